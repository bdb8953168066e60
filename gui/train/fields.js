// The fields of the page: an input with `data-field` is one, and nothing else is known of it here. What somebody
// has typed is a text that differs from the one that was shown; only such texts are sent. What is shown is the text
// of the draft, else what the plan chose, else nothing or the choice that leaves it to lora-train.

export class Fields {
  constructor(place) {
    this.place = place;
    this.inputs = new Map([...place.querySelectorAll("[data-field]")].map((node) => [node.dataset.field, node]));
    this.texts = {};
    this.filled = {};
    this.shown = new Map([...this.inputs].map(([key, node]) => [key, read(node)]));
    this.listeners = [];
  }

  /** Return the text of a field as it stands in its input. */
  read(key) { return read(this.inputs.get(key)); }

  /** Put a text into an input, as somebody who types it. */
  type(key, text) { write(this.inputs.get(key), text); }

  /** Return what was typed and is not kept yet, by key. */
  typed() {
    return Object.fromEntries([...this.inputs.keys()].filter((key) => this.isTyped(key)).map((key) => [key, this.read(key)]));
  }

  isTyped(key) { return this.read(key) !== this.shown.get(key); }

  /** Take over what the server has kept of the texts that were sent, and say what it refused. Where the earlier text
   *  stands again, which is kept already and was not sent, nothing is refused any more. */
  kept(sent, refused) {
    for (const key of this.inputs.keys()) {
      const isSent = key in sent;
      if (isSent && !(key in refused)) this.shown.set(key, sent[key]);
      if (isSent || !this.isTyped(key)) this.refuse(key, refused[key] ?? "");
    }
  }

  refuse(key, text) {
    const said = this.place.querySelector(`[data-refused="${key}"]`);
    said.textContent = text;
    said.hidden = !text;
    const node = this.inputs.get(key);
    if (text) node.setAttribute("aria-invalid", "true"); else node.removeAttribute("aria-invalid");
  }

  /** Say beside fields what is to be known of their values; markup of our own server, in which every text is escaped. */
  tell(told) {
    for (const [key, html] of Object.entries(told)) {
      const place = this.place.querySelector(`[data-told="${key}"]`);
      if (place.innerHTML !== html) place.innerHTML = html;
      place.hidden = !html;
    }
  }

  /** Show the texts of the draft, or what the plan fills in; a field in which somebody types stays. */
  draw({ texts = this.texts, filled = this.filled } = {}) {
    Object.assign(this, { texts, filled });
    for (const [key, node] of this.inputs) {
      if (this.isTyped(key)) continue;
      const text = texts[key] ?? filled[key] ?? node.dataset.unset ?? "";
      if (read(node) !== text) write(node, text);
      this.shown.set(key, read(node));
    }
    for (const button of this.place.querySelectorAll("[data-reset]")) button.hidden = !(button.dataset.reset in texts);
    for (const listener of this.listeners) listener();
  }
}

const isChoice = (node) => node.localName === "fieldset";

function read(node) {
  if (isChoice(node)) return node.querySelector("input:checked")?.value ?? "";
  return node.type === "checkbox" ? String(node.checked) : node.value;
}

function write(node, text) {
  if (isChoice(node)) for (const input of node.querySelectorAll("input")) input.checked = input.value === text;
  else if (node.type === "checkbox") node.checked = text === "true";
  else node.value = text;
}
