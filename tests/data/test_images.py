"""Decoding: every odd image of FAULTS IMG-01..09, and what is remembered of a good one."""

from __future__ import annotations

import io
import os
import signal
import struct
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.files import sha256_bytes
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.images import (
    DecodedImage,
    ImageDecodeError,
    background_rgb,
    decode,
)
from tests.fakes.odd_pictures import (
    chunk,
    cmyk_profile,
    encoded,
    header_only,
    picture,
    png,
)

SETTINGS = DataSettings()


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """Nothing here may block: a pipe that is opened would, for ever."""
    signal.alarm(20)
    yield
    signal.alarm(0)


def decoded(
    folder: Path, data: bytes, settings: DataSettings = SETTINGS, name: str = "a.png"
) -> DecodedImage:
    path = folder / name
    path.write_bytes(data)
    found = decode(path, settings=settings)
    assert found.image.mode == "RGB"
    return found


def fault(
    folder: Path, data: bytes, settings: DataSettings = SETTINGS, name: str = "a.png"
) -> ImageDecodeError:
    with pytest.raises(ImageDecodeError) as caught:
        decoded(folder, data, settings, name)
    assert str(folder / name) in caught.value.found
    assert caught.value.fix
    assert isinstance(caught.value, InputError)
    return caught.value


# --- ordinary files


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF", "JPEG", "WEBP", "AVIF"])
def test_ordinary_files_need_no_note(tmp_path: Path, kind: str) -> None:
    found = decoded(tmp_path, encoded(picture(), kind), name=f"a.{kind.lower()}")
    assert found.notes == ()
    assert found.alpha is None
    difference = np.asarray(found.image, dtype=int) - np.asarray(picture(), dtype=int)
    lossless = kind in ("PNG", "BMP", "TIFF")
    assert np.abs(difference).max() == 0 if lossless else np.abs(difference).mean() < 12


# --- IMG-01, IMG-02: cut and damaged files


def flipped(data: bytes) -> bytes:
    """Flip a bit in the pixels of a PNG."""
    at = data.index(b"IDAT") + 20
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@pytest.mark.parametrize(
    "data",
    [
        encoded(picture(200, 150))[:-40],
        encoded(picture(200, 150), "WEBP")[:-40],
        encoded(picture(200, 150), "GIF")[:-200],
        encoded(picture(200, 150), "TIFF", compression="tiff_lzw")[:-200],
    ],
)
def test_a_cut_file_is_named(tmp_path: Path, data: bytes) -> None:
    assert fault(tmp_path, data).code in ("IMG-01", "IMG-02")


@pytest.mark.parametrize(
    ("data", "code", "reason"),
    [
        (encoded(picture(200, 150), "JPEG")[:-400], "IMG-01", "ends early"),
        (flipped(encoded(picture())), "IMG-02", "is damaged"),
        (b"", "IMG-02", "is empty (0 bytes)"),
        (b"\n  <HTML><body>", "IMG-02", "is not an image (looks like HTML)"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "IMG-02", "is a Git LFS pointer"),
        (b"just some words\n", "IMG-02", "is not an image (looks like text)"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "IMG-02", "is a HEIC image"),
        (b"\0\0\0\x20ftypisom\0\0\2\0", "IMG-02", "is a video"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n\0", "IMG-02", "is not an image of a known kind"),
    ],
)
def test_what_cannot_be_decoded_is_named(
    tmp_path: Path, data: bytes, code: str, reason: str
) -> None:
    refusal = fault(tmp_path, data, name="a.jpg")
    assert (refusal.code, refusal.reason[: len(reason)]) == (code, reason)


# --- IMG-03: orientation


def test_a_warning_of_pillow_becomes_a_note(tmp_path: Path) -> None:
    cut_off = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x0e\x01\x02\0\xff\0\0\0\x1a\0\0\0"
    found = decoded(tmp_path, encoded(picture(), "JPEG", exif=cut_off), name="a.jpg")
    assert found.notes
    assert all(note.startswith("exif: ") for note in found.notes)


# --- IMG-04: transparency


@pytest.mark.parametrize(
    ("background", "rgb"), [("white", (255, 255, 255)), ("#102030", (16, 32, 48))]
)
def test_transparency_is_put_on_the_background(
    tmp_path: Path, background: str, rgb: tuple[int, int, int]
) -> None:
    half_transparent = picture().convert("RGBA")
    half_transparent.putalpha(Image.new("L", half_transparent.size, 0))
    half_transparent.paste((10, 20, 30, 255), (0, 0, 24, 32))
    half_transparent.paste((0, 0, 0, 128), (40, 0, 48, 32))
    settings = DataSettings(alpha_background=background)
    found = decoded(tmp_path, encoded(half_transparent), settings)
    assert found.alpha is not None
    assert found.image.getpixel((5, 5)) == (10, 20, 30)
    assert found.image.getpixel((30, 5)) == rgb
    blended = np.asarray(found.image.getpixel((44, 5)))
    assert np.abs(blended - np.asarray(rgb) * 127 / 255).max() <= 1


def test_a_transparent_colour_in_other_bit_depths(tmp_path: Path) -> None:
    """Pillow leaves the colour in the file's depth, where no 8-bit pixel matches it."""
    colours = np.zeros((16, 16, 3), ">u2")
    colours[:8], colours[8:] = (0x8001, 0x1234, 0xFFF0), (0x4001, 0x1234, 0xFFF0)
    grays = np.zeros((16, 16), ">u2")
    grays[:8], grays[8:] = 0x8001, 0x8100
    rows_16 = [b"".join(b"\0" + row.tobytes() for row in part) for part in (colours, grays)]
    rows_4 = (b"\0" + b"\x22" * 8) * 8 + (b"\0" + b"\x33" * 8) * 8
    rows_2 = (b"\0" + b"\xaa" * 4) * 8 + (b"\0" + b"\xff" * 4) * 8
    cases = {
        "rgb 16": png(16, 16, 16, 2, rows_16[0], chunk(b"tRNS", b"\x80\x01\x12\x34\xff\xf0")),
        "gray 16": png(16, 16, 16, 0, rows_16[1], chunk(b"tRNS", b"\x80\x01")),
        "gray 4": png(16, 16, 4, 0, rows_4, chunk(b"tRNS", b"\0\x02")),
        "gray 2": png(16, 16, 2, 0, rows_2, chunk(b"tRNS", b"\0\x02")),
    }
    black = DataSettings(alpha_background="black")
    for name, data in cases.items():
        found = decoded(tmp_path, data, black)
        assert found.alpha is not None, name
        assert found.image.getpixel((3, 3)) == (0, 0, 0), name
        assert found.image.getpixel((3, 12)) != (0, 0, 0), name


def test_a_background_that_is_no_colour_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"data\.alpha_background='whit'"):
        decoded(tmp_path, encoded(picture()), DataSettings(alpha_background="whit"))
    assert background_rgb(DataSettings(alpha_background="#ff000080")) == (255, 0, 0)


