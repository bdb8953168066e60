// The tab Describe of a LoRA: each change is told in its line, and shown at the top of the page. Questions go out one
// after another, so that the answer to an older note shows nothing that is over.
import { onSubmit } from "/ui/library/form.js";
import { ask, sendFile } from "/ui/shared/ask.js";
import { tell } from "/ui/shared/tell.js";

export function mountDescribe(panel, head, file) {
  const part = (name) => panel.querySelector(name);
  let last = Promise.resolve();

  /** Ask `path` once all before is answered; show what is said in `line`, and the top of the page as it is then. */
  function change(line, path, question) {
    last = last.then(async () => {
      const body = await question();
      const answer = body.error ? body : await ask(path, { file, ...body });
      if (answer.head !== undefined) head.innerHTML = answer.head; // markup of our own server
      if (answer.choices !== undefined) part(".drawn").innerHTML = answer.choices;
      if (answer.to) location.assign(answer.to);
      else tell(line, answer);
    });
    return last;
  }

  onSubmit(part("form.named"), (form) => change(part("#named"), "/library/rename", () => ({ name: form.elements.name.value })));

  const note = part("#note");
  note.addEventListener("change", () => {
    const text = note.value;
    change(part("#named"), "/library/note", () => ({ text }));
  });

  const texts = part("form.texts");
  onSubmit(texts, () => change(texts.querySelector(".said"), "/library/texts", () => Object.fromEntries(new FormData(texts))));

  const preview = part(".preview");
  const said = preview.querySelector(".said");
  const chooser = preview.querySelector("input[type=file]");
  preview.querySelector("[data-upload]").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", () => {
    const picture = chooser.files[0];
    chooser.value = "";
    if (picture) change(said, "/library/preview", async () => ({ name: picture.name, ...await sendFile(picture) }));
  });
  preview.addEventListener("click", ({ target }) => {
    const { choose } = target.closest("[data-choose]")?.dataset ?? {};
    if (choose) change(said, "/library/preview", () => ({ choice: choose }));
  });
}
