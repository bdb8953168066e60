// The part of an image that is trained, as a box on the image: dragged as a whole or by its handles, moved by the arrow
// keys, made larger and smaller by them with Shift. All places are shares of the image's width and height.
import { say } from "/ui/shared/words.js";
import { make } from "/ui/shared/elements.js";

const LEAST = 0.05; // of a side
const STEP = 0.01;
const HANDLES = ["nw", "n", "ne", "e", "se", "s", "sw", "w"];

export class CropBox {
  /** `box` is [left, top, right, bottom]; `changed` hears of each change. */
  constructor(file, box, changed) {
    Object.assign(this, { box: [...box], changed, shape: 0 });
    this.part = make("div", {
      class: "cb-part", tabindex: 0, role: "img",
      "aria-label": say("Crop of {}: the arrow keys move it, with Shift they change its size", file),
    }, ...HANDLES.map((side) => make("i", { class: `cb-${side}`, "data-side": side })));
    this.node = make("div", { class: "cb" }, this.part);
    this.node.addEventListener("pointerdown", (event) => this.begin(event));
    this.node.addEventListener("pointermove", (event) => this.drag(event));
    for (const end of ["pointerup", "pointercancel"]) this.node.addEventListener(end, () => { this.held = null; });
    this.part.addEventListener("keydown", (event) => this.key(event));
    this.draw();
  }

  /** Keep the width at so many heights, both as shares of the image; 0 for any. */
  keepShape(shape) {
    this.shape = shape;
    if (!shape) return;
    const [left, top, right, bottom] = this.box;
    const middle = [(left + right) / 2, (top + bottom) / 2];
    const area = (right - left) * (bottom - top);
    let high = Math.sqrt(area / shape);
    high = Math.min(high, 1, 1 / shape);
    const wide = high * shape;
    const at = (centre, length) => Math.min(1 - length, Math.max(0, centre - length / 2));
    const [x, y] = [at(middle[0], wide), at(middle[1], high)];
    this.set([x, y, x + wide, y + high]);
  }

  /** Whether all of the image is kept: that cannot be moved, so a new frame is drawn on it. */
  get isWhole() { return this.box.every((edge, at) => edge === (at < 2 ? 0 : 1)); }

  set(box) {
    this.box = box;
    this.draw();
    this.changed();
  }

  draw() {
    const [left, top, right, bottom] = this.box.map((share) => `${(100 * share).toFixed(3)}%`);
    this.part.classList.toggle("cb-whole", this.isWhole);
    Object.assign(this.part.style, { left, top, width: `calc(${right} - ${left})`, height: `calc(${bottom} - ${top})` });
  }

  begin(event) {
    if (event.button) return; // the middle one moves an enlarged image
    event.preventDefault();
    this.node.setPointerCapture(event.pointerId);
    const side = event.target.dataset.side ?? (event.target === this.part && !this.isWhole ? "move" : "draw");
    this.held = { side, from: this.at(event), box: [...this.box] };
    this.part.focus({ preventScroll: true });
  }

  at(event) {
    const place = this.node.getBoundingClientRect();
    return [(event.clientX - place.left) / place.width, (event.clientY - place.top) / place.height];
  }

  drag(event) {
    if (!this.held) return;
    const { side, from, box } = this.held;
    const to = this.at(event);
    const by = [to[0] - from[0], to[1] - from[1]];
    if (side === "move") this.move(box, by);
    else if (side === "draw") this.stretch("se", [from[0], from[1], from[0] + LEAST, from[1] + LEAST], [by[0] - LEAST, by[1] - LEAST]);
    else this.stretch(side, box, by);
  }

  move([left, top, right, bottom], [x, y]) {
    const across = Math.min(1 - right, Math.max(-left, x));
    const down = Math.min(1 - bottom, Math.max(-top, y));
    this.set([left + across, top + down, right + across, bottom + down]);
  }

  /** Move the sides that a handle is on; a kept shape moves the other side along. */
  stretch(side, [left, top, right, bottom], [x, y]) {
    const within = (value, low, high) => Math.min(high, Math.max(low, value));
    const isWest = side.includes("w"), isEast = side.includes("e"), isNorth = side.includes("n"), isSouth = side.includes("s");
    if (isWest) left = within(left + x, 0, right - LEAST);
    if (isEast) right = within(right + x, left + LEAST, 1);
    if (isNorth) top = within(top + y, 0, bottom - LEAST);
    if (isSouth) bottom = within(bottom + y, top + LEAST, 1);
    if (this.shape) {
      const roomAcross = isWest ? right : 1 - left;
      const roomDown = isNorth ? bottom : 1 - top;
      let wide = isWest || isEast ? right - left : (bottom - top) * this.shape;
      wide = Math.min(wide, roomAcross, roomDown * this.shape);
      const high = wide / this.shape;
      if (isWest) left = right - wide; else right = left + wide;
      if (isNorth) top = bottom - high; else bottom = top + high;
    }
    this.set([left, top, right, bottom]);
  }

  key(event) {
    const by = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] }[event.key];
    if (!by || event.ctrlKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation(); // the workbench turns over by the same keys
    if (event.shiftKey) this.stretch(by[0] ? "e" : "s", this.box, by); else this.move(this.box, by);
  }
}
