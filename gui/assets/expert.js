// The page of all settings. `props.value` is the form (gui/expert_view.py: form); the draft's state and
// plan come from the server functions, each of which takes one object and answers one. All texts from
// there are set with textContent or value, never as markup.
//
// Every change is saved as it is typed: what is refused stays in its field with the reason, is kept in
// the session of this tab, and is never overwritten by what the server says.

const TYPING_MS = 400;
const TICK_MS = 1000;
const AWAY = "The interface does not answer. What you type stays here and is saved when it is back.";

const root = element.querySelector(".expert");
const fields = new Map(); // "section.name" -> Field
const sections = [];
let shown = { id: new URL(location.href).searchParams.get("draft") || "", stamp: "", given: {} };
let plan = null;

/** Make an element; children are texts and elements. */
function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function put(target, text) {
  if (target.textContent !== text) target.textContent = text;
  target.hidden = !text;
}

// ---- asking the server: one request after another, so that changes arrive in order

let line = Promise.resolve();

function ask(name, more = {}) {
  const answer = line.then(() => server[name]({ draft: shown.id, ...more }));
  line = answer.catch(() => null);
  return answer.then(
    (found) => (put(away, ""), found),
    () => (put(away, AWAY), { away: true, error: AWAY }),
  );
}

// ---- one setting

