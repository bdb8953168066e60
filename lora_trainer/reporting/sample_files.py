"""The sample images of a run as files: the newest ones, the prompt of one, the name of one that is drawn later."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from lora_trainer.common.files import open_regular


def last_samples(samples: Path) -> list[Path]:
    """Return the images of the newest step that has any of the run's own prompts, in their order."""
    # A step has eight digits, so that names sort by it.
    for folder in sorted(samples.glob("step-*"), reverse=True):
        if files := sorted(file for file in folder.glob("[0-9]*.png") if file.is_file()):
            return files
    return []


def sample_prompt(image: Path) -> str:
    """Return the prompt that a sample image carries, "" where it carries none."""
    with open_regular(image) as file, Image.open(file) as opened:
        text = str(opened.info.get("parameters", ""))
    return text.split("\nNegative prompt:")[0].split("\nSteps:")[0]


def try_name(stem: str, *, seed: int, strength: float | None = None) -> str:
    """Return the name of an image drawn with a finished file; `strength` where there are several."""
    return f"{stem}-{seed}{'' if strength is None else f'-x{strength:g}'}.png"
