// The base models as cards: a picture, one verdict (how long, whether it fits), what it is for, the rest on demand. One card after another is planned, so that the page can be used meanwhile, a folded one
// when it comes into sight; a card keeps its place, so that no click hits another. Below are the models that other programs have here already.
// Above the cards stands what the chosen one lacks: a gated one leads to Hugging Face.
import { make } from "/ui/dialog.js";
import { signIn } from "/ui/share/sign_in.js";
import { browse } from "/ui/shared/browse.js";
import { ask } from "/ui/shared/ask.js";
import { say } from "/ui/shared/words.js";
import { card, foundCard } from "/ui/train/base_card.js";

const HUB = { hub_sign_in: (body) => ask("/share/sign-in", body) };
const emblem = (family) => `/train/emblem.svg?${new URLSearchParams({ family, of: "" })}`;
const AUTO = { source: "auto", name: say("Automatic"), good_for: say("Chosen for this machine"), picture: emblem("auto") };
const MINIATURE = { source: "embedded", name: say("Miniature"), good_for: say("To try things out, 64 px"), picture: "/ui/miniature.png", isSample: true, download: say("nothing to download"), subjects: [], companies: "free", licence_word: say("Free for companies"), licence: "Apache 2.0", allows: say("free for every use"), folded: true };
const MINIATURE_EDIT = { ...MINIATURE, source: "embedded-edit", name: say("Miniature that edits"), good_for: say("To try out pairs, 64 px"), picture: "/ui/miniature_edit.png", edits: true };
const MINIATURES = [MINIATURE, MINIATURE_EDIT];
const OWN_FILE = { source: "", name: say("Your own model"), good_for: say("A checkpoint of Civitai or of your own: its kind is recognised."), picture: emblem("own"), download: say("Browse \u2026") };
/** The card of a file of one's own: it names checkpoints that people bring, those of the base that is recommended. */
const ownFile = (cards) => {
  const examples = cards.find((row) => row.recommended)?.checkpoints;
  return examples ? { ...OWN_FILE, good_for: say("A checkpoint of Civitai or of your own, such as {}: its kind is recognised.", examples) } : OWN_FILE;
};
const STAYING = new Set([AUTO.source, OWN_FILE.source]); // whatever is filtered
const SUBJECTS = new Set(["people", "anime", "photos"]);
const FOUND_SHOWN = 8;
const ESTIMATING = { fits: "awaited", said: say("Estimating \u2026") };
const FILTERS = [
  ["people", say("People"), ({ row }) => row.subjects?.includes("people")],
  ["anime", say("Anime"), ({ row }) => row.subjects?.includes("anime")],
  ["photos", say("Photos"), ({ row }) => row.subjects?.includes("photos")],
  ["edits", say("Edits images"), ({ row }) => row.edits === true],
  ["fits", say("Fits here"), ({ fit }) => fit?.fits !== "bad"],
  ["companies", say("Free for company work"), ({ row }) => row.companies === "free"],
];

/** The cards in `place`, with the field for other models after them; `pick` hears which source was chosen. `kept`
 *  returns a promise of when the server has all that was typed. */
export class Bases {
  constructor(place, { draft, leaving, kept, pick }) {
    Object.assign(this, { place, draft, leaving, kept, pick, chosen: "auto", cards: new Map(), found: new Map(), isOpen: false, turn: 0, fitOfOwn: null });
    this.others = place.parentElement.querySelector(".other-base"); // the field for other models
    this.lacks = make("div", { className: "gate notice warning", hidden: true });
    this.all = make("button", { type: "button", className: "all-bases", textContent: say("Show all base models"), onclick: () => this.unfold() });
    this.all.setAttribute("aria-expanded", "false");
    this.none = make("p", { className: "quiet", hidden: true, textContent: say("No base model is all of that: take a filter off.") });
    this.none.setAttribute("role", "status");
    this.here = make("details", { className: "found-models", hidden: true });
    place.parentElement.querySelector(".base-head").append(this.filters());
    place.before(this.lacks);
    place.parentElement.querySelector(".more-bases").append(this.none, this.all, this.here);
    // A plan that a base is too large for has a button to leave it, and a try-out one to a base for other programs.
    document.addEventListener("click", ({ target }) => {
      const button = target.closest?.("[data-base]");
      if (button?.dataset.base === "") this.press("");
      else if (button) pick(button.dataset.base, button.dataset.afresh?.split(" "));
    }, { signal: leaving });
  }

  filters() {
    const chips = FILTERS.map(([value, text]) => make("label", {}, make("input", { type: "checkbox", value, onchange: () => this.filter() }), text));
    this.chips = make("fieldset", { className: "base-filters field choice" }, make("legend", { className: "unseen", textContent: say("Show only base models for") }), ...chips);
    return this.chips;
  }

