"""The page of a run: what it shows at each moment, what its buttons do, and which parts are drawn again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lora_trainer.gui import drafts, run_actions, runs
from lora_trainer.gui.run import film as run_film
from lora_trainer.gui.run import head as run_head
from lora_trainer.gui.run import parts as run_parts
from lora_trainer.gui.run import routes
from lora_trainer.gui.run import view as run_view
from lora_trainer.gui.run.log import line_of
from lora_trainer.gui.run_state import look
from lora_trainer.gui.server.templates import render
from lora_trainer.gui.server.translation import words as words_of
from lora_trainer.gui.trash import store
from lora_trainer.gui.workplace import Workplace
from PIL import Image

from lora_trainer.common.errors import InputError, MachineError, RequestError
from lora_trainer.common.event_kinds import BaseLosses, Learned, Measured
from lora_trainer.config.config import setting_keys
from lora_trainer.lora_file.embedding import embedding_path
from lora_trainer.lora_file.write import prune_exports
from lora_trainer.queue import commands
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.film import why_no_mp4
from lora_trainer.reporting.history import read_history
from lora_trainer.reporting.status import end_process, read_status
from tests.fakes.live_runs import until, write_status
from tests.fakes.lora_library import finished_run
from tests.fakes.run_folder import HOSTILE_CAPTION, PROMPTS, fake_run
from tests.fakes.runs import run_cli

DEAD = 2**22 - 3
GIB = 1 << 30
TRAINING = {"save", "sample", "stop"}


@pytest.fixture
def live(work: Workplace) -> Path:
    """A run of 30 steps that trains, at step 12; its last save was at step 10."""
    folder = until(fake_run(work.runs / "live", steps=30), 12)
    write_status(folder)
    return folder


@pytest.fixture
def finished(work: Workplace) -> Path:
    """A finished run of 30 steps with exports of 20 and 30; that of 10 was pruned."""
    folder = fake_run(work.runs / "my <run>", steps=30).write()
    write_status(folder, state="finished", step=30, steps=30, exit_code=0)
    (folder / "zorble-step00000020.safetensors").write_bytes(b"twenty")
    return folder


def now(folder: Path, *, later_s: float = 0.0) -> Any:
    return look(folder, read_status(folder), now_s=time.time() + later_s)


def page(folder: Path, **when: float) -> dict[str, Any]:
    """Return the parts of the page as they are drawn; the buttons by those that are of use."""
    parts = run_parts.parts(now(folder, **when), runs.Followed().read(folder))
    drawn = {name: part.draw(words_of("en")) for name, part in parts.items()}
    drawn["buttons"] = set(drawn["buttons"])
    return drawn


def head(folder: Path, **when: float) -> str:
    """Return the head of the page with the figures below it."""
    drawn = page(folder, **when)
    return f"{drawn['head']}{drawn['figures']}"


def said(folder: Path) -> str:
    (sentence,) = re.findall(r'<p class="said [^>]*>(.*?)</p>', head(folder))
    return str(sentence)


def change_record(folder: Path, change: Any) -> None:
    """Let `change` change what run.json holds."""
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    change(record)
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")


def change_events(folder: Path, change: Any) -> None:
    """Let `change` change each row of events.jsonl."""
    file = folder / "events.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        change(row)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def append(folder: Path, **row: object) -> None:
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def test_one_sentence_says_what_it_does_and_before_the_first_step_there_are_stages(
    live: Path, work: Workplace
) -> None:
    images = {"phase": "cache", "done": 14, "total": 23, "message": "x.png"}
    stopped = "Stopped at step 12 of 30, its state saved; Resume goes on from there."
    for fields, words in (
        ({}, "Training."),
        (images, "Preparing the images: 14 of 23."),
        ({"phase": "cache", "message": "captions", "total": 0}, "Preparing the captions."),
        ({"phase": "", "state": "starting"}, "Starting."),
        ({"phase": "novel", "message": "something new"}, "something new."),
        ({"phase": "quit"}, "Stopping at once, without saving."),
        ({"state": "finished", "exit_code": 0}, "Finished after 12 steps."),
        ({"state": "stopped", "exit_code": 143}, stopped),
        ({"state": "failed", "exit_code": 4}, "Failed at step 12 of 30."),
        ({"pid": DEAD}, "Interrupted at step 12 of 30."),
    ):
        write_status(live, **fields)
        assert said(live) == words
    new = until(fake_run(work.runs / "new", steps=30), 0)
    cached = {"phase": "cache", "done": 1, "total": 9, "message": "x.png", "steps_here": 0}
    write_status(new, step=0, **cached, left_s=None)
    assert "Time left" not in head(new)
    write_status(new, step=0, **cached, left_s=300.0, left_from="from 3 finished runs")
    shown = head(new)
    assert "about 5 min" not in shown, "the middle of a range, which steps may change tenfold"
    record = json.loads((new / "run.json").read_text())
    words_of_slider = {"name": "red.toml"}
    record["plan"] = {**record.get("plan", {}), "time": {"run_s": [240, 480], "beside_others": 2.0}}
    (new / "run.json").write_text(json.dumps(record))
    shown = head(new)
    assert "<dt>Takes</dt><dd>about 8 to 16 min</dd><dd>from 3 finished runs</dd>" in shown
    assert "Check your images" in shown
    record["dataset"] = {**record.get("dataset", {}), **words_of_slider}
    (new / "run.json").write_text(json.dumps(record))
    assert "Read the words of the slider" in head(new) and "Check your images" not in head(new)
    assert "A step takes" not in shown and "meter" not in shown
    stages = re.findall(r'<li class="(\w+)"', shown)
    assert stages == ["done", "now", "later", "later", "later"]
    assert "1 of 9" in shown and 'aria-current="step"' in shown and 'aria-valuenow="11"' in shown
    assert "begins with the first step" in page(new)["chart"]["drawn"]
    # In the order of a training, no tick is taken back: the base is looked at before the first step.
    at = []
    for phase in ("scan", "cache", "load", "base", "sample", "train"):
        write_status(new, step=0, steps_here=0, phase=phase, done=0, total=4)
        at.append(re.findall(r'<li class="(\w+)"', head(new)).index("now"))
    assert at == [0, 1, 2, 3, 3, 4]
    write_status(new, step=0, phase="train", done=0, total=30)
    assert "stages" not in head(new), "the first step is done"
    record = json.loads((live / "run.json").read_text())
    record["plan"] = {**record.get("plan", {}), "time": {"run_s": [60, 120], "beside_others": 2.0}}
    (live / "run.json").write_text(json.dumps(record))
    for left_s, said_too in ((60.0, False), (3600.0, True)):
        write_status(live, left_s=left_s)
        assert ("from the first 12 steps; longer than planned" in head(live)) == said_too


def add_previews(folder: Path, steps: Sequence[int], **more: object) -> None:
    """Write previews of a run, each with its record."""
    (folder / "previews").mkdir()
    for step in steps:
        file = f"previews/step-{step:08d}.jpg"
        Image.new("RGB", (64, 48), (step, 90, 90)).save(folder / file)
        fields = {"prompt": PROMPTS[0], "seed": 1234, "drawn": "real", "denoising_steps": 6}
        append(folder, event="preview", step=step, file=file, seconds=0.1, **{**fields, **more})


def test_the_film_has_the_previews_says_what_they_are_and_is_saved(
    live: Path, work: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = page(live)["film"]
    assert [frame["name"] for frame in samples["frames"]] == ["base", "step 10"] and samples["goes"]
    assert {frame["how"] for frame in samples["frames"]} == {"A sample image, drawn in full."}
    add_previews(live, [0, 4, 8], drawn="approximate")
    assert [frame["step"] for frame in page(live)["film"]["frames"]] == [0, 4, 8, 10], (
        "the newest picture is a sample"
    )
    append(live, event="preview", step=12, file="../../secret.jpg", drawn="real")
    shown = page(live)["film"]
    assert [frame["step"] for frame in shown["frames"]] == [0, 4, 8], (
        "and no file of another folder"
    )
    assert {frame["how"].split(",")[0] for frame in shown["frames"]} == {
        "A quick preview: only 6 denoising steps"
    }
    assert all(frame["src"].startswith("/media/run/live/previews/") for frame in shown["frames"])
    with pytest.raises(InputError, match=r"secret.jpg of step 12 cannot be read"):
        run_film.film_file(work, "live", "gif")
    lines = (live / "events.jsonl").read_text(encoding="utf-8").splitlines()
    (live / "events.jsonl").write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    kind, made = run_film.film_file(work, "live", "gif")
    with Image.open(BytesIO(made)) as film:
        frames = film.n_frames  # type: ignore[attr-defined] # of a GIF
        assert (kind, film.format, frames) == ("gif", "GIF", 3)
    with pytest.raises(RequestError, match="not a kind of film"):
        run_film.film_file(work, "live", "exe")
    if why_no_mp4():
        with pytest.raises(MachineError, match="MP4 needs PyAV"):
            run_film.film_file(work, "live", "mp4")
    else:
        assert run_film.film_file(work, "live", "mp4")[1][4:8] == b"ftyp"
    monkeypatch.chdir(tmp_path)
    assert run_cli(["film", str(live)]) == 0
    assert Path("live.gif").read_bytes() == made
    assert run_cli(["film", str(live)]) == 2, "it is there already"
    assert run_cli(["film", str(live), "--output", "film.avi"]) == 2


def test_stop_saves_force_stop_does_not_and_a_process_that_obeys_neither_is_ended(
    live: Path, work: Workplace
) -> None:
    assert page(live)["buttons"] == TRAINING
    run_actions.ask(work, "live", "stop")
    assert Control(live).pending() == {"stop"}
    assert page(live)["buttons"] == {"force"} and said(live).startswith("Asked to stop")
    write_status(live, phase="stop")  # it has seen the request
    Control(live).done("stop")
    assert page(live)["buttons"] == {"force"} and "goes on from step 10" in head(live)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as trainer:
        started_s = psutil.Process(trainer.pid).create_time()
        write_status(live, pid=trainer.pid, pid_started_s=started_s)
        with pytest.raises(RequestError, match="may still end by itself"):
            run_actions.end(work, "live")
        run_actions.ask(work, "live", "stop_now")
        assert page(live)["buttons"] == set()
        later_s = 16  # a second longer than a page waits
        assert page(live, later_s=later_s)["buttons"] == {"end"}
        assert str(trainer.pid) in head(live, later_s=later_s)
        with pytest.raises(RequestError, match="may still end by itself"):
            run_actions.end(work, "live")
        asked_s = time.time() - later_s
        os.utime(live / "control" / "stop_now", (asked_s, asked_s))
        other = replace(read_status(live), pid_started_s=started_s - 60)
        assert not end_process(other), "a number that is used again is another process"
        run_actions.end(work, "live")
        assert trainer.wait() != 0
    assert read_status(live).state == "interrupted"
    run_actions.end(work, "live")  # from a second tab: nothing is left to end
    Control(live).done("stop_now")
    write_status(live, phase="quit", heartbeat_s=time.time() - later_s)
    assert page(live)["buttons"] == {"end"}, "it has seen the request and hangs"
    write_status(live, phase="quit")
    assert page(live)["buttons"] == set()


def test_what_ended_early_is_resumed_through_the_queue(
    live: Path, work: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    monkeypatch.setattr("lora_trainer.queue.worker.ensure_worker", started.append)
    with pytest.raises(RequestError, match="being trained already"):
        run_actions.resume(work, "live")
    assert "/train?again=live" not in page(live)["take"]
    for fields in ({"pid": DEAD}, {"state": "failed", "exit_code": 4}, {"state": "stopped"}):
        write_status(live, **fields)
        assert page(live)["buttons"] == {"resume"}
        assert page(live)["where"] is True, "somebody has to say where its images are"
        assert ("/train?again=live" in page(live)["take"]) is ("pid" not in fields)
        assert "/train?again=live" not in head(live), "nothing is offered twice"
    for refused, why in (
        (lambda: run_actions.ask(work, "live", "stop"), "is not being trained"),
        (lambda: run_actions.ask(work, "../live", "stop"), "no run"),
    ):
        with pytest.raises(RequestError, match=why):
            refused()
    with pytest.raises(InputError, match="does not say where its images are"):
        run_actions.resume(work, "live")
    images = tmp_path / "images"
    images.mkdir()
    run_actions.resume(work, "live", dataset=str(images))
    (item,) = commands.items(work.runs)
    assert item.argv == (str(images), f"--resume-from={live.resolve()}")
    assert started == [work.runs]
    assert said(live) == "Waits in the queue to be resumed from step 12 of 30."
    assert page(live)["buttons"] == set()
    with pytest.raises(RequestError, match="in the queue already"):
        run_actions.resume(work, "live", dataset=str(images))
    commands.remove(work.runs, item.id)
    assert page(live)["buttons"] == {"resume"}
    write_status(live, state="finished")
    assert page(live)["buttons"] == set()


def test_a_file_that_was_asked_for_is_said_where_the_button_is_and_stays_once_it_is_stopped(
    live: Path, work: Workplace
) -> None:
    def taken(code: str = "en") -> str:
        parts = run_parts.parts(now(live), runs.Followed().read(live))
        return str(parts["take"].draw(words_of(code)))

    for file in live.glob("*.safetensors"):
        file.unlink()
    assert taken().strip() == ""
    (live / "zorble-step00000010.safetensors").write_bytes(b"ten")
    for address in (
        "/media/run/live/zorble-step00000010.safetensors",
        "/library?file=live%2Fzorble",
    ):
        assert address in taken()
    assert "Saved: step 10" in taken() and "Gespeichert: Schritt 10" in taken("de")
    write_status(live, state="stopped", exit_code=143)
    shown = taken()
    assert "Download step 10" in shown and "Try it" in shown and "Saved: step" not in shown
    assert shown.index("Download") < shown.index("Try it") < shown.index("Train again")
    assert page(live)["buttons"] == {"resume"}
    write_status(live, state="finished", exit_code=0)
    assert taken().strip() == "", "its head has them"


def test_a_failure_requests_silence_a_recovery_and_damage_are_told_above_the_figures(
    live: Path,
) -> None:
    assert "notice" not in head(live)
    for request, words in (("save", "Asked to save"), ("sample", "to make sample images")):
        run_actions.ask(Workplace(runs=live.parent), "live", request)
        assert words in head(live)
        Control(live).done(request)
    write_status(live, heartbeat_s=time.time() - 200)
    assert "nothing for 3 min" in head(live)
    write_status(live, heartbeat_s=time.time() - 200, state="finished")
    assert "notice" not in head(live).replace("notice try-out", "")
    message = "the disk <img src=x onerror=alert(1)> is full. Fix: <b>free</b> some."
    write_status(live, state="failed", exit_code=4, message=message)
    shown = head(live)
    assert shown.index("What to do: ") < shown.index("figures")
    assert "The disk &lt;img" in shown and "&lt;b&gt;free&lt;/b&gt; some" in shown
    assert "<img" not in shown and "<b>free" not in shown
    write_status(live, pid=DEAD)
    assert "without a word" in head(live) and "from step 10" in head(live)
    (live / "status.json").write_text("[]")
    assert "cannot be read" in head(live)
    full = until(fake_run(live.parent / "full", steps=30), 20)
    write_status(full)
    assert "Recovered from out of memory at step 15: images at a time 8 -&gt; 4" in head(full)
    append(full, event="change", key="memory.micro_batch", old=4, new=8, reason="50 steps fitted")
    assert "Recovered" not in head(full)
    write_status(live)
    until(fake_run(live.parent / "whole", steps=30), 12)
    (live / "run.json").write_text("{")
    with pytest.raises(RequestError) as refused:
        runs.Followed().read(live)
    parts = run_parts.damaged_parts(now(live), str(refused.value))
    drawn = {name: part.draw(words_of("en")) for name, part in parts.items()}
    assert set(drawn) == set(
        run_parts.parts(now(live), runs.Followed().read(live.parent / "whole"))
    )
    assert "not JSON" in drawn["head"] and "stop" in drawn["buttons"]


def test_head_has_progress_pace_time_left_and_losses_memory_stands_in_the_bar_until_it_ends(
    live: Path,
) -> None:
    shown = head(live)
    assert "width:40.0%" in shown and 'aria-valuenow="40"' in shown
    for words in ("12 of 30", "about 9 s", "0.19 s", "mean of the last 12 steps"):
        assert words in shown
    assert "below the base&#x27;s" in shown and "Memory" not in shown
    write_status(live, left_s=600.0)
    assert "about 10 min<" in head(live)
    write_status(live, state="stopped", exit_code=130)
    assert "1.0 GiB" in head(live) and "predicted 1.2 GiB" in head(live), "of the process"

    def on_a_card(row: dict[str, Any]) -> None:
        if row["event"] == "step":
            row |= {"vram_reserved_bytes": 7 * GIB + row["step"], "vram_used_bytes": 8 * GIB}

    items = [{"name": "runtime", "bytes": GIB, "note": ""}, "odd", {"name": "base"}]
    predicted = {"items": items, "peak_bytes": 9 * GIB, "limit_bytes": 11 * GIB}
    change_events(live, on_a_card)
    change_record(live, lambda record: record["plan"]["memory"].update(predicted))
    shown = head(live)
    assert "8.0 GiB" in shown and "at most; predicted 9.0 GiB" in shown, (
        "the highest reserved plus what libraries hold"
    )


def test_a_finished_run_names_the_best_step_that_has_a_file_and_where_its_lora_works(
    work: Workplace,
) -> None:
    folder = finished_run(work.runs / "done")

    def measured(at: int, step: int, loss: float) -> None:
        def change(row: dict[str, Any]) -> None:
            if row["event"] == "validation" and row["step"] == at:
                row |= {"step": step, "loss": loss}

        change_events(folder, change)

    measured(21, 20, 0.04)
    shown = head(folder)
    assert "Step 20 did best" in shown and "compare its samples below" in shown
    assert "Download step 20 (best)" in shown and "Around step" not in shown
    write_status(folder, state="stopped", exit_code=143)
    parts = run_parts.parts(now(folder), runs.Followed().read(folder))
    assert "Download step 20, the best saved" in str(parts["take"].draw(words_of("en")))
    write_status(folder, state="finished", exit_code=0)
    measured(15, 15, 0.001)
    shown = head(folder)
    assert "Step 20 did best" in shown and "Download step 20 (best)" in shown
    assert "Around step 15 the loss was lower (0.0010)" in shown
    assert "not in ComfyUI" in shown and "Copy to ComfyUI" not in shown
    change_record(folder, lambda record: record["base"].update(source="owner/model"))
    assert "not in ComfyUI" not in head(folder) and "Copy to ComfyUI" in head(folder)


def test_the_log_is_in_words_and_has_the_newest_first(finished: Path) -> None:
    for row in (
        {"event": "stopped", "exit_code": 4, "step": 2, "reason": "no disk"},
        {"event": "stopped", "exit_code": 143, "step": 2, "reason": "asked"},
        {"event": "stopped", "exit_code": 143, "step": 3, "reason": "stopped after step 3 of 9"},
        {"event": "out_of_memory", "images_at_once": 8},
        {"event": "resumed", "step": 4, "exactness": "EXACT"},
        {"event": "something_new"},
    ):
        append(finished, **row)
    german = run_parts.log_html(runs.Followed().read(finished).recent, words_of("de"))
    assert german.startswith('<p class="quiet">Was das Programm geschrieben hat, auf Englisch.</p>')
    assert 'lang="en"' in german
    shown = page(finished)["log"]
    assert "in English" not in shown
    assert shown.index("Finished: zorble.safetensors.") < shown.index("Started: 30 steps")
    words = re.sub("<[^>]*>", "", shown)
    for line in (
        "Step 10: saved zorble-step00000010.safetensors and step-00000010 (3.1 MiB of state",
        "Changed \u201cMicro batch\u201d 8 -&gt; 4: out of memory in backward",
        *("The base: validation loss 0.1337.", "Step 20: 3 sample images.", "Export it again"),
        "warning: broken/owl &lt;b&gt;17&lt;/b&gt;.jpg: image is cut off",
        *("error: Stopped at step 2: no disk.", "Stopped at step 2: asked."),
        *("warning: Out of memory with 8 images", "as if it had not stopped", "Something new."),
    ):
        assert line in words, line
    assert "error: Stopped at step 2: asked" not in words
    assert "Stopped after step 3 of 9." in words and "Stopped at step 3" not in words
    assert HOSTILE_CAPTION not in shown and "<b>17" not in shown
    assert "step 7" not in words.lower(), "single steps are in the chart"


VALUES = st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.none())
KEYS = st.sampled_from(["time", "step", "seconds", "bytes", "loss", "file", "what", "images"])
KINDS = ["run_started", "resumed", "cached", "validation", "sample", "saved", "change", "stopped"]


@given(st.sampled_from([*KINDS, "finished", "x"]), st.dictionaries(KEYS, VALUES))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_records_are_no_error(live: Path, kind: str, fields: dict[str, Any]) -> None:
    append(live, **{**fields, "event": kind})
    page(live)


@pytest.fixture
def long_run(work: Workplace) -> Path:
    folder = until(fake_run(work.runs / "live", steps=1000), 600)
    write_status(folder, step=600, steps=1000)
    return folder


def changed(folder: Path, followed: runs.Followed, before: dict[str, object]) -> set[str]:
    found = run_parts.parts(now(folder), followed.read(folder))
    names = {name for name, part in found.items() if before.get(name) != part.key}
    before.update({name: part.key for name, part in found.items()})
    return names


def test_a_part_is_drawn_again_when_it_changes(long_run: Path) -> None:
    followed, before = runs.Followed(), dict[str, object]()
    assert len(changed(long_run, followed, before)) == 12
    assert changed(long_run, followed, before) == set()
    drawn = []
    for step in range(601, 607):
        append(long_run, event="step", step=step, loss=0.5, seconds=0.2)
        write_status(long_run, step=step, steps=1000)
        drawn.append(changed(long_run, followed, before))
    assert all({"head", "figures"} <= names <= {"head", "figures", "chart"} for names in drawn)
    assert sum("chart" in names for names in drawn) == 2
    append(long_run, event="validation", step=606, loss=0.4)
    assert changed(long_run, followed, before) >= {"chart", "log"}
    (long_run / "zorble-step00000333.safetensors").write_bytes(b"x")
    assert changed(long_run, followed, before) == {"samples", "files", "take"}
    stamps = [run_parts.stamp(now(long_run))]
    write_status(long_run, step=606, steps=1000, heartbeat_s=time.time() - 1)
    assert run_parts.stamp(now(long_run)) == stamps[0]
    for change in (
        lambda: Control(long_run).request("save"),
        lambda: append(long_run),
        lambda: write_status(long_run, step=606, steps=1000, pid=DEAD),
        lambda: run_actions.use_as_best(Workplace(runs=long_run.parent), "live", 333),
    ):
        change()
        stamps.append(run_parts.stamp(now(long_run)))
    assert len(set(stamps)) == 5
    write_status(long_run, step=606, steps=1000)
    Control(long_run).done("save")
    assert changed(long_run, followed, before) == {"samples", "files", "chart"}
    append(long_run, event="sample", step=600, images=[{"prompt": "p", "seed": 1, "file": "x"}])
    assert changed(long_run, followed, before) == {"samples", "film", "log"}
    shown = page(long_run)
    assert "<svg" in shown["chart"]["drawn"]
    json.dumps(shown["samples"], allow_nan=False)


def test_a_tab_is_sent_the_parts_that_it_does_not_show_in_its_language(long_run: Path) -> None:
    followed, german = runs.Followed(), words_of("de")
    first = run_view.shown(long_run, followed, german)
    assert first["goes"] and set(first["keys"]) == set(first["parts"])
    assert (
        "Das Training läuft." in first["parts"]["head"]
        and "Training." not in first["parts"]["head"]
    )
    assert "jeder Schritt" in first["parts"]["chart"]["drawn"]
    assert first["parts"]["samples"]["steps"][0]["name"] == "Basis"
    assert "sample images" in first["parts"]["log"], "the log stays as it was written"

    def sent(stamp: str, keys: dict[str, str]) -> dict[str, Any]:
        return dict(run_view.changed(long_run, followed, german, before=stamp, keys=keys))

    assert sent(first["stamp"], first["keys"]) == {"goes": True, "stamp": first["stamp"]}
    assert set(sent("of before the server started again", {})["parts"]) == set(first["keys"])
    Control(long_run).request("stop")
    now = sent(first["stamp"], first["keys"])
    assert set(now["parts"]) == {"head", "figures", "buttons"} and now["parts"]["buttons"][
        "drawn"
    ] == ["force"]
    keys = {**first["keys"], **{name: part["key"] for name, part in now["parts"].items()}}
    write_status(long_run, step=600, steps=1000, state="stopped", exit_code=143)
    ended = sent(now["stamp"], keys)
    assert not ended["goes"] and ended["parts"]["where"]["drawn"] is True
    assert ended["parts"]["buttons"]["drawn"] == ["resume"]


def test_what_a_button_did_or_why_not_is_said(live: Path, work: Workplace) -> None:
    german = words_of("de")

    def press(run: str, action: Any, **more: Any) -> Any:
        return routes.pressed(work, run, routes.Press(action=action, **more), german)

    assert press("live", "save") == {"done": ""} and Control(live).pending() == {"save"}
    assert press("live", "force") == {"done": ""} and "stop_now" in Control(live).pending()
    (live / "zorble-step00000010.safetensors").write_bytes(b"ten")
    assert "live-best.safetensors" in press("live", "best", step=10)["done"]
    for run, action in (("live", "end"), ("live", "resume"), ("../live", "stop"), ("", "best")):
        assert press(run, action)["error"]
    assert routes.folder_of(work, "../live") is None and routes.folder_of(work, "live") == live
    missing = render("run/missing.html", german, **run_view.missing("<b>", german))
    assert "&lt;b&gt;" in missing and "Kein Training hei\u00dft" in missing


def test_the_page_of_a_deleted_run_says_that_it_is_in_the_trash_and_brings_it_back(
    finished: Path, work: Workplace
) -> None:
    thrown = store.throw_away(work, kind="run", ref=finished.name)
    german = words_of("de")
    for name, is_there in ((finished.name, True), ("none", False), ("", False), ("../x", False)):
        found = store.holding(work, name)
        shown = render("run/missing.html", german, **run_view.missing(name, german, thrown=found))
        assert (f'data-back="{thrown.id}"' in shown and 'href="/trash"' in shown) is is_there
        assert ("ist im Papierkorb" in shown) is is_there is ("gibt es nicht" not in shown)
    store.put_back(work, thrown.id)
    assert store.holding(work, finished.name) is None and finished.is_dir()


def test_tabs_of_one_run_share_what_was_read_until_nobody_looks(
    long_run: Path, tmp_path: Path
) -> None:
    followed = runs.Followed()

    def steps() -> Any:
        return followed.read(long_run).history.steps

    with ThreadPoolExecutor(3) as tabs:
        counts = [tabs.submit(lambda: len(steps())) for _ in range(60)]
        for step in range(601, 640):
            append(long_run, event="step", step=step, loss=0.5)
        assert all(600 <= count.result() <= 639 for count in counts)
    first = steps()[0]
    assert len(steps()) == 639 and steps()[0] is first, "it was not parsed again"
    others = [fake_run(tmp_path / str(number), steps=2).write() for number in range(8)]
    for half in (others[:4], others[4:]):
        for other in half:
            followed.read(other)
        assert steps()[0] is first, "it was looked at meanwhile"
    for other in others:
        followed.read(other)
    assert steps()[0] is not first


def test_a_run_is_trained_again_with_what_was_chosen_for_it(
    work: Workplace, live: Path, tmp_path: Path
) -> None:
    images = tmp_path / "zorble"
    images.mkdir()
    origins: dict[str, Any] = {}

    def chosen(record: dict[str, Any]) -> None:
        record["dataset"]["name"] = images.name
        record["command"][1] = str(images)
        record["plan"]["priority"] = "quality"
        record["settings"]["output.name"] = "mine"
        record["origins"]["output.name"] = {"layer": "command line", "reason": ""}
        origins.update(record["origins"])

    change_record(live, chosen)
    draft = run_actions.clone(work, "live")
    assert draft == drafts.read(work, draft.id)
    assert (draft.dataset, draft.base, draft.priority) == (str(images), "embedded", "quality")
    assert draft.settings == {"train.steps": 30, "data.trigger": "zorble thing"}
    assert (draft.name, draft.step) == ("", 2)
    resumed = {key: {"layer": "resumed run", "reason": ""} for key in origins}
    change_record(live, lambda record: record.update(origins=resumed))
    images.rmdir()
    again = run_actions.clone(work, "live")
    assert (again.dataset, again.step) == ("", 1)
    assert again.settings["data.trigger"] == "zorble thing"
    assert not any(key.startswith("memory.") for key in again.settings)
    assert "this run, as it began" in page(live)["settings"]
    assert "earlier version" not in page(live)["settings"]
    change_record(live, lambda record: record["settings"].update({"adapter.init": "pissa"}))
    assert "Of an earlier version: adapter.init=pissa." in page(live)["settings"]
    assert "adapter.init" not in run_actions.clone(work, "live").settings


def test_a_failed_run_is_trained_again_with_the_setting_that_mends_it(
    work: Workplace, live: Path
) -> None:
    usual = {"train.steps": 30, "data.trigger": "zorble thing"}
    low = (
        "the learning rate, 1e-12, is far too low. Fix: leave optimizer.learning_rate out "
        "for the preset's, which suits most images"
    )
    infinite = (
        "the loss is not finite. Fix: lower optimizer.learning_rate, or use "
        "--set train.precision=fp32, and resume"
    )
    at_usual = "Train again with the usual learning rate, 0.0001"
    in_fp32 = "Train again with precision fp32"
    before = (live / "run.json").read_bytes()
    for message, chosen, offered, then in (
        (low, {"optimizer.learning_rate": 1e-12}, at_usual, {}),
        (infinite, {}, in_fp32, {"train.precision": "fp32"}),
        ("the disk is full. Fix: free some space", {}, "", {}),
    ):
        (live / "run.json").write_bytes(before)

        def choose(record: dict[str, Any], chosen: dict[str, float] = chosen) -> None:
            record["settings"] |= chosen
            record["origins"] |= {key: {"layer": "command line", "reason": ""} for key in chosen}

        change_record(live, choose)
        write_status(live, state="failed", exit_code=5, message=message)
        shown = page(live)
        assert shown["buttons"] == set(), "a run that learns nothing would learn nothing again"
        assert offered in shown["head"] and ("mended=1" in shown["head"]) is bool(offered)
        assert run_actions.clone(work, "live").settings == {**usual, **chosen}
        mended = run_actions.clone(work, "live", mended=True)
        assert mended.settings == {**usual, **then} and mended == drafts.read(work, mended.id)


def test_a_finished_run_says_what_was_weak_and_a_press_trains_again_with_the_change(
    finished: Path, live: Path, work: Workplace
) -> None:
    def worse(row: dict[str, Any]) -> None:
        if row["event"] == "validation" and row["step"] > 15:
            row["loss"] = 0.11

    assert "What to do better" not in page(live)["coach"], "it has not finished"
    change_events(finished, worse)
    images = [
        {
            "image": f"{n}.png",
            "held_out": False,
            "base": 0.1,
            "lora": lora,
            "other_caption": 1.2 * lora,
        }
        for n, lora in enumerate((0.04, 0.039, 0.041, 0.04, 0.042, 0.095))
    ]
    append(finished, event="image_losses", step=30, seconds=1.0, levels=3, images=images, time=1.0)
    (work.own / "pictures").mkdir(parents=True)
    command = ["lora-train", str(work.own / "pictures")]

    def where(record: dict[str, Any]) -> None:
        record["command"], record["dataset"]["name"] = command, "pictures"

    change_record(finished, where)
    shown = page(finished)["coach"]
    assert "It was best at step 15" in shown and "5.png: little was learned of it" in shown
    assert "advice=too-long" in shown and "Train again with 15 steps" in shown
    assert "file=5.png" in shown and "find=5.png" in shown, (
        "its picture, and the way to its caption"
    )
    again = run_actions.clone(work, finished.name, advice="too-long")
    assert again.settings["train.steps"] == 15
    assert run_actions.clone(work, finished.name, advice="nothing").settings["train.steps"] == 30
    in_german = run_parts.parts(now(finished), runs.Followed().read(finished))["coach"]
    assert "Am besten war es bei Schritt 15" in in_german.draw(words_of("de"))


def test_the_sheet_is_prompts_by_steps_with_the_base_first(finished: Path) -> None:
    sheet = page(finished)["samples"]
    assert [prompt["text"] for prompt in sheet["prompts"]] == list(PROMPTS)
    assert [step["name"] for step in sheet["steps"]] == ["base", "step 10", "step 20", "step 30"]
    assert [bool(step["file"]) for step in sheet["steps"]] == [False, False, True, True]
    assert [step["best"] for step in sheet["steps"]] == [False, False, False, True]
    image = "/media/run/my%20%3Crun%3E/samples/step-00000020/01.png?v="
    assert sheet["images"][1][2].startswith(image)
    os.utime(finished / "samples/step-00000020/01.png", (1.0, 1.0))
    assert page(finished)["samples"]["images"][1][2] != sheet["images"][1][2], "made again"
    # Records cannot make the page lead elsewhere.
    (finished.parent / "secret.png").write_bytes(b"secret")
    (finished.parent / "other.safetensors").write_bytes(b"other")
    (finished / "link.safetensors").symlink_to(finished.parent / "other.safetensors")
    for file, export in (
        ("../secret.png", "../other.safetensors"),
        ("/etc/hosts", "link.safetensors"),
        ("samples/step-00000010/../../run.json", "run.json"),
        ("samples/step-00000010/99.png", "a\nb.safetensors"),
    ):

        def elsewhere(row: dict[str, Any], file: str = file, export: str = export) -> None:
            for image in row.get("images", ()) if row["event"] == "sample" else ():
                image["file"] = file
            row |= {"export": export} if "export" in row else {}

        change_events(finished, elsewhere)
        shown = page(finished)
        assert {image for row in shown["samples"]["images"] for image in row} == {None}
        assert "No LoRA file yet" in shown["files"]


def test_the_best_step_is_a_copy_that_pruning_leaves_alone(
    finished: Path, work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, twenty = finished.name, finished / "zorble-step00000020.safetensors"
    files = page(finished)["files"]
    assert 'href="/media/run/my%20%3Crun%3E/zorble.safetensors"' in files
    assert files.index("step 30") < files.index("step 20")
    assert files.count("Mark this as the best") == 2 and "when the training ends" in files
    no_steps = [(wrong, "not a step") for wrong in ("10", True, 10.0)]
    for step, why in (*no_steps, (10, "only of: 20, 30")):
        with pytest.raises(RequestError, match=why):
            run_actions.use_as_best(work, run, step)
    (finished / "embeddings").mkdir()
    embedding_path(twenty).write_bytes(b"vectors")
    (finished / "report.html").write_text("x")
    best = run_actions.use_as_best(work, run, 20)
    assert (best.file, best.step) == ("my <run>-best.safetensors", 20)
    assert embedding_path(finished / best.file).read_bytes() == b"vectors"
    prune_exports(finished, name="zorble", keep_last=0)
    prune_exports(finished, name=run, keep_last=0)
    assert not twenty.exists()
    files = page(finished)["files"]
    assert "the best: step 20" in files and "/report.html" in files and "<run>" not in files
    assert files.count("Mark this as the best") == 1

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", refuse)
        with pytest.raises(MachineError, match="No space left"):
            run_actions.use_as_best(work, run, 30)
    assert (finished / best.file).read_bytes() == b"twenty"
    assert "the best: step 20" in page(finished)["files"]
    assert run_actions.use_as_best(work, run, 30).step == 30
    assert (finished / best.file).stat().st_size == 3_288_000
    assert not list(finished.glob(".tmp-*"))


def texts(part: str) -> list[str]:
    return [re.sub("<[^>]*>", "", each) for each in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", part)]


def test_the_film_of_a_finished_run_opens_at_the_sample_of_the_best_step(finished: Path) -> None:
    add_previews(finished, [0, 10, 20, 25, 30])
    history = read_history(finished)
    shown = run_film.film_of(finished, history, words_of("en"), best_step=20)
    steps = [frame["step"] for frame in shown["frames"]]
    assert steps == [0, 10, 20, 25, 30]
    opened = shown["frames"][shown["opens_at"]]
    assert opened["step"] == 20 and opened["how"] == "A sample image, drawn in full."
    assert "/samples/step-00000000/" in shown["frames"][0]["src"], "beside the base, drawn in full"
    assert "quick preview" in shown["frames"][1]["how"]
    assert run_film.film_key(history, 20) != run_film.film_key(history, 10)


def test_the_loss_of_a_finished_run_is_that_of_the_lora_it_offers(finished: Path) -> None:
    history = read_history(finished)
    measured = [row.step for row in history.validations if row.step]
    assert len(measured) > 1
    seen = look(finished, read_status(finished), now_s=time.time())
    shown = {name: note for name, _value, note in run_head.figures(seen, history)}
    assert f"step {measured[-1]}" in shown["Validation loss"]
    best = run_head.figures(seen, history, best_step=measured[0])
    assert f"step {measured[0]}:" in {name: note for name, _, note in best}["Validation loss"]


def test_each_kind_of_record_has_words_in_the_log() -> None:
    for event, said in (
        (BaseLosses(step=0, seconds=1.0, losses=[1.0]), "Measured the base on the images"),
        (Learned(step=60, seconds=1.0, change=1.8), "it learns: the losses on its own images"),
        (
            Learned(step=60, seconds=1.0, change=0.0004),
            "it learns. At this pace, the losses on its own images change by 0.04 %",
        ),
        (Learned(step=60, seconds=1.0, change=0.0001), "Step 60: it learns nothing."),
        (Measured(step=60, parts={"gain": 0.5}), "from 0 (bad) to 1 (good): what it learned 0.50"),
    ):
        assert said in line_of(event).words


def test_settings_are_a_difference_from_the_preset_those_that_were_typed_first(
    finished: Path,
) -> None:
    def preset(record: dict[str, Any]) -> None:
        plan = {"family": "sd15", "tier": "cpu", "priority": "balanced", "preset": "sd15/cpu"}
        record["plan"] |= plan
        for key, value, layer, reason in (
            ("train.precision", "fp32", "planner", "16 bits save <no> time"),
            ("adapter.rank", 4, "command line", ""),
            ("optimizer.weight_decay", 0.5, "config my.toml", ""),
        ):
            record["settings"][key] = value
            record["origins"][key] = {"layer": layer, "reason": reason}

    change_record(finished, preset)
    shown = page(finished)["settings"]
    top = shown[: shown.index("<details>")]
    mine, decided = top.split("Decided for this machine")
    rank = texts(mine).index("Rank")
    assert texts(mine)[rank : rank + 4] == ["Rank", "4", "16", "you"]
    assert "your file my.toml" in texts(mine)
    why = texts(decided).index("Train: Precision")
    said = ["fp32", "auto", "the planner", "16 bits save &lt;no&gt; time"]
    assert texts(decided)[why + 1 : why + 5] == said
    rate = "Learning rate"
    assert "Seed" not in texts(top) and rate not in texts(top), "as the preset has them"
    assert len(re.findall("<tr>", shown[shown.index("<details>") :])) == 1 + len(setting_keys())
    for plan in ({"family": "of tomorrow"}, {"tier": "9-11", "priority": []}):
        change_record(finished, lambda record, plan=plan: record["plan"].update(plan))
        other = page(finished)["settings"]
        assert rate in texts(other[: other.index("<details>")]), "the defaults are compared"
    odd = {"settings": {"<b>.x": 1, "train.steps": None}, "origins": []}
    change_record(finished, lambda record: record.update(odd))
    assert "&lt;b&gt;.x" in page(finished)["settings"]


def test_runs_that_train_come_first_then_the_newest_and_only_folders_with_records(
    live: Path, work: Workplace
) -> None:
    for age, name in enumerate(("newer", "older"), start=1):
        folder = fake_run(work.runs / name, steps=3).write()
        write_status(folder, state="finished", step=3, steps=3, exit_code=0)
        for file in folder.glob("*.json*"):
            os.utime(file, (time.time() + 10 - age, time.time() + 10 - age))
    for name in ("empty", ".gui"):
        (work.runs / name).mkdir()
    (work.runs / ".gui" / "run.json").write_text("{}")
    (work.runs / "file").write_text("")
    entries = runs.find_runs(work.runs)
    assert [entry.name for entry in entries] == ["live", "newer", "older"]
    assert [entry.status.state for entry in entries][:2] == ["running", "finished"]
    assert runs.find_runs(work.runs / "missing") == ()
    for name in ("empty", "file", ".gui"):
        with pytest.raises(RequestError, match="no run"):
            runs.run_folder(work.runs, name)


def test_a_slider_shows_its_newest_samples_from_less_to_more(live: Path) -> None:
    assert page(live)["strip"] == "", "images without strengths are none"

    def at_strengths(row: dict[str, Any]) -> None:
        for image, strength in zip(row.get("images") or (), (1, -2, 0), strict=False):
            image |= {"prompt": f"a <b> person --m {strength} --w 64", "seed": 5}

    change_events(live, lambda row: at_strengths(row) if row["event"] == "sample" else None)
    before = run_parts.parts(now(live), runs.Followed().read(live))["strip"]
    html = str(before.draw(words_of("en")))
    assert re.findall(r"step-0*(\d+)/(\d+)\.png", html)[::2] == [
        ("10", "01"),
        ("10", "02"),
        ("10", "00"),
    ]
    assert re.findall(r"<span[^>]*>(\S+)</span></li>", html) == ["\u22122", "0", "+1"]
    assert "a &lt;b&gt; person, 64 px wide</figcaption>" in html and "Each round of samples" in html
    append(live, event="sample", step=20, images=[], seconds=1.0, time=1.0)
    row = {"prompt": "a <b> person --m 1", "seed": 5, "file": "samples/step-00000020/00.png"}
    both = [row, {**row, "prompt": "a <b> person --m -1", "file": "samples/step-00000020/01.png"}]
    append(live, event="sample", step=20, images=both, seconds=1.0, time=1.0)
    after = run_parts.parts(now(live), runs.Followed().read(live))["strip"]
    assert after.key != before.key, "the next round is drawn"
    assert "step 20" in str(after.draw(words_of("en")))
    assert page(live)["samples"]["is_slider"], "so that its strengths are not drawn large again"
