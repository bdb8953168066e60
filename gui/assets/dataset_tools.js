// The bars above the cards: which folder, upload, undo, filters, order, what to look for.

const MAX_TAGS = 60;
const SIZES = [["", ""], ["512", "512 px"], ["768", "768 px"], ["1024", "1024 px"]];

/** The line that opens a folder, or takes images that the browser sends. */
class Opener {
  constructor(desk) {
    this.desk = desk;
    this.list = make("datalist", { id: "ds-recent" });
    this.path = field("Folder on this machine", { list: "ds-recent", spellcheck: "false" });
    this.path.node.classList.add("ds-wide");
    this.error = make("p", { class: "ds-error", role: "alert", hidden: true });
    this.said = make("p", { class: "ds-quiet", role: "status" });
    this.recent = make("div", { class: "ds-recent" });
    this.train = make("a", { class: "ds-train", hidden: true }, "Train on these images");
    this.remove = button("Delete", () => {}, { hidden: true });
    this.node = make("div", { class: "ds-open" }, make("form", {
      class: "ds-line", onsubmit: (event) => { event.preventDefault(); this.submit(); },
    }, this.path.node, this.list, button("Browse", () => this.browse()),
    make("button", { type: "submit", class: "primary" }, "Open"),
    this.train, this.remove), this.error, this.said, this.recent, make("p", { class: "empty quiet" },
      "Here you write captions, find blurred and doubled images and see how each is cropped."));
  }

  async browse() {
    const { browse } = await import("/ui/shared/browse.js");
    browse("dataset", (path) => { this.path.input.value = path; this.submit(); });
  }

  async start(folder) {
    const answer = await ask("recent", {});
    const folders = answer.recent ?? [];
    this.list.replaceChildren(...folders.map((value) => make("option", { value })));
    this.recent.replaceChildren(...(folders.length ? [make("span", { class: "ds-quiet" }, "Used lately:")] : []),
      ...folders.map((name) => button(name, () => this.desk.open(name), { class: "bare" })));
    this.path.input.value = folder ?? "";
    if (folder) this.desk.open(folder);
  }

  /** Open the folder that dropped or chosen files were put into. */
  async received(answer) {
    await this.desk.open(answer.received);
    this.said.textContent = answer.said;
  }

  submit() { this.refuse(""); this.desk.open(this.path.input.value); }

  /** Say that a folder is being opened, which takes a while on a slow disk; return what ends that. */
  waiting() {
    const opening = "Opening the folder \u2026";
    const before = this.said.textContent.replace(opening, ""); // of one that is being opened already
    this.said.textContent = before || opening;
    return () => { this.said.textContent = before; };
  }

  opened({ folder, uploaded }) {
    this.path.input.value = folder;
    const name = folder.split(/[\\/]/).at(-1);
    for (const [key, value] of Object.entries({ trash: "dataset", ref: folder, next: "/datasets" })) this.remove.dataset[key] = value;
    this.remove.setAttribute("aria-label", `Delete ${name}`);
    this.remove.hidden = !uploaded; // a folder of the user's own is not ours to delete
    this.train.href = `/train?${new URLSearchParams({ folder })}`;
    this.train.hidden = false;
    document.querySelector(".drop").hidden = this.recent.hidden = this.node.lastChild.hidden = true;
    this.refuse("");
  }

  refuse(text) {
    this.error.textContent = text;
    this.error.hidden = !text;
  }
}

/** Filters, order, undo, and what is said of the whole folder. */
class Tools {
  constructor(desk) {
    this.desk = desk;
    const redraw = () => desk.refilter();
    this.head = make("p", { class: "ds-head" });
    this.status = make("p", { class: "ds-quiet", role: "status" });
    this.message = make("p", { class: "ds-message", role: "status", hidden: true });
    this.notes = make("ul");
    this.notesBox = make("details", { hidden: true }, make("summary", {}, ""), this.notes);
    this.undo = button("Undo", () => desk.undo());
    this.redo = button("Redo", () => desk.redo());
    this.search = field("Find", { type: "search", placeholder: "name or caption", oninput: redraw });
    this.order = choice("Order", [["name", "by name"], ["worst", "worst first"], ["best", "best first"]], redraw);
    this.size = choice("Size for the check", SIZES, () => this.remember());
    this.trigger = field("Trigger word for the check", { maxlength: 100, onchange: () => this.remember() });
    this.crop = button("Show crop", () => this.toggleCrop(), { "aria-pressed": "false" });
    this.filters = make("div", { class: "ds-line", role: "group", "aria-label": "Filter by remark" });
    this.tags = make("div", { class: "ds-tags", role: "group", "aria-label": "Filter by tag" });
    this.tagBox = make("details", {}, make("summary", {}, "Tags"), this.tags);
    this.counter = make("span", { class: "ds-quiet" });
    this.excludeChosen = button("Exclude selected", () => desk.exclude([...desk.chosen]));
    this.backChosen = button("Put selected back", () => desk.putBack([...desk.chosen]));
    this.bulkPlace = make("div", { class: "ds-folded" });
    this.node = make("div", { class: "ds-tools" }, this.head, this.status, this.message, this.notesBox,
      make("div", { class: "ds-line" }, this.undo, this.redo, this.search.node),
      make("details", { class: "ds-more", open: matchMedia("(min-width: 40rem)").matches ? "" : null }, make("summary", {}, "Sort, select and filter"),
        make("div", { class: "ds-line" }, this.order.node, this.size.node, this.trigger.node, this.crop),
        this.filters, this.tagBox,
        make("div", { class: "ds-line" }, this.counter,
          button("Select all shown", () => desk.selectAll(true)),
          button("Select none", () => desk.selectAll(false)), this.excludeChosen, this.backChosen)));
  }

