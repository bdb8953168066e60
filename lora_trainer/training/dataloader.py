"""The samples of each optimizer step: a pure function of its number, prepared ahead by one thread.

Step k takes samples [kB, (k+1)B) of the endless concatenation of shuffled epochs, whatever their
bucket. Order, flip, caption, dropout, latent draw, timestep and noise of a sample come from (seed,
stream, epoch, sample), so the split into micro-batches, a resume or another prefetch depth cannot
change them. The samples hold every random draw already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from lora_trainer.cache.background import prefetch_map
from lora_trainer.cache.cache_plan import Entries, SampleSource, SampleView
from lora_trainer.cache.store import CacheKey
from lora_trainer.common.processes import DistEnv, share
from lora_trainer.common.randomness import Stream, draw_choice, draw_seed, draw_uniform, shuffled
from lora_trainer.config.inputs import DataSettings
from lora_trainer.config.learning import ObjectiveSettings
from lora_trainer.dataset.records import epoch_order, sample_id
from lora_trainer.families.base.facts import Conditioning, Prediction
from lora_trainer.families.base.noise_levels import Level, Levels
from lora_trainer.families.base.references import references_in, with_references
from lora_trainer.training.noise import contrast, draw_noise, loss_delta, loss_weight


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample ready for the device: latents and noise float32 [C, H, W], conditioning of batch 1.

    `input_noise` is the noise in the input where it is not the noise to predict (noise perturbation).
    `loss` and `delta` choose the error function (config/losses.py). `mask_weights` [1, H, W] weigh the error by
    position, with a mean of 1; None where all positions count alike. `dropout_seed` names the masks of the
    adapter's dropout. `as_base`: the target is the base model's prediction without the adapter. `contrast` is the
    scale g of the contrastive target, `empty_conditioning` the empty prompt that it needs (None: not needed).
    `strength` is the strength of the adapter. `slide` is of a sample of a slider: it has no image, so that its
    `latents` are zeros.
    """

    sample: str
    latents: Tensor
    noise: Tensor
    level: Level
    weight: float
    conditioning: Conditioning
    input_noise: Tensor | None = None
    loss: str = "mse"
    delta: float = 1.0
    dropout_seed: int = 0
    mask_weights: Tensor | None = None
    as_base: bool = False
    contrast: float = 1.0
    empty_conditioning: Conditioning | None = None
    strength: float = 1.0
    slide: Slide | None = None


@dataclass(frozen=True, kw_only=True)
class Slide:
    """How a sample of a slider gets its noisy latents, and what is added to the base's prediction as its target.

    The latents are denoised from the sample's noise along the levels of `path` to the sample's own, by its prompt and
    guidance of this scale against the prompt `empty` (1: no second pass). The target is moved by `push` times the
    prediction for `more` minus that for `less`, both of the base; None and 0 for a prompt that is kept.
    """

    path: tuple[Level, ...]
    guidance_scale: float
    empty: Conditioning
    push: float = 0.0
    more: Conditioning | None = None
    less: Conditioning | None = None


class Feeder(Protocol):
    """What the loop asks of the samples of a run."""

    def stream(self, first: int, last: int) -> AbstractContextManager[Iterator[tuple[Sample, ...]]]:
        """Return a context whose value iterates over this process's samples of steps first..last-1."""

    def epochs_after(self, steps: int) -> float:
        """Return how many epochs are over after so many steps."""


def split(
    samples: Sequence[Sample],
    *,
    cap: int,
    images_at_once: Mapping[tuple[int, int], int] = MappingProxyType({}),
    group_key: Callable[[Conditioning], int] = lambda _: 0,
) -> list[tuple[Sample, ...]]:
    """Split samples by shape, then into micro-batches of at most `cap`; order within a shape is kept.

    `images_at_once` are lower caps by (height, width) of the latents: those of large buckets. Samples with
    reference images of different sizes, those whose conditioning has different `group_key`s, and those of different
    strengths of the adapter, are split too.
    """
    # A dict keeps its order: micro-batches, and with them the order in which gradients are summed, are those of the
    # samples.
    by_shape: dict[tuple[torch.Size, tuple[torch.Size, ...], int, float], list[Sample]] = {}
    for sample in samples:
        references = tuple(latents.shape for latents in references_in(sample.conditioning))
        group = group_key(sample.conditioning)
        key = (sample.latents.shape, references, group, sample.strength)
        by_shape.setdefault(key, []).append(sample)
    micro_batches: list[tuple[Sample, ...]] = []
    for (shape, *_), alike in by_shape.items():
        size = min(cap, images_at_once.get((shape[-2], shape[-1]), cap))
        micro_batches += [tuple(alike[at : at + size]) for at in range(0, len(alike), size)]
    return micro_batches


