// The page: what is open, what is asked, what is drawn. The rules are in reconcile.js, conversation.js and live.js.
import { api, Events } from "./net.js";
import { Conversation, parseCursor } from "./conversation.js";
import { LiveTurn } from "./live.js";
import { Outbox, freshId } from "./outbox.js";
import { prepare, tooMuch } from "./photos.js";
import { h } from "./markdown.js";
import { ago, blockNode, day, entryNode, icon, mark, setViewer, userNode } from "./view.js";

const TAIL = 120; // entries of the first page: a few screens
const PAGE = 100; // entries of one older page
const KEPT_MAX = 600; // entries held while the newest are in view
const PHASES = {
  idle: "Asleep: wakes with your next message", starting: "Waking up…", ready: "Ready", streaming: "Answering…", stopping: "Stopping…",
};
const DOTS = { idle: "asleep", starting: "waking up", ready: "ready", streaming: "answering", stopping: "stopping" };

const $ = (id) => document.getElementById(id);
const scroll = $("scroll");
const list = $("list");

let open = null; // {conv, ids, talk: Conversation, turns: Map, phase, turnId, features, draft?, notes, …}: see begin
let sessions = [];
let cursor = "0";
let online = true;
let retryAt = 0;
const local = new Map(); // messageUuid -> object URLs of photos sent from this tab
const drafts = { text: (conv) => "draft:" + conv, photos: [] };

const outbox = new Outbox({
  changed: () => draw(),
  answered(item, answer, conv) {
    if (item.images.length) {
      local.set(answer.messageUuid, urlsOf(item));
      while (local.size > 20) {
        const [uuid, urls] = local.entries().next().value;
        local.delete(uuid);
        urls.forEach((u) => URL.revokeObjectURL(u));
      }
    }
    if (open?.conv === conv && conv !== answer.sessionId) {
      // The draft has become a conversation: same view, its own address.
      Object.assign(open, { conv: answer.sessionId, draft: undefined });
      open.ids.add(answer.sessionId);
      history.replaceState(null, "", "#/c/" + answer.sessionId);
      refresh();
    } else if (open?.ids.has(answer.sessionId) && ["done", "cleared", "failed"].includes(answer.state)) refresh();
    listSoon();
  },
});

function urlsOf(item) {
  item.urls ??= item.images.map((i) => URL.createObjectURL(new Blob([i.bytes], { type: i.mimeType })));
  return item.urls;
}

// ---- what is open

function route() {
  const [, kind, id] = /^#\/(c|new|main)\/?([\w-]{1,64})?$/.exec(location.hash) ?? [];
  if (kind === "c" && id) openConversation(id);
  else if (kind === "new" || kind === "main") openDraft(id ?? freshId(), kind);
  else openConversation(null);
}

function begin(conv, draft) {
  keepDraft();
  for (const p of drafts.photos) URL.revokeObjectURL(p.url);
  drafts.photos = [];
  open = {
    conv, draft, ids: new Set(conv ? [conv] : []), talk: new Conversation(), turns: new Map(), phase: "idle", turnId: null,
    features: null, notes: [], reading: null, again: false, older: false, error: null,
  };
  list.replaceChildren();
  nodes.clear();
  $("compose").value = storage("get", drafts.text(conv ?? "home")) ?? "";
  stuck = true;
  closePanel();
  drawer(false);
  drawThumbs();
  grow();
}

/** A conversation that begins with its first message; `word` is what that says instead of an id. */
function openDraft(id, word) {
  begin(id, word);
  open.talk.loaded = true;
  const path = `#/${word}/${id}`;
  if (location.hash !== path) history.replaceState(null, "", path);
  draw();
  drawSessions();
  focusCompose();
  if (cursor === "0") api("/api/chat/bootstrap?tail=1").then((answer) => heardUpTo(answer.cursor), away);
}

/** Where the events go on, from the first answer that tells it. */
function heardUpTo(at) {
  if (at !== undefined && (cursor === "0" || parseCursor(at).epoch !== parseCursor(cursor).epoch)) cursor = at;
  if (!events.socket && online) events.connect();
}

async function openConversation(id) {
  begin(id, null);
  draw();
  drawSessions();
  await refresh();
  focusCompose();
}

/** Reads the open conversation again; asked for while it reads, it reads once more after that. */
async function refresh() {
  const o = open;
  if (o.draft) return;
  if (o.reading) {
    o.again = true;
    return o.reading;
  }
  o.reading = (async () => {
    for (let tries = 0; o === open;) {
      o.again = false;
      const asked = performance.now();
      try {
        const answer = await api(`/api/chat/bootstrap?tail=${TAIL}${o.conv ? "&session=" + encodeURIComponent(o.conv) : ""}`);
        if (o !== open) return;
        took(o, answer, asked);
        tries = 0;
        if (!o.again) return;
      } catch (e) {
        if (o !== open) return;
        if (e.status === 404 || e.status === 410 || e.status === 400) {
          o.error = e.status === 404 ? "There is no such conversation here." : e.message;
          o.talk.loaded = true;
          draw();
          return;
        }
        o.error = e.status === 401 ? e.message : null;
        away(e);
        await new Promise((r) => setTimeout(r, Math.min(10_000, 500 * 2 ** tries++)));
      }
    }
  })();
  await o.reading.finally(() => {
    o.reading = null;
  });
}

