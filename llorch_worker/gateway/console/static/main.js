// Who is here, and what they see.

import { ApiError, call, key, whenRefused } from "./api.js";
import { DeadLetters } from "./dead_letters.js";
import { byId, setText } from "./dom.js";
import { Fleet } from "./fleet.js";
import { duration } from "./format.js";
import { Generate } from "./generate.js";
import { Jobs } from "./jobs.js";
import { Polling } from "./polling.js";

const FLEET_MS = 2000;
const OLD_MS = 3 * FLEET_MS;
const REFUSED = "llorch-refused";
const JOBS_MS = 5000;
const MODELS_MS = 30000;

const jobs = new Jobs();
const generate = new Generate((job) => jobs.add(job));
const letters = new DeadLetters();
const fleet = new Fleet((dead) => letters.look(dead));
const pollings = [
  new Polling(() => fleet.look(), FLEET_MS, showLink),
  new Polling(() => jobs.look(), JOBS_MS),
];
const models = new Polling(() => generate.loadModels(), MODELS_MS);

function showLink(ok, error) {
  const away = error instanceof ApiError ? error.message : "the gateway cannot be reached";
  setText(byId("link"), ok ? "" : away);
  showAge();
}

/** An answer may also be late: the age is shown while nothing says why. */
function showAge() {
  const ageMs = fleet.readAt === null ? 0 : performance.now() - fleet.readAt;
  const away = byId("link").textContent !== "";
  setText(byId("age"), ageMs > OLD_MS || (away && ageMs) ? `Figures are ${duration(ageMs)} old` : "");
}

function showSignIn(message = "") {
  for (const each of [...pollings, models]) each.stop();
  byId("console").hidden = byId("nav").hidden = byId("who").hidden = true;
  byId("sign-in").hidden = false;
  setText(byId("sign-in-error"), message);
  byId("key").value = "";
  byId("key").focus();
}

async function enter() {
  const session = await call("console/api/session");
  if (!session.signed_in) {
    const tried = key.get() !== null || sessionStorage.getItem(REFUSED) !== null;
    key.forget();
    sessionStorage.removeItem(REFUSED);
    showSignIn(tried ? "This key is unknown here, or was revoked." : "");
    return;
  }
  byId("sign-in").hidden = true;
  byId("console").hidden = byId("nav").hidden = false;
  byId("who").hidden = !session.needs_key;
  setText(byId("who-name"), session.name);
  document.body.classList.toggle("alone", !session.operator);
  for (const each of document.querySelectorAll(".operator")) each.hidden = !session.operator;
  if (session.operator) for (const each of pollings) each.start();
  await generate.start();
  models.start();
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
  generate.stop();
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
byId("sign-out").addEventListener("click", leave);
setInterval(showAge, 1000);
open();
