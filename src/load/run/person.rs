//! One scripted client: a person with a phone, on a thread of its own.
//! Rule a change could break: a message is never sent a second time under another id, and each try is noted with what
//! came of it.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::World;
use crate::load::checker::{Sent, Try, mark};
use crate::load::client::{Answer, Client, Photo, send_body};
use crate::load::events::{Follower, Frame};
use crate::load::rng::Rng;
use crate::load::scenario::{Act, Over, Script, SessionChoice};
use crate::sync::Sender;

/// Dispatches, ends and clearings remembered, in case they come before the answer to the send.
const REMEMBERED: usize = 1024;
/// After a failed step, so that a server that is down is not hammered.
const AFTER_ERROR_MS: [u64; 2] = [50, 300];
/// How long a subscriber may take to reach the last event of the settled server.
const TAIL_WITHIN: Duration = Duration::from_secs(15);

/// One client.
pub struct Person {
    world: Arc<World>,
    group: usize,
    name: String,
    script: Script,
    session: String,
    client: Client,
    follower: Option<Follower>,
    rng: Rng,
    sent: Vec<Sent>,
    /// The uuid of the last send, once it was answered 200.
    last_uuid: Option<String>,
    last_started: Instant,
    dispatched: VecDeque<(String, String)>,
    over: VecDeque<String>,
    hashes: Vec<(i64, u64)>,
    refs: Vec<String>,
    total: u64,
    /// How late this round began; counted on its first measured step.
    late: Duration,
    /// Held until the last send is done with.
    busy: Option<Sender<()>>,
}

type Step<T> = Result<T, String>;

impl Person {
    /// Client `n` of a group.
    pub fn new(world: Arc<World>, group: usize, script: &Script, n: usize, busy: Sender<()>) -> Self {
        let sessions = world.sessions.lock();
        let session = match script.session {
            SessionChoice::Shared => sessions[n % sessions.len().max(1)].clone(),
            SessionChoice::Main => "main".to_owned(),
            SessionChoice::New => "new".to_owned(),
            SessionChoice::Archive => super::gather::ARCHIVE_SESSION.to_owned(),
        };
        drop(sessions);
        Self {
            client: world.client(),
            rng: Rng::new(world.scenario.seed, (group as u64) << 32 | n as u64),
            name: format!("{}-{n}", script.name),
            script: script.clone(),
            session,
            group,
            world,
            follower: None,
            sent: Vec::new(),
            last_uuid: None,
            last_started: Instant::now(),
            dispatched: VecDeque::new(),
            over: VecDeque::new(),
            hashes: Vec::new(),
            refs: Vec::new(),
            total: 0,
            late: Duration::ZERO,
            busy: Some(busy),
        }
    }

    /// From arrival to departure.
    pub fn live(mut self, delay: Duration) {
        self.world.pause(delay);
        let script = self.script.clone();
        for step in &script.start {
            if !self.world.is_stopped() {
                self.step(&step.act);
            }
        }
        let every = script.per_s.map(|r| Duration::from_secs_f64(1.0 / r));
        // Clients of one group do not march in step.
        let mut due = Instant::now() + every.map_or(Duration::ZERO, |e| e.mul_f64(self.rng.unit()));
        while !self.world.is_stopped() && !script.rounds.is_empty() {
            if let Some(every) = every {
                self.read_events_until(due);
                if self.world.is_stopped() {
                    break;
                }
                self.late = Instant::now().saturating_duration_since(due);
                due += every;
            }
            for step in &script.rounds {
                if self.world.is_stopped() {
                    break;
                }
                if step.chance >= 1.0 || self.rng.unit() < step.chance {
                    self.step(&step.act);
                }
            }
        }
        self.leave();
    }

