// What this page knows of one conversation: the newest snapshot of the server and the kept events after it. Pure.
// Rule a change could break: a snapshot speaks up to its cursor; events after the cursor are applied again on top of it.
import { origin, reconcile } from "./reconcile.js";

const EVENTS_MAX = 2000;

/** `EPOCH.ID` or `ID` -> {epoch, id}. */
export function parseCursor(cursor) {
  const [, epoch = "", id = "0"] = /^(?:(.*)\.)?(\d+)$/.exec(String(cursor ?? "0")) ?? [];
  return { epoch, id: Number(id) };
}

export class Conversation {
  entries = [];
  offset = 0;
  total = 0;
  skippedLines = 0;
  pending = [];
  delivered = [];
  seen = 0;
  epoch = "";
  events = []; // kept events since the last snapshot's cursor
  errors = new Map(); // messageUuid -> why it failed, in words
  loaded = false; // something may be drawn: also a draft that no snapshot speaks for yet
  adopted = false;

  /**
   * Takes a bootstrap answer; older pages that still join on are kept. Answers whether it should be asked for once more
   * before anything is drawn: a message came while it was made, and nothing tells which entries were there before.
   */
  adopt(snapshot) {
    const first = !this.adopted;
    const before = first ? undefined : this.userUuids();
    const { epoch, id } = parseCursor(snapshot.cursor);
    const kept = first || epoch === this.epoch ? this.events.filter((e) => e.id > id) : [];
    const fresh = snapshot.entries ?? [];
    const offset = snapshot.offset ?? 0;
    const mine = offset - this.offset; // how many of ours come before the fresh ones
    const joins = this.adopted && mine > 0 && mine <= this.entries.length && (snapshot.total ?? 0) >= this.total
      && (mine === this.entries.length || fresh.length === 0 || this.entries[mine].uuid === fresh[0].uuid);
    this.entries = joins ? this.entries.slice(0, mine).concat(fresh) : fresh;
    this.offset = joins ? this.offset : offset;
    this.total = snapshot.total ?? fresh.length;
    this.skippedLines = snapshot.skippedLines ?? this.skippedLines;
    this.pending = (snapshot.pending ?? []).map((p) => ({ ...p }));
    this.delivered = snapshot.delivered ?? [];
    this.epoch = epoch;
    this.seen = id;
    this.events = [];
    this.loaded = true;
    this.adopted = true;
    for (const event of kept) this.hear(event, before);
    return first && kept.some((e) => e.event === "chat-user-message");
  }

  /** Older entries, read from `offset` on up to where ours begin. */
  prepend(entries, offset) {
    this.entries = entries.concat(this.entries);
    this.offset = offset;
  }

  /**
   * Takes a kept event of this session; `known`: the user entries that were there before it. Answers whether the
   * transcript should be read again.
   */
  hear({ id, event, data }, known = this.userUuids()) {
    if (id <= this.seen) return false;
    this.seen = id;
    this.events.push({ id, event, data });
    if (this.events.length > EVENTS_MAX) this.events.shift();
    switch (event) {
      case "chat-user-message":
        if (!this.pending.some((p) => p.uuid === data.messageUuid)) {
          const content = data.message ? [{ type: "text", text: data.message }] : [];
          for (let n = 0; n < (data.images ?? 0); n++) content.push({ type: "image", pending: true });
          this.pending.push({
            uuid: data.messageUuid, type: "user", timestamp: data.timestamp, state: "accepted", content,
            reconcileKnownUuids: known,
          });
        }
        return false;
      case "chat-message-dispatched":
        for (const p of this.pending) {
          if (data.messageUuids.includes(p.uuid)) Object.assign(p, { turnId: data.turnId, state: "dispatched" });
        }
        return false;
      case "chat-queue-cleared":
        this.pending = this.pending.filter((p) => !data.messageUuids.includes(p.uuid));
        return true;
      case "chat-turn-failed":
        for (const uuid of data.messageUuids ?? []) this.errors.set(uuid, data.error);
        for (const p of this.pending) {
          if (data.willRetry && (data.messageUuids ?? []).includes(p.uuid)) p.state = "accepted";
        }
        return true;
      case "chat-complete":
      case "chat-session-assigned":
        return true;
      default:
        return false;
    }
  }

  userUuids() {
    return this.entries.filter((e) => e.type === "user").map((e) => e.uuid);
  }

  /** What a new own copy keeps of the moment it was written. */
  origin(own) {
    return origin({ entries: this.entries, pending: this.pending, own });
  }

  /** What is shown, by the rule of reconcile.js. */
  shown(own) {
    // Before the first snapshot some events were missed: `seen` speaks for nothing yet.
    return reconcile({ entries: this.entries, pending: this.pending, delivered: this.delivered, own, seen: this.adopted ? this.seen : 0 });
  }
}
