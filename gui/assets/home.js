// The buttons of the cards: one listener for all of them, since the cards are drawn again and again.
element.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  if (!button) return;
  button.disabled = true; // until the cards are drawn again, which a refusal does not do
  setTimeout(() => (button.disabled = false), 3000);
  trigger("click", { action: button.dataset.action, run: button.dataset.run });
});
