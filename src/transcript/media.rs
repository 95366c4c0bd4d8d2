//! (room being built)

use crate::ids::SessionId;

/// One photo of a transcript: `<sessionId>/<entryUuid>/<index>`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MediaRef {
    /// Which conversation.
    pub session: SessionId,
    /// Which entry.
    pub entry: String,
    /// Its n-th block of type image, from 0.
    pub index: usize,
}
