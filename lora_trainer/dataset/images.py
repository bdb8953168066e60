"""Image files: decoded to upright 8-bit RGB and measured, or refused with the reason in one line.

Reads PNG, JPEG, WebP, GIF, TIFF, BMP and AVIF through Pillow, HEIC where pillow-heif is installed. Size limits are
checked from the header, and only regular files are opened. Transparent parts get a background colour, 16 bits are
scaled to 8, CMYK goes through its colour profile, RGB and gray with colours other than sRGB's are converted
(`colours`). Each of these changes is a note.
Crispness, brightness and a perceptual hash are measured once, when an image is decoded for the check, and
remembered, so that a second quality report opens no file.

A caption can lie inside the image: the first text that describes it, that of generators cut to
its prompt; a workflow in JSON is not a caption. Sources: PNG specification 11.3.3 (keywords), EXIF 2.32
(UserComment), and the "parameters" text of AUTOMATIC1111's web UI.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms, ImageColor, TiffImagePlugin, UnidentifiedImageError

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.events import shown
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.captions import NAMES, CaptionText, caption_of, clean, decoded
from lora_trainer.dataset.colour_tags import note_stated_colours
from lora_trainer.dataset.colours import Recolour, recolouring
from lora_trainer.dataset.crops import CROPS_FILE, Crop

_MEASURED_SIDE_PX = 1024
_LEAST_MEASURED_SIDE_PX = 48
_BLUR_WIDTH_PX = 9
_PRINT_SIDE = 8
PRINT_LENGTH_BITS = 2 * _PRINT_SIDE**2
_PRINT_MARGIN = 2
_COLOUR_SIDE = 4
_AREAS_SIDE = 64
_AREAS_TOLERANCE = 16


class Measures(NamedTuple):
    """Numbers about one image, as the memo keeps them."""

    crispness: tuple[tuple[int, float], ...]
    """(side, value) pairs, largest side first: value in [0, 1] after scaling the image to side x side pixels."""
    darkest: float
    """1st percentile of luminance, in [0, 1]."""
    brightest: float
    """99th percentile of luminance, in [0, 1]."""
    structure: str
    """A 128-bit difference hash, hexadecimal."""
    colours: str
    """A 4x4 RGB miniature, hexadecimal."""
    is_like_a_mask: bool
    """Hardly more than areas of black and white."""


def measure(image: Image.Image) -> Measures:
    """Measure an RGB image; its crispness is that of the worse of the two directions."""
    gray = image.convert("L")
    factor = _MEASURED_SIDE_PX / math.sqrt(gray.width * gray.height)
    if factor < 1:
        size = (max(1, round(gray.width * factor)), max(1, round(gray.height * factor)))
        gray = gray.resize(size, Image.Resampling.LANCZOS)
    # A difference hash: is a cell clearly brighter than its left, its upper neighbour?
    side = _PRINT_SIDE
    across = np.asarray(gray.resize((side + 1, side), Image.Resampling.BOX), dtype=np.int16)
    down = np.asarray(gray.resize((side, side + 1), Image.Resampling.BOX), dtype=np.int16)
    bits = (np.diff(across, axis=1) > _PRINT_MARGIN, np.diff(down, axis=0) > _PRINT_MARGIN)
    crispness = []
    level = gray
    while True:
        side_px = round(math.sqrt(level.width * level.height))
        pixels = np.asarray(level, dtype=np.float32)
        value = min(_crispness_along(pixels), _crispness_along(pixels.T))
        crispness.append((side_px, round(value, 3)))
        if side_px < 2 * _LEAST_MEASURED_SIDE_PX or min(level.size) < 2:
            break
        level = level.reduce(2)
    darkest, brightest = np.percentile(np.asarray(level), (1, 99)) / 255
    return Measures(
        crispness=tuple(crispness),
        darkest=round(float(darkest), 3),
        brightest=round(float(brightest), 3),
        structure=np.packbits(np.concatenate([part.ravel() for part in bits])).tobytes().hex(),
        colours=image.resize((_COLOUR_SIDE, _COLOUR_SIDE), Image.Resampling.BOX, reducing_gap=2.0)
        .tobytes()
        .hex(),
        is_like_a_mask=_is_like_a_mask(image),
    )


def _is_like_a_mask(image: Image.Image) -> bool:
    """Say whether an image is little more than areas of black and white, with short borders, as masks are.

    Line art and text are black and white too, but most of their pixels lie near a border.
    """
    side = _AREAS_SIDE
    pixels = np.asarray(image.resize((side, side), Image.Resampling.NEAREST), dtype=np.int16)
    if (pixels.max(axis=2) - pixels.min(axis=2)).max() > _AREAS_TOLERANCE:
        return False
    grey = pixels[..., 0]
    is_white, is_black = grey >= 255 - _AREAS_TOLERANCE, grey <= _AREAS_TOLERANCE
    borders = int(np.diff(is_white, axis=0).sum()) + int(np.diff(is_white, axis=1).sum())
    return bool(
        (is_white | is_black).mean() > 0.95
        and min(is_white.mean(), is_black.mean()) > 0.005
        and borders < 0.1 * side**2
    )


def _crispness_along(gray: NDArray[np.float32]) -> float:
    """Return how much of an image's variation a blur along its rows removes, in [0, 1]: little if it is blurred.

    1 - blur of Crete et al. 2007, "The blur effect: perception and estimation with a new
    no-reference perceptual blur metric"; 0 for a flat image.
    """
    if gray.shape[1] <= _BLUR_WIDTH_PX:
        return 0.0
    sums = np.cumsum(gray, axis=1)  # whole numbers far below 2**24: exact in float32
    blurred = (sums[:, _BLUR_WIDTH_PX:] - sums[:, :-_BLUR_WIDTH_PX]) / _BLUR_WIDTH_PX
    margin = _BLUR_WIDTH_PX // 2 + 1
    sharp = gray[:, margin : margin + blurred.shape[1]]
    variation = np.abs(np.diff(sharp, axis=1))
    total = float(variation.sum())
    lost = np.maximum(0.0, variation - np.abs(np.diff(blurred, axis=1)))
    return float(lost.sum()) / total if total > 0 else 0.0


_OPAQUE_MODES = frozenset({"1", "L", "P", "RGB", "YCbCr"})
_REFUSED_MODES = {"F": "floating-point", "I": "32-bit integer", "LAB": "Lab"}

Rgb = tuple[int, int, int]


def to_rgb(
    image: Image.Image,
    path: Path,
    *,
    raw_mode: str,
    background: Rgb,
    notes: list[str],
    recolour: Recolour | None = None,
) -> tuple[Image.Image, Image.Image | None]:
    """Return a loaded image as RGB, and how opaque it is as L where some of it is not.

    `raw_mode` is the format of the file's own pixels, `recolour` changes colours before they are put on the
    background. Appends "kind: sentence" to `notes`; raises
    ImageDecodeError for a pixel format that cannot be turned into RGB without guessing.
    """
    # BGR;16 of BMP is 16 bits for all three channels.
    bits = next((bits for bits in (12, 16) if f";{bits}" in raw_mode), 0)
    if bits and "BGR;16" not in raw_mode:
        notes.append(f"depth: {bits} bits per channel are scaled to 8")
    # Pillow leaves a PNG's transparent colour in the file's bit depth, and then no pixel has it.
    match raw_mode, image.info.get("transparency"):
        case "RGB;16B", (int(red), int(green), int(blue)):
            image.info["transparency"] = (red >> 8, green >> 8, blue >> 8)
        case "L;4", int(gray):
            image.info["transparency"] = gray * 17
        case "L;2", int(gray):
            image.info["transparency"] = gray * 85
    if image.mode.startswith("I;16"):
        values, transparent = np.asarray(image), image.info.get("transparency")
        white = (1 << (bits or 16)) - 1
        # A table needs one byte a pixel; the formula on the pixels needs eight.
        numbers = np.arange(1 << 16, dtype=np.uint32).clip(max=white)
        table = ((2 * 255 * numbers + white) // (2 * white)).astype(np.uint8)
        if _white_is_zero(image):
            notes.append("icc: black and white are exchanged, because the file stores white as 0")
            table = 255 - table
        image = Image.fromarray(table[values])
        if isinstance(transparent, int):
            opaque = np.where(values == transparent, 0, 255).astype(np.uint8)
            image.putalpha(Image.fromarray(opaque))
    if image.mode == "CMYK":
        return _from_cmyk(image, notes), None
    if image.has_transparency_data:
        straight = image.convert("LA") if image.mode == "La" else image
        rgba = straight.convert("RGBA")
        alpha = rgba.getchannel("A")
        if recolour is not None:
            rgba = recolour(rgba.convert("RGB"))
            rgba.putalpha(alpha)
        if alpha.getextrema() == (255, 255):
            return rgba.convert("RGB"), None
        notes.append("alpha: transparent parts are put on the colour data.alpha_background")
        canvas = Image.new("RGBA", rgba.size, (*background, 255))
        return Image.alpha_composite(canvas, rgba).convert("RGB"), alpha
    if image.mode in _OPAQUE_MODES:
        rgb = image.convert("RGB")
        return (rgb if recolour is None else recolour(rgb)), None
    reason = f"has {_REFUSED_MODES.get(image.mode, image.mode)} pixels"
    fix = "save it as RGB or gray with 8 or 16 bits"
    raise ImageDecodeError(path, reason, code="IMG-05", fix=fix)


def _white_is_zero(image: Image.Image) -> bool:
    """Say whether 0 is white in a TIFF; Pillow heeds it in 8 bits, and not in more."""
    tags = getattr(image, "tag_v2", {})
    photometric = tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION)
    return bool(photometric == 0)


def _from_cmyk(image: Image.Image, notes: list[str]) -> Image.Image:
    profile, problem = image.info.get("icc_profile"), "CMYK without a colour profile"
    if profile:
        try:
            inks = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            srgb = ImageCms.createProfile("sRGB")
            converted = ImageCms.profileToProfile(image, inks, srgb, outputMode="RGB")
        except (ImageCms.PyCMSError, OSError, ValueError, TypeError) as error:
            problem = f"broken CMYK profile ignored ({error})"
        else:
            assert converted is not None  # None is for inPlace=True
            notes.append("cmyk: converted from CMYK through its colour profile")
            return converted
    notes.append(f"cmyk-profile: {problem}, converted by the plain formula")
    return image.convert("RGB")


# Pillow's names of what is read: decoders that run no foreign program, as that of EPS would.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
HEAD_BYTES = 256
# The beginning of HEIC files, read where the package for them is installed.
_HEIC = re.compile(rb"....ftyp(hei|hev|mif1|msf1)", re.DOTALL)


@cache
def _reads_heic() -> bool:
    """Say whether HEIC files are read: the first call makes Pillow read them, if pillow-heif is installed."""
    try:
        from pillow_heif import (  # noqa: PLC0415 - optional, and only such files need it
            register_heif_opener,
        )
    except ImportError:
        return False
    register_heif_opener(thumbnails=False)
    return True


def _formats(head: bytes) -> tuple[str, ...]:
    """Return the formats that a file which begins with `head` may have."""
    return (*FORMATS, "HEIF") if _HEIC.match(head) and _reads_heic() else FORMATS


class ImageDecodeError(InputError):
    """An image that cannot be used: `reason` without its path, `code` one of docs/faults.md."""

    def __init__(self, path: Path, reason: str, *, code: str, fix: str) -> None:
        super().__init__(f"{shown(str(path))} {reason}", fix=fix)
        self.reason = reason
        self.code = code


def _explain(path: Path, error: Exception, head: bytes, max_megapixels: float) -> ImageDecodeError:
    """Turn a decoder's error into one line; `head` is the first `HEAD_BYTES` of the file."""
    if isinstance(error, Image.DecompressionBombError):
        claimed = re.search(r"\d+", str(error))
        pixels = f"{int(claimed[0]):,}" if claimed else "too many"
        limit = f"data.max_megapixels={max_megapixels:g} are allowed"
        fix = "scale it down, or raise data.max_megapixels if you trust it"
        reason = f"is too large: its header claims {pixels} pixels, {limit}"
        return ImageDecodeError(path, reason, code="IMG-07", fix=fix)
    if isinstance(error, UnidentifiedImageError):
        text, flags = head.decode("latin-1"), re.IGNORECASE | re.DOTALL | re.ASCII
        row = next(row for row in NAMES["signatures"] if re.match(row["pattern"], text, flags))
        reason = f"is {row['what'].format(formats=', '.join(FORMATS))}"
        return ImageDecodeError(path, reason, code="IMG-02", fix=row["fix"])
    fix = "replace it with an intact copy or remove it"
    if "truncated" in str(error).lower():
        reason = "ends early: it was cut off while it was copied or downloaded"
        return ImageDecodeError(path, reason, code="IMG-01", fix=fix)
    detail = shown(str(error)) or type(error).__name__
    return ImageDecodeError(path, f"is damaged ({detail})", code="IMG-02", fix=fix)


