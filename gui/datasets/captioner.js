// Captions written by a model, in a process of its own: it goes on when this page is closed. What it
// writes shows on the cards as it comes.
import { say } from "/ui/shared/words.js";
import { button, choice, field, make, opening } from "/ui/shared/elements.js";

const LOOK_EVERY_MS = 1500;

export class Captioner {
  constructor(editor) {
    this.editor = editor;
    this.timer = 0;
    editor.leaving.addEventListener("abort", () => clearTimeout(this.timer));
    this.first = make("div", { class: "cap-models" });
    this.others = make("div", { class: "cap-models" });
    this.more = make("details", {}, make("summary", {}, say("More models")), this.others);
    this.prompt = field(say("Instruction (optional)"), { maxlength: 2000, placeholder: say("Describe the image in two sentences.") });
    this.prompt.node.classList.add("cap-prompt");
    this.names = button(say("Take words of the names instead"), () => this.takeNames(), { hidden: true });
    this.mode = choice(say("Which"), [
      ["missing", say("images without a caption")], ["chosen", say("the selected images, if they have none")],
      ["replace", say("the selected images, replacing captions")],
    ], () => this.aim());
    this.start = button(say("Start"), () => this.begin(), { class: "primary" });
    this.stop = button(say("Stop"), () => this.ask("caption_stop"));
    this.back = button(say("Take the last ones back"), () => this.takeBack());
    this.said = make("p", { class: "ds-quiet", role: "status" });
    this.bar = make("progress", { max: 1, value: 0, "aria-label": say("Captions written") });
    this.problems = make("ul", { class: "ds-quiet" });
    this.node = make("div", { class: "ds-panel captioner" },
      make("fieldset", { onchange: () => this.describe() }, make("legend", { class: "unseen" }, say("Model")), this.first, this.more),
      make("div", { class: "ds-line" }, this.mode.node, this.prompt.node, this.start, this.stop, this.names, this.back),
      this.bar, this.said, this.problems);
    Object.assign(this, opening(say("Write captions \u2026"), this.node));
  }

  /** The model that is chosen. */
  get model() { return this.node.querySelector("input[type=radio]:checked")?.value ?? ""; }

  /** Open it where somebody came to have captions written. */
  showFirst() {
    this.open(true);
    this.node.scrollIntoView({ block: "nearest" });
    this.start.focus({ preventScroll: true });
  }

  /** Ask how far it is, and again while it runs. */
  async look() {
    clearTimeout(this.timer);
    this.show(await this.editor.ask("caption_state", {}));
  }

  show(answer) {
    clearTimeout(this.timer);
    if (this.editor.leaving.aborted) return;
    this.said.classList.remove("notice", "warning");
    if (answer.error) {
      this.said.textContent = answer.error;
      this.names.hidden = this.running; // no model, or no network: names of files and folders have words too
      if (this.running) this.timer = setTimeout(() => this.look(), LOOK_EVERY_MS); // it goes on, whoever answers
      return;
    }
    if (answer.models?.length && !this.known) {
      this.known = new Map(answer.models.map((model) => [model.name, model]));
      for (const model of answer.models) {
        (model.offered_for ? this.first : this.others).append(modelCard(model, model.name === answer.suggested));
      }
      this.describe();
    }
    const running = answer.state === "running";
    const fresh = this.done !== undefined && (this.done !== answer.done || this.running !== running);
    const begins = running && !this.running;
    this.done = answer.done;
    this.running = running;
    this.start.disabled = running;
    this.start.textContent = say("Start");
    this.stop.hidden = !running;
    this.back.hidden = running || !(answer.written || answer.done); // where nothing was written, nothing is taken back
    this.bar.hidden = !running;
    this.names.hidden = answer.state !== "failed";
    // Without a value it moves by itself: while a model is loaded nobody knows how far it is.
    const share = answer.count ? answer.done / answer.count : answer.downloaded;
    if (typeof share === "number") this.bar.value = share; else this.bar.removeAttribute("value");
    if (answer.state !== "none") this.said.textContent = answer.said;
    this.said.classList.toggle("ds-error", answer.state === "failed");
    this.problems.replaceChildren(...answer.problems.map((text) => make("li", {}, text)));
    if (begins) this.open(true); // who closes it has it closed
    if (running) {
      this.timer = setTimeout(() => this.look(), LOOK_EVERY_MS);
    }
    if (fresh) this.editor.reload();
    if (fresh && !running && answer.state !== "none") this.editor.captioned?.();
  }

  describe() {
    this.prompt.node.hidden = Boolean(this.known.get(this.model)?.tags); // a tagger takes none
  }

  aim() { this.said.textContent = ""; }

  async ask(name, values = {}) { this.show(await this.editor.ask(name, values)); }

  async begin() {
    await this.editor.flush();
    const mode = this.mode.input.value;
    const files = mode === "missing" ? [] : [...this.editor.chosen];
    if (mode !== "missing" && !files.length) { this.said.textContent = say("Select images first."); return; }
    this.said.replaceChildren();
    this.said.classList.remove("notice", "warning", "ds-error");
    this.done = -1;
    const answer = await this.editor.ask("caption", {
      files, model: this.model, mode: mode === "replace" ? "replace" : "missing",
      prompt: this.prompt.node.hidden ? "" : this.prompt.input.value,
    });
    if (answer.instead) this.showInstead(answer); else this.show(answer);
  }

  /** No model can come: captions were taken from the images' own descriptions, and words of names are offered. */
  showInstead(answer) {
    this.names.hidden = !answer.named;
    this.said.classList.remove("ds-error");
    this.said.classList.add("notice", "warning");
    this.said.replaceChildren(`${answer.instead[0]}. ${answer.instead.slice(1).join(" ")}`, ...(answer.written ? [" ", button(say("Undo"), async () => {
      this.said.replaceChildren();
      const now = await this.editor.ask("undo", { step: answer.undo });
      this.editor.changed(now, say("Undone: {}", now.step));
    })] : []));
    this.editor.changed(answer, say("Done: {}", answer.step));
    this.start.textContent = say("Try again"); // pressed once more, the same would be said, as if nothing happened
    this.node.scrollIntoView({ block: "center" }); // not below the bar that stays in sight
  }

  /** Write captions from the names of files and folders, which needs no model and no network. */
  async takeNames() {
    await this.editor.flush();
    const answer = await this.editor.ask("caption_names", {});
    if (answer.error) { this.said.textContent = answer.error; return; }
    this.names.hidden = true;
    this.said.textContent = say("Captions were taken from the names of files and folders.");
    this.said.classList.remove("ds-error");
    this.editor.changed(answer, say("Done: {}", answer.step));
  }

  async takeBack() {
    this.back.disabled = true;
    const answer = await this.editor.ask("caption_undo", {});
    this.back.disabled = false;
    if (answer.error) this.said.textContent = answer.error;
    else this.editor.changed(answer, say("Done: {}", answer.step));
  }
}

/** Return a model as a radio button with what it writes, what it is good for and what it takes. */
function modelCard(model, checked) {
  const named = make("span", { translate: "no" }, `${model.title} \u00b7 ${model.licence}`);
  const good = model.good_for[0].toUpperCase() + model.good_for.slice(1);
  return make("label", { class: "cap-model" },
    make("input", { type: "radio", name: "captioner", value: model.name, checked, autocomplete: "off" }),
    make("span", {}, make("b", { translate: model.offered_for ? null : "no" }, model.offered_for || model.title),
      make("small", {}, `${good}.`), make("small", { class: "quiet" }, model.takes, ". ", named)));
}
