"""Text encoders in host memory: the same bits, each part copied once for all texts, and nothing copied back."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

from lora_trainer.families.base.texts import TextEncoder
from lora_trainer.network import offload
from lora_trainer.network.offload import Offloaded
from tests.fakes import studio
from tests.fakes.pinning import pinning_driver
from tests.fakes.studio import text_encoder

CPU = torch.device("cpu")
PARTS = 4  # embeddings, two blocks, the last norm


def t5() -> T5EncoderModel:
    torch.manual_seed(0)
    config = T5Config(vocab_size=20, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    return T5EncoderModel(config).eval().requires_grad_(False)


def texts(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(20, (1, 8), generator=generator) for _ in range(count)]


def states(network: nn.Module, ids: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [*network(ids, output_hidden_states=True).hidden_states]


def same(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(all(map(torch.equal, one, other)) and len(one) == len(other) for one, other in pairs)


def test_all_texts_pass_a_part_for_one_copy_of_it_with_the_bits_of_each_alone() -> None:
    network, ids = t5(), texts(5)
    alone = [states(network, each) for each in ids]
    offloaded = Offloaded([network], CPU)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    found = offloaded.together([partial(states, network, each) for each in ids])
    assert same(found, alone) and offloaded.copies == PARTS
    hosts = {name: tensor.data_ptr() for name, tensor in network.named_parameters()}
    again = offloaded.together([partial(states, network, ids[0])])
    assert same(again, alone[:1]) and offloaded.copies == 2 * PARTS
    after = dict(network.named_parameters())
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == hosts, "nothing came back"
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_two_encoders_of_one_base_are_passed_in_their_order() -> None:
    first, second = t5(), t5()

    def both(ids: Tensor) -> list[Tensor]:
        return [*states(first, ids), *states(second, ids.flip(1))]

    ids = texts(3)
    alone = [both(each) for each in ids]
    offloaded = Offloaded([first, second], CPU)
    assert same(offloaded.together([partial(both, each) for each in ids]), alone)
    assert offloaded.copies == 2 * PARTS


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_device_that_is_full_gets_fewer_texts_at_once(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, ids = t5(), texts(4)
    alone = [states(network, each) for each in ids]
    offloaded = Offloaded([network], CPU)
    running: Callable[..., object] = offloaded._run

    def full_beyond(calls: list[Callable[[], object]]) -> object:
        if len(calls) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return running(calls)

    monkeypatch.setattr(offloaded, "_run", full_beyond)
    found = offloaded.together([partial(states, network, each) for each in ids])
    assert 1 <= len(found) <= most and same(found, alone[: len(found)])


@pytest.mark.parametrize(
    ("network", "wanted"),
    [
        (t5(), ((0, 1), (0.25, 10), (1, offload.MOST_TOGETHER), (100, offload.MOST_TOGETHER))),
        (nn.Linear(64, 64), ((0, 1), (0.25, 3), (1, 30), (100, offload.MOST_TOGETHER))),
    ],
    ids=["t5", "another"],
)
def test_the_free_memory_decides_how_many_texts_run_together(
    network: nn.Module, wanted: tuple[tuple[float, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Device:
        type = "cuda"

    offloaded = Offloaded([network], CPU)
    offloaded.device = Device()  # type: ignore[assignment]  # plays a device
    monkeypatch.setattr(offload, "kind_of", lambda _: offload_kind)
    offload_kind = type("Kind", (), {"own_memory": True})()
    weights = offloaded._weights_bytes
    for share, most in wanted:
        free = int(share * weights)
        monkeypatch.setattr(offload, "free_and_total_bytes", lambda _, free=free: (free, 0))
        assert offloaded._most_together() == most


def test_an_error_of_one_text_ends_the_others_and_is_raised() -> None:
    network = t5()

    def wrong() -> list[Tensor]:
        raise ValueError("this text")

    offloaded = Offloaded([network], CPU)
    calls = [partial(states, network, each) for each in texts(2)]
    with warnings.catch_warnings(record=True) as silenced:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="this text"):
            offloaded.together([*calls, wrong])
    assert not silenced, "a text that waits has no turn that it could give back"
    assert len(offloaded.together(calls)) == 2, "it can be used again"


def test_two_callers_at_once_wait_for_each_other_and_get_the_bits_of_each_alone() -> None:
    network, ids = t5(), texts(4)
    alone = [states(network, each) for each in ids]
    offloaded = Offloaded([network], CPU)
    calls = [partial(states, network, each) for each in ids]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            both = pool.submit(offloaded.together, calls), pool.submit(offloaded.together, calls)
            assert all(same(found.result(timeout=60), alone) for found in both)


def test_host_memory_is_pinned_where_allowed_and_unpinned_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = pinning_driver(monkeypatch)
    network, ids = t5(), texts(2)
    offloaded = Offloaded([network], CPU)
    offloaded.together([partial(states, network, each) for each in ids])
    assert len(driver.in_place) == PARTS and driver.bytes > 0
    del offloaded, network
    gc.collect()
    assert driver.bytes == 0


def test_the_captions_of_a_run_are_encoded_for_one_copy_of_each_part_with_the_same_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Offloaded] = []

    def offloaded(base: Path) -> TextEncoder:
        # Not the one that all tests of the process share: what offloads it stays on its networks.
        encoder = text_encoder.__wrapped__(base)
        made.append(Offloaded(tuple(encoder.networks.values()), CPU))
        encoder.together = made[-1].together
        return encoder

    entries = []
    for name, loader in (("plain", text_encoder), ("offloaded", offloaded)):
        (tmp_path / name).mkdir()
        at = studio.studio_in(tmp_path / name)
        monkeypatch.setattr(studio, "text_encoder", loader)
        done, _, _ = at.encode()
        assert done["texts"] == 5
        jobs = at.needs().texts.values()
        entries.append({job.text: at.cache.read(job.key) for job in jobs})
    assert entries[0].keys() == entries[1].keys()
    for text, entry in entries[0].items():
        other = entries[1][text]
        assert all(np.array_equal(values, other[name]) for name, values in entry.items())
    (one,) = made
    parts = 2 + 1 + 1  # token and position embeddings, a block, the last norm
    assert one.copies == parts, "five texts, and each part was copied once"
