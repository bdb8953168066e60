"""What a step sees is a function of its number: order, draws, epochs, groups, and the thread ahead."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_trainer.cache.cache_plan import Entries
from lora_trainer.cache.store import Cache, CacheKey
from lora_trainer.common.errors import MachineError
from lora_trainer.common.events import EventStream
from lora_trainer.common.files import CappedFolder
from lora_trainer.config.inputs import DataSettings
from lora_trainer.config.learning import ObjectiveSettings
from lora_trainer.families.base.facts import TEXT_LENGTHS
from lora_trainer.families.base.noise_levels import Level
from lora_trainer.training.dataloader import Sample, TrainingDataLoader, split
from lora_trainer.training.loss import collate
from tests.fakes.training import CPU, SQUARE, TALL, WIDE, build_feeder

EVERYTHING = DataSettings(flip=True, caption_dropout=0.3)
NOISY = ObjectiveSettings(
    noise_offset=0.1,
    multires_noise_iterations=2,
    input_perturbation=0.1,
    timestep_strata=6,
    loss="smooth_l1",
)


def rich_feeder(batch_size: int = 4, *, seed: int = 5) -> TrainingDataLoader:
    """Every kind of draw is on."""
    return build_feeder(batch_size=batch_size, seed=seed, data=EVERYTHING, objective=NOISY, texts=3)


def two_sized(batch_size: int = 4) -> TrainingDataLoader:
    """Every sample is there as itself and at a second size, which is that of the first sample."""
    feeder = rich_feeder(batch_size)
    second = feeder.sources["s0"]
    sources = {
        name: replace(source, others=() if name == "s0" else (second,))
        for name, source in feeder.sources.items()
    }
    return replace(feeder, sources=sources)


def tensors(sample: Sample) -> list[torch.Tensor]:
    own = (sample.latents, sample.noise, sample.input_noise, *sample.conditioning.values())
    return [tensor for tensor in own if tensor is not None]


def same(one: Sample, other: Sample) -> bool:
    facts = [(s.sample, s.level, s.weight, s.delta, [*s.conditioning]) for s in (one, other)]
    pairs = zip(tensors(one), tensors(other), strict=True)
    return facts[0] == facts[1] and all(torch.equal(a, b) for a, b in pairs)


def all_same(one: tuple[Sample, ...], other: tuple[Sample, ...]) -> bool:
    return all(same(a, b) for a, b in zip(one, other, strict=True))


def names(feeder: TrainingDataLoader, steps: int) -> list[str]:
    return [sample.sample for step in range(steps) for sample in feeder.prepare(step)]


def of_pairs(**changes: Any) -> TrainingDataLoader:
    """Every sample is one of a pair with the sample of the next number, at strength -1."""
    feeder = two_sized(**changes)
    sources = list(feeder.sources.items())
    others = [*sources[1:], sources[0]]
    # The other image of a pair has as many sizes as the first.
    return replace(
        feeder,
        sources={
            name: replace(
                source,
                opposite=replace(other, strength=-1.0, others=(other,) if source.others else ()),
            )
            for (name, source), (_, other) in zip(sources, others, strict=True)
        },
    )


# ---- steps


def test_both_images_of_a_pair_are_in_one_step_with_the_same_draws() -> None:
    plain, paired = two_sized(), of_pairs()
    for step in range(6):
        alone, samples = plain.prepare(step), paired.prepare(step)
        assert [sample.strength for sample in samples] == [1.0, -1.0] * len(alone)
        for one, more, less in zip(alone, samples[::2], samples[1::2], strict=True):
            assert same(replace(one, weight=one.weight / 2), more), "the first is as without"
            assert (less.level, less.weight, less.sample) == (more.level, more.weight, more.sample)
            assert torch.equal(less.conditioning["text"], more.conditioning["text"])
            assert not torch.equal(less.latents.flatten()[:8], more.latents.flatten()[:8])
            if less.latents.shape == more.latents.shape:
                assert torch.equal(less.noise, more.noise)
                assert torch.equal(less.input_noise, more.input_noise)  # type: ignore[arg-type]  # perturbed
    assert {len({s.strength for s in part}) for part in split(samples, cap=8)} == {1}


def test_no_two_draws_share_their_noise() -> None:
    """Samples of an epoch, epochs of a sample, and the noise and latent streams are all different draws."""
    feeder = build_feeder(batch_size=1, seed=5, data=DataSettings(), objective=ObjectiveSettings())
    sample, other, *_ = feeder.sources
    drawn = [feeder.prepare_sample(epoch, name) for epoch in (0, 1) for name in (sample, other)]
    entry = feeder.entries.read(feeder.sources[sample].views[0].latents)
    mean, std = entry["mean"], entry["std"]
    noises = [one.noise.flatten()[:16] for one in drawn]
    noises.append(((drawn[0].latents - mean) / std).flatten()[:16])
    for one in drawn:
        snr = one.level.signal / (1 - one.level.signal)
        assert one.weight == pytest.approx(min(snr, 5.0) / snr), "that of its timestep"
    for index, one in enumerate(noises):
        assert all(not torch.allclose(one, later, atol=1e-3) for later in noises[index + 1 :])


def test_a_step_does_not_depend_on_what_was_prepared_before() -> None:
    feeder = rich_feeder()
    forward = [feeder.prepare(step) for step in range(12)]
    fresh = rich_feeder()
    assert all(all_same(fresh.prepare(step), forward[step]) for step in reversed(range(12)))
    assert all(all_same(feeder.prepare(step), forward[step]) for step in (11, 0, 5, 5))
    torch.manual_seed(123)
    backwards = dict(reversed(feeder.sources.items()))
    other = TrainingDataLoader(**{**vars(feeder), "sources": backwards, "_orders": {}})
    assert all_same(other.prepare(3), forward[3])
    reseeded = rich_feeder(seed=6).prepare(3)
    drawn = ((a, b) for a in forward[3] for b in reseeded)
    assert not any(torch.equal(a.noise, b.noise) for a, b in drawn)


def test_a_sample_is_drawn_the_same_in_any_batch() -> None:
    """The stream of samples, with all their draws, is cut differently and nothing else."""
    whole = [sample for step in range(7) for sample in two_sized(4).prepare(step)]
    strata = [int(sample.level.timestep * 6 / 1000) for sample in whole[:24]]
    windows = [tuple(strata[first : first + 6]) for first in range(0, 24, 6)]
    assert all(sorted(window) == list(range(6)) for window in windows), "one of each stratum"
    assert len(set(windows)) > 2, "in another order in each window"
    for batch_size in (1, 5):
        other = chain.from_iterable(two_sized(batch_size).prepare(step) for step in range(28))
        assert all(same(a, b) for a, b in zip(whole, other, strict=False))


@settings(max_examples=20)
@given(count=st.integers(1, 9), batch_size=st.integers(1, 6))
def test_every_sample_once_per_epoch_and_steps_cross_epochs(count: int, batch_size: int) -> None:
    feeder = build_feeder([SQUARE] * count, batch_size=batch_size)
    stream = [feeder.sample_at(position) for position in range(3 * count)]
    for epoch in range(3):
        part = stream[epoch * count : (epoch + 1) * count]
        assert {place[0] for place in part} == {epoch}
        assert Counter(name for _, name in part) == Counter(feeder.sources.keys())
    steps = 3 * count // batch_size
    assert feeder.epochs_after(steps) == steps * batch_size / count
    assert names(feeder, steps) == [name for _, name in stream[: steps * batch_size]]


def test_latents_are_draws_from_the_posterior() -> None:
    feeder = build_feeder([SQUARE], batch_size=64)
    mean = feeder.entries.read(feeder.sources["s0"].views[0].latents)["mean"]
    drawn = torch.stack([sample.latents - mean for sample in feeder.prepare(0)])
    assert float(drawn.std()) == pytest.approx(0.1, rel=0.03)
    assert float(drawn.mean()) == pytest.approx(0.0, abs=0.003)


# ---- flips, dropout, variants


def nearest(sample: Sample, feeder: TrainingDataLoader) -> str:
    views = feeder.sources[sample.sample].views
    plain, mirrored = (feeder.entries.read(view.latents)["mean"] for view in views)
    closer = (sample.latents - plain).norm() < (sample.latents - mirrored).norm()
    return "plain" if closer else "mirrored"


def test_latents_are_the_mean_where_the_family_s_references_take_it() -> None:
    """Everything else of a sample is the same: its noise, its level, its text."""
    feeder = build_feeder(batch_size=1, seed=5, data=DataSettings(), objective=ObjectiveSettings())
    taken = TrainingDataLoader(**{**vars(feeder), "draws_latents": False, "_orders": {}})
    for name in feeder.sources:
        mean = feeder.entries.read(feeder.sources[name].views[0].latents)["mean"]
        drawn, sample = (each.prepare_sample(0, name) for each in (feeder, taken))
        assert torch.equal(sample.latents, mean) and not torch.equal(drawn.latents, mean)
        assert same(replace(drawn, latents=mean), sample)


def test_half_of_the_samples_are_mirrored_with_their_own_crop_and_mask() -> None:
    feeder = build_feeder([SQUARE], batch_size=400, data=EVERYTHING)
    (source,), views = feeder.sources.values(), []
    for view, corner in zip(source.views, (3, 4), strict=True):
        mask = CacheKey.of("masks", of=str(corner))
        feeder.entries.resident[mask.digest] = {"mask": torch.arange(8.0).expand(1, 8, 8) == corner}
        crop = {"time_ids": torch.tensor([[corner]])}
        views.append(replace(view, geometry=crop, mask=mask))
    cropped = replace(feeder, sources={"s0": replace(source, views=tuple(views))})
    found = Counter[tuple[str, int, int]]()
    for sample in cropped.prepare(0):
        assert sample.mask_weights is not None
        masked = int(sample.mask_weights[0, 0].argmax())
        found[nearest(sample, feeder), int(sample.conditioning["time_ids"]), masked] += 1
    assert set(found) == {("plain", 3, 3), ("mirrored", 4, 4)}
    assert 160 < found["mirrored", 4, 4] < 240


def test_each_epoch_draws_a_text_of_a_sample_or_leaves_it_out() -> None:
    """The first of several texts is that of validation."""

    def drawn(**data: Any) -> list[list[int | None]]:
        feeder = build_feeder([SQUARE] * 40, data=DataSettings(**data), texts=4)
        keys = [(None, feeder.empty_text)]
        keys += [pair for source in feeder.sources.values() for pair in enumerate(source.texts)]
        numbers = {id(feeder.entries.read(key)["text"]): number for number, key in keys}
        return [
            [
                numbers[id(feeder.prepare_sample(epoch, name).conditioning["text"])]
                for name in feeder.sources
            ]
            for epoch in range(12)
        ]

    counts = Counter(chain.from_iterable(drawn(caption_dropout=0.25)))
    assert counts[None] / 480 == pytest.approx(0.25, abs=0.05)
    assert 0 not in counts and min(counts[number] for number in (1, 2, 3)) > 90
    assert None not in chain.from_iterable(drawn())
    left_out = [None in numbers for numbers in drawn(caption_dropout_every_epochs=3)]
    assert left_out == [False, False, True] * 4
    (all_left_out,) = {*chain.from_iterable(drawn(caption_dropout=1.0))}
    assert all_left_out is None


# ---- validation


def test_validation_is_fixed_and_unaugmented() -> None:
    """At the first resolution; squared errors whatever the loss, so that runs stay comparable."""
    feeder = two_sized()
    keys = list(feeder.sources.items())[:2]
    batches, again = (one.validation(keys, quantiles=2) for one in (feeder, two_sized()))
    assert all(all_same(one, other) for one, other in zip(batches, again, strict=True))
    assert [batch[0].level.timestep for batch in batches] == [250, 750]
    for batch in batches:
        for sample, (name, source) in zip(batch, keys, strict=True):
            assert sample.sample == name and sample.level.timestep == batch[0].level.timestep
            assert torch.equal(sample.latents, feeder.entries.read(source.views[0].latents)["mean"])
            text = feeder.entries.read(source.texts[0])["text"]
            assert torch.equal(sample.conditioning["text"], text)
            assert sample.loss == "mse" and sample.input_noise is None
    first, second = (batch[0].noise for batch in batches)
    assert not torch.equal(first, second)


# ---- groups


def batch_of(shapes: list[tuple[int, int, int]]) -> tuple[Sample, ...]:
    zero = torch.zeros(())
    return tuple(
        Sample(
            sample=str(index),
            latents=zero.expand(shape),
            noise=zero.expand(shape),
            level=Level(timestep=0, alpha=1.0, sigma=0.0, signal=1.0),
            weight=1.0,
            conditioning={},
        )
        for index, shape in enumerate(shapes)
    )


@given(
    shapes=st.lists(st.sampled_from([SQUARE, WIDE, TALL]), max_size=20),
    cap=st.integers(1, 9),
    wide=st.integers(1, 9),
)
def test_groups_hold_every_sample_once_by_shape_within_the_cap(
    shapes: list[tuple[int, int, int]], cap: int, wide: int
) -> None:
    """A large bucket may have a lower cap of its own."""
    batch = batch_of(shapes)
    groups = split(batch, cap=cap, images_at_once={(WIDE[1], WIDE[2]): wide})
    assert Counter(s.sample for group in groups for s in group) == Counter(
        sample.sample for sample in batch
    )
    caps = {SQUARE: cap, TALL: cap, WIDE: min(cap, wide)}
    for group in groups:
        (shape,) = {tuple(sample.latents.shape) for sample in group}
        assert 1 <= len(group) <= caps[shape]
    fewest = sum(-(-count // caps[shape]) for shape, count in Counter(shapes).items())
    assert len(groups) == fewest, "no more passes than needed"


def test_a_group_is_stacked_in_order() -> None:
    samples = build_feeder([SQUARE] * 3, batch_size=3).prepare(0)
    stacked = collate(samples, device=CPU, precision=torch.bfloat16).on(CPU)
    assert torch.equal(stacked.latents, torch.stack([sample.latents for sample in samples]))
    assert torch.equal(stacked.noise, torch.stack([sample.noise for sample in samples]))
    texts = torch.cat([sample.conditioning["text"] for sample in samples])
    assert torch.equal(stacked.conditioning["text"], texts.bfloat16())
    assert stacked.timesteps.tolist() == [sample.level.timestep for sample in samples]
    assert stacked.timesteps.dtype == torch.int64
    assert stacked.loss == "mse" and stacked.input_noise is None
    huber = [
        one for one in prepared(loss="huber", input_perturbation=0.1) if one.latents.shape == SQUARE
    ]
    batch = collate(huber, device=CPU, precision=torch.float32)
    assert batch.numbers[3].tolist() == pytest.approx([sample.delta for sample in huber])
    assert torch.equal(batch.input_noise, torch.stack([tensors(one)[2] for one in huber]))
    alpha, sigma, _, _ = stacked.numbers
    assert alpha.tolist() == pytest.approx([sample.level.alpha for sample in samples])
    assert sigma.tolist() == pytest.approx([sample.level.sigma for sample in samples])


def test_texts_of_several_lengths_are_padded_with_their_masks() -> None:
    def sample(length: int) -> Sample:
        text = torch.full((1, length, 3), float(length))
        (one,) = batch_of([SQUARE])
        mask = torch.ones(1, length, dtype=torch.int64)
        told = {"text": text, "text_mask": mask, "guidance": torch.tensor([float(length)])}
        return replace(one, conditioning=told)

    batch = collate([sample(2), sample(5)], device=CPU, precision=torch.bfloat16).on(CPU)
    stacked = batch.conditioning
    assert stacked["text"].shape == (2, 5, 3) and stacked["text"].dtype == torch.bfloat16
    assert stacked["text"][0, :, 0].tolist() == [2, 2, 0, 0, 0]
    assert stacked["text_mask"].dtype == torch.int64
    assert stacked["text_mask"].tolist() == [[1, 1, 0, 0, 0], [1] * 5]
    assert stacked["guidance"].tolist() == [2, 5]
    assert stacked[TEXT_LENGTHS].tolist() == [2, 5]


# ---- entries


def cache_in(folder: Path) -> Cache:
    return Cache(
        folder=CappedFolder(root=folder, limit_bytes=1 << 30), on_problem=EventStream().problem
    )


def test_entries_are_read_once_up_to_the_limit(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    keys = [CacheKey.of("text", text=name) for name in "abc"]
    for value, key in enumerate(keys):
        cache.write(key, {"text": torch.full((1, 4), float(value)).numpy()})
    entries = Entries(cache=cache, limit_bytes=20)
    read = [entries.read(key)["text"][0, 0].item() for key in keys * 2]
    assert read == [0, 1, 2] * 2
    for key in keys:
        cache.path(key).unlink()
    assert [entries.read(key)["text"][0, 0].item() for key in keys[:2]] == [0, 1]
    with pytest.raises(MachineError, match="vanished or was damaged"):
        entries.read(keys[2])


# ---- the thread


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "lora-train-ahead"]
    assert left == []


def test_the_stream_gives_what_prepare_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, usual = list[int](), TrainingDataLoader.prepare

    def prepare(self: TrainingDataLoader, step: int) -> tuple[Sample, ...]:
        begun.append(step)
        return usual(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingDataLoader, "prepare", prepare)
        patch.setattr(Future, "cancel", lambda _: False)  # what waits when it is left is made, too
        with rich_feeder().stream(0, 10_000) as batches:
            assert next(batches), "leaving early stops the thread"
    assert begun == [*range(6)], "one taken, four ready, one being made"
    with rich_feeder().stream(2, 9) as batches:
        streamed = list(batches)
    feeder = rich_feeder()
    wanted = [feeder.prepare(step) for step in range(2, 9)]
    assert len(streamed) == 7
    assert all(all_same(one, other) for one, other in zip(streamed, wanted, strict=True))


# ---- objective options


def prepared(count: int = 40, **objective: object) -> list[Sample]:
    """Return the first samples of a stream of seven."""
    feeder = build_feeder(batch_size=1, objective=ObjectiveSettings.model_validate(objective))
    return [feeder.prepare(step)[0] for step in range(count)]


def test_input_perturbation_adds_its_own_noise_to_the_input_only() -> None:
    plain, perturbed = prepared(), prepared(input_perturbation=0.25)
    assert all(sample.input_noise is None for sample in plain)
    extra = []
    for one, other in zip(plain, perturbed, strict=True):
        assert torch.equal(one.noise, other.noise), "what is to be predicted stays"
        assert other.input_noise is not None
        extra.append((other.input_noise - other.noise).flatten())
    drawn = torch.cat(extra)
    assert float(drawn.std()) == pytest.approx(0.25, rel=0.05)
    noises = torch.cat([sample.noise.flatten() for sample in plain])
    assert float((drawn * noises).mean()) == pytest.approx(0.0, abs=0.02), (
        "independent of the noise"
    )


# ---- more resolutions


def test_each_epoch_draws_one_of_the_resolutions_of_a_sample() -> None:
    feeder = two_sized()
    name = next(n for n, s in feeder.sources.items() if s.size_px != feeder.sources["s0"].size_px)
    sizes = Counter(feeder.drawn(epoch, name).size_px for epoch in range(40))
    assert set(sizes) == {feeder.sources[one].size_px for one in ("s0", name)}
    assert min(sizes.values()) > 8
    for epoch in range(10):
        width_px, height_px = feeder.drawn(epoch, name).size_px
        made = feeder.prepare_sample(epoch, name)
        assert made.latents.shape[1:] == made.noise.shape[1:] == (height_px // 2, width_px // 2)