function took(o, answer, asked) {
  heardUpTo(answer.cursor);
  o.error = null;
  if (answer.kind === "empty" && !answer.sessionId) {
    o.draft = "main";
    o.conv ??= "main";
    o.talk.loaded = true;
  } else {
    const first = !o.conv;
    o.ids.add(answer.sessionId);
    if (first) {
      o.conv = answer.sessionId;
      history.replaceState(null, "", "#/c/" + o.conv);
      $("compose").value ||= storage("get", drafts.text(o.conv)) ?? "";
      grow();
    }
    if (answer.kind === "unavailable") o.error = answer.error || "The record of this conversation cannot be read just now.";
    // Taken in any case: what is skipped here would be forgotten below and shown by nobody until the next answer.
    const incomplete = o.talk.adopt(answer);
    o.again ||= incomplete;
    if (stuck && o.talk.entries.length > KEPT_MAX) {
      const drop = o.talk.entries.length - TAIL;
      o.talk.entries = o.talk.entries.slice(drop);
      o.talk.offset += drop;
    }
    // A conversation without a transcript says why, once something was said in it.
    const { code, text } = answer.reason ?? {};
    o.unkept = code === "agent_keeps_none";
    o.notes = o.notes.filter((n) => n.key !== "n:reason");
    if (o.unkept || code === "transcript_gone") o.notes.push({ key: "n:reason", text: text[0].toUpperCase() + text.slice(1) + "." });
    o.features = answer.features ?? o.features;
    // A phase heard since we asked is at least as new as the answer's.
    const status = answer.status ?? {};
    phase(o, o.phaseAt > asked ? { ...status, phase: undefined } : status);
    settleTurns(o);
  }
  const settled = outbox.items.filter((i) => o.ids.has(i.conv) && i.messageUuid && (i.eventId ?? 0) <= o.talk.seen);
  for (const item of settled) outbox.forget(item);
  draw();
  drawSessions();
}

function phase(o, status) {
  if (status.phase) o.phase = status.phase;
  if (status.startError !== undefined) o.startError = status.startError;
  o.heardAt = Date.now() - (status.lastMessageAgeMs ?? 0);
  if (status.turnId !== undefined) o.turnId = status.turnId;
  if (o.turnId && (o.phase === "streaming" || o.phase === "stopping") && !o.turns.has(o.turnId)) catchUp(o, turnOf(o, o.turnId));
}

function turnOf(o, turnId) {
  let turn = o.turns.get(turnId);
  if (!turn) o.turns.set(turnId, turn = new LiveTurn(turnId));
  return turn;
}

/** Reads the frames of a turn that were said before we listened. */
async function catchUp(o, turn) {
  if (turn.reading) return;
  turn.reading = [];
  try {
    const { frames = [], gap, complete } = await api(`/api/chat/turns/${encodeURIComponent(turn.turnId)}?after=${turn.seq}`);
    for (const { seq, msg } of frames) turn.take(seq, msg);
    turn.gap ||= gap === true;
    if (complete) turn.ended = true;
  } catch { /* the transcript tells it in the end */ }
  for (const { seq, msg } of turn.reading) turn.take(seq, msg);
  turn.reading = null;
  if (o === open) draw();
}

/** Turns that ended leave once the transcript shows what they said; one that it never shows leaves after some tries. */
function settleTurns(o) {
  // What no transcript will ever show stays as it was heard, as long as this page is open.
  if (o.unkept) return;
  const uuids = new Set(o.talk.entries.map((e) => e.uuid));
  for (const turn of o.turns.values()) {
    if (!turn.ended) continue;
    if (turn.shown(uuids).length === 0 || (turn.tries = (turn.tries ?? 0) + 1) > 5) o.turns.delete(turn.turnId);
    else setTimeout(() => o === open && refresh(), 200 * 2 ** turn.tries);
  }
}

// ---- events

