"""The page Compare: the samples of two runs side by side, a step chosen in each, `/compare?a=RUN&b=RUN`.

Its script asks for the sheet of each run, and shows the prompts that both have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.reporting.history import read_history
from lora_trainer.reporting.run_record import read

from .. import runs
from ..run.parts import sample_sheet
from ..run_best import exports, read_best
from ..run_settings import compared_settings
from ..server.pages import Body, Text, answer, page
from ..server.translation import Words
from ..workplace import Workplace

_LOOKED_AT = 12


class Sheet(Body):
    """The samples of one run."""

    run: Text


def routes(work: Workplace) -> list[Route]:
    """Return the routes of the page and of its script."""

    def show(_request: Request, _: Words) -> Mapping[str, Any]:
        names = [run.name for run in runs.find_runs(work.runs)]
        drawn = [name for name in names if runs.newest_samples(work.runs / name)]
        return {"runs": drawn, "alike": alike(work, drawn)}

    def sheet(asked: Sheet, _: Words) -> Mapping[str, Any]:
        folder = runs.run_folder(work.runs, asked.run)
        history = read_history(folder)
        samples = sample_sheet(
            folder, history, exported=exports(folder, history), best=read_best(folder), _=_
        )
        settings = {_(name): value for name, value in compared_settings(history.run).items()}
        return {**samples, "settings": settings}

    return [
        page("/compare", "compare/page.html", title="Compare", look=show),
        answer("/compare/sheet", Sheet, sheet),
    ]


def alike(work: Workplace, names: Sequence[str]) -> Sequence[str]:
    """Return the two newest runs that trained on the same images, which are worth comparing; none without such."""
    seen: dict[str, str] = {}
    for name in names[:_LOOKED_AT]:
        with suppress(LoraTrainError):  # a damaged record names no images
            images = read(work.runs / name).dataset.fingerprint
            if images in seen:
                return (seen[images], name)
            if images:
                seen[images] = name
    return ()
