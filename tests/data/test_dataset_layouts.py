"""Datasets as other trainers have them are read as `dataset_layouts` expects; one of them trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.config.config import build_config
from lora_trainer.dataset.records import Dataset
from lora_trainer.dataset.scan import DatasetMemo, scan
from tests.data.dataset_layouts import CATDOG, LAYOUTS, NAMES, TWO, Layout, images, png_text


def written(files: dict[str, bytes], root: Path) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def read(root: Path, settings: dict[str, object], memo: DatasetMemo | None = None) -> Dataset:
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


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.tool}: {layout.case}")
def test_a_layout_is_read(layout: Layout, tmp_path: Path) -> None:
    root = written(dict(layout.files), tmp_path)
    if layout.error:
        with pytest.raises(LoraTrainError) as refusal:
            read(root, dict(layout.settings))
        assert layout.error in f"{refusal.value}"
        return
    dataset = read(root, dict(layout.settings))
    assert {one.name: one.caption or None for one in dataset.records} == dict(layout.captions)
    repeats = {one.name: one.repeats for one in dataset.records if one.repeats != 1}
    assert repeats == dict(layout.repeats)
    masks = {
        one.name: one.mask.path.relative_to(root).as_posix() for one in dataset.records if one.mask
    }
    assert masks == dict(layout.masks)
    assert {one.name for one in dataset.regularisation} == set(layout.regularisation)
    sources = {one.name: one.caption_source for one in dataset.records}
    assert {name: sources[name] for name in layout.sources} == dict(layout.sources)
    if layout.findings is not None:
        for finding, expected in zip(dataset.findings, layout.findings, strict=True):
            cut = len(expected) - 3 if expected.endswith("...") else None
            short = f"{finding.kind} {finding.file or ''}".strip()
            assert expected in (short, as_line(finding)) or as_line(finding)[:cut] == expected[:cut]
        return
    kinds = {finding.kind for finding in dataset.findings}
    assert set(layout.said) <= kinds
    assert not set(layout.unsaid) & kinds
    assert any(layout.advice in finding.advice for finding in dataset.findings) or not layout.advice
    assert {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()} == set(
        layout.files
    )


def test_captions_inside_images_are_remembered_apart_from_caption_files(tmp_path: Path) -> None:
    memo = DatasetMemo()
    files = {"1.png": png_text("1.png", Description="a cat"), **images("2.png", "3.png")}
    root = written({**files, "2.txt": b'{"text": "x"}', "3.json": b'{"text": "x"}'}, tmp_path)
    expected = {"1.png": "a cat", "2.png": '{"text": "x"}', "3.png": "x"}
    for _ in range(2):
        dataset = read(root, {"data.caption_fallback": "metadata"}, memo)
        assert {one.name: one.caption for one in dataset.records} == expected
    assert read(root, NAMES, memo).records[0].caption == "", "the name is a number"


def test_a_table_in_parquet_is_read_by_pyarrow(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="optional: the extra `parquet`")
    from pyarrow import parquet  # noqa: PLC0415 - after the check that it is there

    root = written(TWO, tmp_path)
    columns = {"file_name": list(CATDOG), "text": list(CATDOG.values()), "image": [b"x", b"y"]}
    parquet.write_table(pyarrow.table(columns), root / "metadata.parquet")
    assert {one.name: one.caption for one in read(root, {}).records} == CATDOG
    (root / "metadata.parquet").write_bytes(b"PAR1")
    (problem,) = (one.what for one in read(root, {}).findings if one.kind == "metadata")
    assert problem.startswith("cannot be read")
