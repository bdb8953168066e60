// One image with its caption. The caption is saved after a pause and when the field is left; what
// could not be saved stays in the field and says so.
import { say } from "/ui/shared/words.js";
import { afterPause, button, make } from "/ui/shared/elements.js";
import { openWorkbench, remember } from "/ui/datasets/workbench.js";

const SAVE_PAUSE_MS = 800;
const SAVED_SHOWN_MS = 6000;
const SAVES_ITSELF = say("Saves itself");
const THUMB_PX = 384;
const LARGE_PX = 1536;

/** Return the reference images of a row, which its caption says how to change, as pictures of at most that size. */
function referencesOf(folder, { file, references }, size) {
  return references.map((name, index) => make("img", {
    src: "/media/thumb?" + new URLSearchParams({ folder, file: name, size }), loading: "lazy", decoding: "async",
    alt: say("Reference {#} of {}", index + 1, file), title: name,
  }));
}

export class Card {
  /** `editor` asks the server and hears of what was saved; `picture` is the server's row. */
  constructor(editor, picture, excluded) {
    this.editor = editor;
    this.folder = editor.folder; // another may be opened while something typed here waits
    this.excluded = excluded;
    this.saving = null;
    this.failed = false;
    this.group = "";
    this.pause = afterPause(SAVE_PAUSE_MS, () => this.save());
    this.build(picture);
    this.show(picture);
  }

  build(row) {
    const name = row.file;
    const pictureOf = (size) => "/media/thumb?" + new URLSearchParams({
      folder: this.editor.folder, file: this.excluded ? `_excluded/${name}` : name, size,
    });
    this.before = make("div", { class: "ds-before" });
    this.image = make("img", {
      src: pictureOf(THUMB_PX), alt: "", loading: "lazy", decoding: "async",
      onerror: () => this.box.classList.add("ds-broken"),
    });
    this.kept = make("i");
    this.frame = make("div", { class: "ds-frame", "aria-hidden": "true" }, this.kept);
    this.check = make("input", {
      type: "checkbox", "aria-label": say("Select {}", name),
      onchange: () => this.editor.selected(name, this.check.checked),
    });
    const large = make("a", {
      href: pictureOf(LARGE_PX), target: "_blank", rel: "noopener", "aria-label": say("Enlarge {}", name),
      onclick: (event) => {
        if (this.excluded || event.ctrlKey || event.metaKey || event.shiftKey) return; // the picture itself, in a tab of its own
        event.preventDefault();
        openWorkbench(this.editor, name);
      },
    }, this.image);
    this.box = make("div", { class: "ds-picture", "data-broken": say("cannot be shown") }, large, this.before, this.frame,
      make("label", { class: "ds-select" }, this.check));
    this.size = make("div", { class: "ds-size" });
    this.badges = make("ul", { class: "ds-badges", "aria-label": say("Remarks on {}", name) });
    this.area = make("textarea", {
      rows: 4, dir: "auto", "aria-label": say("Caption of {}", name), readonly: this.excluded,
      onfocus: () => {
        this.group = `${Date.now()}-${Math.random()}`;
        if (!this.area.readOnly && !this.state.textContent) this.say(SAVES_ITSELF);
      },
      oninput: () => { this.say(SAVES_ITSELF); this.pause.later(); },
      onblur: () => { if (this.dirty) this.pause.now(); else if (this.state.textContent === SAVES_ITSELF) this.say(""); },
    });
    this.state = make("div", { class: "ds-state" });
    const act = this.excluded
      ? button(say("Put back"), () => this.editor.putBack([name]), { "aria-label": say("Put {} back", name) })
      : button(say("Exclude"), () => this.editor.exclude([name]), {
        "aria-label": say("Exclude {}", name), title: say("Moves it into the folder _excluded; nothing is deleted"),
      });
    this.closerButton = this.excluded ? null
      : button(say("Mask"), () => openWorkbench(this.editor, name, "mask"), { "aria-label": say("Mask and crop of {}", name) });
    this.foot = make("div", { class: "ds-foot" }, this.state, this.closerButton, act);
    this.node = make("li", { class: "ds-card" }, this.box,
      make("div", { class: "ds-name", title: name, dir: "auto", translate: "no" }, name),
      this.area, this.size, this.badges, this.foot);
    remember(this.folder, row);
  }

  /** Give the field, the remarks and what is said to the workbench, until it gives them back. */
  lend() { return [this.area, this.badges, this.state]; }

  references(size) { return referencesOf(this.folder, this.picture, size); }

  takeBack() {
    this.size.before(this.area);
    this.foot.before(this.badges);
    this.foot.prepend(this.state);
  }

  ask(name, values) { return this.editor.ask(name, { folder: this.folder, ...values }); }

  get dirty() { return !this.excluded && this.area.value !== this.seen; }

