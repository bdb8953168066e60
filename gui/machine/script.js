// The page Machine: it shows which bases fit, the cache is cleared after a question, downloads are forbidden or
// allowed, commands are copied.
import { ask } from "/ui/shared/ask.js";
import { make } from "/ui/shared/elements.js";
import { tell } from "/ui/shared/tell.js";
import { say } from "/ui/shared/words.js";
import { mount as shares } from "/ui/share/script.js";

export function mount(main, leaving) {
  const [said, doctor] = [".said", ".doctor"].map((name) => main.querySelector(name));
  shares(main); // it copies commands

  // The report is drawn anew once the cache is cleared, so its buttons are looked for when they are pressed.
  const acts = {
    ask: async () => {
      const answer = await ask("/doctor/cache");
      tell(said, answer.error ? answer : {});
      if (answer.error) return;
      const question = doctor.querySelector(".question");
      question.querySelector(".notice").textContent = answer.question;
      question.querySelector("[data-clear]").hidden = answer.isEmpty;
      question.hidden = false;
    },
    keep: () => { doctor.querySelector(".question").hidden = true; },
    clear: async (button) => {
      button.disabled = true; // it may take a while
      const answer = await ask("/doctor/clear");
      button.disabled = false;
      doctor.querySelector(".question").hidden = true;
      tell(said, answer);
      redraw(answer);
    },
  };

  /** Draw the report anew, with what is open in it and which bases fit, which is the same. */
  function redraw(answer) {
    if (!answer.report) return;
    const fits = doctor.querySelector(".what-fits");
    const open = [...doctor.querySelectorAll("details[open]")].map(({ id }) => id);
    doctor.innerHTML = answer.report; // markup of our own server
    doctor.querySelector(".what-fits").replaceWith(fits);
    for (const id of open) doctor.querySelector(`#${id}`).open = true;
  }

  let shown = new AbortController(); // what fits on one machine; another that is chosen ends it
  let bases = [];
  function showFor(card) {
    shown.abort();
    shown = new AbortController();
    showFits(doctor.querySelector(".fits"), bases, Number(card) || null, AbortSignal.any([leaving, shown.signal]));
  }

  doctor.addEventListener("change", async ({ target }) => {
    if (target.id === "card") showFor(target.value);
    if (target.id !== "offline") return;
    const answer = await ask("/doctor/offline", { offline: target.checked });
    tell(said, answer);
    if (answer.error) target.checked = !target.checked;
    redraw(answer);
    doctor.querySelector("#offline").focus();
  });
  doctor.addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    const name = Object.keys(acts).find((each) => button?.dataset[each] !== undefined);
    if (name) acts[name](button);
  });

  ask("/doctor/bases").then((answer) => {
    if (leaving.aborted) return;
    tell(said, answer.error ? answer : {});
    if (answer.error) return;
    bases = answer.bases;
    showFor(doctor.querySelector("#card").value);
  });

  const price = main.querySelector(".price");
  price.addEventListener("submit", async (event) => {
    event.preventDefault();
    tell(said, await ask("/doctor/price", { typed: price.querySelector("input").value }));
  });
}

/** List the base models, each with a bar of the memory that it needs as soon as its plan is there: the plan for this
 *  machine, or for a card of `vramGib`. */
async function showFits(place, bases, vramGib, leaving) {
  place.classList.remove("measured");
  const limit = place.querySelector(".limit");
  const rows = bases.map(({ source, name, picture }) => {
    const [fits, time, needs, bar] = [make("b", { class: "awaited quiet" }, say("looking \u2026")), make("span", { class: "time" }), make("small", { class: "quiet" }), make("i", { class: "bar-of" })];
    const node = make("li", {}, make("img", { src: picture, alt: "", loading: "lazy" }),
      make("div", { class: "name" }, make("strong", { translate: "no" }, name), needs),
      make("span", { class: "track", "aria-hidden": "true" }, bar), make("div", { class: "verdict" }, fits, time));
    return { source, fits, time, needs, bar, node, bytes: 0 };
  });
  place.querySelector("ul").replaceChildren(...rows.map((row) => row.node));
  let limitBytes = 0;

  /** The longest bar takes the whole width, or the limit does where all is below it. */
  function measure() {
    const longest = Math.max(limitBytes, ...rows.map((row) => row.bytes)) * 1.02;
    for (const { bar, bytes } of rows) bar.style.width = `${(100 * bytes) / longest}%`;
    place.style.setProperty("--limit", limitBytes / longest);
  }

  for (const row of rows) {
    const answer = await ask("/doctor/fits", { source: row.source, vram_gib: vramGib });
    if (leaving.aborted) return;
    row.fits.textContent = answer.error ?? answer.said;
    row.fits.className = "";
    row.node.className = `fits-${answer.fits}`;
    row.time.textContent = answer.time ?? "";
    // What is a larger download needs hardly less: it is said at once, until its own plan says by how much.
    if (answer.too_large) for (const { fits } of rows.slice(rows.indexOf(row) + 1)) fits.textContent = say("likely too large \u2026");
    row.needs.textContent = answer.needs || answer.why || "";
    row.bytes = answer.needs_bytes ?? 0;
    if (!limitBytes && answer.limit_bytes) {
      limitBytes = answer.limit_bytes;
      limit.textContent = answer.limit;
      place.classList.add("measured");
    }
    if (limitBytes) measure();
  }
}
