// Buttons that carry what they stand for: a click is told to the server as the text of data-choose.
element.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-choose]");
  if (button) trigger("click", button.dataset.choose);
});
