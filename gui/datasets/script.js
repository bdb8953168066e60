// The page Datasets: opens a folder, draws its cards, filters and sorts them, and asks the server for
// every change. The server's rows are the truth; this only shows them.
import { dropZone } from "/ui/shared/drop.js";
import { say } from "/ui/shared/words.js";
import { mount as deletes } from "/ui/trash/script.js";
import { ask, askInTurn } from "/ui/datasets/asking.js";
import { Captioner } from "/ui/datasets/captioner.js";
import { Card, ofKind } from "/ui/datasets/card.js";
import { EditMany } from "/ui/datasets/edit_many.js";
import { holds, make } from "/ui/shared/elements.js";
import { Opener } from "/ui/datasets/opener.js";
import { tagsOf } from "/ui/datasets/tags.js";
import { Tools } from "/ui/datasets/tools.js";

const CHUNK = 60; // whole rows of one to six cards
const NEAR_PX = 800;

/** CHUNK of the cards: there while they are on the screen or near it, else as much empty space. */
class Part {
  constructor(editor, near) {
    this.editor = editor;
    this.rows = [];
    this.near = near;
    this.node = make("ul", { class: "ds-cards", onfocusout: () => setTimeout(() => this.draw()) });
  }

  use(rows, from) {
    this.rows = rows;
    this.node.setAttribute("aria-label", say("Images {} to {}", from + 1, from + rows.length));
    this.draw();
  }

  come(near) {
    this.near = near;
    this.draw();
  }

  draw() {
    const shown = this.near || this.node.contains(document.activeElement);
    const nodes = shown ? this.rows.map((row) => this.editor.card(row).node) : [];
    const heightPx = this.node.offsetHeight; // as it is while it holds the cards
    const same = holds(this.node, nodes);
    if (!shown && !same) {
      this.editor.partPx = heightPx;
      this.rows.forEach((row) => this.editor.forget(row));
    }
    const share = same ? this.rows.length / CHUNK : 1;
    if (shown) this.node.style.height = "";
    else if (!same || !this.node.style.height) this.node.style.height = `${share * this.editor.partPx}px`;
  }
}

class Editor {
  constructor(place, leaving) {
    this.leaving = leaving;
    this.folder = "";
    this.data = null;
    this.cards = new Map();
    this.chosen = new Set();
    this.kinds = new Set();
    this.tags = new Set();
    this.away = false;
    this.wish = new URL(location.href).searchParams.get("kind");  // what to filter by once it is known
    this.found = new URL(location.href).searchParams.get("find");  // what is searched for at first
    this.parts = [];
    this.partPx = 80 * CHUNK; // of a part that was not drawn yet
    this.live = make("div", { class: "unseen", role: "status", "aria-live": "polite" });
    this.opener = new Opener(this);
    this.tools = new Tools(this);
    leaving.addEventListener("abort", () => this.tools.aboutRemarks.drop());
    this.bulk = new EditMany(this);
    this.captioner = new Captioner(this);
    this.list = make("div");
    this.tools.take(this.bulk, this.captioner, this.tools.judged, this.tools.tagged);
    this.page = make("div", { hidden: true }, this.tools.node,
      make("div", { class: "ds-line ds-many" }, this.tools.openers, this.tools.selection), this.tools.panels,
      this.list);
    place.replaceChildren(this.live, this.opener.node, this.page);
    this.watcher = new IntersectionObserver((seen) => {
      for (const { target, isIntersecting } of seen) {
        this.parts.find((part) => part.node === target)?.come(isIntersecting);
      }
    }, { rootMargin: `${NEAR_PX}px` });
  }

  ask(name, values) { return askInTurn(name, { folder: this.folder, ...values }); }

  announce(text) { this.live.textContent = text; }

  async open(folder) {
    let answer;
    do {
      if (!await this.allSaved()) return;
      const done = this.opener.waiting();
      answer = await this.ask("look", { folder });
      done();
      if (answer.error) { this.opener.refuse(answer.error); return; }
    } while (this.unsaved); // typed while the folder was opened
    if (this.leaving.aborted) return;
    const address = new URL(location.href);
    address.searchParams.set("folder", answer.folder);
    history.replaceState(history.state, "", address);
    this.folder = answer.folder;
    this.cards.clear();
    this.chosen.clear();
    this.kinds.clear();
    this.tags.clear();
    this.away = false;
    this.opener.opened(answer);
    this.captioner.look();
    if (address.searchParams.has("write")) this.captioner.showFirst();
    this.data = answer;
    await this.tools.showRemarks(); // before the buttons and cards below them, which would move
    this.changed(answer, imagesIn(answer));
  }

