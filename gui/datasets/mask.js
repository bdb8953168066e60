// Painting the mask of an image: bright is what the training learns, dark what counts little. Below it the
// crops that the trainer makes of the image. Arrow keys move the brush, Space paints, E erases.
import { say } from "/ui/shared/words.js";
import { button, make } from "/ui/shared/elements.js";

const STEPS_KEPT = 20;
const SOFT_STEPS = 10; // presses of the soft brush along its own width
const SOFT_CORE = 0.15; // of its width, around its middle, that does not fade
const DIMMED = 0.8; // of the light that the mask takes

/** Return the parts of the painting: {canvas, ring, tools, crops, painted()}; `painted` is the mask as a data URL, and
 *  `findSubject` resolves to one of the subject, to nothing where there is none. `changed` is called at each change. */
export function maskPane(file, { width_px, height_px, mask, seen, finds_subject: finds }, findSubject, changed) {
  const canvas = make("canvas", {
    width: width_px, height: height_px, tabindex: 0, role: "img",
    "aria-label": say("Mask of {}: arrow keys move the brush, Space paints, E erases", file),
  });
  const brush = new Brush(canvas, mask, changed);
  const size = make("input", { type: "range", min: 2, max: 50, value: 12, oninput: () => { brush.share = size.value / 100; place(); } });
  const ring = make("i", { class: "brush", hidden: true });
  const place = () => { ring.style.width = `${100 * brush.width / canvas.width}%`; };
  place();
  const show = ({ x, y }) => {
    Object.assign(ring.style, { left: `${100 * x / canvas.width}%`, top: `${100 * y / canvas.height}%` });
    ring.hidden = false;
  };
  canvas.addEventListener("pointermove", (event) => show(brush.point(event)));
  canvas.addEventListener("pointerleave", () => { ring.hidden = true; });
  canvas.addEventListener("blur", () => { ring.hidden = true; });
  brush.moved = () => { show(brush.cursor); ring.scrollIntoView({ block: "nearest", inline: "nearest" }); };
  const tool = (label, value) => button(label, () => { brush.erases = value; mark(); }, { value: String(value) });
  const kinds = [tool(say("Paint"), false), tool(say("Erase"), true)];
  const mark = () => kinds.forEach((one) => one.setAttribute("aria-pressed", String(one.value === String(brush.erases))));
  mark();
  const tools = make("p", { class: "actions" }, ...[...kinds, make("label", { class: "switch" }, say("Brush"), size),
    make("label", { class: "switch" }, make("input", { type: "checkbox", onchange: ({ target }) => { brush.isSoft = target.checked; } }), say("Soft edge")),
    finds && button(say("Subject"), async ({ target }) => {
      target.disabled = true;
      const found = await findSubject();
      target.disabled = false;
      if (found) brush.take(found);
    }, { title: say("Finds what the image shows, by the program rembg") }),
    button(say("Fill all"), () => brush.fill(255)), button(say("Clear"), () => brush.fill(0)), button(say("Undo"), () => brush.undo())].filter(Boolean));
  const views = (seen ?? []).map((one) => new Seen(one, brush));
  brush.drawn = () => { for (const view of views) view.draw(); };
  const pictures = views.map((view) => view.node);
  const crops = pictures.length ? make("div", { class: "crops" }, make("h3", {}, say("What the training sees")), ...pictures) : "";
  return { canvas, ring, tools, crops, painted: () => canvas.toDataURL("image/png") };
}

/** A crop that is trained, dimmed where the mask says that it counts little: as the mask is now, saved or not. */
class Seen {
  constructor({ src, said, part, is_mirrored: isMirrored }, brush) {
    Object.assign(this, { part, isMirrored, brush });
    this.canvas = make("canvas", { role: "img", "aria-label": said });
    this.node = make("figure", {}, this.canvas, make("figcaption", {}, said));
    this.image = new Image();
    this.image.onload = () => { Object.assign(this.canvas, { width: this.image.naturalWidth, height: this.image.naturalHeight }); this.draw(); };
    this.image.src = src;
  }

