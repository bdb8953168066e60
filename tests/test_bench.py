"""`bench`: which trainings are compared, what a row says, and that a failing one ends no other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lora_trainer.cli import main
from lora_trainer.measuring import bench
from tests.fakes.runs import SETTINGS, Toy, toy


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("bench")).with_base()


def arguments(place: Toy, *words: str, steps: int = 2, **settings: Any) -> list[str]:
    line = ["bench", str(place.dataset), "--base", str(place.base), "--steps", str(steps), *words]
    chosen = {**SETTINGS, **{key.replace("__", "."): value for key, value in settings.items()}}
    for key, value in chosen.items():
        line += ["--set", f"{key}={json.dumps(value)}"]
    return line


def test_variants_differ_in_one_setting_from_the_plan_and_are_compared_with_it(
    place: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(_request: Any, settings: Any, **_: Any) -> bench.BenchRow:
        name = next(iter(settings.items()), ("as planned",))
        row = {"name": "=".join(map(str, name)), "settings": settings}
        if settings == {"memory.micro_batch": 6}:
            return bench.BenchRow(**row, failure="error: no memory")
        speed = 2.0 if settings else 1.0
        return bench.BenchRow(**row, images_per_s=speed, peak_bytes=1 << 30)

    monkeypatch.setattr(bench, "_measure", measure)
    monkeypatch.setenv("COLUMNS", "120")
    batches = {"train__batch_size": 6, "memory__micro_batch": 2}
    assert main.run(arguments(place, "--json", **batches)) == 0
    first, *others = json.loads(capsys.readouterr().out)
    assert first["settings"] == {}
    assert all(len(each["settings"]) == 1 for each in others)
    tried = [each["settings"].get("memory.micro_batch") for each in others]
    assert [value for value in tried if value] == [1, 4, 6], "2 is what is planned"
    sides = [each["settings"].get("data.resolution") for each in others]
    assert [side for side in sides if side] == [8, 12], "smaller, and sides of buckets"
    assert main.run(arguments(place, "--only", "memory.micro_batch", **batches)) == 0
    table = capsys.readouterr().out
    rows = {line.split("  ")[0]: line for line in table.splitlines()}
    assert "1.00x" in rows["as planned"] and "1.00 GiB" in rows["as planned"]
    assert "2.00x" in rows["memory.micro_batch=1"]
    assert table.rstrip().endswith("memory.micro_batch=6: error: no memory")


def test_rows_are_what_trainings_of_their_own_measured(
    place: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: Any = ({}, {"memory.micro_batch": 1}, {"adapter.rank": 0})
    monkeypatch.setattr(bench, "variants", lambda _prepared: iter(tried))
    before = sorted(path.name for path in place.folder.iterdir())
    assert main.run(arguments(place, "--json", train__batch_size=2)) == 0
    planned, single, broken = json.loads(capsys.readouterr().out)
    assert [planned["name"], single["name"]] == ["as planned", "memory.micro_batch=1"]
    for row in (planned, single):
        assert row["failure"] is None
        assert row["images_per_s"] == pytest.approx(2 / row["seconds_per_step"])
        assert row["peak_bytes"] > 50 << 20, "a process with torch in it"
        assert row["predicted_bytes"] > 0
    assert planned["cached_images_per_s"] > 0, "the first training fills the caches"
    assert single["cached_images_per_s"] is None, "the second finds them"
    assert broken["seconds_per_step"] is None and "adapter.rank" in broken["failure"]
    assert sorted(path.name for path in place.folder.iterdir()) == before, "nothing is left"
