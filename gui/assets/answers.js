// Answers of Gradio's server reach a page over one stream, which the server closes when nothing is asked. Gradio's
// script learns of the end a moment later; an event of that moment was sent into a stream that has ended, and
// its answer stays on the server until the next event. The page may wait for it and send none: it stands still.
// So the end is kept from the script while an event has no answer, and the stream goes on with a new request.
// And where an answer comes before the number of its event is known, the script opens a stream for it afterwards,
// in which nothing comes and which has no end: such a stream is ended here, without a request.

(() => {
  const send = window.fetch.bind(window);
  const asked = new Set(); // events without an answer
  const early = new Set(); // events whose answer came before their number
  const MESSAGE = /^data: \{"msg":"(\w+)","event_id":(?:"(\w+)")?/;
  const END = 'data: {"msg":"close_stream","event_id":null}\n\n';
  let end = null; // resolved once the script knows that the stream is closed: it aborts its request then
  const closing = (request) => {
    end = new Promise((known) => {
      request.signal?.addEventListener("abort", known, { once: true });
      setTimeout(known, 1000); // for a script that does not abort
    });
  };

  window.fetch = async (request, options) => {
    const path = new URL(request.url ?? request, location).pathname;
    if (path.endsWith("/queue/data") && !asked.size) {
      closing(request);
      return new Response(END, { headers: { "content-type": "text/event-stream" } });
    }
    const answer = await send(request, options);
    if (path.endsWith("/queue/join") && answer.ok) {
      const { event_id: event } = await answer.clone().json();
      if (!early.delete(event)) asked.add(event);
      await end;
    }
    if (!path.endsWith("/queue/data") || !answer.ok) return answer;
    return new Response(unbroken(request, answer), answer);
  };

  function unbroken(request, answer) {
    let reader;
    return new ReadableStream({
      async start(messages) {
        const bytes = new TextEncoder();
        let goes = true;
        while (goes) {
          goes = false;
          reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
          let rest = "";
          for (let part = await reader.read(); !part.done; part = await reader.read()) {
            const read = (rest + part.value).split("\n\n");
            rest = read.pop();
            for (const message of read) {
              const [, kind, event] = MESSAGE.exec(message) ?? [];
              if (kind === "process_completed" && !asked.delete(event)) early.add(event);
              if (kind === "close_stream" && asked.size) {
                goes = true;
                continue;
              }
              if (kind === "close_stream") closing(request);
              messages.enqueue(bytes.encode(`${message}\n\n`));
            }
          }
          if (goes) answer = await send(request);
          if (!answer.ok) throw new Error(answer.statusText); // as Gradio's script does: the page is loaded again
        }
        messages.close();
      },
      cancel: (reason) => reader.cancel(reason),
    });
  }
})();
