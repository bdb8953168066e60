// What every page shows of the trainings that run: the chip in the bar, the title of the tab, a notice
// when one ends. Asks while something trains or waits; a page on which nothing happens asks once, and
// again when somebody comes back to it.

import { say } from "/ui/shared/words.js";

const AGAIN_MS = 2000;
const state = { timer: 0, turn: 0, bar: null, said: "", before: new Map(), title: "" };

export function start(bar) {
  state.bar = bar;
  // Gradio has named the language that the browser asks for, whatever the page is in.
  const language = document.documentElement.dataset.language ?? "en";
  bar.querySelector(".language select").value = document.documentElement.lang = language;
  if (!state.listening) {
    state.listening = true;
    document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
    window.addEventListener("focus", look);
    window.addEventListener("pageshow", (event) => { if (event.persisted) look(); });
    // Gradio sets the title of the page when it has loaded.
    new MutationObserver(() => { if (state.title && document.title !== state.title) document.title = state.title; })
      .observe(document.querySelector("title") ?? document.head, { childList: true, subtree: true, characterData: true });
  }
  return look();
}

/** Ask now, and go on asking while there is something to follow. */
async function look() {
  clearTimeout(state.timer);
  const turn = state.turn += 1;
  let now;
  try {
    const answer = await fetch("/live", { credentials: "same-origin" });
    if (!answer.ok) throw new Error(answer.statusText);
    now = await answer.json();
  } catch {
    now = null; // the server was ended, or starts anew
  }
  if (turn !== state.turn) return; // asked again meanwhile: that answer is newer
  if (!now) {
    state.timer = setTimeout(look, 5 * AGAIN_MS);
    return;
  }
  show(now);
  if (now.training.length || now.waiting) state.timer = setTimeout(look, AGAIN_MS);
}

function show(now) {
  for (const run of now.training) state.before.set(run.name, run);
  for (const [name, run] of state.before) {
    if (now.training.some((other) => other.name === name)) continue;
    state.before.delete(name);
    const ended = now.ended[name];
    if (ended) tell(run, ended);
  }
  const first = now.training[0];
  const title = first ? `${first.percent} % \u00b7 ${first.name}` : state.bar.dataset.page;
  state.title = `${title} \u2013 lora-train`;
  document.title = state.title;
  const place = state.bar.querySelector(".live");
  const said = first ? [first.name, `${first.percent} %`, first.left].filter(Boolean).join(" \u00b7 ") : "";
  if (state.said === said) return;
  state.said = said;
  place.replaceChildren();
  if (!first) return;
  const link = Object.assign(document.createElement("a"), { href: first.url });
  const words = document.createElement("span");
  const left = document.createElement("small");
  if (first.left) left.append(" \u00b7 ", document.createTextNode(first.left));
  words.append(nameOf(first), ` \u00b7 ${first.percent} %`, left);
  link.append(document.createElement("i"), words);
  place.append(link);
  if ("Notification" in window && Notification.permission === "default") place.append(bell());
}

function nameOf(run) {
  return Object.assign(document.createElement("span"), { textContent: run.name, translate: false });
}

function bell() {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "bare tool", title: say("Tell me when it ends") });
  const icon = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  icon.setAttribute("class", "icon");
  icon.append(document.createElementNS("http://www.w3.org/2000/svg", "use"));
  icon.firstChild.setAttribute("href", "/ui/icons.svg#bell");
  button.append(icon, Object.assign(document.createElement("span"), { textContent: say("Notify me") }));
  button.onclick = async () => { await Notification.requestPermission(); button.remove(); };
  return button;
}

/** Say that a training has ended: in the page, and from the system where somebody wished it. */
function tell(run, said) {
  const toast = Object.assign(document.createElement("div"), { className: "toast" });
  toast.setAttribute("role", "status");
  const close = Object.assign(document.createElement("button"), { type: "button", textContent: say("Close"), onclick: () => toast.remove() });
  const words = document.createElement("span");
  words.append(nameOf(run), ": ", Object.assign(document.createElement("span"), { textContent: say(said) }), ". ");
  toast.append(words, Object.assign(document.createElement("a"), { href: run.url, textContent: say("Open it") }), close);
  (state.bar.closest(".html-container") ?? document.body).append(toast);
  if ("Notification" in window && Notification.permission === "granted" && document.hidden) {
    new Notification(`${run.name}: ${say(said)}`, { icon: "/ui/mark.svg" });
  }
}
