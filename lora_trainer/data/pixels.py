"""From any of Pillow's pixel formats to 8-bit RGB, with a note for every change a picture needed.

Transparency is put on a background colour, 16 bits are scaled to 8, CMYK goes through its colour
profile. RGB and gray are taken as they are, whatever profile they carry. Nothing goes silently.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageCms

_OPAQUE_MODES = frozenset({"1", "L", "P", "RGB", "YCbCr"})
_ALPHA_MODES = frozenset({"LA", "La", "PA", "RGBA", "RGBa"})
_REFUSED_MODES = {"F": "floating-point", "I": "32-bit integer", "LAB": "Lab"}

Rgb = tuple[int, int, int]


class PixelFormatError(ValueError):
    """A pixel format that cannot be turned into RGB without guessing; the message names it."""


def to_rgb(image: Image.Image, *, raw_mode: str, background: Rgb, notes: list[str]) -> Image.Image:
    """Return a loaded picture as RGB; `raw_mode` is the format of the file's own pixels.

    Appends "kind: sentence" to `notes`; raises PixelFormatError.
    """
    if ";16" in raw_mode:
        notes.append("depth: 16 bits per channel are scaled to 8")
    _scale_transparent_colour(image, raw_mode)
    if image.mode.startswith("I;16"):
        image = _scaled_to_8_bits(image)
    if image.mode == "CMYK":
        return _from_cmyk(image, notes)
    if image.mode in _ALPHA_MODES or image.has_transparency_data:
        return _on_background(image, background, notes)
    if image.mode in _OPAQUE_MODES:
        return image.convert("RGB")
    raise PixelFormatError(f"has {_REFUSED_MODES.get(image.mode, image.mode)} pixels")


def to_alpha(image: Image.Image, *, raw_mode: str) -> Image.Image | None:
    """Return how opaque a loaded picture is, mode L, or None for one that has no transparency."""
    _scale_transparent_colour(image, raw_mode)
    if image.mode.startswith("I;16"):
        image = _scaled_to_8_bits(image)
    if image.mode not in _ALPHA_MODES and not image.has_transparency_data:
        return None
    straight = image.convert("LA") if image.mode == "La" else image
    return straight.convert("RGBA").getchannel("A")


def _scale_transparent_colour(image: Image.Image, raw_mode: str) -> None:
    # Pillow leaves a PNG's transparent colour in the file's bit depth, and then no pixel has it.
    match raw_mode, image.info.get("transparency"):
        case "RGB;16B", (int(red), int(green), int(blue)):
            image.info["transparency"] = (red >> 8, green >> 8, blue >> 8)
        case "L;4", int(gray):
            image.info["transparency"] = gray * 17
        case "L;2", int(gray):
            image.info["transparency"] = gray * 85


def _scaled_to_8_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    table = ((np.arange(1 << 16, dtype=np.uint32) + 128) // 257).astype(np.uint8)
    gray = Image.fromarray(table[values])
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        opaque = np.where(values == transparent, 0, 255).astype(np.uint8)
        gray.putalpha(Image.fromarray(opaque))
    return gray


def _from_cmyk(image: Image.Image, notes: list[str]) -> Image.Image:
    profile = image.info.get("icc_profile")
    if not profile:
        notes.append("cmyk-profile: CMYK without a colour profile, converted by the plain formula")
        return image.convert("RGB")
    try:
        inks = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        srgb = ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, inks, srgb, outputMode="RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError) as error:
        problem = f"broken CMYK profile ignored ({error}), converted by the plain formula"
        notes.append(f"cmyk-profile: {problem}")
        return image.convert("RGB")
    assert converted is not None  # None is for inPlace=True
    notes.append("cmyk: converted from CMYK through its colour profile")
    return converted


def _on_background(image: Image.Image, background: Rgb, notes: list[str]) -> Image.Image:
    straight = image.convert("LA") if image.mode == "La" else image
    rgba = straight.convert("RGBA")
    if rgba.getchannel("A").getextrema() == (255, 255):
        return rgba.convert("RGB")
    notes.append("alpha: transparent parts are put on the colour data.alpha_background")
    canvas = Image.new("RGBA", rgba.size, (*background, 255))
    return Image.alpha_composite(canvas, rgba).convert("RGB")
