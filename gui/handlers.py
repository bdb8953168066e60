"""What happens when a widget is used or a second has passed: from values of widgets to updates.

Inputs: names and texts that a browser sent, which are checked; the runs folder; the launcher.
Outputs: gradio updates, in the order of the outputs that page.py connects. Refusals become text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr

from lora_trainer.errors import LoraTrainError
from lora_trainer.files import disk_error
from lora_trainer.output.status import Control, Request

from . import answers, launch, state
from .launch import Form, Launcher

REQUEST_LABELS: dict[Request, str] = {
    "stop": "Stop",
    "save": "Save now",
    "sample": "Sample now",
}
NO_RUN = "No run is here yet: fill in the form and press Start."
# Head, request buttons, Resume, plot, samples, problems, files.
_RUN_OUTPUTS = 1 + len(REQUEST_LABELS) + 1 + 4

Updates = Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class Session:
    """What one browser page was sent last, and the process whose run it will show."""

    listed: state.Stamp = ()
    shown: state.Stamp = ()
    samples: str = ""
    following: int | None = None


def read_form(fields: Sequence[str]) -> Form:
    dataset, base, priority, name, more_settings = (field or "" for field in fields)
    return Form(
        dataset=dataset, base=base, priority=priority, name=name, more_settings=more_settings
    )


def refresh(launcher: Launcher, name: str | None, seen: Session) -> Any:
    """Return what has changed since this session was sent something, or nothing at all."""
    entries = {entry.name: entry for entry in state.runs(launcher.root)}
    by_pid = {entry.status.pid: entry.name for entry in entries.values() if entry.status.pid}
    news = launcher.news(list(by_pid))
    chosen = name if name in entries else next(iter(entries), None)
    following = seen.following
    if following in by_pid:
        chosen, following = by_pid[following], None
    choices = [(entry.label, entry.name) for entry in entries.values()]
    listed: state.Stamp = (*choices, chosen, news)
    entry = entries[chosen] if chosen is not None else None
    shown = state.stamp(launcher.root / entry.name, entry.status) if entry else ()
    if (listed, shown, following) == (seen.listed, seen.shown, seen.following):
        return gr.skip()
    # A value that is sent without need would undo a click made meanwhile.
    runs = gr.Radio(choices=choices, value=chosen) if chosen != name else gr.Radio(choices=choices)
    now = replace(seen, listed=listed, shown=shown, following=following)
    if shown == seen.shown:
        return [runs, _news_html(news), *[gr.skip()] * _RUN_OUTPUTS, now]
    updates, samples = _run_updates(launcher.root, entry, seen.samples)
    return [runs, _news_html(news), *updates, replace(now, samples=samples)]


def _run_updates(root: Path, entry: state.RunEntry | None, samples: str) -> tuple[Updates, str]:
    """Return the updates for the widgets of a run, and the samples they show."""
    if entry is None:
        off = [gr.Button(interactive=False)] * (len(REQUEST_LABELS) + 1)
        return [answers.note_html(NO_RUN), *off, None, "", "", ""], ""
    view = state.view(root / entry.name, entry.status)
    buttons = [gr.Button(interactive=request in view.requests) for request in REQUEST_LABELS]
    updates = [
        view.head,
        *buttons,
        gr.Button(interactive=view.can_resume),
        state.plot_payload(view.points),
        gr.skip() if view.samples == samples else view.samples,  # it carries the images
        view.problems,
        view.files,
    ]
    return updates, view.samples


def _news_html(news: launch.News) -> str:
    if news.starting:
        return answers.note_html(
            "Starting: the run appears here once its data and base are checked."
        )
    return answers.error_html(news.error)


def asking(root: Path, request: Request) -> Callable[[str | None], str]:
    """Return the handler of a button that asks a run for something."""

    def ask(name: str | None) -> str:
        try:
            folder = state.run_folder(root, name)
            Control(folder).request(request)
        except LoraTrainError as error:
            return answers.error_html(str(error))
        except OSError as error:
            return answers.error_html(str(disk_error(root, error)))
        return ""

    return ask


def asker(
    command: Callable[[Form], launch.Argv], shown: Callable[[answers.Values], str]
) -> Callable[..., Updates]:
    """Return the handler of a button whose command answers at once."""

    def ask(*fields: str) -> Updates:
        try:
            answer = launch.ask(command(read_form(fields)))
        except LoraTrainError as error:
            return gr.skip(), gr.skip(), answers.error_html(str(error))
        if answer.values is None:
            return gr.skip(), gr.skip(), answers.error_html(answer.error)
        return shown(answer.values), gr.Tabs(selected="answer"), ""

    return ask


def started(start: Callable[[], int], seen: Session) -> Updates:
    """Start a trainer; return the refusal, if any, and the session that follows the new process."""
    try:
        following = start()
    except LoraTrainError as error:
        return answers.error_html(str(error)), seen
    return "", replace(seen, following=following)
