"""The content-addressed cache: keys, whole entries only, damage set aside, room and pruning."""

from __future__ import annotations

import json
import os
import random
import shutil
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
from lora_trainer.cache.keys import Arrays, CacheKey, latent_key, text_key
from lora_trainer.cache.store import Cache
from lora_trainer.common.errors import MachineError
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


def all_keys(**changes: Any) -> dict[str, str]:
    """The digests of one image's and one caption's entries, some inputs changed."""
    given_values: dict[str, Any] = {
        "image": "hash a",
        "vae": "vae 1",
        "placement": PLACEMENT,
        "background": None,
        "caption": "a cat",
        "text_encoder": "text 1",
        "max_tokens": 77,
        "content": "fp32",
    } | changes
    keys = {
        f"latents flip={flip}": latent_key(
            content_hash=given_values["image"],
            encoder_identity=given_values["vae"],
            placement=given_values["placement"],
            flip=flip,
            alpha_background=given_values["background"],
        )
        for flip in (False, True)
    }
    for text in ("", given_values["caption"]):
        name = "text empty" if not text else "text caption"
        keys[name] = text_key(
            text=text,
            encoder_identity=given_values["text_encoder"],
            max_tokens=given_values["max_tokens"],
            content=given_values["content"],
        )
    return {name: key.digest for name, key in keys.items()}


LATENTS = {"latents flip=False", "latents flip=True"}
TEXTS = {"text empty", "text caption"}


@pytest.mark.parametrize(
    ("change", "affected"),
    [
        ({}, set()),
        ({"image": "hash b"}, LATENTS),
        ({"vae": "vae 2"}, LATENTS),
        ({"placement": replace(PLACEMENT, bucket=Bucket(48, 64))}, LATENTS),
        ({"placement": replace(PLACEMENT, scaled_width_px=71)}, LATENTS),
        ({"placement": replace(PLACEMENT, scaled_height_px=49)}, LATENTS),
        ({"placement": replace(PLACEMENT, left_px=4)}, LATENTS),
        ({"placement": replace(PLACEMENT, top_px=1)}, LATENTS),
        ({"background": "black"}, LATENTS),
        ({"caption": "a dog"}, {"text caption"}),
        ({"text_encoder": "text 2"}, TEXTS),
        ({"max_tokens": 150}, TEXTS),
        ({"content": "bf16"}, TEXTS),
        ({"content": "tokens"}, TEXTS),
    ],
)
def test_a_change_gives_exactly_the_affected_entries_new_names(
    change: dict[str, Any], affected: set[str]
) -> None:
    before, after = all_keys(), all_keys(**change)
    assert {name for name in before if before[name] != after[name]} == affected
    assert len(set(after.values())) == 4


def test_a_new_format_renames_every_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    before = all_keys()
    monkeypatch.setattr(keys_module, "FORMAT_VERSION", keys_module.FORMAT_VERSION + 1)
    assert not set(before.values()) & set(all_keys().values())


def test_what_is_said_about_a_placement_is_no_part_of_the_key() -> None:
    told_otherwise = replace(PLACEMENT, cropped_fraction=0.2, upscaled=True)
    assert all_keys() == all_keys(placement=told_otherwise)


def test_digests_are_the_same_in_every_process() -> None:
    assert (
        KEY.digest == CacheKey(kind="text", fields=dict(reversed(list(KEY.fields.items())))).digest
    )
    assert KEY.digest.startswith("debdee51be436c6d")


def test_keys_can_be_counted() -> None:
    again = text_key(text="a cat", encoder_identity="encoder", max_tokens=77, content="fp32")
    other = text_key(text="b", encoder_identity="encoder", max_tokens=77, content="fp32")
    assert len({KEY, again, other}) == 2


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


def test_every_single_flipped_bit_is_caught_or_harmless(entry: bytes, tmp_path: Path) -> None:
    rng = random.Random(0)
    bits = rng.sample(range(len(entry) * 8), 250)
    harmless = 0
    for bit in bits:
        data = bytearray(entry)
        data[bit // 8] ^= 1 << bit % 8
        harmless += check_damage(tmp_path, bytes(data))
    assert harmless < 20  # how JSON is spelled, nothing else


def test_every_truncation_is_caught(entry: bytes, tmp_path: Path) -> None:
    for length in range(0, len(entry), 7):
        assert not check_damage(tmp_path, entry[:length])
    assert not check_damage(tmp_path, entry + b"\0")
    assert not check_damage(tmp_path, bytes(len(entry)))


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


def test_an_entry_swapped_with_its_neighbour_is_caught(tmp_path: Path) -> None:
    cache, problems = make_cache(tmp_path)
    other = text_key(text="a dog", encoder_identity="encoder", max_tokens=77, content="fp32")
    cache.write(KEY, ARRAYS)
    cache.write(other, {name: array + 1 for name, array in ARRAYS.items()})
    here, there = cache.path(KEY).read_bytes(), cache.path(other).read_bytes()
    cache.path(KEY).write_bytes(there)
    cache.path(other).write_bytes(here)
    assert cache.read(KEY) is None
    assert cache.read(other) is None
    assert all("holds another entry" in problem for problem in problems.found)
    cache.write(KEY, ARRAYS)
    assert same(cache.read(KEY), ARRAYS)


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
    monkeypatch.delattr(Path, "open")
    monkeypatch.delattr(Path, "read_bytes")
    assert cache.has(KEY)


def test_a_run_that_needs_more_than_the_cap_is_refused_before_it_starts(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path, limit_bytes=1000)
    cache.check_room(1000)
    with pytest.raises(MachineError, match=r"needs 1,001 bytes, .*cache_max_gib allows 1,000"):
        cache.check_room(1001)
    with pytest.raises(MachineError, match=r"cache_max_gib=3"):
        cache.check_room((2 << 30) + 1)


def test_a_full_disk_is_noticed_before_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, _ = make_cache(tmp_path)

    class Usage:
        free = 500

    monkeypatch.setattr(shutil, "disk_usage", lambda root: Usage)
    cache.check_room(10_000, missing_bytes=500)
    with pytest.raises(MachineError, match=r"still needs 501 bytes .* 500 are free"):
        cache.check_room(10_000, missing_bytes=501)
    with pytest.raises(MachineError, match=r"still needs 10,000 bytes"):
        cache.check_room(10_000)


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    cache, _ = make_cache(tmp_path)
    with pytest.raises(MachineError, match="cannot write"):
        cache.check_room(1)
    with pytest.raises(MachineError, match="cannot write"):
        cache.write(KEY, ARRAYS)


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
