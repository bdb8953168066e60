// The card of a base model: a button with its picture, its name and one verdict, and what else there is to know on
// demand. `tell` gives it the verdict: {fits, said, time, why, images}.
import { make } from "/ui/dialog.js";
import { say } from "/ui/shared/words.js";

/** Return {node, button, tell} of a release, or of a choice that is not a release. */
export function card(row, onclick) {
  const parts = pressed(row, onclick, [
    row.recommended && make("mark", { className: "badge", textContent: say("Recommended for ComfyUI") }),
    make("b", { textContent: row.name }),
  ], [row.licence_word && line(row.licence_word, `licence ${row.companies}`)], [
    row.gated && line(say("Accept its terms on Hugging Face first"), "slow"),
  ]);
  const facts = [
    row.own && say("The picture is a sample of your own training."),
    row.isSample && say("The picture is a true sample of it."),
    row.checkpoints && say("Also for {}", row.checkpoints),
    row.size,
  ].filter(Boolean);
  const why = make("p", {});
  const licence = row.licence && make("p", {}, make("span", { textContent: row.licence, translate: false }), ": ", make("span", { textContent: row.allows }));
  const details = make("details", {}, make("summary", {}, say("More about it"), make("span", { className: "unseen", textContent: ` ${row.name}`, translate: false })),
    ...facts.map((textContent) => make("p", { textContent })), ...[licence, why].filter(Boolean));
  const node = make("div", { className: row.folded ? "base folded" : "base" }, parts.button, ...(row.source ? [details] : []));
  return { node, button: parts.button, tell: (fit) => { parts.tell(fit); why.textContent = fit.why ?? ""; } };
}

/** Return {node, button, tell} of a model that another program has on this machine. */
export function foundCard(row, onclick) {
  const parts = pressed(row, onclick, [make("b", { textContent: row.name, translate: false })], [], [
    line(row.kind, "", false), line(say("{}, in {}", row.size, row.of), "quiet"),
  ]);
  return { node: make("div", { className: "base", title: row.source }, parts.button), ...parts };
}

/** Return the button of a card: picture, `head`, verdict, one line of facts with `facts` in it, what it is for, `foot`. */
function pressed(row, onclick, head, facts, foot) {
  const light = make("i", {});
  const words = make("strong", {});
  const load = make("span", { className: "load", textContent: row.download ?? "" });
  const besides = make("small", {}); // beside how long it takes
  const verdict = make("span", { className: "verdict fits" }, light, make("span", {}, words, besides));
  const small = make("span", { className: "images quiet", hidden: true }); // said as a warning once it is chosen
  const button = make("button", { type: "button", className: "base-card", onclick },
    make("img", { src: row.picture, alt: "", loading: "lazy", className: row.isSample || row.own ? "sample" : "" }),
    ...[...head, verdict, make("span", { className: "facts" }, load, ...facts.filter(Boolean)), line(row.good_for, "quiet"), ...foot, small].filter(Boolean));
  button.dataset.source = row.source;
  const tell = ({ fits = "", said = "", time = "", images = [], download = row.download }) => {
    verdict.className = `verdict fits ${fits}`;
    words.textContent = time || said;
    besides.textContent = time ? said : "";
    load.textContent = download ?? "";
    small.replaceChildren(...images.map((textContent) => make("span", { textContent })));
    for (const badge of button.querySelectorAll(".badge")) badge.hidden = fits === "bad" || fits === "slow"; // none is recommended here
    small.hidden = !images.length;
  };
  return { button, tell };
}

function line(textContent, className, translate = true) {
  return textContent && make("span", { textContent, className, translate });
}
