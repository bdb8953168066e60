// Asking for a dataset (routes.py), for the pages that show its cards.
import { ask as asked } from "/ui/shared/ask.js";

const PATIENCE_MS = 30_000;
let line = Promise.resolve();

/** Ask at once. */
export function ask(name, values = {}) {
  return asked(`/datasets/${name}`, values);
}

/** Ask after everything that was asked before is answered: no answer then shows cards as they were before a change
 * that is answered already, which would put old captions back on the page. */
export function askInTurn(name, values) {
  const answer = line.then(() => ask(name, values));
  // One that no answer comes to, of a folder on a disk that hangs, keeps the others waiting no longer than this.
  const patience = line.then(() => new Promise((resolve) => setTimeout(resolve, PATIENCE_MS)));
  line = Promise.race([answer, patience]);
  return answer;
}
