// Elements without markup: text of files goes into textContent and attributes only, never into HTML.
// Shared by the scripts of the page Datasets, which are joined into one function.

/** Return an element; `on...` attributes are listeners, null, undefined and false are left out. */
function make(name, attributes = {}, ...children) {
  const found = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) found.addEventListener(key.slice(2), value);
    else if (value === true) found.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false)
      found.setAttribute(key, String(value));
  }
  found.append(...children.filter((child) => child !== null && child !== undefined));
  return found;
}

/** Return a real button, which is reached with Tab and pressed with Enter or Space. */
function button(text, onclick, attributes = {}) {
  return make("button", { type: "button", onclick, ...attributes }, text);
}

/** Return a labelled select of [value, text] pairs. */
function choice(label, pairs, onchange) {
  const select = make("select", { onchange: () => onchange(select.value) });
  for (const [value, text] of pairs) select.append(make("option", { value }, text));
  return { label: make("label", { class: "ds-field" }, make("span", {}, label), select), select };
}

/** Return a labelled text field. */
function field(label, attributes = {}) {
  const input = make("input", { type: "text", autocomplete: "off", ...attributes });
  return { label: make("label", { class: "ds-field" }, make("span", {}, label), input), input };
}

/** Return "1 image", "3 images". */
function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

/** Return `text` after a pause: each call starts the pause again; `now` ends it. */
function afterPause(pause_ms, act) {
  let timer = 0;
  const run = () => { clearTimeout(timer); timer = 0; return act(); };
  return {
    later() { clearTimeout(timer); timer = setTimeout(run, pause_ms); },
    now: run,
    drop() { clearTimeout(timer); timer = 0; },
  };
}
