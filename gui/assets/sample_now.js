// The button "Draw samples now" of a training that goes on: a dialog that asks for the prompt.
import { dialog, make } from "/ui/dialog.js";

export function mount(element, server) {
  document.addEventListener("click", async (event) => {
    if (!element.isConnected || !event.target.closest?.("#sample-now")) return;
    const run = new URL(location.href).searchParams.get("run") ?? "";
    const { prompt: first } = (await server.first_prompt({ run })) ?? {};
    const prompt = make("textarea", { rows: 3, maxLength: 2000, value: first ?? "", dir: "auto" });
    dialog("Draw samples now", {
      fields: [make("label", {}, "Prompt", prompt)],
      note: "Drawn after the step that runs; the training itself stays the same. Left empty, the training's own prompts are drawn. Another prompt takes longer, because it has to be read first.",
      act: "Make samples",
      submit: () => server.sample_now({ run, prompt: prompt.value }),
    });
  });
  element.firstElementChild.dataset.ready = ""; // from now on a press counts
}
