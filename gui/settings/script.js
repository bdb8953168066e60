// The page All settings, and living with a file that other tabs change too.
import { make } from "/ui/dialog.js";
import { ask } from "/ui/shared/ask.js";
import { fileOf } from "/ui/settings/file.js";
import { planner } from "/ui/settings/plan.js";
import { sectionsOf } from "/ui/settings/sections.js";
import { Page, put } from "/ui/settings/state.js";
import { say } from "/ui/shared/words.js";

const AGAIN_MS = 1000;

export function mount(main, leaving) {
  const page = new Page(main.querySelector(".settings"), leaving);
  const { fields, places, root, tabs } = page;
  const sections = sectionsOf(page);
  const file = fileOf(page);
  const replan = planner(page, sections);
  let looking = 0;

  page.hears.draft = (isOther) => {
    draw();
    if (isOther) replan();
  };

  page.hears.away = () => {
    clearTimeout(looking);
    looking = setTimeout(look, AGAIN_MS);
  };
  leaving.addEventListener("abort", () => clearTimeout(looking));

  function draw() {
    put(page.at("note"), page.shown.started ? say("This training is started: its settings stay as they are.") : "");
    const own = whose.querySelector(`option[value="${page.shown.id}"]`);
    if (own && page.shown.called) own.textContent = page.shown.called;
    for (const field of fields.values()) field.draw();
    file.json.draw();
    file.drawPresets();
    sections.filter();
  }

  /** See whether the draft was changed elsewhere: asked when a tab says so, and when somebody comes back. */
  async function look() {
    clearTimeout(looking);
    if (document.hidden || leaving.aborted) return;
    const found = await page.askInTurn("look", { stamp: page.shown.stamp });
    if (found.isAway) return;
    if (found.error) put(page.at("note"), found.error);
    page.accept(found);
    if (page.wasLost) {
      page.wasLost = false;
      for (const place of places.values()) if (place.dirty) place.commit();
      replan();
    }
  }

  document.addEventListener("visibilitychange", look, { signal: leaving });
  window.addEventListener("focus", look, { signal: leaving });
  tabs.onmessage = ({ data }) => { if (data === page.shown.id) look(); };

  // A reload and a link show the same draft.
  const address = new URL(location.href);
  if (address.searchParams.get("draft") !== page.shown.id) {
    address.searchParams.set("draft", page.shown.id);
    history.replaceState(null, "", address);
  }
  /** Offer the bases by their names, as the page Train does. */
  async function offerBases() {
    const { picks } = fields.get("base.model");
    const { choices = [], cards = [] } = await ask("/train/bases", { draft: page.shown.id });
    const offered = new Map([...choices, ...cards.map(({ source, name }) => [source, name])]);
    picks.append(...[...offered].map(([value, name]) => make("option", { value, textContent: name === value ? value : `${name} (${value})` })));
  }

  // Its way to the settings of another training that waits.
  const whose = page.at("whose");
  whose.addEventListener("change", () => location.assign(`/settings?draft=${encodeURIComponent(whose.value)}`));

  draw();
  replan();
  offerBases();
  page.recall();
  const wanted = location.hash && page.at(decodeURIComponent(location.hash.slice(1)));
  if (!wanted) return;
  sections.reveal(wanted);
  wanted.scrollIntoView();
}
