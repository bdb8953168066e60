"""Every registered family end to end on a tiny random base: cache, train, sample, export, reload.

A new family, whose folder has a tiny.toml, is tried here without another line.
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
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.families.base.sampling import pipeline_arguments
from lora_trainer.lora.adapter import Adapter, inject
from lora_trainer.lora.dropout import halves
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.family_bases import (
    base_of,
    denoiser_of,
    draw,
    facts_of,
    pipeline_of,
    side_of,
    told_of,
)
from tests.fakes.runs import Toy, events, run_cli, toy, trajectory

pytestmark = pytest.mark.timeout(400)  # a loaded machine is not a failure
FAMILIES = pytest.mark.parametrize("name", families.NAMES)
RANK, ALPHA, STEPS, PROMPTS = 4, 2.0, 3, ("one toy", "two words more")
SETTINGS: Mapping[str, Any] = {
    "adapter__rank": RANK,
    "adapter__alpha": ALPHA,
    "adapter__targets": "transformer",
    "adapter__refiners": True,  # all layers that a family can adapt
    "data__validation_fraction": 0.34,
    "logging__trackers": [],
    "memory__gradient_checkpointing": "none",  # else most of the time goes into traces for the plan
    "memory__micro_batch": 2,
    "optimizer__learning_rate": 0.02,
    "optimizer__schedule": "constant",
    "output__measure": True,
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


@pytest.fixture
def place(name: str, tmp_path: Path) -> Place:
    """A dataset and cache of the family, with a run `whole`."""
    trained = Place(folder=toy(tmp_path, images=3).folder, name=name)
    assert run_cli(trained.command("whole")) == 0
    return trained


# ---- the pieces, put together as a run does


def adapted(name: str, settings: AdapterSettings, *, alive: bool) -> tuple[nn.Module, Adapter]:
    """Return a family's denoiser and its adapter; `alive` as in mid-training.

    While the second factors are zero, the first get no gradient.
    """
    denoiser, generator = denoiser_of(name), torch.Generator().manual_seed(17)
    adapter = inject(
        {DENOISER: denoiser},
        modules={DENOISER: families.family(name).lora_targets(denoiser, "transformer")},
        settings=settings,
        alpha=ALPHA,
        seed=0,
    )
    with torch.no_grad():
        for parameter in adapter.parameters() if alive else ():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return denoiser, adapter


def losses(
    name: str, denoiser: nn.Module, prompts: Sequence[str] = PROMPTS, rows: slice = slice(None)
) -> Tensor:
    """Return the losses of some rows of a fixed batch of two, half-way to noise."""
    family, facts = families.family(name), facts_of(name)
    side = side_of(facts) // facts.vae_factor
    latents, noise = draw(2, 2, facts.latent_channels, side, side, seed=1)[:, rows]
    count, sigma, alpha, timestep = len(latents), 0.5, 0.5, torch.tensor(500.0)
    if facts.release.prediction != "flow":
        signal = float(facts.release.alphas_cumprod()[500])
        alpha, sigma, timestep = signal**0.5, (1 - signal) ** 0.5, torch.tensor(500)
    level = torch.full((count,), alpha), torch.full((count,), sigma)
    noisy = add_noise(latents, noise, *level)
    predicted = family.predict(
        denoiser, noisy, timestep.expand(count), told_of(name, tuple(prompts))
    )
    return sample_losses(predicted, target(latents, noise, *level, facts.release.prediction))


# ---- training


@FAMILIES
def test_checkpointing_changes_neither_loss_nor_gradients(name: str) -> None:
    found = []
    for checkpointing in (False, True):
        denoiser, adapter = adapted(name, AdapterSettings(rank=RANK), alive=True)
        network: Any = denoiser.train()
        if checkpointing:
            network.enable_gradient_checkpointing()
        loss = losses(name, network).sum()
        loss.backward()
        found.append((loss.detach(), [p.grad for p in adapter.parameters()]))
    (loss, gradients), (again, recomputed) = found
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=1e-6)
    for one, other in zip(gradients, recomputed, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    assert any(float(gradient.abs().max()) > 0 for gradient in gradients)


@FAMILIES
def test_a_sample_is_dropped_the_same_in_any_batch(name: str) -> None:
    """Every layer's inputs are rows of one sample after the other, whatever its network does to them."""
    prompts, seeds = ("a", "many more words than that, and more of them"), (1 << 40, 1 << 50)
    if families.family(
        name
    ).text.one_length:  # training does texts of other lengths one after the other
        prompts = ("a", "a")
    dropping = AdapterSettings(
        rank=RANK, dropout=0.3, rank_dropout=0.3, module_dropout=0.1, noise_rank=1
    )
    denoiser, adapter = adapted(name, dropping, alive=True)
    assert adapter.masks is not None

    def of(rows: slice) -> Tensor:
        own, noisy = (
            torch.tensor([halves(seed) for seed in seeds[rows]]),
            torch.tensor([100.0, 900.0]),
        )
        with torch.no_grad(), adapter.masks.of(own, noisy[rows]):  # type: ignore[union-attr]  # asserted above
            return losses(name, denoiser, prompts[rows], rows)

    together = of(slice(0, 2))
    alone = torch.cat([of(slice(0, 1)), of(slice(1, 2))])
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)


# ---- whole runs


@FAMILIES
def test_the_exported_file_gives_the_live_output_in_a_fresh_pipeline(
    name: str, place: Place, tmp_path: Path
) -> None:
    """Of one prediction, and of the run's last sample."""
    run, family, facts = place.runs / "whole", families.family(name), facts_of(name)
    file = run / "whole.safetensors"
    if family.formats.written[0] in family.formats.joined:
        # Its layers are joined, and diffusers parts them by the widths of the releases alone.
        file = tmp_path / "whole.safetensors"
        line = ["convert", str(run / file.name), "--format", "diffusers", "--output", str(file)]
        assert run_cli([*line, "--base", str(place.base)]) == 0
    (cached,) = events(run, "cached")
    assert cached["latents"] == 3 and cached["texts"] >= 3
    assert all(np.isfinite(loss) for _, loss, *_ in trajectory(run))
    denoiser, adapter = adapted(name, AdapterSettings(rank=RANK), alive=False)
    state = load_newest(run / "states", events=EventStream())
    assert state is not None and state.step == STEPS
    adapter.load_state(state.adapter)
    pipeline = pipeline_of(facts)
    with torch.no_grad():
        base = losses(name, getattr(pipeline, family.traits.folder))
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
        loaded = losses(name, getattr(pipeline, family.traits.folder))
        expected = losses(name, denoiser)
    torch.testing.assert_close(loaded, expected, rtol=1e-4, atol=1e-5)
    assert float((expected - base).abs().max()) > 1e-3, "or a file that does nothing would pass"
    row = events(run, "sample")[-1]
    (image,) = row["images"]
    side = side_of(facts)
    drawn = pipeline(
        **pipeline_arguments(
            family, pipeline, facts, image["prompt"], "", guidance_scale=3.0, steps=2
        )[0],
        generator=torch.Generator().manual_seed(image["seed"]),
        num_inference_steps=2,
        width=side,
        height=side,
    ).images[0]
    shown = np.asarray(Image.open(run / image["file"]), dtype=np.int16)
    assert row["step"] == STEPS
    assert int(np.abs(shown - np.asarray(drawn, dtype=np.int16)).max()) <= 2
