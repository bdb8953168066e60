// Before and after: two heaps of images become pairs, by their names, else in their order. They are shown side by side
// before anything is sent; a picture that is dropped on another one changes places with it.
import { sendFiles } from "/ui/shared/drop.js";
import { button, make } from "/ui/shared/elements.js";
import { forgetPairs, keepPairs, keptPairs } from "/ui/train/pair_store.js";
import { say } from "/ui/shared/words.js";

const STRIP = 6; // pictures of a heap
const CAPTION = /\.txt$/i;
const natural = new Intl.Collator("en", { numeric: true });

const stemOf = ({ name }) => name.replace(/\.[^.]*$/, "");
const endOf = ({ name }) => name.match(/\.[^.]*$/)?.[0] ?? "";
const byName = (files) => [...files].sort((a, b) => natural.compare(a.name, b.name));

/** Return [{before, after}] of two heaps, the files without a partner, and whether their names say what belongs together. */
export function matched(befores, afters) {
  const named = new Map(byName(befores).map((file) => [stemOf(file).toLowerCase(), file]));
  const same = byName(afters).filter((file) => named.has(stemOf(file).toLowerCase()));
  if (same.length === 0 && befores.length === afters.length) {
    const ordered = byName(befores);
    return { pairs: byName(afters).map((after, index) => ({ before: ordered[index], after })), alone: [], byNames: false };
  }
  const pairs = same.map((after) => ({ before: named.get(stemOf(after).toLowerCase()), after }));
  const taken = new Set(pairs.flatMap(({ before, after }) => [before, after]));
  return { pairs, alone: [...befores, ...afters].filter((file) => !taken.has(file)), byNames: true };
}

/** Return the files of pairs as the dataset has them: NAME.png, references/NAME.jpg and NAME.txt with what changes. */
export function filesOf(pairs, captions, instruction) {
  const used = new Set();
  return pairs.flatMap(({ before, after }) => {
    let name = stemOf(after);
    for (let number = 2; used.has(name.toLowerCase()); number += 1) name = `${stemOf(after)}-${number}`;
    used.add(name.toLowerCase());
    const own = captions.find((file) => stemOf(file) === stemOf(after)) ?? (instruction && new File([instruction], "caption.txt"));
    const parts = [[after, name + endOf(after)], [before, `references/${name}${endOf(before)}`], ...(own ? [[own, `${name}.txt`]] : [])];
    return parts.map(([file, path]) => Object.assign(new File([file], path.split("/").pop(), { type: file.type }), { path }));
  });
}

/** Make the two heaps in `place` take files until the page is left; the button `take` in the bar `goOn` sends the pairs,
 *  and `done` gets {received, said} of them. Until then this browser keeps them for the draft. */
