"""The queue's markup is a function of its files, and buttons reach only what is listed; jobs of the pages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from lora_trainer.gui import clock, command_lines, drafts, jobs, plan_view
from lora_trainer.gui.datasets import check
from lora_trainer.gui.own_load import Beside
from lora_trainer.gui.queue import routes, times, view
from lora_trainer.gui.server.translation import words
from lora_trainer.gui.workplace import Workplace
from starlette.routing import Router
from starlette.testclient import TestClient

from lora_trainer.common.errors import RequestError
from lora_trainer.common.events import EventStream
from lora_trainer.queue import commands, notices, rules, worker
from tests.fakes.live_runs import write_status
from tests.fakes.lora_library import finished_run
from tests.fakes.made_events import made
from tests.fakes.queues import Place, until
from tests.fakes.run_folder import fake_run
from tests.fakes.runs import write_dataset

WAITS = [sys.executable, "-c", "import signal; print('here', flush=True); signal.pause()"]
ENGLISH = words("en")
HOSTILE = '<img src=x onerror="alert(1)">${alert(1)}{{x}}'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A queue whose trainings only start when a test lets a worker tick."""
    monkeypatch.setattr(worker, "ensure_worker", lambda runs: None)
    place = Place(folder=tmp_path)
    yield place
    place.clean_up()


def shown(work: Workplace) -> str:
    """Return the markup of the queue."""
    return view.view(work, ENGLISH)


def asked(work: Workplace, *, action: str, id: str) -> str:
    """Press a button of the queue; return what is said of it."""
    said = routes.pressed(work, routes.Press(action=action, id=id), ENGLISH)
    return said.get("error", said.get("done", ""))


PAUSING = (("pause", ""), ("pause_all", ""))
"""The buttons of the queue itself, while something trains."""


def buttons(html: str) -> list[tuple[str, str]]:
    """Return action and item of the buttons of the items that can be pressed."""
    found = re.findall(r'<button[^>]*data-action="(\w+)" data-id="([^"]*)"[^>]*>', html)
    off = re.findall(r'<button[^>]*data-action="(\w+)" data-id="([^"]*)"[^>]*disabled', html)
    return [pair for pair in found if pair not in off and pair not in PAUSING]


def test_each_item_has_the_buttons_that_fit_its_state(place: Place, work: Workplace) -> None:
    assert "The queue is empty" in shown(work)
    a, b, c, d, e = (place.add(name) for name in "abcde")
    run = place.runs / "a"
    run.mkdir()
    write_status(run)
    place.become(a, state="running", run="a", started_s=1.0)
    place.become(d, state="finished", run="d", started_s=5.0, ended_s=70.0)
    place.become(e, state="failed", exit_code=3, ended_s=60.0, error="no images. Fix: add some.")
    html = shown(work)
    words = f"stop {a.id} down {b.id} remove {b.id} up {c.id} remove {c.id}".split()
    words += f"again {d.id} remove {d.id} again {e.id} remove {e.id}".split()
    assert buttons(html) == [*zip(words[::2], words[1::2], strict=True), ("clear", "")]
    assert 'href="/run?run=a"' in html
    assert "step 12 of 30" in html and 'style="width:40.0%"' in html


@pytest.mark.parametrize(
    ("status", "english", "german"),
    [
        (
            {"phase": "cache", "message": "IMG_2012.jpg", "done": 12, "total": 20},
            "Preparing the images: 12 of 20",
            "Bereitet die Bilder vor: 12 von 20",
        ),
        ({"phase": "load", "message": "owner/name"}, "Loading the base model", "Lädt das Basismodell"),
        ({"phase": "scan", "total": 0}, "Reading the images", "Liest die Bilder"),
        ({}, "step 12 of 30, loss 0.1000", "Schritt 12 von 30, Loss 0,1000"),
        # It is resumed, and its process has not written yet.
        ({"state": "stopped", "message": "stopped. Fix: resume."}, "starting", "startet"),
    ],
)  # fmt: skip
def test_what_a_training_does_is_said_in_words_and_not_by_a_file(
    place: Place, work: Workplace, status: dict[str, Any], english: str, german: str
) -> None:
    run = place.runs / "a"
    run.mkdir()
    write_status(run, **status)
    place.become(place.add("a"), state="running", run="a", started_s=1.0)
    assert f'<span class="state">{english}</span>' in shown(work)
    assert f'<span class="state">{german}</span>' in view.view(work, words("de"))


