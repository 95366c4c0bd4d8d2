//! The routes that only read. Rule a change could break: `bootstrap` reads cursor, then pending, then entries, so that
//! no message is in neither; nothing here joins the two records.

use std::io::Read;
use std::time::Duration;

use serde::Serialize;
use serde_json::json;

use super::Handlers;
use crate::clock;
use crate::error::{Code, Error, Result};
use crate::http::reply::{Body, Reply};
use crate::ids::{MessageUuid, SessionId, TurnId};
use crate::journal::PendingRow;
use crate::session::features::Features;
use crate::transcript::entry::EntryType;
use crate::transcript::media::MediaRef;
use crate::transcript::page::{Page, Window};

/// Deliveries told by `bootstrap`: those of the last hour.
const DELIVERED_MS: i64 = 3_600_000;
/// Rows of the conversation list.
const SESSION_ROWS_MAX: usize = 500;

// Long answers are written straight from what they are made of: a tree of values would be ten times their size.

/// A page of a conversation.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct History<'a> {
    session_id: &'a SessionId,
    #[serde(flatten)]
    page: &'a Page,
    /// Why there is nothing to show, when there is no transcript.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<NoTranscript>,
}

/// Why a conversation has no transcript.
#[derive(Serialize)]
struct NoTranscript {
    code: &'static str,
    text: &'static str,
}

const NOT_YET: NoTranscript =
    NoTranscript { code: "no_transcript_yet", text: "the agent has written nothing of this conversation yet" };
const KEEPS_NONE: NoTranscript = NoTranscript {
    code: "agent_keeps_none",
    text: "this agent keeps no transcript where the server looks: what was said is not kept",
};
const GONE: NoTranscript =
    NoTranscript { code: "transcript_gone", text: "the transcript of this conversation is gone" };

#[derive(Serialize)]
struct Bootstrap<'a> {
    kind: &'a str,
    #[serde(flatten)]
    history: History<'a>,
    pending: Vec<serde_json::Value>,
    delivered: Vec<Delivered<'a>>,
    status: Option<serde_json::Value>,
    features: Features,
    cursor: String,
}

#[derive(Serialize)]
struct Sessions<T> {
    sessions: T,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Delivered<'a> {
    uuid: &'a MessageUuid,
    turn_id: &'a TurnId,
}

impl Handlers {
    pub(super) fn history(&self, session: &SessionId, window: Window) -> Result<Reply> {
        let id = self.registry.current_id(session);
        if !self.registry.is_known(&id) {
            return Err(Error::new(Code::UnknownSession, format!("no conversation has the id {session}")));
        }
        let page = self.registry.context().archive.history(&id, window)?;
        let reason = self.why_empty(&id, &page)?;
        Ok(Reply::json(&History { session_id: &id, page: &page, reason }))
    }

    /// Why a page of a known conversation is empty, if it has no transcript.
    fn why_empty(&self, id: &SessionId, page: &Page) -> Result<Option<NoTranscript>> {
        let context = self.registry.context();
        if page.total > 0 || context.archive.path_of(id).is_some() {
            return Ok(None);
        }
        let (had_one, is_settled) = match self.registry.find(id) {
            Ok(session) => {
                let state = session.state();
                (state.resumable, state.machine.is_settled())
            }
            Err(_) => return Ok(None),
        };
        if had_one {
            return Ok(Some(GONE));
        }
        // Everything that was sent is over, and nothing of it was written where we look.
        let is_over = is_settled && context.journal.pending(id)?.is_empty();
        let keeps_none = is_over || context.journal.has_delivered(id)?;
        Ok(Some(if keeps_none { KEEPS_NONE } else { NOT_YET }))
    }

    pub(super) fn bootstrap(&self, session: Option<&SessionId>, tail: usize) -> Result<Reply> {
        let context = self.registry.context();
        let cursor = format!("{}.{}", context.bus.epoch(), context.bus.head());
        let id = match session {
            Some(id) => Some(self.registry.current_id(id)),
            None => self.registry.most_active(),
        };
        let Some(id) = id else {
            return Ok(Reply::json(&json!({
                "kind": "empty", "sessionId": null, "entries": [], "total": 0, "offset": 0, "hasMore": false,
                "pending": [], "delivered": [], "status": null,
                "features": Features::default(), "cursor": cursor,
            })));
        };
        let window = Window::Tail { tail, min_real_user_messages: 0 };
        let read = || match context.archive.path_of(&id) {
            Some(_) => context.archive.history(&id, window).map(|page| (true, page)),
            None => Ok((false, Page::empty())),
        };
        let early = crate::faults::planted("entries_before_pending").then(&read).transpose()?;
        if early.is_some() {
            // Wide enough for a test to find.
            std::thread::sleep(Duration::from_millis(15));
        }
        let pending = context.journal.pending(&id)?;
        let delivered = context.journal.delivered_within(&id, DELIVERED_MS)?;
        let session = self.registry.find(&id).ok();
        let (has_file, page) = match early {
            Some(early) => early,
            None => read()?,
        };
        let kind = match &session {
            None => "unavailable",
            Some(s) if s.state().resumable && !has_file => "unavailable",
            Some(_) => "resumable",
        };
        let features = session.as_ref().map(|s| s.state().features.clone()).unwrap_or_default();
        // For an agent that keeps no uuids: which user lines were there before a message was accepted.
        let reason = self.why_empty(&id, &page)?;
        let keeps_ids = context.proofs.holds(&context.agent());
        let known_before = |at_ms: i64| -> Vec<&str> {
            if keeps_ids {
                return Vec::new();
            }
            let at = clock::rfc3339(at_ms);
            let users = page.entries.iter().filter(|e| e.kind == EntryType::User);
            users.filter(|e| e.timestamp.as_deref().is_none_or(|t| t < at.as_str())).map(|e| e.uuid.as_str()).collect()
        };
        Ok(Reply::json(&Bootstrap {
            kind,
            history: History { session_id: &id, page: &page, reason },
            pending: pending.iter().map(|row| pending_entry(row, &known_before)).collect(),
            delivered: delivered.iter().map(|(uuid, turn_id)| Delivered { uuid, turn_id }).collect(),
            status: session.map(|s| status(&s)),
            features,
            cursor,
        }))
    }

