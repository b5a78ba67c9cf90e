// The fleet: totals, queues by model and priority, workers.

import { call } from "./api.js";
import { byId, el, Rows, setMeter, setText } from "./dom.js";
import { bytes, count, counted, duration, percent, rate } from "./format.js";

const PRIORITIES = ["high", "normal", "low"];
const MORE = 50;

const share = (part, whole) => (whole > 0 ? part / whole : null);
const kvShare = (worker) => share(worker.kv_blocks_used, worker.kv_blocks_total);
const hitShare = (worker) => share(worker.cached_tokens, worker.prompt_tokens);
const load = (worker) => share(worker.running + worker.waiting, worker.max_sequences) ?? 0;

export class Fleet {
  constructor() {
    this.limit = MORE;
    this.queues = new Rows(
      byId("queues"),
      {
        model: "Model", high: "High", normal: "Normal", low: "Low", besides: "Besides",
        slots: "Running / slots", saturation: "Saturation",
      },
      "No model was ever served here. llorch worker starts one.",
    );
    this.workers = new Rows(
      byId("workers"),
      {
        name: "Worker", model: "Model", device: "Device", memory: "Memory", slots: "Running / slots",
        rate: "Tokens/s", kv: "KV use", hits: "Cache hits", up: "Up",
      },
      "No worker.",
    );
    for (const id of ["worker-filter", "worker-sort"]) {
      byId(id).addEventListener("input", () => {
        this.limit = MORE;
        this.look();
      });
    }
    byId("workers-more").addEventListener("click", () => {
      this.limit += MORE;
      this.look();
    });
    this.tiles = {};
    for (const [name, label] of [
      ["workers", "Workers"], ["running", "Running"], ["waiting", "Waiting"],
      ["rate", "Tokens/s"], ["kv", "KV use"], ["hits", "Cache hits"],
    ]) {
      const value = el("dd");
      byId("totals").append(el("div", { class: name }, el("dt", {}, label), value));
      this.tiles[name] = value;
    }
  }

  /** Asks for the totals and for the workers that are shown. */
  async look() {
    const asked = new URLSearchParams({
      find: byId("worker-filter").value, order: byId("worker-sort").value, limit: this.limit,
    }).toString();
    this.asked = asked;
    const fleet = await call(`console/api/fleet?${asked}`);
    if (asked !== this.asked) return;
    this.fleet = fleet;
    this.#showTotals();
    this.#showQueues();
    this.#showWorkers();
  }

  #showTotals() {
    const all = this.fleet.totals;
    setMeter(this.tiles.running, `${count(all.running)} / ${count(all.slots)}`, share(all.running, all.slots));
    this.tiles.workers.replaceChildren(count(all.workers), el("small", {}, all.silent ? ` ${count(all.silent)} silent` : ""));
    const age = all.oldest_s === null ? "" : ` oldest ${duration(1000 * all.oldest_s)}`;
    this.tiles.waiting.replaceChildren(count(all.waiting), el("small", {}, age));
    setText(this.tiles.rate, rate(all.tokens_per_s));
    setMeter(this.tiles.kv, percent(kvShare(all)), kvShare(all));
    setText(this.tiles.hits, percent(hitShare(all)));
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
      const besides = [];
      if (model.scheduled) besides.push(`${count(model.scheduled)} scheduled`);
      if (model.orphaned) besides.push(`${count(model.orphaned)} of a silent worker`);
      if (model.suspects) besides.push(counted(model.suspects, "suspect"));
      const served = Object.keys(model.fingerprints).length;
      if (served > 1) besides.push(`${count(served)} different models`);
      setText(cells.besides, besides.join(", ") || "–");
      cells.besides.classList.toggle("none", !besides.length);
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
    const { workers, matching } = this.fleet;
    const filtered = byId("worker-filter").value.trim() !== "";
    setText(this.workers.empty, filtered ? "No worker matches." : "No worker. llorch worker starts one.");
    byId("workers-more").hidden = workers.length >= matching;
    setText(byId("workers-count"), workers.length < matching ? `The first ${count(workers.length)} of ${count(matching)}.` : "");
    // One that keeps several models has a card for each.
    this.workers.show(workers, (worker) => `${worker.hostname} ${worker.model}`, (cells, worker, row) => {
      const notes = [];
      if (worker.silent) notes.push(el("small", { class: "silence" }, `silent for ${duration(1000 * worker.age_s)}`));
      for (const note of [worker.away, worker.reload]) {
        if (note) notes.push(el("small", { class: "silence" }, note));
      }
      if (!worker.away && worker.last_death) {
        const when = worker.died_s === null ? "" : ` ${duration(1000 * worker.died_s)} ago`;
        notes.push(el("small", { class: "silence" }, `last death${when}: ${worker.last_death}`));
      }
      cells.name.replaceChildren(el("span", { class: "number" }, worker.hostname), ...notes);
      row.classList.toggle("alarm", worker.silent || Boolean(worker.away));
      const several = worker.models.length > 1 ? ` of ${count(worker.models.length)}` : "";
      cells.model.replaceChildren(worker.model, el("small", {}, several));
      cells.model.title = several && worker.models.join(", ");
      setText(cells.device, worker.device);
      setText(cells.memory, worker.memory_bytes ? bytes(worker.memory_bytes) : "–");
      const preempting = worker.waiting ? `, ${count(worker.waiting)} preempting` : "";
      setMeter(cells.slots, `${count(worker.running)} / ${count(worker.max_sequences)}${preempting}`, load(worker));
      setText(cells.rate, rate(worker.tokens_per_s));
      setMeter(cells.kv, percent(kvShare(worker)), kvShare(worker));
      setText(cells.hits, percent(hitShare(worker)));
      setText(cells.up, duration(1000 * worker.up_s));
    });
  }
}
