// The page Machine: the cache is cleared after a question.
import { ask } from "/ui/shared/ask.js";
import { tell } from "/ui/shared/tell.js";

export function mount(main) {
  const [question, said] = [".question", ".said"].map((name) => main.querySelector(name));
  const press = (name, act) => main.querySelector(`[${name}]`).addEventListener("click", act);

  press("data-ask", async () => {
    const answer = await ask("/doctor/cache");
    tell(said, answer.error ? answer : {});
    if (answer.error) return;
    question.querySelector(".notice").textContent = answer.question;
    question.querySelector("[data-clear]").hidden = answer.isEmpty;
    question.hidden = false;
  });

  const price = main.querySelector(".price");
  price.addEventListener("submit", async (event) => {
    event.preventDefault();
    tell(said, await ask("/doctor/price", { typed: price.querySelector("input").value }));
  });

  press("data-keep", () => { question.hidden = true; });

  press("data-clear", async ({ target }) => {
    target.disabled = true; // it may take a while
    const answer = await ask("/doctor/clear");
    target.disabled = false;
    question.hidden = true;
    tell(said, answer);
    if (answer.report) main.querySelector(".doctor").innerHTML = answer.report; // markup of our own server
  });
}
