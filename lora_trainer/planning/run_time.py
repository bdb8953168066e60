"""The seconds of a step and of a run, its number of steps and its disk space; the judge of a load. No torch.

How long an optimizer step takes is an estimate from FLOPs, memory traffic and transfers, as a range. Input is the work
of a step (`StepWork`) and a GPU or a number of cores; output is the shortest and the longest time to expect, and a
note that names the bottleneck. gpus.toml has the rates of GPUs. Plans are compared by `seconds`, the geometric mean of
the range.

Of a run, input is the decided settings, the load that fits and the GPU; output a `RunTime`: for each part (start,
caching, steps, validation, sample images) the shortest and the longest time to expect. Also how
often to draw sample images, and how long a run of each priority may take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lora_trainer.common.wording import GIB, gib
from lora_trainer.config.declare import KEEP_ATTENTION, BasePrecision, Precision, settled
from lora_trainer.config.running import Config, PreviewKind, RunConfig, SamplingSettings
from lora_trainer.costs.base_costs import ELEMENT_BYTES, BaseCosts, FrozenBase
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.lora.adapter_size import total_elements
from lora_trainer.planning.gpu_rates import link_of, rates_of
from lora_trainer.planning.memory import (
    Load,
    Prediction,
    latent_area,
    pinned_shares,
    predict,
    predict_host,
)
from lora_trainer.planning.optimizer_facts import MASTER_BYTES, state_bytes
from lora_trainer.planning.plan_input import PlanInput

# Seconds: the shortest and the longest to expect.
Range = tuple[float, float]


# Share of the matrix rate that eager training reaches, as its elementwise kernels move much memory.
CARD_SHARE = (0.25, 0.8)
# Share of the memory rate that dequantising reaches, and copies from the host.
TRAFFIC_SHARE = (0.5, 0.9)
# Python, peft and autograd start one kernel in this time; small models on fast GPUs wait for it.
KERNEL_START_S = (20e-6, 70e-6)
# Texts that pass an offloaded encoder together, at least, on the GPUs that it does not fit on (network/offload.py).
TEXTS_TOGETHER = 16
FP32_SLOWDOWN = 4
# Measured on two cores: 49 GFLOP/s per core for a 4 M-parameter U-Net, everything included.
CPU_GFLOPS_PER_CORE = (20, 80)
# Bytes read and written to dequantise one weight to 16 bits, and the kernels that dequantise a layer.
DEQUANTISE_BYTES: Mapping[BasePrecision, float] = {"int8": 7.0, "fp8": 7.0, "nf4": 2.6}
DEQUANTISE_KERNELS: Mapping[BasePrecision, int] = {"int8": 2, "fp8": 2, "nf4": 3}
# A block that is recomputed without its matrix products still runs its other kernels. They take this share
# of the products' time: from the rooflines of FLUX.1, Z-Image and SDXL at 1024 px on several GPUs.
OTHER_KERNELS = 0.32
# Where blocks keep results, the layers that make them run some Python in both passes, as a share of the time to start a
# step's kernels: measured on a processor for all families (docs/experiments/speed.md).
KEEPING_KERNELS = 0.1
# Kernels of a pass without gradients, as a share of a training step's.
FORWARD_KERNELS = 1 / 3
# A streamed block is copied once for the forward pass and once to be recomputed for the backward pass.
STREAM_PASSES = 2


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of one optimizer step: arithmetic, kernels, bytes to dequantise, bytes over the bus one way.

    `other_flops` stand for the non-product kernels of recomputed blocks, as arithmetic that takes as long.
    `bus_bytes` are copied while the GPU computes, `ordered_bytes` between its kernels; `unpinned_bytes` come
    from unpinned memory, so the host waits for each copy.
    """

    flops: float
    other_flops: float = 0.0
    kernels: int = 0
    dequantised_bytes: float = 0.0
    bus_bytes: float = 0.0
    ordered_bytes: float = 0.0
    unpinned_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Expected seconds of an optimizer step; `note` names the bottleneck."""

    range_s: Range
    note: str

    @property
    def seconds(self) -> float:
        """Geometric mean of the range, by which plans are compared."""
        return middle(self.range_s)


def step_work(
    load: Load, costs: BaseCosts, *, batch_size: int, pinnable_bytes: int | None
) -> StepWork:
    """Return the work of a step over `batch_size` images, in micro-batches of `load.micro_batch`.

    A process may pin `pinnable_bytes` of host memory, None: no limit. Passes for the base's own prediction
    and those for the empty prompt run without gradients: they only go forward.
    """
    cost, base = costs.sample_cost(load.workload()), load.frozen_base(costs)
    images = batch_size * (1 + load.twice)
    forward = batch_size * (load.as_base + load.contrasted)
    passes = math.ceil(images / load.micro_batch)
    forwards = sum(
        math.ceil(batch_size * share / load.micro_batch)
        for share in (load.as_base, load.contrasted)
    )
    # Forward, backward, and when a block is recomputed.
    weight_passes = 2.0 if load.checkpointing == "none" else 3.0
    dequantised = passes * weight_passes + forwards if base.is_quantized else 0.0
    spared_flops = 0.0  # of matrix products that recomputed blocks do not repeat
    if keeps_results := load.checkpointing in KEEP_ATTENTION:
        everything = replace(load, checkpointing="full")
        spared_flops = float(costs.sample_cost(everything.workload()).step_flops - cost.step_flops)
    streamed = (passes * STREAM_PASSES + forwards) * base.streamed_bytes(load.streamed_blocks)
    # To the host in the forward pass, back in the backward pass.
    offloaded = 2 * cost.host_bytes * images
    blocks, inputs = pinned_shares(load, costs, pinnable_bytes=pinnable_bytes)
    started = (passes + forwards * FORWARD_KERNELS) * cost.kernels
    flops = cost.step_flops * images + cost.forward_flops * forward
    return StepWork(
        flops=flops,
        other_flops=OTHER_KERNELS * spared_flops * images,
        kernels=round(
            started * (1 + KEEPING_KERNELS * keeps_results) + dequantised * _layer_kernels(base)
        ),
        dequantised_bytes=dequantised * _layer_bytes(base),
        bus_bytes=blocks * streamed,
        ordered_bytes=inputs * offloaded,
        unpinned_bytes=(1 - blocks) * streamed + (1 - inputs) * offloaded,
    )


def _layer_bytes(base: FrozenBase) -> float:
    return base.linear_elements * DEQUANTISE_BYTES.get(base.kept_as, 0.0)


def _layer_kernels(base: FrozenBase) -> int:
    return len(base.costs.linear_shapes) * DEQUANTISE_KERNELS.get(base.kept_as, 0)


def step_time(work: StepWork, *, gpu: Gpu | None, threads: int, precision: Precision) -> StepTime:
    """Estimate a step on a GPU, or on `threads` cores of the processor where `gpu` is None."""
    if gpu is None:
        slow, fast = (rate * 1e9 * threads for rate in CPU_GFLOPS_PER_CORE)
        range_s = _range(work.flops + work.other_flops, (slow, fast))
        note = f"rough estimate for {threads} cores: {work.flops / 1e9:.1f} GFLOP a step"
        return StepTime(range_s=range_s, note=note)
    # The longest of computing, starting kernels and copying over the bus. Copies of weights run beside the
    # computation, so they cost only memory traffic and the time they take longer than it; a step waits for copies
    # of block inputs and for every copy of unpinned memory.
    rates, (link, unpinned_link) = rates_of(gpu), link_of(gpu)
    rate = rates.flops / (FP32_SLOWDOWN if precision == "fp32" else 1)
    computing = _range((work.flops + work.other_flops) / rate, CARD_SHARE)
    # Copies from the host are written to the same memory that the computation reads.
    moved_bytes = work.dequantised_bytes + work.bus_bytes
    beside = _range(moved_bytes / rates.bytes_per_s, TRAFFIC_SHARE)
    fast_s, slow_s = KERNEL_START_S
    parts = {
        "arithmetic": (computing[0] + beside[0], computing[1] + beside[1]),
        "starting kernels": (work.kernels * fast_s, work.kernels * slow_s),
        "copies from host memory": _range(work.bus_bytes, link),
    }
    ordered = _range(work.ordered_bytes, link)
    unpinned = _range(work.unpinned_bytes, unpinned_link)
    note = (
        f"estimate for {rates.says}: {work.flops / 1e12:.1f} TFLOP a "
        f"step, limited by {max(parts, key=lambda name: middle(parts[name]))}"
    )
    if work.unpinned_bytes:
        note += f", and waits for {work.unpinned_bytes / 1e9:.1f} GB of unpinned memory"
    longest = max(low for low, _ in parts.values()), max(high for _, high in parts.values())
    return StepTime(range_s=_sum(_sum(longest, ordered), unpinned), note=note)


def _range(amount: float, slow_and_fast: tuple[float, float]) -> Range:
    slow, fast = slow_and_fast
    return amount / fast, amount / slow


def middle(ends: Range) -> float:
    """Return the geometric mean of a range, whose ends differ by factors."""
    return math.sqrt(ends[0] * ends[1])


# ---- a load on this machine


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Bytes that may be used, and in words how many they are and why."""

    bytes: int
    said: str

    def __str__(self) -> str:
        return self.said


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Judges a load on this machine: device memory, host memory and the time of a step.

    Of `config` only memory's settings may be `auto`; `gpu` None is the processor.
    """

    inputs: PlanInput
    config: Config | RunConfig
    gpu: Gpu | None

    @property
    def costs(self) -> BaseCosts:
        return self.inputs.costs

    @property
    def batch_size(self) -> int:
        """The most images of a step that one process trains on: the slowest process sets the pace."""
        return math.ceil(self.config.train.batch_size / self.inputs.processes)

    @property
    def has_host(self) -> bool:
        """Whether the device has memory of its own, so that weights can wait in the machine's memory."""
        return self.gpu is not None and self.gpu.can.own_memory

    @cached_property
    def limit(self) -> Limit:
        """Memory of the device that the run may use: free memory or the user's limit, whichever is less.

        With an out-of-memory record of this GPU, only the recorded share of it.
        """
        limit_gib, full_card = self.config.hardware.vram_limit_gib, self.inputs.full_card
        if self.gpu is None:
            free_bytes = self.inputs.ram_bytes
            return Limit(bytes=free_bytes, said=f"{gib(free_bytes)} of memory free, less a margin")
        size = self.gpu.free_bytes
        said = f"{gib(size)} free on {self.gpu.name}"
        if limit_gib is not None and limit_gib * GIB < size:
            size = int(limit_gib * GIB)
            said = f"{gib(size)} allowed by hardware.vram_limit_gib"
        if full_card is None:
            return Limit(bytes=size, said=said)
        usable_bytes = int(size * full_card.share)
        return Limit(bytes=usable_bytes, said=f"{gib(usable_bytes)} ({said}; {full_card})")

    def predict(self, load: Load) -> Prediction:
        return predict(load, self.costs, limit_bytes=self.limit.bytes)

    def predict_host(self, load: Load) -> Prediction | None:
        if not self.has_host:
            return None  # `predict` counts everything already
        limit_bytes, pinnable_bytes = self.inputs.ram_bytes, self.inputs.pinnable_bytes
        return predict_host(
            load, self.costs, limit_bytes=limit_bytes, pinnable_bytes=pinnable_bytes
        )

    def time(self, load: Load) -> StepTime:
        pinnable_bytes = self.inputs.pinnable_bytes
        work = step_work(
            load, self.costs, batch_size=self.batch_size, pinnable_bytes=pinnable_bytes
        )
        return self.time_of(work, load.precision)

    def time_of(self, work: StepWork, precision: Precision) -> StepTime:
        threads = settled(self.config.hardware.threads)
        return step_time(work, gpu=self.gpu, threads=threads, precision=precision)

    def fits(self, load: Load) -> bool:
        """Say whether the device and the machine can hold a load."""
        if not self.predict(load).fits:
            return False
        host = self.predict_host(load)
        return host is None or host.fits


