// Cost against size: transcript length, sessions, subscribers, journal size, open connections. Prints a table and writes
// target/growth/growth.html with a plot each. Sizes are made beforehand in the server's own formats, with the server down.
// usage: node growth.mjs BEEBOX_CHATD [--quick | --huge]
import { execFileSync } from "node:child_process";
import { createWriteStream, mkdtempSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { once } from "node:events";
import { connect } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Chatd, ask, check, end, endAll, followSse, freePort, send, until } from "./common.mjs";

const [binary, size] = process.argv.slice(2);
const quick = size === "--quick";
const home = mkdtempSync(join(tmpdir(), "growth."));
const REPEATS = quick ? 15 : 40;
const rows = [];

const median = (list) => [...list].sort((a, b) => a - b)[Math.floor(list.length / 2)];
async function timed(act, repeats = REPEATS) {
  const took = [];
  for (let i = 0; i < repeats; i++) {
    const began = process.hrtime.bigint();
    await act(i);
    took.push(Number(process.hrtime.bigint() - began) / 1e6);
  }
  return median(took);
}
const rssMiB = (server) => Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${server.child.pid}/status`, "utf8"))[1]) / 1024;
function note(curve, n, figures) {
  rows.push({ curve, n, ...figures });
  console.log(`${curve.padEnd(14)} ${String(n).padStart(9)}  ${Object.entries(figures).map(([k, v]) => `${k} ${v.toFixed(2)}`).join("  ")}`);
}
let boxes = 0;
async function newBox(args = []) {
  const box = join(home, `box-${boxes++}`);
  mkdirSync(join(box, ".beebox"), { recursive: true });
  return new Chatd(binary, box, await freePort(), args);
}
async function startTimed(server) {
  const began = performance.now();
  await server.start();
  return performance.now() - began;
}
const get = async (server, path) => {
  const answer = await ask(`${server.url}${path}`, { timeout: 120_000 });
  check(answer.status === 200, `${path}: ${answer.status} ${answer.body.slice(0, 200)}`);
  return answer;
};
/** First send, so that journal, transcript folder and session `main` exist; resolves when its turn ended. */
async function converse(server, id = "first") {
  const answer = await send(server.url, "hello", id);
  await until("the turn ends", async () => JSON.parse((await get(server, "/api/chat/bootstrap")).body).pending.length === 0);
  return answer;
}
const uuid = (n) => `00000000-0000-4000-8000-${String(n).padStart(12, "0")}`;
async function writeTranscript(path, session, lines) {
  const out = createWriteStream(path);
  let parent = null;
  for (let i = 0; i < lines; i++) {
    const id = uuid(i + 1);
    const user = i % 2 === 0;
    const message = user ? { role: "user", content: `question ${i} ${"x".repeat(200)}` } : { role: "assistant", content: [{ type: "text", text: `answer ${i} ${"y".repeat(400)}` }] };
    const line = { parentUuid: parent, isSidechain: false, userType: "external", cwd: "/", sessionId: session, version: "2.0.0", type: user ? "user" : "assistant", message, uuid: id, timestamp: "2026-01-01T00:00:00.000Z" };
    parent = id;
    if (!out.write(JSON.stringify(line) + "\n")) await once(out, "drain");
  }
  out.end();
  await once(out, "finish");
}
const projects = (server) => join(server.box, ".beebox", "agent", "projects", server.box.replace(/[^0-9A-Za-z]/g, "-"));

async function transcriptLength() {
  for (const n of quick ? [1e3, 1e4, 1e5] : [1e3, 1e4, 1e5, 3e5]) {
    const server = await newBox();
    const session = uuid(999);
    mkdirSync(projects(server), { recursive: true });
    await writeTranscript(join(projects(server), `${session}.jsonl`), session, n);
    await server.start();
    const began = performance.now();
    await get(server, `/api/chat/history?session=${session}&tail=50`);
    const first = performance.now() - began;
    const tail = await timed(() => get(server, `/api/chat/history?session=${session}&tail=50`));
    const page = await timed((i) => get(server, `/api/chat/history?session=${session}&offset=${Math.floor((n / REPEATS) * i)}&limit=50`));
    note("transcript", n, { "first tail ms": first, "tail ms": tail, "page ms": page, "RSS MiB": rssMiB(server) });
    await end(server.child);
    rmSync(server.box, { recursive: true });
  }
}

async function sessionsCount() {
  for (const n of quick ? [10, 100, 1000] : [10, 100, 1000, 5000]) {
    const server = await newBox();
    mkdirSync(projects(server), { recursive: true });
    for (let i = 0; i < n; i++) await writeTranscript(join(projects(server), `${uuid(i)}.jsonl`), uuid(i), 4);
    const started = await startTimed(server);
    const list = await timed(() => get(server, "/api/chat/sessions"));
    const one = await timed((i) => get(server, `/api/chat/history?session=${uuid(i % n)}&tail=50`));
    note("sessions", n, { "start ms": started, "list ms": list, "history ms": one, "RSS MiB": rssMiB(server) });
    await end(server.child);
    rmSync(server.box, { recursive: true });
  }
}

async function journalSize() {
  const sizes = quick ? [1e3, 1e4, 1e5] : size === "--huge" ? [1e3, 1e4, 1e5, 1e6, 1e7] : [1e3, 1e4, 1e5, 1e6];
  for (const n of sizes) {
    const server = await newBox();
    await server.start();
    await converse(server);
    await end(server.child, "SIGTERM");
    // Young events of 200 bytes: nothing of them is old enough to be pruned.
    execFileSync("sqlite3", [join(server.box, ".beebox", "journal.db"), `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i<${n}) INSERT INTO event(event, data) SELECT 'chat-note', '{"n":' || i || ',"text":"${"z".repeat(170)}"}' FROM n; SELECT 1;`]);
    const started = await startTimed(server);
    const began = performance.now();
    const feed = followSse(`${server.url}/api/events?after=${n - 100}`);
    await until("the last hundred", () => feed.events.length >= 100, 60_000, 1);
    const behind = performance.now() - began;
    feed.stop();
    const sent = await timed((i) => send(server.url, "hi {{deltas=1}}", `m${i}`), Math.min(REPEATS, 20));
    note("journal", n, { "start ms": started, "catch up 100 ms": behind, "send ms": sent, "RSS MiB": rssMiB(server) });
    await end(server.child);
    rmSync(server.box, { recursive: true });
  }
}

/** n open sockets that were sent `head`. */
async function openMany(server, n, head) {
  const sockets = [];
  for (let i = 0; i < n; i++) {
    const socket = connect(server.port, "127.0.0.1");
    socket.on("error", () => {});
    socket.resume();
    sockets.push(socket);
    await once(socket, "connect");
    if (head) socket.write(head);
  }
  return sockets;
}
async function held(curve, sizes, head) {
  const server = await newBox();
  await server.start();
  await converse(server);
  for (const n of sizes) {
    const sockets = await openMany(server, n, head);
    const status = await timed(() => get(server, "/healthz"));
    const feed = followSse(`${server.url}/api/events`);
    await until("hello", () => feed.events.length > 0);
    let seen = 0;
    const told = await timed(async (i) => {
      await send(server.url, "hi {{deltas=1}}", `${curve}-${n}-${i}`);
      seen++;
      // Our own reader polls each turn of the event loop, so that its clock is not a timer's.
      while (feed.events.filter((e) => e.data.includes('"chat-user-message"')).length < seen) await new Promise(setImmediate);
    }, Math.min(REPEATS, 20));
    note(curve, n, { "healthz ms": status, "send to event ms": told, "RSS MiB": rssMiB(server) });
    feed.stop();
    sockets.forEach((s) => s.destroy());
    await until("the turns end", async () => JSON.parse((await get(server, "/api/chat/bootstrap")).body).pending.length === 0, 60_000);
  }
  await end(server.child);
  rmSync(server.box, { recursive: true });
}

function html() {
  const plots = [...new Set(rows.map((r) => r.curve))].map((curve) => {
    const mine = rows.filter((r) => r.curve === curve);
    const names = Object.keys(mine[0]).filter((k) => k !== "curve" && k !== "n");
    const xs = mine.map((r) => Math.log10(Math.max(1, r.n)));
    const top = Math.max(...mine.flatMap((r) => names.map((k) => r[k]))) * 1.1;
    const x = (v) => 50 + ((v - xs[0]) / (xs.at(-1) - xs[0] || 1)) * 380;
    const y = (v) => 210 - (Math.log10(Math.max(v, 0.1) * 10) / Math.log10(top * 10)) * 190;
    const colours = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];
    const lines = names.map((k, i) => `<polyline fill="none" stroke="${colours[i]}" stroke-width="2" points="${mine.map((r, j) => `${x(xs[j])},${y(r[k])}`).join(" ")}"/><text x="440" y="${30 + i * 16}" fill="${colours[i]}">${k}</text>`).join("");
    const ticks = mine.map((r, j) => `<text x="${x(xs[j])}" y="228" text-anchor="middle">${r.n.toLocaleString("en")}</text>`).join("");
    const marks = [0.1, 1, 10, 100, 1000].filter((v) => v < top).map((v) => `<line x1="50" x2="430" y1="${y(v)}" y2="${y(v)}" stroke="#ddd"/><text x="45" y="${y(v) + 4}" text-anchor="end">${v}</text>`).join("");
    return `<h2>${curve}</h2><svg viewBox="0 0 600 240" width="800" font-size="11" font-family="sans-serif">${marks}${lines}${ticks}</svg>`;
  });
  return `<!doctype html><meta charset="utf-8"><title>Growth</title><style>body{font-family:sans-serif;max-width:60em;margin:2em auto}</style><h1>Cost against size</h1><p>${binary}; medians; both axes logarithmic (ms, MiB).</p>${plots.join("\n")}`;
}

const limit = setTimeout(() => { console.error("bench-growth: out of time"); endAll().finally(() => process.exit(1)); }, 1_500_000);
try {
  const open = quick ? [0, 100, 400] : [0, 100, 400, 900];
  for (const part of [transcriptLength, sessionsCount, journalSize, () => held("subscribers", open, "GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"), () => held("connections", open, "")]) {
    try {
      await part();
    } catch (e) {
      console.error(`bench-growth: ${e.stack}`);
      process.exitCode = 1;
      await endAll();
    }
  }
  mkdirSync("target/growth", { recursive: true });
  writeFileSync("target/growth/growth.html", html());
  writeFileSync("target/growth/growth.json", JSON.stringify(rows, null, 1));
  console.log("plots: target/growth/growth.html");
} finally {
  clearTimeout(limit);
  await endAll();
  rmSync(home, { recursive: true, force: true });
}
