// The changed settings as a file: edited, downloaded, uploaded, kept as presets, as a command line.

const json = {
  dirty: false,
  basis: "", // the stamp of what the text was made from
  draw() {
    if (this.dirty) return;
    this.basis = shown.stamp;
    if (this.area.value === shown.json) return;
    this.area.value = shown.json;
    this.area.rows = Math.min(24, Math.max(6, shown.json.split("\n").length));
  },
  typed() {
    this.dirty = true;
    remember();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.commit(), 2 * TYPING_MS);
  },
  async commit() {
    clearTimeout(this.timer);
    if (!this.dirty) return;
    const text = this.area.value;
    const before = texts();
    const answer = await ask("replace", { text, name: "settings.json", stamp: this.basis });
    this.basis = answer.stamp || shown.stamp; // who types on has read that it was changed elsewhere
    if (this.area.value !== text) return;
    put(this.error, answer.away ? "" : answer.error || "");
    this.area.setAttribute("aria-invalid", String(Boolean(answer.error)));
    if (answer.error) return;
    this.dirty = document.activeElement === this.area; // not laid out anew under the cursor
    taken(answer, before);
    remember();
  },
  /** Give up what is typed and show what is in force. */
  giveUp() {
    clearTimeout(this.timer);
    this.dirty = false;
    put(this.error, "");
    this.area.setAttribute("aria-invalid", "false");
    this.draw();
    remember();
  },
  left() {
    this.commit().then(() => {
      if (this.error.hidden) this.dirty = false;
      this.draw();
      remember();
    });
  },
};

/** Return the text in each field. */
function texts() { return new Map([...fields.values()].map((field) => [field, field.read()])); }

/** Show a draft whose settings came all at once: what was typed in single fields before they were asked for is over. */
function taken(state, before) {
  for (const [field, text] of before) {
    if (field.read() !== text) continue; // typed since then
    field.dirty = false;
    field.refuse("");
  }
  accept(state);
}

let earlier = null; // the settings before the last change of all at once

async function replaceAll(name, more) {
  const before = shown.json;
  const typed = texts();
  const jsonText = json.area.value;
  const answer = await ask(name, more);
  put(json.error, answer.error || "");
  const isUpload = Boolean(more.name && more.name !== "settings.json" && name === "replace");
  put(json.note, isUpload ? "" : answer.note || "");
  put(note, isUpload ? answer.note || "" : ""); // on top: what a file of another trainer comes to is worth reading
  if (answer.error) return;
  if (json.area.value === jsonText) json.dirty = false;
  earlier = before;
  undo.hidden = false;
  taken(answer, typed);
}

function download() {
  const url = URL.createObjectURL(new Blob([shown.json], { type: "application/json" }));
  const name = (shown.given["output.name"] || "lora-train").replace(/[^\w.-]+/g, "-");
  make("a", { href: url, download: `${name}-settings.json` }).click();
  URL.revokeObjectURL(url);
}

async function upload() {
  const [file] = chooser.files;
  chooser.value = ""; // the same file again is a change too
  if (file) await replaceAll("replace", { text: await file.text(), name: file.name });
}

async function copyCommand() {
  const answer = await ask("command");
  put(commandError, answer.error || "");
  command.hidden = Boolean(answer.error);
  if (answer.error) return;
  command.value = answer.command;
  command.rows = Math.min(12, Math.ceil(answer.command.length / 40));
  command.select();
  try {
    await navigator.clipboard.writeText(answer.command);
    put(copied, "Copied.");
  } catch {
    put(copied, "Copy it from here."); // not allowed, or no secure connection
  }
}

async function keepPreset(over) {
  const answer = await ask("keep", { name: presetName.value, over });
  put(presetError, answer.error || "");
  put(presetNote, answer.note || "");
  replaceButton.hidden = over || !/^there is a preset/.test(answer.error || "");
  if (!answer.error) accept(answer);
}

function drawPresets() {
  const names = shown.presets || [];
  const now = [...presetList.options].map((option) => option.value);
  if (now.join("\n") !== names.join("\n")) {
    presetList.replaceChildren(...names.map((name) => make("option", { value: name, translate: "no" }, name)));
  }
  loadRow.hidden = names.length === 0;
}
