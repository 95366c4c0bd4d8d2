//! What durable acceptance costs, against the same disk's raw append + fdatasync: `cargo bench --bench journal`.
//! Medians over rounds, in one run, so that both sides meet the same machine. Leaves HTTP to `scripts/bench-send`.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    missing_docs,
    reason = "a program for a person at a terminal"
)]

use std::collections::VecDeque;
use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beebox_chatd::bus::Publisher;
use beebox_chatd::clock::now_ms;
use beebox_chatd::ids::{EventId, MessageId, MessageUuid, SessionId, TurnId};
use beebox_chatd::inbox::Message;
use beebox_chatd::journal::{
    AcceptOutcome, Acceptance, Change, Claim, Journal, JournalOptions, KeptEvent, Unit, content_hash,
};
use serde_json::json;

const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(1000);
const TEXT: &str = "a message of a usual length, such as a person types into a chat window before lunch";

struct Nobody;
impl Publisher for Nobody {
    fn publish_kept(&self, _: EventId, _: &str, _: &serde_json::Value, _: &str) {}
}

/// Latencies of one round, in microseconds.
struct Round {
    per_s: f64,
    p50: f64,
    p99: f64,
    per_commit: f64,
    /// CPU time of the journal's thread for each, in microseconds.
    cpu_us: f64,
}

/// CPU time of the thread `journal`, in microseconds; ticks of 10 ms, so of use over a whole round only.
fn journal_cpu_us() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    for task in tasks.flatten() {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        if let Some((_, fields)) = stat.split_once("(journal) ") {
            let fields: Vec<&str> = fields.split(' ').collect();
            return (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) * 10_000.0;
        }
    }
    0.0
}

fn round(mut us: Vec<f64>, took: Duration, commits: u64, cpu_us: f64) -> Round {
    us.sort_by(f64::total_cmp);
    let at = |q: f64| us[((us.len() - 1) as f64 * q) as usize];
    Round {
        per_s: us.len() as f64 / took.as_secs_f64(),
        p50: at(0.5),
        p99: at(0.99),
        per_commit: us.len() as f64 / commits.max(1) as f64,
        cpu_us: cpu_us / us.len() as f64,
    }
}

