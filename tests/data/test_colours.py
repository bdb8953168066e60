"""Colour profiles change pixels to sRGB and so name another cache entry; HEIC is read, or named with its cure."""

from __future__ import annotations

import io
import json
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms

from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset import images
from lora_trainer.dataset.images import ImageDecodeError, decode
from lora_trainer.dataset.scan import scan
from tests.fakes.studio import Studio, studio_in

# Red, green and blue in XYZ under D50, of Display P3 (Apple's profile) and of sRGB; each row one colour.
P3 = ((0.51512, 0.2412, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))
SRGB = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410))
RED, GREY, PINK = (255, 0, 0), (128, 128, 128), (200, 100, 150)


def fixed(*numbers: float) -> bytes:
    return b"".join(struct.pack(">i", round(number * 65536)) for number in numbers)


def profile(space: bytes, tags: dict[bytes, bytes]) -> bytes:
    """Return a display profile of version 2 with these tags (ICC.1:2001-04)."""
    text = b"a test\0"
    tags = {
        b"desc": b"desc" + bytes(4) + struct.pack(">I", len(text)) + text + bytes(78),
        b"cprt": b"text" + bytes(4) + text,
        b"wtpt": b"XYZ " + bytes(4) + fixed(0.9642, 1.0, 0.8249),
        **tags,
    }
    at, table, data = 128 + 4 + 12 * len(tags), b"", b""
    for name, value in tags.items():
        padded = value + bytes(-len(value) % 4)
        table += name + struct.pack(">II", at + len(data), len(value))
        data += padded
    head = struct.pack(">I4sI4s4s4s", 0, b"lcms", 0x02100000, b"mntr", space, b"XYZ ")
    head += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + bytes(28)
    head += fixed(0.9642, 1.0, 0.8249) + bytes(48)
    whole = head + struct.pack(">I", len(tags)) + table + data
    return struct.pack(">I", len(whole)) + whole[4:]


def gamma(power: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(power * 256)) + bytes(2)


def rgb_profile(primaries: tuple[tuple[float, ...], ...], power: float = 2.2) -> bytes:
    names = (b"rXYZ", b"gXYZ", b"bXYZ")
    colours = {
        name: b"XYZ " + bytes(4) + fixed(*row) for name, row in zip(names, primaries, strict=True)
    }
    return profile(b"RGB ", {**colours, **dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), gamma(power))})


def grey_profile(power: float) -> bytes:
    return profile(b"GRAY", {b"kTRC": gamma(power)})


def own_srgb() -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def picture(mode: str = "RGB", **saving: Any) -> bytes:
    """Return three stripes: red, grey, pink; the last is half transparent with alpha."""
    pixels = np.zeros((24, 24, 4), np.uint8)
    pixels[:, :8, :3], pixels[:, 8:16, :3], pixels[:, 16:, :3] = RED, GREY, PINK
    pixels[..., 3] = 255
    pixels[:, 16:, 3] = 128
    data = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(data, "PNG", **saving)
    return data.getvalue()


def stripes(data: bytes, folder: Path) -> tuple[list[tuple[int, ...]], list[str]]:
    """Return the colours of the stripes as they are trained, and the kinds of notes."""
    file = folder / "a.png"
    file.write_bytes(data)
    decoded = decode(file, settings=DataSettings())
    colours = [decoded.image.getpixel((x, 10)) for x in (4, 12, 20)]
    return colours, [note.partition(": ")[0] for note in decoded.notes]  # type: ignore[misc]  # a note is text here


@pytest.mark.parametrize("mode", ["RGB", "P", "RGBA"])
def test_colours_of_another_space_are_those_of_srgb(mode: str, tmp_path: Path) -> None:
    plain, notes = stripes(picture(mode), tmp_path)
    assert "icc" not in notes
    (red, grey, pink), notes = stripes(picture(mode, icc_profile=rgb_profile(P3)), tmp_path)
    assert notes[0] == "icc"
    # Red of Display P3 lies outside of sRGB, whose own red is the nearest; pink becomes more colourful.
    assert red == (255, 0, 0) and np.abs(np.subtract(grey, plain[1])).max() <= 2
    assert pink[0] > plain[2][0] + (1 if mode == "RGBA" else 3) and pink[1] < plain[2][1]


def test_a_profile_of_nearly_srgb_changes_nothing(tmp_path: Path) -> None:
    plain, _ = stripes(picture(), tmp_path)
    for same in (own_srgb(),):
        assert stripes(picture(icc_profile=same), tmp_path) == (plain, [])
    assert stripes(picture(icc_profile=rgb_profile(SRGB, 1.0)), tmp_path)[1] == ["icc"]


def test_greys_go_through_their_profile(tmp_path: Path) -> None:
    plain, _ = stripes(picture("L"), tmp_path)
    found, notes = stripes(picture("L", icc_profile=grey_profile(1.0)), tmp_path)
    assert notes == ["icc"] and found[1][0] == pytest.approx(188, abs=2), "linear grey 128"
    assert len(set(found[1])) == 1 and found != plain


