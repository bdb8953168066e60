// What each page ends with, once its own script listens: its parts can be pressed, the bar follows the trainings.
import { start } from "/ui/shared/live.js";

document.querySelector("main").inert = false;
start(document.querySelector(".bar"));
