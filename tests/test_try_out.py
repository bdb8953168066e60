"""`lora-train sample`: images of a run or a file, with the base it was trained on or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.fakes.runs import Toy, run_cli, toy


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


def apart(first: Path, second: Path) -> int:
    with Image.open(first) as one, Image.open(second) as other:
        return int(np.abs(np.asarray(one, np.int16) - np.asarray(other, np.int16)).max())


def test_a_run_draws_what_its_samples_showed(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    out = tmp_path / "out"
    prompts = ["--prompt", "a toy", "--prompt", "another"]
    assert sample(place.run, *prompts, "--output", out) == 0
    files = [out / "toy-1234.png", out / "toy-1235.png"]
    assert sorted(out.iterdir()) == files
    assert capsys.readouterr().out.split() == [str(file) for file in files]
    samples = place.run / "samples"
    assert apart(files[0], samples / "step-00000006" / "00.png") <= 2
    assert apart(files[0], samples / "step-00000000" / "00.png") > 10


def test_strength_0_is_the_base(place: Toy, tmp_path: Path) -> None:
    assert sample(place.run, "--prompt", "a toy", "--strength", "0", "--output", tmp_path) == 0
    base = place.run / "samples" / "step-00000000" / "00.png"
    assert apart(tmp_path / "toy-1234.png", base) <= 2


def test_strengths_share_base_and_seed(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["--prompt", "a toy", "--prompt", "another"]
    capsys.readouterr()
    strengths = ["--strength", "0", "--strength", "1"]
    assert sample(place.run, *prompts, *strengths, "--output", tmp_path) == 0
    names = [f"toy-{seed}-x{strength}.png" for seed in (1234, 1235) for strength in (0, 1)]
    assert capsys.readouterr().out.split() == [str(tmp_path / name) for name in names]
    samples = place.run / "samples"
    assert apart(tmp_path / names[0], samples / "step-00000000" / "00.png") <= 2
    assert apart(tmp_path / names[1], samples / "step-00000006" / "00.png") <= 2
    assert apart(tmp_path / names[2], tmp_path / names[3]) > 10


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


def test_a_file_without_metadata_needs_the_base(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(place.run / "toy.safetensors"), bare)
    capsys.readouterr()
    assert sample(bare, "--prompt", "a toy") == 2
    assert "--base" in capsys.readouterr().err
    assert sample(bare, "--prompt", "a toy", "--base", place.base) == 0
    assert (tmp_path / "samples" / "bare-1234.png").is_file()


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


def test_a_folder_with_brackets_in_its_name_is_printed_as_it_is(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    out = tmp_path / "[odd] [/red]"
    assert sample(place.run, "--prompt", "a toy", "--output", out) == 0
    assert capsys.readouterr().out.strip() == str(out / "toy-1234.png")


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000, "5", "null"])
def test_settings_of_a_file_that_cannot_be_read_are_not_stated(
    text: str, place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, tensors = tmp_path / "odd.safetensors", load_file(place.run / "toy.safetensors")
    save_file(tensors, file, metadata={"lora_train.settings": text})
    assert sample(file, "--prompt", "a toy") == 2
    assert "does not say which base it was trained on" in capsys.readouterr().err
