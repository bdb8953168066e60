// The samples of a run: a table prompt x step, one picture large, two pictures over each other.
//
// The sheet is what parts.py returns. Texts of it are set as text only. Keys in the large picture: left and right
// another prompt, up and down another step, Escape closes.
import { button, icon, make } from "/ui/shared/elements.js";
import { wipe } from "/ui/shared/wipe.js";
import { say } from "/ui/shared/words.js";

/** Show the samples in `place`, first as data-sheet has them, and in `others` one of each prompt, small, which the `film`
 *  shows when it is pressed; `markBest` marks a step as the best and returns {error} or {done}. Return what draws them as
 *  they are by now, and what enlarges the picture of a step. */
export function samples(place, others, film, markBest) {
  const pictures = new Map(); // address -> <img>, so that a redraw loads nothing again
  let sheet = JSON.parse(place.dataset.sheet);
  let cell = { prompt: 0, step: 0 };

  const title = ({ prompt, step }) => `${sheet.steps[step].name}: ${sheet.prompts[prompt].text}`;
  const address = ({ prompt, step }) => sheet.images[prompt][step];

  /** Return the columns in which a prompt has a picture. */
  const drawnSteps = (prompt) => sheet.steps.map((_, step) => step).filter((step) => address({ prompt, step }) !== null);

  const SHOWN = 6; // prompts; the table has all
  let picked = -1; // the prompt that somebody wants to see in the film; -1: the film's own
  const filmed = () => (picked >= 0 ? picked : Math.max(0, sheet.prompts.findIndex(({ text }) => text === film.ownPrompt())));

  /** Show a small picture of each prompt, beside the film, in which a press shows it. */
  function drawPrompts(empty) {
    const shown = empty ? [] : [...sheet.prompts.keys()].slice(0, SHOWN).filter((prompt) => drawnSteps(prompt).length);
    const held = others.contains(document.activeElement) && document.activeElement.dataset.prompt;
    others.style.setProperty("--count", Math.min(5, Math.max(3, shown.length)));
    others.replaceChildren(...(shown.length > 1 ? shown : []).map((prompt) => {
      const step = opens(prompt);
      return make("button", { type: "button", onclick: () => choose(prompt), title: sheet.prompts[prompt].text, "aria-pressed": String(prompt === filmed()), "data-prompt": prompt },
        make("img", { src: address({ prompt, step }), alt: `${sheet.prompts[prompt].text}, ${sheet.steps[step].name}`, loading: "lazy" }));
    }));
    if (held) others.querySelector(`[data-prompt="${held}"]`)?.focus();
  }

  /** Return the column with which a prompt is shown: the best step of what has ended, else the newest. */
  function opens(prompt) {
    const drawn = drawnSteps(prompt);
    return (sheet.ended && drawn.find((step) => sheet.steps[step].best)) || drawn.at(-1);
  }

  function choose(prompt) {
    picked = -1;
    if (prompt !== filmed()) picked = prompt;
    showPicked(false);
    drawPrompts(false);
  }

  function showPicked(again) {
    if (picked < 0) return film.choose(null, again);
    const drawn = drawnSteps(picked);
    const frames = drawn.map((step) => ({ step: sheet.steps[step].step, name: sheet.steps[step].name, src: address({ prompt: picked, step }), how: "" }));
    const at = sheet.ended ? drawn.indexOf(opens(picked)) : -1;
    film.choose({ frames, prompt: sheet.prompts[picked].text, no_mp4: "", opens_at: at, goes: !sheet.ended }, again);
  }

  // ---- the table

  const said = make("p", { role: "status", class: "line" });
  const table = make("div", { class: "sheet-scroll", tabindex: "0", "aria-label": say("samples") });
  const sideways = make("p", { class: "quiet sideways", hidden: true }, say("More steps are to the right: scroll the table sideways."));
  new ResizeObserver(() => { sideways.hidden = table.scrollWidth <= table.clientWidth + 1; }).observe(table);
  const help = make(
    "p",
    { class: "quiet" },
    say("The arrow beside a step downloads its LoRA. Steps without one have no file: they were only drawn, or their file made room for newer ones. Click an image to enlarge it."),
  );
  const compareButton = button(say("Compare two pictures"), () => openCompare());

  function draw() {
    // The base alone stands in the film; its pictures are worth a table once there is something beside them.
    const empty = !sheet || sheet.prompts.length === 0 || sheet.steps.length < 2;
    place.closest("section").hidden = empty;
    drawPrompts(!sheet);
    if (picked >= 0) showPicked(true);
    if (empty) return;
    // The first look is at the first column, whole; who sees the newest step then goes on seeing the newest.
    const atEnd = table.querySelector(".sheet") && table.scrollLeft + table.clientWidth >= table.scrollWidth - 8;
    const focused = table.contains(document.activeElement) && document.activeElement.dataset.cell;
    const head = make("tr", {}, make("th", { scope: "col" }, say("prompt")), ...sheet.steps.map(column));
    const rows = sheet.prompts.map((prompt, index) => row(prompt, index));
    const drawn = make("table", { class: "sheet" }, make("thead", {}, head), make("tbody", {}, ...rows));
    drawn.style.setProperty("--steps", sheet.steps.length);
    table.replaceChildren(drawn);
    sideways.hidden = table.scrollWidth <= table.clientWidth + 1;
    if (focused) table.querySelector(`[data-cell="${focused}"]`)?.focus();
    if (atEnd) table.scrollLeft = table.scrollWidth;
    if (zoom.open) showCell();
  }

  function column(step) {
    const best = step.best ? [" ", make("mark", { class: "badge" }, say("best"))] : [];
    const label = say("Download the LoRA of {}", step.name);
    const file = step.file ? [" ", make("a", { href: step.file, download: "", "aria-label": label, title: label }, icon("download"))] : [];
    return make("th", { scope: "col" }, step.name, ...best, ...file);
  }

  function row(prompt, index) {
    const name = make(
      "th",
      { scope: "row", dir: "auto", title: prompt.text, translate: "no" },
      make("span", {}, prompt.text || say("(empty prompt)")),
      make("small", {}, say("seed {#}", prompt.seed)),
    );
    const cells = sheet.steps.map((_, step) => make("td", {}, picture({ prompt: index, step })));
    return make("tr", {}, name, ...cells);
  }

  function picture(at) {
    const source = address(at);
    if (source === null) return make("span", { class: "quiet" }, say("none"));
    if (!pictures.has(source)) {
      pictures.set(source, make("img", { src: source, loading: "lazy" }));
    }
    const image = pictures.get(source);
    image.alt = title(at);
    const open = () => openZoom(at);
    return make("button", { type: "button", class: "cell", onclick: open, "data-cell": key(at) }, image);
  }

  const key = ({ prompt, step }) => `${prompt}-${sheet.steps[step].step}`;

  async function useAsBest(step) {
    said.textContent = say("Copying the LoRA of {text} ...", step.name);
    const { error, done } = await markBest(step.step);
    said.textContent = error ?? done;
    said.classList.toggle("error", Boolean(error));
  }

  // ---- one picture, large

  const large = make("img", {});
  const caption = make("p", { class: "caption", "aria-live": "polite" });
  const prompt = make("p", { class: "prompt", dir: "auto", translate: "no" });
  const baseButton = button(say("Compare with the base"), () => openCompare({ ...cell, step: 0 }, cell));
  const bestButton = button("", () => useAsBest(sheet.steps[cell.step]));
  const zoom = make(
    "dialog",
    { class: "viewer", "aria-label": say("sample image"), onkeydown: moveByKey },
    make("div", { class: "actions" }, caption, button(say("Close"), () => zoom.close(), { autofocus: true })),
    large,
    prompt,
    make(
      "div",
      { class: "actions" },
      button("\u2190", () => move(-1, 0), { "aria-label": say("previous prompt") }),
      button("\u2192", () => move(1, 0), { "aria-label": say("next prompt") }),
      button("\u2191", () => move(0, 1), { "aria-label": say("later step") }),
      button("\u2193", () => move(0, -1), { "aria-label": say("earlier step") }),
      baseButton,
      bestButton,
    ),
    make(
      "p",
      { class: "quiet keys" },
      say("Keys: left and right another prompt, up a later step, down an earlier one, Escape closes."),
    ),
  );

  function openZoom(at) {
    cell = at;
    showCell();
    zoom.showModal();
  }

  function showCell() {
    const step = sheet.steps[cell.step];
    const source = address(cell);
    large.hidden = source === null;
    if (source !== null && large.getAttribute("src") !== source) large.src = source;
    large.alt = title(cell);
    const where = say("{text}, prompt {#} of {#}", step.name, cell.prompt + 1, sheet.prompts.length);
    caption.replaceChildren(where, ...(source === null ? [make("span", {}, say(": no picture was made here"))] : []));
    prompt.textContent = sheet.prompts[cell.prompt].text;
    const hasBase = sheet.steps[0].step === 0 && address({ ...cell, step: 0 }) !== null;
    baseButton.disabled = !hasBase;
    baseButton.title = hasBase ? "" : say("the base model has not drawn this prompt");
    bestButton.textContent = step.marked ? say("★ Marked as the best") : say("☆ Mark this step as the best");
    bestButton.disabled = step.marked || !step.file;
    bestButton.title = step.file ? "" : say("no LoRA file of this step is there");
  }

  function move(prompts, steps) {
    const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
    cell = {
      prompt: within(cell.prompt + prompts, sheet.prompts.length),
      step: within(cell.step + steps, sheet.steps.length),
    };
    showCell();
  }

  function moveByKey(event) {
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
    const way = ways[event.key];
    if (!way || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    move(...way);
  }

  // ---- two pictures over each other

  const sides = [side("A"), side("B")];
  const compare = wipe(make("div", { class: "actions sides" }, ...sides.map((one) => one.form)));

  /** Return the two lists of one side. */
  function side(name) {
    const made = { name };
    made.prompt = make("select", { "aria-label": say("prompt of {}", name), onchange: showSides });
    made.step = make("select", { "aria-label": say("step of {}", name), onchange: showSides });
    made.form = make("fieldset", {}, make("legend", {}, name), made.step, made.prompt);
    return made;
  }

  function openCompare(a, b) {
    // A step at which somebody asked for another prompt has no picture of the first one.
    const drawn = drawnSteps(0);
    const chosen = [a ?? { prompt: 0, step: drawn[0] ?? 0 }, b ?? { prompt: 0, step: drawn.at(-1) ?? 0 }];
    sides.forEach((one, index) => {
      const option = (text, value) => make("option", { value }, text);
      one.step.replaceChildren(...sheet.steps.map((step, at) => option(step.name, at)));
      one.prompt.replaceChildren(...sheet.prompts.map((row, at) => make("option", { value: at, translate: "no" }, row.text)));
      one.step.value = chosen[index].step;
      one.prompt.value = chosen[index].prompt;
    });
    showSides();
    zoom.close();
    compare.open();
  }

  function showSides() {
    compare.show(sides.map((one) => {
      const at = { prompt: Number(one.prompt.value), step: Number(one.step.value) };
      const source = address(at);
      return { source, text: `${one.name}, ${title(at)}${source === null ? ": no picture" : ""}` };
    }));
  }

  place.closest("section").querySelector(".steps-head").append(compareButton);
  place.append(help, sideways, table, said);
  place.closest("section").after(zoom, compare.node); // which are opened from beside the film too
  draw();
  return {
    draw(newer) { sheet = newer; draw(); },
    /** Enlarge the picture of a step that the film shows, where it is a sample. */
    enlarge(number) {
      const step = sheet ? sheet.steps.findIndex((each) => each.step === number) : -1;
      if (step >= 0 && address({ prompt: filmed(), step }) !== null) openZoom({ prompt: filmed(), step });
    },
  };
}
