"""The picture of a LoRA: the one beside its file, its preview first, else the last of its training; never the base's.

Input: a file of the library. Outputs: the picture, and the address of a small copy of it.
"""

from __future__ import annotations

from pathlib import Path

from lora_trainer.reporting.sample_files import PREVIEWS, newest_preview, own_samples

from ..lora_files import BEST_PICTURE_SUFFIX, PREVIEW_SUFFIX, LoraFile
from ..media import thumb_url

_THUMB_PX = 384


def preview_of(file: LoraFile) -> Path | None:
    """Return the picture beside a file or, of the result or a save of a run, its last sample, else its last preview.

    None where only the base has drawn any: its picture shows nothing of the LoRA.
    """
    for suffix in (PREVIEW_SUFFIX, BEST_PICTURE_SUFFIX, ".png"):
        image = file.path.with_name(f"{file.path.stem}{suffix}")
        if image.is_file() and not image.is_symlink():
            return image
    if not file.trained:
        return None
    samples = file.path.parent / "samples"
    drawn = sorted((samples / f"step-{file.step:08d}").glob("*.png")) if file.step else []
    own = next(iter(drawn or own_samples(samples)), None)
    return own or newest_preview(file.path.parent / PREVIEWS)


def small_url(image: Path, *, size_px: int = _THUMB_PX) -> str:
    """Return the address of a small copy; a picture that was replaced has another one."""
    return f"{thumb_url(image.parent, image.name, size_px=size_px)}&v={_changed_ns(image)}"


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # gone since it was listed; the address leads nowhere then
        return 0
