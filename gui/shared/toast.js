// What is said in passing, in a corner of the page, until it is closed or the page is left.
import { make } from "/ui/dialog.js";
import { say } from "/ui/shared/words.js";

/** Say a text or elements; `undo` gives it a button. */
export function toast(said, undo) {
  const main = document.querySelector("main");
  main.querySelector(".toast")?.remove();
  const close = make("button", { type: "button", textContent: say("Close"), onclick: () => node.remove() });
  const again = undo && make("button", { type: "button", className: "primary", textContent: say("Undo"), onclick: undo });
  const node = make("div", { className: "toast", role: "status" }, make("span", {}, ...[said].flat()), again, close);
  main.append(node);
}
