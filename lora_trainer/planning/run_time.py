"""The number of steps of a run, how long the run takes, and its disk space. No torch.

Input is the decided settings, the load that fits and the GPU; output a `RunTime`: for each part (start,
caching, steps, validation, sample images, saves) the shortest and the longest time to expect. Also how
often to draw sample images, and how long a run of each priority may take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lora_trainer.config.declare import Precision
from lora_trainer.config.running import RunConfig
from lora_trainer.costs.base_costs import ELEMENT_BYTES
from lora_trainer.lora.adapter_size import total_elements
from lora_trainer.planning.memory import Load
from lora_trainer.planning.optimizer_facts import MASTER_BYTES, state_bytes
from lora_trainer.planning.plan_input import Evaluator, PlanInput
from lora_trainer.planning.step_time import (
    LINK_BYTES_PER_S,
    Range,
    StepTime,
    StepWork,
    forward_work,
    middle,
)

COUNTED_IMAGES = (20, 160)
"""(fewest, most). Fewer than 20 images are trained as long as 20, or they would not be learned at all; more
than 160 as long as 160, as more passes no longer pay."""

VIEWS: Mapping[str, float] = {"style": 0.5}
"""Factor on `train.views`: a style is common to many images, and repeating an image too often teaches the
image itself."""


def run_length(
    *,
    images: int,
    batch_size: int,
    views: int,
    samples: int | None = None,
    repeats: int = 1,
    regularisation: float = 0.0,
    concept: str = "any",
) -> tuple[int, str]:
    """Return the steps of a run over `images` different images, and the sentence that explains them.

    Repeats shift weight, not length. images seen = views x images, with images clamped to `COUNTED_IMAGES`;
    at least one epoch's `samples` (None: `images`) / `repeats`, the fewest repeats of any image, so that each
    image is seen about once. `regularisation` regularisation images are trained for each of these. steps =
    images seen / batch size, rounded up. A `concept` may have fewer views.
    """
    fewest, most = COUNTED_IMAGES
    of_concept = VIEWS.get(concept, 1.0)  # before the clamp: few images get their full steps
    images_seen = round(views * min(max(of_concept * images, fewest), most))
    images_seen = max(images_seen, math.ceil((images if samples is None else samples) / repeats))
    steps = math.ceil(images_seen * (1 + regularisation) / batch_size)
    beside = f", each with {regularisation:g} regularisation images" if regularisation else ""
    whose = f"{concept}: " if concept in VIEWS else ""
    reason = (
        f"{whose}{round(of_concept * views)} views of each of {images} images (counted as at least "
        f"{fewest} and at most {most}): {images_seen:,} images seen, {batch_size} a step{beside}"
    )
    return steps, reason


def disk_bytes(inputs: PlanInput, config: RunConfig, load: Load) -> dict[str, int]:
    """Return bytes of cache, states and exports; one more state and export exist while saving."""
    facts, (width_px, height_px) = inputs.facts, load.bucket_px
    latent_area = (width_px // facts.vae_factor) * (height_px // facts.vae_factor)
    # Each latent is stored as the mean and the deviation of the VAE's distribution, in fp32.
    channels = 2 * facts.latent_channels + (config.data.masks != "none")
    tensors = inputs.costs.adapter_tensors(load.adapter)
    parameters, output = total_elements(tensors), config.output
    conditioning_bytes = inputs.costs.sample_cost(load.workload()).conditioning_bytes
    state = MASTER_BYTES * parameters + sum(state_bytes(tensors, load.optimizer))
    kept_exports = output.keep_last + output.keep_best
    return {
        "cache": inputs.latents * 4 * channels * latent_area
        + (inputs.texts + EMPTY_TEXT) * conditioning_bytes,
        "states": state * (output.keep_states + 1),
        "exports": parameters * ELEMENT_BYTES[output.precision] * (kept_exports + 2),
    }


EMPTY_TEXT = 1
"""In the cache beside the captions, for caption dropout and guidance."""
MOST_HOURS: Mapping[str, float] = {"speed": 1.0, "balanced": 3.0, "quality": 8.0}
"""Longest run with the presets over 20 images, in hours, on the GPU that stands for its tier (docs/plans.md)."""
VALIDATION_QUANTILES = 8
"""Noise levels at which each held-out image is predicted."""
SAMPLES_SHARE, FREE_SAMPLES_S = 0.15, 180.0
"""Sample images may take this share of the time of all steps, or three minutes if that is more."""
FEWER_SAMPLES = (1, 2, 5)
"""Sample images are drawn at every save, every second or every fifth, and always before the first step."""

# Python, torch and the libraries, the plan, the device's context and the first kernels.
START_S: Range = (10.0, 30.0)
# (slow, fast): reading weights from a SATA SSD or an NVMe disk, through mapped files, layer by layer.
DISK_BYTES_PER_S = (0.45e9, 2.5e9)
# Bytes a parameter takes on the disk where a download's size does not tell: bases are released in 16 bits.
RELEASED_BYTES = 2
# FLOPs a pixel of an AutoencoderKL with 83.65 million parameters, by torch's counter; a multiply-add is 2.
VAE_PARAMETERS = 83_653_863
ENCODE_FLOPS_PER_PX, DECODE_FLOPS_PER_PX = 4.4e6, 9.8e6
# Reading, decoding, scaling and checking an image on one core, and writing its cache entries.
PICTURE_S: Range = (0.03, 0.2)
TEXT_FLOPS_PER_PARAMETER = 2
NEWEST_ONLY_S: Range = (0.2, 2.0)
"""Time a save stops the steps: the copy from the device, and the wait for the previous save's writing."""


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """(shortest, longest) seconds of a run by part, in the order of the run."""

    parts: Mapping[str, Range]

    @property
    def low_s(self) -> float:
        return sum(low for low, _ in self.parts.values())

    @property
    def high_s(self) -> float:
        return sum(high for _, high in self.parts.values())

    @property
    def seconds(self) -> float:
        """Expected seconds: the sum of each part's geometric mean."""
        return sum(map(middle, self.parts.values()))


