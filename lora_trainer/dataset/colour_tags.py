"""Colour spaces that image files state without an ICC profile: in numbers, which become a profile here.

PNG has the chunks cICP, gAMA and cHRM (PNG specification, third edition, 11.3.2: cICP counts before a profile, a
profile and sRGB before gAMA and cHRM); AVIF and HEIC have the code points of ITU-T H.273; BMP has primaries and a
gamma, or a profile, in headers of version 4 and 5 (Windows' BITMAPV5HEADER); TIFF has primaries (TIFF 6.0, section 20;
a table of its curve is left unread); cameras write Adobe RGB as EXIF's interoperability index "R03" (DCF 2.0). What
cannot be converted without choosing a look, such as the brightness of HDR images, is named.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image

# Key of an opened image's `info` for (primaries, transfer) as H.273 numbers them.
CODE_POINTS = "code_points"
# Key of an opened image's `info` for the `Space` that a BMP's header states.
CALIBRATED = "calibrated"
_HEAD_BYTES = 1 << 16

# Chromaticities x, y of white, red, green, blue.
Chromaticities = tuple[float, ...]
_D65 = (0.3127, 0.3290)
_SRGB: Chromaticities = (*_D65, 0.64, 0.33, 0.30, 0.60, 0.15, 0.06)
_ADOBE: Chromaticities = (*_D65, 0.64, 0.33, 0.21, 0.71, 0.15, 0.06)
# H.273, table 2. Of 2 (unspecified) sRGB is assumed, as browsers do.
_PRIMARIES: Mapping[int, tuple[str, Chromaticities]] = {
    1: ("sRGB", _SRGB),
    2: ("sRGB", _SRGB),
    5: ("BT.601 with 625 lines", (*_D65, 0.64, 0.33, 0.29, 0.60, 0.15, 0.06)),
    6: ("BT.601 with 525 lines", (*_D65, 0.630, 0.340, 0.310, 0.595, 0.155, 0.070)),
    7: ("SMPTE 240M", (*_D65, 0.630, 0.340, 0.310, 0.595, 0.155, 0.070)),
    9: ("BT.2020", (*_D65, 0.708, 0.292, 0.170, 0.797, 0.131, 0.046)),
    11: ("DCI-P3", (0.314, 0.351, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060)),
    12: ("Display P3", (*_D65, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060)),
    22: ("EBU 3213", (*_D65, 0.630, 0.340, 0.295, 0.605, 0.155, 0.077)),
}
# H.273, table 3: the power of the curve, None for that of sRGB. The camera curves of video (1, 6, 14, 15) are meant for
# a screen, whose curve sRGB's is nearest to.
_TRANSFERS: Mapping[int, float | None] = {
    **dict.fromkeys((1, 2, 6, 13, 14, 15)), 4: 2.2, 5: 2.8, 8: 1.0,
}  # fmt: skip
_HDR = {16: "PQ", 18: "HLG"}
# Writers round sRGB's curve to a power of 2.2; libpng too ignores differences below 5 %.
_SRGB_POWER, _SAME_POWER = 2.2, 0.05
_ADOBE_POWER = 563 / 256
# From D65 and other whites to that of profiles, D50 (ICC.1:2022, annex E, Bradford).
_BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)
_D50 = np.array([0.9642, 1.0, 0.8249])


class Space(NamedTuple):
    """A colour space of three primaries; `power` is that of its curve, None for the curve of sRGB."""

    name: str
    chromaticities: Chromaticities
    power: float | None


def note_stated_colours(image: Image.Image, file: IO[bytes]) -> None:
    """Keep in `info` what a file states of its colours, where Pillow does not read it: code points, BMP's header."""
    found: tuple[int, int] | None = None
    file.seek(0)
    if image.format == "BMP":
        _note_header_of_bmp(image.info, file)
    elif image.format == "PNG":
        found = _of_png(file.read(_HEAD_BYTES))
    elif image.format == "AVIF":
        head = file.read(_HEAD_BYTES)
        at = head.find(b"colrnclx")
        if at >= 0 and len(head) >= at + 12:
            found = struct.unpack_from(">HH", head, at + 8)
    elif isinstance(stated := image.info.get("nclx_profile"), dict):  # pillow-heif
        found = int(stated["color_primaries"]), int(stated["transfer_characteristics"])
    if found is not None:
        image.info[CODE_POINTS] = found


