// Two boxes, one Redis: the broker is killed and started again, the servers are killed, entries are read by a consumer
// group meanwhile; in the end every kept event of both boxes is in the group's hands, in order, once.
// usage: node mirror.mjs BEEBOX_CHATD REDIS_SERVER [MESSAGES]
import { mkdtempSync, mkdirSync, rmSync } from "node:fs";
import { connect } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Chatd, ask, check, end, endAll, followSse, freePort, pause, send, start, until } from "./common.mjs";

const [binary, redisServer, messagesText] = process.argv.slice(2);
const messages = Number(messagesText ?? 60);
const home = mkdtempSync(join(tmpdir(), "mirror-test."));
const redisPort = await freePort();
const GROUP = "readers";

/** As much of the protocol as a consumer needs. */
class Redis {
  constructor() {
    this.socket = connect(redisPort, "127.0.0.1");
    this.bytes = Buffer.alloc(0);
    this.waiting = [];
    this.socket.on("data", (d) => {
      this.bytes = Buffer.concat([this.bytes, d]);
      for (let found; this.waiting.length && (found = this.parse(0)); ) {
        this.bytes = this.bytes.subarray(found.next);
        const { done, fail } = this.waiting.shift();
        found.value instanceof Error ? fail(found.value) : done(found.value);
      }
    });
    const lost = () => this.waiting.splice(0).forEach(({ fail }) => fail(new Error("connection lost")));
    this.socket.on("error", lost).on("close", lost);
  }
  parse(at) {
    const eol = this.bytes.indexOf("\r\n", at);
    if (eol < 0) return null;
    const kind = String.fromCharCode(this.bytes[at]);
    const rest = this.bytes.toString("utf8", at + 1, eol);
    let next = eol + 2;
    if (kind === "+") return { value: rest, next };
    if (kind === "-") return { value: new Error(rest), next };
    if (kind === ":") return { value: Number(rest), next };
    const count = Number(rest);
    if (count < 0) return { value: null, next };
    if (kind === "$") {
      if (this.bytes.length < next + count + 2) return null;
      return { value: this.bytes.toString("utf8", next, next + count), next: next + count + 2 };
    }
    const list = [];
    for (let i = 0; i < count; i++) {
      const one = this.parse(next);
      if (!one) return null;
      list.push(one.value);
      next = one.next;
    }
    return { value: list, next };
  }
  do(...words) {
    const parts = words.map((w) => `$${Buffer.byteLength(String(w))}\r\n${w}\r\n`).join("");
    return new Promise((done, fail) => {
      if (this.socket.destroyed) return fail(new Error("connection lost"));
      this.waiting.push({ done, fail });
      this.socket.write(`*${words.length}\r\n${parts}`);
    });
  }
  close() {
    this.socket.destroy();
  }
}

let redis;
async function startRedis() {
  redis = start(redisServer, [
    "--port", redisPort, "--bind", "127.0.0.1", "--dir", home, "--appendonly", "yes", "--appendfsync", "everysec",
    "--save", "", "--daemonize", "no",
  ].map(String));
  await until("Redis answers", async () => {
    const probe = new Redis();
    const answer = await probe.do("PING").finally(() => probe.close());
    return answer === "PONG";
  });
}

/** The consumer: reads new entries of every stream of the set, keeps them by stream, acknowledges afterwards. */
const got = new Map();
let consuming = true;
async function consume() {
  while (consuming) {
    const link = new Redis();
    try {
      for (const key of got.keys()) await link.do("XGROUP", "CREATE", key, GROUP, "0", "MKSTREAM").catch((e) => check(e.message.startsWith("BUSYGROUP"), e.message));
      // What was handed to us before the connection was lost, then what is new.
      let from = "0";
      while (consuming) {
        for (const key of await link.do("SMEMBERS", "beebox:streams")) {
          if (!got.has(key)) {
            await link.do("XGROUP", "CREATE", key, GROUP, "0", "MKSTREAM");
            got.set(key, new Map());
          }
        }
        const keys = [...got.keys()];
        if (!keys.length) { await pause(50); continue; }
        const found = await link.do("XREADGROUP", "GROUP", GROUP, "one", "COUNT", 100, "BLOCK", 100, "STREAMS", ...keys, ...keys.map(() => from));
        let any = 0;
        for (const [key, entries] of found ?? []) {
          const mine = got.get(key);
          for (const [id, fields] of entries) {
            any++;
            const one = {};
            for (let i = 0; i < (fields ?? []).length; i += 2) one[fields[i]] = fields[i + 1];
            // The group hands an entry out again if its acknowledgement was lost: the same id must be the same entry.
            if (mine.has(id)) check(mine.get(id).data === one.data, `${key} ${id} changed`);
            else mine.set(id, one);
            await link.do("XACK", key, GROUP, id);
          }
        }
        if (from === "0" && !any) from = ">";
      }
    } catch (e) {
      if (!/connection lost|ECONN|LOADING/.test(e.message)) throw e;
      await pause(100);
    } finally {
      link.close();
    }
  }
}

