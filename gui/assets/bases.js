// The base models as cards: what each is good for, its licence, what there is to download, whether it fits this
// machine. One card after another is planned, so that the page can be used meanwhile; a folded one when it is unfolded.
// Above the cards stands what the chosen one lacks: a gated one leads to Hugging Face.
import { make } from "/ui/dialog.js";
import { signIn } from "/ui/share/sign_in.js";
import { browse } from "/ui/shared/browse.js";

const AUTO = { source: "auto", name: "Automatic", said: "Chosen for this machine" };
const MINIATURE = { source: "embedded", name: "Miniature", good_for: "To try things out, 64 px", said: "Nothing to download", licence: "Apache 2.0", allows: "free for every use", folded: true };
const OWN_FILE = { source: "", name: "Your own model", good_for: "A checkpoint from Civitai or of your own", said: "Browse \u2026 Its kind is recognised, and nothing is downloaded." };

export async function mount(place, server, act) {
  const lacks = make("div", { className: "gate notice warning", hidden: true });
  place.before(lacks);
  const draft = await draftId();
  const answer = await server.bases_list({ draft });
  const [first, ...others] = answer?.cards ?? [];
  const list = [AUTO, ...(first ? [first] : []), OWN_FILE, ...others, MINIATURE];
  let signedIn = answer?.signed_in;
  let chosen = answer?.chosen ?? "auto";
  const say = () => {
    const row = list.find((each) => each.source === chosen);
    const words = row?.gated ? gateOf(row, signedIn, () => signIn(server, { may: "read", done: ({ name }, shown) => {
      shown.end(`You are signed in as ${name}.`);
      signedIn = true;
      say();
    } })) : [];
    lacks.hidden = !words.length;
    lacks.replaceChildren(...words);
  };
  const choose = (source) => {
    chosen = source;
    const shown = cards.has(source) ? source : "";
    for (const button of cards.values()) button.setAttribute("aria-pressed", String(button.dataset.source === shown));
    if (!shown) cards.get("").querySelector(".fits").textContent = source;
    say();
  };
  const pick = (source) => { choose(source); place.chosen = source; act(); };
  const cards = new Map(list.map((row) => [row.source, card(row, () => (row.source ? pick(row.source) : browse("base", pick)))]));
  place.replaceChildren(...cards.values());
  const all = make("button", { type: "button", className: "all-bases", textContent: "Show all base models" });
  all.setAttribute("aria-expanded", "false");
  all.onclick = () => {
    const open = place.classList.toggle("open");
    all.setAttribute("aria-expanded", String(open));
    all.textContent = open ? "Show fewer" : "Show all base models";
    if (open) plan(list.filter((row) => row.folded));
  };
  place.after(all);
  choose(chosen);
  // A plan that a base is too large for has a button to leave it, and a try-out one to a base for other programs.
  document.addEventListener("click", ({ target }) => {
    const button = target.closest?.("[data-base]");
    if (button && place.isConnected) cards.get(button.dataset.base)?.click();
  });
  if (answer?.error) place.append(make("p", { className: "error notice", textContent: answer.error }));
  const plan = async (rows) => {
    for (const row of rows) {
      if (!place.isConnected) return;
      const told = cards.get(row.source).querySelector(".fits");
      if (!row.source || told.textContent) continue;
      const fit = await server.base_fits({ draft, source: row.source });
      if (!fit) return; // the server was ended
      Object.assign(told, { textContent: fit.said, title: fit.why, className: `fits ${fit.fits}` });
      if (row !== AUTO || !fit.picks) continue;
      cards.get("auto").querySelector("b").replaceChildren("Automatic: ", make("span", { textContent: fit.picks }));
    }
  };
  await plan(list.filter((row) => !row.folded));
}

function card({ source, name, good_for: goodFor, recommended, folded, said, here, size, licence, allows, gated, checkpoints }, onclick) {
  const line = (textContent, className) => textContent && make("span", { textContent, className });
  const button = make("button", { type: "button", className: folded ? "base-card folded" : "base-card", onclick },
    ...[recommended && make("mark", { className: "badge", textContent: "Recommended for ComfyUI" }), make("b", { textContent: name }),
      line(goodFor, ""), checkpoints && line(`Also for ${checkpoints}`, ""),
      line(size, "quiet"), line(said, here ? "good" : "quiet"), licence && terms(licence, allows),
      gated && line("Accept its terms on Hugging Face first", "slow"), make("span", { className: "fits quiet" })].filter(Boolean));
  button.dataset.source = source;
  return button;
}

function terms(licence, allows) {
  return make("span", { className: "quiet" }, make("span", { textContent: licence, translate: false }), ": ", make("span", { textContent: allows }));
}

function gateOf({ name, source }, signedIn, ask) {
  const page = make("a", { href: `https://huggingface.co/${source}`, target: "_blank", rel: "noopener", textContent: "its page on Hugging Face" });
  const words = make("p", {}, make("b", { textContent: `${name} asks you to accept its terms.` }), " ", "Do that once on ", page,
    signedIn ? ". You are signed in on this machine." : ", then sign in here, so that it can be downloaded.");
  return signedIn ? [words] : [words, make("button", { type: "button", textContent: "Sign in to Hugging Face", onclick: ask })];
}

/** Return the draft of the page; its id comes into the address when the page is filled. */
async function draftId() {
  for (;;) {
    const id = new URL(location.href).searchParams.get("draft");
    if (id && id !== "new") return id;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}
