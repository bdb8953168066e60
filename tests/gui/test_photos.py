"""What a phone makes comes in as images: photographs turned and converted, frames of videos; the rest is told."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import photos
from lora_trainer.gui.server.translation import words
from PIL import Image

from lora_trainer.dataset.images import head_text
from tests.gui.conftest import tree

heif = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed (extra `phone`)")
av = pytest.importorskip("av", reason="PyAV is not installed (extra `phone`)")
SIZE = (96, 64)


def photograph(file: Path, *, turned: bool = False, description: str = "") -> None:
    """Write a HEIC file whose left half is red; `turned` says that it is to be shown a quarter turn clockwise."""
    image = Image.new("RGB", SIZE, "blue")
    image.paste((255, 0, 0), (0, 0, SIZE[0] // 2, SIZE[1]))
    exif = Image.Exif()
    exif[0x0112] = 6 if turned else 1
    if description:
        exif[0x010E] = description.encode()
    heif.from_pillow(image).save(file, quality=95, exif=exif.tobytes())


def video(file: Path, *, seconds: int = 6, rate: int = 8) -> None:
    """Write a video of a square that goes from left to right; every other look at it finds nothing."""
    with av.open(str(file), "w", format="mov") as content:
        stream: Any = content.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        for number in range(seconds * rate):
            image = Image.new("RGB", SIZE, "white")
            if number % 4 >= 2:
                image.paste((0, 0, 0), (number, 16, number + 16, 48))
            content.mux(stream.encode(av.VideoFrame.from_image(image)))
        content.mux(stream.encode())


def test_a_phone_s_files_become_images_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    photograph(tmp_path / "IMG_1.HEIC", turned=True, description="H\u00fcndin")
    photograph(tmp_path / "below/IMG_2.heic")
    (tmp_path / "IMG_1.txt").write_text("a cat")
    (tmp_path / "plain.png").write_bytes(b"as it is")
    video(tmp_path / "clip.MOV")
    found = photos.convert(tmp_path)
    files = set(tree(tmp_path))
    frames = {name for name in files if name.startswith("clip-")}
    assert files - frames == {"IMG_1.jpg", "IMG_1.txt", "below/IMG_2.jpg", "plain.png"}
    assert (found.heic, found.videos, found.frames) == (2, 1, len(frames)) and len(frames) == 12
    with Image.open(tmp_path / "IMG_1.jpg") as upright:
        assert upright.size == (SIZE[1], SIZE[0]) and 0x0112 not in upright.getexif()
        top, bottom = upright.getpixel((32, 10)), upright.getpixel((32, 86))
    assert head_text(tmp_path / "IMG_1.jpg") == "H\u00fcndin", "its own words come along"
    assert top[0] > 200 > top[2] and bottom[2] > 200 > bottom[0]
    with Image.open(tmp_path / min(frames)) as frame:
        assert frame.size == SIZE and min(frame.convert("L").tobytes()) < 60, "the crisp ones"
    said = photos.sentence(found, 3 + len(frames))
    assert said.startswith(f"2 of {3 + len(frames)} were HEIC: converted.")
    assert photos.convert(tmp_path) == photos.Converted()


def test_what_cannot_be_read_is_left_out_with_its_reason_and_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torn.mp4").write_bytes(b"\0\0\0\x18ftypmp42torn")
    (tmp_path / "torn.heic").write_bytes(b"\0\0\0\x18ftypheictorn")
    # A list of other files is not followed: a file that is not an MP4 or MOV is not opened as anything else.
    (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile /etc/passwd\n")
    found = photos.convert(tmp_path)
    assert not tree(tmp_path) and len(found.left_out) == 3 and found.images == 0
    assert all("; " in each or "send single images" in each for each in found.left_out)
    photograph(tmp_path / "a.heic")
    video(tmp_path / "a.mov", seconds=1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    missing = photos.convert(tmp_path)
    assert not tree(tmp_path)
    assert all("lora-train[phone]" in each for each in missing.left_out)


def test_a_frame_is_turned_as_the_phone_was_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Turned:
        time, rotation = 0.0, -90

        def to_image(self) -> Image.Image:
            return Image.new("RGB", SIZE)

    class Content:
        duration = None

        class streams:  # noqa: N801 - as PyAV names it
            video = (object(),)

        def decode(self, _: object) -> list[Turned]:
            return [Turned()]

    [(part, image)] = photos._frames(Content())
    assert (part, image.size) == (0, (SIZE[1], SIZE[0]))


def test_what_is_said_of_photographs_is_said_in_german() -> None:
    said = words("de").message("12 images were taken from 1 video.")
    assert said == "12 Bilder stammen aus 1 Video."
