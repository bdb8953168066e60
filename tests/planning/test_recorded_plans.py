"""Plans of many bases, machines and settings are those of recorded_plans.json: values, reasons, bytes, seconds.

After a change that is meant: `python -m tests.planning.test_recorded_plans`, and read the differences.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_trainer import families
from lora_trainer.common.errors import LoraTrainError
from lora_trainer.config.config import flatten
from lora_trainer.families.facts import BaseFacts
from lora_trainer.planning.plan_input import OomRecord
from tests.fakes.nvml import GIB
from tests.fakes.plans import FLUX, MACHINE, QWEN, SDXL, WITHOUT_CARD, machine, planned
from tests.fakes.stable_diffusion import mini_facts, sd15_facts

FILE = Path(__file__).with_name("recorded_plans.json")
APPLE = {"kind": "mps", "name": "Apple M3 Max", "bf16": True, "compute_capability": None}
ARC = {"kind": "xpu", "name": "Intel(R) Arc(TM) A770 Graphics", "bf16": True}
HOPPER = {"name": "NVIDIA H100", "compute_capability": (9, 0), "packages": {"triton": "3.5"}}
TURING = {"name": "NVIDIA GeForce RTX 2080", "compute_capability": (7, 5)}
MACHINES = {
    "6": machine(6, ram_gib=14),
    "8": machine(8),
    "12": MACHINE,
    "12, little RAM": machine(12, ram_gib=14),
    "12, 11 free": machine(12, free_bytes=11 * GIB, display=True),
    "16, Windows": machine(16, spills=True, ram_gib=60),
    "24": machine(24, ram_gib=60, name="NVIDIA GeForce RTX 3090"),
    "80": machine(80, ram_gib=200, **HOPPER),
    "two of 24": replace(machine(24), gpus=machine(24).gpus * 2),
    "11, Turing": machine(11, **TURING),
    "8, Pascal": machine(8, name="GTX 1080", compute_capability=(6, 1)),
    "unknown capability": machine(24, name="Voodoo 2", compute_capability=None),
    "WSL": replace(MACHINE, pinnable_bytes=GIB // 2),
    "segments": replace(MACHINE, expandable_segments=False),
    "Apple": machine(48, **APPLE),
    "Arc": machine(16, **ARC),
    "bare": replace(MACHINE, packages={"torch": "2.13.0"}),
    "processor": WITHOUT_CARD,
    **{name: machine(24, name=name) for name in ("NVIDIA L40S", "NVIDIA A100-SXM4", "A10G")},
    **{f"{gib} of a kind": machine(gib, name="Voodoo 2") for gib in (9, 17, 34, 48, 192)},
}


def with_parts(**parameters: int) -> BaseFacts:
    """Return the facts of Stable Diffusion 1.5 with other numbers of weights."""
    facts = sd15_facts()
    changed: Any = {
        name: replace(part, parameters=parameters.get(name, part.parameters))
        for name, part in facts.parts.items()
    }
    return replace(facts, parts=changed)


SIZES = ((512, 512), (448, 576))
LARGE_SIZES = ((1024, 1024), (768, 1344), (512, 512))
FIRST = {name: next(iter(families.family(name).releases)) for name in families.MODULES}
FLOW = replace(sd15_facts(), prediction="flow")
V_PREDICTION = replace(sd15_facts(), prediction="v_prediction", zero_terminal_snr=True)
LION, LONG = {"optimizer.name": "lion"}, {"train.steps": 200_000}
CLASS = {"data.trigger": "sks", "data.class_word": "dog", "train.batch_size": 2}
SETTINGS: list[dict[str, Any]] = [
    *({"adapter.kind": kind} for kind in ("loha", "lokr", "oft")),
    *({"adapter.dropout": 0.1, "train.precision": dtype} for dtype in ("bf16", "fp32")),
    *({"adapter.dropout": 0.1, "adapter.dora": True, "train.precision": d} for d in ("bf16", "fp32")),
    {"adapter.kind": "loha", "adapter.text_encoder": True, "memory.gradient_checkpointing": "full"},
    {"adapter.text_encoder": True}, {"adapter.new_tokens": 2, "data.trigger": "sks"}, {"adapter.conv_rank": 8},
    {"adapter.rank": 512}, {"adapter.rank": 128, "optimizer.name": "paged_adamw8bit"},
    {"train.ema_decay": 0.9}, {"output.keep_best": True}, {"data.masks": "alpha"},
    {"objective.preservation_weight": 0.5, **CLASS}, {"data.prefetch_steps": 4, "train.batch_size": 2},
    *({"optimizer.name": name} for name in (
        "adamw8bit", "paged_adamw8bit", "adafactor", "came", "muon", "prodigy", "lion8bit",
        "schedulefree_adamw",
    )),
    {**LION, "optimizer.learning_rate": 3e-4, "optimizer.beta2": 0.9},
    {"optimizer.name": "schedulefree_adamw", "optimizer.schedule": "linear"},
    {"optimizer.name": "schedulefree_adamw", "optimizer.schedule": "constant"},
    {"optimizer.name": "prodigy", "train.batch_size": 4},
    *({"memory.base_precision": kind} for kind in ("bf16", "int8", "fp8", "nf4")),
    *({"memory.base_precision": kind, "memory.streamed_blocks": 10} for kind in ("int8", "nf4")),
    *({"memory.gradient_checkpointing": kind} for kind in ("none", "light", "selective", "full")),
    {"memory.gradient_checkpointing": "offloaded", "memory.streamed_blocks": 4, "train.batch_size": 2},
    {"memory.gradient_checkpointing": False, "train.batch_size": 4},
    {"memory.streamed_blocks": 400}, {"memory.micro_batch": 2, "train.batch_size": 5},
    {"memory.text_encoder_offload": True}, {"memory.text_encoder_offload": False},
    {"memory.text_encoder_precision": "fp32"},
    *({"train.precision": dtype} for dtype in ("fp16", "fp32")),
    {"train.precision": "fp32", "memory.base_precision": "fp32", "base.assistant": "a.safetensors"},
    {"base.assistant": "a.safetensors"}, *({"hardware.device": kind} for kind in ("cpu", "mps", "cuda")),
    {"hardware.vram_limit_gib": 5}, {"hardware.vram_limit_gib": 40},
    {"hardware.compile": "blocks"}, {"hardware.compile": "blocks", "adapter.dora": True},
    {"hardware.compile": "blocks", "objective.preservation_weight": 0.5, **CLASS},
    {"hardware.compile": "blocks", "adapter.rank_dropout": 0.1},
    {"hardware.compile": "blocks", "base.assistant": "a.safetensors"},
    {"data.resolution": 1000}, {"data.resolution": 768, "data.more_resolutions": [512, 1024]},
    {"data.resolution": 512, "data.more_resolutions": [512]}, {"data.flip": True},
    {"data.resolution": 2048, "train.batch_size": 8, "adapter.rank": 64},
    *({"train.steps": 3, "output.save_every_steps": every} for every in ("auto", 0, 2)),
    {"output.save_every_epochs": 2}, {"output.save_every_steps": 400}, {"output.keep_states": 5},
    {"sampling.every_steps": 0}, {"sampling.every_steps": 100, "sampling.steps": 1000},
    {"sampling.steps": 1000}, {"sampling.guidance_scale": 1.0}, {"train.validate_every_steps": 0},
    {"train.concept": "style"}, {"train.concept": "person", "train.batch_size": 7},
    *({"objective.weighting": kind} for kind in ("p2", "cosmap", "sigma_sqrt", "none")),
    {"objective.min_snr_gamma": None}, {"objective.zero_terminal_snr": False},
]  # fmt: skip
LENGTHS = ((14, 8, 60), (100, 2, 120), (500, 4, 120), (30_000, 4, 120), (1, 7, 120))
REGULARISED = {"objective.prior": "base", "data.regularisation_dir": "other"}
BEFORE = {"memory.micro_batch": 2, "memory.gradient_checkpointing": "light", "train.batch_size": 4}
BEFORE |= {"memory.base_precision": "bf16", "memory.streamed_blocks": 0}
BEFORE |= {"memory.text_encoder_offload": False}
INPUTS: Mapping[str, dict[str, Any]] = {
    "out of memory before": {"full_card": OomRecord(share=0.5, on="2026-01-02")},
    "resumed": {"kept_at_once": dict.fromkeys(SIZES, 2), "buckets": SIZES, "overrides": BEFORE},
    "resumed with another bucket": {"kept_at_once": {SIZES[0]: 2}, "buckets": SIZES},
    "regularised": {"regularisation_per_epoch": 10, "overrides": REGULARISED},
    "repeats": {"samples_per_epoch": 200, "fewest_repeats": 10},
    "uneven repeats": {"samples_per_epoch": 3801, "fewest_repeats": 1},
    "captions": {"texts": 40, "latents": 60, "prompts": 3, "held_out_count": 4},
    "named preset": {"overrides": LION, "layers": {"optimizer.learning_rate": "preset /a.json"}},
    "settings file": {"overrides": LION, "layers": {"optimizer.learning_rate": "config a.toml"}},
    "weighting of a preset": {
        "overrides": {"objective.weighting": "cosmap"},
        "layers": {"objective.weighting": "preset quality"},
    },
    **{
        f"{images} images, {batch} a step, {views} views": {
            "images": images,
            "samples_per_epoch": images,
            "overrides": {"train.batch_size": batch, "train.views": views},
        }
        for images, batch, views in LENGTHS
    },
}


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a name and the arguments of `planned`."""
    for base in (None, FLUX):
        for name, hardware in MACHINES.items():
            sizes = LARGE_SIZES if base else SIZES
            how: dict[str, Any] = {"base": base, "hardware": hardware, "buckets": sizes}
            yield f"{base}, {name}", {**how, "held_out_count": 2}
    for family, base in FIRST.items():
        for name in ("8", "8, Pascal"):
            yield f"{family}, {name}", {"base": base, "hardware": MACHINES[name]}
        how = {"base": base, "hardware": MACHINES["24"]}
        yield f"{family}, fp16", {**how, "overrides": {"train.precision": "fp16"}}
    unfit = {"train.precision": "fp32", "memory.base_precision": "fp32"}
    unfit["base.assistant"] = "a.safetensors"  # with which nothing is streamed
    for family, gib, gpu in (("zimage", 24, {}), ("zimage", 24, TURING), ("sd3", 10, TURING)):
        how = {"base": FIRST[family], "hardware": machine(gib, ram_gib=52, **gpu)}
        yield f"{family}, fp32, {gpu}", {**how, "overrides": unfit}
    for priority in ("speed", "quality"):
        for base in (SDXL, QWEN):
            for name in ("8", "80", "processor"):
                how = {"base": base, "hardware": MACHINES[name], "priority": priority}
                yield f"{base}, {name}, {priority}", how
                yield f"{base}, {name}, {priority}, long", {**how, "overrides": LONG}
    for base, name in ((None, "processor"), (FLUX, "24")):
        for asked in SETTINGS:
            how = {"base": base, "hardware": MACHINES[name], "overrides": asked}
            yield f"{base}, {name}, {json.dumps(asked)}", {**how, "held_out_count": 2}
    how = {"base": QWEN, "hardware": MACHINES["24"], "overrides": {"hardware.compile": "blocks"}}
    yield f"{QWEN}, 24, compiled", how
    for base in (None, FLUX):
        for words, changes in INPUTS.items():
            yield f"{base}, {words}", {"base": base, "hardware": MACHINES["24"], **changes}
    for processes in (2, 3):
        split = {"processes": processes, "sharing": processes, "overrides": {"train.batch_size": 4}}
        for base in (None, FLUX):
            how = {"base": base, "hardware": MACHINES["two of 24"], **split}
            yield f"{base}, {processes} processes", {**how, "held_out_count": 4}
    for gib in (1.5, 2.2, 2.45, 2.8, 3.0, 3.4, 3.7, 5, 5.5):
        how = {"hardware": machine(12, free_bytes=int(gib * GIB)), "buckets": SIZES}
        yield f"{gib} free", {**how, "overrides": {"train.batch_size": 4}}
    for gib, asked in (
        *((gib, {}) for gib in (3.1, 3.2, 3.3, 3.4)),
        (2.9, {"adapter.rank": 512}),
        (12, {"memory.streamed_blocks": 4}),
    ):
        how = {"hardware": machine(12, free_bytes=int(gib * GIB)), "overrides": asked}
        yield f"{gib} free, {asked}", how
    for limit_gib in (8, 15.9):
        asked = {"hardware.vram_limit_gib": limit_gib}
        yield f"{limit_gib} on Windows", {"hardware": MACHINES["16, Windows"], "overrides": asked}
    asked = {"memory.gradient_checkpointing": "offloaded", "memory.streamed_blocks": 20}
    for pinnable_gib in (0.5, 9):
        hardware = replace(MACHINES["24"], pinnable_bytes=int(pinnable_gib * GIB))
        yield f"{pinnable_gib} pinnable", {"base": FLUX, "hardware": hardware, "overrides": asked}
    yield f"{QWEN}, too little RAM", {"base": QWEN, "hardware": machine(12, ram_gib=12)}
    for words, facts in (
        *(("flow", FLOW), ("v-prediction", V_PREDICTION), ("miniature", mini_facts())),
        *((f"text of {n}", with_parts(text_encoder=n)) for n in (2_000_000_000, 2_000_000_001)),
        ("tiny denoiser", with_parts(denoiser=1)),
    ):
        for asked in (
            {},
            {"objective.weighting": "cosmap"},
            {"objective.weighting": "soft_min_snr"},
        ):
            how = {"base": facts, "hardware": MACHINES["24"], "overrides": asked}
            yield f"{words}, {asked}", how
        how = {"base": facts, "layers": {"objective.min_snr_gamma": "config a.toml"}}
        yield f"{words}, typed gamma", how