    pub(super) fn sessions(&self) -> Reply {
        Reply::json(&Sessions { sessions: self.registry.list(SESSION_ROWS_MAX) })
    }

    pub(super) fn status(&self, session: &SessionId) -> Result<Reply> {
        Ok(Reply::json(&status(&*self.session(session)?)))
    }

    pub(super) fn pending_image(&self, message: &MessageUuid, n: usize) -> Result<Reply> {
        let image = self.registry.context().journal.pending_image(message, n)?;
        let (_, bytes) =
            image.ok_or_else(|| Error::new(Code::NotFound, format!("no photo {n} of a waiting message {message}")))?;
        // The type is read off the bytes, never taken from the client: this is shown in a page of ours.
        let mime = crate::transcript::media::mime(&bytes);
        Ok(reply(200, Body::Bytes(bytes))
            .with("Content-Type", mime)
            .with("Cache-Control", "private, no-store")
            .with("X-Content-Type-Options", "nosniff")
            .with("Content-Disposition", "inline"))
    }

    pub(super) fn turns(&self, turn: &TurnId, after: u64, wait_ms: u64) -> Result<Reply> {
        let page = self
            .registry
            .context()
            .turns
            .read(turn, after, Duration::from_millis(wait_ms))
            .ok_or_else(|| Error::new(Code::NotFound, format!("no frames are kept of a turn {turn}")))?;
        Ok(Reply::json(&page))
    }

    pub(super) fn media(
        &self,
        media: &MediaRef,
        head: bool,
        range: Option<&str>,
        if_none_match: Option<&str>,
    ) -> Result<Reply> {
        let mut media = media.clone();
        media.session = self.registry.current_id(&media.session);
        let file = self.registry.context().archive.media(&media)?;
        let common = |reply: Reply| {
            reply
                .with("Cache-Control", "private, max-age=31536000, immutable")
                .with("ETag", &file.etag)
                .with("X-Content-Type-Options", "nosniff")
                .with("Content-Disposition", "inline")
                .with("Accept-Ranges", "bytes")
        };
        if if_none_match.is_some_and(|tags| matches_etag(tags, &file.etag)) {
            return Ok(common(Reply::empty(304)));
        }
        let (start, len) = match range.and_then(|r| parse_range(r, file.len)) {
            None => (0, file.len),
            Some(Ok(part)) => part,
            Some(Err(())) => {
                let range = range.unwrap_or_default();
                let text = format!("range {range:?} lies outside the photo of {} bytes", file.len);
                let refused = Reply::from_error(&Error::new(Code::BadRange, text));
                return Ok(refused.with("Content-Range", format!("bytes */{}", file.len)));
            }
        };
        let reader: Box<dyn Read + Send> = if head { Box::new(std::io::empty()) } else { file.open(start, len)? };
        let body = Body::Reader { reader, len };
        // Parts of the whole are 206 also when the part is all of it (RFC 9110, 15.3.7).
        let part = range.is_some_and(|r| parse_range(r, file.len).is_some());
        let answer = if part {
            reply(206, body).with("Content-Range", format!("bytes {start}-{}/{}", start + len - 1, file.len))
        } else {
            reply(200, body)
        };
        Ok(common(answer.with("Content-Type", file.mime)))
    }
}

