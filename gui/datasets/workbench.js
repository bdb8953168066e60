// One image, large, with its caption beside it: Enter saves and goes to the next, Page Up and Page Down turn over,
// Escape leaves a crop or a mask, then closes, but not while one is not saved. The part of it that is trained is chosen on the image, and so is its mask painted. The field, the remarks and what is said are those of the card, lent while they are here, so that what
// is typed is saved, refused and warned of as it is there. Below are the tags of all captions, to add or take away.
// + and - enlarge the image (zoom.js).
import { dialog } from "/ui/dialog.js";
import { say } from "/ui/shared/words.js";
import { button, icon, make } from "/ui/shared/elements.js";
import { CropBox } from "/ui/datasets/crop_box.js";
import { maskPane } from "/ui/datasets/mask.js";
import { tagsOf } from "/ui/datasets/tags.js";
import { Zoom } from "/ui/datasets/zoom.js";

const LARGE_PX = 1536;
const TAGS_SHOWN = 24;
const LONGEST_TAG = 40;
const ENLARGED = 1.25; // from here on the check remarks on an image, too
const before = new Map(); // the captions as they were when this page first showed them, by folder and file

/** Remember a caption as it was before something on this page has changed it. */
export function remember(folder, { file, caption }) {
  const key = `${folder}\n${file}`;
  if (!before.has(key)) before.set(key, caption);
}

/** Open it on an image; `editor` has `order()`, the names in the order on the page, and `cardOf(name)`. With `work`
 *  "crop" or "mask" that is begun. */
export function openWorkbench(editor, name, work = "") {
  const bench = new Workbench(editor);
  bench.show(name);
  if (work) bench.begin(work);
}

class Workbench {
  constructor(editor) {
    Object.assign(this, { editor, card: null, sizes: new Map(), unsaved: "" });
    this.picture = make("img", { alt: "", onload: () => this.fit() });
    this.stage = make("div", { class: "wb-stage" }, this.picture);
    this.zoom = new Zoom(this.stage);
    this.image = make("div", { class: "wb-image" }, this.zoom.node, this.zoom.buttons);
    this.bar = make("div", { class: "wb-bar" });
    this.before = make("div", { class: "wb-before" });
    this.name = make("h3", { dir: "auto", translate: "no" });
    this.counter = make("p", { class: "ds-quiet", role: "status" });
    this.caption = make("div", { class: "wb-caption" });
    this.was = make("p", { class: "ds-quiet wb-was", hidden: true });
    this.tags = make("div", { class: "ds-tags", role: "group", "aria-label": say("Tags of all captions") });
    const arrow = (name, label, by, key) => {
      const found = button("", () => this.turn(by), { class: "wb-turn", "aria-label": label, title: label, "aria-keyshortcuts": key });
      found.append(icon(name));
      return found;
    };
    this.back = arrow("arrow-left", say("Previous"), -1, "PageUp");
    this.next = arrow("arrow-right", say("Next"), 1, "PageDown");
    this.turns = make("p", { class: "actions wb-turns" });
    const does = (name, label, act) => {
      const found = button(label, act);
      found.prepend(icon(name));
      return found;
    };
    this.crop = does("crop", say("Crop"), () => this.begin("crop"));
    this.mask = does("contrast", say("Mask"), () => this.begin("mask"));
    this.exclude = does("x", say("Exclude"), () => this.leaveOut());
    this.exclude.className = "wb-leaves-out";
    // The arrows come before the buttons: what is pressed stays under the pointer when they come.
    this.head = make("div", { class: "wb-head" }, this.name, this.counter, this.turns,
      make("p", { class: "actions" }, this.crop, this.mask, this.exclude));
    this.shown = dialog(say("Image and caption"), {
      fields: [make("div", { class: "workbench" }, this.head,
        make("div", { class: "wb-pair" }, this.before, this.image), this.bar,
        make("div", { class: "wb-beside" }, this.caption, this.was, this.tags))],
      note: say("Enter saves and goes to the next image, Shift and Enter begins a line."),
      act: say("Save and next"),
      submit: async () => { if (this.holds()) return { error: this.unsaved }; await this.card.save(); return this.card.failed ? { error: say("The caption is not saved.") } : {}; },
    });
    this.shown.done = () => {
      this.shown.node.querySelector("[type=submit]").disabled = false;
      if (!this.turn(1)) this.shown.node.close();
    };
    const { node } = this.shown;
    node.classList.add("whole");
    const leave = node.querySelector("[type=submit] + button");
    leave.textContent = "\u00d7";
    leave.className = "wb-close";
    leave.ariaLabel = leave.title = say("Close"); // all that was typed is saved
    this.head.append(leave);
    leave.onclick = () => { if (!this.holds()) node.close(); };
    node.addEventListener("cancel", (event) => { if (this.holds()) event.preventDefault(); });
    // Below what it saves, not below the picture.
    this.caption.after(node.querySelector("form > .actions"), node.querySelector("form > .said"), node.querySelector("form > .quiet"));
    node.addEventListener("close", () => {
      const link = this.card?.node.querySelector("a");
      this.giveBack();
      link?.focus(); // not on the image that it was opened with
    });
    node.addEventListener("keydown", (event) => this.key(event));
    node.addEventListener("input", () => this.drawTags());
    editor.leaving.addEventListener("abort", () => node.close());
  }

