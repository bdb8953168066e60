// The line that opens a folder, the folders used lately, and images that the browser sends.
import { browse } from "/ui/shared/browse.js";
import { say } from "/ui/shared/words.js";
import { ask } from "/ui/datasets/asking.js";
import { button, field, make } from "/ui/shared/elements.js";

export class Opener {
  constructor(editor) {
    this.editor = editor;
    this.drop = document.querySelector(".drop");
    this.list = make("datalist", { id: "ds-recent" });
    this.path = field(say("Folder on this machine"), { list: "ds-recent", spellcheck: "false" });
    this.path.node.classList.add("ds-wide");
    this.error = make("p", { class: "ds-error", role: "alert", hidden: true });
    this.said = make("p", { class: "ds-quiet", role: "status" });
    this.recent = make("div", { class: "ds-recent" });
    this.train = make("a", { class: "ds-train", hidden: true }, say("Train on these images"));
    this.remove = button(say("Delete"), () => {}, { hidden: true });
    this.node = make("div", { class: "ds-open" }, make("form", {
      class: "ds-line", onsubmit: (event) => { event.preventDefault(); this.submit(); },
    }, this.path.node, this.list, button(say("Browse"), () => this.browse()),
    make("button", { type: "submit", class: "primary" }, say("Open")),
    this.train, this.remove), this.error, this.said, this.recent, make("p", { class: "empty quiet" },
      say("Here you write captions, find blurred and doubled images and see how each is cropped.")));
  }

  browse() {
    browse("dataset", (path) => { this.path.input.value = path; this.submit(); });
  }

  async start(folder) {
    const answer = await ask("recent", {});
    const folders = answer.recent ?? [];
    this.list.replaceChildren(...folders.map((value) => make("option", { value })));
    this.recent.replaceChildren(...(folders.length ? [make("span", { class: "ds-quiet" }, say("Used lately:"))] : []),
      ...folders.map((name) => button(name, () => this.editor.open(name), { class: "bare" })));
    if (!folder) return;
    this.path.input.value = folder;
    this.editor.open(folder);
  }

  /** Open the folder that dropped or chosen files were put into. */
  async received(answer) {
    await this.editor.open(answer.received);
    this.said.textContent = answer.said;
  }

  submit() { this.refuse(""); this.editor.open(this.path.input.value); }

  /** Say that a folder is being opened, which takes a while on a slow disk; return what ends that. */
  waiting() {
    const opening = say("Opening the folder \u2026");
    const before = this.said.textContent.replace(opening, ""); // of one that is being opened already
    this.said.textContent = before || opening;
    return () => { this.said.textContent = before; };
  }

  opened({ folder, uploaded }) {
    this.path.input.value = folder;
    const name = folder.split(/[\\/]/).at(-1);
    for (const [key, value] of Object.entries({ trash: "dataset", ref: folder, next: "/datasets" })) this.remove.dataset[key] = value;
    this.remove.setAttribute("aria-label", say("Delete {}", name));
    this.remove.hidden = !uploaded; // a folder of the user's own is not ours to delete
    this.train.href = `/train?${new URLSearchParams({ folder })}`;
    this.train.hidden = false;
    this.drop.hidden = this.recent.hidden = this.node.lastChild.hidden = true;
    this.refuse("");
  }

  refuse(text) {
    this.error.textContent = text;
    this.error.hidden = !text;
  }
}
