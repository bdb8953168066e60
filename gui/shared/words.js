// The texts of the scripts in the language of the page: say("Put back {}", name). What the language does not know
// stays English.

const code = document.documentElement.dataset.language ?? "en";
/** In which language the server is to answer: this page's, whatever another tab has chosen meanwhile. */
export const language = { "lora-train-language": code };
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
  return (texts[english] ?? english).replace(/\{(?:text|#)?\}/g, (place) => {
    const { value } = left.next();
    return place === "{#}" ? figure(String(value)) : value;
  });
}

const sample = texts["1,234.5"] ?? "1,234.5"; // it shows the separators of the language
const separators = { ".": sample.at(-2), ",": sample.at(1) };

/** Return a figure with the separators of the language; a version such as 2.13.0 is none. */
export function figure(written) {
  return written.replace(/(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?!\w*[.,]\d)/g, (number) => number.replace(/[.,]/g, (each) => separators[each]));
}
