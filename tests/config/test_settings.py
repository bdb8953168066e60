"""Settings: strict, documented, the same after a round trip, and a form for each; mistakes are named at once."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from lora_trainer.common.errors import RequestError
from lora_trainer.config import config as settings
from lora_trainer.config import constraints
from lora_trainer.config.config import all_settings, build_config, flatten, parse_assignment
from lora_trainer.config.running import Config

INFOS = {info.key: info for info in all_settings()}


def test_every_setting_has_a_default_one_line_and_a_label_of_its_own() -> None:
    flat = flatten(Config())
    assert list(flat) == list(INFOS) and len(INFOS) == len(all_settings())
    assert len({(info.section, info.label) for info in INFOS.values()}) == len(INFOS)
    for key, info in INFOS.items():
        assert info.doc and "\n" not in info.doc and len(info.doc) <= 100, key
        assert not info.doc.endswith("."), key
        assert flat[key] == json.loads(json.dumps(info.default)), key


def test_a_flat_config_builds_the_same_config_which_cannot_change() -> None:
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
    assert build_config(json.loads(json.dumps(flatten(config)))) == config
    assert list(config.adapter.rank_pattern) == ["attn2", "attn"], "the first match wins"
    assert config.objective.zero_terminal_snr is False, "off is not auto"
    assert config.memory.gradient_checkpointing == "none", "as older files write it"
    with pytest.raises(ValidationError, match="frozen"):
        config.train.batch_size = 9  # type: ignore[misc]  # it is frozen


def test_a_mistake_is_named_and_all_of_a_kind_at_once() -> None:
    for values, message in (
        ({"train.step": 3}, "unknown setting 'train.step'. Did you mean 'train.steps'?"),
        ({"train.stepz": 1, "adapter.rnak": 1}, "'adapter.rnak'"),
        ({"train.steps": 0, "adapter.rank": 0}, "adapter.rank=0"),
        (
            {"adapter.kind": "loha", "adapter.dora": True, "optimizer.lora_plus_ratio": 2},
            "adapter.dora",
        ),
        ({"adapter.rank": 1, "adapter.alpha": 500, "memory.micro_batch": 9}, "adapter.alpha=500"),
        ({"optimizer.learning_rate": float("nan")}, "optimizer.learning_rate=nan"),
        ({"train.precision": "fp8"}, "train.precision='fp8'"),
        ({"adapter.rank_pattern": {"(": 4}}, "rank_pattern='(': '(' is not a regular expression"),
        ({"optimizer.learning_rate_pattern": {"attn": -1}}, "optimizer.learning_rate_pattern"),
        ({"objective.flow_shift": "auto"}, "objective.flow_shift='auto'"),
        ({"data.folders.a.repeats": 0}, "data.folders.a.repeats=0"),
        ({"data.folders.a.repeat": 3}, "Did you mean 'data.folders.a.repeats'?"),
        ({"data.folders": {"a": {"repets": 3}}}, "Did you mean 'data.folders.a.repeats'?"),
        ({"data.folders.a": {"repeats": 3}}, "unknown setting 'data.folders.a'"),
        ({"data.folders": 3, "data.folders.a.repeats": 3}, "data.folders=3"),
    ):
        with pytest.raises(RequestError) as caught:
            build_config(values)
        assert message in caught.value.found
        assert all(key.split(".")[1] in caught.value.found for key in values), values


BROKEN: list[dict[str, Any]] = [
    {"objective.min_timestep": 9, "objective.max_timestep": 3},
    {"objective.weighting": "soft_min_snr", "objective.min_snr_gamma": None},
    {"adapter.alpha": 500, "adapter.rank": 4},
    {"adapter.noise_rank": 5, "adapter.rank": 4},
    {"adapter.lokr_factor": 0, "adapter.kind": "lokr"},
    {"output.save_every_steps": 11, "train.steps": 10},
    {"memory.micro_batch": 4, "train.batch_size": 2},
    {"data.resolution": 64, "data.more_resolutions": [32, 64]},
    {"objective.prior": "base"},
    {"objective.preservation_weight": 1.0, "data.class_word": "toy"},
    {"objective.preservation_weight": 1.0, "data.class_word": " Toy", "data.trigger": "toy"},
    {"adapter.new_tokens": 2, "data.trigger": " "},
    {"adapter.new_tokens": 2, "train.init_from": "a.safetensors", "data.trigger": "toy"},
    {"optimizer.name": "prodigy", "optimizer.learning_rate_pattern": {"ff": 0.5}},
    {"optimizer.beta1": 0, "optimizer.name": "schedulefree_adamw"},
    {"optimizer.name": "muon", "adapter.kind": "oft"},
    {"output.weights": "ema"},
    {"memory.base_precision": "bf16", "train.precision": "fp32"},
    {"memory.streamed_blocks": 2, "memory.gradient_checkpointing": "none"},
    {"memory.text_encoder_offload": True, "adapter.text_encoder": True},
]
"""Settings that break one rule among settings each; the first is refused by name."""


def test_each_rule_among_settings_is_said_alone() -> None:
    sentences = set()
    for values in BROKEN:
        with pytest.raises(RequestError) as caught:
            build_config(values)
        assert next(iter(values)) in caught.value.found
        assert caught.value.found.count(". ") == 0, "nothing else is wrong with them"
        sentences.add(caught.value.found)
    rules = re.findall(r"^        yield [f(\"]", inspect.getsource(constraints), re.MULTILINE)
    assert len(sentences) == len(BROKEN) == len(rules)


def test_limits_themselves_are_allowed() -> None:
    build_config(
        {
            "objective.min_timestep": 3,
            "objective.max_timestep": 3,
            "adapter.alpha": 400,
            "adapter.rank": 4,
            "adapter.rslora": True,
            "train.steps": 10,
            "output.save_every_steps": 10,
            "memory.micro_batch": 2,
            "train.batch_size": 2,
            "data.trigger": 123,
            "adapter.rank_pattern": {r"attn\d\.to_q$": 4},
        }
    )
    build_config({"adapter.kind": "lokr", "adapter.lokr_factor": -1, "train.init_from": "a"})


def test_folders_are_set_as_a_whole_or_piece_by_piece() -> None:
    below = {"data.folders": {"a": {"repeats": 2, "flip": True}}, "train.steps": 3}
    above = {"data.folders.a.repeats": 5, "data.folders.10_b.c.trigger": "zibbo"}
    values = settings.overlaid(below, above)
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
    assert settings.overlaid(values, {"data.folders": {}})["data.folders"] == {}
    assert data.triggers == ("zibbo",)
    of_folder = set(type(data.folders["a"]).model_fields) - {"weight", "regularisation"}
    assert of_folder <= set(type(data).model_fields), "or nobody would read it"


def test_assignments_are_json_where_they_can_be() -> None:
    assert parse_assignment(" train.steps =100") == ("train.steps", 100)
    assert parse_assignment("data.trigger=zorble = thing") == ("data.trigger", "zorble = thing")
    assert parse_assignment('sampling.prompts=["a, b"]') == ("sampling.prompts", ["a, b"])
    with pytest.raises(RequestError, match="has no '='"):
        parse_assignment("train.steps")


def test_forms_follow_from_the_schema() -> None:
    for key, kind, words, allowed, label in (
        ("adapter.rslora", "switch", (), "", "rsLoRA"),
        ("objective.zero_terminal_snr", "choice", ("auto", True, False), "", "Zero terminal SNR"),
        ("data.resolution", "number", ("auto",), "a whole number from 16 to 4,096 or auto", "Resolution"),
        ("objective.min_snr_gamma", "number", (), "a number above 0 to 100 or empty: none", "Min SNR gamma"),
        ("optimizer.beta1", "number", (), "a number from 0 below 1", "Beta1"),
        ("base.vae", "text", (), "empty: none", "VAE"),
        ("sampling.prompts", "list", (), "", "Prompts"),
        ("adapter.rank_pattern", "mapping", (), "", "Rank pattern"),
        ("data.cache_max_gib", "number", (), "a number above 0 to 100,000", "Cache max"),
    ):  # fmt: skip
        info = INFOS[key]
        shown = (info.form.kind, info.form.words, info.form.allowed, info.label)
        assert shown == (kind, words, allowed, label)
    assert INFOS["train.validate_every_steps"].label == "Validate every N steps"


def test_a_run_has_no_auto_and_a_setting_of_an_earlier_version_no_effect() -> None:
    with pytest.raises(RequestError, match=r"train\.steps='auto'.*has to be decided"):
        settings.build_run_config({})
    assert build_config({"hardware.cuda_graphs": True}) == Config()
    full = build_config({"memory.gradient_checkpointing": "full"})
    assert build_config({"memory.gradient_checkpointing": True}) == full, (
        "as earlier versions had it"
    )
