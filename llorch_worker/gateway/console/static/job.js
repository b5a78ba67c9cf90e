// One job, opened: its state, its events as they come and, for who may see it, its text.

import { Answer } from "./answer.js";
import { ApiError, call } from "./api.js";
import { byId, el, setText } from "./dom.js";

export class OpenedJob {
  constructor() {
    this.answer = null;
    byId("job-cancel").addEventListener("click", () => this.#cancel());
  }

  async show(id) {
    this.leave();
    setText(byId("job-title"), `Job ${id}`);
    setText(byId("job-state"), "");
    byId("job-error").replaceChildren();
    byId("job-cancel").hidden = true;
    const answer = new Answer({ plain: true, onState: (text) => this.#state(answer, text) });
    this.answer = answer;
    byId("job-text").replaceChildren(answer.element);
    answer.element.querySelector(".happened").open = true;
    try {
      // First: whose text it is not gets no further.
      await call(`v1/jobs/${encodeURIComponent(id)}`);
    } catch (error) {
      const gone = error instanceof ApiError && error.status === 404;
      const why = "It is unknown here, has expired, or is not yours to read. A stock producer's job is unknown until a worker takes it.";
      if (this.answer === answer) this.#fail(gone ? why : error.message);
      return;
    }
    if (this.answer !== answer) return;
    byId("job-cancel").hidden = false;
    byId("job-cancel").disabled = false;
    await answer.run(id, { begun: null, replays: true });
    if (this.answer === answer) byId("job-cancel").hidden = true;
  }

  leave() {
    this.answer?.abort.abort();
    this.answer = null;
    byId("job-text").replaceChildren();
  }

  async #cancel() {
    byId("job-cancel").disabled = true;
    try {
      await this.answer?.cancel();
    } catch (error) {
      byId("job-cancel").disabled = false;
      this.#fail(error.message);
    }
  }

  #state(answer, text) {
    if (this.answer === answer) setText(byId("job-state"), text);
  }

  #fail(text) {
    byId("job-error").replaceChildren(el("span", {}, text));
  }
}
