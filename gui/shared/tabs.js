// Tabs of a page: `place` has a list of role=tab, each of which names its panel by aria-controls. Left, right, Home and
// End go through them.

/** Make the tabs work; `shown` gets the name of each panel that is shown. */
export function tabs(place, shown = () => {}) {
  const all = [...place.querySelectorAll("[role=tab]")];

  function choose(chosen) {
    for (const tab of all) {
      tab.setAttribute("aria-selected", tab === chosen);
      tab.tabIndex = tab === chosen ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = tab !== chosen;
    }
    shown(chosen.getAttribute("aria-controls"));
  }

  for (const tab of all) tab.addEventListener("click", () => choose(tab));
  place.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    const at = all.indexOf(document.activeElement);
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key];
    if (next === undefined || at < 0) return;
    event.preventDefault();
    const chosen = all.at(next % all.length);
    choose(chosen);
    chosen.focus();
  });
}
