"""Datasets as other trainers and tools write them are read as dataset_layouts.toml expects."""

from __future__ import annotations

import io
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import ExifTags, Image, PngImagePlugin

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.config.config import build_config
from lora_trainer.dataset.buckets import placing
from lora_trainer.dataset.quality import inspect_images
from lora_trainer.dataset.records import Dataset
from lora_trainer.dataset.scan import DatasetMemo, scan

LAYOUTS: list[dict[str, Any]] = [
    layout
    for name in ("dataset_layouts.toml", "pair_layouts.toml")
    for layout in tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))[
        "layouts"
    ]
]
# What a text file cannot hold: a name that is not UTF-8, a line of 100,000 characters.
ODD_NAMES = ("sp ace.png", "\u732b.png", "a'b\"c.png", "{a|b}%s.png", os.fsdecode(b"caf\xe9.png"))
LAYOUTS += [
    {
        "case": "odd names",
        "images": ODD_NAMES,
        "files": {f"{name[:-4]}.txt": "x" for name in ODD_NAMES},
        "captions": dict.fromkeys((*ODD_NAMES[:-1], "caf\\xe9.png"), "x"),
        "findings": ("same-caption",),
    },
    {
        "case": "damaged rows in a table",
        "images": ("a.png", "b.png", "c.png", "s.png"),
        "files": {
            "metadata.jsonl": "\n".join(
                (
                    '\ufeff{"file_name": "a.png", "text": "a"}',
                    '{"file_name": "a.png", "text": ["one", " two ", ""]}',
                    *("{nonsense", '["a.png"]', '{"file_name": 3, "text": "x"}'),
                    '{"file_name": "b.png", "text": ["one", 2]}',
                    "[" * 100_000,
                    '{"file_name": "s.png", "text": "\\ud800"}',
                    '{"file_name": ".\\\\b.png", "prompt": "no", "text": "first\\nkey wins"}',
                    '{"file_name": "./c.png", "prompt": "four\u2028five"}\n',
                )
            )
        },
        "settings": {"data.caption_lines": "one"},
        "captions": {"a.png": "one", "s.png": "?", "b.png": "first key wins", "c.png": "four five"},
        "findings": (
            "bare-caption",  # of s.png, "?"
            "warning metadata CAP-02 metadata.jsonl: a.png occurs again; the last row counts",
            "warning metadata CAP-02 metadata.jsonl: line 3: not JSON (...",
            'warning metadata CAP-02 metadata.jsonl: line 4: no {"file_name": "..."}',
            'warning metadata CAP-02 metadata.jsonl: line 5: no {"file_name": "..."}',
            "warning metadata CAP-02 metadata.jsonl: line 6: no text under text, caption, prompt",
            "warning metadata CAP-02 metadata.jsonl: 1 more lines like these",
        ),
    },
]
UNSAID = ("metadata", "ignored-files", "unused-caption", "two-captions")


def saved(pixels: Image.Image, kind: str = "PNG", **saving: Any) -> bytes:
    data = io.BytesIO()
    pixels.save(data, kind, **saving)
    return data.getvalue()


def image(name: str, **saving: Any) -> bytes:
    """Return a small image whose bytes depend on its name; masks are half white."""
    colour = sum(ord(letter) * (place + 7) for place, letter in enumerate(name))
    pixels = Image.new("RGB", (48, 32), (colour % 251, colour * 7 % 241, colour * 3 % 239))
    pixels.paste((255, 255, 255), (0, 0, 20, 20))
    kind = {"jpg": "JPEG", "webp": "WEBP"}.get(name.rpartition(".")[2], "PNG")
    return saved(pixels, kind, **saving)


def png_text(**chunks: str) -> bytes:
    info = PngImagePlugin.PngInfo()
    for key, text in chunks.items():
        info.add_itxt(key, text)
    return image("1.png", pnginfo=info)


def exif(comment: bytes | None = None, description: str | None = None) -> bytes:
    tags = Image.Exif()
    if comment is not None:
        tags.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = comment
    if description is not None:
        tags[ExifTags.Base.ImageDescription] = description
    return image("1.jpg", exif=tags.tobytes())


PROMPT = "a red cat\nNegative prompt: dog\nSteps: 20"
MADE = {
    "PNG with parameters": png_text(parameters=PROMPT),
    "PNG with a workflow": png_text(prompt='{"3": {"class_type": "KSampler"}}', workflow="{}"),
    "PNG with Description": png_text(Description="a dog"),
    "JPEG with UserComment": exif(b"UNICODE\0" + PROMPT.encode("utf-16-be")),
    "JPEG with blank UserComment": exif(b"JIS\0\0\0\0\0" + b" " * 4),
    "JPEG with ImageDescription": exif(description="a red cat"),
    "black mask": saved(Image.new("L", (48, 32))),
    "white mask of 64x32": saved(Image.new("L", (64, 32), 255)),
    "gray mask of 26x16": saved(Image.new("L", (26, 16), 9)),
    "transparent image": saved(Image.new("RGBA", (20, 20), (255, 0, 0, 0))),
}


def files_of(layout: Mapping[str, Any]) -> dict[str, bytes]:
    mask = Image.new("L", (48, 32))
    mask.paste(255, (0, 0, 5, 5))
    return {
        **{name: image(name) for name in layout.get("images", ())},
        **{
            name: saved(mask, "WEBP" if name.endswith("webp") else "PNG")
            for name in layout.get("mask_images", ())
        },
        **{name: MADE[made] for name, made in layout.get("made", {}).items()},
        **{name: text.encode() for name, text in layout.get("files", {}).items()},
    }


