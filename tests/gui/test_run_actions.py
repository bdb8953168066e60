"""What is done with a run: its buttons, its best step, its files and settings; and which runs there are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from lora_trainer.gui import drafts, run_actions, run_state, state
from lora_trainer.gui.run_best import exports, mark_best, read_best
from lora_trainer.gui.run_files import files_html
from lora_trainer.gui.run_samples import sample_sheet
from lora_trainer.gui.run_settings import preset_values, settings_html
from lora_trainer.gui.run_state import END_AFTER_S
from lora_trainer.gui.run_view import head
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import InputError, MachineError, RequestError
from lora_trainer.config.config import setting_keys
from lora_trainer.config.layers import RESUMED
from lora_trainer.lora_file.embedding import embedding_path
from lora_trainer.lora_file.write import prune_exports
from lora_trainer.queue import commands, worker
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.history import read_history
from lora_trainer.reporting.status import read_status
from tests.fakes.live_runs import until, write_status
from tests.fakes.run_folder import HOSTILE_CAPTION, PROMPTS, fake_run


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(runs=tmp_path / "runs")


@pytest.fixture
def folder(work: Workplace) -> Path:
    folder = until(fake_run(work.runs / "live", steps=30), 12)
    write_status(folder)
    return folder


@pytest.fixture
def trainer(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that obeys nothing, as the one that trains the run."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started_s = psutil.Process(process.pid).create_time()
        write_status(folder, pid=process.pid, pid_started_s=started_s)
        yield process
        process.kill()


def test_a_request_is_a_file_in_the_control_folder(work: Workplace, folder: Path) -> None:
    run_actions.ask(work, "live", "sample")
    assert Control(folder).pending() == {"sample"}
    write_status(folder, state="finished", exit_code=0)
    with pytest.raises(RequestError, match="is not being trained"):
        run_actions.ask(work, "live", "stop")
    with pytest.raises(RequestError, match="no run"):
        run_actions.ask(work, "../live", "stop")
    assert Control(folder).pending() == {"sample"}


def test_a_process_is_ended_only_after_it_was_told_to_stop_at_once_for_some_time(
    work: Workplace, folder: Path, trainer: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(RequestError, match="may still end by itself"):
        run_actions.end(work, "live")
    run_actions.ask(work, "live", "stop_now")
    with pytest.raises(RequestError, match="may still end by itself"):
        run_actions.end(work, "live")
    asked_s = time.time() - END_AFTER_S - 1
    os.utime(folder / "control" / "stop_now", (asked_s, asked_s))
    assert trainer.poll() is None
    run_actions.end(work, "live")
    assert trainer.wait() != 0
    assert read_status(folder).state == "interrupted"
    run_actions.end(work, "live")  # from a second tab: nothing is left to end


def test_resume_goes_through_the_queue(
    work: Workplace, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    monkeypatch.setattr(worker, "ensure_worker", started.append)
    with pytest.raises(RequestError, match="being trained already"):
        run_actions.resume(work, "live")
    write_status(folder, state="stopped", exit_code=143)
    with pytest.raises(InputError, match="does not say where its images are"):
        run_actions.resume(work, "live")
    images = tmp_path / "images"
    images.mkdir()
    run_actions.resume(work, "live", dataset=str(images))
    (item,) = commands.items(work.runs)
    assert item.argv == (str(images), f"--resume-from={folder.resolve()}")
    assert started == [work.runs]
    with pytest.raises(RequestError, match="in the queue already"):
        run_actions.resume(work, "live", dataset=str(images))


def test_the_best_step_has_to_be_a_number(work: Workplace, folder: Path) -> None:
    (folder / "zorble-step00000010.safetensors").write_bytes(b"ten")
    for step in ("10", None, True, 10.0, [10]):
        with pytest.raises(RequestError, match="no step"):
            run_actions.use_as_best(work, "live", step)
    assert run_actions.use_as_best(work, "live", 10).file == "live-best.safetensors"


def test_a_run_is_trained_again_with_what_was_chosen_for_it(
    work: Workplace, folder: Path, tmp_path: Path
) -> None:
    images = tmp_path / "zorble"
    images.mkdir()
    record = json.loads((folder / "run.json").read_text())
    record["dataset"]["name"] = images.name
    record["command"][1] = str(images)
    record["plan"]["priority"] = "quality"
    record["settings"]["output.name"] = "mine"
    record["origins"]["output.name"] = {"layer": "command line", "reason": ""}
    (folder / "run.json").write_text(json.dumps(record))
    draft = run_actions.clone(work, "live")
    assert draft == drafts.read(work, draft.id)
    assert (draft.dataset, draft.base, draft.priority) == (str(images), "embedded", "quality")
    assert draft.settings == {"train.steps": 30, "data.trigger": "zorble thing"}
    assert (draft.name, draft.step) == ("", 2)
    for origin in record["origins"].values():
        origin["layer"] = "resumed run"
    (folder / "run.json").write_text(json.dumps(record))
    images.rmdir()
    again = run_actions.clone(work, "live")
    assert (again.dataset, again.step) == ("", 1)
    assert again.settings["data.trigger"] == "zorble thing"
    assert not any(key.startswith("memory.") for key in again.settings)


@pytest.mark.parametrize(
    ("message", "chosen", "offered", "then"),
    [
        (
            "the learning rate, 1e-12, is far too low. Fix: leave optimizer.learning_rate out "
            "for the preset's, which suits most images",
            {"optimizer.learning_rate": 1e-12},
            "Train again with the usual learning rate, 0.0001",
            {},
        ),
        (
            "the adapter's update is scaled by only 0.001 (adapter.alpha / adapter.rank). Fix: leave "
            "adapter.alpha out; it then equals adapter.rank",
            {"adapter.alpha": 0.01},
            "Train again, alpha as usual",
            {},
        ),
        (
            "the loss is not finite. Fix: lower optimizer.learning_rate, or use "
            "--set train.precision=fp32, and resume",
            {},
            "Train again with precision fp32",
            {"train.precision": "fp32"},
        ),
        ("the disk is full. Fix: free some space", {}, "", {}),
    ],
)
def test_a_failed_run_is_trained_again_with_the_setting_that_mends_it(
    work: Workplace,
    folder: Path,
    message: str,
    chosen: dict[str, object],
    offered: str,
    then: dict[str, object],
) -> None:
    record = json.loads((folder / "run.json").read_text())
    record["settings"] |= chosen
    record["origins"] |= {key: {"layer": "command line", "reason": ""} for key in chosen}
    (folder / "run.json").write_text(json.dumps(record))
    write_status(folder, state="failed", exit_code=5, message=message)
    seen = run_state.look(folder, read_status(folder), now_s=time.time())
    assert not run_state.possible(seen).resume
    page = head(seen, read_history(folder))
    assert offered in page and ("mended=1" in page) is bool(offered)
    usual = {"train.steps": 30, "data.trigger": "zorble thing"}
    assert run_actions.clone(work, "live").settings == {**usual, **chosen}
    mended = run_actions.clone(work, "live", mended=True)
    assert mended.settings == {**usual, **then} and mended == drafts.read(work, mended.id)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A finished run of 30 steps with exports of 20 and 30; that of 10 was pruned."""
    finished = fake_run(tmp_path / "runs" / "my <run>", steps=30).write()
    (finished / "zorble-step00000020.safetensors").write_bytes(b"twenty")
    return finished