IMAGE_EXTENSIONS = frozenset(NAMES["image_extensions"])
MIN_SIDE_PX = 16
MAX_ASPECT = 20
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Pillow's size limit and Python's warnings belong to the whole process: calls that depend on either
# are made one at a time. Decoding proper runs outside the lock.
_PROCESS_WIDE = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class DecodedImage:
    """An image as it is displayed, in mode RGB."""

    image: Image.Image
    notes: tuple[str, ...]
    """The changes made to display it, as "kind: sentence"."""
    alpha: Image.Image | None
    """Opacity, mode L, if some pixels come from `data.alpha_background`."""


def background_rgb(settings: DataSettings) -> Rgb:
    """Return the colour put behind transparent images; raises RequestError for an unknown one."""
    try:
        red, green, blue = ImageColor.getrgb(settings.alpha_background)[:3]
    except ValueError:
        raise RequestError(
            f"data.alpha_background={settings.alpha_background!r} is not a colour",
            fix="use a CSS name such as white, or #rrggbb",
        ) from None
    return red, green, blue


def max_pixels(settings: DataSettings) -> int:
    """Return the number of pixels above which an image is refused."""
    return int(settings.max_megapixels * 1_000_000)


def decode(
    path: Path,
    *,
    settings: DataSettings,
    content_hash: str | None = None,
    crop: Crop | None = None,
) -> DecodedImage:
    """Decode a file to RGB as it is displayed: EXIF orientation applied, transparency put on
    `data.alpha_background`, first frame of an animation (see `pixels` for the formats). Of a `crop` only that part.

    Raises ImageDecodeError (an InputError) naming file and reason; also when `content_hash` is given and
    the file's bytes no longer have that SHA-256.
    """
    background = background_rgb(settings)
    notes: list[str] = []
    with loaded(path, settings, content_hash, notes) as (image, raw_mode):
        rgb, alpha = to_rgb(
            image,
            path,
            raw_mode=raw_mode,
            background=background,
            notes=notes,
            recolour=recolouring(image, notes),
        )
        turn = upright_turn(image, settings, notes)
        if turn is not None:
            rgb, alpha = rgb.transpose(turn), alpha and alpha.transpose(turn)
    if crop is not None:
        if not crop.fits(*rgb.size) or min(crop.size_px) < MIN_SIDE_PX:
            reason = (
                f"is {rgb.width}x{rgb.height}, and its crop {list(crop)} is not a part of it "
                f"with sides of {MIN_SIDE_PX} px or more"
            )
            fix = f"choose its crop again, or remove its line from {CROPS_FILE}"
            raise ImageDecodeError(path, reason, code="IMG-07", fix=fix)
        rgb, alpha = rgb.crop(crop), alpha and alpha.crop(crop)
    return DecodedImage(image=rgb, notes=tuple(notes), alpha=alpha)