  show(name) {
    this.giveBack();
    const order = this.editor.order();
    const at = order.indexOf(name);
    this.card = this.editor.cardOf(name);
    const { picture, folder } = this.card;
    remember(folder, picture);
    this.picture.src = `/media/thumb?${new URLSearchParams({ folder, file: picture.file, size: LARGE_PX })}`;
    this.before.hidden = !picture.references.length;
    this.before.replaceChildren(...this.card.references(LARGE_PX));
    this.zoom.set(1);
    this.name.textContent = picture.file;
    this.counter.textContent = say("{#} of {#}", at + 1, order.length);
    this.caption.replaceChildren(...this.card.lend());
    this.back.disabled = at < 1;
    this.next.disabled = at + 1 >= order.length;
    this.crop.hidden = this.mask.hidden = Boolean(picture.unreadable);
    this.end();
    this.drawWas();
    this.drawTags();
    this.card.area.focus();
  }

  /** Give the picture the largest place of its shape. */
  fit() {
    const { naturalWidth, naturalHeight } = this.picture;
    if (naturalHeight) this.stage.style.setProperty("--shape", naturalWidth / naturalHeight);
  }

  /** Begin to choose the crop or to paint the mask, on the picture. */
  async begin(work) {
    if (this.holds()) return;
    const { card } = this;
    this.end();
    const answer = await card.ask("closer", { file: card.picture.file });
    if (this.card !== card) return; // turned over meanwhile
    if (answer.error) { card.say(answer.error, "error"); return; }
    this.sizes.set(card.picture.file, answer.image_px);
    if (work === "crop") this.beginCrop(answer); else this.beginMask(answer);
  }

  beginCrop({ image_px: [width, height], crop }) {
    const { file, bucket } = this.card.picture;
    const shown = make("span", { class: "ds-quiet", role: "status" });
    const warned = make("span", { class: "ds-error", role: "status" });
    // Of the size that it is trained in now, which is about that of all images; without a check nobody knows.
    const area = (bucket ?? "").split("x").reduce((product, side) => product * Number(side), 1) || 0;
    const box = new CropBox(file, crop ?? [0, 0, 1, 1], () => { this.unsaved = say("The crop is not saved: save it, or press Cancel."); tell(); });
    const tell = () => {
      const [left, top, right, bottom] = box.box;
      const [wide, high] = [(right - left) * width, (bottom - top) * height];
      const times = Math.sqrt(area / (wide * high));
      const isSmall = times > ENLARGED;
      shown.textContent = say("{#} \u00d7 {#} px", Math.round(wide), Math.round(high));
      warned.textContent = isSmall ? say("too few, it would be enlarged {#} times", times.toFixed(1)) : "";
    };
    const sizes = /^\d+x\d+$/.test(bucket ?? "") ? [bucket, bucket.split("x").reverse().join("x")] : [];
    const shapes = [["", say("any shape")], ["1x1", say("square")],
      ...[...new Set(sizes)].filter((size) => new Set(size.split("x")).size > 1).map((size) => [size, say("as {} px", size.replace("x", " \u00d7 "))])];
    const chips = shapes.map(([value, text]) => button(text, () => {
      const [wide, high] = value.split("x").map(Number);
      box.keepShape(high ? wide / high * height / width : 0);
      mark(value);
    }, { class: "ds-chip", value }));
    const mark = (value) => { for (const chip of chips) chip.setAttribute("aria-pressed", String(chip.value === value)); };
    mark("");
    tell();
    const shape = make("div", { class: "wb-shapes", role: "group", "aria-label": say("Shape") }, ...chips);
    this.work("crop", box.node, [shape, shown, warned], {
      title: say("Which part is trained?"),
      note: say("Drag the corners, or draw a new frame. What is dark is left out; the file stays as it is."),
      save: say("Save the crop"), act: () => this.change("crop", { box: box.box }),
      remove: crop ? [say("The whole image"), () => this.change("crop", { box: null })] : null,
    });
    box.part.focus();
  }

