// A job's events, over as many connections as it takes. EventSource cannot send the key.

import { ApiError, send } from "./api.js";

const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 8000;
/** The gateway sends something every 15 s. A phone that slept may wait for a dead connection. */
const DEAF_MS = 40000;
const LAST_EVENTS = ["finished", "failed", "cancelled"];

/**
 * Calls `onEvent` with each event of a job, from the first to the last, each once; `onOpen` when it
 * is connected, and `onBreak` when the connection broke off.
 *
 * Raises ApiError if the gateway refuses, and AbortError once `signal` is aborted.
 */
export async function follow(jobId, { onEvent, onOpen, onBreak, signal }) {
  let lastId = "";
  let pause = FIRST_PAUSE_MS;
  for (;;) {
    const deaf = new AbortController();
    let timer;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => deaf.abort(), DEAF_MS);
    };
    try {
      heard();
      const headers = lastId ? { "Last-Event-ID": lastId } : {};
      const either = AbortSignal.any([signal, deaf.signal]);
      const answer = await send(`v1/jobs/${jobId}/events`, { headers, signal: either });
      if (answer.status === 204) return;
      onOpen();
      for await (const event of parsed(answer.body, heard)) {
        lastId = event.id || lastId;
        pause = FIRST_PAUSE_MS;
        onEvent(JSON.parse(event.data));
        if (LAST_EVENTS.includes(event.type)) return;
      }
    } catch (error) {
      if (signal.aborted || (error instanceof ApiError && error.status < 500)) throw error;
    } finally {
      clearTimeout(timer);
    }
    onBreak();
    await slept(pause * (0.5 + Math.random()), signal);
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
}

/** The server-sent events in a stream of bytes; `onBytes` is called whenever some come. */
async function* parsed(body, onBytes) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = {};
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      onBytes();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (event.data !== undefined) yield event;
          event = {};
        } else if (!line.startsWith(":")) {
          const colon = line.indexOf(":");
          const name = colon < 0 ? line : line.slice(0, colon);
          const text = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
          const field = name === "event" ? "type" : name;
          event[field] = field === "data" && event.data !== undefined ? `${event.data}\n${text}` : text;
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function slept(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}
