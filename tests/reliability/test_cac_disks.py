"""CAC-04, 05 and 06: caches on disks that refuse or are too small, and caches that runs share."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lora_trainer.data.cache import text_key
from lora_trainer.errors import MachineError
from lora_trainer.files import CappedFolder
from tests.fakes.disk import Disk
from tests.fakes.runs import python
from tests.fakes.studio import Studio, elsewhere, few_objects, files_of, studio_in

Figure = Callable[..., None]


@pytest.fixture(scope="module", autouse=True)
def _little_garbage() -> Iterator[None]:
    """Caching collects garbage when it lets go of an encoder: here among few objects."""
    with few_objects():
        yield


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    return studio_in(tmp_path)


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


# ---- CAC-06

SHARED = """
import sys
from pathlib import Path
import numpy as np
from lora_trainer.data.cache import Cache, text_key
from lora_trainer.files import CappedFolder

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
    limit_bytes = studio.cache.folder.used_bytes() - 1
    small = replace(studio.cache, folder=CappedFolder(root=root, limit_bytes=limit_bytes))
    small.prune([])
    assert not small.has(other)
    assert all(small.has(key) for key in used)
