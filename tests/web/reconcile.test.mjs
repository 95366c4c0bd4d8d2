// The join of transcript, pending and own copies: a table of cases, and random interleavings against a model of the server.
// `node --test tests/web/reconcile.test.mjs`; ROUNDS and SEED change the random part, which prints both.
import test from "node:test";
import assert from "node:assert/strict";
import { Conversation, parseCursor } from "../../src/web/conversation.js";
import { normalize, reconcile, settle } from "../../src/web/reconcile.js";

const user = (uuid, text, photos = 0) => ({
  uuid, type: "user", timestamp: "2026-01-01T00:00:00.000Z",
  content: [...Array(photos).fill({ type: "image", imageRef: `s/${uuid}/0` }), ...(text ? [{ type: "text", text }] : [])],
});
const agent = (uuid, text = "answer") => ({ uuid, type: "assistant", timestamp: "2026-01-01T00:00:00.000Z", content: [{ type: "text", text }] });
const owed = (uuid, text, more = {}) => ({ ...user(uuid, text), state: "accepted", ...more });
const mine = (messageId, text, more = {}) => ({ messageId, text, photos: 0, known: [], attempted: true, ...more });
const keys = (input) => reconcile({ entries: [], ...input }).map((s) => s.key);

const TABLE = [
  ["nothing is nothing", {}, []],
  ["an own copy shows at once", { own: [mine("1", "hi", { attempted: false })] }, ["o:1"]],
  ["an accepted message shows once although the answer is not here yet", { pending: [owed("u", "hi")], own: [mine("1", "hi")] }, ["p:u"]],
  ["an answered copy gives way to the pending message", { pending: [owed("u", "hi")], own: [mine("1", "hi", { messageUuid: "u" })] }, ["p:u"]],
  ["an answered copy stays until the server's word speaks for it", { own: [mine("1", "hi", { messageUuid: "u", eventId: 9 })], seen: 8 }, ["o:1"]],
  ["…and leaves then, also when the message was cleared", { own: [mine("1", "hi", { messageUuid: "u", eventId: 9 })], seen: 9 }, []],
  ["a pending message is retired by its own uuid", { entries: [user("u", "hi")], pending: [owed("u", "hi")] }, ["e:u"]],
  ["…by its turn", { entries: [user("t", "hi\n\nyou")], pending: [owed("t", "hi"), owed("u", "you", { turnId: "t" })] }, ["e:t"]],
  ["…by being delivered", { entries: [user("x", "other")], pending: [owed("u", "hi")], delivered: [{ uuid: "u", turnId: "u" }] }, ["e:x"]],
  ["two equal messages, one in the transcript", { entries: [user("a", "ok")], pending: [owed("a", "ok"), owed("b", "ok")] }, ["e:a", "p:b"]],
  ["an equal text is not enough for an agent that keeps uuids", { entries: [user("x", "ok")], pending: [owed("u", "ok")] }, ["e:x", "p:u"]],
  ["text rule: the words are there", { entries: [user("x", "ok")], pending: [owed("u", "ok", { reconcileKnownUuids: [] })] }, ["e:x"]],
  ["text rule: not by an entry that was there before", { entries: [user("x", "ok")], pending: [owed("u", "ok", { reconcileKnownUuids: ["x"] })] }, ["e:x", "p:u"]],
  ["text rule: an occurrence is used up", { entries: [user("x", "ok")], pending: [owed("u", "ok", { reconcileKnownUuids: [] }), owed("v", "ok", { reconcileKnownUuids: [] })] }, ["e:x", "p:v"]],
  ["text rule: two in one merged line", { entries: [user("x", "ok\n\nok")], pending: [owed("u", "ok", { reconcileKnownUuids: [] }), owed("v", "ok", { reconcileKnownUuids: [] })] }, ["e:x"]],
  ["text rule: placeholders and blanks do not count", { entries: [user("x", "look   at\n[image#2] this")], pending: [owed("u", "look at this [image#1]", { reconcileKnownUuids: [] })] }, ["e:x"]],
  ["text rule: only the newest pending+5 entries", {
    entries: [user("x", "ok"), ...[1, 2, 3, 4, 5, 6].map((n) => user("n" + n, "n"))], pending: [owed("u", "ok", { reconcileKnownUuids: [] })],
  }, ["e:x", "e:n1", "e:n2", "e:n3", "e:n4", "e:n5", "e:n6", "p:u"]],
  ["text rule: a photo without words", { entries: [user("x", "", 1)], pending: [{ ...user("u", "", 1), state: "dispatched", reconcileKnownUuids: [] }] }, ["e:x"]],
  ["after a reload an unanswered copy is its pending twin", { pending: [owed("k", "ok"), owed("u", "ok")], own: [mine("1", "ok", { before: [{ uuid: "k", text: "ok" }] })] }, ["p:k", "p:u"]],
  ["…or its entry", { entries: [user("k", "ok"), user("u", "ok")], own: [mine("1", "ok", { known: ["k"] })] }, ["e:k", "e:u"]],
  ["…or part of a merged entry", { entries: [user("u", "first\n\nok")], own: [mine("1", "ok")] }, ["e:u"]],
  ["…but not words inside other words", { entries: [user("u", "well ok then")], own: [mine("1", "ok")] }, ["e:u", "o:1"]],
  ["…nor what was there when it was written", { entries: [user("k", "ok")], pending: [owed("p", "ok")], own: [mine("1", "ok", { known: ["k"], before: [{ uuid: "p", text: "ok" }] })] }, ["e:k", "p:p", "o:1"]],
  ["…nor another copy's message", { pending: [owed("u", "ok")], own: [mine("1", "ok", { messageUuid: "u" }), mine("2", "ok")] }, ["p:u", "o:2"]],
  ["a copy never sent cannot have arrived", { entries: [user("u", "ok")], own: [mine("1", "ok", { attempted: false })] }, ["e:u", "o:1"]],
  ["of two entries with one uuid the first counts", { entries: [user("a", "1"), user("a", "2")] }, ["e:a"]],
  ["a failed message stays", { pending: [owed("u", "hi", { state: "failed" })] }, ["p:u"]],
  ["…also when others of its turn were sent again without it", { entries: [user("t", "a")], pending: [owed("u", "b", { turnId: "t", state: "failed" })] }, ["e:t", "p:u"]],
  ["order: transcript, owed, own", { entries: [agent("z")], pending: [owed("u", "a"), owed("v", "b")], own: [mine("1", "c")] }, ["e:z", "p:u", "p:v", "o:1"]],
];
for (const [name, input, want] of TABLE) test(name, () => assert.deepEqual(keys(input), want));

