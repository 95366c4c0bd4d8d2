// The Markdown subset, as far as it is pure: blocks and addresses. What becomes of it in the page is in browser.test.mjs.
import test from "node:test";
import assert from "node:assert/strict";
import { blocks, safeUrl } from "../../src/web/markdown.js";

const kinds = (text) => blocks(text).map((b) => b.kind);

test("blocks", () => {
  const table = [
    ["", []],
    ["a\nb\n\nc", ["text", "text"]],
    ["# a\ntext\n## b", ["head", "text", "head"]],
    ["#no head", ["text"]],
    ["```js\n# not a head\n```\nafter", ["code", "text"]],
    ["```\nnever closed", ["code"]],
    ["~~~\n```\n~~~", ["code"]],
    ["- a\n- b\n\n1. c\n2. d", ["ul", "ol"]],
    ["- a\n  - deep\n- b", ["ul"]],
    ["text\n- a list right after", ["text", "ul"]],
    ["in 2024\n2024. is no list", ["text"]],
    ["> a\n> b\n\nc", ["quote", "text"]],
    ["---\n***\n_ _ _", ["rule", "rule", "rule"]],
    ["| a | b |\n|---|:-:|\n| 1 | 2 |\n\nx", ["table", "text"]],
    ["a | b\nno table", ["text"]],
    ["\r\na\r\n\r\nb", ["text", "text"]],
  ];
  for (const [text, want] of table) assert.deepEqual(kinds(text), want, JSON.stringify(text));
  assert.deepEqual(blocks("1. a\n   b\n\n   c\n2. d")[0].items, ["a\nb\n\nc", "d"]);
  assert.deepEqual(blocks("| a | b\\|c |\n|---|---|\n| 1 |")[0], { kind: "table", head: ["a", "b\\|c"], rows: [["1"]], source: "table| a | b\\|c |\n|---|---|\n| 1 |" });
});

test("a streamed text renews only its last block", () => {
  const a = blocks("one\n\n```\ncode");
  const b = blocks("one\n\n```\ncode\n```\n\ntail");
  assert.equal(a[0].source, b[0].source);
  assert.notEqual(a[1].source, b[1].source);
});

test("addresses lead to the web or to mail and nowhere else", () => {
  for (const good of ["https://a.example/x?y#z", "http://a.example", "mailto:a@b.example", "HTTPS://A.example"]) assert.ok(safeUrl(good), good);
  for (const bad of ["javascript:alert(1)", " javascript:alert(1)", "JaVaScRiPt:1", "java\nscript:1", "data:text/html,x", "vbscript:x", "file:///etc/passwd", "//evil.example", "/local", "blob:x", "", "https://"]) {
    assert.equal(safeUrl(bad), null, bad);
  }
});

test("hostile text costs no more than linear time", { timeout: 20_000 }, () => {
  for (const evil of ["*".repeat(50_000), "`".repeat(50_000), "[".repeat(50_000), "> ".repeat(20_000), "- ".repeat(20_000), "|".repeat(50_000) + "\n" + "|-".repeat(20_000), "_a ".repeat(20_000), "  ".repeat(30_000) + "x", "\n".repeat(50_000)]) blocks(evil);
});