def test_sheet_is_prompts_by_steps_with_the_base_first(finished: Path) -> None:
    history = read_history(finished)
    sheet = sample_sheet(finished, history, exported=exports(finished, history), best=None)
    assert [prompt["text"] for prompt in sheet["prompts"]] == list(PROMPTS)
    assert [step["name"] for step in sheet["steps"]] == ["base", "step 10", "step 20", "step 30"]
    assert [bool(step["file"]) for step in sheet["steps"]] == [False, False, True, True]
    assert [step["best"] for step in sheet["steps"]] == [False, False, False, True]
    assert sheet["images"][1][2].startswith(
        "/media/run/my%20%3Crun%3E/samples/step-00000020/01.png?v="
    )
    assert HOSTILE_CAPTION in json.dumps(sheet, ensure_ascii=False).replace('\\"', '"')


def test_an_image_that_is_made_again_has_another_address(finished: Path) -> None:
    def address() -> str:
        return str(
            sample_sheet(finished, read_history(finished), exported={}, best=None)["images"][0]
        )

    before = address()
    os.utime(finished / "samples/step-00000010/00.png", (1.0, 1.0))
    assert address() != before


@pytest.mark.parametrize(
    "file",
    ["../secret.png", "/etc/hosts", "samples/step-00000010/../../run.json", "run.json", ""]
    + ["samples/step-00000010/99.png"],
)
def test_records_cannot_make_the_sheet_lead_elsewhere(finished: Path, file: str) -> None:
    (finished.parent / "secret.png").write_bytes(b"secret")
    rows = [
        json.loads(line) for line in (finished / "events.jsonl").read_text("utf-8").splitlines()
    ]
    for row in rows:
        for image in row.get("images", ()) if row["event"] == "sample" else ():
            image["file"] = file
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (finished / "events.jsonl").write_text(text, encoding="utf-8")
    sheet = sample_sheet(finished, read_history(finished), exported={}, best=None)
    assert {image for row in sheet["images"] for image in row} == {None}


