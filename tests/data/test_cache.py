"""The content-addressed cache: keys, whole entries only, damage set aside, room and pruning."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.cache import keys as keys_module
from lora_trainer.cache.keys import Arrays, CacheKey, latent_key, mask_key, text_key
from lora_trainer.cache.store import Cache
from lora_trainer.common.events import EventStream
from lora_trainer.common.files import CappedFolder
from lora_trainer.dataset.buckets import Bucket, Placement

PLACEMENT = Placement(Bucket(64, 48), 70, 48, 3, 0, 0.1, False)
KEY = text_key(text="a cat", encoder_identity="encoder", max_tokens=77, content="fp32")
ARRAYS: Arrays = {
    "mean": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "std": np.full((2, 3, 4), 0.5, dtype=np.float32),
    "mask": np.array([[1, 1, 0]], dtype=np.int64),
}


class Problems:
    """Collects what a cache reports."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __call__(self, what: str, *, fix: str, file: str | None = None, code: str = "") -> None:
        assert fix
        assert file
        assert code == "CAC-01"
        self.found.append(what)


def make_cache(root: Path, *, limit_bytes: int = 1 << 30) -> tuple[Cache, Problems]:
    problems = Problems()
    folder = CappedFolder(root=root / "cache", limit_bytes=limit_bytes)
    return Cache(folder=folder, on_problem=problems), problems


def same(first: Arrays | None, second: Arrays) -> bool:
    return (
        first is not None
        and first.keys() == second.keys()
        and all(
            first[name].dtype == second[name].dtype
            and first[name].shape == second[name].shape
            and first[name].tobytes() == second[name].tobytes()
            for name in second
        )
    )


# --- keys


def test_digests_are_the_same_in_every_process() -> None:
    assert (
        KEY.digest == CacheKey(kind="text", fields=dict(reversed(list(KEY.fields.items())))).digest
    )
    image = latent_key(
        content_hash="a", encoder_identity="b", placement=PLACEMENT, flip=True, alpha_background="c"
    )
    mask = mask_key(content_hash="a", of_alpha=False, placement=PLACEMENT, flip=False, factor=8)
    digests = [key.digest[:16] for key in (KEY, image, mask)]
    assert digests == ["debdee51be436c6d", "bdaae15f34fadb06", "e3ed8a21edfd8301"], (
        "caches on disk have these names"
    )


# --- whole entries


def test_what_was_written_is_read(tmp_path: Path) -> None:
    cache, problems = make_cache(tmp_path)
    assert not cache.has(KEY)
    assert cache.read(KEY) is None
    cache.write(KEY, ARRAYS)
    assert cache.has(KEY)
    assert cache.verify(KEY)
    found = cache.read(KEY)
    assert same(found, ARRAYS)
    assert found is not None
    found["mean"][0, 0, 0] = 9.0  # torch.from_numpy warns about arrays that cannot be written to
    assert problems.found == []
    path = cache.folder.root / "text" / KEY.digest[:2] / f"{KEY.digest}.safetensors"
    assert cache.path(KEY) == path
    assert (cache.folder.root / cache.folder.marker).exists()


def test_entries_are_plain_safetensors_and_equal_ones_equal_files(tmp_path: Path) -> None:
    contents = set()
    for name in "abcd":
        cache, _ = make_cache(tmp_path / name)
        cache.write(KEY, dict(reversed(ARRAYS.items())) if name == "d" else ARRAYS)
        contents.add(cache.path(KEY).read_bytes())
    assert len(contents) == 1
    assert same(safetensors.numpy.load(contents.pop()), ARRAYS)


def test_the_header_says_what_the_entry_is(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path)
    cache.write(KEY, ARRAYS)
    with safetensors.safe_open(cache.path(KEY), framework="numpy") as file:
        (header,) = file.metadata().values()
    header = json.loads(header)
    assert header["fields"] == {
        "text": "a cat",
        "encoder": "encoder",
        "max_tokens": 77,
        "content": "fp32",
    }
    assert header["key"] == KEY.digest
    assert header["format_version"] == keys_module.FORMAT_VERSION
    assert len(header["sha256"]) == 64


