//! From bytes to a decision: heads, bodies, refusals, the gate's own answers, and the end of each request.
//!
//! Rules a change could break: Host, Origin and token are looked at before anything is done; what is refused with bytes
//! unread closes its connection; every request is counted and logged once, without a secret.

use super::body::{Chunks, Store};
use super::client::{BULK, BodyIn, Job, Peer, Phase, Target, WAIT, WORK};
use super::core::{Core, Step};
use super::head::{self, Framing, Head, Scan};
use super::limits::LOGIN_BYTES_MAX;
use super::slab::Key;
use super::{login, token};
use crate::bus::parse_cursor;
use crate::error::{Code, Error};
use crate::http::guard::Door;
use crate::http::reply::{Body, Reply};
use crate::http::route::{self, Class, Lane, Refusal, Route};
use crate::push::{Stream, Upgrade, UpgradeKind};

/// A request that was let in.
struct Let {
    class: Class,
    plan: Plan,
    head_only: bool,
    http10: bool,
    keep_alive: bool,
    framing: Framing,
    expects_continue: bool,
    line: Option<String>,
}

enum Plan {
    Pool {
        lane: usize,
        upstream_head: Vec<u8>,
        repeatable: bool,
        wait_ms: u64,
    },
    Own(Route),
    Login,
    Push {
        kind: UpgradeKind,
        cursor: Option<String>,
    },
}

/// A request that was not.
struct Refused {
    refusal: Refusal,
    class: Class,
    head_only: bool,
    http10: bool,
    close: bool,
    line: Option<String>,
}

impl Core {
    // ---- heads

    pub(super) fn step_head(&mut self, key: Key) -> Step {
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        if !client.unread().is_empty()
            && let Some(step) = self.try_head(key)
        {
            return step;
        }
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        let was_empty = client.unread().is_empty();
        if let Some(step) = self.fill(key) {
            return step;
        }
        if was_empty {
            // Most requests come whole: their head needs no timer.
            if let Some(step) = self.try_head(key) {
                return step;
            }
            // Empty lines alone begin nothing, and buy no time.
            let begun = self
                .clients
                .get_mut(key)
                .is_some_and(|c| !c.unread().is_empty());
            if begun {
                let deadline = self.now + self.parts.limits.head_time;
                self.arm(key, deadline);
            }
        }
        Step::More
    }

    /// Reads a head if one is whole.
    fn try_head(&mut self, key: Key) -> Option<Step> {
        let head_max = self.parts.limits.head_bytes_max;
        let client = self.clients.get_mut(key)?;
        // One empty line before a request is an old client's habit; more are somebody's trick and end at the limit.
        while client.scanned == 0
            && client.unread().starts_with(b"\r\n")
            && client.inbuf_at < head_max
        {
            client.inbuf_at += 2;
        }
        let mut scanned = client.scanned;
        let scan = head::scan(client.unread(), &mut scanned);
        client.scanned = scanned;
        let too_large = || Error::new(Code::HeadTooLarge, format!("a head over {head_max} bytes"));
        let len = match scan {
            Scan::Whole(len) if len <= head_max => len,
            Scan::Partial if client.unread().len() <= head_max => return None,
            Scan::Whole(_) | Scan::Partial => {
                self.refuse(key, &too_large(), Class::Unknown, None, true);
                return Some(Step::More);
            }
            Scan::BareLf => {
                let error = Error::new(Code::BadRequest, "a line that ends in LF alone");
                self.refuse(key, &error, Class::Unknown, None, true);
                return Some(Step::More);
            }
        };
        let buffer = std::mem::take(&mut client.inbuf);
        let from = client.inbuf_at;
        let decision = self.vet(key, &buffer[from..from + len]);
        let client = self.clients.get_mut(key)?;
        client.inbuf = buffer;
        client.inbuf_at += len;
        client.scanned = 0;
        self.release_inbuf(key);
        Some(match decision {
            Ok(admitted) => self.admit(key, admitted),
            Err(refused) => {
                let job = self.fresh_job(
                    refused.class,
                    refused.head_only,
                    refused.http10,
                    !refused.close,
                    refused.line,
                );
                let client = self.clients.get_mut(key)?;
                client.job = Some(Box::new(job));
                let Refusal { error, allow } = refused.refusal;
                self.refuse(key, &error, refused.class, allow, refused.close);
                Step::More
            }
        })
    }

