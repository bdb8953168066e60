"""What plan, check, presets, inspect and doctor say: complete, and never broken by odd texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from lora_trainer.common.findings import Finding
from lora_trainer.config.choices import PRIORITIES
from lora_trainer.config.config import all_settings, setting_keys
from lora_trainer.config.layers import TIERS, Origin, preset_families
from lora_trainer.lora_file.inspect import Inspection, Problem, Spread
from lora_trainer.run.answers import check_text, doctor_json, inspect_text, presets_text
from lora_trainer.run.plan_text import plan_json, plan_text
from lora_trainer.run.prepare import Prepared, Request, prepare
from tests.fakes.runs import toy

ODD = "[bold]odd[/] [/red] :cat:"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    place = toy(tmp_path_factory.mktemp("show"))
    overrides = {"data.cache_dir": str(place.cache), "sampling.prompts": [ODD], "train.steps": 12}
    return prepare(Request(dataset=place.dataset, overrides=overrides))


def text(shown: RenderableType, *, width: int = 400) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(shown, highlight=False)
    return captured.get()


def row(shown: str, start: str) -> str:
    return next(line for line in shown.splitlines() if line.startswith(start))


def test_plan_shows_every_setting_with_value_origin_and_reason(prepared: Prepared) -> None:
    shown = text(plan_text(prepared, everything=True))
    for key in setting_keys():
        origin = prepared.plan.origins[key]
        line = row(shown, f"{key} ")
        assert origin.layer in line
        assert origin.reason in line
    assert "12" in row(shown, "train.steps ")
    assert "px" in row(shown, "data.resolution ")


def test_names_of_settings_are_whole_on_a_narrow_terminal(prepared: Prepared) -> None:
    shown = text(plan_text(prepared, everything=True), width=80)
    assert "…" not in shown
    assert all(row(shown, f"{key} ") for key in setting_keys())


def test_plan_shows_a_dozen_settings_and_those_the_user_set(prepared: Prepared) -> None:
    """REALITY R19: more than 130 rows hid the dozen that were decided."""
    lines = text(plan_text(prepared)).splitlines()
    shown = {key for key in setting_keys() if any(line.startswith(f"{key} ") for line in lines)}
    headlines = {info.key for info in all_settings() if info.headline}
    typed = {"data.cache_dir", "sampling.prompts", "train.steps"}
    assert len(headlines) == 12 and typed <= shown
    assert shown == headlines | {key for key in shown if prepared.plan.origins[key].is_users}
    assert f"{len(setting_keys()) - len(shown)} more settings: --all" in lines


def test_plan_shows_every_item_of_the_peak(prepared: Prepared) -> None:
    shown = text(plan_text(prepared))
    assert all(row(shown, item.name) for item in prepared.plan.memory.items)
    assert row(shown, "predicted peak")


def test_plan_tells_what_is_held_out_and_how_long_it_is(prepared: Prepared) -> None:
    shown = text(plan_text(prepared))
    assert f"{len(prepared.trained)} images trained" in row(shown, "data")
    assert f"12 steps of {prepared.config.train.batch_size}" in row(shown, "length")


def test_plan_says_the_whole_time_and_what_more_of_it_would_buy(prepared: Prepared) -> None:
    shown = text(plan_text(prepared, ("--priority quality", prepared.plan)))
    time = row(shown, "time")
    assert "about" in time and "steps" in time and "s a step" in time
    more = row(shown, "more time")
    assert "--priority quality" in more and "12 steps" in more
    assert "more time" not in text(plan_text(prepared))
    told = plan_json(prepared, ("--priority quality", prepared.plan))["time"]
    assert told["more"].startswith("--priority quality: ")
    low, high = prepared.plan.seconds_per_step
    assert 12 * low < told["run_s"][0] < told["run_s"][1] and told["run_s"][1] > 12 * high
    assert sum(pair[0] for pair in told["parts_s"].values()) == pytest.approx(told["run_s"][0])


def test_texts_of_the_user_are_shown_as_they_are(prepared: Prepared) -> None:
    assert ODD in text(plan_text(prepared))


def test_a_base_or_a_reason_with_brackets_is_shown_as_it_is(prepared: Prepared) -> None:
    odd = f"bases/{ODD}"
    origin = Origin(layer="planner", reason=odd)
    plan = replace(prepared.plan, origins={**prepared.plan.origins, "hardware.device": origin})
    changed = replace(prepared, facts=replace(prepared.facts, source=odd), plan=plan)
    shown = text(plan_text(changed))
    assert odd in row(shown, "base")
    assert odd in row(shown, "device")


def test_a_download_is_announced(prepared: Prepared) -> None:
    assert "to download" not in text(plan_text(prepared))
    facts = replace(prepared.facts, layout=None)
    assert "to download" in row(text(plan_text(replace(prepared, facts=facts))), "base")


def test_the_machine_readable_plan_says_the_same(prepared: Prepared) -> None:
    plan = plan_json(prepared)
    assert plan["settings"]["train.steps"]["value"] == 12
    assert plan["time"]["steps"] == 12
    assert plan["memory"]["peak_bytes"] == prepared.plan.memory.peak_bytes
    assert [item["name"] for item in plan["memory"]["items"]] == [
        item.name for item in prepared.plan.memory.items
    ]


def test_remarks_end_the_plan(prepared: Prepared) -> None:
    assert plan_json(prepared)["remarks"] == []
    changed = replace(prepared, facts=replace(prepared.facts, distilled=True, source=ODD))
    (remark,) = plan_json(changed)["remarks"]
    assert remark["kind"] == "distilled" and remark["advice"]
    last = text(plan_text(changed)).splitlines()[-1]
    assert last == f"warning: {remark['what']}. {remark['advice']}" and ODD in last


def test_check_shows_score_buckets_and_every_finding(prepared: Prepared) -> None:
    finding = Finding(
        kind="odd", severity="warning", file=f"{ODD}.png", what="is odd", advice="look at it"
    )
    whole = replace(finding, file=None, what="the dataset is odd")
    report = replace(prepared.report, findings=(finding, whole))
    shown = text(check_text(report))
    assert f"{report.score:.2f} of 1" in shown
    assert all(f"{name} x{count}" in shown for name, count in report.buckets.items())
    assert f"warning: {ODD}.png: is odd. look at it" in shown
    assert "warning: the dataset is odd. look at it" in shown
    assert "no findings" not in shown
    assert "no findings" in text(check_text(replace(report, findings=())))


def test_presets_shows_every_cell() -> None:
    shown = text(presets_text()).splitlines()[1:]
    expected = [
        [family, tier, priority]
        for family in preset_families()
        for tier in TIERS
        for priority in PRIORITIES
    ]
    assert [line.split()[:3] for line in shown] == expected
    assert all("=" in line or "unsupported: " in line for line in shown)


def test_inspect_shows_what_the_file_says_and_its_problems() -> None:
    inspection = Inspection(
        family="sd15",
        format="kohya",
        rank=Spread(low=4, high=8),
        alpha=None,
        modules=12,
        metadata={"title": ODD, "long": "x" * 101, "fits": "y" * 100},
        problems=(Problem(kind="k", severity="warning", what=f"bad {ODD}", advice="do"),),
    )
    shown = text(inspect_text(inspection))
    assert ODD in row(shown, "title")
    assert row(shown, "long").split()[1] == "x" * 97 + "..."
    assert row(shown, "fits").split()[1] == "y" * 100
    assert "12" in row(shown, "modules")
    assert f"bad {ODD}" in shown


def test_a_problem_of_a_file_reads_as_a_sentence() -> None:
    inspection = Inspection(
        family="sd15",
        format="kohya",
        rank=Spread(low=4, high=4),
        alpha=None,
        modules=1,
        metadata={},
        problems=(Problem(kind="k", severity="warning", what="no alpha", advice="add it"),),
    )
    shown = text(inspect_text(inspection))
    assert "no alpha" in shown
    assert "add it" in shown
    assert "{" not in shown, "a Python value is no sentence"


def test_inspect_shows_the_blocks_that_change_most() -> None:
    norms = {f"up_blocks.{number}": float(number) for number in range(1, 16)}
    inspection = Inspection(
        family="sdxl",
        format="comfyui",
        rank=None,
        alpha=Spread(low=0.5, high=0.5),
        modules=15,
        metadata={},
        problems=(),
        kinds=("loha", "oft"),
        norms=norms,
    )
    shown = text(inspect_text(inspection))
    assert "loha, oft" in row(shown, "kind")
    assert row(shown, "rank").split()[1:] == ["not", "stated"]
    assert row(shown, "alpha").split()[1] == "0.5"
    whole = sum(norm**2 for norm in norms.values())
    table = [line.split() for line in shown.splitlines() if line.startswith("up_blocks")]
    assert table == [
        [f"up_blocks.{number}", f"{number}", f"{number**2 / whole:.1%}"]
        for number in range(15, 3, -1)
    ]
    assert "and 3 blocks with norms up to 3" in shown
    assert "block " not in text(inspect_text(replace(inspection, norms={})))


def test_doctor_gives_scripts_every_fact_with_its_reason(prepared: Prepared) -> None:
    """Its sentences for people are in tests/test_doctor.py."""
    found = doctor_json(prepared.hardware)
    assert found["accelerator"] == prepared.hardware.accelerator().reason
    for name, reason in prepared.hardware.reasons.items():
        assert found[name].keys() == {"value", "reason"}
        assert found[name]["reason"] == reason


def test_no_output_of_these_needs_a_terminal(prepared: Prepared, tmp_path: Path) -> None:
    assert "\x1b" not in text(plan_text(prepared)) + text(check_text(prepared.report))
