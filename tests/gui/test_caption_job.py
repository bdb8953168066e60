"""A captioning is asked for in the words of the command, and told from the lines it prints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import caption_job, jobs
from lora_trainer.gui.jobs import Job
from lora_trainer.gui.launch import Answer
from lora_trainer.gui.workplace import Workplace

from lora_trainer.cli.main import main
from lora_trainer.common.errors import InputError, RequestError

EXAMPLE = Path(__file__).resolve().parents[2] / "datasets" / "example"


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(runs=tmp_path / "runs")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that would have been started."""
    lines: list[list[str]] = []

    def start(work: Workplace, *, kind: str, argv: list[str], about: Any) -> None:
        lines.append(argv)

    monkeypatch.setattr(jobs, "start", start)
    return lines


def job(tmp_path: Path, *rows: object, state: Any = "running", code: int | None = None) -> Job:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (tmp_path / jobs.LOG_FILE).write_text("\n".join(lines))
    return Job(
        id="0" * 12, folder=tmp_path, kind="caption", argv=(), about={}, state=state, exit_code=code
    )


def test_the_command_takes_what_is_asked_for(
    work: Workplace,
    started: list[list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its own parser is asked, with a model folder that is not there in place of a download."""
    root = tmp_path / "set"
    shutil.copytree(EXAMPLE, root)
    files = ["zibbo_01.png", "zibbo_02.jpg"]
    model = str(tmp_path / "no model")
    caption_job.start(work, root, model=model, files=files, trigger="-x", replace=True)
    (line,) = started
    words = line[line.index("caption") :]
    assert {"--overwrite", "--trigger=-x", *(f"--images={name}" for name in files)} < set(words)
    with pytest.raises(SystemExit):
        main([*words, "--dry-run"])
    captured = capsys.readouterr()
    assert "no model" in captured.err, captured.err
    assert not list(root.glob(".captions-before/*"))


def test_a_folder_is_captioned_once_at_a_time(
    work: Workplace, started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = job(tmp_path)
    monkeypatch.setattr(caption_job, "of_folder", lambda work, root: running)
    with pytest.raises(RequestError, match="already"):
        caption_job.start(work, tmp_path, model="blip", files=(), trigger="", replace=False)
    assert started == []


@pytest.mark.parametrize(
    ("rows", "state", "said", "done"),
    [
        ([], "running", "loading the model", 0),
        ([{"event": "downloading", "model": "a/b", "gigabytes": 1.6}], "running",
         "downloading a/b, about 1.6 GB", 0),
        ([{"event": "caption", "index": 3, "count": 9}, "a word of a library", '{"event": "capt'],
         "running", "3 of 9 captions written", 3),
        ([{"event": "caption", "index": 9, "count": 9},
          {"event": "captioned", "written": 8, "failed": 1, "had_one": 0}], "finished",
         "8 captions written, 1 images without", 9),
        (["error: no such model. Fix: x"], "failed", "error: no such model. Fix: x", 0),
    ],
)  # fmt: skip
def test_how_far_it_is(rows: list[Any], state: str, said: str, done: int, tmp_path: Path) -> None:
    found = caption_job.state(job(tmp_path, *rows, state=state))
    assert (found["state"], found["said"], found["done"]) == (state, said, done)


def test_images_without_a_caption_are_named(tmp_path: Path) -> None:
    problem = {"event": "problem", "file": "a.png", "what": "is damaged", "fix": "remove it"}
    found = caption_job.state(job(tmp_path, problem))
    assert found["problems"] == ["a.png is damaged. remove it"]


def test_no_captioning_yet() -> None:
    assert caption_job.state(None)["state"] == "none"


def test_what_was_taken_back_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {"event": "undone", "removed": ["a", "b"], "restored": ["c"], "kept": []}
    monkeypatch.setattr(caption_job.launch, "ask", lambda words: Answer(values=values))
    assert caption_job.take_back(tmp_path) == "2 captions removed, 1 put back"
    refused = Answer(values=None, error="error: nothing to take back")
    monkeypatch.setattr(caption_job.launch, "ask", lambda words: refused)
    with pytest.raises(InputError, match="nothing to take back"):
        caption_job.take_back(tmp_path)
