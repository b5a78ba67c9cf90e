// The conversation: its turns, one answer at a time.

import { Answer } from "./answer.js";
import { ApiError, call } from "./api.js";
import { byId, el, setText } from "./dom.js";
import { Settings } from "./settings.js";

/** The job of this tab and when it was submitted, as `<id> <ms>`. */
const JOB = "llorch-job";
const AT_END_PX = 60;

export class Chat {
  constructor() {
    this.settings = new Settings();
    /** {user, text of the answer, elements}; `user` is null after the page was loaded again. */
    this.turns = [];
    this.answer = null;
    this.submitting = false;
    this.editing = null;
    /** A request whose answer was lost: sent again, it has the same key and makes no second job. */
    this.unanswered = null;
    this.list = byId("conversation");
    this.prompt = byId("prompt");
    this.form = byId("chat-form");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!event.repeat) this.form.requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    byId("edit-cancel").addEventListener("click", () => this.#edit(null));
    byId("model").addEventListener("change", () => {
      this.settings.choose(byId("model").value);
      this.#suit();
    });
    this.#show();
  }

  async start() {
    await this.loadModels();
    const [id, begun] = sessionStorage.getItem(JOB)?.split(" ") ?? [];
    if (!id || this.answer || this.submitting) return;
    // Texts are in no storage of the browser: what was asked is gone.
    const turn = this.#turn(null, this.settings.plain);
    this.#run(turn, id, { begun: Number(begun) || Date.now(), replays: true });
  }

  /** Lets go of the answer that comes, whose job goes on. */
  leave() {
    this.answer?.abort.abort();
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
    const chosen = select.value || this.settings.chosen;
    select.replaceChildren(
      ...data.map((model) =>
        el("option", { value: model.id }, model.workers ? model.id : `${model.id} (no worker now)`),
      ),
    );
    const served = data.find((model) => model.workers);
    select.value = this.models.has(chosen) ? chosen : ((served ?? data[0])?.id ?? "");
    this.#suit();
  }

  /** One answer at a time: does nothing while one is asked for or comes. */
  async submit() {
    const text = this.prompt.value.trim();
    if (!text || this.answer || this.submitting || !this.settings.valid()) return;
    const kept = this.editing ?? this.turns.length;
    if (await this.#ask(text, kept)) {
      this.prompt.value = "";
      this.#edit(null);
    }
  }

  /** Asks once more for the answer of a turn; what follows it goes. */
  again(turn) {
    if (this.answer || this.submitting || !this.settings.valid()) return;
    this.#ask(turn.user, this.turns.indexOf(turn));
  }

  /** Ends the answer that comes, or gives up what is being edited. Whether there was anything. */
  async stop() {
    if (!this.answer) {
      if (this.editing === null) return false;
      this.#edit(null);
      return true;
    }
    byId("stop").disabled = true;
    try {
      await this.answer.cancel();
    } catch (error) {
      byId("stop").disabled = false;
      this.#fail([error.message]);
    }
    return true;
  }

  clear() {
    if (this.answer) this.stop();
    this.turns = [];
    this.list.replaceChildren();
    this.#edit(null);
    this.#fail([]);
    if (!this.answer) setText(byId("state"), "");
    this.#show();
    this.prompt.focus();
  }

  /** Whether the answer to `text` is on its way, after the first `kept` turns. */
  async #ask(text, kept) {
    const request = { ...this.settings.fields(), ...this.#said(text, kept) };
    if (byId("model").value) request.model = byId("model").value;
    const body = JSON.stringify(request);
    if (this.unanswered?.body !== body) this.unanswered = { body, key: randomKey() };
    this.#fail([]);
    setText(byId("state"), "Sending");
    this.submitting = true;
    this.#show();
    try {
      const headers = { "Idempotency-Key": this.unanswered.key };
      const { id } = await call("v1/jobs?stream=true", { method: "POST", body: request, headers });
      this.unanswered = null;
      for (const gone of this.turns.splice(kept)) gone.element.remove();
      this.#run(this.#turn(text, this.settings.plain), id);
      return true;
    } catch (error) {
      const answered = error instanceof ApiError;
      if (answered && error.status < 500) this.unanswered = null;
      setText(byId("state"), "Not sent");
      this.#fail(answered ? error.lines : ["The gateway cannot be reached."]);
      return false;
    } finally {
      this.submitting = false;
      this.#show();
    }
  }