  /** Draw the cards, once; then look for models of other programs. */
  async open() {
    if (this.isOpen) {
      await this.plan();
      await this.planFound();
      return;
    }
    this.isOpen = true;
    const answer = await ask("/train/bases", { draft: this.draft });
    this.isOpen = !answer.isAway;
    this.signedIn = answer.signed_in;
    const cards = answer.cards ?? [];
    for (const row of [AUTO, ...cards, ownFile(cards), ...MINIATURES]) {
      this.cards.set(row.source, { ...card(row, () => this.press(row.source)), row, fit: null });
    }
    this.place.replaceChildren(...[...this.cards.values()].map(({ node }) => node));
    if (answer.error) this.place.append(make("p", { className: "error notice", textContent: answer.error }));
    const options = (answer.choices ?? []).map(([value, textContent]) => make("option", { value, textContent }));
    this.others.querySelector("datalist").replaceChildren(...options);
    this.choose(this.chosen);
    this.order();
    this.show(); // a filter may be on before the cards are here
    const found = this.look();
    await this.plan();
    await found;
    await this.planFound();
  }

  press(source) {
    if (source) this.pick(source);
    else browse("base", this.pick);
  }

  /** Show which base the draft has. */
  choose(source) {
    if (source !== this.chosen) this.fitOfOwn = null;
    this.chosen = source;
    if (!this.cards.size) return;
    const shown = this.cards.has(source) || this.found.has(source) ? source : "";
    for (const { button } of [...this.cards.values(), ...this.found.values()]) {
      button.setAttribute("aria-pressed", String(button.dataset.source === shown));
    }
    if (shown) this.cards.get("").tell({}); else this.tellOwn();
    this.sayWhatIsLacking();
  }

  /** Say on the card of the own models which one is chosen, and its verdict once the plan has it. */
  tellOwn() {
    const { said, line, is_absent: isAbsent, ...fit } = this.fitOfOwn ?? {};
    const verdict = isAbsent ? "" : line ?? said; // which the plan says, with what to do
    this.cards.get("")?.tell({ ...fit, said: [nameOf(this.chosen), verdict].filter(Boolean).join(": "), download: "" });
  }

  sayWhatIsLacking() {
    const row = this.cards.get(this.chosen)?.row;
    const words = row?.gated ? gateOf(row, this.signedIn, () => signIn(HUB, { may: "read", done: ({ name }, shown) => {
      shown.end(say("You are signed in as {}.", name));
      this.signedIn = true;
      this.sayWhatIsLacking();
    } })) : [];
    this.lacks.hidden = !words.length;
    this.lacks.replaceChildren(...words);
  }

  unfold() {
    const open = this.place.classList.toggle("open");
    this.all.setAttribute("aria-expanded", String(open));
    this.all.textContent = say(open ? "Show fewer" : "Show all base models");
    this.others.hidden = !open;
    if (open) this.plan();
  }

  filter() {
    this.order();
    this.show();
    this.plan();
  }

  /** Put those first that are made for a subject which is asked for; without one all are in their own order. */
  order() {
    const asked = new Set([...this.chips.querySelectorAll(":checked")].map(({ value }) => value));
    const isMadeFor = ({ row }) => asked.has(row.subjects?.[0]);
    const all = [...this.cards.values()];
    const [first, rest] = [all.slice(0, 1), all.slice(1)]; // the automatic one, unless no card is there yet
    this.place.append(...[...first, ...rest.filter(isMadeFor), ...rest.filter((each) => !isMadeFor(each))].map(({ node }) => node));
  }

  /** Begin with the base models that can learn from pairs, or with all; who takes the filter off has it off. */
  onlyEditing(is) {
    if (this.isOfPairs === is) return;
    this.isOfPairs = is;
    this.chips.querySelector("[value=edits]").checked = is;
    this.show();
  }

  /** Show the cards that pass each filter; a subject passes with any of those that are chosen. */
  show() {
    const on = new Set([...this.chips.querySelectorAll(":checked")].map(({ value }) => value));
    const chosen = FILTERS.filter(([name]) => on.has(name));
    const subjects = chosen.filter(([name]) => SUBJECTS.has(name));
    const others = chosen.filter(([name]) => !SUBJECTS.has(name));
    this.place.classList.toggle("filtered", on.size > 0);
    let count = 0;
    for (const each of this.cards.values()) {
      if (STAYING.has(each.row.source)) continue;
      const passes = (!subjects.length || subjects.some(([, , test]) => test(each))) && others.every(([, , test]) => test(each));
      each.node.hidden = !passes;
      count += passes;
    }
    this.none.hidden = count > 0 || !this.cards.size;
  }

  isInSight({ row, node }) {
    return !node.hidden && (!row.folded || ["open", "filtered"].some((name) => this.place.classList.contains(name)));
  }

  isAwaited(each) {
    return !each.fit && Boolean(each.row.source) && this.isInSight(each);
  }

  awaited() {
    return [...this.cards.values()].filter((each) => this.isAwaited(each));
  }