const events = new Events({
  cursor: () => cursor,
  state(word, at) {
    const back = word === "open" && !online;
    online = word === "open";
    retryAt = at ?? 0;
    if (back) {
      if (open) {
        for (const turn of open.turns.values()) if (!turn.ended) catchUp(open, turn);
        refresh();
      }
      listSoon();
      outbox.hurry();
    }
    drawBanner();
  },
  hear(frame) {
    const { id, event, data = {} } = frame;
    if (event === "hello" || event === "resync") {
      const epoch = data.epoch ?? parseCursor(cursor).epoch;
      if (event === "resync" || parseCursor(cursor).epoch !== epoch) {
        cursor = `${epoch}.${data.head}`;
        if (open) {
          open.turns.clear(); // whatever they were, the next answer tells what runs now
          refresh();
        }
        listSoon();
      }
      return;
    }
    if (id) {
      const at = parseCursor(cursor);
      if (id > at.id) cursor = at.epoch ? `${at.epoch}.${id}` : String(id);
    }
    if (event === "chat-phase") {
      heardPhases.set(data.sessionId, { phase: data.phase, at: performance.now() });
      const row = sessions.find((s) => s.sessionId === data.sessionId);
      if (row) Object.assign(row, { phase: data.phase, queued: data.queued ?? row.queued });
      else listSoon();
      drawSessions();
    } else if (id) listSoon();
    const o = open;
    if (!o || !(o.ids.has(data.sessionId) || o.ids.has(data.was))) return;
    switch (event) {
      case "chat-phase":
        o.phaseAt = performance.now();
        if (data.phase === "idle" && o.phase === "starting") refresh(); // a start that failed says why in the status
        if (data.phase !== "streaming" && data.phase !== "stopping") o.turnId = null;
        if (data.phase === "idle" || data.phase === "ready") for (const t of o.turns.values()) t.retry = null;
        phase(o, data);
        draw();
        break;
      case "chat-turn": {
        o.heardAt = Date.now();
        if (o.turns.get(data.turnId)?.ended) break;
        const fresh = !o.turns.has(data.turnId);
        const turn = turnOf(o, data.turnId);
        if (turn.reading) turn.reading.push(data);
        else if ((fresh && data.seq > 1) || data.seq > turn.seq + 1) {
          const reading = catchUp(o, turn);
          turn.reading?.push(data);
          reading.catch(() => {});
        } else turn.take(data.seq, data.msg);
        if (fresh) draw();
        else drawLive();
        break;
      }
      case "chat-features-changed":
        o.features = data.features;
        drawFeatures();
        break;
      case "chat-task":
        break;
      default:
        if (id) kept(o, frame);
    }
  },
});

function kept(o, frame) {
  const { event, data } = frame;
  if (event === "chat-session-assigned") {
    o.ids.add(data.sessionId);
    o.conv = data.sessionId;
    history.replaceState(null, "", "#/c/" + o.conv);
  }
  if (event === "chat-queue-cleared") {
    const back = o.talk.pending.filter((p) => data.messageUuids?.includes(p.uuid));
    const words = back.map((p) => (p.content ?? []).filter((b) => b.type === "text").map((b) => b.text).join("\n")).filter(Boolean);
    if (back.length && frame.id > o.talk.seen) o.notes.push({ key: "n:" + frame.id, text: `${back.length === 1 ? "A waiting message was" : back.length + " waiting messages were"} taken back.`, words: words.join("\n\n") });
  }
  if (["chat-turn-failed", "chat-complete"].includes(event)) o.notes = o.notes.filter((n) => n.turnId !== data.turnId);
  if (event === "chat-turn-failed" && frame.id > o.talk.seen) {
    o.notes.push({ key: "n:" + frame.id, error: true, turnId: data.turnId, uuids: data.messageUuids ?? [],
      text: data.willRetry ? `The agent ended before it took the message: ${data.error}. It is sent again.` : `The turn did not finish: ${data.error}` });
  }
  // Sent again: its frames count from one anew.
  if (event === "chat-message-dispatched" && frame.id > o.talk.seen) o.turns.delete(data.turnId);
  if (event === "chat-complete") {
    say(data.isError ? "The answer ended with an error." : "The answer is complete.");
    // Said already, by the answer's own last words or as an interrupt.
    const said = (o.turns.get(data.turnId)?.blocks ?? []).some(({ block: b }) => b.type === "interrupted" || data.errors?.some((e) => b.text?.includes(e)));
    if (data.isError && !said && frame.id > o.talk.seen && data.errors?.length) o.notes.push({ key: "n:" + frame.id, error: true, text: "The answer ended with an error: " + data.errors.join(" · ") });
  }
  if (event === "chat-user-message") o.notes = o.notes.filter((n) => n.words);
  const turn = o.turns.get(data.turnId);
  if (turn && (event === "chat-complete" || event === "chat-turn-failed")) Object.assign(turn, { ended: true, retry: null });
  if (o.talk.hear(frame)) refresh();
  draw();
}

const heardPhases = new Map(); // session -> {phase, at}: the list tells only running and busy
let listTimer = 0;
function listSoon() {
  listTimer ||= setTimeout(async () => {
    listTimer = 0;
    const asked = performance.now();
    try {
      const answer = await api("/api/chat/sessions");
      sessions = answer.sessions.map((s) => {
        const { phase: known, at } = heardPhases.get(s.sessionId) ?? {};
        const fits = s.running === (known === "ready" || known === "streaming") && s.busy === (known === "streaming" || known === "starting");
        return { ...s, phase: known && (at > asked || fits) ? known : s.busy ? (s.running ? "streaming" : "starting") : s.running ? "ready" : "idle" };
      });
      drawSessions();
      drawHead();
    } catch (e) {
      away(e);
    }
  }, 150);
}

