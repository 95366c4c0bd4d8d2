// Messages on their way: kept in IndexedDB, photos as first sent, until the server answered for them.
// Rule a change could break: a message keeps its messageId and its bytes for life, so that a repeat is never a second copy.
import { api } from "./net.js";
import { settle } from "./reconcile.js";

const BACKOFF_MS = [500, 1000, 2000, 4000, 8000, 15_000, 30_000];
const SEND_MS_MAX = 120_000; // 25 MB over a slow phone line

/** A fresh id; randomUUID is not there on plain http. */
export function freshId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");
}

const asked = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function base64(bytes, type) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(new Blob([bytes], { type }));
  });
  return url.slice(url.indexOf(",") + 1);
}

export class Outbox {
  items = []; // oldest first: {messageId, conv, session, text, images, at, known, attempted, state, error?, messageUuid?, turnId?, eventId?}
  busy = new Set(); // conversations with a send under way
  stored = new Set(); // messageIds that were seen in IndexedDB
  db = null;
  tab = "BroadcastChannel" in globalThis ? new BroadcastChannel("beebox-outbox") : null;

  /** `changed()` after every change; `answered(item, answer, conv)` once the server took one over. */
  constructor({ changed, answered }) {
    Object.assign(this, { changed, answered });
    if (this.tab) this.tab.onmessage = ({ data }) => (data.answer ? this.settle(data.messageId, data.answer) : this.reload());
  }

  async open() {
    try {
      const request = indexedDB.open("beebox", 1);
      request.onupgradeneeded = () => request.result.createObjectStore("outbox", { keyPath: "messageId" });
      this.db = await asked(request);
      await this.reload();
    } catch {
      this.db = null; // private windows: kept for the life of the tab only
    }
  }

  store(mode = "readwrite") {
    return this.db.transaction("outbox", mode).objectStore("outbox");
  }

  async keep(item) {
    try {
      if (this.db) {
        await asked(this.store().put(item));
        this.stored.add(item.messageId);
      }
    } catch { /* no room: the copy in memory is still sent */ }
    this.tab?.postMessage({});
  }

  /** Reads what other tabs, or this one before its reload, left; answered copies stay until the page sees them arrive. */
  async reload() {
    if (!this.db) return;
    const kept = await asked(this.store("readonly").getAll()).catch(() => null);
    if (!kept) return;
    const mine = new Map(this.items.map((i) => [i.messageId, i]));
    // Gone from the store is only what was in it: a message written while this was read may not be there yet.
    const inStore = new Set(kept.map((k) => k.messageId));
    this.items = this.items.filter((i) => i.messageUuid || inStore.has(i.messageId) || !this.stored.has(i.messageId));
    for (const k of kept) {
      this.stored.add(k.messageId);
      const have = mine.get(k.messageId);
      // Answered meanwhile: what was read is older, and would move the copy back to where it was written.
      if (have?.messageUuid) continue;
      if (have) Object.assign(have, { attempted: have.attempted || k.attempted, state: k.state, error: k.error, session: k.session, conv: k.conv });
      else this.items.push(k);
    }
    this.items.sort((a, b) => a.at - b.at);
    this.changed();
    this.pump();
  }

  /** Own copies of one conversation, oldest first. */
  of(conv) {
    return this.items.filter((i) => i.conv === conv);
  }

  async add(item) {
    this.items.push(item);
    this.changed();
    await this.keep(item);
    this.pump();
  }

  async retry(item) {
    Object.assign(item, { state: "waiting", error: undefined });
    this.changed();
    await this.keep(item);
    this.pump();
  }

  /** Forgets a copy: refused and given up, or seen to have arrived. */
  async forget(item) {
    this.items = this.items.filter((i) => i !== item);
    this.changed();
    try {
      if (this.db) await asked(this.store().delete(item.messageId));
    } catch { /* it comes back once, and is answered as a repeat */ }
    this.tab?.postMessage({});
  }

  pump() {
    for (const conv of new Set(this.items.filter((i) => i.state === "waiting" && !i.messageUuid).map((i) => i.conv))) {
      if (this.busy.has(conv)) continue;
      this.busy.add(conv);
      const work = () => this.drain(conv);
      // One tab at a time, where the browser can; the server knows a repeat anyway.
      const run = navigator.locks ? navigator.locks.request("beebox-send-" + conv, work) : work();
      run.catch(() => {}).finally(() => {
        this.busy.delete(conv);
        if (this.items.some((i) => i.conv === conv && i.state === "waiting" && !i.messageUuid)) setTimeout(() => this.pump(), 50);
      });
    }
  }

  async drain(conv) {
    for (let tries = 0; ;) {
      const item = this.items.find((i) => i.conv === conv && i.state === "waiting" && !i.messageUuid);
      if (!item) return;
      try {
        if (!item.attempted) {
          item.attempted = true;
          await this.keep(item);
        }
        const images = [];
        for (const [n, image] of item.images.entries()) {
          images.push({ id: n + 1, mimeType: image.mimeType, dataBase64: await base64(image.bytes, image.mimeType) });
        }
        const body = { message: item.text, session: item.session, messageId: item.messageId };
        if (images.length) body.images = images;
        const answer = await api("/api/chat/send", body, SEND_MS_MAX);
        if (this.db) await asked(this.store().delete(item.messageId)).catch(() => {});
        this.tab?.postMessage({ messageId: item.messageId, answer });
        this.settle(item.messageId, answer);
        tries = 0;
      } catch (e) {
        const again = e.status === 0 || e.status === 401 || e.status === 429 || e.status >= 500;
        item.error = e.message;
        if (!again) {
          item.state = "refused";
          await this.keep(item);
          this.changed();
          continue;
        }
        this.changed();
        const wait = e.retryAfterS * 1000 || BACKOFF_MS[Math.min(tries++, BACKOFF_MS.length - 1)];
        await new Promise((resolve) => {
          this.wake = resolve;
          setTimeout(resolve, wait);
        });
      }
    }
  }

  /** The server answered, here or in another tab. */
  settle(messageId, answer) {
    const item = settle(this.items, messageId, answer);
    if (!item) return;
    const conv = item.conv;
    item.error = undefined;
    for (const i of this.items) {
      if (i.conv !== conv) continue;
      i.conv = answer.sessionId;
      if (i.session === "new" || i.session === "main") i.session = answer.sessionId;
      if (i !== item && !i.messageUuid) this.keep(i);
    }
    this.answered(item, answer, conv);
    this.changed();
  }

  /** The way to the server seems open again. */
  hurry() {
    this.wake?.();
    this.pump();
  }
}
