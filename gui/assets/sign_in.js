// The sign-in to the Hugging Face Hub: a dialog that asks for a token.
import { dialog, make } from "/ui/dialog.js";

const TOKENS = "https://huggingface.co/settings/tokens";

/** Ask for a token that may `may` (read or write), after a sentence that says `why`; `done` gets the answer, {name}, and the open dialog. */
export function signIn(server, { may, why, done }) {
  const token = make("input", { type: "password", required: true, autocomplete: "off", spellcheck: false, maxLength: 300 });
  const where = make("p", {}, `Make a token that may ${may} on `, make("a", { href: TOKENS, target: "_blank", rel: "noopener", textContent: "your page of tokens" }), ", and paste it here.");
  const shown = dialog("Sign in to the Hugging Face Hub", {
    fields: [...(why ? [make("p", { className: "notice" }, why)] : []), where, make("label", {}, "Token", token)],
    note: "It is kept where the Hub's own programs keep it on this machine, and nowhere else.",
    act: "Sign in",
    submit: () => server.hub_sign_in({ token: token.value }),
  });
  shown.done = (answer) => done(answer, shown);
}
