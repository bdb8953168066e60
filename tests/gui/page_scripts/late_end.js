// Makes Gradio's script see the end of a stream of answers only after the next tick.
const asked = window.fetch;
window.fetch = async (input, init) => {
  const answer = await asked(input, init);
  if (!String(input.url ?? input).includes("/queue/data")) return answer;
  const late = new TransformStream({ async transform(bytes, out) {
    const text = new TextDecoder().decode(bytes);
    const end = text.indexOf('data: {"msg":"close_stream"');
    if (end < 0) return out.enqueue(bytes);
    out.enqueue(new TextEncoder().encode(text.slice(0, end)));
    await new Promise((go) => setTimeout(go, 1500));
    window.ends = (window.ends ?? 0) + 1;
    out.enqueue(new TextEncoder().encode(text.slice(end)));
  } });
  return new Response(answer.body.pipeThrough(late), answer);
};
