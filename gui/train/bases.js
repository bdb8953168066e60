// The base models as cards: what each is good for, its licence, what there is to download, whether it fits this
// machine. One card after another is planned, so that the page can be used meanwhile; a folded one when it is unfolded.
// Above the cards stands what the chosen one lacks: a gated one leads to Hugging Face.
import { make } from "/ui/dialog.js";
import { signIn } from "/ui/share/sign_in.js";
import { browse } from "/ui/shared/browse.js";
import { ask } from "/ui/shared/ask.js";
import { say } from "/ui/shared/words.js";

const HUB = { hub_sign_in: (body) => ask("/share/sign-in", body) };
const AUTO = { source: "auto", name: say("Automatic"), said: say("Chosen for this machine") };
const MINIATURE = { source: "embedded", name: say("Miniature"), good_for: say("To try things out, 64 px"), said: say("Nothing to download"), licence: "Apache 2.0", allows: say("free for every use"), folded: true };
const OWN_FILE = { source: "", name: say("Your own model"), good_for: say("A checkpoint from Civitai or of your own"), said: say("Browse \u2026 Its kind is recognised, and nothing is downloaded.") };

/** The cards in `place`, with the field for other models after them; `pick` hears which source was chosen. */
export class Bases {
  constructor(place, { draft, leaving, pick }) {
    Object.assign(this, { place, draft, leaving, pick, chosen: "auto", cards: new Map(), list: [], isOpen: false });
    this.others = place.parentElement.querySelector(".other-base"); // the field for other models
    this.lacks = make("div", { className: "gate notice warning", hidden: true });
    this.all = make("button", { type: "button", className: "all-bases", textContent: say("Show all base models"), onclick: () => this.unfold() });
    this.all.setAttribute("aria-expanded", "false");
    place.before(this.lacks);
    place.after(this.all);
    // A plan that a base is too large for has a button to leave it, and a try-out one to a base for other programs.
    document.addEventListener("click", ({ target }) => {
      const button = target.closest?.("[data-base]");
      if (button) pick(button.dataset.base);
    }, { signal: leaving });
  }

  /** Draw the cards, once. */
  async open() {
    if (this.isOpen) return;
    this.isOpen = true;
    const answer = await ask("/train/bases", { draft: this.draft });
    this.isOpen = !answer.isAway;
    const [first, ...others] = answer.cards ?? [];
    this.list = [AUTO, ...(first ? [first] : []), OWN_FILE, ...others, MINIATURE];
    this.signedIn = answer.signed_in;
    this.cards = new Map(this.list.map((row) => [row.source, card(row, () => this.press(row.source))]));
    this.place.replaceChildren(...this.cards.values());
    if (answer.error) this.place.append(make("p", { className: "error notice", textContent: answer.error }));
    const options = (answer.choices ?? []).map(([value, textContent]) => make("option", { value, textContent }));
    this.others.querySelector("datalist").replaceChildren(...options);
    this.choose(this.chosen);
    await this.plan(this.list.filter((row) => !row.folded));
  }

  press(source) {
    if (source) this.pick(source);
    else browse("base", this.pick);
  }

  /** Show which base the draft has. */
  choose(source) {
    this.chosen = source;
    if (!this.cards.size) return;
    const shown = this.cards.has(source) ? source : "";
    for (const button of this.cards.values()) button.setAttribute("aria-pressed", String(button.dataset.source === shown));
    this.cards.get("").querySelector(".fits").textContent = shown ? "" : source;
    this.sayWhatIsLacking();
  }

  sayWhatIsLacking() {
    const row = this.list.find((each) => each.source === this.chosen);
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
    if (open) this.plan(this.list.filter((row) => row.folded));
  }

  async plan(rows) {
    for (const row of rows) {
      const told = this.cards.get(row.source).querySelector(".fits");
      if (!row.source || told.textContent) continue;
      const fit = await ask("/train/fits", { draft: this.draft, source: row.source });
      if (fit.isAway || this.leaving.aborted) return;
      Object.assign(told, { textContent: fit.said, title: fit.why, className: `fits ${fit.fits}` });
      if (row !== AUTO || !fit.picks) continue;
      this.cards.get("auto").querySelector("b").replaceChildren(say("Automatic:"), " ", make("span", { textContent: fit.picks, translate: false }));
    }
  }
}

function card({ source, name, good_for: goodFor, recommended, folded, said, here, size, licence, allows, gated, checkpoints }, onclick) {
  const line = (textContent, className) => textContent && make("span", { textContent, className });
  const button = make("button", { type: "button", className: folded ? "base-card folded" : "base-card", onclick },
    ...[recommended && make("mark", { className: "badge", textContent: say("Recommended for ComfyUI") }), make("b", { textContent: name }),
      line(goodFor, ""), checkpoints && line(say("Also for {}", checkpoints), ""),
      line(size, "quiet"), line(said, here ? "good" : "quiet"), licence && terms(licence, allows),
      gated && line(say("Accept its terms on Hugging Face first"), "slow"), make("span", { className: "fits quiet" })].filter(Boolean));
  button.dataset.source = source;
  return button;
}

function terms(licence, allows) {
  return make("span", { className: "quiet" }, make("span", { textContent: licence, translate: false }), ": ", make("span", { textContent: allows }));
}

function gateOf({ name, source }, signedIn, signInPressed) {
  const page = make("a", { href: `https://huggingface.co/${source}`, target: "_blank", rel: "noopener", textContent: say("its page on Hugging Face") });
  const words = make("p", {}, make("b", { textContent: say("{} asks you to accept its terms.", name) }), " ", say("Do that once on"), " ", page,
    say(signedIn ? ". You are signed in on this machine." : ", then sign in here, so that it can be downloaded."));
  return signedIn ? [words] : [words, make("button", { type: "button", textContent: say("Sign in to Hugging Face"), onclick: signInPressed })];
}
