// Two boxes behind one nginx that ends TLS and routes by host name: the page, sends, history, both kinds of event
// stream, strangers refused, and a server killed behind it.
// usage: node proxy.mjs BEEBOX_CHATD NGINX
import { execFileSync } from "node:child_process";
import { createHash, randomBytes } from "node:crypto";
import { mkdtempSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { connect as tlsConnect } from "node:tls";
import { Chatd, ask, check, endAll, followSse, freePort, send, start, until } from "./common.mjs";

const [binary, nginx] = process.argv.slice(2);
const home = mkdtempSync(join(tmpdir(), "proxy-test."));
const HOSTS = ["box-a.localhost", "box-b.localhost"];

async function main() {
  execFileSync("openssl", ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=boxes", "-addext", `subjectAltName=${HOSTS.map((h) => `DNS:${h}`).join(",")}`, "-keyout", join(home, "key.pem"), "-out", join(home, "cert.pem")], { stdio: "pipe" });
  const ca = readFileSync(join(home, "cert.pem"));
  const port = await freePort();
  const boxes = [];
  for (const host of HOSTS) {
    mkdirSync(join(home, host));
    const server = new Chatd(binary, join(home, host), await freePort(), ["--public-url", `https://${host}:${port}`]);
    server.host = host;
    server.base = `https://${host}:${port}`;
    await server.start();
    boxes.push(server);
  }
  const conf = execFileSync("scripts/proxy-nginx/make-conf", [`127.0.0.1:${port}`, join(home, "cert.pem"), join(home, "key.pem"), ...boxes.map((b) => `${b.host}=${b.port}`)], { env: { ...process.env, WHOLE: home } });
  writeFileSync(join(home, "nginx.conf"), conf);
  const proxy = start(nginx, ["-p", home, "-c", join(home, "nginx.conf")]);
  // The name goes to loopback whatever the resolver thinks; the certificate is checked against it.
  const lookup = (_name, options, done) => (options.all ? done(null, [{ address: "127.0.0.1", family: 4 }]) : done(null, "127.0.0.1", 4));
  const tls = { ca, lookup };
  const via = (b, path, options = {}) => ask(`${b.base}${path}`, { ...tls, ...options });
  await until("the proxy answers", async () => {
    if (proxy.exitCode !== null) throw new Error(proxy.log);
    return (await via(boxes[0], "/healthz")).status === 200;
  });

  /** A WebSocket through the proxy: resolves to {messages, socket} after the handshake. */
  const webSocket = (b, origin = b.base, path = "/api/events") =>
    new Promise((done, fail) => {
      const key = randomBytes(16).toString("base64");
      const socket = tlsConnect({ host: "127.0.0.1", port, servername: b.host, ca }, () =>
        socket.write(`GET ${path} HTTP/1.1\r\nHost: ${b.host}:${port}\r\nOrigin: ${origin}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: ${key}\r\nSec-WebSocket-Version: 13\r\n\r\n`),
      );
      const link = { socket, messages: [], closed: false };
      let bytes = Buffer.alloc(0), head = "";
      socket.on("data", (d) => {
        bytes = Buffer.concat([bytes, d]);
        if (!head) {
          const at = bytes.indexOf("\r\n\r\n");
          if (at < 0) return;
          head = bytes.toString("latin1", 0, at);
          bytes = bytes.subarray(at + 4);
          link.status = Number(head.split(" ")[1]);
          const expected = createHash("sha1").update(`${key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11`).digest("base64");
          if (link.status === 101) check(head.includes(expected), "the handshake answers our key");
          done(link);
        }
        while (link.status === 101 && bytes.length >= 2) {
          let len = bytes[1] & 127, at = 2;
          if (len === 126) { if (bytes.length < 4) return; len = bytes.readUInt16BE(2); at = 4; }
          else if (len === 127) { if (bytes.length < 10) return; len = Number(bytes.readBigUInt64BE(2)); at = 10; }
          if (bytes.length < at + len) return;
          if ((bytes[0] & 15) === 1) link.messages.push(JSON.parse(bytes.toString("utf8", at, at + len)));
          bytes = bytes.subarray(at + len);
        }
      });
      socket.on("close", () => (link.closed = true));
      socket.on("error", (e) => { link.closed = true; fail(e); });
    });

  for (const b of boxes) {
    const page = await via(b, "/");
    check(page.status === 200 && /<!doctype html/i.test(page.body), `page of ${b.host}: ${page.status}`);
    check(/default-src/.test(page.headers["content-security-policy"] ?? ""), "the page keeps its policy");
    const ws = await webSocket(b);
    check(ws.status === 101, `WebSocket of ${b.host}: ${ws.status}`);
    const sse = followSse(`${b.base}/api/events`, tls);
    await until("both streams say hello", () => ws.messages.length > 0 && sse.events.length > 0);
    const answer = await send(b.base, `hello ${b.host} {{deltas=5 delta_ms=20}}`, `first-${b.host}`, {}, { ...tls, headers: { Origin: b.base } });
    const isEnd = (e) => e.event === "chat-complete";
    await until("the turn's end over WebSocket", () => ws.messages.some(isEnd));
    await until("the turn's end over SSE", () => sse.events.some((e) => isEnd(JSON.parse(e.data))));
    const history = await via(b, `/api/chat/history?session=${answer.sessionId}&tail=50`);
    check(history.status === 200 && history.body.includes(`hello ${b.host}`), `history of ${b.host}`);
    const other = boxes.find((o) => o !== b);
    check(!history.body.includes(`hello ${other.host}`), "each box has its own");
    // An 8 MiB photo passes whole.
    const photo = Buffer.concat([Buffer.from("89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489", "hex"), randomBytes(8 << 20)]).toString("base64");
    const big = await ask(`${b.base}/api/chat/send`, { ...tls, method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ session: "main", message: "see [image#1]", messageId: `photo-${b.host}`, images: [{ id: 1, mimeType: "image/png", dataBase64: photo }] }), timeout: 60_000 });
    check(big.status === 200, `photo: ${big.status} ${big.body.slice(0, 200)}`);
    // Strangers: a page of another origin, by request and by stream.
    const foreign = await via(b, "/api/chat/send", { method: "POST", headers: { "Content-Type": "application/json", Origin: "https://evil.example" }, body: "{}" });
    check(foreign.status === 403 && foreign.body.includes("forbidden_origin"), `foreign origin: ${foreign.status}`);
    const foreignWs = await webSocket(b, "https://evil.example");
    check(foreignWs.status === 403, `WebSocket of a foreign origin: ${foreignWs.status}`);
    foreignWs.socket.destroy();
    ws.socket.destroy();
    sse.stop();
    console.log(`${b.host}: page, send, history, photo, WebSocket and SSE over TLS; foreign origins refused`);
  }

  // Strange hosts: the proxy sends them to no box, and a server that is asked under one refuses it itself.
  const [a] = boxes;
  const lost = await via(a, "/api/chat/bootstrap", { servername: a.host, headers: { Host: "evil.example" } });
  check(lost.status === 421, `foreign Host at the proxy: ${lost.status}`);
  const behind = await ask(`${a.url}/api/chat/bootstrap`, { headers: { Host: "evil.example" } });
  check(behind.status === 403 && behind.body.includes("forbidden_host"), `foreign Host at the server: ${behind.status}`);
  const neighbour = await ask(`${a.url}/api/chat/bootstrap`, { headers: { Host: `${boxes[1].host}:${port}` } });
  check(neighbour.status === 403, `the neighbour's Host at the server: ${neighbour.status}`);
  console.log("foreign hosts: 421 by the proxy, 403 by the server");

  // kill -9 behind the proxy: 502 meanwhile, the other box undisturbed, then everything is there, from the cursor on.
  await until("the photo's turn ends", async () => (JSON.parse((await via(a, "/api/chat/bootstrap")).body).pending ?? []).length === 0);
  const cursor = JSON.parse((await via(a, "/api/chat/bootstrap")).body).cursor;
  const cut = await webSocket(a);
  await send(a.base, "slow {{deltas=40 delta_ms=50}}", "slow", {}, tls);
  await a.kill9();
  await until("the stream is cut", () => cut.closed);
  check((await via(a, "/healthz")).status === 502, "502 while the server is away");
  check((await via(boxes[1], "/healthz")).status === 200, "the other box is served");
  await a.start();
  const back = await webSocket(a, a.base, `/api/events?after=${cursor}`);
  const again = await send(a.base, "slow {{deltas=40 delta_ms=50}}", "slow", {}, tls);
  check(again.deduplicated === true, "a repeat after the return is the same message");
  // The agent died with the server: what it had recorded by then is told as broken off, what not is sent again.
  const over = (m) => m.event === "chat-complete" || (m.event === "chat-turn-failed" && m.data.willRetry === false);
  await until("the turn ends after the return", () => back.messages.some(over));
  const said = back.messages.filter((m) => m.event === "chat-user-message");
  check(said.length === 1, `the message is told once: ${said.length}`);
  back.socket.destroy();
  console.log("kill -9 behind the proxy: 502, return, the stream goes on from its cursor, one message");
  console.log("proxy-test: all good");
}

const limit = setTimeout(() => { console.error("proxy-test: out of time"); endAll().finally(() => process.exit(1)); }, 150_000);
try {
  await main();
} catch (e) {
  console.error(`proxy-test: ${e.stack}`);
  process.exitCode = 1;
} finally {
  clearTimeout(limit);
  await endAll();
  rmSync(home, { recursive: true, force: true });
}
// Sockets that a killed server left half open would keep the loop alive.
process.exit();
