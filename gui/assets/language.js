// Says the page in another language: texts that languages/CODE.json knows are replaced where they stand,
// now and whenever a page adds some; all others stay. Nothing in an element with translate="no", a field
// or a log is replaced: names, captions, prompts and paths are of the user.
//
// A text is known as a whole, or with `{}` in place of what stays as it is (a name), `{#}` of a figure with
// its unit and `{text}` of what is a text of its own. Of several that fit, the one with the most letters counts.

function translatePage(texts) {
  const NAMES = ["placeholder", "title", "aria-label", "alt", "label", "data-page", "data-sure"];
  const KEPT = '[translate="no"], .notranslate, [contenteditable], script, style, code, pre, kbd';
  const PLACEHOLDERS = {
    "{}": "(.+?)", "{text}": "(.+?)",
    "{#}": String.raw`(\d[^A-Za-z]*?(?:(?:[KMG]iB|B|days|h|min|ms|px|s|e-?\d+)\b[^A-Za-z]*?)*)`,
  };
  const written = new WeakMap(); // what was put into a text node: not to be looked up as English
  const whole = new Map(), patterns = new Map();
  for (const [english, other] of Object.entries(texts)) {
    if (/\{(text|#)?\}/.test(english)) add(english, other);
    else whole.set(english, other);
  }
  for (const list of patterns.values()) list.sort((one, two) => two.letters - one.letters);

  function add(english, other) {
    const parts = english.split(/(\{(?:text|#)?\})/);
    const source = parts.map((part, at) => (at % 2 ? PLACEHOLDERS[part] : part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"))).join("");
    const key = parts[0].slice(0, 2);
    const pattern = {
      test: new RegExp(`^${source}$`, "s"),
      isText: parts.filter((_, at) => at % 2).map((part) => part !== "{}"),
      pieces: other.split(/\{(?:text|#)?\}/),
      letters: english.length,
    };
    if (!patterns.has(key)) patterns.set(key, []);
    patterns.get(key).push(pattern);
  }

  /** Return a text in the language, null where it is not known. */
  function said(english) {
    const trimmed = english.trim().replace(/\s+/g, " ");
    if (trimmed.length < 2) return null;
    const other = whole.get(trimmed) ?? filled(trimmed);
    if (other === null) return null;
    return english.match(/^\s*/)[0] + other + english.match(/\s*$/)[0];
  }

  function filled(text) {
    const candidates = [...new Set([text.slice(0, 2), text.slice(0, 1), ""])].flatMap((key) => patterns.get(key) ?? []);
    let best = null;
    for (const pattern of candidates) {
      if (best && best.pattern.letters >= pattern.letters) continue;
      const match = pattern.test.exec(text);
      if (match) best = { pattern, values: match.slice(1) };
    }
    if (!best) return null;
    const values = best.values.map((value, at) => (best.pattern.isText[at] ? said(value) ?? value : value));
    return best.pattern.pieces.map((piece, at) => piece + (values[at] ?? "")).join("");
  }

  function node(text) {
    if (written.get(text) === text.data || text.parentNode?.localName === "textarea") return;
    const other = said(text.data);
    if (other === null) return;
    const parent = text.parentNode;
    // The text of an option is its value too unless that is named.
    if (parent?.localName === "option" && !parent.hasAttribute("value")) parent.setAttribute("value", parent.text);
    written.set(text, other);
    text.data = other;
  }

  function attribute(element, name) {
    const value = element.getAttribute(name);
    const before = written.get(element) ?? {};
    if (!value || before[name] === value) return;
    const other = said(value);
    if (other === null) return;
    written.set(element, { ...before, [name]: other });
    element.setAttribute(name, other);
  }

  function walk(top) {
    if (top.nodeType === Node.TEXT_NODE) return node(top);
    if (top.nodeType !== Node.ELEMENT_NODE || top.matches(KEPT)) return;
    const accept = (at) => (at.nodeType === Node.ELEMENT_NODE && at.matches(KEPT) ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
    const walker = document.createTreeWalker(top, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT, accept);
    for (let at = top; at; at = walker.nextNode()) {
      if (at.nodeType === Node.TEXT_NODE) node(at);
      else for (const name of NAMES) if (at.hasAttribute(name)) attribute(at, name);
    }
  }

  function kept(element) {
    return !element?.isConnected || element.closest(KEPT) !== null || document.head.contains(element);
  }

  new MutationObserver((changes) => {
    for (const { type, target, addedNodes, attributeName } of changes) {
      if (kept(target.nodeType === Node.TEXT_NODE ? target.parentElement : target)) continue;
      if (type === "childList") addedNodes.forEach((added) => { if (added.isConnected) walk(added); });
      else if (type === "attributes") attribute(target, attributeName);
      else node(target);
    }
  }).observe(document.documentElement, { childList: true, subtree: true, characterData: true, attributes: true, attributeFilter: NAMES });
}
