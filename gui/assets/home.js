// Home: the cards follow the event "live"; one listener serves the buttons of all cards.
import { dropZone, trainOn } from "/ui/drop.js";
import { followHome, look } from "/ui/shared/live.js";

export function mount(element, act) {
  const place = element.querySelector(".home");
  const draw = (markup) => {
    const focused = place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    place.innerHTML = markup; // markup of our own server, in which every text is escaped
    if (focused) place.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  };
  document.addEventListener("live", (event) => {
    if (element.isConnected && event.detail.home !== undefined) draw(event.detail.home);
  });
  followHome(place.dataset.stamp);
  element.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-action]");
    if (!button || !act) return;
    button.disabled = true; // until the cards are drawn again, which a refusal does not do
    setTimeout(() => { button.disabled = false; look(); }, 1500);
    act({ action: button.dataset.action, run: button.dataset.run });
  });
  dropZone(element.querySelector(".drop"), trainOn);
}
