// A part of a page that follows the server: `path` is asked once a second while something goes on, else when somebody
// comes back to the page, and what has changed is drawn.
import { ask } from "/ui/shared/ask.js";
import { look } from "/ui/shared/live.js";

const AGAIN_MS = 1000;
const AWAY_MS = 5000;

/** Follow `path` in `place`, whose markup was drawn at data-stamp, until the page is left; `drawn` gets each answer that
 *  was drawn, and `of` is part of each question. Return a function that asks `path` for more than to look: its answer is
 *  drawn too. */
export function follow(place, path, leaving, drawn, of = {}) {
  let { stamp } = place.dataset;
  return following({
    path,
    leaving,
    goes: "goes" in place.dataset,
    shown: () => ({ stamp, ...of }),
    draw(now) {
      if (now.html === undefined || "held" in place.dataset) return; // somebody drags in it: the next answer is drawn
      ({ stamp } = now);
      const focusAgain = keepFocus(place);
      place.innerHTML = now.html; // markup of our own server, in which every text is escaped
      drawn(now);
      focusAgain();
    },
  });
}

/** Note what has the keyboard in `place`; return a function that gives it to the same thing of what was drawn anew. */
function keepFocus(place) {
  const held = document.activeElement;
  if (held === place || !place.contains(held)) return () => {};
  const named = [...held.attributes].filter(({ name }) => ["id", "href", "name"].includes(name) || name.startsWith("data-"));
  const own = held.localName + named.map(({ name, value }) => `[${name}="${CSS.escape(value)}"]`).join("");
  const around = held.closest("[data-key]");
  const selector = around && around !== held ? `[data-key="${CSS.escape(around.dataset.key)}"] ${own}` : own;
  const at = [...place.querySelectorAll(selector)].indexOf(held);
  return () => {
    if (document.activeElement === document.body) place.querySelectorAll(selector)[at]?.focus({ preventScroll: true });
  };
}

/** Follow `path`: `shown` says what the page shows, `draw` gets each answer. Return a function that asks for more than
 *  to look. Questions go out one after another, so that no late answer draws what is over. */
export function following({ path, leaving, goes, shown, draw }) {
  let last = Promise.resolve();
  let timer = 0;

  function asked(body) {
    last = last.then(async () => {
      clearTimeout(timer);
      const now = await ask(path, { ...shown(), ...body });
      if (leaving.aborted) return now;
      draw(now);
      // The bar says the same time left as the page: it is not to wait for its own turn.
      if (now.html !== undefined || Object.keys(now.parts ?? {}).length) look();
      goes = now.goes ?? goes;
      if (now.isAway) timer = setTimeout(asked, AWAY_MS, {});
      else if (goes) timer = setTimeout(asked, AGAIN_MS, {});
      return now;
    });
    return last;
  }

  const back = () => { if (!document.hidden) asked({}); };
  document.addEventListener("visibilitychange", back, { signal: leaving });
  window.addEventListener("focus", back, { signal: leaving });
  leaving.addEventListener("abort", () => clearTimeout(timer));
  if (goes) timer = setTimeout(asked, AGAIN_MS, {});
  return asked;
}