def test_the_new_tokens_of_the_best_step_are_kept_with_it(finished: Path) -> None:
    (finished / "embeddings").mkdir()
    embedding_path(finished / "zorble-step00000020.safetensors").write_bytes(b"vectors")
    best = mark_best(finished, read_history(finished), 20)
    assert embedding_path(finished / best.file).read_bytes() == b"vectors"


def test_the_best_step_is_a_copy_that_pruning_leaves_alone(finished: Path) -> None:
    history = read_history(finished)
    assert read_best(finished) is None
    best = mark_best(finished, history, 20)
    assert best.file == "my <run>-best.safetensors"
    assert (finished / best.file).read_bytes() == b"twenty"
    prune_exports(finished, name="zorble", keep_last=0)
    prune_exports(finished, name=finished.name, keep_last=0)
    assert read_best(finished) == best
    assert set(exports(finished, history)) == {30}
    assert mark_best(finished, history, 30).step == 30
    assert (finished / best.file).stat().st_size == 3_288_000
    assert not list(finished.glob(".tmp-*"))


def test_a_step_without_a_file_cannot_be_marked(finished: Path) -> None:
    with pytest.raises(RequestError, match=r"no LoRA file of step 10 is there, only of: 20, 30"):
        mark_best(finished, read_history(finished), 10)
    assert read_best(finished) is None


def test_a_copy_that_the_disk_refuses_leaves_the_best_one_as_it_was(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = read_history(finished)
    best = mark_best(finished, history, 20)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", refuse)
    with pytest.raises(MachineError, match="No space left"):
        mark_best(finished, history, 30)
    assert read_best(finished) == best
    assert (finished / best.file).read_bytes() == b"twenty"


@pytest.mark.parametrize("name", ["../other.safetensors", "run.json", "a\nb.safetensors", "link"])
def test_only_lora_files_of_the_folder_are_exports(finished: Path, name: str) -> None:
    (finished.parent / "other.safetensors").write_bytes(b"other")
    (finished / "link.safetensors").symlink_to(finished.parent / "other.safetensors")
    name = "link.safetensors" if name == "link" else name
    (finished / "events.jsonl").write_text(
        json.dumps({"event": "saved", "step": 3, "export": name}) + "\n"
    )
    assert exports(finished, read_history(finished)) == {}


def test_files_have_downloads_a_report_and_say_which_is_the_best(finished: Path) -> None:
    history = read_history(finished)
    page = files_html(finished, exported=exports(finished, history), best=None)
    assert 'href="/media/run/my%20%3Crun%3E/zorble.safetensors"' in page
    assert page.index("step 30") < page.index("step 20")
    assert page.count("Mark this as the best") == 2
    assert "when the training ends" in page
    (finished / "report.html").write_text("x")
    best = mark_best(finished, history, 20)
    page = files_html(finished, exported=exports(finished, history), best=best)
    assert "the best: step 20" in page
    assert page.count("Mark this as the best") == 1
    assert "/report.html" in page
    assert "<run>" not in page
    assert "No LoRA file yet" in files_html(finished, exported={}, best=None)


PLAN = {"family": "sd15", "tier": "cpu", "priority": "balanced", "preset": "sd15/cpu"}


def record(**changed: tuple[Any, str, str]) -> dict[str, Any]:
    """A run.json whose settings are those of the preset but for `section__name=(value, who, why)`."""
    settings = dict(preset_values(PLAN))
    origins = {key: {"layer": "default", "reason": ""} for key in settings}
    for name, (value, layer, reason) in changed.items():
        key = name.replace("__", ".")
        settings[key] = value
        origins[key] = {"layer": layer, "reason": reason}
    return {"settings": settings, "origins": origins, "plan": PLAN}


def texts(page: str) -> list[str]:
    return [re.sub("<[^>]*>", "", part) for part in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page)]


