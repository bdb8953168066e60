"""The number of steps of a run, how long the run takes, and its disk space. No torch.

Input is the decided settings, the load that fits and the GPU; output a `RunTime`: for each part (start,
caching, steps, validation, sample images, saves) the shortest and the longest time to expect. Also a
`Length` with the sentence that explains its steps, how often to draw sample images, and how long a run of
each priority may take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lora_trainer.config.choices import VIEWS
from lora_trainer.config.config import Precision, RunConfig
from lora_trainer.families.base import BaseFacts
from lora_trainer.hardware.machine import Gpu
from lora_trainer.planning.loads import Load, RememberedCosts
from lora_trainer.planning.step_time import (
    LINK_BYTES_PER_S,
    StepTime,
    StepWork,
    forward_work,
    step_time,
    step_work,
)
from lora_trainer.planning.weight_bytes import ELEMENT_BYTES, MASTER_BYTES

COUNTED_IMAGES = (20, 160)
"""(fewest, most). Fewer than 20 images are trained as long as 20, or they would not be learned at all; more
than 160 as long as 160, as more passes no longer pay."""


@dataclass(frozen=True, kw_only=True)
class Length:
    """Optimizer steps and the sentence that explains them."""

    steps: int
    reason: str


def run_length(
    *,
    images: int,
    batch_size: int,
    views: int,
    samples: int | None = None,
    repeats: int = 1,
    regularisation: float = 0.0,
    concept: str = "any",
) -> Length:
    """Return the steps of a run over `images` different images; repeats shift weight, not length.

    images seen = views x images, with images clamped to `COUNTED_IMAGES`; at least one epoch's `samples`
    (None: `images`) / `repeats`, the fewest repeats of any image, so that each image is seen about once.
    `regularisation` regularisation images are trained for each of these. steps = images seen / batch size,
    rounded up. A `concept` may have fewer views.
    """
    fewest, most = COUNTED_IMAGES
    of_concept = VIEWS.get(
        concept, 1.0
    )  # applied before the clamp: few images get their full steps
    images_seen = round(views * min(max(of_concept * images, fewest), most))
    images_seen = max(images_seen, math.ceil((images if samples is None else samples) / repeats))
    steps = math.ceil(images_seen * (1 + regularisation) / batch_size)
    beside = f", each with {regularisation:g} regularisation images" if regularisation else ""
    whose = f"{concept}: " if concept in VIEWS else ""
    return Length(
        steps=steps,
        reason=(
            f"{whose}{round(of_concept * views)} views of each of {images} images (counted as at least "
            f"{fewest} and at most {most}): {images_seen:,} images seen, {batch_size} a step{beside}"
        ),
    )


@dataclass(frozen=True, kw_only=True)
class DiskUse:
    """Counts and sizes that decide the disk space of a run.

    `latents` counts a mirrored image twice; `texts` counts different captions, with the empty one.
    `latent_elements` and `mask_elements` are of the largest image, `state_bytes` the optimizer's states.
    """

    latents: int
    texts: int
    latent_elements: int
    conditioning_bytes: int
    adapter_parameters: int
    state_bytes: int
    export_precision: Precision
    keep_states: int
    keep_exports: int
    mask_elements: int = 0


def disk_bytes(use: DiskUse) -> dict[str, int]:
    """Return bytes of cache, states and exports; one more state and export exist while saving."""
    # Each latent is stored as the mean and the deviation of the VAE's distribution, in fp32.
    latents = use.latents * 4 * (2 * use.latent_elements + use.mask_elements)
    texts = use.texts * use.conditioning_bytes
    state = MASTER_BYTES * use.adapter_parameters + use.state_bytes
    export = use.adapter_parameters * ELEMENT_BYTES[use.export_precision]
    return {
        "cache": latents + texts,
        "states": state * (use.keep_states + 1),
        "exports": export * (use.keep_exports + 2),
    }


MOST_HOURS: Mapping[str, float] = {"speed": 1.0, "balanced": 3.0, "quality": 8.0}
"""Longest run with the presets over 20 images, in hours, on the GPU that stands for its tier (docs/plans.md)."""
VALIDATION_QUANTILES = 8
"""Noise levels at which each held-out image is predicted."""
SAMPLES_SHARE, FREE_SAMPLES_S = 0.15, 180.0
"""Sample images may take this share of the time of all steps, or three minutes if that is more."""
FEWER_SAMPLES = (1, 2, 5)
"""Sample images are drawn at every save, every second or every fifth, and always before the first step."""

Range = tuple[float, float]
"""Seconds: the shortest and the longest to expect."""
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
        return sum(math.sqrt(low * high) for low, high in self.parts.values())


@dataclass(frozen=True, kw_only=True)
class RunTimeInputs:
    """Predicts the time of a run from settings without `auto`, the load that fits, and counts of the data.

    `held_out` counts images, `latents` and `texts` the cache entries to encode, `prompts` the sample
    images of one step; `pinnable_bytes` is the host memory each process may pin (None: no limit).
    """

    config: RunConfig
    load: Load
    facts: BaseFacts
    costs: RememberedCosts
    gpu: Gpu | None
    pinnable_bytes: int | None
    processes: int
    held_out: int
    latents: int
    texts: int
    prompts: int

    def step(self) -> StepTime:
        """Return the time of a step: the mean over the run's resolutions."""
        batch_size = math.ceil(self.config.train.batch_size / self.processes)
        times = []
        for load in self._loads:
            work = step_work(
                load,
                facts=self.facts,
                costs=self.costs,
                batch_size=batch_size,
                pinnable_bytes=self.pinnable_bytes,
            )
            times.append(self._step_time(work, load.precision))
        return StepTime(
            low_s=sum(time.low_s for time in times) / len(times),
            high_s=sum(time.high_s for time in times) / len(times),
            note=times[0].note,
        )

    def run_time(self) -> RunTime:
        step, steps = self.step(), self.config.train.steps
        return RunTime(
            parts={
                "start": self._start(),
                "caching": self._caching(),
                "steps": (steps * step.low_s, steps * step.high_s),
                "validation": self._validation(),
                "sample images": self._samples(self.config.sampling.every_steps),
                "saves": _times(self._saves(), NEWEST_ONLY_S),
            }
        )

    def sample_interval(self, every_steps: int) -> int:
        """Return after how many steps to draw sample images: `every_steps`, or more where they take too long."""
        step_s = self.config.train.steps * self.step().seconds
        for times in FEWER_SAMPLES:
            low, high = self._samples(times * every_steps)
            if math.sqrt(low * high) <= max(FREE_SAMPLES_S, SAMPLES_SHARE * step_s):
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
                step_px = self.facts.bucket_step_px
                sides = (round(length / step_px) * step_px for length in (width_px, height_px))
                width_px, height_px = (max(step_px, side) for side in sides)
                yield replace(self.load, bucket_px=(width_px, height_px))

    def _step_time(self, work: StepWork, precision: Precision) -> StepTime:
        threads = self.config.hardware.threads
        return step_time(work, gpu=self.gpu, threads=threads, precision=precision)

    def _forward(self, side_px: int) -> Range:
        """Return the time of one prediction of one image without gradients."""
        size = (side_px, side_px)
        load = replace(self.load, bucket_px=size, micro_batch=1)
        work = forward_work(load, facts=self.facts, costs=self.costs)
        time = self._step_time(work, load.precision)
        return time.low_s, time.high_s

    def _start(self) -> Range:
        parameters = sum(part.parameters for part in self.facts.parts.values())
        size = max(self.facts.download_bytes, RELEASED_BYTES * parameters)
        slow, fast = DISK_BYTES_PER_S
        return START_S[0] + size / fast, START_S[1] + size / slow

    def _caching(self) -> Range:
        encoder = self.facts.parts["text_encoder"].parameters
        whole = self._plain(
            TEXT_FLOPS_PER_PARAMETER * encoder * self.facts.max_tokens, self.load.text_precision
        )
        if self.load.text_offload:
            size = encoder * ELEMENT_BYTES[self.load.text_precision]
            slow, fast = LINK_BYTES_PER_S
            # Every text copies the whole encoder again, layer by layer, beside the computation.
            whole = max(whole[0], size / fast), max(whole[1], size / slow)
        pixels = math.prod(self.load.bucket_px)
        picture = _sum(PICTURE_S, self._vae(ENCODE_FLOPS_PER_PX * pixels))
        return _sum(_times(self.latents, picture), _times(self.texts, whole))

    def _validation(self) -> Range:
        every = self.config.train.validate_every_steps
        if not (every and self.held_out):
            return (0.0, 0.0)
        steps = self.config.train.steps
        times = 1 + math.ceil(steps / every)
        passes = times * VALIDATION_QUANTILES * self.held_out / self.processes
        return _times(passes, self._forward(self.config.data.resolution))

    def _samples(self, every_steps: int) -> Range:
        """Return the time of all sample images: before the first step, at each interval, at the end."""
        if not every_steps:
            return (0.0, 0.0)
        sampling, side_px = self.config.sampling, self.config.data.resolution
        images = (1 + math.ceil(self.config.train.steps / every_steps)) * self.prompts
        is_guided = sampling.guidance_scale > 1
        passes = 1 + (is_guided and self.facts.guidance.two_passes)
        drawing = _times(sampling.steps * passes, self._forward(side_px))
        return _times(images, _sum(drawing, self._vae(DECODE_FLOPS_PER_PX * side_px * side_px)))

    def _saves(self) -> int:
        every = self.config.output.save_every_steps
        return math.ceil(self.config.train.steps / every) if every else 1

    def _vae(self, flops: float) -> Range:
        """Return the time of a VAE pass in fp32; `flops` are of the AutoencoderKL, scaled by parameters."""
        return self._plain(flops * self.facts.parts["vae"].parameters / VAE_PARAMETERS, "fp32")

    def _plain(self, flops: float, precision: Precision) -> Range:
        work = StepWork(
            flops=flops, other_flops=0.0, kernels=0, dequantised_bytes=0.0, bus_bytes=0.0
        )
        time = self._step_time(work, precision)
        return time.low_s, time.high_s


def _times(count: float, seconds: Range) -> Range:
    return count * seconds[0], count * seconds[1]


def _sum(one: Range, other: Range) -> Range:
    return one[0] + other[0], one[1] + other[1]
