// The page of a series: its trainings are drawn again as they are validated and draw samples. How long those take that
// wait is asked apart, because plans take seconds. No button asks back: Undo puts back what was taken off the queue.
import { ask } from "/ui/shared/ask.js";
import { follow } from "/ui/shared/follow.js";
import { toast } from "/ui/shared/toast.js";
import { say } from "/ui/shared/words.js";

export function mount(main, leaving) {
  const place = main.querySelector(".series");
  const { id, study } = place.dataset;
  let times = {};
  let note = "";
  let asked = ""; // for which trainings

  async function plan() {
    const lines = () => [...place.querySelectorAll("[data-times]")];
    const show = () => {
      for (const line of lines()) line.textContent = times[line.dataset.times]?.length ?? "";
      for (const line of place.querySelectorAll("[data-note]")) line.textContent = note;
    };
    show();
    const waiting = lines().map((line) => line.dataset.times).join(" ");
    if (!waiting || waiting === asked) return;
    asked = waiting;
    ({ times = {}, note = "" } = await ask("/queue/times", {}));
    if (!leaving.aborted) show();
  }

  const looked = follow(place, "/series/look", leaving, plan, { id, study });
  place.addEventListener("click", async ({ target, detail }) => {
    const button = target.closest("[data-remove]");
    if (!button || detail > 1) return; // a double click is one press
    const items = button.dataset.remove.split(" ");
    button.disabled = true;
    const { error } = await looked({ remove: items });
    button.disabled = false;
    toast(error ?? say("Removed from the queue."), error ? undefined : async () => {
      const { error: refused } = await looked({ back: items });
      if (refused) toast(refused);
      else main.querySelector(".toast")?.remove();
    });
  });
  plan();
}
