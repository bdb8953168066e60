// Choosing a folder, or a model file, of the machine that lora-train runs on, instead of typing its path.
import { dialog, make } from "/ui/dialog.js";
import { ask } from "/ui/shared/ask.js";
import { say } from "/ui/shared/words.js";

const WORDS = {
  dataset: { title: say("Choose a folder with images"), act: say("Choose this folder"), note: say("Nothing in the folder is changed.") },
  models: { title: say("Choose a folder with models"), act: say("Look in this folder"), note: say("Only the headers of its files are read; the folder is remembered.") },
  export: { title: say("Choose a folder for the files"), act: say("Choose this folder"), note: say("Nothing in the folder is replaced.") },
  base: {
    title: say("Choose a base model"), act: say("Choose"),
    note: say("A model file (.safetensors, .sft, .gguf), or the folder of a whole model."),
  },
};

/** Open the dialog for a "dataset", a "base", a folder with "models" or one for an "export"; `pick` gets the path that was chosen. */
export async function browse(kind, pick) {
  const above = make("button", { type: "button", textContent: say("Up") });
  const path = make("input", { type: "text", spellcheck: false, ariaLabel: say("Folder") });
  const rows = make("ul", { className: "browsed", tabIndex: -1 });
  const here = make("p", { className: "quiet", role: "status" });
  let chosen = "";
  let folder = "";
  let asked = 0; // an answer that comes after a newer question is not shown
  let opening = null;
  const isFile = () => chosen !== "" && chosen !== folder;
  const shown = dialog(WORDS[kind].title, {
    fields: [make("div", { className: "browse-path" }, above, path), rows, here],
    ...WORDS[kind],
    submit: async () => {
      await opening; // else its answer would take away what is said here
      if (path.value.trim() !== folder && !isFile()) {
        await open(path.value);
        return isFile() ? { path: chosen } : { stay: true }; // the whole path of a file was typed
      }
      return chosen ? { path: chosen } : { error: say("Choose one of the model files, or open a folder that holds a whole model.") };
    },
  });
  const go = shown.node.querySelector("[type=submit]");
  shown.done = async (answer) => {
    if (answer.stay) { go.disabled = false; return; }
    const kept = await ask("/browse/chosen", { kind, path: answer.path });
    if (kept.error) { shown.refuse(kept.error); return; }
    shown.node.close();
    pick(answer.path);
  };

  function row({ name, path: target, file, said }) {
    const button = make("button", { type: "button", className: file ? "file" : "folder" }, make("span", { textContent: name, translate: false }));
    if (said) button.append(make("small", { textContent: said }));
    button.addEventListener("click", () => {
      if (!file) { open(target); return; }
      chosen = target;
      for (const other of rows.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
    });
    if (file) button.setAttribute("aria-pressed", "false");
    return make("li", {}, button);
  }

  function open(target) {
    opening = list(target);
    return opening;
  }

  async function list(target) {
    const number = (asked += 1);
    const typed = path.value;
    const answer = await ask("/browse/look", { kind, path: target });
    if (number !== asked) return;
    if (answer.error) { shown.refuse(answer.error); return; }
    shown.say("");
    const inside = rows.contains(document.activeElement);
    folder = answer.folder;
    if (path.value === typed) { // else somebody types meanwhile
      path.value = folder;
      if (!typed && document.activeElement === path) path.select(); // who is about to type a path means a whole one
    }
    chosen = answer.chosen || (answer.can ? answer.folder : "");
    above.disabled = !answer.above;
    above.onclick = () => open(answer.above);
    rows.replaceChildren(...answer.rows.map(row));
    const said = [answer.said, answer.more && say("{} more are not shown: type the path", answer.more), !answer.rows.length && say("No folders in here")];
    here.replaceChildren(...said.filter(Boolean).map((textContent) => make("span", { textContent })));
    if (inside) (rows.querySelector("button") ?? above).focus();
  }
  await open("");
}

/** Go on with the page Train in a folder; the draft stays. */
export function trainIn(folder) {
  const asked = new URL(location.href);
  asked.searchParams.set("folder", folder);
  location.assign(asked);
}
