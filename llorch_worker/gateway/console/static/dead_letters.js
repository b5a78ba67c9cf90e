// Dead letters: why each died, retry, and drop after a question.

import { call } from "./api.js";
import { byId, el, harmless, Rows, setText } from "./dom.js";
import { ago, bytes, count, counted, shortId } from "./format.js";

const OUTCOMES = {
  retried: "is in its queue again",
  dropped: "is dropped",
  gone: "had been retried or dropped already",
  "under way": "was left: the same job waits or runs already",
  ended: "was left: the job succeeded or was cancelled",
  malformed: "was left: no worker can run the message",
};

export class DeadLetters {
  constructor() {
    this.version = this.newest = null;
    this.letters = [];
    this.rows = new Rows(
      byId("letters"),
      { job: "Job", model: "Model", reason: "Reason", workers: "Workers lost", size: "Size", died: "Died", actions: "" },
      "No dead letters.",
    );
    this.rows.head.querySelector(".actions").textContent = "Actions";
    byId("retry-all").addEventListener("click", () => {
      this.#send("retry", this.letters.filter((letter) => letter.retriable).map((letter) => letter.id));
    });
  }

  /** How many there are, on every view; `version` is another one when their list has changed. */
  note({ dead_letters: number, version }) {
    const badge = byId("dead-badge");
    badge.hidden = number === 0;
    setText(badge, count(number));
    this.newest = version;
  }

  /** Called again and again. Letters are read only when their list has changed. */
  async look() {
    if (this.version === null || this.newest !== this.version) await this.#read();
    this.#show();
  }

  async #read() {
    const { total, version, letters } = await call("console/api/dead-letters");
    this.version = version;
    this.letters = letters;
    const more = total - letters.length;
    setText(byId("dead-more"), more > 0 ? `The newest ${letters.length} of ${count(total)}.` : "");
    byId("retry-all").hidden = !letters.some((letter) => letter.retriable);
  }

  #show() {
    this.rows.show(this.letters, (letter) => letter.id, (cells, letter) => this.#fill(cells, letter));
  }

  #fill(cells, letter) {
    setText(cells.job, shortId(letter.id));
    cells.job.title = harmless(letter.id);
    setText(cells.model, letter.model);
    setText(cells.reason, letter.reason);
    setText(cells.workers, letter.workers.join(", ") || "–");
    setText(cells.size, bytes(letter.message_bytes));
    setText(cells.died, ago(letter.died_at));
    if (cells.actions.firstElementChild) return;
    const name = `job ${shortId(letter.id)}`;
    const drop = el("button", { type: "button", "aria-label": `Drop ${name}` }, "Drop");
    drop.addEventListener("click", () => this.#confirm(letter.id));
    if (letter.retriable) {
      const retry = el("button", { type: "button", "aria-label": `Retry ${name}` }, "Retry");
      retry.addEventListener("click", () => this.#send("retry", [letter.id]));
      cells.actions.append(retry);
    }
    cells.actions.append(drop);
  }

  #confirm(id) {
    const dialog = byId("confirm");
    setText(byId("confirm-id"), id);
    dialog.returnValue = "";
    dialog.addEventListener(
      "close",
      () => {
        if (dialog.returnValue === "drop") this.#send("drop", [id]);
      },
      { once: true },
    );
    dialog.showModal();
  }

  async #send(what, ids) {
    if (!ids.length) return;
    try {
      const { outcomes } = await call(`console/api/dead-letters/${what}`, { method: "POST", body: { ids } });
      setText(byId("dead-status"), summary(outcomes));
      await this.#read();
      this.#show();
    } catch (error) {
      setText(byId("dead-status"), error.message);
    }
    // The buttons that had the focus may be gone.
    if (document.activeElement === document.body) byId("letters").focus();
  }
}

function summary(outcomes) {
  const ids = Object.keys(outcomes);
  if (ids.length === 1) return `Job ${shortId(ids[0])} ${OUTCOMES[outcomes[ids[0]]]}.`;
  const numbers = new Map();
  for (const outcome of Object.values(outcomes)) numbers.set(outcome, (numbers.get(outcome) ?? 0) + 1);
  return [...numbers].map(([outcome, number]) => `${counted(number, "letter")}: ${OUTCOMES[outcome]}.`).join(" ");
}
