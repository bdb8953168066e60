"""The planner: no value stays auto, each has a reason; the chosen load fits, nothing that is asked for is raised."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lora_trainer import families
from lora_trainer.common.errors import MachineError
from lora_trainer.config.config import build_config, flatten, parse_assignment
from lora_trainer.config.declare import CHECKPOINTING, settled
from lora_trainer.config.running import SamplingSettings
from lora_trainer.hardware.machine import Hardware
from lora_trainer.planning.known_pace import (
    PastRun,
    RunKind,
    known_counts,
    known_runs,
    load_beside,
    load_factor,
    pace_here,
    remember_run,
)
from lora_trainer.planning.optimizer_facts import optimizer_remarks
from lora_trainer.planning.plan import Plan, pass_shapes, plan
from lora_trainer.planning.plan_input import known_oom, remember_oom
from lora_trainer.planning.run_time import middle, run_length
from lora_trainer.run.samples import OF_THE_BASE, is_own_base, recipe
from tests.fakes.nvml import GIB
from tests.fakes.plans import CARD, FLUX, MACHINE, QWEN, WITHOUT_CARD, machine, planned, request

LEFT_TO_RUN = {
    "base.model", "base.companion", "data.caption_tokens", "data.cache_dir", "base.system_prompt", "output.name"
}  # fmt: skip


def test_a_dashboard_without_its_package_is_said_by_the_plan() -> None:
    key, hardware = "logging.trackers", machine(packages={"tensorboard": None, "comet-ml": "3"})
    with pytest.raises(MachineError) as refused:
        planned(hardware=hardware, overrides={key: ["wandb", "comet_ml", "aim"]})
    assert (
        f'{key}=["wandb", "comet_ml", "aim"] needs wandb and aim, which are not installed'
        in str(refused.value)
    )
    assert refused.value.fix == f'pip install wandb aim, or use --set {key}=["comet_ml"]'
    assert planned(hardware=hardware, overrides={key: ["comet_ml"]}).config.logging.trackers
    made = planned(hardware=hardware)  # the default
    assert made.config.logging.trackers == ()
    assert "pip install tensorboard" in made.origins[key].reason


@pytest.mark.parametrize("hardware", [MACHINE, WITHOUT_CARD], ids=["cuda", "cpu"])
def test_no_auto_is_left_and_every_decision_has_a_reason(hardware: Hardware) -> None:
    asked = request(None, hardware)
    made = plan(asked)
    left = {key for key, value in flatten(made.config).items() if value == "auto"}
    assert left == LEFT_TO_RUN
    before = flatten(asked.resolved.config)
    decided = {key for key, value in before.items() if value == "auto"} - LEFT_TO_RUN
    for key in decided:
        assert made.origins[key].layer == "planner" and made.origins[key].reason
    for key in set(before) - decided:
        assert made.origins[key] == asked.resolved.origins[key]


# ---- the optimizer

RATE = "optimizer.learning_rate"


def test_a_rate_that_nobody_would_use_and_tensors_left_to_adamw_are_remarked_on() -> None:
    for name, usual, odd in (("adamw", 2e-3, 1.0), ("prodigy", 1.0, 1e-4), ("lion", 1e-4, 1e-2)):
        for rate in (usual, odd):
            config: Any = build_config({"optimizer.name": name, RATE: rate})
            said = [each.what for each in optimizer_remarks(config, shapes={})]
            expected = [True] if rate == odd else []
            assert [f"unusual for {name}" in what for what in said] == expected
    config = build_config({"optimizer.name": "muon", "adapter.dora": True})
    (remark,) = optimizer_remarks(config, shapes={"line": (24, 36), "conv": (54, 20, 9)})
    assert remark.what == "4 of 6 tensors are not matrices, so AdamW trains them"


def test_prodigy_may_freeze_layers_and_trains_text_encoders_at_its_own_rate() -> None:
    pattern = {"optimizer.learning_rate_pattern": {"attn": 0, "ff": 1}}
    optimizer = build_config({"optimizer.name": "prodigy", **pattern}).optimizer
    assert optimizer.text_encoder_scale == 1.0 == optimizer.new_tokens_scale
    assert build_config({}).optimizer.text_encoder_scale == 0.5


# ---- length


@given(images=st.integers(1, 500), batch_size=st.integers(1, 16), views=st.integers(1, 1000))
def test_more_images_or_views_are_never_fewer_steps_and_each_is_seen(
    images: int, batch_size: int, views: int
) -> None:
    steps, more_images, more_views = (
        run_length(images=count, batch_size=batch_size, views=each)[0]
        for count, each in ((images, views), (images + 1, views), (images, views + 1))
    )
    assert steps * batch_size >= images
    assert more_images >= steps and more_views >= steps


def test_shapes_of_passes() -> None:
    """Steps take what comes: in several buckets groups of any size, in one only what is left over."""
    assert pass_shapes({(8, 8): 4}, batch_size=4) == [(8, 8, 4)]
    assert pass_shapes({(8, 8): 4}, batch_size=6) == [(8, 8, 4), (8, 8, 2)]
    assert pass_shapes({(8, 8): 2}, batch_size=6, processes=2) == [(8, 8, 2), (8, 8, 1)]
    shapes = pass_shapes({(8, 8): 2, (6, 10): 1}, batch_size=4)
    assert shapes == [(8, 8, 2), (6, 10, 1), (8, 8, 1)], "full groups of large buckets first"


# ---- the load that is chosen

BATCH, MICRO, LEVEL = "train.batch_size", "memory.micro_batch", "memory.gradient_checkpointing"
BASE, STREAMED = "memory.base_precision", "memory.streamed_blocks"
SIZES = ((512, 512), (448, 576))


def free(gib: float, **how: Any) -> Plan:
    """Plan Stable Diffusion 1.5 for a GPU of 12 GiB with so much of it free."""
    hardware = replace(MACHINE, gpus=(replace(CARD, free_bytes=int(gib * GIB)),))
    return planned(None, hardware, **{"buckets": SIZES, **how})


@given(
    gib=st.floats(2.9, 14),
    batch_size=st.integers(1, 6),
    micro_batch=st.sampled_from(["auto", 1, 2, 6]),
    checkpointing=st.sampled_from(["auto", *CHECKPOINTING, True, False]),
    streamed=st.sampled_from(["auto", 0, 4]),
    precision=st.sampled_from(["auto", "bf16", "int8", "nf4"]),
)
def test_it_fits_the_batch_stays_and_nothing_asked_for_is_raised(
    gib: float,
    batch_size: int,
    micro_batch: int | str,
    checkpointing: str | bool,
    streamed: int | str,
    precision: str,
) -> None:
    assume(streamed != 4 or checkpointing not in ("none", False))
    micro = min(micro_batch, batch_size) if isinstance(micro_batch, int) else micro_batch
    asked = {BATCH: batch_size, MICRO: micro, LEVEL: checkpointing, STREAMED: streamed}
    asked[BASE] = precision
    before = flatten(build_config(asked))
    made = free(gib, overrides=asked)
    after = flatten(made.config)
    assert made.memory.fits
    assert made.memory.limit_bytes == int(gib * GIB)
    assert after[BATCH] == batch_size
    assert 1 <= after[MICRO] <= (batch_size if micro == "auto" else int(micro))
    assert max(made.images_at_once.values()) == after[MICRO]
    levels = [CHECKPOINTING.index(each[LEVEL]) for each in (before, after) if each[LEVEL] != "auto"]
    assert levels == sorted(levels)
    assert after[STREAMED] >= (4 if streamed == 4 else 0)
    assert precision in ("auto", after[BASE]), "a value that changes the result stays"
    for key in asked:
        assert (made.origins[key].layer == "planner") == (after[key] != before[key])


def test_when_nothing_fits_the_setting_it_names_does_or_it_says_how_much_would() -> None:
    for gib, overrides in (
        (2.2, {"data.resolution": 1024}),
        (2.9, {"adapter.rank": 512}),
        (2.5, {"train.precision": "fp32"}),
        (2.4, {"adapter.rank": 64, BATCH: 8}),
        (2.2, {BASE: "bf16", LEVEL: "offloaded"}),
    ):
        # no buckets: the square of the resolution is planned for
        with pytest.raises(MachineError, match="needs at least") as caught:
            free(gib, overrides=overrides, buckets=())
        assert caught.value.exit_code == 4
        key, value = parse_assignment(caught.value.fix.split()[2].rstrip(","))
        assert free(gib, overrides={**overrides, key: value}, buckets=()).memory.fits
    with pytest.raises(MachineError, match=r"a GPU with 2\.\d\d GiB free") as caught:
        free(1.5)
    assert "1.50 GiB free on NVIDIA GeForce RTX 3060" in str(caught.value)


RANKS = {"bf16": 0, "int8": 1, "fp8": 2, "nf4": 3}


def test_speed_is_never_slower_and_quality_never_less_precise() -> None:
    same = {"data.resolution": 1024, "adapter.rank": 16, "sampling.every_steps": 0}
    for source, gib, ram_gib in ((QWEN, 24, 17), (QWEN, 26, 24), (QWEN, 28, 17), (FLUX, 20, 14)):
        how: dict[str, Any] = {"preset_tier": "10-12", "overrides": same}
        made = [
            planned(source, machine(gib, ram_gib=ram_gib), priority=priority, **how)
            for priority in ("speed", "balanced", "quality")
        ]
        times = [each.seconds_per_step for each in made]
        ranks = [RANKS[each.config.memory.base_precision] for each in made]
        assert times == sorted(times) and ranks == sorted(ranks, reverse=True)
        assert ranks[0] > ranks[-1] and times[0] < times[-1], "here the priorities differ"
    how["overrides"] = {"data.resolution": 1024}
    drawing = planned(FLUX, machine(7, ram_gib=40), **how)
    assert settled(drawing.config.sampling.every_steps), "sample images of little cost are drawn"


# ---- a GPU on which a plan did not fit


def test_the_next_plan_stays_below_those_that_did_not_fit_on_this_card_with_this_torch(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "not made yet"

    def remember(planned_gib: float) -> Any:
        size = int(planned_gib * GIB)
        return remember_oom(folder, MACHINE, "sdxl", planned_bytes=size, limit_bytes=11 * GIB)

    assert remember(4.0) is None, "far below its limit: something else filled the GPU"
    assert known_oom(folder, MACHINE, "sdxl") is None
    shares = [remember(planned_gib).share for planned_gib in (10.0, 9.0, 10.9)]
    assert shares[0] == pytest.approx(0.95 * 10 / 11, abs=1e-4)
    assert shares[1] == shares[2] < shares[0], "it only ever gets smaller"
    found = known_oom(folder, MACHINE, "sdxl")
    assert found is not None and found.share == shares[1]
    for other in (
        replace(MACHINE, gpus=(replace(CARD, name="NVIDIA GeForce RTX 4070"),)),
        replace(MACHINE, gpus=(replace(CARD, total_bytes=8 * GIB),)),
        replace(MACHINE, packages={"torch": "2.14"}),
        replace(MACHINE, gpus=()),
    ):
        assert known_oom(folder, other, "sdxl") is None
    assert known_oom(folder, MACHINE, "sd15") is None


NO_RUNS = "an estimate: no such training has finished on this machine yet"


SD15 = 859_520_964  # parameters of its U-Net


def past_run(
    slower: float,
    *,
    load: float = 1.0,
    size_px: int = 512,
    parameters: int = SD15,
    **parts: float,
) -> PastRun:
    return PastRun(
        kind=RunKind(priority="balanced", resolution_px=size_px, parameters=parameters),
        slower={"steps": slower, **parts},
        load=load,
    )


def test_what_other_programs_use_now_is_said_beside_the_time_and_changes_nothing_of_it() -> None:
    idle = replace(WITHOUT_CARD, processors=6)
    busy = replace(idle, busy_processors=12.0)
    first, beside = planned(hardware=idle), planned(hardware=busy)
    assert first.time_corrections == (NO_RUNS,) and load_factor(idle, None) == 1.0
    # 6 threads beside 12 others get 2 of 6 processors.
    assert load_factor(busy, None) == 3.0
    assert beside.run_time == first.run_time, "a card, the plan and the queue say one time"
    others = "other programs keep 6.0 of 6 processors busy now; beside them it takes about 3.0 times as long"
    assert beside.time_corrections == (NO_RUNS, others)
    assert beside.config == first.config, "a busy machine gets the same settings"
    # Two programs that always compute get a half of a GPU each; a desktop's share does not count.
    for busy_fraction, factor in ((0.05, 1.0), (0.2, 1.25), (0.5, 2.0), (1.0, 2.0)):
        hardware = machine(24, busy_fraction=busy_fraction)
        assert load_factor(hardware, hardware.gpus[0]) == pytest.approx(factor)
    alone, shared = planned(hardware=machine(24)), planned(hardware=hardware)
    assert shared.run_time == alone.run_time
    others = "other programs use the GPU for 100% of the time now; beside them it takes about 2.0 times as long"
    assert shared.time_corrections == (NO_RUNS, others)
    assert shared.config == alone.config
    # While it trains, others get what it leaves: 2 of 6 processors taken leave 4 for 6 threads.
    unknown = partial(load_beside, waited=None)
    assert unknown(own=4.0, taken=2.0, processors=6, threads=6) == 1.5
    assert unknown(own=6.0, taken=2.0, processors=8, threads=6) == 1.0
    # Where processors were idle nobody took any from it, however few of its threads worked.
    assert unknown(own=1.2, taken=1.0, processors=4, threads=4) == 1.0
    # A system that tells how long threads were ready without a processor knows it better.
    known = partial(load_beside, own=1.0, taken=1.0, processors=2, threads=2)
    assert known(waited=0.0) == 1.0 and known(waited=0.2) == 1.2


@pytest.mark.parametrize(
    ("cores", "others", "factor"),
    [(2.6, 0.6, 1.3), (1.3, 1.0, 1.15), (1.1, 0.8, 1.0), (2.0, 1.0, 1.5), (1.0, 3.0, 2.0)],
)
def test_what_leaves_threads_waiting_is_not_slowed_by_a_program_on_another_processor(
    tmp_path: Path, cores: float, others: float, factor: float
) -> None:
    two = replace(WITHOUT_CARD, processors=2, cpu_threads=2)
    busy = replace(two, busy_processors=others)
    for _ in range(2):
        run = replace(past_run(4.0), cores=cores)
        remember_run(tmp_path, two, run, gpu=None, family="sd15")
    past = known_runs(tmp_path, two, gpu=None, family="sd15")
    assert [run.cores for run in past] == [cores, cores], "read as it was written"
    pace = pace_here(busy, gpu=None, past=past, kind=past[0].kind)
    assert pace.load == pytest.approx(factor)
    said = f"beside them it takes about {factor:.1f} times as long"
    assert (said in " ".join(pace.notes)) == (factor >= 1.05)


def test_time_follows_the_finished_runs_of_this_machine(tmp_path: Path) -> None:
    idle = replace(WITHOUT_CARD, processors=6)
    busy = replace(idle, busy_processors=12.0)
    folder = tmp_path / "not made yet"
    assert known_runs(folder, idle, gpu=None, family="sd15") == ()
    first = planned(hardware=idle)
    assert first.config.data.resolution == 512
    # That run took 12 times as long beside others; alone it would have taken 4 times.
    for slower in (12.0, 10.5, 12.9):
        run = past_run(slower, load=3.0, start=9.0)
        remember_run(folder, busy, run, gpu=None, family="sd15")
    past = known_runs(folder, idle, gpu=None, family="sd15")
    again, still = (planned(hardware=each, past_runs=past) for each in (idle, busy))
    assert middle(again.seconds_per_step) == pytest.approx(4 * first.idle_step_s)
    assert again.seconds_per_step[1] / again.seconds_per_step[0] < 2, "narrower than a guess"
    assert still.seconds_per_step == again.seconds_per_step
    assert again.idle_step_s == first.idle_step_s, "what the next run is compared with"
    for part, factor in {"start": 3.0, "steps": 4.0, "caching": 4.0}.items():
        planned_s = first.idle_parts_s[part]
        assert middle(again.run_time.parts[part]) == pytest.approx(factor * planned_s)
    assert again.time_source == "from 3 finished runs on this machine"
    assert again.config == first.config
    for other in (replace(idle, cpu_threads=4), replace(idle, packages={"torch": "2.14"})):
        assert known_runs(folder, other, gpu=None, family="sd15") == ()
    assert known_runs(folder, idle, gpu=CARD, family="sd15") == ()
    assert known_runs(folder, idle, gpu=None, family="sdxl") == ()
    for _ in range(9):
        remember_run(folder, idle, past_run(1.0), gpu=None, family="sd15")
    kept = known_runs(folder, idle, gpu=None, family="sd15")
    assert [run.slower["steps"] for run in kept] == [1.0] * 5
    assert known_counts(folder, idle, gpu=None, families=["sd15", "sdxl"]) == {"sd15": 5}


def test_the_runs_most_like_the_planned_one_tell_its_time(tmp_path: Path) -> None:
    first = planned(hardware=WITHOUT_CARD)

    def factor(*past: PastRun) -> tuple[float, str]:
        made = planned(hardware=WITHOUT_CARD, past_runs=past)
        return middle(made.seconds_per_step) / first.idle_step_s, made.time_source

    other_size, same = past_run(9.0, size_px=768), past_run(2.0)
    other_priority = replace(past_run(5.0), kind=replace(same.kind, priority="speed"))
    found, source = factor(same, other_priority, other_size)
    assert found == pytest.approx(2.0) and source == "from 1 finished run on this machine"
    found, source = factor(other_priority, other_size)
    assert found == pytest.approx(5.0)
    assert source == "from 1 finished run on this machine, of another size or priority"
    assert factor(other_size)[0] == pytest.approx(9.0)
    # The miniature is of a family that has large bases: it made days of their hours.
    assert factor(past_run(9.0, parameters=4_000_000)) == (pytest.approx(1.0), NO_RUNS)
    # Of each kind the last five are kept, whatever runs of other kinds came between.
    for run in (same, *[other_size] * 8):
        remember_run(tmp_path, WITHOUT_CARD, run, gpu=None, family="sd15")
    kept = known_runs(tmp_path, WITHOUT_CARD, gpu=None, family="sd15")
    assert sorted(run.slower["steps"] for run in kept) == [2.0, *[9.0] * 5]
    # One run that stood still for hours does not spoil the next predictions.
    made = planned(hardware=WITHOUT_CARD, past_runs=(same, past_run(2.2), past_run(60.0)))
    low_s, high_s = made.seconds_per_step
    assert middle((low_s, high_s)) == pytest.approx(2.2 * first.idle_step_s)
    assert high_s == pytest.approx(60 * first.idle_step_s), "the range shows it"


# ---- how samples are drawn


PUBLISHED = {
    "Tongyi-MAI/Z-Image-Turbo": (8, 1.0),
    "Tongyi-MAI/Z-Image": (28, 5.0),
    "stabilityai/stable-diffusion-3.5-large-turbo": (4, 1.0),
    "stabilityai/stable-diffusion-3.5-large": (28, 3.5),
    "black-forest-labs/FLUX.1-schnell": (4, 1.0),
    "black-forest-labs/FLUX.2-klein-4B": (4, 1.0),
}


@pytest.mark.parametrize("base", PUBLISHED)
def test_samples_are_drawn_as_the_release_is_published(base: str) -> None:
    """Z-Image-Turbo was drawn in 28 steps at 5, two passes each: burned, and judged as the LoRA's work."""
    made = plan(request(base))
    sampling = made.config.sampling
    assert (sampling.steps, sampling.guidance_scale) == PUBLISHED[base]
    assert "distilled" in made.origins["sampling.steps"].reason or sampling.steps > 8
    user = {"sampling.steps": 11, "sampling.guidance_scale": 2.5, "base.distilled": False}
    chosen = plan(request(base, overrides=user)).config
    assert (chosen.sampling.steps, chosen.sampling.guidance_scale) == (11, 2.5)
    assert chosen.base.distilled is False


def test_images_of_a_lora_are_drawn_as_its_samples_or_as_another_base_is() -> None:
    """The `sample` command, and tries in the interface."""
    turbo = families.known_base("Tongyi-MAI/Z-Image-Turbo")
    assert turbo is not None
    own = SamplingSettings(steps=28, guidance_scale=5.0)
    drawn = [recipe(settings, turbo) for settings in (own, SamplingSettings())]
    assert [(each.steps, each.guidance_scale) for each in drawn] == [(28, 5.0), (8, 1.0)]
    assert is_own_base("/here/z_image.safetensors", "/there/z_image.safetensors")
    assert not is_own_base("Tongyi-MAI/Z-Image", "Tongyi-MAI/Z-Image-Turbo")
    recorded = flatten(plan(request("Tongyi-MAI/Z-Image")).config)
    decided = {
        key
        for key, value in flatten(plan(request("Tongyi-MAI/Z-Image-Turbo")).config).items()
        if value != recorded[key] and key.startswith(("base.", "sampling.", "objective."))
    }
    # How often samples are drawn follows from their time.
    assert decided - {"base.model", "sampling.every_steps"} <= set(OF_THE_BASE)
