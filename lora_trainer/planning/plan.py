"""The planner: every `auto` becomes a value with a reason, and the run fits or is refused.

It never changes the batch size and never makes a value of the user take more memory; if it has to lower
one, it says so. Micro-batch and checkpointing change memory and speed, not results.
No torch: input is facts and settings, output a `Plan`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.wording import GIB, duration_text, gib, step_seconds_text
from lora_trainer.config.config import build_run_config, flatten, value_of, with_value
from lora_trainer.config.constraints import typed
from lora_trainer.config.declare import (
    FLOW_WEIGHTINGS,
    SNR_WEIGHTINGS,
    Precision,
    settled,
)
from lora_trainer.config.inputs import NO_ASSISTANT
from lora_trainer.config.layers import Origin, is_preset
from lora_trainer.config.optimizers import SCHEDULE, SCHEDULE_FREE
from lora_trainer.config.running import Config, RunConfig
from lora_trainer.hardware.machine import Hardware
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning.image_size import with_image_size
from lora_trainer.planning.known_convolutions import MOST_STEPS
from lora_trainer.planning.known_pace import STEPS, RunKind, pace_here
from lora_trainer.planning.machine_needs import unmet_needs
from lora_trainer.planning.memory import Load, Prediction
from lora_trainer.planning.memory_choice import MemoryChoice, MemoryChooser
from lora_trainer.planning.optimizer_facts import RATE, needed_otherwise
from lora_trainer.planning.plan_input import PlanInput
from lora_trainer.planning.run_time import (
    PREVIEW_SHARE,
    SLIDER_STEPS,
    Evaluator,
    RunTime,
    RunTimeInputs,
    disk_bytes,
    middle,
    run_length,
)

# Most shapes that are compiled; further shapes run as usual.
MOST_SHAPES = 16
# Compiling one graph of a block, both passes, on a few cores; found in the cache it takes a second or two.
COMPILE_S = 40.0
# Share of a step that compiled blocks save, by others' measurements: musubi-tuner, OneTrainer and Krea 2's authors name
# 10 to 37 %. Not measured here: `gpu_day` will tell.
COMPILED_SAVES = (0.10, 0.37)
# Seconds that are saved, by the lower of these, for each that compiling takes: from here on `auto` compiles.
PAYS_FROM = 2.0
# A run with so many times the steps of a comparison of convolutions makes it.
COMPARED_FROM = 10
# Memory that the other ways may take: copies in another layout, and workspaces, whose size cuDNN decides.
COMPARED_WITH_BYTES = GIB // 2
# Triton has kernels from this compute capability on.
TRITON_CAPABILITY = (7, 0)
# (width, height) in pixels, images at once.
PixelShape = tuple[int, int, int]
# A text encoder with more parameters runs in bf16, because fp32 weights would set the peak of the run.
LARGE_TEXT_ENCODER = 2_000_000_000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of the run with the reason of every decision in their `origins`, and its costs.

    `seconds_per_step` is (shortest, longest) as this machine takes them. `idle_step_s` and `idle_parts_s` are the
    estimates of a step and of each part before they were corrected by what is known of the machine. `beside_others` is
    how many times as long all of it takes beside the programs that run now, 1 where they make no difference.
    """

    memory_choice: MemoryChoice
    config: RunConfig
    origins: Mapping[str, Origin]
    steps: int
    epochs: float
    seconds_per_step: tuple[float, float]
    idle_step_s: float
    idle_parts_s: Mapping[str, float]
    run_time: RunTime
    time_note: str
    time_source: str
    time_corrections: tuple[str, ...]
    beside_others: float
    disk_bytes: Mapping[str, int]

    @property
    def load(self) -> Load:
        """What is in memory at once, in the largest bucket."""
        return self.memory_choice.load

    @property
    def memory(self) -> Prediction:
        """The predicted memory of the training device."""
        return self.memory_choice.memory

    @property
    def host(self) -> Prediction | None:
        """The predicted memory of the machine beside a GPU."""
        return self.memory_choice.host

    @property
    def images_at_once(self) -> Mapping[tuple[int, int], int]:
        """The micro-batch of each bucket, (width, height) in pixels."""
        return self.memory_choice.images_at_once


