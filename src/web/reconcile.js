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
 * own:       this browser's copies, oldest first: {messageId, text, photos, known, before?, attempted, messageUuid?, turnId?, eventId?}
 *            `known`: uuids of the user entries that were there when it was written; `before`: the messages that are known
 *            not to be this one, {uuid, text, photos}: pending then, or other copies of this browser (see origin, settle)
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
  const users = shown.filter((s) => s.value.type === "user").map(({ value }) => {
    const user = { uuid: value.uuid, text: "", starts: new Set(), ends: new Set(), photos: photosOf(value.content), used: [], usedPhotos: 0 };
    for (const part of textOf(value.content).split(/\n\s*\n/).map(normalize).filter(Boolean)) {
      if (user.text) user.text += " ";
      user.starts.add(user.text.length);
      user.text += part;
      user.ends.add(user.text.length);
    }
    return user;
  });
  const byUuid = new Map(users.map((u) => [u.uuid, u]));
  const done = new Map(delivered.map((d) => [d.uuid, d.turnId]));
  const spent = new Set(); // messages whose words in their entry are used up

  // Uses up one occurrence of the text in the entry; false when no unused one is left. `whole`: only whole paragraphs count.
  const take = (entry, text, photos, whole) => {
    if ((whole || !text) && entry.photos - entry.usedPhotos < photos) return false;
    if (!text) {
      if (!photos) return false;
    } else {
      const free = (from, to) => !entry.used.some(([a, b]) => from < b && to > a) && (!whole || (entry.starts.has(from) && entry.ends.has(to)));
      let at = entry.text.indexOf(text);
      while (at >= 0 && !free(at, at + text.length)) at = entry.text.indexOf(text, at + 1);
      if (at < 0) return false;
      entry.used.push([at, at + text.length]);
    }
    entry.usedPhotos += photos;
    return true;
  };
  const byId = (uuid, turnId) => (uuid && uuids.has(uuid) ? uuid : turnId && uuids.has(turnId) ? turnId : null);

  // Ids first, for everybody, so that the text rule sees only what no id explains.
  const waiting = pending.map((value) => {
    // A failed message was never recorded: a line of its turn is that of other members, sent again without it.
    const hit = byId(value.uuid, value.state === "failed" ? null : value.turnId);
    const entry = hit && byUuid.get(hit);
    if (entry && take(entry, normalize(textOf(value.content)), photosOf(value.content), true)) spent.add(value.uuid);
    return { value, gone: Boolean(hit) || done.has(value.uuid) };
  });
  const pendingUuids = new Set(pending.map((p) => p.uuid));
  const copies = own.map((value) => {
    const hit = byId(value.messageUuid, value.turnId);
    const entry = hit && byUuid.get(hit);
    if (entry && !spent.has(value.messageUuid) && take(entry, normalize(value.text), value.photos ?? 0, true)) spent.add(value.messageUuid);
    return {
      value,
      gone: Boolean(hit) || (value.messageUuid !== undefined
        && (pendingUuids.has(value.messageUuid) || done.has(value.messageUuid) || (value.eventId ?? Infinity) <= seen)),
    };
  });

  // An agent that keeps no uuid: by text, in the newest entries that were not there before.
  // An entry that delivered messages explain is not that of one still owed.
  const explained = new Set(delivered.flatMap((d) => [d.uuid, d.turnId]));
  const newest = users.slice(-(pending.length + 5)).filter((e) => !explained.has(e.uuid));
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
    const others = new Set((o.value.before ?? []).map((b) => b.uuid));
    const twin = pending.find((p) => !known.has(p.uuid) && !others.has(p.uuid) && !claimed.has(p.uuid)
      && normalize(textOf(p.content)) === text && photosOf(p.content) === photos);
    if (twin) {
      claimed.add(twin.uuid);
      o.gone = true;
      continue;
    }
    for (const before of o.value.before ?? []) {
      const entry = byUuid.get(before.uuid) ?? byUuid.get(done.get(before.uuid));
      if (entry && !spent.has(before.uuid) && take(entry, normalize(before.text), before.photos ?? 0, true)) spent.add(before.uuid);
    }
    const last = users.findLastIndex((e) => known.has(e.uuid));
    o.gone = users.slice(last + 1).some((e) => take(e, text, photos, true));
  }

  for (const { value, gone } of waiting) if (!gone) shown.push({ kind: "pending", key: "p:" + value.uuid, value });
  for (const { value, gone } of copies) if (!gone) shown.push({ kind: "own", key: "o:" + value.messageId, value });
  return shown;
}

/** What a new own copy must not be taken for, to be kept in it: `known` entries, and messages `before` it. */
export function origin({ entries, pending, own }) {
  return {
    known: entries.filter((e) => e.type === "user").slice(-20).map((e) => e.uuid),
    before: pending.map((p) => ({ uuid: p.uuid, text: textOf(p.content), photos: photosOf(p.content) }))
      .concat(own.filter((o) => o.messageUuid !== undefined).map((o) => ({ uuid: o.messageUuid, text: o.text, photos: o.photos }))),
  };
}

/**
 * Notes the server's answer on the own copy it is for, and on the others that this message is not theirs: of two equal
 * ones sent in a row the second must not be taken for the first. Answers the copy, or undefined if it was answered before.
 */
export function settle(own, messageId, answer) {
  const copy = own.find((o) => o.messageId === messageId && o.messageUuid === undefined);
  if (!copy) return undefined;
  Object.assign(copy, { messageUuid: answer.messageUuid, turnId: answer.turnId, eventId: answer.eventId });
  for (const o of own) {
    if (o.messageUuid !== undefined) continue;
    o.before = (o.before ?? []).concat({ uuid: answer.messageUuid, text: copy.text, photos: copy.photos });
  }
  return copy;
}
