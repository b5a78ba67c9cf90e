// The jobs: those that run and wait, and those that ended last. The filters are in the address.

import { call } from "./api.js";
import { byId, el, Rows, setText } from "./dom.js";
import { ago, count, counted, duration, shortId } from "./format.js";
import { address, amend } from "./route.js";

const FILTERS = ["state", "model", "tenant", "worker", "job"];
const PHASES = ["queued", "prefill", "decode"];
const MORE = 50;
/** A bar that is longer than this many median ones is cut, so that one job does not hide the rest. */
const MOST_MEDIANS = 4;
const PAUSE_MS = 400;

export class Jobs {
  constructor() {
    this.filters = {};
    this.limit = MORE;
    this.form = byId("job-filters");
    this.open = new Rows(
      byId("job-list"),
      {
        state: "State", job: "Job", model: "Model", tenant: "Tenant", worker: "Worker", age: "Age",
        tokens: "Tokens",
      },
      "No such job runs or waits.",
    );
    this.ended = new Rows(
      byId("ended-list"),
      {
        outcome: "Outcome", job: "Job", model: "Model", worker: "Worker", tokens: "Tokens",
        time: "Queued, prefill, decode", total: "Total", ended: "Ended",
      },
      "No such job has ended lately.",
    );
    let pause;
    this.form.addEventListener("input", () => {
      clearTimeout(pause);
      pause = setTimeout(() => this.#asked(), PAUSE_MS);
    });
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#asked();
    });
    byId("jobs-more").addEventListener("click", () => {
      this.limit += MORE;
      this.look();
    });
  }

  /** The view is opened at an address with these filters. */
  show(filters) {
    this.filters = Object.fromEntries(FILTERS.map((name) => [name, filters[name] ?? ""]));
    this.limit = MORE;
    for (const name of FILTERS) {
      const field = this.form.elements[name];
      if (document.activeElement !== field) field.value = this.filters[name];
    }
    const ended = this.filters.state === "ended";
    if (ended) for (const name of ["jobs-count", "jobs-partly"]) setText(byId(name), "");
    byId("open-jobs").hidden = ended;
    byId("ended-jobs").hidden = !ended;
  }

  async look() {
    const asked = this.filters;
    const query = new URLSearchParams(Object.entries(asked).filter(([, value]) => value));
    if (asked.state === "ended") {
      const { jobs } = await call("console/api/ended");
      if (asked === this.filters) this.#showEnded(jobs);
      return;
    }
    query.set("limit", this.limit);
    const found = await call(`console/api/jobs?${query}`);
    if (asked === this.filters) this.#showOpen(found);
  }

  #asked() {
    const values = FILTERS.map((name) => [name, this.form.elements[name].value.trim()]);
    amend(address("jobs", "", Object.fromEntries(values)));
  }

  #showOpen({ jobs, running, waiting, scheduled, whole }) {
    const later = scheduled ? `, ${count(scheduled)} scheduled` : "";
    setText(byId("jobs-count"), `${counted(running, "job runs", "jobs run")}, ${counted(waiting, "waits", "wait")}${later}.`);
    setText(byId("jobs-partly"), whole ? "" : "There are so many that the filters look only at the first.");
    byId("jobs-more").hidden = jobs.length < this.limit;
    this.open.show(jobs, (job) => job.id, (cells, job, row) => {
      const place = job.place ? `waiting, place ${count(job.place)}` : job.state;
      const priority = job.priority === "normal" ? "" : ` · ${job.priority}`;
      setText(cells.state, place + priority);
      const starts = job.starts_in_s === undefined ? "" : `starts in about ${duration(1000 * job.starts_in_s)}`;
      cells.state.title = starts;
      link(cells.job, job.id);
      setText(cells.model, job.model);
      setText(cells.tenant, job.tenant || job.owner || "–");
      const again = job.attempts > 1 ? ` · attempt ${job.attempts}` : "";
      setText(cells.worker, job.worker ? job.worker + again : "–");
      setText(cells.age, job.age_s === undefined ? "–" : duration(1000 * job.age_s));
      setText(cells.tokens, job.tokens === undefined ? "–" : count(job.tokens));
      row.classList.toggle("retried", job.attempts > 1);
    });
  }

  #showEnded(jobs) {
    const { model, worker, job: id } = this.filters;
    const shown = jobs.filter(
      (job) => (!model || job.model === model) && (!worker || job.worker === worker) && (!id || job.id === id),
    );
    const times = shown.map(total).filter((ms) => ms !== null).sort((a, b) => a - b);
    const median = times[Math.floor((times.length - 1) / 2)] ?? 0;
    const scale = Math.max(1, Math.min(times.at(-1) ?? 0, MOST_MEDIANS * median));
    this.ended.show(shown, (job) => job.id, (cells, job, row) => {
      const failed = job.outcome === "failed";
      setText(cells.outcome, failed ? (job.error ?? "failed").toLowerCase().replaceAll("_", " ") : job.outcome);
      link(cells.job, job.id);
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

function link(cell, id) {
  if (!cell.firstElementChild) cell.append(el("a", { href: address("jobs", id), title: id }, shortId(id)));
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
  // The parts of a resumed job's would be those of its last attempt.
  made.hidden = !job.timings || job.resumed;
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
