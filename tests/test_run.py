"""A whole training through the command line: what it leaves, goes on with, refuses, and how it stops."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.numpy import load_file

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.event_kinds import Event
from lora_trainer.common.events import read_jsonl
from lora_trainer.common.files import json_bytes
from lora_trainer.common.records import as_json
from lora_trainer.config.config import setting_keys
from lora_trainer.hardware.machine import Hardware
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.run_record import read as read_record
from lora_trainer.reporting.status import read_status
from lora_trainer.training.loss import Model
from tests.fakes.runs import (
    QUIET,
    SETTINGS,
    STEPS,
    Toy,
    contents,
    events,
    heard_by,
    last_state,
    listing,
    problems,
    run_cli,
    settings_of,
    toy,
    trajectory,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """One run of six steps; tests that go on with it take a copy."""
    place = toy(tmp_path_factory.mktemp("run")).with_base()
    before = listing(place.dataset)
    assert place.train("--strict", output__keep_last=1, output__measure=True) == 0
    assert listing(place.dataset) == before, "a training only reads its dataset"
    return place


@pytest.fixture
def copied(place: Toy, tmp_path: Path) -> Toy:
    return place.copy(tmp_path / "runs")


def resume(place: Toy, *more: str, steps: int | None = None, **settings: Any) -> int:
    """Go on as a person would: the same command, which names the settings again."""
    return place.train("--resume", *more, steps=steps, output__keep_last=1, **settings)


# ---- what a run leaves


def test_a_run_leaves_what_design_names(place: Toy) -> None:
    found = {path.name for path in place.run.iterdir()} - {".lock", "control", "problems.jsonl"}
    assert found == {
        "run.json", "events.jsonl", "status.json", "report.html", "samples", "validation.json",
        "states", "tensorboard", "toy.safetensors", "toy-step00000004.safetensors",
    }  # fmt: skip
    assert any((place.run / "tensorboard").rglob("*tfevents*"))
    assert "<script src" not in (place.run / "report.html").read_text(encoding="utf-8")
    assert len(load_file(place.run / "toy.safetensors")) > 0


def test_run_json_tells_all_about_the_run(place: Toy) -> None:
    written = (place.run / "run.json").read_bytes()
    assert json_bytes(as_json(read_record(place.run))) == written, "all of it is read"
    run = json.loads(written)
    assert run.keys() >= {"settings", "origins", "base", "plan", "environment", "dataset"}
    assert run["name"] == "toy"
    assert run["settings"].keys() == run["origins"].keys() == set(setting_keys())
    assert "auto" not in [run["settings"][key] for key in ("train.precision", "adapter.alpha")]
    assert run["settings"]["train.steps"] == 6
    assert run["origins"]["train.steps"]["layer"] == "command line"
    assert run["base"].keys() == {"family", "source", "path", "identities"}
    assert run["base"]["path"] == "base", "the name only: a full path says who trained it"
    assert all(len(identity) == 64 for identity in run["base"]["identities"].values())
    assert run["dataset"].keys() >= {
        "name", "images", "fingerprint", "buckets", "findings", "score", "parts", "held_out",
    }  # fmt: skip
    assert (run["dataset"]["images"], len(run["dataset"]["held_out"])) == (6, 1)
    assert sum(run["dataset"]["buckets"].values()) == 5
    assert isinstance(run["command"], list)


def test_every_step_is_one_line(place: Toy) -> None:
    steps = events(place.run, "step")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [row["images"] for row in steps] == [1, 2, 3, 4, 5, 6]
    for row in steps:
        assert row.keys() == {
            "event", "step", "images", "loss", "lr", "grad_norm", "seconds", "data_wait_s",
            "vram_bytes", "vram_reserved_bytes", "vram_used_bytes", "vram_now_bytes", "host_bytes", "host_own_bytes",
            "latents", "epoch", "time",
        }  # fmt: skip
    assert steps[4]["epoch"] == pytest.approx(1, abs=0.21)


def test_base_validations_samples_and_saves_come_in_time(place: Toy) -> None:
    rows = read_jsonl(place.run / "events.jsonl")
    kinds = [(row["event"], row["step"]) for row in rows if "step" in row]
    assert kinds[:3] == [("validation", 0), ("sample", 0), ("step", 1)]
    steps = {kind: [row["step"] for row in events(place.run, kind)] for kind, _ in kinds}
    assert steps["validation"] == steps["sample"] == [0, 3, 6] and steps["saved"] == [2, 4, 6]
    finished = events(place.run, "finished")[0]
    validations = [row["loss"] for row in events(place.run, "validation")]
    assert finished["base_validation_loss"] == validations[0]
    assert finished["validation_loss"] == validations[-1]
    assert (finished["step"], finished["export"]) == (6, "toy.safetensors")
    for row in events(place.run, "sample"):
        (image,) = row["images"]
        assert (image["prompt"], image["seed"]) == ("a toy", 1234)
        assert image["file"] == f"samples/step-{row['step']:08d}/00.png"
        with Image.open(place.run / image["file"]) as picture:
            assert picture.size == (16, 16)
    # Rolling files are pruned, but two states stay.
    states = sorted(path.name for path in (place.run / "states").glob("step-*"))
    assert states == ["step-00000004", "step-00000006"]
    exports = [row["export"] for row in events(place.run, "saved")]
    assert exports == ["toy-step00000002.safetensors", "toy-step00000004.safetensors", None]
    status = read_status(place.run)
    assert (status.state, status.step, status.steps, status.exit_code) == ("finished", 6, 6, 0)


# ---- going on


def test_going_on_for_longer_says_what_changed_and_keeps_the_run_s_own_settings(
    copied: Toy,
) -> None:
    """Only the dataset, the folder and what changes are typed; the rest is in run.json."""
    before = trajectory(copied.run)
    typed = ["--resume-from", str(copied.run), "--steps", "8"]
    assert run_cli([str(copied.dataset), *typed, "--set", "optimizer.learning_rate=0.5"]) == 0
    rows = trajectory(copied.run)
    assert rows[:6] == before
    assert [row[0] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    (resumed,) = events(copied.run, "resumed")
    assert (resumed["step"], resumed["exactness"]) == (6, "CHANGED")
    rate, steps = sorted(resumed["differences"])
    assert rate.startswith("optimizer.learning_rate: ") and steps == "train.steps: 6 -> 8"
    assert rows[7][2] > 0.001
    settings = settings_of(copied.run)
    assert (settings["train.steps"], settings["optimizer.learning_rate"]) == (8, 0.5)
    began_with = {**SETTINGS, "output.measure": True}
    assert {key: settings[key] for key in SETTINGS} == began_with
    assert events(copied.run, "finished")[-1]["step"] == 8
    assert last_state(copied.run).name == "step-00000008"
    # Fewer steps than there are: nothing is trained, and it is said.
    assert run_cli([str(copied.dataset), *typed[:3], "3"]) == 0
    assert [row[0] for row in trajectory(copied.run)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "8 steps, more than train.steps=3" in problems(copied.run)[-1]["what"]
    assert events(copied.run, "finished")[-1]["early"] == ""


def test_another_adapter_is_refused_and_nothing_is_touched(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """What decides shapes, groups and beginnings is not that of the state."""
    before = contents(place.run, without=(".lock",))
    capsys.readouterr()
    assert resume(place, adapter__rank_pattern={"attn2": 2}) == 2
    error = capsys.readouterr().err
    assert "a resume cannot change adapter.rank_pattern " in error
    assert error.count("\n") == 1
    assert contents(place.run, without=(".lock",)) == before


def test_a_run_that_began_with_a_file_goes_on_without_it(copied: Toy) -> None:
    """Its values are in the state: the file may be gone by then."""
    file = copied.runs / "began.safetensors"
    shutil.copy2(copied.run / "toy.safetensors", file)
    line = copied.arguments("--name", "again", train__init_from=str(file), **QUIET)
    assert run_cli(line) == 0
    run = copied.runs / "again"
    tensors = load_file(run / "again.safetensors")
    file.unlink()
    assert run_cli([*line, "--resume"]) == 0
    (resumed,) = events(run, "resumed")
    assert (resumed["step"], resumed["exactness"]) == (6, "EXACT")
    again = load_file(run / "again.safetensors")
    assert all((again[key] == tensors[key]).all() for key in tensors)
    other = ["--set", f"train.init_from={copied.run / 'toy.safetensors'}"]
    assert run_cli([str(copied.dataset), "--resume-from", str(run), *other]) == 2


def test_a_run_that_a_settings_file_names_is_resumed_by_the_same_command(
    copied: Toy, tmp_path: Path
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"output.name": "mine", "output.folder": str(tmp_path / "mine")}))
    line = copied.arguments("--config", str(file), steps=2, **QUIET)
    at = line.index("--output")
    del line[at : at + 2]
    assert [run_cli(line), run_cli([*line, "--resume"])] == [0, 0]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["mine"]
    assert events(tmp_path / "mine" / "mine", "resumed")


def test_no_valid_state_is_not_started_over_silently(
    copied: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    for state in (copied.run / "states").glob("step-*"):
        (state / "adapter.safetensors").write_bytes(b"torn")
    capsys.readouterr()
    assert resume(copied) == 4
    assert "bad-step-00000006" in capsys.readouterr().err
    assert resume(copied, "--name", "nobody") == 2
    assert "holds no run to resume" in capsys.readouterr().err


# ---- refusals before anything is written


def test_a_low_score_is_warned_of_and_refused_where_strict(
    copied: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    low = {**QUIET, "steps": 1, "output__save_every_steps": 0, "data__min_score": 1.0}
    assert copied.train("--strict", "--name", "strict", **low) == 3
    assert "data.min_score" in capsys.readouterr().err
    assert not (copied.runs / "strict").exists()
    assert copied.train("--name", "warned", **low) == 0
    assert copied.train("--name", "warned", "--resume", **low) == 0
    (problem,) = problems(copied.runs / "warned")
    assert "below data.min_score" in problem["what"] and problem["severity"] == "warning"


def test_a_disk_that_is_too_small_is_refused(
    place: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Hardware, "disk_free_bytes", lambda self, path: 10)
    capsys.readouterr()
    line = place.arguments(**QUIET)
    line[line.index("--output") + 1] = str(tmp_path / "none")
    assert run_cli(line) == 4
    assert "free" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_exports_that_fail_end_the_run_with_its_work_saved(
    copied: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> float:
        raise MachineError("the disk is full", fix="free some space")

    def other(folder: Path) -> None:
        raise MachineError("cannot write report.html", fix="free some space")

    monkeypatch.setattr("lora_trainer.run.saving.write_export", full)
    with monkeypatch.context() as no_report:
        no_report.setattr("lora_trainer.run.lead.write_report", other)
        assert copied.train("--name", "full", **QUIET) == 4
    error = capsys.readouterr().err
    assert "the disk is full" in error and "report.html" not in error, (
        "the cause is what is said last"
    )
    run = copied.runs / "full"
    assert "report.html" in problems(run)[-1]["what"]
    (stopped,) = events(run, "stopped")
    assert (stopped["exit_code"], stopped["step"]) == (4, 6)
    assert "the disk is full" in stopped["reason"]
    saved = [(row["step"], row["export"]) for row in events(run, "saved")]
    assert saved == [(2, None), (4, None), (6, None)]
    assert [row["what"] for row in problems(run) if "saving at step" in row["what"]] == [
        f"saving at step {step} failed ({count} of 3 in a row end the run): the disk is full"
        for count, step in enumerate((2, 4), start=1)
    ]
    assert read_status(run).state == "failed"
    monkeypatch.undo()
    assert copied.train("--name", "full", "--resume", **QUIET) == 0
    assert [row[0] for row in trajectory(run)] == [1, 2, 3, 4, 5, 6]
    assert not events(run, "stopped"), "the end of before is dropped"
    assert (run / "report.html").is_file()


def test_memory_that_is_used_up_ends_in_one_line_with_the_last_whole_step_saved(
    copied: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `ulimit -v` does it: Python's own error, which is none of ours."""
    whole, calls = Model.losses_of, iter(range(100))

    def short(*arguments: Any) -> Any:
        if next(calls) == 3:
            raise MemoryError
        return whole(*arguments)

    monkeypatch.setattr(Model, "losses_of", short)
    settings = {**QUIET, "output__save_every_steps": 0, "memory__micro_batch": 2}
    assert copied.train("--name", "short", train__batch_size=2, **settings) == 5
    assert "is used up" in capsys.readouterr().err
    run = copied.runs / "short"
    (stopped,) = events(run, "stopped")
    assert stopped["exit_code"] == 5 and stopped["step"] > 0
    assert [row["step"] for row in events(run, "saved")] == [stopped["step"]]