function away(e) {
  if (e.status === 0 && online) {
    online = false;
    events.connect();
  }
  drawBanner(e.status === 401 ? "This server wants a login: open its login link again." : null);
}

// ---- drawing: the list of messages

const nodes = new Map(); // key -> {node, value, sig}
let stuck = true; // the newest stays in view
let drawn = 0;

function draw() {
  const now = () => {
    drawn = 0;
    paint();
  };
  // A tab in the background gets no frames, but its title tells.
  drawn ||= document.hidden ? setTimeout(now, 300) : requestAnimationFrame(now);
}

function keep(key, value, make, sigOf) {
  const have = nodes.get(key);
  if (have && have.value === value && !sigOf) return have.node;
  const sig = sigOf ? sigOf() : JSON.stringify(value);
  if (have && have.sig === sig) {
    have.value = value;
    return have.node;
  }
  const li = h("li", null, make(value));
  li.dataset.key = key;
  nodes.set(key, { node: li, value, sig });
  return li;
}

const pendingPhoto = (uuid) => (b, n) => local.get(uuid)?.[n] ?? `/api/chat/pending/${encodeURIComponent(uuid)}/${n}`;

function pendingNode(p) {
  const failed = p.state === "failed";
  const act = (what) => async () => {
    try {
      await api("/api/chat/pending/" + what, { session: open.conv, messageUuid: p.uuid });
    } catch (e) {
      if (e.status !== 409) flash(e.message);
    }
    refresh();
  };
  return userNode({
    content: p.content, timestamp: p.timestamp, user: p.user, photos: pendingPhoto(p.uuid), state: p.state,
    stateText: failed ? ["Not delivered", p.error ?? open.talk.errors.get(p.uuid)].filter(Boolean).join(": ") : p.state === "accepted" ? "Queued" : "",
    actions: failed ? [["Try again", act("retry")], ["Discard", act("discard")]] : [],
  });
}

function ownNode(o) {
  const refused = o.state === "refused";
  return userNode({
    content: [...(o.text ? [{ type: "text", text: o.text }] : []), ...o.images.map(() => ({ type: "image" }))],
    timestamp: new Date(o.at).toISOString(), photos: (b, n) => urlsOf(o)[n], state: refused ? "failed" : "own",
    stateText: refused ? "Not sent: " + o.error : o.error ? "Waiting to be sent" : o.messageUuid ? "" : "Sending…",
    actions: refused ? [["Try again", () => outbox.retry(o)], ["Discard", () => outbox.forget(o)]] : [],
  });
}

const liveKey = (turn) => "t:" + turn.turnId;

function liveNode(o, turn) {
  const key = liveKey(turn);
  let have = nodes.get(key);
  if (!have) {
    const node = h("li", { class: "live" }, h("article", { class: "agent", "aria-label": "Agent, answering" }));
    node.dataset.key = key;
    nodes.set(key, have = { node, blocks: new Map() });
  }
  const article = have.node.firstChild;
  const blocks = turn.shown(o.uuids);
  const want = [];
  const used = new Map();
  for (const { key: k, block, growing } of blocks) {
    let entry = have.blocks.get(k);
    // A block that was growing keeps its node when it is confirmed.
    if (!entry && !growing) {
      const grew = [...have.blocks].find(([x, e]) => x.startsWith("grow/") && e.type === block.type && !used.has(x));
      if (grew) {
        entry = grew[1];
        have.blocks.delete(grew[0]);
      }
    }
    const sig = `${growing}|${block.type}|${(block.text ?? "").length}|${block.resultSummary?.length}|${block.inputSummary?.length}`;
    if (!entry || entry.sig !== sig) entry = { sig, type: block.type, node: blockNode(block, { old: entry?.node, growing }) };
    used.set(k, entry);
    want.push(entry.node);
  }
  have.blocks = used;
  if (turn.retry) {
    const { attempt, max, delayMs, status, error } = turn.retry;
    want.push(h("p", { class: "waiting" }, `The model's service said no (${[status, error].filter(Boolean).join(" ")}). Trying again${delayMs ? ` in ${(delayMs / 1000).toFixed(1)} s` : ""}: attempt ${attempt}${max ? " of " + max : ""}.`));
  } else if (!turn.ended && !blocks.some((b) => b.growing && b.block.type === "text")) {
    have.pulse ??= h("p", { class: "pulse" }, h("i"), h("i"), h("i"), h("span", { class: "sr" }, "The agent is working"));
    want.push(have.pulse);
  }
  if (turn.gap) want.push(h("p", { class: "faint" }, "Some of this answer was not heard here; it shows in full when the turn ends."));
  place(article, want);
  return have.node;
}

