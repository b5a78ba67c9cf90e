// Recent jobs, each with its time as a bar: queued, prefill, decode.

import { call } from "./api.js";
import { byId, el, Rows, setText } from "./dom.js";
import { ago, count, duration, shortId } from "./format.js";

const SHOWN = 50;
const PHASES = ["queued", "prefill", "decode"];
/** A bar that is longer than this many median ones is cut, so that one job does not hide the rest. */
const MOST_MEDIANS = 4;

export class Jobs {
  constructor() {
    this.own = new Map();
    this.others = [];
    this.rows = new Rows(
      byId("job-list"),
      {
        outcome: "Outcome", job: "Job", model: "Model", worker: "Worker", tokens: "Tokens",
        time: "Queued, prefill, decode", total: "Total", ended: "Ended",
      },
      "No job has ended yet.",
    );
  }

  /** The jobs of the whole fleet, for operators. */
  async look() {
    this.others = (await call("console/api/jobs")).jobs;
    this.show();
  }

  /** A job of this page, which it knows at once. */
  add(job) {
    this.own.set(job.id, job);
    this.show();
  }

  show() {
    const all = new Map(this.own);
    for (const job of this.others) all.set(job.id, job);
    const shown = [...all.values()].sort((a, b) => b.ended_at - a.ended_at).slice(0, SHOWN);
    const times = shown.map(total).filter((ms) => ms !== null).sort((a, b) => a - b);
    const median = times[Math.floor((times.length - 1) / 2)] ?? 0;
    const scale = Math.max(1, Math.min(times.at(-1) ?? 0, MOST_MEDIANS * median));
    this.rows.show(shown, (job) => job.id, (cells, job, row) => {
      const failed = job.outcome === "failed";
      setText(cells.outcome, failed ? (job.error ?? "failed").toLowerCase().replaceAll("_", " ") : job.outcome);
      setText(cells.job, shortId(job.id));
      cells.job.title = job.id;
      setText(cells.model, job.model);
      setText(cells.worker, job.attempts > 1 ? `${job.worker} · attempt ${job.attempts}` : job.worker);
      setText(cells.tokens, job.usage ? `${count(job.usage.prompt)} → ${count(job.usage.completion)}` : "–");
      bar(cells.time, job, scale);
      setText(cells.total, job.timings ? duration(total(job)) : "–");
      setText(cells.ended, ago(job.ended_at));
      row.classList.toggle("alarm", failed);
      row.classList.toggle("retried", job.attempts > 1);
    });
  }
}

function phases({ timings }) {
  return timings ? [timings.queue_ms, timings.prefill_ms, timings.decode_ms] : null;
}

function total(job) {
  return phases(job)?.reduce((sum, ms) => sum + ms, 0) ?? null;
}

function bar(cell, job, scale) {
  if (!cell.firstElementChild) {
    const made = el("span", { class: "bar", role: "img" });
    for (const name of PHASES) made.append(el("i", { class: name }));
    cell.append(made);
  }
  const made = cell.firstElementChild;
  const times = phases(job);
  const said = times
    ? PHASES.map((name, i) => `${name} ${duration(times[i])}`).join(", ")
    : "no timings";
  made.setAttribute("aria-label", said);
  made.title = said;
  const whole = Math.max(scale, total(job) ?? 0);
  made.classList.toggle("cut", whole > scale);
  PHASES.forEach((_, i) => {
    made.children[i].style.width = `${(100 * (times?.[i] ?? 0)) / whole}%`;
  });
}