def written(files: Mapping[str, bytes], root: Path) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def read(root: Path, settings: Mapping[str, object], memo: DatasetMemo | None = None) -> Dataset:
    data = build_config({"data.max_bad_fraction": 0.0, **settings}).data
    return scan(root, settings=data, memo=memo)


def as_line(finding: Any) -> str:
    file = f"{finding.file}:" if finding.file else ""
    parts = (finding.severity, finding.kind, finding.code, file, finding.what)
    return " ".join(filter(None, parts))


@pytest.fixture(autouse=True)
def _without_pyarrow(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Where it is installed or not, the layouts read the same."""
    if "pyarrow" not in request.node.name:
        monkeypatch.setitem(sys.modules, "pyarrow", None)


@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda one: f"{one.get('tool', 'any')}: {one['case']}"
)
def test_a_layout_is_read(layout: Mapping[str, Any], tmp_path: Path) -> None:
    files, settings = files_of(layout), layout.get("settings", {})
    root = written(files, tmp_path)
    if "error" in layout:
        with pytest.raises(LoraTrainError) as refusal:
            read(root, settings)
        assert layout["error"] in f"{refusal.value}"
        return
    dataset = read(root, settings)
    assert {one.name: one.caption for one in dataset.records} == layout["captions"]
    repeats = {one.name: one.repeats for one in dataset.records if one.repeats != 1}
    assert repeats == layout.get("repeats", {})
    masks = {
        one.name: one.mask.path.relative_to(root).as_posix() for one in dataset.records if one.mask
    }
    assert masks == layout.get("masks", {})
    references = {
        one.name: [reference.name for reference in one.references]
        for one in dataset.records
        if one.references
    }
    assert references == layout.get("references", {})
    assert [one.name for one in dataset.regularisation] == layout.get("regularisation", [])
    sources = {one.name: one.caption_source or "" for one in dataset.records}
    assert sources.items() >= layout.get("sources", {}).items()
    if "findings" in layout:
        for finding, expected in zip(dataset.findings, layout["findings"], strict=True):
            cut = len(expected) - 3 if expected.endswith("...") else None
            short = f"{finding.kind} {finding.file or ''}".strip()
            assert expected in (short, as_line(finding)) or as_line(finding)[:cut] == expected[:cut]
        return
    kinds = {finding.kind for finding in dataset.findings}
    assert kinds >= {*layout.get("said", ())}
    assert not kinds & {*layout.get("unsaid", UNSAID)}
    advice = layout.get("advice", "")
    assert not advice or any(advice in finding.advice for finding in dataset.findings)
    there = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert there == files.keys(), "nothing is written to the folder"


def test_captions_inside_images_are_remembered_apart_from_caption_files(tmp_path: Path) -> None:
    memo = DatasetMemo()
    files = {"1.png": png_text(Description="a cat"), "2.png": image("2.png"), "3.png": image("3")}
    root = written({**files, "2.txt": b'{"text": "x"}', "3.json": b'{"text": "x"}'}, tmp_path)
    expected = {"1.png": "a cat", "2.png": '{"text":"x"}', "3.png": "x"}
    for _ in range(2):
        dataset = read(root, {"data.caption_fallback": "metadata"}, memo)
        assert {one.name: one.caption for one in dataset.records} == expected
    by_name = read(root, {"data.caption_fallback": "file_name"}, memo)
    assert by_name.records[0].caption == "", "the name is a number"


def test_a_table_in_parquet_is_read_by_pyarrow(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="optional: the extra `parquet`")
    from pyarrow import parquet  # noqa: PLC0415 - after the check that it is there

    captions = {"a.png": "a cat", "b.jpg": "a dog"}
    root = written({name: image(name) for name in captions}, tmp_path)
    columns = {"file_name": list(captions), "text": [*captions.values()], "image": [b"x", b"y"]}
    parquet.write_table(pyarrow.table(columns), root / "metadata.parquet")
    assert {one.name: one.caption for one in read(root, {}).records} == captions
    (root / "metadata.parquet").write_bytes(b"PAR1")
    (problem,) = (one.what for one in read(root, {}).findings if one.kind == "metadata")
    assert problem.startswith("cannot be read")


@pytest.mark.parametrize(
    ("name", "caption"), [("10_cat", "cat"), ("2024_summer", ""), ("plain", "")]
)
def test_a_folder_of_repeats_that_is_given_itself_keeps_its_words(
    name: str, caption: str, tmp_path: Path
) -> None:
    root = written({"a.png": image("a.png")}, tmp_path / name)
    (record,) = read(root, {}).records
    assert (record.caption, record.repeats) == (caption, 1)


def test_a_crop_that_leaves_little_is_a_warning(tmp_path: Path) -> None:
    wide = saved(Image.effect_noise((640, 40), 90).convert("RGB"))
    root = written({"a.png": wide}, tmp_path)
    data = build_config({"data.max_aspect": 1.0}).data
    place_image = placing(data, resolution_px=64, step_px=8)
    dataset = scan(root, settings=data, place_image=place_image)
    (cropped,) = [
        one for one in inspect_images(dataset, settings=data).findings if one.kind == "cropped"
    ]
    assert cropped.severity == "warning" and "94%" in cropped.what


def test_a_folder_of_references_is_read_once_and_holds_no_images_to_learn(tmp_path: Path) -> None:
    names = ("a.png", "before/a.png", "references/a.png", "elsewhere/a.png")
    root = written({name: image(name) for name in names}, tmp_path)
    given = [str(root / "before"), str(root / "references")]
    dataset = read(root, {"data.reference_dirs": given})
    (first, other) = dataset.records
    assert (first.name, other.name) == ("a.png", "elsewhere/a.png")
    assert [Path(one.file) for one in first.references] == [
        root / "before/a.png",
        root / "references/a.png",
    ]
