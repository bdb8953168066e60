"""The planner: nothing stays auto, nothing is raised, it fits or the error names what would fit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config import flatten, parse_assignment
from lora_trainer.errors import MachineError, RequestError, exit_code
from lora_trainer.hardware import GIB, Hardware
from lora_trainer.memory import RememberedCosts
from lora_trainer.nvml import Gpu
from lora_trainer.plan import Plan, PlanInput, plan
from lora_trainer.resolve import resolve
from tests.fakes.stable_diffusion import UNetCosts, mini_facts, sd15_facts

COSTS = RememberedCosts(family=UNetCosts())
LEFT_TO_RUN = {"base.model", "data.cache_dir", "output.name"}
CARD = Gpu(
    index=0,
    name="NVIDIA GeForce RTX 3060",
    total_bytes=12 * GIB,
    free_bytes=12 * GIB,
    compute_capability=(8, 6),
    driver="570",
)
MACHINE = Hardware(
    gpus=(CARD,),
    gpu_reason="1 of 1 NVIDIA GPUs usable",
    cpu_name="A Processor",
    cpu_threads=6,
    ram_total_bytes=32 * GIB,
    ram_free_bytes=24 * GIB,
    packages={"torch": "2.13.0", "bitsandbytes": "0.50", "xformers": None},
    reasons={"cpu_threads": "6 physical cores among 12 usable processors"},
)
WITHOUT_CARD = replace(MACHINE, gpus=(), gpu_reason="no NVIDIA driver")


def request(
    *,
    overrides: dict[str, Any] | None = None,
    free_gib: float = 12,
    hardware: Hardware = MACHINE,
    tier: str = "10-12",
    images: int = 20,
    repeats: int = 1,
    buckets: tuple[tuple[int, int], ...] = ((512, 512), (448, 576)),
) -> PlanInput:
    if hardware.gpus:
        card = replace(hardware.gpus[0], free_bytes=int(free_gib * GIB))
        hardware = replace(hardware, gpus=(card,))
    resolved = resolve(
        family="sd15",
        tier=tier,
        priority="balanced",
        preset="auto",
        config_file=None,
        overrides=overrides or {},
    )
    return PlanInput(
        resolved=resolved,
        facts=sd15_facts(),
        family=COSTS,
        hardware=hardware,
        images=images,
        samples_per_epoch=images * repeats,
        buckets=buckets,
    )


def planned(**changes: Any) -> Plan:
    return plan(request(**changes))


@pytest.mark.parametrize("hardware", [MACHINE, WITHOUT_CARD], ids=["cuda", "cpu"])
def test_no_auto_is_left_and_every_decision_has_a_reason(hardware: Hardware) -> None:
    given = request(hardware=hardware)
    made = plan(given)
    left = {key for key, value in flatten(made.config).items() if value == "auto"}
    assert left == LEFT_TO_RUN
    decided = {choice.key for choice in made.decisions}
    before = flatten(given.resolved.config)
    assert decided == {key for key, value in before.items() if value == "auto"} - LEFT_TO_RUN
    for choice in made.decisions:
        assert choice.reason
        assert flatten(made.config)[choice.key] == choice.value
        assert made.origins[choice.key].layer == "planner"
        assert made.origins[choice.key].reason == choice.reason
    for key in set(before) - decided:
        assert made.origins[key] == given.resolved.origins[key]


def test_values_that_follow_from_the_base_and_the_machine() -> None:
    config = planned().config
    assert config.data.resolution == 512
    assert config.adapter.alpha == config.adapter.rank
    assert config.hardware.threads == 6
    assert (config.hardware.device, config.train.precision) == ("cuda", "bf16")
    assert config.memory.attention == "sdpa"
    on_cpu = planned(hardware=WITHOUT_CARD)
    assert (on_cpu.config.hardware.device, on_cpu.config.train.precision) == ("cpu", "fp32")
    assert on_cpu.origins["hardware.device"].reason == "no NVIDIA driver"


def test_a_typed_cpu_wins_over_the_card() -> None:
    made = planned(overrides={"hardware.device": "cpu"})
    assert (made.config.hardware.device, made.config.train.precision) == ("cpu", "fp32")
    assert made.memory.limit_bytes == MACHINE.ram_free_bytes


def test_cuda_without_a_card_says_why() -> None:
    with pytest.raises(MachineError, match="no NVIDIA driver") as caught:
        planned(overrides={"hardware.device": "cuda"}, hardware=WITHOUT_CARD)
    assert exit_code(caught.value) == 4


@pytest.mark.parametrize(
    ("capability", "precision"),
    [((7, 5), "fp16"), ((8, 0), "bf16"), ((12, 0), "bf16"), (None, "fp16")],
)
def test_precision_follows_the_card(capability: tuple[int, int] | None, precision: str) -> None:
    hardware = replace(MACHINE, gpus=(replace(CARD, compute_capability=capability),))
    assert planned(hardware=hardware).config.train.precision == precision


def test_bf16_on_a_card_without_it_is_refused() -> None:
    hardware = replace(MACHINE, gpus=(replace(CARD, compute_capability=(7, 5)),))
    with pytest.raises(RequestError, match=r"capability 7\.5.*fp16"):
        planned(hardware=hardware, overrides={"train.precision": "bf16"})


def test_a_resolution_the_base_cannot_have_names_its_neighbours() -> None:
    with pytest.raises(RequestError, match=r"1000 is not a multiple of 64.*960 or 1024"):
        planned(overrides={"data.resolution": 1000})


def test_eight_bit_adam_without_its_package() -> None:
    hardware = replace(MACHINE, packages={"torch": "2.13.0"})
    preset = planned(hardware=hardware, tier="6-8")
    assert preset.config.optimizer.name == "adamw"
    assert "pip install bitsandbytes" in preset.origins["optimizer.name"].reason
    with pytest.raises(MachineError, match="pip install bitsandbytes"):
        planned(hardware=hardware, overrides={"optimizer.name": "adamw8bit"})
    assert planned(tier="6-8").config.optimizer.name == "adamw8bit"


def test_xformers_gives_way_to_sdpa_where_it_is_missing() -> None:
    asked = {"memory.attention": "xformers"}
    assert planned(overrides=asked).config.memory.attention == "sdpa"
    there = replace(MACHINE, packages={**MACHINE.packages, "xformers": "0.0.35"})
    assert planned(overrides=asked, hardware=there).config.memory.attention == "xformers"
    on_cpu = planned(overrides={**asked, "hardware.device": "cpu"}, hardware=there)
    assert "needs a GPU" in on_cpu.origins["memory.attention"].reason


def test_steps_and_cadences() -> None:
    made = planned()
    assert made.steps == made.config.train.steps == 1200
    assert made.config.output.save_every_steps == made.config.sampling.every_steps == 240
    assert made.config.train.validate_every_steps == 120
    assert made.epochs == 120


def test_repeats_shorten_the_run_in_epochs_not_in_steps() -> None:
    made = planned(repeats=10)
    assert (made.steps, made.epochs) == (1200, 12)


def test_a_short_run_saves_and_validates_every_step() -> None:
    config = planned(overrides={"train.steps": 3}).config
    assert config.output.save_every_steps == config.sampling.every_steps == 1
    assert config.train.validate_every_steps == 1


def test_saving_by_epochs_or_by_given_steps() -> None:
    by_epochs = planned(overrides={"output.save_every_epochs": 2}).config
    assert by_epochs.output.save_every_steps == 0
    assert by_epochs.sampling.every_steps == 240
    by_steps = planned(overrides={"output.save_every_steps": 100}).config
    assert by_steps.sampling.every_steps == 100


def chosen(made: Plan) -> tuple[int, bool]:
    return int(made.config.memory.micro_batch), bool(made.config.memory.gradient_checkpointing)


def test_less_memory_means_smaller_micro_batches_and_only_then_checkpointing() -> None:
    seen = [
        chosen(planned(free_gib=free_gib, overrides={"train.batch_size": 4}))
        for free_gib in (12, 7.5, 6, 4.5, 3.7, 3.5)
    ]
    assert seen == [(4, False), (3, False), (2, False), (1, False), (3, True), (2, True)]


@given(
    free_gib=st.floats(2.9, 14),
    batch_size=st.integers(1, 6),
    micro_batch=st.sampled_from(["auto", 1, 2, 6]),
    checkpointing=st.sampled_from(["auto", True, False]),
)
def test_it_fits_the_batch_stays_and_nothing_given_is_raised(
    free_gib: float, batch_size: int, micro_batch: int | str, checkpointing: bool | str
) -> None:
    if isinstance(micro_batch, int):
        micro_batch = min(micro_batch, batch_size)
    asked = {
        "train.batch_size": batch_size,
        "memory.micro_batch": micro_batch,
        "memory.gradient_checkpointing": checkpointing,
    }
    made = planned(free_gib=free_gib, overrides=asked)
    assert made.memory.fits
    assert made.memory.limit_bytes == int(free_gib * GIB)
    assert made.config.train.batch_size == batch_size
    micro, is_checkpointed = chosen(made)
    assert 1 <= micro <= (batch_size if micro_batch == "auto" else int(micro_batch))
    assert is_checkpointed or checkpointing is not True
    for key, before in asked.items():
        assert (made.origins[key].layer == "planner") == (flatten(made.config)[key] != before)


def test_a_lowered_value_says_what_was_asked_and_the_bytes() -> None:
    made = planned(free_gib=3.7, overrides={"memory.gradient_checkpointing": False})
    (decision,) = [d for d in made.decisions if d.key == "memory.gradient_checkpointing"]
    assert decision.value is True
    assert "False does not fit" in decision.reason
    assert "3.70 GiB free on NVIDIA GeForce RTX 3060" in decision.reason
    assert 0 < decision.bytes <= 3.7 * GIB


def test_the_limit_is_the_smaller_of_what_is_free_and_what_is_allowed() -> None:
    for allowed_gib, limit_gib in ((4.0, 4.0), (40.0, 12.0)):
        made = planned(overrides={"hardware.vram_limit_gib": allowed_gib})
        assert made.memory.limit_bytes == limit_gib * GIB


def test_sample_images_are_given_up_before_the_run_is() -> None:
    made = planned(free_gib=3.0)
    assert made.config.sampling.every_steps == 0
    assert "sample images would take" in made.origins["sampling.every_steps"].reason
    assert "sampling" not in made.memory.phases


@pytest.mark.parametrize(
    ("free_gib", "overrides"),
    [
        (2.5, {}),
        (2.9, {"data.resolution": 1024}),
        (3.0, {"adapter.rank": 512}),
        (4.0, {"train.precision": "fp32"}),
        (2.9, {"adapter.rank": 64, "train.batch_size": 8}),
    ],
)
def test_when_nothing_fits_the_setting_it_names_does(
    free_gib: float, overrides: dict[str, Any]
) -> None:
    # no buckets: the square of the resolution is planned for
    with pytest.raises(MachineError, match="needs at least") as caught:
        planned(free_gib=free_gib, overrides=overrides, buckets=())
    assert exit_code(caught.value) == 4
    key, value = parse_assignment(caught.value.fix.split()[2].rstrip(","))
    made = planned(free_gib=free_gib, overrides={**overrides, key: value}, buckets=())
    assert made.memory.fits


def test_when_the_weights_alone_do_not_fit_it_says_how_much_would() -> None:
    with pytest.raises(MachineError, match=r"a card with 2\.\d\d GiB free") as caught:
        planned(free_gib=1.5)
    assert "1.50 GiB free on NVIDIA GeForce RTX 3060" in str(caught.value)


def test_the_largest_bucket_decides() -> None:
    small = planned(buckets=((256, 256),)).memory.peak_bytes
    mixed = planned(buckets=((256, 256), (512, 512), (320, 320))).memory.peak_bytes
    assert mixed == planned(buckets=((512, 512),)).memory.peak_bytes > small
    assert planned(buckets=()).memory.peak_bytes == mixed


def test_time_and_disk_are_part_of_the_plan() -> None:
    made = planned()
    assert made.seconds_per_step is not None
    assert made.seconds_per_step[0] < made.seconds_per_step[1]
    assert "RTX 3060" in made.time_note
    assert set(made.disk_bytes) == {"cache", "states", "exports"}
    more = planned(overrides={"output.keep_states": 5, "data.flip": True})
    assert more.disk_bytes["states"] == 2 * made.disk_bytes["states"]
    assert more.disk_bytes["cache"] > made.disk_bytes["cache"]


def test_the_embedded_base_plans_on_a_processor() -> None:
    given = replace(
        request(hardware=WITHOUT_CARD, tier="cpu", buckets=()),
        facts=mini_facts(),
        family=UNetCosts(),
    )
    made = plan(given)
    assert made.config.data.resolution == 64
    assert chosen(made) == (8, False)
    assert made.memory.peak_bytes < GIB


def test_planning_imports_no_torch() -> None:
    code = "import sys, lora_trainer.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
