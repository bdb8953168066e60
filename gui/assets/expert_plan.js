// The draft as the server has it, what the plan makes of it, and which rows are looked for.

function accept(state) {
  if (!state || state.error) return;
  const before = shown.stamp;
  shown = state;
  put(note, state.started ? "This training is started: its settings stay as they are." : "");
  drawWhose();
  for (const field of fields.values()) field.draw();
  json.draw();
  drawPresets();
  filter();
  if (state.stamp !== before) replan();
}

function drawWhose() {
  const what = shown.dataset ? `of the training on ${shown.dataset} · ` : "of a new training · ";
  const back = make("a", { href: `/train?draft=${shown.id}` }, "back to the page Train");
  whose.replaceChildren(what, back);
}

let planning = false;
let again = false;

async function replan() {
  again = planning;
  if (planning) return;
  planning = true;
  summary.setAttribute("aria-busy", "true");
  do {
    again = false;
    try {
      // Not in line with the changes: it takes a second, and they do not wait for it.
      const found = await server.plan({ draft: shown.id });
      if (found === undefined) throw new Error(AWAY);
      put(planError, found.error || "");
      if (!found.fields) continue;
      plan = found;
      drawPlan();
    } catch {
      lost();
    }
  } while (again);
  planning = false;
  summary.removeAttribute("aria-busy");
}

function drawPlan() {
  said.replaceChildren(...plan.said.map((text) => make("p", {}, ...inline(text))));
  drawMemory(plan.memory);
  for (const [key, field] of fields) {
    field.draw();
    field.row.classList.toggle("blamed", plan.blamed.includes(key));
    field.unused = plan.unused[key] || "";
  }
  sortUnused();
  filter();
}

function drawMemory(found) {
  memory.hidden = !found;
  if (!found) return;
  const percent = (share) => `${(100 * share).toFixed(2)}%`;
  const pieces = found.parts.map((part) => {
    const piece = make("i", { class: part.css, title: part.text });
    piece.style.width = percent(part.share); // no style attribute: a security policy may forbid them
    return piece;
  });
  if (found.limit !== null) {
    const limit = make("b", { class: "limit", title: "the limit" });
    limit.style.left = percent(found.limit);
    pieces.push(limit);
  }
  const legend = found.parts.map((part) => make("span", {}, make("i", { class: part.css }), part.text));
  memory.replaceChildren(
    make("p", { class: found.fits ? "fit" : "fit error" }, found.said),
    make("div", { class: "bar-of-parts", role: "img", "aria-label": found.said }, ...pieces),
    make("p", { class: "legend" }, ...legend),
  );
}

/** Fold the settings that do not matter here; one that is changed or in use stays where it is. */
function sortUnused() {
  for (const section of sections) {
    for (const field of section.fields) {
      const folded = Boolean(field.unused) && !field.row.classList.contains("changed");
      const home = folded ? section.unused : section.body;
      put(field.why, field.unused);
      if (field.row.parentElement === home || field.row.contains(document.activeElement)) continue;
      const after = section.fields
        .slice(section.fields.indexOf(field) + 1)
        .find((other) => other.row.parentElement === home);
      home.insertBefore(field.row, after ? after.row : null);
    }
  }
}

// ---- finding

function filter() {
  // Short words begin one: "lr" is not a part of "already".
  const wanted = plainWords(search.value).split(" ").filter(Boolean).map((word) => (word.length < 4 ? ` ${word}` : word));
  let count = 0;
  for (const section of sections) {
    let visible = 0;
    let folded = 0;
    for (const field of section.fields) {
      const text = `${field.words} ${section.words}`;
      const changed = field.row.classList.contains("changed") || Boolean(field.refused);
      const fits = wanted.every((word) => text.includes(word)) && (!changedOnly.checked || changed);
      field.row.hidden = !fits;
      if (!fits) continue;
      visible += 1;
      if (field.row.parentElement === section.unused) folded += 1;
    }
    section.box.hidden = visible === 0;
    section.fold.hidden = folded === 0;
    put(section.summary, `Not used here: ${folded}`);
    if (wanted.length && folded && !section.fold.open) section.opened = section.fold.open = true;
    if (!wanted.length && section.opened) section.opened = section.fold.open = false;
    count += visible;
  }
  nothing.hidden = count > 0;
  const all = fields.size;
  put(counted, count === all ? `${all} settings` : `${count} of ${all} settings`);
  const set = Object.keys(shown.given).length;
  put(changes, set ? `${set} changed` : "none changed");
  resetAll.hidden = set === 0;
}