def plan(inputs: PlanInput) -> Plan:
    """Resolve every `auto` and fit the run into memory; the size of the images first, by what it makes of the rest.

    Raises MachineError naming the nearest setting that fits when nothing does, and RequestError for
    settings that do not work with this base or GPU.
    """
    return _plan(with_image_size(inputs, _idle_hours))


def _idle_hours(inputs: PlanInput) -> float:
    """Return the predicted hours of a run on a machine of which nothing is known."""
    made = _plan(inputs)
    here = math.sqrt(math.prod(made.seconds_per_step)) / made.idle_step_s
    # The size of the images is not chosen by whether somebody looks on, or looks back at the end.
    looks_s = middle(made.run_time.parts["previews"]) + middle(made.run_time.images)
    return (made.run_time.seconds - looks_s) / here / 3600


def _plan(inputs: PlanInput) -> Plan:
    planner = _Planner(inputs=inputs, config=inputs.resolved.config)
    for key, (value, reason) in inputs.decided.items():
        planner.decide(key, value, reason)
    # The order matters: each step reads the settings decided before it. Precision follows from the GPU, the
    # length from the batch, memory from the length (whether samples are drawn), speed-ups from memory and length.
    planner.decide_device()
    planner.decide_numbers()
    planner.decide_objective()
    planner.decide_optimizer()
    planner.decide_length()
    planner.decide_drawing()
    return planner.finish(planner.decide_memory())


def run_kind(inputs: PlanInput, config: RunConfig) -> RunKind:
    """Return what kind of run this is among those whose times are known."""
    return RunKind(
        priority=inputs.resolved.priority,
        resolution_px=config.data.resolution,
        parameters=inputs.facts.parts["denoiser"].parameters,
    )


def device_of(config: Config | RunConfig, hardware: Hardware, *, sharing: int = 1) -> Gpu | None:
    """Return the GPU that a run trains on, None for the processor."""
    return hardware.accelerator(sharing=sharing)[0] if config.hardware.device != "cpu" else None


