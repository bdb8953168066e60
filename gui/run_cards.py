"""The runs as cards: what each is, how far it is, what can be done with it.

Input: the runs folder. Output: escaped markup; the buttons name the run and what is asked, a handler
checks both.
"""

from __future__ import annotations

from pathlib import Path

from lora_trainer.reporting.charts import Html, tag

from . import state
from .media import run_url
from .state import RunEntry, page_url
from .workplace import Workplace

MAX_CARDS = 60
_WORDS = {
    "running": "training",
    "interrupted": "interrupted, can go on",
    "finished": "finished",
    "stopped": "stopped, can go on",
    "failed": "failed",
}
_PREPARING = {"starting": "starting", "caching": "preparing"}


def stamp(work: Workplace) -> state.Stamp:
    """Return a value that changes when the cards do."""
    return tuple(state.stamp(work.runs / run.name, run.status) for run in state.runs(work.runs))


def cards(work: Workplace) -> Html:
    """Return a card for each run, those that train first, then the newest."""
    runs = state.runs(work.runs)
    if not runs:
        return tag(
            "div",
            tag("p", "No training yet."),
            tag(
                "p",
                "Ten to thirty images are enough for a start. Without any at hand, the folder "
                "datasets/example trains in a few minutes on any machine.",
                class_="quiet",
            ),
            class_="empty",
        )
    left_out = len(runs) - MAX_CARDS
    note = (
        tag("p", f"{left_out} older runs are not shown.", class_="quiet") if left_out > 0 else None
    )
    return tag(
        "div", tag("ul", *(_card(work, run) for run in runs[:MAX_CARDS]), class_="cards"), note
    )


def _card(work: Workplace, run: RunEntry) -> Html:
    status = run.status
    fraction = min(1.0, status.step / status.steps) if status.steps else 0.0
    steps = f"{status.step:,} of {status.steps:,} steps" if status.steps else ""
    return tag(
        "li",
        tag(
            "a", _picture(work.runs / run.name, run.name), href=page_url(run.name), class_="picture"
        ),
        tag(
            "div",
            tag("h3", tag("a", run.name, href=page_url(run.name))),
            tag("p", _state(run), class_=f"state {status.state}"),
            tag(
                "div",
                tag("i", style=f"width:{fraction:.1%}"),
                class_=f"progress {status.state}",
                role="progressbar",
                aria_label=f"progress of {run.name}",
                aria_valuenow=round(100 * fraction),
            ),
            tag("p", steps, class_="quiet"),
            _buttons(run),
            class_="text",
        ),
        class_=f"card {status.state}",
    )


def _state(run: RunEntry) -> str:
    status = run.status
    if status.state == "running":
        doing = _PREPARING.get(status.stage, "training")
        return doing if not status.message else f"{doing}: {status.message}"
    if status.state == "failed" and status.message:
        return f"failed: {status.message}"
    return _WORDS[status.state]


def _buttons(run: RunEntry) -> Html:
    asked = {"running": (("stop", "Stop"),), "finished": ()}.get(
        run.status.state, (("resume", "Resume"),)
    )
    buttons = (
        tag(
            "button",
            label,
            type="button",
            data_action=action,
            data_run=run.name,
            aria_label=f"{label} {run.name}",
        )
        for action, label in asked
    )
    return tag("p", tag("a", "Open", href=page_url(run.name)), *buttons, class_="actions")


def _picture(folder: Path, name: str) -> Html:
    """Return the newest sample; a run that has none yet shows its initial."""
    newest = _newest_sample(folder)
    if newest is None:
        return tag("span", name[:1].upper(), class_="blank", aria_hidden="true")
    src = run_url(folder.name, *newest.relative_to(folder).parts)
    return tag("img", src=src, alt=f"newest sample of {name}", loading="lazy")


def _newest_sample(folder: Path) -> Path | None:
    try:
        steps = sorted(path for path in (folder / "samples").iterdir() if path.is_dir())
        return sorted(steps[-1].glob("*.png"))[0] if steps else None
    except (OSError, IndexError):
        return None
