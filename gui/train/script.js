// The page Train. What was typed is written into the draft by questions that go out one after another, each with
// the texts that have changed and no others; the report on the images and the plan take seconds, so each has a line
// of its own, in which only the newest question counts.
import { ask } from "/ui/shared/ask.js";
import { browse, trainIn } from "/ui/shared/browse.js";
import { dropZone, trainOn } from "/ui/shared/drop.js";
import { say } from "/ui/shared/words.js";
import { Bases } from "/ui/train/bases.js";
import { Fields } from "/ui/train/fields.js";
import { Images } from "/ui/train/images.js";
import { mountLength } from "/ui/train/length.js";
import { mountPairs } from "/ui/train/pairs.js";

const AGAIN_MS = 1000;
const AWAY_MS = 5000;
const TYPED_MS = 800; // what is typed counts so long after the last key

export function mount(main, leaving) {
  const page = main.querySelector(".train");
  const { draft } = page.dataset;
  const pageOfStart = `/train?${new URLSearchParams({ draft })}`; // which leads to it
  const fields = new Fields(page);
  const said = page.querySelector(".train > .said");
  const seen = {}; // the stamps of the parts that are shown
  const one = (selector) => page.querySelector(selector);
  let step = 0;
  let writing = Promise.resolve();
  let judgedFor = ""; // the base that the images were judged for
  let judged = Promise.resolve(); // once what was chosen or typed last on the first step has its report
  let retry = 0;

  /** Call `act` after a while, on this page. */
  function later(act, afterMs) {
    return leaving.aborted ? 0 : setTimeout(() => { if (!leaving.aborted) act(); }, afterMs);
  }

  /** Ask with what was typed, after all that was asked before; draw what has changed, and return the answer. */
  function write(path, more = {}) {
    writing = writing.then(async () => {
      clearTimeout(retry);
      const typed = fields.typed();
      const now = await ask(path, { draft, typed, ...more });
      tell(now.error ?? "");
      if (now.isAway) retry = later(keep, AWAY_MS);
      if (now.refused) fields.kept(typed, now.refused);
      draw(now);
      return now;
    });
    return writing;
  }

  /** Keep what was typed; with `more.step` go to that step. */
  function keep(more = {}) {
    return write("/train/look", { show: ["draft"], seen, ...more });
  }

  /** Return a function that asks for a part of the page, which is drawn by `shown`; of many calls at once the newest
   *  counts. */
  function line(part, ...places) {
    let going = null;
    let again = false;
    let isAway = false;
    return async function asked() {
      again = true;
      going ??= (async () => {
        for (const place of places) place.setAttribute("aria-busy", "true");
        while (again) {
          again = false;
          await writing;
          const now = await ask("/train/look", { draft, show: [part], seen });
          if (again) continue;
          if (now.error || isAway) tell(now.error ?? "");
          isAway = now.isAway ?? false;
          if (isAway) later(asked, AWAY_MS);
          draw(now);
        }
        for (const place of places) place.removeAttribute("aria-busy");
        going = null;
      })();
      return going;
    };
  }

  const report = line("images", one("#report"));
  const plan = line("plan", one("#plan"), one(".beside-train"));
  let drawn = {}; // the text of the button, and for how many trainings
  const images = new Images(one(".train-images"), leaving, {
    changed: () => report(),
    named: (name) => { one(".from span").textContent = name; },
    drawn: () => {
      for (const shows of one("#report").querySelectorAll("button[data-kind]")) {
        shows.hidden = !shows.dataset.find && !images.has(shows.dataset.kind);
      }
    },
  });
  const length = mountLength(one(".length"), fields, changed);
  const bases = new Bases(one(".bases"), {
    draft,
    leaving,
    kept: () => writing,
    pick: (source, afresh = []) => {
      for (const key of afresh) fields.type(key, "");
      fields.type("base.model", source);
      bases.choose(source);
      changed("base.model");
    },
  });

  function draw({ draft: kept, images: looked, plan: planned }) {
    if (leaving.aborted) return;
    for (const [name, part] of Object.entries({ draft: kept, images: looked, plan: planned })) {
      if (part) seen[name] = part.stamp;
    }
    if (looked) drawImages(looked);
    if (planned) drawPlan(planned);
    if (kept) drawDraft(kept);
  }

  function drawDraft({ texts, told, step: at, is_started: isStarted }) {
    fields.draw({ texts });
    fields.tell(told);
    showKind();
    bases.choose(texts["base.model"] ?? "auto");
    if (isStarted) location.replace(pageOfStart); // by another tab
    else if (step === 0) show(at);
  }

  function drawImages({ html, folder, next, lacks }) {
    // What a file says that was brought before its images is another now that they are there.
    if (folder && one(".brought .awaits")) { location.replace(pageOfStart); return; }
    judgedFor = fields.read("base.model");
    one("#report").innerHTML = html; // markup of our own server, in which every text is escaped
    one("#next").hidden = !next;
    one("#next").disabled = Boolean(lacks) && !isWriting();
    one("#next").textContent = next;
    one("#lacks").textContent = lacks;
    page.classList.toggle("has-images", Boolean(folder));
    if (!folder) chooseOthers(false); // the ways to images are all in sight
    one(".from span").title = folder;
    images.open(folder);
  }

  function drawPlan({ html, beside, filled, length: facts, button, works, told, verdict }) {
    bases.planned(verdict);
    one("#plan").innerHTML = html;
    one(".beside-train").innerHTML = beside;
    one("#train").textContent = button;
    drawn = { button, count: trainings() };
    one("#train").disabled = !works;
    length.facts(facts);
    fields.draw({ filled });
    fields.tell(told);
  }

  /** Show a step; what it needs is asked for when it comes into sight. */
  function show(at) {
    if (at === step) return;
    step = at;
    for (const section of page.querySelectorAll("[data-at]")) section.hidden = Number(section.dataset.at) !== at;
    for (const [index, item] of page.querySelectorAll(".steps li").entries()) {
      if (index + 1 === at) item.setAttribute("aria-current", "step"); else item.removeAttribute("aria-current");
    }
    one("#to-images").disabled = at !== 2;
    if (at === 2) one(".brought details")?.removeAttribute("open"); // the bases stand below it
    // Another base judges them anew.
    const isJudged = seen.images && judgedFor === fields.read("base.model");
    if (at === 1 && !isJudged && (isOfWords() || fields.read("dataset"))) report();
    if (at === 2) { plan(); bases.open(); }
  }

  async function go(to) {
    const { error } = await keep({ step: to });
    if (error || leaving.aborted) return;
    show(to);
    window.scrollTo(0, 0); // a step begins at its top, for the keyboard too
    main.querySelector("h1").focus({ preventScroll: true });
  }

  /** Have the draft set what a button says, without a value leave it to lora-train; show what comes of it. */
  async function setIn({ dataset: { sets: key, value: text } }) {
    await writing; // what was typed before
    const { error } = text === undefined
      ? await ask("/settings/reset", { draft, key }) : await ask("/settings/change", { draft, key, text });
    tell(error ?? "");
    if (error) return;
    bases.forget();
    if (step === 1) report(); else planAll();
  }

  /** Go back to the images and have their captions written. */
  async function writeCaptions() {
    await go(1);
    if (!images.folder) await images.open(fields.read("dataset"));
    if (!leaving.aborted) images.write();
  }

  /** Go back to those images that have a badge, as they are judged for the chosen base. */
  async function showThere(kind) {
    await go(1);
    if (leaving.aborted || step !== 1) return;
    await report();
    if (!images.folder) return;
    await images.open(images.folder); // the badges come with the report
    if (!leaving.aborted) images.showOnly({ kind });
  }

  function tell(text) {
    said.textContent = text;
    said.hidden = !text;
    if (text) said.scrollIntoView({ block: "nearest" });
  }

  /** Show the ways to other images, or the one line that stands for them once there are images. */
  function chooseOthers(open) {
    page.classList.toggle("chooses", open);
    one("#other-images").setAttribute("aria-expanded", String(open));
  }

  function showKind() {
    page.dataset.kind = fields.read("kind");
    one(".from b").textContent = one("[data-field=kind] label:has(:checked)").textContent.trim();
    bases.onlyEditing(page.dataset.kind === "pairs");
  }

  /** Whether words of a slider were typed that are not judged yet. */
  function isWriting() { return Object.keys(fields.typed()).some((key) => key.startsWith("slider:")); }

  function isOfWords() { return fields.read("kind") === "slider"; }

  /** Fill in the words of the slider that the page shows as an example. */
  function takeExample() {
    for (const { dataset: { word }, textContent } of page.querySelectorAll("[data-word]")) fields.type(`slider:${word}`, textContent);
    changed("slider:target");
  }

  /** Keep a field, and plan anew unless it does not count for the plan. */
  function changed(key) {
    if (key === "kind") showKind();
    keep();
    if (step === 1 && (key === "kind" || key.startsWith("slider:"))) {
      delete seen.images; // so that the answer is drawn even where it says what it said before
      judged = report();
    }
    if (key === "output.name") return;
    if (key !== "base.model") bases.forget();
    if (step === 2) planAll();
  }

  /** How many trainings the further values make that are typed now. */
  function trainings() {
    const further = [...page.querySelectorAll(".also input")].map(({ value }) => new Set(value.split(/[\s,;]+/).filter(Boolean)).size);
    return further.reduce((product, values) => product * (values + 1), 1);
  }

  /** Say on the button how many trainings are typed, before they are planned. */
  function countTrainings() {
    const count = trainings();
    if (count === drawn.count) one("#train").textContent = drawn.button;
    else if (count > 1) one("#train").textContent = say("Queue {#} trainings", count);
  }

  /** Plan the draft, then what the other bases make of it. */
  async function planAll() {
    await plan();
    if (!leaving.aborted) await bases.open();
  }

  page.addEventListener("change", ({ target }) => {
    const field = target.closest("[data-field]");
    if (field) changed(field.dataset.field);
  });
  // How many trainings are started is said before the field is left.
  let typing = 0;
  page.addEventListener("input", ({ target }) => {
    const field = target.closest(".also [data-field]");
    if (!field) return;
    countTrainings();
    clearTimeout(typing);
    typing = later(() => { if (fields.isTyped(field.dataset.field)) changed(field.dataset.field); }, TYPED_MS);
  });
  page.addEventListener("click", ({ target }) => {
    const reset = target.closest("[data-reset]");
    if (target.closest("[data-write]")) images.write();
    if (target.closest("[data-captions]")) writeCaptions();
    const there = target.closest("[data-shows]");
    if (there) showThere(there.dataset.shows);
    const types = target.closest("[data-types]");
    if (types) { fields.type(types.dataset.types, types.dataset.value); changed(types.dataset.types); }
    if (target.closest("[data-instruct]")) images.instruct();
    const shows = target.closest("button[data-kind]");
    if (shows) images.showOnly(shows.dataset);
    const keeps = target.closest("[data-keep]");
    if (keeps) images.keepOne(keeps.dataset.keep);
    if (target.closest("[data-take-example]")) takeExample();
    const sets = target.closest("[data-sets]");
    if (sets) setIn(sets);
    const opens = target.closest("[data-opens]");
    if (opens) document.getElementById(opens.dataset.opens).showModal();
    if (target.closest("[data-closes]") || target.localName === "dialog") target.closest("dialog").close();
    if (reset) { fields.type(reset.dataset.reset, ""); changed(reset.dataset.reset); }
  });
  one("#dataset").addEventListener("keydown", ({ key }) => { if (key === "Enter") one("#look").click(); });
  one("#look").onclick = () => {
    one("#next").hidden = true; // it continues with what is judged, and that is another folder now
    delete seen.images; // so that the report comes even where it says what it said before
    keep();
    report();
  };
  one("#other-images").onclick = () => chooseOthers(!page.classList.contains("chooses"));
  one("#browse").onclick = () => browse("dataset", trainIn);
  // It continues with what is judged. A press that leaves the last field of a slider is waited for: the button is not
  // disabled between pressing and letting go.
  page.addEventListener("input", ({ target }) => {
    if (target.closest("[data-field^='slider:']")) one("#next").disabled = false;
  });
  one("#next").onclick = async () => {
    const said = one("#next").textContent;
    await judged;
    const { disabled, hidden, textContent } = one("#next");
    if (!disabled && !hidden && textContent === said && !leaving.aborted) go(2);
  };
  for (const id of ["#back", "#to-images"]) one(id).onclick = () => go(1);
  one("#train").onclick = async () => {
    one("#train").disabled = true;
    const now = await write("/train/start");
    if (now.url) location.assign(now.url);
    else one("#train").disabled = false;
    page.querySelector("[aria-invalid]")?.focus();
  };
  // Another tab, or All settings, may have changed the draft.
  async function back() {
    if (document.hidden) return;
    const before = seen.draft;
    await keep();
    if (seen.draft === before) return;
    bases.forget();
    if (step === 2) planAll();
  }
  document.addEventListener("visibilitychange", back, { signal: leaving });
  window.addEventListener("focus", back, { signal: leaving });
  window.addEventListener("pageshow", ({ persisted }) => { if (persisted) back(); }, { signal: leaving });

  const address = new URL(location.href);
  for (const name of ["folder", "again", "mended", "advice", "example"]) address.searchParams.delete(name); // they are in the draft
  address.searchParams.set("draft", draft);
  history.replaceState(null, "", address);
  dropZone(one(".drop"), leaving, trainOn);
  mountPairs(one(".pairs"), one("[data-at='1'] .go-on"), leaving, { draft, done: trainOn });
  draw(JSON.parse(page.dataset.parts));
  // The images are seen while they are looked at.
  if (step === 1 && !isOfWords() && fields.read("dataset") && !images.folder) images.open(fields.read("dataset"));
}
