"""CFG: settings that are misspelt, no JSON, contradictory or too much; each mistake at its place, at once.

What each mistake says is in tests/config; here it is said through the command line, as one line, in little
time, and nothing is begun.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fakes.runs import Toy, events, run_cli, toy

QUIET = {"sampling__every_steps": 0, "train__validate_every_steps": 0, "logging__trackers": []}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("cfg")).with_base()


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that is refused with exit code 2; return its one line."""
    capsys.readouterr()
    began_s = time.process_time()
    assert run_cli(words) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ") and "\n" not in said and "Fix: " in said
    assert time.process_time() - began_s < 5.0
    return said


WRITTEN: Mapping[str, tuple[str, str, str]] = {
    "unknown": ("a.json", '{"lerning_rate": 1}', "a.json: unknown setting 'lerning_rate'"),
    "misspelt": ("a.toml", "[train]\nstepz = 5", "a.toml: unknown setting 'train.stepz'"),
    "not JSON": ("a.json", "{steps: 5}", "a.json:1:2: not JSON"),
    "byte order mark": ("a.json", '\ufeff{"train.steps": 0}', "train.steps=0"),
    "twice": ("a.json", '{"train.steps": 5, "train.steps": 6}', "'train.steps' occurs twice"),
    "1e999": ("a.json", '{"optimizer.learning_rate": 1e999}', "optimizer.learning_rate=inf"),
    "deep": ("a.json", '{"a":' * 100_000, "a.json"),
    "deep TOML": ("a.toml", "a = " + "[" * 100_000, "a.toml"),
    "no file": ("b.json", "{}", "a.json"),
}


def test_cfg_01_02_settings_with_a_mistake_are_one_line_with_its_place(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What else a file or an assignment may hold is drawn in test_fuzz.py."""
    line = [str(place.dataset), "--base", str(place.base), "--output", str(tmp_path / "runs")]
    for kind, (name, text, said) in WRITTEN.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        asked = tmp_path / ("a.json" if kind == "no file" else name)
        flag = "--preset" if kind == "unknown" else "--config"
        assert said in refused([*line, flag, str(asked)], capsys), kind
        (tmp_path / name).unlink()
    assert "'lerning_rate'" in refused([*line, "--set", "lerning_rate=1"], capsys)
    refused([*line, "--set", "train.steps=" + "[" * 100_000], capsys)
    assert not (tmp_path / "runs").exists()


def test_cfg_03_contradictions_are_told_all_at_once(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values first, then how they go together, then what base and machine can do: each as a whole."""
    values = {"train__batch_size": 0, "data__resolution": 8, "adapter__rank": -1}
    said = refused(place.arguments(**values), capsys)
    assert all(
        name in said for name in ("train.batch_size=0", "data.resolution=8", "adapter.rank=-1")
    )
    together = {
        "adapter__rank": 1,
        "adapter__alpha": 500,
        "output__save_every_steps": 99,
        "memory__micro_batch": 9,
    }
    said = refused(place.arguments(**together), capsys)
    assert all(
        name in said
        for name in ("adapter.alpha=500", "output.save_every_steps=99", "memory.micro_batch=9")
    )
    said = refused(place.arguments(data__resolution=1001), capsys)
    assert "data.resolution=1001" in said


def test_cfg_04_a_cap_that_nothing_fits_and_no_card_are_answers_and_not_crashes(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["plan", str(place.dataset)]) == 0
    capsys.readouterr()
    assert run_cli(["plan", str(place.dataset), "--vram", "0.01"]) == 4
    assert "Fix: " in capsys.readouterr().err
    assert run_cli(["doctor"]) == 0


def test_cfg_05_a_resume_tells_each_change_and_goes_on(place: Toy) -> None:
    name = ("--name", "changes")
    assert place.train(*name, steps=2, **QUIET) == 0
    changes = {"optimizer__learning_rate": 0.01, "optimizer__schedule": "constant"}
    changes |= {"train__batch_size": 2, "train__seed": 7}
    assert place.train(*name, "--resume", steps=4, **QUIET, **changes) == 0
    (resumed,) = events(place.runs / "changes", "resumed")
    assert (resumed["exactness"], resumed["step"]) == ("CHANGED", 2)
    told = {line.split(":")[0] for line in resumed["differences"]}
    assert told >= {key.replace("__", ".") for key in changes} | {"train.steps"}
    steps = events(place.runs / "changes", "step")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert steps[-1]["lr"] == pytest.approx(0.01)
