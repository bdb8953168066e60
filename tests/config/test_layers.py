"""Layers of settings and the files they come from: later wins, mistakes name file, line and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.errors import RequestError
from lora_trainer.config import layers
from lora_trainer.config.config import flatten
from tests.fakes.runs import run_cli, toy

KEY = "sampling.steps"


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def written_settings(folder: Path, text: str) -> layers.SettingsFile:
    return layers.read_settings_file(written(folder, "a.json", text))


def resolved(**changes: Any) -> layers.Resolved:
    """Resolve for Stable Diffusion 1.x on a 12 GiB GPU, but for the changes."""
    given = {key: changes.pop(key) for key in ("family", "tier", "priority") if key in changes}
    names: dict[str, Any] = {"family": "sd15", "tier": "10-12", "priority": "balanced"}
    return layers.resolve(layers.AskedFor(**changes), **{**names, **given})


def test_what_the_base_is_chosen_by_has_the_precedence_of_the_settings(tmp_path: Path) -> None:
    """The layers of the user are the same in both stages: a preset file, a settings file, the command line."""
    preset = written(tmp_path, "mine.json", '{"base.model": "of-preset", "base.clip_skip": 2}')
    config = written(tmp_path, "run.toml", '[base]\nmodel = "of-file"')
    given: dict[str, Any] = {
        "preset": str(preset),
        "config_file": layers.read_settings_file(config),
        "overrides": {"base.model": "typed"},
    }
    for model, take_away in (
        ("typed", given["overrides"].clear),
        ("of-file", lambda: given.pop("config_file")),
        ("of-preset", lambda: given.update(preset="10-12")),
        ("auto", lambda: None),
    ):
        asked = layers.AskedFor(**given)
        final = layers.resolve(asked, family="sd15", tier="10-12", priority="balanced").config.base
        assert final.model == model
        assert final == asked.base(model=asked.value("base.model") or "auto")
        take_away()
    resumed = layers.AskedFor(preset=str(preset), run_settings={"base.model": "of-run"})
    assert (resumed.value("base.model"), resumed.value("base.clip_skip")) == ("of-run", None)


def test_later_layers_win_and_a_cell_that_cannot_work_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer sets another value; they are taken away one by one."""
    family, tier, priority, cell = ({KEY: number} for number in (101, 102, 103, 104))
    made = layers.FamilyPresets(
        family="sd15",
        title="",
        base=family,
        tiers={"10-12": tier, "cpu": {}},
        priorities={"balanced": priority, "speed": {}},
        cells={"10-12/balanced": cell},
    )
    monkeypatch.setattr(layers, "load_presets", lambda family: made)
    preset = written(tmp_path, "mine.json", '{"sampling.steps": 105}')
    config = written(tmp_path, "run.toml", "[sampling]\nsteps = 106")
    asked: dict[str, Any] = {
        "preset": str(preset),
        "config_file": layers.read_settings_file(config),
        "overrides": {KEY: 107},
    }
    for value, layer, take_away in (
        (107, "command line", asked["overrides"].clear),
        (106, f"config {config}", lambda: asked.pop("config_file")),
        (105, f"preset {preset}", lambda: asked.pop("preset")),
        (104, "cell 10-12/balanced", cell.clear),
        (103, "priority balanced", priority.clear),
        (102, "preset 10-12", tier.clear),
        (101, "family sd15", family.clear),
        ("auto", "default", lambda: cell.update(unsupported="it would take days")),
    ):
        result = resolved(**asked)
        assert (result.config.sampling.steps, result.origins[KEY].layer) == (value, layer)
        take_away()
    with pytest.raises(RequestError, match="it would take days"):
        resolved()
    assert resolved(tier="cpu", priority="speed").tier == "cpu"


def test_a_typed_field_of_a_folder_keeps_the_others_of_its_file(tmp_path: Path) -> None:
    file = written_settings(tmp_path, '{"data.folders": {"more": {"weight": 2.0, "repeats": 3}}}')
    result = resolved(config_file=file, overrides={"data.folders.more.repeats": 5})
    more = result.config.data.folders["more"]
    assert (more.weight, more.repeats) == (2.0, 5)
    assert result.origins["data.folders"].layer == "command line"


def test_a_named_preset_replaces_the_tier_of_the_machine() -> None:
    for preset, tier in (("auto", "10-12"), ("16-24", "16-24"), ("sd3/6-8", "6-8")):
        result = resolved(family="sd3", preset=preset)
        assert (result.tier, result.preset) == (tier, f"sd3/{tier}")
        sized = "default" if tier == "16-24" else f"preset {tier}"
        assert result.origins["optimizer.name"].layer == sized


def test_a_preset_that_is_unknown_or_of_another_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"Did you mean '10-12'\?.*sd15/6-8.*Fix"):
        resolved(preset="10-13")
    with pytest.raises(RequestError, match=r"for sdxl.*--preset sd15/6-8"):
        resolved(preset="sdxl/6-8")
    file = written(tmp_path, "shared.json", '{"family": "sdxl", "settings": {}}')
    with pytest.raises(RequestError, match="for sdxl, the base model is sd15"):
        resolved(preset=str(file))


def test_a_bad_value_and_a_contradiction_name_the_file_they_are_from(tmp_path: Path) -> None:
    bad = written_settings(tmp_path, '{"train": {"batch_size": 0},\n "train.seed": 3}')
    with pytest.raises(RequestError, match=r"train\.batch_size=0.*a\.json") as caught:
        resolved(config_file=bad)
    assert "train.seed" not in str(caught.value)
    least = written_settings(tmp_path, '{"objective.min_timestep": 900}')
    with pytest.raises(RequestError, match=r"min_timestep is from config .*a\.json"):
        resolved(config_file=least, overrides={"objective.max_timestep": 100})


