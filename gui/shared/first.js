// What has to be there before a page is drawn and before its modules have come: the scheme that the browser asks
// for, and the choice of the language, which counts from its first moment.
if (matchMedia("(prefers-color-scheme: dark)").matches) document.documentElement.classList.add("dark");

document.addEventListener("change", ({ target }) => {
  if (!target.matches?.(".language select")) return;
  const yearInSeconds = 365 * 24 * 3600;
  // It is read back, as a browser may store it beside the script, and a page asked for meanwhile goes without it.
  document.cookie = `lora_train_language=${target.value}; path=/; max-age=${yearInSeconds}; SameSite=Strict`;
  if (document.cookie) location.reload();
});
