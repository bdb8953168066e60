// The page Compare: two runs, a step of each, their samples of the same prompts side by side. What is
// chosen stands in the address, so that a reload and a link show the same.
import { make } from "/ui/dialog.js";
import { ask } from "/ui/shared/ask.js";
import { wipe } from "/ui/shared/wipe.js";
import { say } from "/ui/shared/words.js";

export async function mount(main, leaving) {
  const place = main.querySelector(".compare");
  const runs = JSON.parse(place.dataset.runs);
  const said = make("p", { className: "quiet" });
  said.setAttribute("role", "status");
  const differences = make("p", { className: "differences" });
  const base = make("p", { className: "notice warning", hidden: true });
  const rows = make("div", { className: "pairs", tabIndex: 0 });
  rows.setAttribute("role", "region");
  rows.setAttribute("aria-label", say("Pictures side by side"));
  const asked = new URL(location.href).searchParams;
  const curves = make("div", { id: "how-they-learned", className: "curves" });
  const large = enlarged();
  const draw = () => { show(rows, said, sides, (prompt) => large.open(prompt, sides)); differ(differences, sides); onlyBase(base, sides); };
  const drawCurves = async () => {
    const names = sides.map((side) => side.run.value);
    const { html, said: remark } = await ask("/compare/curves", { runs: names });
    if (leaving.aborted || sides.some((side, index) => side.run.value !== names[index])) return;
    // Markup of our own server, in which every text is escaped.
    curves.innerHTML = html ? `<h2></h2>${html}` : "";
    if (html) curves.firstChild.textContent = say("How they learned");
    if (remark) curves.firstChild.after(make("p", { className: "quiet", textContent: remark, translate: false }));
  };
  const [one, other] = JSON.parse(place.dataset.first);
  const first = asked.get("a") ?? one;
  const second = asked.get("b") ?? (first === one ? other : runs.find((name) => name !== first) ?? first);
  const sides = [
    new Side(say("First"), "a", runs, first, draw, leaving),
    new Side(say("Second"), "b", runs, second, draw, leaving),
  ];
  const fields = make("div", { className: "sides" }, ...sides.map((side) => side.node));
  place.replaceChildren(fields, base, differences, said, rows, curves, large.node);
  for (const side of sides) side.run.addEventListener("change", drawCurves);
  drawCurves();
  await Promise.all(sides.map((side) => side.read()));
  const drawn = sides.map((side) => side.drawn());
  // Of one training the base beside its best; of two, the last step of both: at step 0 both are the base.
  const common = first === second ? undefined : drawn[0].findLast((step) => step > 0 && drawn[1].includes(step));
  sides[0].fill(first === second ? drawn[0][0] : common);
  sides[1].fill(common);
}

/** One of the two: which run, which step of it, and its sheet of samples. */
class Side {
  constructor(title, key, runs, chosen, draw, leaving) {
    Object.assign(this, { key, draw, leaving, sheet: null });
    this.run = make("select", { onchange: () => this.load() }, ...runs.map((name) => make("option", { value: name, textContent: name, translate: false })));
    if (runs.includes(chosen)) this.run.value = chosen;
    this.step = make("select", { onchange: () => this.chosen() });
    this.facts = make("p", { className: "facts" });
    const label = (text, field) => make("label", {}, text, field);
    this.node = make("fieldset", { className: "panel" }, make("legend", { textContent: title }),
      label(say("Training"), this.run), label(say("Step"), this.step), this.facts);
  }

  async load() {
    await this.read();
    this.fill();
  }

  /** Ask for the sheet, again where another training was chosen meanwhile. */
  async read() {
    let name, sheet;
    do {
      name = this.run.value;
      sheet = await ask("/compare/sheet", { run: name });
    } while (name !== this.run.value);
    this.sheet = sheet;
  }

  /** Return the steps at which the first prompt was drawn. */
  drawn() {
    return (this.sheet.steps ?? []).filter((_, index) => this.sheet.images[0]?.[index]).map(({ step }) => step);
  }

  /** Offer the steps: first the one in the address, else the one that both have, else the best, else the last drawn. */
  fill(common) {
    const steps = this.sheet.steps ?? [];
    this.facts.textContent = (this.sheet.facts ?? []).join(" \u00b7 ");
    this.step.replaceChildren(...steps.map((step, index) => make("option", { value: index, textContent: step.best ? say("{text}, the best", step.name) : step.name })));
    const asked = new URL(location.href).searchParams.get(`${this.key}-step`);
    const wished = [Number(asked ?? NaN), common, steps.find((step) => step.best)?.step, this.drawn().at(-1)];
    this.step.value = wished.map((at) => steps.findIndex(({ step }) => step === at)).find((index) => index >= 0) ?? 0;
    this.chosen();
  }