  show(data) {
    const buckets = Object.entries(data.check.buckets).map(([name, count]) => `${count} at ${name.replace("x", "\u00d7")} px`);
    const unreadable = data.pictures.filter((row) => row.unreadable).length; // counted apart, as on Train
    const count = data.pictures.length - unreadable;
    const images = count === 1 ? "1 image" : `${count.toLocaleString("en")} images`;
    const others = unreadable === 1 ? "1 more file that cannot be read" : `${unreadable} more files that cannot be read`;
    this.head.replaceChildren(make("span", {}, images), ...(unreadable ? [", ", make("span", {}, others)] : []), ...(data.check.score === null ? [] : [make("span", {}, data.check.score >= 0.8 ? ", good to train on" : data.check.score >= 0.6 ? ", usable, with weak points" : ", worth improving first")]));
    const error = data.problem || data.check.error;
    if (!this.desk.examining) {
      this.status.textContent = error || (buckets.length ? `Trained as: ${buckets.join(", ")}` : "");
    }
    this.status.classList.toggle("ds-error", Boolean(error));
    for (const [node, title, word, none] of [[this.undo, data.undo, "Undo", "nothing to undo"], [this.redo, data.redo, "Redo", "nothing to redo"]]) {
      node.disabled = !title;
      node.title = title ? `${word}: ${title}` : none;
    }
    this.size.input.options[0].textContent = data.trained_as;
    this.size.input.value = data.resolution;
    if (document.activeElement !== this.trigger.input) this.trigger.input.value = data.trigger;
    this.notesBox.hidden = data.notes.length === 0;
    this.notesBox.firstChild.textContent = data.notes.length === 1 ? "1 note on the folder" : `${data.notes.length} notes on the folder`;
    this.notes.replaceChildren(...data.notes.map((text) => make("li", {}, text)));
    this.showFilters();
  }

  /** Draw the counts of remarks and tags, each a button that filters. */
  showFilters() {
    const { desk } = this;
    const kinds = new Map();
    const tags = new Map();
    for (const row of desk.rows()) {
      for (const kind of new Set(row.badges.map((badge) => badge.kind))) kinds.set(kind, (kinds.get(kind) ?? 0) + 1);
      for (const tag of new Set(tagsOf(row.caption))) tags.set(tag, (tags.get(tag) ?? 0) + 1);
    }
    for (const kind of desk.kinds) if (!kinds.has(kind)) desk.kinds.delete(kind);
    for (const tag of desk.tags) if (!tags.has(tag)) desk.tags.delete(tag);
    const away = desk.data.excluded.length;
    redrawn(this.filters, [
      ...[...kinds].sort().map(([kind, count]) => this.filter(desk.kinds, kind, count)),
      away || desk.away ? button(`excluded ${away}`, () => this.toggleAway(), {
        class: "ds-chip", "aria-pressed": String(desk.away), "data-chip": "excluded",
      }) : null,
    ]);
    const common = [...tags].sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0])).slice(0, MAX_TAGS);
    redrawn(this.tags, common.map(([tag, count]) => this.filter(desk.tags, tag, count)));
    this.tagBox.hidden = tags.size === 0;
    this.tagBox.firstChild.textContent = `Tags (${tags.size.toLocaleString("en")})`;
  }

  filter(on, name, count) {
    return button(`${name} ${count}`, () => {
      if (!on.delete(name)) on.add(name);
      this.desk.refilter();
    }, { class: "ds-chip", "aria-pressed": String(on.has(name)), "data-chip": name, dir: "auto", translate: on === this.desk.tags ? "no" : null });
  }

  toggleAway() {
    this.desk.away = !this.desk.away;
    this.desk.chosen.clear();
    this.desk.kinds.clear();
    this.desk.tags.clear();
    this.desk.refilter();
  }

  toggleCrop() {
    const on = mount.classList.toggle("ds-crops");
    this.crop.setAttribute("aria-pressed", String(on));
  }

  async remember() {
    const values = { trigger: this.trigger.input.value, resolution: this.size.input.value };
    await this.desk.flush(); // its answers show the trigger word and size of before
    this.desk.changed(await this.desk.ask("look", values), "");
  }

  say(text, wrong = false) {
    this.message.textContent = text;
    this.message.hidden = !text;
    this.message.classList.toggle("ds-error", wrong);
  }

  busy(on) {
    if (on) this.status.textContent = "Looking at the images \u2026";
    this.node.setAttribute("aria-busy", String(on));
  }

  count(shown, all) {
    this.counter.textContent = shown === all ? `all ${all} shown` : `${shown} of ${all} shown`;
  }

  aim(chosen, away) {
    this.excludeChosen.hidden = away;
    this.backChosen.hidden = !away;
    this.excludeChosen.disabled = this.backChosen.disabled = chosen === 0;
    this.bulkPlace.hidden = away;
  }
}

/** Put new buttons in the place of the old ones, with the focus where it was. */
function redrawn(node, buttons) {
  const focused = node.contains(document.activeElement) ? document.activeElement.dataset.chip : null;
  node.replaceChildren(...buttons.filter(Boolean));
  if (focused !== null) [...node.children].find((one) => one.dataset.chip === focused)?.focus();
}
