"""Every registered family end to end on a tiny random base: cache, train, sample, export, reload.

A new family adds tests/fakes/bases/NAME.py and is tried here without another line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.checkpoint.states import load_newest
from lora_trainer.common.events import EventStream
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.families.base import DENOISER, BaseFacts, Conditioning, Family
from lora_trainer.lora.adapter import Adapter, inject
from lora_trainer.lora.dropout import halves
from lora_trainer.lora_file.write import final_export_name
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.family_bases import (
    base_of,
    conditioning_of,
    denoiser_of,
    facts_of,
    pipeline_of,
    side_of,
)
from tests.fakes.runs import Toy, events, run_cli, toy, trajectory

pytestmark = pytest.mark.timeout(400)  # a loaded machine is no failure
FAMILIES = pytest.mark.parametrize("name", families.MODULES)
RANK, ALPHA, STEPS = 4, 2.0, 3
SETTINGS: Mapping[str, Any] = {
    "adapter__rank": RANK,
    "adapter__alpha": ALPHA,
    "adapter__targets": "transformer",
    "data__validation_fraction": 0.34,
    "logging__trackers": [],
    "optimizer__learning_rate": 0.02,
    "optimizer__schedule": "constant",
    "output__precision": "fp32",
    "output__save_every_steps": 2,
    "sampling__every_steps": 3,
    "sampling__guidance_scale": 3,
    "sampling__steps": 2,
    "train__batch_size": 2,
    "train__precision": "fp32",
    "train__validate_every_steps": 3,
}


@dataclass(frozen=True, kw_only=True)
class Place(Toy):
    """A toy dataset beside one family's tiny base."""

    name: str

    @property
    def base(self) -> Path:
        return base_of(self.name)

    def command(self, run: str, *more: str) -> list[str]:
        side = side_of(facts_of(self.name))
        settings = {**SETTINGS, "data__resolution": side}
        return self.arguments("--name", run, *more, steps=STEPS, **settings)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Place]:
    """One dataset and cache per family, with a run `whole`."""
    trained = {}
    for name in families.MODULES:
        folder = toy(tmp_path_factory.mktemp(name), images=3).folder
        trained[name] = Place(folder=folder, name=name)
        assert run_cli(trained[name].command("whole")) == 0, name
    return trained


# ---- the pieces, put together as a run does


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A family's denoiser with an adapter, and a fixed batch to ask it about."""

    family: Family
    facts: BaseFacts
    denoiser: nn.Module
    adapter: Adapter
    latents: Tensor
    noise: Tensor
    conditioning: Conditioning

    def losses(self, sigma: float = 0.5) -> Tensor:
        facts, count = self.facts, len(self.latents)
        if facts.prediction == "flow":
            alpha, timestep = 1 - sigma, torch.full((count,), 1000 * sigma)
        else:
            signal = float(facts.alphas_cumprod()[500])
            alpha, sigma = signal**0.5, (1 - signal) ** 0.5
            timestep = torch.full((count,), 500)
        level = torch.full((count,), alpha), torch.full((count,), sigma)
        noisy = add_noise(self.latents, self.noise, *level)
        predicted = self.family.predict(self.denoiser, noisy, timestep, self.conditioning)
        return sample_losses(predicted, target(self.latents, self.noise, *level, facts.prediction))


def bench(
    name: str,
    *,
    prompts: Sequence[str] = ("one toy", "two words more"),
    settings: AdapterSettings = AdapterSettings(rank=RANK),  # noqa: B008 - frozen, so sharing is safe
) -> Bench:
    family, facts = families.family(name), facts_of(name)
    denoiser = denoiser_of(name)
    adapter = inject(
        {DENOISER: denoiser},
        modules={DENOISER: family.lora_targets(denoiser, "transformer")},
        settings=settings,
        alpha=ALPHA,
        seed=0,
    )
    side = side_of(facts) // facts.vae_factor
    generator = torch.Generator().manual_seed(1)
    shape = (len(prompts), facts.latent_channels, side, side)
    return Bench(
        family=family,
        facts=facts,
        denoiser=denoiser,
        adapter=adapter,
        latents=torch.randn(shape, generator=generator),
        noise=torch.randn(shape, generator=generator),
        conditioning=conditioning_of(family, facts, prompts),
    )


