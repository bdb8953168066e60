"""The sample images of a run as a grid: one row per prompt, one column per step, the base first.

Inputs: the samples of a RunHistory; image files inside the run folder, no others. Output: `Html` with
every image embedded. Large images are reduced, small ones enlarged without smoothing; a file that
is missing or damaged is a cell that says so.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from lora_trainer.reporting.charts import Html, tag
from lora_trainer.reporting.history import RunHistory, SampleImage

MAX_COLUMNS = 12
EMBEDDED_MAX_PX = 384
SHOWN_MAX_PX = 192
SHOWN_MIN_PX = 96
PIXELATED_MAX_PX = 128
_PREFERRED_PX = 128
_JPEG_QUALITY = 88

Row = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class _Cell:
    content: Html
    width_px: int


def sample_grid(history: RunHistory) -> Html:
    """Return the grid, or a sentence when the run made no samples."""
    by_cell = {((image.prompt, image.seed), image.step): image for image in history.samples}
    if not by_cell:
        return tag(
            "p", "No samples were made: sampling was off or did not come to it.", class_="quiet"
        )
    all_steps = sorted({step for _, step in by_cell})
    steps = spread(all_steps, limit=MAX_COLUMNS)
    rows = list(dict.fromkeys(row for row, _ in by_cell))
    cells = {
        key: _cell(image, folder=history.folder)
        for key, image in by_cell.items()
        if key[1] in steps
    }
    head = tag(
        "div",
        tag("div", "prompt", role="columnheader", class_="corner"),
        *(tag("div", _column_name(step), role="columnheader") for step in steps),
        role="row",
    )
    body = (
        _row(row, cells=[cells.get((row, step), _missing("not sampled")) for step in steps])
        for row in rows
    )
    style = f"--steps:{len(steps)};--cell:{max(cell.width_px for cell in cells.values())}px"
    grid = tag(
        "div",
        head,
        *body,
        role="table",
        class_="samples",
        style=style,
        aria_label="samples",
        tabindex=0,  # it scrolls sideways, by the arrow keys too
    )
    left_out = len(all_steps) - len(steps)
    note = (
        f"{left_out} of {len(all_steps)} sampled steps are not shown; all images are in samples/."
    )
    return tag("div", grid, tag("p", note, class_="note") if left_out else None)


def spread(steps: Sequence[int], *, limit: int) -> list[int]:
    """Return at most `limit` steps, first and last among them, evenly spaced by position."""
    if len(steps) <= limit:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (limit - 1))] for index in range(limit)]


def _column_name(step: int) -> str:
    return f"step {step:,}" if step else "base"


def _row(row: Row, *, cells: Sequence[_Cell]) -> Html:
    prompt, seed = row
    head = tag(
        "div",
        prompt or "(empty prompt)",
        tag("small", f"seed {seed}"),
        role="rowheader",
        dir="auto",
    )
    return tag("div", head, *(tag("div", cell.content, role="cell") for cell in cells), role="row")


def _cell(image: SampleImage, *, folder: Path) -> _Cell:
    try:
        return _picture(
            inside(folder, image.file), alt=f"{_column_name(image.step)}: {image.prompt}"
        )
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        # Pillow raises SyntaxError for some damaged PNG chunks.
        return _missing("unreadable", detail=f"{image.file}: {type(error).__name__}")


def _missing(reason: str, *, detail: str | None = None) -> _Cell:
    content = tag("div", reason, class_="missing", title=detail)
    return _Cell(content=content, width_px=_PREFERRED_PX)


def inside(folder: Path, file: str) -> Path:
    """Return the path of `file` in `folder`; raises ValueError when it leads out of it."""
    path = (folder / file).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{file} is outside of the run folder")
    return path


def _picture(path: Path, *, alt: str) -> _Cell:
    data = path.read_bytes()
    with Image.open(io.BytesIO(data)) as picture:
        picture.load()
        width, height = shown_size(*picture.size)
        # The width decides alone: an image is enlarged as a whole or not at all.
        enlarged = width > picture.width
        uri = _data_uri(data, picture)
    css = "pixels" if enlarged else None
    content = tag("img", src=uri, alt=alt, title=alt, width=width, height=height, class_=css)
    return _Cell(content=content, width_px=width)


def shown_size(width_px: int, height_px: int) -> tuple[int, int]:
    """Return the size on the page: a whole factor of small images, large ones reduced."""
    longest = max(width_px, height_px)
    if longest <= PIXELATED_MAX_PX:
        factor = max(round(_PREFERRED_PX / longest), math.ceil(SHOWN_MIN_PX / longest))
        return width_px * factor, height_px * factor
    scale = min(1.0, SHOWN_MAX_PX / longest)
    return max(1, round(width_px * scale)), max(1, round(height_px * scale))


def _data_uri(data: bytes, picture: Image.Image) -> str:
    if picture.format == "PNG" and max(picture.size) <= PIXELATED_MAX_PX:
        return f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"
    reduced = picture.convert("RGB")
    reduced.thumbnail((EMBEDDED_MAX_PX, EMBEDDED_MAX_PX), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    reduced.save(buffer, format="JPEG", quality=_JPEG_QUALITY, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
