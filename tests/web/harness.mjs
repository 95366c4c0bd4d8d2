// What the browser tests share: a real server on a box of its own, a real Chromium, photos, transcripts, waits with a limit.
import { spawn } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync, realpathSync, rmSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";
import zlib from "node:zlib";
import { chromium } from "playwright-core";

const ROOT = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../..");
const FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"];

/** The server under test: BIN, else the newest build. */
export function binary() {
  const name = process.env.CARGO_TARGET_DIR ?? path.join(ROOT, "target");
  const all = process.env.BIN ? [process.env.BIN] : ["release", "debug"].map((p) => path.join(name, p, "beebox-chatd")).filter(existsSync);
  if (!all.length || !existsSync(all[0])) throw new Error("no beebox-chatd: build it, or name it in BIN");
  return all.sort((a, b) => statSync(b).mtimeMs - statSync(a).mtimeMs)[0];
}

export const sleep = (ms) => new Promise((r) => setTimeout(r, ms));

/** Waits until `probe` answers something true; fails with `what` after the limit. */
export async function until(what, probe, limitMs = 15_000) {
  const end = Date.now() + limitMs;
  for (;;) {
    const got = await probe();
    if (got) return got;
    if (Date.now() > end) throw new Error(`not within ${limitMs} ms: ${what}`);
    await sleep(25);
  }
}

const servers = new Set();
process.on("exit", () => servers.forEach((s) => s.child?.kill("SIGKILL")));

/** A server on a fresh box; `again()` starts it anew on the same box and port. */
export async function server(args = []) {
  const dir = realpathSync(mkdtempSync(path.join(tmpdir(), "beebox-web-")));
  const self = {
    box: path.join(dir, "box"), port: 0, url: "", log: "", child: null,
    home: path.join(dir, "box", ".beebox", "agent"),
    /** Where the transcript of a session lies. */
    transcript: (id) => path.join(self.home, "projects", self.box.replace(/[^0-9A-Za-z]/g, "-"), id + ".jsonl"),
    write(id, lines) {
      const file = self.transcript(id);
      mkdirSync(path.dirname(file), { recursive: true });
      writeFileSync(file, lines.map((l) => JSON.stringify(l) + "\n").join(""));
    },
    async again() {
      const child = spawn(binary(), ["--box", self.box, "--live-max", "8", "--listen", `127.0.0.1:${self.port}`, ...args], {
        stdio: ["ignore", "pipe", "pipe"], env: { ...process.env, RUST_LOG: process.env.RUST_LOG ?? "warn" },
      });
      self.child = child;
      let out = "";
      child.stdout.on("data", (d) => (out += d));
      child.stderr.on("data", (d) => (self.log = (self.log + d).slice(-20_000)));
      const line = await until("the server listens:\n" + self.log, () => {
        if (child.exitCode !== null) throw new Error(`the server ended with ${child.exitCode}: ${self.log}`);
        return /listening on (http:\S+)/.exec(out);
      });
      self.url = line[1];
      self.port = Number(new URL(self.url).port);
    },
    async end(signal = "SIGTERM") {
      const child = self.child;
      if (!child || child.exitCode !== null || child.signalCode !== null) return;
      const gone = new Promise((r) => child.once("exit", r));
      child.kill(signal);
      const hard = setTimeout(() => child.kill("SIGKILL"), 8000);
      await gone;
      clearTimeout(hard);
    },
    async close() {
      self.child?.kill("SIGTERM");
      await self.end("SIGTERM");
      servers.delete(self);
      rmSync(dir, { recursive: true, force: true });
    },
    get: async (route) => (await fetch(self.url + route)).json(),
    post: async (route, body) => (await fetch(self.url + route, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) })).json(),
  };
  servers.add(self);
  mkdirSync(self.box, { recursive: true });
  return self;
}

let browser;
export async function launch() {
  const executablePath = process.env.CHROMIUM ?? "/usr/bin/chromium";
  browser ??= await chromium.launch({ executablePath, args: FLAGS });
  return browser;
}
export async function quit() {
  await browser?.close();
  browser = null;
}

/** A window of its own; `faults` gathers what no page of ours may ever say, `foreign` requests to another origin. */
export async function windowOn(url, { width = 1280, height = 800, dark = false, phone = false } = {}) {
  const context = await (await launch()).newContext({
    viewport: { width, height }, colorScheme: dark ? "dark" : "light", hasTouch: phone, isMobile: phone, deviceScaleFactor: phone ? 2 : 1,
    locale: "en-GB",
  });
  context.setDefaultTimeout(15_000);
  const faults = [];
  const foreign = [];
  context.on("page", (page) => {
    page.on("pageerror", (e) => faults.push(`${e.message}\n${e.stack}`));
    page.on("console", (m) => {
      // A refused connection while the server is down is said by the browser itself.
      if (m.type() === "error" && !/Failed to load resource|WebSocket connection to/.test(m.text())) faults.push(m.text());
    });
    page.on("request", (r) => {
      if (!r.url().startsWith(url) && !/^(blob|data):/.test(r.url())) foreign.push(r.url());
    });
  });
  const page = await context.newPage();
  return { context, page, faults, foreign };
}

/** A noisy PNG, so that it does not shrink to nothing. */
export function png(width, height, seed = 1) {
  let s = seed * 2654435761;
  const raw = Buffer.alloc((width * 3 + 1) * height);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      s = (Math.imul(s, 1103515245) + 12345) >>> 0;
      const at = y * (width * 3 + 1) + 1 + x * 3;
      raw[at] = (x * 255) / width;
      raw[at + 1] = ((seed * 40) % 256) ^ (s >>> 28);
      raw[at + 2] = (y * 255) / height;
    }
  }
  const chunk = (type, data) => {
    const body = Buffer.concat([Buffer.from(type), data]);
    const out = Buffer.alloc(body.length + 8);
    out.writeUInt32BE(data.length, 0);
    body.copy(out, 4);
    out.writeUInt32BE(zlib.crc32(body), body.length + 4);
    return out;
  };
  const head = Buffer.alloc(13);
  head.writeUInt32BE(width, 0);
  head.writeUInt32BE(height, 4);
  head.set([8, 2, 0, 0, 0], 8);
  return Buffer.concat([Buffer.from([137, 80, 78, 71, 13, 10, 26, 10]), chunk("IHDR", head), chunk("IDAT", zlib.deflateSync(raw)), chunk("IEND", Buffer.alloc(0))]);
}

const uuid = (n) => `00000000-0000-4000-8000-${String(n).padStart(12, "0")}`;
const at = (n) => new Date(Date.UTC(2026, 0, 5, 8) + n * 20_000).toISOString();

/** A line a person wrote, as the agent keeps it. */
export const userLine = (session, n, content) => ({
  parentUuid: null, isSidechain: false, type: "user", message: { role: "user", content }, uuid: uuid(n), timestamp: at(n), cwd: "/", sessionId: session, version: "2.1.332",
});
/** A line of the agent. */
export const agentLine = (session, n, content) => ({
  parentUuid: null, isSidechain: false, type: "assistant",
  message: { id: "msg_" + n, type: "message", role: "assistant", model: "claude-opus-5-5", content: typeof content === "string" ? [{ type: "text", text: content }] : content },
  uuid: uuid(n), timestamp: at(n), cwd: "/", sessionId: session, version: "2.1.332",
});
