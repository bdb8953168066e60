// The base models as cards: what each is, its licence, what there is to download, whether it fits this machine.
// One card after another is planned, so that the page can be used meanwhile. A gated one leads to the Hub.
import { make } from "/ui/dialog.js";
import { browse } from "/ui/browse.js";
import { signIn } from "/ui/sign_in.js";

const OWN = [
  { source: "auto", name: "Chosen for this machine", owner: "lora-train", said: "The smallest full base on a GPU, else the miniature" },
  { source: "embedded", name: "Miniature", owner: "built in", said: "Nothing to download", size: "To try things out, 64 px", licence: "Apache 2.0", allows: "free for every use" },
];

const OWN_FILE = { source: "", name: "Your own model", owner: "a file or folder on this machine", said: "Browse \u2026", size: "A checkpoint from Civitai or the Hub" };

export async function mount(place, server, act) {
  const gate = make("div", { className: "gate notice", hidden: true });
  place.after(gate);
  const draft = await draftId();
  const answer = await server.bases_list({ draft });
  const list = [...OWN, ...(answer?.cards ?? [])];
  let signedIn = answer?.signed_in;
  const choose = (source) => {
    for (const button of place.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.source === source));
    const row = list.find((each) => each.source === source);
    gate.hidden = !row?.gated;
    if (row?.gated) gate.replaceChildren(...gateOf(row, signedIn, () => signIn(server, { may: "read", done: ({ name }, shown) => {
      shown.end(`You are signed in as ${name}.`);
      signedIn = true;
      choose(source);
    } })));
  };
  const cards = new Map(list.map((row) => [row.source, card(row, () => { choose(row.source); act({ source: row.source }); })]));
  const own = card(OWN_FILE, () => browse(server, "base", (source) => { chooseOwn(source); act({ source }); }));
  const chooseOwn = (source) => {
    choose("");
    own.setAttribute("aria-pressed", "true");
    own.querySelector(".fits").textContent = source;
  };
  place.replaceChildren(...[...cards.values()].slice(0, 1), own, ...[...cards.values()].slice(1));
  const all = make("button", { type: "button", className: "all-bases", textContent: "Show all base models" });
  all.setAttribute("aria-expanded", "false");
  all.onclick = () => {
    const open = place.classList.toggle("open");
    all.setAttribute("aria-expanded", String(open));
    all.textContent = open ? "Show fewer" : "Show all base models";
  };
  place.after(all);
  const chosen = answer?.chosen ?? "auto";
  if (cards.has(chosen)) choose(chosen);
  else chooseOwn(chosen);
  // A plan that a base is too large for has a button to leave it.
  document.addEventListener("click", ({ target }) => {
    const button = target.closest?.("[data-base]");
    if (button && place.isConnected) cards.get(button.dataset.base)?.click();
  });
  if (answer?.error) place.append(make("p", { className: "error notice", textContent: answer.error }));
  for (const source of cards.keys()) {
    if (!place.isConnected) return;
    const fit = await server.base_fits({ draft, source });
    if (!fit) return; // the server was ended
    Object.assign(cards.get(source).querySelector(".fits"), { textContent: fit.said, title: fit.why, className: `fits ${fit.fits}` });
    if (source === "auto" && fit.picks) cards.get(source).querySelector("small").textContent = fit.picks;
  }
}

function card({ source, name, owner, said, here, size, licence, allows, gated, family, checkpoints }, onclick) {
  const line = (textContent, className) => textContent && make("span", { textContent, className });
  const button = make("button", { type: "button", className: "base-card", onclick },
    emblem(family ?? source), make("b", { textContent: name }), make("small", { textContent: owner }),
    ...[checkpoints && line(`Also for ${checkpoints}`, ""), line(size, "quiet"), line(said, here ? "good" : "quiet"), licence && terms(licence, allows),
      gated && line("Accept its terms on the Hub first", "slow"), make("span", { className: "fits quiet" })].filter(Boolean));
  button.dataset.source = source;
  return button;
}

function terms(licence, allows) {
  return make("span", { className: "quiet" }, make("span", { textContent: licence, translate: false }), ": ", make("span", { textContent: allows }));
}

/** Return a pattern of its own for each word: two discs before a slope of colours. */
function emblem(word) {
  let seed = 7;
  for (const sign of word) seed = (seed * 31 + sign.codePointAt(0)) % 99991;
  const mark = make("i", { className: "emblem" });
  mark.setAttribute("aria-hidden", "true");
  const numbers = { hue: (seed * 137) % 360, turn: `${(seed >> 2) % 180}deg`, x: `${15 + (seed % 7) * 6}%`, y: `${20 + (seed % 5) * 15}%`, z: `${60 + (seed % 6) * 6}%` };
  for (const [name, value] of Object.entries(numbers)) mark.style.setProperty(`--${name}`, value);
  return mark;
}

function gateOf({ name, source }, signedIn, ask) {
  const page = make("a", { href: `https://huggingface.co/${source}`, target: "_blank", rel: "noopener", textContent: "its page on the Hub" });
  const words = make("p", {}, make("b", { textContent: `${name} asks you to accept its terms.` }), " ", "Do that once on ", page,
    signedIn ? ". You are signed in on this machine." : ", then sign in here, so that it can be downloaded.");
  return signedIn ? [words] : [words, make("button", { type: "button", textContent: "Sign in to the Hub", onclick: ask })];
}

/** Return the draft of the page; its id comes into the address when the page is filled. */
async function draftId() {
  for (;;) {
    const id = new URL(location.href).searchParams.get("draft");
    if (id && id !== "new") return id;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}
