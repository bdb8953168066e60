"""Decoding: every odd image of FAULTS IMG-01..09, and what is remembered of a good one."""

from __future__ import annotations

import io
import json
import os
import signal
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.files import sha256_bytes
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.captions import CaptionText
from lora_trainer.dataset.images import (
    DecodedImage,
    ImageDecodeError,
    background_rgb,
    decode,
    measure,
    verify,
)
from lora_trainer.dataset.inspect_image import DatasetMemo
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
    assert not found.transparent
    difference = np.asarray(found.image, dtype=int) - np.asarray(picture(), dtype=int)
    lossless = kind in ("PNG", "BMP", "TIFF")
    assert np.abs(difference).max() == 0 if lossless else np.abs(difference).mean() < 12


def test_the_name_does_not_decide_the_format(tmp_path: Path) -> None:
    assert decoded(tmp_path, encoded(picture(), "WEBP"), name="a.jpg").image.size == (48, 32)


# --- IMG-01, IMG-02: cut and damaged files


@pytest.mark.parametrize(
    "data",
    [
        encoded(picture(200, 150), "JPEG")[:-400],
        encoded(picture(200, 150), "JPEG", progressive=True)[:-400],
        encoded(picture(200, 150))[:-40],
        encoded(picture(200, 150), "WEBP")[:-40],
        encoded(picture(200, 150), "GIF")[:-200],
        encoded(picture(200, 150), "BMP")[:-200],
        encoded(picture(200, 150), "TIFF", compression="tiff_lzw")[:-200],
    ],
)
def test_a_cut_file_is_named(tmp_path: Path, data: bytes) -> None:
    assert fault(tmp_path, data).code in ("IMG-01", "IMG-02")


def test_a_cut_jpeg_ends_early(tmp_path: Path) -> None:
    found = fault(tmp_path, encoded(picture(200, 150), "JPEG")[:-400], name="a.jpg")
    assert found.code == "IMG-01"
    assert found.reason.startswith("ends early")
    assert fault(tmp_path, encoded(picture(), "JPEG")[:30]).code in ("IMG-01", "IMG-02")


def test_a_flipped_byte_in_a_png_is_found(tmp_path: Path) -> None:
    data = bytearray(encoded(picture()))
    data[data.index(b"IDAT") + 20] ^= 0x10
    found = fault(tmp_path, bytes(data))
    assert (found.code, found.reason[:10]) == ("IMG-02", "is damaged")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty (0 bytes)"),
        (b"<!DOCTYPE html><html>404</html>", "is not an image (looks like HTML)"),
        (b"\n  <html><body>", "is not an image (looks like HTML)"),
        (b'<?xml version="1.0"?><svg/>', "is not a bitmap (looks like SVG or XML)"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer"),
        (b"just some words\n", "is not an image (looks like text)"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "is a HEIC image"),
        (b"\0\0\0\x20ftypisom\0\0\2\0", "is a video"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "is a JPEG XL image"),
        (b"%PDF-1.7\n%\xff", "is not an image (looks like PDF)"),
        (b"PK\x03\x04\x14\0", "is not an image (looks like an archive)"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n\0", "is not an image of a known"),
        (bytes(1000), "is not an image of a known kind"),
    ],
)
def test_what_is_no_picture_is_told_by_its_first_bytes(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    found = fault(tmp_path, data, name="a.jpg")
    assert found.reason.startswith(reason)
    assert found.code == "IMG-02"


# --- IMG-03: orientation


def test_a_warning_of_pillow_becomes_a_note(tmp_path: Path) -> None:
    cut_off = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x0e\x01\x02\0\xff\0\0\0\x1a\0\0\0"
    found = decoded(tmp_path, encoded(picture(), "JPEG", exif=cut_off), name="a.jpg")
    assert found.notes
    assert all(note.startswith("exif: ") for note in found.notes)


# --- IMG-04: transparency


def half_transparent() -> Image.Image:
    image = picture().convert("RGBA")
    image.putalpha(Image.new("L", image.size, 0))
    image.paste((10, 20, 30, 255), (0, 0, 24, 32))
    image.paste((0, 0, 0, 128), (40, 0, 48, 32))
    return image


@pytest.mark.parametrize(
    ("background", "rgb"), [("white", (255, 255, 255)), ("#102030", (16, 32, 48))]
)
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_transparency_is_put_on_the_background(
    tmp_path: Path, kind: str, background: str, rgb: tuple[int, int, int]
) -> None:
    settings = DataSettings(alpha_background=background)
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    found = decoded(tmp_path, encoded(half_transparent(), kind, **options), settings)
    assert found.transparent
    assert found.notes[0].startswith("alpha: ")
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
        assert found.transparent, name
        assert found.image.getpixel((3, 3)) == (0, 0, 0), name
        assert found.image.getpixel((3, 12)) != (0, 0, 0), name


def test_a_background_that_is_no_colour_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"data\.alpha_background='whit'"):
        decoded(tmp_path, encoded(picture()), DataSettings(alpha_background="whit"))
    assert background_rgb(DataSettings(alpha_background="#ff000080")) == (255, 0, 0)