def rounded(*values: float) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def record(how: dict[str, Any]) -> dict[str, Any]:
    """Return a plan as flat JSON values, or its refusal."""
    try:
        made = planned(**how)
    except LoraTrainError as error:
        return {"refused": f"{type(error).__name__}, exit code {error.exit_code}: {error}"}
    found: dict[str, Any] = {
        "at once": {str(size): count for size, count in made.images_at_once.items()},
        "length": [made.steps, *rounded(made.epochs)],
        "step": [*rounded(*made.seconds_per_step), made.time_note],
        "limit": made.memory.limit_bytes,
    }
    values = flatten(made.config)
    for key, origin in made.origins.items():
        if origin.layer == "planner":
            found[key] = [values[key], origin.reason]
    memories = [("device", made.memory)]
    if made.host is not None:
        memories.append(("host", made.host))
        found["loading"] = [made.host.limit_bytes, made.host.loading_bytes, made.host.loads_slowly]
        found["pinned"] = [each.note for each in made.host.items if "pinned" in each.note]
    for place, memory in memories:
        found |= {f"{place}, {phase}": size for phase, size in memory.phases.items()}
        for item in itertools.chain(*memory.by_phase.values()):
            found[f"{place}: {item.name}"] = item.bytes
    found |= {f"time, {part}": rounded(*pair) for part, pair in made.run_time.parts.items()}
    found |= {f"disk, {part}": size for part, size in made.disk_bytes.items()}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


CASES = dict(cases())


@pytest.fixture(scope="module")
def recorded() -> Mapping[str, Any]:
    """The records by case; the file has for each what differs from the case before it, null for what is gone."""
    found, last = {}, {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        name, changes = json.loads(line)
        last = {key: value for key, value in {**last, **changes}.items() if value is not None}
        found[name] = last
    return found


def test_every_case_is_recorded(recorded: Mapping[str, Any]) -> None:
    assert list(recorded) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_what_was_recorded(name: str, recorded: Mapping[str, Any]) -> None:
    found = {key: value for key, value in record(CASES[name]).items() if value is not None}
    assert found == recorded[name]


if __name__ == "__main__":
    last: dict[str, Any] = {}
    with FILE.open("w", encoding="utf-8") as file:
        for name, how in CASES.items():
            found = record(how)
            keys = dict.fromkeys([*found, *last])
            changes = {key: found.get(key) for key in keys if found.get(key) != last.get(key)}
            file.write(json.dumps([name, changes], ensure_ascii=False) + "\n")
            last = found
