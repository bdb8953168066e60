"""Which files the library lists, and that a name leads to a file of a run and to nothing else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from lora_trainer.gui import lora_files
from lora_trainer.gui.run_best import exports
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import RequestError
from lora_trainer.reporting.history import read_history
from tests.fakes.live_runs import write_status
from tests.fakes.lora_library import finished_run, lora, picture


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    (tmp_path / "runs").mkdir()
    return Workplace(runs=tmp_path / "runs")


def refs(found: tuple[lora_files.Entry, ...]) -> set[str]:
    return {entry.file.ref for entry in found}


def test_a_run_shows_its_result_with_the_saves_behind_it(work: Workplace) -> None:
    finished_run(work.runs / "a", modelspec__trigger_phrase="zorble")
    (entry,) = lora_files.entries(work)
    assert entry.file.ref == "a/zorble.safetensors"
    assert [save.step for save in entry.saves] == [20, 10]
    assert (entry.header.rank, entry.header.trigger) == (8, "zorble")
    assert "below the base's" in entry.validation
    assert not entry.training


def test_the_file_marked_best_comes_before_the_result(work: Workplace) -> None:
    run = finished_run(work.runs / "a")
    lora(run / "a-best.safetensors")
    (run / "best.json").write_text('{"step": 20}')
    (entry,) = lora_files.entries(work)
    assert (entry.file.path.name, entry.file.step) == ("a-best.safetensors", 20)
    assert [save.step for save in entry.saves] == [None, 20, 10]


def test_a_run_without_a_result_shows_its_newest_save(work: Workplace) -> None:
    run = finished_run(work.runs / "a")
    (run / "zorble.safetensors").unlink()
    (entry,) = lora_files.entries(work)
    assert entry.file.step == 20


def test_files_that_tools_made_stand_for_themselves(work: Workplace) -> None:
    run = finished_run(work.runs / "a")
    for name in ("zorble-merged", "other-step00000010"):
        lora(run / f"{name}.safetensors", ss_network_dim="8")
    found = lora_files.entries(work)
    assert refs(found) == {
        "a/zorble.safetensors",
        "a/zorble-merged.safetensors",
        "a/other-step00000010.safetensors",
    }
    assert {entry.file.trained for entry in found if entry.saves} == {True}


def test_the_newest_file_comes_first(work: Workplace) -> None:
    for age, name in enumerate(("new", "old")):
        run = finished_run(work.runs / name, saves=())
        then = time.time() - 60 * age
        os.utime(run / "zorble.safetensors", (then, then))
    assert [entry.file.run for entry in lora_files.entries(work)] == ["new", "old"]


def test_a_changed_file_is_read_again(work: Workplace) -> None:
    run = finished_run(work.runs / "a", saves=(), modelspec__title="one")
    assert lora_files.entries(work)[0].header.title == "one"
    lora(run / "zorble.safetensors", modelspec__title="another")
    assert lora_files.entries(work)[0].header.title == "another"


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is not a safetensors file"), (b"\x08" + b"\0" * 7 + b"{}      ", "holds no LoRA")],
)
def test_a_broken_file_is_listed_with_the_reason_and_no_folder(
    work: Workplace, content: bytes, said: str
) -> None:
    run = finished_run(work.runs / "a", saves=())
    (run / "zorble.safetensors").write_bytes(content)
    (entry,) = lora_files.entries(work)
    assert entry.header.problem.startswith(said)
    assert str(work.runs) not in entry.header.problem


@pytest.mark.parametrize(
    "ref",
    [
        "", "a", "a/", "/", "../a/zorble.safetensors", "a/../a/zorble.safetensors", "a/run.json",
        "a/.hidden.safetensors", "a/link.safetensors", "a//zorble.safetensors", "b/zorble.safetensors",
        "a/sub/zorble.safetensors", "a/folder.safetensors", "a/\0", ".gui/x.safetensors",
    ],
)  # fmt: skip
def test_a_name_leads_to_a_listed_file_or_nowhere(work: Workplace, ref: str) -> None:
    run = finished_run(work.runs / "a")
    outside = lora(work.runs.parent / "secret.safetensors")
    (run / "link.safetensors").symlink_to(outside)
    (run / "folder.safetensors").mkdir()
    (run / "sub").mkdir()
    for path in (run / ".hidden.safetensors", run / "sub" / "zorble.safetensors"):
        lora(path)
    assert refs(lora_files.entries(work)) == {"a/zorble.safetensors"}
    with pytest.raises(RequestError):
        lora_files.find(work, ref)
    assert lora_files.find(work, "a/zorble-step00000010.safetensors").step == 10


def test_search_wants_every_word_somewhere(work: Workplace) -> None:
    finished_run(
        work.runs / "owl", saves=(), modelspec__title="Blue Owl", modelspec__tags="bird, night"
    )
    finished_run(work.runs / "cat", saves=(), ss_sd_model_name="sdxl.safetensors")
    found = lora_files.entries(work)
    for text, base, runs in (
        ("", "", {"owl", "cat"}),
        ("blue NIGHT", "", {"owl"}),
        ("blue day", "", set()),
        ("", "sdxl.safetensors", {"cat"}),
        ("owl", "sdxl.safetensors", set()),
    ):
        assert {e.file.run for e in lora_files.matching(found, text, base)} == runs, (text, base)


def test_a_base_is_where_the_run_says_if_the_file_is_for_it(work: Workplace) -> None:
    run = finished_run(work.runs / "a", saves=())
    record = json.loads((run / "run.json").read_text())
    record["base"]["source"] = "/models/mine.safetensors"
    (run / "run.json").write_text(json.dumps(record))
    lora(run / "converted.safetensors", ss_sd_model_name="mine.safetensors")
    lora(run / "foreign.safetensors", ss_sd_model_name="other.safetensors")
    for name, base in (
        ("zorble", "/models/mine.safetensors"),
        ("converted", "/models/mine.safetensors"),
        ("foreign", ""),
    ):
        file = lora_files.find(work, f"a/{name}.safetensors")
        assert lora_files.recorded_base(file) == base


@pytest.mark.parametrize("settings", ["{", "[1]", "[" * 100_000, "5", "null", '{"base.model": 5}'])
def test_hostile_settings_in_a_header_are_no_error(work: Workplace, settings: str) -> None:
    finished_run(work.runs / "a", saves=(), lora_train__settings=settings, ss_steps="9" * 99)
    (entry,) = lora_files.entries(work)
    assert entry.header.steps is None
    assert isinstance(entry.header.base, str)


def test_a_picture_in_a_header_is_a_picture_or_nothing() -> None:
    for text, shown in (
        ("data:image/jpeg;base64,/9j/4A==", True),
        ("javascript:alert(1)", False),
        ("data:text/html;base64,PHNjcmlwdD4=", False),
        ("data:image/svg+xml;base64,PHN2Zz4=", False),
        ('data:image/png;base64,A"onerror="x', False),
    ):
        header = lora_files.Header(metadata={"modelspec.thumbnail": text})
        assert bool(header.thumbnail) == shown


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    assert lora_files.unused(path) == path
    for name in ("a.safetensors", "a-002.safetensors"):
        (tmp_path / name).touch()
    assert lora_files.unused(path).name == "a-003.safetensors"


def test_a_renamed_lora_is_still_the_result_of_its_run(work: Workplace) -> None:
    run = finished_run(work.runs / "a")
    write_status(run, state="finished", exit_code=0)
    picture(run / "zorble.preview.png")
    lora_files.rename(work, "a/zorble.safetensors", "first")
    lora_files.take_note(work, "a/first.safetensors", "good with hats\n")
    file = lora_files.rename(work, "a/first.safetensors", "Blue creature.safetensors")
    assert file.ref == "a/Blue creature.safetensors"
    assert (run / "Blue creature.preview.png").is_file() and not (
        run / "zorble.safetensors"
    ).exists()
    (entry,) = lora_files.entries(work)
    assert (entry.file.ref, len(entry.saves)) == (file.ref, 2)
    assert lora_files.matching((entry,), "hats BLUE", "") == (entry,)
    assert file.was("a/zorble.safetensors") and file.was("a/first.safetensors")
    assert exports(run, read_history(run))[30] == "Blue creature.safetensors"
    for name, why in (
        ("zorble-step00000010", "already"),
        ("../x", "cannot be"),
        ("", "cannot be"),
        ("x" * 101, "101 letters"),
    ):
        with pytest.raises(RequestError, match=why):
            lora_files.rename(work, file.ref, name)
    assert lora_files.rename(work, file.ref, "zorble").earlier == (
        "first.safetensors",
        "Blue creature.safetensors",
    )
    assert lora_files.entries(work)[0].saves[0].step == 20
    assert lora_files.take_note(work, "a/zorble.safetensors", " ").note == ""
