"""Layers of settings: later wins, every value knows where it is from, mistakes name their place."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.errors import RequestError
from lora_trainer.config import layers as resolve_module
from lora_trainer.config.config import Config, flatten, setting_keys
from lora_trainer.config.layers import FamilyPresets, Resolved, read_settings_file, resolve

KEY = "sampling.steps"


def resolved(**changes: Any) -> Resolved:
    """Resolve for Stable Diffusion 1.x on a 12 GiB GPU, but for the changes."""
    request: dict[str, Any] = {
        "family": "sd15",
        "tier": "10-12",
        "priority": "balanced",
        "preset": "auto",
        "config_file": None,
        "overrides": {},
    }
    return resolve(**{**request, **changes})


@pytest.fixture
def presets(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Presets in which every layer sets another value, to be taken away layer by layer."""
    layers: dict[str, dict[str, Any]] = {
        "base": {KEY: 101},
        "tier": {KEY: 102},
        "priority": {KEY: 103},
        "cell": {KEY: 104},
    }
    made = FamilyPresets(
        family="sd15",
        title="",
        base=layers["base"],
        tiers={"10-12": layers["tier"], "cpu": {}},
        priorities={"balanced": layers["priority"], "speed": {}},
        cells={"10-12/balanced": layers["cell"]},
    )
    monkeypatch.setattr(resolve_module, "load_presets", lambda family: made)
    return layers


def test_later_layers_win(tmp_path: Path, presets: dict[str, dict[str, Any]]) -> None:
    preset, config = tmp_path / "mine.json", tmp_path / "run.toml"
    preset.write_text('{"sampling.steps": 105}')
    config.write_text("[sampling]\nsteps = 106")
    asked: dict[str, Any] = {
        "preset": str(preset),
        "config_file": read_settings_file(config),
        "overrides": {KEY: 107},
    }
    expected = [
        (107, "command line", lambda: asked["overrides"].clear()),
        (106, f"config {config}", lambda: asked.pop("config_file")),
        (105, f"preset {preset}", lambda: asked.pop("preset")),
        (104, "cell 10-12/balanced", presets["cell"].clear),
        (103, "priority balanced", presets["priority"].clear),
        (102, "preset 10-12", presets["tier"].clear),
        (101, "family sd15", presets["base"].clear),
        (25, "default", lambda: None),
    ]
    for value, layer, take_away in expected:
        result = resolved(**asked)
        assert (result.config.sampling.steps, result.origins[KEY].layer) == (value, layer)
        take_away()


def test_every_setting_has_an_origin_and_default_means_default() -> None:
    result = resolved()
    assert set(result.origins) == set(setting_keys())
    values, defaults = flatten(result.config), flatten(Config())
    for key, origin in result.origins.items():
        assert origin.layer != "default" or values[key] == defaults[key]


def test_the_reason_of_a_file_is_the_place(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"train":\n  {"steps": 5}}')
    origin = resolved(config_file=read_settings_file(file)).origins["train.steps"]
    assert (origin.layer, origin.reason) == (f"config {file}", f"{file}:2:4")


@pytest.mark.parametrize(
    ("preset", "tier", "name"),
    [
        ("auto", "10-12", "sd3/10-12"),
        ("16-24", "16-24", "sd3/16-24"),
        ("sd3/6-8", "6-8", "sd3/6-8"),
        ("cpu", "cpu", "sd3/cpu"),
    ],
)
def test_a_named_preset_replaces_the_tier_of_the_machine(preset: str, tier: str, name: str) -> None:
    result = resolved(family="sd3", preset=preset)
    assert (result.tier, result.preset) == (tier, name)
    sized = "default" if tier in ("cpu", "16-24") else f"preset {tier}"
    assert result.origins["data.resolution"].layer == sized


def test_the_batch_of_the_presets_is_known_whatever_is_typed() -> None:
    """The learning rate beside it is for this batch."""
    typed = {"train.batch_size": 3}
    assert resolved(overrides=typed).preset_batch_size == 1
    assert resolved(preset="cpu", overrides=typed).preset_batch_size == 8


@pytest.mark.parametrize("preset", ["6-9", "sd15/6-9", "sd16/6-8", "quality", "mine"])
def test_an_unknown_preset_lists_the_names(preset: str) -> None:
    with pytest.raises(RequestError, match=r"sd15/6-8.*Fix"):
        resolved(preset=preset)


def test_the_nearest_preset_is_proposed() -> None:
    with pytest.raises(RequestError, match=r"Did you mean '10-12'\?"):
        resolved(preset="10-13")


def test_a_preset_of_another_family_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resolve_module, "preset_families", lambda: ("sd15", "sdxl"))
    with pytest.raises(RequestError, match=r"for sdxl.*--preset sd15/6-8"):
        resolved(preset="sdxl/6-8")
    file = tmp_path / "shared.json"
    file.write_text('{"family": "sdxl", "settings": {}}')
    with pytest.raises(RequestError, match="for sdxl, the base model is sd15"):
        resolved(preset=str(file))


def test_a_cell_that_cannot_work_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cells: Mapping[str, Any] = {"cpu/quality": {"unsupported": "it would take days"}}
    presets = FamilyPresets(
        family="sd15", title="", base={}, tiers={"cpu": {}}, priorities={"speed": {}}, cells=cells
    )
    monkeypatch.setattr(resolve_module, "load_presets", lambda family: presets)
    with pytest.raises(RequestError, match="it would take days"):
        resolved(tier="cpu", priority="quality")
    assert resolved(tier="cpu", priority="speed").tier == "cpu"


def test_the_command_line_may_not_misspell() -> None:
    with pytest.raises(RequestError, match=r"Did you mean 'train\.batch_size'\?"):
        resolved(overrides={"train.batchsize": 3})


def test_a_bad_value_names_the_file_it_is_from(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"train": {"batch_size": 0},\n "train.seed": 3}')
    with pytest.raises(RequestError, match=r"train\.batch_size=0.*a\.json:1:12") as caught:
        resolved(config_file=read_settings_file(file))
    assert "train.seed" not in str(caught.value)


def test_a_contradiction_names_both_origins(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"objective.min_timestep": 900}')
    with pytest.raises(RequestError, match=r"min_timestep is from .*a\.json:1:2"):
        resolved(config_file=read_settings_file(file), overrides={"objective.max_timestep": 100})


def test_a_resumed_run_keeps_its_own_settings(tmp_path: Path) -> None:
    own = flatten(resolved(priority="quality", overrides={"train.steps": 9}).config)
    file = tmp_path / "a.json"
    file.write_text('{"output.keep_last": 9}')
    result = resolved(
        priority="speed",
        run_settings=own,
        overrides={"train.steps": 11},
        config_file=read_settings_file(file),
    )
    assert result.config.adapter.rank == 32, "no preset applies to a resumed run"
    assert result.origins["adapter.rank"].layer == "resumed run"
    assert (result.config.train.steps, result.config.output.keep_last) == (11, 9)
    assert result.origins["train.steps"].layer == "command line"


def test_resolving_does_not_depend_on_the_order_of_keys() -> None:
    overrides = {"train.steps": 3, "adapter.rank": 4, "data.flip": True}
    results = [
        resolved(overrides=dict(order)) for order in itertools.permutations(overrides.items())
    ]
    assert all(result.config == results[0].config for result in results)
