"""How long a whole run takes: start, caching, steps, validation, sample images, saves. No torch.

Input is the settled settings, the load that fits and the card; output a `RunTime`: for each part the shortest
and the longest time to expect. Also how often sample images are worth drawing, and how long a run of a
priority may take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lora_trainer.families.base import BaseFacts
from lora_trainer.hardware.machine import Gpu
from lora_trainer.planning.loads import Load, RememberedCosts
from lora_trainer.planning.step_time import (
    LINK_BYTES_PER_S,
    StepTime,
    StepWork,
    card,
    cpu_step_time,
    forward_work,
    gpu_step_time,
    step_work,
)
from lora_trainer.planning.weight_bytes import ELEMENT_BYTES

MOST_HOURS: Mapping[str, float] = {"speed": 1.0, "balanced": 3.0, "quality": 8.0}
"""What a run with the presets may take of 20 pictures on the card that stands for its tier (docs/plans.md)."""
VALIDATION_QUANTILES = 8
"""Noise levels at which each held-out picture is predicted."""
SAMPLES_SHARE, FREE_SAMPLES_S = 0.15, 180.0
"""Sample images may take this share of the time of all steps, or three minutes if that is more."""
FEWER_SAMPLES = (1, 2, 5)
"""They are drawn at each, every second or only the last of the saves of a run, and before the first step."""

Range = tuple[float, float]
"""Seconds: the shortest and the longest to expect."""
# Python, torch and the libraries, the plan, the device's context and the first kernels.
START_S: Range = (10.0, 30.0)
# Weights from a disk: NVMe to a SATA SSD. They are read as they are used, not all at once.
DISK_BYTES_PER_S = (0.45e9, 2.5e9)
# A 16-bit release, whatever it is kept in; its size is known where it would be downloaded.
RELEASED_BYTES = 2
# An AutoencoderKL of 83.65 million parameters: multiply-adds of a pixel, counted twice, by torch's counter.
VAE_PARAMETERS = 83_653_863
ENCODE_FLOPS_PER_PX, DECODE_FLOPS_PER_PX = 4.4e6, 9.8e6
# To read, decode, scale and check a picture on one core, and to write its entries.
PICTURE_S: Range = (0.03, 0.2)
TEXT_FLOPS_PER_PARAMETER = 2
NEWEST_ONLY_S: Range = (0.2, 2.0)
"""A save: copies from the device, and its wait for the save before; writing goes on beside the steps."""


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Seconds of a run by part, in the order they come."""

    parts: Mapping[str, Range]

    @property
    def low_s(self) -> float:
        return sum(low for low, _ in self.parts.values())

    @property
    def high_s(self) -> float:
        return sum(high for _, high in self.parts.values())

    @property
    def seconds(self) -> float:
        """One number: the geometric means, added up."""
        return sum(math.sqrt(low * high) for low, high in self.parts.values())


