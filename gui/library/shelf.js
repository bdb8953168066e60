// All LoRAs: what is searched for is asked as it is typed, and kept in the address for Back and a reload.
import { ask } from "/ui/shared/ask.js";
import { menus } from "/ui/shared/menus.js";

const KEYS = { search: "text", base: "base", order: "order" };

export function mountShelf(main, leaving) {
  const form = main.querySelector(".search");
  const shelf = main.querySelector("#shelf");
  menus(shelf, leaving);
  let wished = null;
  let asking = false;

  /** Ask for what is wished last, one question after another. */
  async function search() {
    wished = { text: form.search.value, base: form.base.value, order: form.order.value };
    const address = new URL(location.href);
    for (const [name, key] of Object.entries(KEYS)) {
      if (wished[key]) address.searchParams.set(name, wished[key]);
      else address.searchParams.delete(name);
    }
    history.replaceState(history.state, "", address);
    if (asking) return;
    asking = true;
    while (wished) {
      const asked = wished;
      wished = null;
      show(await ask("/library/search", asked));
    }
    asking = false;
  }

  function show({ html, error }) {
    if (html !== undefined) {
      shelf.innerHTML = html; // markup of our own server, in which every text is escaped
      return;
    }
    shelf.replaceChildren(Object.assign(document.createElement("p"), { className: "error notice", textContent: error }));
  }

  form.addEventListener("input", search);
  main.addEventListener("added", search, { signal: leaving }); // by add.js
  form.addEventListener("submit", (event) => event.preventDefault());
}
