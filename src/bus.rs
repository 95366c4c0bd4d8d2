//! (room being built)

/// A place in the event stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor {
    /// The epoch it belongs to, if it names one.
    pub epoch: Option<String>,
    /// The last event the client has.
    pub id: crate::ids::EventId,
}

/// A text that is no cursor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadCursor;

/// Parses `EPOCH.ID` or `ID`.
///
/// # Errors
/// [`BadCursor`] for anything else.
pub fn parse_cursor(text: &str) -> Result<Cursor, BadCursor> {
    let (epoch, id) = match text.rsplit_once('.') {
        Some((epoch, id)) => (Some(epoch.to_owned()), id),
        None => (None, text),
    };
    if id.is_empty() || !id.bytes().all(|b| b.is_ascii_digit()) {
        return Err(BadCursor);
    }
    Ok(Cursor {
        epoch,
        id: id.parse().map_err(|_| BadCursor)?,
    })
}
