// The page of a run. Its parts are drawn again as they change: the server is told by `keys` which of each the page
// shows, and sends the others.
import { dialog, make } from "/ui/dialog.js";
import { chart } from "/ui/run/chart.js";
import { film } from "/ui/run/film.js";
import { samples } from "/ui/run/samples.js";
import { mount as shares } from "/ui/share/script.js";
import { ask } from "/ui/shared/ask.js";
import { follow, following } from "/ui/shared/follow.js";
import { tabs } from "/ui/shared/tabs.js";
import { tell } from "/ui/shared/tell.js";
import { toast } from "/ui/shared/toast.js";
import { say } from "/ui/shared/words.js";
import { mount as deletes } from "/ui/trash/script.js";

export function mount(main, leaving) {
  const starting = main.querySelector(".starting");
  if (starting) mountStarting(main, starting, leaving);
  else mountRun(main, leaving);
}

function mountStarting(main, starting, leaving) {
  const { draft } = starting.dataset;
  const asked = follow(starting, "/run/starting", leaving, ({ url }) => { if (url) location.replace(url); }, { draft });
  main.addEventListener("click", async ({ target }) => {
    const button = target.closest("[data-stop]");
    if (!button) return;
    button.disabled = true;
    const { error } = await asked({ stop: true });
    button.disabled = !error;
    if (error) toast(error);
  });

  // The seconds go on in the page: a screen reader need not say each.
  const since = main.querySelector(".since");
  let begun = since.dataset.seconds ? performance.now() - 1000 * since.dataset.seconds : null;
  const tick = () => {
    const begins = starting.querySelector(".stages") !== null;
    if (begins) begun ??= performance.now();
    since.textContent = begins ? say("{#} s since it began", Math.round((performance.now() - begun) / 1000)) : "";
  };
  tick();
  const timer = setInterval(tick, 1000);
  leaving.addEventListener("abort", () => clearInterval(timer));
}

function mountRun(main, leaving) {
  const page = main.querySelector(".run-page");
  const said = page.querySelector(":scope > .said");
  const where = page.querySelector(".where");
  const buttons = [...page.querySelectorAll("button[data-press]")];
  const { run } = page.dataset;
  const keys = JSON.parse(page.dataset.keys);
  let { stamp } = page.dataset;

  const drawChart = chart(page.querySelector(".run-chart"), run);
  const beside = page.querySelector(".run-beside");
  const shownFilm = film(page.querySelector(".run-film"), beside, run, leaving, (step) => shownSamples.enlarge(step));
  const shownSamples = samples(page.querySelector(".run-samples"), beside.querySelector(".others"), shownFilm, (step) => asked({ press: { action: "best", step } }));
  const asked = following({ path: "/run/look", leaving, goes: "goes" in page.dataset, shown: () => ({ run, stamp, keys }), draw });

  function draw(now) {
    if (now.gone !== undefined) main.innerHTML = now.gone; // markup of our own server, as all here
    stamp = now.stamp ?? stamp;
    for (const [name, { key, drawn }] of Object.entries(now.parts ?? {})) {
      keys[name] = key;
      if (name === "buttons") for (const button of buttons) button.hidden = !drawn.includes(button.dataset.press);
      else if (name === "where") where.hidden = !drawn;
      else if (name === "chart") drawChart(drawn);
      else if (name === "film") shownFilm.draw(drawn);
      else if (name === "samples") shownSamples.draw(drawn);
      else drawMarkup(page.querySelector(`[data-part=${name}]`), drawn);
    }
  }

  /** Draw a part again; what scrolls in it and what is open in it stay so. */
  function drawMarkup(part, drawn) {
    const top = part.querySelector(".log")?.scrollTop ?? 0;
    const isOpen = part.querySelector("details")?.open ?? false;
    part.innerHTML = drawn;
    if (top) part.querySelector(".log")?.scrollTo(0, top);
    if (isOpen) part.querySelector("details")?.setAttribute("open", "");
  }

  async function press(button, body) {
    button.disabled = true;
    const answer = await asked({ press: body });
    button.disabled = false;
    tell(said, answer);
  }

  page.addEventListener("click", ({ target, detail }) => {
    const button = target.closest("button[data-press], button[data-best]");
    if (!button || detail > 1) return; // a double click is one press
    if (button.dataset.best) press(button, { action: "best", step: Number(button.dataset.best) });
    else if (button.dataset.press === "sample") askForSamples();
    else press(button, { action: button.dataset.press, dataset: where.querySelector("input").value });
  });

  async function askForSamples() {
    const { prompt: first } = await ask("/run/prompt", { run });
    const prompt = make("textarea", { rows: 3, maxLength: 2000, value: first ?? "", dir: "auto" });
    const shown = dialog(say("Draw samples now"), {
      fields: [make("label", {}, say("Prompt"), prompt)],
      note: say("Drawn after the step that runs; the training itself stays the same. Left empty, the training's own prompts are drawn. Another prompt takes longer, because it has to be read first."),
      act: say("Make samples"),
      submit: () => ask("/run/sample", { run, prompt: prompt.value }),
    });
    shown.done = () => { shown.node.close(); asked({}); };
  }

  tabs(page.querySelector("#records"));
  shares(page);
  deletes(main);
}
