// A strict, small subset of Markdown, built as DOM nodes: text only ever enters by textContent, no HTML is parsed.
// Rule a change could break: links lead to http, https or mailto and nowhere else; depth and length are bounded.

const DEPTH_MAX = 6;
const INLINE_CHARS_MAX = 8000; // the inline scan may be quadratic: a longer paragraph is shown as it is

/** Makes an element: props set as properties (`class`, `aria-…`, `data-…` as attributes, `on…` as listeners). */
export function h(tag, props, ...children) {
  const el = document.createElement(tag);
  for (const [k, v] of Object.entries(props ?? {})) {
    if (v === undefined || v === null || v === false) continue;
    if (k.startsWith("on")) el.addEventListener(k.slice(2), v);
    else if (k === "class" || k.includes("-") || k === "role" || k === "for") el.setAttribute(k, v === true ? "" : v);
    else el[k] = v;
  }
  el.append(...children.filter((c) => c !== null && c !== undefined && c !== false));
  return el;
}

/** An address that may be followed, or null. */
export function safeUrl(text) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(text)) return null;
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function link(label, target) {
  const href = safeUrl(target);
  if (!href) return null;
  return h("a", { href, target: "_blank", rel: "noopener noreferrer", title: href }, ...(label ?? [target]));
}

const WEB = /https?:\/\/[^\s<>"']+/g;
// An address in running text ends before the punctuation that follows it.
const trimUrl = (url) => {
  let u = url.replace(/[.,;:!?*_~'"]+$/, "");
  if (u.endsWith(")") && !u.includes("(")) u = u.slice(0, -1);
  return u;
};

/** Plain words with their web addresses made links. */
export function plain(text) {
  const out = document.createDocumentFragment();
  let at = 0;
  for (const m of text.matchAll(WEB)) {
    const url = trimUrl(m[0]);
    const a = link(null, url);
    if (!a) continue;
    out.append(text.slice(at, m.index), a);
    at = m.index + url.length;
  }
  out.append(text.slice(at));
  return out;
}

const INLINE = new RegExp([
  /\\([!-/:-@[-`{-~])/, // 1 escape
  /(`{1,8})(?!`)((?:[^`]|(?!\2)`){1,2000}?)\2(?!`)/, // 2,3 code
  /!?\[((?:[^[\]\\]|\\.|\[[^[\]]{0,200}\]){0,500})\]\(\s{0,9}<?([^\s()<>]{0,1500}(?:\([^\s()<>]{0,300}\)[^\s()<>]{0,300})?)>?(?:\s+"[^"]{0,200}")?\s{0,9}\)/, // 4,5 link
  /(https?:\/\/[^\s<>"']{1,1500})/, // 6 address
  /(\*\*\*|\*\*|~~)(?=\S)([\s\S]{1,2000}?\S?)\7/, // 7,8 strong, struck
  /(?<!\w)(__|_)(?=\S)([\s\S]{0,1000}?[^\s_])\9(?!\w)/, // 9,10
  /\*(?=[^\s*])([^*]{0,1000}?[^\s*])\*(?!\*)/, // 11
].map((r) => r.source).join("|"), "g");

function inline(text, depth = 0) {
  if (text.length > INLINE_CHARS_MAX || depth > DEPTH_MAX) return [text];
  const out = [];
  let at = 0;
  for (const m of text.matchAll(INLINE)) {
    let node;
    let end = m.index + m[0].length;
    if (m[1]) node = m[1];
    else if (m[2]) node = h("code", null, m[3].replace(/^ (.*\S.*) $/s, "$1"));
    else if (m[4] !== undefined) node = link(inline(m[4] || m[5], depth + 1), m[5]);
    else if (m[6]) {
      const url = trimUrl(m[6]);
      node = link(null, url);
      end = m.index + url.length;
    } else if (m[7]) {
      const inner = inline(m[8], depth + 1);
      node = m[7] === "~~" ? h("del", null, ...inner) : m[7] === "**" ? h("strong", null, ...inner) : h("strong", null, h("em", null, ...inner));
    } else if (m[9]) node = h(m[9] === "_" ? "em" : "strong", null, ...inline(m[10], depth + 1));
    else if (m[11]) node = h("em", null, ...inline(m[11], depth + 1));
    if (!node) continue;
    out.push(text.slice(at, m.index), node);
    at = end;
  }
  out.push(text.slice(at));
  return out.filter((n) => n !== "");
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]{0,40})[^`]*$/;
const HEAD = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const starts = (line) => FENCE.test(line) || HEAD.test(line) || RULE.test(line) || QUOTE.test(line);

/** Splits into blocks [{kind, source, …}]; `source` names a block, so that a streamed text renews only what changed. */
export function blocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  const out = [];
  let i = 0;
  while (i < lines.length) {
    const from = i;
    const line = lines[i];
    let m;
    let block;
    if (!line.trim()) {
      i++;
      continue;
    }
    if ((m = FENCE.exec(line))) {
      const close = new RegExp(`^ {0,3}${m[1][0]}{${m[1].length},}\\s*$`);
      i++;
      while (i < lines.length && !close.test(lines[i])) i++;
      block = { kind: "code", lang: m[2], text: lines.slice(from + 1, i).join("\n"), open: i >= lines.length };
      i++;
    } else if ((m = HEAD.exec(line))) {
      block = { kind: "head", level: m[1].length, text: m[2] };
      i++;
    } else if (RULE.test(line)) {
      block = { kind: "rule" };
      i++;
    } else if (QUOTE.test(line)) {
      const inner = [];
      while (i < lines.length && (m = QUOTE.exec(lines[i]))) {
        inner.push(m[1]);
        i++;
      }
      block = { kind: "quote", text: inner.join("\n") };
    } else if ((m = ITEM.exec(line))) {
      block = { kind: /\d/.test(m[2]) ? "ol" : "ul", start: parseInt(m[2], 10), items: [] };
      const base = m[1].length;
      while (i < lines.length && (m = ITEM.exec(lines[i])) && m[1].length >= base && m[1].length < base + 2
        && (/\d/.test(m[2]) ? "ol" : "ul") === block.kind && !RULE.test(lines[i])) {
        const indent = base + m[2].length + Math.min(4, Math.max(1, m[3].length));
        const inner = [m[4]];
        i++;
        for (; i < lines.length; i++) {
          const l = lines[i];
          const deep = l.length - l.trimStart().length;
          if (!l.trim()) {
            const next = lines.slice(i, i + 3).find((x) => x.trim());
            if (next === undefined || next.length - next.trimStart().length < base + 2) break;
            inner.push("");
          } else if (deep >= base + 2) inner.push(l.slice(Math.min(indent, deep)));
          else if (ITEM.test(l) || starts(l) || inner[inner.length - 1] === "") break;
          else inner.push(l.trim());
        }
        block.items.push(inner.join("\n"));
        while (i < lines.length - 1 && !lines[i].trim() && ITEM.test(lines[i + 1])) i++;
      }
    } else if (line.includes("|") && i + 1 < lines.length && lines[i + 1].includes("-") && TABLE.test(lines[i + 1])) {
      const row = (l) => l.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).slice(0, 40).map((c) => c.trim());
      block = { kind: "table", head: row(line), rows: [] };
      i += 2;
      while (i < lines.length && lines[i].includes("|")) block.rows.push(row(lines[i++]));
    } else {
      i++;
      while (i < lines.length && lines[i].trim() && !starts(lines[i]) && !(ITEM.test(lines[i]) && /^ *(?:[-*+]|1[.)])/.test(lines[i]))) i++;
      block = { kind: "text", text: lines.slice(from, i).join("\n").trim() };
    }
    block.source = block.kind + (block.open ? "…" : "") + lines.slice(from, i).join("\n");
    out.push(block);
  }
  return out;
}

function node(block, depth, copy) {
  switch (block.kind) {
    case "code": {
      const code = h("code", null, block.text);
      return h("figure", { class: "code" },
        h("figcaption", null, h("span", null, block.lang || "code"), copy(() => block.text, "Copy code")),
        h("pre", { tabIndex: 0, "aria-label": "Code" }, code));
    }
    case "head": // below the page's h1
      return h("h" + Math.min(6, block.level + 1), null, ...inline(block.text));
    case "rule":
      return h("hr");
    case "quote":
      return h("blockquote", null, ...nodes(block.text, depth + 1, copy));
    case "ol":
    case "ul":
      return h(block.kind, block.kind === "ol" && block.start !== 1 ? { start: block.start } : null,
        ...block.items.map((item) => h("li", null, ...nodes(item, depth + 1, copy))));
    case "table":
      return h("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" }, h("table", null,
        h("thead", null, h("tr", null, ...block.head.map((c) => h("th", { scope: "col" }, ...inline(c))))),
        h("tbody", null, ...block.rows.map((r) => h("tr", null, ...r.map((c) => h("td", null, ...inline(c))))))));
    default:
      return h("p", null, ...inline(block.text));
  }
}

function nodes(text, depth, copy) {
  if (depth > DEPTH_MAX) return [text];
  const list = blocks(text);
  if (depth > 0 && list.length === 1 && list[0].kind === "text") return inline(list[0].text); // a tight list item
  return list.map((b, i) => (depth > 0 && i === 0 && b.kind === "text" ? h("span", null, ...inline(b.text)) : node(b, depth, copy)));
}

/** Shows the text in `into`, renewing only the blocks that changed. `copy(get, name)` makes a copy button. */
export function render(into, text, copy) {
  const have = [...into.children];
  const list = blocks(text);
  list.forEach((block, i) => {
    if (have[i]?.mdSource === block.source) return;
    const el = node(block, 0, copy);
    el.mdSource = block.source;
    if (have[i]) have[i].replaceWith(el);
    else into.append(el);
  });
  for (const el of have.slice(list.length)) el.remove();
}