def in_stratum(uniform: float, *, position: int, strata: int, seed: int) -> float:
    """Return a uniform number in the stratum of a place in the stream, of `strata` equal ones."""
    window, stratum = divmod(position, strata)
    order = shuffled(map(str, range(strata)), seed, Stream.TIMESTEP_STRATUM, window)
    return (int(order[stratum]) + uniform) / strata


@dataclass(frozen=True, kw_only=True)
class TrainingDataLoader:
    """Prepares steps. `sources` maps sample ids to cache entries; `shared_conditioning` is conditioning
    all samples share.

    Of several processes each prepares its share of a step, `dist_env` says which. `regularisation` are the
    samples of which an epoch takes only so many. `draws_latents`: an epoch draws latents from the cached posterior,
    else it takes the mean. `reference_scale` multiplies the latents of references.
    """

    sources: Mapping[str, SampleSource]
    empty_text: CacheKey
    entries: Entries
    levels: Levels
    prediction: Prediction
    shared_conditioning: Conditioning
    data: DataSettings
    objective: ObjectiveSettings
    batch_size: int
    seed: int
    draws_latents: bool
    reference_scale: float = 1.0
    regularisation: Sequence[str] = ()
    regularisation_per_epoch: int = 0
    dist_env: DistEnv = field(default_factory=DistEnv)
    _orders: dict[int, tuple[list[str], dict[str, int]]] = field(default_factory=dict)

    def sample_at(self, position: int) -> tuple[int, str]:
        """Return (epoch, sample id) at a position of the endless stream of shuffled epochs."""
        epoch, index = divmod(position, self.epoch_length)
        return epoch, self._order(epoch)[0][index]

    @property
    def epoch_length(self) -> int:
        """How many samples an epoch has."""
        return len(self.sources) - len(self.regularisation) + self.regularisation_per_epoch

    def epochs_after(self, steps: int) -> float:
        """Return how many epochs are over after so many steps."""
        return steps * self.batch_size / self.epoch_length

    def prepare(self, step: int) -> tuple[Sample, ...]:
        """Return this process's samples of step `step` (0-based), on the CPU, with all random draws.

        With class preservation each sample whose text says the trigger is followed by itself as its class,
        with the same draws. Of a slider each is followed by the other image of its pair, with the same draws too.
        """
        samples: list[Sample] = []
        for epoch, name in self.share(step):
            source = self.sources[sample_id(name)]
            variant = self._variant(source, epoch, name) if source.of_class else None
            class_text = None if variant is None else self._class_text(variant, epoch, name)
            for sample in self._pair(epoch, name):
                samples.append(sample)
                if class_text is not None:
                    as_class = replace(
                        sample,
                        weight=sample.weight * self.objective.preservation_weight,
                        conditioning={**sample.conditioning, **self.entries.read(class_text)},
                        # The class is kept on the whole image, also where the subject's mask leaves it out.
                        mask_weights=None,
                        as_base=True,
                    )
                    samples.append(as_class)
        return tuple(samples)

    def _pair(self, epoch: int, sample: str) -> tuple[Sample, ...]:
        """Return a sample, and of a slider the other image of its pair at its own strength.

        The loss of a pair is the mean of the two.
        """
        first, opposite = (
            self.prepare_sample(epoch, sample),
            self.sources[sample_id(sample)].opposite,
        )
        if opposite is None:
            return (first,)
        # It has as many sizes, and the same is drawn.
        view = self._view(self._at_size(opposite, epoch, sample), epoch, sample)
        empty = first.empty_conditioning
        second = replace(
            first,
            strength=opposite.strength,
            conditioning={**first.conditioning, **view.geometry},
            empty_conditioning=None if empty is None else {**empty, **view.geometry},
            **self._noised(view, epoch, sample),
        )
        return tuple(replace(one, weight=one.weight / 2) for one in (first, second))

    def share(self, step: int) -> list[tuple[int, str]]:
        """Return (epoch, sample id) of each sample of a step that this process computes.

        Samples of one shape stay together, so that they can be done at once.
        """
        first, process = step * self.batch_size, self.dist_env
        positions = [self.sample_at(first + k) for k in range(self.batch_size)]
        if process.count == 1:
            return positions
        # Stable sort: every process finds the same order, so the shares neither overlap nor miss a sample.
        sources = {at: self.drawn(*at) for at in positions}
        positions.sort(key=lambda at: (sources[at].size_px, sources[at].references_px))
        return [
            positions[index]
            for index in share(len(positions), rank=process.rank, count=process.count)
        ]

    def drawn(self, epoch: int, sample: str) -> SampleSource:
        """Return the sample at the resolution it is trained at in an epoch."""
        return self._at_size(self.sources[sample_id(sample)], epoch, sample)

    def _at_size(self, first: SampleSource, epoch: int, sample: str) -> SampleSource:
        if not first.others:
            return first
        all_of_it = (first, *first.others)
        return all_of_it[draw_choice(len(all_of_it), self.seed, Stream.RESOLUTION, epoch, sample)]

    def prepare_sample(self, epoch: int, sample: str) -> Sample:
        """Draw all of one sample's randomness for one epoch."""
        source, here, objective = self.drawn(epoch, sample), (epoch, sample), self.objective
        view = self._view(source, epoch, sample)
        level = self.levels.draw(self._uniform(epoch, sample), size_px=source.size_px)
        weight = loss_weight(objective, level, self.prediction)
        weight *= self.data.weight_of(source.folder)
        if source.regularisation:
            weight *= objective.prior_weight
        variant = self._variant(source, epoch, sample)
        drops = self._drops_references(source, epoch, sample)
        text = self._text(source, view, variant, drops_references=drops)
        empty = self._text(source, view, None, drops_references=drops)
        return Sample(
            sample=sample,
            level=level,
            weight=weight,
            conditioning=self._conditioning(text, view, drops_references=drops),
            loss=objective.loss,
            delta=loss_delta(objective, level),
            dropout_seed=draw_seed(self.seed, Stream.ADAPTER_DROPOUT, *here),
            strength=source.strength,
            **self._noised(view, epoch, sample),
            as_base=source.regularisation and objective.prior == "base",
            contrast=contrast(objective, level),
            empty_conditioning=self._conditioning(empty, view, drops_references=drops)
            if objective.contrast_scale != 1
            else None,
        )

    def _noised(self, view: SampleView, epoch: int, sample: str) -> dict[str, Any]:
        """Return the `latents`, `noise`, `input_noise` and `mask_weights` of a sample."""
        here, objective = (epoch, sample), self.objective
        entry = self.entries.read(view.latents)
        mean, std = entry["mean"], entry["std"]
        # The cache holds the VAE's distribution, not a draw: each epoch sees another latent of the image.
        latents = mean
        if self.draws_latents:
            latents = mean + std * self._randn(mean, Stream.LATENT, *here)
        noise = draw_noise(mean.shape, self._generator(Stream.NOISE, *here), objective)
        # The input may have more noise than is to be predicted.
        perturbation, input_noise = objective.input_perturbation, None
        if perturbation:
            other_noise = self._randn(noise, Stream.INPUT_PERTURBATION, *here)
            input_noise = noise + perturbation * other_noise
        return {
            "latents": latents,
            "noise": noise,
            "input_noise": input_noise,
            "mask_weights": self._mask_weights(view.mask),
        }

    def validation(
        self, keys: Sequence[tuple[str, SampleSource]], *, quantiles: int
    ) -> list[tuple[Sample, ...]]:
        """Return the held-out samples at each quantile of the timesteps, with fixed noise and captions.

        Their loss is the squared error whatever `objective.loss` is, so that runs can be compared.
        """
        batches = []
        for quantile in range(quantiles):
            # The middle of each slice: at the ends, no noise and nothing but noise, no adapter makes a difference.
            fraction = (quantile + 0.5) / quantiles
            samples = []
            for sample, source in keys:
                # The mean and not a draw, which would add its own noise to the comparison of two steps.
                view = source.views[0]
                mean = self.entries.read(view.latents)["mean"]
                level = self.levels.at(fraction)
                name = (sample, int(level.timestep))
                samples.append(
                    Sample(
                        sample=sample,
                        latents=mean,
                        noise=self._randn(mean, Stream.VALIDATION_NOISE, *name),
                        level=level,
                        weight=loss_weight(self.objective, level, self.prediction),
                        conditioning=self._conditioning(self._text(source, view, 0), view),
                        mask_weights=self._mask_weights(view.mask),
                        strength=source.strength,
                    )
                )
            batches.append(tuple(samples))
        return batches

    def stream(self, first: int, last: int) -> AbstractContextManager[Iterator[tuple[Sample, ...]]]:
        """Return a context whose value iterates over steps first..last-1, as `prefetch_map` says."""
        # One more than are ready is in the works.
        most_ahead = self.data.prefetch_steps + 1
        return prefetch_map(self.prepare, range(first, last), threads=1, most_ahead=most_ahead)

    def _uniform(self, epoch: int, sample: str) -> float:
        """Return the number that becomes the timestep, one in each stratum of samples in a row.

        Which stratum follows from the place in the stream, so no split and no batch size changes it.
        """
        uniform = draw_uniform(self.seed, Stream.TIMESTEP, epoch, sample)
        strata = self.objective.timestep_strata
        if strata == 1:
            return uniform
        position = epoch * self.epoch_length + self._order(epoch)[1][sample]
        return in_stratum(uniform, position=position, strata=strata, seed=self.seed)

    def _view(self, source: SampleSource, epoch: int, sample: str) -> SampleView:
        # Mirrored images are encoded by themselves: the latents of a mirror are not the mirrored latents.
        flipped = (
            len(source.views) > 1 and draw_uniform(self.seed, Stream.FLIP, epoch, sample) < 0.5
        )
        return source.views[int(flipped)]

    def _text(
        self,
        source: SampleSource,
        view: SampleView,
        variant: int | None,
        *,
        drops_references: bool = False,
    ) -> CacheKey:
        """Return the key of one of a sample's texts, None: the empty one, read with the references that it has."""
        seeing = None if drops_references else view.seeing
        if variant is None:
            return self.empty_text if seeing is None else seeing.empty
        return (source if seeing is None else seeing).texts[variant]

    def _class_text(self, variant: int, epoch: int, sample: str) -> CacheKey | None:
        """Return the key of a text with the class word in place of the trigger, None for one without the trigger."""
        source = self.drawn(epoch, sample)
        drops = self._drops_references(source, epoch, sample)
        seeing = None if drops else self._view(source, epoch, sample).seeing
        return (source if seeing is None else seeing).of_class[variant]

    def _conditioning(
        self, text: CacheKey, view: SampleView, *, drops_references: bool = False
    ) -> Conditioning:
        # The mean of the posterior, as the pipelines that edit take it: a draw would add noise to what is known.
        references = [self.entries.read(key)["mean"] for key in view.references]
        return {
            **self.entries.read(text),
            **view.geometry,
            **self.shared_conditioning,
            **with_references([] if drops_references else references, scale=self.reference_scale),
        }

    def _drops_references(self, source: SampleSource, epoch: int, sample: str) -> bool:
        """Return whether a sample is trained without its reference images; its caption is drawn apart."""
        share = self.data.reference_dropout
        if not share or not source.references_px:
            return False
        return draw_uniform(self.seed, Stream.REFERENCE_DROPOUT, epoch, sample) < share

    def _mask_weights(self, mask: CacheKey | None) -> Tensor | None:
        """Return how much each latent's error counts, by the mask and the weight of the unmasked rest."""
        if mask is None:
            return None
        rest = self.data.mask_background
        weights = rest + (1.0 - rest) * self.entries.read(mask)["mask"]
        # Mean 1, so that a small subject does not lower the image's share of the step.
        return weights / weights.mean()

    def _variant(self, source: SampleSource, epoch: int, sample: str) -> int | None:
        """Return which of its texts a sample is trained with; None: the empty one."""
        settings = self.data.of_folder(source.folder)
        every = settings.caption_dropout_every_epochs
        draw = draw_uniform(self.seed, Stream.CAPTION_DROPOUT, epoch, sample)
        if (every and (epoch + 1) % every == 0) or draw < settings.caption_dropout:
            return None
        # The first text is the plain caption of validation; training draws among the variants after it.
        drawn = range(len(source.texts))[1:] or range(1)
        return drawn[draw_choice(len(drawn), self.seed, Stream.CAPTION_VARIANT, epoch, sample)]

    def _order(self, epoch: int) -> tuple[list[str], dict[str, int]]:
        """Return the samples of an epoch in their order, and the place of each, found once an epoch."""
        if epoch not in self._orders:
            order = epoch_order(
                self.sources.keys() - set(self.regularisation),
                self.regularisation,
                count=self.regularisation_per_epoch,
                seed=self.seed,
                epoch=epoch,
            )
            if len(self._orders) > 2:  # old epochs are never asked for again
                self._orders.clear()
            self._orders[epoch] = order, {name: place for place, name in enumerate(order)}
        return self._orders[epoch]

    def _randn(self, like: Tensor, stream: Stream, *counters: int | str) -> Tensor:
        return torch.randn(like.shape, generator=self._generator(stream, *counters))

    def _generator(self, stream: Stream, *counters: int | str) -> torch.Generator:
        return torch.Generator().manual_seed(draw_seed(self.seed, stream, *counters))
