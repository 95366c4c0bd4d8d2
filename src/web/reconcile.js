// The join of the two records: what the transcript holds (`entries`) and what is owed (`pending`), with this browser's
// own optimistic copies (`own`). Pure: values in, the list to show out; no DOM, no clock, no network.
// Rule a change could break: a message is in the list exactly once, whichever of the three knows it.

/** Text as it is compared: placeholders of photos removed, whitespace collapsed. */
export function normalize(text) {
  return String(text ?? "").replace(/\[image(?:\s*#?\s*\d+| not displayed)?\]/gi, " ").replace(/\s+/g, " ").trim();
}

/** The text of a message or an entry, its text blocks joined. */
export function textOf(content) {
  if (typeof content === "string") return content;
  return (Array.isArray(content) ? content : []).filter((b) => b?.type === "text").map((b) => b.text).join("\n\n");
}

/** How many photos a message or an entry has, those that could not be displayed included. */
export function photosOf(content) {
  return (Array.isArray(content) ? content : [])
    .filter((b) => b?.type === "image" || (b?.type === "text" && b.text === "[image not displayed]")).length;
}

/**
 * entries:   oldest first, as history tells them
 * pending:   oldest first: {uuid, turnId?, state, content, reconcileKnownUuids?}
 * delivered: [{uuid, turnId}]: messages whose delivery is done
 * own:       this browser's copies, oldest first: {messageId, text, photos, known, attempted, messageUuid?, turnId?, eventId?}
 *            `known`: uuids of user entries and pending messages that were there when it was written
 * seen:      id of the newest event that entries and pending already speak for; an own copy accepted by then is theirs
 * Answers [{kind: "entry"|"pending"|"own", key, value}].
 */
export function reconcile({ entries, pending = [], delivered = [], own = [], seen = 0 }) {
  const shown = [];
  const uuids = new Set();
  for (const value of entries) {
    if (uuids.has(value.uuid)) continue; // of two with one uuid the first counts
    uuids.add(value.uuid);
    shown.push({ kind: "entry", key: "e:" + value.uuid, value });
  }
  const users = shown.filter((s) => s.value.type === "user").map(({ value }) => ({
    uuid: value.uuid, text: normalize(textOf(value.content)), photos: photosOf(value.content), used: [], usedPhotos: 0,
  }));
  const byUuid = new Map(users.map((u) => [u.uuid, u]));
  const done = new Set(delivered.map((d) => d.uuid));

  // Uses up one occurrence of the text in the entry; false when no unused one is left.
  const take = (entry, text, photos) => {
    if (!text) {
      if (!photos || entry.photos - entry.usedPhotos < photos) return false;
    } else {
      let at = entry.text.indexOf(text);
      while (at >= 0 && entry.used.some(([from, to]) => at < to && at + text.length > from)) at = entry.text.indexOf(text, at + 1);
      if (at < 0) return false;
      entry.used.push([at, at + text.length]);
    }
    entry.usedPhotos += photos;
    return true;
  };
  const byId = (uuid, turnId) => (uuid && uuids.has(uuid) ? uuid : turnId && uuids.has(turnId) ? turnId : null);

  // Ids first, for everybody, so that the text rule sees only what no id explains.
  const waiting = pending.map((value) => {
    const hit = byId(value.uuid, value.turnId);
    const entry = hit && byUuid.get(hit);
    if (entry) take(entry, normalize(textOf(value.content)), photosOf(value.content));
    return { value, gone: Boolean(hit) || done.has(value.uuid) };
  });
  const pendingUuids = new Set(pending.map((p) => p.uuid));
  const copies = own.map((value) => {
    const hit = byId(value.messageUuid, value.turnId);
    const entry = hit && byUuid.get(hit);
    if (entry && !pendingUuids.has(value.messageUuid)) take(entry, normalize(value.text), value.photos ?? 0);
    return {
      value,
      gone: Boolean(hit) || (value.messageUuid !== undefined
        && (pendingUuids.has(value.messageUuid) || done.has(value.messageUuid) || (value.eventId ?? Infinity) <= seen)),
    };
  });

  // An agent that keeps no uuid: by text, in the newest entries that were not there before.
  const newest = users.slice(-(pending.length + 5));
  for (const p of waiting) {
    if (p.gone || !Array.isArray(p.value.reconcileKnownUuids)) continue;
    const known = new Set(p.value.reconcileKnownUuids);
    const text = normalize(textOf(p.value.content));
    p.gone = newest.some((e) => !known.has(e.uuid) && take(e, text, photosOf(p.value.content)));
  }

  // An own copy whose answer never came (reload, lost connection) may have been accepted all the same: it is the pending
  // message, or the entry, with its words that was not there when it was written and that no other copy owns.
  const claimed = new Set(own.map((o) => o.messageUuid).filter(Boolean));
  for (const o of copies) {
    if (o.gone || o.value.messageUuid !== undefined || !o.value.attempted) continue;
    const known = new Set(o.value.known ?? []);
    const text = normalize(o.value.text);
    const photos = o.value.photos ?? 0;
    const twin = pending.find((p) => !known.has(p.uuid) && !claimed.has(p.uuid)
      && normalize(textOf(p.content)) === text && photosOf(p.content) === photos);
    if (twin) {
      claimed.add(twin.uuid);
      o.gone = true;
      continue;
    }
    const last = users.findLastIndex((e) => known.has(e.uuid));
    o.gone = users.slice(last + 1).some((e) => take(e, text, photos));
  }

  for (const { value, gone } of waiting) if (!gone) shown.push({ kind: "pending", key: "p:" + value.uuid, value });
  for (const { value, gone } of copies) if (!gone) shown.push({ kind: "own", key: "o:" + value.messageId, value });
  return shown;
}
