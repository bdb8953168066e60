// The bars above the cards: undo, filters, order, what to look for, and what is said of the whole folder.
import { say } from "/ui/shared/words.js";
import { afterPause, button, choice, field, make, opening } from "/ui/shared/elements.js";
import { tagsOf } from "/ui/datasets/tags.js";

const MAX_TAGS = 60;
const REMARKS_PAUSE_MS = 300; // of captions that are saved one after another
const ORDERS = [["name", say("by name")], ["worst", say("worst first")], ["best", say("best first")]];
const SIZES = [["", ""], ["512", "512 px"], ["768", "768 px"], ["1024", "1024 px"]];

export class Tools {
  constructor(editor) {
    this.editor = editor;
    const redraw = () => editor.refilter();
    this.head = make("p", { class: "judged" });
    this.verdict = make("b", { class: "verdict", hidden: true });
    this.status = make("p", { class: "ds-quiet", role: "status" });
    this.message = make("p", { class: "ds-message", role: "status", hidden: true });
    this.remarks = make("div", { onclick: ({ target }) => this.mend(target.closest("button")) });
    this.aboutRemarks = afterPause(REMARKS_PAUSE_MS, () => this.showRemarks());
    this.undo = button(say("Undo"), () => editor.undo());
    this.redo = button(say("Redo"), () => editor.redo());
    this.search = field(say("Find"), { type: "search", placeholder: say("Find a name or caption"), oninput: redraw });
    this.order = choice(say("Order"), ORDERS, redraw);
    this.size = choice(say("Size for the check"), SIZES, () => this.remember());
    this.trigger = field(say("Trigger word for the check"), { maxlength: 100, onchange: () => this.remember() });
    this.crop = button(say("Show crop"), () => this.toggleCrop(), { "aria-pressed": "false" });
    this.filters = make("div", { class: "ds-filters", role: "group", "aria-label": say("Filter by remark") });
    this.tags = make("div", { class: "ds-tags", role: "group", "aria-label": say("Filter by tag") });
    this.counter = make("span", { class: "ds-quiet" });
    this.excludeChosen = button(say("Exclude selected"), () => editor.exclude([...editor.chosen]));
    this.backChosen = button(say("Put selected back"), () => editor.putBack([...editor.chosen]));
    this.sizes = make("p", { class: "ds-quiet" });
    const judging = make("div", { class: "ds-panel" },
      make("div", { class: "ds-line" }, this.size.node, this.trigger.node), this.sizes);
    const tagging = make("div", { class: "ds-panel" }, this.tags);
    this.judged = { ...opening(say("Size and trigger word \u2026"), judging), node: judging };
    this.tagged = { ...opening(say("Tags \u2026"), tagging), node: tagging };
    this.panels = make("div");
    this.openers = make("div", { class: "ds-line ds-openers" });
    this.selectNone = button(say("Select none"), () => editor.selectAll(false), { class: "bare" });
    this.selection = make("div", { class: "ds-line ds-selection" }, this.counter,
      button(say("Select all shown"), () => editor.selectAll(true), { class: "bare" }),
      this.selectNone, this.excludeChosen, this.backChosen);
    this.node = make("div", { class: "ds-tools" }, this.head, this.status, this.message, this.remarks,
      make("div", { class: "ds-line ds-bar" }, this.search.node, this.filters, this.order.node, this.undo, this.redo));
  }

  /** Take the tools for many images: a button each, and one panel at a time below them. */
  take(...tools) {
    for (const { opener } of tools) {
      opener.addEventListener("click", () => {
        for (const other of tools) if (other.opener !== opener) other.open(false);
      });
    }
    this.openers.append(...tools.map(({ opener }) => opener), this.crop);
    this.panels.append(...tools.map(({ node }) => node));
  }

  /** Show what is odd about the images and captions as they are now. */
  async showRemarks() {
    const { folder, leaving } = this.editor;
    const { findings, verdict, good } = await this.editor.ask("findings", {});
    if (findings === undefined || leaving.aborted || folder !== this.editor.folder) return;
    this.verdict.textContent = verdict;
    this.verdict.hidden = !verdict;
    this.verdict.classList.toggle("good", good);
    if (this.drawn === findings) return; // the keyboard keeps its place
    this.drawn = findings;
    this.remarks.innerHTML = findings; // markup of our own server, in which every text is escaped
    for (const shows of this.remarks.querySelectorAll("button[data-kind]")) {
      shows.hidden = !shows.dataset.find && !this.editor.has(shows.dataset.kind);
    }
  }

  /** Do what the button of a remark says. */
  mend(pressed) {
    if (!pressed) return;
    const { editor } = this;
    const { write, instruct, sets, find, kind, keep } = pressed.dataset;
    if (write !== undefined) editor.write();
    else if (instruct !== undefined) editor.bulk.instruct();
    else if (sets) editor.act("use_masks", {}, () => say("The masks are used."));
    else if (keep) editor.keepOne(keep);
    else { // these images, and no others that were looked for before
      editor.kinds.clear();
      editor.tags.clear();
      if (!find) editor.kinds.add(kind);
      this.search.input.value = find;
      editor.refilter();
    }
  }

