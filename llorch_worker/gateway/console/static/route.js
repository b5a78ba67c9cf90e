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

/** The same view at another address, without a step back to the last. */
export function amend(where) {
  if (location.hash === where) return;
  history.replaceState(null, "", where);
  for (const each of listeners) each(route(), { amended: true });
}

/** `listener(route, {amended})` hears of each change. */
export function whenRouted(listener) {
  listeners.push(listener);
  addEventListener("hashchange", () => listener(route(), { amended: false }));
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
