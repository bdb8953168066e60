// Takes images that are dropped anywhere on the page, chosen or pasted: files, folders, zips, addresses of the web.
// Several are sent at once, one that fails is sent again, and when all are there the server makes a folder of them.

import { newBatch } from "/ui/shared/ask.js";
import { bring, settingsIn } from "/ui/shared/bring.js";
import { language, say } from "/ui/shared/words.js";

const AT_ONCE = 4;
const TRIES = 3;

/** Open the page Train with the folder that was received, in the draft of this page if it has one. */
export function trainOn(answer) {
  const asked = new URLSearchParams({ folder: answer.received });
  const draft = new URL(location.href).searchParams.get("draft");
  if (draft) asked.set("draft", draft);
  sessionStorage.setItem("uploaded", answer.said);
  location.assign(`/train?${asked}`);
}

/** Make `zone` take files until the page is left; `done` gets {received, said} when they lie in a folder of their own. */
export function dropZone(zone, leaving, done) {
  const said = zone.querySelector(".said");
  const bar = zone.querySelector("progress");
  let busy = false;
  said.textContent = sessionStorage.getItem("uploaded") ?? "";
  sessionStorage.removeItem("uploaded");

  /** Show that something comes until `bring` has brought it; it gets what hears how many of them are there. */
  const taking = async (count, bring) => {
    if (busy || !count) return;
    busy = true;
    bar.hidden = false;
    try {
      done(await bring((here) => {
        bar.value = here / count;
        said.textContent = say("{#} of {#} files are here", here, count);
      }));
    } catch (problem) {
      said.textContent = problem.message;
    } finally {
      busy = false;
      bar.hidden = true;
    }
  };
  const take = (files) => taking(files.length, (progress) => sendFiles(files, leaving, progress));
  const fetchAll = (addresses) => taking(addresses.length, () => {
    said.textContent = say("Fetching {#} images from the web \u2026", addresses.length);
    bar.removeAttribute("value");
    return sendAddresses(addresses, leaving);
  });

  for (const input of zone.querySelectorAll("input[type=file]")) {
    zone.querySelector(`button[data-for=${input.name}]`).onclick = () => input.click();
    input.onchange = () => {
      const files = [...input.files];
      input.value = "";
      if (input.name === "settings") bring(files[0]); else take(files);
    };
    if (input.files.length) input.onchange();  // chosen before this script came
  }
  const on = (name, act) => window.addEventListener(name, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    act(event);
  }, { signal: leaving });
  window.addEventListener("paste", (event) => {
    if (event.target.closest?.("input, textarea, [contenteditable]") || document.querySelector("dialog[open]")) return;
    const files = [...event.clipboardData.files];
    const addresses = event.clipboardData.getData("text").split(/\s+/).filter((word) => /^https?:\/\/./i.test(word));
    if (files.length && !settingsIn(event.clipboardData.files)) take(files);
    else fetchAll(addresses);
  }, { signal: leaving });
  let inside = 0;
  const mark = (by) => { inside = Math.max(0, inside + by); zone.classList.toggle("over", inside > 0); };
  on("dragenter", () => mark(1));
  on("dragleave", () => mark(-1));
  on("dragover", () => {});
  on("drop", async (event) => {
    mark(-inside);
    if (settingsIn(event.dataTransfer.files)) return; // bring.js takes it
    const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
    take(entries.length ? (await Promise.all(entries.map((entry) => filesOf(entry)))).flat() : [...event.dataTransfer.files]);
  });
}

/** Return the files of a dropped entry; of a folder all that are in it, each with its path. */
async function filesOf(entry) {
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    file.path = entry.fullPath.replace(/^\//, "");
    return [file];
  }
  const reader = entry.createReader();
  const found = [];
  for (;;) { // a folder is handed out in parts of a hundred
    const part = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!part.length) break;
    found.push(...part);
  }
  return (await Promise.all(found.map((inner) => filesOf(inner)))).flat();
}

/** Send files, until the page is left; `progress` gets how many are there. Return {received, said}, or throw what to say. */
export async function sendFiles(files, leaving, progress) {
  const batch = newBatch();
  let next = 0;
  let arrived = 0;
  progress(0);
  const sender = async () => {
    while (next < files.length) {
      const index = next++;
      await asked(`/upload/${batch}/${index}`, { method: "PUT", body: files[index], signal: leaving });
      progress(++arrived);
    }
  };
  await Promise.all(Array.from({ length: Math.min(AT_ONCE, files.length) }, sender));
  const paths = files.map((file) => file.path || file.webkitRelativePath || file.name);
  const name = paths[0].includes("/") ? paths[0].split("/")[0] : "";
  return post(`/upload/${batch}`, { name, files: paths }, leaving);
}

/** Have the server fetch images from addresses; return {received, said}, or throw what to say. */
async function sendAddresses(addresses, leaving) {
  const batch = newBatch();
  const { files, missed } = await post(`/upload/${batch}/web`, { addresses: addresses.slice(0, 100) }, leaving);
  const { received, said } = await post(`/upload/${batch}`, { name: "", files }, leaving);
  return { received, said: [said, ...missed].join(" ") };
}

async function post(address, body, signal) {
  const answer = await asked(address, { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal });
  return answer.json();
}

async function asked(address, options) {
  for (let tries = 1; ; tries += 1) {
    let answer = null;
    try {
      answer = await fetch(address, { credentials: "same-origin", ...options, headers: { ...language, ...options.headers } });
    } catch (problem) {
      if (options.signal.aborted) throw problem;
      if (tries === TRIES) throw new Error(say("The upload broke off: is lora-train-gui still running?"));
    }
    if (answer?.ok) return answer;
    if (answer && answer.status < 500) throw new Error(await answer.text());
    if (answer && tries === TRIES) throw new Error(await answer.text());
    await new Promise((resolve) => setTimeout(resolve, 300 * tries));
  }
}
