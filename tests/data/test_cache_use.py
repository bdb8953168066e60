"""A cache is emptied when nobody works with it, and only of what is its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_trainer.cache.store import clear, entries, in_use
from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import CappedFolder
from tests.fakes.runs import ROOT

NAME = f"{'0123456789abcdef' * 4}.safetensors"
OURS = (f"latents/01/{NAME}", f"text/01/{NAME}", f"damaged/{NAME}")
NOT_OURS = (
    "notes.txt",
    ".memo.sqlite",
    NAME,
    f"mine/{NAME}",
    "latents/01/model.safetensors",
    f"latents/01/{NAME}.bak",
)
HOLDS = """
import sys
from pathlib import Path
from lora_trainer.cache.store import in_use
with in_use(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path) -> CappedFolder:
    folder = CappedFolder(root=tmp_path / "cache", limit_bytes=1 << 20)
    folder.create()
    for name in (*OURS, *NOT_OURS):
        path = folder.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 10)
    return folder


@pytest.fixture
def training(cache: CappedFolder) -> Iterator[subprocess.Popen[str]]:
    """Another process that works with the cache."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(cache.root)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def there(cache: CappedFolder, *names: str) -> list[bool]:
    return [(cache.root / name).exists() for name in names]


def test_entries_go_and_everything_else_stays(cache: CappedFolder) -> None:
    assert sum(size for _, size in entries(cache)) == 30
    done = clear(cache)
    assert (done.files, done.bytes) == (3, 30)
    assert not any(there(cache, *OURS))
    assert all(there(cache, *NOT_OURS))
    assert clear(cache).files == 0


def test_a_folder_that_is_no_cache_is_left_alone(cache: CappedFolder) -> None:
    (cache.root / cache.marker).unlink()
    with pytest.raises(MachineError, match="no cache"):
        clear(cache)
    assert all(there(cache, *OURS, *NOT_OURS))


def test_a_cache_that_a_training_uses_is_left_alone(
    cache: CappedFolder, training: subprocess.Popen[str]
) -> None:
    with pytest.raises(MachineError, match="a training uses"):
        clear(cache)
    assert all(there(cache, *OURS))
    training.communicate("")  # it ends as it should
    assert clear(cache).files == 3


def test_a_training_that_was_killed_uses_nothing(
    cache: CappedFolder, training: subprocess.Popen[str]
) -> None:
    training.kill()
    training.communicate()
    assert clear(cache).files == 3
    assert not list(cache.root.glob(".in-use-*"))


def test_a_cache_that_nobody_has_made_can_be_used(tmp_path: Path) -> None:
    with in_use(tmp_path / "deep" / "cache"):
        assert len(list((tmp_path / "deep" / "cache").glob(".in-use-*"))) == 1
    assert not list((tmp_path / "deep" / "cache").glob(".in-use-*"))


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot write"), in_use(tmp_path / "file" / "cache"):
        pass
