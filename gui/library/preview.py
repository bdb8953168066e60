"""The picture of a LoRA: the one beside its file, its preview first, else the last that its training drew with it.

Input: a file of the library. Outputs: the picture, the address of a small copy of it, what its training drew with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.common.wording import one_line
from lora_trainer.reporting.sample_files import (
    PREVIEWS,
    SAMPLES,
    newest_preview,
    own_samples,
    sample_prompt,
)

from ..lora_files import BEST_PICTURE_SUFFIX, PREVIEW_SUFFIX, LoraFile, step_of
from ..media import run_url, thumb_url

_THUMB_PX = 384


def preview_of(file: LoraFile) -> Path | None:
    """Return the picture beside a file or, of the result or a save of a run, its last sample, else its last preview.

    Of a save those up to its step: later ones show another LoRA. None where only the base has drawn any until then.
    """
    for suffix in (PREVIEW_SUFFIX, BEST_PICTURE_SUFFIX, ".png"):
        image = file.path.with_name(f"{file.path.stem}{suffix}")
        if image.is_file() and not image.is_symlink():
            return image
    if not file.trained:
        return None
    folder, step = file.path.parent, step_of(file)
    own = own_samples(folder / SAMPLES, up_to=step)
    return own[0] if own else newest_preview(folder / PREVIEWS, up_to=step)


@dataclass(frozen=True, kw_only=True)
class TrainingSamples:
    """What a training has drawn of its own prompts with one of its files: the step, address and prompt of each."""

    step: str
    images: tuple[Mapping[str, str], ...]


def samples_of(file: LoraFile) -> TrainingSamples | None:
    """Return the last samples up to the step of a file, as `preview_of`; None without any."""
    if not file.trained:
        return None
    images = own_samples(file.path.parent / SAMPLES, up_to=step_of(file))
    shown = [{"url": _address(image, file), "prompt": _prompt(image)} for image in images]
    if not shown:
        return None
    step = int(images[0].parent.name.removeprefix("step-"))
    return TrainingSamples(step=f"{step:,}", images=tuple(shown))


def _address(image: Path, file: LoraFile) -> str:
    return f"{run_url(file.run, 'samples', image.parent.name, image.name)}?v={_changed_ns(image):x}"


def _prompt(image: Path) -> str:
    try:
        return one_line(sample_prompt(image))
    except (OSError, ValueError, SyntaxError):  # not a picture, or being written
        return ""


def small_url(image: Path, *, size_px: int = _THUMB_PX) -> str:
    """Return the address of a small copy; a picture that was replaced has another one."""
    return f"{thumb_url(image.parent, image.name, size_px=size_px)}&v={_changed_ns(image)}"


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # gone since it was listed; the address leads nowhere then
        return 0
