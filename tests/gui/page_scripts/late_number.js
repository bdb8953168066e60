// Asks as Gradio's script does while the answer to an event comes before its number.
async (script) => {
  const lines = (...messages) => messages.map((each) => `data: ${JSON.stringify(each)}\n\n`).join("");
  const number = (event) => new Response(JSON.stringify({ event_id: event }));
  let send, streams = 0;
  window.fetch = (request) => {
    const url = request.url ?? request;
    if (url.endsWith("/queue/join?late")) return new Promise((go) => { send = () => go(number("b")); });
    if (url.endsWith("/queue/join")) return Promise.resolve(number("a"));
    streams += 1;
    const answers = ["a", "b"].map((event) => ({ msg: "process_completed", event_id: event }));
    return Promise.resolve(new Response(lines(...answers, { msg: "close_stream", event_id: null })));
  };
  new Function(script)();
  await fetch("/queue/join");
  const late = fetch("/queue/join?late");
  const stop = new AbortController();
  const stream = await fetch(new Request("/queue/data", { signal: stop.signal }));
  const text = await stream.text();
  stop.abort();
  send();
  await late;
  const last = new AbortController();
  const rest = await (await fetch(new Request("/queue/data", { signal: last.signal }))).text();
  const order = [];
  setTimeout(() => { order.push("end"); last.abort(); }, 200);
  await fetch("/queue/join").then(() => order.push("event"));
  return [text, rest, streams, order];
}
