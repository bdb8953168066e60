"""The contrastive target of distilled bases: u + g (t - u), u the prediction for the empty prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.config.learning import ObjectiveSettings
from lora_trainer.families.base.facts import Conditioning
from lora_trainer.training.loss import Batch, Model, add_noise, target
from tests.fakes.plans import FLUX, bytes_by_name, machine, planned
from tests.fakes.training import (
    CPU,
    EMPTY_TEXT,
    SQUARE,
    TinyTraining,
    add_gradients,
    awaken,
    build_feeder,
    build_training,
    distance,
    gradients,
)
from tests.train.test_priors import with_priors

CONTRAST = ObjectiveSettings(contrast_scale=3.0, min_snr_gamma=None)
BY_SIGMA = ObjectiveSettings(contrast_scale=3.0, contrast_schedule="sigma", min_snr_gamma=None)


def awake(feeder: Any, **options: Any) -> TinyTraining:
    tiny = build_training(feeder, steps=1, **options)
    awaken(tiny.adapter)
    return tiny


def predicted(tiny: TinyTraining, batch: Batch, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the plain target of a batch and the prediction for these texts."""
    model, (alpha, sigma, _, _) = tiny.training.model, batch.numbers
    noisy = add_noise(batch.latents, batch.noise, alpha, sigma)
    plain = target(batch.latents, batch.noise, alpha, sigma, model.prediction)
    with torch.no_grad():
        return plain, model.predict(model.denoiser, noisy, batch.timesteps, {"text": texts})


@pytest.mark.parametrize("objective", [CONTRAST, BY_SIGMA], ids=["constant", "sigma"])
def test_the_target_is_moved_away_from_the_prediction_for_the_empty_prompt(
    objective: ObjectiveSettings,
) -> None:
    feeder = build_feeder([SQUARE] * 4, objective=objective)
    tiny, samples = awake(feeder), feeder.prepare(0)
    batch = tiny.training.model.collate(samples)
    empty = feeder.entries.read(EMPTY_TEXT)["text"]
    plain, unguided = predicted(tiny, batch, empty.expand(4, -1, -1))
    _, guided = predicted(tiny, batch, batch.conditioning["text"])
    scale = torch.full((4,), 3.0)
    if objective.contrast_schedule == "sigma":
        scale = torch.tensor([1 + 2 * sample.level.sigma for sample in samples])
        assert 1 < scale.min() < scale.max() < 3
    moved = unguided + scale.view(4, 1, 1, 1) * (plain - unguided)
    expected = (guided - moved).square().mean(dim=(1, 2, 3))
    found = tiny.training.model.losses(samples)
    assert torch.allclose(found, expected, rtol=1e-4)
    assert not torch.allclose(found, (guided - plain).square().mean(dim=(1, 2, 3)), rtol=0.1)


def test_no_gradient_goes_through_the_empty_prompt() -> None:
    """The loss of a target that was computed before, as a constant, has the same gradients."""
    feeder = build_feeder([SQUARE] * 4, objective=CONTRAST)
    tiny, samples = awake(feeder), feeder.prepare(0)
    add_gradients(tiny.training, samples, cap=4)
    found = gradients(tiny.adapter)
    tiny.training.optimizer.zero_grad()
    model, batch = tiny.training.model, tiny.training.model.collate(samples)
    empty = feeder.entries.read(EMPTY_TEXT)["text"]
    plain, unguided = predicted(tiny, batch, empty.expand(4, -1, -1))
    alpha, sigma, _, _ = batch.numbers
    noisy = add_noise(batch.latents, batch.noise, alpha, sigma)
    guided = model.predict(model.denoiser, noisy, batch.timesteps, batch.conditioning)
    (guided - (3 * plain - 2 * unguided)).square().mean().backward()
    assert distance(gradients(tiny.adapter), found) < 1e-5


def test_no_target_depends_on_the_split() -> None:
    masks = {"dropout": 0.2, "rank_dropout": 0.3, "noise_rank": 1}

    def found(cap: int, objective: ObjectiveSettings, **options: Any) -> list[Tensor]:
        feeder = with_priors(
            [SQUARE] * 4, regularisation=(3,), per_epoch=1, of_class=(1,), objective=objective
        )
        tiny = awake(feeder, adapter_settings=masks, **options)
        add_gradients(tiny.training, feeder.prepare(0), cap=cap)
        return gradients(tiny.adapter)

    both = CONTRAST.model_copy(update={"prior": "base", "preservation_weight": 0.5})
    whole = found(8, both)
    assert distance(whole, found(8, both.model_copy(update={"contrast_scale": 1.0}))) > 0.05
    for cap in (3, 2, 1):
        assert distance(found(cap, both, checkpointing=True), whole) < 1e-5


