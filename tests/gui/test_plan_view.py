"""The plan as markup: fit, time, items, decisions; what files of anybody say is shown as text."""

from __future__ import annotations

from lora_trainer.gui import plan_view
from lora_trainer.gui.bases import RECOMMENDED


def test_plan_says_whether_it_fits_how_long_and_what_was_decided() -> None:
    memory = {"items": [{"name": "base", "bytes": 2**30, "note": "<n>"}], "peak_bytes": 2**31}
    plan = {
        "base": "embedded",
        "preset": "cpu",
        "priority": "speed",
        "memory": {**memory, "limit_bytes": 2**32, "fits": True, "phase": "training"},
        "time": {"steps": 60, "epochs": 2.0, "run_s": [60, 120], "note": "by table"},
        "disk": {"cache": 2**20},
        "settings": {
            "train.steps": {"value": 60, "origin": "planner", "reason": "by images"},
            "train.seed": {"value": 42, "origin": "default", "reason": ""},
        },
    }
    html = plan_view.plan(plan)
    assert "Fits: needs 2.0 GiB of 4.0 GiB at most" in html
    assert "About 60 s to 2 min" in html
    assert "not for ComfyUI" in plan_view.brief(plan)
    assert f'data-base="{RECOMMENDED}"' in plan_view.brief(plan)
    for shown in (plan_view.brief, plan_view.plan):
        assert "not for ComfyUI" not in shown({**plan, "base": "owner/name"})
    assert "&lt;n&gt;" in html
    assert "Train: Steps" in html
    assert "Seed" not in html
    over = {**plan, "memory": {**memory, "limit_bytes": 2**30, "fits": False}}
    assert "Does not fit: needs 2.0 GiB, and 1.0 GiB are free" in plan_view.plan(over)
    unknown = {**plan, "memory": {**memory, "limit_bytes": None}, "time": {"note": "unmeasured"}}
    assert "no limit is known" in plan_view.plan(unknown)
    assert "unmeasured" in plan_view.plan(unknown)
