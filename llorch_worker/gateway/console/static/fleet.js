// The fleet: totals, queues by model and priority, workers.

import { call } from "./api.js";
import { byId, el, Rows, setMeter, setText } from "./dom.js";
import { count, counted, duration, percent, rate } from "./format.js";

const PRIORITIES = ["high", "normal", "low"];
const RATES_KEPT = 60;

const share = (part, whole) => (whole > 0 ? part / whole : null);
const kvShare = (worker) => share(worker.kv_blocks_used, worker.kv_blocks_total);
const hitShare = (worker) => share(worker.cached_tokens, worker.prompt_tokens);
const load = (worker) => share(worker.running + worker.waiting, worker.max_sequences) ?? 0;
const sum = (items, figure) => items.reduce((total, item) => total + figure(item), 0);

const ORDERS = {
  hostname: () => 0,
  load: (a, b) => load(b) - load(a),
  rate: (a, b) => b.tokens_per_s - a.tokens_per_s,
  kv: (a, b) => (kvShare(b) ?? -1) - (kvShare(a) ?? -1),
  hits: (a, b) => (hitShare(b) ?? -1) - (hitShare(a) ?? -1),
  up: (a, b) => a.up_s - b.up_s,
};

export class Fleet {
  /** `onDeadLetters({count, version})` hears how many there are, and of each change. */
  constructor(onDeadLetters) {
    this.onDeadLetters = onDeadLetters;
    this.rates = [];
    this.readAt = null;
    this.queues = new Rows(
      byId("queues"),
      {
        model: "Model", high: "High", normal: "Normal", low: "Low", later: "Later",
        slots: "Running / slots", saturation: "Saturation",
      },
      "No model was ever served here. llorch worker starts one.",
    );
    this.workers = new Rows(
      byId("workers"),
      {
        name: "Worker", model: "Model", slots: "Running / slots", rate: "Tokens/s", kv: "KV use",
        hits: "Cache hits", up: "Up",
      },
      "No worker.",
    );
    for (const id of ["worker-filter", "worker-sort"]) {
      byId(id).addEventListener("input", () => this.#showWorkers());
    }
    this.tiles = {};
    for (const [name, label] of [
      ["workers", "Workers"], ["running", "Running"], ["waiting", "Waiting"],
      ["rate", "Tokens/s"], ["kv", "KV use"], ["hits", "Cache hits"],
    ]) {
      const value = el("dd");
      byId("totals").append(el("div", { class: name }, el("dt", {}, label), value));
      this.tiles[name] = value;
    }
    this.spark = sparkline();
    this.tiles.rate.after(this.spark);
  }

  async look() {
    this.fleet = await call("console/api/fleet");
    this.readAt = performance.now();
    this.#showTotals();
    this.#showQueues();
    this.#showWorkers();
    await this.onDeadLetters(this.fleet.dead_letters);
  }

  #showTotals() {
    const { workers, models } = this.fleet;
    const ages = models.flatMap((model) => Object.values(model.queues).map((queue) => queue.oldest_s ?? 0));
    const oldest = Math.max(0, ...ages);
    const waiting = sum(models, (model) => model.waiting);
    const tokens = sum(workers, (worker) => worker.tokens_per_s);
    const cached = sum(workers, (worker) => worker.cached_tokens);
    const prompts = sum(workers, (worker) => worker.prompt_tokens);
    const used = sum(workers, (worker) => worker.kv_blocks_used);
    const blocks = sum(workers, (worker) => worker.kv_blocks_total);
    const running = sum(models, (model) => model.running);
    const slots = sum(models, (model) => model.slots);
    setMeter(this.tiles.running, `${count(running)} / ${count(slots)}`, share(running, slots));
    const silent = workers.filter((worker) => worker.silent).length;
    this.tiles.workers.replaceChildren(count(workers.length), el("small", {}, silent ? ` ${count(silent)} silent` : ""));
    const age = waiting ? ` oldest ${duration(1000 * oldest)}` : "";
    this.tiles.waiting.replaceChildren(count(waiting), el("small", {}, age));
    setText(this.tiles.rate, rate(tokens));
    setMeter(this.tiles.kv, percent(share(used, blocks)), share(used, blocks));
    setText(this.tiles.hits, percent(share(cached, prompts)));
    this.rates = [...this.rates, tokens].slice(-RATES_KEPT);
    draw(this.spark, this.rates);
  }

