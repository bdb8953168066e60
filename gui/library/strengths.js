// The strengths to draw at, on the tab Try: each is a button that takes it out, and a field adds more.
import { make } from "/ui/shared/elements.js";
import { figure, say } from "/ui/shared/words.js";

/** Look after the strengths in `place`. Return what gives them as a text, with what is typed and not added yet. */
export function strengths(place) {
  const typed = place.querySelector("input");
  const chips = () => [...place.querySelectorAll("[data-strength]")];

  function add() {
    const known = new Set(chips().map((chip) => Number(chip.dataset.strength)));
    const rest = [];
    for (const word of typed.value.split(/[\s;]+|,\s+/).filter(Boolean)) {
      const value = Number(word.replace(",", "."));
      if (!Number.isFinite(value)) rest.push(word); // which the server refuses in words
      else if (!known.has(value)) {
        known.add(value);
        const after = chips().find((chip) => Number(chip.dataset.strength) > value) ?? typed.parentElement;
        after.before(chip(value));
      }
    }
    typed.value = rest.join(" ");
  }

  function chip(value) {
    const name = make("span", { class: "unseen" }, `${say("Remove")} `);
    const sign = make("span", { "aria-hidden": "true" }, "\u00d7");
    return make("button", { type: "button", "data-strength": value, title: say("Remove") }, name, figure(String(value)), sign);
  }

  place.addEventListener("click", ({ target }) => {
    const pressed = target.closest("button");
    if (!pressed) return;
    if (pressed.dataset.strength === undefined) {
      add();
      typed.focus();
      return;
    }
    const next = pressed.nextElementSibling.closest("[data-strength]") ?? typed;
    pressed.remove();
    next.focus();
  });
  typed.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !typed.value.trim()) return; // of an empty field it draws
    event.preventDefault();
    add();
  });
  return () => {
    add();
    return [...chips().map((chip) => chip.dataset.strength), typed.value].join(" ").trim();
  };
}
