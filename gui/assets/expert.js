// The elements of the page, and living with a file that other tabs change too.

const away = make("p", { class: "error notice", role: "alert", hidden: true });
const note = make("p", { class: "notice lines", role: "status", hidden: true });
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

// Where the search finds nothing.
const nothing = make(
  "div",
  { class: "notice", role: "status", hidden: true },
  make("p", {}, "No setting has all of these words, neither in its name nor in its help."),
  make("p", {}, "Try one word alone, a part of it, or the name that another trainer has for it, such as network_dim or blocks_to_swap."),
);

function layOutSection({ name, label, doc, settings }) {
  const section = { words: plainWords(`${name} ${label} ${doc}`) };
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
  accept: ".json,.toml,.yaml,.yml,application/json", // of other trainers too
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
      make("label", { class: "ui-button", for: "expert-file" }, chooser, "Upload"),
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
    make("h1", {}, "All settings"),
    whose,
    summary,
    tools,
    make("nav", { class: "expert-jumps", "aria-label": "Sections" }, ...jumps),
    make("div", { class: "expert-grid" }, make("div", { class: "expert-all" }, ...boxes, nothing), side),
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

let looking = 0;

function lookLater() {
  clearTimeout(looking);
  looking = setTimeout(look, TICK_MS);
}

/** See whether the draft was changed elsewhere: asked when a tab says so, and when somebody comes back. */
async function look() {
  clearTimeout(looking);
  if (!root.isConnected || document.hidden) return;
  if (!shown.stamp) return open(); // the server was away when the page came
  const found = await ask("look", { stamp: shown.stamp });
  if (found?.away) return;
  if (found?.error) put(note, found.error);
  accept(found);
  if (wasLost) {
    wasLost = false;
    for (const field of fields.values()) if (field.dirty) field.commit();
    if (json.dirty) json.commit();
    replan();
  }
}

document.addEventListener("visibilitychange", look);
window.addEventListener("focus", look);
tabs.onmessage = ({ data }) => { if (data === shown.id) look(); };
document.addEventListener("keydown", (event) => {
  if (!root.isConnected || event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input:not([type=checkbox]), textarea, select, [contenteditable]")) return;
  event.preventDefault();
  search.focus();
  search.select();
});

layOut();
filter();
open();
