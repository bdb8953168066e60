// The stars of the files: one listener for all of them, since the list is drawn again and again.
element.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-best]");
  if (button) trigger("click", { step: Number(button.dataset.best) });
});
