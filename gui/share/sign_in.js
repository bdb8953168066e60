// The sign-in to the Hugging Face Hub: a dialog that asks for a token.
import { dialog, make } from "/ui/dialog.js";
import { say } from "/ui/shared/words.js";

const TOKENS = "https://huggingface.co/settings/tokens";

/** Ask for a token that may `may` (read or write), after a sentence that says `why`; `done` gets the answer, {name}, and the open dialog. */
export function signIn(server, { may, why, done }) {
  const token = make("input", { type: "password", required: true, autocomplete: "off", spellcheck: false, maxLength: 300 });
  const where = make("p", {}, may === "write" ? say("Make a token that may write on") : say("Make a token that may read on"), " ", make("a", { href: TOKENS, target: "_blank", rel: "noopener", textContent: say("your page of tokens") }), say(", and paste it here."));
  const shown = dialog(say("Sign in to the Hugging Face Hub"), {
    fields: [...(why ? [make("p", { className: "notice" }, why)] : []), where, make("label", {}, say("Token"), token)],
    note: say("It is kept where the Hub's own programs keep it on this machine, and nowhere else."),
    act: say("Sign in"),
    submit: () => server.hub_sign_in({ token: token.value }),
  });
  shown.done = (answer) => done(answer, shown);
}
