//! From a whole head to a decision: who may talk, then what about, then in which form.
//!
//! Leaves carrying it out to `request`. Rule a change could break: Host, Origin and token are looked at before anything
//! else is, and the pool is told nothing that was not vetted.

use super::client::{BULK, Peer, WAIT, WORK};
use super::core::Core;
use super::head::{self, Framing, Head};
use super::slab::Key;
use crate::bus::parse_cursor;
use crate::error::{Code, Error};
use crate::http::guard::Door;
use crate::http::route::{self, Class, Lane, Refusal, Route};
use crate::push::UpgradeKind;

/// A request that was let in.
pub(super) struct Let {
    pub class: Class,
    pub plan: Plan,
    pub head_only: bool,
    pub http10: bool,
    pub keep_alive: bool,
    pub framing: Framing,
    pub expects_continue: bool,
    pub line: Option<String>,
}

pub(super) enum Plan {
    Pool { lane: usize, upstream_head: Vec<u8>, wait_ms: u64 },
    Own(Route),
    Login,
    Push { kind: UpgradeKind, cursor: Option<String> },
}

/// A request that was not.
pub(super) struct Refused {
    pub refusal: Refusal,
    pub class: Class,
    pub head_only: bool,
    pub http10: bool,
    pub close: bool,
    pub line: Option<String>,
}

impl Core {
    pub(super) fn vet(&mut self, key: Key, bytes: &[u8]) -> Result<Let, Refused> {
        let door = match self.clients.get_mut(key) {
            Some(client) => match client.peer {
                Peer::Tcp(_) if self.parts.listens_everywhere => {
                    let local = rustix::net::getsockname(&client.fd).ok();
                    Door::Port { local: local.and_then(|a| std::net::SocketAddr::try_from(a).ok()) }
                }
                Peer::Tcp(_) => Door::Port { local: None },
                Peer::Unix => Door::ChatSocket,
            },
            None => Door::Port { local: None },
        };
        let head = match head::parse(bytes) {
            Ok(head) => head,
            Err(error) => {
                return Err(Refused {
                    refusal: error.into(),
                    class: Class::Unknown,
                    head_only: false,
                    http10: false,
                    close: true,
                    line: None,
                });
            }
        };
        let line = log::log_enabled!(log::Level::Debug).then(|| {
            // The path only: a query is the client's business, and a secret sent there by mistake stays out of the log.
            format!("{} {}", head.method, head.target.split('?').next().unwrap_or_default())
        });
        let routed = route::parse(head.method, head.target);
        let class = routed.as_ref().map_or(Class::Unknown, Route::class);
        let head_only = head.method == "HEAD";
        match self.plan(&head, routed, door) {
            Ok(plan) => Ok(Let {
                class,
                plan,
                head_only,
                http10: head.http10,
                keep_alive: head.keep_alive,
                framing: head.framing,
                expects_continue: head.expects_continue,
                line,
            }),
            Err(refusal) => Err(Refused {
                refusal,
                class,
                head_only,
                http10: head.http10,
                // A body that nobody will read ends the connection.
                close: !head.keep_alive || head.framing != Framing::None,
                line,
            }),
        }
    }

    /// Who may talk, then what about, then in which form.
    fn plan(&self, head: &Head<'_>, routed: Result<Route, Refusal>, door: Door) -> Result<Plan, Refusal> {
        let guard = &self.parts.guard;
        guard.vet_host(head.host, door)?;
        guard.vet_origin(head.origin, door)?;
        if !matches!(routed, Ok(Route::Healthz | Route::Login)) {
            guard.vet_token(head.authorization, head.cookie, door)?;
        }
        let route = routed?;
        let class = route.class();
        let body_max = self.parts.limits.body_bytes_max(class);
        let post = head.method == "POST";
        if post && !head.content_type.is_some_and(head::is_json) {
            return Err(Error::new(Code::NotJson, "POST needs Content-Type: application/json").into());
        }
        let allowed = if post { body_max } else { 0 };
        match head.framing {
            Framing::Length(n) if n > allowed => {
                return Err(Error::new(Code::TooLarge, format!("a body of {n} bytes, at most {allowed} here")).into());
            }
            Framing::Chunked if allowed == 0 => {
                return Err(Error::new(Code::TooLarge, "this route takes no body").into());
            }
            Framing::None | Framing::Length(_) | Framing::Chunked => {}
        }
        match route.lane() {
            Lane::Local => Ok(if class == Class::Login && post { Plan::Login } else { Plan::Own(route) }),
            Lane::Push => plan_push(head),
            lane @ (Lane::Work | Lane::Wait | Lane::Bulk) => {
                let wait_ms = if let Route::Turns { wait_ms, .. } = route { wait_ms } else { 0 };
                let lane = match lane {
                    Lane::Wait => WAIT,
                    Lane::Bulk => BULK,
                    Lane::Work | Lane::Local | Lane::Push => WORK,
                };
                Ok(Plan::Pool { lane, upstream_head: upstream_head(head, class), wait_ms })
            }
        }
    }
}

/// The head that the pool gets: nothing in it that was not vetted.
fn upstream_head(head: &Head<'_>, class: Class) -> Vec<u8> {
    let mut out = Vec::with_capacity(head.target.len() + 96);
    for part in [head.method, " ", head.target, " HTTP/1.1\r\n"] {
        out.extend_from_slice(part.as_bytes());
    }
    if matches!(class, Class::Media | Class::PendingImage | Class::Asset) {
        for (name, value) in [("Range: ", head.range), ("If-None-Match: ", head.if_none_match)] {
            if let Some(value) = value {
                for part in [name, value, "\r\n"] {
                    out.extend_from_slice(part.as_bytes());
                }
            }
        }
        if head.accepts_gzip {
            out.extend_from_slice(b"Accept-Encoding: gzip\r\n");
        }
    }
    out
}

/// WebSocket or Server-Sent Events, with a cursor that parses.
fn plan_push(head: &Head<'_>) -> Result<Plan, Refusal> {
    let query = head.target.split_once('?').map_or("", |(_, q)| q);
    let mut cursor = route::events_after(query)?;
    let kind = if head.websocket {
        if head.websocket_version != Some("13") {
            return Err(Error::new(Code::UpgradeRequired, "the WebSocket version must be 13").into());
        }
        let Some(key) = head.websocket_key.filter(|k| head::is_websocket_key(k)) else {
            return Err(Error::new(Code::BadRequest, "Sec-WebSocket-Key is not 16 bytes of base64").into());
        };
        if head.http10 {
            return Err(Error::new(Code::BadRequest, "a WebSocket needs HTTP/1.1").into());
        }
        UpgradeKind::WebSocket { key: key.to_owned() }
    } else if head.accept.is_some_and(|a| a.contains("text/event-stream")) {
        // What a browser got last counts more than where the page once began.
        if let Some(last) = head.last_event_id.filter(|l| !l.is_empty()) {
            cursor = Some(last.to_owned());
        }
        UpgradeKind::Sse
    } else {
        let text = "a WebSocket, or Accept: text/event-stream";
        return Err(Error::new(Code::UpgradeRequired, text).into());
    };
    if let Some(text) = &cursor
        && parse_cursor(text).is_err()
    {
        return Err(Error::new(Code::BadField, "after: EPOCH.ID or ID").into());
    }
    Ok(Plan::Push { kind, cursor })
}
