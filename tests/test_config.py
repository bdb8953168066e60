"""The settings model: strict, documented, all errors at once, and the same after a round trip."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from lora_trainer.common.errors import RequestError
from lora_trainer.config.config import (
    Config,
    DataSettings,
    FolderSettings,
    all_settings,
    build_config,
    build_run_config,
    flatten,
    overlaid,
    parse_assignment,
    setting_keys,
)
from lora_trainer.config.constraints import SETTINGS, Rule


def test_every_setting_is_documented_in_one_line() -> None:
    for info in all_settings():
        assert info.doc and "\n" not in info.doc and len(info.doc) <= 100, info.key
        assert not info.doc.endswith("."), info.key


def test_keys_are_those_of_a_flat_config() -> None:
    keys = setting_keys()
    assert list(flatten(Config())) == list(keys)
    assert len(set(keys)) == len(keys)
    assert all(key.count(".") == 1 for key in keys)


def test_defaults_are_what_the_table_says() -> None:
    defaults = flatten(Config())
    for info in all_settings():
        assert defaults[info.key] == json.loads(json.dumps(info.default)), info.key


def test_a_flat_config_builds_the_same_config() -> None:
    config = build_config(
        {
            "train.steps": 7,
            "objective.min_snr_gamma": None,
            "sampling.prompts": ["a", "b"],
            "adapter.alpha": 2.5,
            "memory.gradient_checkpointing": False,
            "adapter.rank_pattern": {"attn2": 4, "attn": 8},
            "optimizer.learning_rate_pattern": {"ff": 0},
            "objective.flow_shift": "resolution",
            "objective.zero_terminal_snr": False,
        }
    )
    flat = json.loads(json.dumps(flatten(config)))
    assert build_config(flat) == config
    assert list(config.adapter.rank_pattern) == ["attn2", "attn"], "the first match wins"
    assert config.objective.zero_terminal_snr is False, "off is not auto"
    assert config.sampling.prompts == ("a", "b")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train.step": 3}, "unknown setting 'train.step'. Did you mean 'train.steps'?"),
        ({"steps": 3}, "unknown setting 'steps'"),
        ({"train": {"steps": 3}}, "unknown setting 'train'"),
        ({"train.steps": 0}, "train.steps=0"),
        ({"train.steps": "many"}, "train.steps='many'"),
        ({"optimizer.learning_rate": float("nan")}, "optimizer.learning_rate=nan"),
        ({"optimizer.learning_rate": float("inf")}, "optimizer.learning_rate=inf"),
        ({"adapter.rank": 0}, "adapter.rank=0"),
        ({"train.precision": "fp8"}, "train.precision='fp8'"),
        ({"adapter.rank_pattern": {"(": 4}}, "rank_pattern='(': '(' is no regular expression"),
        (
            {"optimizer.learning_rate_pattern": {"ff[": 2.0}},
            "learning_rate_pattern='ff[': 'ff[' is no regular expression",
        ),
        ({"adapter.rank_pattern": {"attn": 0}}, "adapter.rank_pattern"),
        ({"optimizer.learning_rate_pattern": {"attn": -1}}, "optimizer.learning_rate_pattern"),
        ({"objective.flow_shift": 0}, "objective.flow_shift=0"),
        ({"objective.flow_shift": "auto"}, "objective.flow_shift='auto'"),
        ({"objective.zero_terminal_snr": "perhaps"}, "objective.zero_terminal_snr='perhaps'"),
        ({"base.prediction": "sample"}, "base.prediction='sample'"),
        ({"output.format": "a1111"}, "output.format='a1111'"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        build_config(values)
    assert message in caught.value.found


BROKEN: list[dict[str, Any]] = [
    {"objective.min_timestep": 9, "objective.max_timestep": 3},
    {"objective.weighting": "soft_min_snr", "objective.min_snr_gamma": None},
    {"adapter.alpha": 500, "adapter.rank": 4},
    {"output.save_every_steps": 11, "train.steps": 10},
    {"memory.micro_batch": 4, "train.batch_size": 2},
    {"data.resolution": 64, "data.more_resolutions": [32, 64]},
    {"objective.prior": "base"},
    {"objective.preservation_weight": 1.0, "data.class_word": "toy"},
    {"adapter.new_tokens": 2, "data.trigger": " "},
    {"adapter.dora": True, "adapter.init": "pissa"},
    {"adapter.init": "pissa", "train.init_from": "a.safetensors"},
    {"adapter.new_tokens": 2, "train.init_from": "a.safetensors", "data.trigger": "toy"},
    {"adapter.lokr_factor": 0, "adapter.kind": "lokr"},
    {"optimizer.name": "prodigy", "optimizer.learning_rate_pattern": {"ff": 0.5}},
    {"optimizer.beta1": 0, "optimizer.name": "schedulefree_adamw"},
    {"optimizer.name": "muon", "adapter.kind": "oft"},
    {"output.weights": "ema"},
    {"memory.base_precision": "bf16", "train.precision": "fp32"},
    {"memory.base_matmul": "int8", "memory.base_precision": "nf4"},
    {"memory.streamed_blocks": 2, "memory.gradient_checkpointing": "none"},
    {"memory.streamed_blocks": 2, "base.assistant": "a.safetensors"},
    {"memory.text_encoder_offload": True, "adapter.text_encoder": True},
]
"""Settings that break one rule of `constraints.SETTINGS` each, in its order; the first is refused by name."""


@pytest.mark.parametrize(("rule", "values"), list(zip(SETTINGS, BROKEN, strict=True)))
def test_each_rule_among_settings_is_said_alone(rule: Rule, values: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        build_config(values)
    assert next(iter(values)) in caught.value.found
    assert caught.value.found.startswith(rule.found.partition("{")[0])
    assert caught.value.found.count(". ") == 0, "nothing else is wrong with them"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data.folders.a.repeats": 0}, "data.folders.a.repeats=0"),
        ({"data.folders": {"a": {"weight": -1}}}, "data.folders.a.weight=-1"),
        ({"data.folders.a.repeat": 3}, "Did you mean 'data.folders.a.repeats'?"),
        ({"data.folders": {"a": {"repets": 3}}}, "Did you mean 'data.folders.a.repeats'?"),
        ({"data.folders.a": {"repeats": 3}}, "unknown setting 'data.folders.a'"),
        ({"data.folders": 3}, "data.folders=3"),
        ({"data.folders": 3, "data.folders.a.repeats": 3}, "data.folders=3"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        build_config(values)
    assert message in caught.value.found


def test_folders_are_set_as_a_whole_or_piece_by_piece() -> None:
    below = {"data.folders": {"a": {"repeats": 2, "flip": True}}, "train.steps": 3}
    above = {"data.folders.a.repeats": 5, "data.folders.10_b.c.trigger": "zibbo"}
    values = overlaid(below, above)
    assert values["data.folders"] == {
        "a": {"repeats": 5, "flip": True},
        "10_b.c": {"trigger": "zibbo"},
    }
    assert below["data.folders"] == {"a": {"repeats": 2, "flip": True}}, "left as it was"
    data = build_config(values).data
    assert (data.of_folder("a").repeats, data.of_folder("a").trigger) == (5, None)
    assert data.of_folder("10_b.c").trigger == "zibbo"
    assert data.of_folder("none") is data
    assert flatten(build_config(values))["data.folders"] == values["data.folders"]
    assert overlaid(values, {"data.folders": {}})["data.folders"] == {}
    assert data.triggers == ("zibbo",)


def test_every_setting_of_a_folder_is_one_of_the_data() -> None:
    own = set(FolderSettings.model_fields) - {
        "weight",
        "regularisation",
    }  # what is of a folder alone
    assert own <= set(DataSettings.model_fields), "or it would be read by nobody"


def test_all_errors_are_named_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        build_config({"train.steps": -1, "adapter.rank": 0, "data.flip": "perhaps"})
    assert all(name in caught.value.found for name in ("train.steps", "adapter.rank", "data.flip"))
    with pytest.raises(RequestError) as caught:
        build_config({"train.stepz": 1, "adapter.rnak": 1})
    assert all(name in caught.value.found for name in ("train.stepz", "adapter.rnak"))


@pytest.mark.parametrize(
    "values",
    [
        {"objective.min_timestep": 3, "objective.max_timestep": 3},
        {"adapter.alpha": 400, "adapter.rank": 4},
        {"train.steps": 10, "output.save_every_steps": 10},
        {"memory.micro_batch": 2, "train.batch_size": 2},
        {"adapter.dora": True, "adapter.rslora": True},
        {"adapter.init": "pissa", "adapter.rslora": True},
        {"adapter.kind": "oft", "adapter.rank": 4},
        {"adapter.kind": "lokr", "adapter.lokr_factor": 4},
        {"adapter.kind": "lokr", "adapter.lokr_factor": -1},
        {"adapter.targets": "all", "adapter.conv_rank": 4, "adapter.conv_alpha": 1},
        {"adapter.kind": "loha", "optimizer.lora_plus_ratio": 1},
        {"adapter.text_encoder": True, "optimizer.text_encoder_learning_rate": 1e-5},
        {"adapter.rank_pattern": {r"attn\d\.to_q$": 4}},
        {"optimizer.learning_rate_pattern": {"ff": 0}},
        {"adapter.kind": "loha", "train.init_from": "a.safetensors"},
        {"objective.flow_shift": "resolution", "objective.zero_terminal_snr": True},
    ],
)
def test_limits_themselves_are_allowed(values: dict[str, Any]) -> None:
    build_config(values)


def test_all_contradictions_are_named_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        build_config({"adapter.kind": "loha", "adapter.dora": True, "optimizer.lora_plus_ratio": 2})
    for key in ("adapter.dora=true", "optimizer.lora_plus_ratio=2.0"):
        assert f"{key} needs adapter.kind=lora, but it is loha: leave" in caught.value.found


def test_a_config_cannot_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().train.batch_size = 9  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train.steps=100", "train.steps", 100),
        ("optimizer.learning_rate=1e-4", "optimizer.learning_rate", 1e-4),
        ("data.flip=true", "data.flip", True),
        ("data.trigger=zorble = thing", "data.trigger", "zorble = thing"),
        ("objective.min_snr_gamma=null", "objective.min_snr_gamma", None),
        ('sampling.prompts=["a, b"]', "sampling.prompts", ["a, b"]),
        (" train.precision =bf16", "train.precision", "bf16"),
        ("data.trigger=", "data.trigger", ""),
    ],
)
def test_assignments_are_json_where_they_can_be(text: str, key: str, value: Any) -> None:
    assert parse_assignment(text) == (key, value)


def test_an_assignment_needs_an_equals_sign() -> None:
    with pytest.raises(RequestError, match="has no '='"):
        parse_assignment("train.steps")


def test_the_settings_of_a_run_have_no_auto() -> None:
    with pytest.raises(RequestError, match=r"train\.steps='auto'.*has to be decided"):
        build_run_config({})


def test_a_word_of_digits_is_a_word() -> None:
    key, value = parse_assignment("data.trigger=123")
    assert build_config({key: value}).data.trigger == "123"
    assert build_config({"train.steps": 12}).train.steps == 12
