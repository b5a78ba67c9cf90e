// Who is here, and what they see.

import { ApiError, call, key, whenRefused } from "./api.js";
import { Chat } from "./chat.js";
import { DeadLetters } from "./dead_letters.js";
import { byId, setText } from "./dom.js";
import { Fleet } from "./fleet.js";
import { duration } from "./format.js";
import { History } from "./history.js";
import { OpenedJob } from "./job.js";
import { Jobs } from "./jobs.js";
import { Polling } from "./polling.js";
import { route, whenRouted } from "./route.js";

const LOOK_MS = 3000;
const OLD_MS = 3 * LOOK_MS;
const PULSE_MS = 10000;
const HISTORY_MS = 15000;
const MODELS_MS = 30000;
const REFUSED = "llorch-refused";

const chat = new Chat();
const jobs = new Jobs();
const job = new OpenedJob();
const fleet = new Fleet();
const history = new History();
const letters = new DeadLetters();

/** The parts of the page. `looks`: what each asks for again and again while it is shown. */
const VIEWS = {
  chat: { looks: [polling(() => chat.loadModels(), MODELS_MS)] },
  jobs: { looks: [polling(() => jobs.look(), LOOK_MS)] },
  job: { looks: [] },
  fleet: { operators: true, looks: [polling(() => fleet.look(), LOOK_MS), polling(() => history.look(), HISTORY_MS)] },
  dead: { operators: true, looks: [polling(() => letters.look(), LOOK_MS)] },
};
const pulse = polling(async () => letters.note(await call("console/api/pulse")), PULSE_MS);
let session = null;
let shown = null;
let readAt = null;

function polling(look, everyMs) {
  return new Polling(look, everyMs, showLink);
}

function showLink(ok, error) {
  const away = error instanceof ApiError ? error.message : "the gateway cannot be reached";
  setText(byId("link"), ok ? "" : away);
  if (ok) readAt = performance.now();
  showAge();
}

/** An answer may also be late: the age is shown while nothing says why. */
function showAge() {
  const ageMs = readAt === null || !shown?.looks.length ? 0 : performance.now() - readAt;
  const old = shown === VIEWS.chat ? Infinity : OLD_MS;
  const away = byId("link").textContent !== "";
  setText(byId("age"), ageMs > old || (away && ageMs) ? `Figures are ${duration(ageMs)} old` : "");
}

/** Shows the part that the address names, and asks for nothing else. */
function show({ view, id, filters }) {
  if (session === null) return;
  const name = view === "jobs" && id ? "job" : view;
  const found = VIEWS[name] && (!VIEWS[name].operators || session.operator) ? name : "chat";
  for (const each of shown?.looks ?? []) each.stop();
  if (shown === VIEWS.job) job.leave();
  for (const each of document.querySelectorAll(".view")) each.hidden = each.id !== found;
  const section = found === "job" ? "jobs" : found;
  for (const link of byId("nav").children) {
    if (link.getAttribute("href") === `#/${section}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  shown = VIEWS[found];
  readAt = null;
  if (found === "jobs") jobs.show(filters);
  if (found === "job") job.show(id);
  for (const each of shown.looks) each.start();
  showAge();
}

/** Esc ends what runs, wherever one looks. A dialog and a list of choices take it for themselves. */
function escape(event) {
  if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (shown === VIEWS.job && !byId("job-cancel").hidden) byId("job-cancel").click();
  else chat.stop();
}

function showSignIn(message = "") {
  for (const each of [...(shown?.looks ?? []), pulse]) each.stop();
  byId("main").hidden = byId("nav").hidden = byId("who").hidden = true;
  byId("sign-in").hidden = false;
  setText(byId("sign-in-error"), message);
  byId("key").value = "";
  byId("key").focus();
}

async function enter() {
  const caller = await call("console/api/session");
  if (!caller.signed_in) {
    const tried = key.get() !== null || sessionStorage.getItem(REFUSED) !== null;
    key.forget();
    sessionStorage.removeItem(REFUSED);
    showSignIn(tried ? "This key is unknown here, or was revoked." : "");
    return;
  }
  session = caller;
  byId("sign-in").hidden = true;
  byId("main").hidden = byId("nav").hidden = false;
  byId("who").hidden = !session.needs_key;
  setText(byId("who-name"), session.name);
  for (const each of document.querySelectorAll(".operator")) each.hidden = !session.operator;
  show(route());
  if (session.operator) pulse.start();
  await chat.start();
}

/** Shows why the console does not open, and tries again. */
async function open() {
  try {
    await enter();
    setText(byId("link"), "");
  } catch (error) {
    showLink(false, error);
    setTimeout(open, 3000);
  }
}

/** What this key saw must not stay for the next one, so the page begins anew. */
function leave() {
  chat.leave();
  key.forget();
  location.reload();
}

whenRefused(() => {
  sessionStorage.setItem(REFUSED, "yes");
  leave();
});
byId("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  open();
});
whenRouted((where, { amended }) => {
  show(where);
  // A screen reader goes on there; whoever types a filter stays in its field.
  if (!amended) byId("main").focus({ preventScroll: true });
});
document.addEventListener("keydown", escape);
byId("sign-out").addEventListener("click", leave);
setInterval(showAge, 1000);
open();
