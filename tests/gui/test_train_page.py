"""The page Train: drafts, their plan, and the command lines that they become."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_trainer.gui import drafts, launch, plan_view
from lora_trainer.gui.pages import train_handlers as handlers
from lora_trainer.gui.workplace import Workplace

from lora_trainer.cli import main
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.config import parse_assignment
from lora_trainer.queue import commands

gradio = pytest.importorskip("gradio", reason="gradio is not installed (extra `gui`)")


def test_a_process_that_answers_half_a_line_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [sys.executable, "-c", "input(); print('{', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as half:
        monkeypatch.setattr(launch._PLANS, "_process", half)
        assert launch.ask(("plan",)).error == "the command ended without an answer"
        assert half.returncode


def test_another_folder_begins_another_draft_unless_its_images_were_sent_from_one(
    work: Workplace,
) -> None:
    first = drafts.new(work, dataset="/one")
    assert handlers._wanted(work, {"folder": "/one"}) == first
    second = handlers._wanted(work, {"folder": "/two"})
    assert (second.dataset, drafts.read(work, first.id)) == ("/two", first)
    assert handlers._wanted(work, {"draft": "new"}).dataset == ""
    example = handlers._wanted(work, {"example": "1"})
    assert (Path(example.dataset).name, example.step) == ("example", handlers.CHECK)
    assert handlers._wanted(work, {"example": "1"}) == example
    draft = replace(first, name="kept", step=handlers.CHECK)
    drafts.save(work, draft)
    asked = {"draft": draft.id, "folder": "/three"}
    changed = handlers._wanted(work, asked)
    assert changed == replace(draft, dataset="/three", step=handlers.IMAGES)
    assert drafts.read(work, draft.id) == changed == handlers._wanted(work, asked)
    started = replace(changed, started_as="0001-x")
    drafts.save(work, started)
    other = handlers._wanted(work, {"draft": draft.id, "folder": "/four"})
    assert (other.dataset, drafts.read(work, draft.id)) == ("/four", started)


def test_a_field_that_is_left_by_a_press_of_train_does_not_undo_it(
    work: Workplace, tmp_path: Path
) -> None:
    """Of a blur and a click, both requests are under way at once."""
    draft = drafts.new(work, dataset=str(tmp_path))
    fields = (draft.id, str(tmp_path), "auto", "balanced", "name", "", "any", {})
    with drafts.changing(work):
        leaving = threading.Thread(target=handlers.keeping(work), args=fields)
        leaving.start()
        drafts.save(work, replace(draft, started_as="0001-x"))
    leaving.join()
    assert drafts.read(work, draft.id).started_as == "0001-x"


def test_typed_length_and_samples_are_settings_of_the_draft_until_they_are_cleared(
    work: Workplace, tmp_path: Path
) -> None:
    draft = drafts.new(work, dataset=str(tmp_path))
    keep = handlers.keeping(work)

    def typed(*, concept: str | None = "any", **course: object) -> str:
        return keep(draft.id, str(tmp_path), "auto", "balanced", "name", "", concept, course)

    for concept, settings in (("person", {"train.concept": "person"}), ("any", {}), (None, {})):
        assert typed(concept=concept) == ""
        assert drafts.read(work, draft.id).settings == settings

    assert typed(steps=300, prompts="from the plan") == ""
    assert drafts.read(work, draft.id).settings == {}, "what a plan fills in is nobody's choice"
    assert typed(changed={"steps": "40", "prompts": "a cat\n\na dog"}) == ""
    chosen = {"train.steps": 40, "sampling.prompts": ["a cat", "a dog"]}
    assert drafts.read(work, draft.id).settings == chosen
    assert "greater than or equal to 1" in typed(changed={"steps": "0"})
    assert "unknown setting" in typed(changed={"output.folder": "/"})
    assert drafts.read(work, draft.id).settings == chosen
    assert typed(changed={"steps": "", "prompts": " "}) == ""
    assert drafts.read(work, draft.id).settings == {}


def test_where_there_is_no_plan_the_fields_hold_what_the_draft_sets_and_nothing_of_another_base(
    work: Workplace, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gradio", reason="gradio is not installed (extra `gui`)")
    from lora_trainer.gui.pages import train_handlers

    draft = replace(drafts.new(work, dataset=str(root)), base="black-forest-labs/FLUX.1-dev")
    draft = replace(draft, settings={"adapter.rank": 8, "sampling.prompts": ["a", "b"]})
    refused = launch.Answer(values=None, error="error: this run needs at least 53.72 GiB. Fix: x.")
    monkeypatch.setattr(launch, "ask", lambda _: refused)
    course = {"resolution": "64", "learning_rate": "0.002", "steps": 300, "changed": {"rank": "8"}}
    plan, fields, _, why = train_handlers._plan(work, draft, course)
    shown = {name: fields[name] for name in plan_view.COURSE}
    assert shown == {
        "steps": "",
        "resolution": "",
        "learning_rate": "",
        "rank": "8",
        "prompts": "a\nb",
    }
    assert (fields["own"], fields["taken"]) == (["prompts", "rank"], {"rank": "8"})
    assert "This run needs at least 53.72 GiB" in plan and "53.72 GiB" in why


def test_plan_says_whether_it_fits_how_long_and_what_was_decided() -> None:
    memory = {"items": [{"name": "base", "bytes": 2**30, "note": "<n>"}], "peak_bytes": 2**31}
    plan = {
        "base": "embedded",
        "preset": "cpu",
        "priority": "speed",
        "memory": {**memory, "limit_bytes": 2**32, "fits": True, "phase": "training"},
        "time": {"steps": 60, "epochs": 2.0, "run_s": [60, 120], "note": "by table"},
        "disk": {"cache": 2**20},
        "settings": {
            "train.steps": {"value": 60, "origin": "planner", "reason": "by images"},
            "train.seed": {"value": 42, "origin": "default", "reason": ""},
        },
    }
    html = plan_view.plan(plan)
    assert "Fits: needs 2.0 GiB of 4.0 GiB at most" in html
    assert "About 60 s to 2 min" in html
    assert "not for ComfyUI" in plan_view.brief(plan)
    assert 'data-base="stabilityai/' in plan_view.brief(plan)
    for shown in (plan_view.brief, plan_view.plan):
        assert "not for ComfyUI" not in shown({**plan, "base": "owner/name"})
    assert "&lt;n&gt;" in html and "Train: Steps" in html and "Seed" not in html
    over = {**plan, "memory": {**memory, "limit_bytes": 2**30, "fits": False}}
    assert "Does not fit: needs 2.0 GiB, and 1.0 GiB may be used" in plan_view.plan(over)
    unknown = {**plan, "memory": {**memory, "limit_bytes": None}, "time": {"note": "unmeasured"}}
    html = plan_view.plan(unknown)
    assert "no limit is known" in html and "unmeasured" in html


EMPTY = drafts.Draft(id="0" * 12)


def test_the_same_draft_and_images_are_asked_once_for_a_minute(
    work: Workplace, tmp_path: Path
) -> None:
    """Tabs wait for each other, and only some answers are kept."""
    asked: list[Any] = []
    now_s = [0.0]

    def ask(words: Any) -> Any:
        asked.append(words)
        return len(asked)

    plans = launch.Plans(work, ask=ask, clock_s=lambda: now_s[0])

    def plan(**more: Any) -> Any:
        return plans.of(replace(EMPTY, **{"dataset": str(tmp_path), **more}))

    with ThreadPoolExecutor(8) as tabs:
        assert set(tabs.map(lambda _: plan(), range(8))) == {1}
    assert plan() == plan(name="other") == 1
    assert plan(settings={"adapter.rank": 4}) == 2 and plan() == 1
    now_s[0] = 61.0
    assert plan() == 3
    os.utime(tmp_path, ns=(1, 1))
    assert plan() == 4, "new images are planned anew"
    for rank in range(5, 69):
        plan(settings={"adapter.rank": rank})
    assert plan(settings={"adapter.rank": 68}) == 68 and plan() == 69
    with pytest.raises(InputError, match="no folder"):
        plan(dataset="/nowhere/at/all")
    assert len(asked) == 69


def test_a_started_or_damaged_draft_makes_place_and_one_taken_off_the_queue_is_a_draft_again(
    work: Workplace, tmp_path: Path
) -> None:
    draft = drafts.current(work)
    drafts.save(work, replace(draft, started_as="000001"))
    assert drafts.current(work).id != draft.id
    assert drafts.read(work, draft.id).started_as == "000001"
    draft = drafts.current(work)
    file = work.own / "drafts" / f"{draft.id}.json"
    for text in ("", "[]", '{"id": 5}', '{"id": "x", "unknown": 1}', '{"id": "a", "settings": []}'):
        file.write_text(text)
        with pytest.raises(RequestError):
            drafts.read(work, draft.id)
        assert drafts.current(work).id != draft.id and file.read_text() == text
    for name in ("../x", "", "a" * 12 + "/..", "0" * 200, "ABCDEFABCDEF"):
        with pytest.raises(RequestError, match="no draft"):
            drafts.read(work, name)
    with pytest.raises(RequestError, match=r"adapter\.rank"):
        draft.with_setting("adapter.rank", "many")
    item = commands.add(work.runs, ["images"], label="x")
    started = replace(drafts.new(work, dataset=str(tmp_path)), started_as=item.id)
    drafts.save(work, started)
    follow = handlers.following(work)
    follow(started.id)
    assert drafts.read(work, started.id) == started
    commands.remove(work.runs, started.started_as)
    said = follow(started.id)
    assert "taken off the queue" in said[1]
    assert said[3].active is False, "a draft that is not started asks nothing"
    assert drafts.read(work, started.id) == replace(started, started_as="", step=2)
    assert drafts.current(work).id == started.id


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "--resume; touch marker"
    folder.mkdir()
    return folder


def parsed(words: Any) -> tuple[str, dict[str, Any]]:
    """Return what the real command line understands: the command and its arguments."""
    command, bound, _ = main.app.parse_args(list(words), exit_on_error=False, print_error=False)
    arguments = dict(bound.arguments)
    options = arguments.pop("options", None)
    chosen = vars(options).items() if options else ()
    return command.__name__, arguments | {
        name: value for name, value in chosen if value != getattr(type(options)(), name)
    }


def test_full_draft_arrives_as_typed(images: Path, work: Workplace) -> None:
    draft = replace(
        EMPTY,
        dataset=f"  {images} ",
        base="me/model",
        priority="quality",
        name="my run",
        settings={"train.steps": 5, "sampling.prompts": ["a, b", "c=d"], "data.trigger": "5"},
    )
    command, arguments = parsed(launch.train_words(draft, work))
    assert command == "train"
    sets = [parse_assignment(text) for text in arguments.pop("set_")]
    assert dict(sets) == draft.settings
    assert arguments == {
        "dataset": images,
        "priority": "quality",
        "base": "me/model",
        "name": "my run",
        "output": work.runs,
    }
    for text in ("$(touch marker)", "a b", "--strict", "\u202e"):  # a value and never a flag
        draft = replace(EMPTY, dataset=str(images), base=text, settings={"data.trigger": text})
        words = launch.train_words(draft, work)
        assert shlex.split(launch.command_line(words)) == ["lora-train", *words]
        _, arguments = parsed(words)
        assert set(arguments) == {"dataset", "base", "output", "set_"}
        assert arguments["base"] == text.strip()
        assert parse_assignment(arguments["set_"][0]) == ("data.trigger", text)


def test_what_cannot_be_is_refused_before_anything_starts_and_no_folder_is_a_flag(
    images: Path, work: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("../up", "/abs", "a\\b", "..", ".hidden", "--strict", "C:x", "a\nb", "x" * 101):
        with pytest.raises(RequestError, match="name of a run"):
            launch.train_words(replace(EMPTY, dataset=str(images), name=name), work)
    with pytest.raises(RequestError, match=r"train\.steps"):
        wrong = replace(EMPTY, dataset=str(images), settings={"train.stepz": 5})
        launch.train_words(wrong, work)
    for text in ("", "/no/such/folder", "a\0b"):
        with pytest.raises(InputError):
            launch.train_words(replace(EMPTY, dataset=text), work)
    (tmp_path / "outside").mkdir()
    bounded = Workplace(runs=tmp_path / "runs", roots=(images,))
    (images / "deeper").mkdir()
    (images / "link").symlink_to(tmp_path / "outside")
    launch.train_words(replace(EMPTY, dataset=str(images / "deeper")), bounded)
    for other in (tmp_path, tmp_path / "outside", images / "link", images / ".." / "outside"):
        with pytest.raises(InputError, match="outside of the folders"):
            launch.train_words(replace(EMPTY, dataset=str(other)), bounded)
        with pytest.raises(InputError, match="outside of the folders"):
            draft = replace(EMPTY, dataset=str(images / "deeper"), base=str(other))
            launch.train_words(draft, bounded)
    monkeypatch.chdir(work.runs)
    for name in ("--strict", "plan"):
        (work.runs / name).mkdir()
        words = launch.train_words(replace(EMPTY, dataset=name), work)
        assert words[0] == str(work.runs / name)
        assert parsed(words)[0] == "train"


@given(st.text(max_size=30))
def test_every_name_that_passes_is_one_folder_in_the_root(name: str) -> None:
    try:
        found = launch.run_name(name)
    except RequestError:
        return
    assert not found or Path("/runs", found).resolve().parent == Path("/runs")


def test_resume_finds_the_dataset_in_the_command_of_the_run_or_takes_the_typed_one(
    images: Path, work: Workplace
) -> None:
    run = work.runs / "x"
    run.mkdir()

    def record(*command: str) -> None:
        content = {"command": command, "dataset": {"name": images.name}}
        (run / "run.json").write_text(json.dumps(content), encoding="utf-8")

    record("--output", str(work.runs), str(images), "--name=x")
    words = launch.resume_words(run, dataset="", work=work)
    assert words == (str(images), f"--resume-from={run}")
    assert parsed(words)[1] == {"dataset": images, "resume_from": run}
    record("not/here", str(work.runs), "~nobody-of-that-name/x", "a" * 5000, "a\0b")
    assert launch.resume_words(run, dataset=str(images), work=work)[0] == str(images)
    with pytest.raises(InputError, match="where its images are"):
        launch.resume_words(run, dataset="", work=work)


def test_ask_returns_json_or_the_line_of_the_refusal() -> None:
    def asked(program: str) -> launch.Answer:
        return launch.ask((), program=(sys.executable, "-c", program))

    assert asked("print('{\"a\": 1}')").values == {"a": 1}
    refused = asked(r"import sys; sys.stderr.write('x\nerror: no. Fix: do\n'); sys.exit(3)")
    assert (refused.values, refused.error) == (None, "error: no. Fix: do")
    assert "no JSON" in asked("print('hello')").error
    assert "/no/such/program" in launch.ask((), program=("/no/such/program",)).error
