//! PURE. One session's waiting messages, and the merge of a queue into one turn.
//! Leaves phases to `lifecycle`, durability to `journal`. Rule a change could break: places leave in the order they
//! were taken, and a place whose record is not committed yet hides itself and everything behind it.

use std::sync::Arc;

use crate::clock::UnixMs;
use crate::ids::MessageUuid;

/// One photo of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// The N of the `[image#N]` token that stands for it in the text.
    pub number: u32,
    /// Its media type as the client named it.
    pub mime: String,
    /// The decoded bytes.
    pub bytes: Arc<[u8]>,
}

/// One message of a person, as recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Minted at acceptance.
    pub uuid: MessageUuid,
    /// The words, verbatim.
    pub text: String,
    /// The photos, in the order of the request.
    pub images: Vec<Image>,
    /// Who wrote it, if the text says so.
    pub user: Option<String>,
    /// When it was accepted.
    pub at_ms: UnixMs,
}
