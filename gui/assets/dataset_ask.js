// Asking the desk of a dataset (gui/dataset_desk.py), for the pages that show its cards.

let line = Promise.resolve();

/** Ask at once; a failure of any kind comes back as {error}. */
async function ask(name, values) {
  let answer;
  try {
    answer = await server[name](values);
  } catch {
    answer = null;
  }
  // Where the connection fails, gradio answers with nothing instead of raising.
  return answer ?? { error: "the interface does not answer; is it still running?" };
}

/** Ask after everything that was asked before is answered: no answer then shows cards as they were before a change
 * that is answered already, which would put old captions back on the page. */
function askInTurn(name, values) {
  line = line.then(() => ask(name, values));
  return line;
}
