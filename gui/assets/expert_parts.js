// The page of all settings is five scripts in one function, in this order: expert_parts, expert_field,
// expert_plan, expert_file, expert. `props.value` is the form (gui/expert_view.py: form); the draft's
// state and plan come from the server functions, each of which takes one object and answers one. All
// texts from there are set with textContent or value, never as markup.
//
// Every change is saved as it is typed: what is refused stays in its field with the reason, is kept in
// the session of this tab, and is never overwritten by what the server says.

const TYPING_MS = 400;
const TICK_MS = 1000;
const WRITES = new Set(["change", "reset", "replace", "load", "keep"]);
const AWAY = "The interface does not answer. What you type stays here and is saved when it is back.";

const root = element.querySelector(".expert");
const fields = new Map(); // "section.name" -> Field
const sections = [];
let shown = { id: new URL(location.href).searchParams.get("draft") || "", stamp: "", given: {} };
let plan = null;
/** The other tabs of this browser: told of each change, so that none has to ask whether there is one. */
const tabs = new BroadcastChannel("lora-train.draft");

/** Make an element; children are texts and elements. */
function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Return words as they are searched: learning_rate, --learning-rate and Learning rate are the same. */
function plainWords(text) { return ` ${text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, " ").trim()}`; }

/** Return a text of the server in parts: `code` as code, nothing as code with an odd backtick. */
function inline(text) {
  const parts = text.split("`");
  if (parts.length % 2 === 0) return [text];
  return parts.map((part, at) => (at % 2 ? make("code", {}, part) : part));
}

function put(target, text) {
  const parts = inline(text ?? "");
  if (target.textContent !== parts.map((part) => part.textContent ?? part).join("")) target.replaceChildren(...parts);
  target.hidden = !text;
}

// ---- asking the server: one request after another, so that changes arrive in order

let line = Promise.resolve();
let wasLost = false; // an answer did not come, and what it was about is not asked again yet

function ask(name, more = {}) {
  const answer = line.then(() => server[name]({ draft: shown.id, ...more }));
  line = answer.catch(() => null);
  return answer.then((found) => {
    if (found === undefined) return lost(); // gradio's word for a connection that fails; "no news" is null
    put(away, "");
    if (WRITES.has(name) && !found.error) tabs.postMessage(shown.id);
    return found;
  }, lost);
}

/** Say that the server is away, and ask again until it is back. */
function lost() {
  wasLost = true;
  put(away, AWAY);
  lookLater();
  return { away: true, error: AWAY };
}
