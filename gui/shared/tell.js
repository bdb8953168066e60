// What a page says of an answer, in its line for that: what was done, or why not.

export function tell(line, { error, done = "" }) {
  line.className = error ? "said error notice" : "said notice";
  line.textContent = error ?? done;
  line.hidden = !line.textContent;
}
