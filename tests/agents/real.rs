//! The real agent program beside the embedded one: both hold the same conversation, and what the embedded one says must
//! have the order of the real one and no key that the real one lacks. Run by `scripts/real-agent`, which installs the
//! program and names it in `BEEBOX_REAL_AGENTS` (`VERSION=PATH` separated by blanks).
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests fail loudly")]

#[path = "../it/agent_process.rs"]
#[allow(dead_code, reason = "the other users need the rest of it")]
mod agent_process;
#[path = "fake_messages_api.rs"]
#[allow(dead_code, reason = "its main is the example's")]
mod fake_messages_api;

use std::process::Command;

use agent_process::{Agent, Place, assert_shapes, order, parsed};
use serde_json::json;

/// What both agents are asked, each in its own script language.
struct Words {
    thought_and_tool: String,
    slow: String,
    slow_tool: String,
    background: String,
    error: String,
}

fn embedded_words() -> Words {
    Words {
        thought_and_tool: "tool {{think tool}}".to_owned(),
        slow: "slow {{deltas=40 delta_ms=50 size=400}}".to_owned(),
        slow_tool: "tool {{tool tool_ms=1500}}".to_owned(),
        background: "background {{bg_ms=500}}".to_owned(),
        error: "error {{error}}".to_owned(),
    }
}

fn real_words() -> Words {
    let fake = |steps| format!("FAKE{}", json!({ "steps": steps }));
    let bash = |command: &str| json!({"tool": "Bash", "input": {"command": command, "description": "a tool"}});
    Words {
        thought_and_tool: fake(json!([{"blocks": [{"think": "I think"}, bash("echo done")]}])),
        slow: fake(json!([{"blocks": [{"text": "slow answer ".repeat(40), "chunks": 40}], "chunk_delay": 0.05}])),
        slow_tool: fake(json!([{"blocks": [bash("sleep 1.5; echo done")]}])),
        background: fake(json!([{"blocks": [
            {"tool": "Bash", "input": {"command": "sleep 1", "description": "a task", "run_in_background": true}},
        ]}])),
        error: fake(json!([{"status": 400, "error_type": "invalid_request_error", "message": "made up"}])),
    }
}

/// Kinds that come at their own time, or that the embedded agent has no reason to say.
fn is_noise(kind: &str) -> bool {
    ["command_lifecycle/queued", "system/api_retry", "rate_limit_event"].iter().any(|noise| kind.starts_with(noise))
}

/// The whole conversation; returns the kinds of each part and every line.
fn converse(agent: &mut Agent, words: &Words) -> Vec<(&'static str, Vec<String>)> {
    let mut parts = Vec::new();
    let mut from = 0;
    let mut part = |name, agent: &Agent| {
        let mut kinds = order(&parsed(&agent.raw[from..]));
        kinds.retain(|kind| !is_noise(kind));
        kinds.dedup_by(|b, a| a == b && a.ends_with("delta"));
        parts.push((name, kinds));
        from = agent.raw.len();
    };
    agent.send_as("00000000-0000-4000-8000-0000000000a1", "hello there");
    agent.result();
    settle(agent);
    part("text", agent);
    agent.send_as("00000000-0000-4000-8000-0000000000a2", words.thought_and_tool.as_str());
    agent.result();
    settle(agent);
    part("thought and tool", agent);
    agent.send_as("00000000-0000-4000-8000-0000000000a3", words.slow.as_str());
    agent.kind("stream_event/content_block_delta");
    agent.send_as("00000000-0000-4000-8000-0000000000a4", "one more");
    agent.send_as("00000000-0000-4000-8000-0000000000a5", "and another");
    agent.result();
    agent.result();
    settle(agent);
    part("two that wait", agent);
    agent.send_as("00000000-0000-4000-8000-0000000000a6", words.slow_tool.as_str());
    agent.kind("stream_event/message_stop");
    agent.send_as("00000000-0000-4000-8000-0000000000a7", "while the tool runs");
    agent.result();
    settle(agent);
    part("folded", agent);
    agent.send_as("00000000-0000-4000-8000-0000000000a8", words.slow.as_str());
    agent.kind("stream_event/content_block_delta");
    agent.interrupt("r1");
    agent.result();
    settle(agent);
    part("interrupted", agent);
    agent.send_as("00000000-0000-4000-8000-0000000000a9", words.slow_tool.as_str());
    agent.kind("stream_event/message_stop");
    agent.interrupt("r2");
    agent.result();
    settle(agent);
    part("interrupted in a tool", agent);
    agent.send_as("00000000-0000-4000-8000-0000000000ac", words.background.as_str());
    agent.result();
    assert_eq!(agent.result()["origin"]["kind"], "task-notification");
    settle(agent);
    part("a turn that nobody asked for", agent);
    agent.send_as("00000000-0000-4000-8000-0000000000aa", words.error.as_str());
    assert_eq!(agent.result()["is_error"], true);
    settle(agent);
    part("error", agent);
    agent.send_as("00000000-0000-4000-8000-0000000000a1", "hello there");
    settle(agent);
    part("repeated", agent);
    agent.send_as("00000000-0000-4000-8000-0000000000ab", "/clear");
    agent.result();
    settle(agent);
    part("clear", agent);
    assert_eq!(agent.code(), 0);
    parts
}