# ---- a run

# (fewest, most). Fewer than 20 images are trained as long as 20, or they would not be learned at all; more than 160 as
# long as 160, as more passes no longer pay.
COUNTED_IMAGES = (20, 160)

# Factor on `train.views`: a style is common to many images, and repeating an image too often teaches the image itself.
VIEWS: Mapping[str, float] = {"style": 0.5}


# Steps of a slider: what LECO, Concept Sliders and ai-toolkit train by default or advise.
SLIDER_STEPS = 500


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
    # Each latent is stored as the mean and the deviation of the VAE's distribution, in fp32.
    channels = 2 * inputs.facts.latent_channels + (config.data.masks != "none")
    tensors = inputs.costs.adapter_tensors(load.adapter)
    parameters, output = total_elements(tensors), config.output
    state = MASTER_BYTES * parameters + sum(
        state_bytes(tensors, load.optimizer, load.optimizer_options)
    )
    kept_exports = output.keep_last + output.keep_best
    return {
        "cache": inputs.latents * 4 * channels * latent_area(load, inputs.costs)
        + (inputs.texts + EMPTY_TEXT) * inputs.costs.text_bytes(load.references_px),
        "states": state * (output.keep_states + 1),
        "exports": parameters * ELEMENT_BYTES[output.precision] * (kept_exports + 2),
    }


