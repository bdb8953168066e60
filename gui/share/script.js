// The dialogs that copy a LoRA into another program's folder, draw with it in ComfyUI, make a zip for Civitai and publish it
// on the Hub. Buttons anywhere on the page open them: data-share is copy, comfyui, civitai or publish, data-ref the LoRA as
// RUN/FILE. Publishing without a token of the Hub begins with the sign-in. A button with data-copy copies the text of the element before it.
import { dialog, make } from "/ui/dialog.js";
import { ask } from "/ui/shared/ask.js";
import { say } from "/ui/shared/words.js";
import { signIn } from "/ui/share/sign_in.js";

const LOOK_EVERY_MS = 1000;

const OPENED = { copy: copyDialog, comfyui: comfyuiDialog, civitai: civitaiDialog, publish: publishDialog };
const signInFirst = (asked) => signIn({ hub_sign_in: (body) => ask("/share/sign-in", body) }, { may: "write", ...asked });

/** Listen for those buttons in `place`. */
export function mount(place) {
  place.addEventListener("click", ({ target }) => {
    const button = target.closest("[data-share]");
    if (button) OPENED[button.dataset.share]?.(button.dataset.ref);
    const copies = target.closest("[data-copy]");
    if (copies) copyWord(copies);
  });
}

/** Copy the word before a button and say so; where the browser forbids it, without a secure connection, select it instead. */
async function copyWord(button) {
  const word = button.previousElementSibling;
  try {
    await navigator.clipboard.writeText(word.textContent);
    button.lastChild.textContent = say("Copied");
  } catch {
    getSelection().selectAllChildren(word);
    button.lastChild.textContent = say("Press Ctrl+C");
  }
}

async function copyDialog(ref) {
  const { folder } = await ask("/share/folder");
  const path = make("input", { type: "text", required: true, spellcheck: false, value: folder ?? "" });
  const shown = dialog(say("Copy to ComfyUI or Forge"), {
    fields: [make("label", {}, say("The program, or its folder of LoRAs"), path)],
    note: say("For example ComfyUI, or ComfyUI/models/loras. It is remembered. Nothing there is replaced."),
    act: say("Copy"),
    submit: () => ask("/share/copy", { file: ref, folder: path.value }),
  });
  shown.done = (answer) => shown.end(answer.said);
}

async function comfyuiDialog(ref) {
  const { folder, address } = await ask("/share/folder");
  const path = make("input", { type: "text", required: true, spellcheck: false, value: folder ?? "" });
  const where = make("input", { type: "text", required: true, spellcheck: false, value: address ?? "" });
  const prompt = make("textarea", { rows: 2, maxLength: 10000 });
  const pictures = make("div", { className: "seen" });
  const shown = dialog(say("See it in ComfyUI"), {
    fields: [
      make("label", {}, say("Folder of ComfyUI, or its folder of LoRAs"), path),
      make("label", {}, say("Address of ComfyUI"), where),
      make("label", {}, say("Prompt (empty: that of the workflow, with the trigger word)"), prompt),
    ],
    note: say("The LoRA is copied there. ComfyUI draws the workflow that it drew last, without the LoRA and with it, from the same seed."),
    act: say("Draw"),
    submit: () => ask("/share/comfyui", { file: ref, folder: path.value, address: where.value, prompt: prompt.value }),
  });
  shown.node.querySelector(".said").after(pictures);
  shown.done = async () => {
    shown.say(say("ComfyUI draws …"));
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, LOOK_EVERY_MS));
      if (!shown.node.open || !shown.node.isConnected) return; // it goes on
      const seen = await ask("/share/seen", { file: ref });
      if (seen.isAway) { shown.say(seen.error); continue; }
      for (const { label, url } of (seen.pictures ?? []).slice(pictures.childElementCount)) {
        pictures.append(make("figure", {}, make("img", { src: url, alt: label }), make("figcaption", { textContent: label })));
      }
      if (seen.state === "failed") return shown.refuse(seen.said);
      if (seen.state !== "running") return shown.end(seen.said || say("Drawn with the same seed and settings."));
    }
  };
}

function civitaiDialog(ref) {
  const strength = make("input", { type: "number", required: true, min: "0", max: "2", step: "0.05", value: "1" });
  const shown = dialog(say("Zip for Civitai"), {
    fields: [make("label", {}, say("Preferred strength"), strength)],
    note: say("One file to unpack and upload: the LoRA, its preview, its last samples with their prompts, and ABOUT.txt with what Civitai's form asks."),
    act: say("Make the zip"),
    submit: () => ask("/share/civitai", { file: ref, weight: strength.valueAsNumber }),
  });
  shown.done = ({ url, name, missing }) => {
    shown.end(say("It is ready:") + " ", url, name);
    if (missing.length) shown.node.querySelector(".said").append(make("ul", {}, ...missing.map((textContent) => make("li", { textContent }))));
  };
}

async function publishDialog(ref) {
  const { signed_in: signedIn } = await ask("/share/signed-in");
  if (signedIn) publishForm(ref);
  else signInFirst({ done: (_, shown) => { shown.node.close(); publishForm(ref); } });
}

function publishForm(ref, typed) {
  const name = ref.split("/").at(-1).replace(/\.safetensors$/, "");
  const repository = make("input", { type: "text", required: true, spellcheck: false, maxLength: 200, value: typed ?? name.replaceAll(/[^\w.-]+/g, "-") });
  const hidden = make("input", { type: "checkbox", checked: true });
  const shown = dialog(say("Publish on the Hugging Face Hub"), {
    fields: [
      make("label", {}, say("Name of its page there"), repository),
      make("label", { className: "switch" }, hidden, say("Private: only you see it. You can change that there later.")),
    ],
    note: say("Sent are the LoRA, its last samples and a page that describes it. No training image leaves this machine."),
    act: say("Publish"),
    submit: () => ask("/share/publish", { file: ref, name: repository.value, who: hidden.checked ? "private" : "public" }),
  });
  shown.done = async () => {
    shown.say(say("Sending it …"));
    let lost = false;
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, LOOK_EVERY_MS));
      if (!shown.node.open || !shown.node.isConnected) return; // it goes on; opened again, the newest answer is shown
      const seen = await ask("/share/published", { file: ref });
      if (lost !== Boolean(seen.isAway)) shown.say(seen.isAway ? seen.error : say("Sending it …"));
      lost = Boolean(seen.isAway);
      if (lost) continue; // it is sent meanwhile
      if (seen.only_reads) {
        shown.node.close();
        const why = say("The token that is signed in may only read, or may not write there. Publishing needs one that may write.");
        return signInFirst({ why, done: (_, again) => { again.node.close(); publishForm(ref, repository.value); } });
      }
      if (seen.state === "failed") return shown.refuse(seen.said);
      if (seen.state === "finished") return shown.end(say("It is there:") + " ", seen.said.match(/https?:\S+/)?.[0]);
    }
  };
}
