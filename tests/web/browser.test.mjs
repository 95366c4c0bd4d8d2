// The page in a real Chromium against the real server. Run by scripts/browser-test; SHOTS=DIR keeps screenshots.
import test, { after, before, describe } from "node:test";
import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { request } from "node:http";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import path from "node:path";
import { agentLine, launch, png, quit, server, sleep, until, userLine, windowOn } from "./harness.mjs";

const KIB = 1024;
const SHOTS = process.env.SHOTS;
if (SHOTS) mkdirSync(SHOTS, { recursive: true });
const shot = async (page, name) => {
  if (SHOTS) await page.screenshot({ path: path.join(SHOTS, name + ".png") });
};
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

/** Accessibility faults that a machine can find, contrast included. */
async function accessible(page, where) {
  await page.evaluate(axe);
  const found = await page.evaluate(async () => {
    const { violations } = await globalThis.axe.run(document, { 
      runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"],
      rules: { "heading-order": { enabled: false } }, // an agent's answer may begin with any heading
    });
    return violations.map((v) => `${v.id}: ${v.help}: ${v.nodes.map((n) => n.target.join(" ")).slice(0, 4).join(", ")}`);
  });
  assert.deepEqual(found, [], where);
}

const say = async (page, text) => {
  await page.fill("#compose", text);
  await page.press("#compose", "Enter");
};
const phase = (page, word) => page.waitForSelector(`#state[data-phase=${word}]`);
const users = (page) => page.locator("#list article.user");
const times = (page, text) => page.locator("#list article.user .bubble", { hasText: text }).count();
const answered = (page, text) => page.locator("#list article.agent .md", { hasText: text }).first().waitFor();
/** Counts `token` among the shown messages every 50 ms, across reloads, and keeps the counts. */
async function sample(page, token) {
  const seen = [];
  await page.exposeFunction("sampled", (n) => seen.push(n));
  const start = (t) => setInterval(() => globalThis.sampled([...document.querySelectorAll("#list article.user .bubble")].filter((b) => b.textContent.includes(t)).length), 50);
  await page.addInitScript(start, token);
  await page.evaluate(start, token);
  return seen;
}

