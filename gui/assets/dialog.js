// A dialog with a form, for what is asked in passing; the browser keeps the focus in it and gives it back.
import { say } from "/ui/shared/words.js";

export const make = (name, properties, ...children) => {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};

/** Open a dialog: `submit` asks the server; an {error} stays in it, everything else goes to `done`. */
export function dialog(title, { fields, note, act, submit, danger = false }) {
  const said = make("p", { className: "said" });
  said.setAttribute("role", "status");
  const go = make("button", { type: "submit", className: danger ? "danger big" : "primary big", textContent: act });
  const leave = make("button", { type: "button", className: "big", textContent: say("Cancel"), onclick: () => node.close() });
  const form = make("form", { method: "dialog" }, make("h2", { textContent: title }), ...fields,
    make("p", { className: "quiet", textContent: note }), said, make("p", { className: "actions" }, go, leave));
  const node = make("dialog", { className: "ask panel", ariaLabel: title }, form);
  node.dataset.title = title; // the label is translated
  const shown = {
    node,
    done: () => node.close(),
    say(text) { said.className = "said"; said.textContent = text; },
    refuse(text) { said.className = "said notice error"; said.textContent = text; go.disabled = false; },
    /** Say how it ended, with a link: to a page elsewhere, or to a file of that name. */
    end(text, address, file) {
      const to = file ? { download: file, textContent: file, translate: false } : { target: "_blank", rel: "noopener", textContent: address };
      const link = address ? make("a", { href: address, ...to }) : null;
      said.className = "said notice";
      said.replaceChildren(text, ...(link ? [link] : []));
      for (const field of fields) field.hidden = true;
      go.hidden = true;
      leave.textContent = say("Close");
      leave.focus();
    },
  };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    shown.say("");
    const answer = (await submit()) ?? { error: say("The program does not answer; is it still running?") };
    if (answer.error) shown.refuse(answer.error);
    else shown.done(answer);
  });
  node.addEventListener("close", () => node.remove());
  // Pressed again before the answer that it waited for: one is enough.
  if ([...document.querySelectorAll("dialog.ask[open]")].some((other) => other.dataset.title === title)) return shown;
  document.querySelector("main").append(node);
  node.showModal();
  return shown;
}
