// The lists are drawn again and again: one listener for all buttons, and what the person had focused
// or opened is found again by its data afterwards.
const opened = new Set();
let focused = null;

const keyOf = (node) => {
  const button = node.closest("button[data-action]");
  return button && { action: button.dataset.action, id: button.dataset.id };
};

const say = (button, words) => {
  const before = button.textContent;
  button.dataset.label = before;
  button.textContent = words;
  button.setAttribute("aria-label", button.getAttribute("aria-label").replace(before, words));
};

element.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  if (!button || button.disabled) return;
  if (button.dataset.sure && !button.dataset.label) {
    say(button, button.dataset.sure); // a second click does it, leaving takes it back
    return;
  }
  button.disabled = true; // until the lists are drawn again
  trigger("click", { action: button.dataset.action, id: button.dataset.id });
});

element.addEventListener("focusout", (event) => {
  const button = event.target.closest("button[data-label]");
  if (!button || !button.isConnected) return;
  say(button, button.dataset.label);
  delete button.dataset.label;
});

document.addEventListener("focusin", (event) => {
  focused = element.contains(event.target) ? keyOf(event.target) : null;
});

document.addEventListener("pointerdown", (event) => {
  if (!element.contains(event.target)) focused = null;
});

element.addEventListener("toggle", (event) => {
  const key = event.target.dataset.key;
  if (key) event.target.open ? opened.add(key) : opened.delete(key);
}, true);

new MutationObserver(() => {
  for (const details of element.querySelectorAll("details[data-key]")) {
    if (opened.has(details.dataset.key) && !details.open) details.open = true;
  }
  if (!focused || element.contains(document.activeElement)) return;
  const buttons = [...element.querySelectorAll("button[data-action]:not(:disabled)")];
  const ofItem = buttons.filter((button) => button.dataset.id === focused.id);
  // At the end of the list its button is disabled: the other one of the item is the next best.
  (ofItem.find((button) => button.dataset.action === focused.action) ?? ofItem[0])?.focus({ preventScroll: true });
}).observe(element, { childList: true, subtree: true });
