// Two pictures over each other, large: a slider wipes from A, on the left, to B, on the right. Escape closes.
import { button, make } from "/ui/shared/elements.js";
import { say } from "/ui/shared/words.js";

/** Return the dialog as {node, show, open}; `below` stands under the slider. The page loads /ui/viewer.css for it. */
export function wipe(...below) {
  const images = ["a", "b"].map((name) => make("img", { class: name }));
  const slider = make("input", {
    type: "range",
    min: "0",
    max: "100",
    value: "50",
    "aria-label": say("where A ends and B begins, in percent of the width"),
    oninput: cut,
  });
  const stage = make("div", { class: "stage" }, ...images, make("i"));
  const node = make(
    "dialog",
    { class: "viewer", "aria-label": say("compare two pictures") },
    make(
      "div",
      { class: "actions" },
      make("p", { class: "caption" }, say("A on the left, B on the right")),
      button(say("Close"), () => node.close()),
    ),
    stage,
    slider,
    ...below,
    make(
      "p",
      { class: "quiet keys" },
      say("Drag the slider, or press left and right while it is chosen. Escape closes."),
    ),
  );

  function cut() {
    stage.style.setProperty("--cut", `${slider.value}%`);
  }

  return {
    node,
    /** Show these two pictures, as {source, text}; of a source that is null there is none. */
    show(pictures) {
      pictures.forEach(({ source, text }, index) => {
        const image = images[index];
        image.hidden = source === null;
        image.alt = text;
        if (source !== null && image.getAttribute("src") !== source) image.src = source;
      });
    },
    open() {
      slider.value = 50;
      cut();
      node.showModal();
      slider.focus();
    },
  };
}