@pytest.mark.parametrize("shape", [(), (0,), (1, 1), (2, 0, 3)])
def test_odd_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    cache, _ = make_cache(tmp_path)
    arrays = {"x": np.zeros(shape, dtype=np.float32)}
    cache.write(KEY, arrays)
    assert same(cache.read(KEY), arrays)


def test_arrays_are_written_in_their_own_order_whatever_their_memory(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path)
    square = np.arange(12, dtype=np.float32).reshape(3, 4)
    cache.write(KEY, {"turned": square.T, "every_other": square[:, ::2]})
    found = cache.read(KEY)
    assert found is not None
    assert np.array_equal(found["turned"], square.T)
    assert np.array_equal(found["every_other"], square[:, ::2])


@pytest.mark.parametrize("arrays", [{}, {"x": np.zeros(3)}, {"x": np.zeros(3, np.float16)}])
def test_nothing_but_numbers_and_tokens_is_stored(tmp_path: Path, arrays: Any) -> None:
    cache, _ = make_cache(tmp_path)
    with pytest.raises(TypeError, match="float32"):
        cache.write(KEY, arrays)
    assert not cache.has(KEY)


# --- damage


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    cache, _ = make_cache(tmp_path_factory.mktemp("entry"))
    cache.write(KEY, ARRAYS)
    return cache.path(KEY).read_bytes()


def read_back(root: Path, data: bytes) -> tuple[Arrays | None, Cache, Problems]:
    cache, problems = make_cache(root)
    cache.path(KEY).parent.mkdir(parents=True, exist_ok=True)
    cache.path(KEY).write_bytes(data)
    return cache.read(KEY), cache, problems


def check_damage(root: Path, data: bytes) -> bool:
    """Read `data` as the entry: the exact arrays, or None with the file set aside. Say which."""
    found, cache, problems = read_back(root, data)
    if found is not None:
        assert same(found, ARRAYS)
        assert problems.found == []
        return True
    assert not cache.has(KEY)
    assert (cache.folder.root / "damaged" / f"{KEY.digest}.safetensors").read_bytes() == data
    assert len(problems.found) == 1
    return False


@given(
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=40))),
    st.floats(0, 1),
)
def test_no_edit_of_any_kind_gives_wrong_arrays(
    entry: bytes,
    tmp_path_factory: pytest.TempPathFactory,
    edits: list[tuple[float, bytes]],
    kept: float,
) -> None:
    data = bytearray(entry)
    for where, patch in edits:
        start = int(where * len(entry))
        data[start : start + len(patch)] = patch
    check_damage(tmp_path_factory.mktemp("edit"), bytes(data[: int(kept * len(data)) + 1]))


@pytest.mark.parametrize(
    "forge",
    [
        lambda header: header | {"key": "0" * 64},
        lambda header: header | {"kind": "latents"},
        lambda header: header | {"fields": header["fields"] | {"text": "a dog"}},
        lambda header: header | {"fields": []},
        lambda header: header | {"sha256": "0" * 64},
        lambda header: {},
        lambda header: [],
    ],
)
def test_a_header_that_does_not_fit_is_damage(
    tmp_path: Path, entry: bytes, forge: Callable[[Any], Any]
) -> None:
    length = int.from_bytes(entry[:8], "little")
    outer = json.loads(entry[8 : 8 + length])
    ((name, header),) = outer["__metadata__"].items()
    metadata = {name: json.dumps(forge(json.loads(header)))}
    assert not check_damage(tmp_path, safetensors.numpy.save(ARRAYS, metadata=metadata))


