// The shell that all pages stand in. A page is its title, its `main`, its style sheets and its script, which exports
// mount(main, leaving): the signal `leaving` ends what listens, waits or asks outside of `main`. A link, Back, Forward
// and location.assign() fetch the page and put it into the shell; a browser without the Navigation API loads it, and so
// does any browser where it cannot be fetched, or has another shell (another language, another version of lora-train).
import { takeDropped } from "/ui/shared/bring.js";
import { look, start } from "/ui/shared/live.js";
import { say } from "/ui/shared/words.js";

let here = new AbortController();
let isLeftToBrowser = false;

async function enter(main) {
  const { signal } = here;
  if (main.dataset.script) {
    const { mount } = await import(main.dataset.script);
    if (signal.aborted) return;
    mount(main, signal);
  }
  main.inert = false; // nothing is pressed before its script is there
}

/** Whether a navigation leads to another page of this site, or draws this one again. */
function isToPage({ canIntercept, hashChange, downloadRequest, formData, navigationType, userInitiated, destination }) {
  if (isLeftToBrowser || !canIntercept || hashChange || downloadRequest !== null || formData) return false;
  if (navigationType === "traverse") return destination.sameDocument;
  if (navigationType === "reload") return !userInitiated; // who asks for a reload gets a whole one
  return !destination.sameDocument; // else a page notes in its address what it shows
}

/** Ask about what is typed and not saved, as the browser does before it loads another page. */
function mayLeave() {
  return window.dispatchEvent(new Event("beforeunload", { cancelable: true }))
    || confirm(say("What you typed is not saved yet. Leave this page all the same?"));
}

async function go({ destination, signal }) {
  document.activeElement?.blur(); // what is typed in a field is kept when it is left
  document.querySelector(".bar").ariaBusy = "true";
  try {
    const answer = await fetch(destination.url, { signal, headers: { accept: "text/html" } });
    if (!answer.headers.get("content-type")?.startsWith("text/html")) throw new Error("not a page");
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (page.documentElement.dataset.shell !== document.documentElement.dataset.shell) throw new Error("another shell");
    await dressed(page);
    show(page, answer);
  } catch {
    if (signal.aborted) return; // somebody goes elsewhere meanwhile
    isLeftToBrowser = true;
    location.reload();
  }
}

/** Bring the style sheets of a page, so that it is never seen without; return once they are there. */
function dressed(page) {
  const known = new Set(sheets(document).map((sheet) => sheet.href));
  const missing = sheets(page).filter((sheet) => !known.has(sheet.href));
  return Promise.all(missing.map((sheet) => new Promise((resolve, reject) => {
    const link = Object.assign(document.createElement("link"), { rel: "stylesheet", href: sheet.href, onload: resolve, onerror: reject });
    document.head.append(link);
  })));
}

const sheets = (page) => [...page.querySelectorAll("link[rel=stylesheet]")];

function show(page, { redirected, url }) {
  here.abort();
  here = new AbortController();
  const main = page.querySelector("main");
  const bar = page.querySelector(".bar");
  const used = new Set(sheets(page).map((sheet) => sheet.href));
  for (const kept of [".live", ".theme"]) bar.querySelector(kept).replaceWith(document.querySelector(kept));
  document.querySelector(".bar").replaceWith(bar);
  document.querySelector("main").replaceWith(main);
  for (const sheet of sheets(document)) if (!used.has(sheet.href)) sheet.remove();
  document.title = page.title;
  document.querySelector("#arrived").textContent = page.title; // said by a screen reader, as a load is
  look();
  // Once the browser has scrolled and moved the focus: what a page notes in its address ends that.
  const arrived = () => {
    if (redirected) history.replaceState(history.state, "", url);
    return enter(main);
  };
  navigation.transition.finished.then(arrived, arrived);
}

window.navigation?.addEventListener("navigate", (event) => {
  if (!isToPage(event)) return;
  if (mayLeave()) event.intercept({ handler: () => go(event) });
  else event.preventDefault();
});
start();
takeDropped();
enter(document.querySelector("main"));
