"""Sample images as files: the newest ones of a run, their prompts and seeds, a thumbnail.

Input is a run's samples folder, output paths, prompts and JPEG bytes. Torch-free.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from PIL import Image

THUMBNAIL_PX = 256
THUMBNAIL_BYTES = 48_000
"""What a thumbnail may add to a file's header; ComfyUI ignores headers above 8 MiB."""
_STEP = re.compile(r"step-(\d+)")
_QUALITIES = (85, 70, 50, 30, 10)


def last_samples(samples: Path) -> list[Path]:
    """Return the images of the newest step that has any of the run's own prompts, in their order."""
    steps = {
        int(match[1]): folder
        for folder in (samples.iterdir() if samples.is_dir() else ())
        if (match := _STEP.fullmatch(folder.name))
    }
    for step in sorted(steps, reverse=True):
        if files := sorted(steps[step].glob("[0-9]*.png")):
            return files
    return []


def sample_prompt(image: Path) -> str:
    """Return the prompt that a sample image carries, "" where it carries none."""
    with Image.open(image) as opened:
        text = str(opened.info.get("parameters", ""))
    return text.split("\nNegative prompt:")[0].split("\nSteps:")[0]


def try_name(stem: str, *, seed: int, strength: float | None = None) -> str:
    """Return the name of an image drawn with a finished file; `strength` where there are several."""
    return f"{stem}-{seed}{'' if strength is None else f'-x{strength:g}'}.png"


def thumbnail_jpeg(image: Path) -> bytes:
    """Return the image as JPEG of at most 256 px a side and 48 kB; raises OSError where it is none."""
    with Image.open(image) as opened:
        small = opened.convert("RGB")
    small.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX), Image.Resampling.LANCZOS)
    for quality in _QUALITIES:
        buffer = io.BytesIO()
        small.save(buffer, format="JPEG", quality=quality, optimize=True)
        if buffer.tell() <= THUMBNAIL_BYTES:
            break
    return buffer.getvalue()
