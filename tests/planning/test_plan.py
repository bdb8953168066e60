"""The planner: nothing stays auto, nothing is raised, it fits or the error names what would fit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lora_trainer.common.errors import MachineError, RequestError, exit_code
from lora_trainer.config.config import (
    CHECKPOINTING,
    build_config,
    flatten,
    parse_assignment,
)
from lora_trainer.config.layers import Origin, resolve
from lora_trainer.families.base import BaseFacts, PartFacts
from lora_trainer.hardware.machine import GIB, Hardware
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.lora.adapter_size import adapter_parameters
from lora_trainer.planning.loads import RememberedCosts
from lora_trainer.planning.plan import Plan, plan
from lora_trainer.planning.plan_input import PlanInput
from tests.fakes.stable_diffusion import SD15, mini_facts, sd15_facts

COSTS = RememberedCosts(family=SD15, facts=sd15_facts())
LEFT_TO_RUN = {
    *("base.model", "base.companion", "data.caption_tokens", "data.cache_dir", "output.name"),
}
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
    expandable_segments=True,
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
        decided={"output.format": ("kohya", "known before")},
        resolved=resolved,
        facts=sd15_facts(),
        family=SD15,
        hardware=hardware,
        images=images,
        samples_per_epoch=images * repeats,
        fewest_repeats=repeats,
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
    assert made.memory.limit_bytes == MACHINE.ram_usable_bytes < MACHINE.ram_free_bytes


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


# ---- what depends on the kind of base


FLOW = replace(sd15_facts(), prediction="flow")
V_PREDICTION = replace(sd15_facts(), prediction="v_prediction", zero_terminal_snr=True)
GAMMA = "objective.min_snr_gamma"
WEIGHTING = "objective.weighting"


def planned_for(facts: BaseFacts, **changes: Any) -> Plan:
    return plan(replace(request(**changes), facts=facts))


def test_signal_to_noise_weights_give_way_where_there_are_none() -> None:
    """The preset of the family asks for them; a base that is trained by flow matching has none."""
    assert planned().config.objective.min_snr_gamma == 5.0
    made = planned_for(FLOW)
    assert made.config.objective.min_snr_gamma is None
    assert made.origins[GAMMA].layer == "planner"
    assert "flow matching" in made.origins[GAMMA].reason


def test_a_default_gives_way_as_a_preset_does() -> None:
    given = replace(request(), facts=FLOW)
    origins = {**given.resolved.origins, GAMMA: Origin(layer="default")}
    made = plan(replace(given, resolved=replace(given.resolved, origins=origins)))
    assert made.config.objective.min_snr_gamma is None


@pytest.mark.parametrize(
    ("facts", "asked", "found"),
    [
        (sd15_facts(), {}, "min_snr"),
        (sd15_facts(), {GAMMA: None}, "none"),
        (sd15_facts(), {WEIGHTING: "p2"}, "p2"),
        (FLOW, {}, "none"),
        (FLOW, {WEIGHTING: "cosmap"}, "cosmap"),
    ],
)
def test_a_weighting_is_chosen(facts: BaseFacts, asked: dict[str, Any], found: str) -> None:
    made = planned_for(facts, overrides=asked)
    assert made.config.objective.weighting == found


@pytest.mark.parametrize(
    ("facts", "kind"),
    [(FLOW, "soft_min_snr"), (V_PREDICTION, "sigma_sqrt"), (sd15_facts(), "cosmap")],
)
def test_a_weighting_of_the_other_kind_of_base_is_refused(facts: BaseFacts, kind: str) -> None:
    with pytest.raises(RequestError, match=f"{WEIGHTING}={kind} is for bases") as caught:
        planned_for(facts, overrides={WEIGHTING: kind})
    assert caught.value.fix.endswith(f"--set {WEIGHTING}=none")
    given = replace(request(overrides={WEIGHTING: kind}), facts=facts)
    origins = {**given.resolved.origins, WEIGHTING: Origin(layer="preset quality")}
    made = plan(replace(given, resolved=replace(given.resolved, origins=origins)))
    assert made.config.objective.weighting == "none", "a preset's wish gives way"


@pytest.mark.parametrize("layer", ["command line", "config mine.toml", "resumed run"])
def test_weights_that_somebody_asked_for_are_refused(layer: str) -> None:
    given = replace(request(), facts=FLOW)
    origins = {**given.resolved.origins, GAMMA: Origin(layer=layer)}
    with pytest.raises(RequestError, match="is trained by flow matching") as caught:
        plan(replace(given, resolved=replace(given.resolved, origins=origins)))
    assert caught.value.fix.endswith(f"--set {GAMMA}=null")
    assert exit_code(caught.value) == 2


def test_typed_weights_are_refused_and_typed_none_is_kept() -> None:
    with pytest.raises(RequestError, match=GAMMA):
        planned_for(FLOW, overrides={GAMMA: 5.0})
    made = planned_for(FLOW, overrides={GAMMA: None})
    assert made.origins[GAMMA].layer == "command line"


@pytest.mark.parametrize(
    ("facts", "prediction", "zero"),
    [
        (sd15_facts(), "epsilon", False),
        (V_PREDICTION, "v_prediction", True),
        (FLOW, "flow", False),
    ],
    ids=["epsilon", "v", "flow"],
)
def test_what_the_base_is_becomes_a_setting(facts: BaseFacts, prediction: str, zero: bool) -> None:
    """Named in run.json, so that a resume meets the same."""
    config = planned_for(facts).config
    assert (config.base.prediction, config.objective.zero_terminal_snr) == (prediction, zero)


def test_typed_levels_stay() -> None:
    made = planned_for(V_PREDICTION, overrides={"objective.zero_terminal_snr": False})
    assert made.config.objective.zero_terminal_snr is False
    assert made.origins["objective.zero_terminal_snr"].layer == "command line"


def with_text(parameters: int) -> BaseFacts:
    text = PartFacts(parameters=parameters)
    return replace(sd15_facts(), parts={**sd15_facts().parts, "text_encoder": text})


@pytest.mark.parametrize(
    ("parameters", "overrides", "precision", "reason"),
    [
        (2_000_000_000, {}, "fp32", "2,000 million parameters"),
        (2_000_000_001, {}, "bf16", "2.0 billion parameters"),
        (2_000_000_001, {"train.precision": "fp32"}, "fp32", "2,000 million parameters"),
        (2_000_000_001, {"train.precision": "fp16"}, "bf16", "2.0 billion parameters"),
    ],
)
def test_large_text_encoders_run_in_16_bits(
    parameters: int, overrides: dict[str, Any], precision: str, reason: str
) -> None:
    made = planned_for(with_text(parameters), overrides=overrides, free_gib=24)
    assert made.config.memory.text_encoder_precision == precision
    assert made.origins["memory.text_encoder_precision"].reason == reason


def test_a_typed_precision_of_the_text_encoders_is_kept_and_counted() -> None:
    key = "memory.text_encoder_precision"
    peaks = {}
    for precision in ("fp32", "bf16"):
        made = planned_for(with_text(2_500_000_000), overrides={key: precision})
        assert made.config.memory.text_encoder_precision == precision
        peaks[precision] = made.memory.phases["texts"]
    assert peaks["fp32"] - peaks["bf16"] == pytest.approx(2 * 2.5e9 * (1 + 1 / 24), rel=0.02)


def test_a_rotation_has_no_alpha() -> None:
    assert planned(overrides={"adapter.kind": "oft"}).config.adapter.alpha == "auto"
    assert planned(overrides={"adapter.kind": "loha"}).config.adapter.alpha == 16


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_disk_is_that_of_the_kind(kind: str) -> None:
    made = planned(overrides={"adapter.kind": kind})
    shapes = COSTS.adapter_shapes("transformer")
    parameters = adapter_parameters(shapes, made.config.adapter)
    assert made.disk_bytes["states"] == 3 * (4 + 8) * parameters
    assert made.disk_bytes["exports"] == 5 * 2 * parameters


def test_disk_holds_the_adapters_of_text_encoders_too() -> None:
    """SD1.5's has 12 layers of four 768 x 768 and two 768 x 3072."""
    alone = planned().disk_bytes
    along = planned(overrides={"adapter.text_encoder": True})
    text = along.config.adapter.rank * 12 * (4 * 2 * 768 + 2 * (768 + 3072))
    assert along.disk_bytes["states"] - alone["states"] == 3 * (4 + 8) * text
    assert along.disk_bytes["exports"] - alone["exports"] == 5 * 2 * text


