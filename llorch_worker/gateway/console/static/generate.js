// The prompt box: one job at a time, its text as it comes, and what happened to it.

import { ApiError, call, send } from "./api.js";
import { byId, el, setText } from "./dom.js";
import { follow } from "./events.js";
import { counted, duration, rate } from "./format.js";

const SILENCE_MS = 2500;
const TICK_MS = 500;
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
    this.form = byId("generate-form");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    byId("cancel").addEventListener("click", () => this.cancel());
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        if (!this.job) this.form.requestSubmit();
      }
    });
    byId("generate").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.job) this.cancel();
    });
    byId("model").addEventListener("change", () => this.#limit());
  }

  async start() {
    await this.loadModels();
    const known = sessionStorage.getItem(JOB);
    if (known && !this.job) this.#follow(known);
  }

  stop() {
    this.job?.abort.abort();
    sessionStorage.removeItem(JOB);
  }

  async loadModels() {
    const { data } = await call("v1/models");
    const known = JSON.stringify(data.map((model) => [model.id, model.workers > 0]));
    // Somebody may be choosing one.
    if (known === this.known) return;
    this.known = known;
    this.contexts = new Map(data.map((model) => [model.id, model.max_model_len]));
    const select = byId("model");
    const chosen = select.value;
    select.replaceChildren(
      ...data.map((model) =>
        el("option", { value: model.id }, model.workers ? model.id : `${model.id} (no worker now)`),
      ),
    );
    const served = data.find((model) => model.workers);
    select.value = this.contexts.has(chosen) ? chosen : (served ?? data[0])?.id ?? "";
    this.#limit();
  }

  async submit() {
    const kind = this.form.elements.kind.value;
    const prompt = byId("prompt").value;
    const request = {
      max_tokens: byId("max-tokens").valueAsNumber,
      temperature: byId("temperature").valueAsNumber,
      ...(kind === "chat" ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    };
    if (byId("model").value) request.model = byId("model").value;
    if (byId("priority").value) request.priority = byId("priority").value;
    this.#fail([]);
    byId("submit").disabled = true;
    try {
      const job = await call("v1/jobs", { method: "POST", body: request });
      this.#follow(job.id, request.model ?? "");
    } catch (error) {
      byId("submit").disabled = false;
      this.#fail(error instanceof ApiError ? error.lines : ["The gateway cannot be reached."]);
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

  async #follow(jobId, model = "") {
    const job = {
      id: jobId,
      model,
      abort: new AbortController(),
      tokens: 0,
      attempts: 0,
      worker: "",
      begunAt: performance.now(),
      heardAt: performance.now(),
      firstTokenAt: null,
      paused: false,
      text: document.createTextNode(""),
    };
    this.job = job;
    sessionStorage.setItem(JOB, jobId);
    byId("output").replaceChildren(job.text);
    byId("log").replaceChildren();
    byId("submit").disabled = true;
    byId("cancel").disabled = false;
    this.#say("Queued");
    this.#note(job, `job ${jobId}`);
    const timer = setInterval(() => this.#tick(job), TICK_MS);
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
      this.job = null;
      sessionStorage.removeItem(JOB);
      byId("submit").disabled = false;
      byId("cancel").disabled = true;
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
      this.#note(
        job,
        again
          ? `attempt ${event.attempt} on ${event.worker}, after a pause of ${duration(silentMs)}`
          : `attempt ${event.attempt} on ${event.worker}, queued for ${duration(event.queue_ms)}`,
      );
      this.#say(again ? `Resumed by ${event.worker}, attempt ${event.attempt}` : "Generating");
    } else if (event.type === "tokens") {
      job.firstTokenAt ??= now;
      job.tokens += event.ids.length;
      const output = byId("output");
      const atEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
      job.text.appendData(event.text);
      if (atEnd) output.scrollTop = output.scrollHeight;
      if (job.paused) this.#say(`Generating, attempt ${job.attempts}`);
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

  #tick(job) {
    const now = performance.now();
    if (job.attempts && !job.paused && now - job.heardAt > SILENCE_MS) {
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
    if (!job.paused) return;
    job.paused = false;
    this.#say(job.attempts ? `Generating, attempt ${job.attempts}` : "Queued");
  }

  #progress(job, now) {
    const parts = [counted(job.tokens, "token")];
    const decodeMs = job.firstTokenAt === null ? 0 : job.heardAt - job.firstTokenAt;
    if (job.tokens > 1 && decodeMs > 0) parts.push(`${rate(((job.tokens - 1) * 1000) / decodeMs)}/s`);
    if (job.attempts > 1) parts.push(`attempt ${job.attempts}`);
    if (job.worker) parts.push(job.worker);
    parts.push(duration(now - job.begunAt));
    setText(byId("progress"), parts.join(" · "));
  }

  #note(job, text) {
    const at = duration(performance.now() - job.begunAt);
    byId("log").append(el("li", {}, el("span", { class: "at" }, at), ` ${text}`));
  }

  #say(text) {
    setText(byId("state"), text);
  }

  #fail(lines) {
    byId("generate-error").replaceChildren(...lines.map((line) => el("span", {}, line)));
  }

  #limit() {
    const context = this.contexts?.get(byId("model").value);
    if (context) byId("max-tokens").max = context;
  }
}