def test_why_one_failed_comes_with_what_to_do_and_the_end_of_its_log(
    place: Place, work: Workplace
) -> None:
    for number in range(view.MAX_ENDED + 1):
        place.become(place.add(f"t{number}"), state="failed", ended_s=float(number + 1))
    item = place.add("a")
    place.become(item, state="failed", exit_code=3, error="no images. Fix: add some.", ended_s=99.0)
    log = commands.item_file(place.runs, item.id, "log")
    token = "hf_" + "a" * 34
    log.write_text("".join(f"line {number} {token}\n" for number in range(100)))
    html = shown(work)
    assert html.count('data-action="again"') == view.MAX_ENDED
    assert "2 older ones are not shown." in html and 'data-item="0001-t0"' not in html
    assert "<p>No images.</p>" in html
    assert "<b>What to do: </b>add some." in html
    assert "line 99" in html and "line 80" in html and "line 79" not in html
    assert token not in html, "it is struck out"
    place.become(item, state="failed", exit_code=1, error=f"KeyError: '{token}'", ended_s=99.0)
    html = shown(work)
    assert "A fault of lora-train or of a library it uses: KeyError:" in html and token not in html


def test_what_has_finished_says_how_good_it_is_and_is_tried_from_here(
    place: Place, work: Workplace
) -> None:
    finished_run(place.runs / "done")
    place.become(place.add("done"), state="finished", run="done", ended_s=1.0)
    html = shown(work)
    assert "58 % better than the base" in html
    assert 'href="/library?file=done%2Fzorble.safetensors"' in html
    # Its name is that of its run, as on all other pages.
    place.become(place.add("gone"), state="finished", run="gone-002", ended_s=2.0)
    assert ">gone-002</a>" in shown(work) and ">gone<" not in shown(work)
    assert shown(work).count("/library?file=") == 1


def test_starting_again_is_called_what_it_does_and_a_damaged_item_can_only_be_removed(
    place: Place, work: Workplace
) -> None:
    for name, state, label in (
        ("a", "finished", "Train again"),
        ("a", "interrupted", "Resume"),
        ("a", "failed", "Resume"),
        (None, "failed", "Train again"),
    ):
        if name:
            (place.runs / name).mkdir(parents=True, exist_ok=True)
        item = place.become(place.add("a"), state=state, run=name)
        assert f">{label}</button>" in shown(work)
        assert asked(work, action="again", id=item.id) == ""
        argv = place.item(item.id).argv
        assert (argv[0] == "--resume-from") == (label == "Resume")
        commands.remove(place.runs, item.id)
    write_status(fake_run(place.runs / "a", steps=3).write(), state="finished", exit_code=0)
    place.become(place.add("a"), state="interrupted", run="a")
    assert "resume" not in shown(work).casefold(), "the run finished otherwise"
    for item in commands.items(place.runs):
        commands.remove(place.runs, item.id)
    item = place.add("a")
    (place.runs / ".queue" / f"{item.id}.json").write_text("{")
    html = shown(work)
    assert "is damaged" in html
    assert [pair for pair in buttons(html) if pair[0] != "back"] == [("remove", item.id)]
    asked(work, action="remove", id=item.id)
    assert commands.items(place.runs) == ()