/** Makes `want` the children of `parent`, moving as little as possible. */
function place(parent, want) {
  const keepSet = new Set(want);
  for (const child of [...parent.children]) if (!keepSet.has(child)) child.remove();
  let at = parent.firstElementChild;
  for (const node of want) {
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
  }
}

function paint() {
  const o = open;
  if (!o) return;
  const shown = o.talk.shown(outbox.of(o.conv).concat(...[...o.ids].filter((id) => id !== o.conv).map((id) => outbox.of(id))));
  o.uuids = new Set(o.talk.entries.map((e) => e.uuid));
  const want = [];
  const keys = new Set();
  const add = (key, node) => {
    keys.add(key);
    want.push(node);
  };
  let lastDay = "";
  const daily = (at) => {
    const d = at && day(at);
    if (!d || d === lastDay) return;
    lastDay = d;
    add("d:" + d + want.length, h("li", { class: "day" }, h("span", null, d)));
  };
  for (const { kind, key, value } of shown) {
    if (kind !== "entry") continue;
    daily(value.timestamp);
    add(key, keep(key, value, (v) => entryNode(v, (uuid, n) => local.get(uuid)?.[n])));
  }
  const rest = shown.filter((s) => s.kind !== "entry");
  const put = (s) => {
    rest.splice(rest.indexOf(s), 1);
    daily(s.value.timestamp ?? new Date(s.value.at).toISOString());
    const sig = () => JSON.stringify([s.value.state, s.value.text ?? s.value.content, s.value.error, s.value.attempted, s.value.messageUuid, open.talk.errors.get(s.value.uuid)]);
    add(s.key, keep(s.key, s.value, s.kind === "pending" ? pendingNode : ownNode, sig));
  };
  const turns = [...o.turns.values()].sort((a, b) => Number(b.ended) - Number(a.ended));
  const isOf = (s, turn) => (s.kind === "pending" ? s.value.turnId === turn.turnId && s.value.state === "dispatched"
    : s.value.messageUuid !== undefined && [s.value.messageUuid, s.value.turnId].includes(turn.turnId));
  for (const turn of turns) {
    for (const s of [...rest]) if (isOf(s, turn)) put(s);
    add(liveKey(turn), liveNode(o, turn));
  }
  // What waits for a start rides its first turn.
  for (const s of [...rest]) if (s.value.state === "dispatched" || o.phase === "starting") put(s);
  if (turns.every((t) => t.ended) && ["starting", "streaming"].includes(o.phase)) {
    add("t:", keep("t:", "wait", () => h("p", { class: "pulse" }, h("i"), h("i"), h("i"), h("span", { class: "sr" }, "The agent is working"))));
  }
  for (const s of [...rest]) put(s);
  // A message that failed says so itself.
  const failed = new Set(o.talk.pending.filter((p) => p.state === "failed").map((p) => p.uuid));
  for (const note of o.notes) if (!note.uuids?.some((u) => failed.has(u))) add(note.key, keep(note.key, note, noteNode));
  for (const key of nodes.keys()) if (!keys.has(key)) nodes.delete(key);

  const anchor = stuck ? null : firstInView();
  place(list, want);
  list.setAttribute("aria-busy", o.phase === "streaming");
  $("welcome").hidden = !(o.talk.loaded && !want.length && !o.error);
  $("older").hidden = o.talk.offset <= 0 && !o.talk.skippedLines;
  $("older").textContent = o.talk.offset > 0 ? `${o.talk.offset.toLocaleString()} earlier…`
    : `${o.talk.skippedLines} ${o.talk.skippedLines === 1 ? "line" : "lines"} of the record could not be read.`;
  drawHead();
  drawBanner();
  if (stuck) toEnd();
  else if (anchor) scroll.scrollTop += anchor.node.getBoundingClientRect().top - anchor.top;
  jump();
  if (scroll.scrollTop < 600) older();
}

function noteNode(note) {
  return h("p", { class: "note" + (note.error ? " error" : "") }, h("span", null, note.text),
    note.words && h("button", { type: "button", class: "link", onclick: () => {
      $("compose").value = [$("compose").value, note.words].filter(Boolean).join("\n\n");
      open.notes = open.notes.filter((n) => n !== note);
      grow();
      draw();
      $("compose").focus();
    } }, "Write it again"),
    h("button", { type: "button", class: "link", onclick: () => {
      open.notes = open.notes.filter((n) => n !== note);
      draw();
    } }, "Dismiss"));
}

let liveDrawn = 0;
function drawLive() {
  liveDrawn ||= requestAnimationFrame(() => {
    liveDrawn = 0;
    const o = open;
    if (!o?.uuids) return;
    for (const turn of o.turns.values()) if (nodes.has(liveKey(turn))) liveNode(o, turn);
    if (stuck) toEnd();
    jump();
  });
}

// ---- scrolling

function firstInView() {
  const top = scroll.getBoundingClientRect().top;
  for (const node of list.children) {
    const box = node.getBoundingClientRect();
    if (box.bottom > top) return { node, top: box.top };
  }
  return null;
}

