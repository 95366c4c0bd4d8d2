// Values in, DOM nodes out: messages, blocks, photos, times. Everything from outside enters as text.
// Rule a change could break: a photo's box has its size before the photo is there, so that nothing jumps.
import { h, plain, render } from "./markdown.js";

const SVG = "http://www.w3.org/2000/svg";

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", "#i-" + name);
  svg.append(use);
  return svg;
}

/** Puts text on the clipboard, also on plain http, where the clipboard's own interface is missing. */
async function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = h("textarea", { class: "sr", value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function copyButton(get, name = "Copy message") {
  const button = h("button", { type: "button", class: "copy", "aria-label": name, title: name, onclick: async () => {
    try {
      await toClipboard(get());
    } catch {
      return;
    }
    button.replaceChildren(icon("done"));
    button.setAttribute("aria-label", "Copied");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", name);
    }, 1500);
  } }, icon("copy"));
  return button;
}

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
const dayName = new Intl.DateTimeFormat(undefined, { weekday: "long", day: "numeric", month: "long" });
const date = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });
const weekday = new Intl.DateTimeFormat(undefined, { weekday: "short" });
const shortDate = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });
const whole = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "medium" });

const valid = (at) => {
  const d = new Date(at);
  return Number.isNaN(d.getTime()) ? null : d;
};

export function timeNode(at) {
  const d = valid(at);
  return d && h("time", { dateTime: d.toISOString(), title: whole.format(d) }, clock.format(d));
}

const daysAgo = (d) => Math.round((new Date().setHours(0, 0, 0, 0) - new Date(d).setHours(0, 0, 0, 0)) / 864e5);

/** The day of a time in words, for the lines between days. */
export function day(at) {
  const d = valid(at);
  if (!d) return "";
  const ago = daysAgo(d);
  return ago === 0 ? "Today" : ago === 1 ? "Yesterday" : ago < 300 ? dayName.format(d) : date.format(d);
}

/** How long ago, short, for the list of conversations. */
export function ago(at) {
  const d = valid(at);
  if (!d) return "";
  const minutes = Math.round((Date.now() - d) / 60_000);
  if (minutes < 1) return "now";
  if (minutes < 60) return `${minutes} min`;
  const days = daysAgo(d);
  return days === 0 ? clock.format(d) : days < 7 ? weekday.format(d) : days < 300 ? shortDate.format(d) : String(d.getFullYear());
}

let viewer;
export function setViewer(dialog) {
  viewer = dialog;
  dialog.addEventListener("click", (e) => e.target !== dialog.querySelector("img") && dialog.close());
}

function photo(src, at, of) {
  const alt = of > 1 ? `Photo ${at} of ${of}` : "Photo";
  const img = h("img", { loading: "lazy", decoding: "async", width: 320, height: 240, alt, onerror: () => button.replaceWith(lost()) });
  img.src = src; // after `loading`, which it obeys only then
  const button = h("button", { type: "button", class: "photo", "aria-label": `${alt}: open`, onclick: () => {
    const big = viewer.querySelector("img");
    big.src = src;
    big.alt = alt;
    viewer.showModal();
  } }, img);
  return button;
}

const lost = () => h("span", { class: "lost" }, "[image not displayed]");

/** Photo blocks -> a row; `src(block, n)` says where the n-th photo is, or null. */
function photoRow(blocks, src) {
  const row = h("div", { class: "photos" + (blocks.length > 1 ? " many" : "") });
  blocks.forEach((b, n) => {
    const url = src(b, n);
    row.append(url ? photo(url, n + 1, blocks.length) : lost());
  });
  return row;
}

