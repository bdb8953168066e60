"""Home as markup: what trains now, what needs attention, every run with its newest sample; or, before
the first run, the example.

Input: the runs folder. Output: escaped markup; the buttons name the run and what is asked, a handler
checks both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lora_trainer.common.errors import LoraTrainError, TrainingStopped
from lora_trainer.common.wording import bytes_text
from lora_trainer.hardware.machine import Hardware
from lora_trainer.reporting.charts import Html

from . import state
from .live import LiveTraining, running
from .markup import (
    button,
    delete_button,
    drop_zone,
    icon,
    inline,
    link_button,
    progress,
    state_line,
    tag,
)
from .media import run_url
from .server.asset_files import EXAMPLE_IMAGES, example_url
from .state import Followed, RunEntry, page_url
from .workplace import Workplace

MAX_CARDS = 60
_NOW_SHOTS = 3
_ATTENTION = frozenset({"failed", "interrupted"})
_WORDS = {
    "interrupted": "It ended without a word; it can be resumed.",
    "finished": "finished",
    "stopped": "stopped; it can be resumed",
    "failed": "failed",
}


def stamp(work: Workplace) -> str:
    """Return a text that changes when the view does."""
    runs = state.runs(work.runs)
    seen = tuple(state.stamp(work.runs / run.name, run.status) for run in runs)
    return f"{hash(seen):x}"


def page(work: Workplace, followed: Followed, hardware: Hardware) -> Html:
    """Return the whole page, with the drop zone that stays while the rest is drawn again."""
    # Before the view: what changes between the two is drawn again, not missed.
    stamped = stamp(work)
    return tag(
        "div",
        tag("div", view(work, followed), class_="home", data_stamp=stamped),
        drop_zone(),
        machine_line(work, hardware),
    )


def view(work: Workplace, followed: Followed) -> Html:
    """Return the runs: those that train, those that need attention, the others, the newest first."""
    runs = state.runs(work.runs)
    if not runs:
        return _welcome()
    trains = running(work, followed)
    named = {run.name: run for run in runs}
    attention = [run for run in runs if run.status.state in _ATTENTION]
    rest = [run for run in runs if run.name not in trains and run not in attention]
    left_out = len(attention) + len(rest) - MAX_CARDS
    note = f"{left_out} older runs are not shown." if left_out > 0 else ""
    top = tag(
        "div",
        tag("h1", "Your trainings"),
        link_button("Compare two", "/compare", icon_name="images", kind="big"),
        link_button("Train a LoRA", "/train?draft=new", icon_name="plus", kind="big primary"),
        class_="top",
    )
    return tag(
        "div",
        top,
        _section("Training now", (_now(work, named[name], seen) for name, seen in trains.items())),
        _section("Needs your attention", (_card(work, run) for run in attention[:MAX_CARDS])),
        _section(
            "Trained" if trains or attention else "",
            (_card(work, run) for run in rest[: max(0, MAX_CARDS - len(attention))]),
        ),
        tag("p", note, class_="quiet") if note else None,
    )


def machine_line(work: Workplace, machine: Hardware) -> Html:
    """Return what this machine trains on, in a line."""
    try:
        disk = f"{bytes_text(machine.disk_free_bytes(work.runs))} of disk free"
    except (OSError, LoraTrainError):  # the folder was taken away while the page is open
        disk = "the runs folder cannot be read"
    return tag(
        "p",
        f"This machine: {_device(machine)} \u00b7 {disk} \u00b7 ",
        tag("a", "more about it", href="/doctor"),
        class_="machine",
    )


def _device(machine: Hardware) -> str:
    if not machine.gpus:
        return (
            f"no GPU that can train; {machine.cpu_name}, {machine.cpu_threads} threads, "
            f"{bytes_text(machine.ram_total_bytes)} of memory"
        )
    return "; ".join(
        f"{gpu.name}, {bytes_text(gpu.free_bytes)} of {bytes_text(gpu.total_bytes)} free"
        for gpu in machine.gpus
    )


def _welcome() -> Html:
    shown = (
        tag("img", src=example_url(name), alt="", width=240, height=240)
        for name in EXAMPLE_IMAGES[:4]
    )
    return tag(
        "div",
        tag(
            "div",
            tag("h1", "Teach an image model something of yours"),
            tag(
                "p",
                "Show it 10 to 30 images of one person, animal, thing or style. The result is a small "
                "file, a LoRA, that draws it in any scene. Everything stays on this machine.",
                class_="lead",
            ),
            tag(
                "p",
                link_button(
                    "Try it with 16 example images",
                    "/train?example=1",
                    icon_name="play",
                    kind="big primary",
                ),
                class_="actions",
            ),
            tag(
                "p",
                "Zibbo, a drawn creature: done in a few minutes on any machine.",
                class_="quiet",
            ),
        ),
        tag("div", *shown, class_="shown"),
        class_="hero",
    )


def _section(title: str, cards: Iterable[Html]) -> Html | None:
    shown = list(cards)
    if not shown:
        return None
    return tag("section", tag("h2", title) if title else None, tag("ul", *shown, class_="runs"))


def _now(work: Workplace, run: RunEntry, seen: LiveTraining) -> Html:
    """Return a run that trains: its newest samples large, how far it is and how long it takes."""
    samples = newest_samples(work.runs / run.name)[:_NOW_SHOTS]
    shots = [_image(run.name, work.runs / run.name, file) for file in samples]
    link = page_url(run.name)
    return tag(
        "li",
        tag(
            "a",
            *(tag("span", shot, class_="shot") for shot in shots or [_blank(run.name)]),
            href=link,
            class_="shots" if shots else "shots none",
            aria_label=f"Open {run.name}",
        ),
        tag(
            "div",
            tag("h3", tag("a", run.name, href=link, translate="no")),
            tag(
                "p",
                tag("b", f"{seen.percent} %"),
                tag("span", seen.left and f"{seen.left} left", class_="quiet"),
                class_="far",
            ),
            progress(seen.fraction, label=f"progress of {run.name}"),
            state_line("running", seen.said),
            tag(
                "p",
                link_button("Open", link, kind="primary"),
                _action("stop", "Stop", run),
                class_="actions",
            ),
            class_="text",
        ),
        class_="run-card panel now",
    )


def _card(work: Workplace, run: RunEntry) -> Html:
    status, folder = run.status, work.runs / run.name
    samples = newest_samples(folder)
    shot = _image(run.name, folder, samples[0]) if samples else _blank(run.name)
    done = f"{status.step:,} of {status.steps:,} steps" if status.steps else ""
    why = status.message if status.state == "failed" else ""
    goes_on = status.state != "finished" and status.exit_code != TrainingStopped.exit_code
    resume = _action("resume", "Resume", run, "rotate-ccw") if goes_on else None
    delete = delete_button("run", run.name, name=run.name, then="/")
    return tag(
        "li",
        tag("a", shot, href=page_url(run.name), class_="shot", aria_label=f"Open {run.name}"),
        tag(
            "div",
            tag("h3", tag("a", run.name, href=page_url(run.name), translate="no")),
            state_line(status.state, _WORDS[status.state]),
            tag("p", inline(why), class_="why") if why else None,
            tag("p", done, class_="quiet") if done else None,
            tag("p", resume, delete, class_="actions"),
            class_="text",
        ),
        class_="run-card panel",
    )


def _action(action: str, label: str, run: RunEntry, icon_name: str = "square") -> Html:
    named = f"Stop {run.name}" if action == "stop" else f"Resume {run.name}"
    return button(
        label,
        icon_name=icon_name,
        attributes={
            "data-action": action,
            "data-run": run.name,
            "data-key": f"{action} {run.name}",
            "aria-label": named,
        },
    )


def _blank(name: str) -> Html:
    initial = name.strip()[:1].upper()
    return tag("span", initial or icon("sparkles"), class_="blank", aria_hidden="true")


def _image(name: str, folder: Path, file: Path) -> Html:
    src = run_url(name, *file.relative_to(folder).parts)
    return tag("img", src=src, alt=f"newest sample of {name}", loading="lazy")


def newest_samples(folder: Path) -> Sequence[Path]:
    """Return the sample images of the last step that has any."""
    try:
        steps = sorted(path for path in (folder / "samples").iterdir() if path.is_dir())
    except OSError:
        return ()
    for step in reversed(steps):
        if images := sorted(step.glob("*.png")):
            return images
    return ()
