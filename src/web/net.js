// Talking to the server: requests that end, and one WebSocket that comes back by itself.
// Rule a change could break: the cursor only ever moves forward with kept events, so that nothing is asked for twice.

/** What the server, or the way to it, said no with. `status` is 0 when there was no answer at all. */
export class ApiError extends Error {
  constructor(status, code, message, retryAfterS) {
    super(message);
    Object.assign(this, { status, code, retryAfterS });
  }
}

const REQUEST_MS_MAX = 30_000;

/** Asks `path`; a body makes it a POST. Answers the JSON or throws ApiError. */
export async function api(path, body, limitMs = REQUEST_MS_MAX) {
  const gone = new AbortController();
  const timer = setTimeout(() => gone.abort(), limitMs);
  try {
    const answer = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: gone.signal, cache: "no-store", credentials: "same-origin",
    });
    const json = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new ApiError(answer.status, json.code ?? "", json.error ?? answer.statusText, Number(answer.headers.get("Retry-After")) || 0);
    return json;
  } catch (e) {
    throw e instanceof ApiError ? e : new ApiError(0, "unreachable", "the server does not answer");
  } finally {
    clearTimeout(timer);
  }
}

const BACKOFF_MS = [300, 800, 1500, 3000, 6000, 12_000, 30_000];

/** The event stream. `cursor()` says where to go on; `hear(frame)` gets every frame, `state(word, retryAt)` every change. */
export class Events {
  tries = 0;
  socket = null;
  timer = 0;

  constructor({ cursor, hear, state }) {
    Object.assign(this, { cursor, hear, state });
  }

  connect() {
    clearTimeout(this.timer);
    this.drop();
    const url = new URL("/api/events", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    url.searchParams.set("after", this.cursor());
    const socket = new WebSocket(url);
    this.socket = socket;
    // A half-open connection never says so: one that does not open in time is dropped.
    const slow = setTimeout(() => socket.close(), 10_000);
    socket.onopen = () => clearTimeout(slow);
    socket.onmessage = ({ data }) => {
      if (socket !== this.socket) return;
      let frame;
      try {
        frame = JSON.parse(data);
      } catch {
        return;
      }
      if (frame.event === "hello") {
        this.tries = 0;
        this.state("open");
      }
      this.hear(frame);
    };
    socket.onclose = () => {
      clearTimeout(slow);
      if (socket !== this.socket) return;
      this.socket = null;
      const wait = BACKOFF_MS[Math.min(this.tries++, BACKOFF_MS.length - 1)] * (0.75 + Math.random() / 2);
      this.state("closed", Date.now() + wait);
      this.timer = setTimeout(() => this.connect(), wait);
    };
  }

  drop() {
    const socket = this.socket;
    this.socket = null;
    socket?.close();
  }

  /** Tries at once instead of at the end of the back-off; `anew` also gives up a connection that seems open. */
  hurry(anew) {
    if (this.socket && !anew) return;
    this.tries = 0;
    this.connect();
  }
}
