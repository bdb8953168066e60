"""CFG: settings that are misspelt, no JSON, contradictory or too much; each mistake at its place, at once.

What each mistake says is in tests/config; here it is said through the command line, as one line, in little
time, and nothing is begun.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fakes.runs import Toy, run_cli, toy


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


def test_cfg_01_02_settings_with_a_mistake_are_one_line_with_its_place(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What else a file or an assignment may hold is drawn in test_fuzz.py."""
    line = [str(place.dataset), "--base", str(place.base), "--output", str(tmp_path / "runs")]
    for flag, name, text, said in (
        ("--preset", "a.json", '{"lerning_rate": 1}', "a.json: unknown setting 'lerning_rate'"),
        ("--config", "a.json", '\ufeff{"train.steps": 0}', "train.steps=0"),
        (
            "--config",
            "b.json",
            '{"train.steps": 5, "train.steps": 6}',
            "'train.steps' occurs twice",
        ),
        ("--config", "c.json", '{"optimizer.learning_rate": 1e999}', "optimizer.learning_rate=inf"),
        ("--config", "d.json", '{"a":' * 100_000, "d.json"),
        ("--config", "e.toml", "a = " + "[" * 100_000, "e.toml"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert said in refused([*line, flag, str(tmp_path / name)], capsys), text[:80]
    assert "none.json" in refused([*line, "--config", str(tmp_path / "none.json")], capsys)
    assert "'lerning_rate'" in refused([*line, "--set", "lerning_rate=1"], capsys)
    refused([*line, "--set", "train.steps=" + "[" * 100_000], capsys)
    assert not (tmp_path / "runs").exists()


def test_cfg_03_contradictions_are_told_all_at_once(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values first, then how they go together, then what base and machine can do: each as a whole."""
    together = {"adapter__rank": 1, "adapter__alpha": 500}
    together |= {"output__save_every_steps": 99, "memory__micro_batch": 9}
    for values, named in (
        (
            {"train__batch_size": 0, "data__resolution": 8, "adapter__rank": -1},
            "train.batch_size=0 data.resolution=8 adapter.rank=-1",
        ),
        (together, "adapter.alpha=500 output.save_every_steps=99 memory.micro_batch=9"),
        ({"data__resolution": 1001}, "data.resolution=1001"),
    ):
        said = refused(place.arguments(**values), capsys)
        assert all(one in said for one in named.split())


def test_cfg_04_a_cap_that_nothing_fits_and_no_card_are_answers_and_not_crashes(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["plan", str(place.dataset)]) == 0
    capsys.readouterr()
    assert run_cli(["plan", str(place.dataset), "--vram", "0.01"]) == 4
    assert "Fix: " in capsys.readouterr().err
    assert run_cli(["doctor"]) == 0
