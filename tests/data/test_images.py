"""Decoding one file: what is refused and why, what each pixel becomes. Folders of odd images: reliability/test_img."""

from __future__ import annotations

import os
import signal
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
from lora_trainer.dataset.images import decode
from tests.fakes.odd_pictures import encoded, picture, png

SETTINGS = DataSettings()


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """Nothing here may block: a pipe that is opened would, for ever."""
    signal.alarm(20)
    yield
    signal.alarm(0)


def decoded(
    folder: Path, data: bytes, settings: DataSettings = SETTINGS, name: str = "a.png"
) -> Any:
    path = folder / name
    path.write_bytes(data)
    found = decode(path, settings=settings)
    assert found.image.mode == "RGB"
    return found


def fault(folder: Path, data: bytes, settings: DataSettings = SETTINGS, name: str = "a.png") -> Any:
    with pytest.raises(InputError) as caught:
        decoded(folder, data, settings, name)
    assert str(folder / name) in caught.value.found
    assert caught.value.fix
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


# --- IMG-04: transparency


def test_transparency_is_put_on_the_background(tmp_path: Path) -> None:
    half_transparent = picture().convert("RGBA")
    half_transparent.putalpha(Image.new("L", half_transparent.size, 0))
    half_transparent.paste((10, 20, 30, 255), (0, 0, 24, 32))
    half_transparent.paste((0, 0, 0, 128), (40, 0, 48, 32))
    rgb, settings = (16, 32, 48), DataSettings(alpha_background="#102030")
    found = decoded(tmp_path, encoded(half_transparent), settings)
    assert found.alpha is not None and found.alpha.getextrema() == (0, 255)
    assert found.image.getpixel((5, 5)) == (10, 20, 30)
    assert found.image.getpixel((30, 5)) == rgb
    blended = np.asarray(found.image.getpixel((44, 5)))
    assert np.abs(blended - np.asarray(rgb) * 127 / 255).max() <= 1


def test_a_background_that_is_no_colour_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"data\.alpha_background='whit'"):
        decoded(tmp_path, encoded(picture()), DataSettings(alpha_background="whit"))
    clear = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    found = decoded(tmp_path, encoded(clear), DataSettings(alpha_background="#ff000080"))
    assert found.image.getpixel((5, 5)) == (255, 0, 0), "its own transparency is left out"


# --- IMG-05: other pixel formats


def test_16_bit_gray_is_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    found = decoded(tmp_path, encoded(Image.fromarray(values)))
    assert found.notes == ("depth: 16 bits per channel are scaled to 8",)
    gray = np.asarray(found.image)[..., 0]
    assert (gray == np.round(values / 257)).all()


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
    assert fault(tmp_path, png(25_000, 25_000, 8, 2, b"\0"), high).code in ("IMG-01", "IMG-02")
    assert (Image.MAX_IMAGE_PIXELS, list(warnings.filters)) == before


# --- IMG-09 and files that change


def test_only_whole_regular_files_with_the_bytes_that_were_hashed_are_decoded(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.png"

    def refused() -> str:
        with pytest.raises(InputError) as caught:
            decode(path, settings=SETTINGS)
        return str(vars(caught.value)["code"])

    assert refused() == "IMG-09", "missing"
    path.symlink_to(path)
    assert refused() == "IMG-09"
    path.unlink()
    os.mkfifo(path)
    assert refused() == "IMG-09"
    path.unlink()
    path.write_bytes(encoded(picture()))
    decode(path, settings=SETTINGS, content_hash=sha256_bytes(path.read_bytes()))
    with pytest.raises(InputError, match="changed while in use"):
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
