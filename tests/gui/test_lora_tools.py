"""Command lines of the tools: exact, into names that are free; their results as a list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import jobs, lora_files, lora_tools
from lora_trainer.gui.workplace import Workplace

from lora_trainer.cli import main
from lora_trainer.common.errors import RequestError
from tests.fakes.lora_library import finished_run, lora

Make = Callable[..., jobs.Job]


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    for name in ("a", "b"):
        finished_run(tmp_path / "runs" / name, saves=())
    return Workplace(runs=tmp_path / "runs")


@pytest.fixture
def file(work: Workplace) -> lora_files.LoraFile:
    return lora_files.find(work, "a/zorble.safetensors")


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(work: Workplace, **asked: Any) -> jobs.Job:
        asked["argv"] = tuple(asked["argv"])
        folder = work.own / "jobs" / "1"
        return jobs.Job(id="1", folder=folder, state="running", exit_code=None, **asked)

    monkeypatch.setattr(jobs, "start", start)


def parsed(job: jobs.Job) -> tuple[str, dict[str, Any]]:
    words = list(job.argv)
    words = words[words.index("lora_trainer") + 1 :]
    command, bound, _ = main.app.parse_args(words, exit_on_error=False, print_error=False)
    return command.__name__, dict(bound.arguments)


def test_convert_goes_beside_the_file(work: Workplace, file: lora_files.LoraFile) -> None:
    job = lora_tools.convert(work, file, format="diffusers", name="")
    output = file.path.with_name("zorble-diffusers.safetensors")
    command, arguments = parsed(job)
    assert vars(arguments.pop("options")) == {"base": "embedded", "precision": None, "force": False}
    assert (command, arguments) == (
        "convert",
        {"file": file.path, "format": "diffusers", "output": output},
    )
    assert job.about["result"] == "a/zorble-diffusers.safetensors"


def test_a_name_that_is_taken_is_never_replaced(work: Workplace, file: lora_files.LoraFile) -> None:
    for name, expected in (("zorble", "zorble-002"), ("x.safetensors", "x"), ("", "zorble-kohya")):
        job = lora_tools.convert(work, file, format="kohya", name=name)
        _, arguments = parsed(job)
        assert arguments["output"].name == f"{expected}.safetensors"
        assert not arguments["options"].force


def test_resize_by_rank_share_or_both(work: Workplace, file: lora_files.LoraFile) -> None:
    job = lora_tools.resize(work, file, rank=" 4 ", energy_percent="95", name="")
    _, arguments = parsed(job)
    assert (arguments["rank"], arguments["energy"]) == (4, 0.95)
    assert arguments["output"].name == "zorble-r4-e95.safetensors"
    job = lora_tools.resize(work, file, rank="", energy_percent="90", name="")
    assert "rank" not in parsed(job)[1]


def test_merge_names_each_file_with_its_weight(work: Workplace, file: lora_files.LoraFile) -> None:
    others = [("b/zorble.safetensors", -0.5), ("", 1.0), (None, None)]
    job = lora_tools.merge(work, file, weight=0.25, others=others, rank="8", name="")
    command, arguments = parsed(job)
    other = lora_files.find(work, "b/zorble.safetensors").path
    assert command == "merge"
    assert arguments["files"] == [f"{file.path}:0.25", f"{other}:-0.5"]
    assert arguments["rank"] == 8


@pytest.mark.parametrize(
    ("make", "asked"),
    [
        (lora_tools.convert, {"format": "--force", "name": ""}),
        (lora_tools.convert, {"format": "kohya", "name": "../../x"}),
        (lora_tools.convert, {"format": "kohya", "name": "--force"}),
        (lora_tools.convert, {"format": "kohya", "name": ".hidden"}),
        (lora_tools.resize, {"rank": "", "energy_percent": " ", "name": ""}),
        (lora_tools.resize, {"rank": "0", "energy_percent": "", "name": ""}),
        (lora_tools.resize, {"rank": "2.5", "energy_percent": "", "name": ""}),
        (lora_tools.resize, {"rank": "inf", "energy_percent": "", "name": ""}),
        (lora_tools.resize, {"rank": "", "energy_percent": "100", "name": ""}),
        (lora_tools.resize, {"rank": "--force", "energy_percent": "", "name": ""}),
        (lora_tools.resize, {"rank": "", "energy_percent": "nan", "name": ""}),
        (lora_tools.merge, {"weight": 1.0, "others": [], "rank": "", "name": ""}),
        (
            lora_tools.merge,
            {"weight": 0.0, "others": [("b/zorble.safetensors", 1.0)], "rank": "", "name": ""},
        ),
        (
            lora_tools.merge,
            {"weight": 1.0, "others": [("../secret", 1.0)], "rank": "", "name": ""},
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    work: Workplace, file: lora_files.LoraFile, make: Make, asked: dict[str, Any]
) -> None:
    with pytest.raises(RequestError):
        make(work, file, **asked)


def test_a_result_is_linked_while_it_is_there(work: Workplace, file: lora_files.LoraFile) -> None:
    job = lora_tools.convert(work, file, format="kohya", name="new")
    assert "working" in lora_tools.shown(work, [job])
    done = replace(job, state="finished", exit_code=0)
    assert "not there any more" in lora_tools.shown(work, [done])
    lora(file.path.with_name("new.safetensors"))
    assert "/library?file=a%2Fnew.safetensors" in lora_tools.shown(work, [done])
    job.folder.mkdir(parents=True)
    (job.folder / jobs.LOG_FILE).write_text("error: <b>no</b>. Fix: do.\n")
    failed = replace(job, state="failed", exit_code=2)
    assert "error: &lt;b&gt;no&lt;/b&gt;. Fix: do." in lora_tools.shown(work, [failed])
