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
//! | [`session::look_up`], [`session::proof`], [`session::moved`], [`session::recover`] | what a dead server, another agent or another place leaves to know |
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
//! 6. The server only ever reads transcripts (after a move it may link one into the folder where an agent looks for it);
//!    nothing on the server joins them with the acceptance record for a reader.
//! 7. Every queue has a bound and a written answer to "full".
//! 8. What is absent on purpose: an async runtime, a thread per client, a second writer of the journal, a cache of
//!    transcripts' contents.
//!
//! ## What is taken as proof that an agent has, or has not, a message
//!
//! A 200 promises one delivery. After a death the server has to know whether the agent had the message; it asks the
//! transcript, and a transcript says what it says only where the row's ground holds. Where it does not, the fate is
//! *unknown*: the message is failed, visible, and given again by hand only. A `result` always ends its turn, whatever the
//! files say; `chat-complete` then has `recorded: false`. Tests are in `tests/it/promise.rs` where no other file is named.
//!
//! | what is asked | it rests on | when that is not so | test |
//! |---|---|---|---|
//! | it has it: an id of the turn stands in a line | `uuid`, `mergedSendUuids`, `attachment.source_uuid` at their places in whole lines | an id inside a text counts for nothing | `archive::tests::a_turn_is_looked_up_in_whole_parsed_lines` |
//! | it has it: place | the file's name, in every project folder of the home; the folder it was seen in first | a box that was moved has its files under its former path | `a_moved_box_has_its_conversations_its_photos_and_what_it_owes` |
//! | it has it: name | the files of the folder that belong to no conversation we know are searched, too | the agent named its session before it told; more files than are searched: unknown | `an_agent_that_named_its_session_before_it_told_has_the_turn_once` |
//! | it has it: merged messages | the turn has the first one's id, and exactly the words and photos of all | a line too long to read: those behind it are unknown | `archive::queue::tests` |
//! | it has not: uuid kept | this program, in this home, was seen to write our ids where we read ([`session::proof`]) | never seen: unknown | `an_agent_that_keeps_no_transcript_and_dies_gets_the_message_once` |
//! | it has not: program | the command line's files (which, size, time of change) and words; the agent a turn was handed to is in the ledger | `--agent` exchanged: the old proof counts for what the old one was given, not for the new one | `the_proof_of_one_program_says_nothing_of_the_next`, `what_was_handed_to_a_proven_program_is_judged_by_it_after_the_exchange` |
//! | it has not: version | the version that `init` tells | a wrapper starts another version: the proof is void from its first `init` on | `another_version_of_the_program_has_to_be_seen_anew` |
//! | it has not: home | the home is part of the program's identity; one inside the box moves with it | another `--agent-home`, or an agent that keeps its files elsewhere: unknown; it is resumed there when it says that it has the conversation | `an_agent_that_has_the_conversation_in_another_home_is_resumed_there` |
//! | it has not: same file | the last turn of ours that was seen in it is still there | the file was shortened, replaced or deleted: unknown | `a_transcript_that_was_shortened_or_exchanged_proves_nothing`, `agents::what_was_accepted_before_its_conversation_was_lost_fails_with_the_reason` |
//! | it has not: `/clear`, a new id | the ground is asked anew for the new file | nothing was seen in it yet: only the program's proof counts | `conversation::a_slash_clear_moves_the_conversation_and_keeps_the_old_one` |
//! | it has not: compaction | the file is only appended to, so what was there stays there | as a file that was shortened | `archive::tests` |
//! | it has not: readable | a regular file that opens and reads | unreadable, a FIFO, a socket, a device, a folder: unknown, and never opened | `what_is_no_regular_file_holds_up_nobody` |
//! | it has not: refusal | a start that says in words we know that it does not start read nothing | other words: unknown | `agent::command::tests` |
//! | it was never given: ledger | `dispatched` is committed before the first byte | the journal came back from a backup: what waits is looked up before its first byte, too | `what_waits_in_a_restored_journal_is_looked_up_before_its_first_byte` |
//! | it runs twice: dedup | nothing; whether an agent drops a repeat is never relied on | | `crash` (every round has `dedup=off`) |
//! | nobody else gives it: leftovers | mark and working directory of a process, by device and inode | a copy of the box, a pid given again, another namespace: not ours | `agent::pump::tests::leftovers_of_a_box_are_ended_and_those_of_its_copy_are_not`, `a_server_on_a_copy_of_a_live_box_leaves_the_original_and_its_agents_alone` |
//! | nobody else gives it: copies | a lock on the transcript while an agent lives | held by the server of a copy: the start is refused and tried again, and what waits is looked up first | `two_servers_whose_boxes_share_a_home_never_have_two_agents_in_one_conversation` |
//! | nobody else gave it meanwhile | before each start: the file is as it was when it was searched, or when our last run ended | somebody else wrote to it (the server of a copy, a person at a terminal): what waits is looked up again, under the lock | `what_the_original_writes_after_it_was_copied_is_not_given_again_by_the_copy` |
//! | it is a repeat: claims | the journal's own time, of the clock that nobody can set | the wall clock was set: no claim is older for it; a machine that was off ages none | `a_claim_is_as_old_as_time_has_passed_whatever_the_clock_is_set_to` |
//!
//! Two limits that no look can lift: a wrapper whose file stays the same, that starts another program which tells no
//! version and dies, is taken for the program that was proven; and what was accepted after a backup of the journal was
//! made is unknown to the journal that is restored from it.
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
//! | `too_large` | a body, photo or text over its limit, or more than 100 photos |
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
