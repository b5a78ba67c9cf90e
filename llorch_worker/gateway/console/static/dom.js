// Elements. Text only ever becomes text: nothing here parses HTML.

export const byId = (id) => document.getElementById(id);

// C0 and C1 controls except tab and newline, and marks that turn the direction of the text beside them.
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** A text of strangers with these characters made visible, as the command line shows them. */
export const harmless = (text) =>
  text.replace(CONTROLS, (mark) => `\\u${mark.charCodeAt(0).toString(16).padStart(4, "0")}`);

/** A new element; children are elements or text, properties are attributes. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.map((child) => (typeof child === "string" ? harmless(child) : child)));
  return made;
}

/** Sets an element's text, if it differs: what has not changed keeps its selection. */
export function setText(element, given) {
  const text = harmless(given);
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Makes the rows of a table equal to `items`. A row stays the same element as long as its item has
 * the same key, so focus and selection stay where they are.
 */
export class Rows {
  /** `columns`: {name: label}. Cells get the class `name`; narrow screens show the label in them. */
  constructor(table, columns, empty) {
    this.columns = columns;
    this.known = new Map();
    const head = el("div", { role: "row", class: "head" });
    for (const [name, label] of Object.entries(columns)) {
      head.append(el("span", { role: "columnheader", class: name }, label));
    }
    this.body = el("div", { role: "rowgroup" });
    this.head = el("div", { role: "rowgroup" }, head);
    this.empty = el("p", { class: "empty" }, empty);
    this.table = table;
    table.before(this.empty);
    table.replaceChildren(this.head, this.body);
    this.show([], () => "", () => {});
  }

  /** `fill(cells, item, row)` writes an item into its cells, by column name. */
  show(items, keyOf, fill) {
    const old = this.known;
    this.known = new Map();
    items.forEach((item, place) => {
      const key = keyOf(item);
      const entry = old.get(key) ?? this.#row();
      old.delete(key);
      this.known.set(key, entry);
      fill(entry.cells, item, entry.row);
      if (this.body.children[place] !== entry.row) {
        this.body.insertBefore(entry.row, this.body.children[place] ?? null);
      }
    });
    for (const { row } of old.values()) row.remove();
    this.empty.hidden = items.length > 0;
    this.table.hidden = items.length === 0;
  }

  #row() {
    const row = el("div", { role: "row" });
    const cells = {};
    for (const [name, label] of Object.entries(this.columns)) {
      cells[name] = el("span", { role: "cell", class: name, "data-label": label });
      row.append(cells[name]);
    }
    return { row, cells };
  }
}

/** A number with a bar under it that is filled to `share` (0 to 1, or null for no bar). */
export function setMeter(cell, text, share) {
  if (!cell.firstElementChild) {
    cell.append(el("span", { class: "number" }), el("i", { class: "meter", "aria-hidden": "true" }, el("i")));
  }
  const [number, meter] = cell.children;
  setText(number, text);
  meter.hidden = share === null;
  meter.firstElementChild.style.width = `${100 * Math.min(1, share ?? 0)}%`;
  meter.classList.toggle("full", (share ?? 0) >= 0.95);
}
