// The page Queue: one listener serves all buttons. The lists are drawn again as they change; what is open and what has
// the keyboard follow the item. No button asks back: what it removed is put back by Undo.
import { follow } from "/ui/shared/follow.js";
import { keepOpen } from "/ui/shared/keep_open.js";
import { tell } from "/ui/shared/tell.js";

const keyOf = (node) => {
  const button = node.closest("button[data-action]");
  return button && { action: button.dataset.action, id: button.dataset.id };
};

export function mount(main, leaving) {
  const place = main.querySelector("#queue");
  const said = main.querySelector(".said");
  const openAgain = keepOpen(place);
  let focused = null; // action and item of the button that has the keyboard

  const asked = follow(place, "/queue/look", leaving, () => {
    openAgain();
    if (!focused) return;
    const buttons = [...place.querySelectorAll("button[data-action]:not(:disabled)")];
    const ofItem = buttons.filter((button) => button.dataset.id === focused.id);
    // At the end of the list its button is disabled: the other one of the item is the next best.
    const best = ofItem.find((button) => button.dataset.action === focused.action) ?? ofItem[0];
    best?.focus({ preventScroll: true });
  });

  place.addEventListener("click", async (event) => {
    const key = keyOf(event.target);
    if (!key || event.detail > 1) return; // a double click's second one may meet another item
    const answer = await asked({ press: key });
    tell(said, answer);
  });

  document.addEventListener("focusin", (event) => {
    focused = place.contains(event.target) ? keyOf(event.target) : null;
  }, { signal: leaving });
  document.addEventListener("pointerdown", (event) => {
    if (!place.contains(event.target)) focused = null;
  }, { signal: leaving });
}
