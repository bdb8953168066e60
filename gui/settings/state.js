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

export class Page {
  constructor(root, leaving) {
    this.root = root;
    this.leaving = leaving;
    this.shown = JSON.parse(root.dataset.state); // the draft that the page shows
    this.plan = null; // what it comes to, once that is known
    this.wasLost = false;
    this.fields = new Map(); // by "section.name"
    this.places = new Map(); // where something can be typed: the fields, and the JSON as ""
    this.line = Promise.resolve();
    // The other tabs of this browser: told of each change, so that none has to ask whether there is one.
    this.tabs = new BroadcastChannel("lora-train.draft");
    this.hears = { away() {}, draft() {} }; // an answer that did not come; the draft that is there, and whether it is another
    leaving.addEventListener("abort", () => this.tabs.close());
  }

  /** Return an element by its id, also once the page is left. */
  at(id) { return this.root.querySelector(`#${CSS.escape(id)}`); }

  /** Ask after all that was asked before, so that changes arrive in order. */
  askInTurn(name, more = {}) {
    // No JSON that the server reads has half a character in it.
    if (Object.values(more).some((value) => /\p{Surrogate}/u.test(value))) {
      return Promise.resolve({ error: say("Half a character stands in it: type it again.") });
    }
    this.line = this.line.then(() => this.askNow(name, more));
    return this.line;
  }

  async askNow(name, more = {}) {
    const found = await ask(`/settings/${name}`, { draft: this.shown.id, ...more });
    if (found.isAway) {
      this.wasLost = true;
      put(this.at("away"), AWAY);
      if (!this.leaving.aborted) this.hears.away();
      return { isAway: true, error: AWAY };
    }
    put(this.at("away"), "");
    if (WRITES.has(name) && !found.error && !this.leaving.aborted) this.tabs.postMessage(this.shown.id);
    return found;
  }

  /** Show an answer, unless it is a refusal or has no news. */
  accept(answer) {
    if (!answer.stamp || this.leaving.aborted) return;
    const isOther = answer.stamp !== this.shown.stamp;
    this.shown = answer;
    this.hears.draft(isOther);
  }

  get keptAs() { return `lora-train.typed.${this.shown.id}`; }

  /** Note what was typed and refused: it outlives a reload of this tab. */
  remember() {
    const typed = {};
    for (const [key, place] of this.places) if (place.dirty) typed[key] = place.read();
    sessionStorage.setItem(this.keptAs, JSON.stringify(typed));
  }

  recall() {
    const typed = JSON.parse(sessionStorage.getItem(this.keptAs) || "{}");
    for (const [key, text] of Object.entries(typed)) this.places.get(key)?.recall(text);
  }
}
