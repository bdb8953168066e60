"""The samples of a slider and their loss: latents from noise, both strengths, goals of the base's own predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from lora_trainer.cache.cache_plan import DirectionSource, Entries
from lora_trainer.cache.store import Cache, CacheKey
from lora_trainer.common.events import EventStream
from lora_trainer.common.files import CappedFolder
from lora_trainer.common.processes import DistEnv
from lora_trainer.config.learning import ObjectiveSettings, SliderSettings
from lora_trainer.families.base.facts import Conditioning
from lora_trainer.families.base.noise_levels import Level, Levels, flow_levels, table_levels
from lora_trainer.training.dataloader import Sample, Slide, split
from lora_trainer.training.loss import Batch, Model, add_noise, parts_of, target
from lora_trainer.training.slider import SliderDataLoader, reach
from tests.fakes.training import (
    CPU,
    EMPTY_TEXT,
    TEXT_WIDTH,
    TOKENS,
    TinyTraining,
    add_gradients,
    awaken,
    build_training,
    distance,
    gradients,
    tiny_facts,
    tiny_signal,
)

SLIDER = SliderSettings(guidance=2.0, denoising_steps=2, keep_weight=0.5)
PLAIN = ObjectiveSettings(min_snr_gamma=None)
SMALL, LARGE = (16, 16), (24, 16)


class Loader(SliderDataLoader):
    """A slider's loader as the tiny training takes it."""

    @property
    def prediction(self) -> Any:
        return self.facts.release.prediction


def loader(**changes: Any) -> Loader:
    """Return a loader of two directions, the second of which keeps two prompts, at two sizes."""
    resident: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(7)

    def text(words: str) -> CacheKey:
        key = CacheKey.of("text", text=words)
        resident[key.digest] = {"text": torch.randn((1, TOKENS, TEXT_WIDTH), generator=generator)}
        return key

    text("")
    sources = {
        name: DirectionSource(
            target=text(f"{name} target"),
            more=text(f"{name} more"),
            less=text(f"{name} less"),
            keep=tuple(text(f"{name} keep {number}") for number in range(keep)),
            sizes=((SMALL, {}), (LARGE, {})),
            weight=1.0 + keep,
        )
        for name, keep in (("age", 0), ("size", 2))
    }
    nowhere = CappedFolder(root=tiny_facts().located.folder / "none", limit_bytes=0)
    cache = Cache(folder=nowhere, on_problem=EventStream().problem)
    objective = changes.pop("objective", PLAIN)
    fields: dict[str, Any] = {
        "sources": sources,
        "empty_text": EMPTY_TEXT,
        "entries": Entries(cache=cache, resident=resident),
        "levels": table_levels(tiny_signal().tolist(), objective),
        "facts": tiny_facts(),
        "shared_conditioning": {},
        "objective": objective,
        "slider": SLIDER,
        "batch_size": 4,
        "seed": 5,
        "prefetch_steps": 2,
    }
    return Loader(**{**fields, **changes})


def awake(feeder: Any, **options: Any) -> TinyTraining:
    def with_strength(model: Model) -> Model:
        return replace(model, at_strength=lambda strength: tiny[0].adapter.at(strength))

    tiny: list[TinyTraining] = []
    tiny.append(
        build_training(feeder, steps=1, adapt=with_strength, targets="attention", **options)
    )
    awaken(tiny[0].adapter)
    return tiny[0]


# ---- the samples


def test_a_draw_is_a_sample_at_each_strength_and_as_many_of_a_prompt_that_is_kept() -> None:
    feeder = loader(batch_size=2)
    samples = feeder.prepare(0)
    assert [(one.sample, one.strength) for one in samples].count(("age", 1.0)) == 1
    assert [(one.sample, one.strength) for one in samples].count(("size", -1.0)) == 2
    for name in ("age", "size"):
        of_name = [one for one in samples if one.sample == name]
        assert all(torch.equal(one.noise, of_name[0].noise) for one in of_name)
        assert {one.level for one in of_name} == {of_name[0].level}
    pushes = sorted(one.slide.push for one in samples if one.slide)
    assert pushes == [-2.0, -2.0, 0.0, 0.0, 2.0, 2.0]
    kept = [one for one in samples if one.slide and not one.slide.push]
    moved = [one for one in samples if one.sample == "size" and one.slide and one.slide.push]
    assert all(one.weight == 0.5 * moved[0].weight for one in kept), "slider.keep_weight"
    # The mean over the strengths, times the direction's own weight.
    assert sum(one.weight for one in moved) == 3.0
    without = loader(batch_size=2, slider=SLIDER.model_copy(update={"keep_weight": 0.0}))
    assert len(without.prepare(0)) == 4


