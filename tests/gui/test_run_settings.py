"""Settings of a run as a difference from its preset, with who decided each and why."""

from __future__ import annotations

import json
import re
from typing import Any

from lora_trainer.gui.run_settings import preset_values, settings_html

from lora_trainer.config.config import setting_keys
from lora_trainer.config.layers import RESUMED

PLAN = {"family": "sd15", "tier": "cpu", "priority": "balanced", "preset": "sd15/cpu"}


def record(**changed: tuple[Any, str, str]) -> dict[str, Any]:
    """A run.json whose settings are those of the preset but for `section__name=(value, who, why)`."""
    settings = dict(preset_values(PLAN))
    origins = {key: {"layer": "default", "reason": ""} for key in settings}
    for name, (value, layer, reason) in changed.items():
        key = name.replace("__", ".")
        settings[key] = value
        origins[key] = {"layer": layer, "reason": reason}
    return {"settings": settings, "origins": origins, "plan": PLAN}


def texts(page: str) -> list[str]:
    return [re.sub("<[^>]*>", "", part) for part in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page)]


def test_preset_is_what_the_files_of_presets_say() -> None:
    values = preset_values(PLAN)
    assert set(values) == set(setting_keys())
    assert values["optimizer.learning_rate"] == 0.002
    assert values["train.steps"] == "auto"
    assert values["sampling.prompts"] == [], "as JSON has it"


def test_only_differences_are_on_top_those_that_were_typed_first() -> None:
    page = settings_html(
        record(
            train__precision=("fp32", "planner", "16 bits save <no> time"),
            adapter__rank=(4, "command line", ""),
            optimizer__weight_decay=(0.5, "config my.toml", ""),
        )
    )
    top = page[: page.index("<details>")]
    assert f"3 of {len(setting_keys())} settings differ" in top
    assert texts(top)[5:10] == ["adapter.rank", "4", "16", "you", ""]
    assert "your file my.toml" in texts(top)
    decided = top[top.index("Decided for this machine") :]
    assert texts(decided)[5:] == [
        "train.precision",
        "fp32",
        "auto",
        "the planner",
        "16 bits save &lt;no&gt; time",
    ]
    assert page.count("<tr>") == 3 + 3 + len(setting_keys()), "three heads, three differences, all"


def test_a_resumed_run_says_that_its_values_are_its_own() -> None:
    page = settings_html(record(adapter__rank=(4, RESUMED, "")))
    assert "this run, as it began" in page


def test_of_an_unknown_preset_the_defaults_are_compared() -> None:
    run = record()
    run["plan"] = {"family": "of tomorrow", "tier": "cpu", "priority": "balanced"}
    assert preset_values(run["plan"])["optimizer.learning_rate"] != 0.002
    assert "optimizer.learning_rate" in texts(settings_html(run))
    for plan in ({}, {"tier": "cpu", "priority": []}, {"tier": "9-11", "priority": "speed"}):
        assert set(preset_values(plan)) == set(setting_keys())


def test_settings_that_nobody_knows_are_shown_all_the_same() -> None:
    run = {"settings": {"<b>.x": 1, "train.steps": None}, "origins": []}
    page = settings_html(json.loads(json.dumps(run)))
    assert "&lt;b&gt;.x" in page
    assert settings_html({}).startswith('<p class="quiet">No settings')
