"""`bench`: which trainings are compared, what a row says, and that a failing one ends no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lora_trainer.cli import main
from lora_trainer.cli.measure import bench_table
from lora_trainer.common.errors import RequestError
from lora_trainer.measuring import bench as bench_module
from lora_trainer.measuring.bench import BenchRow, Variant, bench, variants
from lora_trainer.run.prepare import Request, prepare
from tests.fakes.runs import SETTINGS, Toy, toy


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("bench")).with_base()


def request(place: Toy, **settings: Any) -> Request:
    given = {key.replace("__", "."): value for key, value in settings.items()}
    overrides = {**SETTINGS, "base.model": str(place.base), **given}
    overrides = {key: value for key, value in overrides.items() if "every" not in key}
    return Request(dataset=place.dataset, overrides=overrides)


def test_the_variants_differ_in_one_setting_from_the_plan(place: Toy) -> None:
    prepared = prepare(request(place, train__batch_size=6, memory__micro_batch=2))
    first, *others = variants(prepared)
    assert first.settings == {}
    assert all(len(each.settings) == 1 for each in others)
    tried = [each.settings.get("memory.micro_batch") for each in others]
    assert [value for value in tried if value] == [1, 4, 6], "2 is what is planned"
    sides = [
        each.settings["data.resolution"] for each in others if "data.resolution" in each.settings
    ]
    assert sides, "a smaller resolution is tried"
    assert all(side < 16 and side % prepared.facts.bucket_step_px == 0 for side in sides)


def test_rows_are_what_trainings_of_their_own_measured(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["bench", str(place.dataset), "--base", str(place.base), "--steps", "2", "--json"]
    line += ["--only", "memory.micro_batch"]
    for key, value in {**SETTINGS, "train.batch_size": 2}.items():
        line += ["--set", f"{key}={json.dumps(value)}"]
    before = sorted(path.name for path in place.folder.iterdir())
    assert main.run(line) == 0
    planned, single = json.loads(capsys.readouterr().out)
    assert (planned["name"], single["name"]) == ("as planned", "memory.micro_batch=1")
    for row in (planned, single):
        assert row["failure"] is None
        assert row["images_per_s"] == pytest.approx(2 / row["seconds_per_step"])
        assert row["peak_bytes"] > 50 << 20, "a process with torch in it"
        assert row["predicted_bytes"] > 0
    assert planned["cached_images_per_s"] > 0, "the first training fills the caches"
    assert single["cached_images_per_s"] is None, "the second finds them"
    assert sorted(path.name for path in place.folder.iterdir()) == before, "nothing is left"


def test_a_training_that_fails_is_a_row(place: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Variant(name="broken", settings={"adapter.rank": 0})
    monkeypatch.setattr(bench_module, "variants", lambda _prepared: iter([broken]))
    (row,) = bench(request(place), steps=1)
    assert row.seconds_per_step is None
    assert row.failure is not None
    assert "adapter.rank" in row.failure


def test_what_cannot_be_measured_is_refused(place: Toy) -> None:
    with pytest.raises(RequestError, match="--steps 0"):
        bench(request(place), steps=0)
    with pytest.raises(RequestError, match=r"does not vary adapter.rank.*data.resolution"):
        bench(request(place), steps=1, only=["adapter.rank"])


def test_the_table_compares_with_the_plan(tmp_path: Path) -> None:
    rows = [
        BenchRow(
            name="as planned",
            settings={},
            seconds_per_step=2.0,
            images_per_s=2.0,
            peak_bytes=1 << 30,
        ),
        BenchRow(name="faster", settings={"a.b": 1}, seconds_per_step=1.0, images_per_s=4.0),
        BenchRow(name="broken", settings={"a.b": 2}, failure="error: no memory"),
    ]
    console = Console(width=100, record=True, file=(tmp_path / "out").open("w"))
    console.print(bench_table(rows))
    console.file.close()
    lines = console.export_text().splitlines()
    assert "1.00x" in lines[1]
    assert "1.00 GiB" in lines[1]
    assert "2.00x" in lines[2]
    assert lines[-1] == "broken: error: no memory"