  beginMask(answer) {
    const { card } = this;
    this.stage.dataset.hint = say("Paint over what counts");
    const pane = maskPane(card.picture.file, answer, async () => {
      this.refused.textContent = say("Looking for the subject \u2026");
      const found = await card.ask("subject", { file: card.picture.file });
      this.refused.textContent = found.error ?? "";
      return found.subject;
    }, () => { this.unsaved = say("The mask is not saved: save it, or press Cancel."); });
    const paint = document.createDocumentFragment();
    paint.append(make("div", { class: "paint" }, pane.canvas), pane.ring);
    this.work("mask", paint, [pane.tools], {
      title: say("What of it counts?"),
      save: say("Save the mask"), act: () => this.change("mask", { mask: pane.painted() }),
      remove: answer.mask ? [say("Remove the mask"), () => this.change("mask", { mask: "" })] : null,
      note: say("Paint what is to be learned; the dark part counts little. Saved as a file beside {}; Undo on the page takes it back.", this.card.picture.file),
      more: pane.crops,
    });
    pane.canvas.focus();
  }

  /** Put what is done on the picture there, and its tools and the buttons that end it in the place of the caption. */
  work(kind, node, tools, { title, save, act, remove, note, more = "" }) {
    this.refused = make("p", { class: "ds-error", role: "alert" });
    const goOn = async () => { if (await act() && this.turn(1)) this.begin(kind); };
    const onwards = this.next.disabled ? [] : [button(say("Save, then the next image"), goOn)];
    this.stage.replaceChildren(this.picture, node);
    this.press(kind);
    this.bar.replaceChildren(make("h3", {}, title), make("p", { class: "ds-quiet" }, note), make("div", { class: "ds-line" }, ...tools),
      this.refused, make("p", { class: "actions wb-saves" }, button(save, act, { class: "primary big" }), ...onwards,
        ...(remove ? [button(...remove)] : []), button(say("Cancel"), () => { this.end(); this.card.area.focus(); })), more);
  }

  /** Save a crop or a mask and return whether that was done; what is refused is said, and what was drawn stays. */
  async change(name, values) {
    const { card } = this;
    const answer = await card.ask(name, { file: card.picture.file, ...values });
    if (this.card !== card) return false;
    if (answer.error) { this.refused.textContent = answer.error; return false; }
    this.editor.changed(answer, say("Done: {}", answer.step));
    this.end();
    card.say(say("Done: {}", answer.step), "good");
    card.area.focus();
    return true;
  }

  /** Mark the button of what is done on the picture, "" of nothing. Arrows and zoom lie on the picture, except meanwhile. */
  press(kind) {
    const held = document.activeElement;
    (kind ? this.turns : this.image).append(this.back, this.next, this.zoom.buttons);
    if (this.shown.node.contains(held)) held.focus();
    this.crop.setAttribute("aria-pressed", String(kind === "crop"));
    this.mask.setAttribute("aria-pressed", String(kind === "mask"));
  }

  /** End what is done on the picture; show the crop that was chosen. */
  end() {
    this.unsaved = "";
    this.press("");
    const { file, crop, width_px, height_px } = this.card.picture;
    const size = this.sizes.get(file) ?? [width_px, height_px]; // the check may not have come yet
    this.bar.replaceChildren();
    const kept = crop && size[0] ? make("i") : null;
    if (kept) {
      const [left, top, right, bottom] = crop.map((edge, at) => `${(100 * edge / size[at % 2]).toFixed(3)}%`);
      Object.assign(kept.style, { left, top, width: `calc(${right} - ${left})`, height: `calc(${bottom} - ${top})` });
    }
    this.stage.replaceChildren(this.picture, ...(kept ? [make("div", { class: "ds-frame wb-kept", "aria-hidden": "true" }, kept)] : []));
    this.dim();
  }

  /** Dim what counts little, where the image has a mask. */
  async dim() {
    const { card, bar } = this;
    if (!card.picture.badges.some((badge) => badge.kind === "mask")) return;
    const { mask } = await card.ask("closer", { file: card.picture.file });
    if (this.card !== card || bar.childElementCount || !mask) return; // something else is shown by now
    this.stage.querySelector(".paint")?.remove();
    this.stage.append(make("div", { class: "paint wb-masked", "aria-hidden": "true" }, make("img", { src: mask, alt: "" })));
  }

  giveBack() {
    if (!this.card) return;
    this.card.save();
    this.card.takeBack();
    this.card = null;
  }

  /** Whether a crop or a mask is not saved yet, which is said then: nothing may take it away but Cancel. */
  holds() {
    if (!this.unsaved) return false;
    this.refused.textContent = this.unsaved;
    this.bar.querySelector("button.primary").focus();
    return true;
  }

