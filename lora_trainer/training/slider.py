"""The samples of a slider: a pure function of the step, without images.

Step k takes draws [kB, (k+1)B) of the endless concatenation of shuffled epochs; an epoch has every direction once. A
draw has a size, a noise, a noise level and a prompt to keep, by (seed, stream, epoch, direction). It becomes a sample
with the adapter at strength 1 and one at -1, so that both mean the same change with another sign, and two more where a
prompt is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from torch import Generator

from lora_trainer.cache.background import prefetch_map
from lora_trainer.cache.cache_plan import DirectionSource, Entries
from lora_trainer.cache.store import CacheKey
from lora_trainer.common.processes import DistEnv, share
from lora_trainer.common.randomness import Stream, draw_choice, draw_seed, draw_uniform, shuffled
from lora_trainer.config.learning import ObjectiveSettings, SliderSettings
from lora_trainer.families.base.facts import BaseFacts, Conditioning
from lora_trainer.families.base.noise_levels import Levels
from lora_trainer.training.dataloader import Sample, Slide, in_stratum, split
from lora_trainer.training.loss import Model
from lora_trainer.training.noise import draw_noise, loss_delta, loss_weight

# Both in every step. A half each: the loss of a draw is the mean of the two.
STRENGTHS = (1.0, -1.0)
# Draws by which a finished slider is measured.
MEASURED_DRAWS = 8


@dataclass(frozen=True, kw_only=True)
class SliderDataLoader:
    """Prepares the steps of a slider; `shared_conditioning` is conditioning that all samples share.

    Of several processes each prepares its share of a step, `dist_env` says which.
    """

    sources: Mapping[str, DirectionSource]
    empty_text: CacheKey
    entries: Entries
    levels: Levels
    facts: BaseFacts
    shared_conditioning: Conditioning
    objective: ObjectiveSettings
    slider: SliderSettings
    batch_size: int
    seed: int
    prefetch_steps: int
    dist_env: DistEnv = field(default_factory=DistEnv)

    def epochs_after(self, steps: int) -> float:
        """Return how many epochs are over after so many steps."""
        return steps * self.batch_size / len(self.sources)

    def stream(self, first: int, last: int) -> AbstractContextManager[Iterator[tuple[Sample, ...]]]:
        """Return a context whose value iterates over steps first..last-1, as `prefetch_map` says."""
        most_ahead = self.prefetch_steps + 1
        return prefetch_map(self.prepare, range(first, last), threads=1, most_ahead=most_ahead)

    def prepare(self, step: int) -> tuple[Sample, ...]:
        """Return this process's samples of step `step` (0-based), on the CPU, with all random draws.

        Samples of a strength are together, so that they can be done at once.
        """
        first, process = step * self.batch_size, self.dist_env
        mine = share(self.batch_size, rank=process.rank, count=process.count)
        drawn = [sample for index in mine for sample in self.draw(first + index)]
        return tuple(_at(strength, sample) for strength in STRENGTHS for sample in drawn)

    def draw(self, position: int) -> Iterator[Sample]:
        """Yield the samples of a place in the stream at strength 1, with all random draws."""
        epoch, index = divmod(position, len(self.sources))
        name = shuffled(self.sources, self.seed, Stream.ORDER, epoch)[index]
        source, here, objective = self.sources[name], (epoch, name), self.objective
        size = draw_choice(len(source.sizes), self.seed, Stream.RESOLUTION, *here)
        size_px, geometry = source.sizes[size]
        uniform = draw_uniform(self.seed, Stream.TIMESTEP, *here)
        if (strata := objective.timestep_strata) > 1:
            uniform = in_stratum(uniform, position=position, strata=strata, seed=self.seed)
        level = self.levels.draw(uniform, size_px=size_px)
        factor = self.facts.vae_factor
        shape = (self.facts.latent_channels, size_px[1] // factor, size_px[0] // factor)
        generator = Generator().manual_seed(draw_seed(self.seed, Stream.NOISE, *here))
        noise = draw_noise(shape, generator, objective)

        def texts(key: CacheKey) -> Conditioning:
            return {**self.entries.read(key), **geometry, **self.shared_conditioning}

        weight = loss_weight(objective, level, self.facts.release.prediction) * source.weight / 2
        two_passes = self.facts.guidance.two_passes
        path = Slide(
            path=self.levels.towards(level, self.slider.denoising_steps, size_px=size_px),
            guidance_scale=self.slider.denoising_guidance if two_passes else 1.0,
            empty=texts(self.empty_text),
        )
        moved = Sample(
            sample=name,
            latents=noise.new_zeros(noise.shape),
            noise=noise,
            level=level,
            weight=weight,
            conditioning=texts(source.target),
            loss=objective.loss,
            delta=loss_delta(objective, level),
            dropout_seed=draw_seed(self.seed, Stream.ADAPTER_DROPOUT, *here),
            as_base=True,
            slide=replace(
                path,
                push=self.slider.guidance,
                more=texts(source.more),
                less=texts(source.less),
            ),
        )
        yield moved
        if source.keep and self.slider.keep_weight:
            kept = draw_choice(len(source.keep), self.seed, Stream.KEPT_PROMPT, *here)
            yield replace(
                moved,
                weight=weight * self.slider.keep_weight,
                conditioning=texts(source.keep[kept]),
                slide=path,
            )


def reach(feeder: SliderDataLoader, model: Model, *, cap: int) -> tuple[float, float]:
    """Return which share of the way to their goals the strengths 1 and -1 go, on the first draws of a slider's stream.

    At most `cap` samples are in one pass. 1 is all the way; equal numbers are equal changes with another sign.
    """
    moved = [
        sample
        for position in range(MEASURED_DRAWS)
        for sample in feeder.draw(position)
        if sample.slide is not None and sample.slide.push
    ]
    shares = []
    for strength in STRENGTHS:
        passes = split([_at(strength, sample) for sample in moved], cap=cap)
        found, whole = zip(*map(model.reach, passes), strict=True)
        shares.append(sum(found) / sum(whole) if any(whole) else 0.0)
    return shares[0], shares[1]


def _at(strength: float, sample: Sample) -> Sample:
    """Return a sample with the adapter at a strength, which moves the target by as much."""
    assert sample.slide is not None
    push = strength * sample.slide.push
    return replace(sample, strength=strength, slide=replace(sample.slide, push=push))