# In the cache beside the captions, for caption dropout and guidance.
EMPTY_TEXT = 1
# Longest run with the presets over 20 images, in hours, on the GPU that stands for its tier (docs/plans.md);
# without its previews and what is measured of each image at the end, which are a few hundredths of it.
MOST_HOURS: Mapping[str, float] = {"speed": 1.0, "balanced": 3.0, "quality": 8.0}
# Noise levels at which each held-out image is predicted.
VALIDATION_QUANTILES = 8
# At the end each image, of many images so many, is predicted at up to so many noise levels: by the base, by the LoRA,
# and by the LoRA with the caption of another image. These passes take a hundredth of the training, in which an image
# costs about three; or as many as 20 images need for one level, if that is more.
MOST_IMAGE_QUANTILES, MOST_IMAGE_LOSSES, IMAGE_LOSS_KINDS = 3, 48, 3
IMAGE_LOSS_SHARE, FREE_IMAGE_LOSS_PASSES = 0.03, 60
# Sample images may take this share of the time of all steps, or three minutes if that is more.
SAMPLES_SHARE, FREE_SAMPLES_S = 0.15, 180.0
# Sample images are drawn at every save, every second or every fifth, and always before the first step.
FEWER_SAMPLES = (1, 2, 5)

# Previews are drawn every fiftieth of the steps, and not above twenty seconds apart in a short run, where all of them
# take a hundredth of the time; else rarer, down to every tenth of the steps.
PREVIEWS, FEWEST_PREVIEWS, PREVIEW_EVERY_S, PREVIEW_SHARE = 50, 10, 20.0, 0.01
# No base draws anything in smaller images, but the miniature, whose own are smaller.
LEAST_PREVIEW_PX = 256
# How a preview is drawn, the best first: decoded as, most denoising steps, part of the side of a sample image.
PREVIEW_WAYS: Sequence[tuple[PreviewKind, int, float]] = (
    ("real", 10, 1.0),
    ("real", 6, 1.0),
    ("real", 4, 1.0),
    ("approximate", 8, 1.0),
    ("approximate", 8, 0.5),
    ("approximate", 4, 0.5),
)

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