@pytest.mark.parametrize(
    "arrays",
    [
        {"mean": ARRAYS["mean"], "std": ARRAYS["mean"]},
        {"mean": ARRAYS["mean"].reshape(3, 2, 4), "std": ARRAYS["std"]},
        {"mean": ARRAYS["mean"].view(np.int32), "std": ARRAYS["std"]},
        {"mean": ARRAYS["std"], "std": ARRAYS["mean"]},
        {"mean": ARRAYS["mean"]},
        ARRAYS | {"more": ARRAYS["mean"]},
    ],
)
def test_names_shapes_and_types_are_part_of_the_checksum(
    tmp_path: Path, entry: bytes, arrays: Any
) -> None:
    length = int.from_bytes(entry[:8], "little")
    metadata = json.loads(entry[8 : 8 + length])["__metadata__"]
    assert not check_damage(tmp_path, safetensors.numpy.save(arrays, metadata=metadata))


def test_problems_reach_the_event_stream(tmp_path: Path) -> None:
    events: list[Any] = []
    cache, _ = make_cache(tmp_path)
    stream = EventStream(listeners=[events.append])
    cache = replace(cache, on_problem=stream.problem)
    cache.write(KEY, ARRAYS)
    cache.path(KEY).write_bytes(b"junk")
    assert not cache.verify(KEY)
    (event,) = events
    assert event.kind == "problem"
    assert event.fields["file"] == f"text/{KEY.digest[:2]}/{KEY.digest}.safetensors"
    assert "moved to damaged/" in event.fields["what"]


def test_an_unreadable_entry_is_reported_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, problems = make_cache(tmp_path)
    cache.write(KEY, ARRAYS)

    def fail(self: Path, *_: object, **__: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "open", fail)
    assert cache.read(KEY) is None
    assert "Input/output error" in problems.found[0]
    assert cache.has(KEY)


def test_damage_that_cannot_be_moved_is_still_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, problems = make_cache(tmp_path)
    cache.write(KEY, ARRAYS)
    cache.path(KEY).write_bytes(b"junk")

    def fail(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", fail)
    assert cache.read(KEY) is None
    assert "cannot be moved aside (Permission denied)" in problems.found[0]


# --- room, sharing, pruning


def test_asking_for_an_entry_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = make_cache(tmp_path)
    cache.write(KEY, ARRAYS)

    def refuse(*_: object, **options: object) -> None:
        raise AssertionError("it was opened")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert cache.has(KEY)


def test_a_cache_deleted_in_use_is_made_again(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path)
    cache.write(KEY, ARRAYS)
    for path in sorted(cache.folder.root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    cache.folder.root.rmdir()
    assert cache.read(KEY) is None
    cache.write(KEY, ARRAYS)
    assert same(cache.read(KEY), ARRAYS)


def test_pruning_removes_the_oldest_but_nothing_in_use(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path, limit_bytes=2500)
    keys = [
        text_key(text=str(i), encoder_identity="e", max_tokens=77, content="fp32") for i in range(5)
    ]
    now = time.time()
    for age, key in enumerate(keys):
        cache.write(key, ARRAYS)
        os.utime(cache.path(key), (now - 100 + age, now - 100 + age))
    size = cache.path(keys[0]).stat().st_size
    assert 500 < size < 1000
    freed = cache.prune([keys[0]])
    kept = [index for index, key in enumerate(keys) if cache.has(key)]
    assert kept[0] == 0
    assert kept[1:] == list(range(5 - len(kept) + 1, 5))
    assert freed == size * (5 - len(kept)) > 0
    assert cache.folder.used_bytes() <= 2500


def test_pruning_clears_what_killed_runs_left(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path)
    cache.write(KEY, ARRAYS)
    old, fresh = (cache.path(KEY).with_name(f".tmp-{name}") for name in ("old", "fresh"))
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    cache.prune([])
    assert not old.exists()
    assert fresh.exists()
    assert cache.has(KEY)


def test_no_file_outside_a_marked_folder_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "text" / "ab"
    folder.mkdir(parents=True)
    for name in ("mine.safetensors", ".tmp-mine"):
        (folder / name).write_bytes(bytes(5000))
        os.utime(folder / name, (0, 0))
    cache, _ = make_cache(tmp_path, limit_bytes=10)
    assert cache.prune([]) == 0
    assert len(list(folder.iterdir())) == 2
