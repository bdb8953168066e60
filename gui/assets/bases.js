// The base models as cards: what each is, what there is to download, whether it fits this machine. One
// card after another is planned, so that the page can be used meanwhile.

const make = (name, attributes, ...children) => {
  const node = Object.assign(document.createElement(name), attributes);
  node.append(...children);
  return node;
};

const OWN = [
  { source: "auto", name: "Chosen for this machine", owner: "lora-train", said: "Stable Diffusion 1.5 on a GPU, else the miniature" },
  { source: "embedded", name: "Miniature", owner: "built in", said: "nothing to download; to try things out" },
];

export async function mount(place, server, act) {
  const draft = await draftId();
  const answer = await server.bases_list({ draft });
  const list = [...OWN, ...(answer?.cards ?? [])];
  const cards = new Map(list.map((row) => [row.source, card(row, act, place)]));
  place.replaceChildren(...cards.values());
  mark(place, answer?.chosen ?? "auto");
  if (answer?.error) place.append(make("p", { className: "error notice", textContent: answer.error }));
  for (const row of answer?.cards ?? []) {
    if (!place.isConnected) return;
    const fit = await server.base_fits({ draft, source: row.source });
    if (!fit) return; // the server was ended
    const said = cards.get(row.source).querySelector(".fits");
    said.textContent = fit.fits === null ? "not known" : fit.fits ? "Fits this machine" : "Does not fit this machine";
    said.title = fit.said;
    said.className = `fits ${fit.fits ? "good" : "bad"}`;
  }
}

function card({ source, name, owner, said, here }, act, place) {
  const button = make("button", { type: "button", className: "base-card", onclick: () => { mark(place, source); act({ source }); } },
    make("b", { textContent: name }), make("small", { textContent: owner }),
    make("span", { textContent: said, className: here ? "good" : "quiet" }), make("span", { className: "fits quiet" }));
  button.dataset.source = source;
  return button;
}

function mark(place, source) {
  for (const button of place.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.source === source));
}

/** Return the draft of the page; its id comes into the address when the page is filled. */
async function draftId() {
  for (;;) {
    const id = new URL(location.href).searchParams.get("draft");
    if (id && id !== "new") return id;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}
