// The sections of the form: which settings do not matter here, and which ones are looked for.
import { Field, plainWords } from "/ui/settings/field.js";
import { put } from "/ui/settings/state.js";
import { say } from "/ui/shared/words.js";

/** Draw the fields of the page; return {sortUnused, filter, reveal}. */
export function sectionsOf(page) {
  const { fields, root } = page;
  const search = page.at("search");
  const changedOnly = page.at("changed-only");

  const sections = [...root.querySelectorAll("section[data-section]")].map((box) => {
    const fold = box.querySelector(".unused");
    return {
      box,
      used: box.querySelector(".used"),
      fold,
      summary: fold.querySelector("summary"),
      unused: fold.querySelector("div"),
      words: plainWords(`${box.dataset.section} ${box.querySelector("h2").textContent}`),
      fields: [...box.querySelectorAll(".field")].map((row) => new Field(page, row)),
      wasOpened: false, // by the search
      whole: box.querySelector("details.whole"), // not of the first section, which is in sight
      noted: new Set(), // fields for which it was opened already: who closes it has it closed
    };
  });

  /** Open the section that an element is in. */
  function reveal(node) {
    const whole = node.closest("details.whole");
    if (whole) whole.open = true;
  }

  /** Open the sections of settings that are changed, refused or to blame, once for each. */
  function openNoted({ whole, fields: own, noted }) {
    const now = own.filter((field) => field.isChanged || field.refused || field.row.classList.contains("blamed"));
    if (whole && now.some((field) => !noted.has(field))) whole.open = true;
    for (const field of now) noted.add(field);
  }

  /** Fold the settings that do not matter here; one that is changed or in use stays where it is. */
  function sortUnused() {
    for (const section of sections) {
      for (const field of section.fields) {
        const home = field.unused && !field.isChanged ? section.unused : section.used;
        put(field.why, field.unused);
        if (field.row.parentElement === home || field.row.contains(document.activeElement)) continue;
        const after = section.fields
          .slice(section.fields.indexOf(field) + 1)
          .find((other) => other.row.parentElement === home);
        home.insertBefore(field.row, after ? after.row : null);
      }
    }
  }

  /** Show the rows that fit the search. */
  function filter() {
    // Short words begin one: "lr" is not a part of "already".
    const wanted = plainWords(search.value).split(" ").filter(Boolean).map((word) => (word.length < 4 ? ` ${word}` : word));
    let count = 0;
    for (const section of sections) count += filterSection(section, wanted);
    for (const section of sections) openNoted(section);
    page.at("nothing-found").hidden = count > 0;
    const all = fields.size;
    put(page.at("counted"), count === all ? say("{#} settings", all) : say("{#} of {#} settings", count, all));
    const changed = Object.keys(page.shown.given).length;
    put(page.at("changes"), changed ? say("{#} changed", changed) : say("none changed"));
    page.at("reset-all").hidden = changed === 0;
  }

  function filterSection(section, wanted) {
    const { fold } = section;
    let visible = 0;
    let folded = 0;
    for (const field of section.fields) {
      const text = `${field.words} ${section.words}`;
      const fits = wanted.every((word) => text.includes(word)) && (!changedOnly.checked || field.isChanged || Boolean(field.refused));
      field.row.hidden = !fits;
      if (!fits) continue;
      visible += 1;
      if (field.row.parentElement === section.unused) folded += 1;
    }
    section.box.hidden = visible === 0;
    fold.hidden = folded === 0;
    put(section.summary, say("Not used here: {}", folded));
    if (wanted.length && folded && !fold.open) section.wasOpened = fold.open = true;
    if (!wanted.length && section.wasOpened) section.wasOpened = fold.open = false;
    const { whole } = section;
    const looksFor = wanted.length > 0 || changedOnly.checked;
    if (whole && looksFor && visible && !whole.open) section.wholeWasOpened = whole.open = true;
    if (whole && !looksFor && section.wholeWasOpened) section.wholeWasOpened = whole.open = false;
    return visible;
  }

  search.addEventListener("input", filter);
  changedOnly.addEventListener("change", filter);

  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input:not([type=checkbox]), textarea, select, [contenteditable]")) return;
    event.preventDefault();
    search.focus();
    search.select();
  }, { signal: page.leaving });
  root.querySelector(".jumps").addEventListener("click", ({ target }) => {
    const to = target.closest("a")?.hash.slice(1);
    if (to) reveal(page.at(to));
  });
  return { sortUnused, filter, reveal };
}
