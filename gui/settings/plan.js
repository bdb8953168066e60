// What the plan makes of the draft: what is trained, whether it fits, where each value comes from.
import { make } from "/ui/dialog.js";
import { inline, put } from "/ui/settings/state.js";
import { say } from "/ui/shared/words.js";

/** Return what asks for the plan and draws it in the fields and in `sections`. */
export function planner(page, sections) {
  const { fields } = page;
  const place = page.root.querySelector(".come-to");
  let planning = false;
  let again = false;

  /** Ask for the plan; not in line with the changes: it takes a second, and they do not wait for it. */
  async function replan() {
    again = planning;
    if (planning) return;
    planning = true;
    place.setAttribute("aria-busy", "true");
    do {
      again = false;
      const found = await page.askNow("plan");
      if (!found.isAway) put(page.at("plan-error"), found.error ?? "");
      if (found.error) place.querySelector(".waiting")?.remove();
      if (!found.fields) continue;
      if (page.leaving.aborted) return;
      page.plan = found;
      draw();
    } while (again);
    planning = false;
    place.removeAttribute("aria-busy");
  }

  function draw() {
    const { plan } = page;
    place.querySelector(".said").replaceChildren(...plan.said.map((text) => make("p", {}, ...inline(text))));
    page.root.querySelector(".lacks").hidden = !plan.lacks;
    place.hidden = Boolean(plan.lacks);
    drawMemory(plan.memory);
    for (const [key, field] of fields) {
      field.draw();
      field.row.classList.toggle("blamed", plan.blamed.includes(key));
      field.unused = plan.unused[key] ?? "";
    }
    sections.sortUnused();
    sections.filter();
  }

  function drawMemory(found) {
    const memory = place.querySelector(".memory");
    memory.hidden = !found;
    if (!found) return;
    const percent = (share) => `${(100 * share).toFixed(2)}%`;
    const pieces = found.parts.map((part) => {
      const piece = make("i", { className: part.css, title: part.text });
      piece.style.width = percent(part.share);
      return piece;
    });
    if (found.limit !== null) {
      const limit = make("b", { className: "limit", title: say("the most that may be used") });
      limit.style.left = percent(found.limit);
      pieces.push(limit);
    }
    const legend = found.parts.map((part) => make("span", {}, make("i", { className: part.css }), part.text));
    if (found.limit !== null) legend.push(make("span", {}, make("i", { className: "limit" }), say("the most that may be used")));
    const parts = make("details", { open: memory.querySelector("details")?.open ?? false },
      make("summary", { textContent: say("What takes the memory") }), make("p", { className: "legend" }, ...legend));
    memory.replaceChildren(
      make("p", { className: found.fits ? "fit" : "fit error", textContent: found.said }),
      make("div", { className: "bar-of-parts", role: "img", ariaLabel: found.said }, ...pieces),
      parts,
    );
  }

  return replan;
}
