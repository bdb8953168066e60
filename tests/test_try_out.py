"""`lora-train sample`: images of a run or a file, with the base it was trained on or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.fakes.runs import Toy, apart, run_cli, toy


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    place = toy(tmp_path_factory.mktemp("try")).with_base()
    learning: dict[str, Any] = {"optimizer__learning_rate": 0.03, "adapter__alpha": 3}
    assert place.train(**learning, logging__trackers=[]) == 0
    return place


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sample(*arguments: str | Path) -> int:
    return run_cli(["sample", *(str(argument) for argument in arguments)])


def test_a_run_draws_what_its_samples_showed_and_strengths_share_base_and_seed(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["--prompt", "a toy", "--prompt", "another"]
    capsys.readouterr()
    out = tmp_path / "[odd] [/red]"
    strengths = ["--strength", "0", "--strength", "1"]
    assert sample(place.run, *prompts, *strengths, "--output", out) == 0
    names = [f"toy-{seed}-x{strength}.png" for seed in (1234, 1235) for strength in (0, 1)]
    assert capsys.readouterr().out.splitlines() == [str(out / name) for name in names]
    samples = place.run / "samples"
    assert apart(out / names[0], samples / "step-00000000" / "00.png") <= 2
    assert apart(out / names[1], samples / "step-00000006" / "00.png") <= 2
    assert apart(out / names[2], out / names[3]) > 10


def test_a_strength_that_is_no_number_is_refused_before_anything_is_loaded(place: Toy) -> None:
    assert sample(place.run, "--prompt", "a toy", "--strength", "nan") == 2


def test_a_file_draws_with_the_base_given(place: Toy, tmp_path: Path) -> None:
    """It was trained with other sampling steps than a foreign file gets; it says so itself."""
    file = place.run / "toy.safetensors"
    assert sample(file, "--prompt", "a toy", "--base", place.base) == 0
    shown = place.run / "samples" / "step-00000006" / "00.png"
    assert apart(tmp_path / "samples" / "toy-1234.png", shown) <= 2


def test_a_file_does_not_say_where_on_a_disk_its_base_was(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert sample(place.run / "toy.safetensors", "--prompt", "a toy") in (2, 3)
    assert "--base" in capsys.readouterr().err


def test_a_run_that_has_not_finished_draws_with_its_newest_file(place: Toy, tmp_path: Path) -> None:
    copied = place.copy(tmp_path / "runs")
    (copied.run / "toy.safetensors").unlink()
    assert sample(copied.run, "--prompt", "a toy") == 0
    assert (tmp_path / "samples" / "toy-step00000004-1234.png").is_file()


def test_what_cannot_be_drawn_is_one_line(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = place.copy(tmp_path / "runs")
    for file in copied.run.glob("*.safetensors"):
        file.unlink()
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    for target, why in (
        (copied.run, "has no exported file yet"),
        (tmp_path / "empty", "not a run folder"),
        (tmp_path / "absent.safetensors", "absent.safetensors"),
    ):
        assert sample(target, "--prompt", "a toy") == 3
        error = capsys.readouterr().err
        assert why in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000, "null", None])
def test_a_file_that_does_not_say_its_base_needs_it(
    text: str | None, place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, tensors = tmp_path / "odd.safetensors", load_file(place.run / "toy.safetensors")
    save_file(tensors, file, metadata={"lora_train.settings": text} if text else None)
    assert sample(file, "--prompt", "a toy") == 2
    error = capsys.readouterr().err
    assert "does not say which base it was trained on" in error and "--base" in error
    if text is None:
        assert sample(file, "--prompt", "a toy", "--base", place.base) == 0
        assert (tmp_path / "samples" / "odd-1234.png").is_file()
