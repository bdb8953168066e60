// How a run learns, as a film: the base beside one picture of a prompt after another, which a slider walks through. It
// opens with the first prompt, of which there are more pictures than samples; the small pictures beside it choose
// another one. Keys on the slider: left and right one picture, Home and End the first and the last.
import { button, make } from "/ui/shared/elements.js";
import { say } from "/ui/shared/words.js";

const PLAY_MS = 160; // from one picture to the next

/** Show the film in `place`, first as data-film has it, and what is drawn `beside` it; `enlarge` gets the step whose picture
 *  is pressed. Return what draws it as it is by now, and what shows the pictures of another prompt in it. */
export function film(place, beside, run, leaving, enlarge) {
  let first = JSON.parse(place.dataset.film); // of the first prompt
  let shown = first;
  let at = shown.opens_at; // of the picture on the right; -1: the newest, also when another comes
  let playing = 0;

  const base = make("img");
  const now = make("img");
  const large = make("button", { type: "button", class: "enlarge", title: say("Enlarge"), onclick: () => enlarge(one().step) }, now);
  const coming = make("p", { class: "coming quiet" });
  const left = make("span");
  const name = make("span", { class: "name", role: "status" });
  const how = make("p", { class: "quiet how" });
  const prompt = make("p", { class: "prompt", dir: "auto", translate: "no" });
  const slider = make("input", { type: "range", min: "0", step: "1", "aria-label": say("step of the picture"), oninput: () => { stop(); go(Number(slider.value)); } });
  const play = button(say("Play"), () => (playing ? stop() : start()), { class: "play" });
  const link = (kind, text) => make("a", { class: "ui-button", download: "", href: `/run/film?${new URLSearchParams({ run, kind })}` }, text);
  const gif = link("gif", say("Save as GIF"));
  const mp4 = link("mp4", say("Save as MP4"));
  const why = make("span", { class: "quiet" });

  place.append(
    make("div", { class: "pair" },
      make("figure", {}, base, make("figcaption", {}, left)),
      make("figure", {}, large, coming, make("figcaption", {}, name))),
    make("div", { class: "scrub" }, play, slider, gif, mp4),
  );
  beside.append(prompt, how, why, make("div", { class: "others" })); // samples.js fills it
  leaving.addEventListener("abort", stop);

  /** Return the picture on the right. */
  function one() {
    const last = shown.frames.length - 1;
    return shown.frames[at < 0 || at > last ? last : at];
  }

  function draw() {
    const { frames } = shown;
    place.hidden = frames.length === 0;
    if (frames.length === 0) return;
    const last = frames.length - 1;
    const frame = one();
    show(base, frames[0]);
    base.alt = left.textContent = frames[0].name;
    // One picture alone has nothing to be compared with yet: it is not shown twice.
    large.hidden = last === 0;
    coming.hidden = last > 0;
    coming.textContent = shown.goes ? say("The next picture comes after some more steps.") : say("No other picture was drawn.");
    if (last > 0) show(now, frame);
    now.alt = `${shown.prompt}, ${frame.name}`;
    name.textContent = last > 0 ? frame.name : "\u00a0"; // its line stays, so that both pictures stand at one height
    prompt.textContent = shown.prompt;
    how.textContent = frame.how;
    slider.max = last;
    slider.value = frames.indexOf(frame);
    slider.setAttribute("aria-valuetext", frame.name);
    slider.hidden = play.hidden = last === 0;
    gif.hidden = mp4.hidden = last === 0 || shown !== first; // they are made of the first prompt
    mp4.hidden ||= shown.no_mp4 !== "";
    why.textContent = last === 0 || shown !== first ? "" : shown.no_mp4;
  }

  function show(image, { src }) {
    if (image.getAttribute("src") !== src) image.src = src;
  }

  function go(to) {
    at = to >= shown.frames.length - 1 ? -1 : to;
    draw();
  }

  function start() {
    if (at < 0) at = 0;
    play.textContent = say("Pause");
    playing = setInterval(() => {
      go(at + 1);
      if (at < 0) stop();
    }, PLAY_MS);
    draw();
  }

  function stop() {
    clearInterval(playing);
    playing = 0;
    play.textContent = say("Play");
  }

  draw();
  return {
    draw(newer) {
      const isFirst = shown === first;
      if (isFirst && newer.opens_at !== first.opens_at) at = newer.opens_at; // it has ended meanwhile
      first = newer;
      if (isFirst) shown = first;
      draw();
    },
    ownPrompt: () => first.prompt,
    /** Show the pictures of another prompt, or of the first one without any; they are `again` those of the one shown. */
    choose(other, again) {
      shown = other ?? first;
      if (!again) {
        stop();
        at = shown.opens_at;
      }
      draw();
    },
  };
}
