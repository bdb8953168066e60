"""The page: its widgets, and which handler each of them calls.

Input: the launcher with its runs folder. Output: gradio Blocks. Everything shown is a function of
files; a browser's session remembers only what it was sent last and which start it waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from lora_trainer.output.status import Request
from lora_trainer.resolve import PRIORITIES

from . import answers, launch, state
from .handlers import NO_RUN, REQUEST_LABELS, Session, asker, asking, read_form, refresh, started
from .launch import Launcher

TICK_S = 1.0
_PLOT: dict[str, Any] = {
    "label": "Loss: training (blue), validation (orange)",
    "height": 360,
    "color_title": "",
    "color_map": {state.SERIES_TRAIN: "#2f6690", state.SERIES_VALIDATION: "#c2571a"},
}
_SETTINGS_HELP = "One section.key=value a line; the tab All settings lists them."


@dataclass(frozen=True, kw_only=True)
class FormPart:
    """The widgets of the form, in the order of the fields of `Form`."""

    fields: tuple[Any, ...]
    check: Any
    plan: Any
    start: Any


@dataclass(frozen=True, kw_only=True)
class RunPart:
    """The widgets of one run."""

    head: Any
    requests: dict[Request, Any]
    resume: Any
    plot: Any
    samples: Any
    problems: Any
    files: Any

    def outputs(self) -> list[Any]:
        """Return the widgets in the order that `handlers.refresh` gives them."""
        buttons = [*self.requests.values(), self.resume]
        return [self.head, *buttons, self.plot, self.samples, self.problems, self.files]


def build_page(launcher: Launcher) -> gr.Blocks:
    """Return the page for the runs folder of `launcher`."""
    with gr.Blocks(title="lora-train", analytics_enabled=False) as page:
        session = gr.State(Session())
        with gr.Row():
            with gr.Column(scale=1, min_width=340):
                runs = gr.Radio(label="Runs", choices=[], interactive=True)
                form = _form()
            with gr.Column(scale=3):
                news, said = gr.HTML(elem_classes="line"), gr.HTML(elem_classes="line")
                with gr.Tabs() as tabs:
                    with gr.Tab("Run", id="run"):
                        run = _run()
                    with gr.Tab("Dataset and plan", id="answer"):
                        answer = gr.HTML("<p>Press Check or Plan.</p>")
                    with gr.Tab("All settings", id="settings"):
                        _settings_table()
        _connect_run(
            page, launcher, runs=runs, run=run, news=news, said=said, session=session, form=form
        )
        _connect_form(launcher, form=form, answer=answer, tabs=tabs, said=said, session=session)
    return page


def _form() -> FormPart:
    gr.Markdown("### Train")
    dataset = gr.Textbox(label="Images", placeholder="/path/to/a/folder/with/images", max_lines=1)
    base = gr.Textbox(
        label="Base model",
        value="auto",
        info="auto, embedded, a diffusers folder or a Hub id",
        max_lines=1,
    )
    priority = gr.Radio(label="Priority", choices=list(PRIORITIES), value="balanced")
    name = gr.Textbox(label="Name", placeholder="the folder's name", max_lines=1)
    with gr.Accordion("More settings", open=False):
        more = gr.Textbox(
            label="Settings", info=_SETTINGS_HELP, lines=4, placeholder="train.steps=600"
        )
    with gr.Row():
        check, plan = (gr.Button(label, min_width=80) for label in ("Check", "Plan"))
        start = gr.Button("Start", variant="primary", min_width=80)
    return FormPart(
        fields=(dataset, base, priority, name, more), check=check, plan=plan, start=start
    )


def _run() -> RunPart:
    head = gr.HTML(answers.note_html(NO_RUN))
    with gr.Row():
        buttons = [
            gr.Button(label, min_width=90, interactive=False) for label in REQUEST_LABELS.values()
        ]
        resume = gr.Button("Resume", min_width=90, interactive=False)
    # A plot that starts with data keeps the axes of that data; it has to start with none.
    plot = gr.LinePlot(None, x="step", y="loss", color="series", **_PLOT)
    with gr.Accordion("Samples"):
        samples = gr.HTML()
    with gr.Accordion("Problems"):
        problems = gr.HTML()
    return RunPart(
        head=head,
        requests=dict(zip(REQUEST_LABELS, buttons, strict=True)),
        resume=resume,
        plot=plot,
        samples=samples,
        problems=problems,
        files=gr.HTML(),
    )


def _settings_table() -> None:
    gr.Dataframe(
        answers.setting_rows(),
        headers=list(answers.SETTING_COLUMNS),
        datatype="str",
        interactive=False,
        show_search="search",
        wrap=True,
        max_height=700,
        column_widths=["32%", "14%", "8%", "46%"],
    )


def _connect_run(
    page: gr.Blocks,
    launcher: Launcher,
    *,
    runs: Any,
    run: RunPart,
    news: Any,
    said: Any,
    session: Any,
    form: FormPart,
) -> None:
    def tick(name: str | None, seen: Session) -> Any:
        return refresh(launcher, name, seen)

    outputs = [runs, news, *run.outputs(), session]
    quietly = {
        "inputs": [runs, session],
        "outputs": outputs,
        "show_progress": "hidden",
        "concurrency_limit": None,
        "api_visibility": "private",
    }
    page.load(tick, **quietly)
    runs.input(tick, **quietly)
    gr.Timer(TICK_S).tick(tick, **quietly)
    for request, button in run.requests.items():
        button.click(asking(launcher.root, request), runs, said, api_visibility="private")

    def resume(name: str | None, dataset: str, seen: Session) -> Any:
        def go() -> int:
            folder = state.run_folder(launcher.root, name)
            return launcher.start(launch.resume_argv(folder, dataset=dataset))

        return started(go, seen)

    run.resume.click(
        resume, [runs, form.fields[0], session], [said, session], api_visibility="private"
    )


def _connect_form(
    launcher: Launcher, *, form: FormPart, answer: Any, tabs: Any, said: Any, session: Any
) -> None:
    def start(seen: Session, *fields: str) -> Any:
        return started(
            lambda: launcher.start(launch.train_argv(read_form(fields), root=launcher.root)), seen
        )

    shown = [answer, tabs, said]
    fields = list(form.fields)
    check = asker(launch.check_argv, answers.report_html)
    plan = asker(launch.plan_argv, answers.plan_html)
    form.check.click(check, fields, shown, api_visibility="private")
    form.plan.click(plan, fields, shown, api_visibility="private")
    form.start.click(start, [session, *fields], [said, session], api_visibility="private")
