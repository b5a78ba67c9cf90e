// Markdown as elements. The parser gives tokens, and no HTML is ever parsed: markup stays text.

import markdownit from "./markdown-it.js";
import { el, harmless } from "./dom.js";

const parser = markdownit({ html: false, linkify: false });
/** How often what still grows is drawn again. */
const DRAW_MS = 80;

/** A text that grows. Its blocks become elements once they are whole; the last one is drawn again. */
export class Markdown {
  constructor(holder) {
    this.holder = holder;
    this.clear();
  }

  clear() {
    clearTimeout(this.timer);
    this.timer = null;
    this.rest = "";
    /** How many of the holder's nodes stay as they are. */
    this.whole = 0;
    this.holder.replaceChildren();
  }

  push(text) {
    this.rest += text;
    this.timer ??= setTimeout(() => this.draw(), DRAW_MS);
  }

  /** Draws at once. */
  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    while (this.holder.childNodes.length > this.whole) this.holder.lastChild.remove();
    const tokens = parser.parse(this.rest, {});
    const starts = tokens.filter((token) => token.level === 0 && token.map && token.nesting >= 0);
    const last = starts.length > 1 ? starts.at(-1).map[0] : 0;
    if (last) {
      const lines = this.rest.split("\n");
      const before = parser.parse(lines.slice(0, last).join("\n"), {});
      this.holder.append(elements(before));
      this.whole = this.holder.childNodes.length;
      this.rest = lines.slice(last).join("\n");
      this.holder.append(elements(parser.parse(this.rest, {})));
    } else {
      this.holder.append(elements(tokens));
    }
  }
}

/** The elements of the parser's tokens. */
function elements(tokens) {
  const root = document.createDocumentFragment();
  const open = [root];
  const add = (child) => open.at(-1).append(child);
  for (const token of tokens) {
    if (token.hidden) continue; // paragraphs of a tight list
    if (token.type === "inline") add(elements(token.children));
    else if (token.nesting === 1) {
      const made = opened(token);
      add(made);
      open.push(made);
    } else if (token.nesting === -1) open.pop();
    else add(single(token));
  }
  return root;
}

const OPENED = {
  paragraph_open: "p", bullet_list_open: "ul", ordered_list_open: "ol", list_item_open: "li",
  blockquote_open: "blockquote", table_open: "table", thead_open: "thead", tbody_open: "tbody",
  tr_open: "tr", th_open: "th", td_open: "td", strong_open: "strong", em_open: "em", s_open: "s",
};

function opened(token) {
  // The page has its own headings above: an answer's are below them.
  if (token.type === "heading_open") return el("p", { role: "heading", "aria-level": 3 + Number(token.tag[1]), class: token.tag });
  if (token.type === "link_open") {
    // The parser lets no javascript: through.
    const href = token.attrGet("href");
    return el("a", { href, rel: "noopener noreferrer nofollow", target: "_blank", title: harmless(href) });
  }
  const made = el(OPENED[token.type] ?? "span", { dir: token.block ? "auto" : undefined });
  if (token.type === "ordered_list_open") made.setAttribute("start", token.attrGet("start") ?? 1);
  return made;
}

function single(token) {
  switch (token.type) {
    case "fence":
    case "code_block":
      return code(token.content, token.info.trim().split(/\s+/)[0]);
    case "code_inline":
      return el("code", {}, token.content);
    case "hr":
      return el("hr");
    case "softbreak":
      return document.createTextNode("\n");
    case "hardbreak":
      return el("br");
    case "image":
      // The page loads nothing from elsewhere.
      return el("span", {}, `[image: ${token.content}] ${token.attrGet("src")}`);
    default:
      return document.createTextNode(harmless(token.content));
  }
}

function code(text, language) {
  const copy = el("button", { type: "button", class: "copy" }, "Copy");
  copy.addEventListener("click", async () => {
    const shown = harmless(text);
    try {
      await navigator.clipboard.writeText(shown);
      copy.textContent = "Copied";
    } catch {
      // Over plain HTTP from another machine there is no clipboard: select it instead.
      getSelection().selectAllChildren(copy.closest(".code").querySelector("code"));
      copy.textContent = "Selected";
    }
  });
  return el(
    "div",
    { class: "code" },
    el("div", { class: "line" }, el("span", { class: "hint" }, language || "code"), copy),
    el("pre", { tabindex: "0", role: "region", "aria-label": language ? `Code in ${language}` : "Code" }, el("code", { dir: "ltr" }, text)),
  );
}
