// What the scripts of the page All settings share: the draft as the server has it, how they ask about it, and what is
// typed and not taken yet.
//
// Every change is saved as it is typed: what is refused stays in its field with the reason, is kept in the session of
// this tab, and is never overwritten by what the server says. Texts of the server are set as texts, never as markup.
import { make } from "/ui/dialog.js";
import { ask } from "/ui/shared/ask.js";
import { say } from "/ui/shared/words.js";

export const TYPING_MS = 400;
const WRITES = new Set(["change", "reset", "replace", "load", "keep"]);
const AWAY = say("The interface does not answer. What you type stays here and is saved when it is back.");

export const root = document.querySelector(".settings");
/** `shown` is the draft that the page shows, `plan` what it comes to, once that is known. */
export const page = { shown: JSON.parse(root.dataset.state), plan: null, wasLost: false };
/** By "section.name". */
export const fields = new Map();
/** Where something can be typed: the fields, and the JSON as "". */
export const places = new Map();
/** The other tabs of this browser: told of each change, so that none has to ask whether there is one. */
export const tabs = new BroadcastChannel("lora-train.draft");

export const at = (id) => document.getElementById(id);

/** Return a text of the server in parts: `code` as code, nothing as code with an odd backtick. */
export function inline(text) {
  const parts = text.split("`");
  if (parts.length % 2 === 0) return [text];
  return parts.map((part, index) => (index % 2 ? make("code", { textContent: part }) : part));
}

export function put(target, text) {
  const parts = inline(text ?? "");
  if (target.textContent !== parts.map((part) => part.textContent ?? part).join("")) target.replaceChildren(...parts);
  target.hidden = !text;
}

// ---- asking the server

let line = Promise.resolve();

/** Ask after all that was asked before, so that changes arrive in order. */
export function askInTurn(name, more = {}) {
  // No JSON that the server reads has half a character in it.
  if (Object.values(more).some((value) => /\p{Surrogate}/u.test(value))) {
    return Promise.resolve({ error: say("Half a character stands in it: type it again.") });
  }
  line = line.then(() => askNow(name, more));
  return line;
}

export async function askNow(name, more = {}) {
  const found = await ask(`/settings/${name}`, { draft: page.shown.id, ...more });
  if (found.isAway) {
    page.wasLost = true;
    put(at("away"), AWAY);
    for (const hear of hearing.away) hear();
    return { isAway: true, error: AWAY };
  }
  put(at("away"), "");
  if (WRITES.has(name) && !found.error) tabs.postMessage(page.shown.id);
  return found;
}

// ---- what follows from an answer

const hearing = { away: [], draft: [] };

/** Have a function called when an answer did not come. */
export function whenAway(hear) { hearing.away.push(hear); }

/** Have a function called when the draft is there anew; it is told whether that is another one. */
export function whenAccepted(hear) { hearing.draft.push(hear); }

/** Show an answer, unless it is a refusal or has no news. */
export function accept(answer) {
  if (!answer.stamp) return;
  const isOther = answer.stamp !== page.shown.stamp;
  page.shown = answer;
  for (const hear of hearing.draft) hear(isOther);
}

// ---- what was typed and refused outlives a reload of this tab

const keptAs = () => `lora-train.typed.${page.shown.id}`;

export function remember() {
  const typed = {};
  for (const [key, place] of places) if (place.dirty) typed[key] = place.read();
  sessionStorage.setItem(keptAs(), JSON.stringify(typed));
}

export function recall() {
  const typed = JSON.parse(sessionStorage.getItem(keptAs()) || "{}");
  for (const [key, text] of Object.entries(typed)) places.get(key)?.recall(text);
}
