"""Runs that learn nothing stop with exit code 5 and name why; runs that learn, however little, go on."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from lora_trainer.common.event_kinds import Event
from lora_trainer.common.files import read_json_object
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.status import read_status
from tests.fakes.runs import (
    QUIET,
    SQUARES_PX,
    Toy,
    contents,
    events,
    heard_by,
    last_state,
    run_cli,
    same_tensors,
    toy,
    trajectory,
)

ALONE: dict[str, Any] = {**QUIET, "output__save_every_steps": 0, "output__measure": False}
SOON: dict[str, Any] = {**ALONE, "train__batch_size": 4, "memory__micro_batch": 4, "steps": 40}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("learning"), sizes=SQUARES_PX).with_base()


@pytest.fixture
def other(place: Toy, tmp_path: Path) -> Toy:
    """The same place with runs of its own."""
    place.runs.mkdir(exist_ok=True)
    return place.copy(tmp_path / "runs")


@pytest.fixture(autouse=True)
def looked_at_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look after 20 steps in place of 50, when a run has learned less."""
    monkeypatch.setattr("lora_trainer.training.guards.LOOK_STEPS", 20)
    monkeypatch.setattr("lora_trainer.training.guards.LOOK_IMAGES", 80)


def ended(other: Toy) -> str:
    """Return why the run stopped, which must be exit code 5."""
    row = events(other.run, "stopped")[-1]
    assert row["exit_code"] == 5
    return str(row["reason"])


NO_NOISE = {"objective__min_timestep": 0, "objective__max_timestep": 0}
STEEP = {"objective__weighting": "p2", "objective__p2_gamma": 10}
"""With hardly any noise, (1 + SNR)^-10."""


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"optimizer__learning_rate": 1e-50}, "after 25 steps .* rate, 1e-50, is too small"),
        ({**NO_NOISE, **STEEP}, "up to step 25, are all zero.*the weights of the loss"),
        ({**SOON, "adapter__alpha": 1e-6}, "after 20 steps .*adapter.alpha / adapter.rank"),
    ],
    ids=["rate of zero", "weights of zero", "alpha far too low"],
)
def test_a_run_that_learns_nothing_stops_and_names_why(
    other: Toy, settings: dict[str, Any], cause: str
) -> None:
    assert other.train(**{"steps": 40, **ALONE, **settings}) == 5
    assert re.search(cause, ended(other))


