"""Sample images of a prompt that somebody asks for while a training goes on (control/sample)."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from lora_trainer.common.errors import RequestError
from lora_trainer.reporting import sample_files
from lora_trainer.reporting.control import Control
from tests.fakes.runs import STEPS, Toy, events, last_state, problems, toy, trajectory

ASKED = "a zorble on a snowy hill"
SETTINGS = {"logging__trackers": [], "sampling__prompts": ["a toy"], "sampling__every_steps": 6}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A training of STEPS steps that can be resumed."""
    place = toy(tmp_path_factory.mktemp("asked")).with_base()
    assert place.train(**SETTINGS) == 0
    return place


def test_a_prompt_asked_for_is_drawn_and_changes_nothing_of_the_training(
    place: Toy, tmp_path: Path
) -> None:
    plain, asked = place.copy(tmp_path / "plain"), place.copy(tmp_path / "asked")
    Control(asked.run).request("sample", prompt=f" {ASKED}\n")
    for each in (plain, asked):
        assert each.train("--resume", steps=STEPS + 3, **SETTINGS) == 0
    assert trajectory(asked.run) == trajectory(plain.run)
    for name in ("adapter.safetensors", "optim.safetensors", "state.json"):
        states = [(last_state(each.run) / name).read_bytes() for each in (asked, plain)]
        assert states[0] == states[1]
    (row,) = (row for row in events(asked.run, "sample") if row["step"] == STEPS + 1)
    (image,) = row["images"]
    assert (image["prompt"], row["asked"]) == (ASKED, True)
    assert image["file"] == f"samples/step-{STEPS + 1:08d}/asked-00.png"
    assert image["seed"] == events(asked.run, "sample")[0]["images"][0]["seed"]
    assert sample_files.sample_prompt(asked.run / image["file"]) == ASKED
    with Image.open(asked.run / image["file"]) as drawn:
        assert drawn.getcolors(1) is None, "an image, not one colour"
    assert [file.name for file in sample_files.last_samples(asked.run / "samples")] == ["00.png"]
    assert not Control(asked.run).pending()


def test_a_request_that_holds_no_prompt_is_a_problem_and_the_training_goes_on(
    place: Toy, tmp_path: Path
) -> None:
    run = place.copy(tmp_path / "damaged")
    (run.run / "control").mkdir(exist_ok=True)
    (run.run / "control" / "sample").write_bytes(b"\xff\xfe\x00")
    assert run.train("--resume", steps=STEPS + 2, **SETTINGS) == 0
    assert any("is no UTF-8 text" in row["what"] for row in problems(run.run))
    assert STEPS + 1 not in {row["step"] for row in events(run.run, "sample")}


@pytest.mark.parametrize("text", ["x" * 2_001, "a\0b", "half \ud800"])
def test_a_prompt_too_long_or_no_text_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the prompt h"):
        Control(tmp_path).request("sample", prompt=text)
    assert not Control(tmp_path).pending()
