// The chart of the loss: smoothing, a logarithmic scale, outliers, and a stretch of steps to look at closely.
// The server draws it. What is shown at first comes with the page; another view is asked for when it is chosen,
// and again when the run has gone on. The choices are remembered for all runs, the stretch is not.
import { make } from "/ui/dialog.js";
import { ask } from "/ui/shared/ask.js";
import { say } from "/ui/shared/words.js";

const REMEMBERED = "lora-train chart";
const ALL_STEPS = 2 ** 31;
const NEAR_PX = 6; // a drag that is shorter was a click

/** Show the chart of `run` in `place`, first as data-chart has it; return what draws it as it is by now. */
export function chart(place, run) {
  let now = JSON.parse(place.dataset.chart);
  const saved = JSON.parse(localStorage.getItem(REMEMBERED) ?? "{}");
  const smoothing = make("select", {}, ...["none", "some", "much"].map((name) => make("option", { value: name, textContent: say(name) })));
  smoothing.value = ["none", "much"].includes(saved.smoothing) ? saved.smoothing : "some";
  const log = make("input", { type: "checkbox", checked: saved.log === true });
  const outliers = make("input", { type: "checkbox", checked: saved.outliers === true });
  const first = make("input", { type: "number", min: 0, placeholder: say("first") });
  const last = make("input", { type: "number", min: 0, placeholder: say("last") });
  const whole = make("button", { type: "button", textContent: say("Whole run"), hidden: true });
  const drawn = make("div", { className: "drawn" });
  const tools = make("div", { className: "chart-tools" },
    make("label", {}, say("Smoothing"), " ", smoothing), make("label", {}, log, " ", say("Logarithmic")), make("label", {}, outliers, " ", say("All outliers")),
    make("span", { className: "stretch" }, make("label", {}, say("Steps"), " ", first), make("label", {}, say("to"), " ", last), whole),
    make("span", { className: "quiet", textContent: say("Drag over the chart to look closer.") }));
  place.replaceChildren(tools, drawn);
  let asked = 0;

  for (const field of [smoothing, log, outliers]) field.onchange = () => { remember(); show(); };
  for (const field of [first, last]) field.onchange = show;
  whole.onclick = () => { first.value = last.value = ""; show(); smoothing.focus(); };
  drawn.addEventListener("pointerdown", drag);
  show();
  return (newer) => { now = newer; show(); };

  function remember() {
    localStorage.setItem(REMEMBERED, JSON.stringify({ smoothing: smoothing.value, log: log.checked, outliers: outliers.checked }));
  }

  async function show() {
    const { drawn: markup, steps } = now;
    tools.hidden = !steps;
    const zoomed = Boolean(first.value || last.value);
    whole.hidden = !zoomed;
    const turn = ++asked;
    let shown = markup;
    if (steps && (zoomed || log.checked || outliers.checked || smoothing.value !== "some")) {
      const view = { smoothing: smoothing.value, log: log.checked, outliers: outliers.checked };
      const stretch = { first: Math.trunc(Number(first.value)), last: Math.trunc(Number(last.value)) || ALL_STEPS };
      const answer = await ask("/run/chart", { run, ...view, ...stretch });
      if (answer.error) return; // of a server that is away, of a run that was deleted: what was drawn stays
      shown = answer.drawn;
    }
    // Markup of our own server, in which every text is escaped. An older answer may come after a newer one.
    if (turn === asked) drawn.innerHTML = shown;
  }

  function drag(event) {
    const svg = event.target.closest("svg[data-x-px]");
    if (!svg || event.button !== 0) return;
    const [begin, end] = svg.dataset.xPx.split(" ").map(Number);
    const [low, high] = svg.dataset.xRange.split(" ").map(Number);
    const box = svg.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    const inside = (x) => Math.min(end, Math.max(begin, (x - box.left) / scale));
    const step = (x) => Math.round(low + (high - low) * (inside(x) - begin) / (end - begin));
    const band = make("div", { className: "band" });
    const from = event.clientX;
    const move = (at) => {
      const [left, right] = [inside(from), inside(at.clientX)].sort((a, b) => a - b);
      band.style.left = `${svg.getBoundingClientRect().left - drawn.getBoundingClientRect().left + left * scale}px`;
      band.style.top = `${svg.getBoundingClientRect().top - drawn.getBoundingClientRect().top}px`;
      band.style.width = `${(right - left) * scale}px`;
      band.style.height = `${box.height}px`;
    };
    const stop = (at) => {
      drawn.removeEventListener("pointermove", move);
      band.remove();
      if (at.type !== "pointerup" || Math.abs(at.clientX - from) < NEAR_PX) return;
      const [a, b] = [step(from), step(at.clientX)].sort((x, y) => x - y);
      if (a === b) return;
      first.value = a;
      last.value = b;
      show();
    };
    event.preventDefault();
    drawn.append(band);
    drawn.setPointerCapture(event.pointerId);
    move(event);
    drawn.addEventListener("pointermove", move);
    for (const name of ["pointerup", "pointercancel"]) drawn.addEventListener(name, stop, { once: true });
  }
}
