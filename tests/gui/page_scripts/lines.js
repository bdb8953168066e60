// Returns for each element that a selector names over how many lines its words go.
(selector) => [...document.querySelectorAll(selector)].map((element) => {
  const words = document.createRange();
  words.selectNodeContents(element);
  return new Set([...words.getClientRects()].map((part) => Math.round(part.top))).size;
})