  get unsaved() { return [...this.cards.values()].find((card) => card.dirty); }

  /** Save all that is typed; false where a caption could not be saved. */
  async allSaved() {
    await this.flush();
    const { unsaved } = this;
    if (unsaved) this.opener.refuse(say("The caption of {} is not saved yet: see its card.", unsaved.picture.file));
    return !unsaved;
  }

  async reload() {
    const answer = await this.ask("look", {});
    if (!answer.error) this.changed(answer, "");
  }

  /** Take over a whole view; ask for a check where the last one is about other files. */
  changed(answer, said) {
    if (answer.error) { this.tools.say(answer.error, true); this.announce(answer.error); return; }
    if (answer.folder !== this.folder) return; // another was opened meanwhile
    this.data = answer;
    if (this.away && !answer.excluded.length) this.away = false;  // the last one was put back
    const rows = new Map(answer.pictures.map((picture) => [`in ${picture.file}`, picture]));
    for (const picture of answer.excluded) rows.set(`out ${picture.file}`, picture);
    for (const [key, card] of this.cards) {
      if (rows.has(key)) card.show(rows.get(key));
      else if (card.dirty) this.tools.say(say("{} is gone; its caption was not saved", card.picture.file), true);
      if (!rows.has(key)) this.cards.delete(key);
    }
    this.chosen = new Set([...this.chosen].filter((name) => rows.has(`${this.away ? "out" : "in"} ${name}`)));
    if (this.wish && answer.pictures.some((row) => row.badges.some((badge) => badge.kind === this.wish))) {
      this.kinds.add(this.wish);
      this.wish = "";
    }
    this.page.hidden = false;
    const arePairs = answer.pictures.length > 0 && answer.pictures.every((row) => row.references.length);
    this.bulk.ofPairs(arePairs);
    this.captioner.opener.hidden = arePairs; // no model sees what is to change
    this.opener.entitle(answer); // a heap of photos is called after how many of them can be read
    if (this.found) {
      this.tools.search.input.value = this.found;
      this.found = "";
    }
    this.tools.show(answer);
    this.tools.aboutRemarks.now();
    if (said) { this.announce(said); }
    if (answer.left && answer.left.length) this.tools.say(answer.left.join("; "), true);
    else if (answer.step) this.tools.say(said);
    this.draw();
    if (!answer.check.fresh) this.examine();
  }

  async examine() {
    this.asked = true;
    if (this.examining) return; // once more when that check is done
    this.examining = true;
    this.tools.busy(true);
    let folder, answer;
    do {
      folder = this.folder;
      this.asked = false;
      // Out of turn: it takes seconds, and captions are saved meanwhile.
      answer = await ask("check", { folder });
      if (!answer.error) answer = await this.ask("look", {});
    } while (folder !== this.folder || this.asked); // another was opened meanwhile, or the images have changed
    this.examining = false;
    this.tools.busy(false);
    if (answer.error) this.tools.say(say("The images could not be checked: {}", answer.error), true);
    else this.changed({ ...answer, check: { ...answer.check, fresh: true } }, "");
  }

  /** One caption was saved: only the cards that it changed are drawn again. */
  saved(answer, said) {
    for (const row of answer.cards) {
      const index = this.data.pictures.findIndex((picture) => picture.file === row.file);
      if (index >= 0) Object.assign(this.data.pictures[index], row); // the parts have it too
      this.cards.get(`in ${row.file}`)?.show(row);
    }
    Object.assign(this.data, { undo: answer.undo, redo: answer.redo });
    this.tools.show(this.data);
    this.tools.aboutRemarks.later();
    this.announce(said);
  }

  rows() { return this.away ? this.data.excluded : this.data.pictures; }

  /** Return the rows that the filters leave, in order. */
  shown() {
    const words = this.tools.search.input.value.trim().toLowerCase();
    const rows = this.rows().filter((row) =>
      (!words || `${row.file}\n${row.caption}`.toLowerCase().includes(words))
      && (!this.kinds.size || row.badges.some((badge) => this.kinds.has(badge.kind)))
      && [...this.tags].every((tag) => tagsOf(row.caption).includes(tag)));
    if (this.kinds.size === 1) rows.splice(0, rows.length, ...ofKind(rows, [...this.kinds][0]));
    const order = this.tools.order.input.value;
    const score = (row) => row.score ?? -1;
    if (order === "worst") rows.sort((a, b) => score(a) - score(b));
    if (order === "best") rows.sort((a, b) => score(b) - score(a));
    return rows;
  }

