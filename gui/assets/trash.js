// Deleting with Undo: buttons with data-trash move what data-ref names into the trash, and lead to
// data-next, where what was done is said with its Undo. The page Trash puts back and empties.
import { make } from "/ui/dialog.js";

const KEPT = "lora-train deleted";

export function mount(element, server) {
  const place = element.closest(".html-container") ?? element;
  const away = JSON.parse(sessionStorage.getItem(KEPT) ?? "null");
  sessionStorage.removeItem(KEPT);
  if (away) toast(place, `${away.name} is in the trash.`, () => back(server, place, away.id));
  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("[data-trash], [data-back], [data-empty]");
    if (!button || !element.isConnected || event.detail > 1) return; // a double click is one press
    // The press on the question counts: what may come between draws the first words again.
    if (button.dataset.sure && button.lastChild.textContent !== button.dataset.sure) {
      button.lastChild.textContent = button.dataset.sure;
      return;
    }
    button.disabled = true;
    if (button.dataset.back) await back(server, place, button.dataset.back);
    else if (button.dataset.trash) {
      const answer = await asked(server.trash_put({ kind: button.dataset.trash, ref: button.dataset.ref }));
      if (answer.error) toast(place, answer.error);
      else {
        sessionStorage.setItem(KEPT, JSON.stringify(answer));
        location.assign(button.dataset.next);
      }
    } else {
      const answer = await asked(server.trash_empty({}));
      if (answer.error) toast(place, answer.error); else location.reload();
    }
    button.disabled = false;
  });
  (element.querySelector(".trash") ?? element).dataset.ready = ""; // from now on a press counts
}

async function back(server, place, id) {
  const answer = await asked(server.trash_back({ id }));
  if (answer.error) toast(place, answer.error); else location.reload();
}

async function asked(promise) {
  return (await promise) ?? { error: "The program does not answer; is it still running?" };
}

function toast(place, said, undo) {
  place.querySelector(".toast")?.remove();
  const close = make("button", { type: "button", textContent: "Close", onclick: () => node.remove() });
  const again = undo && make("button", { type: "button", className: "primary", textContent: "Undo", onclick: undo });
  const node = make("div", { className: "toast" }, make("span", {}, said), again, close);
  node.setAttribute("role", "status");
  place.append(node);
}
