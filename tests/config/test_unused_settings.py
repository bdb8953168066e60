"""A setting said not to matter beside others (`only_for`, `not_for`) changes nothing there, or is refused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from lora_trainer.common.errors import RequestError
from lora_trainer.common.records import as_json
from lora_trainer.config import constraints
from lora_trainer.config.config import SettingInfo, all_settings
from lora_trainer.run import prepare
from lora_trainer.run.plan_text import plan_record
from tests.fakes.family_bases import base_of, facts_of, side_of
from tests.fakes.runs import Toy, run_cli, toy
from tests.fakes.runs import trajectory as measured
from tests.test_prepare import PROCESSOR

CONDITIONAL = [info for info in all_settings() if info.only_for or info.not_for or info.idle_with]
SETTINGS = {info.key: info for info in all_settings()}
BASES = {"epsilon": "sd15", "v_prediction": "sd15", "flow": "sd3"}
OTHER = {
    "base.revision": "refs/pr/1",
    "base.companion": "someone/something",
    "data.class_word": "toy",
    "optimizer.schedule": "linear",
    "optimizer.text_encoder_learning_rate": 1e-3,
    "adapter.new_tokens_from": "toy",
    "memory.attention": "xformers",
    "objective.zero_terminal_snr": False,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("unused"))


def clauses() -> dict[str, tuple[dict[str, Any], list[SettingInfo]]]:
    """Return settings, and those that do not matter beside them, by the text of the former."""
    groups: dict[str, tuple[dict[str, Any], list[SettingInfo]]] = {}
    for info in CONDITIONAL:
        besides = [{key: refused[0]} for key, refused in info.not_for.items()]
        for key, wanted in info.only_for.items():
            words = (*SETTINGS[key].form.words, not wanted[0])
            besides.append({key: next(word for word in words if word not in (*wanted, "auto"))})
        if info.idle_with:
            besides.append({key: values[0] for key, values in info.idle_with.items()})
        for beside in besides:
            groups.setdefault(str(beside), (beside, []))[1].append(info)
    return groups


def other_value(info: SettingInfo) -> Any:
    """Return a valid value that is not the default."""
    if info.key in OTHER:
        return OTHER[info.key]
    match info.form.kind:
        case "switch":
            return not info.default
        case "choice":
            return next(w for w in info.form.words if w not in (info.default, "auto"))
        case "number":
            low, high = info.form.low or 0, info.form.high or 1
            candidates = (3, 2, low + 1, (low + high) / 2)
            fits = (c for c in candidates if low < c <= high and c != info.default)
            value = next(fits)
            return int(value) if info.form.whole else float(value)
    raise AssertionError(f"no other value for {info.key}: add it to OTHER")


def asked(place: Toy, beside: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a small run in which these stand."""
    base = BASES[str(beside.get("base.prediction", "epsilon"))]
    more = {key: value for key, value in beside.items() if key != "base.prediction"}
    named = {"base.model": str(base_of(base)), "data.resolution": side_of(facts_of(base))}
    if beside.get("base.model") == "embedded":
        named = {}
    return {**named, "data.cache_dir": str(place.cache), **more}


def plan_of(place: Toy, settings: Mapping[str, Any]) -> dict[str, Any]:
    request = prepare.Request(dataset=place.dataset, overrides=dict(settings))
    return as_json(plan_record(prepare.prepare(request, hardware=PROCESSOR)))


def beside_others(
    place: Toy, settings: Mapping[str, Any], others: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the plan in which `others` have their values too, without those that are refused, and the rest."""
    try:
        return plan_of(place, {**settings, **others}), dict(others)
    except RequestError as error:
        rest = {key: value for key, value in others.items() if key not in error.found}
        assert len(rest) < len(others), f"refused for another reason: {error}"
        return beside_others(place, settings, rest)


@pytest.mark.parametrize(("beside", "infos"), clauses().values(), ids=clauses())
def test_the_plan_is_the_same(
    beside: Mapping[str, Any], infos: list[SettingInfo], place: Toy
) -> None:
    settings = asked(place, beside)
    before = plan_of(place, settings)
    in_force = {name: row["value"] for name, row in before["settings"].items()}
    for info in infos:
        assert info.unused(in_force), f"{info.key} is said to matter"
    values = {info.key: other_value(info) for info in infos}
    after, others = beside_others(place, settings, values)
    assert not any(SETTINGS[key].enforced for key in others), "it would be ignored silently"
    for plan, key in itertools.product((before, after), others):
        del plan["settings"][key]
    assert after == before


def test_the_training_is_the_same(place: Toy, tmp_path: Path) -> None:
    """OFT on attention of a flow base that is never validated."""
    beside = {"adapter.kind": "oft", "adapter.targets": "attention", "base.prediction": "flow"}
    settings = asked(place, {**beside, "train.max_grad_norm": 0.0, "data.validation_fraction": 0.0})
    in_force = {key: row["value"] for key, row in plan_of(place, settings)["settings"].items()}
    values = {info.key: other_value(info) for info in CONDITIONAL if info.unused(in_force)}
    _, others = beside_others(place, settings, values)
    assert len(others) >= 5, "too little is tried"
    ends = []
    for name, chosen in (("first", settings), ("second", settings | others)):
        every = {**chosen, "train.steps": 3, "train.batch_size": 2, "hardware.threads": 1}
        every |= {"sampling.every_steps": 0, "output.save_every_steps": 0}
        every["train.validate_every_steps"] = 2
        sets = [f"--set={key}={constraints.typed(value)}" for key, value in every.items()]
        assert run_cli([str(place.dataset), f"--output={tmp_path / name}", *sets]) == 0
        tensors = load_file(tmp_path / name / "toy" / "toy.safetensors")
        learned = {layer: tensor.tobytes() for layer, tensor in tensors.items()}
        ends.append((measured(tmp_path / name / "toy"), learned))
    assert ends[0] == ends[1]


def test_what_matters_with_any_of_several_settings_or_is_not_known_yet_says_so() -> None:
    unused = SETTINGS["data.caption_variants"].unused
    idle = {key: values[0] for key, values in SETTINGS["data.caption_variants"].idle_with.items()}
    told = unused(idle)
    assert told.startswith("without effect while ") and told.count(" and ") == len(idle) - 1
    for key, other in (("data.tag_dropout", 0.1), ("data.folders", {"a": {"shuffle_tags": True}})):
        assert not unused({**idle, key: other})
    assert not unused({key: value for key, value in idle.items() if key != "data.wildcards"})
    unused = SETTINGS["objective.flow_shift"].unused
    assert not unused({"base.prediction": "auto"}) and not unused({})
    needs = "needs base.prediction=flow, but it is epsilon"
    assert unused({"base.prediction": "epsilon"}) == needs
    told = SETTINGS["output.hub_private"].unused({"output.hub_repo": None})
    assert told == "without effect while output.hub_repo is not set"