@pytest.mark.parametrize(
    "broken", [rgb_profile(P3)[:150], b"no profile", grey_profile(2.2)[:200], bytes(200)]
)
def test_a_broken_profile_is_named_and_ignored(broken: bytes, tmp_path: Path) -> None:
    plain, _ = stripes(picture(), tmp_path)
    assert stripes(picture(icc_profile=broken), tmp_path) == (plain, ["icc-profile"])


def test_changed_colours_have_a_cache_entry_of_their_own(tmp_path: Path) -> None:
    studio: Studio = studio_in(tmp_path)
    profiles = {"p0": None, "p1": rgb_profile(P3), "p2": own_srgb()}
    for name, data in profiles.items():
        (studio.folder / f"{name}.png").write_bytes(picture(icc_profile=data))
    fields = {
        job.record.name: json.loads(job.key.fields).get("colours")
        for job in studio.needs().images.values()
    }
    assert fields == {"p0.png": None, "p1.png": "sRGB", "p2.png": None}
    kinds = [(one.kind, one.file) for one in scan(studio.folder, settings=studio.settings).findings]
    assert ("icc", "p1.png") in kinds and [kind for kind, _ in kinds].count("icc") == 1


# ---- HEIC


def heic(**saving: Any) -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif", reason="the extra `heic` is not installed")
    with Image.open(io.BytesIO(picture())) as opened:
        data = io.BytesIO()
        pillow_heif.from_pillow(opened.convert("RGB")).save(data, quality=-1, **saving)
    return data.getvalue()


@pytest.fixture
def without_decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    images._reads_heic.cache_clear()
    yield
    images._reads_heic.cache_clear()


@pytest.mark.parametrize("name", ["a.heic", "a.jpg"])
def test_heic_is_read_where_the_decoder_is_installed(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(heic())
    decoded = decode(tmp_path / name, settings=DataSettings())
    assert decoded.image.size == (24, 24) and decoded.notes == ()
    assert np.abs(np.subtract(decoded.image.getpixel((4, 10)), RED)).max() < 12  # type: ignore[arg-type]  # of RGB it is a tuple
    with pytest.raises(ImageDecodeError, match="ends early|damaged"):
        (tmp_path / name).write_bytes(heic()[:-40])
        decode(tmp_path / name, settings=DataSettings())


@pytest.mark.usefixtures("without_decoder")
@pytest.mark.parametrize("brand", ["heic", "hevc", "mif1", "heix"])
def test_heic_is_named_with_the_cure_where_it_is_not(brand: str, tmp_path: Path) -> None:
    file = tmp_path / "a.heic"
    file.write_bytes(b"\0\0\0\x18ftyp" + brand.encode() + bytes(200))
    with pytest.raises(ImageDecodeError) as caught:
        decode(file, settings=DataSettings())
    assert "is a HEIC image" in caught.value.reason
    assert caught.value.fix == "`pip install pillow-heif`, or convert it to PNG or JPEG"


def test_avif_is_named_where_pillow_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "FORMATS", ("PNG", "JPEG"))
    Image.new("RGB", (32, 32)).save(tmp_path / "a.avif")
    with pytest.raises(ImageDecodeError) as caught:
        decode(tmp_path / "a.avif", settings=DataSettings())
    assert "AVIF" in caught.value.reason and "pillow" in caught.value.fix


# ---- colours stated in numbers


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def with_chunks(data: bytes, *chunks: bytes) -> bytes:
    """Return a PNG with chunks before its palette and pixels."""
    return data[:33] + b"".join(chunks) + data[33:]


def cicp(primaries: int, transfer: int) -> bytes:
    return chunk(b"cICP", bytes((primaries, transfer, 0, 1)))


def gama(value: float) -> bytes:
    return chunk(b"gAMA", struct.pack(">I", round(value * 100_000)))


def chrm(*numbers: float) -> bytes:
    return chunk(b"cHRM", struct.pack(">8I", *(round(number * 100_000) for number in numbers)))


D65 = (0.3127, 0.329)
P3_CHROMATICITIES = (*D65, 0.68, 0.32, 0.265, 0.69, 0.15, 0.06)
SRGB_CHROMATICITIES = (*D65, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)
ADOBE = (0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457)


@pytest.mark.parametrize("mode", ["RGB", "P", "RGBA"])
def test_a_png_that_states_display_p3_in_numbers_is_converted_as_by_its_profile(
    mode: str, tmp_path: Path
) -> None:
    """Apple's profile has sRGB's curve, of which 2.2 is nearest; within the rounding of both the colours are equal."""
    plain, _ = stripes(picture(mode), tmp_path)
    by_profile, _ = stripes(picture(mode, icc_profile=rgb_profile(P3)), tmp_path)
    for stated in (
        [cicp(12, 13)],
        [gama(0.45455), chrm(*P3_CHROMATICITIES)],
        [chrm(*P3_CHROMATICITIES)],
    ):
        found, notes = stripes(with_chunks(picture(mode), *stated), tmp_path)
        assert notes[0] == "icc" and found != plain
        assert np.abs(np.subtract(found, by_profile)).max() <= 2


