// The page of a series: its trainings are drawn again as they are validated and draw samples. How long those take that
// wait is asked apart, because plans take seconds.
import { ask } from "/ui/shared/ask.js";
import { follow } from "/ui/shared/follow.js";

export function mount(main, leaving) {
  const place = main.querySelector(".series");
  const { id, study } = place.dataset;
  let times = {};
  let asked = ""; // for which trainings

  async function plan() {
    const lines = () => [...place.querySelectorAll("[data-times]")];
    const show = () => { for (const line of lines()) line.textContent = times[line.dataset.times] ?? ""; };
    show();
    const waiting = lines().map((line) => line.dataset.times).join(" ");
    if (!waiting || waiting === asked) return;
    asked = waiting;
    times = (await ask("/queue/times", {})).times ?? {};
    if (!leaving.aborted) show();
  }

  follow(place, "/series/look", leaving, plan, { id, study });
  plan();
}