@contextmanager
def loaded(
    path: Path, settings: DataSettings, content_hash: str | None, notes: list[str]
) -> Iterator[tuple[Image.Image, str]]:
    """Yield the loaded first frame of a file and the format of its pixels there."""
    try:
        # Asked before opening: opening a pipe blocks for ever.
        is_regular = stat.S_ISREG(path.stat().st_mode)
        file = path.open("rb") if is_regular else None
    except OSError as error:
        reason = f"cannot be opened ({error.strerror or error})"
        raise ImageDecodeError(
            path, reason, code="IMG-09", fix="make it readable or remove it"
        ) from None
    if file is None:
        raise ImageDecodeError(path, "is not a regular file", code="IMG-09", fix="remove it")
    with file:
        try:
            digest = content_hash and hashlib.file_digest(file, "sha256").hexdigest()
            if digest != content_hash:
                raise ImageDecodeError(
                    path, "changed while in use", code="CAP-05", fix="start the run again"
                )
            file.seek(0)
            formats = _formats(file.read(16))
            file.seek(0)
            with _process_wide_switches(settings, notes):
                image = Image.open(file, formats=formats)
                longer_px, shorter_px = max(image.size), min(image.size)
                size = f"{image.width}x{image.height}"
                if shorter_px < MIN_SIDE_PX:
                    reason = f"is too small: {size}, each side must have {MIN_SIDE_PX} pixels"
                    raise ImageDecodeError(path, reason, code="IMG-07", fix="remove it")
                if longer_px > MAX_ASPECT * shorter_px:
                    reason = f"is too long: {size}, one side may be {MAX_ASPECT} times the other"
                    raise ImageDecodeError(path, reason, code="IMG-07", fix="crop it or remove it")
                raw_mode = str(image.tile[0].args) if image.tile else ""
                # The further images of an MPO are previews and depth maps of the first, those of a HEIC others.
                frames = 1 if image.format in ("MPO", "HEIF") else getattr(image, "n_frames", 1)
                if image.format == "TIFF":  # checks its size again, and warns, while loading
                    image.load()
            if frames > 1:
                notes.append(f"animated: only the first of its {frames} frames or pages is used")
            image.load()
            note_stated_colours(image, file)
            yield image, raw_mode
        except ImageDecodeError:
            raise
        except Exception as error:  # noqa: BLE001 - damaged bytes make Pillow raise anything
            file.seek(0)
            head = file.read(HEAD_BYTES)
            raise _explain(path, error, head, settings.max_megapixels) from None


