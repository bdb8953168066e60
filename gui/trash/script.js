// Deleting with Undo: buttons with data-trash move what data-ref names into the trash, and lead to
// data-next, where what was done is said with its Undo. The page Trash puts back and empties.
import { ask } from "/ui/shared/ask.js";
import { toast } from "/ui/shared/toast.js";
import { say } from "/ui/shared/words.js";

const KEPT = "lora-train deleted";

/** Listen for those buttons in a page; it says by data-ready that a press counts. */
export function mount(place) {
  const away = JSON.parse(sessionStorage.getItem(KEPT) ?? "null");
  sessionStorage.removeItem(KEPT);
  if (away) toast(say("{} is in the trash.", away.name), () => back(away.id));
  place.addEventListener("click", async (event) => {
    const button = event.target.closest?.("[data-trash], [data-back], [data-empty]");
    if (!button || event.detail > 1) return; // a double click is one press
    // The press on the question counts: what may come between draws the first words again.
    if (button.dataset.sure && button.lastChild.textContent !== button.dataset.sure) {
      button.lastChild.textContent = button.dataset.sure;
      return;
    }
    button.disabled = true;
    if (button.dataset.back) await back(button.dataset.back);
    else if (button.dataset.trash) await throwAway(button);
    else await reloadAfter(ask("/trash/empty"));
    button.disabled = false;
  });
  (place.querySelector(".trash") ?? place).dataset.ready = ""; // from now on a press counts
}

async function throwAway(button) {
  const { trash: kind, ref, next } = button.dataset;
  const answer = await ask("/trash/put", { kind, ref });
  if (answer.error) toast(answer.error);
  else {
    sessionStorage.setItem(KEPT, JSON.stringify(answer));
    location.assign(next);
  }
}

function back(id) {
  return reloadAfter(ask("/trash/back", { id }));
}

async function reloadAfter(asked) {
  const answer = await asked;
  if (answer.error) toast(answer.error);
  else location.reload();
}
