// What every page shows of the trainings that run: the chip in the bar, the title of the tab, a notice
// when one ends. Asks while something trains or waits; a page on which nothing happens asks once, and
// again when somebody comes back to it.
import { make } from "/ui/dialog.js";
import { toast } from "/ui/shared/toast.js";
import { language, say } from "/ui/shared/words.js";

const AGAIN_MS = 2000;
const before = new Map();
let timer = 0;
let underWay = false;
let again = false; // asked for while an answer was under way, which may be of before
let said = "";

export function start() {
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  window.addEventListener("focus", look);
  window.addEventListener("pageshow", (event) => { if (event.persisted) look(); });
  look();
}

/** Ask now, and go on asking while there is something to follow. */
export async function look() {
  if (underWay) { again = true; return; }
  clearTimeout(timer);
  underWay = true;
  let now;
  try {
    const answer = await fetch("/live", { credentials: "same-origin", headers: language });
    if (!answer.ok) throw new Error(answer.statusText);
    now = await answer.json();
  } catch {
    now = null; // the server was ended, or starts anew
  }
  underWay = false;
  if (again) {
    again = false;
    if (now) show(now);
    look();
    return;
  }
  if (!now) {
    timer = setTimeout(look, 5 * AGAIN_MS);
    return;
  }
  show(now);
  if (now.training.length || now.waiting) timer = setTimeout(look, AGAIN_MS);
}

function show(now) {
  for (const run of now.training) before.set(run.name, run);
  for (const [name, run] of before) {
    if (now.training.some((other) => other.name === name)) continue;
    before.delete(name);
    const ended = now.ended[name];
    if (ended) tell(run, ended);
  }
  drawCockpit(now.training[0]);
  const first = now.training[0] ?? now.starting[0];
  const taken = [...(first ? ["trains"] : []), ...(now.training[0]?.cockpit ? ["is-measured"] : [])];
  for (const name of ["trains", "is-measured"]) document.documentElement.classList.toggle(name, taken.includes(name));
  localStorage.setItem("lora_train_trains", taken.join(" "));
  const far = now.training.length ? `${first.percent} %` : first?.said;
  const title = first ? `${far} \u00b7 ${first.name}` : document.querySelector(".bar").dataset.page;
  document.title = `${title} \u2013 lora-train`;
  const newer = first ? [first.name, far, first.left].filter(Boolean).join(" \u00b7 ") : "";
  if (said === newer) return;
  said = newer;
  document.querySelector(".live").replaceChildren(...(first ? chip(first, far) : []));
}

/** Show what the machine does while something trains, below the bar of every page, and offer to tell when it ends. */
function drawCockpit(run) {
  const place = document.querySelector(".cockpit");
  const now = run?.cockpit;
  const asked = place.querySelector("button");
  const offered = Boolean(run) && "Notification" in window && Notification.permission === "default";
  if (offered && !asked) place.append(bell());
  if (!offered) asked?.remove();
  // Where no place was kept for it, the page makes room instead of jumping.
  if (place.hidden) place.classList.toggle("comes", !document.documentElement.classList.contains("is-measured"));
  place.hidden = !now && !offered;
  place.querySelector("p").hidden = !now;
  if (!now) return;
  const figures = now.figures.map(([name, value]) => make("span", {}, make("small", {}, name), " ", make("b", { textContent: value })));
  const bar = now.memory === null ? [] : [make("i", { className: now.memory > 1 ? "more" : "" })];
  if (bar.length) bar[0].style.setProperty("--share", `${Math.min(100, 100 * now.memory)}%`);
  figures[now.memory_at]?.append(...bar); // beside the figure that it draws
  figures[now.memory_at]?.classList.add("of-memory");
  place.querySelector("p").replaceChildren(...figures);
  const warning = place.querySelector("strong"); // is read out when it changes, and not at each figure
  if (warning.textContent !== now.warning) warning.textContent = now.warning;
}

function chip(run, far) {
  const left = make("small", {}, run.left ?? "");
  return [make("a", { href: run.url }, make("i"), nameOf(run), make("b", {}, far), left)];
}

function nameOf(run) {
  return make("span", { textContent: run.name, translate: false });
}

function bell() {
  const icon = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  icon.setAttribute("class", "icon");
  icon.append(document.createElementNS("http://www.w3.org/2000/svg", "use"));
  icon.firstChild.setAttribute("href", "/ui/icons.svg#bell");
  const button = make("button", { type: "button", className: "bare", title: say("Tell me when it ends") }, icon, say("Notify me"));
  button.onclick = async () => { await Notification.requestPermission(); button.remove(); };
  return button;
}

/** Say that a training has ended: in the page, and from the system where somebody wished it. */
function tell(run, ended) {
  const isHere = location.pathname + location.search === run.url; // its page says so itself
  if (!isHere) toast([nameOf(run), ": ", say(ended), ". ", make("a", { href: run.url, textContent: say("Open it") })]);
  if ("Notification" in window && Notification.permission === "granted" && document.hidden) {
    new Notification(`${run.name}: ${say(ended)}`, { icon: "/ui/mark.svg" });
  }
}
