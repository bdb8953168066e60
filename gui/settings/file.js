// The changed settings as a file: edited, downloaded, uploaded, kept as presets, as a command line.
import { make } from "/ui/dialog.js";
import { TYPING_MS, put } from "/ui/settings/state.js";
import { say } from "/ui/shared/words.js";

/** Make the file work; return {json, drawPresets}. */
export function fileOf(page) {
  const { fields, places } = page;
  const area = page.at("json");
  const fold = page.at("as-file");
  const error = page.at("json-error");

  const json = {
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
      fold.open = true;
      area.value = text;
      this.typed();
    },
    typed() {
      this.dirty = true;
      page.remember();
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.commit(), 2 * TYPING_MS);
    },
    async commit() {
      clearTimeout(this.timer);
      if (!this.dirty) return;
      const text = area.value;
      const before = texts();
      const answer = await page.askInTurn("replace", { text, stamp: this.basis });
      this.basis = answer.stamp ?? page.shown.stamp; // who types on has read that it was changed elsewhere
      if (area.value !== text) return;
      put(error, answer.isAway ? "" : answer.error ?? "");
      area.setAttribute("aria-invalid", String(Boolean(answer.error)));
      if (answer.error) return;
      this.dirty = document.activeElement === area; // not laid out anew under the cursor
      taken(answer, before);
      page.remember();
    },
    /** Give up what is typed and show what is in force. */
    giveUp() {
      clearTimeout(this.timer);
      this.dirty = false;
      put(error, "");
      area.setAttribute("aria-invalid", "false");
      this.draw();
      page.remember();
    },
    async left() {
      await this.commit();
      if (error.hidden) this.dirty = false;
      this.draw();
      page.remember();
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
    page.accept(answer);
  }

  let earlier = null; // the settings before the last change of all at once

  /** Replace all settings by those of a file, or of a preset; return the answer. */
  async function replaceAll(name, more) {
    const before = page.shown.json;
    const typed = texts();
    const jsonText = area.value;
    const answer = await page.askInTurn(name, more);
    put(error, answer.error ?? "");
    put(page.at("json-note"), "");
    if (answer.error) return answer;
    if (area.value === jsonText) json.dirty = false;
    earlier = before;
    page.at("undo").hidden = false;
    taken(answer, typed);
    return answer;
  }

  page.at("reset-all").addEventListener("click", () => replaceAll("replace", { text: "" }));

  page.at("undo").addEventListener("click", async () => {
    const { note } = await replaceAll("replace", { text: earlier });
    put(page.at("json-note"), note);
  });

  page.at("download").addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([page.shown.json], { type: "application/json" }));
    const name = (page.shown.given["output.name"] || "lora-train").replace(/[^\w.-]+/g, "-");
    make("a", { href: url, download: `${name}-settings.json` }).click();
    URL.revokeObjectURL(url);
  });

  page.at("file").addEventListener("change", async ({ target }) => {
    const [file] = target.files;
    if (!file) return;
    const text = await file.text();
    target.value = ""; // the same file again is a change too
    const { note } = await replaceAll("replace", { text, name: file.name });
    put(page.at("note"), note); // on top: what a file of another trainer comes to is worth reading
  });

  // ---- the command line

  page.at("copy-command").addEventListener("click", async () => {
    const answer = await page.askInTurn("command");
    const place = page.at("command");
    put(page.at("command-error"), answer.error ?? "");
    place.hidden = Boolean(answer.error);
    if (answer.error) return;
    place.value = answer.command;
    place.rows = Math.min(12, Math.ceil(answer.command.length / 40));
    place.select();
    try {
      await navigator.clipboard.writeText(answer.command);
      put(page.at("copied"), say("Copied."));
    } catch {
      put(page.at("copied"), say("Copy it from here.")); // not allowed, or no secure connection
    }
  });

  // ---- presets

  async function keep(over) {
    const answer = await page.askInTurn("keep", { name: page.at("preset-name").value, over });
    put(page.at("preset-error"), answer.error ?? "");
    put(page.at("preset-note"), answer.note ?? "");
    page.at("replace").hidden = !answer.taken;
    page.accept(answer);
  }

  page.at("keep").addEventListener("click", () => keep(false));
  page.at("replace").addEventListener("click", () => keep(true));
  page.at("load").addEventListener("click", () => replaceAll("load", { name: page.at("preset").value }));

  function drawPresets() {
    const list = page.at("preset");
    const names = page.shown.presets;
    const now = [...list.options].map((option) => option.value);
    if (now.join("\n") !== names.join("\n")) {
      list.replaceChildren(...names.map((name) => make("option", { value: name, textContent: name, translate: false })));
    }
    page.at("saved").hidden = names.length === 0;
  }

  return { json, drawPresets };
}