const nearEnd = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
function toEnd() {
  scroll.scrollTop = scroll.scrollHeight;
}
function jump() {
  $("jump").hidden = stuck || nearEnd();
}

scroll.addEventListener("scroll", () => {
  stuck = nearEnd();
  jump();
  if (scroll.scrollTop < 600) older();
}, { passive: true });
new ResizeObserver(() => stuck && toEnd()).observe(scroll);

/** Reads the page before the oldest entry; an answer may stop early, so until it joins on. */
async function older() {
  const o = open;
  if (!o?.talk.loaded || o.older || o.talk.offset <= 0 || !online) return;
  o.older = true;
  try {
    const from = Math.max(0, o.talk.offset - PAGE);
    const end = o.talk.offset;
    const page = [];
    while (from + page.length < end) {
      const at = from + page.length;
      const { entries } = await api(`/api/chat/history?session=${encodeURIComponent(o.conv)}&offset=${at}&limit=${end - at}`);
      if (!entries.length) break;
      page.push(...entries);
    }
    if (o !== open) return;
    if (o.talk.offset === end) {
      if (page.length) o.talk.prepend(page, from);
      else o.talk.offset = 0;
    }
    draw();
    // Once it is drawn, and what was in view is where it was: still near the top?
    requestAnimationFrame(() => {
      o.older = false;
      if (o === open && scroll.scrollTop < 600) older();
    });
  } catch (e) {
    o.older = false;
    away(e);
  }
}

$("jump").addEventListener("click", () => {
  stuck = true;
  toEnd();
  jump();
  $("compose").focus();
});

// ---- drawing: head, banner, list of conversations

function drawHead() {
  const o = open;
  if (!o) return;
  const row = sessions.find((s) => o.ids.has(s.sessionId));
  const title = row?.label || (o.draft || !o.conv ? "New conversation" : "Conversation");
  $("title").textContent = title;
  document.title = (o.phase === "streaming" ? "● " : "") + title + " · beebox";
  const state = !online ? "Not connected" : o.draft ? "" : PHASES[o.phase] ?? o.phase;
  const waiting = o.talk.pending.filter((p) => p.state === "accepted").length;
  const silent = o.phase === "streaming" ? Math.floor((Date.now() - o.heardAt) / 60_000) : 0;
  $("state").textContent = state + (silent > 0 ? ` · no word for ${silent} min` : "") + (waiting > 0 ? ` · ${waiting} waiting` : "");
  $("state").dataset.phase = o.phase;
  $("more").hidden = Boolean(o.draft || !o.conv);
  $("interrupt").hidden = o.phase !== "streaming";
  for (const b of $("panel").querySelectorAll("[data-do]")) {
    b.disabled = (b.dataset.do === "interrupt" && !["streaming", "starting"].includes(o.phase)) || (b.dataset.do === "stop" && o.phase === "idle" && !waiting);
  }
  drawSend();
}

let flashText = "";
let flashTimer = 0;
function flash(text) {
  flashText = text;
  clearTimeout(flashTimer);
  flashTimer = setTimeout(() => {
    flashText = "";
    drawBanner();
  }, 8000);
  drawBanner();
}

let bannerTimer = 0;
let loginText = null;
function drawBanner(login) {
  if (login !== undefined) loginText = login;
  clearTimeout(bannerTimer);
  const waiting = outbox.items.filter((i) => i.state === "waiting" && !i.messageUuid);
  const refused = waiting.find((i) => i.error);
  let text = "";
  if (loginText) text = loginText;
  else if (!online) {
    const s = Math.ceil((retryAt - Date.now()) / 1000);
    text = `No connection to the server${navigator.onLine ? "" : ": this device is offline"}. ${s > 0 ? `Next try in ${s} s.` : "Trying…"}`
      + (waiting.length ? ` ${waiting.length === 1 ? "Your message is" : waiting.length + " messages are"} kept and will be sent.` : "");
    bannerTimer = setTimeout(drawBanner, 1000);
  } else if (flashText) text = flashText;
  else if (open?.error) text = open.error;
  else if (open?.startError && open.phase === "idle") text = "The agent could not be started: " + (open.startError.error ?? open.startError);
  else if (refused) text = `The server cannot take your message yet: ${refused.error}. It is kept, and sent again by itself.`;
  const banner = $("banner");
  banner.hidden = !text;
  if (banner.textContent !== text) banner.textContent = text;
}

