// The dialogs that copy a LoRA into another program's folder and publish it on the Hub. Buttons anywhere
// on the page open them: data-share is copy or publish, data-ref the LoRA as RUN/FILE. Publishing without a
// token of the Hub begins with the sign-in. A button with data-copy copies the text of the element before it.
import { dialog, make } from "/ui/dialog.js";
import { signIn } from "/ui/sign_in.js";

const LOOK_EVERY_MS = 1000;

export function mount(element, server) {
  const opened = { copy: () => copyDialog(server), publish: () => publishDialog(server) };
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-share]");
    if (button && element.isConnected) opened[button.dataset.share]?.().then((show) => show(button.dataset.ref));
    const copies = event.target.closest?.("[data-copy]");
    if (copies && element.isConnected) copyWord(copies);
  });
}

/** Copy the word before a button and say so; where the browser forbids it, without a secure connection, select it instead. */
async function copyWord(button) {
  const word = button.previousElementSibling;
  try {
    await navigator.clipboard.writeText(word.textContent);
    button.lastChild.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(word);
    button.lastChild.textContent = "Press Ctrl+C";
  }
}

async function copyDialog(server) {
  const { folder } = (await server.share_folder({})) ?? {};
  return (ref) => {
    const path = make("input", { type: "text", required: true, spellcheck: false, value: folder ?? "" });
    const shown = dialog("Copy to ComfyUI or Forge", {
      fields: [make("label", {}, "The program, or its folder of LoRAs", path)],
      note: "For example ComfyUI, or ComfyUI/models/loras. It is remembered. Nothing there is replaced.",
      act: "Copy",
      submit: () => server.share_copy({ ref, folder: path.value }),
    });
    shown.done = (answer) => shown.end(answer.said);
  };
}

async function publishDialog(server) {
  const { signed_in: signedIn } = (await server.hub_signed_in({})) ?? {};
  return (ref) => {
    if (signedIn) return publishForm(server, ref);
    signIn(server, { may: "write", done: (_, shown) => { shown.node.close(); publishForm(server, ref); } });
  };
}

function publishForm(server, ref, typed) {
  const name = ref.split("/").at(-1).replace(/\.safetensors$/, "");
  const repository = make("input", { type: "text", required: true, spellcheck: false, maxLength: 200, value: typed ?? name.replaceAll(/[^\w.-]+/g, "-") });
  const hidden = make("input", { type: "checkbox", checked: true });
  const shown = dialog("Publish on the Hugging Face Hub", {
    fields: [
      make("label", {}, "Name of its page there", repository),
      make("label", { className: "switch" }, hidden, "Private: only you see it. You can change that there later."),
    ],
    note: "Sent are the LoRA, its last samples and a page that describes it. No training image leaves this machine.",
    act: "Publish",
    submit: () => server.share_publish({ ref, name: repository.value, who: hidden.checked ? "private" : "public" }),
  });
  shown.done = async () => {
    shown.say("Sending it …");
    let lost = false;
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, LOOK_EVERY_MS));
      if (!shown.node.open) return; // it goes on; opened again, the newest answer is shown
      const seen = await server.share_published({ ref });
      if (lost !== !seen) shown.say(seen ? "Sending it …" : "The program does not answer; is it still running?");
      lost = !seen;
      if (lost) continue; // it is sent meanwhile
      if (seen.only_reads) {
        shown.node.close();
        const why = "The token that is signed in may only read, or may not write there. Publishing needs one that may write.";
        return signIn(server, { may: "write", why, done: (_, again) => { again.node.close(); publishForm(server, ref, repository.value); } });
      }
      if (seen.state === "failed") return shown.refuse(seen.said);
      if (seen.state === "finished") return shown.end("It is there: ", seen.said.match(/https?:\S+/)?.[0]);
    }
  };
}
