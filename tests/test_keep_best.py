"""The best step is kept, and training ends once the validation loss stops falling; kills: test_options_end_to_end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from lora_trainer.common.files import read_json_object
from lora_trainer.reporting.status import read_status
from tests.fakes.runs import (
    QUIET,
    Toy,
    contents,
    events,
    last_state,
    run_cli,
    same_tensors,
    toy,
    trajectory,
)

BEST: dict[str, Any] = {
    **QUIET,
    "output__keep_best": True,
    "output__save_every_steps": 2,
    "output__keep_states": 10,
    "output__keep_last": 30,
    "output__precision": "fp32",
    "train__stop_after_validations": 2,
    "train__validate_every_steps": 2,
    "train__ema_decay": 0.9,
    "optimizer__learning_rate": 0.1,
    "optimizer__schedule": "constant",
    "optimizer__warmup_fraction": 0.0,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A run of many steps that ends two validations after its best, which it keeps."""
    place = toy(tmp_path_factory.mktemp("best")).with_base()
    assert place.train(**BEST, steps=60) == 0
    return place


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in events(run, "validation") if row["step"]}


def test_the_best_step_is_kept_as_it_was_and_training_ends_once_the_loss_stops_falling(
    place: Toy,
) -> None:
    run, by_step = place.run, losses(place.run)
    end, best = max(by_step), min(by_step, key=lambda step: by_step[step])
    record = read_json_object(run / "best.json")
    assert (record["step"], record["file"]) == (best, "toy-best.safetensors")
    tensors = load_file(run / "toy-best.safetensors")
    assert same_tensors(tensors, load_file(run / f"toy-step{best:08d}.safetensors"))
    assert not same_tensors(tensors, load_file(run / "toy.safetensors"))
    assert end == best + 4 < 60, "two validations of two steps each"
    assert trajectory(run)[-1][0] == end
    (finished,) = events(run, "finished")
    assert finished["step"] == end and f"lowest at step {best}" in finished["early"]
    assert last_state(run).name == f"step-{end:08d}"
    status = read_status(run)
    assert status is not None and "finished early" in status.message
    assert (status.state, status.exit_code) == ("finished", 0)
    assert "ended early" in (run / "report.html").read_text(encoding="utf-8")


def test_a_resume_agrees_that_it_has_ended(place: Toy, tmp_path: Path) -> None:
    copied = place.copy(tmp_path / "runs")
    newest, before = last_state(copied.run), contents(last_state(copied.run))
    for is_torn in (False, True):  # then from a state before the end it comes to the same end
        if is_torn:
            shutil.rmtree(newest)
        assert copied.train("--resume", **BEST, steps=60) == 0
        assert last_state(copied.run) == newest and contents(newest) == before
        assert trajectory(copied.run) == trajectory(place.run)

    # With more patience it goes on.
    more = {**BEST, "train__stop_after_validations": 3}
    assert copied.train("--resume", **more, steps=60) == 0
    assert max(losses(copied.run)) > max(losses(place.run))


def test_the_plan_refuses_it_without_held_out_pictures_and_counts_the_kept_weights(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", str(place.dataset), "--base", "embedded", "--json", "--set"]
    for setting in ("output.keep_best=true", "train.stop_after_validations=2"):
        # Too few are held out, as by 0.
        assert run_cli([*line, setting, "--set", "data.validation_fraction=0.1"]) == 2
        assert setting.partition("=")[0] in capsys.readouterr().err
    capsys.readouterr()
    held_out = ["--set", "data.validation_fraction=0.2"]
    assert run_cli([*line, "output.keep_best=true", *held_out]) == 0
    items = json.loads(capsys.readouterr().out)["memory"]["items"]
    sizes = {item["name"]: item["bytes"] for item in items}
    assert sizes["best adapter"] == sizes["adapter weights"] > 0
