// Menus behind three dots, details.menu: one is open at a time; a press elsewhere and Escape close it.
import { keepOpen } from "/ui/shared/keep_open.js";

/** Look after the menus in `place`. Return what opens one again, and what else is unfolded there, in markup that was
 *  drawn anew; what has the keyboard in a menu keeps it. */
export function menus(place, leaving) {
  const openAgain = keepOpen(place);
  const parts = (menu) => [...menu.querySelectorAll("summary, a, button")];
  let held = null; // the key of the menu that has the keyboard, and which of its parts

  function at(target) {
    const menu = place.contains(target) ? target.closest("details.menu") : null;
    held = menu && { key: menu.dataset.key, part: parts(menu).indexOf(target) };
    for (const other of place.querySelectorAll("details.menu[open]")) if (other !== menu) other.open = false;
  }

  for (const sign of ["pointerdown", "focusin"]) document.addEventListener(sign, ({ target }) => at(target), { signal: leaving });
  place.addEventListener("keydown", (event) => {
    const menu = event.key === "Escape" && event.target.closest("details.menu[open]");
    if (!menu) return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });

  return () => {
    openAgain();
    const menu = held && place.querySelector(`details.menu[data-key="${CSS.escape(held.key)}"]`);
    if (menu) parts(menu)[held.part]?.focus({ preventScroll: true });
  };
}
