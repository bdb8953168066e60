// The page Queue: one listener serves all buttons. The lists are drawn again as they change; what is open and what has
// the keyboard follow the item. No button asks back: what it removed is put back by Undo. What waits can be dragged; the
// lists are not drawn meanwhile. How long it takes is asked apart, because plans take seconds.
import { ask } from "/ui/shared/ask.js";
import { follow } from "/ui/shared/follow.js";
import { menus } from "/ui/shared/menus.js";
import { mount as shares } from "/ui/share/script.js";
import { tell } from "/ui/shared/tell.js";

const MINUTE_MS = 60_000;

const keyOf = (node) => {
  const button = node.closest("button[data-action]");
  return button && { action: button.dataset.action, id: button.dataset.id };
};

export function mount(main, leaving) {
  const place = main.querySelector("#queue");
  const said = main.querySelector(".said");
  const openAgain = menus(place, leaving);
  shares(place);
  let focused = null; // action and item of the button that has the keyboard

  let times = {};
  let note = "";
  let planned = ""; // what the times were asked for: the waiting items in their order, the rules, the minute

  const waiting = () => [...place.querySelectorAll("li.waiting")];
  const form = main.querySelector(".rules form");

  function wanted() {
    const ids = waiting().map((entry) => entry.dataset.item);
    const isPaused = Boolean(place.querySelector("[data-action=go_on]"));
    return ids.length ? [...ids, isPaused, form.when.value, Math.floor(Date.now() / MINUTE_MS)].join(" ") : "";
  }

  function showTimes() {
    for (const line of place.querySelectorAll("[data-times]")) {
      const { facts, length } = times[line.dataset.times] ?? {};
      line.textContent = [facts, length].filter(Boolean).join(", ");
    }
    for (const line of place.querySelectorAll("[data-note]")) line.textContent = note;
  }

  async function plan() {
    showTimes();
    const now = wanted();
    if (now === planned) return;
    planned = now;
    const answer = planned ? await ask("/queue/times", {}) : { times: {} };
    if (leaving.aborted || now !== planned) return;
    times = answer.times ?? {};
    note = answer.note ?? "";
    showTimes();
  }

  const asked = follow(place, "/queue/look", leaving, () => {
    plan();
    openAgain();
    if (!focused) return;
    const buttons = [...place.querySelectorAll("button[data-action]:not(:disabled)")];
    const ofItem = buttons.filter((button) => button.dataset.id === focused.id);
    // At the end of the list its button is disabled: the other one of the item is the next best.
    const best = ofItem.find((button) => button.dataset.action === focused.action) ?? ofItem[0];
    best?.focus({ preventScroll: true });
  });

  place.addEventListener("click", async (event) => {
    const key = keyOf(event.target);
    if (!key || event.detail > 1) return; // a double click's second one may meet another item
    const answer = await asked({ press: key });
    tell(said, answer);
  });

  // Dragging: the entry goes where it is held, and stays there when it is let go.
  let held = null;
  let home = null; // the entry behind it, before it is moved
  place.addEventListener("dragstart", ({ target, dataTransfer }) => {
    held = target.closest?.("li.waiting") ?? null;
    if (!held) return;
    home = held.nextElementSibling;
    place.dataset.held = "";
    dataTransfer.effectAllowed = "move";
    held.classList.add("held");
  });
  place.addEventListener("dragover", (event) => {
    const over = held && event.target.closest("li.waiting");
    if (!over) return;
    event.preventDefault();
    const box = over.getBoundingClientRect();
    if (over !== held) over[event.clientY < box.top + box.height / 2 ? "before" : "after"](held);
  });
  place.addEventListener("drop", (event) => { if (held) event.preventDefault(); });
  place.addEventListener("dragend", async ({ dataTransfer }) => {
    if (!held) return;
    const isCancelled = dataTransfer.dropEffect === "none";
    if (isCancelled) held.parentNode.insertBefore(held, home);
    const moved = { action: "to", id: held.dataset.item, place: waiting().indexOf(held) };
    held.classList.remove("held");
    held = null;
    delete place.dataset.held;
    if (!isCancelled) tell(said, await asked({ press: moved }));
  });

  form.addEventListener("change", async () => {
    const hour = (name) => form.querySelector(`#${name}`).valueAsNumber || 0;
    tell(said, await asked({ rules: { when: form.when.value, night_from: hour("night-from"), night_to: hour("night-to") } }));
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  plan();
  const notices = main.querySelector(".notices form");
  if (notices) mountNotices(notices);

  document.addEventListener("focusin", (event) => {
    focused = place.contains(event.target) ? keyOf(event.target) : null;
  }, { signal: leaving });
  document.addEventListener("pointerdown", (event) => {
    if (!place.contains(event.target)) focused = null;
  }, { signal: leaving });
}

/** Where notices go: kept when the form is sent, tried by its other button. */
function mountNotices(form) {
  const said = form.querySelector(".said");
  const keep = async (test) => {
    const texts = Object.fromEntries([...form.querySelectorAll("input")].map((input) => [input.name, input.value]));
    said.hidden = true;
    tell(said, await ask("/queue/notices", { ...texts, smtp_port: form.smtp_port.valueAsNumber || 0, test }));
  };
  form.addEventListener("submit", (event) => { event.preventDefault(); keep(false); });
  form.querySelector("[data-test]").addEventListener("click", () => keep(true));
}