def test_preset_is_what_the_files_of_presets_say() -> None:
    values = preset_values(PLAN)
    assert set(values) == set(setting_keys())
    assert values["optimizer.learning_rate"] == 0.002
    assert values["train.steps"] == "auto"
    assert values["sampling.prompts"] == [], "as JSON has it"


def test_only_differences_are_on_top_those_that_were_typed_first() -> None:
    page = settings_html(
        record(
            train__precision=("fp32", "planner", "16 bits save <no> time"),
            adapter__rank=(4, "command line", ""),
            optimizer__weight_decay=(0.5, "config my.toml", ""),
        )
    )
    top = page[: page.index("<details>")]
    assert f"3 of {len(setting_keys())} settings differ" in top
    assert texts(top)[5:10] == ["adapter.rank", "4", "16", "you", ""]
    assert "your file my.toml" in texts(top)
    decided = top[top.index("Decided for this machine") :]
    assert texts(decided)[5:] == [
        "train.precision",
        "fp32",
        "auto",
        "the planner",
        "16 bits save &lt;no&gt; time",
    ]
    assert page.count("<tr>") == 3 + 3 + len(setting_keys()), "three heads, three differences, all"


def test_a_resumed_run_says_that_its_values_are_its_own() -> None:
    page = settings_html(record(adapter__rank=(4, RESUMED, "")))
    assert "this run, as it began" in page


def test_of_an_unknown_preset_the_defaults_are_compared() -> None:
    run = record()
    run["plan"] = {"family": "of tomorrow", "tier": "cpu", "priority": "balanced"}
    assert preset_values(run["plan"])["optimizer.learning_rate"] != 0.002
    assert "optimizer.learning_rate" in texts(settings_html(run))
    for plan in ({}, {"tier": "cpu", "priority": []}, {"tier": "9-11", "priority": "speed"}):
        assert set(preset_values(plan)) == set(setting_keys())


def test_settings_that_nobody_knows_are_shown_all_the_same() -> None:
    run = {"settings": {"<b>.x": 1, "train.steps": None}, "origins": []}
    page = settings_html(json.loads(json.dumps(run)))
    assert "&lt;b&gt;.x" in page
    assert settings_html({}).startswith('<p class="quiet">No settings')


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def running(root: Path) -> Path:
    folder = until(fake_run(root / "live", steps=30), 12)
    write_status(folder)
    return folder


def test_runs_that_train_come_first_then_the_newest(root: Path, running: Path) -> None:
    for age, name in enumerate(("newer", "older"), start=1):
        folder = fake_run(root / name, steps=3).write()
        write_status(folder, state="finished", step=3, steps=3, exit_code=0)
        for file in folder.glob("*.json*"):
            os.utime(file, (time.time() + 10 - age, time.time() + 10 - age))
    entries = state.runs(root)
    assert [entry.name for entry in entries] == ["live", "newer", "older"]
    assert [entry.status.state for entry in entries][:2] == ["running", "finished"]


def test_only_folders_with_records_are_runs(root: Path) -> None:
    (root / "empty").mkdir()
    (root / "file").write_text("")
    hidden = root / ".gui"
    hidden.mkdir()
    (hidden / "run.json").write_text("{}")
    assert state.runs(root) == ()
    assert state.runs(root / "missing") == ()
    for name in ("empty", "file", ".gui"):
        with pytest.raises(RequestError, match="no run"):
            state.run_folder(root, name)


def test_stamp_changes_with_what_is_seen_and_not_with_a_heartbeat(running: Path) -> None:
    before = state.stamp(running, read_status(running))
    write_status(running, heartbeat_s=0.0)
    assert state.stamp(running, read_status(running)) == before
    Control(running).request("save")
    asked = state.stamp(running, read_status(running))
    with (running / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write("{}\n")
    written = state.stamp(running, read_status(running))
    write_status(running, done=13)
    further = state.stamp(running, read_status(running))
    write_status(running, pid=2**22 - 3)
    dead = state.stamp(running, read_status(running))
    assert len({before, asked, written, further, dead}) == 5
