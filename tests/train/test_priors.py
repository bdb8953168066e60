"""Masks and priors in the step: what is masked out teaches less, what is to stay as the base does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_trainer.cache.store import CacheKey
from lora_trainer.config.inputs import DataSettings
from lora_trainer.config.learning import ObjectiveSettings
from lora_trainer.training.dataloader import Sample, TrainingDataLoader
from lora_trainer.training.loss import collate
from tests.fakes.training import (
    CPU,
    MIXED,
    SQUARE,
    TEXT_WIDTH,
    TOKENS,
    TinyTraining,
    awaken,
    build_feeder,
    build_training,
)

BASE_TARGET = ObjectiveSettings(prior="base", prior_weight=2.0)
KEPT = ObjectiveSettings(preservation_weight=0.5)


def with_priors(
    shapes: Sequence[tuple[int, int, int]] = MIXED,
    *,
    regularisation: Sequence[int] = (),
    masked: Sequence[int] = (),
    of_class: Sequence[int] = (),
    per_epoch: int = 0,
    background: float = 0.25,
    **more: Any,
) -> TrainingDataLoader:
    """Return a feeder some of whose samples, by index, are for regularisation, masked, or kept as a class."""
    data = DataSettings(masks="files", mask_background=background)
    plain = build_feeder(shapes, data=data, **more)
    generator, sources = torch.Generator().manual_seed(4), dict(plain.sources)

    def put(kind: Any, name: str, entry: Mapping[str, Tensor]) -> CacheKey:
        key = CacheKey.of(kind, of=name)
        plain.entries.resident[key.digest] = entry
        return key

    for index, (name, source) in enumerate(plain.sources.items()):
        changes: dict[str, Any] = {"regularisation": index in regularisation}
        (view,) = source.views
        if index in masked:
            mask = torch.rand(1, *shapes[index][1:], generator=generator) > 0.5
            key = put("masks", name, {"mask": mask.float()})
            changes["views"] = (replace(view, mask=key),)
        if index in of_class:
            text = torch.randn(1, TOKENS, TEXT_WIDTH, generator=generator)
            changes["of_class"] = (put("text", name, {"text": text}),)
        sources[name] = replace(source, **changes)
    return replace(
        plain,
        sources=sources,
        regularisation=[f"s{index}" for index in regularisation],
        regularisation_per_epoch=per_epoch,
    )


# ---- masks


def test_a_mask_is_weighed_by_its_background_and_its_mean_in_validation_too() -> None:
    feeder = with_priors([SQUARE] * 2, masked=(0,), batch_size=2, background=0.25)
    (masked,) = [sample for sample in feeder.prepare(0) if sample.sample == "s0"]
    mask = feeder.sources["s0"].views[0].mask
    assert mask is not None and masked.mask_weights is not None
    values = 0.25 + 0.75 * feeder.entries.read(mask)["mask"]
    assert torch.allclose(masked.mask_weights, values / values.mean())
    assert float(masked.mask_weights.mean()) == pytest.approx(1.0)
    for batch in feeder.validation(list(feeder.sources.items()), quantiles=3):
        assert [sample.mask_weights is not None for sample in batch] == [True, False]


def test_a_batch_without_masks_is_as_it_was() -> None:
    samples = build_feeder([SQUARE] * 3, batch_size=3).prepare(0)
    assert collate(samples, device=CPU, precision=torch.float32).mask_weights is None
    mixed = with_priors([SQUARE] * 3, masked=(1,), batch_size=3).prepare(0)
    counts = collate(mixed, device=CPU, precision=torch.float32).mask_weights
    assert counts is not None and counts.shape == (3, 1, 8, 8)
    whole = [index for index, sample in enumerate(mixed) if sample.mask_weights is None]
    assert torch.equal(counts[whole], torch.ones(2, 1, 8, 8))


# ---- the base


def losses_of(training: TinyTraining, samples: Sequence[Sample]) -> list[float]:
    return training.training.model.losses(samples).tolist()


def test_what_is_to_stay_as_the_base_costs_nothing_until_something_is_learned() -> None:
    feeder = with_priors([SQUARE] * 4, regularisation=(2, 3), per_epoch=2, objective=BASE_TARGET)
    training = build_training(feeder, steps=1, adapter_settings={"dropout": 0.5})
    samples = feeder.prepare(0)
    as_base = [sample.as_base for sample in samples]
    assert as_base == [sample.sample.startswith(("s2", "s3")) for sample in samples]
    start = losses_of(training, samples)
    # Up to the rounding of products of two images and of four.
    assert [loss < 1e-12 for loss in start] == as_base
    awaken(training.adapter)
    after = losses_of(training, samples)
    assert all(loss > 1e-6 for loss in after)
    model = training.training.model
    kept = [sample for sample in samples if sample.as_base]
    with torch.no_grad(), model.masking(model.collate(kept)):
        dropped = losses_of(training, kept)
        training.adapter.load_state({k: t * 0 for k, t in training.adapter.state().items()})
        assert losses_of(training, kept) == [0.0, 0.0] != dropped, "the target has no dropout"


def test_regularisation_images_can_teach_what_they_show() -> None:
    objective = ObjectiveSettings(prior_weight=3.0, min_snr_gamma=None)
    feeder = with_priors([SQUARE] * 4, regularisation=(2, 3), per_epoch=2, objective=objective)
    for sample in feeder.prepare(0):
        assert not sample.as_base
        assert sample.weight == (3.0 if sample.sample.startswith(("s2", "s3")) else 1.0)


def test_a_sample_of_a_class_comes_again_with_the_same_draws() -> None:
    feeder = with_priors([SQUARE] * 2, of_class=(1,), masked=(1,), batch_size=2, objective=KEPT)
    samples = feeder.prepare(0)
    assert sorted(sample.sample for sample in samples) == ["s0", "s1", "s1"]
    first, again = (sample for sample in samples if sample.sample == "s1")
    assert (first.as_base, again.as_base) == (False, True)
    assert torch.equal(first.latents, again.latents) and torch.equal(first.noise, again.noise)
    assert (first.level, first.dropout_seed) == (again.level, again.dropout_seed)
    assert again.weight == 0.5 * first.weight
    assert first.mask_weights is not None and again.mask_weights is None, (
        "all of it is to stay as it is"
    )
    key = feeder.sources["s1"].of_class[0]
    assert key is not None
    assert torch.equal(again.conditioning["text"], feeder.entries.read(key)["text"])
    assert not torch.equal(again.conditioning["text"], first.conditioning["text"])


def test_strata_span_the_whole_epoch() -> None:
    objective = ObjectiveSettings(timestep_strata=8, prior="base")
    feeder = with_priors(
        [SQUARE] * 7, regularisation=(5, 6), per_epoch=3, batch_size=8, objective=objective
    )
    for step in range(3):
        levels = sorted(int(sample.level.timestep) // 125 for sample in feeder.prepare(step))
        assert levels == list(range(8))