  /** Go to another image; false where there is none, or something is not saved. */
  turn(by) {
    if (this.holds()) return false;
    const order = this.editor.order();
    const to = order[order.indexOf(this.card.picture.file) + by];
    if (to !== undefined) this.show(to);
    return to !== undefined;
  }

  async leaveOut() {
    if (this.holds()) return;
    const { file } = this.card.picture;
    const order = this.editor.order();
    const at = order.indexOf(file);
    const other = order[at + 1] ?? order[at - 1];
    this.giveBack();
    await this.editor.exclude([file]);
    if (other === undefined) this.shown.node.close(); else this.show(other);
  }

  key(event) {
    // Before the browser closes the dialog, which the second Escape in a row does whatever it is told.
    if (event.key === "Escape" && this.holds()) { event.preventDefault(); return; }
    // A crop or a mask with nothing to save: the image stays, as after Cancel.
    if (event.key === "Escape" && this.bar.childElementCount) { event.preventDefault(); this.end(); this.card.area.focus(); return; }
    const isTyping = event.target === this.card?.area;
    const isField = event.target.matches("textarea, input"); // whose keys are its own: the brush has a size
    if (!isField && !event.altKey && !event.ctrlKey && !event.metaKey) {
      const done = this.zoom.key(event);
      if (done) event.preventDefault();
      if (done !== false) return;
    }
    const by = { PageDown: 1, PageUp: -1, ...(isField ? {} : { ArrowRight: 1, ArrowLeft: -1 }) }[event.key];
    if (by && !event.altKey && !event.ctrlKey) this.turn(by);
    else if (isTyping && event.key === "Enter" && !event.shiftKey && !event.isComposing) this.shown.node.querySelector("[type=submit]").click();
    else return;
    event.preventDefault();
  }

  /** Show what the caption was before, where it is another now: a model may have written it meanwhile. */
  drawWas() {
    const { picture, folder, area } = this.card;
    const text = before.get(`${folder}\n${picture.file}`);
    this.was.hidden = area.readOnly || text === area.value;
    this.was.replaceChildren(say("Before:"), " ", make("span", { dir: "auto", translate: text ? "no" : null }, text || say("(nothing)")), " ",
      button(say("Put that back"), () => { this.write(text); }));
  }

  /** Show the tags of this caption, then those of the others that begin with the word that is typed. */
  drawTags() {
    const { area } = this.card;
    this.drawWas();
    const own = tagsOf(area.value);
    const typed = area.value.slice(area.value.lastIndexOf(",") + 1).trim().toLowerCase();
    const counts = new Map();
    for (const caption of this.editor.captions()) for (const tag of tagsOf(caption)) counts.set(tag, (counts.get(tag) ?? 0) + 1);
    const others = [...counts].filter(([tag, count]) => count > 1 && tag.length <= LONGEST_TAG && !own.includes(tag));
    const fitting = others.filter(([tag]) => typed && tag.toLowerCase().startsWith(typed));
    const shown = (fitting.length ? fitting : others).sort((a, b) => b[1] - a[1]).slice(0, TAGS_SHOWN);
    const isTagged = own.length > 1 && own.every((tag) => tag.length <= LONGEST_TAG);
    const chip = (tag, count, does, pressed, label) => button("", does, { class: "ds-chip", "aria-pressed": String(pressed), "aria-label": label });
    const parts = [
      ...(isTagged ? [make("span", { class: "ds-quiet" }, say("In this caption:"))] : []),
      ...(isTagged ? own : []).map((tag) => {
        const one = chip(tag, 0, () => this.write(own.filter((each) => each !== tag).join(", ")), true, say("Take away {}", tag));
        one.append(make("span", { translate: "no" }, tag), " \u00d7");
        return one;
      }),
      ...(shown.length ? [make("span", { class: "ds-quiet" }, isTagged ? say("Add from the others:") : say("Add:"))] : []),
      ...shown.map(([tag, count]) => {
        const one = chip(tag, count, () => this.add(tag, fitting.length ? typed : ""), false, say("Add {}, in {#} captions", tag, count));
        one.append(make("span", { translate: "no" }, tag), ` ${count}`);
        return one;
      }),
    ];
    this.tags.hidden = area.readOnly || !parts.length;
    this.tags.replaceChildren(...parts);
  }

  /** Add a tag, in place of the beginning of it that is typed. */
  add(tag, typed) {
    const { value } = this.card.area;
    const kept = (typed ? value.slice(0, value.lastIndexOf(",") + 1) : value).trim().replace(/,$/, "");
    this.write(kept ? `${kept}, ${tag}` : tag);
  }

  write(text) {
    const { area } = this.card;
    area.value = text;
    area.dispatchEvent(new Event("input", { bubbles: true }));
    area.focus();
  }
}
