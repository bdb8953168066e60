// Elements without markup: text of files goes into textContent and attributes only, never into HTML.

/** Return an element; `on...` attributes are listeners, null, undefined and false are left out. */
export function make(name, attributes = {}, ...children) {
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
export function button(text, onclick, attributes = {}) {
  return make("button", { type: "button", onclick, ...attributes }, text);
}

/** Return an icon of the pages; what it says is beside it. */
export function icon(name) {
  const [svg, use] = ["svg", "use"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `/ui/icons.svg#${name}`);
  svg.append(use);
  return svg;
}

let fields = 0;

/** Return an input or select with its label above it, as {node, input}. */
function labelled(label, input) {
  fields += 1;
  input.id = `ds-field-${fields}`;
  const node = make("div", { class: "ds-field" }, make("label", { for: input.id }, label), input);
  return { node, input };
}

/** Return a labelled select of [value, text] pairs. */
export function choice(label, pairs, onchange) {
  const options = pairs.map(([value, text]) => make("option", { value }, text));
  return labelled(label, make("select", { onchange }, ...options));
}

/** Return a labelled text field. */
export function field(label, attributes = {}) {
  return labelled(label, make("input", { type: "text", autocomplete: "off", ...attributes }));
}

/** Return a button that shows `node`, which is hidden at first, and hides it again, as {opener, open}. */
export function opening(label, node) {
  const open = (is) => {
    node.hidden = !is;
    opener.setAttribute("aria-expanded", String(is));
  };
  const opener = button(label, () => open(node.hidden), { class: "opener" });
  open(false);
  return { opener, open };
}

/** Return what calls `act` after a pause: `later` starts the pause anew, `now` ends it. */
export function afterPause(pause_ms, act) {
  let timer = 0;
  const run = () => { clearTimeout(timer); timer = 0; return act(); };
  return {
    later() { clearTimeout(timer); timer = setTimeout(run, pause_ms); },
    now: run,
    drop() { clearTimeout(timer); timer = 0; },
  };
}

/** Let a place hold these nodes, in this order; moving a node would take the focus, and what is being typed, from it.
 *  Return whether it held them already. */
export function holds(place, nodes) {
  const same = nodes.length === place.children.length && nodes.every((node, at) => node === place.children[at]);
  if (!same) place.replaceChildren(...nodes);
  return same;
}
