// One answer: its text as it comes, its thought, and what happened to its job.

import { ApiError, call, send } from "./api.js";
import { el, harmless, setText } from "./dom.js";
import { follow } from "./events.js";
import { counted, duration, rate } from "./format.js";
import { Markdown } from "./markdown.js";
import { Polling } from "./polling.js";

const SILENCE_MS = 2500;
const TICK_MS = 500;
const WAIT_MS = 2000;
/** A new connection begins with the events that the page missed, all at once. */
const REPLAY_MS = 500;

const ENDS = {
  finished: (event) => `Finished: ${event.finish_reason}`,
  failed: (event) => `Failed: ${event.error.message}`,
  cancelled: () => "Cancelled",
};

export class Answer {
  /** `plain`: the text is no Markdown. `onState(text)` hears each state. */
  constructor({ plain, onState }) {
    this.onState = onState;
    this.abort = new AbortController();
    this.jobId = "";
    this.text = "";
    this.ended = false;
    this.attempts = 0;
    this.tokens = 0;
    this.worker = "";
    this.reading = this.paused = false;
    this.thought = el("div", { class: "thought", dir: "auto" });
    this.thoughtTitle = el("summary", {}, "Thinking");
    this.thoughts = el("details", { class: "thoughts", hidden: true }, this.thoughtTitle, this.thought);
    this.output = el("div", { class: plain ? "output raw" : "output", dir: "auto" });
    this.markdown = plain ? null : new Markdown(this.output);
    this.figures = el("span", { class: "figures" });
    this.log = el("ol", { class: "log", "aria-label": "What happened to this job" });
    this.element = el(
      "div",
      { class: "answer" },
      this.thoughts,
      this.output,
      el("details", { class: "happened" }, el("summary", {}, this.figures), this.log),
    );
  }

  /** Follows a job until it ends. `begun`: when it was submitted, as Unix time in ms, or null if that
   * is not known; `replays`: the page was loaded since. */
  async run(jobId, { begun = Date.now(), replays = false } = {}) {
    this.jobId = jobId;
    this.begunAt = begun === null ? null : performance.now() - Math.max(0, Date.now() - begun);
    this.heardAt = performance.now();
    /** Whether its next connection begins with what happened long ago, and until when it does. */
    this.replays = replays;
    this.liveAt = 0;
    /** Tokens that came live, since when: replayed ones say nothing about the speed. */
    this.timed = 0;
    this.timedSince = this.thinkingSince = null;
    this.#say("Queued");
    this.#note(`job ${jobId}`);
    const timer = setInterval(() => this.#tick(), TICK_MS);
    const waits = new Polling(() => this.#wait(waits), WAIT_MS);
    waits.start();
    try {
      await follow(jobId, {
        onEvent: (event) => this.#event(event),
        onOpen: () => this.#resume(),
        onBreak: () => this.#pause("connection lost"),
        signal: this.abort.signal,
      });
    } catch (error) {
      if (!this.abort.signal.aborted) {
        const gone = error instanceof ApiError && error.status === 404;
        this.#say(gone ? "Its events have expired" : `Not followed any more: ${error.message}`);
      }
    } finally {
      clearInterval(timer);
      waits.stop();
      this.markdown?.draw();
      this.ended = true;
      this.#progress(performance.now());
    }
  }

  /** Ends the job. Raises an Error with the sentence to show, if that did not reach the gateway. */
  async cancel() {
    this.#say("Cancelling");
    try {
      await send(`v1/jobs/${this.jobId}`, { method: "DELETE" });
    } catch (error) {
      // 409: it has ended already, and its last event says how.
      if (error.status !== 409) throw new Error("The cancel did not reach the gateway. Try again.");
    }
  }

  #event(event) {
    const now = performance.now();
    const silentMs = now - this.heardAt;
    this.heardAt = now;
    if (event.type === "started") {
      this.worker = event.worker;
      const again = this.attempts > 0;
      this.attempts = event.attempt;
      this.reading = true;
      this.timedSince = null;
      const what = `attempt ${event.attempt} on ${event.worker}`;
      const pause = now < this.liveAt ? "" : `, after a pause of ${duration(silentMs)}`;
      this.#note(what + (again ? pause : `, queued for ${duration(event.queue_ms)}`));
      this.#say(again ? `Resumed by ${event.worker}, attempt ${event.attempt}` : this.#state());
    } else if (event.type === "restarted") {
      this.tokens = 0;
      this.timedSince = null;
      this.#clear();
      this.#note("the model was replaced: the text begins again");
    } else if (event.type === "tokens") {
      this.#add(event, now);
    } else {
      this.#end(event);
    }
    this.paused = false;
    this.#progress(now);
  }

  #add(event, now) {
    this.tokens += event.ids.length;
    if (now < this.liveAt) this.timedSince = null;
    else if (this.timedSince === null) [this.timedSince, this.timed] = [now, 0];
    else this.timed += event.ids.length;
    const changes = this.reading || this.paused;
    this.reading = false;
    if (changes) this.#say(this.#state());
    if (event.reasoning_content) {
      this.thinkingSince ??= now;
      this.thoughts.hidden = false;
      this.thought.append(harmless(event.reasoning_content));
    }
    if (!event.text) return;
    if (this.thinkingSince !== null && !this.text) {
      setText(this.thoughtTitle, `Thought for ${duration(now - this.thinkingSince)}`);
    }
    this.text += event.text;
    if (this.markdown) this.markdown.push(event.text);
    else this.output.append(harmless(event.text));
  }

