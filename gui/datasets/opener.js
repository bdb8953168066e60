// The folders used lately as cards, the line that opens another one, and images that the browser sends.
import { browse } from "/ui/shared/browse.js";
import { say } from "/ui/shared/words.js";
import { ask } from "/ui/datasets/asking.js";
import { dialog } from "/ui/dialog.js";
import { button, field, make } from "/ui/shared/elements.js";

const THUMB_PX = 384;

export class Opener {
  constructor(editor) {
    this.editor = editor;
    this.drop = document.querySelector(".drop");
    this.all = document.querySelector(".ds-all");
    this.none = document.querySelector(".ds-none");
    this.title = document.querySelector(".ds-title h1");
    this.actions = document.querySelector(".ds-title .actions");
    this.list = make("datalist", { id: "ds-recent" });
    this.path = field(say("Folder on this machine"), { list: "ds-recent", spellcheck: "false" });
    this.path.node.classList.add("ds-wide");
    this.error = make("p", { class: "ds-error", role: "alert", hidden: true });
    this.said = make("p", { class: "ds-quiet", role: "status" });
    this.recent = make("ul", { class: "ds-shelf" });
    this.train = make("a", { class: "ui-button primary" }, say("Train on these images"));
    this.others = button(say("Open another one"), () => this.another(), { "aria-expanded": "false" });
    this.remove = button(say("Delete"), () => {});
    this.rename = button(say("Rename"), () => this.call());
    this.form = make("form", {
      class: "ds-line", onsubmit: (event) => { event.preventDefault(); this.submit(); },
    }, this.path.node, this.list, button(say("Browse"), () => this.browse()), make("button", { type: "submit" }, say("Open")));
    this.node = make("div", { class: "ds-open" }, this.form, this.error, this.said, this.recent);
  }

  browse() {
    browse("dataset", (path) => { this.path.input.value = path; this.submit(); });
  }

  async start(folder) {
    if (folder) {
      this.path.input.value = folder;
      this.editor.open(folder);
    }
    const answer = await ask("recent", {});
    const folders = answer.recent ?? [];
    this.list.replaceChildren(...folders.map((value) => make("option", { value })));
    this.none.hidden = Boolean(folder || this.editor.folder || folders.length);
    if (folder || !folders.length) return;
    const cards = folders.map((each) => folderCard(each));
    this.recent.replaceChildren(...cards.map((card) => card.node));
    for (const card of cards) {
      if (this.editor.leaving.aborted || this.editor.folder) return;
      card.show(await ask("glance", { folder: card.folder })); // one after another: a folder may have thousands of files
    }
  }

  /** Open the folder that dropped or chosen files were put into. */
  async received(answer) {
    await this.editor.open(answer.received);
    this.said.textContent = answer.said;
  }

  submit() { this.refuse(""); this.editor.open(this.path.input.value); }

  /** Show the line for another folder, or put it away. */
  another() {
    this.form.hidden = !this.form.hidden;
    this.others.setAttribute("aria-expanded", String(!this.form.hidden));
    if (!this.form.hidden) this.path.input.select();
  }

  /** Say that a folder is being opened, which takes a while on a slow disk; return what ends that. */
  waiting() {
    const opening = say("Opening the folder \u2026");
    const before = this.said.textContent.replace(opening, ""); // of one that is being opened already
    this.said.textContent = before || opening;
    return () => { this.said.textContent = before; };
  }

  /** Ask what the dataset is to be called; the folder keeps its name. */
  call() {
    const name = field(say("Name"), { maxlength: 100, value: this.title.textContent });
    const shown = dialog(say("Rename the dataset"), {
      fields: [name.node],
      note: say("On these pages; the folder keeps its name. Left empty, it is called as the folder is."),
      act: say("Rename"),
      submit: () => this.editor.ask("look", { name: name.input.value }),
    });
    shown.done = (answer) => {
      shown.node.close();
      this.opened(answer);
      this.editor.changed(answer, "");
      this.rename.focus();
    };
    name.input.select();
  }

  /** Show what the dataset is called. */
  entitle(answer) {
    const name = nameOf(answer);
    this.title.replaceChildren(make("span", { translate: "no", dir: "auto", title: answer.folder }, name));
    this.remove.setAttribute("aria-label", say("Delete {}", name));
  }

  opened(answer) {
    const { folder, uploaded } = answer;
    this.path.input.value = folder;
    this.entitle(answer);
    for (const [key, value] of Object.entries({ trash: "dataset", ref: folder, next: "/datasets" })) this.remove.dataset[key] = value;
    this.train.href = `/train?${new URLSearchParams({ folder })}`;
    // A folder of the user's own is not ours to delete.
    this.actions.replaceChildren(this.rename, ...(uploaded ? [this.remove] : []), this.others, this.train);
    this.actions.hidden = false;
    this.form.hidden = true;
    this.others.setAttribute("aria-expanded", "false");
    this.all.hidden = false;
    this.drop.hidden = this.recent.hidden = this.none.hidden = true;
    this.refuse("");
  }

  refuse(text) {
    this.error.textContent = text;
    this.error.hidden = !text;
    if (text) this.form.hidden = false;
  }
}

/** Return what a dataset is called: a heap of photos after the first, "IMG_2000 and 18 more". */
export function nameOf({ name, others }) {
  return others ? `${name} ${say("and {#} more", others.toLocaleString("en"))}` : name;
}

/** Return the card of a folder; what it is called and what is in it comes later, by `show`, into the room for it. */
function folderCard(folder) {
  const name = make("b", { translate: "no", dir: "auto" }, "\u00a0");
  const images = make("span", { class: "ds-four" });
  const about = make("span", { class: "quiet" }, "\u00a0");
  const place = make("small", { class: "quiet", translate: "no" }, "\u00a0");
  const node = make("li", {}, make("a", { class: "panel", href: `/datasets?${new URLSearchParams({ folder })}` }, images, name, about, place));
  const show = (answer) => {
    if (answer.error) { name.textContent = folder.split(/[\\/]/).at(-1); about.textContent = answer.error; return; }
    name.textContent = nameOf(answer);
    const lacking = answer.without_caption;
    const counted = answer.are_pairs
      ? [answer.images === 1 ? say("1 pair") : say("{#} pairs", answer.images.toLocaleString("en")),
        lacking ? say("{#} without an instruction", lacking.toLocaleString("en")) : say("all with instructions")]
      : [answer.images === 1 ? say("1 image") : say("{#} images", answer.images.toLocaleString("en")),
        lacking ? say("{#} without a caption", lacking.toLocaleString("en")) : say("all with captions")];
    about.textContent = [
      ...counted,
      answer.used.replaceAll(" ", "\u00a0"), // a date stays on its line
    ].slice(answer.images ? 0 : 2).filter(Boolean).join(" \u00b7 ");
    place.textContent = place.title = answer.uploaded ? "\u00a0" : folder;
    images.replaceChildren(...answer.shown.map((file) => make("img", {
      src: `/media/thumb?${new URLSearchParams({ folder, file, size: THUMB_PX })}`, alt: "", loading: "lazy", decoding: "async",
      onerror: (event) => event.target.remove(),
    })));
  };
  return { folder, node, show };
}