  show(data) {
    const buckets = Object.entries(data.check.buckets).map(([name, count]) => say("{#} at {} px", count, name.replace("x", "\u00d7")));
    const unreadable = data.pictures.filter((row) => row.unreadable).length; // counted apart, as on Train
    const count = data.pictures.length - unreadable;
    const images = count === 1 ? say("1 image") : say("{#} images", count.toLocaleString("en"));
    const others = unreadable === 1
      ? say("1 more file that cannot be read") : say("{#} more files that cannot be read", unreadable);
    this.head.replaceChildren(make("b", {}, images), this.verdict, unreadable ? make("span", {}, others) : "");
    const error = data.problem || data.check.error;
    this.sizes.textContent = buckets.length ? say("Trained as: {}", buckets.join(", ")) : "";
    if (!this.editor.examining) this.status.textContent = error;
    this.status.classList.toggle("ds-error", Boolean(error));
    for (const [node, title, word, none] of [
      [this.undo, data.undo, "Undo: {}", say("nothing to undo")], [this.redo, data.redo, "Redo: {}", say("nothing to redo")],
    ]) {
      node.disabled = !title;
      node.title = title ? say(word, title) : none;
    }
    this.size.input.options[0].textContent = data.trained_as;
    this.size.input.value = data.resolution;
    if (document.activeElement !== this.trigger.input) this.trigger.input.value = data.trigger;
    this.showFilters();
  }

  /** Draw the counts of remarks and tags, each a button that filters. */
  showFilters() {
    const { editor } = this;
    const kinds = new Map();
    const tags = new Map();
    for (const row of editor.rows()) {
      for (const kind of new Set(row.badges.map((badge) => badge.kind))) kinds.set(kind, (kinds.get(kind) ?? 0) + 1);
      for (const tag of new Set(tagsOf(row.caption))) tags.set(tag, (tags.get(tag) ?? 0) + 1);
    }
    for (const kind of editor.kinds) if (!kinds.has(kind)) editor.kinds.delete(kind);
    for (const tag of editor.tags) if (!tags.has(tag)) editor.tags.delete(tag);
    const away = editor.data.excluded.length;
    redrawn(this.filters, [
      ...[...kinds].sort().map(([kind, count]) => this.filter(editor.kinds, kind, count)),
      away || editor.away ? button(say("excluded {#}", away), () => this.toggleAway(), {
        class: "ds-chip", "aria-pressed": String(editor.away), "data-chip": "excluded",
      }) : null,
    ]);
    const common = [...tags].sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0])).slice(0, MAX_TAGS);
    redrawn(this.tags, common.map(([tag, count]) => this.filter(editor.tags, tag, count)));
    this.tagged.opener.hidden = tags.size === 0;
    if (tags.size === 0) this.tagged.open(false);
  }

  filter(on, name, count) {
    const isTag = on === this.editor.tags; // a word of the user's own, in no language of ours
    return button(`${isTag ? name : say(name)} ${count}`, () => {
      if (!on.delete(name)) on.add(name);
      this.editor.refilter();
    }, {
      class: "ds-chip", "aria-pressed": String(on.has(name)), "data-chip": name, dir: "auto", translate: isTag ? "no" : null,
    });
  }

  toggleAway() {
    this.editor.away = !this.editor.away;
    this.editor.chosen.clear();
    this.editor.kinds.clear();
    this.editor.tags.clear();
    this.editor.refilter();
  }

  toggleCrop() {
    const on = this.editor.page.classList.toggle("ds-crops");
    this.crop.setAttribute("aria-pressed", String(on));
  }

  async remember() {
    const values = { trigger: this.trigger.input.value, resolution: this.size.input.value };
    await this.editor.flush(); // its answers show the trigger word and size of before
    this.editor.changed(await this.editor.ask("look", values), "");
  }

  say(text, wrong = false) {
    this.message.textContent = text;
    this.message.hidden = !text;
    this.message.classList.toggle("ds-error", wrong);
  }

  busy(on) {
    if (on) this.status.textContent = say("Looking at the images \u2026");
    this.node.setAttribute("aria-busy", String(on));
  }

  count(shown, all) {
    this.counter.textContent = shown === all ? say("all {#} shown", all) : say("{#} of {#} shown", shown, all);
  }

  aim(chosen, away) {
    this.selectNone.hidden = !chosen;
    this.excludeChosen.hidden = away || !chosen;
    this.backChosen.hidden = !away || !chosen;
    this.openers.hidden = this.panels.hidden = away;
  }
}

/** Put new buttons in the place of the old ones, with the focus where it was. */
function redrawn(node, buttons) {
  const focused = node.contains(document.activeElement) ? document.activeElement.dataset.chip : null;
  node.replaceChildren(...buttons.filter(Boolean));
  if (focused !== null) [...node.children].find((one) => one.dataset.chip === focused)?.focus();
}
