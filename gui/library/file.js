// The page of one LoRA. What its tabs Try and Tools began is followed until it has ended.
import { mountDescribe } from "/ui/library/describe.js";
import { onSubmit } from "/ui/library/form.js";
import { strengths } from "/ui/library/strengths.js";
import { ask } from "/ui/shared/ask.js";
import { browse } from "/ui/shared/browse.js";
import { follow } from "/ui/shared/follow.js";
import { menus } from "/ui/shared/menus.js";
import { keepOpen } from "/ui/shared/keep_open.js";
import { mount as mountShare } from "/ui/share/script.js";
import { tabs } from "/ui/shared/tabs.js";
import { tell } from "/ui/shared/tell.js";
import { say } from "/ui/shared/words.js";

export function mountFile(page, leaving) {
  const { file } = page.dataset;
  mountShare(page);
  const head = page.querySelector("#head");
  menus(head, leaving);
  if (!page.querySelector("[role=tablist]")) return; // of a file that cannot be read
  const panel = (name) => page.querySelector(`#${name}`);
  head.addEventListener("click", ({ target }) => {
    if (!target.closest("[data-rename]")) return;
    page.querySelector("#tab-describe").click();
    page.querySelector("#name").select();
    page.querySelector("#name").focus();
  });
  tabs(page, (name) => { if (name === "inside") lookInside(panel(name), file); });
  mountTry(panel("try"), head, file, leaving);
  mountDescribe(panel("describe"), head, file);
  mountTools(panel("tools"), file, leaving);
  mountExport(panel("export"), file);
}

function mountTry(panel, head, file, leaving) {
  const form = panel.querySelector("form");
  const said = panel.querySelector(".said");
  const stop = panel.querySelector("[data-stop]");
  const go = form.querySelector("[type=submit]");
  const place = panel.querySelector(".tries");
  const openAgain = keepOpen(place);
  const chosen = strengths(form.querySelector(".strengths"));
  countSince(place, leaving);
  let drawnHead = "";
  const asked = follow(place, "/library/tries", leaving, ({ goes, head: newHead }) => {
    if (newHead !== drawnHead && !head.contains(document.activeElement)) {
      head.innerHTML = drawnHead = newHead; // markup of our own server
    }
    openAgain();
    countSince(place, leaving);
    // One of the two stands there; the other takes over the keyboard.
    const [shown, other] = goes ? [stop, go] : [go, stop];
    shown.hidden = false;
    if (document.activeElement === other) shown.focus();
    other.hidden = true;
  }, { file });
  onSubmit(form, async () => {
    const seed = form.seed.valueAsNumber;
    const others = [...form.querySelectorAll("[name=others]:checked")].map((box) => box.value);
    const draw = { prompts: form.prompts.value, strengths: chosen(), seed: Number.isNaN(seed) ? null : seed, base: form.base.value, others };
    tell(said, await asked({ draw }));
  });
  place.addEventListener("click", async ({ target }) => {
    const pressed = target.closest("[data-mark], [data-give-back]");
    if (!pressed) return;
    if (pressed.hasAttribute("data-give-back")) {
      tell(said, await asked({ give_back: true }));
      return;
    }
    const { mark } = pressed.dataset;
    const [job, row, of, strength] = mark.split(" ");
    const answer = await asked({ mark: { job, row: Number(row), file: Number(of), strength: Number(strength) } });
    tell(said, answer);
    place.querySelector(`[data-mark="${CSS.escape(mark)}"]`)?.focus(); // the grid was drawn anew
  });
  stop.addEventListener("click", async () => tell(said, await asked({ stop: true })));
}

/** Count on, each second, for how long a picture has been waited for; `data-since` says for how long when it was drawn. */
function countSince(place, leaving) {
  const began_ms = performance.now();
  for (const clock of place.querySelectorAll("[data-since]")) {
    const show = () => {
      const seconds = Math.floor(Number(clock.dataset.since) + (performance.now() - began_ms) / 1000);
      clock.textContent = say("For {#} min {#} s so far.", Math.floor(seconds / 60), seconds % 60);
    };
    const timer = setInterval(() => (clock.isConnected && !leaving.aborted ? show() : clearInterval(timer)), 1000);
    show();
  }
}

function mountTools(panel, file, leaving) {
  const said = panel.querySelector("#made");
  const asked = follow(panel.querySelector(".made"), "/library/jobs", leaving, () => {}, { file });
  const value = (name) => panel.querySelector(`#${name}`).value;
  const weight = (name) => {
    const number = panel.querySelector(`#${name}`).valueAsNumber;
    return Number.isNaN(number) ? null : number;
  };
  const made = {
    convert: (form) => ({ format: form.format.value, name: value("convert-name") }),
    cut: () => ({ rank: value("cut-rank"), energy_percent: value("cut-energy"), name: value("cut-name") }),
    merge: (form) => ({
      weight: weight("merge-weight"),
      others: [...form.querySelectorAll("select")].filter((list) => list.value)
        .map((list) => ({ file: list.value, weight: weight(list.id.replace("merge-", "merge-weight-")) })),
      rank: value("merge-rank"),
      name: value("merge-name"),
    }),
  };
  for (const [name, wish] of Object.entries(made)) {
    onSubmit(panel.querySelector(`form.${name}`), async (form) => {
      tell(said, await asked({ [name]: wish(form) }));
      said.scrollIntoView({ block: "nearest" });
    });
  }
}

function mountExport(panel, file) {
  const form = panel.querySelector("form");
  const [said, place] = [".said", ".exported"].map((name) => panel.querySelector(name));
  const show = (answer) => {
    tell(said, answer);
    place.innerHTML = answer.html ?? ""; // markup of our own server
  };
  panel.querySelector("[data-browse]").addEventListener("click", () => browse("export", (folder) => { form.folder.value = folder; }));
  panel.querySelector("[data-check]").addEventListener("click", async () => show(await ask("/library/check", { file })));
  onSubmit(form, async () => {
    const wish = { weight: form.weight.valueAsNumber, notes: form["card-notes"].value, folder: form.folder.value };
    show(await ask("/library/export", { file, ...wish }));
  });
}

async function lookInside(panel, file) {
  const { html, error } = await ask("/library/inside", { file });
  if (html !== undefined) panel.innerHTML = html; // markup of our own server
  else tell(panel.querySelector(".said") ?? panel.appendChild(document.createElement("p")), { error });
}
