// Which part of the page is shown. The address says it, with its filters: #/jobs?state=waiting.

const listeners = [];

/** {view, id, filters} of the address. */
export function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, id = ""] = path.split("/");
  return { view: view || "chat", id: decoded(id), filters: Object.fromEntries(new URLSearchParams(query)) };
}

/** The address of a view; empty filters are left out. */
export function address(view, id = "", filters = {}) {
  const query = new URLSearchParams(Object.entries(filters).filter(([, value]) => value)).toString();
  return `#/${view}${id && `/${encodeURIComponent(id)}`}${query && `?${query}`}`;
}

/** Goes there; `replace`: without a step back to where the page was. */
export function go(where, { replace = false } = {}) {
  if (location.hash === where) return;
  if (replace) {
    history.replaceState(null, "", where);
    for (const each of listeners) each(route());
  } else location.hash = where;
}

export function whenRouted(listener) {
  listeners.push(listener);
  addEventListener("hashchange", () => listener(route()));
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
