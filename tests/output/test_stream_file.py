"""Safetensors files written tensor by tensor: read back by the library, hashed right, whole or absent."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from lora_trainer.common.errors import RequestError
from lora_trainer.families.base.layout import TensorInfo
from lora_trainer.lora_file.tensor_file import ordered, write_tensors
from tests.fakes.adapters import body_of, entries_of

HASHES = ("modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")
DTYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64, "I64": np.int64, "U8": np.uint8}
Arrays = dict[str, np.ndarray[Any, Any]]


def infos_of(arrays: Arrays) -> dict[str, TensorInfo]:
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    return ordered({n: TensorInfo(dtype=names[a.dtype], shape=a.shape) for n, a in arrays.items()})


def written(path: Path, arrays: Arrays, metadata: dict[str, str], **options: Any) -> Path:
    infos = infos_of(arrays)
    bodies = (arrays[name].tobytes() for name in infos)
    write_tensors(path, infos, bodies, metadata=metadata, **options)
    return path


ARRAYS = {
    "b": np.arange(6, dtype=np.float16).reshape(2, 3),
    "a": np.arange(4, dtype=np.float32),
    "c": np.array(7, dtype=np.int64),
    "empty": np.zeros((0, 3), dtype=np.uint8),
}

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
arrays = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20).filter(
        lambda name: name != "__metadata__"
    ),
    st.builds(
        lambda shape, dtype: np.full(shape, 3, dtype=DTYPES[dtype]),
        shapes,
        st.sampled_from(sorted(DTYPES)),
    ),
    max_size=6,
)
texts = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=10).filter(lambda key: key not in HASHES),
    st.text(st.characters(codec="utf-8"), max_size=30),
    max_size=4,
)


@given(arrays=arrays, metadata=texts)
def test_the_library_reads_what_was_written_where_it_would_have_written_it(
    arrays: Arrays, metadata: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    file, theirs = written(folder / "a.safetensors", arrays, metadata), folder / "theirs"
    found = load_file(file)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)
    theirs.write_bytes(save(arrays))
    assert body_of(file) == body_of(theirs)
    entries = entries_of(file)
    assert {key: entries.pop(key) for key in HASHES}
    assert entries == metadata


def test_hashes_are_those_readers_compute(tmp_path: Path) -> None:
    """A1111 takes the SHA-256 of all tensor bytes; kohya's legacy hash looks at 64 KiB at 1 MiB.

    Lone surrogates in the header become valid text.
    """
    large = {"x": np.random.default_rng(0).random(300_000, dtype=np.float32)}
    training = {"ss_steps": "9"}
    file = written(tmp_path / "a.safetensors", large, {**training, "other": "x\udc80"})
    entries, digest = entries_of(file), sha256(body_of(file)).hexdigest()
    as_kohya = written(tmp_path / "b.safetensors", large, training, hashes=[]).read_bytes()
    legacy = sha256(as_kohya[0x100000:0x110000]).hexdigest()[:8]
    assert [entries[key] for key in HASHES] == [f"0x{digest}", digest, legacy]
    assert legacy != sha256(b"").hexdigest()[:8] and entries["other"] == "x?"


def test_bodies_are_taken_one_at_a_time(tmp_path: Path) -> None:
    """The file grows with each of them: none is kept for later."""
    sizes: list[int] = []
    slots = {str(number): TensorInfo(dtype="U8", shape=(100_000,)) for number in range(5)}

    def bodies() -> Iterator[bytes]:
        for _ in slots:
            sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
            yield bytes(100_000)

    write_tensors(tmp_path / "a.safetensors", slots, bodies(), metadata={})
    assert all(later - earlier >= 90_000 for earlier, later in pairwise(sizes[1:]))


# ---- whole or absent


@pytest.mark.parametrize("before", [None, b"old"])
def test_an_interrupted_or_wrong_write_leaves_what_was_there(
    before: bytes | None, tmp_path: Path
) -> None:
    """Too few bodies, too many or of other sizes are bugs of the caller."""
    path, slots = tmp_path / "a.safetensors", infos_of(ARRAYS)
    if before is not None:
        path.write_bytes(before)
    bodies = [ARRAYS[name].tobytes() for name in slots]

    def interrupted() -> Iterator[bytes]:
        yield bodies[0]
        raise KeyboardInterrupt

    for wrong, error, reason in (
        (interrupted(), KeyboardInterrupt, None),
        (bodies[:-1], ValueError, "shorter"),
        ([*bodies, b""], ValueError, "longer"),
        ([bodies[0] + b"x", *bodies[1:]], ValueError, "planned"),
    ):
        with pytest.raises(error, match=reason):
            write_tensors(path, slots, wrong, metadata={}, force=True)
        assert [each.read_bytes() for each in tmp_path.iterdir()] == ([before] if before else [])


def test_what_came_into_being_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    slots = infos_of(ARRAYS)

    def bodies() -> Iterator[bytes]:
        path.write_bytes(b"of another program")
        yield from (ARRAYS[name].tobytes() for name in slots)

    with pytest.raises(RequestError, match="exists already"):
        write_tensors(path, slots, bodies(), metadata={})
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"of another program"]


def test_a_folder_is_no_place_for_a_file_and_a_long_name_is_one(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is a folder"):
        written(tmp_path, ARRAYS, {}, force=True)
    long = tmp_path / ("n" * 240 + ".safetensors")
    assert load_file(written(long, ARRAYS, {})).keys() == ARRAYS.keys()