# ---- stopping


def train_asking(place: Toy, **requests: int) -> int:
    """Train `asked`, putting each request into control/ once its step is logged; return the exit code."""

    def ask(event: Event) -> None:
        for request, step in requests.items():
            if event.kind == "step" and event.fields["step"] == step:
                Control(place.runs / "asked").request(request)

    with heard_by(ask):
        return place.train("--name", "asked", **QUIET, output__save_every_steps=0)


def test_control_files_are_obeyed_once_and_removed_and_one_stops_as_sigterm_does(
    copied: Toy,
) -> None:
    assert train_asking(copied, save=2, sample=3, stop=4) == 143
    run = copied.runs / "asked"
    assert [row["step"] for row in events(run, "saved")] == [2, 4]
    assert [row["step"] for row in events(run, "sample")] == [3]
    assert last_state(run).name == "step-00000004"
    assert list((run / "control").iterdir()) == []
    assert any(row["what"].startswith("asked to stop: finishing the step") for row in problems(run))
    status = json.loads((run / "status.json").read_bytes())
    assert (status["phase"], status["state"]) == ("stop", "stopped")


def test_a_stop_that_a_killed_process_never_saw_does_not_stop_the_next(copied: Toy) -> None:
    """And a request for samples that holds no prompt is a problem of the samples alone."""
    Control(copied.run).request("stop")
    os.utime(copied.run / "control" / "stop", (1.0, 1.0))
    (copied.run / "control" / "sample").write_bytes(b"\xff\xfe\x00")
    assert copied.train("--resume", steps=8, **QUIET) == 0
    assert trajectory(copied.run)[-1][0] == 8
    assert any("is not UTF-8 text" in row["what"] for row in problems(copied.run))
    assert STEPS + 1 not in {row["step"] for row in events(copied.run, "sample")}
    assert list((copied.run / "control").iterdir()) == []


