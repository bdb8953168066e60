"""Command lines of the interface: exact, without a shell, and no text of a form becomes a flag."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_trainer.gui import launch
from lora_trainer.gui.launch import Form, Launcher, News

from lora_trainer import cli
from lora_trainer.errors import InputError, RequestError

HOSTILE = ["; touch marker", "$(touch marker)", "`touch marker`", "a b", "--strict", "-h", "\u202e"]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "--resume; touch marker"
    folder.mkdir()
    return folder


def parsed(argv: launch.Argv) -> tuple[str, dict[str, object]]:
    """Return what the real command line understands: the command and its arguments."""
    assert argv[:3] == (sys.executable, "-m", "lora_trainer")
    command, bound, _ = cli.app.parse_args(list(argv[3:]), exit_on_error=False, print_error=False)
    return command.__name__, dict(bound.arguments)


def test_empty_form_leaves_everything_to_the_trainer(images: Path, tmp_path: Path) -> None:
    argv = launch.train_argv(Form(dataset=str(images), base="auto"), root=tmp_path)
    assert argv[3:] == (str(images), "--priority=balanced", f"--output={tmp_path}")


def test_full_form_arrives_as_typed(images: Path, tmp_path: Path) -> None:
    form = Form(
        dataset=f"  {images} ",
        base="me/model",
        priority="quality",
        name="my run",
        more_settings='train.steps=5\n\n# half\n sampling.prompts=["a, b", "c=d"] ',
    )
    command, arguments = parsed(launch.train_argv(form, root=tmp_path))
    assert command == "train"
    assert arguments == {
        "dataset": images,
        "priority": "quality",
        "base": "me/model",
        "name": "my run",
        "output": tmp_path,
        "set_": ["train.steps=5", 'sampling.prompts=["a, b", "c=d"]'],
    }


@pytest.mark.parametrize(
    ("build", "name"), [(launch.check_argv, "check"), (launch.plan_argv, "plan")]
)
def test_questions_ask_for_json(
    images: Path, build: Callable[[Form], launch.Argv], name: str
) -> None:
    command, arguments = parsed(build(Form(dataset=str(images), more_settings="train.steps=5")))
    assert command == name
    assert arguments["json"] is True
    assert arguments["dataset"] == images
    assert arguments["set_"] == ["train.steps=5"]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_the_form_is_a_value_and_never_a_flag(
    images: Path, tmp_path: Path, text: str
) -> None:
    form = Form(dataset=str(images), base=text, more_settings=f"data.trigger={text}")
    _, arguments = parsed(launch.train_argv(form, root=tmp_path))
    assert set(arguments) == {"dataset", "priority", "base", "output", "set_"}
    assert arguments["base"] == text.strip()
    assert arguments["set_"] == [f"data.trigger={text}".strip()]


def test_a_relative_folder_cannot_be_a_flag_or_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("--strict", "plan"):
        (tmp_path / name).mkdir()
        argv = launch.train_argv(Form(dataset=name), root=tmp_path)
        assert argv[3] == str(tmp_path / name)
        assert parsed(argv)[0] == "train"


@pytest.mark.parametrize("text", ["", "  ", "/no/such/folder", "a\0b", "~nobody-of-that-name/x"])
def test_a_dataset_that_is_no_folder_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        launch.train_argv(Form(dataset=text), root=tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../up", "/abs", "a/b", "a\\b", "..", ".hidden", "--strict", "-x", "C:x", "a\nb", "x" * 101],
)
def test_a_name_that_is_no_plain_folder_name_is_refused(images: Path, name: str) -> None:
    with pytest.raises(RequestError, match="name of a run"):
        launch.train_argv(Form(dataset=str(images), name=name), root=images)


@given(st.text(max_size=30))
def test_every_name_that_passes_is_one_folder_in_the_root(name: str) -> None:
    try:
        argv = launch.train_argv(Form(dataset="/", name=name), root=Path("/runs"))
    except RequestError:
        return
    for given_name in [word[7:] for word in argv if word.startswith("--name=")]:
        assert Path("/runs", given_name).resolve().parent == Path("/runs")


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("train.stepz=5", "train.steps"),
        ("train.steps=none", "train.steps"),
        ("train.steps", "no '='"),
        ("train.steps=5\ntrain.steps=6", "twice"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(lines: str, found: str) -> None:
    with pytest.raises(RequestError, match=found):
        launch.more_settings(lines)


def write_run(run: Path, *, command: list[str], dataset: str) -> Path:
    run.mkdir()
    record = {"command": command, "dataset": {"name": dataset}}
    (run / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return run


def test_resume_finds_the_dataset_in_the_command_of_the_run(images: Path, tmp_path: Path) -> None:
    command = ["--output", str(tmp_path), str(images), "--name=x"]
    run = write_run(tmp_path / "x", command=command, dataset=images.name)
    argv = launch.resume_argv(run, dataset="")
    assert argv[3:] == (str(images), f"--resume-from={run}")
    assert parsed(argv)[1] == {"dataset": images, "resume_from": run}


def test_resume_of_a_run_from_elsewhere_takes_the_folder_of_the_form(
    images: Path, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "x", command=["not/here", str(tmp_path)], dataset=images.name)
    assert launch.resume_argv(run, dataset=str(images))[3] == str(images)
    with pytest.raises(InputError, match="where its images are"):
        launch.resume_argv(run, dataset="")


def python(program: str) -> launch.Argv:
    return (sys.executable, "-c", program)


def test_ask_returns_json_or_the_line_of_the_refusal() -> None:
    assert launch.ask(python("print('{\"a\": 1}')")).values == {"a": 1}
    refused = launch.ask(
        python("import sys; sys.stderr.write('x\\nerror: no. Fix: do\\n'); sys.exit(3)")
    )
    assert refused.values is None
    assert refused.error == "error: no. Fix: do"
    assert "no JSON" in launch.ask(python("print('hello')")).error
    assert "/no/such/program" in launch.ask(("/no/such/program",)).error


def news_at_end(launcher: Launcher) -> News:
    launcher.children[-1].process.wait(timeout=60)
    return launcher.news([])


def test_a_trainer_starts_in_a_session_of_its_own_and_without_a_shell(tmp_path: Path) -> None:
    program = "import os, sys; print(os.getsid(0) == os.getpid(), sys.argv[1:]); sys.exit(4)"
    launcher = Launcher(root=tmp_path)
    launcher.start((*python(program), "$(touch marker)", "; touch marker"))
    assert news_at_end(launcher).error == "True ['$(touch marker)', '; touch marker']"
    assert not list(tmp_path.glob("marker"))
    assert not Path("marker").exists()


def test_news_tell_of_starting_and_of_failing_only(tmp_path: Path) -> None:
    launcher = Launcher(root=tmp_path)
    assert launcher.news([]) == News()
    pid = launcher.start(python("input_file = open(0).read(); import time; time.sleep(60)"))
    try:
        assert launcher.news([]) == News(starting=True)
        assert launcher.news([pid]) == News()
    finally:
        os.kill(pid, 15)
        launcher.children[-1].process.wait(timeout=60)
    launcher.start(python("import sys; sys.exit(143)"))
    assert news_at_end(launcher) == News()
    launcher.start(python("import sys; sys.exit(7)"))
    assert news_at_end(launcher) == News(error="the trainer ended with exit code 7")


def test_the_same_training_is_not_started_twice(tmp_path: Path) -> None:
    launcher = Launcher(root=tmp_path)
    argv = python("import time; time.sleep(60)")
    pid = launcher.start(argv)
    try:
        with pytest.raises(RequestError, match="runs already"):
            launcher.start(argv)
    finally:
        os.kill(pid, 15)
        launcher.children[-1].process.wait(timeout=60)
    again = launcher.start(argv)
    os.kill(again, 15)
    launcher.children[-1].process.wait(timeout=60)
    assert len(launcher.children) == 2


def test_logs_lie_in_a_folder_that_is_no_run(tmp_path: Path) -> None:
    launcher = Launcher(root=tmp_path)
    launcher.start(python(""))
    news_at_end(launcher)
    (log,) = (tmp_path / launch.LOGS).iterdir()
    assert launch.LOGS.startswith(".")
    assert log.stat().st_mtime <= time.time() + 1
