"""CAC-04, 05 and 06: caches on disks that refuse or are too small, and caches that runs share."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_trainer.cache import store as cache_module
from lora_trainer.cache.cache_plan import Entries
from lora_trainer.cache.keys import text_key
from lora_trainer.checkpoint.states import load_newest
from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import CappedFolder
from lora_trainer.hardware.machine import Hardware
from lora_trainer.reporting.status import read_status
from lora_trainer.run import build
from lora_trainer.training import loop
from tests.fakes.disk import Disk
from tests.fakes.runs import STEPS, Toy, events, python, toy, trajectory
from tests.fakes.studio import Studio, elsewhere, files_of

Figure = Callable[..., None]
QUIET = {"logging__trackers": [], "sampling__every_steps": 0, "train__validate_every_steps": 0}


pytestmark = pytest.mark.usefixtures("little_garbage", "no_hang")


# ---- CAC-04


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
def test_cac_04_a_disk_that_refuses_is_named_and_what_was_encoded_stays(
    code: int, studio: Studio, tmp_path: Path, figure: Figure
) -> None:
    studio.encode()
    whole = files_of(studio.cache.folder.root)
    wanted = studio.needs()
    with Disk().in_use() as disk:
        elsewhere(studio, tmp_path / "count").encode(wanted)
    for at in range(disk.count):
        again = elsewhere(studio, tmp_path / f"{at}")
        refusal = OSError(code, os.strerror(code))
        try:
            with Disk(at=at, error=refusal).in_use():
                again.encode(wanted)
        except MachineError as told:
            assert os.strerror(code) in told.found
            assert "bytes free" in told.found
            assert "data.cache_dir" in told.fix
            there = files_of(again.cache.folder.root)
            assert there.items() <= whole.items()
            done, *_ = again.encode(wanted)
            assert done.found == len(there)
        assert files_of(again.cache.folder.root) == whole
    figure("io_errors", tried=disk.count, survived=disk.count)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_cac_04_a_folder_that_cannot_be_written_is_named(studio: Studio) -> None:
    root = studio.cache.folder.root
    root.chmod(0o500)
    try:
        with pytest.raises(MachineError, match="Permission denied"):
            studio.encode()
    finally:
        root.chmod(0o700)


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


@contextmanager
def full_disk(folder: Path, *, after: int) -> Iterator[None]:
    """Let a folder take that many more files; other folders lie on another disk."""
    real, left = os.open, after

    def refusing(path: Any, flags: int, *more: Any, **options: Any) -> int:
        nonlocal left
        if flags & os.O_CREAT and Path(os.fspath(path)).is_relative_to(folder):
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refusing)
        yield


def test_cac_04_a_disk_that_fills_while_caching_ends_the_run_in_one_line(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    settings = {**QUIET, "data__cache_dir": str(cache)}
    capsys.readouterr()
    with full_disk(cache, after=8):  # two memos of the scan, the marker, five entries
        assert place.train("--name", "full", **settings) == 4
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "No space left on device" in error and "bytes free" in error
    kept = files_of(cache)
    assert 0 < len(kept) < len(files_of(place.cache))
    assert read_status(place.runs / "full").exit_code == 4
    assert place.train("--name", "full", "--resume", **settings) == 0
    assert trajectory(place.runs / "full") == trajectory(place.run)
    assert kept.items() <= files_of(cache).items()


def test_cac_04_a_cache_deleted_during_training_is_not_missed_by_a_small_dataset(
    place: Toy,
) -> None:
    with deleted_at_step(3, place.folder / "small", resident=True) as settings:
        assert place.train("--name", "small", **QUIET, **settings) == 0
    assert trajectory(place.runs / "small") == trajectory(place.run)


def test_cac_04_a_cache_deleted_during_training_is_named_and_the_state_is_kept(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    with deleted_at_step(3, place.folder / "large", resident=False) as settings:
        assert place.train("--name", "large", **QUIET, **settings) == 4
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "vanished or was damaged during training" in error and "--resume" in error
    state = load_newest(place.runs / "large" / "states", events=None)
    done = [row["step"] for row in events(place.runs / "large", "step")]
    assert state is not None and state.step == done[-1] < STEPS, "whole steps are saved"
    assert place.train("--name", "large", "--resume", **QUIET, **settings) == 0
    assert trajectory(place.runs / "large") == trajectory(place.run)


@contextmanager
def deleted_at_step(step: int, cache: Path, *, resident: bool) -> Iterator[dict[str, Any]]:
    """Delete the cache when a step is done; `resident`: its entries stay in memory."""
    real = loop.judge_step

    def report(*args: Any, **options: Any) -> Any:
        nonlocal done
        done += 1
        if done == step:
            shutil.rmtree(cache)
        return real(*args, **options)

    done = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "judge_step", report)
        if not resident:
            patch.setattr(build, "Entries", partial(Entries, limit_bytes=0))
        yield {"data__cache_dir": str(cache), "data__prefetch_steps": 1}


# ---- CAC-05


def test_cac_05_a_cap_that_is_too_small_is_refused_before_anything_is_written(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"data__cache_max_gib": 1e-6, "data__cache_dir": str(tmp_path / "cache")}
    capsys.readouterr()
    assert place.train("--name", "capped", **QUIET, **settings) == 4
    error = capsys.readouterr().err.strip()
    assert re.search(r"needs [\d,]+ bytes, data.cache_max_gib allows 1,073", error)
    assert "--set data.cache_max_gib=1" in error
    assert error.count("\n") == 0
    assert not (place.runs / "capped").exists()
    assert files_of(tmp_path / "cache") == {}


def test_cac_05_a_full_disk_is_refused_up_front_unless_all_is_cached(
    place: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda _: real._replace(free=0))
    monkeypatch.setattr(Hardware, "disk_free_bytes", lambda self, path: 1 << 40)
    elsewhere = {"data__cache_dir": str(tmp_path / "cache")}
    capsys.readouterr()
    assert place.train("--name", "cold", **QUIET, **elsewhere) == 4
    assert re.search(r"still needs [\d,]+ bytes in .*, 0 are free", capsys.readouterr().err)
    assert not (place.runs / "cold").exists()
    assert place.train("--name", "warm", **QUIET) == 0


def test_cac_05_runs_that_do_not_fit_together_take_turns_and_spare_what_is_not_theirs(
    studio: Studio, tmp_path: Path
) -> None:
    """No run evicts its own entries, and nothing beside the marked folder is touched."""
    bystander = tmp_path / "latents" / "ab" / "mine.safetensors"
    bystander.parent.mkdir(parents=True)
    bystander.write_bytes(bytes(1 << 20))
    studio.encode()
    first = studio.needs().keys()
    small = replace(
        studio.cache,
        folder=replace(studio.cache.folder, limit_bytes=studio.cache.folder.used_bytes()),
    )
    studio.resolution_px = 24
    studio.encode()
    second = studio.needs().keys()
    small.prune(second)
    assert all(small.has(key) for key in second)
    assert not all(small.has(key) for key in first)
    assert small.folder.used_bytes() >= small.folder.limit_bytes - (1 << 14)
    assert bystander.exists()
    assert studio.work() == (0, []), "no entry in use is encoded twice"


# ---- CAC-06

SHARED = """
import sys
from pathlib import Path
import numpy as np
from lora_trainer.cache.store import Cache
from lora_trainer.cache.keys import text_key
from lora_trainer.common.files import CappedFolder