  /** The prompt, or the messages: the system's, those of the first `kept` turns, and `text`. */
  #said(text, kept) {
    if (this.settings.plain) return { prompt: text };
    const messages = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
    for (const turn of this.turns.slice(0, kept)) {
      // Without an answer, or without a question, it is no turn of a chat.
      if (turn.user === null || !turn.answer.text) continue;
      messages.push({ role: "user", content: turn.user }, { role: "assistant", content: turn.answer.text });
    }
    return { messages: [...messages, { role: "user", content: text }] };
  }

  #turn(user, plain) {
    const answer = new Answer({ plain, onState: (text) => this.#state(answer, text) });
    const turn = { user, answer };
    const question = el("div", { class: "question" });
    if (user === null) question.append(el("p", { class: "hint" }, "What was asked is gone: the page was loaded again."));
    else {
      question.append(el("p", { class: "said", dir: "auto" }, user));
      turn.edit = action("Edit", () => this.#edit(turn));
      turn.again = action("Again", () => this.again(turn));
      question.append(el("span", { class: "actions" }, turn.edit, turn.again));
    }
    turn.element = el("li", { class: "turn" }, question, answer.element);
    this.turns.push(turn);
    this.list.append(turn.element);
    return turn;
  }

  async #run(turn, jobId, { begun = Date.now(), replays = false } = {}) {
    const { answer } = turn;
    this.answer = answer;
    sessionStorage.setItem(JOB, `${jobId} ${begun}`);
    byId("stop").disabled = false;
    const growing = new ResizeObserver(() => this.#follow());
    growing.observe(turn.element);
    this.atEnd = true;
    this.#show();
    await answer.run(jobId, { begun, replays });
    growing.disconnect();
    this.#follow();
    if (this.answer !== answer) return;
    this.answer = null;
    sessionStorage.removeItem(JOB);
    this.#show();
  }

  /** Stays at the end of the text, unless somebody has scrolled away from it. */
  #follow() {
    const view = byId("turns");
    if (this.atEnd) view.scrollTop = view.scrollHeight;
    view.onscroll = () => {
      this.atEnd = view.scrollHeight - view.scrollTop - view.clientHeight < AT_END_PX;
    };
  }

  #edit(turn) {
    this.editing = turn === null ? null : this.turns.indexOf(turn);
    byId("editing").hidden = turn === null;
    for (const each of this.turns) each.element.classList.toggle("edited", each === turn);
    if (turn === null) return;
    this.prompt.value = turn.user;
    this.prompt.focus();
  }

  #state(answer, text) {
    if (this.answer === answer) setText(byId("state"), text);
  }

  #show() {
    const busy = this.answer !== null || this.submitting;
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    byId("clear").hidden = !this.turns.length;
    byId("greeting").hidden = this.turns.length > 0;
    this.list.setAttribute("aria-busy", busy);
    for (const turn of this.turns) {
      if (turn.edit) turn.edit.disabled = turn.again.disabled = busy;
    }
  }

  #fail(lines) {
    byId("chat-error").replaceChildren(...lines.map((line) => el("span", {}, line)));
  }

  #suit() {
    const model = this.models?.get(byId("model").value);
    if (model) this.settings.suit(model);
  }
}

function action(name, run) {
  const made = el("button", { type: "button", class: "plain" }, name);
  made.addEventListener("click", run);
  return made;
}

function randomKey() {
  // randomUUID() is missing where the page comes over plain HTTP from another machine.
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