    fn vet(&mut self, key: Key, bytes: &[u8]) -> Result<Let, Refused> {
        let door = match self.clients.get_mut(key) {
            Some(client) => match client.peer {
                Peer::Tcp(_) if self.parts.listens_everywhere => {
                    let local = rustix::net::getsockname(&client.fd).ok();
                    Door::Port {
                        local: local.and_then(|a| std::net::SocketAddr::try_from(a).ok()),
                    }
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
            format!(
                "{} {}",
                head.method,
                head.target.split('?').next().unwrap_or_default()
            )
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
    fn plan(
        &self,
        head: &Head<'_>,
        routed: Result<Route, Refusal>,
        door: Door,
    ) -> Result<Plan, Refusal> {
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
            return Err(
                Error::new(Code::NotJson, "POST needs Content-Type: application/json").into(),
            );
        }
        let allowed = if post { body_max } else { 0 };
        match head.framing {
            Framing::Length(n) if n > allowed => {
                return Err(Error::new(
                    Code::TooLarge,
                    format!("a body of {n} bytes, at most {allowed} here"),
                )
                .into());
            }
            Framing::Chunked if allowed == 0 => {
                return Err(Error::new(Code::TooLarge, "this route takes no body").into());
            }
            Framing::None | Framing::Length(_) | Framing::Chunked => {}
        }
        match route.lane() {
            Lane::Local => Ok(if class == Class::Login && post {
                Plan::Login
            } else {
                Plan::Own(route)
            }),
            Lane::Push => plan_push(head),
            lane @ (Lane::Work | Lane::Wait | Lane::Bulk) => {
                let wait_ms = if let Route::Turns { wait_ms, .. } = route {
                    wait_ms
                } else {
                    0
                };
                let lane = match lane {
                    Lane::Wait => WAIT,
                    Lane::Bulk => BULK,
                    Lane::Work | Lane::Local | Lane::Push => WORK,
                };
                Ok(Plan::Pool {
                    lane,
                    upstream_head: upstream_head(head, class),
                    repeatable: !post,
                    wait_ms,
                })
            }
        }
    }

    fn fresh_job(
        &self,
        class: Class,
        head_only: bool,
        http10: bool,
        keep_alive: bool,
        line: Option<String>,
    ) -> Job {
        Job {
            class,
            target: Target::Login,
            head_only,
            http10,
            keep_alive,
            repeatable: false,
            started: self.now,
            body_started: self.now,
            body_received: 0,
            body_in: BodyIn::Left(0),
            body: Store::default(),
            upstream_head: Vec::new(),
            answer_time: self.parts.limits.answer_time,
            status: 0,
            answer_bytes: 0,
            answer_begun: false,
            progress: self.now,
            blocked_since: None,
            spilling: false,
            line,
        }
    }

    fn admit(&mut self, key: Key, admitted: Let) -> Step {
        let Let {
            class,
            plan,
            head_only,
            http10,
            keep_alive,
            framing,
            expects_continue,
            line,
        } = admitted;
        let mut job = self.fresh_job(class, head_only, http10, keep_alive, line);
        match plan {
            Plan::Push { kind, cursor } => {
                self.hand_to_push(key, kind, cursor);
                return Step::Wait;
            }
            Plan::Own(route) => {
                let Some(client) = self.clients.get_mut(key) else {
                    return Step::Wait;
                };
                client.job = Some(Box::new(job));
                let reply = self.own_answer(&route);
                self.answer(key, reply, false);
                return Step::More;
            }
            Plan::Login => job.target = Target::Login,
            Plan::Pool {
                lane,
                upstream_head,
                repeatable,
                wait_ms,
            } => {
                job.target = Target::Pool(lane);
                job.upstream_head = upstream_head;
                job.repeatable = repeatable;
                job.answer_time = self.parts.limits.answer_time(class, wait_ms);
            }
        }
        let limits = &self.parts.limits;
        match framing {
            Framing::None => {}
            Framing::Length(n) => job.body_in = BodyIn::Left(n),
            Framing::Chunked => {
                job.body_in = BodyIn::Chunked(Chunks::new(limits.body_bytes_max(class)))
            }
        }
        let deadline = self.now + limits.body_grace;
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        client.job = Some(Box::new(job));
        if framing == Framing::None {
            return self.body_is_whole(key);
        }
        client.phase = Phase::Body;
        if expects_continue && client.unread().is_empty() {
            client
                .out
                .extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
        }
        self.arm(key, deadline);
        Step::More
    }

    // ---- bodies

    pub(super) fn step_body(&mut self, key: Key) -> Step {
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        if client.unread().is_empty() {
            client.inbuf.clear();
            client.inbuf_at = 0;
            if let Some(step) = self.fill(key) {
                return step;
            }
        }
        let limits = &self.parts.limits;
        let memory_max = if self.body_bytes < limits.bodies_memory_max {
            limits.body_memory_max
        } else {
            0
        };
        let spool_left = limits.spool_bytes_max.saturating_sub(self.spool_bytes);
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        let Some(job) = client.job.as_mut() else {
            return Step::Close;
        };
        let (memory_before, file_before) = sizes(&job.body);
        let input = &client.inbuf[client.inbuf_at..];
        let dir = &self.parts.state_dir;
        let body = &mut job.body;
        let mut store = |piece: &[u8]| {
            if body.len() + piece.len() as u64 > spool_left + memory_max as u64 {
                return Err(Error::new(Code::Overloaded, "no room to spool a body"));
            }
            body.append(piece, memory_max, dir)
        };
        let (used, whole) = match &mut job.body_in {
            BodyIn::Left(left) => {
                let n = input
                    .len()
                    .min(usize::try_from(*left).unwrap_or(usize::MAX));
                let stored = store(&input[..n]);
                *left -= n as u64;
                (stored.map(|()| n), *left == 0)
            }
            BodyIn::Chunked(chunks) => {
                let used = chunks.feed(input, store);
                (used, chunks.is_done())
            }
        };
        let (memory_after, file_after) = sizes(&job.body);
        self.body_bytes = self.body_bytes + memory_after - memory_before;
        self.spool_bytes = self.spool_bytes + file_after - file_before;
        match used {
            Ok(n) => {
                client.inbuf_at += n;
                job.body_received += n as u64;
            }
            Err(error) => {
                let class = job.class;
                self.refuse(key, &error, class, None, true);
                return Step::More;
            }
        }
        let earned = std::time::Duration::from_millis(
            job.body_received * 1000 / limits.body_rate_min.max(1),
        );
        let deadline = job.body_started + limits.body_grace + earned;
        if whole {
            self.release_inbuf(key);
            return self.body_is_whole(key);
        }
        client.deadline = deadline;
        Step::More
    }

    /// The whole request is here.
    fn body_is_whole(&mut self, key: Key) -> Step {
        let queue_max = self.parts.limits.queue_requests_max;
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        let Some(job) = client.job.as_ref() else {
            return Step::Close;
        };
        match job.target {
            Target::Login => {
                let reply = self.log_in(key);
                self.answer(key, reply, false);
                Step::More
            }
            Target::Pool(lane) => {
                let class = job.class;
                if self.queued[lane] == 0 && self.has_room(lane) {
                    if let Some(upstream) = self.idle.pop() {
                        self.hand(key, lane, upstream);
                        return Step::Wait;
                    }
                } else if self.queued[lane] >= queue_max {
                    let error = Error::new(
                        Code::Overloaded,
                        format!("{queue_max} requests are waiting already"),
                    );
                    self.refuse(key, &error, class, None, false);
                    return Step::More;
                }
                self.enqueue(key, lane);
                self.want_upstreams();
                Step::Wait
            }
        }
    }

    // ---- answers of the gate's own

    fn own_answer(&self, route: &Route) -> Reply {
        match route.class() {
            Class::Healthz => Reply::text(200, "ok\n"),
            Class::Readyz => {
                let pool = if self.upstreams.len() == 0 {
                    Err("no connection to the pool".to_owned())
                } else {
                    Ok(())
                };
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
            | Class::Unknown => {
                Reply::from_error(&Error::internal("not a route of the gate's own"))
            }
        }
    }

    fn log_in(&mut self, key: Key) -> Reply {
        let now_ms = u64::try_from((self.now - self.born).as_millis()).unwrap_or(u64::MAX);
        let mut bytes = vec![0; LOGIN_BYTES_MAX as usize];
        let Some(client) = self.clients.get_mut(key) else {
            return Reply::empty(500);
        };
        let peer = client.peer;
        let read = client
            .job
            .as_ref()
            .and_then(|j| j.body.read_at(0, &mut bytes).ok())
            .unwrap_or(0);
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
        let good = !guard.needs_token()
            || guard.is_token(&code)
            || self.parts.logins.lock().redeem(&code, now_ms);
        if !good {
            return Reply::from_error(&Error::new(
                Code::Unauthorized,
                "the code is used up, too old, or not ours",
            ));
        }
        let reply = Reply::json(&login::Done { ok: true });
        match guard.set_cookie() {
            Some(cookie) => reply.with("Set-Cookie", cookie),
            None => reply,
        }
    }

    fn hand_to_push(&mut self, key: Key, kind: UpgradeKind, cursor: Option<String>) {
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
        self.parts
            .metrics
            .request(Class::Events, status, std::time::Duration::ZERO);
        log::debug!("{peer} events {status}");
        (self.parts.push)(Upgrade {
            stream,
            kind,
            cursor,
            leftover,
            peer,
        });
    }

    /// Answers with an error; `close` when bytes of the request stay unread.
    pub(super) fn refuse(
        &mut self,
        key: Key,
        error: &Error,
        class: Class,
        allow: Option<&'static str>,
        close: bool,
    ) {
        let mut reply = Reply::from_error(error);
        if let Some(allow) = allow {
            reply.headers.push(("Allow", allow.to_owned()));
        }
        let needs_job = self.clients.get_mut(key).is_some_and(|c| c.job.is_none());
        if needs_job {
            let job = self.fresh_job(class, false, false, !close, None);
            if let Some(client) = self.clients.get_mut(key) {
                client.job = Some(Box::new(job));
            }
        }
        self.answer(key, reply, close);
    }

    /// Answers from here; the reply's body is in memory.
    fn answer(&mut self, key: Key, reply: Reply, close: bool) {
        let deadline = self.now + self.parts.limits.reader_time;
        let draining = self.draining.is_some();
        let mut out = self.buffer();
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        let Some(job) = client.job.as_mut() else {
            return;
        };
        let keep = job.keep_alive && !close && !draining;
        let connection = match (keep, job.http10) {
            (true, false) => None,
            (true, true) => Some("keep-alive"),
            (false, _) => Some("close"),
        };
        reply.write_head(&mut out, connection, None);
        if let Body::Bytes(bytes) = &reply.body
            && !job.head_only
        {
            out.extend_from_slice(bytes);
        }
        job.status = reply.status;
        job.answer_begun = true;
        job.answer_bytes = out.len() as u64;
        client.closing |= !keep;
        client.phase = Phase::Answer;
        client.out.extend_from_slice(&out);
        self.arm(key, deadline);
    }

    // ---- the end of a request

    /// The answer is out.
    pub(super) fn finish_answer(&mut self, key: Key) -> Step {
        let (idle, linger) = (self.parts.limits.idle_time, self.parts.limits.linger_time);
        let draining = self.draining.is_some();
        let Some(client) = self.clients.get_mut(key) else {
            return Step::Wait;
        };
        let peer = client.peer;
        let job = client.job.take();
        let spilled = client.spill.take().map_or(0, |s| s.bytes());
        client.phase = Phase::Head;
        let (closing, rest) = (client.closing || draining, !client.unread().is_empty());
        if closing {
            let _ = rustix::net::shutdown(&client.fd, rustix::net::Shutdown::Write);
            client.phase = Phase::Linger;
            client.inbuf = Vec::new();
            client.inbuf_at = 0;
        }
        self.spool_bytes -= spilled;
        self.spilled_bytes -= spilled;
        if let Some(job) = job {
            self.forget_body(&job.body);
            self.record(&job, job.status, peer);
        }
        let patience = if closing {
            linger
        } else if rest {
            self.parts.limits.head_time
        } else {
            idle
        };
        self.arm(key, self.now + patience);
        Step::More
    }

    /// Counts and logs a request, once.
    pub(super) fn record(&self, job: &Job, status: u16, peer: Peer) {
        let took = self.now.saturating_duration_since(job.started);
        self.parts.metrics.request(job.class, status, took);
        if let Some(line) = &job.line {
            log::debug!(
                "{} {line} {status} {} bytes {} us",
                peer_text(peer),
                job.answer_bytes,
                took.as_micros()
            );
        }
    }

    /// A client's deadline passed.
    pub(super) fn time_out(&mut self, key: Key) {
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        match client.phase {
            Phase::Head if client.unread().is_empty() => self.close_client(key),
            Phase::Head | Phase::Body => {
                let class = client.job.as_ref().map_or(Class::Unknown, |j| j.class);
                let error = Error::new(Code::RequestTimeout, "the request took too long to arrive");
                self.refuse(key, &error, class, None, true);
                self.drive_client(key);
            }
            Phase::Queued => {
                let class = client.job.as_ref().map_or(Class::Unknown, |j| j.class);
                if let Some(lane) = Self::lane_of(client) {
                    self.queued[lane] -= 1;
                }
                let error = Error::new(Code::Overloaded, "no worker was free in time");
                self.refuse(key, &error, class, None, false);
                self.drive_client(key);
            }
            Phase::Served(upstream) => self.time_out_served(key, upstream),
            Phase::Answer | Phase::Linger => self.close_client(key),
        }
    }
}

fn sizes(body: &Store) -> (usize, u64) {
    match body {
        Store::Memory(bytes) => (bytes.len(), 0),
        Store::File(_, len) => (0, *len),
    }
}

fn peer_text(peer: Peer) -> String {
    match peer {
        Peer::Tcp(ip) => ip.to_string(),
        Peer::Unix => "chat.sock".to_owned(),
    }
}

/// The head that the pool gets: nothing in it that was not vetted.
fn upstream_head(head: &Head<'_>, class: Class) -> Vec<u8> {
    let mut out = Vec::with_capacity(head.target.len() + 96);
    for part in [head.method, " ", head.target, " HTTP/1.1\r\n"] {
        out.extend_from_slice(part.as_bytes());
    }
    if matches!(class, Class::Media | Class::PendingImage | Class::Asset) {
        for (name, value) in [
            ("Range: ", head.range),
            ("If-None-Match: ", head.if_none_match),
        ] {
            if let Some(value) = value {
                for part in [name, value, "\r\n"] {
                    out.extend_from_slice(part.as_bytes());
                }
            }
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
            return Err(
                Error::new(Code::UpgradeRequired, "the WebSocket version must be 13").into(),
            );
        }
        let Some(key) = head.websocket_key.filter(|k| head::is_websocket_key(k)) else {
            return Err(Error::new(
                Code::BadRequest,
                "Sec-WebSocket-Key is not 16 bytes of base64",
            )
            .into());
        };
        if head.http10 {
            return Err(Error::new(Code::BadRequest, "a WebSocket needs HTTP/1.1").into());
        }
        UpgradeKind::WebSocket {
            key: key.to_owned(),
        }
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
