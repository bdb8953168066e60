// Painting the mask of an image: bright is what the training learns, dark what counts little. Below it the
// crops that the trainer makes of the image. Arrow keys move the brush, Space paints, E erases.
import { dialog, make } from "/ui/dialog.js";
import { say } from "/ui/shared/words.js";

const STEPS_KEPT = 20;

export function paint(file, src, { width_px, height_px, mask, seen }, save) {
  const canvas = make("canvas", { width: width_px, height: height_px, tabIndex: 0 });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", say("Mask of {}: arrow keys move the brush, Space paints, E erases", file));
  const brush = new Brush(canvas, mask);
  const size = make("input", { type: "range", min: 2, max: 50, value: 12, oninput: () => { brush.share = size.value / 100; } });
  const tool = (label, value) => {
    const button = make("button", { type: "button", textContent: label, onclick: () => { brush.erases = value; mark(); } });
    return Object.assign(button, { value: String(value) });
  };
  const tools = [tool(say("Paint"), false), tool(say("Erase"), true)];
  const mark = () => tools.forEach((one) => one.setAttribute("aria-pressed", String(one.value === String(brush.erases))));
  mark();
  const act = (label, does) => make("button", { type: "button", textContent: label, onclick: does });
  const crops = (seen ?? []).map((one) => make("figure", {}, make("img", { src: one.src, alt: one.said }), make("figcaption", { textContent: one.said })));
  const shown = dialog(say("What counts in {}", file), {
    fields: [
      make("div", { className: "paint", style: `aspect-ratio: ${width_px} / ${height_px}; max-width: calc(40vh * ${width_px / height_px})` }, make("img", { src, alt: "" }), canvas),
      make("p", { className: "actions" }, ...tools, make("label", { className: "switch" }, say("Size"), size),
        act(say("All of it"), () => brush.fill(255)), act(say("Nothing"), () => brush.fill(0)), act(say("Undo"), () => brush.undo())),
      crops.length ? make("div", { className: "crops" }, make("h3", { textContent: say("What the training sees") }), ...crops) : "",
    ].map((field) => field || make("span")),
    note: say("Paint what is to be learned; the dark part counts little. Saved as a file beside {}; Undo on the page takes it back.", file),
    act: say("Save the mask"),
    submit: () => save(canvas.toDataURL("image/png")),
  });
  shown.node.classList.add("wide");
  if (mask) {
    shown.node.querySelector(".actions:last-child").append(act(say("Remove the mask"), async () => {
      const answer = await save("");
      if (answer?.error) shown.refuse(answer.error); else shown.node.close();
    }));
  }
  canvas.focus();
}

/** Draws on a canvas of greys, white on black; the page dims what is dark. */
class Brush {
  constructor(canvas, mask) {
    Object.assign(this, { canvas, share: 0.12, erases: false, before: [], at: null });
    this.context = canvas.getContext("2d", { willReadFrequently: true });
    this.flat(0);
    if (mask) {
      const image = new Image();
      image.onload = () => this.context.drawImage(image, 0, 0, canvas.width, canvas.height);
      image.src = mask;
    }
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.keep();
      this.at = this.point(event);
      this.line(this.at, this.at);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.at) return;
      const to = this.point(event);
      this.line(this.at, to);
      this.at = to;
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { this.at = null; });
    this.cursor = { x: canvas.width / 2, y: canvas.height / 2 };
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  get width() { return this.share * Math.max(this.canvas.width, this.canvas.height); }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: (event.clientX - box.left) * this.canvas.width / box.width, y: (event.clientY - box.top) * this.canvas.height / box.height };
  }

  key(event) {
    const by = this.width / 2;
    const move = { ArrowLeft: [-by, 0], ArrowRight: [by, 0], ArrowUp: [0, -by], ArrowDown: [0, by] }[event.key];
    if (move) {
      this.cursor.x = Math.min(this.canvas.width, Math.max(0, this.cursor.x + move[0]));
      this.cursor.y = Math.min(this.canvas.height, Math.max(0, this.cursor.y + move[1]));
    } else if (event.key === " " || event.key === "e") {
      this.keep();
      const erased = this.erases;
      this.erases = event.key === "e" ? true : this.erases;
      this.line(this.cursor, this.cursor);
      this.erases = erased;
    } else return;
    event.preventDefault();
  }

  line(from, to) {
    const { context } = this;
    Object.assign(context, { lineWidth: this.width, lineCap: "round", strokeStyle: this.erases ? "#000" : "#fff" });
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.lineTo(to.x, to.y + (from === to ? 0.01 : 0));
    context.stroke();
  }

  keep() {
    this.before.push(this.context.getImageData(0, 0, this.canvas.width, this.canvas.height));
    this.before.splice(0, this.before.length - STEPS_KEPT);
  }

  undo() { const last = this.before.pop(); if (last) this.context.putImageData(last, 0, 0); }

  flat(grey) {
    this.context.fillStyle = `rgb(${grey} ${grey} ${grey})`;
    this.context.fillRect(0, 0, this.canvas.width, this.canvas.height);
  }

  fill(grey) { this.keep(); this.flat(grey); }
}
