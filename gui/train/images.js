// The images of the folder, with their captions, which are edited in place, one by one or many at once. The cards are
// those of the page Datasets; whole folders and filters are there.
import { say } from "/ui/shared/words.js";
import { askInTurn } from "/ui/datasets/asking.js";
import { Captioner } from "/ui/datasets/captioner.js";
import { Card, ofKind } from "/ui/datasets/card.js";
import { EditMany } from "/ui/datasets/edit_many.js";
import { nameOf } from "/ui/datasets/opener.js";
import { button, holds, make } from "/ui/shared/elements.js";

const SHOWN = 24;

export class Images {
  /** `changed` hears that the images are others, so that the page looks at the folder again; `named` what it is called,
   *  `drawn` that the cards are there. */
  constructor(place, leaving, { changed, named, drawn }) {
    Object.assign(this, { folder: "", rows: [], only: null, cards: new Map(), away: new Set(), left: [], chosen: new Set(), tell: changed, named, drawn, leaving });
    this.said = make("p", { class: "line", role: "status" });
    this.list = make("ul", { class: "ds-cards", "aria-label": say("Your images and their captions") });
    this.more = make("p", { class: "ds-quiet" });
    this.captioner = new Captioner(this);
    this.captioner.opener.textContent = say("Caption model \u2026"); // "Write captions" is what the report offers
    this.captioner.mode.node.hidden = true; // all without a caption: what is chosen is chosen on the page Datasets
    this.bulk = new EditMany(this);
    const panels = [this.captioner, this.bulk];
    for (const { opener } of panels) {
      opener.addEventListener("click", () => { for (const each of panels) if (each.opener !== opener) each.open(false); });
    }
    this.hint = make("p", { class: "ds-quiet" });
    this.showsAll = button(say("Show all"), () => this.showOnly(null), { hidden: true });
    this.leavesOut = button("", () => this.exclude(this.targets()), { hidden: true });
    this.bar = make("div", { class: "images-bar", hidden: true }, this.hint, this.leavesOut, this.showsAll, this.captioner.opener, this.bulk.opener);
    place.replaceChildren(this.bar, this.captioner.node, this.bulk.node, this.said, this.list, this.more);
    window.addEventListener("beforeunload", (event) => {
      if ([...this.cards.values()].some((card) => card.dirty)) event.preventDefault();
    }, { signal: leaving });
  }

  ask(name, values) { return askInTurn(name, { folder: this.folder, ...values }); }

  /** Show the images of a folder as they are now; none for an empty text. */
  async open(folder) {
    if (folder !== this.folder) {
      this.cards.clear();
      this.only = null;
      this.left = [];
      this.said.replaceChildren();
    }
    this.folder = folder;
    this.bar.hidden = !folder;
    if (!folder) for (const panel of [this.captioner, this.bulk]) panel.open(false);
    if (folder) await this.reload(); else this.draw({ pictures: [] });
    if (folder) await this.captioner.look();
  }

  /** Have captions written where there are none: the one press that the report on the images offers. */
  async write() {
    this.captioner.showFirst();
    await this.captioner.look();
    await this.captioner.begin();
  }

  /** Have one instruction typed for all pairs. */
  instruct() {
    this.captioner.open(false);
    this.bulk.instruct();
  }

  /** Show the images that a remark is about, {kind} or {find}, or all of them. */
  showOnly(only) {
    this.only = only;
    this.bulk.close(); // its preview is of others
    this.drawCards();
    if (only) this.list.firstElementChild?.scrollIntoView({ block: "nearest" });
  }

  /** Whether an image has a remark of a kind. */
  has(kind) { return this.rows.some((row) => row.badges.some((badge) => badge.kind === kind)); }

  async flush() { await Promise.all([...this.cards.values()].filter((card) => card.dirty).map((card) => card.save())); }

  async reload() {
    const answer = await this.ask("look", {});
    if (answer.error) this.said.textContent = answer.error; else if (answer.folder === this.folder) this.draw(answer);
  }

  draw({ pictures, excluded = [], name = "", others = 0 }) {
    this.named(nameOf({ name, others }));
    this.away = new Set(excluded.map((row) => row.file));
    this.texts = pictures.map((row) => row.caption);
    this.files = pictures.map((row) => row.file);
    const { length } = pictures.filter((row) => !row.unreadable); // as the report counts them
    this.readable = length;
    this.rows = pictures;
    const arePairs = length > 0 && pictures.every((row) => row.references.length);
    this.captioner.opener.hidden = arePairs; // no model sees what is to change
    this.arePairs = arePairs;
    this.bulk.ofPairs(arePairs);
    this.drawCards();
    this.drawn();
  }

