//! # beebox-chatd: the architecture page
//!
//! One Linux binary hosts long-lived conversations with a coding agent for one **box** (a directory) and serves them over
//! one TCP port: send, history, photos, live events. Plain OS threads, no async runtime: a thread dump explains it.
//! Its promise: **a 200 means the message is durably recorded, and what is recorded is delivered to the agent exactly
//! once, whatever crashes.**
//!
//! ## Bird's-eye view
//!
//! ```text
//!  clients ──TCP──▶ gate ──heads, http.sock──▶ http-00… (tiny_http pool) ──▶ handlers ──▶ session / archive
//!                    │ ◀──bodies, answers: exchange──▶                              │
//!                    └─WebSocket, SSE─▶ push ◀── bus ◀── journal (commit, then publish) ◀─┘
//!                                        │                   ▲
//!                                        └── replay ─────────┘ (catch-up reads)
//!  agents ◀─stdin/stdout─▶ run-3f9a2c1b (one thread per live agent) ──facts──▶ session
//! ```
//!
//! A send takes a place in its session's inbox and in the journal's queue under one lock; the journal commits event,
//! claim and content in one transaction; only then it is answered 200, and only then the session starts an agent. The
//! session's machine decides, its engine carries out: `dispatched` is committed before the agent gets a byte, the end of
//! a turn is told when the transcript holds it. After a crash the journal says what is owed, and the transcript says
//! what the agent already has.
//!
//! A request is vetted whole by the gate; its head goes to tiny_http's pool over one private connection, many heads at a
//! time, its body and its answer go through an exchange in memory. So a request is either taken up by one worker or taken
//! back by the gate, short answers cost no further system call, and a worker hears at once that its reader left.
//!
//! ## Code map, in reading order
//!
//! | room | what it is |
//! |---|---|
//! | [`ids`], [`error`], [`clock`], [`config`] | the words everything is said in |
//! | [`inbox`], [`lifecycle`], [`lifecycle::machine`] | PURE: what a session decides |
//! | [`session::engine`] | one session: its lock, and the carrying out of decisions |
//! | [`session::chat`], [`session::pool`], [`session::registry`] | what requests mean; threads of outside channels; who may live |
//! | [`agent`] | one live agent: command, wire, adapt, pump; [`agent::embedded`] is an agent of our own |
//! | [`journal`], [`bus`], [`push`] | what is durable, what is live, and who hears it |
//! | `mirror` | feature `mirror`: kept events copied into a broker's stream |
//! | [`transcript`], [`archive`] | PURE reading of transcripts; their files, indexes, photos |
//! | [`http`] | gate, pool, URL map, guard, handlers, replies |
//! | [`app`], [`threads`], [`dump`], [`faults`], [`supervisor`], [`tools`] | the frame of the house |
//! | [`web`], [`load`] | the page; scripted clients and the checker |
//!
//! ## Threads
//!
//! | name | owner | blocks on | ends |
//! |---|---|---|---|
//! | `main` | `main.rs` | the word of `signals` | after the shutdown |
//! | `signals` | `main.rs` | a signal | with the process |
//! | `gate` | [`http::gate`] | epoll | `Gate::shutdown` |
//! | `http-accept` | tiny_http: accepting, and reading heads | its private socket | with the pool |
//! | `http-00`… | [`http::server`] | the next request; a commit; a turn; a reader | `Server::shutdown` |
//! | `push` | [`push`] | epoll | `Push::shutdown` |
//! | `replay` | [`push`] | a reader that fell behind | `Push::shutdown` |
//! | `journal` | [`journal`] | its queue; the disk | `Journal::shutdown` |
//! | `mirror` | `mirror.rs`, only with `--mirror` | news; the broker | `Mirror::shutdown` |
//! | `run-3f9a2c1b` | [`agent::pump`] | its agent's pipes | the agent reaped |
//! | `recover` | [`session::registry`] | a turn to look up | `Registry::shut_down` |
//! | `sweep` | [`session::registry`] | the next timer | `Registry::shut_down` |
//!
//! A panic in `gate`, `push`, `replay`, `journal`, `recover`, `sweep` or `mirror` prints the dump and ends the process: a
//! supervisor restarts it and the journal recovers. Workers and runs are contained. Names and what each thread is at are
//! one lock-free table ([`threads`]), printed on SIGQUIT and by `/api/debug/threads`.
//!
//! ## Locks
//!
//! `sessions` (the registry's map) → `state` (one session: machine, run handle, condvar) → `subscribers` (the bus's ring).
//! In that order, never the other. Leaf locks, taken last and alone: the pool's line, turn buffers, the registry's clock,
//! the archive's cache, a listener's watch, the gate's notes, its desk and each exchange. Nothing slow under a lock: no disk, no blocking send, no foreign callback.
//! Work for the journal and the run is queued inside `state` (those queues never block), so that the order of records
//! and events is the order of transitions.
//!
//! ## What must stay true
//!
//! 1. A kept event reaches a subscriber only after its commit; a turn's transient events come after its committed
//!    `chat-message-dispatched`.
//! 2. `dispatched` is committed before the first byte of the turn goes to the agent.
//! 3. Never two runs of one session; nothing is dispatched to a run from the request to close it until it is reaped.
//! 4. A message leaves the queue only by an effect that records where it went: dispatched, done, cleared, failed.
//! 5. Recovery looks a turn up in the transcript before it is sent again, after the old agent is gone.
//! 6. The server only ever reads transcripts; nothing on the server joins them with the acceptance record for a reader.
//! 7. Every queue has a bound and a written answer to "full".
//! 8. What is absent on purpose: an async runtime, a thread per client, a second writer of the journal, a cache of
//!    transcripts' contents.
//!
//! ## Error codes
//!
//! Every error answer is `{"error": text, "code": WORD}`; the status of each is in [`http::reply::status`].
//!
//! | code | when |
//! |---|---|
//! | `bad_request` | the request is not HTTP/1.1 as we speak it |
//! | `bad_json` | the body is not a JSON object |
//! | `bad_field` | a field is missing, of the wrong type or out of range; the text names it |
//! | `unauthorized` | no or a wrong bearer token |
//! | `forbidden_host` | the Host header is none of ours |
//! | `forbidden_origin` | a page of another origin asks |
//! | `unknown_path` | no such path |
//! | `method_not_allowed` | the path is right, the method is not |
//! | `unknown_session` | an id that was never known |
//! | `not_found` | no such turn, message or photo |
//! | `session_gone` | the conversation was known, its transcript is gone |
//! | `content_conflict` | the same messageId with other content |
//! | `thread_session` | the conversation belongs to a thread of an outside channel |
//! | `not_failed` | only a failed message can be retried or discarded |
//! | `busy` | the other thread's turn did not end in time |
//! | `length_required` | a body without a length |
//! | `too_large` | a body, photo or text over its limit |
//! | `not_json` | not `Content-Type: application/json` |
//! | `bad_range` | the byte range lies outside the photo |
//! | `queue_full` | 1,000 messages or 64 MiB wait in the conversation |
//! | `head_too_large` | the request head is over its limit |
//! | `upgrade_required` | the WebSocket handshake is of another version |
//! | `request_timeout` | the request took too long to arrive |
//! | `cannot_record` | not known to be recorded: repeat with the same messageId |
//! | `shutting_down` | the server takes no new messages |
//! | `overloaded` | too much at once: try again later |
//! | `timeout` | the route did not answer before its deadline |
//! | `unreadable` | a transcript exists and cannot be read |
//! | `not_implemented` | a feature of HTTP that we do not speak |
//! | `agent_unavailable` | the agent cannot be started, in words a person can act on |
//! | `internal` | a fault of ours |
#![cfg_attr(
    feature = "model",
    allow(dead_code, unused_imports, reason = "the checker has agents and a disk of its own")
)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests fail loudly"))]

pub mod agent;
pub mod app;
pub mod archive;
pub mod bus;
pub mod clock;
pub mod config;
pub mod dump;
pub mod error;
pub mod faults;
pub mod http;
pub mod ids;
pub mod inbox;
pub mod journal;
pub mod lifecycle;
pub mod load;
#[cfg(feature = "mirror")]
pub mod mirror;
#[cfg(feature = "model")]
pub mod model;
pub mod push;
pub mod session;
pub mod supervisor;
pub mod sync;
pub mod threads;
pub mod tools;
pub mod transcript;
pub mod web;