  /** Show a row of the server; a caption that is being edited stays as it is typed. */
  show(picture) {
    const edited = this.picture !== undefined && this.dirty;
    this.picture = picture;
    if (!edited) {
      this.seen = picture.caption;
      if (this.area.value !== picture.caption) this.area.value = picture.caption;
    }
    this.area.placeholder = picture.stand_in ? say("trained as: {}", picture.stand_in)
      : picture.references.length ? say("What changes?") : say("no caption");
    this.area.readOnly = this.excluded || Boolean(picture.locked) || Boolean(picture.unreadable);
    // What cannot be read is not trained on: there is nothing to say of it, or to paint.
    this.area.hidden = Boolean(picture.unreadable) && !this.area.value;
    if (this.closerButton) this.closerButton.hidden = Boolean(picture.unreadable);
    this.before.replaceChildren(...referencesOf(this.folder, picture, THUMB_PX));
    this.size.replaceChildren(...sizeTexts(picture));
    this.size.title = this.size.textContent;
    this.badges.replaceChildren(...picture.badges.map((badge) =>
      make("li", { class: `ds-badge ds-${badge.severity}`, "data-kind": badge.kind, title: badge.title, "data-what": whatOf(badge) }, badge.text)));
    this.badges.hidden = picture.badges.length === 0;
    this.showCrop(picture);
  }

  /** Draw what the crop keeps; both rectangles are parts of the square that the picture fits in. */
  showCrop({ width_px, height_px, kept }) {
    this.frame.hidden = !kept;
    if (!kept) return;
    const long = Math.max(width_px, height_px);
    const [wide, high] = [width_px / long, height_px / long];
    place(this.frame, (1 - wide) / 2, (1 - high) / 2, wide, high);
    place(this.kept, kept[0], kept[1], kept[2] - kept[0], kept[3] - kept[1]);
  }

  /** Save what is typed; one save at a time, and once more if more was typed meanwhile. */
  async save() {
    this.pause.drop();
    while (this.saving) await this.saving;
    if (!this.dirty || this.conflict) return;
    this.saving = this.send(this.area.value).finally(() => { this.saving = null; });
    await this.saving;
    if (this.dirty && !this.failed && !this.conflict) await this.save();
  }

  async send(text) {
    this.say(say("Saving \u2026"));
    const answer = await this.ask("save", {
      file: this.picture.file, text, seen: this.seen, group: this.group,
    });
    this.failed = Boolean(answer.error);
    if (answer.error) {
      this.say(say("Not saved: {}", answer.error), "error", button(say("Try again"), () => this.save()));
      this.editor.announce(say("The caption of {} is not saved: {}", this.picture.file, answer.error));
    } else if (answer.newer !== undefined) {
      this.showNewer(answer.newer);
    } else {
      this.seen = text;
      this.say(say("Saved in {}", this.picture.where), "good");
      if (this.folder === this.editor.folder) this.editor.saved(answer, say("Caption of {} saved", this.picture.file));
    }
  }

  /** Somebody else wrote the file: show both texts, and write nothing until one is chosen. */
  showNewer(newer) {
    this.conflict = true;
    const decide = (mine) => {
      this.conflict = false;
      this.seen = newer;
      if (!mine) this.area.value = newer;
      this.say("");
      if (mine) this.save(); else this.editor.reload();
      this.area.focus();
    };
    this.say(say("Changed on the disk meanwhile. It now says:"), "error",
      make("blockquote", { dir: "auto", translate: newer ? "no" : null }, newer || say("(nothing)")),
      button(say("Take that"), () => decide(false)), button(say("Keep mine"), () => decide(true)));
    this.editor.announce(say("The caption of {} was changed on the disk meanwhile", this.picture.file));
  }

  say(text, kind = "", ...more) {
    this.state.className = `ds-state ds-${kind || "plain"}`;
    this.state.replaceChildren(text, ...more);
    clearTimeout(this.fading);
    if (kind === "good") this.fading = setTimeout(() => this.say(""), SAVED_SHOWN_MS);
  }
}

/** Return the images that have a remark of a kind; those that are alike stand beside each other. */
export function ofKind(rows, kind) {
  const found = rows.filter((row) => row.badges.some((badge) => badge.kind === kind));
  const first = (row) => row.alike?.[kind] ?? row.file;
  return found.sort((a, b) => first(a).localeCompare(first(b))); // which keeps the order of the folder among them
}

/** Return what a badge says at length, without the advice; nothing where that is what it says anyway. */
function whatOf({ title, text }) {
  const what = title.split(": ")[0];
  return what === text ? null : what || null;
}

function place(node, left, top, width, height) {
  const share = (value) => `${(100 * value).toFixed(3)}%`;
  Object.assign(node.style, {
    left: share(left), top: share(top), width: share(width), height: share(height),
  });
}

/** Return "1024x768 \u2192 832x640 px", ", 4 % cropped" as elements, as far as it is known. */
function sizeTexts(picture) {
  if (!picture.width_px) return [];
  const cropped = Math.round(100 * picture.cropped_fraction);
  // Short, so that a narrow card shows the half that is of use.
  const parts = [`${picture.width_px}\u00d7${picture.height_px} \u2192 ${picture.bucket.replace("x", "\u00d7")} px`];
  if (cropped > 0) parts.push(say(", {} % cropped", cropped));
  if (picture.upscaled) parts.push(say(", enlarged"));
  return parts.map((part) => make("span", {}, part));
}
