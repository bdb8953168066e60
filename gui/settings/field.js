// One setting: its row, what is typed in it, and what of that the server takes.
import { make } from "/ui/dialog.js";
import { icon } from "/ui/shared/elements.js";
import { TYPING_MS, inline, put } from "/ui/settings/state.js";
import { say } from "/ui/shared/words.js";

export class Field {
  constructor(page, row) {
    this.page = page;
    this.row = row;
    this.key = row.id;
    this.kind = row.dataset.kind;
    this.isFixed = "fixed" in row.dataset;
    this.default = row.dataset.default;
    this.text = this.default; // what the server last said
    this.dirty = false; // typed and not yet taken
    this.sending = null; // the text that is on its way to the server
    this.taken = null; // the text as it was typed here and taken, until the field is left
    this.refused = "";
    this.unused = ""; // why it does not matter here
    this.label = row.querySelector(".field-name label").textContent;
    this.error = row.querySelector(".field-error");
    this.origin = row.querySelector(".field-from");
    this.aliases = (row.dataset.others ?? "").split(" ").filter(Boolean);
    this.why = row.querySelector(".field-why");
    this.said = make("span");
    this.resetButton = make("button", { type: "button", className: "field-reset", hidden: true }, icon("rotate-ccw"), make("span"));
    this.origin.append(this.said, this.resetButton);
    this.alias = make("p", { className: "field-also", hidden: true });
    row.querySelector(".field-help").after(this.alias);
    row.querySelector(".field-name").append(this.more());
    this.resetButton.addEventListener("click", () => this.reset());
    const words = [".field-name label", ".field-help", ".field-unit"].map((each) => row.querySelector(each));
    this.words = plainWords([this.key, row.dataset.also, row.dataset.others, row.dataset.detail, row.dataset.source, ...words.map((node) => node?.textContent ?? "")].join(" "));
    this.control = this.listen(row.querySelector(".field-input > :is(input, select, textarea)"));
    this.picks = row.querySelector(".picks");
    this.picks?.addEventListener("change", () => this.picked());
    this.write(this.default);
    page.fields.set(this.key, this);
    page.places.set(this.key, this);
  }

  listen(control) {
    control.addEventListener("input", () => this.typed());
    control.addEventListener("change", () => this.commit());
    control.addEventListener("blur", () => this.left());
    return control;
  }

  /** A text with a line break in it is typed in several lines from now on. */
  useManyLines() {
    const { id, disabled } = this.control;
    const area = make("textarea", { id, disabled, rows: 3, spellcheck: false });
    area.setAttribute("aria-describedby", this.control.getAttribute("aria-describedby"));
    this.control.replaceWith(area);
    this.control = this.listen(area);
  }

  read() {
    return this.kind === "switch" ? String(this.control.checked) : this.control.value;
  }

  /** Show a text, unless somebody is typing here. */
  write(text) {
    this.text = text;
    if (this.dirty || this.read() === text) return;
    // "0.0" on the way to "0.01" is not made "0" under the cursor.
    if (this.read() === this.taken && document.activeElement === this.control) return;
    if (this.kind === "switch") {
      this.control.checked = text === "true";
      return;
    }
    if (/[\r\n]/.test(text) && this.control.type === "text") this.useManyLines();
    this.control.value = text;
    if (this.control.tagName === "TEXTAREA") {
      this.control.rows = Math.min(10, Math.max(2, text.split("\n").length));
    }
  }

  /** Show what was typed before a reload, to be tried again. */
  recall(text) {
    this.write(text);
    this.text = this.page.shown.given[this.key] ?? this.default;
    this.typed();
  }

