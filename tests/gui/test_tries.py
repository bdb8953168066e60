"""What is asked of `lora-train sample`, and what a page shows of the images so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import jobs, lora_files, tries
from lora_trainer.gui.workplace import Workplace

from lora_trainer.cli import main
from lora_trainer.common.errors import InputError, RequestError
from tests.fakes.lora_library import finished_run, picture


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    finished_run(tmp_path / "runs" / "a", saves=())
    return Workplace(runs=tmp_path / "runs")


@pytest.fixture
def file(work: Workplace) -> lora_files.LoraFile:
    return lora_files.find(work, "a/zorble.safetensors")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, work: Workplace) -> list[jobs.Job]:
    """Take jobs instead of starting them."""
    found: list[jobs.Job] = []

    def start(work: Workplace, *, kind: str, argv: list[str], about: Mapping[str, Any]) -> jobs.Job:
        folder = work.own / "jobs" / str(len(found))
        job = jobs.Job(
            id=str(len(found)),
            folder=folder,
            kind=kind,
            argv=tuple(argv),
            about=about,
            state="running",
            exit_code=None,
        )
        found.insert(0, job)
        return job

    monkeypatch.setattr(jobs, "start", start)
    monkeypatch.setattr(jobs, "find", lambda work, kind: [job for job in found if job.kind == kind])
    return found


def parsed(job: jobs.Job) -> dict[str, Any]:
    """Return what the real command line understands."""
    words = list(job.argv)
    words = words[words.index("lora_trainer") + 1 :]
    command, bound, _ = main.app.parse_args(words, exit_on_error=False, print_error=False)
    assert command.__name__ == "sample"
    return dict(bound.arguments)


def drawn(work: Workplace, job: jobs.Job, *names: str) -> None:
    folder = work.own / "tries" / str(job.about["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        picture(folder / name)


def test_texts_of_the_form_arrive_as_values(
    work: Workplace, file: lora_files.LoraFile, started: list[jobs.Job]
) -> None:
    prompts = "--output=/tmp/x\n\n; touch marker\n$(touch marker)\n  a, (b:1.2)  "
    wish = tries.wish(prompts=prompts, strengths="1,0.4 -0.5", seed=7, base="me/model")
    arguments = parsed(tries.start(work, file, wish))
    assert arguments["run"] == file.path
    assert arguments["prompt"] == [
        "--output=/tmp/x",
        "; touch marker",
        "$(touch marker)",
        "a, (b:1.2)",
    ]
    assert arguments["strength"] == [-0.5, 0.4, 1.0]
    assert (arguments["seed"], arguments["base"]) == (7, "me/model")
    assert arguments["output"].parent == work.own / "tries"


def test_a_base_outside_of_what_may_be_named_is_refused(
    file: lora_files.LoraFile, tmp_path: Path, work: Workplace, started: list[jobs.Job]
) -> None:
    shared = replace(work, roots=())
    wish = tries.wish(prompts="x", strengths="1", seed=1, base=str(tmp_path))
    with pytest.raises(InputError, match="outside of the folders"):
        tries.start(shared, file, wish)
    assert started == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompts": " \n "}, {"prompts": "\n".join(map(str, range(13)))}, {"strengths": ""},
        {"strengths": "a"}, {"strengths": "nan"}, {"strengths": "1e9"}, {"seed": -1.0}, {"seed": 0.5},
        {"seed": 1e30}, {"seed": float("inf")}, {"seed": float("nan")},
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(wrong: dict[str, Any]) -> None:
    fine: dict[str, Any] = {"prompts": "x", "strengths": "1", "seed": 1, "base": ""}
    tries.wish(**fine)
    with pytest.raises(RequestError):
        tries.wish(**{**fine, **wrong})


def test_one_try_at_a_time(
    work: Workplace, file: lora_files.LoraFile, started: list[jobs.Job]
) -> None:
    wish = tries.wish(prompts="x", strengths="1", seed=None, base="")
    tries.start(work, file, wish)
    with pytest.raises(RequestError, match="already"):
        tries.start(work, file, wish)


def test_the_grid_fills_as_images_come(
    work: Workplace, file: lora_files.LoraFile, started: list[jobs.Job]
) -> None:
    wish = tries.wish(prompts="one\ntwo <b>", strengths="0.4 1", seed=5, base="")
    job = tries.start(work, file, wish)
    stamps = [tries.stamp(work, [job])]
    assert "loading the base model" in tries.shown(work, [job])
    drawn(work, job, "zorble-5-x0.4.png", "zorble-6-x1.png", "other.png", ".tmp-1-zorble-5-x1.png")
    stamps.append(tries.stamp(work, [job]))
    assert {place: path.name for place, path in tries.images(work, job).items()} == {
        (0, 0.4): "zorble-5-x0.4.png",
        (1, 1.0): "zorble-6-x1.png",
    }
    markup = tries.shown(work, [job])
    assert "2 of 4 images" in markup
    assert markup.count("<img") == 2
    assert "two &lt;b&gt;" in markup
    assert f"/media/own/tries/{job.about['folder']}/zorble-5-x0.4.png" in markup
    done = replace(job, state="finished", exit_code=0)
    stamps.append(tries.stamp(work, [done]))
    assert len(set(stamps)) == 3
    assert "4 images, seed 5" in tries.shown(work, [done])


def test_one_strength_has_the_names_that_the_command_gives(
    work: Workplace, file: lora_files.LoraFile, started: list[jobs.Job]
) -> None:
    job = tries.start(work, file, tries.wish(prompts="x", strengths="1", seed=5, base=""))
    drawn(work, job, "zorble-5.png")
    assert list(tries.images(work, job)) == [(0, 1.0)]


def test_a_refusal_is_one_line_and_a_stop_is_no_error(
    work: Workplace, file: lora_files.LoraFile, started: list[jobs.Job]
) -> None:
    job = tries.start(work, file, tries.wish(prompts="x", strengths="1", seed=5, base=""))
    job.folder.mkdir(parents=True)
    (job.folder / jobs.LOG_FILE).write_text("loading\nerror: no <base>. Fix: --base.\n")
    markup = tries.shown(work, [replace(job, state="failed", exit_code=3)])
    assert "error: no &lt;base&gt;. Fix: --base." in markup
    markup = tries.shown(work, [replace(job, state="failed", exit_code=-15)])
    assert "Stopped after 0 of 1" in markup
    assert "error" not in markup


def test_a_record_that_somebody_changed_leads_nowhere(
    work: Workplace, file: lora_files.LoraFile, started: list[jobs.Job]
) -> None:
    job = tries.start(work, file, tries.wish(prompts="x", strengths="1", seed=5, base=""))
    picture(work.runs.parent / "zorble-5.png")
    for about in (
        {"folder": "../../.."}, {"folder": 5, "prompts": 3, "strengths": ["x"], "seed": "y"}, {},
    ):  # fmt: skip
        changed = replace(job, about={**job.about, **about} if about else {})
        assert tries.images(work, changed) == {}
        tries.shown(work, [changed])
