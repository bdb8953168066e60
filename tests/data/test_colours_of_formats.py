"""Each format that a dataset may hold is read with its colours: profiles as littlecms has them, depths, alpha, inks."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms

from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.images import ImageDecodeError, decode
from tests.data.test_colours import ADOBE, P3, P3_CHROMATICITIES, rgb_profile

SIDE = 24
COLOURS = ((255, 0, 0), (128, 128, 128), (200, 100, 150))
Encoder = Callable[[Image.Image, bytes | None], bytes]
Tag = tuple[str, list[Any]]


def drawn() -> Image.Image:
    """Return three stripes of eight pixels."""
    pixels = np.repeat(np.array(COLOURS, np.uint8), SIDE // 3, axis=0)
    return Image.fromarray(np.tile(pixels, (SIDE, 1, 1)))


def read(data: bytes, folder: Path) -> tuple[list[tuple[int, ...]], list[str]]:
    """Return the stripes' colours as they are trained, and the notes."""
    file = folder / "a.png"  # the name says nothing of the format
    file.write_bytes(data)
    decoded = decode(file, settings=DataSettings())
    return [decoded.image.getpixel((x, 10)) for x in (4, 12, 20)], list(decoded.notes)  # type: ignore[misc]  # RGB


def pillow(kind: str, **options: Any) -> Encoder:
    def encode(image: Image.Image, profile: bytes | None) -> bytes:
        data = io.BytesIO()
        image.save(data, kind, **options, icc_profile=profile)
        return data.getvalue()

    return encode


def heic(image: Image.Image, profile: bytes | None) -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif", reason="the extra `heic` is not installed")
    data = io.BytesIO()
    pillow_heif.from_pillow(image).save(data, quality=-1, icc_profile=profile)
    return data.getvalue()


def bmp(image: Image.Image, *, space: bytes, numbers: bytes = b"", profile: bytes = b"") -> bytes:
    """Return a BMP whose header is of version 5."""
    rows = np.asarray(image.convert("RGB"))[::-1, :, ::-1].tobytes()
    begin, header = 14, 124
    head = struct.pack("<IiiHHIIiiII", header, *image.size, 1, 24, 0, len(rows), 0, 0, 0, 0)
    head += bytes(16) + space + numbers.ljust(48, b"\0") + struct.pack("<I", 4)
    head += struct.pack("<III", header + len(rows) if profile else 0, len(profile), 0)
    size = begin + header + len(rows) + len(profile)
    return b"BM" + struct.pack("<IHHI", size, 0, 0, begin + header) + head + rows + profile


def bmp_with(image: Image.Image, profile: bytes | None) -> bytes:
    return bmp(image, space=b"DEBM" if profile else b"BGRs", profile=profile or b"")


def tiff(bits: list[int], kind: int, data: bytes, **tags: Tag) -> bytes:
    """Return an uncompressed TIFF of `SIDE` pixels a side; `kind` is its photometric interpretation."""
    longs = {256: SIDE, 257: SIDE, 259: 1, 262: kind, 277: len(bits), 278: SIDE, 279: len(data)}
    entries: dict[int, Tag] = {tag: ("I", [number]) for tag, number in longs.items()}
    entries |= {258: ("H", bits), 273: ("I", [0])}
    entries |= {ExifTags.Base[name].value: tag for name, tag in tags.items()}
    types = {"H": 3, "I": 4, "II": 5}
    values = {
        tag: b"".join(
            struct.pack("<" + form, *(each if isinstance(each, tuple) else (each,)))
            for each in numbers
        )
        for tag, (form, numbers) in entries.items()
    }
    at = 8 + 2 + 12 * len(entries) + 4
    behind = b"".join(value for _, value in sorted(values.items()) if len(value) > 4)
    values[273] = struct.pack("<I", at + len(behind))
    table = b""
    for tag, (form, numbers) in sorted(entries.items()):
        value = values[tag]
        if len(value) > 4:
            value, at = struct.pack("<I", at), at + len(value)
        table += struct.pack("<HHI", tag, types[form], len(numbers)) + value.ljust(4, b"\0")
    head = b"II*\0" + struct.pack("<IH", 8, len(entries))
    return head + table + bytes(4) + behind + data


ENCODERS: dict[str, Encoder] = {
    "png": pillow("PNG"),
    "tiff": pillow("TIFF"),
    "webp": pillow("WEBP", lossless=True),
    "jpeg": pillow("JPEG", quality=100, subsampling=0),
    "avif": pillow("AVIF", quality=100, subsampling="4:4:4"),
    "heic": heic,
    "bmp": bmp_with,
}


