// The page Trash: its buttons are those of script.js.
import { mount } from "/ui/trash/script.js";

mount(document.querySelector("main"));
