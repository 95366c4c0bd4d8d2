// A turn as it streams in: what the frames of a real agent make of it.
import test from "node:test";
import assert from "node:assert/strict";
import { LiveTurn } from "../../src/web/live.js";

const ev = (event) => ({ type: "stream_event", event });
const start = ev({ type: "message_start", message: {} });
const block = (index, content_block) => ev({ type: "content_block_start", index, content_block });
const delta = (index, d) => ev({ type: "content_block_delta", index, delta: d });
const text = (index, t) => delta(index, { type: "text_delta", text: t });
const whole = (uuid, content) => ({ type: "assistant", uuid, message: { role: "assistant", content } });
const none = new Set();

function turn(...msgs) {
  const t = new LiveTurn("t");
  msgs.forEach((m, n) => t.take(n + 1, m));
  return t;
}
const shown = (t, uuids = none) => t.shown(uuids).map((b) => [b.block.type, b.block.text ?? b.block.toolName, Boolean(b.growing)]);

test("text grows by its deltas, and is confirmed in place", () => {
  const t = turn(start, block(0, { type: "text", text: "" }), text(0, "Hello"), text(0, " you"));
  assert.deepEqual(shown(t), [["text", "Hello you", true]]);
  t.take(5, whole("a", [{ type: "text", text: "Hello you" }]));
  assert.deepEqual(shown(t), [["text", "Hello you", false]]);
  assert.deepEqual(shown(t, new Set(["a"])), [], "the transcript has it now");
});

test("a new message_start voids the deltas before it, and nothing that was confirmed", () => {
  const t = turn(start, block(0, { type: "text" }), text(0, "whole"), whole("a", [{ type: "text", text: "whole" }]), block(1, { type: "text" }), text(1, "half"), start);
  assert.deepEqual(shown(t), [["text", "whole", false]]);
});

test("a retry is told until the model answers", () => {
  const t = turn({ type: "status", kind: "api_retry", attempt: 1, maxRetries: 10, retryDelayMs: 591, errorStatus: 529, error: "overloaded" });
  assert.deepEqual(t.retry, { attempt: 1, max: 10, delayMs: 591, status: 529, error: "overloaded" });
  t.take(2, start);
  assert.equal(t.retry, null);
});

test("a tool call gets its result; thinking folds; a helper's words stay out", () => {
  const t = turn(
    start, block(0, { type: "thinking", thinking: "" }), delta(0, { type: "thinking_delta", thinking: "hm" }), delta(0, { type: "signature_delta", signature: "x" }),
    whole("a", [{ type: "thinking", thinking: "hm" }]), block(1, { type: "tool_use", id: "c", name: "Bash", input: {} }), delta(1, { type: "input_json_delta", partial_json: "{\"command\":" }),
  );
  assert.deepEqual(shown(t), [["thinking", "hm", false], ["tool_use", "Bash", true]]);
  t.take(8, whole("b", [{ type: "tool_use", id: "c", name: "Bash", input: { command: "ls" } }]));
  t.take(9, { type: "user", message: { content: [{ type: "tool_result", tool_use_id: "c", content: [{ type: "text", text: "x".repeat(900) }, { type: "image" }] }] } });
  t.take(10, { ...whole("z", [{ type: "text", text: "aside" }]), parentToolUseId: "c" });
  const [, call] = t.shown(none);
  assert.deepEqual([call.block.input, call.block.resultSummary.length, call.block.isError], [{ command: "ls" }, 500, false]);
  assert.equal(t.shown(none).length, 2);
});

test("frames are applied once, and a hole is told", () => {
  const t = new LiveTurn("t");
  assert.equal(t.take(1, start), false);
  assert.equal(t.take(1, text(0, "twice")), false);
  assert.equal(t.take(4, text(0, "b")), true);
  assert.deepEqual(shown(t), [["text", "b", true]]);
});

test("an interrupted answer keeps what was said and says so", () => {
  const t = turn(start, block(0, { type: "text" }), text(0, "long a"), whole("a", [{ type: "text", text: "long a" }]),
    { type: "user", uuid: "i", message: { content: [{ type: "text", text: "[Request interrupted by user]" }] } });
  assert.deepEqual(shown(t).map((b) => b[0]), ["text", "interrupted"]);
});

test("what nobody knows is no harm", () => {
  const t = turn(null, {}, { type: "new" }, ev(null), ev({ type: "content_block_delta", index: 7, delta: { type: "new" } }), ev({ type: "content_block_start", index: 0 }),
    whole("a", "plain"), whole("b", [{ type: "novelty" }]), { type: "user", message: {} }, { type: "status", kind: "new" });
  assert.deepEqual(shown(t), [["text", "plain", false], ["text", "[novelty]", false]]);
});