  #showQueues() {
    this.queues.show(this.fleet.models, (model) => model.model, (cells, model, row) => {
      setText(cells.model, model.model);
      for (const priority of PRIORITIES) {
        const { jobs, oldest_s } = model.queues[priority];
        const age = oldest_s === null ? "" : ` · ${duration(1000 * oldest_s)}`;
        setText(cells[priority], jobs ? `${count(jobs)}${age}` : "0");
        cells[priority].classList.toggle("none", jobs === 0);
      }
      const later = [];
      if (model.scheduled) later.push(`${count(model.scheduled)} scheduled`);
      if (model.suspects) later.push(counted(model.suspects, "suspect"));
      const served = Object.keys(model.fingerprints).length;
      if (served > 1) later.push(`${count(served)} different models`);
      setText(cells.later, later.join(", ") || "–");
      cells.later.classList.toggle("none", !later.length);
      setText(cells.slots, `${count(model.running)} / ${count(model.slots)}`);
      const stuck = !model.workers && model.waiting > 0;
      setMeter(cells.saturation, model.workers ? percent(model.saturation) : "no worker", model.saturation);
      row.classList.toggle("alarm", stuck || served > 1);
    });
    const jobs = (number) => counted(number, "job waits", "jobs wait");
    byId("unserved").replaceChildren(
      ...Object.entries(this.fleet.unserved).map(([queue, number]) =>
        el("li", {}, `${queue}: ${jobs(number)}, no worker serves it`),
      ),
    );
  }

  #showWorkers() {
    if (!this.fleet) return;
    const words = byId("worker-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = this.fleet.workers.filter((worker) => {
      const about = `${worker.hostname} ${worker.model} ${worker.device}`.toLowerCase();
      return words.every((word) => about.includes(word));
    });
    wanted.sort(ORDERS[byId("worker-sort").value]);
    setText(this.workers.empty, words.length ? "No worker matches." : "No worker. llorch worker starts one.");
    this.workers.show(wanted, (worker) => worker.hostname, (cells, worker, row) => {
      cells.name.replaceChildren(
        worker.hostname,
        ...(worker.silent ? [el("small", { class: "silence" }, ` silent for ${duration(1000 * worker.age_s)}`)] : []),
      );
      row.classList.toggle("alarm", worker.silent);
      setText(cells.model, worker.model);
      cells.name.title = `${worker.hostname} on ${worker.device}`;
      const preempting = worker.waiting ? `, ${count(worker.waiting)} preempting` : "";
      setMeter(cells.slots, `${count(worker.running)} / ${count(worker.max_sequences)}${preempting}`, load(worker));
      setText(cells.rate, rate(worker.tokens_per_s));
      setMeter(cells.kv, percent(kvShare(worker)), kvShare(worker));
      setText(cells.hits, percent(hitShare(worker)));
      setText(cells.up, duration(1000 * worker.up_s));
    });
  }
}

const SVG = "http://www.w3.org/2000/svg";

function sparkline() {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", `0 0 ${RATES_KEPT - 1} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.append(document.createElementNS(SVG, "polyline"));
  // A dl's group holds only dt and dd.
  const holder = el("dd", { "aria-hidden": "true" });
  holder.append(svg);
  return holder;
}

function draw(holder, rates) {
  const most = Math.max(1, ...rates);
  const first = RATES_KEPT - rates.length;
  const points = rates.map((value, i) => `${first + i},${19 - (18 * value) / most}`);
  holder.querySelector("polyline").setAttribute("points", points.join(" "));
}
