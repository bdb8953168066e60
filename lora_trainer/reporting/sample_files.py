"""The sample images of a run as files: the newest ones, the prompt of one, the name of one that is drawn later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from lora_trainer.common.files import open_regular
from lora_trainer.config.prompt_line import SamplePrompt, seeds

PREVIEWS = "previews"
"""The folder of a run with the pictures of its film."""
BASE_SAMPLES = "step-00000000"
"""What the base draws, before the first step."""


def last_samples(samples: Path) -> list[Path]:
    """Return the images of the newest step that has any of the run's own prompts, in their order."""
    # A step has eight digits, so that names sort by it.
    for folder in sorted(samples.glob("step-*"), reverse=True):
        if files := sorted(file for file in folder.glob("[0-9]*.png") if file.is_file()):
            return files
    return []


def own_samples(samples: Path) -> list[Path]:
    """Return `last_samples`, none where only the base has drawn any."""
    return [image for image in last_samples(samples) if image.parent.name != BASE_SAMPLES]


def newest_preview(previews: Path) -> Path | None:
    """Return the newest preview that a run has drawn after its first step, None before."""
    drawn = sorted(path for path in previews.glob("step-*.jpg") if path.is_file())
    return next((path for path in reversed(drawn) if path.stem != BASE_SAMPLES), None)


def sample_prompt(image: Path) -> str:
    """Return the prompt that a sample image carries, "" where it carries none."""
    with open_regular(image) as file, Image.open(file) as opened:
        text = str(opened.info.get("parameters", ""))
    return text.split("\nNegative prompt:")[0].split("\nSteps:")[0]


def try_names(
    stem: str, prompts: Sequence[SamplePrompt], *, seed: int, strengths: Sequence[float]
) -> dict[tuple[int, float], str]:
    """Return the names of images drawn with a finished file, by the place of the prompt and the strength.

    The strength is in them where there are several. Prompts with the same seed of their own get a number.
    """
    names = {}
    own_seeds = seeds(prompts, seed)
    for at, own in enumerate(own_seeds):
        before = own_seeds[:at].count(own)
        again = f"-{before + 1}" if before else ""
        for strength in strengths:
            times = f"-x{strength:g}" if len(strengths) > 1 else ""
            names[at, strength] = f"{stem}-{own}{again}{times}.png"
    return names