# --- IMG-05: other pixel formats


def test_16_bit_gray_is_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    found = decoded(tmp_path, encoded(Image.fromarray(values)))
    assert found.notes == ("depth: 16 bits per channel are scaled to 8",)
    gray = np.asarray(found.image)[..., 0]
    assert (gray == np.round(values / 257)).all()


def test_big_endian_16_bit_tiff(tmp_path: Path) -> None:
    values = np.full((16, 16), 0x1234, ">u2")
    tags = [(256, 16), (257, 16), (258, 16), (259, 1), (262, 1), (273, 110), (277, 1), (279, 512)]
    body = b"".join(struct.pack(">HHII", tag, 4, 1, value) for tag, value in tags)
    header = b"MM\0*\0\0\0\x08" + struct.pack(">H", len(tags)) + body + bytes(4)
    found = decoded(tmp_path, header.ljust(110, b"\0") + values.tobytes())
    assert found.image.getpixel((3, 3)) == (round(0x1234 / 257),) * 3


def test_cmyk_goes_through_its_profile(tmp_path: Path) -> None:
    source = Image.new("CMYK", (20, 20), (255, 0, 0, 0))
    profile = cmyk_profile((136, 208, 195))  # about sRGB red
    found = decoded(tmp_path, encoded(source, "TIFF", icc_profile=profile))
    assert found.notes == ("cmyk: converted from CMYK through its colour profile",)
    red, green, blue = np.asarray(found.image)[5, 5].tolist()
    assert red > 200
    assert max(green, blue) < 60


# --- IMG-06: animations


def test_the_previews_in_a_camera_jpeg_are_no_animation(tmp_path: Path) -> None:
    data = encoded(picture(), "MPO", save_all=True, append_images=[picture(24, 16)])
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "MPO"
        assert getattr(image, "n_frames", 1) == 2
    found = decoded(tmp_path, data, name="a.jpg")
    assert found.notes == ()
    assert found.image.size == (48, 32)


# --- IMG-07: sizes


def test_the_limit_is_the_setting_in_both_directions(tmp_path: Path) -> None:
    before = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    low = DataSettings(max_megapixels=0.001)
    for kind in ("PNG", "WEBP", "TIFF", "GIF", "BMP", "JPEG", "AVIF"):
        assert fault(tmp_path, encoded(picture(), kind), low).code == "IMG-07"
    exact = DataSettings(max_megapixels=48 * 32 / 1e6)
    assert decoded(tmp_path, encoded(picture()), exact).image.size == (48, 32)
    # Above Pillow's own limit of 179 megapixels the image is tried, and found cut.
    high = DataSettings(max_megapixels=700)
    assert fault(tmp_path, header_only(25_000, 25_000), high).code in ("IMG-01", "IMG-02")
    assert (Image.MAX_IMAGE_PIXELS, list(warnings.filters)) == before


# --- IMG-09 and files that change


def test_only_whole_regular_files_with_the_bytes_that_were_hashed_are_decoded(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.png"

    def refused() -> str:
        with pytest.raises(ImageDecodeError) as caught:
            decode(path, settings=SETTINGS)
        return caught.value.code

    assert refused() == "IMG-09", "missing"
    path.symlink_to(path)
    assert refused() == "IMG-09"
    path.unlink()
    os.mkfifo(path)
    assert refused() == "IMG-09"
    path.unlink()
    path.write_bytes(encoded(picture()))
    decode(path, settings=SETTINGS, content_hash=sha256_bytes(path.read_bytes()))
    with pytest.raises(ImageDecodeError, match="changed while in use"):
        decode(path, settings=SETTINGS, content_hash=sha256_bytes(b""))


def test_what_is_process_wide_is_used_by_one_thread_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(encoded(picture()))
    inside, most = [0], [0]
    usual = Image.open

    def slow(*args: Any, **options: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.02)  # time for another thread to come in
        inside[0] -= 1
        return usual(*args, **options)

    monkeypatch.setattr(Image, "open", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: decode(tmp_path / "a.png", settings=SETTINGS), range(8)))
    assert most == [1]