  drawCards() {
    const { kind, find } = this.only ?? {};
    const says = (row) => `${row.file}\n${row.caption}`.toLowerCase().includes(find.toLowerCase());
    const found = !this.only ? this.rows : find ? this.rows.filter(says) : ofKind(this.rows, kind);
    const shown = found.length ? found : this.rows; // the last one was mended
    if (shown === this.rows) this.only = null;
    const { length } = this.rows;
    this.hint.textContent = this.only ? say("{#} of {#} shown", shown.length.toLocaleString("en"), length.toLocaleString("en"))
      : this.arePairs ? say("Click into an instruction to change it; it saves itself.") : say("Click into a caption to change it; it saves itself.");
    this.showsAll.hidden = !this.only;
    this.shownFiles = shown.map((row) => row.file);
    const count = shown.length.toLocaleString("en");
    this.leavesOut.textContent = shown.length === 1 ? say("Exclude it") : say("Exclude these {#}", count);
    // Of those that are alike one is to stay, which the remark itself offers; without any there is nothing to train.
    this.leavesOut.hidden = !this.only || shown.length === length || shown.some((row) => row.alike?.[kind]);
    this.bulk.aim(this.only ? say("for all {#} shown", count)
      : this.readable === 1 ? say("for the one image") : say("for all {#} images", this.readable.toLocaleString("en")));
    const rows = shown.slice(0, SHOWN);
    const names = new Set(rows.map((row) => row.file));
    for (const name of this.cards.keys()) if (!names.has(name)) this.cards.delete(name);
    for (const row of rows) {
      if (this.cards.has(row.file)) this.cards.get(row.file).show(row);
      else this.cards.set(row.file, new Card(this, row, false));
    }
    holds(this.list, rows.map((row) => this.cards.get(row.file).node));
    const left = shown.length - rows.length;
    this.more.textContent = left > 0 ? say("and {#} more", left.toLocaleString("en")) : "";
  }

  exclude(files) { return this.leaveOut("exclude", { files }); }

  /** Leave out all but one of those that are alike. */
  keepOne(kind) { return this.leaveOut("keep_one", { kind }); }

  async leaveOut(name, values) {
    await this.flush(); // what is typed moves with its image
    const answer = await this.ask(name, values);
    if (answer.error) { this.said.textContent = answer.error; return; }
    const { folder, away: before } = this;
    if (answer.folder !== folder) return; // another is shown by now
    this.changed(answer);
    // Not the last step of the folder: that may be a caption by then.
    this.left.push([...this.away].filter((name) => !before.has(name)));
    this.sayLeftOut();
  }

  /** Say what was left out on this page, with a button that takes it back, one press after another. */
  sayLeftOut() {
    const { folder } = this;
    this.left = this.left.map((names) => names.filter((name) => this.away.has(name))).filter((names) => names.length);
    const files = this.left.at(-1);
    if (!files) { this.said.replaceChildren(); return; }
    const count = this.left.flat().length;
    const back = button(say("Undo"), async () => {
      back.disabled = true;
      const answer = await this.ask("put_back", { folder, files });
      this.changed(answer);
      if (!answer.error && this.folder === folder) { this.sayLeftOut(); keyboardTo(this.said.querySelector("button") ?? this.bulk.opener); }
    });
    back.title = files.join(", ");
    const text = count === 1 ? say("Left out of the training; the file is in the folder _excluded.")
      : say("{#} left out of the training; the files are in the folder _excluded.", count);
    this.said.replaceChildren(make("span", {}, text), " ", back);
  }

  /** Captions were written: the report on the images is another now. */
  captioned() { this.forgetUndo(); this.tell(); }

  /** Offer no longer to take back what was changed of many: it was the last step of the folder. */
  forgetUndo() { this.said.querySelector(".of-many")?.replaceChildren(); }

  /** Take over a whole view, and let the page look at the folder again; what was changed of many can be taken back. */
  changed(answer, done = "", ofMany = false) {
    if (answer.error) { this.said.textContent = answer.error; return; }
    if (answer.folder !== this.folder) return;
    this.draw(answer);
    this.forgetUndo(); // the last step of the folder is another now
    if (ofMany) {
      const back = button(say("Undo"), async () => {
        this.forgetUndo();
        this.changed(await this.ask("undo", { step: answer.undo }));
        keyboardTo(this.bulk.opener);
      });
      this.said.replaceChildren(make("span", { class: "of-many" }, done, ...(answer.step ? [" ", back] : [])));
      keyboardTo(answer.step ? back : this.bulk.opener);
    }
    this.tell();
  }

  // What the workbench asks for.
  order() { return [...this.cards.keys()]; }
  cardOf(name) { return this.cards.get(name); }
  captions() { return this.texts; }

  saved(answer) {
    this.forgetUndo(); // it would take back this caption now
    let isOther = false; // what the report counts: which image has a caption
    for (const row of answer.cards) {
      this.cards.get(row.file)?.show(row);
      const at = this.rows.findIndex(({ file }) => file === row.file);
      if (at < 0) continue;
      isOther ||= !this.rows[at].caption.trim() !== !row.caption.trim();
      this.rows[at] = row;
    }
    if (isOther) this.tell();
  }

  targets() { return this.only ? this.shownFiles : this.files; }
  announce(text) { this.said.textContent = text; }
  selected() {}
}

/** Give the keyboard to a button where it has just lost what it was on. */
function keyboardTo(button) {
  if (document.activeElement === document.body) button.focus({ preventScroll: true });
}
