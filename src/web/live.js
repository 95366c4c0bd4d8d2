// One turn as it streams in: adapted messages in, blocks to show out. Pure.
// Rule a change could break: a new message_start voids the deltas before it that no `assistant` message confirmed.

const RESULT_CHARS_MAX = 500; // as history grafts results

export class LiveTurn {
  constructor(turnId) {
    this.turnId = turnId;
    this.seq = 0; // of the newest frame applied
    this.blocks = []; // confirmed: {uuid, block}
    this.partial = []; // growing: {block, json}
    this.retry = null; // {attempt, max, delayMs, status, error} while the model's service is asked again
    this.ended = false;
    this.gap = false;
  }

  /** Applies a frame; frames at or below `seq` were applied already. Answers whether frames are missing before it. */
  take(seq, msg) {
    if (seq <= this.seq) return false;
    const missing = seq > this.seq + 1;
    this.seq = seq;
    this.apply(msg);
    return missing;
  }

  apply(msg) {
    if (!msg || msg.parentToolUseId || msg.parent_tool_use_id) return; // a helper of the agent speaks; its call shows
    switch (msg.type) {
      case "stream_event":
        this.event(msg.event ?? {});
        break;
      case "assistant":
        this.confirm(msg);
        break;
      case "user":
        this.result(msg);
        break;
      case "status":
        if (msg.kind === "api_retry") {
          this.retry = {
            attempt: msg.attempt, max: msg.maxRetries ?? msg.max_retries, delayMs: msg.retryDelayMs ?? msg.retry_delay_ms,
            status: msg.errorStatus ?? msg.error_status, error: msg.error,
          };
        }
        break;
      default: // a kind that this page does not know is none of its business
    }
  }

  event(event) {
    switch (event.type) {
      case "message_start":
        this.partial = [];
        this.retry = null;
        break;
      case "content_block_start": {
        const b = event.content_block ?? {};
        const block = b.type === "tool_use" ? { type: "tool_use", toolName: b.name, toolId: b.id, input: null }
          : { type: b.type === "thinking" || b.type === "redacted_thinking" ? "thinking" : "text", text: b.text || b.thinking || "" };
        this.partial.push({ index: event.index, block, json: "" });
        break;
      }
      case "content_block_delta": {
        const d = event.delta ?? {};
        let p = this.partial.find((x) => x.index === event.index);
        if (!p) {
          if (d.text === undefined && d.thinking === undefined) break;
          p = { index: event.index, block: { type: d.thinking === undefined ? "text" : "thinking", text: "" }, json: "" };
          this.partial.push(p);
        }
        if (d.partial_json !== undefined) p.json += d.partial_json;
        else p.block.text = (p.block.text ?? "") + (d.text ?? d.thinking ?? "");
        break;
      }
      default:
    }
  }

  confirm(msg) {
    const content = msg.message?.content;
    const list = typeof content === "string" ? [{ type: "text", text: content }] : Array.isArray(content) ? content : [];
    list.forEach((b, i) => {
      const block = b.type === "tool_use" ? { type: "tool_use", toolName: b.name ?? b.toolName, toolId: b.id ?? b.toolId, input: b.input }
        : b.type === "thinking" ? { type: "thinking", text: b.thinking ?? b.text ?? "" }
          : b.type === "text" ? { type: "text", text: b.text ?? "" } : { type: "text", text: `[${b.type}]` };
      const at = this.partial.findIndex((p) => p.block.type === block.type);
      if (at >= 0) this.partial.splice(at, 1);
      this.blocks.push({ key: `${msg.uuid ?? this.seq}/${i}`, uuid: msg.uuid, block });
    });
  }

  result(msg) {
    const content = msg.message?.content;
    const list = typeof content === "string" ? [{ type: "text", text: content }] : Array.isArray(content) ? content : [];
    for (const b of list) {
      if (b.type === "tool_result") {
        const call = this.blocks.find((x) => x.block.toolId === b.tool_use_id);
        const text = typeof b.content === "string" ? b.content
          : (b.content ?? []).map((c) => (c.type === "text" ? c.text : `[${c.type}]`)).join("\n");
        if (call) Object.assign(call.block, { resultSummary: [...text.slice(0, 2 * RESULT_CHARS_MAX)].slice(0, RESULT_CHARS_MAX).join(""), isError: b.is_error === true });
      } else if (b.type === "text" && b.text?.startsWith("[Request interrupted by user")) {
        this.blocks.push({ key: `${msg.uuid ?? this.seq}/x`, uuid: msg.uuid, block: { type: "interrupted" } });
        this.partial = [];
      }
    }
  }

  /** Blocks that the transcript does not hold yet, oldest first; a growing one has `growing: true`. */
  shown(uuids) {
    const out = this.blocks.filter((b) => !(b.uuid && uuids.has(b.uuid)));
    if (!this.ended) {
      for (const p of this.partial) {
        const block = p.block.type === "tool_use" ? { ...p.block, inputSummary: p.json.slice(0, 200) } : p.block;
        if (block.type === "tool_use" || block.text) out.push({ key: "grow/" + p.index, block, growing: true });
      }
    }
    return out;
  }
}
