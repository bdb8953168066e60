"""CAC-03 and 07: after a change exactly the affected entries are encoded again, and no old one is used."""

from __future__ import annotations

import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lora_trainer.data import cache as cache_module
from lora_trainer.data.encode import Needs
from tests.fakes.studio import ENTRIES, Studio, few_objects, files_of, studio_in

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


# ---- CAC-07


def of_format(version: int, studio: Studio, monkeypatch: pytest.MonkeyPatch) -> Needs:
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "FORMAT_VERSION", version)
        wanted = studio.needs()
        studio.encode(wanted)
    return wanted


def test_cac_07_entries_of_another_format_are_left_alone_and_not_used(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_format(cache_module.FORMAT_VERSION - 1, studio, monkeypatch)
    old = files_of(studio.cache.folder.root)
    assert len(old) == ENTRIES
    images, texts = studio.work()
    assert images + len(texts) == ENTRIES
    both = files_of(studio.cache.folder.root)
    assert both.items() > old.items()
    assert len(both) == 2 * ENTRIES
    assert studio.damage == []


def test_cac_07_an_old_entry_under_a_new_name_is_damage(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = of_format(cache_module.FORMAT_VERSION - 1, studio, monkeypatch).keys()
    new = studio.needs().keys()
    for before, now in zip(old, new, strict=True):
        studio.cache.path(now).parent.mkdir(exist_ok=True)
        shutil.copy(studio.cache.path(before), studio.cache.path(now))
    images, texts = studio.work()
    assert images + len(texts) == len(studio.damage) == ENTRIES


def test_cac_07_numbers_in_another_byte_order_are_damage(studio: Studio) -> None:
    """safetensors is little-endian by definition; a file of a program that forgot is found out."""
    studio.encode()
    key = next(iter(studio.needs().latents.values())).key
    path = studio.cache.path(key)
    data = path.read_bytes()
    body = 8 + struct.unpack_from("<Q", data)[0]
    swapped = np.frombuffer(data[body:], dtype=np.float32).byteswap().tobytes()
    path.write_bytes(data[:body] + swapped)
    assert studio.work() == (1, [])
    assert path.read_bytes() == data
