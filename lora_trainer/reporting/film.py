"""A film of a run's previews: the base on the left, step after step on the right, as GIF or MP4. No torch.

Inputs: a run's history and its folder. Output: the bytes of the film. A run with few previews is shown in its sample
images of the first prompt.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError

from lora_trainer.common.errors import InputError, MachineError, RequestError
from lora_trainer.common.files import open_regular
from lora_trainer.reporting.history import RunHistory

FilmKind = Literal["gif", "mp4"]
KINDS: tuple[FilmKind, ...] = get_args(FilmKind)
# A film of either lasts about so long, its last picture longer; a picture is seen for so long at least and at most.
_WHOLE_S, _LAST_S, _LEAST_S, _MOST_S = 8.0, 2.5, 0.08, 0.7
_SIDE_PX = 384
_BAND_PX = 34
_MARGIN_PX = 10
_PAPER, _INK, _RULE, _ACCENT = "#14161a", "#f4f4f0", "#3a3f47", "#5fb08a"
_FRAMES_PER_S = 25


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One picture of the first prompt; `file` is relative to the run folder."""

    step: int
    file: str


def frames(history: RunHistory) -> list[Frame]:
    """Return the pictures of the film in the order of their steps: the previews, or samples where they are more."""
    previews = [Frame(step=each.step, file=each.file) for each in history.previews]
    first = next(((each.prompt, each.seed) for each in history.samples), None)
    drawn = {
        each.step: Frame(step=each.step, file=each.file)
        for each in history.samples
        if (each.prompt, each.seed) == first
    }
    samples = [drawn[step] for step in sorted(drawn)]
    return previews if len(previews) >= len(samples) else samples


def why_no_mp4() -> str:
    """Return why MP4 cannot be written here, an empty text where it can."""
    if importlib.util.find_spec("av") is None:
        return "MP4 needs PyAV: pip install av"
    return ""


def film(folder: Path, history: RunHistory, kind: FilmKind) -> bytes:
    """Return the film of a run.

    Raises RequestError for a run with fewer than two pictures, InputError for one that cannot be read, MachineError
    for an MP4 without PyAV.
    """
    shown = frames(history)
    if len(shown) < 2:
        raise RequestError(
            f"{folder.name} has {len(shown)} pictures of its first prompt, and a film needs two",
            fix="wait for the next preview or sample images",
        )
    if kind == "mp4" and (why := why_no_mp4()):
        raise MachineError(why, fix="install it, or take a GIF")
    steps = history.run.plan.time.steps or shown[-1].step
    base = _picture(folder, shown[0])
    pages = [_page(base, _picture(folder, each), each.step, steps=steps) for each in shown]
    each_s = min(_MOST_S, max(_LEAST_S, _WHOLE_S / len(pages)))
    lasting_s = [each_s] * (len(pages) - 1) + [_LAST_S]
    return _gif(pages, lasting_s) if kind == "gif" else _mp4(pages, lasting_s)


def _picture(folder: Path, frame: Frame) -> Image.Image:
    """Return a picture in the size of the film; enlarged smoothly."""
    path = folder / frame.file
    try:
        if not path.resolve().is_relative_to(folder.resolve()):  # records may name any file
            raise FileNotFoundError(path)
        with open_regular(path) as file, Image.open(file) as opened:
            image = opened.convert("RGB")
    except (OSError, UnidentifiedImageError, ValueError) as error:
        raise InputError(
            f"the picture {frame.file} of step {frame.step} cannot be read",
            fix="put back the file that the run wrote",
        ) from error
    scale = _SIDE_PX / max(image.size)
    width, height = (max(2, round(side * scale / 2) * 2) for side in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _page(base: Image.Image, now: Image.Image, step: int, *, steps: int) -> Image.Image:
    """Return one picture of the film: base and now, their names, and how far the training was."""
    width, height = base.size
    page = Image.new(
        "RGB", (2 * width + 3 * _MARGIN_PX, height + 2 * _MARGIN_PX + _BAND_PX), _PAPER
    )
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size=16)
    name = f"step {step:,} of {steps:,}" if step else "base"
    for at, (image, text) in enumerate(((base, "base"), (now, name))):
        left = _MARGIN_PX + at * (width + _MARGIN_PX)
        page.paste(image.resize(base.size), (left, _MARGIN_PX))
        draw.text((left, _MARGIN_PX + height + 6), text, fill=_INK, font=font)
    top = page.height - _MARGIN_PX
    right = page.width - _MARGIN_PX
    draw.rectangle((_MARGIN_PX, top, right, top + 3), fill=_RULE)
    done = _MARGIN_PX + round((right - _MARGIN_PX) * min(1.0, step / max(1, steps)))
    draw.rectangle((_MARGIN_PX, top, done, top + 3), fill=_ACCENT)
    return page


def _gif(pages: Sequence[Image.Image], lasting_s: Sequence[float]) -> bytes:
    written = BytesIO()
    first, *others = (page.quantize(255, dither=Image.Dither.FLOYDSTEINBERG) for page in pages)
    first.save(
        written,
        format="GIF",
        save_all=True,
        append_images=others,
        duration=[round(1000 * seconds) for seconds in lasting_s],
        loop=0,
    )
    return written.getvalue()


def _mp4(pages: Sequence[Image.Image], lasting_s: Sequence[float]) -> bytes:
    av: Any = importlib.import_module("av")
    written = BytesIO()
    with av.open(written, mode="w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=_FRAMES_PER_S)
        stream.width, stream.height = (side // 2 * 2 for side in pages[0].size)
        stream.pix_fmt = "yuv420p"  # which every player has
        stream.codec_context.options = {"crf": "18"}
        number = 0
        for page, seconds in zip(pages, lasting_s, strict=True):
            for _ in range(max(1, round(seconds * _FRAMES_PER_S))):
                frame = av.VideoFrame.from_image(page.crop((0, 0, stream.width, stream.height)))
                frame.pts, frame.time_base = number, Fraction(1, _FRAMES_PER_S)
                container.mux(stream.encode(frame))
                number += 1
        container.mux(stream.encode(None))
    return written.getvalue()