@dataclass(frozen=True, kw_only=True)
class RunTimeInputs(Evaluator):
    """Predicts the time of a run from settings without `auto` and the load that fits."""

    config: RunConfig
    load: Load

    def step(self) -> StepTime:
        """Return the time of a step: the mean over the run's resolutions."""
        times = [self.time(load) for load in self._loads]
        return StepTime(
            low_s=sum(time.low_s for time in times) / len(times),
            high_s=sum(time.high_s for time in times) / len(times),
            note=times[0].note,
        )

    def run_time(self) -> RunTime:
        inputs, train, every = self.inputs, self.config.train, self.config.output.save_every_steps
        step, parameters = self.step(), sum(part.parameters for part in inputs.facts.parts.values())
        size = max(inputs.facts.download_bytes, RELEASED_BYTES * parameters)
        slow, fast = DISK_BYTES_PER_S
        validation = (0.0, 0.0)
        if train.validate_every_steps and inputs.held_out_count:
            times = 1 + math.ceil(train.steps / train.validate_every_steps)
            passes = times * VALIDATION_QUANTILES * inputs.held_out_count / inputs.processes
            validation = _times(passes, self._forward(self.config.data.resolution))
        return RunTime(
            parts={
                "start": (START_S[0] + size / fast, START_S[1] + size / slow),
                "caching": self._caching(),
                "steps": (train.steps * step.low_s, train.steps * step.high_s),
                "validation": validation,
                "sample images": self._samples(self.config.sampling.every_steps),
                "saves": _times(math.ceil(train.steps / every) if every else 1, NEWEST_ONLY_S),
            }
        )

    def sample_interval(self, every_steps: int) -> int:
        """Return after how many steps to draw sample images: `every_steps`, or more where they take too long."""
        step_s = self.config.train.steps * self.step().seconds
        for times in FEWER_SAMPLES:
            drawing_s = middle(self._samples(times * every_steps))
            if drawing_s <= max(FREE_SAMPLES_S, SAMPLES_SHARE * step_s):
                break
        return times * every_steps

    @property
    def _loads(self) -> Iterator[Load]:
        """Yield the load of the largest bucket, and one with that bucket scaled to each other resolution."""
        yield self.load
        own_px = self.config.data.resolution
        largest_px = max(own_px, *self.config.data.more_resolutions, 1)
        for side_px in (own_px, *self.config.data.more_resolutions):
            if side_px != largest_px:
                width_px, height_px = (
                    max(1, length * side_px // largest_px) for length in self.load.bucket_px
                )
                # The smaller bucket keeps the aspect ratio and, as all buckets, is a multiple of the step.
                step_px = self.inputs.facts.bucket_step_px
                sides = (round(length / step_px) * step_px for length in (width_px, height_px))
                width_px, height_px = (max(step_px, side) for side in sides)
                yield replace(self.load, bucket_px=(width_px, height_px))

    def _forward(self, side_px: int) -> Range:
        """Return the time of one prediction of one image without gradients."""
        size = (side_px, side_px)
        load = replace(self.load, bucket_px=size, micro_batch=1)
        time = self.time_of(forward_work(load, self.costs), load.precision)
        return time.low_s, time.high_s

    def _caching(self) -> Range:
        encoder = self.costs.parameters("text_encoder")
        whole = self._plain(
            TEXT_FLOPS_PER_PARAMETER * encoder * self.inputs.facts.max_tokens,
            self.load.text_precision,
        )
        if self.load.text_offload:
            size = encoder * ELEMENT_BYTES[self.load.text_precision]
            slow, fast = LINK_BYTES_PER_S
            # Every text copies the whole encoder again, layer by layer, beside the computation.
            whole = max(whole[0], size / fast), max(whole[1], size / slow)
        pixels = math.prod(self.load.bucket_px)
        picture = _sum(PICTURE_S, self._vae(ENCODE_FLOPS_PER_PX * pixels))
        return _sum(
            _times(self.inputs.latents, picture),
            _times(self.inputs.texts + EMPTY_TEXT, whole),
        )

    def _samples(self, every_steps: int) -> Range:
        """Return the time of all sample images: before the first step, at each interval, at the end."""
        if not every_steps:
            return (0.0, 0.0)
        sampling, side_px = self.config.sampling, self.config.data.resolution
        images = (1 + math.ceil(self.config.train.steps / every_steps)) * self.inputs.prompts
        is_guided = sampling.guidance_scale > 1
        passes = 1 + (is_guided and self.inputs.facts.guidance.two_passes)
        drawing = _times(sampling.steps * passes, self._forward(side_px))
        return _times(images, _sum(drawing, self._vae(DECODE_FLOPS_PER_PX * side_px * side_px)))

    def _vae(self, flops: float) -> Range:
        """Return the time of a VAE pass in fp32; `flops` are of the AutoencoderKL, scaled by parameters."""
        return self._plain(flops * self.costs.parameters("vae") / VAE_PARAMETERS, "fp32")

    def _plain(self, flops: float, precision: Precision) -> Range:
        time = self.time_of(StepWork(flops=flops), precision)
        return time.low_s, time.high_s


def _times(count: float, seconds: Range) -> Range:
    return count * seconds[0], count * seconds[1]


def _sum(one: Range, other: Range) -> Range:
    return one[0] + other[0], one[1] + other[1]