/** Where a photo of the transcript is; only this server's own references are followed. */
export function mediaUrl(block) {
  const ref = block.imageRef ?? block.imageUrl?.replace(/^\/api\/session-media\//, "") ?? "";
  return /^[\w-]{1,64}\/[\w-]{1,64}\/\d{1,6}$/.test(ref) ? "/api/session-media/" + ref : null;
}

const fold = (cls, label, detail, ...body) => h("details", { class: "fold " + cls },
  h("summary", null, h("b", null, label), detail && h("span", null, detail)), h("div", { class: "inside" }, ...body));

const pretty = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

const scrollable = (cls, name, text) => h("pre", { class: cls, tabIndex: 0, "aria-label": name }, text);

function tool(block, growing) {
  const state = block.resultSummary === undefined ? (growing ? "" : "") : block.isError ? " failed" : " done";
  const input = block.input === null || block.input === undefined ? "" : pretty(block.input);
  const summary = block.inputSummary || summarize(block.input);
  return fold("tool" + state, block.toolName || "tool", summary,
    input && input !== "{}" && scrollable("", "What the tool was given", input),
    block.resultSummary !== undefined && block.resultSummary !== null && scrollable("result", "What the tool answered", block.resultSummary || "(nothing)"),
    block.resultSummary === undefined && h("p", { class: "faint" }, "No result yet."));
}

function summarize(input) {
  if (!input || typeof input !== "object") return typeof input === "string" ? input : "";
  const first = input.description ?? input.command ?? input.file_path ?? input.path ?? input.pattern ?? input.query ?? input.url
    ?? Object.values(input).find((v) => typeof v === "string");
  return first === undefined ? "" : String(first).slice(0, 200);
}

// Features are told by the agent in tags of our own; history leaves them out, so the stream does too.
const spoken = (text) => text.replace(/<chat-app\b[^<>]*>(?:\s*<\/chat-app>)?/gi, "");

/** One block of the agent. `old` is the node that showed it before; a growing text is renewed in place. */
export function blockNode(block, { old, growing } = {}) {
  if (block.type === "text") {
    const el = old?.matches(".md") ? old : h("div", { class: "md" });
    el.classList.toggle("growing", Boolean(growing));
    render(el, spoken(block.text ?? ""), copyButton);
    return el;
  }
  if (block.type === "thinking") {
    const el = old?.matches(".thinking") ? old : fold("thinking", "", "", h("div", { class: "words" }));
    el.querySelector("b").textContent = growing ? "Thinking…" : "Thought";
    el.querySelector(".words").textContent = block.text ?? "";
    return el;
  }
  if (block.type === "tool_use") {
    const el = tool(block, growing);
    if (old?.open) el.open = true;
    return el;
  }
  if (block.type === "interrupted") return mark("You interrupted the answer");
  if (block.type === "image") return photoRow([block], mediaUrl);
  return h("p", { class: "faint" }, `[${block.type}]`);
}

export const mark = (text) => h("p", { class: "mark-line" }, h("span", null, text));

/** The words and photos of a person. `photos(block, n)` says where a photo is. */
function words(content, photos) {
  const blocks = typeof content === "string" ? [{ type: "text", text: content }] : Array.isArray(content) ? content : [];
  const images = blocks.filter((b) => b.type === "image" || b.text === "[image not displayed]");
  const texts = blocks.filter((b) => b.type === "text" && b.text !== "[image not displayed]" && b.text?.trim());
  return [
    images.length > 0 && photoRow(images, (b, n) => (b.type === "image" ? photos(b, n) : null)),
    texts.length > 0 && h("div", { class: "bubble" }, ...texts.map((b) => h("p", null, plain(b.text)))),
  ];
}

const textOf = (content) => (typeof content === "string" ? content : (content ?? []).filter((b) => b.type === "text").map((b) => b.text).join("\n\n"));

/** A message of a person, in any state. */
export function userNode({ content, timestamp, user, state, stateText, photos, actions }) {
  const text = textOf(content);
  return h("article", { class: "user" + (state ? " " + state : ""), "aria-label": `${user || "You"}${state ? ", " + stateText : ""}` },
    ...words(content, photos),
    h("footer", null, text && copyButton(() => text), timeNode(timestamp), user && h("span", null, user),
      stateText && h("span", { class: "badge" }, stateText),
      ...(actions ?? []).map(([label, act]) => h("button", { type: "button", class: "link", onclick: act }, label))));
}

/** An entry of the transcript. `local(uuid, n)`: this tab's own copy of a photo, while there is one. */
export function entryNode(entry, local) {
  const content = Array.isArray(entry.content) ? entry.content : [{ type: "text", text: String(entry.content ?? "") }];
  switch (entry.type) {
    case "user":
      return userNode({ content, timestamp: entry.timestamp, user: entry.user, photos: (b, n) => local(entry.uuid, n) ?? mediaUrl(b) });
    case "assistant": {
      const text = textOf(content);
      const el = h("article", { class: "agent", "aria-label": "Agent" });
      let images = [];
      const flush = () => {
        if (images.length) el.append(photoRow(images, mediaUrl));
        images = [];
      };
      for (const b of content) {
        if (b.type === "image") images.push(b);
        else {
          flush();
          el.append(blockNode(b));
        }
      }
      flush();
      if (text) el.append(h("footer", null, copyButton(() => text), timeNode(entry.timestamp)));
      return el;
    }
    case "compaction":
      return h("article", { class: "aside" }, fold("", "The conversation so far was summed up", "", h("div", { class: "words" }, textOf(content))));
    case "interrupted":
      return mark("The answer was interrupted");
    default: {
      const text = textOf(content);
      const summary = /<summary>([^<]{1,300})<\/summary>/.exec(text)?.[1]; // of a finished background task
      return h("article", { class: "aside" }, summary || text.length > 120 || text.includes("\n")
        ? fold("", entry.type === "notice" ? "Notice" : entry.type, summary ?? text.slice(0, 100), h("div", { class: "words" }, text)) : mark(text || entry.type));
    }
  }
}