/// Every session id that an init named.
fn ids(agent: &Agent) -> Vec<String> {
    let mut ids: Vec<String> = Vec::new();
    for message in agent.heard.iter().filter(|message| message["subtype"] == "init") {
        ids.push(message["session_id"].as_str().unwrap().to_owned());
    }
    ids.dedup();
    ids
}

/// Hears whatever still belongs to the turn: an answer to an idle interrupt comes behind it.
fn settle(agent: &mut Agent) {
    agent.interrupt("settle");
    agent.until("the answer", |message| message["response"]["request_id"] == "settle");
}

#[test]
fn the_embedded_agent_speaks_as_the_real_one() {
    let agents = std::env::var("BEEBOX_REAL_AGENTS").expect("scripts/real-agent sets BEEBOX_REAL_AGENTS");
    let api = fake_messages_api::start(0, None).unwrap();
    for agent in agents.split_whitespace() {
        let (version, path) = agent.split_once('=').expect("VERSION=PATH");
        println!("real agent {version}");
        let place = Place::new();
        let mut command = Command::new(path);
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", place.dir.path())
            .env("ANTHROPIC_BASE_URL", format!("http://127.0.0.1:{api}"))
            .env("ANTHROPIC_API_KEY", "dummy")
            .env("CLAUDE_CODE_MAX_RETRIES", "2")
            .env("IS_SANDBOX", "1");
        for name in ["DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] {
            command.env(name, "1");
        }
        let mut real = place.start_program(command, &[]);
        let real_parts = converse(&mut real, &real_words());
        let mut embedded = place.start(&["--profile", version]);
        let embedded_parts = converse(&mut embedded, &embedded_words());
        for (ours, theirs) in embedded_parts.iter().zip(&real_parts) {
            assert_eq!(ours, theirs, "{version}: ours is left, the real one right");
        }
        assert_shapes(&embedded.raw, &real.raw);
        // And what they wrote, before and after the clear.
        let (real_ids, embedded_ids) = (ids(&real), ids(&embedded));
        assert_eq!((real_ids.len(), embedded_ids.len()), (2, 2));
        // The bookkeeping of the real one depends on how long it lived.
        let written = |ids: &[String]| -> Vec<String> {
            let lines = ids.iter().flat_map(|id| place.raw_lines(id));
            lines.filter(|line| !line.contains(r#""type":"last-prompt""#)).collect()
        };
        assert_shapes(&written(&embedded_ids), &written(&real_ids));
    }
}