test("normalized text has no placeholders and single blanks", () => {
  assert.equal(normalize(" a [image#12]\n\tb [image3] [Image #1] [image not displayed] c "), "a b c");
  assert.equal(normalize(null), "");
});

test("a cursor is an epoch and a number, or a number", () => {
  assert.deepEqual(parseCursor("ab.c.12"), { epoch: "ab.c", id: 12 });
  assert.deepEqual(parseCursor("12"), { epoch: "", id: 12 });
});

test("older pages stay when a newer tail still joins on, and go when it does not", () => {
  const talk = new Conversation();
  const all = Array.from({ length: 30 }, (_, n) => agent("a" + n));
  talk.adopt({ entries: all.slice(10, 20), offset: 10, total: 20, cursor: "e.1" });
  talk.prepend(all.slice(0, 10), 0);
  talk.adopt({ entries: all.slice(15, 25), offset: 15, total: 25, cursor: "e.2" });
  assert.deepEqual(talk.entries.map((e) => e.uuid), all.slice(0, 25).map((e) => e.uuid));
  talk.adopt({ entries: [agent("b")], offset: 29, total: 30, cursor: "e.3" });
  assert.deepEqual([talk.offset, talk.entries.length], [29, 1]);
});

// ---- random interleavings

function rng(seed) {
  let s = seed >>> 0;
  return (n) => {
    s = (s + 0x6d2b79f5) >>> 0;
    let t = Math.imul(s ^ (s >>> 15), 1 | s);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) % n;
  };
}

const MINE = ["ok", "ok", "yes", "ok then", "two\n\nparts"];
const THEIRS = ["well ok", "no", "no", "ok also", "yes and no"];

