"""Masks: which part of an image counts, from a file of its own or from the transparency of the image.

White counts, black does not, grey counts in part. Programs write masks in other ways too, which are recognised by
their pixels: label images (values 0 and 1, or 0 to N, or a palette of colours, as segmentation tools write them), in
which every label but 0 counts, also where a lossy format has blurred them; a mask that is drawn in one colour, or in
black, on nothing, where what is drawn counts; 16 bits a pixel that hold values of 8. Sources: the class colours of
PASCAL VOC (index 0 is black and the background), PNG specification 11.2 (palettes, transparency).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.crops import Crop
from lora_trainer.dataset.images import decode, loaded, to_rgb, upright_turn

# How the pixels of a mask are read. `brightness`: as they are, the only reading before 2026-12.
Meaning = Literal["brightness", "labels", "lossy labels", "colours", "drawn", "8 of 16 bits"]
WHITE = 255
# The largest label: nobody means by a brightness of 31 of 255 that 12 % of the loss counts.
MAX_LABEL = 31
# Colours that an image of labels has at most; edges of painted masks have hundreds.
MAX_COLOURS = 32
# Formats that change values; WebP has a lossless form too, which its first chunk names.
_LOSSY = ("JPEG", "MPO", "AVIF", "HEIF")
_WEBP_HEAD_BYTES = 64
# Squares whose means are looked at, and how finely; the share of them that makes a peak, and how much higher peaks
# are than the gap between them.
_SQUARE_PX = 4
_BINS_A_VALUE = 4
_PEAK_SHARE = 0.01
_GAP_DEPTH = 8
# Up to which mean a square is black with noise.
_NOISE_OF_BLACK = 2
# A mask whose brightest pixel is darker leaves most of the loss out even where it counts most.
DARK_BELOW = 128
_COLOURED = 16
_COLOURED_SHARE = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """A mask that was checked."""

    path: Path
    content_hash: str
    of_alpha: bool
    """Whether the image itself is the file and its transparency the mask."""
    meaning: Meaning = "brightness"
    brightest: int = WHITE
    """The largest value as it is read, of 255."""
    is_framed: bool = False
    """Whether its edges count and its middle does not."""
    crop: Crop | None = None
    """The part of its image that is trained, None for the whole image."""
    image_px: tuple[int, int] = (0, 0)
    """Width and height of the whole image."""

    @property
    def channel(self) -> str:
        """How its values are read, as names of cache entries have it."""
        return "alpha" if self.of_alpha else self.meaning


class MaskFacts(NamedTuple):
    """What the memo keeps of a mask's file."""

    width_px: int
    height_px: int
    brightest: int
    meaning: Meaning
    is_framed: bool


def decode_mask(mask: Mask, *, settings: DataSettings) -> Image.Image:
    """Return a mask upright, mode L, of the part that is trained.

    Raises ImageDecodeError, also for a file that has changed.
    """
    if mask.of_alpha:
        alpha = decode(
            mask.path, settings=settings, content_hash=mask.content_hash, crop=mask.crop
        ).alpha
        assert alpha is not None, "only transparent images have such a mask"
        return alpha
    pixels, _ = read_mask(mask.path, settings=settings, content_hash=mask.content_hash)
    return pixels if mask.crop is None else mask.crop.of_mask(pixels, image_px=mask.image_px)


def facts_of(mask: Mask, *, settings: DataSettings) -> MaskFacts:
    """Decode a mask and return what is kept of it; raises ImageDecodeError."""
    meaning: Meaning = "brightness"
    if mask.of_alpha:
        pixels = decode_mask(mask, settings=settings)
    else:
        pixels, meaning = read_mask(mask.path, settings=settings, content_hash=mask.content_hash)
        if mask.crop is not None:
            pixels = mask.crop.of_mask(pixels, image_px=mask.image_px)
    values = np.asarray(pixels)
    is_framed = not mask.of_alpha and _is_framed(values)
    return MaskFacts(*pixels.size, int(values.max()), meaning, is_framed)


def read_mask(
    path: Path, *, settings: DataSettings, content_hash: str | None = None
) -> tuple[Image.Image, Meaning]:
    """Return the mask in a file upright, mode L, and how its pixels are read; raises ImageDecodeError.

    Transparent parts are black: only what is drawn counts.
    """
    notes: list[str] = []
    with loaded(path, settings, content_hash, notes) as (image, raw_mode):
        values, meaning = _values(image, path, raw_mode)
        if meaning == "labels" and _is_lossy(image, path):
            grey = image.convert("L")
            values = _white_where(np.asarray(grey) > _most_of_black(grey))
            meaning = "lossy labels"
        turn = upright_turn(image, settings, notes)
    pixels = Image.fromarray(values)
    return (pixels if turn is None else pixels.transpose(turn)), meaning


Values = NDArray[np.uint8]


def _values(image: Image.Image, path: Path, raw_mode: str) -> tuple[Values, Meaning]:
    """Return the values of a loaded mask, and how they were read."""
    if image.mode.startswith(("I", "F")):
        return _of_numbers(np.asarray(image), is_float=image.mode == "F")
    if image.mode == "P" and not image.has_transparency_data:
        labels = _of_palette(image)
        return _of_grey(np.asarray(image.convert("L"))) if labels is None else (labels, "labels")
    on_black, alpha = to_rgb(image, path, raw_mode=raw_mode, background=(0, 0, 0), notes=[])
    if alpha is not None and _is_of_one_colour(image, alpha):
        return np.asarray(alpha), "drawn"
    colours = np.asarray(on_black)
    if _is_coloured(colours).mean() <= _COLOURED_SHARE:
        return _of_grey(np.asarray(on_black.convert("L")))
    brightest: Values = colours.max(axis=2)
    if on_black.getcolors(MAX_COLOURS) is not None and not brightest.all():
        return _white_where(brightest > 0), "labels"
    return brightest, "colours"