def test_a_stop_now_file_stops_without_saving_in_one_line(
    copied: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert train_asking(copied, stop_now=3) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("stopped at once;")
    assert not (copied.runs / "asked" / "states").exists()


# ---- a prompt that somebody asks for

ASKED = "a zorble on a snowy hill"
OPTIONS = "--n mud --w 8 --h 24 --d 77 --l 2.5 --s 3"


def test_a_prompt_asked_for_is_drawn_and_changes_nothing_of_the_training(
    place: Toy, tmp_path: Path
) -> None:
    """Its images are of control/sample, between two steps."""
    plain, asked = place.copy(tmp_path / "plain"), place.copy(tmp_path / "asked")
    Control(asked.run).request("sample", prompt=f" {ASKED} {OPTIONS}\n")
    for each in (plain, asked):
        assert each.train("--resume", steps=STEPS + 3, **QUIET) == 0
    assert trajectory(asked.run) == trajectory(plain.run)
    for name in ("adapter.safetensors", "optim.safetensors", "state.json"):
        states = [(last_state(each.run) / name).read_bytes() for each in (asked, plain)]
        assert states[0] == states[1]
    (row,) = (row for row in events(asked.run, "sample") if row["step"] == STEPS + 1)
    (image,) = row["images"]
    assert (image["prompt"], row["asked"]) == (f"{ASKED} {OPTIONS}", True)
    assert image["file"] == f"samples/step-{STEPS + 1:08d}/asked-00.png"
    assert image["seed"] == 77
    with Image.open(asked.run / image["file"]) as drawn:
        assert drawn.info["parameters"] == (
            f"{ASKED}\nNegative prompt: mud\nSteps: 3, CFG scale: 2.5, Seed: 77, Size: 8x24"
        )
        assert drawn.size == (8, 24)
        assert drawn.getcolors(1) is None, "an image, not one colour"
    assert not Control(asked.run).pending()


def test_a_prompt_too_long_or_no_text_is_refused(tmp_path: Path) -> None:
    for text in ("x" * 2_001, "a\0b", "half \ud800"):
        with pytest.raises(RequestError, match="the prompt h"):
            Control(tmp_path).request("sample", prompt=text)
    assert not Control(tmp_path).pending()
    (tmp_path / "control").mkdir()
    for character in ("x", "\u732b"):  # of one byte and of three
        (tmp_path / "control" / "sample").write_text(character * 20_000, encoding="utf-8")
        # It is not read to its end.
        with pytest.raises(RequestError, match="the prompt has 8,000 characters"):
            Control(tmp_path).take_samples()
