"""Naming, claiming and finding run folders; what a resume may change, and what it drops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.records import as_json
from lora_trainer.config.config import all_settings, flatten, setting_keys
from lora_trainer.config.running import Config
from lora_trainer.run import run_folder

BEFORE: dict[str, Any] = {key: "before" for key in setting_keys()}
PATIENCE = "train.stop_after_validations"
"""Free by itself, but with it the validations decide something."""
LOWER = "train.lower_after_validations"
"""Changes the learning rate, and so makes validations decide something too."""
BEFORE |= {"output.keep_best": False, PATIENCE: None, LOWER: None}
FREE, ROUNDING, FORBIDDEN, OTHERS = (
    [info.key for info in all_settings() if info.handling.resume == effect]
    for effect in ("free", "rounding", "forbidden", "changed")
)
FREE.remove(PATIENCE)
OTHERS.remove(LOWER)
MACHINE = {"torch": "2.13.0", "threads": 1, "deterministic": True}


def compared(
    changes: dict[str, Any],
    machine: dict[str, Any] | None = None,
    *,
    before: dict[str, Any] = BEFORE,
    now: dict[str, Any] = BEFORE,
) -> tuple[str, list[str]]:
    here = MACHINE | (machine or {})
    return run_folder.compare(before, now | changes, environment=MACHINE, environment_now=here)


def test_a_name_that_exists_gets_the_next_number(tmp_path: Path) -> None:
    for name in ("toy", "toy-002", "toy-003"):
        with run_folder.create(tmp_path / "runs", "toy") as folder:
            assert folder == tmp_path / "runs" / name and folder.is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="file"):
        run_folder.create(tmp_path / "file", "toy")


def test_two_processes_never_train_in_one_folder(tmp_path: Path) -> None:
    taken = pytest.raises(MachineError, match="another process")
    with run_folder.create(tmp_path, "toy") as folder, taken, run_folder.claim(folder):
        pass
    (folder / ".tmp-1-2-x").touch()
    with run_folder.claim(folder) as claimed:
        assert claimed == folder and [path.name for path in folder.iterdir()] == [".lock"]


RECORD: dict[str, Any] = {
    "name": "toy",
    "started_at_s": 1.5,
    "settings": {"train.steps": 6},
    "base": {"source": "embedded", "identities": {"denoiser": "cd"}},
    "environment": {"exactness": {"torch": "2.13.0"}},
    "dataset": {"fingerprint": "ab"},
    "plan": {"memory": {"images_at_once": {"64x64": 2}}},
}
"""As little as a resume reads of run.json."""


def known(content: Any) -> Any:
    """Return a content of run.json without what counts as not known."""
    if not isinstance(content, dict):
        return content
    found = {key: known(entry) for key, entry in content.items()}
    return {key: entry for key, entry in found.items() if entry not in (None, "", 0, [], {})}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    for name in ("toy", "apple", "not-a-run"):
        (tmp_path / name).mkdir()
    for name in ("toy", "apple"):
        (tmp_path / name / "run.json").write_text(json.dumps(RECORD))
    read = run_folder.read_run(tmp_path / "toy")
    assert known(as_json(read)) == RECORD, "all of it, and nothing else"
    assert as_json(read)["dataset"]["held_out"] == []
    with pytest.raises(RequestError, match="runs beside it: apple, toy"):
        run_folder.read_run(tmp_path / "zebra")


@pytest.mark.parametrize(
    ("part", "damaged", "key"),
    [
        *((name, None, name) for name in RECORD),
        ("name", 7, "name"),
        ("started_at_s", "noon", "started_at_s"),
        ("settings", ["train.steps"], "settings"),
        ("base", {"identities": {}}, "base.source"),
        ("base", {"source": "x", "identities": {"vae": 7}}, "base.identities"),
        ("environment", {"exactness": [1]}, "environment.exactness"),
        ("dataset", {"fingerprint": "ab", "held_out": "a.png"}, "dataset.held_out"),
        ("plan", {"memory": [1]}, "plan.memory"),
        ("plan", {"memory": {"images_at_once": {"64x64": "2"}}}, "plan.memory.images_at_once"),
    ],
)
def test_a_resume_says_which_part_of_run_json_it_lacks(
    tmp_path: Path, part: str, damaged: Any, key: str
) -> None:
    """Where the part is None it is missing."""
    content = {
        name: value for name, value in {**RECORD, part: damaged}.items() if value is not None
    }
    (tmp_path / "run.json").write_text(json.dumps(content))
    with pytest.raises(RequestError, match=f"run.json has no {key} that can be read") as refused:
        run_folder.read_run(tmp_path)
    assert refused.value.exit_code == 2 and "restore that file" in str(refused.value)


def test_a_run_without_a_state_begins_again_without_what_it_had_logged(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"event": "phase"}, {"event": "stopped"}]
    rows += [{"event": kind, "step": step} for kind, step in (("sample", 0), ("step", 1))]
    file = tmp_path / run_folder.EVENTS_FILE
    for step, left in ((0, [rows[0], rows[2]]), (-1, rows[:1])):
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        run_folder.cut_events(tmp_path, step=step)
        assert [json.loads(line) for line in file.read_text().splitlines()] == left


# ---- what a resume may change


def test_what_decides_shapes_groups_and_beginnings_may_not_change() -> None:
    assert "hardware.compile" in ROUNDING and "memory.base_precision" in OTHERS
    adapter = {key for key in setting_keys() if key.startswith("adapter.")}
    masks = ("dropout", "rank_dropout", "module_dropout", "noise_rank", "noise_rank_power")
    adapter -= {f"adapter.{name}" for name in masks}
    others = {"optimizer.name", "train.init_from", "train.concept", "output.keep_best"}
    assert adapter | others < set(FORBIDDEN)
    for key in FORBIDDEN:
        with pytest.raises(RequestError, match=rf"{key} {BEFORE[key]} -> now"):
            compared({key: "now", "train.seed": "now"})


@given(
    st.sets(st.sampled_from([*OTHERS, *FREE, *ROUNDING])),
    st.sampled_from([{}, {"threads": 2}, {"torch": "2.14.0"}, {"processes": 2}]),
)
@example(set(), {})
@example({ROUNDING[0]}, {})
@example({"base.model", "objective.flow_shift"}, {"processes": 2})
def test_mpr_04_what_changed_is_said_and_decides_how_exactly_a_run_is_repeated(
    keys: set[str], machine: dict[str, Any]
) -> None:
    """Free settings change nothing; rounding and another machine keep the draws and not the bits."""
    exactness, differences = compared(dict.fromkeys(keys, "now"), machine)
    assert sorted(differences) == sorted(
        [f"{key}: {BEFORE[key]} -> now" for key in keys - set(FREE)]
        + [f"{key}: {MACHINE.get(key)} -> {value}" for key, value in machine.items()]
    )
    if keys & set(OTHERS):
        assert exactness == "CHANGED"
    else:
        assert exactness == ("SAME-STREAM" if differences else "EXACT")


def test_a_device_that_is_not_deterministic_never_promises_the_bits() -> None:
    """Nothing differs there, and the bits do."""
    loose = MACHINE | {"deterministic": False}
    assert run_folder.compare(BEFORE, BEFORE, environment=loose, environment_now=loose) == (
        "SAME-STREAM",
        [],
    )


@pytest.mark.parametrize("watching", ["output.keep_best", PATIENCE, LOWER])
def test_when_and_what_is_validated_matters_where_it_decides_something(watching: str) -> None:
    before = BEFORE | {watching: 3}
    for key in ("train.validate_every_steps", "output.weights"):
        changed = compared({key: "now"}, before=before, now=before)
        assert changed == ("CHANGED", [f"{key}: before -> now"])


@pytest.mark.parametrize("key", ["objective.loss", "adapter.rslora"])
def test_a_setting_that_an_older_run_did_not_have_was_at_its_default(key: str) -> None:
    default = flatten(Config())[key]
    older = {other: value for other, value in BEFORE.items() if other != key}
    assert compared({key: default}, before=older) == ("EXACT", [])
    if key in FORBIDDEN:
        with pytest.raises(RequestError, match=f"{key} {default} -> now"):
            compared({key: "now"}, before=older)
    else:
        changed = compared({key: "now"}, before=older)
        assert changed == ("CHANGED", [f"{key}: {default} -> now"])


GONE: list[tuple[str, object, str, dict[str, Any]]] = [
    ("train.tighten_on_spike", True, "CHANGED", {}),
    ("train.lower_on_plateau", True, "CHANGED", {}),
    ("train.tighten_on_spike", False, "EXACT", {}),
    ("memory.base_matmul", "int8", "SAME-STREAM", {}),
    ("memory.base_matmul", "dequantized", "EXACT", {}),
    # A plateau that nothing could see.
    ("train.lower_on_plateau", True, "EXACT", {"data.validation_fraction": 0}),
    ("train.lower_on_plateau", True, "EXACT", {"train.validate_every_steps": 0}),
]


@pytest.mark.parametrize(("key", "value", "exactness", "others"), GONE)
def test_a_setting_that_is_gone_counts_where_it_had_an_effect(
    key: str, value: object, exactness: str, others: dict[str, Any]
) -> None:
    differences = [] if exactness == "EXACT" else [f"{key}: {value} -> removed in this version"]
    now = BEFORE | others
    assert compared({}, before=now | {key: value}, now=now) == (exactness, differences)
