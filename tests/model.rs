//! The shipped sessions, registry and pool under a model checker: every schedule is another interleaving of senders, a
//! person who stops and restarts, agents that die, and the journal. Run by scripts/model-check.
//!
//! `SCHEDULES` says how many (2,000). Rule a change could break: the code is the shipped one; only agents, the database
//! and the transcripts are the checker's (`beebox_chatd::model`).
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests fail loudly")]

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use beebox_chatd::archive::Archive;
use beebox_chatd::bus::Bus;
use beebox_chatd::config::{Cli, Config};
use beebox_chatd::error::Code;
use beebox_chatd::http::gate::body::Store;
use beebox_chatd::http::gate::exchange::{End, Exchange, Exchanges, PIPE_BYTES_MAX};
use beebox_chatd::http::gate::notes::Note;
use beebox_chatd::ids::{MessageId, SessionId};
use beebox_chatd::journal::{Journal, Recovered};
use beebox_chatd::model::{self, Agents, Planted, Weather};
use beebox_chatd::session::Context;
use beebox_chatd::session::chat::{self, Draft, Sent};
use beebox_chatd::session::pool::{Pool, ThreadMessage};
use beebox_chatd::session::proof::Proofs;
use beebox_chatd::session::recover::Leftovers;
use beebox_chatd::session::registry::{Registry, Selector};
use clap::Parser as _;
use shuttle::rand::{Rng as _, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::thread;

/// The model's waits time out where the weather says so; this is only what calls ask for.
const LONG: Duration = Duration::from_secs(3600);

/// What an impatient sender is answered; `internal` is a parked run that was not reaped in time.
const WAITED_TOO_LONG: [Code; 3] = [Code::Busy, Code::CannotRecord, Code::Internal];

static ENDED_EARLY: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];

/// One scenario at a time: the world is one.
static ALONE: Mutex<()> = Mutex::new(());

fn schedules() -> usize {
    std::env::var("SCHEDULES").ok().map_or(2_000, |n| n.parse().unwrap())
}

struct House {
    registry: Arc<Registry>,
    journal: Journal,
}

impl House {
    fn build(config: &Config, weather: Weather, planted: Option<Planted>) -> Self {
        model::begin(weather, planted);
        let _ = std::fs::remove_file(config.state_dir().join("chat-session-id.json"));
        let mut config = config.clone();
        config.live_max = weather.live_max;
        let journal = Journal::in_memory().unwrap();
        let archive = Arc::new(Archive::new(&config.agent_home, &config.box_dir, Vec::new()));
        let bus = Arc::new(Bus::new("epoch", 0));
        let leftovers = Leftovers::new(Vec::new());
        let context = Context::new(
            config,
            vec!["agent".into()],
            Vec::new(),
            journal.clone(),
            bus,
            archive,
            leftovers,
            Proofs::default(),
        );
        let registry = Registry::new(Arc::new(context), Recovered::default()).unwrap();
        registry.resume();
        Self { registry, journal }
    }

    /// Everything settles, nobody is left, no place of the journal's queue is kept.
    fn end(self) {
        model::be_patient();
        for session in self.registry.all() {
            assert!(session.wait_until_settled(Instant::now() + LONG));
            assert!(session.wait_for_idle(Instant::now() + LONG));
        }
        let listed: Vec<_> = self.registry.list(1_000).into_iter().map(|row| row.session_id).collect();
        for took in model::chats_with_messages() {
            assert!(listed.contains(&self.registry.current_id(&took)), "a conversation that took a message is listed");
        }
        assert!(self.registry.shut_down(LONG, &|| false, LONG));
        assert!(self.journal.shutdown(LONG));
        assert_eq!(self.journal.places_taken(), 0, "places are given back");
        model::end();
    }
}

fn draft(text: &str, id: Option<&str>) -> Draft {
    let message_id = id.map(|id| MessageId::parse(id).unwrap());
    Draft { text: text.into(), images: Vec::new(), message_id, seeds: Vec::new() }
}

fn send(registry: &Arc<Registry>, selector: &Selector, text: &str, id: Option<&str>) -> Option<SessionId> {
    match chat::send(registry, selector, draft(text, id)) {
        Ok(Sent::Accepted { session, .. }) => Some(session),
        Ok(Sent::Repeat(first)) => Some(first.session),
        Err(_) => None,
    }
}

