// How answers are asked for: what the user sets, what the model's makers say, and what is left.

import { byId, setText } from "./dom.js";

const KEY = "llorch-settings";
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
/** Where the model's makers do not say how to sample: small models ramble at 1. */
const SAMPLING = { temperature: 0.7, top_p: 0.95 };
/** Of an answer for which nobody names a maximum, if the context has room for them. */
const MOST_TOKENS = 4096;

/** The form of the settings. All but the system prompt is remembered in this browser. */
export class Settings {
  constructor() {
    this.model = null;
    this.form = byId("settings-form");
    for (const [name, value] of Object.entries(this.#remembered())) {
      const field = this.form.elements[name];
      if (field?.type === "checkbox") field.checked = value === true;
      else if (field) field.value = value;
    }
    this.form.addEventListener("input", () => this.#changed());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    byId("settings-reset").addEventListener("click", () => {
      this.form.reset();
      this.#changed();
    });
  }

  get plain() {
    return this.form.elements.plain.checked;
  }

  get system() {
    return this.form.elements.system.value.trim();
  }

  /** The model that was chosen last. */
  get chosen() {
    return this.#remembered().model ?? "";
  }

  choose(model) {
    this.#remember({ ...this.#remembered(), model });
  }

  /** Shows how this model is sampled from, and bounds the tokens by its context. */
  suit(model) {
    this.model = model;
    this.form.elements.max_tokens.max = model.max_model_len;
    this.#show();
  }

  /** Whether what is typed can be sent; the browser says what cannot. */
  valid() {
    if (!this.form.checkValidity()) byId("settings").open = true;
    return this.form.reportValidity();
  }

  /** The fields of a request beside its messages. */
  fields() {
    const own = this.#own();
    const config = this.model?.generation_config ?? {};
    const fields = { ...this.#added(own, config), ...own };
    if (!("max_tokens" in own) && !("max_tokens" in config)) {
      Object.assign(fields, { max_tokens: MOST_TOKENS, cut_max_tokens: true });
    }
    if (this.form.elements.priority.value) fields.priority = this.form.elements.priority.value;
    return fields;
  }

  #own() {
    const own = {};
    for (const name of NUMBERS) {
      const value = this.form.elements[name].valueAsNumber;
      if (!Number.isNaN(value)) own[name] = value;
    }
    return own;
  }

  /** What this page adds where neither the user nor the makers say how to sample. */
  #added(own, config) {
    if (own.temperature === 0 || "temperature" in config || "top_p" in config) return {};
    return Object.fromEntries(Object.entries(SAMPLING).filter(([name]) => !(name in own)));
  }

  #changed() {
    const values = { model: this.chosen };
    for (const field of this.form.elements) {
      if (!field.name || field.name === "system") continue;
      values[field.name] = field.type === "checkbox" ? field.checked : field.value;
    }
    this.#remember(values);
    this.#show();
  }

  #show() {
    const config = this.model?.generation_config ?? {};
    const own = this.#own();
    const added = this.#added({}, config);
    for (const name of NUMBERS) {
      const fallback = { top_k: "off", max_tokens: "what fits", seed: "random" }[name] ?? 1;
      this.form.elements[name].placeholder = config[name] ?? added[name] ?? fallback;
    }
    const said = (values) => Object.entries(values).map(([name, value]) => `${name.replace("_", " ")} ${value}`).join(", ");
    const makers = Object.fromEntries(Object.entries(config).filter(([name]) => !(name in own)));
    const parts = [
      [said(own), "yours"],
      [said(own.temperature === 0 ? {} : makers), "the model's own"],
      [said(this.#added(own, config)), "the default"],
    ];
    setText(byId("sampling"), parts.filter(([text]) => text).map(([text, whose]) => `${text} (${whose})`).join("; "));
  }

  #remembered() {
    try {
      return JSON.parse(localStorage.getItem(KEY)) ?? {};
    } catch {
      return {};
    }
  }

  #remember(values) {
    try {
      localStorage.setItem(KEY, JSON.stringify(values));
    } catch {
      // A browser that keeps nothing: the settings hold until the page is left.
    }
  }
}