# ---- length


def test_steps_and_cadences() -> None:
    made = planned()
    assert made.steps == made.config.train.steps == 2400
    assert made.config.output.save_every_steps == made.config.sampling.every_steps == 480
    assert made.config.train.validate_every_steps == 240
    assert made.epochs == 120


def test_repeats_shorten_the_run_in_epochs_not_in_steps() -> None:
    made = planned(repeats=10)
    assert (made.steps, made.epochs) == (2400, 12)


def test_a_short_run_saves_and_validates_every_step() -> None:
    config = planned(overrides={"train.steps": 3}).config
    assert config.output.save_every_steps == config.sampling.every_steps == 1
    assert config.train.validate_every_steps == 1


def test_saving_by_epochs_or_by_given_steps() -> None:
    by_epochs = planned(overrides={"output.save_every_epochs": 2}).config
    assert by_epochs.output.save_every_steps == 0
    assert by_epochs.sampling.every_steps == 480
    by_steps = planned(overrides={"output.save_every_steps": 400}).config
    assert by_steps.sampling.every_steps == 400


def chosen(made: Plan) -> tuple[int, str]:
    memory = made.config.memory
    return memory.micro_batch, memory.gradient_checkpointing


def test_less_memory_means_smaller_micro_batches_then_recomputing_then_streaming() -> None:
    made = [
        planned(free_gib=free_gib, overrides={"train.batch_size": 4})
        for free_gib in (12, 5.5, 5, 3.7, 3.3, 2.8, 2.5, 2.45)
    ]
    assert [chosen(each) for each in made] == [
        (4, "none"), (3, "none"), (2, "none"), (1, "none"),
        (2, "selective"), (1, "full"), (1, "full"), (1, "full"),
    ]  # fmt: skip
    streamed = [each.config.memory.streamed_blocks for each in made]
    assert streamed[:6] == [0] * 6
    assert 0 < streamed[6] < streamed[7] <= 16
    times = [each.seconds_per_step[1] for each in made]
    assert times[-1] > times[0]