/// Three conversations on few places, two messages each, one of them the box's own with two first sends at once, while
/// a person stops, restarts and interrupts.
fn chats(config: &Config, weather: Weather, planted: Option<Planted>) {
    let house = House::build(config, weather, planted);
    let mut threads = Vec::new();
    for n in 0..2 {
        let registry = house.registry.clone();
        threads.push(thread::spawn(move || {
            if let Some(session) = send(&registry, &Selector::New, &format!("first {n}"), Some(&format!("id-{n}"))) {
                send(&registry, &Selector::Id(session), &format!("second {n}"), None);
            }
        }));
    }
    let mains = Arc::new(Mutex::new(Vec::new()));
    for n in 0..2 {
        let (registry, mains) = (house.registry.clone(), mains.clone());
        threads.push(thread::spawn(move || {
            let sent = [
                send(&registry, &Selector::Main, &format!("main {n}"), Some("the same")),
                send(&registry, &Selector::Main, &format!("main again {n}"), None),
            ];
            mains.lock().unwrap().extend(sent.into_iter().flatten());
        }));
    }
    let registry = house.registry.clone();
    threads.push(thread::spawn(move || {
        for _ in 0..2 {
            let all = registry.all();
            if all.is_empty() {
                thread::yield_now();
                continue;
            }
            let session = &all[thread_rng().gen_range(0..all.len())];
            match thread_rng().gen_range(0..4) {
                0 => drop(chat::stop(session)),
                1 => drop(chat::restart(session)),
                2 => drop(chat::interrupt(session)),
                _ => drop(registry.list(10)),
            }
        }
    }));
    for thread in threads {
        thread.join().unwrap();
    }
    // Whatever was refused: the box's own conversation is the one that took what was sent to it.
    let main = house.registry.main().map(|id| house.registry.current_id(&id));
    for session in mains.lock().unwrap().iter().filter(|_| !weather.renames) {
        assert_eq!(main, Some(house.registry.current_id(session)), "two conversations of the box's own");
    }
    house.end();
}

/// Two threads of an outside channel and a repeat, beside a chat on the only other place.
fn pool(config: &Config, weather: Weather, planted: Option<Planted>) {
    let house = House::build(config, weather, planted);
    let pool = Arc::new(Pool::new(house.registry.clone(), &[], LONG));
    let mut threads = Vec::new();
    for (n, name) in ["anna", "bert", "anna"].into_iter().enumerate() {
        let pool = pool.clone();
        threads.push(thread::spawn(move || {
            for round in 0..2 {
                let id = (round == 0).then(|| MessageId::parse(name).unwrap());
                let message = format!("message {}", if round == 0 { 0 } else { n + 1 });
                let answer =
                    pool.send(ThreadMessage { thread: name.into(), message, description: None, message_id: id });
                if weather.mortal {
                    continue;
                }
                if let Err(e) = &answer {
                    ENDED_EARLY[WAITED_TOO_LONG.iter().position(|code| *code == e.code()).unwrap_or(0)]
                        .fetch_add(1, Ordering::Relaxed);
                }
                if weather.impatient && answer.as_ref().is_err_and(|e| WAITED_TOO_LONG.contains(&e.code())) {
                    continue;
                }
                assert!(answer.unwrap().success, "nobody stopped it and its agent lives");
            }
        }));
    }
    let registry = house.registry.clone();
    threads.push(thread::spawn(move || {
        send(&registry, &Selector::New, "beside", None);
    }));
    for thread in threads {
        thread.join().unwrap();
    }
    drop(pool);
    house.end();
}

/// Requests between the gate and four workers, of which two listen: some are taken back, some readers leave, some workers
/// fall, some answers are long; the first two stay at work until all the others are through.
fn desk(_: &Config, weather: Weather, _: Option<Planted>) {
    const REQUESTS: u64 = 6;
    let exchanges = Exchanges::new().unwrap();
    let (give, take) = beebox_chatd::sync::unbounded::<u64>();
    let (release, released) = beebox_chatd::sync::unbounded::<()>();
    let executed = Arc::new(Mutex::new(Vec::new()));
    let workers: Vec<_> = (0..4)
        .map(|_| {
            let (exchanges, take, executed) = (exchanges.clone(), take.clone(), executed.clone());
            let released = released.clone();
            thread::spawn(move || {
                while let Some(listening) = exchanges.listen() {
                    let Ok(number) = take.recv() else { return };
                    let Some((_, answering)) = listening.take_up(number) else { continue };
                    executed.lock().unwrap().push(number);
                    if number < 2 {
                        released.recv().unwrap();
                    }
                    if weather.mortal && thread_rng().gen_range(0..4) == 0 {
                        continue;
                    }
                    answering.begin(200, 0);
                    let long = thread_rng().gen_range(0..3);
                    if (0..long).all(|_| answering.give(&[0; PIPE_BYTES_MAX])) {
                        answering.finish(Vec::new());
                    }
                }
            })
        })
        .collect();
    let (mut laid_out, mut taken_back) = (Vec::<Arc<Exchange>>::new(), Vec::new());
    let (mut ended, mut notes, mut all_released) = (BTreeSet::new(), Vec::new(), false);
    while laid_out.len() < REQUESTS as usize || ended.len() + taken_back.len() < laid_out.len() {
        if laid_out.len() < REQUESTS as usize {
            let number = laid_out.len() as u64;
            laid_out.push(exchanges.lay_out(number, Store::default()));
            give.send(number).unwrap();
            let earlier = thread_rng().gen_range(0..=number);
            match thread_rng().gen_range(0..4) {
                0 if exchanges.take_back(earlier).is_some() => taken_back.push(earlier),
                1 => {
                    laid_out[earlier as usize].abandon();
                    notes.push(Note::Answer(earlier));
                }
                _ => {}
            }
        } else if !all_released && (2..REQUESTS).all(|n| ended.contains(&n) || taken_back.contains(&n)) {
            all_released = true;
            release.send(()).unwrap();
            release.send(()).unwrap();
        } else if exchanges.notes().rest() {
            let mut rounds = 0;
            while rustix::io::read(exchanges.notes().event(), &mut [0u8; 8][..]).is_err() {
                rounds += 1;
                assert!(rounds < 10_000, "the gate sleeps and nobody wakes it: {exchanges:?}");
                thread::yield_now();
            }
        }
        let mut fresh = Vec::new();
        exchanges.notes().take(&mut fresh);
        for note in notes.drain(..).chain(fresh) {
            let Note::Answer(number) = note else { panic!("{note:?}") };
            if laid_out[number as usize].take().end != End::Open {
                ended.insert(number);
            }
        }
    }
    exchanges.close();
    drop(give);
    for worker in workers {
        worker.join().unwrap();
    }
    let mut all = executed.lock().unwrap().clone();
    all.extend(taken_back);
    all.sort_unstable();
    assert_eq!(all, (0..REQUESTS).collect::<Vec<_>>(), "each is executed once or taken back");
}

