// How long a training is: a number of steps, or how often each image is seen, which is made of it; and both in a
// sentence.
import { say } from "/ui/shared/words.js";

const STEPS = "train.steps";

/** Return {facts}, which takes what the plan says of the images, null without a plan. */
export function mountLength(place, fields, changed) {
  const steps = fields.inputs.get(STEPS);
  const epochs = place.querySelector("#epochs");
  const said = place.querySelector(".length-said");
  const keeps = place.querySelector(".keeps");
  const [onAll, back] = keeps.children;
  let plan = null;
  let typing = false; // in `epochs`

  const ratio = () => plan?.epochs_per_step ?? 0;

  /** Return how often each image is seen: a whole number, but where that is none. */
  function times(count) {
    const exact = count * ratio();
    return exact < 2 ? Math.round(10 * exact) / 10 : Math.round(exact);
  }

  function sentence() {
    const count = Number(steps.value);
    keeps.hidden = !plan?.images;
    if (!plan || !count) { said.textContent = count ? "" : say("Left empty, it is chosen for your images."); return; }
    const { images, held_out: kept, batch } = plan;
    if (!images) { said.textContent = ""; return; } // of a slider, which has none
    const [length, all, often] = [count, images, times(count)].map((number) => number.toLocaleString("en"));
    const how = count * ratio() < 0.95 ? say("{#} steps of {#} = some of the {#} images.", length, String(batch), all)
      : say("{#} steps of {#} = each of the {#} images about {#}\u00d7.", length, String(batch), all, often);
    const more = kept === 1 ? say("1 more kept aside, to measure how well it learns.") : say("{#} more kept aside, to measure how well it learns.", (kept ?? 0).toLocaleString("en"));
    const aside = kept ? more : say("None is kept aside, so how well it learns is not measured.");
    said.textContent = `${how} ${aside}`;
    if (kept) onAll.textContent = say("Train on all {#}", (images + kept).toLocaleString("en"));
    const pressed = document.activeElement;
    onAll.hidden = !kept;
    back.hidden = !plan.trains_on_all || !onAll.hidden; // a press is taken back by another
    if (pressed === onAll && onAll.hidden) back.focus();
    if (pressed === back && back.hidden) onAll.focus();
  }

  function draw() {
    if (!typing) epochs.value = steps.value && ratio() ? times(Number(steps.value)) : "";
    sentence();
  }

  steps.addEventListener("input", draw);
  epochs.addEventListener("input", () => {
    typing = true;
    steps.value = epochs.value.trim() && ratio() ? Math.max(1, Math.round(epochs.value / ratio())) : "";
    sentence();
  });
  epochs.addEventListener("change", () => { typing = false; changed(STEPS); });
  fields.listeners.push(draw);
  return { facts: (facts) => { plan = facts; draw(); } };
}
