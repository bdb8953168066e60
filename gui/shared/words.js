// The texts of the scripts in the language of the page: say("Put back {}", name). What the language does not know
// stays English.

const code = document.documentElement.dataset.language ?? "en";
const texts = code === "en" ? {} : await read(`/ui/language/${code}.json`);

async function read(address) {
  try {
    return await (await fetch(address)).json();
  } catch {
    return {}; // the server was ended meanwhile: the scripts go on in English
  }
}

export function say(english, ...values) {
  const left = values[Symbol.iterator]();
  return (texts[english] ?? english).replace(/\{(?:text|#)?\}/g, () => left.next().value);
}
