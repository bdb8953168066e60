// The changed settings as a file: edited, downloaded, uploaded, kept as presets, as a command line.
import { make } from "/ui/dialog.js";
import { TYPING_MS, accept, askInTurn, at, fields, page, places, put, remember } from "/ui/settings/state.js";
import { say } from "/ui/shared/words.js";

const area = at("json");
const error = at("json-error");

export const json = {
  dirty: false,
  basis: "", // the stamp of what the text was made from
  read() { return area.value; },
  draw() {
    if (this.dirty) return;
    this.basis = page.shown.stamp;
    if (area.value === page.shown.json) return;
    area.value = page.shown.json;
    area.rows = Math.min(24, Math.max(6, page.shown.json.split("\n").length));
  },
  /** Show what was typed before a reload, to be tried again. */
  recall(text) {
    area.value = text;
    this.typed();
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
    const text = area.value;
    const before = texts();
    const answer = await askInTurn("replace", { text, stamp: this.basis });
    this.basis = answer.stamp ?? page.shown.stamp; // who types on has read that it was changed elsewhere
    if (area.value !== text) return;
    put(error, answer.isAway ? "" : answer.error ?? "");
    area.setAttribute("aria-invalid", String(Boolean(answer.error)));
    if (answer.error) return;
    this.dirty = document.activeElement === area; // not laid out anew under the cursor
    taken(answer, before);
    remember();
  },
  /** Give up what is typed and show what is in force. */
  giveUp() {
    clearTimeout(this.timer);
    this.dirty = false;
    put(error, "");
    area.setAttribute("aria-invalid", "false");
    this.draw();
    remember();
  },
  async left() {
    await this.commit();
    if (error.hidden) this.dirty = false;
    this.draw();
    remember();
  },
};

places.set("", json);
area.addEventListener("input", () => json.typed());
area.addEventListener("blur", () => json.left());
area.addEventListener("keydown", ({ key }) => { if (key === "Escape") json.giveUp(); });

/** Return the text in each field. */
function texts() { return new Map([...fields.values()].map((field) => [field, field.read()])); }

/** Show a draft whose settings came all at once: what was typed in single fields before they were asked for is over. */
function taken(answer, before) {
  for (const [field, text] of before) {
    if (field.read() !== text) continue; // typed since then
    field.dirty = false;
    field.refuse("");
  }
  accept(answer);
}

let earlier = null; // the settings before the last change of all at once

/** Replace all settings by those of a file, or of a preset; return the answer. */
async function replaceAll(name, more) {
  const before = page.shown.json;
  const typed = texts();
  const jsonText = area.value;
  const answer = await askInTurn(name, more);
  put(error, answer.error ?? "");
  put(at("json-note"), "");
  if (answer.error) return answer;
  if (area.value === jsonText) json.dirty = false;
  earlier = before;
  at("undo").hidden = false;
  taken(answer, typed);
  return answer;
}

at("reset-all").addEventListener("click", () => replaceAll("replace", { text: "" }));

at("undo").addEventListener("click", async () => {
  const { note } = await replaceAll("replace", { text: earlier });
  put(at("json-note"), note);
});

at("download").addEventListener("click", () => {
  const url = URL.createObjectURL(new Blob([page.shown.json], { type: "application/json" }));
  const name = (page.shown.given["output.name"] || "lora-train").replace(/[^\w.-]+/g, "-");
  make("a", { href: url, download: `${name}-settings.json` }).click();
  URL.revokeObjectURL(url);
});

at("file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  if (!file) return;
  const text = await file.text();
  target.value = ""; // the same file again is a change too
  const { note } = await replaceAll("replace", { text, name: file.name });
  put(at("note"), note); // on top: what a file of another trainer comes to is worth reading
});

// ---- the command line

at("copy-command").addEventListener("click", async () => {
  const answer = await askInTurn("command");
  const place = at("command");
  put(at("command-error"), answer.error ?? "");
  place.hidden = Boolean(answer.error);
  if (answer.error) return;
  place.value = answer.command;
  place.rows = Math.min(12, Math.ceil(answer.command.length / 40));
  place.select();
  try {
    await navigator.clipboard.writeText(answer.command);
    put(at("copied"), say("Copied."));
  } catch {
    put(at("copied"), say("Copy it from here.")); // not allowed, or no secure connection
  }
});

// ---- presets

async function keep(over) {
  const answer = await askInTurn("keep", { name: at("preset-name").value, over });
  put(at("preset-error"), answer.error ?? "");
  put(at("preset-note"), answer.note ?? "");
  at("replace").hidden = !answer.taken;
  accept(answer);
}

at("keep").addEventListener("click", () => keep(false));
at("replace").addEventListener("click", () => keep(true));
at("load").addEventListener("click", () => replaceAll("load", { name: at("preset").value }));

export function drawPresets() {
  const list = at("preset");
  const names = page.shown.presets;
  const now = [...list.options].map((option) => option.value);
  if (now.join("\n") !== names.join("\n")) {
    list.replaceChildren(...names.map((name) => make("option", { value: name, textContent: name, translate: false })));
  }
  at("saved").hidden = names.length === 0;
}
