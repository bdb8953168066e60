// One setting: its row, what is typed in it, and what of that the server takes.

class Field {
  constructor(info) {
    this.info = info;
    this.text = info.default; // what the server last said
    this.dirty = false; // typed and not yet taken
    this.sending = null; // the text that is on its way to the server
    this.taken = null; // the text as it was typed here and taken, until the field is left
    const id = `set-${info.key}`;
    this.error = make("p", { class: "field-error", id: `${id}-error`, role: "alert", hidden: true });
    this.origin = make("p", { class: "field-from", id: `${id}-from` });
    this.help = make("p", { class: "field-help", id: `${id}-help` }, ...inline(this.helpText()));
    this.resetButton = make(
      "button",
      {
        type: "button",
        class: "field-reset",
        hidden: true,
        "aria-label": `Reset ${info.label} (${info.key}) to the preset`,
        title: "Back to the preset",
        onclick: () => this.reset(),
      },
      "↺",
    );
    this.place = make("div", { class: "field-input" });
    this.control = null;
    this.useControl(this.newControl(false));
    const unit = info.unit ? make("span", { class: "field-unit" }, info.unit) : null;
    this.place.append(...[unit, this.resetButton].filter(Boolean));
    this.row = make(
      "div",
      { class: "field", id: info.key },
      make(
        "div",
        { class: "field-name" },
        make("label", { for: id }, info.label),
        make("code", {}, ...info.key.split(/(?<=[._])/).flatMap((part) => [part, make("wbr")])),
      ),
      this.place,
      make("div", { class: "field-about" }, this.help, this.origin, this.error),
    );
    this.words = plainWords([info.label, info.key, info.doc, info.unit, info.also].join(" "));
  }

  helpText() {
    const { doc, allowed } = this.info;
    return allowed ? `${doc} (${allowed})` : doc;
  }

  newControl(manyLines) {
    const { kind, words, key, fixed } = this.info;
    const id = `set-${key}`;
    const shared = {
      id,
      "aria-describedby": `${id}-help ${id}-from ${id}-error`,
      disabled: fixed,
      oninput: () => this.typed(),
      onchange: () => this.commit(),
      onblur: () => this.left(),
    };
    if (kind === "switch") return make("input", { type: "checkbox", ...shared });
    if (kind === "choice") {
      const options = words.map(({ text, label }) => make("option", { value: text, translate: "no" }, label));
      return make("select", shared, ...options);
    }
    if (kind === "list" || kind === "mapping" || manyLines) {
      return make("textarea", { rows: 3, spellcheck: "false", ...shared });
    }
    const text = { type: "text", autocomplete: "off", spellcheck: "false" };
    if (words.length) {
      this.place.append(
        make("datalist", { id: `${id}-words` }, ...words.map((word) => make("option", { value: word.text }))),
      );
      text.list = `${id}-words`;
    }
    if (kind === "number") text.class = "number";
    return make("input", { ...text, ...shared });
  }

  useControl(control) {
    if (this.control) this.control.replaceWith(control);
    else this.place.append(control);
    this.control = control;
  }

  read() {
    return this.info.kind === "switch" ? String(this.control.checked) : this.control.value;
  }

  /** Show a text, unless somebody is typing here. */
  write(text) {
    this.text = text;
    if (this.dirty || this.read() === text) return;
    // "0.0" on the way to "0.01" is not made "0" under the cursor.
    if (this.read() === this.taken && document.activeElement === this.control) return;
    if (this.info.kind === "switch") this.control.checked = text === "true";
    else {
      // A line of text would lose line breaks.
      if (/[\r\n]/.test(text) && this.control.type === "text") this.useControl(this.newControl(true));
      this.control.value = text;
      if (this.control.tagName === "TEXTAREA") {
        this.control.rows = Math.min(10, Math.max(2, text.split("\n").length));
      }
    }
  }

  typed() {
    this.dirty = true;
    remember();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.commit(), TYPING_MS);
  }

  left() {
    if (this.dirty) return;
    this.taken = null;
    this.write(this.text);
  }

  async commit() {
    clearTimeout(this.timer);
    const text = this.read();
    const known = text === this.text || text === this.taken;
    if (known && !this.refused && this.sending === null) {
      this.dirty = false;
      remember();
      return;
    }
    this.sending = text;
    const answer = await ask("change", { key: this.info.key, text });
    if (this.sending === text) this.sending = null;
    if (this.read() === text) {
      this.refuse(answer.away ? "" : answer.error || "");
      this.dirty = Boolean(answer.error);
      this.taken = answer.error ? null : text;
      remember();
    } // else typed on meanwhile: the next commit says what of it
    accept(answer);
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
    const answer = await ask("reset", { key: this.info.key });
    if (answer.error) return this.refuse(answer.error);
    this.taken = null;
    if (this.read() === text) {
      this.dirty = false;
      this.refuse("");
    } // else typed on meanwhile
    remember();
    accept(answer);
  }

  /** A value as the sentences name it. */
  named(text) {
    const word = this.info.words.find((known) => known.text === text);
    return word ? word.label : text || "none";
  }

  /** Show the value in force, whether it is changed, and where it comes from. */
  draw() {
    const { key, fixed } = this.info;
    const set = key in shown.given;
    const force = plan && plan.fields[key];
    if (fixed) this.write(shown.folder || "");
    else this.write(set ? shown.given[key] : force ? force.text : this.info.default);
    this.row.classList.toggle("changed", set);
    this.resetButton.hidden = !set && !this.refused;
    this.origin.replaceChildren(...this.originText(set, force));
  }

  originText(set, force) {
    if (this.info.fixed) return ["the runs folder of this interface"];
    if (!force) return [set ? "from you" : "default"];
    const parts = [`from ${force.from}`];
    if (force.from === "default") parts[0] = "default";
    if (set && force.from !== "you" && force.text !== shown.given[this.info.key]) {
      parts[0] = `in force: ${this.named(force.text)}, from ${force.from}`;
    }
    if (force.reason) parts.push(": ", ...inline(force.reason));
    if (set) parts.push(`; without it ${this.named(force.preset)} (${force.preset_from})`);
    return parts;
  }
}

// ---- what was typed and refused outlives a reload of this tab

function remember() {
  const typed = {};
  for (const [key, field] of fields) if (field.dirty) typed[key] = field.read();
  if (json.dirty) typed[""] = json.area.value;
  sessionStorage.setItem(`lora-train.typed.${shown.id}`, JSON.stringify(typed));
}

function recall() {
  const typed = JSON.parse(sessionStorage.getItem(`lora-train.typed.${shown.id}`) || "{}");
  for (const [key, text] of Object.entries(typed)) {
    const field = fields.get(key);
    if (key === "") {
      json.area.value = text;
      json.typed();
    } else if (field) {
      field.write(text);
      field.text = shown.given[key] ?? field.info.default;
      field.typed();
    }
  }
}
