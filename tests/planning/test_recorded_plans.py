"""Plans of plan_cases.json are those of recorded_plans.json: values, reasons, bytes, seconds.

At most 40 cases, chosen so that every kind of machine and remedy is met, and one of each family that is not among
them. A case is the arguments of `planned`; what it does not say is as in `MACHINE` and `request` of
tests/fakes/plans.py.
After a change that is meant: `python -m tests.planning.test_recorded_plans`, and read the differences.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_trainer import families
from lora_trainer.common.errors import LoraTrainError
from lora_trainer.config.config import flatten
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.hardware.machine import Hardware
from lora_trainer.planning.plan_input import OomRecord
from tests.fakes.plans import CARD, MACHINE, mini_facts, planned, sd15_facts

FILE = Path(__file__).with_name("recorded_plans.json")
DESCRIBED = json.loads(Path(__file__).with_name("plan_cases.json").read_text(encoding="utf-8"))
_PLANNED = {case.get("base") for case in DESCRIBED["cases"].values()}
CASES: Mapping[str, Mapping[str, Any]] = DESCRIBED["cases"] | {
    f"{name}, 24": {"machine": "24", "base": base}
    for name in families.NAMES
    if (base := next(iter(families.family(name).releases))) not in _PLANNED
}
"""Those of the file, and a plan on 24 GB of each family that the file lacks."""


def machine_of(described: str | Mapping[str, Any]) -> Hardware:
    """Return a machine by its name in the file, or one that differs from `MACHINE`."""
    differs = dict(DESCRIBED["machines"][described] if isinstance(described, str) else described)
    gpu, count = differs.pop("gpu", {}), differs.pop("count", 1)
    if capability := gpu.get("compute_capability"):
        gpu = {**gpu, "compute_capability": tuple(capability)}
    return replace(MACHINE, gpus=(replace(CARD, **gpu),) * count, **differs)


def facts_of(described: Any) -> BaseFacts:
    """Return facts that differ from those of Stable Diffusion 1.5, also in parameters by part."""
    if described == "miniature":
        return mini_facts()
    facts, differs = sd15_facts(), dict(described)
    counts = differs.pop("parameters", {})
    parts: Any = {
        name: replace(part, parameters=counts.get(name, part.parameters))
        for name, part in facts.parts.items()
    }
    release = replace(facts.release, **differs.pop("release", {}))
    return replace(facts, release=release, parts=parts, **differs)


def rounded(*values: float) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def record(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan as flat JSON values, or its refusal."""
    how = {**case, "hardware": machine_of(case["machine"])}
    del how["machine"]
    if "facts" in how:
        how["base"] = facts_of(how.pop("facts"))
    how["buckets"] = [tuple(size) for size in how.get("buckets", ())]
    if "full_card" in how:
        how["full_card"] = OomRecord(**how["full_card"])
    if "kept_at_once" in how:
        how["kept_at_once"] = {(width, height): n for width, height, n in how["kept_at_once"]}
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
        found["host limit"] = made.host.limit_bytes
        found["pinned"] = [each.note for each in made.host.items if "pinned" in each.note]
    for place, memory in memories:
        found |= {f"{place}, {phase}": size for phase, size in memory.phases.items()}
        for item in itertools.chain(*memory.by_phase.values()):
            found[f"{place}: {item.name}"] = item.bytes
    found |= {f"time, {part}": rounded(*pair) for part, pair in made.run_time.parts.items()}
    found |= {f"disk, {part}": size for part, size in made.disk_bytes.items()}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


@pytest.fixture(scope="module")
def recorded() -> Mapping[str, Any]:
    plans: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return plans


def test_every_case_is_recorded(recorded: Mapping[str, Any]) -> None:
    assert list(recorded) == list(CASES), "run python -m tests.planning.test_recorded_plans"


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_what_was_recorded(name: str, recorded: Mapping[str, Any]) -> None:
    assert record(CASES[name]) == recorded[name]


def test_a_resumed_run_has_the_plan_of_its_start() -> None:
    """Its text encoders are offloaded as before, or its record would say that the card is too small."""
    hardware, base = machine_of(CASES["chroma, 8"]["machine"]), CASES["chroma, 8"]["base"]
    made = planned(base, hardware)
    assert made.config.memory.text_encoder_offload is True
    kept = {**flatten(made.config), "train.steps": made.steps}
    again = planned(base, hardware, overrides=kept, kept_at_once=made.images_at_once)
    assert again.memory.phases == made.memory.phases
    assert again.memory.fits


def as_text(plans: Mapping[str, Mapping[str, Any]]) -> str:
    """Return plans as JSON with one value a line, so that a difference is read line by line."""

    def entry(key: str, value: Any) -> str:
        return f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"

    blocks = [
        f"{json.dumps(name, ensure_ascii=False)}: {{\n"
        + ",\n".join(f"  {entry(key, value)}" for key, value in plan.items())
        + "\n}"
        for name, plan in plans.items()
    ]
    return "{\n" + ",\n".join(blocks) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(as_text({name: record(how) for name, how in CASES.items()}), encoding="utf-8")