    fn leave(mut self) {
        self.client.hang_up();
        self.world.sent.lock().append(&mut self.sent);
        self.busy = None;
        if self.follower.is_some() {
            // Only the settled server says what the last event is; until then it is read on.
            let mut deadline = None;
            loop {
                let head = self.world.head.load(Ordering::Acquire);
                let last = self.follower.as_ref().and_then(|f| f.order.last_id());
                if head >= 0 && last.is_some_and(|last| last >= head) {
                    break;
                }
                if head >= 0 && Instant::now() > *deadline.get_or_insert_with(|| Instant::now() + TAIL_WITHIN) {
                    if let Some(follower) = &mut self.follower {
                        let fault = format!("stopped at event {last:?}, the last is {head}");
                        follower.order.faults.push(fault);
                    }
                    break;
                }
                if let Err(e) = self.read_frames(Instant::now() + Duration::from_millis(100)) {
                    log::debug!("{}: {e}", self.name);
                    std::thread::park_timeout(Duration::from_millis(100));
                }
            }
        }
        if let Some(follower) = self.follower.take() {
            self.world.subscribers.lock().push((self.name.clone(), follower.order));
        }
        self.world.hashes.lock().append(&mut self.hashes);
    }

    /// Does one step and writes its figures.
    fn step(&mut self, act: &Act) {
        let begun = Instant::now();
        let measured_from = match act {
            Act::Wait { .. } => self.last_started,
            Act::Send { .. }
            | Act::SendAndDrop { .. }
            | Act::Repeat
            | Act::Follow { .. }
            | Act::Drop
            | Act::Resume
            | Act::Bootstrap { .. }
            | Act::History { .. }
            | Act::Page { .. }
            | Act::Photos { .. }
            | Act::Status
            | Act::Sessions
            | Act::Interrupt
            | Act::Stop
            | Act::Restart
            | Act::Get { .. }
            | Act::Pause { .. }
            | Act::Stall { .. } => begun,
        };
        match self.act(act) {
            Ok(true) => {
                let late = std::mem::take(&mut self.late);
                self.world.board.took(self.group, act.row(), measured_from.elapsed() + late);
            }
            Ok(false) => {}
            Err(why) => {
                // What the end of the run cut off is nobody's fault.
                if !self.world.is_stopped() || matches!(act, Act::Send { .. }) {
                    self.world.board.failed(self.group, act.row(), why);
                }
                let span = self.rng.between_ms(AFTER_ERROR_MS);
                self.world.pause(span);
            }
        }
    }

    /// True when it is worth a figure.
    fn act(&mut self, act: &Act) -> Step<bool> {
        match act {
            Act::Send { text, photos } => self.send(text, photos).map(|()| true),
            Act::SendAndDrop { text, photos } => self.send_and_drop(text, photos).map(|()| true),
            Act::Repeat => self.repeat(),
            Act::Wait { limit_s } => self.wait(Duration::from_secs_f64(*limit_s)),
            Act::Follow { over } => self.follow(*over).map(|()| true),
            Act::Drop => {
                if let Some(follower) = &mut self.follower {
                    follower.drop_connection();
                }
                Ok(false)
            }
            Act::Resume => self.resume(),
            Act::Bootstrap { tail } => {
                let path = match self.session.as_str() {
                    "main" | "new" => format!("/api/chat/bootstrap?tail={tail}"),
                    id => format!("/api/chat/bootstrap?session={id}&tail={tail}"),
                };
                let page = self.get(&path)?;
                self.take_refs(&page);
                Ok(true)
            }
            Act::History { tail } => self.history(&format!("tail={tail}")),
            Act::Page { limit } => {
                let offset = self.rng.below(self.total.saturating_sub(*limit).max(1));
                self.history(&format!("offset={offset}&limit={limit}"))
            }
            Act::Photos { max } => self.photos(*max).map(|()| false),
            Act::Status if self.is_named() => {
                self.get(&format!("/api/chat/status?session={}", self.session)).map(|_| true)
            }
            Act::Status => Ok(false),
            Act::Sessions => self.get("/api/chat/sessions").map(|_| true),
            Act::Interrupt => self.control("interrupt"),
            Act::Stop => self.control("stop"),
            Act::Restart => self.control("restart"),
            Act::Get { path } => {
                let answer = self.client.get(path).map_err(|e| e.to_string())?;
                good(&answer).map(|()| true)
            }
            Act::Pause { ms } => {
                let until = Instant::now() + self.rng.between_ms(*ms);
                self.read_events_until(until);
                Ok(false)
            }
            Act::Stall { ms } => {
                self.world.pause(Duration::from_millis(*ms));
                Ok(false)
            }
        }
    }

