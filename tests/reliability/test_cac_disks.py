"""CAC-04, 05 and 06: caches on disks that refuse or are too small, and caches that runs share."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.cache.cache_plan import Entries
from lora_trainer.checkpoint.states import load_newest
from lora_trainer.hardware.machine import Hardware
from lora_trainer.training import loop
from tests.fakes.runs import QUIET, STEPS, Toy, events, toy, trajectory
from tests.fakes.studio import Studio, elsewhere, files_of

# ---- CAC-04


def test_cac_04_a_full_cache_that_cannot_be_written_is_read(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared cache on a read-only disk: neither touching nor making a folder may be needed."""
    studio.encode()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("utime", "mkdir", "replace", "rename", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    assert studio.work() == (0, [])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The undisturbed run."""
    place = toy(tmp_path_factory.mktemp("cac")).with_base()
    assert place.train(**QUIET) == 0
    return place


def test_cac_04_a_cache_deleted_during_training_is_named_and_the_state_is_kept(
    place: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At step 3 of a run whose entries do not stay in memory."""
    cache, real, done = place.folder / "large", loop.judge_step, []

    def judge(*args: Any, **options: Any) -> Any:
        done.append(1)
        if len(done) == 3:
            shutil.rmtree(cache)
        return real(*args, **options)

    monkeypatch.setattr(loop, "judge_step", judge)
    monkeypatch.setattr("lora_trainer.run.build.Entries", partial(Entries, limit_bytes=0))
    settings = {**QUIET, "data__cache_dir": str(cache), "data__prefetch_steps": 1}
    assert place.train("--name", "large", **settings) == 4
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "vanished or was damaged during training" in error and "--resume" in error
    state = load_newest(place.runs / "large" / "states", events=None)
    steps = [row["step"] for row in events(place.runs / "large", "step")]
    assert state is not None and state.step == steps[-1] < STEPS, "whole steps are saved"
    assert place.train("--name", "large", "--resume", **settings) == 0
    assert trajectory(place.runs / "large") == trajectory(place.run)


# ---- CAC-05


def test_cac_05_too_little_room_is_refused_before_anything_is_written(
    place: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cap that is too small, and a full disk unless all is cached."""
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(Hardware, "disk_free_bytes", lambda self, path: 1 << 40)
    cold = {**QUIET, "data__cache_dir": str(tmp_path / "cache")}
    capsys.readouterr()
    assert place.train("--name", "cold", data__cache_max_gib=1e-6, **cold) == 4
    error = capsys.readouterr().err.strip()
    assert re.search(r"needs [\d,]+ bytes, data.cache_max_gib allows 1,073", error)
    assert "--set data.cache_max_gib=1" in error and error.count("\n") == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=0))
    assert place.train("--name", "cold", **cold) == 4
    assert re.search(r"still needs [\d,]+ bytes in .*, 0 are free", capsys.readouterr().err)
    assert not (place.runs / "cold").exists() and files_of(tmp_path / "cache") == {}
    assert place.train("--name", "warm", **QUIET) == 0


# ---- CAC-06


def test_cac_06_two_runs_that_cache_at_once_end_with_the_same_entries(
    studio: Studio, tmp_path: Path
) -> None:
    """There is no lock that a dead run could leave: both write what is missing, and it is equal."""
    studio.encode()
    whole = files_of(studio.cache.folder.root)
    first, second = (elsewhere(studio, tmp_path / "shared") for _ in range(2))
    leftover = tmp_path / "shared" / "latents" / "ab" / ".tmp-999999999-1-dead.safetensors"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half")
    threads = [threading.Thread(target=other.encode) for other in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files_of(tmp_path / "shared") == whole
    assert first.damage == second.damage == []
