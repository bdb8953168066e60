// Settings that somebody brings along: a settings file of any trainer, or a LoRA file, becomes a draft.
import { ask } from "/ui/shared/ask.js";
import { toast } from "/ui/shared/toast.js";

const KINDS = /\.(toml|json|ya?ml|sh|env|safetensors)$/i;
const LENGTH_BYTES = 8;

/** Return the file of settings among files; there is none among images and their captions. */
export function settingsIn(files) {
  return files.length === 1 && KINDS.test(files[0].name) ? files[0] : null;
}

/** Make a draft of a file, for the images of the draft that the page shows, and go there; else say why not. */
export async function bring(file) {
  const draft = new URL(location.href).searchParams.get("draft") ?? "";
  const { url, error } = await ask("/settings/bring", { name: file.name, text: await textOf(file), draft: draft === "new" ? "" : draft });
  if (error) toast(error);
  else location.assign(url);
}

/** Return the text of a file; of a LoRA its header, which has its length before it. */
async function textOf(file) {
  if (!/\.safetensors$/i.test(file.name)) return file.text();
  const start = new DataView(await file.slice(0, LENGTH_BYTES).arrayBuffer());
  const length = start.byteLength === LENGTH_BYTES ? Number(start.getBigUint64(0, true)) : 0;
  return file.slice(LENGTH_BYTES, LENGTH_BYTES + length).text();
}

/** Take such a file that is dropped anywhere on any page; what else is dropped where nothing takes it is not opened. */
export function takeDropped() {
  const on = (name, act) => window.addEventListener(name, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    act(event);
  });
  on("dragover", () => {});
  on("drop", ({ dataTransfer }) => {
    const file = settingsIn(dataTransfer.files);
    if (file) bring(file);
  });
}
