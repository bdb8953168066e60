// Returns what has the keyboard, and whether it is seen.
() => {
  const element = document.activeElement;
  const box = element.getBoundingClientRect();
  const style = getComputedStyle(element);
  return {
    tag: element.tagName,
    name: (element.getAttribute("aria-label") ?? element.innerText ?? "").trim(),
    seen: box.width > 0 && box.bottom > 0 && box.top < innerHeight && style.outlineStyle !== "none",
  };
}