function drawSessions() {
  const rows = sessions.map((s) => {
    const mine = open?.ids.has(s.sessionId);
    const label = s.label || "Conversation";
    return h("li", null, h("a", { href: "#/c/" + s.sessionId, "aria-current": mine ? "page" : null },
      h("i", { class: "dot " + s.phase, title: DOTS[s.phase] ?? s.phase }), h("span", { class: "label" }, label),
      h("span", { class: "sr" }, `, ${DOTS[s.phase] ?? s.phase},`),
      s.queued > 0 && h("span", { class: "count", title: `${s.queued} waiting` }, String(s.queued), h("span", { class: "sr" }, " waiting")),
      h("span", { class: "when" }, ago(s.lastUsedAt))));
  });
  const sig = JSON.stringify([sessions, [...(open?.ids ?? [])], Math.floor(Date.now() / 60_000)]);
  if ($("sessions").dataset.sig === sig) return;
  const at = [...$("sessions").querySelectorAll("a")].indexOf(document.activeElement);
  $("sessions").replaceChildren(...rows);
  $("sessions").dataset.sig = sig;
  if (at >= 0) $("sessions").querySelectorAll("a")[at]?.focus();
}
setInterval(() => {
  drawSessions();
  drawHead();
}, 30_000);

function say(text) {
  $("say").textContent = text;
}

// ---- composing

function storage(how, key, value) {
  try {
    return how === "get" ? localStorage.getItem(key) : value ? localStorage.setItem(key, value) : localStorage.removeItem(key);
  } catch {
    return null;
  }
}

function keepDraft() {
  if (open) storage("set", drafts.text(open.conv ?? "home"), $("compose").value);
}

function grow() {
  const area = $("compose");
  area.style.height = "auto";
  area.style.height = Math.min(area.scrollHeight, innerHeight * 0.4) + "px";
  drawSend();
}

function drawSend() {
  const has = $("compose").value.trim() || drafts.photos.length;
  $("send").disabled = !has;
  const busy = open && ["starting", "streaming", "stopping"].includes(open.phase);
  $("hint").textContent = has && busy ? "Waits for the answer to end" : "";
  $("send").setAttribute("aria-label", busy ? "Send: waits for the answer to end" : "Send");
}

const touch = matchMedia("(pointer: coarse)").matches;
function focusCompose() {
  if (!touch && !document.querySelector("dialog[open]")) $("compose").focus();
}

async function submit() {
  const text = $("compose").value.trim();
  const photos = drafts.photos;
  const o = open;
  if ((!text && !photos.length) || !o) return;
  if (!o.talk.loaded) await refresh(); // a copy must know what was there before it
  if (!o.talk.loaded || !o.conv || o !== open) return;
  const wrong = tooMuch(photos);
  if (wrong) return flash(wrong);
  drafts.photos = [];
  $("compose").value = "";
  keepDraft();
  storage("set", drafts.text("home"), "");
  drawThumbs();
  grow();
  stuck = true;
  const item = {
    messageId: freshId(), conv: o.conv, session: o.draft ?? o.conv, text, images: photos.map(({ mimeType, bytes }) => ({ mimeType, bytes })),
    photos: photos.length, at: Math.max(Date.now(), (outbox.items.at(-1)?.at ?? 0) + 1), ...o.talk.origin(outbox.of(o.conv)), attempted: false, state: "waiting",
  };
  await outbox.add(item);
  for (const p of photos) URL.revokeObjectURL(p.url);
  if (!online) events.hurry();
}

$("composer").addEventListener("submit", (e) => {
  e.preventDefault();
  submit();
  if (!touch) $("compose").focus();
});
$("compose").addEventListener("input", () => {
  grow();
  keepDraft();
});
$("compose").addEventListener("keydown", (e) => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing && (!touch || e.ctrlKey || e.metaKey)) {
    e.preventDefault();
    submit();
  }
});

async function attach(files) {
  for (const file of files) {
    try {
      const photo = await prepare(file);
      photo.url = URL.createObjectURL(new Blob([photo.bytes], { type: photo.mimeType }));
      drafts.photos.push(photo);
    } catch (e) {
      flash(e.message);
    }
  }
  drawThumbs();
  drawSend();
  if (!touch) $("compose").focus();
}

function drawThumbs() {
  const thumbs = $("thumbs");
  thumbs.hidden = !drafts.photos.length;
  thumbs.replaceChildren(...drafts.photos.map((p, n) => h("li", null,
    h("img", { src: p.url, alt: `Photo ${n + 1}`, width: 72, height: 72 }),
    h("button", { type: "button", "aria-label": `Remove photo ${n + 1}`, onclick: () => {
      drafts.photos = drafts.photos.filter((x) => x !== p);
      URL.revokeObjectURL(p.url);
      drawThumbs();
      drawSend();
      $("compose").focus();
    } }, icon("close")))));
}

$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => {
  attach([...$("files").files]);
  $("files").value = "";
});
document.addEventListener("paste", (e) => {
  const files = [...(e.clipboardData?.files ?? [])];
  if (!files.length) return;
  e.preventDefault();
  attach(files);
});
let dragging = 0;
const dropZone = (show) => {
  $("drop").hidden = !show;
};
document.addEventListener("dragover", (e) => {
  if (!e.dataTransfer?.types.includes("Files")) return;
  e.preventDefault();
  dropZone(true);
  clearTimeout(dragging);
  dragging = setTimeout(dropZone, 300, false);
});
document.addEventListener("drop", (e) => {
  e.preventDefault();
  dropZone(false);
  attach([...(e.dataTransfer?.files ?? [])]);
});

