//! Which conversation a client means: a fresh one, the box's own, or one by its id. Pure.

use crate::error::{Code, Error, Result};
use crate::ids::SessionId;

/// What a client calls a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// A fresh one.
    New,
    /// The box's own.
    Main,
    /// By its id.
    Id(SessionId),
}

impl Selector {
    /// Reads the `session` field.
    ///
    /// # Errors
    /// `bad_field` for what is neither a name nor an id.
    pub fn parse(text: &str) -> Result<Self> {
        match text {
            "new" => Ok(Selector::New),
            "main" => Ok(Selector::Main),
            id => SessionId::parse(id).map(Selector::Id).map_err(|_| {
                Error::new(Code::BadField, "session is \"new\", \"main\" or an id of 1 to 64 A-Z a-z 0-9 _ -")
            }),
        }
    }
}
