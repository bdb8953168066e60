// The groups of the form: which one is in sight, which settings do not matter here, and which ones are looked for.
import { Field, plainWords } from "/ui/settings/field.js";
import { put } from "/ui/settings/state.js";
import { say } from "/ui/shared/words.js";

/** Draw the fields of the page; return {sortUnused, filter, reveal}. One group is in sight; a search looks through all. */
export function sectionsOf(page) {
  const { fields, root } = page;
  const search = page.at("search");
  const changedOnly = page.at("changed-only");
  const choice = page.at("group");
  const links = new Map([...root.querySelectorAll(".jumps a")].map((link) => [link.dataset.group, link]));
  let shown = choice.options[0].value;

  const sections = [...root.querySelectorAll("section[data-section]")].map((box) => {
    const fold = box.querySelector(".unused");
    return {
      box,
      name: box.dataset.section,
      used: box.querySelector(".used"),
      fold,
      summary: fold.querySelector("summary"),
      unused: fold.querySelector("div"),
      words: plainWords(`${box.dataset.section} ${box.querySelector("h2").textContent}`),
      fields: [...box.querySelectorAll(".field")].map((row) => new Field(page, row)),
      wasOpened: false, // by the search
      found: 0,
    };
  });

  const looksFor = () => search.value.trim() !== "" || changedOnly.checked;

  /** Bring a group into sight. */
  function show(name) {
    shown = name;
    choice.value = name;
    draw();
  }

  /** Bring the group into sight that an element is in. */
  function reveal(node) {
    const section = node.closest("section[data-section]");
    if (section && !looksFor()) show(section.dataset.section);
    const fold = node.closest("details.unused");
    if (fold) fold.open = true;
  }

  // A group names its settings that stand under what is changed most often.
  root.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-setting]");
    if (!link) return;
    event.preventDefault();
    const row = document.getElementById(link.dataset.setting);
    reveal(row);
    row.querySelector("input, select, textarea").focus();
  });

  /** Show the group that is chosen, or all in which a search finds something; what is changed where, and what refused. */
  function draw() {
    const isLooking = looksFor();
    for (const { box, name, found, fields: own } of sections) {
      box.hidden = isLooking ? found === 0 : name !== shown;
      const link = links.get(name);
      link.classList.toggle("without", isLooking && found === 0);
      if (!isLooking && name === shown) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
      const changed = own.filter((field) => field.isChanged).length;
      const isWrong = own.some((field) => field.refused || field.row.classList.contains("blamed"));
      const badge = link.querySelector(".badge");
      badge.classList.toggle("wrong", isWrong);
      badge.title = isWrong ? say("something here is not possible") : say("{#} changed", changed);
      put(badge, isWrong ? "!" : changed ? String(changed) : "");
    }
    choice.hidden = isLooking;
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
    draw();
    page.at("nothing-found").hidden = count > 0;
    const all = fields.size;
    put(page.at("counted"), count === all ? say("{#} settings", all) : say("{#} of {#} settings", count, all));
    const changed = Object.keys(page.shown.given).length;
    put(page.at("changes"), changed ? String(changed) : "");
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
      field.foundBy(fits && wanted.length ? wanted : []);
      if (!fits) continue;
      visible += 1;
      if (field.row.parentElement === section.unused) folded += 1;
    }
    section.found = visible;
    fold.hidden = folded === 0;
    put(section.summary, say("Not used here: {}", folded));
    if (wanted.length && folded && !fold.open) section.wasOpened = fold.open = true;
    if (!wanted.length && section.wasOpened) section.wasOpened = fold.open = false;
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
  root.querySelector(".jumps").addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link) return;
    event.preventDefault();
    goTo(link.dataset.group);
  });
  choice.addEventListener("change", () => goTo(choice.value));

  /** Show a group from its top; what a search has found of it while somebody looks for something. */
  function goTo(name) {
    const { box } = sections.find((section) => section.name === name);
    if (looksFor()) {
      if (!box.hidden) box.scrollIntoView();
      return;
    }
    show(name);
    if (box.getBoundingClientRect().top < 0) box.scrollIntoView();
  }

  return { sortUnused, filter, reveal };
}
