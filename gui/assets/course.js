// How long and how large a training is, and what its samples are of: filled in by the plan, until somebody types.
// props.value is what the plan chose (plan_view.course); `changed` in it has the texts typed since then, which
// come to the server with whatever is pressed next, and `taken` those that it has kept. An empty text leaves
// the choice to lora-train.
import { make } from "/ui/dialog.js";

export function mount(place, { get, set, asked, onchange }) {
  const steps = number();
  const epochs = number();
  const said = make("p", { className: "said" });
  said.setAttribute("role", "status");
  const prompts = make("textarea", { rows: 4, maxLength: 20000 });
  const sizes = { resolution: number(), rank: number(), learning_rate: number() };
  const automatic = Object.fromEntries(["steps", "prompts", ...Object.keys(sizes)].map((name) => [name, reset(name)]));
  place.replaceChildren(
    make("fieldset", { className: "length" }, make("legend", { textContent: "How long, and how large" }),
      make("div", { className: "either" }, make("label", {}, "Steps", steps), make("span", { className: "quiet", textContent: "or" }),
        make("label", {}, "Times through your images", epochs)),
      said, automatic.steps,
      make("div", { className: "either" }, make("label", {}, "Size of the images, px", sizes.resolution), automatic.resolution,
        make("label", {}, "Rank: how much it can learn", sizes.rank), automatic.rank,
        make("label", {}, "Learning rate", sizes.learning_rate), automatic.learning_rate)),
    make("div", { className: "prompts" }, make("label", {}, "What the samples show, one a line", prompts),
      make("p", { className: "quiet", textContent: "While it trains, an image is drawn for each line, so that you see what it has learned." }),
      automatic.prompts),
  );
  const unsent = {};
  place.unsent = unsent; // for the button Train: an older plan may take the place of `changed` as it is pressed
  let typing = null; // the field with a text that has not been sent
  place.addEventListener("input", (event) => { typing = event.target; });
  steps.oninput = () => say(epochs, times(steps.value));
  epochs.oninput = () => say(steps, Math.max(1, Math.round(epochs.value / ratio())));
  for (const field of [steps, epochs]) field.onchange = () => change("steps", field.value.trim() && steps.value.trim());
  for (const [name, field] of Object.entries(sizes)) field.onchange = () => change(name, field.value.trim());
  prompts.onchange = () => change("prompts", prompts.value);
  onchange(draw);
  draw();

  function ratio() { return get()?.epochs_per_step ?? 0; }

  /** Return how often each image is seen: a whole number, but where that is none. */
  function times(count) {
    const exact = count * ratio();
    return exact < 2 ? Math.round(10 * exact) / 10 : Math.round(exact);
  }

  function say(other, value) {
    other.value = (other === steps ? epochs : steps).value.trim() && ratio() ? value : "";
    sentence();
  }

  function sentence() {
    const { images, held_out: kept, batch } = get() ?? {};
    const count = Number(steps.value);
    if (!images || !count) { said.textContent = "Left empty, it is chosen for your images."; return; }
    const [length, all, often] = [count, images, times(count)].map((number) => number.toLocaleString("en"));
    const aside = kept ? ` ${kept} more kept aside, to measure how well it learns; the setting Validation fraction 0 trains on all.` : "";
    const how = count * ratio() < 0.95 ? `${length} steps of ${batch} = some of the ${all} images.`
      : `${length} steps of ${batch} = each of the ${all} images about ${often}\u00d7.`;
    said.replaceChildren(how, make("span", { textContent: aside }));
  }

  function change(name, text) {
    typing = null;
    unsent[name] = text;
    send();
  }

  function send() {
    set({ ...get(), changed: { ...unsent } });
    asked();
  }

  function reset(name) {
    return make("button", { type: "button", hidden: true, textContent: "Choose for me", onclick: () => change(name, "") });
  }

  function draw() {
    const value = get();
    place.hidden = value?.steps === undefined;
    if (place.hidden || value.changed) return; // its answer is on the way
    for (const [name, text] of Object.entries(value.taken)) if (unsent[name] === text) delete unsent[name];
    // A plan that was asked for before the last text was typed.
    if (Object.keys(unsent).length) return send();
    if (![steps, epochs].includes(typing)) {
      steps.value = value.steps;
      epochs.value = value.steps && ratio() ? times(value.steps) : "";
    }
    if (typing !== prompts) prompts.value = value.prompts;
    for (const [name, field] of Object.entries(sizes)) if (typing !== field) field.value = value[name];
    for (const [name, button] of Object.entries(automatic)) button.hidden = !value.own.includes(name);
    sentence();
  }
}

function number() {
  return make("input", { type: "number", min: 0, step: "any", inputMode: "decimal" });
}
