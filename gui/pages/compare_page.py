"""The page Compare: the samples of two runs side by side, a step chosen in each, `/compare?a=RUN&b=RUN`.

Inputs: names of runs from the page's script. Outputs: which runs have samples, and their sheets; the script
shows the prompts that both have.
"""

from __future__ import annotations

from typing import Any

from lora_trainer.reporting.history import read_history

from .. import state
from ..home_view import newest_samples
from ..posted import Posted
from ..run_best import exports, read_best
from ..run_parts import sample_sheet
from ..run_settings import compared_settings
from ..workplace import Workplace
from .gradio_events import answering, html, module

_MOUNT = module("compare.js", 'module.mount(element.querySelector(".compare"), server);')


def build(work: Workplace) -> None:
    """Lay the page out."""

    def compare_runs(_posted: Posted) -> dict[str, Any]:
        names = [run.name for run in state.runs(work.runs)]
        return {"runs": [name for name in names if newest_samples(work.runs / name)]}

    def compare_sheet(posted: Posted) -> dict[str, Any]:
        folder = state.run_folder(work.runs, posted.text("run"))
        history = read_history(folder)
        sheet = sample_sheet(
            folder, history, exported=exports(folder, history), best=read_best(folder)
        )
        return {**sheet, "settings": compared_settings(history.run)}

    html("<h1>Compare two trainings</h1>")
    html(
        html_template='<div class="compare"></div>',
        js_on_load=_MOUNT,
        server_functions=[answering(compare_runs), answering(compare_sheet)],
    )