def test_draws_follow_from_their_place_alone_and_processes_share_them() -> None:
    def drawn(feeder: SliderDataLoader, steps: Sequence[int]) -> list[tuple[Any, ...]]:
        samples = [one for step in steps for one in feeder.prepare(step)]
        return sorted(
            (one.sample, one.strength, one.level.timestep, one.weight, float(one.noise.sum()))
            for one in samples
        )

    whole = drawn(loader(), [0, 1])
    assert drawn(loader(batch_size=8), [0]) == whole
    shares = [loader(dist_env=DistEnv(rank=rank, count=2)) for rank in (0, 1)]
    assert sorted(drawn(shares[0], [0, 1]) + drawn(shares[1], [0, 1])) == whole
    epochs = [
        one.sample for one in loader(batch_size=1).prepare(6) + loader(batch_size=1).prepare(7)
    ]
    assert set(epochs) == {"age", "size"}, "an epoch has each direction once"
    assert {one.noise.shape for step in range(4) for one in loader().prepare(step)} == {
        (4, 8, 8),
        (4, 8, 12),
    }


def test_strengths_are_never_in_one_pass() -> None:
    passes = split(loader(batch_size=8).prepare(0), cap=16)
    assert all(len({one.strength for one in each}) == 1 for each in passes)
    assert len(passes) == 4, "two strengths of two sizes"


# ---- the latents


def pure(levels: Levels, *, end: Level, prediction: Any, steps: int) -> tuple[Tensor, list[Any]]:
    """Denoise one sample with a network of a formula; return its latents and what it was asked."""
    asked: list[Any] = []

    def predict(_: nn.Module, noisy: Tensor, timesteps: Tensor, texts: Conditioning) -> Tensor:
        asked.append((float(timesteps[0]), float(texts["text"][0, 0])))
        return (
            torch.tanh(noisy) * texts["text"].view(-1, 1, 1, 1) + timesteps.view(-1, 1, 1, 1) / 2000
        )

    model = Model(
        denoiser=nn.Identity(),
        predict=predict,
        embed=lambda conditioning: conditioning,
        prediction=prediction,
        precision=torch.float32,
        device=CPU,
    )
    noise = torch.randn((4, 8, 8), generator=torch.Generator().manual_seed(3))
    sample = Sample(
        sample="one",
        latents=torch.zeros_like(noise),
        noise=noise,
        level=end,
        weight=1.0,
        conditioning={"text": torch.tensor([[0.5]])},
        as_base=True,
        slide=Slide(
            path=levels.towards(end, steps, size_px=SMALL),
            guidance_scale=3.0,
            empty={"text": torch.tensor([[0.2]])},
        ),
    )
    noisy = model.drawn(model.collate([sample])).noisy
    assert noisy is not None
    return noisy[0], asked


def guided(x: Tensor, timestep: float) -> Tensor:
    """Return what the network of `pure` predicts with guidance 3: 0.2 + 3 (0.5 - 0.2) = 1.1 times tanh."""
    return 1.1 * torch.tanh(x) + timestep / 2000


# diffusers hands torch's tensor to numpy in an old way.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_latents_of_a_table_are_those_of_diffusers_euler_sampler() -> None:
    signal = tiny_signal()
    levels = table_levels(signal.tolist(), PLAIN)
    end = levels.at(0.4)
    found, asked = pure(levels, end=end, prediction="epsilon", steps=4)
    timesteps = [999, 849, 699, 550]
    assert [one for one, _ in asked[::2]] == timesteps
    scheduler = EulerDiscreteScheduler.from_config(tiny_facts().release.scheduler_config())
    scheduler.set_timesteps(timesteps=[*timesteps, 400])
    noise = torch.randn((4, 8, 8), generator=torch.Generator().manual_seed(3))
    x = noise * float((1 + scheduler.sigmas[0] ** 2) ** 0.5)  # in its own scaling, x / alpha
    for at, timestep in enumerate(timesteps):
        inside = x / float((1 + scheduler.sigmas[at] ** 2) ** 0.5)
        x = scheduler.step(guided(inside, timestep), torch.tensor(float(timestep)), x).prev_sample
    assert torch.allclose(found, x * math.sqrt(float(signal[400])), atol=1e-4)


