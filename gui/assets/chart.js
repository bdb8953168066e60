// The chart of the loss: smoothing, a logarithmic scale, outliers, and a stretch of steps to look at closely.
// The server draws it. What is shown at first comes with the page; another view is asked for when it is chosen,
// and again when the run has gone on. The choices are remembered for all runs, the stretch is not.
import { make } from "/ui/dialog.js";

const REMEMBERED = "lora-train chart";
const ALL_STEPS = 2 ** 31;
const NEAR_PX = 6; // a drag that is shorter was a click

export function mount(place, { get, server, onchange }) {
  const saved = JSON.parse(localStorage.getItem(REMEMBERED) ?? "{}");
  const smoothing = make("select", {}, ...["none", "some", "much"].map((name) => make("option", { value: name, textContent: name })));
  smoothing.value = ["none", "much"].includes(saved.smoothing) ? saved.smoothing : "some";
  const log = make("input", { type: "checkbox", checked: saved.log === true });
  const outliers = make("input", { type: "checkbox", checked: saved.outliers === true });
  const first = make("input", { type: "number", min: 0, placeholder: "first" });
  const last = make("input", { type: "number", min: 0, placeholder: "last" });
  const whole = make("button", { type: "button", textContent: "Whole run", hidden: true });
  const drawn = make("div", { className: "drawn" });
  const tools = make("div", { className: "chart-tools" },
    make("label", {}, "Smoothing ", smoothing), make("label", {}, log, " Logarithmic"), make("label", {}, outliers, " All outliers"),
    make("span", { className: "stretch" }, make("label", {}, "Steps ", first), make("label", {}, " to ", last), whole),
    make("span", { className: "quiet", textContent: "Drag over the chart to look closer." }));
  place.replaceChildren(tools, drawn);
  let asked = 0;

  for (const field of [smoothing, log, outliers]) field.onchange = () => { remember(); show(); };
  for (const field of [first, last]) field.onchange = show;
  whole.onclick = () => { first.value = last.value = ""; show(); smoothing.focus(); };
  drawn.addEventListener("pointerdown", drag);
  onchange(show);
  show();

  function remember() {
    localStorage.setItem(REMEMBERED, JSON.stringify({ smoothing: smoothing.value, log: log.checked, outliers: outliers.checked }));
  }

  async function show() {
    const { drawn: markup, steps } = get() ?? { drawn: "", steps: 0 };
    tools.hidden = !steps;
    const zoomed = Boolean(first.value || last.value);
    whole.hidden = !zoomed;
    const turn = ++asked;
    let shown = markup;
    if (steps && (zoomed || log.checked || outliers.checked || smoothing.value !== "some")) {
      const view = { smoothing: smoothing.value, log: log.checked, outliers: outliers.checked };
      const stretch = { first: Number(first.value), last: Number(last.value) || ALL_STEPS };
      const run = new URL(location.href).searchParams.get("run");
      try {
        shown = (await server.draw_chart({ run, ...view, ...stretch })).drawn;
      } catch {
        return; // the server is away: what was drawn stays, and the page says so elsewhere
      }
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
