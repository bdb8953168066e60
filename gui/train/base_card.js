// The card of a base model: a button with its picture, its name, one verdict and what it is for; what else there is to
// know is on demand. On the picture stand what it costs to have it, and what not everybody may do with it. `tell` gives
// it the verdict: {fits, said, line, why, images, is_try_out}.
import { make } from "/ui/dialog.js";
import { say } from "/ui/shared/words.js";

/** Return {node, button, tell, about} of a release, or of a choice that is not a release. */
export function card(row, onclick) {
  const isOpen = row.companies === "free";
  const parts = pressed(row, onclick, [
    row.recommended && make("mark", { className: "badge", textContent: say("Recommended for ComfyUI") }),
    row.licence_word && !isOpen && tag(row.licence_word),
  ], [make("b", { textContent: row.name })], [line(row.good_for, "quiet")]);
  const facts = make("div", {});
  const small = make("div", {}); // said as a warning once it is chosen
  const why = make("p", {});
  const details = make("details", {}, make("summary", {}, say("More about it"), make("span", { className: "unseen", textContent: ` ${row.name}`, translate: false })),
    make("div", { className: "more" }, facts, small, why));
  const node = make("div", { className: row.folded ? "base folded" : "base" }, parts.button, ...(row.source ? [details] : []));
  const about = (shown) => {
    const said = [
      shown.gated && say("Accept its terms on Hugging Face first"),
      shown.own && say("The picture is a sample of your own training."),
      shown.isSample && say("The picture is a true sample of it."),
      shown.checkpoints && say("Also for {}", shown.checkpoints),
      shown.size,
      shown.licence_word,
    ].filter(Boolean);
    const licence = shown.licence && make("p", {}, make("span", { textContent: shown.licence, translate: false }), ": ", make("span", { textContent: shown.allows }));
    facts.replaceChildren(...said.map((textContent) => make("p", { textContent })), ...[licence].filter(Boolean));
  };
  about(row);
  return {
    node, button: parts.button, about,
    tell: (fit) => {
      parts.tell(fit);
      why.textContent = fit.why ?? "";
      small.replaceChildren(...(fit.images ?? []).map((textContent) => make("p", { className: "images", textContent })));
    },
  };
}

/** Return {node, button, tell} of a model that another program has on this machine. */
export function foundCard(row, onclick) {
  const parts = pressed({ ...row, download: "" }, onclick, [], [make("b", { textContent: row.name, translate: false })], [
    line(row.kind, "", false), line(say("{}, in {}", row.size, row.of), "quiet"),
  ]);
  return { node: make("div", { className: "base", title: row.source }, parts.button), ...parts };
}

/** Return the button of a card: the picture with its tags, `head`, the verdict, `foot`. */
function pressed(row, onclick, tags, head, foot) {
  const light = make("i", {});
  const words = make("strong", {});
  const tryOut = tag(say("A try-out"));
  tryOut.hidden = true;
  const load = tag(row.download ?? "");
  load.classList.add("load");
  const verdict = make("span", { className: "verdict fits" }, light, words);
  const button = make("button", { type: "button", className: "base-card", onclick },
    make("span", { className: "picture" },
      make("img", { src: row.picture, alt: "", loading: "lazy", className: row.isSample || row.own ? "sample" : "" }),
      make("span", { className: "tags" }, ...tags.filter(Boolean), tryOut), make("span", { className: "tags low" }, load)),
    ...[...head, verdict, ...foot].filter(Boolean));
  button.dataset.source = row.source;
  const tell = ({ fits = "", said = "", line: verdictLine = said, is_try_out: isTryOut = false, download = row.download }) => {
    verdict.className = `verdict fits ${fits}`;
    words.textContent = verdictLine;
    tryOut.hidden = !isTryOut;
    load.textContent = download ?? "";
    for (const badge of button.querySelectorAll(".badge")) badge.hidden = fits === "bad" || fits === "slow"; // none is recommended here
  };
  return { button, tell };
}

function tag(textContent) { return make("span", { className: "tag", textContent }); }

function line(textContent, className, translate = true) {
  return textContent && make("span", { textContent, className, translate });
}
