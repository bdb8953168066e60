"""Naming, claiming and finding run folders; what a resume may change, and what it drops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.events import read_jsonl
from lora_trainer.config.config import Config, flatten, setting_keys
from lora_trainer.run.run_folder import (
    FORBIDDEN_SETTINGS,
    FREE_SETTINGS,
    ROUNDING_SETTINGS,
    RunFolder,
    claim,
    compare,
    create,
    cut_events,
    last_step,
    read_run,
    write_run,
)

BEFORE: dict[str, Any] = {key: "before" for key in setting_keys()}
PATIENCE = "train.stop_after_validations"
"""Free by itself, but with it the validations decide something."""
BEFORE |= {"train.lower_on_plateau": False, "output.keep_best": False, PATIENCE: None}
OTHERS = sorted(set(setting_keys()) - FREE_SETTINGS - ROUNDING_SETTINGS - set(FORBIDDEN_SETTINGS))
MACHINE = {"torch": "2.13.0", "threads": 1, "deterministic": True}


def compared(
    changes: dict[str, Any], machine: dict[str, Any] | None = None
) -> tuple[str, list[str]]:
    return compare(
        BEFORE, BEFORE | changes, environment=MACHINE, environment_now=MACHINE | (machine or {})
    )


def lines(file: Path, *rows: dict[str, Any]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_a_name_that_exists_gets_the_next_number(tmp_path: Path) -> None:
    made = [create(tmp_path / "runs", "toy") for _ in range(3)]
    assert [folder.name for folder in made] == ["toy", "toy-002", "toy-003"]
    assert all(folder.path.is_dir() for folder in made)


def test_a_folder_that_cannot_be_made_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="file"):
        create(tmp_path / "file", "toy")


def test_two_processes_never_train_in_one_folder(tmp_path: Path) -> None:
    folder = create(tmp_path, "toy")
    write_run(folder, {})
    with folder.lock, pytest.raises(MachineError, match="another process"):
        claim(folder.path)
    folder.lock.release(force=True)
    assert claim(folder.path).path == folder.path


def test_a_run_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    for name in ("zebra", "apple"):
        write_run(create(tmp_path, name), {})
    (tmp_path / "not-a-run").mkdir()
    with pytest.raises(RequestError, match="runs there: apple, zebra"):
        read_run(tmp_path / "toy")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = create(tmp_path, "toy")
    record = {
        "name": "toy",
        "started_at_s": 1.5,
        "settings": {"train.steps": 6},
        "base": {"source": "embedded", "identities": {}},
        "environment": {"exactness": {}},
        "dataset": {"fingerprint": "ab"},
        "plan": {"memory": {"images_at_once": {}}},
    }
    write_run(folder, record)
    assert read_run(folder.path) == record
    for key in record:
        write_run(folder, {name: value for name, value in record.items() if name != key})
        with pytest.raises(RequestError, match=f"has no {key}"):
            read_run(folder.path)


@pytest.mark.parametrize("name", ["", " ", ".", "..", "a ", "a/b", "a\\b", "a\nb", "\0", "x" * 181])
def test_a_name_that_is_no_visible_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="cannot be the name of a run"):
        create(tmp_path / "runs", name)
    assert not list(tmp_path.iterdir())


# ---- what a resume may change


def test_every_setting_named_is_one() -> None:
    assert FREE_SETTINGS | set(FORBIDDEN_SETTINGS) <= set(setting_keys())
    assert not FREE_SETTINGS & set(FORBIDDEN_SETTINGS)


def test_what_decides_shapes_groups_and_beginnings_may_not_change() -> None:
    adapter = {key for key in setting_keys() if key.startswith("adapter.")}
    others = {"optimizer.name", "optimizer.learning_rate_pattern", "optimizer.lora_plus_ratio"}
    others |= {"optimizer.text_encoder_learning_rate", "train.init_from", "train.ema_decay"}
    others |= {"optimizer.new_tokens_learning_rate", "output.keep_best", "train.concept"}
    adapter -= {f"adapter.{name}" for name in ("dropout", "rank_dropout", "module_dropout")}
    assert adapter | others == FORBIDDEN_SETTINGS
    assert len(adapter) > 10


@pytest.mark.parametrize(
    "key", ["base.model", "base.vae", "base.prediction", "base.assistant", "objective.flow_shift"]
)
def test_another_base_or_objective_is_said(key: str) -> None:
    assert compared({key: "now"}) == ("CHANGED", [f"{key}: before -> now"])


def test_the_same_settings_on_the_same_machine_are_exact() -> None:
    assert compared({}) == ("EXACT", [])


@given(st.sets(st.sampled_from(sorted(FREE_SETTINGS - {PATIENCE})), min_size=1))
def test_where_and_how_much_may_change(keys: set[str]) -> None:
    assert compared(dict.fromkeys(keys, "now")) == ("EXACT", [])


@pytest.mark.parametrize("watching", ["train.lower_on_plateau", "output.keep_best", PATIENCE])
def test_when_and_what_is_validated_matters_where_it_decides_something(watching: str) -> None:
    before = BEFORE | {watching: 3}
    for key in ("train.validate_every_steps", "output.weights"):
        found, lines = compare(
            before, before | {key: "now"}, environment=MACHINE, environment_now=MACHINE
        )
        assert (found, lines) == ("CHANGED", [f"{key}: before -> now"])


@given(st.sets(st.sampled_from(OTHERS), min_size=1), st.booleans())
def test_what_is_computed_may_change_and_is_said(keys: set[str], moved: bool) -> None:
    exactness, differences = compared(dict.fromkeys(keys, "now"), {"threads": 2} if moved else None)
    assert exactness == "CHANGED"
    expected = [f"{key}: {BEFORE[key]} -> now" for key in keys]
    assert sorted(differences) == sorted(expected + ["threads: 1 -> 2"] * moved)


def test_mpr_04_another_number_of_processes_draws_the_same_another_batch_is_a_change() -> None:
    assert compared({}, {"processes": 2})[0] == "SAME-STREAM"
    exactness, differences = compared({"train.batch_size": 9}, {"processes": 2})
    assert exactness == "CHANGED"
    assert {line.split(":")[0] for line in differences} == {"train.batch_size", "processes"}


@given(st.sets(st.sampled_from(sorted(ROUNDING_SETTINGS)), min_size=1))
def test_how_it_is_computed_keeps_the_draws_and_not_the_bits(keys: set[str]) -> None:
    exactness, differences = compared(dict.fromkeys(keys, "now"))
    assert exactness == "SAME-STREAM"
    assert len(differences) == len(keys)


def test_a_device_that_is_not_deterministic_never_promises_the_bits() -> None:
    """Nothing differs there, and the bits do."""
    loose = MACHINE | {"deterministic": False}
    assert compare(BEFORE, BEFORE, environment=loose, environment_now=loose) == ("SAME-STREAM", [])


def test_how_often_is_validated_matters_where_it_decides_the_learning_rate() -> None:
    settings = BEFORE | {"train.lower_on_plateau": True}
    later = settings | {"train.validate_every_steps": "now"}
    exactness, differences = compare(settings, later, environment=MACHINE, environment_now=MACHINE)
    assert exactness == "CHANGED"
    assert differences == ["train.validate_every_steps: before -> now"]


@pytest.mark.parametrize("key", ["objective.loss", "adapter.rslora"])
def test_a_setting_that_an_older_run_did_not_have_was_at_its_default(key: str) -> None:
    default = flatten(Config())[key]
    older = {other: value for other, value in BEFORE.items() if other != key}
    same = compare(older, BEFORE | {key: default}, environment=MACHINE, environment_now=MACHINE)
    assert same == ("EXACT", [])
    if key in FORBIDDEN_SETTINGS:
        with pytest.raises(RequestError, match=f"{key} {default} -> now"):
            compare(older, BEFORE | {key: "now"}, environment=MACHINE, environment_now=MACHINE)
    else:
        changed = compare(
            older, BEFORE | {key: "now"}, environment=MACHINE, environment_now=MACHINE
        )
        assert changed == ("CHANGED", [f"{key}: {default} -> now"])


@pytest.mark.parametrize("key", sorted(FORBIDDEN_SETTINGS))
def test_what_has_another_shape_may_not_change(key: str) -> None:
    with pytest.raises(RequestError, match=rf"{key} {BEFORE[key]} -> now"):
        compared({key: "now", "train.seed": "now"})


@pytest.mark.parametrize(("key", "value"), [("torch", "2.14.0"), ("threads", 2)])
def test_another_machine_keeps_the_stream_but_not_the_bits(key: str, value: Any) -> None:
    expected = ("SAME-STREAM", [f"{key}: {MACHINE[key]} -> {value}"])
    assert compared({}, {key: value}) == expected


# ---- what it drops


def test_what_came_after_the_state_is_dropped(tmp_path: Path) -> None:
    folder = create(tmp_path, "toy")
    kept: list[dict[str, Any]] = [
        {"event": "run_started"},
        {"event": "validation", "step": 0},
        {"event": "step", "step": 1},
        {"event": "step", "step": 2},
        {"event": "saved", "step": 2},
        {"event": "change", "reason": "  "},
    ]
    dropped: list[dict[str, Any]] = [
        {"event": "step", "step": 3},
        {"event": "stopped", "step": 2},
        {"event": "finished", "step": 2},
    ]
    lines(folder.path / "events.jsonl", *kept, *dropped)
    lines(folder.path / "problems.jsonl", {"event": "problem", "what": "x"})
    cut_events(folder, step=2)
    assert read_jsonl(folder.path / "events.jsonl") == kept
    assert len(read_jsonl(folder.path / "problems.jsonl")) == 1


def test_without_a_state_no_step_stays(tmp_path: Path) -> None:
    folder = create(tmp_path, "toy")
    rows = [{"event": "validation", "step": 0}, {"event": "step", "step": 1}]
    lines(folder.path / "events.jsonl", *rows)
    cut_events(folder, step=-1)
    assert read_jsonl(folder.path / "events.jsonl") == []


def test_a_line_that_a_kill_tore_is_dropped(tmp_path: Path) -> None:
    folder = create(tmp_path, "toy")
    events = folder.path / "events.jsonl"
    lines(events, {"event": "step", "step": 1})
    events.write_text(events.read_text() + '{"event": "st')
    cut_events(folder, step=1)
    assert events.read_text() == '{"event": "step", "step": 1}\n'


def test_the_last_step_is_the_highest_logged(tmp_path: Path) -> None:
    folder: RunFolder = create(tmp_path, "toy")
    assert last_step(folder) == 0
    rows = [{"event": "step", "step": step} for step in (1, 2)]
    lines(folder.path / "events.jsonl", *rows, {"event": "saved", "step": 9})
    assert last_step(folder) == 2
