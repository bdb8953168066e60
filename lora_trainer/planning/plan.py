"""The planner: every `auto` becomes a value with a reason, and the run fits or is refused.

It never changes the batch size and never raises what somebody set; it may only lower the memory a
given value takes, and says so. Micro-batch and checkpointing change memory and speed, not results.
No torch: input is facts and settings, output a `Plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.config.choices import CONCEPT
from lora_trainer.config.config import (
    FLOW_WEIGHTINGS,
    SCHEDULE_FREE,
    SNR_WEIGHTINGS,
    Config,
    Precision,
    build_config,
    concrete,
    flatten,
)
from lora_trainer.config.layers import Origin, Resolved, is_preset
from lora_trainer.config.recipe import rate_for_batch
from lora_trainer.costs.sample_cost import SampleCost
from lora_trainer.families.base import BaseFacts
from lora_trainer.hardware.machine import Gpu, Hardware
from lora_trainer.lora.adapter_size import total_elements
from lora_trainer.planning.allocation import Allocation, Allocator, Decision
from lora_trainer.planning.estimates import DiskUse, disk_bytes, run_length
from lora_trainer.planning.host_memory import HostPrediction
from lora_trainer.planning.loads import CostModel, Load, RememberedCosts
from lora_trainer.planning.memory import Prediction
from lora_trainer.planning.oom_history import OomRecord
from lora_trainer.planning.optimizer_facts import OPTIMIZERS, RATE, SCHEDULE, needed_otherwise
from lora_trainer.planning.precisions import on_card
from lora_trainer.planning.run_time import RunTime, RunTimeInputs
from lora_trainer.planning.speedups import compiling, graphing, run_facts
from lora_trainer.planning.weight_bytes import state_bytes

PLANNER = "planner"
INSTEAD = {
    "optimizer.name": "adamw",
    "memory.base_precision": "auto",
    "memory.base_matmul": "dequantized",
    "memory.attention": "sdpa",
    "hardware.compile": "none",
    "hardware.cuda_graphs": False,
}
"""What every kind of device has, of the settings that some lack."""
SAVES_PER_RUN = 5
VALIDATIONS_PER_RUN = 10
LARGE_TEXT_ENCODER = 2_000_000_000
"""Parameters above which a text encoder runs in bf16: in fp32 it would set the peak of the run."""


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """What a plan is made from: `images` are the different pictures trained on.

    `samples_per_epoch` counts repeats, of which each picture has at least `fewest_repeats`;
    `regularisation_per_epoch` is trained beside them. `buckets` are the (width, height) in use, in
    pixels, of each picture, held-out ones too. `latents` counts mirrored pictures twice, `texts` the
    different ones of all captions; None: as `data.flip` says, and each picture has its own. `full_card`
    is what an earlier run found out about this card; `processes` share each step, `sharing` of them the
    memory of a machine; `kept_at_once` are the images at once of a run that goes on as it was planned.
    """

    resolved: Resolved
    facts: BaseFacts
    family: CostModel
    hardware: Hardware
    images: int
    samples_per_epoch: int
    buckets: Sequence[tuple[int, int]]
    fewest_repeats: int = 1
    latents: int | None = None
    texts: int | None = None
    full_card: OomRecord | None = None
    processes: int = 1
    sharing: int = 1
    kept_at_once: Mapping[tuple[int, int], int] | None = None
    regularisation_per_epoch: int = 0
    held_out: int = 0
    """Pictures that are kept for validation."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A configuration without `auto` (but names and folders), its costs, and every decision.

    `load` is what memory and time were predicted for; `memory` is of the training device, `host` of the
    machine beside a card; `images_at_once` is the micro-batch of each bucket, (width, height) in pixels,
    the largest of them `memory.micro_batch`.
    """

    config: Config
    origins: Mapping[str, Origin]
    load: Load
    memory: Prediction
    host: HostPrediction | None
    images_at_once: Mapping[tuple[int, int], int]
    steps: int
    epochs: float
    seconds_per_step: tuple[float, float]
    run_time: RunTime
    time_note: str
    disk_bytes: Mapping[str, int]
    decisions: tuple[Decision, ...]
    modulation_samples: int = 0
    """For how many samples modulation is made at once; 0: in each pass."""


def plan(given: PlanInput) -> Plan:
    """Resolve every `auto` and fit the run into memory.

    Raises MachineError naming the nearest setting that fits when nothing does, and RequestError for
    settings this base or card cannot have.
    """
    planner = _Planner(given=given, values=flatten(given.resolved.config))
    planner.decide_device()
    planner.decide_numbers()
    planner.decide_objective()
    planner.decide_possible()
    planner.decide_packages()
    planner.decide_optimizer()
    planner.decide_length()
    allocation = planner.decide_speedups(planner.decide_memory())
    return planner.finish(allocation, planner.decide_samples(allocation))


@dataclass(kw_only=True)
class _Planner:
    given: PlanInput
    values: dict[str, Any]
    decisions: list[Decision] = field(default_factory=list)
    gpu: Gpu | None = None

    def __post_init__(self) -> None:
        self.costs = RememberedCosts(family=self.given.family)

    def decide(self, key: str, value: Any, reason: str, *, peak_bytes: int = 0) -> None:
        self.values[key] = value
        self.decisions = [choice for choice in self.decisions if choice.key != key]
        self.decisions.append(Decision(key=key, value=value, reason=reason, bytes=peak_bytes))

    def decide_auto(self, key: str, value: Any, reason: str) -> None:
        if self.values[key] == "auto":
            self.decide(key, value, reason)

    def decide_device(self) -> None:
        hardware, asked = self.given.hardware, self.values["hardware.device"]
        found = hardware.accelerator(sharing=self.given.sharing)
        here = found.value.can.torch_type if found.value else "cpu"
        if asked not in ("auto", "cpu", here):
            reason = f"the GPU here is {found.value.can.says}" if found.value else found.reason
            raise MachineError(
                f"hardware.device={asked}, but there is no GPU to use: {reason}"
                if found.value is None
                else f"hardware.device={asked}, but {reason}",
                fix=f"use --set hardware.device={here}",
            )
        self.decide_auto("hardware.device", here, found.reason)
        self.gpu = found.value if self.values["hardware.device"] != "cpu" else None
        threads, reason = hardware.cpu_threads, hardware.reasons.get("cpu_threads", "")
        if self.given.sharing > 1:
            reason = f"{threads} for {self.given.sharing} processes; {reason}"
        self.decide_auto("hardware.threads", max(1, threads // self.given.sharing), reason)

    def decide_numbers(self) -> None:
        facts = self.given.facts
        self.decide_auto("train.precision", *self._best_precision())
        self._check_precision()
        reason = f"the size {facts.source} was trained on"
        self.decide_auto("data.resolution", facts.resolution_px, reason)
        _check_resolution(int(self.values["data.resolution"]), facts)
        self._check_more_resolutions()
        if self.values["adapter.kind"] != "oft":
            rank = float(self.values["adapter.rank"])
            self.decide_auto("adapter.alpha", rank, "alpha = rank: the update is not scaled")
        self.decide_auto("memory.text_encoder_precision", *self._text_precision())
        if self.values["train.ema_decay"] is None:
            self.decide_auto("output.weights", "trained", "there is no running average")
        else:
            self.decide_auto("output.weights", "ema", "train.ema_decay asks for an average")

    def _check_precision(self) -> None:
        """Refuse what gives no numbers: hours of it would end in NaN, and what fits in fp16 fits in few bits."""
        precision, best = self.values["train.precision"], self._best_precision()[0]
        fix = f"use --set train.precision={best}"
        if precision not in self.given.family.precisions:
            raise RequestError(
                f"train.precision={precision}, but a {self.given.facts.family} base gives numbers in "
                f"{precision} that are not finite",
                fix=fix,
            )
        if precision == "bf16" and self.gpu and not self.gpu.has_bf16:
            raise RequestError(
                f"train.precision=bf16, but {self.gpu.name} has {_capability(self.gpu)}, "
                "and bf16 needs 8.0",
                fix=fix,
            )

    def _check_more_resolutions(self) -> None:
        key, own_px = "data.more_resolutions", int(self.values["data.resolution"])
        for side_px in self.values[key]:
            _check_resolution(side_px, self.given.facts, key=key)
            if side_px == own_px:  # that of the base, where `auto` took it
                raise RequestError(
                    f"{key} has {side_px}, which is data.resolution already", fix="leave it out"
                )

    def decide_objective(self) -> None:
        """Settle what only some kinds of bases have; a preset's wish gives way, a typed one may not."""
        facts = self.given.facts
        self._decide_weighting(is_flow=facts.prediction == "flow")
        self.decide_auto(
            "objective.zero_terminal_snr", facts.zero_terminal_snr, "as the base was trained"
        )
        self.decide_auto("base.prediction", facts.prediction, "what the base's files say")

    def _decide_weighting(self, *, is_flow: bool) -> None:
        source = self.given.facts.source
        gamma, key = "objective.min_snr_gamma", "objective.weighting"
        if is_flow:
            trained, reason = "by flow matching", "flow matching has no signal-to-noise weights"
            foreign, others = SNR_WEIGHTINGS, "bases that predict noise or v"
        else:
            trained, reason = "to predict noise or v", "its base is not trained by flow matching"
            foreign, others = FLOW_WEIGHTINGS, "flow matching"
        wrong = {key: self.values[key] in foreign}
        wrong[gamma] = is_flow and self.values[gamma] is not None
        for name, none in ((key, "none"), (gamma, None)):
            if not wrong[name]:
                continue
            if not self._is_preset(name) and self._layer(name) != "default":
                what = name if none is None else f"{name}={self.values[name]}"
                raise RequestError(
                    f"{what} weighs {others}, {source} is trained {trained}",
                    fix=f"leave it out, or use --set {name}={none or 'null'}",
                )
            self.decide(name, none, reason)
        if self.values[gamma] is None:
            self.decide_auto(key, "none", f"{gamma} is no number")
        else:
            self.decide_auto(key, "min_snr", f"{gamma} is a number")

    def _text_precision(self) -> tuple[Precision, str]:
        count, precision = self.given.facts.parts["text_encoder"].parameters, "train.precision"
        # A card that trains in fp32 for want of bf16 still computes texts in bf16, by way of fp32.
        wanted = self.gpu is None or not self._is_ours(precision)
        if count <= LARGE_TEXT_ENCODER or (wanted and self.values[precision] == "fp32"):
            return "fp32", f"{count / 1e6:,.0f} million parameters"
        return "bf16", f"{count / 1e9:.1f} billion parameters"

    def _best_precision(self) -> tuple[Precision, str]:
        if self.gpu is None:
            return "fp32", "16 bits save no time on a processor"
        capability, allowed = _capability(self.gpu), self.given.family.precisions
        best = on_card(allowed, self.gpu)[0]
        if best == "bf16":
            return best, f"{capability} has bf16"
        reason = f"{capability}: not known to have bf16"
        if best == "fp32":
            reason += (
                f", and in fp16 {self.given.facts.family} bases give numbers that are not finite; takes "
                "twice the memory of 16 bits and several times as long"
            )
        return best, reason

    def decide_possible(self) -> None:
        """Settle what a kind of GPU cannot have; a preset's wish gives way, a typed one may not."""
        if self.gpu is None:
            return
        kind = self.gpu.can
        for wish, why in kind.lacks.items():
            key, _, value = wish.partition("=")
            if str(self.values[key]) != value:
                continue
            if not self._is_preset(key):
                raise MachineError(
                    f"{key}={value.lower()} cannot be had on {kind.says}: {why}",
                    fix=f"use --set {key}={INSTEAD[key]}",
                )
            self.decide(key, INSTEAD[key], f"{value} is preset, but {why}")

    def decide_packages(self) -> None:
        """Settle what needs an optional package; a preset's wish gives way, a typed one may not."""
        packages, key = self.given.hardware.packages, "optimizer.name"
        name = self.values[key]
        package = OPTIMIZERS[name].package
        if package is not None and packages.get(package) is None:
            if not self._is_preset(key):
                raise MachineError(
                    f"optimizer.name={name} needs {package}, which is not installed",
                    fix=f"pip install {package}, or use --set optimizer.name=adamw",
                )
            reason = f"{name} is preset, but {package} is missing (pip install {package})"
            self.decide(key, "adamw", reason)
        key = "memory.attention"
        if self.values[key] == "xformers" and not (self.gpu and packages.get("xformers")):
            why = "is missing (pip install xformers)" if self.gpu else "needs a GPU"
            self.decide(key, "sdpa", f"xformers was asked for, but {why}")
        self.decide_auto(key, "sdpa", "PyTorch's own attention, always there")

    def decide_optimizer(self) -> None:
        """Settle what AdamW's presets would have wrong for another optimizer; what is typed stands."""
        name = self.values["optimizer.name"]
        shape = self.values[SCHEDULE]
        if name == SCHEDULE_FREE and shape != "constant" and not self._is_ours(SCHEDULE):
            raise RequestError(
                f"{SCHEDULE}={shape}, but {name} takes the place of a schedule",
                fix=f"leave it out, or use --set {SCHEDULE}=constant",
            )
        rate = self._rate_for_batch()
        for key, value, reason in needed_otherwise(name, preset_rate=rate):
            if self._is_ours(key) and self.values[key] != value:
                self.decide(key, value, reason)

    def _rate_for_batch(self) -> float:
        """Return AdamW's rate, moved from the batch it is preset for to the one that is trained."""
        rate, batch_size = float(self.values[RATE]), int(self.values["train.batch_size"])
        preset_batch_size = self.given.resolved.preset_batch_size
        if batch_size == preset_batch_size or not self._is_ours(RATE):
            return rate
        moved = rate_for_batch(rate, batch_size=batch_size, preset_batch_size=preset_batch_size)
        reason = (
            f"{rate:g} is preset for a batch of {preset_batch_size}: it goes with the square root"
        )
        self.decide(RATE, moved, reason)
        return moved

    def _is_ours(self, key: str) -> bool:
        """Say whether a value is this program's choice: not typed, nor in somebody's file."""
        layer = self._layer(key)
        named = layer.startswith("preset ") and layer != f"preset {self.given.resolved.tier}"
        return layer == "default" or (self._is_preset(key) and not named)

    def _is_preset(self, key: str) -> bool:
        return is_preset(self._layer(key))

    def _layer(self, key: str) -> str:
        return self.given.resolved.origins[key].layer

    @property
    def _epoch(self) -> int:
        return self.given.samples_per_epoch + self.given.regularisation_per_epoch

    def decide_length(self) -> None:
        length = run_length(
            images=self.given.images,
            samples=self.given.samples_per_epoch,
            repeats=self.given.fewest_repeats,
            batch_size=self.values["train.batch_size"],
            views=self.values["train.views"],
            regularisation=self.given.regularisation_per_epoch / self.given.samples_per_epoch,
            concept=self.values[CONCEPT],
        )
        self.decide_auto("train.steps", length.steps, length.reason)
        steps = int(self.values["train.steps"])
        fifth, reason = max(1, steps // SAVES_PER_RUN), f"a fifth of {steps} steps"
        if self.values["output.save_every_epochs"] is None:
            self.decide_auto("output.save_every_steps", fifth, reason)
        else:
            self.decide_auto("output.save_every_steps", 0, "output.save_every_epochs says when")
        if self.values["output.save_every_steps"]:
            fifth, reason = self.values["output.save_every_steps"], "as often as it is saved"
        self.decide_auto("sampling.every_steps", fifth, reason)
        tenth = max(1, steps // VALIDATIONS_PER_RUN)
        self.decide_auto("train.validate_every_steps", tenth, f"a tenth of {steps} steps")

    def decide_memory(self) -> Allocation:
        """Choose how the base is kept, what is recomputed, streamed and done at once, so that it fits."""
        allocation = Allocator(
            values=self.values,
            facts=self.given.facts,
            costs=self.costs,
            hardware=self.given.hardware,
            gpu=self.gpu,
            full_card=self.given.full_card,
            processes=self.given.processes,
            sharing=self.given.sharing,
            kept=self.given.kept_at_once,
            buckets=self.given.buckets,
            priority=self.given.resolved.priority,
            regularisation=self.given.regularisation_per_epoch / self._epoch,
        ).allocate()
        for choice in allocation.decisions:
            self.decide(choice.key, choice.value, choice.reason, peak_bytes=choice.bytes)
        return allocation

    def decide_speedups(self, allocation: Allocation) -> Allocation:
        """Settle what makes passes faster; recorded steps keep memory, which the prediction then has."""
        given = self.given
        told = run_facts(
            self.values,
            allocation=allocation,
            facts=given.facts,
            costs=self.costs,
            hardware=given.hardware,
            gpu=self.gpu,
            priority=given.resolved.priority,
            processes=given.processes,
        )
        compiled, graphed = compiling(told), graphing(told)
        for key, value, reason in (
            ("hardware.compile", "blocks" if compiled.use else "none", compiled.reason),
            ("hardware.cuda_graphs", graphed.use, graphed.reason),
        ):
            if self.values[key] != value:
                self.decide(key, value, reason)
        return replace(allocation, memory=told.recorded) if graphed.use else allocation

    def decide_samples(self, allocation: Allocation) -> RunTimeInputs:
        """Draw sample images less often than it is saved where they would take much of the run."""
        given, key = self.given, "sampling.every_steps"
        pictures = max(given.images, len(given.buckets))
        pace = RunTimeInputs(
            values=self.values,
            load=allocation.load,
            facts=given.facts,
            costs=self.costs,
            gpu=self.gpu,
            pinnable_bytes=given.hardware.pinnable_by_each(sharing=given.sharing),
            processes=given.processes,
            held_out=given.held_out,
            latents=pictures if given.latents is None else given.latents,
            texts=1 + (pictures if given.texts is None else given.texts),
        )
        if given.resolved.config.sampling.every_steps == "auto" and self.values[key]:
            interval = pace.sample_interval(self.values[key])
            if interval != self.values[key]:
                self.decide(key, interval, "more often, they would take too much of the time")
        return pace

    def finish(self, allocation: Allocation, pace: RunTimeInputs) -> Plan:
        given, config, step = self.given, build_config(self.values), pace.step()
        cost = self.costs.sample_cost(given.facts, allocation.load.workload())
        steps = concrete(config.train.steps)
        made = {
            choice.key: Origin(layer=PLANNER, reason=choice.reason) for choice in self.decisions
        }
        return Plan(
            config=config,
            origins={**given.resolved.origins, **made},
            load=allocation.load,
            memory=allocation.memory,
            host=allocation.host,
            images_at_once=allocation.images_at_once,
            steps=steps,
            epochs=steps * config.train.batch_size / self._epoch,
            seconds_per_step=(step.low_s, step.high_s),
            run_time=pace.run_time(),
            time_note=step.note,
            disk_bytes=self._disk(config, allocation.load, cost),
            decisions=tuple(self.decisions),
            modulation_samples=self.costs.frozen_base(given.facts, allocation.load).samples_ahead,
        )

    def _disk(self, config: Config, load: Load, cost: SampleCost) -> dict[str, int]:
        facts, (width_px, height_px) = self.given.facts, load.bucket_px
        tensors = self.costs.adapter_tensors(facts, load.adapter)
        latent_px = (width_px // facts.vae_factor) * (height_px // facts.vae_factor)
        images = max(self.given.images, len(self.given.buckets))
        use = DiskUse(
            latents=images * (1 + config.data.flip)
            if self.given.latents is None
            else self.given.latents,
            texts=1 + (images if self.given.texts is None else self.given.texts),
            latent_elements=facts.latent_channels * latent_px,
            mask_elements=0 if config.data.masks == "none" else latent_px,
            conditioning_bytes=cost.conditioning_bytes,
            adapter_parameters=total_elements(tensors),
            state_bytes=state_bytes(tensors, load.optimizer).total,
            export_precision=config.output.precision,
            keep_states=config.output.keep_states,
            keep_exports=config.output.keep_last + config.output.keep_best,
        )
        return disk_bytes(use)


def _check_resolution(
    resolution_px: int, facts: BaseFacts, *, key: str = "data.resolution"
) -> None:
    step_px = facts.bucket_step_px
    if resolution_px % step_px:
        below = resolution_px // step_px * step_px
        allowed = " or ".join(str(side) for side in (below, below + step_px) if side)
        raise RequestError(
            f"{key}={resolution_px} is not a multiple of {step_px} ({facts.family})",
            fix=f"use {allowed}",
        )


def _capability(gpu: Gpu) -> str:
    found = gpu.compute_capability
    return (
        "an unknown compute capability"
        if found is None
        else f"compute capability {found[0]}.{found[1]}"
    )