// ---- what the agent can be told

function closePanel() {
  $("panel").hidden = true;
  $("more").setAttribute("aria-expanded", "false");
}

$("more").addEventListener("click", () => {
  const show = $("panel").hidden;
  closePanel();
  if (!show) return;
  $("panel").hidden = false;
  $("more").setAttribute("aria-expanded", "true");
  drawFeatures();
  $("panel").querySelector("button:enabled")?.focus();
});

const DID = {
  asked: "The agent was asked to end its answer.", stopped: "Stopped.", restarted: "The agent starts afresh.", reset: "Done. Your next message opens a new main conversation.",
  nothing: "There was nothing to do.",
};

async function tell(what) {
  const o = open;
  closePanel();
  if (!o?.conv || o.draft) return;
  try {
    const { did } = await api("/api/chat/" + what, { session: o.conv });
    say(DID[did] ?? did);
    if (did === "nothing" || did === "reset") flash(DID[did]);
    if (what === "reset" && o === open) {
      const id = freshId();
      history.pushState(null, "", "#/main/" + id);
      openDraft(id, "main");
      listSoon();
    }
  } catch (e) {
    flash(e.message);
  }
}
for (const b of $("panel").querySelectorAll("[data-do]")) b.addEventListener("click", () => tell(b.dataset.do));
$("interrupt").addEventListener("click", () => tell("interrupt"));

function drawFeatures() {
  const box = $("features");
  const all = Object.entries(open?.features ?? {});
  box.hidden = !all.length;
  const isOn = (v) => v === true || v === "on";
  box.replaceChildren(box.querySelector("legend"), ...all.map(([name, value]) => h("label", null,
    h("input", { type: "checkbox", checked: isOn(value), onchange: async (e) => {
      const on = e.target.checked;
      try {
        const { features } = await api("/api/chat/features", { session: open.conv, feature: name, value: typeof value === "boolean" ? on : on ? "on" : "off" });
        if (features) open.features = features;
      } catch (err) {
        flash(err.message);
      }
      drawFeatures();
    } }), h("span", null, name), typeof value !== "boolean" && value !== "on" && value !== "off" && h("em", null, String(value)))));
}

// ---- the frame: drawer, keys, coming back

function drawer(show) {
  document.body.classList.toggle("drawer", show);
  $("side-open").setAttribute("aria-expanded", String(show));
  const narrow = matchMedia("(max-width: 800px)").matches;
  document.querySelector("main").inert = show && narrow;
  $("side").inert = narrow && !show;
}
$("side-open").addEventListener("click", () => {
  drawer(true);
  $("new").focus();
});
$("side-close").addEventListener("click", () => {
  drawer(false);
  $("side-open").focus();
});
$("shade").addEventListener("click", () => drawer(false));
matchMedia("(max-width: 800px)").addEventListener("change", () => drawer(false));
$("new").addEventListener("click", () => {
  location.hash = "#/new/" + freshId();
});
$("skip").addEventListener("click", (e) => {
  e.preventDefault(); // the address says what is open
  $("compose").focus();
});

document.addEventListener("keydown", (e) => {
  if (e.key === "Escape") {
    if (!$("panel").hidden) {
      closePanel();
      $("more").focus();
    } else if (document.body.classList.contains("drawer")) {
      drawer(false);
      $("side-open").focus();
    }
  } else if (e.altKey && !e.ctrlKey && !e.metaKey && e.code === "KeyN") {
    e.preventDefault();
    $("new").click();
  } else if (e.altKey && (e.key === "ArrowUp" || e.key === "ArrowDown") && sessions.length) {
    e.preventDefault();
    const at = sessions.findIndex((s) => open?.ids.has(s.sessionId));
    const next = sessions[Math.max(0, Math.min(sessions.length - 1, at + (e.key === "ArrowUp" ? -1 : 1)))];
    if (next) location.hash = "#/c/" + next.sessionId;
  }
});
document.addEventListener("pointerdown", (e) => {
  if (!$("panel").hidden && !e.target.closest("#panel, #more")) closePanel();
});

let hiddenAt = 0;
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    hiddenAt = Date.now();
    keepDraft();
  } else if (hiddenAt && Date.now() - hiddenAt > 30_000) {
    // A phone that slept keeps a socket that only looks open.
    events.hurry(true);
    if (open) refresh();
    listSoon();
  } else events.hurry();
});
addEventListener("online", () => {
  events.hurry(true);
  outbox.hurry();
});
addEventListener("offline", () => drawBanner());
addEventListener("pagehide", keepDraft);
addEventListener("hashchange", route);

setViewer($("viewer"));
drawer(false);
await outbox.open();
route();
listSoon();