fn pending_entry<'a>(row: &PendingRow, known_before: &impl Fn(i64) -> Vec<&'a str>) -> serde_json::Value {
    let mut content = Vec::new();
    if !row.text.is_empty() {
        content.push(json!({"type": "text", "text": row.text}));
    }
    for (n, image) in row.images.iter().enumerate() {
        let url = format!("/api/chat/pending/{}/{n}", row.message);
        content.push(json!({"type": "image", "mediaType": image.mime, "imageUrl": url}));
    }
    let mut entry = json!({
        "uuid": row.message, "type": "user", "timestamp": clock::rfc3339(row.at_ms), "content": content,
        "state": row.state.word(), "reconcileKnownUuids": known_before(row.at_ms),
    });
    for (name, value) in [
        ("turnId", row.turn.as_ref().map(|t| json!(t))),
        ("user", row.user.as_ref().map(|u| json!(u))),
        ("error", row.error.as_ref().map(|e| json!(e))),
    ] {
        if let Some(value) = value {
            entry[name] = value;
        }
    }
    entry
}

fn status(session: &crate::session::engine::Session) -> serde_json::Value {
    let state = session.state();
    let phase = state.machine.phase();
    let run = phase.run();
    json!({
        "sessionId": state.id,
        "phase": phase.kind().word(),
        "running": phase.is_running() && run.is_some_and(|r| !r.is_closed()),
        "busy": state.machine.is_busy(),
        "queued": state.machine.queued(),
        "turnId": state.machine.current_turn(),
        "since": clock::rfc3339(state.since_ms),
        "lastMessageAgeMs": run.and_then(crate::agent::Run::last_message_age_ms),
        "startError": state.start_error,
    })
}

fn reply(status: u16, body: Body) -> Reply {
    Reply { status, headers: Vec::new(), body }
}

pub(super) fn asset(path: &str, if_none_match: Option<&str>, gzip: bool) -> Result<Reply> {
    let asset = crate::web::asset(path).ok_or_else(|| Error::new(Code::UnknownPath, format!("no such path {path}")))?;
    let (bytes, etag) = if gzip { (asset.gz, asset.gz_etag) } else { (asset.bytes, asset.etag) };
    let common = |reply: Reply| {
        reply
            .with("Cache-Control", crate::web::CACHE_CONTROL)
            .with("ETag", etag)
            .with("Vary", "Accept-Encoding")
            .with("Content-Security-Policy", crate::web::CSP)
            .with("X-Content-Type-Options", "nosniff")
            .with("Referrer-Policy", "no-referrer")
    };
    if if_none_match.is_some_and(|tags| matches_etag(tags, etag)) {
        return Ok(common(Reply::empty(304)));
    }
    let answer = reply(200, Body::Bytes(bytes.to_vec())).with("Content-Type", asset.mime);
    Ok(common(if gzip { answer.with("Content-Encoding", "gzip") } else { answer }))
}

/// True if an `If-None-Match` list names `etag` or is `*`; weak and strong tags compare alike here.
fn matches_etag(list: &str, etag: &str) -> bool {
    list.split(',').map(str::trim).any(|tag| tag == "*" || tag.trim_start_matches("W/") == etag)
}

/// One byte range of a body of `len` bytes: start and length. `None` for what HTTP says to ignore (another unit, several
/// ranges, garbage), `Some(Err)` for one that lies outside.
fn parse_range(header: &str, len: u64) -> Option<std::result::Result<(u64, u64), ()>> {
    let spec = header.trim().strip_prefix("bytes=")?;
    if spec.contains(',') {
        return None;
    }
    let (from, to) = spec.split_once('-')?;
    let digits = |t: &str| t.bytes().all(|b| b.is_ascii_digit());
    let (from, to) = (from.trim(), to.trim());
    if !digits(from) || !digits(to) {
        return None;
    }
    let number = |t: &str| t.parse::<u64>().unwrap_or(u64::MAX);
    let (start, end) = match (from, to) {
        ("", "") => return None,
        ("", last) => (len.saturating_sub(number(last)), len),
        (from, "") => (number(from), len),
        (from, to) if number(from) > number(to) => return None,
        (from, to) => (number(from), number(to).saturating_add(1).min(len)),
    };
    Some(if start < end && start < len { Ok((start, end - start)) } else { Err(()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_as_http_reads_them() {
        let table = [
            ("bytes=0-0", Some(Ok((0, 1)))),
            ("bytes=5-", Some(Ok((5, 5)))),
            ("bytes=-3", Some(Ok((7, 3)))),
            ("bytes=-99", Some(Ok((0, 10)))),
            ("bytes=2-99", Some(Ok((2, 8)))),
            ("bytes=10-", Some(Err(()))),
            ("bytes=-0", Some(Err(()))),
            ("bytes=99999999999999999999-", Some(Err(()))),
            ("bytes=5-2", None),
            ("bytes=0-1,3-4", None),
            ("bytes=a-b", None),
            ("bytes=-", None),
            ("items=0-1", None),
        ];
        for (header, expected) in table {
            assert_eq!(parse_range(header, 10), expected, "{header}");
        }
        assert_eq!(parse_range("bytes=0-", 0), Some(Err(())));
    }

    #[test]
    fn etags_in_a_list() {
        for (list, yes) in
            [("\"a\"", true), ("W/\"a\"", true), ("\"b\", \"a\"", true), ("*", true), ("\"b\"", false), ("", false)]
        {
            assert_eq!(matches_etag(list, "\"a\""), yes, "{list}");
        }
    }
}