class Field {
  constructor(info) {
    this.info = info;
    this.text = info.default; // what the server last said
    this.dirty = false; // typed and not yet taken
    const id = `set-${info.key}`;
    this.error = make("p", { class: "field-error", id: `${id}-error`, role: "alert", hidden: true });
    this.origin = make("p", { class: "field-from", id: `${id}-from` });
    this.help = make("p", { class: "field-help", id: `${id}-help` }, this.helpText());
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
    this.words = [info.label, info.key, info.doc, info.unit].join(" ").toLowerCase();
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
    };
    if (kind === "switch") return make("input", { type: "checkbox", ...shared });
    if (kind === "choice") {
      const options = words.map(({ text, label }) => make("option", { value: text }, label));
      return make("select", shared, ...options);
    }
    if (kind === "list" || kind === "mapping" || manyLines) {
      return make("textarea", { rows: 3, spellcheck: "false", ...shared });
    }
    const text = { type: "text", autocomplete: "off", spellcheck: "false" };
    if (kind === "number" && words.length) {
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

  async commit() {
    clearTimeout(this.timer);
    const text = this.read();
    if (text === this.text && !this.refused) {
      this.dirty = false;
      remember();
      return;
    }
    const answer = await ask("change", { key: this.info.key, text });
    if (this.read() !== text) return; // typed on meanwhile: the next commit says what of it
    this.refuse(answer.away ? "" : answer.error || "");
    if (answer.error) return;
    this.dirty = false;
    remember();
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
    const answer = await ask("reset", { key: this.info.key });
    if (answer.error) return this.refuse(answer.error);
    this.dirty = false;
    this.refuse("");
    remember();
    this.control.focus();
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
    if (force.reason) parts.push(`: ${force.reason}`);
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

// ---- the draft and its plan

function accept(state) {
  if (!state || state.error) return;
  const before = shown.stamp;
  shown = state;
  put(note, state.started ? "This training is started: its settings stay as they are." : "");
  drawWhose();
  for (const field of fields.values()) field.draw();
  json.draw();
  drawPresets();
  filter();
  if (state.stamp !== before) replan();
}

function drawWhose() {
  const what = shown.dataset ? `of the training on ${shown.dataset} · ` : "of a new training · ";
  const back = make("a", { href: `/train?draft=${shown.id}` }, "back to the page Train");
  whose.replaceChildren(what, back);
}

let planning = false;
let again = false;

async function replan() {
  again = planning;
  if (planning) return;
  planning = true;
  summary.setAttribute("aria-busy", "true");
  do {
    again = false;
    try {
      // Not in line with the changes: it takes a second, and they do not wait for it.
      plan = await server.plan({ draft: shown.id });
      drawPlan();
    } catch {
      put(away, AWAY);
    }
  } while (again);
  planning = false;
  summary.removeAttribute("aria-busy");
}

function drawPlan() {
  if (!plan.fields) return put(planError, plan.error || "");
  put(planError, plan.error);
  said.replaceChildren(...plan.said.map((text) => make("p", {}, text)));
  drawMemory(plan.memory);
  for (const [key, field] of fields) {
    field.draw();
    field.row.classList.toggle("blamed", plan.blamed.includes(key));
    field.unused = plan.unused[key] || "";
  }
  sortUnused();
  filter();
}

function drawMemory(found) {
  memory.hidden = !found;
  if (!found) return;
  const percent = (share) => `${(100 * share).toFixed(2)}%`;
  const pieces = found.parts.map((part) => {
    const piece = make("i", { class: part.css, title: part.text });
    piece.style.width = percent(part.share); // no style attribute: a security policy may forbid them
    return piece;
  });
  if (found.limit !== null) {
    const limit = make("b", { class: "limit", title: "the limit" });
    limit.style.left = percent(found.limit);
    pieces.push(limit);
  }
  const legend = found.parts.map((part) => make("span", {}, make("i", { class: part.css }), part.text));
  memory.replaceChildren(
    make("p", { class: found.fits ? "fit" : "fit error" }, found.said),
    make("div", { class: "bar", role: "img", "aria-label": found.said }, ...pieces),
    make("p", { class: "legend" }, ...legend),
  );
}

/** Fold the settings that do not matter here; one that is changed or in use stays where it is. */
function sortUnused() {
  for (const section of sections) {
    for (const field of section.fields) {
      const folded = Boolean(field.unused) && !field.row.classList.contains("changed");
      const home = folded ? section.unused : section.body;
      put(field.why, field.unused);
      if (field.row.parentElement === home || field.row.contains(document.activeElement)) continue;
      const after = section.fields
        .slice(section.fields.indexOf(field) + 1)
        .find((other) => other.row.parentElement === home);
      home.insertBefore(field.row, after ? after.row : null);
    }
  }
}

// ---- finding

function filter() {
  const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const section of sections) {
    let visible = 0;
    let folded = 0;
    for (const field of section.fields) {
      const text = `${field.words} ${section.words}`;
      const changed = field.row.classList.contains("changed") || Boolean(field.refused);
      const fits = wanted.every((word) => text.includes(word)) && (!changedOnly.checked || changed);
      field.row.hidden = !fits;
      if (!fits) continue;
      visible += 1;
      if (field.row.parentElement === section.unused) folded += 1;
    }
    section.box.hidden = visible === 0;
    section.fold.hidden = folded === 0;
    put(section.summary, `Not used here: ${folded}`);
    if (wanted.length && folded && !section.fold.open) section.opened = section.fold.open = true;
    if (!wanted.length && section.opened) section.opened = section.fold.open = false;
    count += visible;
  }
  const all = fields.size;
  put(counted, count === all ? `${all} settings` : `${count} of ${all} settings`);
  const set = Object.keys(shown.given).length;
  put(changes, set ? `${set} changed` : "none changed");
  resetAll.hidden = set === 0;
}

// ---- the settings as a file

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
    const answer = await ask("replace", { text, name: "settings.json", stamp: this.basis });
    this.basis = answer.stamp || shown.stamp; // who types on has read that it was changed elsewhere
    if (this.area.value !== text) return;
    put(this.error, answer.away ? "" : answer.error || "");
    this.area.setAttribute("aria-invalid", String(Boolean(answer.error)));
    if (answer.error) return;
    this.dirty = document.activeElement === this.area; // not laid out anew under the cursor
    taken(answer);
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

/** Show a draft whose settings came all at once: what was typed in single fields is over. */
function taken(state) {
  for (const field of fields.values()) {
    field.dirty = false;
    field.refuse("");
  }
  accept(state);
}

let earlier = null; // the settings before the last change of all at once

async function replaceAll(name, more) {
  const before = shown.json;
  const answer = await ask(name, more);
  put(json.error, answer.error || "");
  put(json.note, answer.note || "");
  if (answer.error) return;
  json.dirty = false;
  earlier = before;
  undo.hidden = false;
  taken(answer);
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
    presetList.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  }
  loadRow.hidden = names.length === 0;
}

// ---- laying it out

const away = make("p", { class: "error notice", role: "alert", hidden: true });
const note = make("p", { class: "notice", role: "status", hidden: true });
const planError = make("p", { class: "error notice", hidden: true });
const said = make("div", { class: "expert-said" });
const memory = make("div", { class: "memory", hidden: true });
const whose = make("p", { class: "expert-whose" });
const summary = make("div", { class: "expert-summary" }, away, note, said, memory, planError);

const search = make("input", {
  type: "search",
  id: "expert-search",
  placeholder: "name or words of its help",
  autocomplete: "off",
  oninput: filter,
});
const changedOnly = make("input", { type: "checkbox", id: "expert-changed", onchange: filter });
const counted = make("span", { role: "status" });
const changes = make("span", { class: "quiet" });
const resetAll = make(
  "button",
  { type: "button", hidden: true, onclick: () => replaceAll("replace", { text: "", name: "" }) },
  "Reset all",
);
const undo = make(
  "button",
  {
    type: "button",
    hidden: true,
    onclick: async () => {
      await replaceAll("replace", { text: earlier, name: "settings.json" });
    },
  },
  "Undo",
);
const tools = make(
  "div",
  { class: "expert-tools" },
  make("label", { for: "expert-search" }, "Search ", make("kbd", {}, "/")),
  search,
  make("label", { class: "switch", for: "expert-changed" }, changedOnly, "changed only"),
  counted,
  changes,
  resetAll,
  undo,
);

function layOutSection({ name, label, doc, settings }) {
  const section = { words: `${name} ${label} ${doc}`.toLowerCase() };
  section.body = make("div", { class: "expert-body" });
  section.unused = make("div", { class: "expert-body" });
  section.summary = make("summary");
  section.fold = make("details", { class: "unused", hidden: true }, section.summary, section.unused);
  section.fields = settings.map((info) => {
    const field = new Field(info);
    field.why = make("p", { class: "field-why", hidden: true });
    field.help.after(field.why);
    fields.set(info.key, field);
    return field;
  });
  section.body.append(...section.fields.map((field) => field.row));
  section.box = make(
    "section",
    { "aria-labelledby": `section-${name}` },
    make("h2", { id: `section-${name}` }, label, make("small", {}, doc)),
    section.body,
    section.fold,
  );
  sections.push(section);
  return section.box;
}

json.area = make("textarea", {
  id: "expert-json",
  spellcheck: "false",
  rows: 6,
  "aria-describedby": "expert-json-help expert-json-error",
  oninput: () => json.typed(),
  onkeydown: (event) => event.key === "Escape" && json.giveUp(),
  onblur: () => json.left(),
});
json.error = make("p", { class: "field-error", id: "expert-json-error", role: "alert", hidden: true });
json.note = make("p", { class: "field-help", role: "status", hidden: true });
const chooser = make("input", {
  type: "file",
  id: "expert-file",
  accept: ".json,.toml,application/json",
  class: "unseen",
  onchange: upload,
});
const command = make("textarea", { readonly: true, hidden: true, "aria-label": "Command line" });
const commandError = make("p", { class: "field-error", role: "alert", hidden: true });
const copied = make("span", { role: "status", hidden: true });
const presetList = make("select", { "aria-label": "Saved preset" });
const loadRow = make(
  "div",
  { class: "expert-row", hidden: true },
  presetList,
  make("button", { type: "button", onclick: () => replaceAll("load", { name: presetList.value }) }, "Load"),
);
const presetName = make("input", { type: "text", "aria-label": "Name of the preset", placeholder: "name" });
const presetError = make("p", { class: "field-error", role: "alert", hidden: true });
const presetNote = make("p", { class: "field-help", role: "status", hidden: true });
const replaceButton = make(
  "button",
  { type: "button", hidden: true, onclick: () => keepPreset(true) },
  "Replace it",
);

function layOut() {
  const boxes = props.value.sections.map(layOutSection);
  const jumps = props.value.sections.map(({ name, label }) =>
    make("a", { href: `#section-${name}` }, label),
  );
  const side = make(
    "aside",
    { class: "expert-side", "aria-label": "The changed settings as a file" },
    make("h2", {}, make("label", { for: "expert-json" }, "Changed settings as JSON")),
    make("p", { class: "field-help", id: "expert-json-help" }, "What you edit here changes the fields; Escape gives up what is refused."),
    json.area,
    json.error,
    json.note,
    make(
      "div",
      { class: "expert-row" },
      make("button", { type: "button", onclick: download }, "Download"),
      make("label", { class: "button", for: "expert-file" }, chooser, "Upload"),
      make("button", { type: "button", onclick: copyCommand }, "Copy command line"),
      copied,
    ),
    command,
    commandError,
    make("h2", {}, "Your presets"),
    loadRow,
    make(
      "div",
      { class: "expert-row" },
      presetName,
      make("button", { type: "button", onclick: () => keepPreset(false) }, "Save as preset"),
      replaceButton,
    ),
    presetError,
    presetNote,
  );
  root.replaceChildren(
    make("h1", {}, "Settings"),
    whose,
    summary,
    tools,
    make("nav", { class: "expert-jumps", "aria-label": "Sections" }, ...jumps),
    make("div", { class: "expert-grid" }, make("div", { class: "expert-all" }, ...boxes), side),
  );
}

// ---- living with the file

async function open() {
  const state = await ask("open");
  if (state.error) return put(note, state.error);
  shown.stamp = "";
  accept(state);
  const url = new URL(location.href);
  if (url.searchParams.get("draft") !== state.id) {
    url.searchParams.set("draft", state.id);
    history.replaceState(null, "", url);
  }
  recall();
  if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

async function tick() {
  if (!root.isConnected) return;
  if (!document.hidden && shown.stamp) {
    const wasAway = !away.hidden;
    const found = await ask("look", { stamp: shown.stamp });
    if (found && !found.error) accept(found);
    if (wasAway && away.hidden) {
      for (const field of fields.values()) if (field.dirty) field.commit();
      if (!plan) replan();
    }
  }
  setTimeout(tick, TICK_MS);
}

document.addEventListener("keydown", (event) => {
  if (!root.isConnected || event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input:not([type=checkbox]), textarea, select, [contenteditable]")) return;
  event.preventDefault();
  search.focus();
  search.select();
});

layOut();
filter();
open().then(tick);