@pytest.mark.parametrize("name", ENCODERS)
def test_a_profile_is_heeded_as_littlecms_does(name: str, tmp_path: Path) -> None:
    plain, notes = read(ENCODERS[name](drawn(), None), tmp_path)
    assert notes == [] and np.abs(np.subtract(plain, COLOURS)).max() <= 4
    for primaries in (P3, ADOBE):
        profile = rgb_profile(primaries)
        expected = ImageCms.profileToProfile(
            Image.fromarray(np.array([plain], np.uint8)),
            ImageCms.ImageCmsProfile(io.BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
        found, notes = read(ENCODERS[name](drawn(), profile), tmp_path)
        assert [note.partition(": ")[0] for note in notes] == ["icc"]
        assert found != plain
        assert np.abs(np.subtract(found, np.asarray(expected)[0])).max() <= 2
    found, notes = read(ENCODERS[name](drawn(), rgb_profile(P3)[:200]), tmp_path)
    assert found == plain and notes[0].startswith("icc-profile: "), "broken, and said so"


def primaries_of(columns: tuple[tuple[float, ...], ...]) -> bytes:
    return struct.pack("<9i", *(round(number * (1 << 30)) for row in columns for number in row))


# XYZ under D65 of Display P3 and sRGB (IEC 61966-2-1; SMPTE EG 432-1).
P3_D65 = ((0.48657, 0.22897, 0.0), (0.26567, 0.69174, 0.04511), (0.19822, 0.07929, 1.04394))
SRGB_D65 = ((0.41239, 0.21264, 0.01933), (0.35758, 0.71517, 0.11919), (0.18048, 0.07219, 0.95053))


def test_a_bmp_states_its_colours_in_numbers(tmp_path: Path) -> None:
    by_profile, _ = read(bmp_with(drawn(), rgb_profile(P3)), tmp_path)
    found, (note,) = read(bmp(drawn(), space=bytes(4), numbers=primaries_of(P3_D65)), tmp_path)
    assert "the primaries of its header" in note
    assert np.abs(np.subtract(found, by_profile)).max() <= 2
    gamma = struct.pack("<3I", *[1 << 16] * 3)
    linear, _ = read(bmp(drawn(), space=bytes(4), numbers=primaries_of(SRGB_D65) + gamma), tmp_path)
    assert linear[1][0] == pytest.approx(188, abs=2)


@pytest.mark.parametrize(
    "numbers",
    [b"", primaries_of(SRGB_D65), primaries_of(SRGB_D65) + struct.pack("<3I", *[0x23333] * 3)],
    ids=["none", "primaries", "primaries and gamma"],
)
def test_a_bmp_with_the_numbers_of_srgb_or_none_stays_as_it_is(
    numbers: bytes, tmp_path: Path
) -> None:
    assert read(bmp(drawn(), space=bytes(4), numbers=numbers), tmp_path) == ([*COLOURS], [])
    broken = bmp(drawn(), space=bytes(4), numbers=struct.pack("<9i", *[1] * 9))
    found, (note,) = read(broken, tmp_path)
    assert found == [*COLOURS] and note.startswith("icc-profile: ") and "header" in note


def rationals(*numbers: float) -> Tag:
    return "II", [(round(number * 10_000), 10_000) for number in numbers]


def test_a_tiff_states_its_primaries(tmp_path: Path) -> None:
    pixels = np.asarray(drawn()).tobytes()

    def stated(*numbers: float) -> tuple[list[tuple[int, ...]], list[str]]:
        tags = {
            "WhitePoint": rationals(*numbers[:2]),
            "PrimaryChromaticities": rationals(*numbers[2:]),
        }
        return read(tiff([8] * 3, 2, pixels, **tags), tmp_path)

    by_profile, _ = read(ENCODERS["tiff"](drawn(), rgb_profile(P3)), tmp_path)
    found, (note,) = stated(*P3_CHROMATICITIES)
    assert "the primaries of its tags" in note
    assert np.abs(np.subtract(found, by_profile)).max() <= 2
    assert stated(0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06) == ([*COLOURS], [])
    for broken in ((0.3127, 0.329, 0.64), (0.3127, 0.329, 0, 0, 0, 0, 0, 0)):
        found, (note,) = stated(*broken)
        assert found == [*COLOURS] and note.startswith("icc-profile: ") and "tags" in note


def test_a_webp_of_a_camera_in_adobe_rgb_says_so_by_a_letter(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.ColorSpace] = 0xFFFF
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.IFD.Interop] = {1: "R03"}
    by_profile, _ = read(ENCODERS["webp"](drawn(), rgb_profile(ADOBE)), tmp_path)
    found, notes = read(pillow("WEBP", lossless=True, exif=exif)(drawn(), None), tmp_path)
    assert notes[0].startswith("icc: ") and np.abs(np.subtract(found, by_profile)).max() <= 2


# Pixels of TIFF: bits, photometric interpretation, one pixel, further tags -> what is trained, kinds of notes.
GREY, INVERTED, RGB, INKS = 1, 0, 2, 5
PREMULTIPLIED, STRAIGHT = ("H", [1]), ("H", [2])
PIXELS: dict[str, tuple[list[int], int, bytes, dict[str, Tag], tuple[int, ...], list[str]]] = {
    "grey 8": ([8], GREY, b"\x80", {}, (128,) * 3, []),
    "grey 8, 0 is white": ([8], INVERTED, b"\x20", {}, (223,) * 3, []),
    "grey 12": ([12], GREY, b"\x80\x08\x00", {}, (128,) * 3, ["depth"]),
    "grey 16": ([16], GREY, b"\x80\x80", {}, (128,) * 3, ["depth"]),
    "grey 16, 0 is white": ([16], INVERTED, b"\x20\x20", {}, (223,) * 3, ["depth", "icc"]),
    "grey and alpha": ([8] * 2, GREY, b"\xc8\x80", {"ExtraSamples": STRAIGHT}, (227,) * 3, ["alpha"]),
    "rgb 16": ([16] * 3, RGB, b"\xff\xff\x80\x80\x20\x20", {}, (255, 128, 32), ["depth"]),
    "rgba": ([8] * 4, RGB, b"\xff\x80\x20\x80", {"ExtraSamples": STRAIGHT}, (255, 191, 143), ["alpha"]),
    "rgba, premultiplied": (
        [8] * 4, RGB, b"\x80\x40\x10\x80", {"ExtraSamples": PREMULTIPLIED}, (255, 191, 143), ["alpha"],
    ),
    "rgba 16": (
        [16] * 4, RGB, b"\xff\xff\x80\x80\x20\x20\x80\x80", {"ExtraSamples": STRAIGHT},
        (255, 191, 143), ["depth", "alpha"],
    ),
    "inks 16": ([16] * 4, INKS, b"\xff\xff" + bytes(6), {}, (0, 255, 255), ["depth", "cmyk-profile"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PIXELS)
def test_pixels_of_a_tiff_are_read_as_they_are_meant(name: str, tmp_path: Path) -> None:
    bits, kind, pixel, tags, expected, kinds = PIXELS[name]
    pixels = SIDE * SIDE * sum(bits) // 8 // len(pixel)
    found, notes = read(tiff(bits, kind, pixel * pixels, **tags), tmp_path)
    assert [note.partition(": ")[0] for note in notes] == kinds
    assert np.abs(np.subtract(found, [expected] * 3)).max() <= 1


def test_pixels_that_pillow_cannot_read_are_named_as_those_of_a_tiff(tmp_path: Path) -> None:
    with pytest.raises(ImageDecodeError, match="is a TIFF") as caught:
        read(tiff([16] * 2, GREY, b"\xc8\xc8\x80\x80" * SIDE**2, ExtraSamples=STRAIGHT), tmp_path)
    assert caught.value.fix == "save it as RGB or gray with 8 or 16 bits"


def test_five_and_six_bits_a_channel_are_not_sixteen(tmp_path: Path) -> None:
    rows = struct.pack("<H", 0xF800) * SIDE**2
    head = struct.pack("<IiiHHIIiiII", 56, SIDE, SIDE, 1, 16, 3, len(rows), 0, 0, 0, 0)
    head += struct.pack("<4I", 0xF800, 0x7E0, 0x1F, 0)
    begin = 14 + len(head)
    data = b"BM" + struct.pack("<IHHI", begin + len(rows), 0, 0, begin) + head + rows
    assert read(data, tmp_path) == ([(255, 0, 0)] * 3, [])


def test_of_several_frames_the_first_is_read_with_its_colours(tmp_path: Path) -> None:
    """TIFF's pages have a profile each; WebP's frames share one."""
    for kind, options in {"TIFF": {}, "WEBP": {"lossless": True}}.items():
        encode = pillow(kind, **options)
        alone, _ = read(encode(drawn(), rgb_profile(P3)), tmp_path)
        more = {"save_all": True, "append_images": [Image.new("RGB", (SIDE, SIDE), "blue")]}
        found, notes = read(pillow(kind, **options, **more)(drawn(), rgb_profile(P3)), tmp_path)
        assert found == alone
        assert [note.partition(": ")[0] for note in notes] == ["animated", "icc"]


def test_a_palette_with_transparency_and_a_profile(tmp_path: Path) -> None:
    image = Image.new("P", (SIDE, SIDE), 1)
    image.putpalette([0, 0, 0, *COLOURS[2]])
    image.paste(0, (0, 0, 8, SIDE))
    data = io.BytesIO()
    image.save(data, "PNG", transparency=0, icc_profile=rgb_profile(P3))
    (clear, _, pink), notes = read(data.getvalue(), tmp_path)
    assert [note.partition(": ")[0] for note in notes] == ["icc", "alpha"]
    assert clear == (255, 255, 255) and pink[0] > COLOURS[2][0] + 3
