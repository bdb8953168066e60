// Home: the cards are drawn again as they change, and what has the keyboard keeps it; one listener serves all buttons.
import { dropZone, trainOn } from "/ui/shared/drop.js";
import { follow } from "/ui/shared/follow.js";
import { menus } from "/ui/shared/menus.js";
import { mount as deletes } from "/ui/trash/script.js";

export function mount(main, leaving) {
  const place = main.querySelector(".home");
  const said = main.querySelector(":scope > .said");
  const openAgain = menus(place, leaving);
  let focused = null; // data-key of the button that has the keyboard

  const asked = follow(place, "/home/look", leaving, () => {
    openAgain();
    if (focused) place.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  });

  document.addEventListener("focusin", ({ target }) => {
    focused = place.contains(target) ? target.dataset.key ?? null : null;
  }, { signal: leaving });

  place.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-action]");
    if (!button || event.detail > 1) return; // a double click's second one may meet another run
    button.disabled = true;
    const { action, run } = button.dataset;
    const { error = "" } = await asked({ press: { action, run } });
    button.disabled = false; // of a refusal; else other cards are drawn by now
    said.textContent = error;
    said.hidden = !error;
  });

  deletes(main);
  dropZone(main.querySelector(".drop"), leaving, trainOn);
}
