// Painting the mask of an image: bright is what the training learns, dark what counts little. Below it the
// crops that the trainer makes of the image. Arrow keys move the brush, Space paints, E erases.
import { say } from "/ui/shared/words.js";
import { button, make } from "/ui/shared/elements.js";

const STEPS_KEPT = 20;

/** Return the parts of the painting: {canvas, tools, crops, painted()}; `painted` is the mask as a data URL, and
 *  `findSubject` resolves to one of the subject, to nothing where there is none. `changed` is called at each change. */
export function maskPane(file, { width_px, height_px, mask, seen, finds_subject: finds }, findSubject, changed) {
  const canvas = make("canvas", {
    width: width_px, height: height_px, tabindex: 0, role: "img",
    "aria-label": say("Mask of {}: arrow keys move the brush, Space paints, E erases", file),
  });
  const brush = new Brush(canvas, mask, changed);
  const size = make("input", { type: "range", min: 2, max: 50, value: 12, oninput: () => { brush.share = size.value / 100; } });
  const tool = (label, value) => button(label, () => { brush.erases = value; mark(); }, { value: String(value) });
  const kinds = [tool(say("Paint"), false), tool(say("Erase"), true)];
  const mark = () => kinds.forEach((one) => one.setAttribute("aria-pressed", String(one.value === String(brush.erases))));
  mark();
  const tools = make("p", { class: "actions" }, ...[...kinds, make("label", { class: "switch" }, say("Size"), size),
    finds && button(say("Subject"), async ({ target }) => {
      target.disabled = true;
      const found = await findSubject();
      target.disabled = false;
      if (found) brush.take(found);
    }, { title: say("Finds what the image shows, by the program rembg") }),
    button(say("All of it"), () => brush.fill(255)), button(say("Nothing"), () => brush.fill(0)), button(say("Undo"), () => brush.undo())].filter(Boolean));
  const pictures = (seen ?? []).map((one) => make("figure", {}, make("img", { src: one.src, alt: one.said }), make("figcaption", {}, one.said)));
  const crops = pictures.length ? make("div", { class: "crops" }, make("h3", {}, say("What the training sees")), ...pictures) : "";
  return { canvas, tools, crops, painted: () => canvas.toDataURL("image/png") };
}

/** Draws on a canvas of greys, white on black; the page dims what is dark. */
class Brush {
  constructor(canvas, mask, changed) {
    Object.assign(this, { canvas, changed, share: 0.12, erases: false, before: [], at: null });
    this.context = canvas.getContext("2d", { willReadFrequently: true });
    this.flat(0);
    if (mask) this.load(mask); else canvas.classList.add("fresh"); // the image is seen until something is painted
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

  load(mask) {
    const image = new Image();
    image.onload = () => this.context.drawImage(image, 0, 0, this.canvas.width, this.canvas.height);
    image.src = mask;
  }

  /** Take a mask that was made elsewhere, as a step that can be undone. */
  take(mask) { this.keep(); this.load(mask); }

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
    event.stopPropagation(); // the workbench turns over by the same keys
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
    this.changed();
    this.canvas.classList.remove("fresh");
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
