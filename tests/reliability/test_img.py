"""IMG: damaged and odd images by the dozen, each used as it is displayed or refused by name; none ends a scan."""

from __future__ import annotations

import io
import os
import random
import socket
import struct
import threading
import tracemalloc
import unicodedata
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.images import decode
from lora_trainer.dataset.records import Dataset
from lora_trainer.dataset.scan import scan
from tests.fakes.runs import QUIET, contents, events, problems, toy

Figure = Callable[..., None]
WHITE = (255, 255, 255)
RED = (252, 1, 6)


# ---- images as cameras, scanners and vandals make them; what Pillow does not write is made by hand


def picture(width_px: int = 48, height_px: int = 32) -> Image.Image:
    """An RGB image without symmetry: smooth colours and a red top left corner."""
    x, y = np.meshgrid(np.linspace(40, 200, width_px), np.linspace(20, 180, height_px))
    image = Image.fromarray(np.stack([y * 0 + 60, x, y], axis=-1).astype(np.uint8))
    image.paste("red", (0, 0, 8, 4))
    return image


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(
    width_px: int, height_px: int, depth: int, colour: int, rows: bytes, *chunks: bytes
) -> bytes:
    """A PNG made by hand, for what Pillow does not write."""
    header = struct.pack(">IIBBBBB", width_px, height_px, depth, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", header), *chunks, chunk(b"IDAT", zlib.compress(rows))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def stored_for(orientation: int, upright: Image.Image) -> Image.Image:
    """How a camera stores `upright` under an EXIF orientation (the inverse of showing it)."""
    turn = Image.Transpose
    inverse = {
        1: None,
        2: turn.FLIP_LEFT_RIGHT,
        3: turn.ROTATE_180,
        4: turn.FLIP_TOP_BOTTOM,
        5: turn.TRANSPOSE,
        6: turn.ROTATE_90,
        7: turn.TRANSVERSE,
        8: turn.ROTATE_270,
    }[orientation]
    return upright if inverse is None else upright.transpose(inverse)


def cmyk_profile(cyan: tuple[int, int, int]) -> bytes:
    """A CMYK profile that shows cyan ink as this Lab colour, any other mixture as gray."""
    white, gray, black = (255, 128, 128), (128, 128, 128), (0, 128, 128)
    inks = {0b0000: white, 0b1000: cyan, 0b1111: black}
    table = b"".join(bytes(inks.get(mixture, gray)) for mixture in range(16))
    identity = bytes(range(256))
    matrix = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    lut = b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + matrix + identity * 4 + table + identity * 3
    point = b"XYZ " + bytes(4) + struct.pack(">3i", 63190, 65536, 54061)
    text = b"text" + bytes(4) + b"x\0\0\0"
    parts = [(b"A2B0", lut), (b"wtpt", point), (b"desc", text), (b"cprt", text)]
    offset = 128 + 4 + 12 * len(parts)
    directory, body = struct.pack(">I", len(parts)), b""
    for kind, data in parts:
        padded = data.ljust(-(-len(data) // 4) * 4, b"\0")
        directory += kind + struct.pack(">II", offset + len(body), len(data))
        body += padded
    header = struct.pack(
        ">I4sI4s4s4s12s4s4sIIIQI3iI",
        offset + len(body), b"lcms", 0x02400000, b"prtr", b"CMYK", b"Lab ", bytes(12),
        b"acsp", b"APPL", 0, 0, 0, 0, 0, 63190, 65536, 54061, 0,
    )  # fmt: skip
    return header.ljust(128, b"\0") + directory + body


# ---- cases


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file, and what the scan must say: code and reason of a refusal, each as it begins, or the notes
    on a used one, by kind.

    `size_px` is that as displayed, `corner` the colour of its pixel (2, 2) within 3 of 255.
    """

    data: bytes
    refused: str = ""
    reason: str = ""
    notes: tuple[str, ...] = ()
    size_px: tuple[int, int] | None = None
    corner: tuple[int, int, int] | None = None


def img_01_02() -> dict[str, Case]:
    """Ordinary files, and those that cannot be decoded, with the reason."""
    found = {
        kind: Case(data=encoded(picture(), kind), size_px=(48, 32), corner=colour)
        for kind, colour in {
            **dict.fromkeys(("PNG", "BMP", "TIFF"), (255, 0, 0)),
            **dict.fromkeys(("GIF", "JPEG", "WEBP", "AVIF")),
        }.items()
    }
    whole = encoded(picture())
    at = whole.index(b"IDAT") + 20  # a bit of its pixels
    flipped = whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
    reasons = {
        "ends early": encoded(picture(200, 150), "JPEG")[:-400],
        "is damaged": flipped,
        "is empty (0 bytes)": b"",
        "is not an image (looks like HTML)": b"\n  <HTML><body>",
        "is a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid",
        "is not an image (looks like text)": b"just some words\n",
        "is a HEIC image": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
        "is a video": b"\0\0\0\x20ftypisom\0\0\2\0",
        "is not an image of a known kind": b"%!PS-Adobe-3.0 EPSF-3.0\n\0",
    }
    for reason, data in reasons.items():
        code = "IMG-01" if reason == "ends early" else "IMG-02"
        found[reason] = Case(data=data, refused=code, reason=reason)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        noise = random.Random(kind).randbytes(60 * 44 * 3)
        data = encoded(Image.frombytes("RGB", (60, 44), noise), kind)
        cuts = {f"{size} bytes": data[:size] for size in (4, 30, len(data) // 2, len(data) - 40)}
        for name, part in {**cuts, "zeros": bytes(len(data)), "no head": data[8:]}.items():
            found[f"{kind.lower()} {name}"] = Case(data=part, refused="IMG-0")
    return found


def with_exif(orientation: int, kind: str) -> Case:
    exif = Image.Exif()
    exif[274] = orientation
    upright = picture()
    real = orientation in range(1, 9)
    stored = stored_for(orientation, upright) if real else upright
    notes = () if real or orientation == 0 else ("exif",)
    lossless = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(stored, kind, exif=exif, **lossless)
    corner = upright.getpixel((2, 2)) if kind != "JPEG" else None
    assert corner is None or isinstance(corner, tuple)
    return Case(data=data, notes=notes, size_px=upright.size, corner=corner)


def img_03() -> dict[str, Case]:
    """Orientations 0 to 8 and beyond, one in each format, and EXIF data that is none."""
    asked = [("PNG", number) for number in (*range(9), 99)]
    asked += [("JPEG", 6), ("WEBP", 8), ("TIFF", 5)]
    found = {f"{kind.lower()} orientation {n}": with_exif(n, kind) for kind, n in asked}
    draw = random.Random(3)
    for kind in ("PNG", "JPEG", "WEBP"):
        garbage = b"Exif\0\0" + draw.randbytes(80)
        data = encoded(picture(), kind, exif=garbage)
        found[f"{kind.lower()} garbage"] = Case(data=data, notes=("exif",), size_px=(48, 32))
    cut_off = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x0e\x01\x02\0\xff\0\0\0\x1a\0\0\0"
    data = encoded(picture(), "JPEG", exif=cut_off)
    return {**found, "a warning of Pillow": Case(data=data, notes=("exif",), size_px=(48, 32))}


def img_04_05() -> dict[str, Case]:
    """Transparency on white, and told; depths and inks scaled, converted, or refused where the range is not known."""
    half = picture().convert("RGBA")
    half.putalpha(Image.new("L", half.size, 0))
    palette = Image.new("P", (20, 20), 0)
    rows = (b"\0" + b"\x80\x01" * 16) * 16
    hidden = png(16, 16, 16, 0, rows, chunk(b"tRNS", b"\x80\x01"))
    # Pillow leaves the transparent colour in the file's depth, where no 8-bit pixel has it.
    colour = b"\x80\x01\x12\x34\xff\xf0"
    other_depths = {
        "rgb 16": (2, 16, b"\0" + colour * 16, colour),
        "gray 4": (0, 4, b"\0" + b"\x22" * 8, b"\0\x02"),
        "gray 2": (0, 2, b"\0" + b"\xaa" * 4, b"\0\x02"),
    }
    transparent = {
        f"{name} tRNS": Case(
            data=png(16, 16, depth, kind, row * 16, chunk(b"tRNS", mark)),
            notes=("depth", "alpha") if depth == 16 else ("alpha",),
            corner=WHITE,
        )
        for name, (kind, depth, row, mark) in other_depths.items()
    }
    rgb_rows = b"".join(b"\0" + b"\x40\x40" * 48 for _ in range(16))
    inks = Image.new("CMYK", (20, 20), (255, 0, 0, 0))
    profile = cmyk_profile((136, 208, 195))
    values = Image.fromarray(np.ones((20, 20), np.float32))
    return transparent | {
        "rgba": Case(data=encoded(half), notes=("alpha",), corner=WHITE),
        "gif": Case(data=encoded(palette, "GIF", transparency=0), notes=("alpha",), corner=WHITE),
        "gray 16 tRNS": Case(data=hidden, notes=("depth", "alpha"), corner=WHITE),
        "opaque alpha": Case(data=encoded(picture().convert("RGBA")), corner=(255, 0, 0)),
        "rgb 16": Case(data=png(16, 16, 16, 2, rgb_rows), notes=("depth",), corner=(64, 64, 64)),
        "one bit": Case(data=encoded(Image.new("1", (20, 20), 1)), corner=WHITE),
        "cmyk": Case(data=encoded(inks, "TIFF"), notes=("cmyk-profile",), corner=(0, 255, 255)),
        "profile": Case(
            data=encoded(inks, "TIFF", icc_profile=profile), notes=("cmyk",), corner=RED
        ),
        "broken profile": Case(
            data=encoded(inks, "JPEG", icc_profile=profile[:200]), notes=("cmyk-profile",)
        ),
        "float": Case(data=encoded(values, "TIFF"), refused="IMG-05"),
        "big endian": Case(data=big_endian_tiff(0x1234), notes=("depth",), corner=(18, 18, 18)),
    }


def big_endian_tiff(value: int) -> bytes:
    """Return gray pixels of 16 bits, the most significant byte first."""
    tags = [(256, 16), (257, 16), (258, 16), (259, 1), (262, 1), (273, 110), (277, 1), (279, 512)]
    body = b"".join(struct.pack(">HHII", tag, 4, 1, count) for tag, count in tags)
    header = b"MM\0*\0\0\0\x08" + struct.pack(">H", len(tags)) + body + bytes(4)
    return header.ljust(110, b"\0") + struct.pack(">H", value) * 256


def img_06() -> dict[str, Case]:
    """Animations: their first frame, told."""
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "lime", "blue")]
    options = {"save_all": True, "append_images": frames[1:]}
    found = {
        f"animated {kind.lower()}": Case(
            data=encoded(frames[0], kind, **options), notes=("animated",), corner=(255, 0, 0)
        )
        for kind in ("GIF", "WEBP", "PNG", "TIFF")
    }
    previews = encoded(picture(), "MPO", save_all=True, append_images=[picture(24, 16)])
    return {**found, "previews of a camera": Case(data=previews, size_px=(48, 32))}


def img_07() -> dict[str, Case]:
    """Bombs, which are refused from their headers, and sizes nothing can be learned from."""
    pixels = (b"\0" + bytes(16)) * 16
    text = b"Comment\0\0" + zlib.compress(bytes(65 << 20), 9)
    found = {
        "25000x25000": Case(data=png(25_000, 25_000, 8, 2, b"\0"), refused="IMG-07"),
        "gif": Case(data=b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"\x2c"
                    + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x08\x00;", refused="IMG-07"),
        "bmp": Case(data=b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, 60000, 60000, 1,
                    24, 0, 0, 0, 0, 0, 0), refused="IMG-07"),
        "text of 65 MB": Case(data=png(16, 16, 8, 0, pixels, chunk(b"zTXt", text)), refused="IMG-02"),
        "1x4000": Case(data=encoded(Image.new("RGB", (1, 4000))), refused="IMG-07"),
        "16x330": Case(data=encoded(Image.new("RGB", (16, 330))), refused="IMG-07"),
        "16x320": Case(data=encoded(Image.new("RGB", (16, 320))), size_px=(16, 320)),
    }  # fmt: skip
    inflating = png(16, 16, 8, 0, pixels + bytes(64 << 20))
    return {**found, "pixels of 64 MB behind 16x16": Case(data=inflating, size_px=(16, 16))}


def scanned(folder: Path, **settings: float) -> Dataset:
    chosen = DataSettings(max_bad_fraction=1.0).model_copy(update=settings)
    return scan(folder, settings=chosen)


@pytest.mark.parametrize("group", [img_01_02, img_03, img_04_05, img_06, img_07])
def test_img_01_02_03_04_05_06_07_each_is_used_as_displayed_or_refused_by_name(
    group: Callable[[], dict[str, Case]], tmp_path: Path, figure: Figure
) -> None:
    cases = group()
    Image.new("RGB", (32, 32)).save(tmp_path / "good.png")
    for name, case in cases.items():
        (tmp_path / f"{name}.png").write_bytes(case.data)
    before = contents(tmp_path)
    dataset = scanned(tmp_path)
    assert contents(tmp_path) == before, "a scan only reads"
    used = {record.name: record for record in dataset.records}
    said: dict[str, list[Any]] = {}
    for finding in dataset.findings:
        said.setdefault(finding.file or "", []).append(finding)
    for name, case in cases.items():
        file = f"{name}.png"
        errors = [row for row in said.get(file, []) if row.severity == "error"]
        assert [row.code[: len(case.refused)] for row in errors] == (
            [case.refused] if case.refused else []
        ), name
        assert (file in used) != bool(case.refused), name
        if case.refused:
            assert errors[0].what.startswith(case.reason) and errors[0].advice, name
            continue
        kinds = sorted(row.kind for row in said.get(file, []) if row.kind != "duplicate")
        assert kinds == sorted(case.notes), name
        shown = decode(tmp_path / file, settings=DataSettings()).image
        assert (used[file].width_px, used[file].height_px) == shown.size
        assert case.size_px in (None, shown.size), name
        if case.corner is not None:
            difference = np.subtract(shown.getpixel((2, 2)), case.corner)
            assert np.abs(difference).max() <= 3, name
    figure("bad_inputs", tried=len(cases), handled=len(cases), crashes=0, hangs=0)


def test_img_01_too_many_are_refused_before_training_and_a_few_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, quiet = toy(tmp_path, images=18).with_base(), {**QUIET, "output__save_every_steps": 0}
    for name in ("x.png", "y.jpg", "z.webp"):
        (place.dataset / name).write_bytes(b"")
    capsys.readouterr()
    assert place.train(steps=1, **quiet) == 3
    refused = capsys.readouterr().err
    assert "3 of 21 images" in refused and refused.count("\n") == 1
    assert all(name in refused for name in ("x.png is", "y.jpg is", "z.webp is"))
    assert not place.runs.exists()
    (place.dataset / "x.png").unlink()
    assert place.train(steps=1, **quiet) == 0
    (started,) = events(place.run, "run_started")
    assert started["images"] + started["validation_images"] == 18
    assert [row["severity"] for row in problems(place.run)].count("error") == 2


def test_img_08_names_that_nearly_clash_are_kept_apart_and_told(
    tmp_path: Path, figure: Figure
) -> None:
    composed, decomposed = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    names = ["a.png", "a.jpg", "A.PNG", f"{composed}.png", f"{decomposed}.png", "copy.png"]
    for index, name in enumerate(names[:-1]):
        noise = np.random.default_rng(index).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / name, "PNG")
    (tmp_path / "copy.png").write_bytes((tmp_path / "A.PNG").read_bytes())
    (tmp_path / "a.txt").write_text("whose caption is this")
    dataset = scanned(tmp_path)
    samples = {record.name: record.sample_ids()[0] for record in dataset.records}
    assert set(samples) == set(names) and len(set(samples.values())) == len(names)
    entries = {record.content_hash for record in dataset.records}
    assert len(entries) == len(names) - 1, "only the copy shares an entry"
    kinds = {finding.kind: finding for finding in dataset.findings if finding.code == "IMG-08"}
    assert "A.PNG, a.jpg, a.png" in kinds["ambiguous-caption"].what
    assert kinds["duplicate"].file == "copy.png"
    figure("bad_inputs", tried=len(names), handled=len(names), crashes=0, hangs=0)


def test_img_09_what_is_no_regular_file_is_named_and_never_opened(
    tmp_path: Path, figure: Figure
) -> None:
    folder, outside = tmp_path / "data", tmp_path / "outside.png"
    folder.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    for path, colour in ((outside, "red"), (other / "x.png", "lime")):
        Image.new("RGB", (32, 32), colour).save(path)
    Image.new("RGB", (32, 32), "blue").save(folder / "good.png")
    (folder / "dangling.png").symlink_to(tmp_path / "nowhere.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    (folder / "device.png").symlink_to("/dev/zero")
    (folder / "folder.png").mkdir()
    (folder / "linked.png").symlink_to(outside)
    for name, target in (("again", folder), ("above", tmp_path), ("linked", other)):
        (folder / name).symlink_to(target)
    for name in ("pipe.png", "pipe.txt"):
        os.mkfifo(folder / name)
    with socket.socket(socket.AF_UNIX) as listener, chdir(folder):
        listener.bind("socket.png")
    dataset = scanned(folder)
    errors = {row.file: row.what for row in dataset.findings if row.severity == "error"}
    kinds = dict.fromkeys(("dangling", "loop", "device"), "a link to no file")
    kinds |= dict.fromkeys(("pipe", "socket"), "a pipe, socket or device") | {"folder": "a folder"}
    bad = {f"{name}.png" for name in kinds}
    assert errors == {
        f"{name}.png": f"is {kind}, not a regular file" for name, kind in kinds.items()
    }
    named = {row.file for row in dataset.findings if row.code == "IMG-09"}
    links = {"linked.png", "linked", "above", "again/", "above/"}
    assert named == bad | links | {"pipe.txt"}
    assert {record.name for record in dataset.records} == {"good.png", "linked.png", "linked/x.png"}
    figure("bad_inputs", tried=len(named), handled=len(named), crashes=0, hangs=0)


# ---- one file, decoded


def decoded(folder: Path, data: bytes, **settings: Any) -> Any:
    (folder / "a.png").write_bytes(data)
    return decode(folder / "a.png", settings=DataSettings(**settings))


def fault(path: Path, **settings: Any) -> str:
    """Return the code of the refusal of a file."""
    with pytest.raises(InputError) as caught:
        decode(path, settings=DataSettings(**settings))
    assert str(path) in caught.value.found and caught.value.fix
    return str(vars(caught.value)["code"])


def test_img_04_transparency_is_put_on_the_background(tmp_path: Path) -> None:
    half_transparent = picture().convert("RGBA")
    half_transparent.putalpha(Image.new("L", half_transparent.size, 0))
    half_transparent.paste((10, 20, 30, 255), (0, 0, 24, 32))
    half_transparent.paste((0, 0, 0, 128), (40, 0, 48, 32))
    rgb = (16, 32, 48)
    found = decoded(tmp_path, encoded(half_transparent), alpha_background="#102030")
    assert found.alpha is not None and found.alpha.getextrema() == (0, 255)
    assert found.image.getpixel((5, 5)) == (10, 20, 30)
    assert found.image.getpixel((30, 5)) == rgb
    blended = np.asarray(found.image.getpixel((44, 5)))
    assert np.abs(blended - np.asarray(rgb) * 127 / 255).max() <= 1


def test_img_04_a_background_that_is_no_colour_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"data\.alpha_background='whit'"):
        decoded(tmp_path, encoded(picture()), alpha_background="whit")
    clear = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    found = decoded(tmp_path, encoded(clear), alpha_background="#ff000080")
    assert found.image.getpixel((5, 5)) == (255, 0, 0), "its own transparency is left out"


def test_img_05_gray_of_16_bits_is_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 1 << 20).astype(np.uint16).reshape(1024, 1024)
    data = encoded(Image.fromarray(values))
    tracemalloc.start()
    found = decoded(tmp_path, data)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 6 * values.size, "no copy in 32 bits"
    assert found.notes == ("depth: 16 bits per channel are scaled to 8",)
    gray = np.asarray(found.image)[..., 0]
    assert (gray == np.round(values / 257)).all()


def test_img_07_the_limit_is_the_setting_in_both_directions(tmp_path: Path) -> None:
    before = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    path = tmp_path / "a.png"
    for kind in ("PNG", "WEBP", "TIFF", "GIF", "BMP", "JPEG", "AVIF"):
        path.write_bytes(encoded(picture(), kind))
        assert fault(path, max_megapixels=0.001) == "IMG-07"
    exact = decoded(tmp_path, encoded(picture()), max_megapixels=48 * 32 / 1e6)
    assert exact.image.size == (48, 32)
    # Above Pillow's own limit of 179 megapixels the image is tried, and found cut.
    path.write_bytes(png(25_000, 25_000, 8, 2, b"\0"))
    assert fault(path, max_megapixels=700) in ("IMG-01", "IMG-02")
    assert (Image.MAX_IMAGE_PIXELS, list(warnings.filters)) == before


def test_img_09_a_file_that_went_is_not_opened_and_a_pipe_never(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    for make in (lambda: None, lambda: path.symlink_to(path), lambda: os.mkfifo(path)):
        make()
        assert fault(path) == "IMG-09"
        path.unlink(missing_ok=True)


def test_img_what_is_process_wide_is_used_by_one_thread_at_a_time(
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
        list(pool.map(lambda _: decode(tmp_path / "a.png", settings=DataSettings()), range(8)))
    assert most == [1]