# --- IMG-05: other pixel formats


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_gray_is_scaled_not_clipped(tmp_path: Path, kind: str) -> None:
    values = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    found = decoded(tmp_path, encoded(Image.fromarray(values), kind))
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
    assert ImageCms.ImageCmsProfile(io.BytesIO(profile)).profile.xcolor_space.strip() == "CMYK"
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
    low = DataSettings(max_megapixels=0.001)
    assert fault(tmp_path, encoded(picture()), low).code == "IMG-07"
    exact = DataSettings(max_megapixels=48 * 32 / 1e6)
    assert decoded(tmp_path, encoded(picture()), exact).image.size == (48, 32)
    # Above Pillow's own limit of 179 megapixels the image is tried, and found cut.
    high = DataSettings(max_megapixels=700)
    assert fault(tmp_path, header_only(25_000, 25_000), high).code in ("IMG-01", "IMG-02")


@pytest.mark.parametrize("kind", ["WEBP", "TIFF", "GIF", "BMP", "JPEG", "AVIF"])
def test_every_format_is_limited(tmp_path: Path, kind: str) -> None:
    settings = DataSettings(max_megapixels=0.001)
    assert fault(tmp_path, encoded(picture(), kind), settings).code == "IMG-07"


def test_pillows_limit_and_pythons_warnings_are_left_as_they_were(tmp_path: Path) -> None:
    before = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    decoded(tmp_path, encoded(picture()))
    fault(tmp_path, header_only(25_000, 25_000))
    assert (Image.MAX_IMAGE_PIXELS, list(warnings.filters)) == before


# --- IMG-09 and files that change


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path)])
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "a.png"
    make(path)
    with pytest.raises(ImageDecodeError) as caught:
        decode(path, settings=SETTINGS)
    assert caught.value.code == "IMG-09"


def test_a_missing_and_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImageDecodeError, match="cannot be opened"):
        decode(tmp_path / "none.png", settings=SETTINGS)
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture()))

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ImageDecodeError, match=r"cannot be opened \(Permission denied\)"):
        decode(path, settings=SETTINGS)


def test_a_file_that_changed_since_it_was_hashed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    data = encoded(picture())
    path.write_bytes(data)
    decode(path, settings=SETTINGS, content_hash=sha256_bytes(data))
    path.write_bytes(encoded(picture(40, 40)))
    with pytest.raises(ImageDecodeError, match="changed while in use") as caught:
        decode(path, settings=SETTINGS, content_hash=sha256_bytes(data))
    assert caught.value.code == "CAP-05"


def test_control_characters_of_a_name_are_escaped_in_messages(tmp_path: Path) -> None:
    with pytest.raises(ImageDecodeError) as caught:
        decode(tmp_path / "a\x1b[31m\n.png", settings=SETTINGS)
    assert "a\\x1b[31m\\n.png" in str(caught.value)


def test_many_threads_decode_at_once(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 99
    paths = []
    for index in range(40):
        path = tmp_path / f"{index}.png"
        path.write_bytes(encoded(Image.new("RGB", (20, 20), (index, 0, 0)), exif=exif))
        paths.append(path)
    barrier = threading.Barrier(8)

    def work(path: Path) -> DecodedImage:
        if int(path.stem) < 8:
            barrier.wait()
        return decode(path, settings=SETTINGS)

    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, paths))
    assert [one.image.getpixel((0, 0)) for one in found] == [(i, 0, 0) for i in range(40)]
    assert all(len(one.notes) == 1 for one in found)
    assert list(warnings.filters) == before


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


# --- what is remembered


def test_the_memo_gives_back_what_depends_on_no_setting_that_changed(tmp_path: Path) -> None:
    for image, depends in ((half_transparent(), True), (picture(), False)):
        path = tmp_path / "a.png"
        path.write_bytes(encoded(image))
        memo = DatasetMemo(tmp_path / "cache")
        facts = verify(path, settings=SETTINGS, content_hash=sha256_bytes(path.read_bytes()))
        memo.images.put("hash", facts)
        memo.captions.put("hash", CaptionText("a cat", ("odd",), ("x", "y"))[:3])
        memo.save()
        memo = DatasetMemo(tmp_path / "cache")
        loaded = memo.images.get("hash")
        assert loaded == facts and facts.background == ("white" if depends else "")
        assert facts.measures == measure(decode(path, settings=SETTINGS).image)
        assert memo.captions.get("hash") == CaptionText("a cat", ("odd",), ("x", "y"))
        assert memo.captions.get("other") is None and memo.images.get("other") is None
        assert facts.holds_with(DataSettings(alpha_background="black")) is not depends
        assert not facts.holds_with(DataSettings(max_megapixels=0.001))


@pytest.mark.parametrize("entry", [None, 3, [], [48, 32], [48, "x", [], [], ""]])
def test_a_damaged_memo_entry_is_no_entry(entry: Any) -> None:
    memo = DatasetMemo()
    memo.images.table.put("hash", json.dumps(entry))
    memo.masks.table.put("hash", json.dumps(entry))
    assert memo.images.get("hash") is None and memo.masks.get("hash") is None
