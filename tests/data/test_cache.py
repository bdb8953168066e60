"""The content-addressed cache: keys, whole entries only, damage set aside, room and pruning."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.numpy

from lora_trainer.cache.cache_plan import TextEntries
from lora_trainer.cache.store import Cache, CacheKey
from lora_trainer.common.files import CappedFolder
from tests.fakes.family_bases import base_of, facts_of
from tests.fakes.studio import Studio, draw

KEY = CacheKey.of("text", text="a cat", encoder="encoder", max_tokens=77, content="fp32")
ARRAYS: dict[str, Any] = {
    "mean": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "std": np.full((2, 3, 4), 0.5, dtype=np.float32),
    "mask": np.array([[1, 1, 0]], dtype=np.int64),
}


def make_cache(root: Path, *, limit_bytes: int = 1 << 30) -> tuple[Cache, list[dict[str, Any]]]:
    """Return a cache, and the list of what it will report."""
    problems: list[dict[str, Any]] = []
    folder = CappedFolder(root=root / "cache", limit_bytes=limit_bytes)
    return Cache(folder=folder, on_problem=lambda what, **words: problems.append(words)), problems


def plainly(arrays: dict[str, Any] | None) -> dict[str, Any]:
    """Return arrays as values that can be compared."""
    items = (arrays or {}).items()
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in items}


# --- keys


def test_digests_are_the_same_in_every_process() -> None:
    fields = json.loads(KEY.fields)
    assert CacheKey.of("text", **dict(reversed(fields.items()))) == KEY
    assert KEY.digest[:16] == "debdee51be436c6d", "caches on disk have these names"


# --- whole entries


def test_what_was_written_is_read_from_plain_safetensors(tmp_path: Path) -> None:
    square = np.arange(12, dtype=np.float32).reshape(3, 4)
    odd = (square.T, square[:, ::2], square[:0], np.asarray(square[0, 0]))
    arrays = {**ARRAYS, **{f"odd {number}": array for number, array in enumerate(odd)}}
    contents = set()
    for name in "ab":
        cache, problems = make_cache(tmp_path / name)
        assert not cache.has(KEY) and cache.read(KEY) is None
        cache.write(KEY, dict(reversed(arrays.items())) if name == "b" else arrays)
        assert cache.has(KEY)
        found = cache.read(KEY)
        assert found is not None and plainly(found) == plainly(arrays)
        found["mean"][:] = 9.0  # torch.from_numpy warns about arrays that cannot be written to
        assert problems == []
        contents.add(cache.path(KEY).read_bytes())
    path = cache.folder.root / "text" / KEY.digest[:2] / f"{KEY.digest}.safetensors"
    assert cache.path(KEY) == path
    assert (cache.folder.root / cache.folder.marker).exists()
    (data,) = contents
    assert plainly(safetensors.numpy.load(data)) == plainly(arrays)
    shutil.rmtree(cache.folder.root)
    cache.write(KEY, ARRAYS)
    assert plainly(cache.read(KEY)) == plainly(ARRAYS), "a cache deleted in use is made again"


# --- damage: that of bytes is in reliability/test_cac


@pytest.mark.parametrize(
    ("forge", "arrays"),
    [
        (lambda header: header | {"kind": "latents"}, {}),
        (lambda header: header | {"fields": header["fields"] | {"text": "a dog"}}, {}),
        (lambda header: header | {"sha256": "0" * 64}, {}),
        (lambda header: [], {}),
        (dict, {"mean": ARRAYS["mean"].reshape(3, 2, 4)}),
        (dict, {"mean": ARRAYS["mean"].view(np.int32)}),
        (dict, {"mean": ARRAYS["std"], "std": ARRAYS["mean"]}),
        (dict, {"more": ARRAYS["mean"][:0]}),
    ],
)
def test_a_header_that_does_not_fit_is_damage(
    tmp_path: Path, forge: Callable[[Any], Any], arrays: dict[str, Any]
) -> None:
    cache, problems = make_cache(tmp_path)
    for wrong in ({}, {"x": np.zeros(3, np.float16)}):
        with pytest.raises(TypeError, match="float32"):
            cache.write(KEY, wrong)
    assert not cache.has(KEY), "nothing but numbers and tokens is stored"
    cache.write(KEY, ARRAYS)
    entry = cache.path(KEY).read_bytes()
    length = int.from_bytes(entry[:8], "little")
    ((name, text),) = json.loads(entry[8 : 8 + length])["__metadata__"].items()
    header = json.loads(text)
    assert header["sha256"][:16] == "2eaca52e7b3f5e56", "caches on disk have this checksum"
    metadata = {name: json.dumps(forge(header))}
    data = safetensors.numpy.save(ARRAYS | arrays, metadata=metadata)
    cache.path(KEY).write_bytes(data)
    assert cache.read(KEY) is None and not cache.has(KEY)
    assert (cache.folder.root / "damaged" / f"{KEY.digest}.safetensors").read_bytes() == data
    (problem,) = problems
    assert problem["fix"] and problem["file"] and problem["code"] == "CAC-01"


# --- room, sharing, pruning


def test_pruning_spares_what_is_in_use_and_removes_what_killed_runs_left(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path, limit_bytes=1)
    keys = [CacheKey.of("text", text=str(index)) for index in range(3)]
    for key in keys:
        cache.write(key, ARRAYS)
    entry = cache.path(keys[0])
    old, fresh = (entry.with_name(f".tmp-{name}") for name in ("old", "fresh"))
    for left_over in (old, fresh):
        left_over.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert cache.prune(keys[:1]) == 2 * entry.stat().st_size
    assert [cache.has(key) for key in keys] == [True, False, False]
    assert fresh.exists() and not old.exists()
    (cache.folder.root / cache.folder.marker).unlink()
    os.utime(fresh, (0, 0))
    assert cache.prune([]) == 0
    assert fresh.exists() and entry.exists(), "a folder without the marker is somebody else's"


def test_families_share_the_entries_of_an_encoder_that_they_read_in_one_way(tmp_path: Path) -> None:
    """FLUX.2 dev reads its VAE as klein does, Ideogram 4 orders the channels otherwise; Z-Image reads other layers."""

    def text_key(name: str) -> CacheKey:
        entries = TextEntries(
            encoder_identity="0" * 64,
            reading=facts_of(name).readings["text_encoder"],
            text_tokens=512,
            precision="bf16",
            tokens_only=False,
        )
        return entries.key("a cat")

    assert text_key("zimage") != text_key("flux2")
    assert "reading" not in text_key("sd15").fields, "an entry of an older release is found"
    (tmp_path / "images").mkdir()
    draw(tmp_path / "images" / "one.png", seed=0, size=(128, 128))
    studio = Studio(
        folder=tmp_path / "images",
        cache=make_cache(tmp_path)[0],
        base=base_of("flux2"),
        resolution_px=128,
    )
    facts, keys = studio.facts(), {}
    for name in ("flux2", "flux2dev", "ideogram4", "flux"):
        other = replace(facts, family=name, readings=facts_of(name).readings)
        with patch.object(studio, "facts", lambda other=other: other):
            keys[name] = {job.key for job in studio.needs().images.values()}
    assert keys["flux2"] == keys["flux2dev"] and keys["flux2"].isdisjoint(keys["ideogram4"])
    assert all("reading" not in key.fields for key in keys["flux"]), "as above"