type Scenario = fn(&Config, Weather, Option<Planted>);

fn check(name: &str, scenario: Scenario, weather: Weather, planted: Option<Planted>, schedules: usize) {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let box_dir = dir.path().join("box");
    let config = Cli::parse_from(["beebox-chatd", "--box", box_dir.to_str().unwrap()]).serve.into_config().unwrap();
    let mut settings = shuttle::Config::new();
    settings.stack_size = 512 * 1024;
    let body = {
        let config = config.clone();
        move || scenario(&config, weather, planted)
    };
    let half = schedules.div_ceil(2);
    shuttle::Runner::new(RandomScheduler::new(half), settings.clone()).run(body.clone());
    shuttle::Runner::new(PctScheduler::new(4, half), settings).run(body);
    println!("{name}: {} schedules", half * 2);
}

#[test]
fn no_schedule_loses_a_message_or_a_wake_up_or_starts_a_second_agent() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let each = schedules().div_ceil(11);
    let fair = Weather { live_max: 2, ..Weather::default() };
    let narrow = Weather { live_max: 1, ..fair };
    let rough = Weather { mortal: true, bad_disk: true, ..narrow };
    check("chats on two places", chats, fair, None, each);
    check("chats on one place", chats, narrow, None, each);
    check("chats with deaths and a bad disk", chats, rough, None, each);
    check("chats whose agents change their ids", chats, Weather { renames: true, ..fair }, None, each);
    let silent = Weather { agents: Agents::KeepNothing, ..rough };
    check("chats with an agent that keeps nothing", chats, silent, None, each);
    let exchanged = Weather { agents: Agents::Exchanged, ..rough };
    check("chats whose agent is exchanged", chats, exchanged, None, each);
    check("threads", pool, narrow, None, each);
    let impatient = Weather { impatient: true, ..narrow };
    check("chats whose waits time out", chats, Weather { bad_disk: true, ..impatient }, None, each);
    check("threads whose waits time out", pool, impatient, None, each);
    check("threads with deaths", pool, Weather { mortal: true, ..narrow }, None, each);
    check("requests between gate and workers", desk, Weather { mortal: true, ..narrow }, None, each);
    let early = ENDED_EARLY.each_ref().map(|n| n.load(Ordering::Relaxed));
    println!("waits that ended early, {WAITED_TOO_LONG:?}: {early:?}");
    if each >= 100 {
        assert!(early.iter().all(|n| *n > 0), "each limit was met");
    }
    println!("schedules: {}", each.div_ceil(2) * 22);
}

fn finds(name: &str, scenario: Scenario, weather: Weather, planted: Planted) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let weather = Weather { live_max: 2, ..weather };
    let found = catch_unwind(AssertUnwindSafe(|| check(name, scenario, weather, Some(planted), 2_000)));
    assert!(found.is_err(), "the checker does not see {planted:?}");
    println!("planted {planted:?}: found");
}

#[test]
fn a_queue_that_drains_into_a_turn_in_flight_is_found() {
    finds("drain before Ready", chats, Weather::default(), Planted::DrainBeforeReady);
}

#[test]
fn a_pool_that_parks_without_waiting_is_found() {
    finds("park without waiting", pool, Weather::default(), Planted::ParkWithoutWaiting);
}

#[test]
fn a_proof_that_counts_for_every_agent_is_found() {
    let weather = Weather { mortal: true, agents: Agents::Exchanged, ..Weather::default() };
    finds("proof for anybody", chats, weather, Planted::ProofForAnybody);
}