def _of_png(head: bytes) -> tuple[int, int] | None:
    """Return primaries and transfer of a cICP chunk, which stands before the pixels."""
    at = 8
    while at + 8 <= len(head):
        length, name = struct.unpack_from(">I4s", head, at)
        if name == b"IDAT":
            return None
        if name == b"cICP" and length >= 4 and at + 12 <= len(head):
            return head[at + 8], head[at + 9]
        at += 12 + length
    return None


# Places in a BMP file, and in its header that begins behind the file's own.
_BMP_HEADER, _BMP_SPACE, _BMP_PROFILE = 14, 56, 112
_BMP_V4_BYTES, _BMP_V5_BYTES = 108, 124


def _note_header_of_bmp(info: dict[Any, Any], file: IO[bytes]) -> None:
    """Keep the embedded profile of a header of version 5, or the primaries and the gamma of one of version 4 or 5."""
    head = file.read(_BMP_HEADER + _BMP_V5_BYTES)[_BMP_HEADER:]
    size = int.from_bytes(head[:4], "little")
    if size < _BMP_V4_BYTES or len(head) < _BMP_V4_BYTES:
        return
    kind, *numbers = struct.unpack_from("<4s9i3I", head, _BMP_SPACE)
    if kind == b"DEBM" and size >= _BMP_V5_BYTES:
        place, length = struct.unpack_from("<2I", head, _BMP_PROFILE)
        left = file.seek(0, os.SEEK_END) - _BMP_HEADER - place
        file.seek(_BMP_HEADER + place)
        info["icc_profile"] = file.read(max(0, min(length, left)))
    # Many programs leave the numbers of a calibrated space at 0.
    elif kind == bytes(4) and any(numbers[:9]):
        primaries = np.array(numbers[:9], float).reshape(3, 3)
        gamma = sum(numbers[9:]) / 3 / (1 << 16)
        info[CALIBRATED] = Space(
            "the primaries of its header",
            _chromaticities([primaries.sum(axis=0), *primaries]),
            _unless_srgb(gamma or None),
        )


def _chromaticities(xyz: Sequence[np.ndarray[Any, np.dtype[np.float64]]]) -> Chromaticities:
    """Return x and y of each of these colours; NaN for black."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return tuple(float(number) for each in xyz for number in each[:2] / each.sum())


def _unless_srgb(power: float | None) -> float | None:
    """Return the power of a curve, None for one that is that of sRGB or nearly so."""
    return None if power is None or abs(power / _SRGB_POWER - 1) < _SAME_POWER else power


def _of_tiff(image: Image.Image) -> Space | None:
    """Return the space of a TIFF's primaries; a file may state them without the white."""
    tags = getattr(image, "tag_v2", {})
    white = tags.get(ExifTags.Base.WhitePoint, _D65)
    primaries = tags.get(ExifTags.Base.PrimaryChromaticities)
    if primaries is None:
        return None
    if not isinstance(white, tuple) or not isinstance(primaries, tuple):
        raise ValueError("the white and the primaries of its tags are not lists of numbers")
    corners = tuple(float(number) for number in (*white, *primaries))
    if len(corners) != len(_SRGB):
        raise ValueError(
            f"the primaries of its tags are {len(corners)} numbers with the white's, not 8"
        )
    return Space("the primaries of its tags", corners, None)


def stated_space(image: Image.Image) -> Space | None:
    """Return the colour space that a file states without a profile; None for sRGB and where it states nothing.

    Raises ValueError, with what is wrong, for a space that is broken or unknown.
    """
    info = image.info
    if points := info.get(CODE_POINTS):
        return _of_code_points(*points)
    if image.format == "PNG":
        return None if "srgb" in info else _of_gamma(info)
    if image.format in ("JPEG", "MPO", "TIFF", "WEBP") and _is_adobe(image):
        return Space("Adobe RGB", _ADOBE, _ADOBE_POWER)
    if image.format == "TIFF":
        return _of_tiff(image)
    space: Space | None = info.get(CALIBRATED)
    return space


def _of_code_points(primaries: int, transfer: int) -> Space | None:
    if transfer in _HDR:
        raise ValueError(
            f"it is an HDR image ({_HDR[transfer]}), whose brightness is read as that of sRGB"
        )
    if primaries not in _PRIMARIES or transfer not in _TRANSFERS:
        raise ValueError(f"the code points {primaries}/{transfer} of H.273 are not known here")
    name, chromaticities = _PRIMARIES[primaries]
    power = _TRANSFERS[transfer]
    if power is None and chromaticities == _SRGB:
        return None
    return Space(name if power is None else f"{name} with gamma {power}", chromaticities, power)


