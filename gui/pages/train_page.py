"""The page Train: from a folder of images to a running training in three clicks.

Inputs: the folder, and choices that all have an answer already. Outputs: the draft (a file, so that
going back, an error, a reload lose nothing) and, at the third click, an item of the queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from lora_trainer.config import PRIORITIES

from ..launch import Plans
from ..markup import drop_zone, note_html
from ..workplace import Workplace
from .gradio_events import GO, PRIVATE, QUIET, TICK_S, html, module
from .train_handlers import (
    CHECK,
    IMAGES,
    STARTED,
    base_cards,
    following,
    keeping,
    looking,
    opening,
    planning,
    recalling,
    replanning,
    starting,
    stepping,
)

_DROP = module(
    "drop.js",
    'module.dropZone(element.querySelector(".drop"), module.trainOn);',
)
_BROWSE = module(
    "shared/browse.js",
    'const button = element.querySelector("button");'
    ' button.onclick = () => module.browse("dataset", module.trainIn); button.disabled = false;',
)
_BASES = module(
    "bases.js",
    'module.mount(element.querySelector(".bases"), server, () => trigger("click"));',
)
_CHOSEN = '() => document.querySelector(".bases").chosen'
_COURSE = module(
    "course.js",
    'module.mount(element.querySelector(".course"), {'
    " get: () => props.value, set: (value) => { props.value = value; },"
    ' asked: () => trigger("click"), onchange: (draw) => watch("value", draw) });',
)
_IMAGES = module(
    "train_images.js",
    'module.mount(element.querySelector(".train-images"), {'
    ' get: () => props.value, onchange: (draw) => watch("value", draw), lookAgain: () => trigger("click") });',
)
_WITH_UNSENT = """(...fields) => {
  const unsent = document.querySelector(".course")?.unsent ?? {};
  return [...fields.slice(0, -1), { ...fields.at(-1), changed: { ...unsent } }];
}"""
_REMEMBER = """(id) => {
  const url = new URL(location.href);
  if (id && url.searchParams.get("draft") !== id) {
    url.searchParams.set("draft", id);
    // They are in the draft, and may be changed there.
    for (const name of ["folder", "again", "mended"]) url.searchParams.delete(name);
    history.replaceState(null, "", url);
  }
}"""
_BASES_HEAD = (
    '<h2 id="bases">The base model it learns on</h2><p class="quiet">Take the kind of model that you draw with: '
    "the LoRA works with every checkpoint made from it.</p>"
)
_KINDS = {
    "person": "A person or character",
    "style": "A style",
    "object": "An object",
    "any": "Not sure, or something else",
}
_ABOUT = {
    "speed": "Speed: done soonest",
    "balanced": "Balanced",
    "quality": "Quality: takes longer",
}


@dataclass(frozen=True, kw_only=True)
class Widgets:
    """The widgets of the page; `fields` are those that a draft keeps, after its id, `course` the last."""

    draft: Any
    dataset: Any
    base: Any
    priority: Any
    name: Any
    trigger: Any
    concept: Any
    course: Any
    train: Any
    beside_train: Any
    walk: Any
    said: Any
    report: Any
    images: Any
    good: Any
    plan: Any
    settings_link: Any
    waiting: Any
    go: Any
    timer: Any

    @property
    def fields(self) -> list[Any]:
        typed = [self.dataset, self.base, self.priority, self.name, self.trigger, self.concept]
        return [self.draft, *typed, self.course]


def build(work: Workplace) -> None:
    """Lay the page out."""
    html("<h1>Train a LoRA</h1>")
    with gr.Walkthrough(selected=IMAGES) as walk:
        with gr.Step("Images", id=IMAGES):
            dataset, look, report, images, good = _images_step(work)
        with gr.Step("Settings", id=CHECK):
            (
                concept,
                base,
                priority,
                name,
                trigger,
                course,
                plan,
                settings_link,
                back,
                train,
                beside_train,
                cards,
            ) = _check_step(work)
        with gr.Step("Train", id=STARTED):
            waiting = html(note_html("Nothing is started yet."))
            gr.Button("Train another one", link="/train?draft=new")
    said = html(elem_classes="line")
    draft = gr.Textbox(visible="hidden", label="draft")
    go = html(value={"to": ""}, html_template="<span></span>", js_on_load=GO)
    widgets = Widgets(
        draft=draft,
        dataset=dataset,
        base=base,
        priority=priority,
        name=name,
        trigger=trigger,
        concept=concept,
        course=course,
        train=train,
        beside_train=beside_train,
        walk=walk,
        said=said,
        report=report,
        images=images,
        good=good,
        plan=plan,
        settings_link=settings_link,
        waiting=waiting,
        go=go,
        timer=gr.Timer(TICK_S, active=False),  # goes while a training of this draft is to begin
    )
    _connect(work, widgets, look=look, back=back, cards=cards)


def _images_step(work: Workplace) -> tuple[Any, ...]:
    html(drop_zone(), js_on_load=_DROP)
    with (
        gr.Accordion("Images that are already on the computer that trains", open=False),
        gr.Row(elem_classes="or-typed"),
    ):
        dataset = gr.Textbox(
            label="Folder with your images",
            placeholder="/path/to/a/folder/with/images",
            info="Used where it is; captions that you change are saved beside the images.",
            max_lines=1,
            scale=5,
            elem_id="dataset",
        )
        html(
            html_template='<p class="actions"><button type="button" disabled>Browse</button></p>',
            js_on_load=_BROWSE,
            elem_classes="browse",
        )
        look = gr.Button("Look at the images", scale=1, min_width=200)
    report = html()
    images = html(
        {"folder": ""},
        html_template='<div class="train-images mount"></div>',
        js_on_load=_IMAGES,
    )
    with gr.Row(elem_classes="go-on"):
        good = gr.Button("Looks good, next step", variant="primary", visible=False)
    return dataset, look, report, images, good


def _check_step(work: Workplace) -> tuple[Any, ...]:
    html(_BASES_HEAD)
    cards = html(
        html_template='<div class="bases"></div>',
        js_on_load=_BASES,
        server_functions=base_cards(work, Plans(work)),
    )
    base = gr.Dropdown(
        label="Or another one",
        choices=[("automatic", "auto")],
        value="auto",
        allow_custom_value=True,
        info="A model that is on this machine, its folder or file, or a name on Hugging Face such as owner/name.",
        elem_classes="other-base",
    )
    concept = gr.Radio(
        label="What do your images show?",
        choices=[(about, word) for word, about in _KINDS.items()],
        value="any",
        elem_classes="kinds",
    )
    priority = gr.Radio(
        label="What matters most?",
        choices=[(_ABOUT[value], value) for value in PRIORITIES],
        value="balanced",
    )
    with gr.Row():
        trigger = gr.Textbox(
            label="Trigger word (optional)",
            info="A rare word that calls it up later in a prompt. While it trains the word goes before each "
            "caption that lacks it, and into the samples' prompts; your files stay as they are.",
            max_lines=1,
            scale=2,
            min_width=300,
        )
        name = gr.Textbox(
            label="Name (optional)",
            info="Of the training and its file.",
            max_lines=1,
            min_width=300,
        )
    plan = html(note_html("The plan appears here."))
    course = html(value={}, html_template='<div class="course" hidden></div>', js_on_load=_COURSE)
    with gr.Row():
        back = gr.Button("Back to the images", min_width=180, scale=0)
        settings_link = gr.Button("Show all settings", link="/settings", min_width=160, scale=0)
    with gr.Row(elem_classes="go-on"):
        beside_train = html(elem_classes="beside-train")
        train = gr.Button("Train", variant="primary", min_width=160)
    return (
        concept,
        base,
        priority,
        name,
        trigger,
        course,
        plan,
        settings_link,
        back,
        train,
        beside_train,
        cards,
    )


def _connect(work: Workplace, widgets: Widgets, *, look: Any, back: Any, cards: Any) -> None:
    planned = [widgets.plan, widgets.course, widgets.train, widgets.beside_train]
    page: Any = gr.context.Context.root_block
    shown = [
        *widgets.fields[:-1],
        widgets.walk,
        widgets.said,
        widgets.settings_link,
        widgets.waiting,
        widgets.timer,
    ]
    opened = page.load(opening(work), None, shown, show_progress="hidden", **PRIVATE)
    opened.then(None, widgets.draft, None, js=_REMEMBER)
    seen = [widgets.report, widgets.images, widgets.good]
    # Nothing is shown of it: a new draft has nothing to recall.
    opened.then(
        recalling(work), widgets.draft, [*seen, *planned], show_progress="hidden", **PRIVATE
    )
    looked = [widgets.said, *seen]
    # The last one asked for is the last one shown; pressed while one is under way, each counts for something.
    last = {"trigger_mode": "always_last", **PRIVATE}
    for event in (look.click, widgets.dataset.submit):
        event(looking(work), widgets.fields, looked, concurrency_id="look", **last)
    widgets.images.click(
        looking(work),
        widgets.fields,
        looked,
        show_progress="hidden",
        concurrency_id="look",
        **last,
    )
    widgets.good.click(
        planning(work),
        widgets.fields,
        [widgets.walk, widgets.said, *planned],
        concurrency_id="plan",
        **PRIVATE,
    )
    gr.on(
        [
            widgets.concept.input,
            widgets.priority.input,
            widgets.base.input,
            widgets.trigger.blur,
            widgets.course.click,
        ],
        replanning(work),
        widgets.fields,
        [widgets.said, *planned],
        concurrency_id="plan",
        **last,
    )
    # At once, so that whatever is pressed next takes the base along.
    picked = cards.click(None, None, widgets.base, js=_CHOSEN, **PRIVATE)
    picked.then(
        replanning(work),
        widgets.fields,
        [widgets.said, *planned],
        concurrency_id="plan",
        **last,
    )
    for event in (widgets.name.blur, widgets.dataset.blur):
        event(keeping(work), widgets.fields, widgets.said, **last)
    back.click(stepping(work, IMAGES), widgets.draft, [widgets.walk, widgets.said], **PRIVATE)
    widgets.train.click(
        starting(work),
        widgets.fields,
        [widgets.walk, widgets.said, widgets.waiting, widgets.timer],
        js=_WITH_UNSENT,
        **PRIVATE,
    )
    widgets.timer.tick(
        following(work),
        widgets.draft,
        [widgets.walk, widgets.said, widgets.waiting, widgets.timer, widgets.go],
        **QUIET,
    )