@contextmanager
def _process_wide_switches(settings: DataSettings, notes: list[str]) -> Iterator[None]:
    """Set Pillow's size limit for the calls inside, and add their warnings to `notes`; restore both after."""
    with _PROCESS_WIDE, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usual = Image.MAX_IMAGE_PIXELS
        # Pillow refuses above twice its limit, before the decoders that do so allocate a canvas.
        Image.MAX_IMAGE_PIXELS = (max_pixels(settings) + 1) // 2
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = usual
        notes += [
            f"exif: {shown(str(warning.message))}"
            for warning in caught
            if not issubclass(warning.category, Image.DecompressionBombWarning)
        ]


def upright_turn(
    image: Image.Image, settings: DataSettings, notes: list[str]
) -> Image.Transpose | None:
    """Return how a loaded image must be turned to stand upright, None where it does."""
    # Asked after loading: PNG has EXIF data at its end, and TIFF is already turned by then.
    try:
        with _process_wide_switches(settings, notes):
            orientation: Any = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception as error:  # noqa: BLE001 - as above
        notes.append(f"exif: unreadable EXIF data is ignored ({shown(str(error))})")
        return None
    data = (image.info.get("exif") or b"").removeprefix(b"Exif\0\0")
    if data and not data.startswith((b"II", b"MM")):  # JPEG swallows the error while opening
        notes.append("exif: unreadable EXIF data is ignored")
    if not isinstance(orientation, int) or not 0 <= orientation <= 8:  # 0 is common for "unknown"
        notes.append(f"exif: orientation {orientation!r} is ignored, 1 to 8 exist")
        return None
    return _UPRIGHT.get(orientation)


