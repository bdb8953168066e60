// LoRA files from elsewhere: chosen, or dropped anywhere on the page LoRAs. Each is sent, checked and kept; one alone
// opens its page, of several the shelf is drawn again.
import { ask, sendFile } from "/ui/shared/ask.js";
import { tell } from "/ui/shared/tell.js";
import { say } from "/ui/shared/words.js";

export function mountAdd(main, leaving) {
  const button = main.querySelector("[data-add]");
  if (!button) return;
  const chooser = main.querySelector("input[name=lora]");
  const line = main.querySelector("#added");
  const zone = main.querySelector(".drop.add");
  let busy = false;

  async function take(files) {
    if (busy || !files.length) return;
    busy = button.disabled = true;
    const told = [];
    let last = {};
    let failed = false;
    for (const [index, file] of files.entries()) {
      tell(line, { done: files.length > 1 ? say("Adding {text}: {#} of {#}", file.name, index + 1, files.length) : say("Adding {}", file.name) });
      const sent = await sendFile(file);
      last = sent.error ? sent : await ask("/library/bring", { name: file.name, ...sent });
      if (leaving.aborted) return;
      failed ||= Boolean(last.error);
      told.push(last.error ?? last.done);
    }
    busy = button.disabled = false;
    tell(line, failed ? { error: told.join(" ") } : { done: told.join(" ") });
    line.scrollIntoView({ block: "nearest" });
    if (files.length === 1 && last.to) location.assign(last.to);
    else if (last.to || told.length > 1) main.dispatchEvent(new Event("added"));
  }

  button.addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", () => {
    const files = [...chooser.files];
    chooser.value = "";
    take(files);
  });
  // Before what takes a dropped file for settings (shared/bring.js).
  const on = (name, act) => window.addEventListener(name, (event) => {
    if (!event.dataTransfer?.types.includes("Files") || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    act(event);
  }, { signal: leaving, capture: true });
  let inside = 0;
  const mark = (by) => { inside = Math.max(0, inside + by); zone?.classList.toggle("over", inside > 0); };
  on("dragenter", () => mark(1));
  on("dragleave", () => mark(-1));
  on("dragover", () => {});
  on("drop", (event) => {
    mark(-inside);
    take([...event.dataTransfer.files]);
  });
}
