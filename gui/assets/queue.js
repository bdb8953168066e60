// Buttons of the queue. gradio patches the lists in place, so that a button may become that of another
// item, and its words come back: one listener serves all, focus and open details follow the item, not the node,
// and no button asks back; what it removed is put back by Undo.
const opened = new Set();
let focused = null; // action and item of the button that has the keyboard

const keyOf = (node) => {
  const button = node.closest("button[data-action]");
  return button && { action: button.dataset.action, id: button.dataset.id };
};
const same = (one, other) => one?.action === other?.action && one?.id === other?.id;

element.addEventListener("click", (event) => {
  const details = event.target.closest("summary")?.parentElement;
  if (details) opened[details.open ? "delete" : "add"](details.dataset.key); // as it was before
  const button = event.target.closest("button[data-action]");
  if (!button || event.detail > 1) return; // a double click's second one may meet another item
  trigger("click", keyOf(button));
});

document.addEventListener("focusin", (event) => {
  focused = element.contains(event.target) ? keyOf(event.target) : null;
});
document.addEventListener("pointerdown", (event) => {
  if (!element.contains(event.target)) focused = null;
});

const focusAgain = () => {
  const active = document.activeElement;
  const elsewhere = active !== document.body && !element.contains(active);
  if (!focused || elsewhere || same(focused, keyOf(active))) return;
  const buttons = [...element.querySelectorAll("button[data-action]:not(:disabled)")];
  const ofItem = buttons.filter((button) => button.dataset.id === focused.id);
  // At the end of the list its button is disabled: the other one of the item is the next best.
  const best = ofItem.find((button) => same(focused, keyOf(button))) ?? ofItem[0];
  if (best) best.focus({ preventScroll: true });
  else active.blur(); // what has the keyboard now belongs to another item
};

new MutationObserver(() => {
  for (const details of element.querySelectorAll("details[data-key]")) {
    if (details.open !== opened.has(details.dataset.key)) details.open = !details.open;
  }
  focusAgain();
}).observe(element, { attributes: true, characterData: true, childList: true, subtree: true });
