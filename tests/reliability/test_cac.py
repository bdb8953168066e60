"""CAC-01 and 02: damaged entries and killed caching; no wrong number is ever used.

Faults are made on entries as runs write them and are met where a run meets them: in `Cache.read`,
and in `fill`, with real encoders that count what they are given.
"""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path

import numpy as np

from lora_trainer.cache.store import Cache, CacheKey
from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import CappedFolder
from tests.fakes.disk import Disk, Killed
from tests.fakes.studio import ENTRIES, Studio, elsewhere, files_of
from tests.reliability.conftest import CASES

Figure = Callable[..., None]
Arrays = dict[str, np.ndarray]


# ---- CAC-01


def array(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def entries(cache: Cache) -> list[tuple[CacheKey, Arrays]]:
    """Write six entries: latents, embeddings and tokens, in neighbours of equal shape."""
    found = []
    for seed in range(6):
        arrays: dict[str, np.ndarray] = {"text": array(1, 8, 16, seed=seed)}
        if seed % 3 == 0:
            arrays = {"mean": array(4, 4, 4, seed=seed), "std": array(4, 4, 4, seed=seed + 99)}
        if seed % 3 == 1:
            arrays["mask"] = np.ones((1, 24), dtype=np.int64)
        key = CacheKey.of("text", text=f"text {seed}")
        cache.write(key, arrays)
        found.append((key, arrays))
    return found


def damages(data: bytes, *, draw: random.Random) -> Iterator[bytes]:
    """Yield an entry's bytes cut, flipped, zeroed and overwritten."""
    yield from (data[:length] for length in (1, 7, 8, 9, *range(0, len(data), 64), len(data) - 1))
    for bit in draw.sample(range(8 * len(data)), CASES):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
    for first in range(0, len(data), 512):
        yield data[:first] + bytes(len(data) - first)  # what a power cut leaves of the last blocks
        yield data[:first] + bytes(512) + data[first + 512 :]
    for _ in range(CASES):
        first, patch = draw.randrange(len(data)), draw.randbytes(draw.randint(1, 64))
        yield data[:first] + patch + data[first + len(patch) :]
    yield data + data


def test_cac_01_no_damage_of_any_kind_gives_wrong_numbers(tmp_path: Path, figure: Figure) -> None:
    told: list[str] = []
    folder = CappedFolder(root=tmp_path / "cache", limit_bytes=1 << 30)
    cache = Cache(folder=folder, on_problem=lambda what, **_: told.append(what))
    written = entries(cache)
    whole = {key.digest: cache.path(key).read_bytes() for key, _ in written}
    draw = random.Random(1)
    tried = harmless = 0

    def meet(key: CacheKey, arrays: Arrays, data: bytes) -> None:
        nonlocal tried, harmless
        tried += 1
        cache.path(key).write_bytes(data)
        found = cache.read(key)
        if found is None:
            assert not cache.has(key), "it is encoded again"
            assert len(told) == tried - harmless, "and said so"
            return
        harmless += 1
        assert found.keys() == arrays.keys()
        assert all(found[name].tobytes() == arrays[name].tobytes() for name in arrays)

    for key, arrays in written:
        for data in damages(whole[key.digest], draw=draw):
            if data != whole[key.digest]:
                meet(key, arrays, data)
    before = harmless
    for (here, arrays), (there, _) in permutations(written, 2):
        meet(here, arrays, whole[there.digest])
    # The checksum is bound to the key: not even numbers with their own checksum fit elsewhere.
    (key, arrays), _, _, (other, _), *_ = written
    ours, theirs = (whole[each.digest] for each in (key, other))
    body = 8 + struct.unpack_from("<Q", ours)[0]
    sums = [data.split(b'sha256\\":\\"')[1][:64] for data in (ours, theirs)]
    meet(key, arrays, ours[:body].replace(*sums) + theirs[len(theirs) - len(ours) + body :])
    assert harmless == before, "no neighbour is taken for another"
    assert harmless < tried / 100, "how JSON is spelled, nothing else"
    figure("cache_faults", injected=tried, detected=tried - harmless, harmless=harmless, wrong=0)


# ---- CAC-02 and 04


CODES = (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO)


def test_cac_02_04_caching_goes_on_where_a_kill_or_a_disk_that_refuses_ended_it(
    studio: Studio, tmp_path: Path, figure: Figure
) -> None:
    """At every second or third operation, at all of them at full length; test_ckp_sweep.py has all of one entry."""
    studio.encode()
    whole = files_of(studio.cache.folder.root)
    # The files of the base are read before caching begins.
    wanted, texts_as = studio.needs(), studio.texts_as()
    counting = elsewhere(studio, tmp_path / "count")
    with Disk().in_use() as disk:
        counting.encode(wanted, texts_as=texts_as)
    kills = [(at, Killed(), at % 4 == 0) for at in range(0, disk.count, 2)]
    refusals = [(at, CODES[at % len(CODES)]) for at in range(1, disk.count, 3)]
    if CASES > 60:
        kills = [(at, Killed(), after) for at in range(disk.count) for after in (False, True)]
        refusals = [(at, code) for at in range(disk.count) for code in CODES]
    faults = [*kills, *((at, OSError(code, os.strerror(code)), False) for at, code in refusals)]
    found_again, named = set(), 0
    for number, (at, error, after) in enumerate(faults):
        again = elsewhere(studio, tmp_path / f"{number}")
        try:
            with Disk(at=at, error=error, after=after).in_use():
                again.encode(wanted, texts_as=texts_as)
        except Killed:
            found_again.add(len(files_of(again.cache.folder.root)))
        except MachineError as refusal:
            named += 1
            assert isinstance(error, OSError) and str(error.strerror) in refusal.found
            is_full = error.errno in (errno.ENOSPC, errno.EIO)
            assert ("bytes free" in refusal.found) == ("free some space" in refusal.fix) == is_full
            assert "data.cache_dir" in refusal.fix
        else:
            assert isinstance(error, OSError), "no kill is survived"
        there = files_of(again.cache.folder.root)
        assert there.items() <= whole.items(), "what is there is whole"
        done, *_ = again.encode(wanted, texts_as=texts_as)
        assert (done["found"], done["latents"] + done["texts"]) == (
            len(there),
            ENTRIES - len(there),
        )
        assert files_of(again.cache.folder.root) == whole
        assert again.damage == [] or isinstance(error, OSError)
    assert {0, 1, ENTRIES - 1} <= found_again, "kills before, between and after entries"
    assert named > len(refusals) / 2
    figure("cache_kills", tried=len(kills), survived=len(kills))
    figure("io_errors", tried=len(refusals), survived=len(refusals))


def test_cac_02_a_power_cut_loses_what_was_not_on_the_disk_and_nothing_else(
    studio: Studio, figure: Figure
) -> None:
    """A cut leaves names whose bytes never arrived: none, some or zeros."""
    studio.encode()
    root, draw = studio.cache.folder.root, random.Random(3)
    whole, cuts = files_of(root), 20 if CASES > 60 else 6
    for _ in range(cuts):
        hit = draw.sample(sorted(whole), draw.randint(1, ENTRIES))
        for name in hit:
            data, kept = whole[name], draw.randrange(len(whole[name]))
            (root / name).write_bytes(
                draw.choice((b"", data[:kept], data[:kept] + bytes(len(data) - kept)))
            )
        done, *_ = studio.encode()
        assert done["latents"] + done["texts"] == len(hit)
        assert files_of(root) == whole
    figure("cache_power_cuts", tried=cuts, wrong=0)