def test_what_is_removed_goes_at_once_and_comes_back_where_it_was(
    place: Place, work: Workplace
) -> None:
    a, b, c = (place.add(name).id for name in "abc")
    failed = place.become(place.add("d"), state="failed", ended_s=2.0)
    log = commands.item_file(place.runs, failed.id, "log")
    log.write_text("why")
    before, seen = commands.items(place.runs), view.stamp(work)
    for id in (b, failed.id):
        assert asked(work, action="remove", id=id) == ""
    html = shown(work)
    assert "sure" not in html, "no button asks back: what is drawn again would forget the question"
    assert [item.id for item in commands.items(place.runs)] == [a, c] and not log.exists()
    assert [pair for pair in buttons(html) if pair[0] == "back"] == [
        ("back", failed.id),
        ("back", b),
    ]
    assert view.stamp(work) != seen
    for id in (b, failed.id):
        assert asked(work, action="back", id=id) == ""
    assert commands.items(place.runs) == before and log.read_text() == "why"
    assert 'data-action="back"' not in shown(work)
    assert "not among the removed" in asked(work, action="back", id=b)
    for id in (a, b, c, failed.id):
        asked(work, action="remove", id=id)
    assert shown(work).count('data-action="back"') == 3, "of an empty queue too"
    removed = place.runs / ".queue" / "removed"
    for path in removed.iterdir():
        os.utime(path, (time.time() - 90_000,) * 2)
    assert 'data-action="back"' not in shown(work)
    commands.remove(place.runs, place.add("e").id)
    assert [path.stem for path in removed.iterdir()] == ["0005-e"], "no id comes twice"
    # An older version moved folders there that somebody had put in an item's place.
    folders = [removed / "0009-mine.json", removed / "0005-e.log"]
    for path in folders:
        path.mkdir()
        (path / "kept.txt").touch()
    for path in removed.iterdir():
        os.utime(path, (time.time() - 90_000,) * 2)
    commands.remove(place.runs, place.add("f").id)
    assert [item.id for item in commands.removed(place.runs)] == ["0006-f"]
    assert all((path / "kept.txt").is_file() for path in folders)


def test_nothing_a_file_says_becomes_markup(place: Place, work: Workplace) -> None:
    a, b, c = (place.add(f"{HOSTILE}{name}", HOSTILE) for name in "abc")
    place.become(a, state="failed", exit_code=1, error=HOSTILE)
    commands.item_file(place.runs, a.id, "log").write_text(HOSTILE)
    run = place.runs / "a"
    run.mkdir()
    write_status(run, message=HOSTILE)
    place.become(b, state="running", run="a", device=HOSTILE)
    place.become(c, state="interrupted", run="<b>x", error=HOSTILE)
    html = shown(work)
    assert html.count("&lt;img") >= 6
    assert "<img" not in html and "<b>x" not in html
    assert 'href="/run?run=%3Cb%3Ex"' in html
    refused = asked(work, action="remove", id=HOSTILE)
    assert "the queue has no item" in refused


def test_the_buttons_do_what_they_say(place: Place, work: Workplace) -> None:
    a, b, c = (place.add(name).id for name in "abc")
    asked(work, action="down", id=a)
    asked(work, action="up", id=c)
    assert [item.id for item in commands.items(place.runs)] == [b, c, a]
    asked(work, action="remove", id=c)
    place.become(place.item(a), state="finished", ended_s=1.0)
    failed = place.become(place.add("d"), state="failed", ended_s=2.0)
    asked(work, action="clear", id="")
    assert [item.id for item in commands.items(place.runs)] == [b, failed.id]
    for action in ("up", "down", "again", "stop", "remove", "back", "delete", ""):
        for wrong in ("", "../x", "0009-none", "a\0"):
            refused = asked(work, action=action, id=wrong)
            assert " Fix: " in refused
    assert len(commands.items(place.runs)) == 2


def test_stop_asks_the_run_of_the_item_and_is_asked_once(place: Place, work: Workplace) -> None:
    item = place.add("a", until=str(place.let("a")))
    worker = place.worker()
    until(lambda: worker.tick() and place.item(item.id).run is not None)
    before = view.stamp(work)
    assert "it saves first" in asked(work, action="stop", id=item.id)
    assert (place.runs / "a" / "control" / "stop").exists()
    html = shown(work)
    assert buttons(html) == [] and ">Stopping</button>" in html
    assert view.stamp(work) != before
    place.let("a").touch()
    place.finish(worker)