@dataclass(frozen=True, kw_only=True)
class RunTimeInputs:
    """What the time of a run follows from: settings without `auto`, the load that fits, the data.

    `trained` and `held_out` are pictures, `latents` and `texts` what is encoded once, `pinnable_bytes` what
    each process may pin of the machine's memory (None: all).
    """

    values: Mapping[str, Any]
    load: Load
    facts: BaseFacts
    costs: RememberedCosts
    gpu: Gpu | None
    pinnable_bytes: int | None
    processes: int
    held_out: int
    latents: int
    texts: int

    def step(self) -> StepTime:
        """Return the time of a step: the mean over the resolutions that samples are drawn from."""
        batch_size = math.ceil(int(self.values["train.batch_size"]) / self.processes)
        times = []
        for load in self._loads:
            work = step_work(
                load,
                facts=self.facts,
                costs=self.costs,
                batch_size=batch_size,
                pinnable_bytes=self.pinnable_bytes,
            )
            times.append(self._time(work))
        return StepTime(
            low_s=sum(time.low_s for time in times) / len(times),
            high_s=sum(time.high_s for time in times) / len(times),
            note=times[0].note,
        )

    def run_time(self) -> RunTime:
        step, steps = self.step(), int(self.values["train.steps"])
        return RunTime(
            parts={
                "start": self._start(),
                "caching": self._caching(),
                "steps": (steps * step.low_s, steps * step.high_s),
                "validation": self._validation(),
                "sample images": self.samples(),
                "saves": _times(self._saves(), NEWEST_ONLY_S),
            }
        )

    def sample_interval(self, every_steps: int) -> int:
        """Return how often to draw sample images: `every_steps`, or less often where they take too long."""
        step_s = int(self.values["train.steps"]) * self.step().seconds
        for times in FEWER_SAMPLES:
            values = {**self.values, "sampling.every_steps": times * every_steps}
            low, high = replace(self, values=values).samples()
            if math.sqrt(low * high) <= max(FREE_SAMPLES_S, SAMPLES_SHARE * step_s):
                break
        return times * every_steps

    @property
    def _loads(self) -> Iterator[Load]:
        """Yield the largest bucket, and for each of more resolutions one that is as much smaller."""
        yield self.load
        own_px = int(self.values["data.resolution"])
        largest_px = max(own_px, *self.values["data.more_resolutions"], 1)
        for side_px in (own_px, *self.values["data.more_resolutions"]):
            if side_px != largest_px:
                width_px, height_px = (
                    max(1, length * side_px // largest_px) for length in self.load.bucket_px
                )
                step_px = self.facts.bucket_step_px
                sides = (round(length / step_px) * step_px for length in (width_px, height_px))
                width_px, height_px = (max(step_px, side) for side in sides)
                yield replace(self.load, bucket_px=(width_px, height_px))

    def _time(self, work: StepWork) -> StepTime:
        if self.gpu is None:
            return cpu_step_time(work, threads=int(self.values["hardware.threads"]))
        known = card(self.gpu.name, total_bytes=self.gpu.total_bytes)
        return gpu_step_time(work, known, precision=self.load.precision)

    def _forward(self, side_px: int) -> Range:
        """Return the time of one prediction of one image without gradients."""
        size = (side_px, side_px)
        load = replace(self.load, bucket_px=size, micro_batch=1)
        time = self._time(forward_work(load, facts=self.facts, costs=self.costs))
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
            whole = max(whole[0], size / fast), max(whole[1], size / slow)
        pixels = math.prod(self.load.bucket_px)
        picture = _sum(PICTURE_S, self._vae(ENCODE_FLOPS_PER_PX * pixels))
        return _sum(_times(self.latents, picture), _times(self.texts, whole))

    def _validation(self) -> Range:
        every = int(self.values["train.validate_every_steps"])
        if not (every and self.held_out):
            return (0.0, 0.0)
        steps = int(self.values["train.steps"])
        times = 1 + math.ceil(steps / every)
        passes = times * VALIDATION_QUANTILES * self.held_out / self.processes
        return _times(passes, self._forward(int(self.values["data.resolution"])))

    def samples(self) -> Range:
        """Return the time of all sample images: before the first step, at each interval, at the end."""
        every = int(self.values["sampling.every_steps"])
        if not every:
            return (0.0, 0.0)
        images = (1 + math.ceil(int(self.values["train.steps"]) / every)) * (
            len(self.values["sampling.prompts"])
            or min(int(self.values["sampling.prompts_from_captions"]), max(1, self.texts - 1))
        )
        side_px = int(self.values["data.resolution"])
        guided = float(self.values["sampling.guidance_scale"]) > 1
        passes = 1 + (guided and self.costs.family.guides_by_two_passes(self.facts))
        drawing = _times(int(self.values["sampling.steps"]) * passes, self._forward(side_px))
        return _times(images, _sum(drawing, self._vae(DECODE_FLOPS_PER_PX * side_px * side_px)))

    def _saves(self) -> int:
        every = int(self.values["output.save_every_steps"])
        return math.ceil(int(self.values["train.steps"]) / every) if every else 1

    def _vae(self, flops: float) -> Range:
        """Return the time of a VAE of any size; all run in fp32."""
        return self._plain(flops * self.facts.parts["vae"].parameters / VAE_PARAMETERS, "fp32")

    def _plain(self, flops: float, precision: Any) -> Range:
        work = StepWork(
            flops=flops, other_flops=0.0, kernels=0, dequantised_bytes=0.0, bus_bytes=0.0
        )
        if self.gpu is None:
            time = cpu_step_time(work, threads=int(self.values["hardware.threads"]))
        else:
            known = card(self.gpu.name, total_bytes=self.gpu.total_bytes)
            time = gpu_step_time(work, known, precision=precision)
        return time.low_s, time.high_s


def _times(count: float, seconds: Range) -> Range:
    return count * seconds[0], count * seconds[1]


def _sum(one: Range, other: Range) -> Range:
    return one[0] + other[0], one[1] + other[1]
