// The prompt box: one job at a time, its text as it comes, and what happened to it.

import { ApiError, call, send } from "./api.js";
import { byId, el, setText } from "./dom.js";
import { follow } from "./events.js";
import { counted, duration, rate } from "./format.js";
import { Polling } from "./polling.js";

const SILENCE_MS = 2500;
const TICK_MS = 500;
const WAIT_MS = 2000;
/** Where the model's makers do not say how to sample: small models ramble at 1. */
const SAMPLING = { temperature: 0.7, top_p: 0.95 };
/** A new connection begins with the events that the page missed, all at once. */
const REPLAY_MS = 500;
/** The job of this tab and when it was submitted, as `<id> <ms>`. */
const JOB = "llorch-job";

const ENDS = {
  finished: (event) => `Finished: ${event.finish_reason}`,
  failed: (event) => `Failed: ${event.error.message}`,
  cancelled: () => "Cancelled",
};

export class Generate {
  /** `onEnd(job)` gets a job that ended, as `/console/api/jobs` lists them. */
  constructor(onEnd) {
    this.onEnd = onEnd;
    this.job = null;
    this.submitting = false;
    /** A request whose answer was lost: sent again, it has the same key and makes no second job. */
    this.unanswered = null;
    this.form = byId("generate-form");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    byId("cancel").addEventListener("click", () => this.cancel());
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        if (!event.repeat) this.form.requestSubmit();
      }
    });
    byId("generate").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.job) this.cancel();
    });
    byId("model").addEventListener("change", () => this.#suit());
  }

  async start() {
    await this.loadModels();
    const [id, begun] = sessionStorage.getItem(JOB)?.split(" ") ?? [];
    if (id && !this.job && !this.submitting) this.#follow(id, { begun: Number(begun) || Date.now(), replays: true });
  }

  stop() {
    this.job?.abort.abort();
    sessionStorage.removeItem(JOB);
  }

  async loadModels() {
    const { data } = await call("v1/models");
    const known = JSON.stringify(data.map((model) => [model.id, model.workers > 0, model.generation_config]));
    // Somebody may be choosing one.
    if (known === this.known) return;
    this.known = known;
    this.models = new Map(data.map((model) => [model.id, model]));
    const select = byId("model");
    const chosen = select.value;
    select.replaceChildren(
      ...data.map((model) =>
        el("option", { value: model.id }, model.workers ? model.id : `${model.id} (no worker now)`),
      ),
    );
    const served = data.find((model) => model.workers);
    select.value = this.models.has(chosen) ? chosen : (served ?? data[0])?.id ?? "";
    this.#suit();
  }

  /** One job at a time: does nothing while one is submitted or runs. */
  async submit() {
    if (this.job || this.submitting) return;
    const kind = this.form.elements.kind.value;
    const prompt = byId("prompt").value;
    const request = {
      max_tokens: byId("max-tokens").valueAsNumber,
      temperature: byId("temperature").valueAsNumber,
      top_p: byId("top-p").valueAsNumber,
      ...(kind === "chat" ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    };
    if (byId("model").value) request.model = byId("model").value;
    if (byId("priority").value) request.priority = byId("priority").value;
    const text = JSON.stringify(request);
    if (this.unanswered?.text !== text) this.unanswered = { text, key: randomKey() };
    const headers = { "Idempotency-Key": this.unanswered.key };
    this.#fail([]);
    byId("submit").disabled = true;
    this.submitting = true;
    try {
      const { id } = await call("v1/jobs?stream=true", { method: "POST", body: request, headers });
      this.unanswered = null;
      this.#follow(id, { model: request.model });
    } catch (error) {
      byId("submit").disabled = false;
      const answered = error instanceof ApiError;
      if (answered && error.status < 500) this.unanswered = null;
      this.#fail(answered ? error.lines : ["The gateway cannot be reached."]);
    } finally {
      this.submitting = false;
    }
  }

  async cancel() {
    const job = this.job;
    if (!job) return;
    byId("cancel").disabled = true;
    this.#say("Cancelling");
    try {
      await send(`v1/jobs/${job.id}`, { method: "DELETE" });
    } catch (error) {
      // 409: it has ended already, and its last event says how.
      if (error.status !== 409 && this.job === job) {
        this.#fail(["The cancel did not reach the gateway. Try again."]);
        byId("cancel").disabled = false;
      }
    }
  }

  /** `begun`: when it was submitted, as Unix time in ms; `replays`: the page was loaded since. */
  async #follow(jobId, { model = "", begun = Date.now(), replays = false }) {
    const job = {
      id: jobId,
      model,
      abort: new AbortController(),
      tokens: 0,
      attempts: 0,
      worker: "",
      begunAt: performance.now() - Math.max(0, Date.now() - begun),
      heardAt: performance.now(),
      /** Whether its next connection begins with what happened long ago, and until when it does. */
      replays,
      liveAt: 0,
      /** Tokens that came live, since when: replayed ones say nothing about the speed. */
      timed: 0,
      timedSince: null,
      reading: false,
      paused: false,
      thought: el("div", { class: "thought" }),
      text: document.createTextNode(""),
    };
    this.job = job;
    sessionStorage.setItem(JOB, `${jobId} ${begun}`);
    byId("output").replaceChildren(job.thought, job.text);
    byId("log").replaceChildren();
    byId("submit").disabled = true;
    byId("cancel").disabled = false;
    this.#say("Queued");
    this.#note(job, `job ${jobId}`);
    const timer = setInterval(() => this.#tick(job), TICK_MS);
    const waits = new Polling(() => this.#wait(job, waits), WAIT_MS);
    waits.start();
    try {
      await follow(jobId, {
        onEvent: (event) => this.#event(job, event),
        onOpen: () => this.#resume(job),
        onBreak: () => this.#pause(job, "connection lost"),
        signal: job.abort.signal,
      });
    } catch (error) {
      if (!job.abort.signal.aborted) {
        const gone = error instanceof ApiError && error.status === 404;
        this.#say(gone ? "Its events have expired" : "Not followed any more");
        if (!gone) this.#fail(error.lines ?? [error.message]);
      }
    } finally {
      clearInterval(timer);
      waits.stop();
      if (this.job === job) {
        this.job = null;
        sessionStorage.removeItem(JOB);
        byId("submit").disabled = false;
        byId("cancel").disabled = true;
      }
    }
  }

  #event(job, event) {
    const now = performance.now();
    const silentMs = now - job.heardAt;
    job.heardAt = now;
    if (event.type === "started") {
      job.model = event.model;
      job.worker = event.worker;
      const again = job.attempts > 0;
      job.attempts = event.attempt;
      job.reading = true;
      job.timedSince = null;
      const what = `attempt ${event.attempt} on ${event.worker}`;
      const pause = now < job.liveAt ? "" : `, after a pause of ${duration(silentMs)}`;
      this.#note(job, what + (again ? pause : `, queued for ${duration(event.queue_ms)}`));
      this.#say(again ? `Resumed by ${event.worker}, attempt ${event.attempt}` : stateOf(job));
    } else if (event.type === "restarted") {
      job.tokens = 0;
      job.timedSince = null;
      job.text.data = job.thought.textContent = "";
      this.#note(job, "the model was replaced: the text begins again");
    } else if (event.type === "tokens") {
      job.tokens += event.ids.length;
      if (now < job.liveAt) job.timedSince = null;
      else if (job.timedSince === null) [job.timedSince, job.timed] = [now, 0];
      else job.timed += event.ids.length;
      const changes = job.reading || job.paused;
      job.reading = false;
      if (changes) this.#say(stateOf(job));
      const output = byId("output");
      const atEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
      if (event.reasoning_content) job.thought.append(event.reasoning_content);
      job.text.appendData(event.text);
      if (atEnd) output.scrollTop = output.scrollHeight;
    } else {
      this.#end(job, event);
    }
    job.paused = false;
    this.#progress(job, now);
  }

  #end(job, event) {
    this.#say(ENDS[event.type](event));
    const { timings, usage } = event;
    const how = timings
      ? `: queued ${duration(timings.queue_ms)}, prefill ${duration(timings.prefill_ms)}, decode ${duration(timings.decode_ms)}`
      : "";
    this.#note(job, `${event.type}${how}`);
    this.onEnd({
      id: job.id,
      model: job.model,
      worker: job.worker,
      attempts: job.attempts || 1,
      ended_at: Date.now() / 1000,
      outcome: event.finish_reason ?? event.type,
      error: event.error?.code,
      usage,
      timings,
    });
  }

  /** Says where the job waits, until it has begun. */
  async #wait(job, waits) {
    const { position } = await call(`v1/jobs/${job.id}`);
    if (job.attempts || this.job !== job) waits.stop();
    else if (position) this.#say(`Queued: ${placeOf(position)}`);
  }

  #tick(job) {
    const now = performance.now();
    // A long prompt takes longer than that before its first token.
    const generates = job.attempts && !job.reading && !job.paused;
    if (generates && now - job.heardAt > SILENCE_MS) {
      this.#pause(job, "no token; if the worker died, another goes on here");
    }
    this.#progress(job, now);
  }

  #pause(job, reason) {
    if (job.paused) return;
    job.paused = true;
    this.#say(`Paused: ${reason}`);
    this.#note(job, `pause: ${reason}`);
  }

  #resume(job) {
    job.heardAt = performance.now();
    if (job.replays) job.liveAt = job.heardAt + REPLAY_MS;
    job.replays = true;
    if (!job.paused) return;
    job.paused = false;
    this.#say(stateOf(job));
  }

  #progress(job, now) {
    const parts = [counted(job.tokens, "token")];
    const timedMs = job.timedSince === null ? 0 : job.heardAt - job.timedSince;
    if (job.timed && timedMs > 0) parts.push(`${rate((job.timed * 1000) / timedMs)}/s`);
    if (job.attempts > 1) parts.push(`attempt ${job.attempts}`);
    if (job.worker) parts.push(job.worker);
    parts.push(duration(now - job.begunAt));
    setText(byId("progress"), parts.join(" · "));
  }

  #note(job, text) {
    const now = performance.now();
    const at = now < job.liveAt ? "earlier" : duration(now - job.begunAt);
    byId("log").append(el("li", {}, el("span", { class: "at" }, at), ` ${text}`));
  }

  #say(text) {
    setText(byId("state"), text);
  }

  #fail(lines) {
    byId("generate-error").replaceChildren(...lines.map((line) => el("span", {}, line)));
  }

  /** Shows how the chosen model is sampled from, and bounds the tokens by its context. */
  #suit() {
    const model = this.models?.get(byId("model").value);
    if (!model) return;
    byId("max-tokens").max = model.max_model_len;
    const shown = JSON.stringify([model.id, model.generation_config]);
    // What somebody has typed stays while the list of models is read again.
    if (shown === this.shown) return;
    this.shown = shown;
    const config = model.generation_config;
    const says = "temperature" in config || "top_p" in config;
    const { temperature, top_p } = { ...(says ? { temperature: 1, top_p: 1 } : SAMPLING), ...config };
    byId("temperature").value = temperature;
    byId("top-p").value = top_p;
  }
}

function stateOf(job) {
  if (!job.attempts) return "Queued";
  if (job.reading) return "Reading the prompt";
  return job.attempts > 1 ? `Generating, attempt ${job.attempts}` : "Generating";
}

function placeOf({ place, starts_in_s: startsInS }) {
  const behind = place === 1 ? "next" : `behind ${counted(place - 1, "job")}`;
  return startsInS === undefined ? behind : `${behind}, starts in about ${duration(1000 * startsInS)}`;
}

function randomKey() {
  // randomUUID() is missing where the page comes over plain HTTP from another machine.
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
