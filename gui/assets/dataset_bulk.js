// One edit of many captions. Nothing is written before its preview, which shows every caption that
// would change; applying is one step of undo.

const BULK_KINDS = [
  ["prepend", "put in front"], ["append", "put at the end"], ["replace", "replace words"],
  ["remove_tag", "remove a tag"], ["trigger", "set the trigger word"],
];
const JOINTS = [[", ", "comma"], [" ", "space"], ["", "nothing"]];

class BulkBar {
  constructor(desk) {
    this.desk = desk;
    this.kind = choice("Change", BULK_KINDS, () => this.changed());
    this.text = field("Words", { maxlength: 2000, oninput: () => this.close() });
    this.replacement = field("With", { maxlength: 2000, oninput: () => this.close() });
    this.joint = choice("Joined with", JOINTS, () => this.close());
    this.target = make("span", { class: "ds-quiet" });
    this.said = make("p", { class: "ds-quiet", role: "status" });
    this.rows = make("tbody");
    this.apply = button("", () => this.commit(), { class: "primary" });
    this.preview = make("div", { class: "ds-preview", hidden: true },
      make("div", { class: "ds-rows", tabindex: "0", role: "region", "aria-label": "Preview" },
        make("table", {}, make("thead", {}, make("tr", {},
          ...["image", "before", "after"].map((text) => make("th", { scope: "col" }, text)))),
        this.rows)),
      make("div", { class: "ds-line" }, this.apply, button("Cancel", () => this.close())));
    const form = make("form", {
      class: "ds-line", onsubmit: (event) => { event.preventDefault(); this.look(); },
    }, this.kind.node, this.text.node, this.replacement.node, this.joint.node,
    make("button", { type: "submit" }, "Preview"), this.target);
    this.node = make("details", { class: "ds-bulk" }, make("summary", {}, "Change many captions: add, remove, replace words \u2026"),
      form, this.said, this.preview);
    this.changed();
  }

  get values() {
    return {
      kind: this.kind.input.value, text: this.text.input.value,
      replacement: this.replacement.input.value, joint: this.joint.input.value,
    };
  }

  changed() {
    const kind = this.kind.input.value;
    this.replacement.node.hidden = kind !== "replace";
    this.joint.node.hidden = kind !== "prepend" && kind !== "append";
    this.close();
  }

  aim(text) { this.target.textContent = text; }

  close() {
    this.turn = (this.turn ?? 0) + 1;
    this.preview.hidden = true;
    this.said.textContent = "";
  }

  async look() {
    await this.desk.flush();
    this.close();
    const { turn, values } = this;
    const answer = await this.desk.ask("preview", { ...values, files: this.desk.targets() });
    if (turn !== this.turn) return; // other words or images were chosen meanwhile: this preview is not of them
    if (answer.error) { this.said.textContent = answer.error; return; }
    this.shown = { ...values, rows: answer.rows };
    if (answer.rows.length === 0) { this.said.textContent = "No caption would change."; return; }
    this.rows.replaceChildren(...answer.rows.map(previewRow));
    this.apply.textContent = answer.rows.length === 1 ? "Apply to 1 caption" : `Apply to ${answer.rows.length} captions`;
    this.preview.hidden = false;
    if (this.node.contains(document.activeElement)) this.apply.focus(); // else somebody types in a caption
  }

  async commit() {
    const { rows, ...edit } = this.shown;
    const seen = Object.fromEntries(rows.map((row) => [row.file, row.before]));
    this.apply.disabled = true;
    const answer = await this.desk.ask("apply", { ...edit, seen });
    this.apply.disabled = false;
    if (answer.error) { this.said.textContent = `Not applied: ${answer.error}`; return; }
    this.close();
    this.desk.changed(answer, `Done: ${answer.step || "nothing"}`);
  }
}

function previewRow({ file, before, after }) {
  let start = 0;
  const shorter = Math.min(before.length, after.length);
  while (start < shorter && before[start] === after[start]) start += 1;
  let end = 0;
  while (end < shorter - start && before.at(-1 - end) === after.at(-1 - end)) end += 1;
  const cell = (text, name) => make("td", { dir: "auto" }, text.slice(0, start),
    make(name, {}, text.slice(start, text.length - end)), text.slice(text.length - end));
  return make("tr", { translate: "no" }, make("th", { scope: "row", dir: "auto" }, file),
    cell(before, "del"), cell(after, "ins"));
}
