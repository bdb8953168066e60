"""The samples of each optimizer step: a pure function of its number, prepared ahead by one thread.

Step k takes samples [kB, (k+1)B) of the endless concatenation of shuffled epochs, whatever their
bucket. Order, flip, caption, dropout, latent draw, timestep and noise of a sample come from (seed,
stream, epoch, sample), so the split into micro-batches, a resume or another prefetch depth cannot
change them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lora_trainer.cache.background import prefetched
from lora_trainer.cache.cache_plan import Entries, SampleSource
from lora_trainer.cache.keys import CacheKey
from lora_trainer.common.dist_env import DistEnv, share
from lora_trainer.common.randomness import Stream, draw_choice, draw_seed, draw_uniform, shuffled
from lora_trainer.config.config import DataSettings, ObjectiveSettings
from lora_trainer.dataset.caption_rules import is_dropped, variant_of
from lora_trainer.dataset.epochs import epoch_order, sample_id
from lora_trainer.families.base import Conditioning, Prediction
from lora_trainer.training.batch import Sample
from lora_trainer.training.loss import draw_noise, loss_delta, loss_weight
from lora_trainer.training.timesteps import TIMESTEPS, Level, Levels


@dataclass(frozen=True, kw_only=True)
class TrainingDataLoader:
    """Prepares steps. `sources` maps sample ids to cache entries; `shared_conditioning` is conditioning
    all samples share.

    Of several processes each prepares its share of a step, `dist_env` says which. `regularisation` are the
    samples of which an epoch takes only so many.
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
    regularisation: Sequence[str] = ()
    regularisation_per_epoch: int = 0
    dist_env: DistEnv = field(default_factory=DistEnv)
    _orders: dict[int, list[str]] = field(default_factory=dict)
    _places: dict[int, dict[str, int]] = field(default_factory=dict)

    def sample_at(self, position: int) -> tuple[int, str]:
        """Return (epoch, sample id) at a position of the endless stream of shuffled epochs."""
        epoch, index = divmod(position, self.epoch_length)
        return epoch, self._order(epoch)[index]

    @property
    def epoch_length(self) -> int:
        """How many samples an epoch has."""
        return len(self.sources) - len(self.regularisation) + self.regularisation_per_epoch

    def source(self, sample: str) -> SampleSource:
        """Return where the tensors are of the sample that stands under a name in an epoch."""
        return self.sources[sample_id(sample)]

    def epochs_after(self, steps: int) -> float:
        """Return how many epochs are over after so many steps."""
        return steps * self.batch_size / self.epoch_length

    def prepare(self, step: int) -> tuple[Sample, ...]:
        """Return this process's samples of step `step` (0-based), on the CPU, with all random draws.

        With class preservation each sample is followed by the same one as its class.
        """
        samples: list[Sample] = []
        for epoch, sample in self.share(step):
            prepared = self.prepare_sample(epoch, sample)
            samples += [prepared, *self._preserved(prepared, epoch, sample)]
        return tuple(samples)

    def share(self, step: int) -> list[tuple[int, str]]:
        """Return (epoch, sample id) of each sample of a step that this process computes.

        Samples of one shape stay together, so that they can be done at once.
        """
        first, process = step * self.batch_size, self.dist_env
        positions = [self.sample_at(first + k) for k in range(self.batch_size)]
        if process.count == 1:
            return positions
        # Stable sort: every process finds the same order, so the shares neither overlap nor miss a sample.
        positions.sort(key=lambda at: self.drawn(*at).size_px)
        return [
            positions[index]
            for index in share(len(positions), rank=process.rank, count=process.count)
        ]

    def drawn(self, epoch: int, sample: str) -> SampleSource:
        """Return the sample at the resolution it is trained at in an epoch."""
        first = self.source(sample)
        if not first.others:
            return first
        all_of_it = (first, *first.others)
        return all_of_it[draw_choice(len(all_of_it), self.seed, Stream.RESOLUTION, epoch, sample)]

    def prepare_sample(self, epoch: int, sample: str) -> Sample:
        """Draw all of one sample's randomness for one epoch."""
        source, here = self.drawn(epoch, sample), (epoch, sample)
        flipped = source.mirrored is not None and draw_uniform(self.seed, Stream.FLIP, *here) < 0.5
        # Mirrored images are encoded by themselves: the latents of a mirror are not the mirrored latents.
        entry = self.entries.read(source.mirrored if flipped and source.mirrored else source.plain)
        geometry = source.mirrored_geometry if flipped else source.geometry
        mean, std = entry["mean"], entry["std"]
        # The cache holds the VAE's distribution, not a draw: each epoch sees another latent of the image.
        latents = mean + std * torch.randn(
            mean.shape, generator=self._generator(Stream.LATENT, *here)
        )
        noise = draw_noise(
            (mean.shape[0], mean.shape[1], mean.shape[2]),
            self._generator(Stream.NOISE, *here),
            offset=self.objective.noise_offset,
            octaves=self.objective.multires_noise_iterations,
            discount=self.objective.multires_noise_discount,
        )
        level = self._level(source, *here)
        delta = loss_delta(
            self.objective, time=level.timestep / TIMESTEPS, alpha=level.alpha, sigma=level.sigma
        )
        conditioning = {**self._text(source, *here), **geometry}
        prepared = self._assemble(sample, latents, noise, level, conditioning)
        weight = prepared.weight * self.data.weight_of(source.folder)
        if source.regularisation:
            weight *= self.objective.prior_weight
        return replace(
            prepared,
            weight=weight,
            loss=self.objective.loss,
            delta=delta,
            input_noise=self._perturbed(noise, *here),
            dropout_seed=draw_seed(self.seed, Stream.ADAPTER_DROPOUT, *here),
            mask_weights=self._mask_weights(source.mirrored_mask if flipped else source.mask),
            as_base=self._stays_base(source),
        )

    def _preserved(self, drawn: Sample, epoch: int, sample: str) -> Iterator[Sample]:
        """Yield the sample again as its class, with the same draws; none where the trigger is not said."""
        text = self._class_text(epoch, sample)
        if text is not None:
            yield replace(
                drawn,
                weight=drawn.weight * self.objective.preservation_weight,
                conditioning={**drawn.conditioning, **self.entries.read(text)},
                # The class is kept on the whole image, also where the subject's mask leaves it out.
                mask_weights=None,
                as_base=True,
            )

    def _class_text(self, epoch: int, sample: str) -> CacheKey | None:
        """Return the text with the class in place of the trigger, None where that is not asked for."""
        source = self.source(sample)
        variant = self._variant(source, epoch, sample) if source.of_class else None
        return None if variant is None else source.of_class[variant]

    def _stays_base(self, source: SampleSource) -> bool:
        return source.regularisation and self.objective.prior == "base"

    def _level(self, source: SampleSource, epoch: int, sample: str) -> Level:
        return self.levels.draw(self._uniform(epoch, sample), size_px=source.size_px)

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
                mean = self.entries.read(source.plain)["mean"]
                level = self.levels.at(fraction, size_px=source.size_px)
                name = (sample, int(level.timestep))
                noise = torch.randn(
                    mean.shape, generator=self._generator(Stream.VALIDATION_NOISE, *name)
                )
                conditioning = {**self.entries.read(source.texts[0]), **source.geometry}
                prepared = self._assemble(sample, mean, noise, level, conditioning)
                samples.append(replace(prepared, mask_weights=self._mask_weights(source.mask)))
            batches.append(tuple(samples))
        return batches

    def stream(
        self, first: int, last: int, *, ahead: int
    ) -> AbstractContextManager[Iterator[tuple[Sample, ...]]]:
        """Return a context whose value iterates over steps first..last-1, as `prefetched` says."""

        return prefetched(self.prepare, first, last, ahead=ahead)

    def _assemble(
        self,
        sample: str,
        latents: Tensor,
        noise: Tensor,
        level: Level,
        conditioning: Conditioning,
    ) -> Sample:
        return Sample(
            sample=sample,
            latents=latents,
            noise=noise,
            level=level,
            weight=loss_weight(
                self.objective,
                signal=level.signal,
                sigma=level.sigma,
                prediction=self.prediction,
            ),
            conditioning={**conditioning, **self.shared_conditioning},
        )

    def _uniform(self, epoch: int, sample: str) -> float:
        """Return the number that becomes the timestep, one in each stratum of samples in a row.

        Which stratum follows from the place in the stream, so no split and no batch size changes it.
        """
        uniform, strata = (
            draw_uniform(self.seed, Stream.TIMESTEP, epoch, sample),
            self.objective.timestep_strata,
        )
        if strata == 1:
            return uniform
        position = epoch * self.epoch_length + self._place_in(epoch)[sample]
        window, stratum = divmod(position, strata)
        order = shuffled(map(str, range(strata)), self.seed, Stream.TIMESTEP_STRATUM, window)
        return (int(order[stratum]) + uniform) / strata

    def _perturbed(self, noise: Tensor, epoch: int, sample: str) -> Tensor | None:
        """Return the noise of the input, with more of it than is to be predicted; None: the same."""
        strength = self.objective.input_perturbation
        if strength == 0:
            return None
        generator = self._generator(Stream.INPUT_PERTURBATION, epoch, sample)
        return noise + strength * torch.randn(noise.shape, generator=generator)

    def _mask_weights(self, mask: CacheKey | None) -> Tensor | None:
        """Return how much each latent's error counts, by the mask and the weight of the unmasked rest."""
        if mask is None:
            return None
        rest = self.data.mask_background
        weights = rest + (1.0 - rest) * self.entries.read(mask)["mask"]
        # Mean 1, so that a small subject does not lower the image's share of the step.
        return weights / weights.mean()

    def _text(self, source: SampleSource, epoch: int, sample: str) -> Conditioning:
        return self.entries.read(self._text_key(source, epoch, sample))

    def _text_key(self, source: SampleSource, epoch: int, sample: str) -> CacheKey:
        variant = self._variant(source, epoch, sample)
        return self.empty_text if variant is None else source.texts[variant]

    def _variant(self, source: SampleSource, epoch: int, sample: str) -> int | None:
        """Return which of its texts a sample is trained with; None: the empty one."""
        settings = self.data.of_folder(source.folder)
        if is_dropped(sample, settings=settings, seed=self.seed, epoch=epoch):
            return None
        # The first text is the plain caption of validation; training draws among the variants after it.
        drawn = range(len(source.texts))[1:] or range(1)
        return drawn[variant_of(sample, count=len(drawn), seed=self.seed, epoch=epoch)]

    def _order(self, epoch: int) -> list[str]:
        order = self._orders.get(epoch)
        if order is None:
            order = epoch_order(
                self.sources.keys() - set(self.regularisation),
                self.regularisation,
                count=self.regularisation_per_epoch,
                seed=self.seed,
                epoch=epoch,
            )
            if len(self._orders) > 2:  # old epochs are never asked for again
                self._orders.clear()
            self._orders[epoch] = order
        return order

    def _place_in(self, epoch: int) -> dict[str, int]:
        """Return where in an epoch each sample comes: found once, not searched for by every sample."""
        places = self._places.get(epoch)
        if places is None:
            places = {sample: position for position, sample in enumerate(self._order(epoch))}
            if len(self._places) > 2:
                self._places.clear()
            self._places[epoch] = places
        return places

    def _generator(self, stream: Stream, *counters: int | str) -> torch.Generator:
        return torch.Generator().manual_seed(draw_seed(self.seed, stream, *counters))