@pytest.mark.parametrize(
    "stated",
    [
        [cicp(1, 13)],
        [cicp(1, 1)],
        [cicp(2, 2)],
        [gama(0.45455)],
        [gama(0.45455), chrm(*SRGB_CHROMATICITIES)],
        # The chunk of sRGB counts before the others, which programs write for those that do not know it.
        [chunk(b"sRGB", b"\0"), gama(1.0), chrm(*P3_CHROMATICITIES)],
    ],
)
def test_numbers_of_srgb_change_nothing(stated: list[bytes], tmp_path: Path) -> None:
    plain, _ = stripes(picture(), tmp_path)
    assert stripes(with_chunks(picture(), *stated), tmp_path) == (plain, [])


def test_linear_pixels_are_brightened_and_the_code_points_count_before_a_profile(
    tmp_path: Path,
) -> None:
    for stated in (gama(1.0), cicp(1, 8)):
        for mode in ("RGB", "L"):
            found, notes = stripes(with_chunks(picture(mode), stated), tmp_path)
            assert notes == ["icc"] and found[1][0] == pytest.approx(188, abs=2)
    plain, _ = stripes(picture(), tmp_path)
    told = picture(icc_profile=rgb_profile(P3))
    assert stripes(with_chunks(told, cicp(1, 13)), tmp_path) == (plain, [])
    both, _ = stripes(with_chunks(told, gama(1.0)), tmp_path)
    assert both == stripes(told, tmp_path)[0], "a profile counts before gAMA"


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ([cicp(9, 16)], "HDR image (PQ)"),
        ([cicp(9, 18)], "HDR image (HLG)"),
        ([cicp(77, 13)], "77/13"),
        ([gama(0.0)], "gAMA"),
        ([chrm(0, 0, 0, 0, 0, 0, 0, 0)], "cHRM"),
        ([chrm(*D65, 0.3, 0.3, 0.4, 0.4, 0.5, 0.5)], "cHRM"),
    ],
)
def test_colours_that_cannot_be_converted_are_named(
    stated: list[bytes], said: str, tmp_path: Path
) -> None:
    plain, _ = stripes(picture(), tmp_path)
    (tmp_path / "a.png").write_bytes(with_chunks(picture(), *stated))
    decoded = decode(tmp_path / "a.png", settings=DataSettings())
    assert [decoded.image.getpixel((x, 10)) for x in (4, 12, 20)] == plain
    (note,) = decoded.notes
    assert note.startswith("icc-profile: ") and said in note


def test_an_avif_states_its_colours_in_numbers(tmp_path: Path) -> None:
    data = io.BytesIO()
    Image.open(io.BytesIO(picture())).convert("RGB").save(data, "AVIF", quality=100)
    plain, notes = stripes(data.getvalue(), tmp_path)
    assert notes == []
    at = data.getvalue().index(b"colrnclx") + 8
    told = bytearray(data.getvalue())
    told[at : at + 4] = struct.pack(">HH", 12, 13)
    found, notes = stripes(bytes(told), tmp_path)
    assert notes == ["icc"] and found[2][0] > plain[2][0] + 3 and found[2][1] < plain[2][1]
    told[at : at + 4] = struct.pack(">HH", 9, 16)
    assert stripes(bytes(told), tmp_path) == (plain, ["icc-profile"])


def test_a_heic_states_its_colours_in_numbers(tmp_path: Path) -> None:
    plain, notes = stripes(heic(), tmp_path)
    assert notes == []
    told = heic(color_primaries=12, transfer_characteristics=13, matrix_coefficients=6)
    data = bytearray(told)
    if (at := data.find(b"colrnclx")) >= 0:
        data[at + 8 : at + 12] = struct.pack(">HH", 12, 13)
    found, notes = stripes(bytes(data), tmp_path)
    assert notes == ["icc"] and found[2][0] > plain[2][0] + 3


def test_a_cameras_jpeg_in_adobe_rgb_says_so_by_a_letter(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.ColorSpace] = 0xFFFF
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.IFD.Interop] = {1: "R03"}
    saving = {"quality": 100, "subsampling": 0}

    def jpeg(**more: Any) -> bytes:
        data = io.BytesIO()
        Image.open(io.BytesIO(picture())).convert("RGB").save(data, "JPEG", **saving, **more)
        return data.getvalue()

    plain, _ = stripes(jpeg(), tmp_path)
    by_profile, _ = stripes(jpeg(icc_profile=rgb_profile(ADOBE)), tmp_path)
    found, notes = stripes(jpeg(exif=exif), tmp_path)
    assert notes == ["icc"] and found != plain
    assert np.abs(np.subtract(found, by_profile)).max() <= 2
