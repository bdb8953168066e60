// One edit of many captions. Nothing is written before its preview, which shows every caption that
// would change; applying is one step of undo.
import { say } from "/ui/shared/words.js";
import { button, choice, field, make, opening } from "/ui/shared/elements.js";

const THUMB_PX = 384; // that of the cards, which is there
const KINDS = [
  ["prepend", say("put in front")], ["append", say("put at the end")], ["replace", say("replace words")],
  ["remove_tag", say("remove a tag")], ["trigger", say("set the trigger word")],
];
const JOINTS = [[", ", say("comma")], [" ", say("space")], ["", say("nothing")]];

export class EditMany {
  constructor(editor) {
    this.editor = editor;
    this.kind = choice(say("Change"), KINDS, () => this.changed());
    this.text = field(say("Words"), { maxlength: 2000, oninput: () => this.close() });
    this.replacement = field(say("With"), { maxlength: 2000, oninput: () => this.close() });
    this.joint = choice(say("Joined with"), JOINTS, () => this.close());
    this.target = make("span", { class: "ds-quiet" });
    this.said = make("p", { class: "ds-quiet", role: "status" });
    this.rows = make("tbody");
    this.apply = button("", () => this.commit(), { class: "primary" });
    this.preview = make("div", { class: "ds-preview", hidden: true },
      make("div", { class: "ds-rows", tabindex: "0", role: "region", "aria-label": say("Preview") },
        make("table", {}, make("thead", {}, make("tr", {},
          ...["image", "caption"].map((text) => make("th", { scope: "col" }, say(text))))),
        this.rows)),
      make("div", { class: "ds-line" }, this.apply, button(say("Cancel"), () => this.close())));
    const form = make("form", {
      class: "ds-line", onsubmit: (event) => { event.preventDefault(); this.look(); },
    }, this.kind.node, this.text.node, this.replacement.node, this.joint.node,
    make("button", { type: "submit" }, say("Preview")), this.target);
    this.node = make("div", { class: "ds-panel" }, form, this.said, this.preview);
    Object.assign(this, opening(say("Change many captions \u2026"), this.node));
    this.opener.addEventListener("click", () => { this.asksOnly(false); this.changed(); });
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

  /** Open it on one instruction for all pairs: nothing but its words is asked for. */
  instruct() {
    this.open(true);
    this.kind.input.value = "append";
    this.changed();
    this.asksOnly(true);
    this.text.input.focus();
  }

  asksOnly(instruction) {
    this.text.node.querySelector("label").textContent = say(instruction ? "What changes?" : "Words");
    this.kind.node.hidden = instruction;
    if (instruction) this.joint.node.hidden = true;
  }

  /** Call what is changed what it is: of a pair it says what changes. */
  ofPairs(arePairs) {
    this.opener.textContent = arePairs ? say("Change many instructions \u2026") : say("Change many captions \u2026");
  }

  aim(text) { this.target.textContent = text; }

  close() {
    this.turn = (this.turn ?? 0) + 1;
    this.preview.hidden = true;
    this.said.textContent = "";
  }

  async look() {
    await this.editor.flush();
    this.close();
    const { turn, values } = this;
    const answer = await this.editor.ask("preview", { ...values, files: this.editor.targets() });
    if (turn !== this.turn) return; // other words or images were chosen meanwhile: this preview is not of them
    if (answer.error) { this.said.textContent = answer.error; return; }
    this.shown = { ...values, rows: answer.rows };
    this.said.textContent = [
      ...(answer.rows.length ? [] : [say("No caption would change.")]),
      ...(answer.have === 1 ? [say("1 caption has it already and stays as it is.")] : []),
      ...(answer.have > 1 ? [say("{#} captions have it already and stay as they are.", answer.have)] : []),
    ].join(" ");
    if (answer.rows.length === 0) return;
    this.rows.replaceChildren(...answer.rows.map((row) => previewRow(this.editor.folder, row)));
    const count = answer.rows.length;
    this.apply.textContent = count === 1 ? say("Apply to 1 caption") : say("Apply to {#} captions", count);
    this.preview.hidden = false;
    if (this.node.contains(document.activeElement)) this.apply.focus(); // else somebody types in a caption
  }

  async commit() {
    const { rows, ...edit } = this.shown;
    const seen = Object.fromEntries(rows.map((row) => [row.file, row.before]));
    this.apply.disabled = true;
    const answer = await this.editor.ask("apply", { ...edit, seen });
    this.apply.disabled = false;
    if (answer.error) { this.said.textContent = say("Not applied: {}", answer.error); return; }
    this.close();
    this.editor.changed(answer, say("Done: {}", answer.step || say("nothing")), true);
  }
}

/** Return a row of the preview: the image, and its caption with what goes and what comes marked in it. */
function previewRow(folder, { file, before, after }) {
  let start = 0;
  const shorter = Math.min(before.length, after.length);
  while (start < shorter && before[start] === after[start]) start += 1;
  let end = 0;
  while (end < shorter - start && before.at(-1 - end) === after.at(-1 - end)) end += 1;
  const part = (text, name) => (text.length > start + end ? make(name, {}, text.slice(start, text.length - end)) : null);
  const thumb = make("img", {
    src: `/media/thumb?${new URLSearchParams({ folder, file, size: THUMB_PX })}`, alt: "", loading: "lazy", decoding: "async",
  });
  return make("tr", { translate: "no" }, make("th", { scope: "row", dir: "auto" }, thumb, file),
    make("td", { dir: "auto" }, after.slice(0, start), part(before, "del"), part(after, "ins"), after.slice(after.length - end)));
}
