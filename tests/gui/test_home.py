"""Home shows each run by its state, and its buttons reach only what they name."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from lora_trainer.gui import command_lines, drafts, live
from lora_trainer.gui.compare.routes import alike
from lora_trainer.gui.datasets import check
from lora_trainer.gui.home import routes, view
from lora_trainer.gui.runs import Followed, RunEntry, find_runs
from lora_trainer.gui.server.templates import render
from lora_trainer.gui.server.translation import words
from lora_trainer.gui.workplace import Workplace

from lora_trainer.queue import commands, rules, worker
from lora_trainer.queue.commands import Item
from lora_trainer.reporting.control import Control
from tests.fakes.live_runs import until, write_status
from tests.fakes.lora_library import finished_run, picture
from tests.fakes.run_folder import fake_run


def cards(work: Workplace, code: str = "en") -> str:
    """Return the markup of the cards."""
    said = words(code)
    return render("home/cards.html", said, **view.shown(work, Followed(), said, there(work)))


def there(work: Workplace) -> tuple[RunEntry, ...]:
    """Return the runs that there are."""
    return find_runs(work.runs)


def stamp(work: Workplace) -> str:
    """Return the stamp of the cards as they are now."""
    return view.stamp(work, there(work))


def goes(work: Workplace) -> bool:
    """Return whether the cards change by themselves."""
    return view.goes(there(work), has_queued=view.has_queued(work))


def run_of(work: Workplace, name: str, **status: object) -> Path:
    folder = until(fake_run(work.runs / name, steps=30), 12)
    write_status(folder, **status)
    return folder


def test_a_run_that_trains_fails_or_ends_says_so_with_the_buttons_of_its_state(
    work: Workplace,
) -> None:
    assert "/train?example=1" in cards(work) and not goes(work)
    run_of(work, "moth")
    run_of(
        work, "poor", state="failed", exit_code=3, message="train.seed is `odd`. Fix: <b>add</b>"
    )
    run_of(work, "done", state="finished", exit_code=0)
    html, german = cards(work), cards(work, "de")
    assert html.index("Training now") < html.index("Needs your attention") < html.index("Trained")
    assert "40 %" in html and 'data-action="stop" data-run="moth"' in html
    assert 'data-action="resume" data-run="poor"' in html and html.count("data-action") == 2
    assert "<code>odd</code>" in html and "&lt;b&gt;add" in html and "train.seed" not in html
    assert "Läuft gerade" in german and "fehlgeschlagen" in german and "Needs your" not in german
    assert 'data-trash="run" data-ref="done" data-next="/"' in html and goes(work)
    assert "Can go on" not in html
    run_of(work, "later", state="stopped", exit_code=130)
    html, german = cards(work), cards(work, "de")
    assert html.index("Needs your") < html.index("Can go on") < html.index("Trained")
    assert (
        'data-run="later"' in html
        and "12 of 30 steps" in html
        and "Lässt sich fortsetzen" in german
    )


def test_a_finished_run_offers_its_lora_and_says_how_good_it_is(work: Workplace) -> None:
    finished_run(work.runs / "done")
    html, german = cards(work), cards(work, "de")
    assert "/library?file=done%2Fzorble.safetensors" in html and "Try it" in html
    assert 'href="/media/run/done/zorble.safetensors" download' in html
    assert "58 % better than the base" in html and "30 of 30 steps" not in html
    assert "58 % besser als das Basismodell" in german
    (work.runs / "done" / "zorble.safetensors").unlink()
    for save in (work.runs / "done").glob("*.safetensors"):
        save.unlink()
    assert "Try it" not in cards(work) and "30 steps" in cards(work)


def test_the_buttons_ask_the_run_that_they_name_and_a_refusal_is_said(
    work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "ensure_worker", lambda runs: None)
    monkeypatch.setattr(command_lines, "resume_words", lambda folder, **_: ["resume", str(folder)])
    folder = run_of(work, "moth")
    german = words("de")
    before = stamp(work)
    assert routes.pressed(work, routes.Press(action="stop", run="moth"), german) == {}
    assert Control(folder).pending() == {"stop"} and stamp(work) != before
    write_status(folder, state="stopped", exit_code=0)
    said = routes.pressed(work, routes.Press(action="stop", run="moth"), german)
    assert "moth" in said["error"] and commands.items(work.runs) == ()
    assert routes.pressed(work, routes.Press(action="resume", run="moth"), german) == {}
    assert len(commands.items(work.runs)) == 1 and goes(work)
    said = routes.pressed(work, routes.Press(action="stop", run="../moth"), german)
    assert "error" in said


def test_an_answer_of_the_bar_lists_the_runs_once(
    work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(work, "moth")
    run_of(work, "done", state="finished", exit_code=0)
    queued(work, "images", label="next")
    listed: list[Path] = []

    def counted(root: Path) -> tuple[RunEntry, ...]:
        listed.append(root)
        return find_runs(root)

    monkeypatch.setattr(live.runs, "find_runs", counted)
    assert heard(work)["waiting"] == 1 and listed == [work.runs]


def test_compare_opens_with_two_runs_of_the_same_images(work: Workplace) -> None:
    for name, images in (("a", "x"), ("b", "y"), ("c", "x")):
        fake_run(work.runs / name).write()
        file = work.runs / name / "run.json"
        record = json.loads(file.read_text())
        record["dataset"]["fingerprint"] = images
        file.write_text(json.dumps(record))
    assert alike(work, ["a", "b", "c"]) == ("a", "c") and alike(work, ["a", "b"]) == ()
    (work.runs / "a" / "run.json").write_text("{")
    assert alike(work, ["a", "b", "c"]) == ()


def queued(work: Workplace, *argv: str, label: str, **changed: object) -> Item:
    """Put a training into the queue as it is there after some time."""
    item = commands.add(work.runs, argv, label=label)
    item = replace(item, **changed)  # type: ignore[arg-type] # fields of an item
    with commands.changing(work.runs):
        commands.write(work.runs, item)
    return item


def heard(work: Workplace, code: str = "en") -> dict[str, object]:
    """Return what the bar of each page shows."""
    return live.live(work, Followed(), words(code))


def test_a_training_that_starts_is_seen_with_its_images_before_it_has_a_run(
    work: Workplace, tmp_path: Path
) -> None:
    images = tmp_path / "moths"
    picture(images / "a.png")
    (images / "torn.png").write_bytes(b"torn")
    torn = {"file": "torn.png", "kind": "unusable", "severity": "error"}
    check.remember(work, images, (), {"findings": [torn]})
    before = stamp(work)
    item = queued(work, str(images), label="moth")
    assert stamp(work) != before and goes(work)
    draft = replace(drafts.new(work, dataset=str(images)), started_as=item.id)
    drafts.save(work, draft)
    address = f"/run?draft={draft.id}"
    for state in ("waiting", "running"):  # the worker takes a second to begin it
        with commands.changing(work.runs):
            commands.write(work.runs, replace(item, state=state))  # type: ignore[arg-type] # of two
        html, german = cards(work), cards(work, "de")
        assert "Training now" in html and f'href="{address}"' in html and "a.png" in html
        assert "<b>starting</b>" in html and "<b>startet</b>" in german
        assert "Starting." not in html, "it is said once"
        assert f'data-action="withdraw" data-run="{item.id}"' in html
        assert "torn.png" not in html, "what the check found unreadable"
        assert "Teach an image model" not in html and html.count("data-action") == 1
        assert heard(work)["starting"] == [{"name": "moth", "url": address, "said": "starting"}]
        assert heard(work)["training"] == [] and heard(work)["waiting"] == 1
    folder = run_of(work, "moth", step=0, steps_here=0, phase="load", left_s=None)
    with commands.changing(work.runs):  # the worker has not seen the run of this process yet
        commands.write(work.runs, replace(item, state="running", pid=os.getpid()))
    html = cards(work)
    assert html.count("Training now") == html.count('class="run-card') == 1
    assert "Loading the base model." in html and "known after the first steps" in html
    assert heard(work)["starting"] == []
    write_status(folder, left_s=600.0)
    assert "about 10 min left" in cards(work)
    write_status(folder, step=30, left_s=0.0)
    html = cards(work)
    assert "finishing" in html and "about 0 s" not in html and "99 %" in html
    assert heard(work, "de")["training"][0]["left"] == "gleich fertig"  # type: ignore[index] # JSON: lists of objects


def test_what_waits_for_its_time_does_not_start_and_a_run_that_goes_on_has_one_card(
    work: Workplace,
) -> None:
    folder = run_of(work, "moth", state="stopped", exit_code=143)
    words_of_it = ("images", f"--resume-from={folder.resolve()}")
    item = queued(work, *words_of_it, label="moth", state="running", started_s=time.time())
    html = cards(work)
    assert html.count('class="run-card') == 1 and "<b>starting</b>" in html
    assert 'href="/run?run=moth"' in html and "Resume" not in html
    commands.write(work.runs, replace(item, state="waiting"))
    rules.pause(work.runs, stop=False)
    assert "<b>starting</b>" not in cards(work) and heard(work)["starting"] == []
    assert "Can go on" in cards(work) and "Resume" in cards(work)


def test_the_picture_of_a_run_is_of_its_own_else_of_what_it_learns(
    work: Workplace, tmp_path: Path
) -> None:
    """What the base draws before the training says nothing of it."""
    folder = run_of(work, "moth", step=0, steps_here=0, phase="load", left_s=None)
    samples = sorted((folder / "samples").iterdir())
    samples[-1].rename(folder / "kept")
    picture(tmp_path / "moths" / "a.png")
    record = json.loads((folder / "run.json").read_text())
    record["command"] = [str(tmp_path / "moths")]
    record["dataset"]["name"] = "moths"
    (folder / "run.json").write_text(json.dumps(record))
    html = cards(work)
    assert "file=a.png" in html and "step-00000000" not in html


def test_the_picture_of_a_run_is_of_its_own_or_says_that_it_is_the_bases(work: Workplace) -> None:
    folder = run_of(work, "moth", state="stopped", exit_code=143)
    samples = sorted((folder / "samples").iterdir())
    assert "step-00000010/00.png" in cards(work) and "drawn by the base" not in cards(work)
    samples[-1].rename(folder / "kept")
    html, german = cards(work), cards(work, "de")
    assert "step-00000000/00.png" in html and "drawn by the base, before moth learned" in html
    assert "vom Basismodell gezeichnet" in german
    for step in (0, 6):
        picture(folder / "previews" / f"step-{step:08d}.jpg")
    html = cards(work)
    assert "previews/step-00000006.jpg" in html and "base, no sample" not in html


def test_a_failed_run_says_what_to_do_whole_and_has_its_button(work: Workplace) -> None:
    what = "nothing is learned: after 60 steps the loss is as it was at the start"
    fix = "leave optimizer.learning_rate out for the preset's, which suits most images."
    folder = run_of(work, "poor", state="failed", exit_code=5, message=f"{what}. Fix: {fix}")
    file = folder / "run.json"
    record = json.loads(file.read_text())
    record["settings"]["optimizer.learning_rate"] = 1e-12
    record["origins"]["optimizer.learning_rate"] = {"layer": "command line", "reason": ""}
    file.write_text(json.dumps(record))
    html = cards(work)
    assert "What to do:" in html and "which suits most images." in html
    assert "again=poor&amp;mended=1" in html
    assert "Train again with the usual learning rate, 0.0001" in html
    german = cards(work, "de")
    assert "Noch einmal trainieren, Lernrate wie üblich: 0,0001" in german, german


def test_what_waits_is_on_home_and_leads_to_the_queue(work: Workplace) -> None:
    rules.pause(work.runs, stop=False)
    before = stamp(work)
    for number in range(6):
        queued(work, f"images-{number}", label=f"moth-{number}")
    html = cards(work)
    assert "moth-0" in html and "moth-5" not in html and "and 2 more" in html
    assert 'href="/queue"' in html and "Teach an image model" not in html and stamp(work) != before
