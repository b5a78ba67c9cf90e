// Who is here, and what they see.

import { ApiError, call, key, whenRefused } from "./api.js";
import { DeadLetters } from "./dead_letters.js";
import { byId, setText } from "./dom.js";
import { Fleet } from "./fleet.js";
import { Generate } from "./generate.js";
import { Jobs } from "./jobs.js";
import { Polling } from "./polling.js";

const FLEET_MS = 2000;
const JOBS_MS = 5000;
const MODELS_MS = 30000;

const jobs = new Jobs();
const generate = new Generate((job) => jobs.add(job));
const letters = new DeadLetters();
const fleet = new Fleet((count) => letters.counted(count));
const pollings = [
  new Polling(() => fleet.look(), FLEET_MS, showLink),
  new Polling(() => jobs.look(), JOBS_MS),
];
const models = new Polling(() => generate.loadModels(), MODELS_MS);

function showLink(ok, error) {
  const away = error instanceof ApiError ? error.message : "the gateway cannot be reached";
  setText(byId("link"), ok ? "" : `Figures are old: ${away}`);
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
    const tried = key.get() !== null;
    key.forget();
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
    setText(byId("link"), "");
    await enter();
  } catch (error) {
    showLink(false, error);
    setTimeout(open, 3000);
  }
}

whenRefused(() => {
  key.forget();
  showSignIn("This key is unknown here, or was revoked.");
});
byId("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  open();
});
byId("sign-out").addEventListener("click", () => {
  generate.stop();
  key.forget();
  location.reload();
});
open();
