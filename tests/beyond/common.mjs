// What the tests of "beyond one box" share: servers to start, kill and end by their own pid, requests, Server-Sent Events.
import { spawn } from "node:child_process";
import http from "node:http";
import https from "node:https";
import { once } from "node:events";
import { createServer } from "node:net";

export const running = new Set();

/** Starts a program, kept for the clean-up at the end. */
export function start(program, args, options = {}) {
  const child = spawn(program, args, { stdio: ["ignore", "pipe", "pipe"], ...options });
  child.log = "";
  child.stdout.on("data", (d) => (child.log += d));
  child.stderr.on("data", (d) => (child.log += d));
  child.exited = once(child, "exit").catch(() => {});
  running.add(child);
  child.exited.then(() => running.delete(child));
  return child;
}

export async function end(child, signal = "SIGKILL") {
  if (child.exitCode === null && child.signalCode === null) {
    child.kill(signal);
    await child.exited;
  }
}

export async function endAll() {
  await Promise.all([...running].map((child) => end(child)));
}

export const pause = (ms) => new Promise((done) => setTimeout(done, ms));

/** Asks again until the answer is truthy; fails after `limitMs`, saying what was awaited. */
export async function until(what, ask, limitMs = 30_000, everyMs = 50) {
  const deadline = Date.now() + limitMs;
  let last;
  while (Date.now() < deadline) {
    try {
      const answer = await ask();
      if (answer) return answer;
    } catch (e) {
      last = e;
    }
    await pause(everyMs);
  }
  throw new Error(`not within ${limitMs} ms: ${what}${last ? ` (${last.message})` : ""}`);
}

export async function freePort() {
  const probe = createServer().listen(0, "127.0.0.1");
  await once(probe, "listening");
  const { port } = probe.address();
  probe.close();
  await once(probe, "close");
  return port;
}

/** A server of ours on a box; `restart` comes back on the same box and port. */
export class Chatd {
  constructor(binary, box, port, args = []) {
    Object.assign(this, { binary, box, port, args });
  }
  async start() {
    this.child = start(this.binary, ["--box", this.box, "--listen", `127.0.0.1:${this.port}`, ...this.args]);
    await until(`${this.box} listens`, () => {
      if (this.child.exitCode !== null) throw new Error(this.child.log);
      return this.child.log.includes("listening on ");
    }, 30_000, 1);
  }
  async kill9() {
    await end(this.child, "SIGKILL");
  }
  get url() {
    return `http://127.0.0.1:${this.port}`;
  }
}

/** One request; resolves to {status, headers, body}. */
export function ask(url, { method = "GET", headers = {}, body, timeout = 15_000, ...rest } = {}) {
  const { request } = url.startsWith("https:") ? https : http;
  return new Promise((done, fail) => {
    const sent = request(url, { method, headers, agent: false, ...rest }, (answer) => {
      let text = "";
      answer.setEncoding("utf8").on("data", (d) => (text += d));
      answer.on("end", () => done({ status: answer.statusCode, headers: answer.headers, body: text }));
      answer.on("error", fail);
    });
    sent.setTimeout(timeout, () => sent.destroy(new Error("timeout")));
    sent.on("error", fail);
    sent.end(body);
  });
}

export async function send(base, message, messageId, rest = {}, options = {}) {
  const answer = await ask(`${base}/api/chat/send`, {
    ...options,
    method: "POST",
    headers: { "Content-Type": "application/json", ...options.headers },
    body: JSON.stringify({ session: "main", message, messageId, ...rest }),
  });
  if (answer.status !== 200) throw new Error(`${answer.status}: ${answer.body}`);
  return JSON.parse(answer.body);
}

/** Follows Server-Sent Events: `events` fills with {id, event, data}. */
export function followSse(url, options = {}) {
  const { request } = url.startsWith("https:") ? https : http;
  const seen = { events: [], closed: false };
  const { headers, ...rest } = options;
  const sent = request(url, { agent: false, headers: { Accept: "text/event-stream", ...headers }, ...rest }, (answer) => {
    seen.status = answer.statusCode;
    let text = "";
    answer.setEncoding("utf8").on("data", (d) => {
      text += d;
      for (let at; (at = text.indexOf("\n\n")) >= 0; text = text.slice(at + 2)) {
        const one = {};
        for (const line of text.slice(0, at).split("\n")) {
          const colon = line.indexOf(":");
          if (colon > 0) one[line.slice(0, colon)] = line.slice(colon + 1).replace(/^ /, "");
        }
        if (one.data) seen.events.push(one);
      }
    });
    answer.on("close", () => (seen.closed = true));
    answer.on("error", () => (seen.closed = true));
  });
  sent.on("error", () => (seen.closed = true));
  sent.end();
  seen.stop = () => sent.destroy();
  return seen;
}

export function check(fact, words) {
  if (!fact) throw new Error(`not so: ${words}`);
}
