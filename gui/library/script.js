// The page LoRAs: the shelf of all, or the page of one file.
import { mount as mountTrash } from "/ui/trash/script.js";
import { mountAdd } from "/ui/library/add.js";
import { mountFile } from "/ui/library/file.js";
import { mountShelf } from "/ui/library/shelf.js";

export function mount(main, leaving) {
  const lora = main.querySelector(".lora-page");
  if (lora) mountFile(lora, leaving);
  else {
    if (main.querySelector(".search")) mountShelf(main, leaving);
    mountAdd(main, leaving);
  }
  mountTrash(main);
}