def _white_where(counts: NDArray[np.bool_]) -> Values:
    return np.where(counts, WHITE, 0).astype(np.uint8)


def _is_coloured(colours: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Say for each colour [..., 3] whether it is clearly no grey."""
    channels = colours.astype(np.int16)
    coloured: NDArray[np.bool_] = (channels.max(axis=-1) - channels.min(axis=-1)) > _COLOURED
    return coloured


def _of_grey(values: Values) -> tuple[Values, Meaning]:
    """Return grey values as they are, those of labels as white; 255 beside labels is the border of things."""
    counts = np.bincount(values.ravel(), minlength=WHITE + 1)
    labels, above = counts[1 : MAX_LABEL + 1].sum(), counts[MAX_LABEL + 1 : WHITE].sum()
    if labels > 0 and above == 0 and labels >= counts[WHITE]:
        return _white_where(values > 0), "labels"
    return values, "brightness"


def _is_lossy(image: Image.Image, path: Path) -> bool:
    """Say whether the values of an opened image are not those that were saved."""
    if image.format != "WEBP":
        return image.format in _LOSSY
    with path.open("rb") as file:
        return b"VP8L" not in file.read(_WEBP_HEAD_BYTES)


def _most_of_black(grey: Image.Image) -> float:
    """Return up to which value pixels of a lossy image of labels are black with noise.

    Means of small squares have little noise, so that black and each label are peaks among them, with gaps between. The
    formats round the means too, which leaves narrow gaps inside of a peak: the gap that tells black from the lowest
    label is the first of at least half the width of the widest. Without a gap every value but 0 is of a label.
    """
    means = np.asarray(grey.convert("F").reduce(_SQUARE_PX))
    counts = np.bincount((means.ravel() * _BINS_A_VALUE + 0.5).astype(np.int64))
    least = _PEAK_SHARE * means.size
    below = np.maximum.accumulate(counts)
    above = np.maximum.accumulate(counts[::-1])[::-1]
    is_gap = (below >= least) & (above >= least) & (counts * _GAP_DEPTH <= np.minimum(below, above))
    turns = np.flatnonzero(np.diff(is_gap.astype(np.int8), prepend=0, append=0))
    starts, ends = turns[::2].tolist(), turns[1::2].tolist()
    most = _NOISE_OF_BLACK * _BINS_A_VALUE
    gaps = [(start, end) for start, end in zip(starts, ends, strict=True) if start <= most]
    if not gaps:
        return 0.0
    widest = max(end - start for start, end in gaps)
    start, end = next((start, end) for start, end in gaps if 2 * (end - start) >= widest)
    return float(start + end - 1) / 2 / _BINS_A_VALUE


def _of_palette(image: Image.Image) -> Values | None:
    """Return the mask of an image whose palette names labels by colours, None for a palette of greys."""
    indices = np.asarray(image)
    palette = np.zeros((256, 3), np.uint8)
    written = np.asarray(image.getpalette("RGB") or [], np.uint8).reshape(-1, 3)
    palette[: len(written)] = written
    used = np.unique(indices)
    colours = palette[used]
    if _is_coloured(colours).any():
        black = used[colours.max(axis=1) == 0]
        return _white_where(~np.isin(indices, black if len(black) else [0]))
    is_black = colours.max() == 0
    return _white_where(indices > 0) if is_black and used.max() > 0 else None


def _of_numbers(numbers: NDArray[Any], *, is_float: bool) -> tuple[Values, Meaning]:
    """Return values of 16 or 32 bits, or of floating point, as 8 bits; the largest tells what white is."""
    known = np.nan_to_num(numbers.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0).clip(min=0)
    most = float(known.max())
    whites = (1.0, 255.0, 65535.0) if is_float else (255.0, 65535.0)
    white = next((white for white in whites if most <= white), most)
    values, meaning = _of_grey(np.floor(known * WHITE / white + 0.5).astype(np.uint8))
    return values, "8 of 16 bits" if meaning == "brightness" and white == WHITE else meaning


def _is_of_one_colour(image: Image.Image, alpha: Image.Image) -> bool:
    """Say whether all that is drawn has one colour, black or no grey: then its opacity is what is meant."""
    straight = image.convert("LA") if image.mode == "La" else image
    drawn = np.asarray(straight.convert("RGBA"))[np.asarray(straight.convert("RGBA"))[..., 3] > 0]
    if not len(drawn):
        return False
    colour = drawn[0, :3]
    is_marked = bool(_is_coloured(colour)) or not colour.any()
    return is_marked and bool((drawn[:, :3] == colour).all())


def _is_framed(values: Values) -> bool:
    """Say whether the edges count and the middle does not: most often a mask whose black and white are swapped."""
    height, width = values.shape
    edge = max(1, min(height, width) // 16)
    rim = (values[:edge], values[-edge:], values[:, :edge], values[:, -edge:])
    middle = values[height * 3 // 8 : height * 5 // 8 + 1, width * 3 // 8 : width * 5 // 8 + 1]
    is_white_at_edges = min(float(part.mean()) for part in rim) > 0.9 * WHITE
    return is_white_at_edges and float(middle.mean()) < 0.1 * WHITE
