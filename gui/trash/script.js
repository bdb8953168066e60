// Deleting with Undo: buttons with data-trash move what data-ref names into the trash, and lead to
// data-next, where what was done is said with its Undo. The page Trash puts back and empties.
import { make } from "/ui/dialog.js";
import { ask } from "/ui/shared/ask.js";
import { say } from "/ui/shared/words.js";

const KEPT = "lora-train deleted";

/** Listen for those buttons in a page; it says by data-ready that a press counts. */
export function mount(place) {
  const away = JSON.parse(sessionStorage.getItem(KEPT) ?? "null");
  sessionStorage.removeItem(KEPT);
  if (away) toast(place, say("{} is in the trash.", away.name), () => back(place, away.id));
  place.addEventListener("click", async (event) => {
    const button = event.target.closest?.("[data-trash], [data-back], [data-empty]");
    if (!button || event.detail > 1) return; // a double click is one press
    // The press on the question counts: what may come between draws the first words again.
    if (button.dataset.sure && button.lastChild.textContent !== button.dataset.sure) {
      button.lastChild.textContent = button.dataset.sure;
      return;
    }
    button.disabled = true;
    if (button.dataset.back) await back(place, button.dataset.back);
    else if (button.dataset.trash) await throwAway(place, button);
    else await reloadAfter(place, ask("/trash/empty"));
    button.disabled = false;
  });
  (place.querySelector(".trash") ?? place).dataset.ready = ""; // from now on a press counts
}

async function throwAway(place, button) {
  const { trash: kind, ref, next } = button.dataset;
  const answer = await ask("/trash/put", { kind, ref });
  if (answer.error) toast(place, answer.error);
  else {
    sessionStorage.setItem(KEPT, JSON.stringify(answer));
    location.assign(next);
  }
}

function back(place, id) {
  return reloadAfter(place, ask("/trash/back", { id }));
}

async function reloadAfter(place, asked) {
  const answer = await asked;
  if (answer.error) toast(place, answer.error);
  else location.reload();
}

function toast(place, said, undo) {
  place.querySelector(".toast")?.remove();
  const close = make("button", { type: "button", textContent: say("Close"), onclick: () => node.remove() });
  const again = undo && make("button", { type: "button", className: "primary", textContent: say("Undo"), onclick: undo });
  const node = make("div", { className: "toast" }, make("span", {}, said), again, close);
  node.setAttribute("role", "status");
  place.append(node);
}