  chosen() {
    if (this.leaving.aborted) return;
    const address = new URL(location.href);
    address.searchParams.set(this.key, this.run.value);
    const step = this.sheet.steps?.[this.step.value];
    if (step) address.searchParams.set(`${this.key}-step`, step.step);
    history.replaceState(history.state, "", address);
    this.draw();
  }

  /** Return the picture of a prompt at the chosen step as {source, name, text}; no source where it was not drawn. */
  drew(prompt) {
    const index = this.sheet.prompts.findIndex((other) => same(other, prompt));
    const step = this.sheet.steps[this.step.value]?.name ?? ""; // none yet before the steps are filled in
    const [name, text] = [`${this.run.value} \u00b7 ${step}`, `${this.run.value}, ${step}: ${prompt.text}`];
    return { source: this.sheet.images[index]?.[this.step.value] ?? null, name, text };
  }

  /** Return the button of that picture, which enlarges the pair. */
  picture(prompt, enlarge) {
    const { source, name, text } = this.drew(prompt);
    if (!source) return make("span", { className: "missing", textContent: say("not drawn at this step") });
    return make("button", { type: "button", className: "large", onclick: () => enlarge(prompt), title: say("Compare two pictures") },
      make("img", { src: source, alt: text, translate: false }), make("small", { textContent: name, translate: false }));
  }
}

/** Return the two pictures of a prompt over each other, large, as {node, open}. */
function enlarged() {
  const words = make("p", { className: "prompt", dir: "auto", translate: false });
  const names = ["A", "B"].map((letter) => ({ letter, of: make("span", { translate: false }) }));
  const both = wipe(make("p", { className: "names" }, ...names.map(({ letter, of }) => make("span", {}, make("b", { textContent: letter }), " ", of))), words);
  return {
    node: both.node,
    open(prompt, sides) {
      const drawn = sides.map((side) => side.drew(prompt));
      drawn.forEach(({ source, name }, index) => { names[index].of.textContent = source ? name : `${name}: ${say("not drawn at this step")}`; });
      words.textContent = prompt.text;
      both.show(drawn);
      both.open();
    },
  };
}

/** Name the sides of which there is nothing to see yet but what their base draws. */
function onlyBase(place, sides) {
  const names = sides.filter(({ sheet }) => sheet?.steps?.length && sheet.steps.every(({ step }) => step === 0)).map(({ run }) => run.value);
  place.hidden = names.length === 0;
  place.textContent = say("Of {} there are only pictures of the base so far.", [...new Set(names)].join(", "));
}

const same = (one, other) => one.text === other.text && one.seed === other.seed;

function show(rows, said, sides, enlarge) {
  const [one, other] = sides.map((side) => side.sheet);
  if (!one || !other) return;
  const error = one.error ?? other.error;
  const shared = error ? [] : one.prompts.filter((prompt) => other.prompts.some((found) => same(found, prompt)));
  const left = error ? 0 : one.prompts.length + other.prompts.length - 2 * shared.length;
  said.className = error ? "error notice" : "quiet";
  said.hidden = !error && shared.length > 0 && left === 0;
  said.textContent = error ?? (shared.length
    ? say("Prompts that both have, with the same seed: {}. Prompts that only one of them has: {}.", shared.length, left)
    : "");
  rows.hidden = shared.length === 0;
  if (!error && !shared.length) said.replaceChildren(...apart(one, other));
  rows.replaceChildren(...shared.map((prompt) => make("figure", {}, caption(prompt), ...sides.map((side) => side.picture(prompt, enlarge)))));
}

/** Say that two trainings have no prompt in common, and lead to where the same one is drawn with both. */
function apart(one, other) {
  const text = say("They have no prompt in common, so their pictures cannot be compared.");
  if (!one.lora || !other.lora || one.base !== other.base) return [text];
  const address = `/library?${new URLSearchParams({ file: one.lora, beside: other.lora })}`;
  return [`${text} `, make("a", { href: address, className: "ui-button primary", textContent: say("Draw the same prompt with both") })];
}

function caption(prompt) {
  return make("figcaption", { textContent: prompt.text || say("(empty prompt)"), dir: "auto", translate: !prompt.text });
}

/** Name the settings in which the two differ. */
function differ(place, sides) {
  const [one, other] = sides.map((side) => side.sheet?.settings ?? {});
  const names = [...new Set([...Object.keys(one), ...Object.keys(other)])].filter((name) => one[name] !== other[name]);
  place.replaceChildren(make("b", { textContent: names.length ? say("What differs") : say("Their settings are the same") }),
    ...names.map((name) => make("span", {}, make("span", { textContent: name }), ": ",
      make("span", { textContent: `${one[name] ?? "\u2013"} | ${other[name] ?? "\u2013"}`, translate: false }))));
}
