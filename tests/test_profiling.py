"""`profile`: the real loop under torch's profiler, a trace on the disk, and a training left as it was."""

from __future__ import annotations

import json

import pytest

from lora_trainer.cli import main
from tests.fakes.runs import SETTINGS, Toy, toy, trajectory


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("profile")).with_base()


def arguments(place: Toy, *, steps: int) -> list[str]:
    line = ["profile", str(place.dataset), "--base", str(place.base), "--output", str(place.runs)]
    line += ["--steps", str(steps), "--json"]
    for key, value in {**SETTINGS, "data.cache_dir": str(place.cache)}.items():
        line += ["--set", f"{key}={json.dumps(value)}"]
    return line


def test_the_steps_are_those_of_a_training_and_leave_a_trace(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments(place, steps=2)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shares"].keys() == {"data", "host", "compute", "memory", "saving"}
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["cause"] in found["shares"]
    assert found["sentence"]
    assert found["steps"] == 2
    operations = found["operations"]
    assert any("conv" in name or "mm" in name for name in operations)
    assert sum(operations.values()) <= found["seconds_per_step"] * 2, "means a step, not sums"
    (trace,) = (place.runs / "toy-profile" / "tensorboard").glob("*.pt.trace.json")
    names = {row.get("name") for row in json.loads(trace.read_bytes())["traceEvents"]}
    assert "aten::convolution" in names
    assert not list((place.runs / "toy-profile").glob("*.safetensors")), "five steps are no result"
    assert not (place.runs / "toy-profile" / "states").exists()

    assert place.train(steps=5) == 0
    watched = [row[1] for row in trajectory(place.runs / "toy-profile")]
    assert [row[1] for row in trajectory(place.run)][:1] == watched[:1], "watching changes nothing"


def test_too_few_steps_are_refused(place: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments(place, steps=0)) == 2
    assert "--steps 0" in capsys.readouterr().err
