// Forms of the page LoRAs.

/** Let `act` answer the button of a form, once for each press: until it has, the button is off. */
export function onSubmit(form, act) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("[type=submit]");
    if (button.disabled) return;
    button.disabled = true;
    await act(form);
    button.disabled = false;
  });
}
