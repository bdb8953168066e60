// The one way in which a page asks the server: a JSON object goes out, one comes back. A refusal of the server and a
// server that is away are answers as well, {error}, so that who asks has one case to show.
import { say } from "/ui/shared/words.js";

export async function ask(path, body = {}) {
  try {
    const answer = await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
    });
    return await answer.json();
  } catch {
    return { error: say("The program does not answer; is it still running?"), isAway: true };
  }
}
