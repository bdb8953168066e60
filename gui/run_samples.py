"""The sample images of a run as a sheet: a row for each prompt, a column for each step.

Inputs: a run folder and its RunHistory. Output: plain JSON, which samples.js draws; addresses lead to
images of this run only, whatever its records say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.reporting.history import RunHistory, SampleImage

from .media import run_url
from .run_best import Best, losses, recommended

_IMAGE = re.compile(r"samples/step-\d{8,}/(asked-)?\d{2,}\.png")


def sample_sheet(
    folder: Path, history: RunHistory, *, exported: Mapping[int, str], best: Best | None
) -> dict[str, Any]:
    """Return prompts, steps and the images where they meet; a missing image is null.

    `best` is the step that somebody marked; without one the step that did best is shown as such.
    """
    take = recommended(exported, losses(history), best)
    newest = {(image.prompt, image.seed, image.step): image for image in history.samples}
    rows = list(dict.fromkeys((image.prompt, image.seed) for image in history.samples))
    steps = sorted({image.step for image in history.samples})
    return {
        "run": folder.name,
        "prompts": [{"text": prompt, "seed": seed} for prompt, seed in rows],
        "steps": [
            {
                "step": step,
                "name": f"step {step:,}" if step else "base",
                "file": run_url(folder.name, exported[step]) if step in exported else None,
                "best": take is not None and take.is_found and take.step == step,
                "marked": best is not None and best.step == step,
            }
            for step in steps
        ],
        "images": [
            [_address(folder, newest.get((prompt, seed, step))) for step in steps]
            for prompt, seed in rows
        ],
    }


def _address(folder: Path, image: SampleImage | None) -> str | None:
    if image is None or not _IMAGE.fullmatch(image.file):
        return None
    try:
        version = (folder / image.file).stat().st_mtime_ns
    except OSError:
        return None
    return f"{run_url(folder.name, *image.file.split('/'))}?v={version:x}"
