"""What another optimizer than AdamW changes in a plan: its library, its rate, its memory, what is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.config.config import SCHEDULE_FREE, OptimizerName, build_config
from lora_trainer.config.constraints import OPTIMIZER_PACKAGES
from lora_trainer.config.layers import Origin
from lora_trainer.planning.optimizer_facts import OPTIMIZERS, RATE, optimizer_remarks
from lora_trainer.planning.plan import Plan, plan
from tests.planning.test_plan import MACHINE, planned, request

LIBRARIES = {"torch": "2.13.0"} | {package: "1" for package in OPTIMIZER_PACKAGES.values()}


@pytest.mark.parametrize("name", list(OPTIMIZER_PACKAGES))
def test_an_optimizer_without_its_package_is_refused_before_the_start(name: OptimizerName) -> None:
    package = OPTIMIZER_PACKAGES[name]
    without = {key: value for key, value in LIBRARIES.items() if key != package}
    with pytest.raises(MachineError, match=f"pip install {package}"):
        planned(hardware=replace(MACHINE, packages=without), overrides={"optimizer.name": name})


def with_optimizer(name: str, **overrides: Any) -> Plan:
    hardware = replace(MACHINE, packages=LIBRARIES)
    return planned(hardware=hardware, overrides={"optimizer.name": name, **overrides})


@pytest.mark.parametrize(
    ("name", "rate"),
    [("adamw", 1e-4), ("lion", 2e-5), ("came", 1e-5), ("muon", 2e-4), ("prodigy", 1.0)],
)
def test_the_learning_rate_of_a_preset_follows_the_optimizer(name: str, rate: float) -> None:
    made = with_optimizer(name)
    assert made.config.optimizer.learning_rate == pytest.approx(rate)
    origin = made.origins["optimizer.learning_rate"]
    assert origin.layer == ("planner" if rate != 1e-4 else "family sd15")
    assert (name in origin.reason) == (rate != 1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_learning_rate_that_somebody_gave_is_never_changed(name: str) -> None:
    typed = {"optimizer.learning_rate": 3e-4, "optimizer.beta2": 0.9}
    made = with_optimizer(name, **typed)
    assert (made.config.optimizer.learning_rate, made.config.optimizer.beta2) == (3e-4, 0.9)
    given = request(overrides={"optimizer.name": name})
    for layer in ("config mine.toml", "preset /my/settings.json", "resumed run"):
        given = replace(given, hardware=replace(MACHINE, packages=LIBRARIES))
        origins = {**given.resolved.origins, RATE: Origin(layer=layer)}
        made = plan(replace(given, resolved=replace(given.resolved, origins=origins)))
        assert made.config.optimizer.learning_rate == 1e-4


def test_lion_has_a_decay_of_its_own_and_schedule_free_no_schedule() -> None:
    assert with_optimizer("lion").config.optimizer.beta2 == 0.99
    assert with_optimizer("adamw").config.optimizer.beta2 == 0.999
    free = with_optimizer(SCHEDULE_FREE)
    assert free.config.optimizer.schedule == "constant"
    assert "needs no schedule" in free.origins["optimizer.schedule"].reason
    with pytest.raises(RequestError, match=r"optimizer\.schedule=linear"):
        with_optimizer(SCHEDULE_FREE, **{"optimizer.schedule": "linear"})
    typed = with_optimizer(SCHEDULE_FREE, **{"optimizer.schedule": "constant"})
    assert typed.origins["optimizer.schedule"].layer == "command line"


def test_the_averaged_weights_of_schedule_free_are_planned_for() -> None:
    free, plain = (
        {item.name: item.bytes for item in with_optimizer(name).memory.by_phase["training"]}
        for name in (SCHEDULE_FREE, "adamw")
    )
    assert free["averaged weights"] == free["adapter weights"]
    assert "averaged weights" not in plain


def remarks(**values: Any) -> list[str]:
    config = build_config({key.replace("__", "."): value for key, value in values.items()})
    shapes = {"line": (24, 36), "conv": (54, 20, 9)}
    return [found.what for found in optimizer_remarks(config, shapes=shapes)]


@pytest.mark.parametrize(
    ("name", "rate", "is_odd"),
    [
        ("adamw", 1e-4, False),
        ("adamw", 2e-3, False),  # the embedded base's own
        ("adamw", 1.0, True),
        ("prodigy", 1.0, False),
        ("prodigy", 1e-4, True),
        ("lion", 1e-4, False),
        ("lion", 1e-2, True),
        ("came", 1e-2, True),
    ],
)
def test_a_rate_that_nobody_would_use_is_remarked_on(name: str, rate: float, is_odd: bool) -> None:
    found = remarks(optimizer__name=name, optimizer__learning_rate=rate)
    assert len(found) == is_odd
    assert all(f"unusual for {name}" in what for what in found)


def test_what_muon_leaves_to_adamw_is_said() -> None:
    assert remarks(optimizer__name="muon", adapter__dora=True) == [
        "4 of 6 tensors are no matrices, so AdamW trains them"
    ]
    assert remarks(optimizer__name="adamw") == []


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"optimizer.name": "prodigy", "optimizer.lora_plus_ratio": 4.0}, "lora_plus_ratio=4"),
        (
            {
                "optimizer.name": "prodigy",
                "adapter.text_encoder": True,
                "optimizer.text_encoder_learning_rate": 1.0,
            },
            "text_encoder_learning_rate",
        ),
        (
            {
                "optimizer.name": "prodigy",
                "adapter.text_encoder": True,
                "adapter.new_tokens": 1,
                "data.trigger": "zwx",
                "optimizer.new_tokens_learning_rate": 1.0,
            },
            "new_tokens_learning_rate",
        ),
        (
            {"optimizer.name": "prodigy", "optimizer.learning_rate_pattern": {"attn": 0.5}},
            "learning_rate_pattern",
        ),
        ({"optimizer.name": SCHEDULE_FREE, "train.ema_decay": 0.9}, "train.ema_decay=0.9"),
        ({"optimizer.name": SCHEDULE_FREE, "optimizer.max_weight_norm": 1.0}, "max_weight_norm=1"),
        ({"optimizer.name": SCHEDULE_FREE, "optimizer.beta1": 0.0}, "beta1=0"),
        ({"optimizer.name": "muon", "adapter.kind": "oft"}, "adapter.kind=oft"),
    ],
    ids=str,
)
def test_what_an_optimizer_cannot_do_is_refused(values: dict[str, Any], found: str) -> None:
    with pytest.raises(RequestError, match=found):
        build_config(values)


def test_prodigy_may_freeze_layers_and_trains_text_encoders_at_its_own_rate() -> None:
    config = build_config(
        {"optimizer.name": "prodigy", "optimizer.learning_rate_pattern": {"attn": 0, "ff": 1}}
    )
    assert config.optimizer.text_encoder_scale == 1.0 == config.optimizer.new_tokens_scale
    assert build_config({}).optimizer.text_encoder_scale == 0.5
