// The one way in which a page asks the server: a JSON object goes out, one comes back. A refusal of the server and a
// server that is away are answers as well, {error}, so that who asks has one case to show.
import { language, say } from "/ui/shared/words.js";

const AWAY = "The program does not answer; is it still running?";

export async function ask(path, body = {}) {
  try {
    const answer = await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json", ...language },
      body: JSON.stringify(body),
    });
    return await answer.json();
  } catch {
    return { error: say(AWAY), isAway: true };
  }
}

/** Return a name for an upload that nothing else has. */
export function newBatch() {
  return [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Send one file, as an upload of its own; return {batch}, by which a question names it, or {error}. */
export async function sendFile(file) {
  const batch = newBatch();
  try {
    const answer = await fetch(`/upload/${batch}/0`, { method: "PUT", body: file, headers: language });
    return answer.ok ? { batch } : { error: await answer.text() };
  } catch {
    return { error: say(AWAY), isAway: true };
  }
}
