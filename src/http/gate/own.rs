//! The routes that the gate answers itself, also when every worker is busy: health, numbers, the dump, the login; and
//! handing an event stream to `push`. Rule a change could break: nothing here waits for another thread.

use super::client::Peer;
use super::core::Core;
use super::limits::LOGIN_BYTES_MAX;
use super::request::peer_text;
use super::slab::Key;
use super::{login, token};
use crate::error::{Code, Error};
use crate::http::reply::Reply;
use crate::http::route::{Class, Route};
use crate::push::{Stream, Upgrade, UpgradeKind};

impl Core {
    pub(super) fn own_answer(&self, route: &Route) -> Reply {
        match route.class() {
            Class::Healthz => Reply::text(200, "ok\n"),
            Class::Readyz => {
                let pool = if self.line.is_up() { Ok(()) } else { Err("no connection to the pool".to_owned()) };
                match pool.and_then(|()| self.parts.local.ready()) {
                    Ok(()) => Reply::text(200, "ok\n"),
                    Err(why) => Reply::text(503, format!("{why}\n")),
                }
            }
            Class::Metrics => {
                let mut page = String::with_capacity(16 * 1024);
                self.parts.metrics.render(&mut page, &self.gauges());
                self.parts.local.metrics(&mut page);
                let mut reply = Reply::text(200, page);
                reply.headers[0].1 = "text/plain; version=0.0.4; charset=utf-8".to_owned();
                reply
            }
            Class::DebugThreads => Reply::text(200, self.parts.local.debug_threads()),
            Class::Login => login::page(),
            Class::Send
            | Class::History
            | Class::Bootstrap
            | Class::Sessions
            | Class::Status
            | Class::Interrupt
            | Class::Stop
            | Class::Restart
            | Class::Reset
            | Class::PendingImage
            | Class::Retry
            | Class::Discard
            | Class::GetFeatures
            | Class::SetFeature
            | Class::Turns
            | Class::Media
            | Class::ThreadsSend
            | Class::Threads
            | Class::Events
            | Class::Asset
            | Class::Unknown => Reply::from_error(&Error::internal("not a route of the gate's own")),
        }
    }

    pub(super) fn log_in(&mut self, key: Key) -> Reply {
        let now_ms = u64::try_from((self.now - self.born).as_millis()).unwrap_or(u64::MAX);
        let mut bytes = vec![0; LOGIN_BYTES_MAX as usize];
        let Some(client) = self.clients.get_mut(key) else {
            return Reply::empty(500);
        };
        let peer = client.peer;
        let read = client.job.as_ref().and_then(|j| j.body.read_at(0, &mut bytes).ok()).unwrap_or(0);
        if peer == Peer::Unix {
            // Who may open chat.sock may have a link for a browser.
            let code = token::secret();
            let url = format!("{}/login#{code}", self.parts.origin);
            self.parts.logins.lock().add(code, now_ms);
            return Reply::json(&login::Link { url });
        }
        let Some(code) = login::code(&bytes[..read]) else {
            return Reply::from_error(&Error::new(Code::BadField, "code: missing"));
        };
        let guard = &self.parts.guard;
        let good = !guard.needs_token() || guard.is_token(&code) || self.parts.logins.lock().redeem(&code, now_ms);
        if !good {
            return Reply::from_error(&Error::new(Code::Unauthorized, "the code is used up, too old, or not ours"));
        }
        let reply = Reply::json(&login::Done { ok: true });
        match guard.set_cookie() {
            Some(cookie) => reply.with("Set-Cookie", cookie),
            None => reply,
        }
    }

    pub(super) fn hand_to_push(&mut self, key: Key, kind: UpgradeKind, cursor: Option<String>) {
        let Some(mut client) = self.give_away(key) else {
            return;
        };
        let peer = peer_text(client.peer);
        let leftover = client.inbuf.split_off(client.inbuf_at);
        let stream = match client.peer {
            Peer::Tcp(_) => Stream::Tcp(client.fd.into()),
            Peer::Unix => Stream::Unix(client.fd.into()),
        };
        let status = if kind == UpgradeKind::Sse { 200 } else { 101 };
        self.parts.metrics.request(Class::Events, status, std::time::Duration::ZERO);
        log::debug!("{peer} events {status}");
        (self.parts.push)(Upgrade { stream, kind, cursor, leftover, peer });
    }
}
