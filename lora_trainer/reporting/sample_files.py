"""The sample images of a run as files: the newest ones, those of a step, the prompt of one, names of later ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from lora_trainer.common.files import open_regular
from lora_trainer.config.prompt_line import SamplePrompt, seeds

SAMPLES = "samples"
PREVIEWS = "previews"
"""The folder of a run with the pictures of its film."""
BASE_SAMPLES = "step-00000000"
"""What the base draws, before the first step."""


def last_samples(samples: Path, *, up_to: int | None = None) -> list[Path]:
    """Return the images of the newest step that has any of the run's own prompts, in their order.

    `up_to` leaves out later steps: a file of step 88 did not draw those of step 120.
    """
    # A step has eight digits, so that names sort by it.
    for folder in sorted(samples.glob("step-*"), reverse=True):
        if _is_later(folder.name, up_to):
            continue
        if files := sorted(file for file in folder.glob("[0-9]*.png") if file.is_file()):
            return files
    return []


def own_samples(samples: Path, *, up_to: int | None = None) -> list[Path]:
    """Return `last_samples`, none where only the base has drawn any."""
    found = last_samples(samples, up_to=up_to)
    return [image for image in found if image.parent.name != BASE_SAMPLES]


def newest_preview(previews: Path, *, up_to: int | None = None) -> Path | None:
    """Return the newest preview that a run has drawn after its first step, `up_to` one; None without any."""
    drawn = sorted(previews.glob("step-*.jpg"), reverse=True)
    wanted = (path for path in drawn if not _is_later(path.stem, up_to) and path.is_file())
    return next((path for path in wanted if path.stem != BASE_SAMPLES), None)


def step_drawn_at(image: Path) -> int | None:
    """Return after which step a run drew a sample or a preview, None for any other picture."""
    of_step = {SAMPLES: image.parent.name, PREVIEWS: image.stem}
    folder = image.parent.parent if image.parent.parent.name == SAMPLES else image.parent
    digits = of_step.get(folder.name, "").removeprefix("step-")
    return int(digits) if digits.isascii() and digits.isdigit() else None


def _is_later(name: str, step: int | None) -> bool:
    return step is not None and name > f"step-{step:08d}"


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