def test_gradients_that_vanish_in_fp16_are_too_small_for_it(
    other: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.Tensor.backward

    def vanishing(self: torch.Tensor, *arguments: Any, **options: Any) -> None:
        real(self * 0.0, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "backward", vanishing)
    assert other.train(steps=40, train__precision="fp16", **ALONE) == 5
    assert "too small for fp16" in ended(other)


@pytest.mark.parametrize(
    "settings",
    [
        {
            "adapter__text_encoder": True,
            "optimizer__learning_rate_pattern": {"^denoiser": 0},
            "optimizer__warmup_fraction": 0.5,
            "optimizer__schedule": "cosine",
        },
        {"adapter__kind": "oft", "train__precision": "bf16"},
    ],
    ids=["text and warm-up", "oft in bf16"],
)
def test_what_learns_goes_on(other: Toy, settings: dict[str, Any]) -> None:
    def stop_after_the_look(event: Event) -> None:
        if event.kind == "learned":
            Control(other.run).request("stop_now")

    with heard_by(stop_after_the_look):
        assert other.train(**{**SOON, **settings}) == 130
    (row,) = events(other.run, "learned")
    assert row["change"] > 9e-4 and row["step"] == 20


def test_a_run_stopped_and_resumed_still_compares_with_its_start(other: Toy) -> None:
    short = {**SOON, "optimizer__learning_rate": 1e-9, "output__save_every_steps": 8}
    assert other.train(**short) == 5
    assert other.train("--resume", **short) == 5
    assert re.search("after 20 steps .* 1e-09, is far too low", ended(other))
    assert [row["step"] for row in events(other.run, "base_losses")] == [1]


def test_first_losses_that_are_no_numbers_are_compared_with_nothing(
    other: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = "lora_trainer.training.actions.FixedLosses.by_timestep"
    monkeypatch.setattr(losses, lambda self, *, cap: [math.nan, 0.1])
    assert other.train(**{**SOON, "output__save_every_steps": 8}) == 0
    assert not events(other.run, "learned") and last_state(other.run).is_dir()


def test_a_short_run_and_an_optimizer_that_finds_its_rate_are_not_looked_at(other: Toy) -> None:
    assert other.train(**{**SOON, "steps": 39, "optimizer__learning_rate": 1e-9}) == 0
    prodigy = {"optimizer__name": "prodigy", "optimizer__learning_rate": 1.0}
    assert other.train("--name", "prodigy", **SOON, **prodigy) == 0
    assert not events(other.run, "learned") and not events(other.runs / "prodigy", "learned")


# ---- the best step is kept, and training ends once the validation loss stops falling

BEST: dict[str, Any] = {
    **QUIET,
    "output__keep_best": True,
    "output__save_every_steps": 2,
    "output__keep_states": 10,
    "output__keep_last": 30,
    "output__precision": "fp32",
    "train__stop_after_validations": 2,
    "train__lower_after_validations": 1,
    "train__lower_to": 0.25,
    "train__validate_every_steps": 2,
    "train__ema_decay": 0.9,
    "optimizer__learning_rate": 0.1,
    "optimizer__schedule": "constant",
    "optimizer__warmup_fraction": 0.0,
}


@pytest.fixture(scope="module")
def ended_early(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A run of many steps that ends two validations after its best, which it keeps."""
    ended_early = toy(tmp_path_factory.mktemp("best")).with_base()
    assert ended_early.train(**BEST, steps=60) == 0
    return ended_early


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in events(run, "validation") if row["step"]}


def test_the_best_step_is_kept_as_it_was_and_training_ends_once_the_loss_stops_falling(
    ended_early: Toy,
) -> None:
    run, by_step = ended_early.run, losses(ended_early.run)
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


def test_the_rate_is_lowered_where_the_loss_stops_falling(ended_early: Toy) -> None:
    best = min(losses(ended_early.run), key=lambda step: losses(ended_early.run)[step])
    lowered = [row for row in events(ended_early.run, "change") if "factor" in row["key"]]
    assert [(row["step"], row["old"], row["new"]) for row in lowered][-2:] == [
        (best + 2, 4 * lowered[-2]["new"], lowered[-2]["new"]),
        (best + 4, lowered[-2]["new"], lowered[-2]["new"] / 4),
    ]
    rates = {row["step"]: row["lr"] for row in events(ended_early.run, "step")}
    assert rates[best + 2] == pytest.approx(4 * rates[best + 3])


def test_a_resume_agrees_that_it_has_ended(ended_early: Toy, tmp_path: Path) -> None:
    copied = ended_early.copy(tmp_path / "runs")
    newest, before = last_state(copied.run), contents(last_state(copied.run))
    for is_torn in (False, True):  # then from a state before the end it comes to the same end
        if is_torn:
            shutil.rmtree(newest)
        assert copied.train("--resume", **BEST, steps=60) == 0
        assert last_state(copied.run) == newest and contents(newest) == before
        assert trajectory(copied.run) == trajectory(ended_early.run)

    # With more patience it goes on.
    more = {**BEST, "train__stop_after_validations": 3}
    assert copied.train("--resume", **more, steps=60) == 0
    assert max(losses(copied.run)) > max(losses(ended_early.run))


def test_the_plan_refuses_it_without_held_out_pictures_and_counts_the_kept_weights(
    ended_early: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", str(ended_early.dataset), "--base", "embedded", "--json", "--set"]
    for setting in (
        "output.keep_best=true",
        "train.stop_after_validations=2",
        "train.lower_after_validations=2",
    ):
        # Too few are held out, as by 0.
        assert run_cli([*line, setting, "--set", "data.validation_fraction=0.1"]) == 2
        assert setting.partition("=")[0] in capsys.readouterr().err
    capsys.readouterr()
    held_out = ["--set", "data.validation_fraction=0.2"]
    assert run_cli([*line, "output.keep_best=true", *held_out]) == 0
    items = json.loads(capsys.readouterr().out)["memory"]["items"]
    sizes = {item["name"]: item["bytes"] for item in items}
    assert sizes["adapter weights"] == 2 * sizes["adapter gradients"] > 0
