// Makes scripts/page.png, the picture in README: the real page and server with a made-up conversation.
// `node tests/web/picture.mjs [FILE]`; needs what scripts/browser-test installs.
import { utimesSync } from "node:fs";
import { agentLine, quit, server, sleep, userLine, windowOn } from "./harness.mjs";

const file = process.argv[2] ?? new URL("../../scripts/page.png", import.meta.url).pathname;
const box = await server();
await box.again();

// A photo: hills at dusk, drawn in a page of its own.
const studio = await windowOn(box.url);
await studio.page.goto("about:blank");
const photo = await studio.page.evaluate(() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 640, height: 480 });
  const p = canvas.getContext("2d");
  const fill = (style, draw) => {
    p.fillStyle = style;
    p.beginPath();
    draw();
    p.fill();
  };
  const sky = p.createLinearGradient(0, 0, 0, 340);
  [["0", "#35507a"], ["0.550", "#d98a6a"], ["1", "#f7cf8a"]].forEach(([at, c]) => sky.addColorStop(at, c));
  p.fillStyle = sky;
  p.fillRect(0, 0, 640, 480);
  fill("#fff3cf", () => p.arc(430, 235, 34, 0, 7));
  for (const [n, c] of ["#7d6a86", "#56577a", "#37415f", "#232c44"].entries()) {
    fill(c, () => {
      p.moveTo(0, 480);
      for (let x = 0; x <= 640; x += 8) p.lineTo(x, 275 + n * 42 + Math.sin(x / (70 - n * 9) + n * 2.1) * (26 - n * 3) + Math.sin(x / 31 + n) * 7);
      p.lineTo(640, 480);
    });
  }
  return canvas.toDataURL("image/jpeg", 0.86).split(",")[1];
});
await studio.context.close();

const now = Date.now();
const write = (id, minutes, lines) => {
  box.write(id, lines.map((l, n) => ({ ...l, timestamp: new Date(now - (minutes - n) * 60_000).toISOString() })));
  utimesSync(box.transcript(id), new Date(now - minutes * 60_000), new Date(now - minutes * 60_000));
};
write("garden", 60 * 26, [userLine("garden", 1, "Plan the autumn garden"), agentLine("garden", 2, "Done.")]);
write("nightly", 60 * 5, [userLine("nightly", 1, "Why did the nightly build fail?"), agentLine("nightly", 2, "A test waited for a clock.")]);
write("receipts", 60 * 50, [userLine("receipts", 1, "Receipts of September"), agentLine("receipts", 2, "Sorted.")]);
write("harbour", 14, [
  userLine("harbour", 1, [{ type: "image", source: { type: "base64", media_type: "image/jpeg", data: photo } }, { type: "text", text: "Which of my photos are from this ridge? Make me a list, newest first." }]),
  agentLine("harbour", 2, [{ type: "thinking", thinking: "The sun sets behind the third ridge.", signature: "x" }]),
  agentLine("harbour", 3, [{ type: "tool_use", id: "t1", name: "Bash", input: { command: "ls -t photos/2026-*/ridge*", description: "List photos of the ridge" } }]),
  userLine("harbour", 4, [{ type: "tool_result", tool_use_id: "t1", content: "ridge-3.jpg\nridge-2.jpg" }]),
  agentLine("harbour", 5, "Two of them, both from the **west path**, with the sun behind the third ridge:\n\n| photo | taken | light |\n|---|---|---|\n| `ridge-3.jpg` | today, 19:42 | like yours |\n| `ridge-2.jpg` | Sunday | low cloud |"),
]);

const w = await windowOn(box.url, { width: 1120, height: 960 });
await w.page.goto(`${box.url}/#/c/harbour`);
await w.page.locator("#list td", { hasText: "low cloud" }).waitFor();
await w.page.fill("#compose", "Lovely. Put the two side by side. {{delay_ms=200 deltas=80 delta_ms=60 say=\"I am laying ridge-3 and ridge-2 next to each other, at the same height of the horizon.\"}}");
await w.page.press("#compose", "Enter");
await w.page.waitForSelector("li.live .md.growing");
await w.page.fill("#compose", "And one for the wall, please.");
await w.page.press("#compose", "Enter");
await w.page.locator("#list .user.accepted").waitFor();
await sleep(1800);
// The agent's directive is no part of the picture.
await w.page.evaluate(() => document.querySelectorAll("#list .user .bubble p, #title, #sessions .label")
  .forEach((p) => (p.textContent = p.textContent.replace(/\s*\{\{.*/s, ""))));
await w.page.screenshot({ path: file });
await quit();
await box.close();