  #clear() {
    this.text = "";
    this.thought.replaceChildren();
    this.thoughts.hidden = true;
    if (this.markdown) this.markdown.clear();
    else this.output.replaceChildren();
  }

  #end(event) {
    if (!this.text && this.thinkingSince !== null) setText(this.thoughtTitle, "Thought");
    this.#say(ENDS[event.type](event));
    if (event.type === "failed") this.output.after(el("p", { class: "error", role: "alert" }, event.error.message));
    const { timings } = event;
    const how = timings
      ? `: queued ${duration(timings.queue_ms)}, prefill ${duration(timings.prefill_ms)}, decode ${duration(timings.decode_ms)}`
      : "";
    this.#note(`${event.type}${how}`);
  }

  /** Says where the job waits, until it has begun. */
  async #wait(waits) {
    const { position } = await call(`v1/jobs/${this.jobId}`);
    if (this.attempts || this.ended) waits.stop();
    else if (position) this.#say(`Queued: ${placeOf(position)}`);
  }

  #tick() {
    const now = performance.now();
    // A long prompt takes longer than that before its first token.
    const generates = this.attempts && !this.reading && !this.paused;
    if (generates && now - this.heardAt > SILENCE_MS) {
      this.#pause("no token; if the worker died, another goes on here");
    }
    this.#progress(now);
  }

  #pause(reason) {
    if (this.paused) return;
    this.paused = true;
    this.#say(`Paused: ${reason}`);
    this.#note(`pause: ${reason}`);
  }

  #resume() {
    this.heardAt = performance.now();
    if (this.replays) this.liveAt = this.heardAt + REPLAY_MS;
    this.replays = true;
    if (!this.paused) return;
    this.paused = false;
    this.#say(this.#state());
  }

  #progress(now) {
    const parts = [counted(this.tokens, "token")];
    const timedMs = this.timedSince === null ? 0 : this.heardAt - this.timedSince;
    if (this.timed && timedMs > 0) parts.push(`${rate((this.timed * 1000) / timedMs)}/s`);
    if (this.attempts > 1) parts.push(`attempt ${this.attempts}`);
    if (this.worker) parts.push(this.worker);
    if (this.begunAt !== null) parts.push(duration((this.ended ? this.heardAt : now) - this.begunAt));
    setText(this.figures, parts.join(" · "));
  }

  #note(text) {
    const now = performance.now();
    const known = this.begunAt !== null && now >= this.liveAt;
    const at = el("span", { class: "at" }, known ? duration(now - this.begunAt) : now < this.liveAt ? "earlier" : "");
    this.log.append(el("li", {}, at, ` ${text}`));
  }

  #say(text) {
    this.onState(text);
  }

  #state() {
    if (!this.attempts) return "Queued";
    if (this.reading) return "Reading the prompt";
    return this.attempts > 1 ? `Generating, attempt ${this.attempts}` : "Generating";
  }
}

function placeOf({ place, starts_in_s: startsInS }) {
  const behind = place === 1 ? "next" : `behind ${counted(place - 1, "job")}`;
  return startsInS === undefined ? behind : `${behind}, starts in about ${duration(1000 * startsInS)}`;
}