root, seed = Path(sys.argv[1]), int(sys.argv[2])
problems = []
folder = CappedFolder(root=root, limit_bytes=1 << 30)
cache = Cache(folder=folder, on_problem=lambda what, **_: problems.append(what))
draw = np.random.default_rng(seed)
for number in draw.integers(0, 40, 600):
    key = text_key(text=str(number), encoder_identity="e", max_tokens=77, content="fp32")
    found = cache.read(key)
    if found is None or draw.random() < 0.5:
        cache.write(key, {"x": np.full(3000, number, dtype=np.float32)})
    else:
        assert (found["x"] == number).all()
assert not problems, problems
"""


def test_cac_06_processes_that_share_a_cache_never_see_half_an_entry(tmp_path: Path) -> None:
    results: list[str] = []

    def work(seed: int) -> None:
        done = python(SHARED, str(tmp_path / "cache"), str(seed), timeout_s=50)
        results.append(done.stderr)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["", "", ""]
    assert len(files_of(tmp_path / "cache")) == 40


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


def test_cac_06_what_another_run_reads_is_pruned_last(studio: Studio, tmp_path: Path) -> None:
    """Also where the disk notes no reading, as most are mounted."""
    studio.encode()
    used, root = studio.needs().keys(), studio.cache.folder.root
    for path in root.rglob("*.safetensors"):
        os.utime(path, (0, 0))
    other = text_key(text="newer", encoder_identity="e", max_tokens=77, content="fp32")
    studio.cache.write(other, {"x": np.zeros(3, dtype=np.float32)})
    os.utime(studio.cache.path(other), (1_000_000_000, 1_000_000_000))
    assert studio.work() == (0, [])
    noted = [studio.cache.path(key).stat() for key in used]
    assert all(max(stat.st_atime, stat.st_mtime) > 1_000_000_000 for stat in noted)
    limit_bytes = studio.cache.folder.used_bytes() - 1
    small = replace(studio.cache, folder=CappedFolder(root=root, limit_bytes=limit_bytes))
    small.prune([])
    assert not small.has(other)
    assert all(small.has(key) for key in used)
