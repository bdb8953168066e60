"""The page Compare: the samples of two runs side by side, or of two steps of one, `/compare?a=RUN&b=RUN`.

Its script asks for the sheet of each run, and shows the prompts that both have; below them, how both learned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.common.wording import duration_text
from lora_trainer.reporting.history import RunHistory, read_history
from lora_trainer.reporting.run_record import read
from lora_trainer.reporting.sample_files import BASE_SAMPLES
from lora_trainer.reporting.status import read_status

from .. import runs
from ..held_out_chart import Learned, held_out_chart
from ..lora_files import result_of
from ..run.parts import sample_sheet
from ..run_best import exports, losses, read_best, standing_of
from ..run_settings import compared_settings
from ..server.pages import Body, Text, answer, page
from ..server.translation import Words
from ..workplace import Workplace

_LOOKED_AT = 12


class Sheet(Body):
    """The samples of one run."""

    run: Text


class Curves(Body):
    """How two runs learned."""

    runs: tuple[Text, Text]


def routes(work: Workplace) -> list[Route]:
    """Return the routes of the page and of its script."""

    def show(_request: Request, _: Words) -> Mapping[str, Any]:
        names = [run.name for run in runs.find_runs(work.runs)]
        drawn = [name for name in names if runs.newest_samples(work.runs / name)]
        # What only the base has drawn for stands last: there is nothing to compare yet.
        drawn.sort(key=lambda name: not _has_learned(work, name))
        return {"runs": drawn, "first": first_pair(work, drawn), "steps": _steps(work, drawn)}

    def sheet(asked: Sheet, _: Words) -> Mapping[str, Any]:
        folder = runs.run_folder(work.runs, asked.run)
        history = read_history(folder)
        samples = sample_sheet(
            folder, history, exported=exports(folder, history), best=read_best(folder), _=_
        )
        settings = {
            _(name): _.value(value) for name, value in compared_settings(history.run).items()
        }
        return {
            **samples,
            "settings": settings,
            "facts": list(_facts(folder, history, _)),
            "lora": _lora_of(folder),
            "base": history.run.base.source,
        }

    def curves(asked: Curves, _: Words) -> Mapping[str, Any]:
        trained = [_learned(work, name) for name in dict.fromkeys(asked.runs)]
        chart = held_out_chart(trained, _)
        return {
            "html": "" if chart is None else _.markup(chart),
            "said": "" if chart is None else remark(trained, _),
        }

    return [
        page("/compare", "compare/page.html", title="Compare", look=show),
        answer("/compare/sheet", Sheet, sheet),
        answer("/compare/curves", Curves, curves),
    ]


def _has_learned(work: Workplace, name: str) -> bool:
    """Whether there is a picture that a run drew after its first step."""
    newest = runs.newest_samples(work.runs / name)
    return bool(newest) and newest[0].parent.name != BASE_SAMPLES


def _facts(folder: Path, history: RunHistory, _: Words) -> Iterator[str]:
    """Yield in a few words each how far a run is, how long it took and how good it is."""
    if history.steps:
        yield _("{#} steps", f"{history.steps[-1].step:,}")
    if history.seconds:
        yield _.message(duration_text(history.seconds))
    good = standing_of(folder, history)
    if good is not None:
        yield _.message(good.said)


def _learned(work: Workplace, name: str) -> Learned:
    history = read_history(runs.run_folder(work.runs, name))
    base = history.base_validation
    return Learned(
        label=name, losses=losses(history), base_loss=math.nan if base is None else base.loss
    )


def remark(trained: Sequence[Learned], _: Words) -> str:
    """Return what a reader of the chart would wonder about: two lines that are seen as one, a line that is missing."""
    if coincide(trained):
        return _("The two curves coincide.")
    missing = [each.label for each in trained if not (each.losses and each.base_loss > 0)]
    if missing:
        return _("No held-out images were measured while {} trained.", missing[0])
    return ""


def coincide(trained: Sequence[Learned]) -> bool:
    """Whether there are two lines that a reader sees as one: the same steps, losses closer than a line is thick."""
    if len(trained) != 2:
        return False
    (one, other) = (
        {step: 1 - loss / each.base_loss for step, loss in each.losses.items()}
        if each.base_loss > 0
        else {}
        for each in trained
    )
    if not one or one.keys() != other.keys():
        return False
    values = [0.0, *one.values(), *other.values()]
    thick = (max(values) - min(values)) / 200  # the chart is 300 px high
    return all(abs(one[step] - other[step]) <= thick for step in one)


def _steps(work: Workplace, names: Sequence[str]) -> int:
    """Return how many pictures of one prompt there are to stand beside each other."""
    if len(names) != 1:
        return len(names)
    return len(list((work.runs / names[0] / "samples").glob("step-*")))


def _lora_of(folder: Path) -> str:
    """Return the LoRA to take of a run as pages know it, an empty text for none."""
    found = result_of(folder)
    return "" if found is None else found.file.ref


def first_pair(work: Workplace, names: Sequence[str]) -> Sequence[str]:
    """Return the two runs to begin with: of the same images, else with a prompt in common, the newest first.

    Without such a pair it is one run twice, whose base and best step are shown; none without pictures.
    """
    learned = [each for each in names if _has_learned(work, each)][:_LOOKED_AT]
    # What has failed is worth a look only where nothing else is.
    well = [each for each in learned if read_status(work.runs / each).state != "failed"]
    if pair := alike(work, well):
        return pair
    prompts = {name: set(_prompts_of(work, name)) for name in well}
    for index, name in enumerate(well):
        for other in well[index + 1 :]:
            if prompts[name] & prompts[other]:
                return (name, other)
    alone = next(iter([*well, *learned, *names]), "")
    return (alone, alone) if alone else ()


def _prompts_of(work: Workplace, name: str) -> Iterator[tuple[str, object]]:
    with suppress(LoraTrainError):  # a damaged record tells none
        for image in read_history(work.runs / name).samples:
            yield image.prompt, image.seed


def alike(work: Workplace, names: Sequence[str]) -> Sequence[str]:
    """Return the two newest runs that trained on the same images, which are worth comparing; none without such."""
    seen: dict[str, str] = {}
    for name in [each for each in names if _has_learned(work, each)][:_LOOKED_AT]:
        with suppress(LoraTrainError):  # a damaged record names no images
            images = read(work.runs / name).dataset.fingerprint
            if images in seen:
                return (seen[images], name)
            if images:
                seen[images] = name
    return ()