  draw() {
    const rows = this.shown();
    const count = Math.ceil(rows.length / CHUNK);
    for (const part of this.parts.splice(count)) {
      this.watcher.unobserve(part.node);
      part.node.remove();
    }
    while (this.parts.length < count) {
      const part = new Part(this, !this.parts.length);
      this.parts.push(part);
      this.list.append(part.node);
      this.watcher.observe(part.node);
    }
    this.parts.forEach((part, index) => part.use(rows.slice(index * CHUNK, (index + 1) * CHUNK), index * CHUNK));
    this.tools.count(rows.length, this.rows().length);
    this.aim(rows);
  }

  refilter() {
    this.bulk.close();
    this.draw();
    this.tools.showFilters();
  }

  keyOf(row) { return `${this.away ? "out" : "in"} ${row.file}`; }

  /** Let go of a card that is out of sight, unless it holds something that is not saved. */
  forget(row) {
    const card = this.cards.get(this.keyOf(row));
    if (card && !card.dirty && !card.saving && !card.conflict) this.cards.delete(this.keyOf(row));
  }

  card(row) {
    const key = this.keyOf(row);
    if (!this.cards.has(key)) this.cards.set(key, new Card(this, row, this.away));
    const card = this.cards.get(key);
    card.check.checked = this.chosen.has(row.file);
    return card;
  }

  /** Whether an image has a remark of a kind. */
  has(kind) { return this.data.pictures.some((row) => row.badges.some((badge) => badge.kind === kind)); }

  /** Have captions written where there are none. */
  async write() {
    this.captioner.showFirst();
    await this.captioner.look();
    await this.captioner.begin();
  }

  // What the workbench asks for.
  order() { return this.shown().map((row) => row.file); }
  cardOf(name) { return this.card(this.rows().find((row) => row.file === name)); }
  captions() { return this.data.pictures.map((row) => row.caption); }

  selected(name, on) {
    this.bulk.close();
    if (on) this.chosen.add(name); else this.chosen.delete(name);
    this.aim(this.shown());
  }

  selectAll(on) {
    this.bulk.close();
    this.chosen = new Set(on ? this.shown().map((row) => row.file) : []);
    this.draw();
  }

  /** Return the names that a change of many is about: the chosen ones, else all that are shown. */
  targets() { return this.chosen.size ? [...this.chosen] : this.shown().map((row) => row.file); }

  aim(rows) {
    const { size } = this.chosen;
    this.bulk.aim(size ? say("for the {#} selected", size) : say("for all {#} shown", rows.length));
    this.tools.aim(size, this.away);
  }

  /** Save all that is typed, before something else is done with the captions. */
  async flush() {
    await Promise.all([...this.cards.values()].filter((card) => card.dirty).map((card) => card.save()));
  }

  async act(name, values, said) {
    await this.flush();
    this.bulk.close();
    this.tools.say("");
    const answer = await this.ask(name, values);
    this.changed(answer, said(answer));
  }

  undo() { return this.act("undo", {}, (a) => (a.step ? say("Undone: {}", a.step) : say("Nothing to undo"))); }
  redo() { return this.act("redo", {}, (a) => (a.step ? say("Done again: {}", a.step) : say("Nothing to redo"))); }
  exclude(files) { return this.act("exclude", { files }, (a) => say("Done: {}", a.step)); }
  keepOne(kind) { return this.act("keep_one", { kind }, (a) => say("Done: {}", a.step)); }
  putBack(files) { return this.act("put_back", { files }, (a) => say("Done: {}", a.step)); }
}

/** Return "3 images in /the/folder". */
function imagesIn({ folder, pictures }) {
  const { length } = pictures.filter((row) => !row.unreadable); // as the heading counts them
  return length === 1 ? say("1 image in {}", folder) : say("{#} images in {}", length.toLocaleString("en"), folder);
}

export function mount(main, leaving) {
  const editor = new Editor(main.querySelector(".mount"), leaving);
  const here = { signal: leaving };
  document.addEventListener("keydown", (event) => {
    const key = event.key.toLowerCase();
    const typing = event.target.closest?.("input:not([type=checkbox]), textarea, select, [contenteditable]");
    if (typing || !(event.ctrlKey || event.metaKey) || event.altKey || !editor.folder) return;
    if (key === "z" && !event.shiftKey) { event.preventDefault(); editor.undo(); }
    if (key === "y" || (key === "z" && event.shiftKey)) { event.preventDefault(); editor.redo(); }
  }, here);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && editor.folder) editor.reload();
  }, here);
  window.addEventListener("beforeunload", (event) => {
    if (editor.unsaved) event.preventDefault();
  }, here);
  dropZone(main.querySelector(".drop"), leaving, (answer) => editor.opener.received(answer));
  deletes(main);
  editor.opener.start(new URL(location.href).searchParams.get("folder"));
}