def test_a_training_that_starts_is_stopped_before_it_has_a_run(
    place: Place, work: Workplace
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as program:
        begun_s = psutil.Process(program.pid).create_time()
        item = place.add("a")
        item = place.become(item, state="running", pid=program.pid, pid_started_s=begun_s)
        assert "before it began" in asked(work, action="stop", id=item.id)
        assert program.wait() != 0


def test_the_line_says_who_works_and_for_what_it_waits(
    place: Place, work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line() -> str:
        return view.worker_line(work, commands.items(place.runs), ENGLISH)

    assert line() == "Nothing waits. A training that you start begins at once."
    place.add("a")
    assert line() == "The queue is starting."
    monkeypatch.setattr(worker, "worker_fault", lambda runs: "no <b>torch</b>")
    assert line() == "The queue cannot work: no <b>torch</b>"
    assert "&lt;b&gt;torch" in shown(work)
    monkeypatch.setattr(worker, "worker_fault", lambda runs: "")
    monkeypatch.setattr(worker, "worker_pid", lambda runs: 1)
    assert "you close this page" in line()
    by_hand = place.runs / "by-hand"
    by_hand.mkdir()
    write_status(by_hand, message="")
    assert line() == "Waiting for by-hand, which was started outside of the queue."


def test_the_download_of_a_base_is_told_in_bytes_and_can_be_ended(
    place: Place, work: Workplace
) -> None:
    item = place.become(place.add("cats"), state="running", started_s=1.0)
    events = EventStream()
    for listener in commands.download_listeners(
        {commands.ITEM_VARIABLE: str(commands.queue_folder(place.runs) / item.id)}
    ):
        events.subscribe(listener)
    assert "starting" in shown(work) and buttons(shown(work)) == [("stop", item.id)]
    fresh = view.stamp(work)
    gib = 2**30
    events.emit(made("phase", phase="download", message="owner/name", done=gib, total=4 * gib))
    html = shown(work)
    assert "downloading the base model owner/name: 1.0 GiB of 4.0 GiB" in html
    assert 'style="width:25.0%"' in html and view.stamp(work) != fresh
    assert buttons(html) == [("stop", item.id)]
    events.emit(made("phase", phase="download", message="owner/name", done=4 * gib, total=4 * gib))
    assert "starting" in shown(work), "all is here: the data comes next"
    place.become(item, state="stopped", ended_s=2.0)
    commands.remove(place.runs, item.id)
    assert [
        path for path in commands.queue_folder(place.runs).iterdir() if item.id in path.name
    ] == []
    assert commands.download_listeners({}) == ()


# ---- jobs are what their folders say, also for an interface that was started after them


def ended(work: Workplace, job: jobs.Job) -> jobs.Job:
    until(lambda: jobs.read(work, job.id).state != "running")
    return jobs.read(work, job.id)


def test_a_job_ends_with_its_exit_code_and_output_and_runs_once_at_a_time(work: Workplace) -> None:
    hostile = ("$(touch marker)", "; touch marker", "--flag", "a\nb")
    program = "import sys; print(sys.argv[1:]); print('error: no. Fix: do.'); sys.exit(3)"
    job = jobs.start(
        work, kind="try", argv=[sys.executable, "-c", program, *hostile], about={"of": "x"}
    )
    assert job.state == "running"
    found = ended(work, job)
    assert (found.state, found.exit_code, found.about) == ("failed", 3, {"of": "x"})
    assert found.log_tail()[0] == str(list(hostile))
    assert found.error() == "error: no. Fix: do."
    assert jobs.find(work, kind="try") == [found]
    assert jobs.find(work, kind="other") == []
    job = jobs.start(work, kind="try", argv=WAITS)
    with pytest.raises(RequestError, match="runs already"):
        jobs.start(work, kind="try", argv=WAITS)
    until(lambda: jobs.read(work, job.id).log_tail() == ["here"])
    jobs.stop(jobs.read(work, job.id))
    assert ended(work, job).exit_code == -signal.SIGTERM
    jobs.stop(jobs.read(work, job.id))  # one that has ended is left alone
    again = jobs.start(work, kind="try", argv=[sys.executable, "-c", "print('two')"])
    assert ended(work, again).state == "finished"
    assert [found.id for found in jobs.find(work, kind="try")][:2] == [again.id, job.id]


def test_old_records_are_forgotten_but_not_what_runs(
    work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MAX_KEPT", 2)
    runs_on = jobs.start(work, kind="try", argv=WAITS)
    until(lambda: jobs.read(work, runs_on.id).log_tail() == ["here"])
    later = [f"{2**63 + number:x}" for number in range(4)]
    for name in later:
        folder = work.own / jobs.FOLDER / name
        folder.mkdir()
        (folder / jobs.JOB_FILE).write_text('{"kind": "try"}')
        (folder / jobs.RESULT_FILE).write_text('{"exit_code": 0}')
    newest = ended(work, jobs.start(work, kind="try", argv=[sys.executable, "-c", "print(1)"]))
    kept = {job.id for job in jobs.find(work, kind="try")}
    assert kept == {*later[2:], runs_on.id, newest.id}, "two, what runs, and the newest"
    jobs.stop(runs_on)
    assert ended(work, runs_on).state == "failed"


def test_a_record_that_is_damaged_or_of_a_runner_that_is_gone_stops_no_page(
    work: Workplace,
) -> None:
    folder = work.own / jobs.FOLDER / ("a" * 12)
    folder.mkdir(parents=True)
    for text, argv in (
        ('{"at_s": "x"}', ()),
        ('{"about": [], "argv": 5}', ()),
        ("[]", None),
        ("{", None),
    ):
        (folder / jobs.JOB_FILE).write_text(text)
        found = [(job.id, job.state, job.argv, job.about) for job in jobs.find(work, kind="None")]
        assert found == ([] if argv is None else [("a" * 12, "failed", argv, {})])
    (folder / jobs.JOB_FILE).write_text(json.dumps({"at_s": time.time()}))
    assert jobs.read(work, folder.name).state == "running", "it is being started"
    (folder / jobs.RUNNER_FILE).write_text('{"pid": 1, "started_s": 1.0}')
    assert jobs.read(work, folder.name).state == "failed"
    for name in ("../x", "", "0" * 12, "a/b"):
        with pytest.raises(RequestError, match="the job .* does not exist"):
            jobs.read(work, name)


# ---- when, and how long


def test_a_paused_queue_says_so_and_goes_on_and_night_and_idle_are_said_too(
    place: Place, work: Workplace
) -> None:
    place.add("a")
    assert asked(work, action="pause", id="") == ""
    html = shown(work)
    assert "Paused: nothing starts" in html
    assert buttons(html)[0] == ("go_on", "")
    assert asked(work, action="go_on", id="") == ""
    assert "Paused" not in shown(work)
    hour = time.localtime().tm_hour
    night = {"night_from": (hour + 2) % 24, "night_to": (hour + 3) % 24}
    kept = routes.ruled(work, routes.When(when="night", **night), ENGLISH)
    assert kept == {"done": "Kept."}
    refused = routes.ruled(work, routes.When(when="night", night_from=24, night_to=1), ENGLISH)
    assert "hours from 0 to 23" in refused["error"]


def test_what_waits_is_dragged_to_a_place(place: Place, work: Workplace) -> None:
    a, b, c = (place.add(name) for name in "abc")

    def order() -> list[str]:
        return [item.id for item in commands.in_order(commands.items(place.runs))]

    for id, to, after in ((c.id, 0, "cab"), (c.id, 2, "abc"), (b.id, 1, "abc"), (a.id, 99, "bca")):
        press = routes.Press(action="to", id=id, place=to)
        assert routes.pressed(work, press, ENGLISH) == {"done": ""}
        assert order() == [{"a": a.id, "b": b.id, "c": c.id}[name] for name in after]
    gone = routes.Press(action="to", id="0009-x", place=0)
    assert "does not wait any more" in routes.pressed(work, gone, ENGLISH)["error"]


def test_a_training_that_ends_while_the_page_asks_is_asked_for_once_more(
    place: Place, work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is told that nothing goes on asks no more: what it shows then has to be the end."""
    item = place.add("one")
    place.become(item, state="running", started_s=time.time())
    before = routes.stamp_text(work)
    looked = routes.stamp_text

    def ends_meanwhile(asked: Workplace) -> str:
        stamp = looked(asked)
        place.become(item, state="stopped")
        return stamp

    monkeypatch.setattr(routes, "stamp_text", ends_meanwhile)
    assert routes.changed(work, before, ENGLISH) == {"goes": True}
    monkeypatch.undo()
    ended = routes.changed(work, before, ENGLISH)
    assert not ended["goes"] and "stopped" in str(ended["html"])


def test_each_waiting_training_says_how_long_it_takes_and_when_it_finishes(
    place: Place, work: Workplace
) -> None:
    """Two devices, one of which is busy for an hour: the second of three waits for the first to end."""
    busy = place.add("busy")
    run = place.runs / "busy"
    run.mkdir()
    write_status(run, left_s=3600.0)
    noon_s = time.mktime((2026, 11, 30, 12, 0, 0, 0, 0, -1))
    place.become(busy, state="running", run="busy", started_s=noon_s - 600)
    planned = {"a": 600.0, "b": 7200.0, "c": None, "d": 60.0}
    ids = {
        name: commands.add(place.runs, [f"/{name}", "--name", name], label=name).id
        for name in planned
    }
    resumed = commands.add(place.runs, ["/e", "--resume-from=x"], label="e").id
    asked_for = list[command_lines.Words]()
    load = {"now": 2.0}  # of the training that runs, which will have ended

    def answer(words: command_lines.Words) -> command_lines.Answer:
        asked_for.append(words)
        seconds = planned[words[1].removeprefix("/")]
        if seconds is None:
            return command_lines.Answer(values=None, error="error: no.")
        time_of: dict[str, Any] = {"run_s": [seconds, seconds], "beside_others": load["now"]}
        values: dict[str, Any] = {"time": time_of}
        if seconds == 600.0:
            values["time"] |= {"steps": 2400, "images": 18}
            values["settings"] = {"adapter.rank": {"value": 16, "origin": "", "reason": ""}}
        return command_lines.Answer(values=values)

    clock_s = {"now": 0.0}
    work = replace(work, beside=Beside(clock_s=lambda: clock_s["now"]))
    found = times.Times(work=work, devices=lambda: 2, ask=answer, clock_s=lambda: noon_s)
    waiting = found.of_waiting(ENGLISH)
    said = waiting.times
    lengths = {
        ids["a"]: "takes about 10 min, finishes at about 12:10",
        ids["b"]: "takes about 2.0 h, finishes at about 14:10",
        # The other device takes c, of which nobody knows how long it takes, so d may begin with b's end.
        ids["d"]: "takes about 60 s, finishes at about 14:11",
    }
    assert {item: each.length for item, each in said.items()} == lengths
    assert said[ids["a"]].facts == "2,400 steps, rank 16"
    assert not waiting.note
    assert resumed not in said
    assert ("plan", "/a", "--json") in asked_for
    before = len(asked_for)
    assert found.of_waiting(ENGLISH) == waiting
    assert len(asked_for) == before, "plans are kept for a while"
    place.become(busy, state="finished", run="busy")
    assert found.of_waiting(ENGLISH).times[ids["a"]] == said[ids["a"]], (
        "others were looked at just now"
    )
    assert len(asked_for) == before + 4, "what a training took corrects the times of the others"
    clock_s["now"] += 301
    place.become(place.add("also"), state="finished")
    # As the bar of the page Train counts it: beside what runs now, which is not a training of ours any more.
    later = found.of_waiting(ENGLISH)
    assert later.times[ids["a"]].length == "takes about 20 min, finishes at about 12:20"
    assert "Other programs slow them down" in later.note
    rules.pause(place.runs, stop=False)
    assert found.of_waiting(ENGLISH).times[ids["a"]].length == "takes about 20 min"
    tomorrow = clock.clock_text(noon_s + 86_400, now_s=noon_s)
    assert tomorrow == "1 Dec 2026, 12:00"
    assert words("de").message(tomorrow) == "1. Dez. 2026, 12:00"
    for value, german in (("0.002", "0,002"), ("none", "keine"), ("none of it", "none of it")):
        assert words("de").value(value) == german


def test_equal_trainings_take_equally_long_whatever_other_programs_did_between_their_plans(
    place: Place, work: Workplace
) -> None:
    names = ("rank-4", "rank-8", "rank-16")
    ids = [commands.add(place.runs, [f"/{name}"], label=name).id for name in names]
    loads = iter((1.4, 3.1, 2.2, 5.0))

    def answer(_: command_lines.Words) -> command_lines.Answer:
        time_of = {"run_s": [600.0, 1200.0], "beside_others": next(loads)}
        return command_lines.Answer(values={"base": "embedded", "time": time_of})

    # The bar of the page Train said it a moment ago.
    plans = command_lines.Plans(work, ask=answer)
    drafted = plans.of(drafts.Draft(id="0" * 12, dataset=str(place.folder))).plan
    said = times.Times(work=work, devices=lambda: 1, ask=answer).of_waiting(ENGLISH).times
    assert drafted is not None
    span = plan_view.span(plan_view.from_now_s(drafted.time) or (0.0, 0.0), ENGLISH)
    assert [said[id_].length.split(",")[0] for id_ in ids] == [f"takes {span}"] * 3
    assert span == "about 14 to 28 min"


def test_a_training_that_waits_takes_as_long_as_the_bar_says_when_the_bar_has_looked_since(
    place: Place, work: Workplace
) -> None:
    """The queue keeps its plan; the page Train has planned anew, beside programs that have begun meanwhile."""
    id_ = commands.add(place.runs, ["/cats"], label="cats").id
    loads = iter((1.0, 3.0))

    def answer(_: command_lines.Words) -> command_lines.Answer:
        time_of = {"run_s": [600.0, 1200.0], "beside_others": next(loads)}
        return command_lines.Answer(values={"base": "embedded", "time": time_of})

    clock_s = {"now": 0.0}
    work = replace(work, beside=Beside(clock_s=lambda: clock_s["now"]))
    waiting = times.Times(work=work, devices=lambda: 1, ask=answer)
    assert waiting.of_waiting(ENGLISH).times[id_].length.startswith("takes about 10 to 20 min")
    clock_s["now"] += 301
    plans = command_lines.Plans(work, ask=answer)
    drafted = plans.of(drafts.Draft(id="0" * 12, dataset=str(place.folder))).plan
    assert drafted is not None and drafted.time.beside_others == 3.0
    assert waiting.of_waiting(ENGLISH).times[id_].length.startswith("takes about 30 to 60 min")


def test_a_draft_is_planned_without_the_training_that_will_have_ended(
    place: Place, work: Workplace
) -> None:
    """Other programs count; what trains now does not, as the new one waits for its end."""
    busy = place.add("busy")
    place.become(busy, state="running", run="busy", started_s=time.time() - 600)
    time_of = {"beside_others": 2.5, "run_s": [60.0, 60.0]}
    answer = command_lines.Answer(values={"time": time_of})
    clock_s = {"now": 0.0}
    work = replace(work, beside=Beside(clock_s=lambda: clock_s["now"]))
    plans = command_lines.Plans(work, ask=lambda _: answer)
    draft = drafts.Draft(id="0" * 12, dataset=str(place.folder))

    def beside() -> float:
        found = plans.of(draft, anew=True).plan
        assert found is not None
        return found.time.beside_others

    assert beside() == 1.5
    place.become(busy, state="finished", run="busy")
    assert beside() == 1.5, "other programs were looked at just now"
    clock_s["now"] += 301
    assert beside() == 2.5


def test_a_training_of_a_terminal_is_planned_as_it_is_trained(place: Place) -> None:
    (place.folder / "cats").mkdir(parents=True)
    words = "--output runs cats --strict --steps 30 --seed=2 --base embedded --set adapter.rank=2"
    item = commands.add(place.runs, words.split(), label="a", folder=place.folder)
    folder = place.folder / "cats"
    assert times.dataset_of(item) == folder
    prompts = "--set=sampling.prompts=" + json.dumps(
        ["a cat on a sofa"] * 40
    )  # too long for a name
    long = commands.add(place.runs, ["cats", prompts], label="b", folder=place.folder)
    assert times.planned_words(long) == ("plan", str(folder), prompts, "--json")
    assert times.planned_words(item) == (
        *("plan", str(folder), "--set=train.steps=30", "--set=train.seed=2", "--base=embedded"),
        *("--set=adapter.rank=2", "--json"),
    )


def test_an_item_shows_its_base_and_its_first_image(place: Place, work: Workplace) -> None:
    images = place.folder / "cats"
    write_dataset(images, images=2)
    commands.add(
        place.runs, [str(images), "--base", "stabilityai/stable-diffusion-xl-base-1.0"], label="a"
    )
    html = shown(work)
    assert "Stable Diffusion XL Base 1.0" in html or "Stable Diffusion XL base 1.0" in html
    assert html.count("/media/thumb?folder=") == 1
    first, second = sorted(path.name for path in images.glob("*.png"))
    assert f"file={first}" in html
    broken = {"findings": [{"file": first, "kind": "unusable"}]}
    check.remember(work, images, (), broken)
    assert f"file={second}" in shown(work), "one that cannot be read is not a picture"
    fenced = Workplace(runs=work.runs, roots=())
    assert "/media/thumb" not in shown(fenced), "what may not be named is not shown"


def test_where_notices_go_is_kept_without_the_password_on_any_page_and_only_on_the_machine_itself(
    work: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CONFIG_HOME", "APPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "config"))
    sent = list[tuple[notices.Notices, notices.Notice]]()
    monkeypatch.setattr(notices, "send", lambda to, notice: sent.append((to, notice)) or [])
    page = TestClient(Router(routes=routes.routes(work)))
    values = {
        "ntfy": " https://ntfy.example/x ", "webhook": "", "email_to": "me@example.org",
        "smtp_server": "s", "smtp_port": 465, "smtp_user": "u", "smtp_password": "geheim",
    }  # fmt: skip

    def ask(**more: Any) -> dict[str, str]:
        answer: dict[str, str] = page.post("/queue/notices", json={**values, **more}).json()
        return answer

    assert ask(test=False) == {"done": "Kept."}
    assert notices.read_notices().ntfy == "https://ntfy.example/x"
    shown = page.get("/queue").text
    assert "geheim" not in shown and "one is kept" in shown
    assert "sent" in ask(smtp_password="", test=True)["done"]
    assert sent[0][0].smtp_password == "geheim", "an empty password stays as it was"
    assert "names no topic" in ask(ntfy="https://ntfy.sh", test=False)["error"]
    away = TestClient(Router(routes=routes.routes(Workplace(runs=work.runs, roots=()))))
    assert 'name="ntfy"' not in away.get("/queue").text
    refused = away.post("/queue/notices", json={**values, "test": True}).json()
    assert "on the machine itself" in refused["error"] and len(sent) == 1