def test_the_base_s_own_prediction_and_the_validation_are_not_contrasted() -> None:
    feeder = with_priors(
        [SQUARE] * 4,
        regularisation=(3,),
        per_epoch=1,
        objective=CONTRAST.model_copy(update={"prior": "base"}),
    )
    plain = replace(feeder, objective=ObjectiveSettings(prior="base", min_snr_gamma=None))
    tiny = awake(feeder)
    model = tiny.training.model

    def losses(of: Any) -> dict[str, float]:
        samples = of.prepare(0)
        return {s.sample: model.losses([s]).item() for s in samples}

    with_contrast, without = losses(feeder), losses(plain)
    (kept,) = [sample.sample for sample in feeder.prepare(0) if sample.as_base]
    same = {name for name, loss in without.items() if loss == with_contrast[name]}
    assert same == {kept}
    held_out = list(feeder.sources.items())
    for one, other in zip(
        feeder.validation(held_out, quantiles=2),
        plain.validation(held_out, quantiles=2),
        strict=True,
    ):
        assert torch.equal(model.losses(one), model.losses(other))


def test_without_it_nothing_is_prepared_nor_computed() -> None:
    tiny = awake(build_feeder([SQUARE] * 4))
    asked: list[int] = []

    def predict(denoiser: nn.Module, noisy: Tensor, *more: Any) -> Tensor:
        asked.append(len(noisy))
        return tiny.training.model.predict(denoiser, noisy, *more)

    samples = tiny.training.feeder.prepare(0)
    assert all(sample.empty_conditioning is None for sample in samples)
    replace(tiny.training.model, predict=predict).losses(samples)
    assert asked == [4]


class Remembers(nn.Module):
    """Predicts one number a prompt; the prompt is a one-hot text."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.tensor([0.25, 1.0, -1.0]))


def test_a_prediction_ends_where_guidance_of_the_scale_would_be() -> None:
    """With u = 0.25 for the empty prompt and targets 0.75 and -0.5, g = 3: 1.75 and -2."""

    def predict(network: nn.Module, noisy: Tensor, _: Tensor, texts: Conditioning) -> Tensor:
        assert isinstance(network, Remembers)
        return (texts["text"] @ network.numbers).view(-1, 1, 1, 1).expand_as(noisy)

    network = Remembers()
    model = Model(
        denoiser=network,
        predict=predict,
        embed=lambda conditioning: conditioning,
        prediction="flow",
        precision=torch.float32,
        device=CPU,
    )
    some, texts = build_feeder([SQUARE] * 2, objective=CONTRAST).prepare(0)[:2], torch.eye(3)
    samples = [
        replace(
            sample,
            latents=torch.zeros_like(sample.latents),
            noise=torch.full_like(sample.noise, wanted),
            conditioning={"text": texts[row : row + 1]},
            empty_conditioning={"text": texts[:1]},
        )
        for row, (sample, wanted) in enumerate(zip(some, (0.75, -0.5), strict=True), start=1)
    ]
    descent = torch.optim.SGD(network.parameters(), lr=0.2)
    for _ in range(60):
        descent.zero_grad()
        model.losses(samples).sum().backward()
        descent.step()
    assert network.numbers.tolist() == pytest.approx([0.25, 1.75, -2.0], abs=1e-4)


# ---- the plan


def test_its_pass_is_in_the_time_and_in_the_memory() -> None:
    asked = {"hardware.compile": "blocks", "data.resolution": 512}
    plan = planned(FLUX, machine(48), overrides={**asked, "objective.contrast_scale": 3.5})
    plain = planned(FLUX, machine(48), overrides={**asked, "hardware.compile": "none"})
    assert plan.config.hardware.compile == "blocks", "its pass has no gradients and runs uncompiled"
    assert plan.load == replace(plain.load, contrasted=1.0), "it fits as well"
    # One more pass forward: a frozen base is as much work back as forward.
    assert 1.4 < plan.idle_step_s / plain.idle_step_s < 1.5
    items, before = (bytes_by_name(each.memory.by_phase["training"]) for each in (plan, plain))
    width_px, height_px = plan.load.bucket_px
    latents_bytes = plan.load.micro_batch * 16 * (width_px // 8) * (height_px // 8) * 4
    assert items["prediction without a prompt"] == latents_bytes
    assert items["inputs"] > before["inputs"]
