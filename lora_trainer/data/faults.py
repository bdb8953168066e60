"""Why a file is no usable picture, told from what its decoder raised and how its bytes begin."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from lora_trainer.data.findings import shown
from lora_trainer.data.pixels import PixelFormatError
from lora_trainer.errors import InputError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
"""Pillow's names of what is read: decoders that run no foreign program, as that of EPS would."""
HEAD_BYTES = 256
DECODER_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    Image.DecompressionBombError,
    struct.error,
    zlib.error,
)
"""What Pillow raises on damaged bytes; its own exceptions are the smaller part."""
_REPLACE = "replace it with an intact copy or remove it"
_CONVERT = "convert it to PNG or JPEG"
_SIGNATURES = (
    (rb"\Z", "empty (0 bytes)", _REPLACE),
    (rb"version https://git-lfs", "a Git LFS pointer, not the picture", "run `git lfs pull`"),
    (rb"\s*<(!doctype html|html|head|body)", "not an image (looks like HTML)", "download it again"),
    (rb"\s*(<\?xml|<svg)", "not a bitmap (looks like SVG or XML)", _CONVERT),
    (rb"....ftyp(hei|hev|mif1|msf1)", "a HEIC picture", _CONVERT),
    (rb"(\xff\x0a|....JXL )", "a JPEG XL picture", _CONVERT),
    (rb"....ftyp", "a video", "take stills from it"),
    (rb"%PDF", "not an image (looks like PDF)", _CONVERT),
    (
        rb"(PK\x03\x04|Rar!|7z\xbc\xaf|\x1f\x8b)",
        "not an image (looks like an archive)",
        "unpack it",
    ),
    (rb"[\t\n\r\x20-\x7e]+\Z", "not an image (looks like text)", "remove it"),
    (rb"", f"not an image of a known kind ({', '.join(FORMATS)})", f"{_CONVERT} or remove it"),
)


class ImageFault(InputError):
    """A picture that cannot be used: `reason` without its path, `code` of the case in FAULTS."""

    def __init__(self, path: Path, reason: str, *, code: str, fix: str) -> None:
        super().__init__(f"{shown(str(path))} {reason}", fix=fix)
        self.reason = reason
        self.code = code


def explain(path: Path, error: Exception, *, head: bytes, max_megapixels: float) -> ImageFault:
    """Turn what a decoder raised into one line; `head` is the first `HEAD_BYTES` of the file."""
    if isinstance(error, Image.DecompressionBombError):
        claimed = re.search(r"\d+", str(error))
        pixels = f"{int(claimed[0]):,}" if claimed else "too many"
        limit = f"data.max_megapixels={max_megapixels:g} are allowed"
        fix = "scale it down, or raise data.max_megapixels if you trust it"
        reason = f"is too large: its header claims {pixels} pixels, {limit}"
        return ImageFault(path, reason, code="IMG-07", fix=fix)
    if isinstance(error, UnidentifiedImageError):
        what, fix = next(
            (what, fix)
            for pattern, what, fix in _SIGNATURES
            if re.match(pattern, head, re.IGNORECASE | re.DOTALL)
        )
        return ImageFault(path, f"is {what}", code="IMG-02", fix=fix)
    if isinstance(error, PixelFormatError):
        fix = "save it as RGB or gray with 8 or 16 bits"
        return ImageFault(path, str(error), code="IMG-05", fix=fix)
    truncated = "truncated" in str(error).lower()
    what, code = ("ends early", "IMG-01") if truncated else ("is damaged", "IMG-02")
    detail = shown(str(error)) or type(error).__name__
    return ImageFault(path, f"{what} ({detail})", code=code, fix=_REPLACE)