    /// True once the session has an id that reading routes take.
    fn is_named(&self) -> bool {
        !matches!(self.session.as_str(), "main" | "new")
    }

    fn get(&mut self, path: &str) -> Step<Value> {
        let answer = self.client.get(path).map_err(|e| e.to_string())?;
        good(&answer)?;
        Ok(answer.json())
    }

    fn control(&mut self, what: &str) -> Step<bool> {
        if !self.is_named() {
            return Ok(false);
        }
        let body = json!({ "session": self.session });
        let answer = self.client.post(&format!("/api/chat/{what}"), &body).map_err(|e| e.to_string())?;
        good(&answer).map(|()| true)
    }

    /// A new message with its mark, noted before it is sent.
    fn compose(&mut self, text: &str, photos: &[usize]) -> Vec<Photo> {
        let number = self.sent.len();
        let message_id = format!("{}-{}-{number}", self.world.tag, self.name);
        let text = format!("{text} {}", mark(&message_id));
        if self.world.has_watchers {
            self.world.sent_at.lock().insert(message_id.clone(), Instant::now());
        }
        self.last_uuid = None;
        self.last_started = Instant::now();
        let made = photos.iter().zip(1..).map(|(bytes, n)| Photo::png(n, *bytes, self.rng.next_u64())).collect();
        self.sent.push(Sent { message_id, text, photos: photos.len(), tries: Vec::new(), discarded: false });
        made
    }

    fn note(&mut self, result: Try) {
        if let Some(sent) = self.sent.last_mut() {
            sent.tries.push(result);
        }
    }

    fn try_once(&mut self, photos: &[Photo]) -> Step<()> {
        let Some(sent) = self.sent.last() else {
            return Err("nothing to send".to_owned());
        };
        let (id, text) = (sent.message_id.clone(), sent.text.clone());
        let session = self.session.clone();
        match self.client.send(&session, &text, Some(&id), photos) {
            Ok(Ok(accepted)) => {
                if !self.is_named() {
                    self.session.clone_from(&accepted.session_id);
                    self.world.sessions_used.lock().push(accepted.session_id.clone());
                }
                self.last_uuid = Some(accepted.message_uuid.clone());
                self.note(Try::Accepted(accepted));
                Ok(())
            }
            Ok(Err(answer)) => {
                self.note(Try::Refused { status: answer.status, code: answer.code() });
                good(&answer)
            }
            Err(e) => {
                self.note(Try::NoAnswer);
                Err(e.to_string())
            }
        }
    }

    /// Whether a repeat under the same id may help.
    fn may_help(&self) -> bool {
        match self.sent.last().and_then(|s| s.tries.last()) {
            Some(Try::NoAnswer) => true,
            Some(Try::Refused { status, .. }) => matches!(status, 429 | 503),
            Some(Try::Accepted(_)) | None => false,
        }
    }

    fn insist(&mut self, photos: &[Photo]) -> Step<()> {
        let deadline = Instant::now() + Duration::from_secs_f64(self.world.scenario.insist_s);
        loop {
            match self.try_once(photos) {
                Err(_) if self.may_help() && Instant::now() < deadline => {
                    // Also after the end of the run: the question is still open.
                    let span = self.rng.between_ms(AFTER_ERROR_MS);
                    std::thread::park_timeout(span);
                }
                result => return result,
            }
        }
    }

