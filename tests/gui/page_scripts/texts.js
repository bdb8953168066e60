// Returns the words that are seen in the elements of a selector, but for those that nobody translates.
selector => [...document.querySelectorAll(selector)].flatMap((element) => {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const { data, parentElement } = walker.currentNode;
    const kept = parentElement.closest("[translate=no]") || !parentElement.checkVisibility();
    if (!kept && /[a-z]{2}/i.test(data)) found.push(data.trim());
  }
  return found;
})