# ---- training


@FAMILIES
def test_checkpointing_changes_neither_loss_nor_gradients(name: str) -> None:
    found = []
    for checkpointing in (False, True):
        at = bench(name)
        awaken(at.adapter)
        at.denoiser.train()
        if checkpointing:
            at.denoiser.enable_gradient_checkpointing()
        loss = at.losses().sum()
        loss.backward()
        found.append((loss.detach(), [p.grad.clone() for p in at.adapter.parameters()]))
    (loss, gradients), (again, recomputed) = found
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=1e-6)
    for one, other in zip(gradients, recomputed, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    assert any(float(gradient.abs().max()) > 0 for gradient in gradients)


def awaken(adapter: Adapter) -> None:
    """Give the second factors values, as in mid-training: while they are zero the first get no gradient."""
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


@FAMILIES
def test_a_sample_is_dropped_the_same_in_any_batch(name: str) -> None:
    """Every layer's inputs are rows of one sample after the other, whatever its network does to them."""
    prompts, seeds = ("a", "many more words than that, and more of them"), (1 << 40, 1 << 50)
    dropping = AdapterSettings(rank=RANK, dropout=0.3, rank_dropout=0.3, module_dropout=0.1)

    def losses(at: Bench, own: Sequence[int]) -> Tensor:
        awaken(at.adapter)
        assert at.adapter.masks is not None
        with torch.no_grad(), at.adapter.masks.of(torch.tensor([halves(seed) for seed in own])):
            return at.losses()

    family, facts = families.family(name), facts_of(name)
    lengths = {
        family.text.batch_group_key(conditioning_of(family, facts, (one,))) for one in prompts
    }
    if len(lengths) > 1:  # training does these one after the other
        prompts = ("a", "a")
    both = bench(name, prompts=prompts, settings=dropping)
    together = losses(both, seeds)
    for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        alone = bench(name, prompts=(prompt,), settings=dropping)
        single = Bench(
            **{
                **vars(alone),
                "latents": both.latents[index : index + 1],
                "noise": both.noise[index : index + 1],
            }
        )
        torch.testing.assert_close(losses(single, [seed])[0], together[index], rtol=1e-4, atol=1e-5)


# ---- whole runs


@FAMILIES
def test_the_exported_file_gives_the_live_output_in_a_fresh_pipeline(
    name: str, places: Mapping[str, Place]
) -> None:
    """Of one prediction, and of the run's last sample."""
    run, family, facts = places[name].runs / "whole", families.family(name), facts_of(name)
    (cached,) = events(run, "cached")
    assert cached["latents"] == 3 and cached["texts"] >= 3
    assert all(np.isfinite(loss) for _, loss, *_ in trajectory(run))
    live = bench(name)
    state = load_newest(run / "states", events=EventStream())
    assert state is not None and state.step == STEPS
    live.adapter.load_state(state.adapter)
    pipeline = pipeline_of(facts)

    def losses_of_pipeline() -> Tensor:
        return Bench(
            **{**vars(live), "denoiser": getattr(pipeline, family.denoiser_folder)}
        ).losses()

    with torch.no_grad():
        base = losses_of_pipeline()
        pipeline.load_lora_weights(str(run), weight_name=final_export_name("whole"))
        loaded, expected = losses_of_pipeline(), live.losses()
    torch.testing.assert_close(loaded, expected, rtol=1e-4, atol=1e-5)
    assert float((expected - base).abs().max()) > 1e-3, "or a file that does nothing would pass"
    row = events(run, "sample")[-1]
    (image,) = row["images"]
    side = side_of(facts)
    drawn = pipeline(
        **family.pipeline_arguments(pipeline, facts, image["prompt"], "", guidance_scale=3.0),
        generator=torch.Generator().manual_seed(image["seed"]),
        num_inference_steps=2,
        width=side,
        height=side,
    ).images[0]
    shown = np.asarray(Image.open(run / image["file"]), dtype=np.int16)
    assert row["step"] == STEPS
    assert int(np.abs(shown - np.asarray(drawn, dtype=np.int16)).max()) <= 2
