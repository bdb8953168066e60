"""Command lines of the interface: exact, without a shell, and no text of a form becomes a flag."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_trainer.gui import launch
from lora_trainer.gui.drafts import Draft
from lora_trainer.gui.workplace import Workplace

from lora_trainer.cli import main
from lora_trainer.cli.options import PLANNED
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.config import parse_assignment

HOSTILE = ["; touch marker", "$(touch marker)", "`touch marker`", "a b", "--strict", "-h", "\u202e"]
EMPTY = Draft(id="0" * 12)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "--resume; touch marker"
    folder.mkdir()
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(runs=tmp_path)


def parsed(words: launch.Words) -> tuple[str, dict[str, Any]]:
    """Return what the real command line understands: the command and its arguments."""
    command, bound, _ = main.app.parse_args(list(words), exit_on_error=False, print_error=False)
    arguments = dict(bound.arguments)
    options = vars(arguments.pop("options", PLANNED)).items()
    return command.__name__, arguments | {
        name: value for name, value in options if value != getattr(PLANNED, name)
    }


def test_empty_draft_leaves_everything_to_the_trainer(images: Path, work: Workplace) -> None:
    words = launch.train_words(replace(EMPTY, dataset=str(images), base="auto"), work)
    assert words == (str(images), "--priority=balanced", f"--output={work.runs}")


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


@pytest.mark.parametrize(
    ("build", "name"), [(launch.check_words, "check"), (launch.plan_words, "plan")]
)
def test_questions_ask_for_json(
    images: Path, work: Workplace, build: Callable[[Draft, Workplace], launch.Words], name: str
) -> None:
    draft = replace(EMPTY, dataset=str(images), settings={"train.steps": 5})
    command, arguments = parsed(build(draft, work))
    assert command == name
    assert arguments["json"] is True
    assert arguments["dataset"] == images
    assert arguments["set_"] == ["train.steps=5"]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_a_draft_is_a_value_and_never_a_flag(
    images: Path, work: Workplace, text: str
) -> None:
    draft = replace(EMPTY, dataset=str(images), base=text, settings={"data.trigger": text})
    _, arguments = parsed(launch.train_words(draft, work))
    assert set(arguments) == {"dataset", "base", "output", "set_"}
    assert arguments["base"] == text.strip()
    assert parse_assignment(arguments["set_"][0]) == ("data.trigger", text)


def test_a_command_line_can_be_pasted_into_a_shell(images: Path, work: Workplace) -> None:
    import shlex

    words = launch.train_words(replace(EMPTY, dataset=str(images)), work)
    assert shlex.split(launch.command_line(words)) == ["lora-train", *words]


def test_a_relative_folder_cannot_be_a_flag_or_a_command(
    work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work.runs)
    for name in ("--strict", "plan"):
        (work.runs / name).mkdir()
        words = launch.train_words(replace(EMPTY, dataset=name), work)
        assert words[0] == str(work.runs / name)
        assert parsed(words)[0] == "train"


@pytest.mark.parametrize("text", ["", "  ", "/no/such/folder", "a\0b", "~nobody-of-that-name/x"])
def test_a_dataset_that_is_no_folder_is_refused(text: str, work: Workplace) -> None:
    with pytest.raises(InputError):
        launch.train_words(replace(EMPTY, dataset=text), work)


def test_a_shared_server_reads_its_own_folders_only(images: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    work = Workplace(runs=tmp_path / "runs", roots=(images,))
    (images / "deeper").mkdir()
    (images / "link").symlink_to(tmp_path / "outside")
    launch.train_words(replace(EMPTY, dataset=str(images / "deeper")), work)
    for other in (tmp_path, tmp_path / "outside", images / "link", images / ".." / "outside"):
        with pytest.raises(InputError, match="outside of the folders"):
            launch.train_words(replace(EMPTY, dataset=str(other)), work)
        with pytest.raises(InputError, match="outside of the folders"):
            draft = replace(EMPTY, dataset=str(images / "deeper"), base=str(other))
            launch.train_words(draft, work)


@pytest.mark.parametrize(
    "name",
    ["../up", "/abs", "a/b", "a\\b", "..", ".hidden", "--strict", "-x", "C:x", "a\nb", "x" * 101],
)
def test_a_name_that_is_no_plain_folder_name_is_refused(
    images: Path, work: Workplace, name: str
) -> None:
    with pytest.raises(RequestError, match="name of a run"):
        launch.train_words(replace(EMPTY, dataset=str(images), name=name), work)


@given(st.text(max_size=30))
def test_every_name_that_passes_is_one_folder_in_the_root(name: str) -> None:
    try:
        found = launch.run_name(name)
    except RequestError:
        return
    assert not found or Path("/runs", found).resolve().parent == Path("/runs")


def test_impossible_settings_are_refused_before_anything_starts(
    images: Path, work: Workplace
) -> None:
    draft = replace(EMPTY, dataset=str(images), settings={"train.stepz": 5})
    with pytest.raises(RequestError, match=r"train\.steps"):
        launch.train_words(draft, work)


def write_run(run: Path, *, command: list[str], dataset: str) -> Path:
    run.mkdir()
    record = {"command": command, "dataset": {"name": dataset}}
    (run / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return run


def test_resume_finds_the_dataset_in_the_command_of_the_run(images: Path, work: Workplace) -> None:
    command = ["--output", str(work.runs), str(images), "--name=x"]
    run = write_run(work.runs / "x", command=command, dataset=images.name)
    words = launch.resume_words(run, dataset="", work=work)
    assert words == (str(images), f"--resume-from={run}")
    assert parsed(words)[1] == {"dataset": images, "resume_from": run}


def test_resume_of_a_run_from_elsewhere_takes_the_folder_that_is_typed(
    images: Path, work: Workplace
) -> None:
    words = ["not/here", str(work.runs), "~nobody-of-that-name/x", "a" * 5000, "a\0b"]
    run = write_run(work.runs / "x", command=words, dataset=images.name)
    assert launch.resume_words(run, dataset=str(images), work=work)[0] == str(images)
    with pytest.raises(InputError, match="where its images are"):
        launch.resume_words(run, dataset="", work=work)


def python(program: str) -> launch.Words:
    return (sys.executable, "-c", program)


def test_ask_returns_json_or_the_line_of_the_refusal() -> None:
    assert launch.ask((), program=python("print('{\"a\": 1}')")).values == {"a": 1}
    refused = launch.ask(
        (), program=python(r"import sys; sys.stderr.write('x\nerror: no. Fix: do\n'); sys.exit(3)")
    )
    assert refused.values is None
    assert refused.error == "error: no. Fix: do"
    assert "no JSON" in launch.ask((), program=python("print('hello')")).error
    assert "/no/such/program" in launch.ask((), program=("/no/such/program",)).error
