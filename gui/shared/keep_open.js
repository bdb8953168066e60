// What somebody has unfolded stays so when its part of the page is drawn again: details with a data-key.

/** Note what is opened in `place`; return a function that opens it again in what was drawn anew. */
export function keepOpen(place) {
  const opened = new Set();
  place.addEventListener("toggle", ({ target }) => {
    opened[target.open ? "add" : "delete"](target.dataset.key);
  }, true);
  return () => {
    for (const details of place.querySelectorAll("details[data-key]")) details.open = opened.has(details.dataset.key);
  };
}