def test_a_resumed_run_keeps_its_own_settings(tmp_path: Path) -> None:
    own = flatten(resolved(priority="quality", overrides={"train.steps": 9}).config)
    result = resolved(
        priority="speed",
        run_settings=own,
        overrides={"train.steps": 11},
        config_file=written_settings(tmp_path, '{"output.keep_last": 9}'),
    )
    assert result.config.adapter.rank == 32, "no preset applies to a resumed run"
    assert result.origins["adapter.rank"].layer == "resumed run"
    assert (result.config.train.steps, result.config.output.keep_last) == (11, 9)
    assert result.origins["train.steps"].layer == "command line"


def test_a_value_of_an_earlier_version_is_read_in_its_layer_or_refused(tmp_path: Path) -> None:
    """Refused where an older run would end otherwise without it."""
    key = "memory.gradient_checkpointing"
    full = written_settings(tmp_path, json.dumps({key: "full"}))
    typed = resolved(config_file=full, overrides={key: False})
    assert typed.config.memory.gradient_checkpointing == "none"
    assert typed.origins[key].layer == "command line"
    assert resolved(overrides={"adapter.init": "default"}).config == resolved().config
    for layer in ("overrides", "run_settings"):
        with pytest.raises(RequestError, match=r"pissa is of an earlier version.*start a new run"):
            resolved(**{layer: {"adapter.init": "pissa"}})


# ---- kinds of concept


def test_files_and_typed_settings_are_above_the_concept(tmp_path: Path) -> None:
    contents = written_settings(tmp_path, '{"train.concept": "style", "data.flip": false}')
    for result in (resolved(config_file=contents), resolved(preset=contents.name)):
        assert (result.config.data.flip, result.config.data.caption_dropout) == (False, 0.1)
    typed = {"train.concept": "person", "data.caption_dropout": 0.3}
    assert resolved(overrides=typed, config_file=contents).config.data.caption_dropout == 0.3
    before = {"train.concept": "style", "data.flip": False, "data.caption_dropout": 0.4}
    resumed = resolved(run_settings=before).config.data
    assert (resumed.flip, resumed.caption_dropout) == (False, 0.4)
    with pytest.raises(RequestError, match="train.concept"):
        resolved(overrides={"train.concept": "dog"})


def test_the_command_line_has_a_word_for_the_concept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", str(toy(tmp_path).dataset), "--json", f"--set=data.cache_dir={tmp_path}"]
    assert run_cli([*line, "--kind", "style"]) == 0
    row = json.loads(capsys.readouterr().out)["settings"]["data.flip"]
    assert (row["value"], row["origin"]) == (True, "concept style") and row["reason"]
    assert run_cli([*line, "--kind", "dog"]) == 2


# ---- settings files


def test_every_way_to_write_settings_means_the_same(tmp_path: Path) -> None:
    for name, text in (
        ("mixed.json", '{"train": {"steps": 7}, "optimizer.learning_rate": 0.5}'),
        ("bom.json", '\ufeff{"$schema": "x", "train.steps": 7, "optimizer.learning_rate": 0.5}'),
        (
            "plan.json",
            '{"tier": "cpu", "settings": {"train.steps": {"value": 7, "origin": "default"},'
            ' "optimizer.learning_rate": {"value": 0.5, "origin": "default", "reason": ""}}}',
        ),
        ("dotted.toml", "train.steps = 7\noptimizer.learning_rate = 0.5"),
        ("quoted.toml", '"train.steps" = 7\n"optimizer.learning_rate" = 0.5'),
        ("wrapped.TOML", "[settings.train]\nsteps = 7\n[settings.optimizer]\nlearning_rate = 0.5"),
    ):
        read = layers.read_settings_file(written(tmp_path, name, text))
        assert read.values == {"train.steps": 7, "optimizer.learning_rate": 0.5}, name


def test_a_mistake_is_named_with_its_file_and_all_unknown_keys_at_once(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00\x80")
    for name, text, message in (
        ("binary.toml", "", "cannot read .*binary.toml"),
        ("missing.json", "", "cannot read .*missing.json"),
        ("a.json", '{"train": {"steps": 7 8}}', "a.json:1:23: not JSON"),
        (
            "b.json",
            '{"train.steps": 1, "train": {"steps": 7}}',
            "b.json: 'train.steps' is set twice",
        ),
        ("g.json", '{"train.steps": 5, "train.steps": 6}', "'train.steps' occurs twice"),
        ("c.json", '{"train.steps": NaN}', "NaN is not a number"),
        ("d.json", "[1, 2]", "holds a list"),
        ("e.toml", "[train]\nsteps = = 7", "at line 2, column 9"),
        (
            "f.toml",
            "[train]\nstepz = 7\n[data]\nb = 2",
            r"f.toml: unknown setting 'train.stepz'. Did you mean 'train.steps'\? f.toml: .*'data.b'",
        ),
    ):
        file = written(tmp_path, name, text) if text else tmp_path / name
        with pytest.raises(RequestError, match=message.replace("f.toml", ".*f.toml")):
            layers.read_settings_file(file)
    for name, text in (
        ("kohya.json", '{"network_dim": 8, "seed": 1}'),
        ("onetrainer.json", '{"network_dim": 8, "optimizer": {"beta": 1}}'),
        ("ai-toolkit.yaml", "a: 1"),
    ):
        with pytest.raises(RequestError, match="YAML|'network_dim'") as caught:
            layers.read_settings_file(written(tmp_path, name, text))
        assert "lora-train import FILE" in caught.value.fix
