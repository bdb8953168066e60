// What has to be there before a page is drawn and before its modules have come: the scheme that was chosen, else the one
// that the browser asks for, the room of what trains where something trained a moment ago, the choice of the language,
// which counts from its first moment, and what keeps a browser from opening a dropped file in place of the page.
const THEME = "lora_train_theme";
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
function colour() {
  const chosen = localStorage.getItem(THEME) ?? "";
  document.documentElement.classList.toggle("dark", chosen === "dark" || (chosen !== "light" && systemIsDark.matches));
}
colour();
systemIsDark.addEventListener("change", colour);
// So that nothing moves when live.js knows; it notes it.
for (const name of (localStorage.getItem("lora_train_trains") ?? "").split(" ")) {
  if (name) document.documentElement.classList.add(name);
}
document.addEventListener("DOMContentLoaded", () => {
  document.querySelector(".theme select").value = localStorage.getItem(THEME) ?? "";
});

document.addEventListener("change", ({ target }) => {
  if (target.matches?.(".theme select")) {
    localStorage.setItem(THEME, target.value);
    colour();
  }
  if (!target.matches?.(".language select")) return;
  const yearInSeconds = 365 * 24 * 3600;
  // It is read back, as a browser may store it beside the script, and a page asked for meanwhile goes without it.
  document.cookie = `lora_train_language=${target.value}; path=/; max-age=${yearInSeconds}; SameSite=Strict`;
  if (document.cookie) location.reload();
});

// Until the page takes files, the pointer says that none can be dropped.
for (const name of ["dragover", "drop"]) {
  window.addEventListener(name, (event) => {
    if (!document.querySelector("main")?.inert) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    event.dataTransfer.dropEffect = "none";
  }, { capture: true });
}