  typed() {
    this.dirty = true;
    this.page.remember();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.commit(), TYPING_MS);
  }

  left() {
    if (this.dirty) return;
    this.taken = null;
    this.write(this.text);
  }

  /** Take a word that was chosen, as if it had been typed. */
  picked() {
    this.control.value = this.picks.value;
    this.picks.value = "";
    this.typed();
    this.commit();
  }

  async commit() {
    clearTimeout(this.timer);
    const text = this.read();
    const known = text === this.text || text === this.taken;
    if (known && !this.refused && this.sending === null) {
      this.dirty = false;
      this.page.remember();
      return;
    }
    this.sending = text;
    const answer = await this.page.askInTurn("change", { key: this.key, text });
    if (this.sending === text) this.sending = null;
    if (this.read() === text) {
      this.refuse(answer.isAway ? "" : answer.error ?? "");
      this.dirty = Boolean(answer.error);
      this.taken = answer.error ? null : text;
      this.page.remember();
    } // else typed on meanwhile: the next commit says what of it
    this.page.accept(answer);
  }

  refuse(why) {
    this.refused = why;
    put(this.error, why);
    if (why) this.control.setAttribute("aria-invalid", "true");
    else this.control.removeAttribute("aria-invalid");
    this.row.classList.toggle("refused", Boolean(why));
  }

  async reset() {
    clearTimeout(this.timer);
    const text = this.read();
    this.control.focus(); // the button goes; by the time of the answer somebody may type elsewhere
    const answer = await this.page.askInTurn("reset", { key: this.key });
    if (answer.error) {
      this.refuse(answer.error);
      return;
    }
    this.taken = null;
    if (this.read() === text) {
      this.dirty = false;
      this.refuse("");
    } // else typed on meanwhile
    this.page.remember();
    this.page.accept(answer);
  }

  /** Whether it is set over the preset. */
  get isChanged() { return this.key in this.page.shown.given; }

  /** A value as the sentences name it. */
  named(text) {
    const options = this.control.tagName === "SELECT" ? [...this.control.options] : [];
    return options.find((option) => option.value === text)?.label ?? (text || say("none"));
  }

  /** Show the value in force, and where it comes from if that is not the usual place; how a change is taken back. */
  draw() {
    const given = this.page.shown.given[this.key];
    const force = this.page.plan?.fields[this.key];
    if (this.isFixed) this.write(this.page.shown.folder);
    else this.write(given ?? force?.text ?? this.default);
    this.row.classList.toggle("changed", this.isChanged);
    this.drawReset(force);
    const origin = this.originText(given, force);
    this.said.replaceChildren(...origin);
    this.origin.hidden = !origin.length && this.resetButton.hidden;
  }

  /** Show the button that takes back what was changed or typed, with the value that there is then. */
  drawReset(force) {
    const back = this.named(force?.preset ?? this.default);
    const text = back.length <= 24 && !back.includes("\n") ? say("Back to {}", back) : say("Back to the usual");
    this.resetButton.hidden = !this.isChanged && !this.refused;
    this.resetButton.lastElementChild.textContent = text;
    this.resetButton.title = force?.preset_from ?? "";
    this.resetButton.setAttribute("aria-label", `${text}: ${this.label}`);
  }

  originText(given, force) {
    if (this.isFixed) return [say("the runs folder of this interface")];
    if (this.isChanged) {
      const isOther = force && force.layer !== "command line" && force.text !== given;
      if (!isOther) return [make("b", { textContent: say("Changed by you") })];
      const why = force.reason ? [": ", ...inline(force.reason)] : [];
      return [say("In force: {}, {text}", this.named(force.text), force.from), ...why];
    }
    // What is usual says nothing; what the plan chose says why.
    if (!force || force.layer !== "planner" || !force.reason) return [];
    return [make("b", { textContent: `${force.from}:` }), " ", ...inline(force.reason)];
  }

  /** Return what says more of the setting, filled when somebody looks into it. */
  more() {
    const name = say("More about {}", this.label);
    const panel = make("div", { className: "panel" });
    const menu = make("details", { className: "menu" }, make("summary", { ariaLabel: name, title: name }, icon("info")), panel);
    menu.dataset.key = this.key;
    menu.addEventListener("toggle", () => { if (menu.open) this.tellMore(panel); });
    return menu;
  }

  /** Say what only some want to know: values, other names, formulas and papers. */
  tellMore(panel) {
    const { allowed, others, detail, source } = this.row.dataset;
    const line = (name, ...what) => make("p", {}, ...(name ? [make("b", { textContent: name }), " "] : []), ...what);
    const asName = (text) => make("span", { translate: false, textContent: text });
    const papers = (source ?? "").split("; ").filter(Boolean).map((text) =>
      make("a", { href: `https://arxiv.org/abs/${text.match(/arXiv (\S+)/)[1]}`, target: "_blank", rel: "noopener", translate: false, textContent: text }));
    const force = this.page.plan?.fields[this.key];
    const isUsual = force && !this.isChanged && this.said.textContent === "";
    panel.replaceChildren(...[
      detail && line("", ...inline(`${detail}.`)),
      allowed && line(say("Possible:"), allowed),
      others && line(say("In other trainers:"), asName(this.aliases.join(", "))),
      ...papers.map((paper) => line(say("From:"), paper)),
      line(say("On the command line:"), make("code", { textContent: this.key })),
      isUsual && line(say("Its value:"), force.from),
    ].filter(Boolean));
  }

  /** Say by which other name of it a search found it. */
  foundBy(wanted) {
    const own = plainWords(`${this.label} ${this.key}`);
    const other = wanted.some((word) => !own.includes(word)) && this.aliases.find((name) => wanted.every((word) => plainWords(name).includes(word)));
    put(this.alias, other && /[._]/.test(other) ? say("in other trainers: {}", other) : "");
  }
}

/** Return words as they are searched: learning_rate, --learning-rate and Learning rate are the same. */
export function plainWords(text) { return ` ${text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, " ").trim()}`; }
