"""Small-memory settings in a whole training: each part in its place, in an order that works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lora_trainer.common.events import read_jsonl
from lora_trainer.config.config import build_config
from lora_trainer.families import family
from lora_trainer.network.quantize import QuantizedLinear
from lora_trainer.run import build, device, session
from lora_trainer.run.prepare import Prepared
from tests.fakes.family_bases import conditioning_of, facts_of, side_of
from tests.fakes.runs import Toy, toy

PLAIN: Mapping[str, Any] = {
    "train.precision": "fp32",
    "memory.base_precision": "fp32",
    "memory.gradient_checkpointing": "none",
    "memory.streamed_blocks": 0,
    "memory.attention": "sdpa",
    "hardware.device": "cpu",
    "adapter.rank": 2,
}


def prepared(name: str, **settings: Any) -> Prepared:
    """Return what the session reads of a prepared run."""
    changed = {key.replace("__", "."): value for key, value in settings.items()}
    return cast(
        Prepared,
        SimpleNamespace(
            config=build_config({**PLAIN, **changed}), family=family(name), facts=facts_of(name)
        ),
    )


def gradients(made: Prepared) -> tuple[nn.Module, dict[str, Tensor]]:
    """Load, inject, arrange as a run does; return the network and the adapter's gradients of a loss."""
    loaded = build.load_networks(made)
    adapter = build.with_adapter(made, loaded, None)
    build.arrange(made, loaded)
    torch.manual_seed(0)
    for parameter in loaded.denoiser.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.02 * torch.randn_like(parameter))
    side = side_of(made.facts) // made.facts.vae_factor
    noisy = torch.randn(1, made.facts.latent_channels, side, side)
    told = conditioning_of(made.family, made.facts, ["a hat"])
    loss = made.family.predict(loaded.denoiser, noisy, torch.tensor([500.0]), told).square().mean()
    loss.backward()
    names = {id(parameter): name for name, parameter in loaded.denoiser.named_parameters()}
    groups = adapter.groups(made.config.optimizer)
    trained = [parameter for group in groups for parameter in group["params"]]
    assert trained and all(parameter.grad is not None for parameter in trained)
    return loaded.denoiser, {names[id(p)]: p.grad for p in trained}


@pytest.mark.parametrize("name", ["flux", "sdxl"])
@pytest.mark.parametrize(
    "settings",
    [
        {"memory__gradient_checkpointing": "light"},
        {"memory__gradient_checkpointing": "selective"},
        {"memory__gradient_checkpointing": "offloaded"},
        {"memory__gradient_checkpointing": "full", "memory__streamed_blocks": 2},
    ],
    ids=["light", "selective", "offloaded", "streamed"],
)
def test_what_saves_memory_changes_no_gradient(name: str, settings: dict[str, Any]) -> None:
    _, plain = gradients(prepared(name))
    _, saving = gradients(prepared(name, **settings))
    assert plain.keys() == saving.keys()
    for key, gradient in plain.items():
        assert torch.allclose(saving[key], gradient, rtol=1e-5, atol=1e-8), key


@pytest.mark.parametrize("streamed", [0, 2])
def test_a_quantised_base_is_quantised_before_adapters_go_in(streamed: int) -> None:
    settings = {"memory__base_precision": "int8", "memory__gradient_checkpointing": "full"}
    network, quantised = gradients(prepared("flux", **settings, memory__streamed_blocks=streamed))
    layers = [module for module in network.modules() if isinstance(module, QuantizedLinear)]
    assert layers and all(not parameter.dtype.is_complex for parameter in network.parameters())
    _, plain = gradients(prepared("flux"))
    one = torch.cat([plain[key].flatten() for key in plain])
    other = torch.cat([quantised[key].flatten() for key in plain])
    assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.99


def test_layers_a_family_wants_whole_stay_whole() -> None:
    network, _ = gradients(prepared("chroma", memory__base_precision="int8"))
    for name, module in network.named_modules():
        if set(name.split(".")) & set(family("chroma").traits.quantization_skip):
            assert not isinstance(module, QuantizedLinear), name


def test_sample_images_are_the_same_from_streamed_and_from_quantised_blocks() -> None:
    """The base's own pipeline, between two steps."""
    small = {"memory__gradient_checkpointing": "full", "memory__streamed_blocks": 3}

    def drawn(**settings: Any) -> Tensor:
        made = prepared("flux", **settings)
        network, _ = gradients(made)
        told = conditioning_of(made.family, made.facts, ["a hat"])
        side = side_of(made.facts)
        sampler = made.family.build_sampler(
            made.facts, denoiser=network, device=torch.device("cpu")
        )
        image = sampler.image(told, told, seed=1, size_px=(side, side), steps=2, guidance_scale=1.0)
        return torch.from_numpy(np.array(image)).float()

    plain = drawn()
    assert torch.equal(drawn(**small), plain)
    for settings in (
        {"memory__base_precision": "int8"},
        {"memory__base_precision": "int8", **small},
    ):
        assert (drawn(**settings) - plain).abs().mean() < 4, "of 255"


def test_a_cap_is_set_at_the_start_of_a_run_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Mapping[str, Any]] = []
    monkeypatch.setattr(device, "cap_allocator", lambda **given: seen.append(given))
    card = SimpleNamespace(index=0, free_bytes=7)
    made = SimpleNamespace(
        config=build_config(
            {**PLAIN, "hardware.vram_limit_gib": 6, "hardware.threads": torch.get_num_threads()}
        ),
        hardware=SimpleNamespace(gpus=(card,)),
        processes=1,
    )
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(device, "planned_device", lambda _: cuda)
    monkeypatch.setattr(device, "name_of", str)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    device.setup_torch(cast(Prepared, made))
    assert seen == [{"limit_bytes": 6 * 2**30, "free_bytes": 7, "device": cuda}]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("small")).with_base()


def test_a_training_on_a_quantised_base_ends_with_a_file(place: Toy) -> None:
    settings = {
        "memory__base_precision": "int8",
        "memory__gradient_checkpointing": "selective",
        "train__batch_size": 3,
    }
    assert place.train(steps=3, **settings) == 0
    assert (place.run / "toy.safetensors").is_file()
    steps = [row for row in read_jsonl(place.run / "events.jsonl") if row["event"] == "step"]
    assert len(steps) == 3 and all(row["loss"] is not None for row in steps)


def test_planned_micro_batches_reach_the_loop_by_the_size_of_latents() -> None:
    made = cast(
        Prepared,
        SimpleNamespace(
            facts=replace(facts_of("flux"), vae_factor=8),
            plan=SimpleNamespace(images_at_once={(1024, 512): 2, (512, 512): 5}),
        ),
    )
    assert session._latents_at_once(made) == {(64, 128): 2, (64, 64): 5}