describe("the page", { timeout: 400_000 }, () => {
  let box;
  before(async () => {
    box = await server();
    await box.again();
  });
  after(async () => {
    await box.close();
    await quit();
  });
  const tab = async (options) => {
    const w = await windowOn(box.url, options);
    w.fresh = async () => {
      await w.page.goto(`${box.url}/#/new/${Math.random().toString(36).slice(2)}`);
      await w.page.reload();
      await w.page.waitForSelector("#welcome:not([hidden])");
    };
    w.done = async () => {
      assert.deepEqual(w.faults, []);
      assert.deepEqual(w.foreign, []);
      await w.context.close();
    };
    return w;
  };

  test("a first load is small, and the first message on a fresh box is answered", async () => {
    const w = await tab();
    const cdp = await w.context.newCDPSession(w.page);
    await cdp.send("Network.enable");
    let bytes = 0;
    const files = new Map();
    cdp.on("Network.requestWillBeSent", (e) => files.set(e.requestId, new URL(e.request.url).pathname));
    const sizes = [];
    cdp.on("Network.loadingFinished", (e) => {
      bytes += e.encodedDataLength;
      sizes.push(`${files.get(e.requestId)} ${e.encodedDataLength}`);
    });
    await w.page.goto(box.url);
    await w.page.waitForSelector("#welcome:not([hidden])");
    await until("the list was asked for", () => sizes.some((s) => s.startsWith("/api/chat/sessions")));
    console.log(`first load: ${bytes} bytes over the wire (${sizes.join(", ")})`);
    assert.ok(bytes <= 60 * KIB, `${bytes} bytes`);
    const { headers } = await fetch(box.url).then((r) => ({ headers: r.headers }));
    assert.match(headers.get("content-security-policy"), /default-src 'none'; script-src 'self'; style-src 'self'/);
    await accessible(w.page, "fresh box");
    await shot(w.page, "fresh-1280");
    await say(w.page, "hello there, first message");
    await answered(w.page, /first message|hello/);
    await phase(w.page, "ready");
    assert.equal(await times(w.page, "hello there, first message"), 1);
    assert.match(w.page.url(), /#\/c\/[\w-]+$/);
    await w.page.locator("#sessions .label", { hasText: "hello there" }).waitFor();
    await w.page.reload();
    await answered(w.page, /first message|hello/);
    assert.equal(await times(w.page, "hello there, first message"), 1);
    await w.done();
  });

  test("the first message of a fresh box is in the list once in every frame, however fast it is answered", async () => {
    // The answer is over before the page has read the conversation for the first time: its end asks for one more reading
    // while the first is under way.
    for (let round = 0; round < 12; round++) {
      const fresh = await server();
      await fresh.again();
      const w = await windowOn(fresh.url);
      await w.page.addInitScript(() => {
        globalThis.counts = [];
        const look = () => {
          const n = [...document.querySelectorAll("#list article.user .bubble")].filter((b) => b.textContent.includes("quick one")).length;
          if (n !== (globalThis.counts.at(-1) ?? 0)) globalThis.counts.push(n);
          requestAnimationFrame(look);
        };
        look();
      });
      await w.page.goto(fresh.url);
      await w.page.waitForSelector("#welcome:not([hidden])");
      await say(w.page, "quick one");
      await answered(w.page, /quick one/);
      await phase(w.page, "ready");
      await until("the turn gave way to the transcript", async () => (await w.page.locator("li.live").count()) === 0);
      assert.deepEqual(await w.page.evaluate(() => globalThis.counts), [1], `round ${round}`);
      await w.context.close();
      await fresh.close();
    }
  });

  test("the answer is seen growing, with its thinking and its tool call", async () => {
    const w = await tab();
    await w.fresh();
    await say(w.page, "grow {{think=yes tool=yes tool_ms=300 deltas=30 delta_ms=60 size=900}}");
    await w.page.waitForSelector("li.live .md");
    const lengths = new Set();
    await until("the turn ends", async () => {
      const n = await w.page.evaluate(() => document.querySelector("li.live .md.growing")?.textContent.length ?? 0);
      if (n) lengths.add(n);
      if (lengths.size === 8) await shot(w.page, "streaming-1280");
      return (await w.page.getAttribute("#state", "data-phase")) === "ready";
    });
    console.log(`streaming: ${lengths.size} lengths seen`);
    assert.ok(lengths.size >= 5, `lengths ${[...lengths]}`);
    await until("the live text gave way to the transcript", async () => (await w.page.locator("li.live").count()) === 0);
    assert.ok((await w.page.locator("#list .fold").count()) >= 1);
    await accessible(w.page, "a conversation");
    await w.done();
  });

  test("two messages during a turn are queued, and become one turn in order", async () => {
    const w = await tab();
    await w.fresh();
    await say(w.page, "one {{deltas=20 delta_ms=80}}");
    await phase(w.page, "streaming");
    await say(w.page, "two waits");
    await say(w.page, "three waits");
    await until("both are queued", async () => (await w.page.locator("#list .user.accepted .badge", { hasText: "Queued" }).count()) === 2);
    await w.page.locator("#state", { hasText: "2 waiting" }).waitFor();
    await w.page.locator("#sessions .count", { hasText: "2" }).waitFor();
    await shot(w.page, "queued-1280");
    await until("all is answered", async () => (await w.page.locator("#list .user.accepted, #list .user.dispatched, li.live").count()) === 0
      && (await w.page.getAttribute("#state", "data-phase")) === "ready", 30_000);
    const all = (await users(w.page).allInnerTexts()).join("\n");
    for (const t of ["one", "two waits", "three waits"]) assert.equal(all.split(t).length - 1, 1, `${t} in:\n${all}`);
    assert.ok(all.indexOf("two waits") < all.indexOf("three waits"));
    await w.done();
  });

  test("a slow answer does not undo what was heard since it was asked for", async () => {
    const w = await tab();
    await w.fresh();
    await w.page.route("**/api/chat/bootstrap*", async (route) => {
      const response = await route.fetch();
      await sleep(900);
      await route.fulfill({ response }).catch(() => {});
    });
    const seen = await sample(w.page, "token-slow");
    await say(w.page, "token-slow {{delay_ms=300 deltas=60 delta_ms=60 size=600}}");
    await phase(w.page, "streaming");
    await sleep(1500);
    assert.equal(await w.page.getAttribute("#state", "data-phase"), "streaming");
    assert.equal(await w.page.locator("#sessions [aria-current] .dot.streaming").count(), 1);
    await phase(w.page, "ready");
    await until("the transcript shows it", async () => (await w.page.locator("#list .user:not(.own, .accepted, .dispatched)").count()) === 1);
    once(seen, 1);
    await w.done();
  });

  test("stop takes the queue back and says so; interrupt ends the answer", async () => {
    const w = await tab();
    await w.fresh();
    await say(w.page, "first {{deltas=1200 delta_ms=50}}");
    await phase(w.page, "streaming");
    await say(w.page, "never sent, taken back");
    await w.page.locator("#list .user.accepted").waitFor();
    await w.page.click("#more");
    await shot(w.page, "panel-1280");
    await accessible(w.page, "the panel");
    await w.page.click("[data-do=stop]");
    await w.page.locator(".note", { hasText: "taken back" }).waitFor();
    await phase(w.page, "idle");
    assert.equal(await times(w.page, "never sent, taken back"), 0);
    await w.page.click(".note .link");
    assert.equal(await w.page.inputValue("#compose"), "never sent, taken back");
    await w.page.fill("#compose", "");
    await say(w.page, "again {{deltas=1200 delta_ms=50}}");
    await w.page.waitForSelector("li.live .md.growing");
    await w.page.click("#interrupt");
    await w.page.locator("#list .mark-line", { hasText: "interrupted" }).waitFor();
    await until("it rests", async () => ["ready", "idle"].includes(await w.page.getAttribute("#state", "data-phase")));
    assert.equal(await times(w.page, "again"), 1);
    await w.done();
  });

  test("a failed message says why and waits for a person; an answer that ends in an error says so", async () => {
    const w = await tab();
    await w.fresh();
    await say(w.page, "never heard {{die=before user_flush_ms=5000}}");
    const failed = w.page.locator("#list .user.failed", { hasText: "never heard" });
    await failed.locator(".badge", { hasText: /Not delivered: .{10}/ }).waitFor();
    await shot(w.page, "failed-1280");
    await w.page.reload();
    await failed.locator(".badge", { hasText: /Not delivered: .{10}/ }).waitFor();
    await failed.locator(".link", { hasText: "Try again" }).click();
    await until("it failed once more", async () => (await box.get(`/api/chat/bootstrap?session=${/#\/c\/([\w-]+)/.exec(w.page.url())[1]}&tail=1`)).pending.some((p) => p.state === "failed"));
    await failed.locator(".link", { hasText: "Discard" }).click();
    await failed.waitFor({ state: "detached" });
    await say(w.page, "oops {{error}}");
    await w.page.locator("#list", { hasText: "the script asked for this error" }).waitFor();
    await until("it rests", async () => ["ready", "idle"].includes(await w.page.getAttribute("#state", "data-phase")));
    assert.equal(await times(w.page, "oops"), 1);
    await w.done();
  });

  test("a photo by paste is scaled, shown at once, and is there after a reload; others by picker and drop", async () => {
    const w = await tab();
    await w.fresh();
    const give = (kind) => w.page.evaluate(async (how) => {
      const canvas = Object.assign(document.createElement("canvas"), { width: 2600, height: 1300 });
      const paint = canvas.getContext("2d");
      const sky = paint.createLinearGradient(0, 0, 2600, 1300);
      sky.addColorStop(0, "#f3c26b");
      sky.addColorStop(1, "#3b6ea5");
      paint.fillStyle = sky;
      paint.fillRect(0, 0, 2600, 1300);
      const blob = await new Promise((r) => canvas.toBlob(r, "image/png"));
      const data = new DataTransfer();
      data.items.add(new File([blob], "<img src=x onerror=globalThis.pwned=1>.png", { type: "image/png" }));
      const event = how === "paste" ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })
        : new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
      document.querySelector("#compose").dispatchEvent(event);
    }, kind);
    await give("paste");
    await w.page.waitForSelector("#thumbs img");
    await shot(w.page, "photo-thumb-1280");
    await say(w.page, "look at this {{deltas=10 delta_ms=60}}");
    await w.page.waitForSelector("#list .user .photo img");
    const width = () => w.page.evaluate(() => document.querySelector("#list .user .photo img")?.naturalWidth);
    await until("it is scaled", async () => (await width()) === 2000);
    await until("the turn ends", async () => (await w.page.locator("#list .user:not(.own, .accepted, .dispatched)").count()) === 1 && (await w.page.getAttribute("#state", "data-phase")) === "ready");
    assert.equal(await w.page.locator("#list .photo").count(), 1);
    await w.page.reload();
    await until("it comes back from the transcript", async () => (await width()) === 2000);
    assert.match(await w.page.getAttribute("#list .user .photo img", "src"), /^\/api\/session-media\//);
    await w.page.setInputFiles("#files", { name: "b.png", mimeType: "image/png", buffer: png(64, 48, 3) });
    await give("drop");
    await until("two thumbs", async () => (await w.page.locator("#thumbs img").count()) === 2);
    await w.page.click("#thumbs button >> nth=0");
    assert.equal(await w.page.locator("#thumbs img").count(), 1);
    await w.page.click("#send");
    await until("a message of a photo alone arrives", async () => (await w.page.locator("#list .photo").count()) === 2);
    await w.page.click("#list .photo >> nth=0");
    await w.page.waitForSelector("#viewer[open] img");
    await w.page.keyboard.press("Escape");
    await w.page.setInputFiles("#files", { name: "<b>x</b>.txt", mimeType: "text/plain", buffer: Buffer.from("no") });
    await w.page.locator("#banner", { hasText: "<b>x</b>.txt" }).waitFor();
    assert.equal(await w.page.evaluate(() => globalThis.pwned), undefined);
    await w.done();
  });

  test("a reload between acceptance and transcript shows the message once, at every moment", async () => {
    const w = await tab();
    await w.fresh();
    const seen = await sample(w.page, "token-late");
    await say(w.page, "token-late {{user_flush_ms=1800 flush_ms=300 deltas=20 delta_ms=100}}");
    await until("it shows", () => seen.at(-1) === 1);
    await until("it is accepted", () => /#\/c\//.test(w.page.url()));
    for (let n = 0; n < 3; n++) {
      await w.page.reload();
      await until("it shows again", async () => (await times(w.page, "token-late")) === 1, 5000);
      await sleep(300);
    }
    await until("the turn ends", async () => (await w.page.getAttribute("#state", "data-phase")) === "ready", 20_000);
    await until("it is the transcript's", async () => (await w.page.locator("#list .user:not(.own, .accepted, .dispatched)").count()) === 1);
    await sleep(500);
    once(seen, 4);
    await w.done();
  });

  /** Never twice; once shown never gone, but for the moments a reload takes. */
  function once(seen, loads) {
    assert.ok(seen.every((n) => n <= 1), `twice: ${seen}`);
    const gaps = seen.join("").replace(/^0+/, "").match(/0+/g) ?? [];
    console.log(`sampled ${seen.length} times: ${gaps.length} gaps of ${gaps.map((g) => g.length).join(",")} samples at ${loads - 1} reloads`);
    assert.ok(gaps.length < loads, `gone: ${seen}`);
    assert.ok(gaps.every((g) => g.length <= 20), `gone: ${seen}`);
  }

  test("an answer that is lost, and a reload before it, make no second copy", async () => {
    const w = await tab();
    await w.fresh();
    const seen = await sample(w.page, "token-lost");
    let posts = 0;
    await w.page.route("**/api/chat/send", async (route) => {
      posts++;
      if (posts > 2) return route.continue();
      await route.fetch(); // the server takes it, and the browser never hears
      await sleep(200);
      await route.abort().catch(() => {});
    });
    await say(w.page, "token-lost {{deltas=10 delta_ms=80}}");
    await until("a first try", () => posts >= 1);
    await w.page.reload();
    await until("it was answered at last", () => posts >= 3, 20_000);
    await until("it is a conversation", async () => /#\/c\//.test(w.page.url()) && (await w.page.getAttribute("#state", "data-phase")) === "ready", 20_000);
    await until("it is the transcript's", async () => (await w.page.locator("#list .user:not(.own, .accepted, .dispatched)").count()) === 1);
    once(seen, 2);
    const id = /#\/c\/([\w-]+)/.exec(w.page.url())[1];
    const history = await box.get(`/api/chat/history?session=${id}&tail=50`);
    assert.equal(history.entries.filter((e) => e.type === "user").length, 1);
    await w.done();
  });

  test("two tabs agree, streaming included", async () => {
    const w = await tab();
    await w.fresh();
    await say(w.page, "from the first tab");
    await phase(w.page, "ready");
    const other = await w.context.newPage();
    await other.goto(w.page.url());
    await answered(other, /first tab/);
    await say(other, "from the second tab {{deltas=30 delta_ms=60 size=600}}");
    await w.page.waitForSelector("li.live .md.growing");
    assert.equal(await times(w.page, "from the second tab"), 1);
    await say(w.page, "queued by the first");
    await other.locator("#list .user.accepted", { hasText: "queued by the first" }).waitFor();
    for (const p of [w.page, other]) {
      await until("all is answered", async () => (await p.locator("#list .user.accepted, #list .user.dispatched, #list .user.own, li.live").count()) === 0
        && (await p.getAttribute("#state", "data-phase")) === "ready", 30_000);
    }
    const [a, b] = await Promise.all([w.page, other].map((p) => p.locator("#list article").allInnerTexts()));
    assert.deepEqual(a, b);
    await w.done();
  });

  test("kill -9 mid-turn: the page says so, keeps what is written, and all is there once after the restart", async () => {
    const w = await tab();
    await w.fresh();
    await say(w.page, "token-crash {{deltas=60 delta_ms=80}}");
    await w.page.waitForSelector("li.live .md.growing");
    const seen = await sample(w.page, "token-crash");
    await box.end("SIGKILL");
    await w.page.locator("#banner", { hasText: "No connection" }).waitFor();
    await say(w.page, "token-offline, written while it was down");
    await w.page.locator("#list .user.own .badge", { hasText: "Waiting to be sent" }).waitFor();
    await shot(w.page, "offline-1280");
    await accessible(w.page, "offline");
    await box.again();
    await until("the banner leaves", async () => await w.page.locator("#banner").isHidden(), 45_000);
    await until("all is answered", async () => (await w.page.locator("#list .user.accepted, #list .user.dispatched, #list .user.own").count()) === 0
      && ["ready", "idle"].includes(await w.page.getAttribute("#state", "data-phase")) && (await times(w.page, "token-offline")) === 1, 45_000);
    once(seen, 1);
    const id = /#\/c\/([\w-]+)/.exec(w.page.url())[1];
    const history = await box.get(`/api/chat/history?session=${id}&tail=50`);
    const text = JSON.stringify(history.entries.filter((e) => e.type === "user"));
    assert.equal(text.split("token-crash").length - 1, 1);
    assert.equal(text.split("token-offline").length - 1, 1);
    await w.done();
  });

  test("2,000 entries with 60 photos: photos load only near the view, older pages join without a jump", async () => {
    const session = "long-conversation";
    const lines = [];
    for (let n = 0; n < 2000; n++) {
      if (n % 2) lines.push(agentLine(session, n, `Answer ${n}: ${"words ".repeat(1 + (n * 7) % 60)}`));
      else if (n % 66 === 0 || n % 66 === 32) {
        const photo = { type: "image", source: { type: "base64", media_type: "image/png", data: png(80, 60, n + 1).toString("base64") } };
        lines.push(userLine(session, n, [photo, { type: "text", text: `Photo ${n}` }]));
      } else lines.push(userLine(session, n, `Question ${n}`));
    }
    const photos = lines.filter((l) => Array.isArray(l.message.content) && l.message.content[0].type === "image").length;
    assert.ok(photos >= 60, `${photos} photos`);
    box.write(session, lines);
    const w = await tab();
    const asked = [];
    w.page.on("request", (r) => r.url().includes("/api/session-media/") && asked.push(r.url()));
    await w.page.goto(`${box.url}/#/c/${session}`);
    await w.page.locator("#list", { hasText: "Answer 1999" }).waitFor();
    await sleep(1000);
    const first = asked.length;
    assert.ok(first <= 6, `${first} photos asked for at the bottom`);
    // Up by pages, as a person scrolls; what is in view stays where it is when older pages join.
    let worst = 0;
    for (let n = 0; n < 40; n++) {
      const moved = await w.page.evaluate(async () => {
        const scroll = document.querySelector("#scroll");
        const top = scroll.getBoundingClientRect().top;
        scroll.scrollTop -= 500;
        await new Promise((r) => requestAnimationFrame(r));
        const node = [...document.querySelectorAll("#list > li")].find((x) => x.getBoundingClientRect().bottom > top + 50);
        const before = node.getBoundingClientRect().top;
        const count = document.querySelectorAll("#list > li").length;
        await new Promise((r) => setTimeout(r, 120));
        return { count: document.querySelectorAll("#list > li").length - count, moved: Math.abs(node.getBoundingClientRect().top - before) };
      });
      worst = Math.max(worst, moved.moved);
    }
    const rows = await w.page.locator("#list > li").count();
    console.log(`photos: ${first} of ${photos} at the bottom, ${asked.length} after 20,000 px up (${rows} rows); largest jump ${worst.toFixed(1)} px`);
    assert.ok(rows > 200, `${rows} rows`);
    assert.ok(asked.length < photos, `${asked.length}`);
    assert.ok(asked.length > first);
    assert.ok(worst <= 2, `${worst} px`);
    await until("the very first entry", async () => {
      await w.page.evaluate(() => (document.querySelector("#scroll").scrollTop = 0));
      return (await w.page.locator("#list > li.day + li", { hasText: "Photo 0" }).count()) === 1;
    }, 90_000);
    assert.equal(await w.page.locator("#list article").count(), 2000);
    assert.equal(await w.page.locator("#older").isHidden(), true);
    assert.equal(new Set(asked).size, asked.length, "a photo was asked for twice");
    await w.page.click("#jump");
    await w.page.locator("#list", { hasText: "Answer 1999" }).waitFor();
    await shot(w.page, "photos-1280");
    await w.done();
  });

  test("100,000 entries open at once", async () => {
    const session = "huge-conversation";
    const lines = [];
    for (let n = 0; n < 100_000; n++) lines.push(n % 2 ? agentLine(session, n, `Answer ${n}`) : userLine(session, n, `Question ${n}`));
    box.write(session, lines);
    const w = await tab();
    const open = async () => {
      await w.page.goto("about:blank");
      const from = Date.now();
      await w.page.goto(`${box.url}/#/c/${session}`);
      await w.page.locator("#list", { hasText: "Answer 99999" }).waitFor();
      return Date.now() - from;
    };
    const cold = await open();
    const warm = await open();
    console.log(`100,000 entries: shown after ${cold} ms, once more after ${warm} ms`);
    assert.match(await w.page.innerText("#older"), /99,880 earlier/);
    await w.done();
  });

  test("nothing that comes from outside becomes markup", async () => {
    const session = "hostile-conversation";
    const evil = `<img src=x onerror="globalThis.pwned=1"><script>globalThis.pwned=2</script><svg onload=globalThis.pwned=3>`;
    const links = "[a](javascript:globalThis.pwned=4) [b](JAVASCRIPT:alert(1)) [c](data:text/html,<script>globalThis.pwned=5</script>) [d](  javascript:alert(1)) [e](vbscript:x) [f](//evil.example) "
      + "[g](https://ok.example/\"onmouseover=\"globalThis.pwned=6) ![h](https://ok.example/x.png) <https://ok.example> `" + evil + "` **" + evil + "** https://ok.example/\"><script>1</script>";
    box.write(session, [
      userLine(session, 1, evil + " label"),
      agentLine(session, 2, `${evil}\n\n${links}\n\n# ${evil}\n\n| ${evil} | b |\n|---|---|\n| ${evil} | ${links} |\n\n> ${evil}\n\n- ${evil}\n\n\`\`\`${"html"}\n${evil}\n\`\`\``),
      agentLine(session, 3, [{ type: "thinking", thinking: evil, signature: "x" }]),
      agentLine(session, 4, [{ type: "tool_use", id: "t1", name: evil, input: { command: evil, [evil]: evil } }]),
      { ...userLine(session, 5, [{ type: "tool_result", tool_use_id: "t1", content: evil, is_error: false }]) },
      userLine(session, 6, `<typed user="${evil.replace(/"/g, "'")}" user-email="x@y">hello ${evil}</typed>`),
      userLine(session, 7, [{ type: "image", source: { type: "base64", media_type: "image/svg+xml", data: Buffer.from(`<svg xmlns="http://www.w3.org/2000/svg" onload="globalThis.pwned=7"/>`).toString("base64") } }, { type: "text", text: "svg" }]),
      agentLine(session, 8, ["*", "_", "`", "[", "[a](", "**a", "~~", "\\", "https://a", "*a_b`c["].map((t) => t.repeat(Math.floor(7900 / t.length))).join("\n\n")),
      agentLine(session, 9, "the end"),
    ]);
    const w = await tab();
    await w.page.route("**/api/chat/bootstrap*", async (route) => {
      const answer = await route.fetch();
      const json = await answer.json();
      json.features = { ...json.features, [evil]: evil };
      await route.fulfill({ response: answer, json });
    });
    await w.page.goto(`${box.url}/#/c/${session}`);
    await answered(w.page, "the end");
    for (const d of await w.page.locator("details").all()) await d.evaluate((x) => (x.open = true));
    await w.page.click("#more");
    await w.page.locator("#features label", { hasText: "onerror" }).first().waitFor();
    await say(w.page, evil);
    await until("it is answered", async () => (await w.page.getAttribute("#state", "data-phase")) === "ready", 20_000);
    await sleep(300);
    const found = await w.page.evaluate(() => ({
      pwned: globalThis.pwned,
      scripts: document.querySelectorAll("main script, aside script").length,
      on: [...document.querySelectorAll("main *, aside *")].filter((e) => [...e.attributes].some((a) => a.name.startsWith("on"))).length,
      images: [...document.querySelectorAll("#list img")].map((i) => i.getAttribute("src")).filter((s) => !/^(\/api\/session-media\/|\/api\/chat\/pending\/|blob:)/.test(s)),
      links: [...document.querySelectorAll("#list a")].map((a) => a.protocol).filter((p) => !["http:", "https:", "mailto:"].includes(p)),
      rel: [...document.querySelectorAll("#list a")].every((a) => a.rel.includes("noopener")),
    }));
    assert.deepEqual(found, { pwned: undefined, scripts: 0, on: 0, images: [], links: [], rel: true });
    await shot(w.page, "hostile-1280");
    assert.deepEqual(w.faults, []);
    await w.context.close();
  });

  test("a phone of 360 px: nothing sticks out, the list is a drawer, dark is dark", async () => {
    for (const dark of [false, true]) {
      const w = await tab({ width: 360, height: 740, phone: true, dark });
      await w.page.goto(`${box.url}/#/c/hostile-conversation`);
      await answered(w.page, "the end");
      const wide = await w.page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(wide <= 0, `${wide} px too wide`);
      await accessible(w.page, `phone, dark ${dark}`);
      await shot(w.page, `phone-360-${dark ? "dark" : "light"}`);
      await w.page.click("#side-open");
      await w.page.locator("#sessions a").first().waitFor();
      await sleep(350);
      await accessible(w.page, `drawer, dark ${dark}`);
      await shot(w.page, `drawer-360-${dark ? "dark" : "light"}`);
      await w.page.click("#new");
      await w.page.waitForSelector("#welcome:not([hidden])");
      await w.page.tap("#compose");
      await w.page.fill("#compose", "short from the phone");
      await w.page.tap("#send");
      await answered(w.page, /phone/);
      await w.done();
    }
  });

  test("by keyboard alone: write, go through the list, open and close the panel", async () => {
    const w = await tab();
    await w.fresh();
    await w.page.keyboard.type("typed blindly");
    await w.page.keyboard.press("Enter");
    await answered(w.page, /blindly/);
    const here = w.page.url();
    await w.page.keyboard.press("Alt+ArrowDown");
    await until("another conversation", () => w.page.url() !== here);
    await w.page.keyboard.press("Alt+KeyN");
    await w.page.waitForSelector("#welcome:not([hidden])");
    await w.page.goto(here);
    await answered(w.page, /blindly/);
    await w.page.focus("#more");
    await w.page.keyboard.press("Enter");
    await w.page.waitForSelector("#panel:not([hidden])");
    await w.page.keyboard.press("Escape");
    await w.page.waitForSelector("#panel", { state: "hidden" });
    assert.equal(await w.page.evaluate(() => document.activeElement.id), "more");
    await w.done();
  });
});

test("behind a token: the login link opens the page, its photos and its events", { timeout: 60_000 }, async () => {
  const dir = mkdtempSync(path.join(tmpdir(), "beebox-token-"));
  const file = path.join(dir, "token");
  writeFileSync(file, randomBytes(32).toString("hex") + "\n", { mode: 0o600 });
  const box = await server(["--token-file", file]);
  await box.again();
  const w = await windowOn(box.url);
  assert.equal((await w.page.goto(box.url)).status(), 401);
  // The owner of the box asks for a link on its own socket.
  const link = await new Promise((resolve, reject) => {
    const ask = request({ socketPath: path.join(box.box, ".beebox/chat.sock"), path: "/login", method: "POST", headers: { "Content-Type": "application/json", Host: "localhost" } }, (answer) => {
      let text = "";
      answer.on("data", (d) => (text += d)).on("end", () => resolve(JSON.parse(text).url));
    });
    ask.on("error", reject);
    ask.end("{}");
  });
  await w.page.goto(link);
  await w.page.waitForSelector("#welcome:not([hidden])");
  await w.page.setInputFiles("#files", { name: "a.png", mimeType: "image/png", buffer: png(64, 48, 9) });
  await w.page.waitForSelector("#thumbs img");
  await say(w.page, "let in {{deltas=10 delta_ms=60}}");
  await w.page.waitForSelector("li.live .md.growing");
  await until("its photo shows", () => w.page.evaluate(() => document.querySelector("#list .photo img")?.naturalWidth === 64));
  await phase(w.page, "ready");
  assert.ok(!w.page.url().includes(link.split("#")[1]));
  await w.context.close();
  await box.close();
  rmSync(dir, { recursive: true });
  await quit();
});

test("the browser", async () => {
  const b = await launch();
  console.log(`chromium ${b.version()}`);
  await quit();
});