async function main() {
  await startRedis();
  const boxes = [];
  for (const name of ["box-a", "box-b"]) {
    const box = join(home, name);
    mkdirSync(box);
    const server = new Chatd(binary, box, await freePort(), ["--mirror", `redis://127.0.0.1:${redisPort}/`]);
    server.name = name;
    await server.start();
    boxes.push(server);
  }
  const consumer = consume();
  consumer.catch(() => {});

  let deaths = 0, brokers = 0;
  const talk = async (server) => {
    for (let n = 0; n < messages; n++) {
      const id = `${server.name}-${n}`;
      await until(`message ${id} is recorded`, () => send(server.url, `message ${n} {{deltas=2 size=40}}`, id), 60_000);
    }
  };
  const talking = Promise.all(boxes.map(talk));
  let done = false;
  talking.finally(() => (done = true)).catch(() => {});
  // At least three of each, however fast the talking is.
  for (let round = 0; !done || round < 6; round++) {
    await pause(400);
    if (round % 2) {
      const signal = round % 4 === 1 ? "SIGKILL" : "SIGTERM";
      await end(redis, signal);
      await pause(600);
      await startRedis();
      brokers++;
    } else {
      const server = boxes[(round / 2) % 2];
      await server.kill9();
      await server.start();
      deaths++;
    }
    check(round < 400, "the talking ends");
  }
  await talking;

  // What the boxes have: all kept events, as an ordinary subscriber gets them.
  let total = 0;
  for (const server of boxes) {
    await until(`${server.name} is idle`, async () => {
      const page = JSON.parse((await ask(`${server.url}/api/chat/bootstrap`)).body);
      return page.status.phase === "idle" || page.status.phase === "dormant" ? (page.pending ?? []).length === 0 : false;
    }, 120_000);
    await pause(300);
    const hello = JSON.parse((await ask(`${server.url}/api/chat/bootstrap`)).body);
    const [epoch, head] = hello.cursor.split(".");
    const feed = followSse(`${server.url}/api/events?after=0`);
    await until(`${server.name} tells all`, () => feed.events.some((e) => e.id === hello.cursor || e.id === head));
    const kept = feed.events.filter((e) => e.id).map((e) => ({ n: Number(e.id.split(".").at(-1)), ...JSON.parse(e.data) })).filter((e) => e.n >= 1 && e.n <= Number(head) && e.event !== "hello");
    feed.stop();
    const key = `beebox:${server.name}:${epoch}`;
    await until(`the group has all of ${key}`, () => got.get(key)?.size >= kept.length, 60_000).catch((e) => {
      throw new Error(`${e.message}: ${got.get(key)?.size} of ${kept.length}\n${server.child.log}`);
    });
    const entries = [...got.get(key)];
    check(entries.length === kept.length, `${key}: ${entries.length} entries for ${kept.length} events`);
    kept.forEach((event, i) => {
      const [id, one] = entries[i];
      check(event.n === i + 1, `the box tells event ${event.n} at place ${i + 1}`);
      check(id === `${event.n}-0`, `place ${i + 1} holds ${id}`);
      check(one.event === event.event && one.at === event.at, `event ${id}: ${JSON.stringify(one)} for ${JSON.stringify(event)}`);
      check(JSON.stringify(JSON.parse(one.data)) === JSON.stringify(event.data), `data of ${id}`);
    });
    const accepted = new Set(kept.filter((e) => e.event === "chat-user-message").map((e) => e.n));
    check(accepted.size === messages, `${accepted.size} accepted messages of ${messages}`);
    total += kept.length;
    console.log(`${key}: ${kept.length} events, each once and in order`);
  }
  consuming = false;
  await consumer;
  check(got.size === 2, `streams ${[...got.keys()]}`);
  // A second copy is refused by the broker itself.
  const link = new Redis();
  const [key] = got.keys();
  const refused = await link.do("XADD", key, "1-0", "event", "x").then(() => false, (e) => /equal or smaller/.test(e.message));
  check(refused, "Redis refuses a second 1-0");
  link.close();
  console.log(`mirror-test: ${total} events of 2 boxes through ${deaths} kill -9 of servers and ${brokers} restarts of the broker (every other by kill -9): all good`);
}

const limit = setTimeout(() => { console.error("mirror-test: out of time"); endAll().finally(() => process.exit(1)); }, 240_000);
try {
  await main();
} catch (e) {
  console.error(`mirror-test: ${e.stack}`);
  process.exitCode = 1;
} finally {
  clearTimeout(limit);
  consuming = false;
  await endAll();
  rmSync(home, { recursive: true, force: true });
}