def test_the_latents_of_flow_matching_are_those_of_its_euler_sampler() -> None:
    levels = flow_levels(PLAIN, base_shift=lambda _: 3.0)
    end = levels.at(0.6)
    found, asked = pure(levels, end=end, prediction="flow", steps=4)
    # Evenly spaced before the shift of 3, as the base's own sampler has them: t = sigma / (3 - 2 sigma).
    unshifted = [1000 - (1000 - 1000 / 3) * k / 4 for k in range(5)]
    sigmas = [3 * t / 1000 / (1 + 2 * t / 1000) for t in unshifted]
    assert [one for one, _ in asked[::2]] == pytest.approx([1000 * each for each in sigmas[:4]])
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(sigmas=sigmas)
    x = torch.randn((4, 8, 8), generator=torch.Generator().manual_seed(3))
    for timestep in scheduler.timesteps[:4]:
        x = scheduler.step(guided(x, float(timestep)), timestep, x).prev_sample
    assert sigmas[4] == pytest.approx(0.6)
    assert torch.allclose(found, x, atol=1e-5)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "flow"])
def test_the_parts_of_a_prediction_are_what_it_was_made_of(prediction: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    image, noise = (torch.randn((2, 4, 3, 3), generator=generator) for _ in range(2))
    alpha, sigma = (
        (torch.tensor([0.3, 0.8]), torch.tensor([0.7, 0.2]))
        if prediction == "flow"
        else (torch.tensor([0.6, 0.8]), torch.tensor([0.8, 0.6]))
    )
    noisy = add_noise(image, noise, alpha, sigma)
    predicted = target(image, noise, alpha, sigma, prediction)
    for found, expected in zip(
        parts_of(noisy, predicted, alpha, sigma, prediction), (image, noise), strict=True
    ):
        assert torch.allclose(found, expected, atol=1e-5)


def test_no_path_begins_where_nothing_of_the_image_is_left() -> None:
    signal = [*tiny_signal().tolist()[:-1], 0.0]
    levels = table_levels(signal, PLAIN)
    for end in (levels.at(0.9999), levels.at(0.5)):
        path = levels.towards(end, 5, size_px=SMALL)
        assert path[0].timestep == 998 and all(one.alpha > 0 for one in path)


# ---- the loss


def test_the_loss_is_the_distance_to_the_base_s_prediction_moved_along_the_direction() -> None:
    feeder = loader(batch_size=2)
    tiny = awake(feeder)
    model, adapter = tiny.training.model, tiny.adapter
    for sample in feeder.prepare(1):
        batch: Batch = model.collate([sample])
        assert sample.slide is not None
        with torch.no_grad(), adapter.at(sample.strength):
            noisy = model.drawn(batch).noisy
        assert noisy is not None

        def told(texts: Conditioning) -> Tensor:
            return model.predict(model.denoiser, noisy, batch.timesteps, texts)  # noqa: B023 - called in its turn

        with torch.no_grad():
            with adapter.off():
                goal = told(sample.conditioning)
                if sample.slide.more is not None and sample.slide.less is not None:
                    goal = goal + sample.slide.push * (
                        told(sample.slide.more) - told(sample.slide.less)
                    )
            with adapter.at(sample.strength):
                expected = (told(sample.conditioning) - goal).square().mean()
        assert model.losses([sample]).item() == pytest.approx(expected.item(), rel=1e-4)
        assert expected > 0


def test_a_strength_of_minus_one_is_the_update_with_the_other_sign() -> None:
    tiny = awake(loader())
    model, (sample, *_) = tiny.training.model, loader().prepare(0)
    batch = model.collate([sample])

    def predicted() -> Tensor:
        with torch.no_grad():
            return model.predict(model.denoiser, batch.noise, batch.timesteps, batch.conditioning)

    plain = predicted()
    with tiny.adapter.at(-1.0):
        other = predicted()
    for layer in tiny.adapter.layers.values():
        with torch.no_grad():
            layer.parameters["up"].neg_()
    assert torch.allclose(predicted(), other, atol=1e-6)
    assert not torch.allclose(plain, other, atol=1e-4)


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr"])
def test_gradients_do_not_depend_on_the_split_nor_on_recomputation(kind: str) -> None:
    def found(cap: int, **options: Any) -> list[Tensor]:
        feeder = loader()
        tiny = build_training(
            feeder, steps=1, targets="attention", adapter_settings={"kind": kind}, **options
        )
        for layer in tiny.adapter.layers.values():
            with torch.no_grad():
                for parameter in layer.parameters.values():
                    generator = torch.Generator().manual_seed(parameter.numel())
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        training = replace(
            tiny.training, model=replace(tiny.training.model, at_strength=tiny.adapter.at)
        )
        add_gradients(training, feeder.prepare(0), cap=cap)
        return gradients(tiny.adapter)

    whole = found(16)
    assert distance(found(1), whole) < 1e-4
    assert distance(found(3, checkpointing=True), whole) < 1e-4


def test_the_reach_is_1_at_the_goals_and_shrinks_with_the_update() -> None:
    """A network whose change is a known share of the goal, other at -1 than at 1."""
    network = Remembers()
    with torch.no_grad():
        network.change[0] = 1.5  # half of the goal's 3

    def predict(_: nn.Module, noisy: Tensor, __: Tensor, texts: Conditioning) -> Tensor:
        # At strength -1 the change is two thirds of that at 1.
        strength = network.strength if network.strength > 0 else network.strength * 2 / 3
        numbers = network.base + strength * network.change
        return (texts["text"] @ numbers).view(-1, 1, 1, 1).expand_as(noisy)

    model = remembering(network, predict)
    feeder = loader()
    one_hot = torch.eye(4)
    for source in feeder.sources.values():
        for row, key in enumerate((source.target, source.more, source.less)):
            feeder.entries.resident[key.digest] = {"text": one_hot[row : row + 1]}
        for key in source.keep:
            feeder.entries.resident[key.digest] = {"text": one_hot[3:]}
    feeder.entries.resident[EMPTY_TEXT.digest] = {"text": one_hot[:1]}
    for cap in (1, 5):
        assert reach(feeder, model, cap=cap) == pytest.approx((0.5, 1 / 3), rel=1e-4)


def test_dropout_is_of_the_trained_pass_alone() -> None:
    """The latents are those that the adapter draws without anything left out."""
    feeder = loader()
    plain, dropping = (awake(feeder, adapter_settings=each) for each in ({}, {"dropout": 0.5}))
    samples = [one for one in feeder.prepare(0) if one.noise.shape == (4, 8, 8)]
    samples = [one for one in samples if one.strength == 1]
    latents = []
    for tiny in (plain, dropping):
        model = tiny.training.model
        latents.append(model.drawn(model.collate(samples)).noisy)
    assert torch.allclose(*latents, atol=1e-5)
    results = []
    for tiny in (plain, dropping):
        add_gradients(tiny.training, samples, cap=4)
        results.append(gradients(tiny.adapter))
    assert distance(*results) > 0.05


class Remembers(nn.Module):
    """Predicts one number a prompt, of a one-hot text; the change of the first prompt is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.tensor([0.25, 1.0, -0.5, 0.4])
        self.change = nn.Parameter(torch.zeros(4))
        self.strength = 1.0

    @contextmanager
    def at(self, strength: float) -> Any:
        before, self.strength = self.strength, strength
        yield
        self.strength = before

    def off(self) -> AbstractContextManager[None]:
        return self.at(0.0)


def remembering(network: Remembers, predict: Any) -> Model:
    return Model(
        denoiser=network,
        predict=predict,
        embed=lambda conditioning: conditioning,
        prediction="flow",
        precision=torch.float32,
        device=CPU,
        without_adapter=network.off,
        at_strength=network.at,
    )


def test_both_strengths_end_at_the_goal_and_a_kept_prompt_stays() -> None:
    """Target 0.25, more 1, less -0.5, guidance 2: a change of 3 at strength 1; the prompt kept is changed by 0."""
    network = Remembers()
    with torch.no_grad():
        network.change[3] = 1.0

    def predict(_: nn.Module, noisy: Tensor, __: Tensor, texts: Conditioning) -> Tensor:
        numbers = network.base + network.strength * network.change
        return (texts["text"] @ numbers).view(-1, 1, 1, 1).expand_as(noisy)

    model = remembering(network, predict)
    one_hot = torch.eye(4)
    samples = []
    for sample in loader(batch_size=2).prepare(0):
        assert sample.slide is not None
        prompt = 0 if sample.slide.push else 3
        slide = replace(
            sample.slide,
            empty={"text": one_hot[:1]},
            more={"text": one_hot[1:2]} if sample.slide.push else None,
            less={"text": one_hot[2:3]} if sample.slide.push else None,
        )
        samples.append(
            replace(sample, conditioning={"text": one_hot[prompt : prompt + 1]}, slide=slide)
        )
    descent = torch.optim.SGD(network.parameters(), lr=0.05)
    for _ in range(60):
        descent.zero_grad()
        for sample in samples:
            model_losses = model.losses([sample]).sum()
            model_losses.backward()
        descent.step()
    assert network.change.tolist() == pytest.approx([3.0, 0.0, 0.0, 0.0], abs=1e-3)