export function mountPairs(place, goOn, leaving, { draft, done }) {
  const heaps = { before: [], after: [] };
  let captions = [];
  let pairs = [];
  const one = (selector) => place.querySelector(selector);
  const list = one(".matched");
  const alone = one(".alone");
  const said = goOn.querySelector(".sent");
  const take = goOn.querySelector("#take");
  const addresses = new Map(); // of files, so that a redraw makes none anew
  let byNames = true;
  let held = null;

  leaving.addEventListener("abort", () => { for (const address of addresses.values()) URL.revokeObjectURL(address); });

  function match() {
    const found = matched(heaps.before, heaps.after);
    ({ pairs, byNames } = found);
    const both = heaps.before.length && heaps.after.length;
    const side = (file) => (heaps.before.includes(file) ? say("Before") : say("After"));
    const names = found.alone.map((file) => `${file.name} (${side(file)})`);
    alone.hidden = !both || !names.length;
    alone.querySelector("span").textContent = alone.hidden ? ""
      : say("Without a partner of the same name, and left out: {}", names.slice(0, 5).join(", ") + (names.length > 5 ? " \u2026" : ""));
    said.textContent = "";
    place.classList.toggle("begun", heaps.before.length + heaps.after.length > 0);
    draw();
  }

  function keep() {
    if (heaps.before.length + heaps.after.length) keepPairs(draft, { ...heaps, captions, pairs, instruction: one("textarea").value });
    else forgetPairs(draft);
  }

  /** Show what was chosen before a reload, unless something is chosen by now. */
  async function recall() {
    const kept = await keptPairs(draft);
    if (!kept || leaving.aborted || heaps.before.length + heaps.after.length) return;
    Object.assign(heaps, { before: kept.before, after: kept.after });
    captions = kept.captions;
    match();
    pairs = kept.pairs; // as they were put together by hand
    one("textarea").value ||= kept.instruction;
    draw();
  }

  function draw() {
    for (const side of ["before", "after"]) {
      const { length } = heaps[side];
      const heap = one(`[data-heap=${side}]`);
      heap.classList.toggle("given", length > 0);
      heap.querySelector("button > :not(.icon, .unseen)").textContent = say(length ? "Choose others" : "Choose or drop");
      heap.querySelector(".count").textContent = length === 1 ? say("1 image") : length ? say("{#} images", length) : "";
      // Until they are seen as pairs.
      const strip = pairs.length ? [] : byName(heaps[side]).slice(0, STRIP);
      heap.querySelector(".strip").replaceChildren(...strip.map((file) => make("img", { src: addressOf(file), alt: "", onerror: (event) => event.target.remove() })));
    }
    one(".matched-head h2").textContent = pairs.length === 1 ? say("1 pair") : say("{#} pairs", pairs.length);
    one(".how").textContent = byNames ? say("put together by their names") : say("put together in their order: look whether they fit");
    one(".together").hidden = take.hidden = pairs.length === 0;
    take.textContent = pairs.length === 1 ? say("Take this pair") : say("Take these {#} pairs", pairs.length);
    list.replaceChildren(...pairs.map((pair, index) => make("li", {},
      picture(pair, "before", index), make("span", { "aria-hidden": "true", class: "becomes" }, "\u2192"), picture(pair, "after", index),
      button(say("Swap"), () => { pairs[index] = { before: pair.after, after: pair.before }; draw(); keep(); }, { "aria-label": say("Swap before and after of {}", pair.after.name) }),
    )));
  }

  function addressOf(file) {
    if (!addresses.has(file)) addresses.set(file, URL.createObjectURL(file));
    return addresses.get(file);
  }

  /** Return the picture of a side of a pair, which changes places with the one that it is dropped on. */
  function picture(pair, side, index) {
    const file = pair[side];
    const image = make("img", { src: addressOf(file), alt: file.name, draggable: "true", title: file.name });
    image.addEventListener("error", () => image.replaceWith(make("span", { class: "unseen-picture" }, file.name))); // HEIC, which no browser draws
    image.addEventListener("dragstart", () => { held = { index, side }; });
    image.addEventListener("dragover", (event) => { if (held) event.preventDefault(); });
    image.addEventListener("drop", (event) => {
      if (!held) return;
      event.preventDefault();
      const from = held;
      held = null;
      [pairs[from.index][from.side], pairs[index][side]] = [file, pairs[from.index][from.side]];
      draw();
      keep();
    });
    image.addEventListener("dragend", () => { held = null; });
    return make("figure", {}, image, make("figcaption", { translate: "no" }, file.name));
  }

  for (const side of ["before", "after"]) {
    const heap = one(`[data-heap=${side}]`);
    const input = heap.querySelector("input");
    const add = (files) => {
      const images = [...files].filter((file) => !CAPTION.test(file.name));
      captions = [...captions, ...[...files].filter((file) => CAPTION.test(file.name))];
      heaps[side] = images;
      match();
      keep();
    };
    heap.querySelector("button").onclick = () => input.click();
    input.onchange = () => { add(input.files); input.value = ""; };
    if (input.files.length) input.onchange(); // chosen before this script came
    heap.addEventListener("dragover", (event) => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
    heap.addEventListener("drop", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      event.stopPropagation(); // the page would take them as a folder of images
      add(event.dataTransfer.files);
    });
  }
  one("[data-swap]").onclick = () => { pairs = pairs.map(({ before, after }) => ({ before: after, after: before })); draw(); keep(); };
  one("textarea").addEventListener("change", keep);
  one("[data-empty]").onclick = () => {
    Object.assign(heaps, { before: [], after: [] });
    captions = [];
    match();
    keep();
    one(".heap button").focus();
  };
  one("[data-folder]").onclick = () => place.parentElement.parentElement.querySelector(".drop [data-for=folder]").click();
  take.onclick = async () => {
    take.disabled = true;
    const files = filesOf(pairs, captions, one("textarea").value.trim());
    try {
      const sent = await sendFiles(files, leaving, (here) => { said.textContent = say("{#} of {#} files are here", here, files.length); });
      await forgetPairs(draft);
      done(sent);
    } catch (problem) {
      if (!leaving.aborted) said.textContent = problem.message;
      take.disabled = false;
    }
  };
  recall();
}
