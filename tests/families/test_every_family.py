"""Every registered family end to end on a tiny random base: cache, train, kill, resume, export, reload.

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
from safetensors.numpy import load_file
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.checkpoint.states import ADAPTER, OPTIMIZER_TENSORS, load_newest
from lora_trainer.common.events import EventStream
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.families.base import DENOISER, BaseFacts, Conditioning, Family
from lora_trainer.lora.adapter import Adapter, inject
from lora_trainer.lora.dropout import halves
from lora_trainer.lora_file.write import final_export_name
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.family_bases import CPU, base_of, conditioning_of, denoiser_of, facts_of, side_of
from tests.fakes.runs import Toy, events, last_state, run_cli, run_killed, toy, trajectory

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
    """One dataset and cache per family, with an uninterrupted run `whole` and a killed one `killed`."""
    found = {}
    for name in families.MODULES:
        folder = toy(tmp_path_factory.mktemp(name), images=3).folder
        found[name] = Place(folder=folder, name=name)
        assert run_cli(found[name].command("whole")) == 0, name
    point = ("lora_trainer.training.loop", "judge_step", 3, True)
    work = [(place.command("killed"), point) for place in found.values()]
    run_killed(work, timeout_s=380)
    return found


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
def test_the_loss_of_a_fixed_batch_is_finite_and_falls(name: str) -> None:
    at = bench(name)
    parameters = at.adapter.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=0.02)
    found = []
    for _ in range(12):
        loss = at.losses().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    assert all(np.isfinite(found))
    assert found[-1] < 0.97 * found[0], found


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
def test_a_sample_does_not_depend_on_its_batch(name: str) -> None:
    """Texts of several lengths, padded together, predict what each predicts alone."""
    prompts = ("a", "many more words than that, and more of them")
    both = bench(name, prompts=prompts)
    with torch.no_grad():
        together = both.losses()
        for index, prompt in enumerate(prompts):
            alone = bench(name, prompts=(prompt,))
            single = Bench(
                **{
                    **vars(alone),
                    "latents": both.latents[index : index + 1],
                    "noise": both.noise[index : index + 1],
                }
            )
            torch.testing.assert_close(single.losses()[0], together[index], rtol=1e-4, atol=1e-5)


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
def test_a_killed_run_goes_on_to_the_same_bits(name: str, places: Mapping[str, Place]) -> None:
    place = places[name]
    whole, killed = place.runs / "whole", place.runs / "killed"
    assert not (killed / final_export_name("killed")).exists()
    assert run_cli(place.command("killed", "--resume")) == 0
    assert trajectory(killed) == trajectory(whole)
    assert all(np.isfinite(loss) for _, loss, *_ in trajectory(whole))
    for file in (ADAPTER, OPTIMIZER_TENSORS):
        one, other = load_file(last_state(whole) / file), load_file(last_state(killed) / file)
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) for key in one), file
    exports = [load_file(run / final_export_name(run.name)) for run in (whole, killed)]
    assert all(np.array_equal(exports[0][key], exports[1][key]) for key in exports[0])


@FAMILIES
def test_a_second_run_encodes_nothing(name: str, places: Mapping[str, Place]) -> None:
    (first,) = events(places[name].runs / "whole", "cached")
    again = events(places[name].runs / "killed", "cached")[0]
    assert first["latents"] == 3 and first["texts"] >= 3
    assert (again["latents"], again["texts"]) == (0, 0)


@FAMILIES
def test_the_exported_file_gives_the_live_output_in_a_fresh_pipeline(
    name: str, places: Mapping[str, Place]
) -> None:
    run, family, facts = places[name].runs / "whole", families.family(name), facts_of(name)
    live = bench(name)
    state = load_newest(run / "states", events=EventStream())
    assert state is not None and state.step == STEPS
    live.adapter.load_state(state.adapter)
    pipeline = family.plain_pipeline(facts, dtype=torch.float32, device=CPU)
    fresh = pipeline.unet if hasattr(pipeline, "unet") else pipeline.transformer
    with torch.no_grad():
        base = Bench(**{**vars(live), "denoiser": fresh}).losses()
    pipeline.load_lora_weights(str(run), weight_name=final_export_name("whole"))
    fresh = pipeline.unet if hasattr(pipeline, "unet") else pipeline.transformer
    with torch.no_grad():
        loaded = Bench(**{**vars(live), "denoiser": fresh}).losses()
        wanted = live.losses()
    torch.testing.assert_close(loaded, wanted, rtol=1e-4, atol=1e-5)
    assert float((wanted - base).abs().max()) > 1e-3, "or a file that does nothing would pass"


@FAMILIES
def test_a_fresh_pipeline_draws_the_last_sample(name: str, places: Mapping[str, Place]) -> None:
    run, facts = places[name].runs / "whole", facts_of(name)
    family = families.family(name)
    pipeline = family.plain_pipeline(facts, dtype=torch.float32, device=CPU)
    pipeline.load_lora_weights(str(run), weight_name=final_export_name("whole"))
    pipeline.set_progress_bar_config(disable=True)
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
