"""The page Compare: the samples of two runs side by side, a step chosen in each, `/compare?a=RUN&b=RUN`.

Its script asks for the sheet of each run, and shows the prompts that both have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from lora_trainer.reporting.history import read_history

from .. import runs
from ..run.parts import sample_sheet
from ..run_best import exports, read_best
from ..run_settings import compared_settings
from ..server.pages import Body, Text, answer, page
from ..server.translation import Words
from ..workplace import Workplace


class Sheet(Body):
    """The samples of one run."""

    run: Text


def routes(work: Workplace) -> list[Route]:
    """Return the routes of the page and of its script."""

    def show(_request: Request, _: Words) -> Mapping[str, Any]:
        names = [run.name for run in runs.find_runs(work.runs)]
        return {"runs": [name for name in names if runs.newest_samples(work.runs / name)]}

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