fn report(what: &str, rounds: Vec<Round>) {
    let median = |f: fn(&Round) -> f64| {
        let mut all: Vec<f64> = rounds.iter().map(f).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    println!(
        "{what:<44} {:>9.0}/s   p50 {:>8.0} us   p99 {:>8.0} us   {:>6.1} a commit   {:>6.1} us of CPU",
        median(|r| r.per_s),
        median(|r| r.p50),
        median(|r| r.p99),
        median(|r| r.per_commit),
        median(|r| r.cpu_us)
    );
}

fn raw(dir: &Path) -> Round {
    let mut file = std::fs::File::options().create(true).append(true).open(dir.join("raw")).unwrap();
    let line = [b'x'; 400];
    let (mut us, begun) = (Vec::new(), Instant::now());
    while begun.elapsed() < ROUND {
        let at = Instant::now();
        file.write_all(&line).unwrap();
        file.sync_data().unwrap();
        us.push(at.elapsed().as_secs_f64() * 1e6);
    }
    let n = us.len() as u64;
    round(us, begun.elapsed(), n, 0.0)
}

fn acceptance(session: &SessionId) -> Acceptance {
    let message =
        Message { uuid: MessageUuid::fresh(), text: TEXT.into(), images: Vec::new(), user: None, at_ms: now_ms() };
    Acceptance {
        session: session.clone(),
        claim: Some(Claim {
            id: MessageId::parse(MessageUuid::fresh().as_str()).unwrap(),
            hash: content_hash(TEXT, &[], &[]),
        }),
        thread: None,
        queued: false,
        turn: Some(TurnId::of(&message.uuid)),
        event: KeptEvent {
            event: "chat-user-message",
            data: json!({"sessionId": session, "messageUuid": message.uuid, "message": TEXT, "images": 0,
                         "timestamp": "2026-12-01T02:20:18.495Z"}),
        },
        message: Arc::new(message),
    }
}

/// A session whose agent takes no time: everything that waits is one turn, done as soon as it is dispatched.
struct Desk {
    session: SessionId,
    journal: Journal,
    inbox: Mutex<(VecDeque<MessageUuid>, bool)>,
}

impl Desk {
    fn accepted(self: &Arc<Self>, uuid: MessageUuid) {
        let mut inbox = self.inbox.lock().unwrap();
        inbox.0.push_back(uuid);
        if !inbox.1 {
            inbox.1 = true;
            drop(inbox);
            self.next();
        }
    }

    fn next(self: &Arc<Self>) {
        let members: Vec<MessageUuid> = {
            let mut inbox = self.inbox.lock().unwrap();
            if inbox.0.is_empty() {
                inbox.1 = false;
                return;
            }
            inbox.0.drain(..).collect()
        };
        let turn = TurnId::of(&members[0]);
        let unit = Unit {
            events: vec![KeptEvent {
                event: "chat-message-dispatched",
                data: json!({"sessionId": self.session, "turnId": turn, "messageUuids": members}),
            }],
            changes: vec![Change::Dispatch {
                session: self.session.clone(),
                turn: turn.clone(),
                members,
                attempt: 1,
                agent: None,
            }],
        };
        let desk = Arc::clone(self);
        let Ok(place) = self.journal.reserve(1) else {
            return;
        };
        self.journal.submit(unit, place, Box::new(move |ids| {
            if ids.is_err() { return; }
            let unit = Unit {
                events: vec![KeptEvent {
                    event: "chat-complete",
                    data: json!({"sessionId": desk.session, "turnId": turn, "isError": false, "subtype": "success"}),
                }],
                changes: vec![Change::Done { turn, outcome: "success".into() }],
            };
            let Ok(place) = desk.journal.reserve(1) else { return };
            let again = Arc::clone(&desk);
            desk.journal.owe(unit, place, Box::new(move |ids| {
                if ids.is_err() { return; }
                again.next();
            }));
        }));
    }
}

fn accepts(dir: &Path, submitters: usize, drain: bool) -> Round {
    let (journal, _) = Journal::open(dir, JournalOptions::default(), Arc::new(Nobody)).unwrap();
    let before = journal.stats().commits;
    let desks: Vec<Arc<Desk>> = (0..16)
        .map(|n| {
            Arc::new(Desk {
                session: SessionId::parse(&format!("session-{n}-4b1c-9c1d-2f6f1f6d7a10")).unwrap(),
                journal: journal.clone(),
                inbox: Mutex::default(),
            })
        })
        .collect();
    let begun = Instant::now();
    let threads: Vec<_> = (0..submitters)
        .map(|n| {
            let (journal, desk) = (journal.clone(), Arc::clone(&desks[n % 16]));
            std::thread::spawn(move || {
                let mut us = Vec::new();
                let (tell, hear) = crossbeam_channel::bounded(1);
                while begun.elapsed() < ROUND {
                    let at = Instant::now();
                    let a = acceptance(&desk.session);
                    let uuid = a.message.uuid.clone();
                    let (tell, desk) = (tell.clone(), Arc::clone(&desk));
                    let place = journal.reserve(1).unwrap();
                    journal.accept(
                        a,
                        place,
                        Box::new(move |outcome| {
                            assert!(matches!(outcome, Ok(AcceptOutcome::Recorded { .. })));
                            tell.send(()).unwrap();
                            if drain {
                                desk.accepted(uuid);
                            }
                        }),
                    );
                    hear.recv().unwrap();
                    us.push(at.elapsed().as_secs_f64() * 1e6);
                }
                us
            })
        })
        .collect();
    let us: Vec<f64> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    let took = begun.elapsed();
    let commits = journal.stats().commits - before;
    let cpu_us = journal_cpu_us();
    let stats = journal.stats();
    if submitters == 64 {
        eprintln!("{} checkpoints, the longest {} us", stats.checkpoints, stats.checkpoint_us_max);
    }
    assert!(journal.shutdown(Duration::from_secs(20)));
    round(us, took, commits, cpu_us)
}

fn main() {
    let root = std::env::var_os("BENCH_DIR").map_or_else(std::env::temp_dir, Into::into);
    let mut all: [Vec<Round>; 6] = Default::default();
    for _ in 0..ROUNDS {
        let dir = tempfile::TempDir::new_in(&root).unwrap();
        all[0].push(raw(dir.path()));
        for (n, (submitters, drain)) in
            [(1, false), (64, false), (1, true), (64, true), (8, true)].into_iter().enumerate()
        {
            // A journal of its own for each, so that rounds compare.
            let dir = tempfile::TempDir::new_in(&root).unwrap();
            all[n + 1].push(accepts(dir.path(), submitters, drain));
        }
    }
    let names = [
        "raw append + fdatasync of 400 bytes",
        "accepts, 1 submitter",
        "accepts, 64 submitters",
        "accept, dispatch, done; 1 submitter",
        "accept, dispatch, done; 64 on 16 sessions",
        "accept, dispatch, done; 8 on 8 sessions",
    ];
    for (name, rounds) in names.into_iter().zip(all) {
        report(name, rounds);
    }
}
