// Requests to the gateway. The key is in the tab's session storage and in headers, never in a URL.

const KEY = "llorch-key";
/** The gateway itself gives a Redis that does not reply up sooner. */
const ANSWER_MS = 10000;

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** The gateway's answer, other than 2xx. `lines` has one sentence for each fault. */
export class ApiError extends Error {
  constructor(status, error) {
    const faults = (error?.faults ?? []).map((fault) => `${fault.field}: ${fault.rule}`);
    super(error?.message ?? `The gateway answered ${status}.`);
    this.status = status;
    this.code = error?.llorch_code;
    this.lines = faults.length ? faults : [this.message];
  }
}

let onRefused = () => {};

/** `listener` is called when the gateway does not know the key any more. */
export function whenRefused(listener) {
  onRefused = listener;
}

/** fetch() with the key. Raises ApiError, or TypeError if the gateway cannot be reached. */
export async function send(path, { method = "GET", headers = {}, body, signal } = {}) {
  const all = { ...headers };
  if (key.get()) all.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) all["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method,
    headers: all,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    credentials: "omit",
    signal,
  });
  if (!answer.ok) {
    const document = await answer.json().catch(() => null);
    if (answer.status === 401) onRefused();
    throw new ApiError(answer.status, document?.error);
  }
  return answer;
}

/** The document of an answer that comes soon. Raises what send() raises, or a TimeoutError. */
export async function call(path, options) {
  return (await send(path, { ...options, signal: AbortSignal.timeout(ANSWER_MS) })).json();
}
