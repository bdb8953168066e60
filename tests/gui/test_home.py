"""Home shows each run by its state, and its buttons reach only what they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lora_trainer.gui import command_lines
from lora_trainer.gui.compare.routes import alike
from lora_trainer.gui.home import routes, view
from lora_trainer.gui.runs import Followed
from lora_trainer.gui.server.templates import render
from lora_trainer.gui.server.translation import words
from lora_trainer.gui.workplace import Workplace

from lora_trainer.queue import commands, worker
from lora_trainer.reporting.control import Control
from tests.fakes.live_runs import until, write_status
from tests.fakes.lora_library import finished_run
from tests.fakes.run_folder import fake_run


def cards(work: Workplace, code: str = "en") -> str:
    """Return the markup of the cards."""
    said = words(code)
    return render("home/cards.html", said, **view.shown(work, Followed(), said))


def run_of(work: Workplace, name: str, **status: object) -> Path:
    folder = until(fake_run(work.runs / name, steps=30), 12)
    write_status(folder, **status)
    return folder


def test_a_run_that_trains_fails_or_ends_says_so_with_the_buttons_of_its_state(
    work: Workplace,
) -> None:
    assert "/train?example=1" in cards(work) and not view.goes(work)
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
    assert 'data-trash="run" data-ref="done" data-next="/"' in html and view.goes(work)


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
    assert "Try it" not in cards(work) and "30 of 30 steps" in cards(work)


def test_the_buttons_ask_the_run_that_they_name_and_a_refusal_is_said(
    work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "ensure_worker", lambda runs: None)
    monkeypatch.setattr(command_lines, "resume_words", lambda folder, **_: ["resume", str(folder)])
    folder = run_of(work, "moth")
    german = words("de")
    before = view.stamp(work)
    assert routes.pressed(work, routes.Press(action="stop", run="moth"), german) == {}
    assert Control(folder).pending() == {"stop"} and view.stamp(work) != before
    write_status(folder, state="stopped", exit_code=0)
    said = routes.pressed(work, routes.Press(action="stop", run="moth"), german)
    assert "moth" in said["error"] and commands.items(work.runs) == ()
    assert routes.pressed(work, routes.Press(action="resume", run="moth"), german) == {}
    assert len(commands.items(work.runs)) == 1 and view.goes(work)
    said = routes.pressed(work, routes.Press(action="stop", run="../moth"), german)
    assert "error" in said


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