@dataclass(kw_only=True)
class _Planner:
    inputs: PlanInput
    # The settings so far: `decide` replaces one after the other.
    config: Config
    origins: dict[str, Origin] = field(default_factory=dict)
    gpu: Gpu | None = None

    def decide(self, key: str, value: Any, reason: str) -> None:
        self.config = with_value(self.config, key, value)
        # A setting may be decided twice, say a preset replaced and then lowered: its last reason is the one to read.
        self.origins[key] = Origin(layer="planner", reason=reason)

    def decide_auto(self, key: str, value: Any, reason: str) -> None:
        if value_of(self.config, key) == "auto":
            self.decide(key, value, reason)

    def decide_device(self) -> None:
        hardware, sharing = self.inputs.hardware, self.inputs.sharing
        setting = self.config.hardware.device
        gpu, reason = hardware.accelerator(sharing=sharing)
        here = gpu.can.torch_type if gpu else "cpu"
        # A device that was typed is never replaced: on the processor the run would take weeks, unnoticed.
        if setting not in ("auto", "cpu", here):
            there = f"the GPU here is {gpu.can.says}" if gpu else f"no GPU can be used: {reason}"
            raise MachineError(
                f"hardware.device={setting}, but {there}", fix=f"use --set hardware.device={here}"
            )
        self.decide_auto("hardware.device", here, reason)
        self.gpu = device_of(self.config, hardware, sharing=sharing)
        threads, reason = hardware.cpu_threads, hardware.reasons.get("cpu_threads", "")
        # Processes on one machine compute at the same time, so they divide its cores among themselves.
        if sharing > 1:
            reason = f"{threads} for {sharing} processes; {reason}"
        self.decide_auto("hardware.threads", max(1, threads // sharing), reason)

    def decide_numbers(self) -> None:
        facts, gpu = self.inputs.facts, self.gpu
        best, reason = self._best_precision()
        self.decide_auto("train.precision", best, reason)
        # A precision in which this base overflows is refused: hours of training would end in NaN.
        precision, fix = self.config.train.precision, f"use --set train.precision={best}"
        if precision not in self.inputs.family.traits.precisions:
            raise RequestError(
                f"train.precision={precision}, but {facts.family} bases overflow to NaN in {precision}",
                fix=fix,
            )
        if precision == "bf16" and gpu and not gpu.has_bf16:
            raise RequestError(
                f"train.precision=bf16 needs compute capability 8.0 or higher, but {gpu.name} has "
                f"{gpu.capability}",
                fix=fix,
            )
        reason = f"the size {facts.source} was trained on"
        self.decide_auto("data.resolution", facts.resolution_px, reason)
        sides = [("data.resolution", settled(self.config.data.resolution))]
        sides += [("data.more_resolutions", side) for side in self.config.data.more_resolutions]
        step_px = facts.bucket_step_px
        for key, side_px in sides:
            if side_px % step_px:
                below = side_px // step_px * step_px
                allowed = " or ".join(str(side) for side in (below, below + step_px) if side)
                raise RequestError(
                    f"{key}={side_px} is not a multiple of {step_px} ({facts.family})",
                    fix=f"use {allowed}",
                )
        # OFT multiplies weights by a rotation, which has no scale; its alpha stays `auto`.
        if self.config.adapter.kind != "oft":
            rank = float(self.config.adapter.rank)
            self.decide_auto("adapter.alpha", rank, "alpha = rank: the update is not scaled")
        # A GPU that trains in fp32 only because it lacks bf16 can still encode texts in (emulated) bf16:
        # encoding happens once, and fp32 weights of a large text encoder would not fit.
        count = facts.parts["text_encoder"].parameters
        is_fp32_chosen = precision == "fp32" and (
            gpu is None or not self._is_ours("train.precision")
        )
        is_small = count <= LARGE_TEXT_ENCODER or is_fp32_chosen
        size = f"{count / 1e9:.3g} billion parameters"
        self.decide_auto("memory.text_encoder_precision", "fp32" if is_small else "bf16", size)
        if self.config.train.ema_decay is None:
            self.decide_auto("output.weights", "trained", "no running average is kept")
        else:
            self.decide_auto("output.weights", "ema", "train.ema_decay asks for an average")

    def decide_objective(self) -> None:
        """Decide settings that suit only some bases or machines: replace a preset's value, refuse the user's."""
        facts, objective = self.inputs.facts, self.config.objective
        gamma, key = "objective.min_snr_gamma", "objective.weighting"
        if facts.release.prediction == "flow":
            reason, others = "flow matching has no signal-to-noise weights", "predict noise or v"
            wrong = {
                key: objective.weighting in SNR_WEIGHTINGS,
                gamma: objective.min_snr_gamma is not None,
            }
        else:
            reason, others = "the base is not trained by flow matching", "train by flow matching"
            wrong = {key: objective.weighting in FLOW_WEIGHTINGS}
        for name in (name for name, is_wrong in wrong.items() if is_wrong):
            none = None if name == gamma else "none"
            # Presets and defaults are made for several kinds of bases; a typed value is a mistake worth a word.
            if not self._is_preset(name) and self._layer(name) != "default":
                value = typed(value_of(self.config, name))
                raise RequestError(
                    f"{name}={value} is for bases that {others}, not for {facts.source}",
                    fix=f"leave {name} out, or use --set {name}={typed(none)}",
                )
            self.decide(name, none, reason)
        if self.config.objective.min_snr_gamma is None:
            self.decide_auto(key, "none", f"{gamma} is not set")
        else:
            self.decide_auto(key, "min_snr", f"{gamma} is set")
        zero_snr = facts.release.zero_terminal_snr
        self.decide_auto("objective.zero_terminal_snr", zero_snr, "as the base was trained")
        self.decide_auto("base.prediction", facts.release.prediction, "from the base's files")
        self.decide_auto(
            "base.distilled", facts.release.distilled, "by the base's files and its name"
        )
        assistant = facts.release.assistant
        self.decide_auto(
            "base.assistant",
            assistant.source if assistant else NO_ASSISTANT,
            "published for this base" if assistant else "none is published for this base",
        )
        if facts.system_prompt is not None:
            self.decide_auto("base.system_prompt", facts.system_prompt, "by the base's name")
        # Settings that this machine cannot follow: a preset's value is replaced, the user's refused.
        hardware = self.inputs.hardware
        for decision in unmet_needs(
            self.config,
            gpu=self.gpu,
            packages=hardware.packages,
            is_preset=lambda key: self._is_preset(key) or self._layer(key) == "default",
            unfit=hardware.unfit,
        ):
            self.decide(*decision)
        self.decide_auto("memory.attention", "sdpa", "PyTorch's own attention, always available")

    def _best_precision(self) -> tuple[Precision, str]:
        """Return the value of `train.precision=auto` and its reason."""
        if self.gpu is None:
            return "fp32", "16 bits save no time on a processor"
        # Emulated bf16 would be slow, and its attention stores all scores. Every family allows fp32.
        best = next(filter(self.gpu.computes, self.inputs.family.traits.precisions))
        if best == "bf16":
            return best, f"{self.gpu.capability} has bf16"
        reason = f"{self.gpu.capability}: not known to have bf16"
        if best == "fp32":
            reason += (
                f", and in fp16 {self.inputs.facts.family} bases overflow to NaN; fp32 takes twice the "
                "memory of 16 bits and several times as long"
            )
        return best, reason

    def decide_optimizer(self) -> None:
        """Replace presets that suit only AdamW where another optimizer is used; the user's values stay."""
        name = self.config.optimizer.name
        shape = self.config.optimizer.schedule
        if name == SCHEDULE_FREE and shape != "constant" and not self._is_ours(SCHEDULE):
            raise RequestError(
                f"{SCHEDULE}={shape}, but {name} needs no schedule",
                fix=f"leave {SCHEDULE} out, or use --set {SCHEDULE}=constant",
            )
        # AdamW's rate first, scaled from the preset's batch size to the run's: the factors of other optimizers
        # multiply it.
        rate, batch_size = self.config.optimizer.learning_rate, self.config.train.batch_size
        preset_batch_size = self.inputs.resolved.preset_batch_size
        if batch_size != preset_batch_size and self._is_ours(RATE):
            # Another batch size changes the number of updates for the same images, and with it the rate. One
            # update of Adam moves a weight by about one learning rate at any batch size, so the rate is scaled
            # with the square root of the batch (Malladi et al. 2022, arXiv 2205.10287: for a batch kappa times as
            # large, rate times sqrt(kappa) and steps over kappa keep updates x rate^2, the distance covered,
            # constant). The paper also scales Adam's betas; they stay fixed here because their memory is short
            # compared with these runs.
            reason = (
                f"the preset's {rate:g} is for a batch of {preset_batch_size}, and the learning rate "
                "grows with the square root of the batch size"
            )
            rate = float(f"{rate * math.sqrt(batch_size / preset_batch_size):.4g}")
            self.decide(RATE, rate, reason)
        for key, value, reason in needed_otherwise(name, preset_rate=rate):
            if self._is_ours(key) and value_of(self.config, key) != value:
                self.decide(key, value, reason)

    def _is_ours(self, key: str) -> bool:
        """Say whether a value is the program's choice: neither typed nor in a file or a named preset."""
        layer = self._layer(key)
        is_named_preset = (
            layer.startswith("preset ") and layer != f"preset {self.inputs.resolved.tier}"
        )
        return layer == "default" or (self._is_preset(key) and not is_named_preset)

    def _is_preset(self, key: str) -> bool:
        return is_preset(self._layer(key))

    def _layer(self, key: str) -> str:
        return self.inputs.resolved.origins[key].layer

    def decide_length(self) -> None:
        inputs, train, output = self.inputs, self.config.train, self.config.output
        if inputs.directions:
            steps, reason = SLIDER_STEPS, "usual for a slider, which has no images"
        elif inputs.pairs:
            steps, reason = SLIDER_STEPS, "usual for a slider from pairs of images"
        else:
            steps, reason = run_length(
                images=inputs.images,
                samples=inputs.samples_per_epoch,
                repeats=inputs.fewest_repeats,
                batch_size=train.batch_size,
                views=train.views,
                regularisation=inputs.regularisation_per_epoch / inputs.samples_per_epoch,
                concept=train.concept,
            )
        self.decide_auto("train.steps", steps, reason)
        steps = settled(self.config.train.steps)
        every, reason = max(1, steps // 5), f"a fifth of {steps} steps"
        if output.save_every_epochs is None:
            self.decide_auto("output.save_every_steps", every, reason)
        else:
            self.decide_auto("output.save_every_steps", 0, "output.save_every_epochs is set")
        # Sample images at the saves show the very weights that a saved file holds.
        if saves := settled(self.config.output.save_every_steps):
            every, reason = saves, "same as output.save_every_steps"
        self.decide_auto("sampling.every_steps", every, reason)
        tenth = max(1, steps // 10)
        self.decide_auto("train.validate_every_steps", tenth, f"a tenth of {steps} steps")

    def decide_drawing(self) -> None:
        """Draw samples as the base's release is drawn; people judge a training by them."""
        facts = self.inputs.facts
        drawing, reason = facts.release.drawing, "as the base is published"
        if facts.release.distilled:
            reason = f"the base is distilled ({facts.release.distillation})"
        self.decide_auto("sampling.steps", drawing.steps, reason)
        self.decide_auto("sampling.guidance_scale", drawing.guidance_scale, reason)
        # Until the time of a step is known (`decide_previews`).
        self.decide_auto("sampling.preview", "off", reason)
        self.decide_auto("sampling.preview_steps", self.config.sampling.steps, reason)
        self.decide_auto("sampling.preview_resolution", self.config.data.resolution, reason)

    def decide_previews(self, pace: RunTimeInputs) -> None:
        """Draw previews in the best way that takes its share of the run; too slow for any, none."""
        asked = self.inputs.resolved.config.sampling
        if asked.preview == "off":
            return
        ways = list(pace.preview_ways(asked))
        way = next((each for each in ways if each.is_often), ways[-1])
        if not pace.config.sampling.every_steps:
            found = (
                "off",
                "sampling.every_steps is 0, and previews take memory and colours from sample images",
            )
        elif asked.preview == "auto" and not way.is_useful:
            found = (
                "off",
                f"one takes about {step_seconds_text(way.seconds)}: all of them above "
                f"{100 * PREVIEW_SHARE:g}% of the run's time",
            )
        else:
            found = (
                way.drawn,
                f"about {way.count} of {step_seconds_text(way.seconds)} each stay below "
                f"{100 * PREVIEW_SHARE:g}% of the run's time",
            )
        kind, reason = found
        for key, value in {
            "sampling.preview": kind,
            "sampling.preview_steps": way.steps,
            "sampling.preview_resolution": way.side_px,
        }.items():
            if value_of(self.inputs.resolved.config, key) == "auto":
                self.decide(key, value, reason)

    def decide_memory(self) -> MemoryChoice:
        """Choose base precision, checkpointing, streaming and micro-batch so that the run fits."""
        chooser = MemoryChooser(inputs=self.inputs, config=self.config, gpu=self.gpu)
        memory_choice, decisions = chooser.choose()
        for decision in decisions:
            self.decide(*decision)
        self.decide_compiling(memory_choice)
        self.decide_convolutions(memory_choice)
        return memory_choice

    def decide_compiling(self, memory_choice: MemoryChoice) -> None:
        """Decide whether blocks are compiled and in which mode: after memory, which chooses the checkpointing."""
        asked = self.config.hardware.compile
        if asked == "auto":
            self.decide("hardware.compile", *self._compiled_by_itself(memory_choice))
        elif asked == "blocks" and (obstacle := self._against_compiling()):
            self.decide("hardware.compile", "none", f"instead of blocks: {obstacle}")
        mode = self.config.hardware.compile_mode
        if mode != "default" and (obstacle := self._against_mode(memory_choice)):
            self.decide("hardware.compile_mode", "default", f"instead of {mode}: {obstacle}")

    def _compiled_by_itself(self, memory_choice: MemoryChoice) -> tuple[str, str]:
        """Return the value of `hardware.compile=auto` and its reason."""
        if obstacle := self._against_compiling() or self._no_gain_of_compiling():
            return "none", obstacle
        steps = settled(self.config.train.steps)
        graphs = self._graphs(memory_choice)
        evaluator = Evaluator(inputs=self.inputs, config=self.config, gpu=self.gpu)
        least, most = (
            share * steps * evaluator.time(memory_choice.load).seconds for share in COMPILED_SAVES
        )
        compile_s = COMPILE_S * graphs
        sums = (
            f"compiling {graphs} graphs takes about {duration_text(compile_s)}; by what others measured it saves "
            f"{duration_text(least)} to {duration_text(most)} of {steps:,} steps"
        )
        return ("blocks" if least >= PAYS_FROM * compile_s else "none"), sums

    def _graphs(self, memory_choice: MemoryChoice) -> int:
        """Return about how many graphs a run compiles."""
        shapes, any_size = compiled_sizes(
            self.inputs, self.config, images_at_once=memory_choice.images_at_once
        )
        # The first block of a network has an input without a gradient, a graph of its own.
        kinds = self.inputs.costs.block_kinds + 1
        if not any_size:
            return kinds * len(shapes)
        # One image and several are two graphs, padded texts another.
        several = any(count > 1 for _, _, count in shapes)
        one = any(count == 1 for _, _, count in shapes)
        sizes = kinds * (one + several * (1 + self.inputs.costs.family.text.masked))
        # Without references and with one more each, where each number of them has code of its own.
        counts = 1 + max(map(len, self.inputs.references.values()), default=0)
        return sizes * min(counts, self.inputs.facts.layouts)

    def _no_gain_of_compiling(self) -> str:
        """Return why compiled blocks are not known to be faster here, else ""; who asks for them gets them."""
        gpu = self.gpu
        if gpu is None:
            return "chosen on a GPU only"
        if not gpu.can.compiles:
            return f"not measured on {gpu.can.says}"
        if gpu.compute_capability is None or gpu.compute_capability < TRITON_CAPABILITY:
            return f"{gpu.capability}: Triton's kernels need 7.0 or higher"
        if self.inputs.hardware.packages.get("triton") is None:
            return "Triton, which compiles for GPUs, is not installed"
        if settled(self.config.memory.streamed_blocks):
            return "with streamed blocks steps wait for copies rather than for kernels"
        return ""

    def _against_mode(self, memory_choice: MemoryChoice) -> str:
        """Return why blocks cannot be compiled in the mode that was asked for, else ""."""
        config = self.config
        if config.hardware.compile == "none":
            return "nothing is compiled"
        if config.hardware.compile_mode == "max-autotune":
            by_time = "kernels that are chosen by their time may give other bits"
            return by_time if config.train.deterministic else ""
        if not self.gpu:
            return "only a GPU has CUDA graphs"
        if settled(config.memory.streamed_blocks):
            return "streamed blocks have their weights at another address each time"
        if self.inputs.costs.family.text.masked:
            return "each length of a text would be a graph of its own"
        each = memory_choice.images_at_once.values()
        if min(each, default=1) < math.ceil(config.train.batch_size / self.inputs.processes):
            return "the gradients of several passes a step cannot be added up in the graphs' memory"
        return ""

    def _against_compiling(self) -> str:
        """Return why blocks cannot be compiled with these settings, else ""; each was tried on every family."""
        config, adapter = self.config, self.config.adapter
        kind = "DoRA" if adapter.dora else adapter.kind
        if kind in ("DoRA", "loha", "lokr"):
            return f"peft's {kind} layers are not a single piece"
        if config.memory.attention == "xformers":
            return "memory.attention=xformers cannot be compiled"
        return ""

    def decide_convolutions(self, memory_choice: MemoryChoice) -> None:
        """Decide how convolutions are computed: as earlier runs found on this card, or by the first steps."""
        key, asked = "hardware.convolutions", self.config.hardware.convolutions
        if asked == "auto":
            self.decide(key, *self._convolutions_by_itself(memory_choice))
        elif asked != "plain" and (obstacle := self._against_convolutions(asked)):
            self.decide(key, "plain", f"instead of {asked}: {obstacle}")

    def _convolutions_by_itself(self, memory_choice: MemoryChoice) -> tuple[str, str]:
        """Return the value of `hardware.convolutions=auto` and its reason."""
        if obstacle := self._against_convolutions("fastest"):
            return "plain", obstacle
        if known := self.inputs.fastest_way(self.config):
            return known.way, str(known)
        steps, memory = settled(self.config.train.steps), memory_choice.memory
        if steps < COMPARED_FROM * MOST_STEPS:
            return "plain", f"comparing other ways takes up to {MOST_STEPS} of {steps:,} steps"
        if memory.limit_bytes - memory.peak_bytes < COMPARED_WITH_BYTES:
            return "plain", f"less than {gib(COMPARED_WITH_BYTES)} are free to compare other ways"
        return "fastest", f"not compared on this card yet: up to {MOST_STEPS} first steps do that"

    def _against_convolutions(self, asked: str) -> str:
        """Return why convolutions cannot be computed in the way that was asked for, else ""."""
        if self.gpu is None or not self.gpu.can.convolution_ways:
            return "chosen on NVIDIA's and AMD's GPUs only"
        kernels = (shape[2:] for shape in self.inputs.costs.layer_shapes("all").values())
        if not any(elements > 1 for (elements,) in filter(None, kernels)):
            return "the base's blocks have no convolutions"
        if asked != "channels_last" and self.config.train.deterministic:
            return "a way that is chosen by its time may give other bits"
        if asked == "fastest" and self.inputs.processes > 1:
            return "each step of several processes takes as long as the slowest of them"
        return ""

    def finish(self, memory_choice: MemoryChoice) -> Plan:
        """Predict the time, draw sample images less often if they would take much of it, and return the plan."""
        inputs, load = self.inputs, memory_choice.load
        config = build_run_config(flatten(self.config))
        pace = RunTimeInputs(inputs=inputs, config=config, gpu=self.gpu, load=load)
        every_steps = config.sampling.every_steps
        if inputs.resolved.config.sampling.every_steps == "auto" and every_steps:
            interval = pace.sample_interval(every_steps)
            if interval != every_steps:
                reason = "more sample images would take too much of the run's time"
                self.decide("sampling.every_steps", interval, reason)
                config = with_value(config, "sampling.every_steps", interval)
                pace = replace(pace, config=config)
        self.decide_previews(pace)
        config = build_run_config(flatten(self.config))
        pace = replace(pace, config=config)
        step = pace.step()
        run_time = pace.run_time()
        here = pace_here(
            inputs.hardware,
            gpu=self.gpu,
            past=inputs.past_runs,
            kind=run_kind(inputs, config),
        )
        return Plan(
            memory_choice=memory_choice,
            config=config,
            origins={**inputs.resolved.origins, **self.origins},
            steps=config.train.steps,
            epochs=config.train.steps * config.train.batch_size / inputs.epoch,
            seconds_per_step=here.of(STEPS, step.range_s),
            idle_step_s=step.seconds,
            idle_parts_s={name: middle(seconds) for name, seconds in run_time.parts.items()},
            run_time=RunTime(
                parts=here.of_parts(run_time.parts), images=here.of("validation", run_time.images)
            ),
            time_note="; ".join((step.note, *here.notes)),
            time_source=here.source,
            time_corrections=here.notes,
            beside_others=here.beside_others,
            disk_bytes=disk_bytes(inputs, config, load),
        )


def compiled_sizes(
    inputs: PlanInput, config: Config | RunConfig, *, images_at_once: Mapping[tuple[int, int], int]
) -> tuple[list[PixelShape], bool]:
    """Return the shapes of passes that are compiled, and whether one code serves all sizes, these and any other.

    Passes of one shape with texts of one length have code of their own, which is the fastest. CUDA graphs are of one
    size each.
    """
    shapes = pass_shapes(
        images_at_once, batch_size=config.train.batch_size, processes=inputs.processes
    )
    if inputs.costs.family.text.masked:
        return shapes, True
    any_size = len(shapes) > 1 and config.hardware.compile_mode != "reduce-overhead"
    return (shapes if any_size else shapes[:MOST_SHAPES]), any_size


def pass_shapes(
    images_at_once: Mapping[tuple[int, int], int], *, batch_size: int, processes: int = 1
) -> list[PixelShape]:
    """Return the shapes that passes may have, full micro-batches first.

    A step draws images from all buckets, so any smaller number of images of a bucket occurs too; with a
    single bucket only the rest of the division does.
    """
    counts = {size: set(range(1, cap + 1)) for size, cap in images_at_once.items()}
    # Equal shares of one bucket: each step has the same full micro-batches and the same rest.
    if len(counts) == 1 and batch_size % processes == 0:
        ((size, cap),) = images_at_once.items()
        counts[size] = {cap, batch_size // processes % cap} - {0}
    missing = {
        (*size, count): images_at_once[size] - count
        for size, batch_counts in counts.items()
        for count in batch_counts
    }
    # The shapes that are compiled first are those that most steps have: full ones, and large ones.
    return sorted(missing, key=lambda shape: (missing[shape], -shape[0] * shape[1], shape))
