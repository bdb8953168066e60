"""The sample images of a run: the newest files, their prompts, a thumbnail; all of them as the report's grid.

Inputs: a run's samples folder or its RunHistory; no file outside of the run folder is read. Outputs: paths,
prompts, JPEG bytes, and cells with every image embedded, one row per prompt and one column per step. Large images
are reduced, small ones keep their pixels; a missing or damaged file is a cell that says so. No torch.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from lora_trainer.reporting.history import RunHistory, SampleImage

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


MAX_COLUMNS = 12
EMBEDDED_MAX_PX = 384
SMALL_PX = 128
_JPEG_QUALITY = 88


@dataclass(frozen=True, kw_only=True)
class SampleCell:
    """An image as a data URI; without one, `words` say why, `fault` more exactly."""

    words: str
    uri: str = ""
    fault: str = ""


def sample_grid(history: RunHistory) -> dict[str, Any] | None:
    """Return the grid's `steps`, `rows` of (prompt, seed, cells) and `left_out`; None when the run made no samples."""
    images = {(image.prompt, image.seed, image.step): image for image in history.samples}
    if not images:
        return None
    all_steps = sorted({step for *_, step in images})
    steps = spread(all_steps, limit=MAX_COLUMNS)
    rows = [
        (prompt, seed, [_cell(images.get((prompt, seed, step)), history.folder) for step in steps])
        for prompt, seed in dict.fromkeys((prompt, seed) for prompt, seed, _ in images)
    ]
    return {"steps": steps, "rows": rows, "left_out": len(all_steps) - len(steps)}


def spread(steps: Sequence[int], *, limit: int) -> list[int]:
    """Return at most `limit` steps, first and last among them, evenly spaced by position."""
    if len(steps) <= limit:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (limit - 1))] for index in range(limit)]


def column_name(step: int) -> str:
    """Return a step in words; step 0 is the untouched base."""
    return f"step {step:,}" if step else "base"


def _cell(image: SampleImage | None, folder: Path) -> SampleCell:
    if image is None:
        return SampleCell(words="not sampled")
    try:
        data = inside(folder, image.file).read_bytes()
        with Image.open(io.BytesIO(data)) as picture:
            picture.load()
            return SampleCell(
                words=f"{column_name(image.step)}: {image.prompt}",
                uri=_data_uri(data, picture),
            )
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        # Pillow raises SyntaxError for some damaged PNG chunks.
        return SampleCell(words="unreadable", fault=f"{image.file}: {type(error).__name__}")


def inside(folder: Path, file: str) -> Path:
    """Return the path of `file` in `folder`; raises ValueError when it leads out of it."""
    path = (folder / file).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{file} is outside of the run folder")
    return path


def _data_uri(data: bytes, picture: Image.Image) -> str:
    if picture.format == "PNG" and max(picture.size) <= SMALL_PX:
        return f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"
    reduced = picture.convert("RGB")
    reduced.thumbnail((EMBEDDED_MAX_PX, EMBEDDED_MAX_PX), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    reduced.save(buffer, format="JPEG", quality=_JPEG_QUALITY, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
