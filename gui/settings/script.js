// The page All settings, and living with a file that other tabs change too.
import { drawPresets, json } from "/ui/settings/file.js";
import { replan } from "/ui/settings/plan.js";
import { filter } from "/ui/settings/sections.js";
import { accept, askInTurn, at, fields, page, places, put, recall, root, tabs, whenAccepted, whenAway } from "/ui/settings/state.js";
import { say } from "/ui/shared/words.js";

const AGAIN_MS = 1000;
let looking = 0;

whenAccepted((isOther) => {
  draw();
  if (isOther) replan();
});

whenAway(() => {
  clearTimeout(looking);
  looking = setTimeout(look, AGAIN_MS);
});

function draw() {
  put(at("note"), page.shown.started ? say("This training is started: its settings stay as they are.") : "");
  const { dataset } = page.shown;
  root.querySelector(".whose span").textContent = dataset ? say("of the training on {}", dataset) : say("of a new training");
  for (const field of fields.values()) field.draw();
  json.draw();
  drawPresets();
  filter();
}

/** See whether the draft was changed elsewhere: asked when a tab says so, and when somebody comes back. */
async function look() {
  clearTimeout(looking);
  if (document.hidden) return;
  const found = await askInTurn("look", { stamp: page.shown.stamp });
  if (found.isAway) return;
  if (found.error) put(at("note"), found.error);
  accept(found);
  if (page.wasLost) {
    page.wasLost = false;
    for (const place of places.values()) if (place.dirty) place.commit();
    replan();
  }
}

document.addEventListener("visibilitychange", look);
window.addEventListener("focus", look);
tabs.onmessage = ({ data }) => { if (data === page.shown.id) look(); };

// A reload and a link show the same draft.
const address = new URL(location.href);
if (address.searchParams.get("draft") !== page.shown.id) {
  address.searchParams.set("draft", page.shown.id);
  history.replaceState(null, "", address);
}
draw();
replan();
recall();
if (location.hash) at(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