@dataclass(frozen=True, kw_only=True)
class PreviewWay:
    """How previews are drawn, how long each takes, and how many a run has beside that of the base."""

    drawn: PreviewKind
    steps: int
    side_px: int
    seconds: float
    count: int
    wanted: int

    @property
    def is_often(self) -> bool:
        """Whether there is one as often as is wanted, for its share of the time."""
        return self.count == self.wanted

    @property
    def is_useful(self) -> bool:
        """Whether there are enough of them to see a training learn."""
        return self.count >= min(FEWEST_PREVIEWS, self.wanted)


def image_loss_extent(config: RunConfig, images: int) -> tuple[int, int]:
    """Return how many of the images are measured at the end, and at how many noise levels."""
    images = min(MOST_IMAGE_LOSSES, images)
    share = int(IMAGE_LOSS_SHARE * config.train.steps * config.train.batch_size)
    room = max(FREE_IMAGE_LOSS_PASSES, share) // IMAGE_LOSS_KINDS
    quantiles = min(MOST_IMAGE_QUANTILES, max(1, room // max(1, images)))
    return min(images, room // quantiles), quantiles


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """(shortest, longest) seconds of a run by part, in the order of the run."""

    parts: Mapping[str, Range]
    images: Range = (0.0, 0.0)
    """Those of the validation in which each image is measured at the end."""

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
class RunTimeInputs:
    """Predicts the time of a run from settings without `auto` and the load that fits."""

    inputs: PlanInput
    config: RunConfig
    gpu: Gpu | None
    load: Load

    @cached_property
    def evaluator(self) -> Evaluator:
        """The judge of the times of steps."""
        return Evaluator(inputs=self.inputs, config=self.config, gpu=self.gpu)

    def step(self) -> StepTime:
        """Return the time of a step: the mean over the run's resolutions."""
        times = [self.evaluator.time(load) for load in self._loads]
        low_s, high_s = (
            sum(ends) / len(times) for ends in zip(*(t.range_s for t in times), strict=True)
        )
        return StepTime(range_s=(low_s, high_s), note=times[0].note)

    def run_time(self) -> RunTime:
        inputs, train = self.inputs, self.config.train
        step, parameters = self.step(), sum(part.parameters for part in inputs.facts.parts.values())
        size = max(inputs.facts.download_bytes, RELEASED_BYTES * parameters)
        slow_disk, fast_disk = DISK_BYTES_PER_S
        # Caching encodes each text and each latent once.
        encoder, load = self.evaluator.costs.parameters("text_encoder"), self.load
        reads, tokens = inputs.facts.references, inputs.facts.release.max_tokens
        if reads is not None:
            tokens += reads.encoded_tokens(load.references_px)
        flops = TEXT_FLOPS_PER_PARAMETER * encoder * tokens
        text = self._plain(flops, load.text_precision)
        copies = (0.0, 0.0)
        if load.text_offload:
            encoder_bytes = encoder * ELEMENT_BYTES[load.text_precision]
            (slow, fast), _ = link_of(self.gpu)
            # The encoder is copied block by block for many texts together, one copy after another.
            sets = math.ceil((inputs.texts + EMPTY_TEXT) / TEXTS_TOGETHER)
            copies = sets * encoder_bytes / fast, sets * encoder_bytes / slow
        picture = _sum(PICTURE_S, self._vae(ENCODE_FLOPS_PER_PX * math.prod(load.bucket_px)))
        validation = (0.0, 0.0)
        if train.validate_every_steps and inputs.held_out_count:
            times = 1 + math.ceil(train.steps / train.validate_every_steps)
            passes = times * VALIDATION_QUANTILES * inputs.held_out_count / inputs.processes
            validation = _times(passes, self._forward(self.config.data.resolution))
        each = (0.0, 0.0)
        if self.config.output.measure:
            images, quantiles = image_loss_extent(
                self.config, inputs.images + inputs.held_out_count
            )
            passes = IMAGE_LOSS_KINDS * quantiles * images
            each = _times(passes, self._forward(self.config.data.resolution))
            validation = _sum(validation, each)
        return RunTime(
            images=each,
            parts={
                "start": (START_S[0] + size / fast_disk, START_S[1] + size / slow_disk),
                "caching": _sum(
                    _times(inputs.latents, picture),
                    _sum(_times(inputs.texts + EMPTY_TEXT, text), copies),
                ),
                "steps": _times(train.steps, step.range_s),
                "validation": validation,
                "sample images": self._samples(self.config.sampling.every_steps),
                "previews": self._previews(),
            },
        )

    def sample_interval(self, every_steps: int) -> int:
        """Return after how many steps to draw sample images: `every_steps`, or more where they take too long."""
        step_s = self.config.train.steps * self.step().seconds
        for times in FEWER_SAMPLES:
            drawing_s = middle(self._samples(times * every_steps))
            if drawing_s <= max(FREE_SAMPLES_S, SAMPLES_SHARE * step_s):
                break
        return times * every_steps

    def preview_ways(self, asked: SamplingSettings) -> Iterator[PreviewWay]:
        """Yield the ways to draw previews, the best first; those settings that are not `auto` stay."""
        side_px, step_px = self.config.data.resolution, self.inputs.facts.bucket_step_px
        for drawn, most_steps, part in PREVIEW_WAYS:
            if asked.preview not in ("auto", drawn):
                continue
            steps = min(most_steps, self.config.sampling.steps)
            smaller_px = max(step_px, round(side_px * part / step_px) * step_px)
            smaller_px = max(smaller_px, min(side_px, LEAST_PREVIEW_PX))
            yield self.preview_way(
                drawn,
                steps=steps if asked.preview_steps == "auto" else asked.preview_steps,
                side_px=smaller_px
                if asked.preview_resolution == "auto"
                else asked.preview_resolution,
            )

    def preview_way(self, drawn: PreviewKind, *, steps: int, side_px: int) -> PreviewWay:
        """Return this way with its cost; the count is 0 where one alone takes above its share of the run."""
        seconds = middle(self._preview(drawn, steps=steps, side_px=side_px))
        run_s = self.config.train.steps * self.step().seconds
        wanted = min(PREVIEWS, max(1, math.floor(run_s / PREVIEW_EVERY_S)))
        count = min(wanted, math.floor(PREVIEW_SHARE * run_s / seconds))
        return PreviewWay(
            drawn=drawn, steps=steps, side_px=side_px, seconds=seconds, count=count, wanted=wanted
        )

    def _preview(self, drawn: PreviewKind, *, steps: int, side_px: int) -> Range:
        drawing = _times(steps, self._sampler_step(side_px))
        if drawn == "approximate":
            return drawing
        return _sum(drawing, self._vae(DECODE_FLOPS_PER_PX * side_px * side_px))

    def _previews(self) -> Range:
        sampling = self.config.sampling
        if sampling.preview == "off" or not sampling.every_steps:
            return (0.0, 0.0)
        steps, side_px = sampling.preview_steps, sampling.preview_resolution
        way = self.preview_way(sampling.preview, steps=steps, side_px=side_px)
        drawing = self._preview(sampling.preview, steps=steps, side_px=side_px)
        return _times(way.count + 1, drawing)

    def _sampler_step(self, side_px: int) -> Range:
        """Return the time of one denoising step of one image, with guidance where samples have it."""
        step = self._forward(side_px)
        if self.config.sampling.guidance_scale > 1 and self.inputs.facts.guidance.two_passes:
            return _sum(_times(2, step), self._reading_unguided())
        return step

    @property
    def _loads(self) -> Iterator[Load]:
        """Yield the load of the largest bucket, and one with that bucket scaled to each other resolution."""
        yield self.load
        own_px = self.config.data.resolution
        largest_px = max(own_px, *self.config.data.more_resolutions, 1)
        for side_px in (own_px, *self.config.data.more_resolutions):
            if side_px != largest_px:
                # The smaller bucket keeps the aspect ratio and, as all buckets, is a multiple of the step.
                step_px, scale = self.inputs.facts.bucket_step_px, side_px / largest_px
                width_px, height_px = (
                    max(step_px, round(length * scale / step_px) * step_px)
                    for length in self.load.bucket_px
                )
                references = self.load.references_px
                if self.config.data.reference_resolution is None:
                    references = tuple((round(w * scale), round(h * scale)) for w, h in references)
                yield replace(self.load, bucket_px=(width_px, height_px), references_px=references)

    def _forward(self, side_px: int) -> Range:
        """Return the time of one prediction of one image without gradients."""
        load = replace(self.load, bucket_px=(side_px, side_px), micro_batch=1)
        cost, base = (
            self.evaluator.costs.sample_cost(load.workload()),
            load.frozen_base(self.evaluator.costs),
        )
        kernels = cost.kernels * FORWARD_KERNELS + base.is_quantized * _layer_kernels(base)
        work = StepWork(
            flops=cost.forward_flops,
            kernels=round(kernels),
            dequantised_bytes=base.is_quantized * _layer_bytes(base),
            bus_bytes=base.streamed_bytes(load.streamed_blocks),
        )
        return self.evaluator.time_of(work, load.precision).range_s

    def _samples(self, every_steps: int) -> Range:
        """Return the time of all sample images: before the first step, at each interval, at the end."""
        if not every_steps:
            return (0.0, 0.0)
        sampling, side_px = self.config.sampling, self.config.data.resolution
        images = (1 + math.ceil(self.config.train.steps / every_steps)) * self.inputs.prompts
        drawing = _times(sampling.steps, self._sampler_step(side_px))
        return _times(images, _sum(drawing, self._vae(DECODE_FLOPS_PER_PX * side_px * side_px)))

    def _reading_unguided(self) -> Range:
        """Return the time in which a network of its own for guidance comes to the device, once for each pass of it.

        Its layers are read from its files while it runs. Files that host memory has room for beside the training stay
        there; larger ones come from the disk each time.
        """
        inputs, load = self.inputs, self.load
        size = inputs.family.unguided_bytes(inputs.facts)
        if not size:
            return (0.0, 0.0)
        moved = inputs.facts.parts["denoiser"].parameters * ELEMENT_BYTES[load.precision]
        _, (slow, fast) = link_of(self.gpu)
        link = (moved / fast, moved / slow)
        taken = self.evaluator.predict_host(load)
        room_bytes = inputs.hardware.ram_free_bytes - (taken.peak_bytes if taken else 0)
        if size <= room_bytes:
            return link
        slow_disk, fast_disk = DISK_BYTES_PER_S
        return _sum(link, (size / fast_disk, size / slow_disk))

    def _vae(self, flops: float) -> Range:
        """Return the time of a VAE pass in fp32; `flops` are of the AutoencoderKL, scaled by parameters."""
        return self._plain(flops * self.evaluator.costs.parameters("vae") / VAE_PARAMETERS, "fp32")

    def _plain(self, flops: float, precision: Precision) -> Range:
        return self.evaluator.time_of(StepWork(flops=flops), precision).range_s


def _times(count: float, seconds: Range) -> Range:
    return count * seconds[0], count * seconds[1]


def _sum(one: Range, other: Range) -> Range:
    return one[0] + other[0], one[1] + other[1]