  /** Plan the cards in sight that have no verdict yet, one after another. */
  async plan() {
    this.isAskedAgain = true;
    if (this.planning) return;
    this.planning = true;
    while (this.isAskedAgain) {
      this.isAskedAgain = false;
      for (const each of this.awaited()) each.tell(ESTIMATING);
      for (const each of this.cards.values()) {
        if (!this.isAwaited(each)) continue;
        const fit = await this.verdict(each);
        if (!fit) break;
        if (each.row === AUTO && fit.picks) this.sayWhatIsPicked(each, fit);
      }
    }
    this.planning = false;
    if (this.leaving.aborted) return;
    for (const each of this.awaited()) each.tell({}); // the server is away
    this.show();
  }

  /** Ask for the verdict on a card; null where the page is left or the server away. */
  async verdict(each) {
    await this.kept(); // else it would be of the settings before
    const { turn } = this;
    const fit = await ask("/train/fits", { draft: this.draft, source: each.row.source });
    if (fit.isAway || this.leaving.aborted) return null;
    if (turn === this.turn) { each.fit = fit; each.tell(fit); this.show(); } else this.isAskedAgain = true;
    return fit;
  }

  /** Take what the plan of the draft says of the chosen base: its card and the plan say the same. */
  planned(fit) {
    const each = this.cards.get(this.chosen) ?? this.found.get(this.chosen);
    if (!fit) return;
    this.fitOfOwn = each ? null : fit;
    if (!each) this.tellOwn();
    if (!each?.row.source) return;
    each.fit = fit;
    each.tell(fit);
    if (each.row === AUTO && fit.picks) this.sayWhatIsPicked(each, fit);
  }

  /** What the cards say is of settings or images that have changed: they say it no longer, and are asked for anew. */
  forget() {
    this.turn += 1;
    if (this.fitOfOwn) { this.fitOfOwn = null; this.tellOwn(); }
    for (const each of [...this.cards.values(), ...this.found.values()]) {
      each.fit = null;
      if (each.row.source) each.tell(this.isInSight(each) ? ESTIMATING : {});
    }
  }

  sayWhatIsPicked({ button, about }, { picks, picked }) {
    button.querySelector("b").replaceChildren(say("Automatic:"), " ", make("span", { textContent: picks, translate: false }));
    const row = this.cards.get(picked)?.row;
    if (!row) return;
    const picture = button.querySelector("img");
    picture.src = row.picture;
    picture.classList.toggle("sample", Boolean(row.isSample || row.own));
    button.querySelector(".load").textContent = row.download ?? "";
    button.querySelector(":scope > .quiet").textContent = row.good_for;
    about(row);
  }

  // ---- models that other programs have on this machine

  async look(named = "") {
    const answer = await ask("/train/found", { named });
    if (this.leaving.aborted) return;
    const models = answer.models ?? [];
    this.found = new Map(models.map((row) => [row.source, { ...foundCard(row, () => this.press(row.source)), row, fit: null }]));
    const list = make("div", { className: "bases found" }, ...[...this.found.values()].map(({ node }) => node));
    const rest = models.length - FOUND_SHOWN;
    const more = rest > 0 ? make("button", { type: "button", textContent: say("Show {#} more", rest), onclick: () => { list.classList.add("open"); more.remove(); } }) : null;
    const another = make("button", { type: "button", textContent: say("Look in another folder"), onclick: () => browse("models", (folder) => this.look(folder)) });
    const said = [
      answer.error,
      models.length ? "" : say("None was found where ComfyUI, Forge, A1111, StabilityMatrix and others keep theirs."),
      answer.others,
      ...(answer.broken ?? []).map(({ name, why }) => say("{} cannot be read: {}", name, why)),
    ].filter(Boolean);
    this.here.hidden = false;
    this.here.open ||= models.length > 0;
    this.here.replaceChildren(
      make("summary", { textContent: say("Checkpoints found on this machine") }), list,
      ...said.map((textContent) => make("p", { className: "quiet", textContent })),
      make("p", { className: "actions" }, ...[more, another].filter(Boolean)),
    );
    this.choose(this.chosen);
    if (named) await this.planFound();
  }

  async planFound() {
    const { turn } = this;
    for (const each of [...this.found.values()].slice(0, FOUND_SHOWN)) {
      if (!each.fit && !(await this.verdict(each))) return;
      if (turn !== this.turn) return; // who changed the settings asks for all of them
    }
  }
}

function nameOf(source) { return source.split(/[\\/]/).pop(); }

function gateOf({ name, source }, signedIn, signInPressed) {
  const page = make("a", { href: `https://huggingface.co/${source}`, target: "_blank", rel: "noopener", textContent: say("its page on Hugging Face") });
  const words = make("p", {}, make("b", { textContent: say("{} asks you to accept its terms.", name) }), " ", say("Do that once on"), " ", page,
    say(signedIn ? ". You are signed in on this machine." : ", then sign in here, so that it can be downloaded."));
  return signedIn ? [words] : [words, make("button", { type: "button", textContent: say("Sign in to Hugging Face"), onclick: signInPressed })];
}
