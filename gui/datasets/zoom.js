// How closely one image is looked at: the wheel, the keys + and -, or the buttons enlarge it, and what is beyond the
// edge is scrolled to. Fingers enlarge the page itself, as everywhere on a phone.
import { say } from "/ui/shared/words.js";
import { button, make } from "/ui/shared/elements.js";

const MOST = 8; // times as large as the whole image shown
const STEP = 1.5; // times as large at a press
const TURN_OF_WHEEL = 0.002; // of the exponent, a pixel of the wheel
const MIDDLE_BUTTON = 1;

export class Zoom {
  /** `stage` is what is enlarged, as wide as `--zoom` says; `node` shows it. */
  constructor(stage) {
    this.stage = stage;
    this.times = 1;
    this.node = make("div", { class: "wb-view", role: "group", "aria-label": say("The image; when enlarged, the arrow keys move it") }, stage);
    this.whole = button("", () => this.set(1), { title: say("Show the whole image") });
    this.less = button("\u2212", () => this.set(this.times / STEP), { "aria-label": say("Smaller"), "aria-keyshortcuts": "-" });
    this.more = button("+", () => this.set(this.times * STEP), { "aria-label": say("Larger"), "aria-keyshortcuts": "+" });
    this.buttons = make("div", { class: "wb-zoom" }, this.less, this.whole, this.more);
    this.node.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.node.addEventListener("pointerdown", (event) => this.hold(event));
    this.node.addEventListener("pointermove", (event) => this.drag(event));
    for (const end of ["pointerup", "pointercancel"]) this.node.addEventListener(end, () => { this.from = null; });
    this.set(1);
  }

  /** Show so many times the size; what is at `at`, a place in the window, stays there. */
  set(times, at = this.middle()) {
    const before = this.stage.getBoundingClientRect();
    const [x, y] = [(at.x - before.left) / before.width, (at.y - before.top) / before.height];
    this.times = Math.min(MOST, Math.max(1, times));
    if (this.times < 1.01) this.times = 1;
    const isEnlarged = this.times > 1;
    this.stage.style.setProperty("--zoom", this.times);
    this.node.classList.toggle("enlarged", isEnlarged);
    if (isEnlarged) this.node.tabIndex = 0; else this.node.removeAttribute("tabindex");
    this.whole.hidden = this.less.hidden = !isEnlarged;
    this.more.disabled = this.times === MOST;
    this.whole.textContent = `${Math.round(100 * this.times)} %`;
    const now = this.stage.getBoundingClientRect();
    if (isEnlarged) this.node.scrollBy(now.left + x * now.width - at.x, now.top + y * now.height - at.y);
  }

  middle() {
    const { left, top, width, height } = this.node.getBoundingClientRect();
    return { x: left + width / 2, y: top + height / 2 };
  }

  /** Do what a key asks for; false where it asks for nothing of this. */
  key({ key, target }) {
    if (key === "+" || key === "=") this.set(this.times * STEP);
    else if (key === "-" && this.times > 1) this.set(this.times / STEP);
    else return target === this.node && key.startsWith("Arrow") && this.times > 1 ? null : false; // null: the browser scrolls
    return true;
  }

  wheel(event) {
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) return; // it scrolls
    const times = this.times * Math.exp(-event.deltaY * TURN_OF_WHEEL);
    if (this.times === 1 && times < 1) return; // the window scrolls
    event.preventDefault();
    this.set(times, { x: event.clientX, y: event.clientY });
  }

  /** Take hold of the image: with the middle button, or with any while nothing is drawn on it. */
  hold(event) {
    const isFree = event.target === this.stage.firstElementChild && event.pointerType === "mouse";
    if (this.times === 1 || !(event.button === MIDDLE_BUTTON || isFree)) return;
    event.preventDefault();
    this.node.setPointerCapture(event.pointerId);
    this.from = { x: event.clientX, y: event.clientY };
  }

  drag({ clientX: x, clientY: y }) {
    if (!this.from) return;
    this.node.scrollBy(this.from.x - x, this.from.y - y);
    this.from = { x, y };
  }
}