  draw() {
    const { width, height } = this.canvas;
    const { canvas: mask, isFresh } = this.brush;
    if (!this.image.complete || !this.image.naturalWidth) return; // it draws itself once it is there
    const context = this.canvas.getContext("2d");
    context.drawImage(this.image, 0, 0);
    if (isFresh) return; // without a mask all of it counts
    const [left, top, right, bottom] = this.part.map((share, at) => share * (at % 2 ? mask.height : mask.width));
    context.save();
    context.globalCompositeOperation = "multiply";
    context.globalAlpha = DIMMED;
    if (this.isMirrored) { context.translate(width, 0); context.scale(-1, 1); }
    context.drawImage(mask, left, top, right - left, bottom - top, 0, 0, width, height);
    context.restore();
  }
}

/** Draws on a canvas of greys, white on black; the page dims what is dark. */
class Brush {
  constructor(canvas, mask, changed) {
    Object.assign(this, { canvas, changed, drawn: () => {}, moved: () => {}, share: 0.12, erases: false, isSoft: false, before: [], at: null });
    this.context = canvas.getContext("2d", { willReadFrequently: true });
    this.flat(0);
    this.hadMask = Boolean(mask);
    if (mask) this.load(mask); else canvas.classList.add("fresh"); // the image is seen until something is painted
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return; // the middle one moves an enlarged image
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
    canvas.addEventListener("pointerup", () => { this.at = null; });
    canvas.addEventListener("pointercancel", () => { // a second finger enlarges: the first one was not painting
      if (this.at) this.undo();
      this.at = null;
    });
    this.cursor = { x: canvas.width / 2, y: canvas.height / 2 };
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  load(mask) {
    const image = new Image();
    image.onload = () => { this.context.drawImage(image, 0, 0, this.canvas.width, this.canvas.height); this.drawn(); };
    image.src = mask;
  }

  /** Take a mask that was made elsewhere, as a step that can be undone. */
  take(mask) { this.keep(); this.load(mask); }

  /** Whether nothing was painted yet. */
  get isFresh() { return this.canvas.classList.contains("fresh"); }

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
      this.moved();
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
    if (this.isSoft) this.softLine(from, to); else this.hardLine(from, to);
    this.drawn();
  }

  /** Press the brush along a line, with an edge that fades; what lies one over another counts once, as the brighter
   *  of both, or the darker one while it erases. */
  softLine(from, to) {
    const { context, erases, width } = this;
    const [ink, edge] = erases ? ["#000", "#fff"] : ["#fff", "#000"];
    const count = Math.max(1, Math.ceil(Math.hypot(to.x - from.x, to.y - from.y) / (width / SOFT_STEPS)));
    context.save();
    context.globalCompositeOperation = erases ? "darken" : "lighten";
    for (let step = 1; step <= count; step += 1) {
      const [x, y] = [from.x + (to.x - from.x) * step / count, from.y + (to.y - from.y) * step / count];
      const fading = context.createRadialGradient(x, y, width * SOFT_CORE, x, y, width / 2);
      fading.addColorStop(0, ink);
      fading.addColorStop(1, edge);
      context.fillStyle = fading;
      context.beginPath();
      context.arc(x, y, width / 2, 0, 2 * Math.PI);
      context.fill();
    }
    context.restore();
  }

  hardLine(from, to) {
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

  undo() {
    const last = this.before.pop();
    if (last) this.context.putImageData(last, 0, 0);
    this.canvas.classList.toggle("fresh", !this.hadMask && !this.before.length);
    this.drawn();
  }

  flat(grey) {
    this.context.fillStyle = `rgb(${grey} ${grey} ${grey})`;
    this.context.fillRect(0, 0, this.canvas.width, this.canvas.height);
  }

  fill(grey) { this.keep(); this.flat(grey); this.drawn(); }
}
