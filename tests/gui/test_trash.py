"""The trash: what goes there, what comes back, what may not go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import trash
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import RequestError
from lora_trainer.queue import commands
from tests.fakes.live_runs import until, write_status
from tests.fakes.lora_library import finished_run, lora, picture
from tests.fakes.run_folder import fake_run
from tests.fakes.runs import contents


def test_each_kind_comes_back_as_it_was(work: Workplace) -> None:
    run = finished_run(work.runs / "done")
    write_status(run, state="finished", exit_code=0)
    picture(run / "zorble.preview.png")
    dataset = work.own / "uploads" / "cats"
    dataset.mkdir(parents=True)
    picture(dataset / "a.png")

    def files() -> list[Any]:
        return [contents(folder) if folder.exists() else None for folder in (run, dataset)]

    before = files()
    for kind, ref in (("lora", "done/zorble.safetensors"), ("run", "done"), ("dataset", dataset)):
        thrown = trash.throw_away(work, kind=kind, ref=str(ref))
        assert [each.id for each in trash.contents(work)] == [thrown.id]
        assert thrown.kind == kind and trash.size_bytes(work) > 0
        assert files() != before
        trash.put_back(work, thrown.id)
        assert files() == before
        assert trash.contents(work) == []


def test_nothing_takes_the_place_of_something_else(work: Workplace) -> None:
    run = finished_run(work.runs / "done")
    thrown = trash.throw_away(work, kind="lora", ref="done/zorble.safetensors")
    lora(run / "zorble.safetensors", rank=3)
    new = contents(run)
    with pytest.raises(RequestError, match="another zorble"):
        trash.put_back(work, thrown.id)
    assert contents(run) == new and trash.contents(work) == [thrown]
    trash.empty(work)
    with pytest.raises(RequestError, match="not in the trash"):
        trash.put_back(work, thrown.id)


def test_what_is_in_use_or_not_ours_stays(work: Workplace, tmp_path: Path) -> None:
    write_status(until(fake_run(work.runs / "live", steps=30), 12))
    waits = finished_run(work.runs / "waits")
    write_status(waits, state="stopped", exit_code=0)
    commands.add(work.runs, [f"--resume-from={waits.resolve()}"], label="waits")
    own = tmp_path / "photos"
    for folder in (own, work.own):
        folder.mkdir()
    before = contents(work.runs)
    for kind, ref, why in (
        ("run", "live", "is being trained"),
        ("lora", "live/zorble.safetensors", "is being trained"),
        ("run", "waits", "in the queue"),
        ("run", "../photos", "no run"),
        ("lora", "waits/../live/zorble.safetensors", "no file"),
        ("dataset", str(own), "of your own"),
        ("dataset", str(work.own), "of your own"),
        ("disk", "/", "nothing to delete"),
    ):
        with pytest.raises(RequestError, match=why):
            trash.throw_away(work, kind=kind, ref=ref)
    after = contents(work.runs)
    assert {name: data for name, data in after.items() if not name.endswith("trash.lock")} == before