def test_a_run_planned_before_there_were_int8_products_goes_on_without() -> None:
    two = {"train.batch_size": 2}
    first = planned(overrides={"memory.gradient_checkpointing": "selective", **two})
    at_once = dict.fromkeys(first.images_at_once, 1)
    settled = flatten(first.config)
    asked = {key: settled[key] for key in settled if key.startswith("memory.")}
    asked |= {"memory.base_matmul": "auto", **two}
    older = plan(replace(request(overrides=asked), kept_at_once=at_once))
    assert (chosen(older)[1], older.config.memory.base_matmul) == ("selective", "dequantized")
    assert older.origins["memory.base_matmul"].reason == "the run began without it"


@given(
    free_gib=st.floats(2.9, 14),
    batch_size=st.integers(1, 6),
    micro_batch=st.sampled_from(["auto", 1, 2, 6]),
    checkpointing=st.sampled_from(["auto", *CHECKPOINTING, True, False]),
    streamed=st.sampled_from(["auto", 0, 4]),
    kept=st.sampled_from(["auto", "bf16", "int8", "nf4"]),
)
def test_it_fits_the_batch_stays_and_nothing_given_is_raised(
    free_gib: float,
    batch_size: int,
    micro_batch: int | str,
    checkpointing: str | bool,
    streamed: int | str,
    kept: str,
) -> None:
    assume(streamed != 4 or checkpointing not in ("none", False))
    if isinstance(micro_batch, int):
        micro_batch = min(micro_batch, batch_size)
    asked = {
        "train.batch_size": batch_size,
        "memory.micro_batch": micro_batch,
        "memory.gradient_checkpointing": checkpointing,
        "memory.streamed_blocks": streamed,
        "memory.base_precision": kept,
    }
    given_values = flatten(build_config(asked))
    made = planned(free_gib=free_gib, overrides=asked)
    assert made.memory.fits
    assert made.memory.limit_bytes == int(free_gib * GIB)
    assert made.config.train.batch_size == batch_size
    micro, kind = chosen(made)
    assert 1 <= micro <= (batch_size if micro_batch == "auto" else int(micro_batch))
    assert max(made.images_at_once.values()) == micro
    before = given_values["memory.gradient_checkpointing"]
    assert before == "auto" or CHECKPOINTING.index(kind) >= CHECKPOINTING.index(before)
    assert made.config.memory.streamed_blocks >= (4 if streamed == 4 else 0)
    assert kept in ("auto", made.config.memory.base_precision), "what changes the result stays"
    for key in asked:
        changed = flatten(made.config)[key] != given_values[key]
        assert (made.origins[key].layer == "planner") == changed


def test_a_lowered_value_says_what_was_asked_and_the_bytes() -> None:
    asked = {"memory.gradient_checkpointing": False, "train.batch_size": 2}
    made = planned(free_gib=3.1, overrides=asked)
    (decision,) = [d for d in made.decisions if d.key == "memory.gradient_checkpointing"]
    assert decision.value == "selective"
    assert decision.reason.startswith("instead of none: light would take 3.62 GiB")
    assert "3.10 GiB free on NVIDIA GeForce RTX 3060" in decision.reason
    assert 0 < decision.bytes <= 3.1 * GIB


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
        (2.2, {}),
        (2.2, {"data.resolution": 1024}),
        (2.9, {"adapter.rank": 512}),
        (2.5, {"train.precision": "fp32"}),
        (2.4, {"adapter.rank": 64, "train.batch_size": 8}),
        (2.2, {"memory.base_precision": "bf16", "memory.gradient_checkpointing": "offloaded"}),
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


def test_when_nothing_helps_it_says_how_much_would() -> None:
    with pytest.raises(MachineError, match=r"a GPU with 2\.\d\d GiB free") as caught:
        planned(free_gib=1.5)
    assert "1.50 GiB free on NVIDIA GeForce RTX 3060" in str(caught.value)


def test_the_largest_bucket_decides() -> None:
    def peak_bytes(*buckets: tuple[int, int]) -> int:
        return planned(overrides={"train.batch_size": 2}, buckets=buckets).memory.peak_bytes

    mixed = peak_bytes((256, 256), (512, 512), (320, 320))
    assert mixed == peak_bytes((512, 512)) > peak_bytes((256, 256))
    assert peak_bytes() == mixed


def test_time_and_disk_are_part_of_the_plan() -> None:
    made = planned()
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
        family=SD15,
    )
    made = plan(given)
    assert made.config.data.resolution == 64
    assert chosen(made) == (8, "none")
    assert made.memory.peak_bytes < GIB


def test_planning_imports_no_torch() -> None:
    code = "import sys, lora_trainer.planning.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