    fn send(&mut self, text: &str, photos: &[usize]) -> Step<()> {
        let photos = self.compose(text, photos);
        self.insist(&photos)
    }

    fn send_and_drop(&mut self, text: &str, photos: &[usize]) -> Step<()> {
        let photos = self.compose(text, photos);
        let Some(sent) = self.sent.last() else {
            return Ok(());
        };
        let body = send_body(&self.session, &sent.text, Some(&sent.message_id), &photos);
        let bytes = body.to_string().len() as u64 + 200;
        // Half of the time all is written and the answer not awaited, else some part of it.
        let keep = if self.rng.below(2) == 0 { usize::MAX } else { self.rng.below(bytes) as usize };
        let result = self.client.post_and_drop("/api/chat/send", &body, keep);
        self.note(Try::NoAnswer);
        result.map_err(|e| e.to_string())
    }

    fn repeat(&mut self) -> Step<bool> {
        // Photos are made by chance and not kept: only a message without any can be repeated word for word.
        let Some(sent) = self.sent.last().filter(|s| s.photos == 0) else {
            return Ok(false);
        };
        let was_accepted = sent.accepted().is_some();
        self.insist(&[])?;
        match self.sent.last().and_then(|s| s.tries.last()) {
            Some(Try::Accepted(a)) if was_accepted && !a.deduplicated => {
                Err(format!("a repeat was taken as new: {a:?}"))
            }
            Some(Try::Accepted(_) | Try::Refused { .. } | Try::NoAnswer) | None => Ok(true),
        }
    }

    fn follow(&mut self, over: Over) -> Step<()> {
        let limit = self.world.answer_within();
        let mut follower = Follower::detached(self.world.addr).forgetful();
        if let Some(token) = &self.world.bearer {
            follower = follower.bearer(token);
        }
        match over {
            Over::WebSocket => follower.open(None, limit),
            Over::Sse => follower.open_sse(None, false, limit),
        }
        .map_err(|e| e.to_string())?;
        let hello = follower.next(limit).map_err(|e| e.to_string())?;
        self.follower = Some(follower);
        match hello {
            Some(frame) if frame.event == "hello" => Ok(()),
            other => Err(format!("no hello: {:?}", other.map(|f| f.event))),
        }
    }

    fn resume(&mut self) -> Step<bool> {
        let limit = self.world.answer_within();
        match &mut self.follower {
            Some(follower) if !follower.is_connected() => {
                follower.resume(limit).map(|()| true).map_err(|e| e.to_string())
            }
            Some(_) | None => Ok(false),
        }
    }

    /// Waits for the end of the turn that carries the last send.
    fn wait(&mut self, limit: Duration) -> Step<bool> {
        let Some(uuid) = self.last_uuid.clone() else {
            return Ok(false);
        };
        let deadline = Instant::now() + limit;
        loop {
            let ended = self.over.contains(&uuid)
                || self.dispatched.iter().rev().any(|(of, turn)| *of == uuid && self.over.contains(turn));
            if ended {
                return Ok(true);
            }
            if Instant::now() > deadline {
                return Err(format!("no end of the turn of {uuid} within {limit:?}"));
            }
            if self.world.is_stopped() {
                return Ok(false);
            }
            let step = Instant::now() + Duration::from_millis(200);
            if let Err(e) = self.read_frame(step.min(deadline)) {
                log::debug!("{}: {e}", self.name);
                let span = self.rng.between_ms(AFTER_ERROR_MS);
                self.world.pause(span);
            }
        }
    }