_PNG_KEYS = ("caption", "description", "prompt", "parameters", "comment", "title")
# What AUTOMATIC1111 and its forks write after the prompt.
_GENERATOR_TAIL = re.compile(r"\n(Negative prompt: |Steps: \d).*", re.DOTALL)


def read_image_text(path: Path, *, settings: DataSettings, content_hash: str) -> CaptionText:
    """Return the caption inside an image file, an empty one where there is none.

    Raises ImageDecodeError for a damaged image and for a file that no longer has this SHA-256.
    """
    # PNG may have its text behind the pixels, so the image is loaded first.
    with loaded(path, settings, content_hash, []) as (image, _):
        return caption_of([_caption_in(image)])


def head_text(path: Path) -> str:
    """Return the caption inside an image file as far as it is there without decoding, "" for none and for no image.

    PNG may have its text behind the pixels, which `read_image_text` finds.
    """
    try:
        with path.open("rb") as file:
            formats = _formats(file.read(16))
            file.seek(0)
            with Image.open(file, formats=formats) as image:
                return _caption_in(image)
    except Exception:  # noqa: BLE001 - damaged bytes make Pillow raise anything; the check names them
        return ""


def _caption_in(image: Image.Image) -> str:
    """Return the first text of an image that describes it: of a generator its prompt; JSON is none."""
    texts = (clean(_GENERATOR_TAIL.sub("", text)) for text in _texts(image))
    return next((text for text in texts if text and not text.startswith(("{", "[{"))), "")


