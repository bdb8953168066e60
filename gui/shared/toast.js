// What is said in passing, in a corner of the page, until it is closed, the page is left, or a minute has passed; what
// can be undone stays.
import { make } from "/ui/dialog.js";
import { say } from "/ui/shared/words.js";

const SHOWN_S = 60;

/** Say a text or elements; `undo` gives it a button. */
export function toast(said, undo) {
  const main = document.querySelector("main");
  main.querySelector(".toast")?.remove();
  const close = make("button", { type: "button", textContent: say("Close"), onclick: () => node.remove() });
  const again = undo && make("button", { type: "button", className: "primary", textContent: say("Undo"), onclick: undo });
  const node = make("div", { className: "toast", role: "status" }, make("span", {}, ...[said].flat()), again, close);
  main.append(node);
  if (!undo) goesAway(node);
}

/** Take a notice away after a while in which it was in sight; not while somebody is at it. */
function goesAway(node) {
  let seconds = 0;
  const timer = setInterval(() => {
    if (!node.isConnected) clearInterval(timer);
    else if (!document.hidden && !node.matches(":is(:hover, :focus-within)")) seconds += 1;
    if (seconds >= SHOWN_S) node.remove();
  }, 1000);
}