    /// Reads events until then, or just waits without a subscription.
    fn read_events_until(&mut self, until: Instant) {
        while !self.world.is_stopped() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            if !self.follower.as_ref().is_some_and(Follower::is_connected) {
                self.world.pause(left);
            } else if let Err(e) = self.read_frames(until.min(Instant::now() + Duration::from_millis(200))) {
                log::debug!("{}: {e}", self.name);
            }
        }
    }

    /// Reads frames until then; connects again when the connection is gone.
    fn read_frames(&mut self, until: Instant) -> io::Result<()> {
        while self.read_frame(until)? && Instant::now() < until {}
        Ok(())
    }

    /// Reads one frame; false when none came until then.
    fn read_frame(&mut self, until: Instant) -> io::Result<bool> {
        let limit = self.world.answer_within();
        let left = until.saturating_duration_since(Instant::now());
        let Some(follower) = &mut self.follower else {
            std::thread::park_timeout(left);
            return Ok(false);
        };
        if !follower.is_connected() {
            follower.resume(limit)?;
        }
        let frame = follower.next(left)?;
        let came = frame.is_some();
        if let Some(frame) = frame {
            take_in(frame, &mut self.dispatched, &mut self.over, &mut self.hashes);
        }
        Ok(came)
    }

    fn history(&mut self, window: &str) -> Step<bool> {
        if !self.is_named() {
            return Ok(false);
        }
        let page = self.get(&format!("/api/chat/history?session={}&{window}", self.session))?;
        self.take_refs(&page);
        Ok(true)
    }

    fn take_refs(&mut self, page: &Value) {
        self.total = page["total"].as_u64().unwrap_or(self.total);
        self.refs.clear();
        for entry in page["entries"].as_array().into_iter().flatten() {
            for block in entry["content"].as_array().into_iter().flatten() {
                if let Some(image) = block["imageRef"].as_str() {
                    self.refs.push(image.to_owned());
                }
            }
        }
    }

    fn photos(&mut self, max: usize) -> Step<()> {
        for _ in 0..max.min(self.refs.len()) {
            let at = self.rng.below(self.refs.len() as u64) as usize;
            let begun = Instant::now();
            let answer =
                self.client.get(&format!("/api/session-media/{}", self.refs[at])).map_err(|e| e.to_string())?;
            good(&answer)?;
            if !answer.body.starts_with(b"\x89PNG") {
                return Err(format!("photo {} is no PNG but {} bytes of something", self.refs[at], answer.body.len()));
            }
            self.world.board.took(self.group, "photo", begun.elapsed());
        }
        Ok(())
    }
}

/// 2xx, or what it says.
fn good(answer: &Answer) -> Step<()> {
    if (200..300).contains(&answer.status) {
        return Ok(());
    }
    let text: String = answer.text().chars().take(200).collect();
    Err(format!("{} {text}", answer.status))
}

/// Remembers what a frame tells about turns.
fn take_in(
    frame: Frame,
    dispatched: &mut VecDeque<(String, String)>,
    over: &mut VecDeque<String>,
    hashes: &mut Vec<(i64, u64)>,
) {
    let members = || frame.data["messageUuids"].as_array().into_iter().flatten().filter_map(Value::as_str);
    match frame.event.as_str() {
        "chat-message-dispatched" => {
            dispatched.extend(members().map(|u| (u.to_owned(), frame.text("turnId").to_owned())));
        }
        "chat-complete" => over.push_back(frame.text("turnId").to_owned()),
        "chat-turn-failed" if frame.data["willRetry"] != true => over.push_back(frame.text("turnId").to_owned()),
        "chat-queue-cleared" => over.extend(members().map(str::to_owned)),
        _ => {}
    }
    while dispatched.len() > REMEMBERED {
        dispatched.pop_front();
    }
    while over.len() > REMEMBERED {
        over.pop_front();
    }
    if let Some(id) = frame.id {
        hashes.push((id, hash_of(&frame.event, &frame.data)));
    }
}

/// What makes two tellings of one event the same.
pub fn hash_of(event: &str, data: &Value) -> u64 {
    let mut hasher = DefaultHasher::new();
    event.hash(&mut hasher);
    data.to_string().hash(&mut hasher);
    hasher.finish()
}
