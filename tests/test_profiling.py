"""`profile`: the real loop under torch's profiler, a trace on the disk, and what sets the pace, with advice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.cli import main
from lora_trainer.common.errors import RESUME, StoppedBySignal
from lora_trainer.config.config import build_config, setting_keys
from lora_trainer.measuring import bench, profile
from tests.fakes.runs import SETTINGS, Toy, toy, trajectory


def test_the_steps_are_those_of_a_training_and_leave_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = toy(tmp_path).with_base()
    capsys.readouterr()
    assert main.run(["profile", *place.arguments("--json", steps=2)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["shares"].values()) == pytest.approx(1) and found["cause"] in found["shares"]
    assert found["sentence"] and found["steps"] == 2
    operations = found["operations"]
    assert any("conv" in name or "mm" in name for name in operations)
    assert sum(operations.values()) <= found["seconds_per_step"] * 2, "means a step, not sums"
    (trace,) = (place.runs / "toy-profile" / "tensorboard").glob("*.pt.trace.json")
    names = {row.get("name") for row in json.loads(trace.read_bytes())["traceEvents"]}
    assert "aten::convolution" in names
    assert not list((place.runs / "toy-profile").glob("*.safetensors")), (
        "five steps are not a result"
    )
    assert not (place.runs / "toy-profile" / "states").exists()

    assert place.train(steps=5) == 0
    watched = [row[1] for row in trajectory(place.runs / "toy-profile")]
    assert [row[1] for row in trajectory(place.run)][:1] == watched[:1], "watching changes nothing"


@pytest.mark.parametrize("end", [KeyboardInterrupt(), StoppedBySignal(2, found="", fix=RESUME)])
def test_one_that_is_stopped_says_to_run_it_again_as_it_cannot_be_resumed(
    end: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise end

    monkeypatch.setattr(profile, "profile_run", stop)
    assert main.run(["profile", "x"]) == 130
    error = "error: profile was stopped. Fix: run the command again.\n"
    assert capsys.readouterr().err == error


# ---- the bottleneck

RESOLVED: dict[str, Any] = {
    "data.resolution": 512,
    "hardware.device": "cuda",
    "memory.gradient_checkpointing": "none",
    "memory.micro_batch": 2,
    "output.save_every_steps": 100,
    "train.batch_size": 4,
    "train.precision": "bf16",
    "train.steps": 1000,
}
EVEN: dict[str, Any] = {
    "wall_s": 1.0, "data_wait_s": 0.0, "work_s": {"aten::mm": 1.0}, "save_s": 0.0
}  # fmt: skip
seconds = st.floats(0, 100, allow_nan=False)


def config(**changes: Any) -> Any:
    return build_config(
        RESOLVED | {key.replace("__", "."): value for key, value in changes.items()}
    )


@given(
    wall_s=seconds,
    data_wait_s=seconds,
    work_s=st.dictionaries(st.sampled_from(["aten::mm", "aten::add", "aten::copy_"]), seconds),
    save_s=seconds,
)
def test_shares_add_up_and_the_largest_is_the_cause(**measured: Any) -> None:
    found = profile.verdict(config(), **measured)
    assert found["shares"].keys() == {"data", "host", "compute", "memory", "saving"}
    assert all(0 <= share <= 1 for share in found["shares"].values())
    total = sum(found["shares"].values())
    assert total == pytest.approx(1) or total == 0
    assert found["shares"][found["cause"]] == max(found["shares"].values())
    for key in re.findall(r"\b[a-z]+\.[a-z_]+\b", found["sentence"]):
        assert key in setting_keys(), "advice names a setting that exists"


def test_each_cause_is_told_from_the_others() -> None:
    slow_data = EVEN | dict(data_wait_s=0.6, work_s={"aten::mm": 0.4})
    idle = EVEN | dict(work_s={"aten::mm": 0.2, "aten::add": 0.1})
    moving = EVEN | dict(work_s={"aten::mm": 0.3, "aten::native_layer_norm": 0.4, "add": 0.3})
    saving = EVEN | dict(save_s=500.0)
    found = [profile.verdict(config(), **m) for m in (slow_data, idle, EVEN, moving, saving)]
    assert [each["cause"] for each in found] == ["data", "host", "compute", "memory", "saving"]
    assert found[0]["shares"]["data"] == pytest.approx(0.6)
    assert found[1]["shares"]["host"] == pytest.approx(0.7)
    assert found[3]["shares"]["memory"] == pytest.approx(0.7)
    assert found[4]["shares"]["saving"] == pytest.approx(5 / 6), "500 s every 100 steps of 1 s"


def test_the_advice_has_what_is_set_now_and_nothing_that_is_so_already() -> None:
    idle, moving = EVEN | dict(work_s={"aten::mm": 0.1}), EVEN | dict(work_s={"aten::add": 1.0})
    assert (
        "memory.micro_batch (now 2 of train.batch_size=4)"
        in profile.verdict(config(), **idle)["sentence"]
    )
    whole = profile.verdict(config(memory__micro_batch=4), **idle)["sentence"]
    assert "memory.micro_batch" not in whole and "changes the training" in whole
    recomputing = profile.verdict(config(memory__gradient_checkpointing="full"), **EVEN)["sentence"]
    assert "gradient_checkpointing (now full)" in recomputing
    assert "resolution (now 512)" in recomputing
    for measured in (EVEN, moving):
        for changes, advised in (
            ({}, False),
            ({"train__precision": "fp32"}, True),
            ({"train__precision": "fp32", "hardware__device": "cpu"}, False),
        ):
            sentence = profile.verdict(config(**changes), **measured)["sentence"]
            assert ("precision=bf16" in sentence) is advised
            assert "gradient_checkpointing" not in sentence


def test_matrix_work_and_moving_numbers_are_known_by_their_names() -> None:
    names = {
        "aten::addmm": "compute",
        "aten::convolution_backward": "compute",
        "aten::_scaled_dot_product_flash_attention_for_cpu": "compute",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "compute",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "compute",
        "aten::native_group_norm": "memory",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "memory",
        "multi_tensor_apply_kernel": "memory",
    }
    for name, cause in names.items():
        assert profile.verdict(config(), **{**EVEN, "work_s": {name: 1.0}})["cause"] == cause, name


# ---- `bench`: which trainings are compared, what a row says, and that a failing one ends no other


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("bench")).with_base()


def arguments(place: Toy, *words: str, steps: int = 2, **settings: Any) -> list[str]:
    line = ["bench", str(place.dataset), "--base", str(place.base), "--steps", str(steps), *words]
    chosen = {**SETTINGS, **{key.replace("__", "."): value for key, value in settings.items()}}
    for key, value in chosen.items():
        line += ["--set", f"{key}={json.dumps(value)}"]
    return line


def test_variants_differ_in_one_setting_from_the_plan_and_are_compared_with_it(
    place: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(_request: Any, settings: Any, **_: Any) -> bench.BenchRow:
        name = next(iter(settings.items()), ("as planned",))
        row = {"name": "=".join(map(str, name)), "settings": settings}
        if settings == {"memory.micro_batch": 6}:
            return bench.BenchRow(**row, failure="error: no memory")
        speed = 2.0 if settings else 1.0
        return bench.BenchRow(**row, images_per_s=speed, peak_bytes=1 << 30)

    monkeypatch.setattr(bench, "_measure", measure)
    monkeypatch.setenv("COLUMNS", "120")
    batches = {"train__batch_size": 6, "memory__micro_batch": 2}
    assert main.run(arguments(place, "--json", **batches)) == 0
    first, *others = json.loads(capsys.readouterr().out)
    assert first["settings"] == {}
    assert all(len(each["settings"]) == 1 for each in others)
    tried = [each["settings"].get("memory.micro_batch") for each in others]
    assert [value for value in tried if value] == [1, 4, 6], "2 is what is planned"
    sides = [each["settings"].get("data.resolution") for each in others]
    assert [side for side in sides if side] == [8, 12], "smaller, and sides of buckets"
    assert main.run(arguments(place, "--only", "memory.micro_batch", **batches)) == 0
    table = capsys.readouterr().out
    rows = {line.split("  ")[0]: line for line in table.splitlines()}
    assert "1.00x" in rows["as planned"] and "1.00 GiB" in rows["as planned"]
    assert "2.00x" in rows["memory.micro_batch=1"]
    assert table.rstrip().endswith("memory.micro_batch=6: error: no memory")


def test_rows_are_what_trainings_of_their_own_measured(
    place: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: Any = ({}, {"memory.micro_batch": 1}, {"adapter.rank": 0})
    monkeypatch.setattr(bench, "variants", lambda _prepared: iter(tried))
    before = sorted(path.name for path in place.folder.iterdir())
    assert main.run(arguments(place, "--json", train__batch_size=2)) == 0
    planned, single, broken = json.loads(capsys.readouterr().out)
    assert [planned["name"], single["name"]] == ["as planned", "memory.micro_batch=1"]
    for row in (planned, single):
        assert row["failure"] is None
        assert row["images_per_s"] == pytest.approx(2 / row["seconds_per_step"])
        assert row["peak_bytes"] > 50 << 20, "a process with torch in it"
        assert row["predicted_bytes"] > 0
    assert planned["cached_images_per_s"] > 0, "the first training fills the caches"
    assert single["cached_images_per_s"] is None, "the second finds them"
    assert broken["seconds_per_step"] is None and "adapter.rank" in broken["failure"]
    assert sorted(path.name for path in place.folder.iterdir()) == before, "nothing is left"
