"""A setting said not to matter beside others (`only_for`, `not_for`) changes nothing there, or is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from lora_trainer.common.errors import RequestError
from lora_trainer.config.config import SettingInfo, all_settings, build_config, setting_schemas
from lora_trainer.run.plan_text import plan_json
from lora_trainer.run.prepare import Request, prepare
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
    "optimizer.text_encoder_learning_rate": 1e-3,
    "adapter.new_tokens_from": "toy",
    "memory.attention": "xformers",
    "objective.zero_terminal_snr": False,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("unused"))


def clauses() -> Iterator[Any]:
    """Yield each setting with settings beside which it does not matter."""
    for info in CONDITIONAL:
        for key, wanted in info.only_for.items():
            word = next(
                word
                for word in (*SETTINGS[key].form.words, not wanted[0])
                if word not in (*wanted, "auto")
            )
            yield pytest.param(info, {key: word}, id=f"{info.key} beside {key}={word}")
        for key, refused in info.not_for.items():
            beside = {key: refused[0]}
            yield pytest.param(info, beside, id=f"{info.key} beside {key}={refused[0]}")
        if info.idle_with:
            idle = {key: values[0] for key, values in info.idle_with.items()}
            yield pytest.param(info, idle, id=f"{info.key} beside all of {', '.join(idle)}")


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


@cache
def side_px(base: str) -> int:
    return side_of(facts_of(base))


def asked(place: Toy, beside: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a small run in which these stand."""
    base = BASES[str(beside.get("base.prediction", "epsilon"))]
    more = {key: value for key, value in beside.items() if key != "base.prediction"}
    named = {"base.model": str(base_of(base)), "data.resolution": side_px(base)}
    if beside.get("base.model") == "embedded":
        named = {}
    return {**named, "data.cache_dir": str(place.cache), **more}


def plan_of(place: Toy, settings: Mapping[str, Any]) -> dict[str, Any]:
    request = Request(dataset=place.dataset, overrides=dict(settings))
    return plan_json(prepare(request, hardware=PROCESSOR))


def test_conditions_name_settings_and_their_values() -> None:
    for info in CONDITIONAL:
        conditions = (info.only_for, info.not_for, info.idle_with)
        for key, values in (pair for needs in conditions for pair in needs.items()):
            assert key in SETTINGS and key != info.key, info.key
            for value in values:
                assert build_config({key: value}), f"{info.key}: {key}={value}"
                assert value != "auto", f"{info.key}: auto of {key} is no answer yet"


@pytest.mark.parametrize(("info", "beside"), list(clauses()))
def test_the_plan_is_the_same(info: SettingInfo, beside: Mapping[str, Any], place: Toy) -> None:
    settings = asked(place, beside)
    before = plan_of(place, settings)
    in_force = {name: row["value"] for name, row in before["settings"].items()}
    assert info.unused(in_force), f"{info.key} is said to matter"
    try:
        after = plan_of(place, {**settings, info.key: other_value(info)})
    except RequestError as error:
        assert info.key in error.found, "refused for another reason"
        return
    assert not setting_schemas()[info.key].get("enforced"), "it would be ignored silently"
    for plan in (before, after):
        del plan["settings"][info.key]
    assert after == before


SITUATIONS = {
    "OFT on attention of an epsilon base": {
        "adapter.kind": "oft",
        "adapter.targets": "attention",
    },
    "a flow base that is never validated": {
        "base.prediction": "flow",
        "data.validation_fraction": 0.0,
        "train.max_grad_norm": 0.0,
    },
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_training_is_the_same(name: str, place: Toy, tmp_path: Path) -> None:
    settings = asked(place, SITUATIONS[name])
    in_force = {key: row["value"] for key, row in plan_of(place, settings)["settings"].items()}
    others: dict[str, Any] = {}
    for info in CONDITIONAL:
        if not info.unused(in_force):
            continue
        try:
            plan_of(place, {**settings, **others, info.key: other_value(info)})
        except RequestError:
            continue  # refused: then there is no such training
        others[info.key] = other_value(info)
    assert len(others) >= 5, "nothing is tried"
    first = trained(place, settings, tmp_path / "first")
    second = trained(place, {**settings, **others}, tmp_path / "second")
    assert second == first


def trained(place: Toy, settings: Mapping[str, Any], runs: Path) -> tuple[Any, ...]:
    """Return what was measured and learned in three steps."""
    chosen = {
        **settings,
        "train.steps": 3,
        "train.batch_size": 2,
        "hardware.threads": 1,
        "sampling.every_steps": 0,
        "output.save_every_steps": 0,
        "train.validate_every_steps": 2,
    }
    sets = [f"--set={key}={flat_text(value)}" for key, value in chosen.items()]
    assert run_cli([str(place.dataset), f"--output={runs}", *sets]) == 0
    tensors = load_file(runs / "toy" / "toy.safetensors")
    learned = {name: tensor.tobytes() for name, tensor in tensors.items()}
    return measured(runs / "toy"), learned


def flat_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_what_matters_with_any_of_several_settings_says_so() -> None:
    info = SETTINGS["data.caption_variants"]
    idle = {key: values[0] for key, values in info.idle_with.items()}
    told = info.unused(idle)
    assert told.startswith("without effect while ") and told.count(" and ") == len(idle) - 1
    for key, other in (("data.tag_dropout", 0.1), ("data.folders", {"a": {"shuffle_tags": True}})):
        assert not info.unused({**idle, key: other})
    assert not info.unused({key: value for key, value in idle.items() if key != "data.wildcards"})


def test_what_is_not_known_yet_may_matter() -> None:
    info = SETTINGS["objective.flow_shift"]
    assert not info.unused({"base.prediction": "auto"})
    assert not info.unused({})
    assert info.unused({"base.prediction": "epsilon"}) == (
        "needs base.prediction=flow, but it is epsilon"
    )
    assert SETTINGS["output.hub_private"].unused({"output.hub_repo": None}) == (
        "without effect while output.hub_repo is null"
    )