def _of_gamma(info: Mapping[Any, Any]) -> Space | None:
    """Return the space of the chunks gAMA and cHRM; Pillow has the numbers of both."""
    gamma, stated = info.get("gamma"), info.get("chromaticity")
    if gamma is None and stated is None:
        return None
    power = None
    if gamma is not None:
        if not gamma > 0:
            raise ValueError("its gAMA chunk is 0")
        power = _unless_srgb(1 / gamma)
    if stated is None and power is None:
        return None
    words = [] if stated is None else ["the primaries of its cHRM chunk"]
    words += [] if power is None else [f"gamma {power:.3g}"]
    return Space(" and ".join(words), _SRGB if stated is None else tuple(stated), power)


def _is_adobe(image: Image.Image) -> bool:
    try:
        exif = image.getexif()
        details = exif.get_ifd(ExifTags.IFD.Exif)
        index = exif.get_ifd(ExifTags.IFD.Interop).get(1, "")
        is_other = details.get(ExifTags.Base.ColorSpace) == 0xFFFF
    except Exception:  # noqa: BLE001 - damaged EXIF is named by the check of the image itself
        return False
    text = index.decode("latin-1") if isinstance(index, bytes) else str(index)
    return is_other and text.rstrip("\0 ").upper() == "R03"


@lru_cache(maxsize=64)
def profile_of(space: Space) -> bytes:
    """Return an ICC profile of a space (ICC.1:2022: a display profile of three components).

    Raises ValueError for chromaticities that are not those of a colour space.
    """
    columns = _to_d50(space)
    curve = _parametric(space.power)
    tags = {
        b"desc": _text(space.name),
        b"cprt": _text("none"),
        b"wtpt": _xyz(_D50),
        **{name: _xyz(columns[:, n]) for n, name in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))},
        **dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve),
    }
    start = 128 + 4 + 12 * len(tags)
    table, data = struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        table += name + struct.pack(">II", start + len(data), len(value))
        data += value + bytes(-len(value) % 4)
    head = struct.pack(">I4sI4s4s4s", 0, b"lcms", 0x04400000, b"mntr", b"RGB ", b"XYZ ")
    head += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + bytes(28)
    head += _fixed(_D50) + bytes(48)
    return struct.pack(">I", start + len(data)) + head[4:] + table + data


def _to_d50(space: Space) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return XYZ under D50 of a space's red, green and blue as columns."""
    corners = np.array(space.chromaticities, float).reshape(4, 2)
    if not np.isfinite(corners).all() or (corners[:, 1] <= 0).any():
        raise ValueError(f"{space.name} are not those of colours")
    xyz = np.stack([corners[:, 0], corners[:, 1], 1 - corners.sum(axis=1)]) / corners[:, 1]
    white, primaries = xyz[:, 0], xyz[:, 1:]
    if abs(np.linalg.det(primaries)) < 1e-4:
        raise ValueError(f"{space.name} lie on one line")
    columns = primaries * np.linalg.solve(primaries, white)
    scale = np.diag((_BRADFORD @ _D50) / (_BRADFORD @ white))
    adapted: np.ndarray[Any, np.dtype[np.float64]] = (
        np.linalg.inv(_BRADFORD) @ scale @ _BRADFORD @ columns
    )
    return adapted


def _fixed(numbers: Any) -> bytes:
    return b"".join(struct.pack(">i", round(float(number) * 65536)) for number in numbers)


def _xyz(numbers: Any) -> bytes:
    return b"XYZ " + bytes(4) + _fixed(numbers)


def _text(words: str) -> bytes:
    encoded = words.encode("utf-16-be")
    return (
        b"mluc"
        + bytes(4)
        + struct.pack(">II2s2sII", 1, 12, b"en", b"US", len(encoded), 28)
        + encoded
    )


def _parametric(power: float | None) -> bytes:
    """Return the curve: a power, or IEC 61966-2-1's of sRGB."""
    kind, numbers = (
        (3, (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)) if power is None else (0, (power,))
    )
    return b"para" + bytes(4) + struct.pack(">HH", kind, 0) + _fixed(numbers)