def _texts(image: Image.Image) -> Iterator[str]:
    """Yield the texts of an image that may describe it, the most explicit first."""
    fields = {key.casefold(): value for key, value in image.info.items() if isinstance(key, str)}
    for key in _PNG_KEYS:
        yield _plain_text(fields.get(key))
    try:
        exif = image.getexif()
        yield _description(exif.get(ExifTags.Base.ImageDescription))
        details = exif.get_ifd(ExifTags.IFD.Exif)
        yield _user_comment(details.get(ExifTags.Base.UserComment))
    except Exception:  # noqa: BLE001 - damaged EXIF is named by the check of the image itself
        pass


def _plain_text(value: object) -> str:
    return decoded(value)[0] if isinstance(value, bytes) else str(value or "")


def _description(value: object) -> str:
    """Return the text of an ImageDescription, which Pillow reads byte by byte and most programs write as UTF-8."""
    try:
        return _plain_text(value.encode("latin-1") if isinstance(value, str) else value)
    except UnicodeEncodeError:
        return _plain_text(value)


def _user_comment(value: object) -> str:
    """Return the text of a UserComment, whose first eight bytes name its encoding."""
    if not isinstance(value, bytes):
        return _plain_text(value)
    head, body = value[:8], value[8:]
    if head == b"UNICODE\0":
        # EXIF leaves the byte order open: of the two, Latin text has its zero bytes on one side.
        is_big = body[:2] == b"\xfe\xff" or body[0:200:2].count(0) > body[1:200:2].count(0)
        return body.decode("utf-16-be" if is_big else "utf-16-le", "replace")
    if head == b"JIS\0\0\0\0\0":
        return body.decode("shift_jis", "replace")
    return _plain_text(body if head in (b"ASCII\0\0\0", bytes(8)) else value)