/** One life of a conversation: a server, somebody else's messages, and one tab that reloads now and then. */
function life(seed) {
  const dice = rng(seed);
  const keepsUuid = dice(3) > 0;
  let ids = 0;
  const id = (w) => w + ++ids;
  const messages = []; // {messageId?, uuid?, text, photos, eventId?, gone}
  const server = { events: [], pending: [], entries: [], delivered: [], turn: null };
  const tell = (event, data) => server.events.push({ id: server.events.length + 1, event, data });
  let talk = new Conversation();
  let own = [];
  let heard = 0;
  let posts = []; // requests and answers under way
  let snapshot = null;
  let again = false;
  const draft = dice(4) === 0; // a conversation that this tab begins: its events are not known to be ours before the answer
  const trace = [];

  const accept = (m) => {
    if (m.uuid) return;
    m.uuid = id("u");
    m.known = server.entries.filter((e) => e.type === "user").map((e) => e.uuid);
    server.pending.push({
      ...user(m.uuid, m.text, m.photos), state: "accepted", m, reconcileKnownUuids: keepsUuid ? undefined : m.known,
    });
    tell("chat-user-message", { messageUuid: m.uuid, message: m.text, images: m.photos, timestamp: "" });
    m.eventId = server.events.length;
  };
  let ours = !draft;
  const hear = (n) => {
    for (; n > 0 && heard < server.events.length; n--, heard++) if (ours) talk.hear(server.events[heard]);
  };
  const steps = {
    compose() {
      if (own.length > 4 || !talk.loaded) return;
      const m = { messageId: id("m"), text: MINE[dice(MINE.length)], photos: dice(5) ? 0 : 1 };
      // Where no uuid is kept, equal words on their way at the same time cannot be told apart by anybody.
      if (!keepsUuid) m.text = `${m.text} (${m.messageId})`;
      messages.push(m);
      own.push({ ...mine(m.messageId, m.text, { photos: m.photos, ...talk.origin(own), attempted: false }), m });
    },
    post() {
      // One at a time and in order, as the outbox does.
      const o = own.find((x) => !x.messageUuid);
      if (!o || posts.some((p) => p.o.messageId === o.messageId)) return;
      o.attempted = true;
      posts.push({ o, at: "request" });
    },
    arrive() {
      const p = posts.find((x) => x.at === "request");
      if (!p) return;
      accept(p.o.m);
      p.at = "answer";
    },
    answer() {
      const p = posts.find((x) => x.at === "answer");
      if (!p) return;
      posts = posts.filter((x) => x !== p);
      ours = true;
      settle(own, p.o.messageId, { messageUuid: p.o.m.uuid, eventId: p.o.m.eventId });
    },
    lose() {
      if (posts.length) posts.splice(dice(posts.length), 1);
    },
    others() {
      if (!ours) return;
      const m = { text: THEIRS[dice(THEIRS.length)] + (keepsUuid ? "" : ` (${id("o")})`), photos: 0 };
      messages.push(m);
      accept(m);
    },
    dispatch() {
      const members = server.pending.filter((p) => p.state === "accepted");
      if (server.turn || !members.length) return;
      const turnId = members[0].turnId ?? members[0].uuid;
      for (const p of members) Object.assign(p, { state: "dispatched", turnId });
      server.turn = { turnId, members, line: false };
      tell("chat-message-dispatched", { turnId, messageUuids: members.map((p) => p.uuid) });
    },
    line() {
      const t = server.turn;
      if (!t || t.line) return;
      t.line = true;
      const text = t.members.map((p) => p.m.text).join("\n\n");
      const photos = t.members.reduce((n, p) => n + p.m.photos, 0);
      server.entries.push({ ...user(keepsUuid ? t.turnId : id("x"), text, photos), members: t.members.map((p) => p.m) });
    },
    say() {
      if (server.turn?.line) server.entries.push(agent(id("a")));
    },
    complete() {
      const t = server.turn;
      if (!t?.line) return;
      server.turn = null;
      server.pending = server.pending.filter((p) => !t.members.includes(p));
      for (const p of t.members) server.delivered.push({ uuid: p.uuid, turnId: t.turnId });
      tell("chat-complete", { turnId: t.turnId, isError: false });
    },
    die() {
      const t = server.turn;
      if (!t || t.line) return;
      server.turn = null;
      const failed = dice(3) === 0;
      for (const p of t.members) p.state = failed ? "failed" : "accepted";
      tell("chat-turn-failed", { turnId: t.turnId, messageUuids: t.members.map((p) => p.uuid), error: "died", willRetry: !failed });
    },
    retry() {
      const p = server.pending.find((x) => x.state === "failed");
      if (!p) return;
      server.pending = server.pending.filter((x) => x !== p).concat(p);
      Object.assign(p, { state: "accepted", turnId: undefined });
    },
    clear() {
      const gone = server.pending.filter((p) => p.state === "accepted");
      if (!gone.length) return;
      for (const p of gone) p.m.gone = true;
      server.pending = server.pending.filter((p) => !gone.includes(p));
      tell("chat-queue-cleared", { messageUuids: gone.map((p) => p.uuid), why: "stop" });
    },
    hear: () => hear(1 + dice(3)),
    // The server reads the cursor, then pending (with delivered), then entries; anything may happen between.
    ask() {
      if (!ours) return;
      snapshot ??= { cursor: "e." + server.events.length, stage: 0, sessionId: "s" };
    },
    read() {
      if (snapshot?.stage === 0) {
        snapshot.stage = 1;
        snapshot.pending = server.pending.map((p) => ({ ...p }));
        snapshot.delivered = [...server.delivered];
      } else if (snapshot?.stage === 1) {
        snapshot.stage = 2;
        snapshot.told = server.events.length;
        const tail = 3 + dice(30);
        snapshot.offset = Math.max(0, server.entries.length - tail);
        snapshot.entries = server.entries.slice(snapshot.offset);
        snapshot.total = server.entries.length;
      }
    },
    adopt() {
      if (snapshot?.stage !== 2) return;
      // What was told before the entries were read is on its way by then, and is heard before anything is drawn; without
      // uuids also before the answer is taken, since only the entries known before it tell old lines from new ones.
      const early = !keepsUuid || dice(2);
      if (early) hear(snapshot.told - heard);
      again = talk.adopt(snapshot);
      heard = Math.max(heard, parseCursor(snapshot.cursor).id);
      if (!early) hear(snapshot.told - heard);
      snapshot = null;
      own = own.filter((o) => !(o.messageUuid && o.eventId <= talk.seen));
      ours = true;
    },
    reload() {
      if (dice(4)) return;
      talk = new Conversation();
      talk.loaded = !ours; // the draft's address opens the draft
      own = own.filter((o) => !o.messageUuid).map((o) => ({ ...o }));
      posts = posts.filter((p) => p.at === "request" && dice(2)); // some requests had left already; no answer comes
      for (const p of posts) p.o = { ...p.o, messageId: p.o.messageId };
      snapshot = null;
      heard = server.events.length; // the next snapshot's cursor says where to go on
    },
  };
  const weights = { compose: 4, post: 5, arrive: 5, answer: 5, lose: 1, others: 2, dispatch: 4, line: 4, say: 2, complete: 4, die: 1, retry: 1, clear: 1, hear: 8, ask: 5, read: 8, adopt: 6, reload: 1 };
  const bag = Object.entries(weights).flatMap(([k, n]) => Array(n).fill(k));

  const check = () => {
    if (!talk.loaded || again) return; // nothing is drawn yet
    const shown = talk.shown(own);
    const from = talk.offset;
    for (const m of messages) {
      let times = 0;
      for (const s of shown) {
        if (s.kind === "entry" ? s.value.members?.includes(m) : s.kind === "pending" ? s.value.uuid === m.uuid : s.value.messageId === m.messageId) times++;
      }
      const where = `seed ${seed}, ${keepsUuid ? "with" : "without"} uuids, ${m.messageId ?? "theirs"} ${m.uuid} “${m.text}”: ${times} times\n${trace.slice(-30).join(" ")}\n${JSON.stringify(shown.map((s) => s.key))}`;
      assert.ok(times <= 1, where);
      const older = server.entries.findIndex((e) => e.members?.includes(m));
      if (older >= 0 && older < from) continue; // on an older page
      const told = talk.adopted && (m.eventId ?? Infinity) <= talk.seen;
      const known = told || (m.messageId !== undefined && own.some((o) => o.messageId === m.messageId));
      if (known && !m.gone) assert.equal(times, 1, where);
    }
  };
  const count = 40 + dice(160);
  if (draft) talk.loaded = true;
  steps.ask();
  steps.read();
  steps.read();
  steps.adopt();
  for (let n = 0; n < count; n++) {
    const step = bag[dice(bag.length)];
    trace.push(step);
    steps[step]();
    check();
  }
  // In the end everything arrives, and is there once.
  while (own.some((o) => !o.messageUuid)) {
    steps.post();
    steps.arrive();
    steps.answer();
    check();
  }
  for (let n = 0; n < 100 && server.pending.length; n++) {
    steps.retry();
    steps.dispatch();
    steps.line();
    steps.complete();
  }
  hear(Infinity);
  ours = true;
  snapshot = null;
  steps.ask();
  steps.read();
  steps.read();
  snapshot.entries = server.entries;
  snapshot.offset = 0;
  steps.adopt();
  trace.push("end");
  check();
  const shown = talk.shown(own);
  assert.equal(shown.filter((s) => s.kind !== "entry").length, 0, `seed ${seed}: something is left over`);
  return count;
}

test("random interleavings: never missing, never twice", () => {
  const rounds = Number(process.env.ROUNDS ?? 4000);
  const seed = Number(process.env.SEED ?? 1);
  let steps = 0;
  for (let n = 0; n < rounds; n++) steps += life(seed + n);
  console.log(`reconcile: ${rounds} interleavings, ${steps} steps, seeds ${seed}…${seed + rounds - 1}, no violation`);
});
