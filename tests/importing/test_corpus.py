"""Every file of the corpus reads as expected; each of its keys is named, and what is written loads again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.config.config import build_config
from lora_trainer.config.layers import read_settings_text
from lora_trainer.importing.reading import TRAINERS, import_file, settings_json, settings_toml
from tests.importing import cases_others, cases_sd_scripts
from tests.importing.corpus import Case, case_id

CASES = [*cases_sd_scripts.CASES, *cases_others.CASES]
SETTLED = (
    "adapter.rank", "adapter.text_encoder", "optimizer.name", "optimizer.weight_decay",
    "optimizer.schedule", "objective.weighting", "objective.loss", "objective.timestep_sampling",
    "data.caption_dropout", "data.validation_fraction", "train.batch_size", "train.max_grad_norm",
    "train.lower_on_plateau",
)  # fmt: skip
"""What presets here would choose otherwise: a training file settles each of these."""


def said(imported: Any) -> str:
    """Return all foreign keys of which something is said, each between blanks."""
    rows = [*imported.sources.values(), *imported.nearest, *imported.nothing_to_set]
    return f" {' '.join([*rows, *imported.without_equivalent, *imported.unknown])} "


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_file_reads_as_expected(case: Case, tmp_path: Path) -> None:
    file = case.write(tmp_path)
    if case.refused:
        with pytest.raises(LoraTrainError) as caught:
            import_file(file)
        assert case.refused in caught.value.found
        assert case.trainer in caught.value.found, "the trainer is named"
        return
    imported = import_file(file)
    assert imported.trainer.partition(" (")[0] == case.trainer
    assert {key: imported.values.get(key) for key in case.settings} == dict(case.settings)
    assert not imported.values.keys() & set(case.absent)
    assert set(case.nearest) <= imported.nearest.keys()
    assert set(case.missing) <= imported.without_equivalent.keys()
    assert not imported.unknown
    build_config(imported.values)


@pytest.mark.parametrize("case", [case for case in CASES if not case.refused], ids=case_id)
def test_every_key_is_named_and_what_is_written_loads(case: Case, tmp_path: Path) -> None:
    file = case.write(tmp_path)
    imported, told = import_file(file), said(import_file(file))
    data = {"[]": case.data} if isinstance(case.data, list) else case.data
    flat = next(flat for each in TRAINERS if (flat := each.flat(data)) is not None)
    for key, value in flat.items():
        nested = isinstance(value, dict) and any(f"{key}.{name}" in told for name in value)
        plain = key.removeprefix("dataset.")
        assert nested or f" {key} " in told or f" {plain} " in told or f" {key}." in told, key
    as_toml = read_settings_text(settings_toml(imported), name="ours.toml", toml=True)
    assert as_toml.values == json.loads(json.dumps(imported.values))
    assert read_settings_text(settings_json(imported), name="ours.json").values == as_toml.values
    if "train.steps" in imported.values or "adapter.rank" in imported.values:
        assert not set(SETTLED) - imported.values.keys()


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    """In a file of each trainer."""
    firsts = {case.trainer: case for case in reversed(CASES) if not case.refused}
    for number, case in enumerate(firsts.values()):
        place = tmp_path / str(number)
        place.mkdir()
        data = {**case.data, "an_option_of_tomorrow": 3}
        if case.trainer == "ai-toolkit":
            data = json.loads(json.dumps(case.data))
            data["config"]["process"][0]["an_option_of_tomorrow"] = 3
        if case.trainer == "LoRA_Easy_Training_Scripts":
            data = {**case.data, "extra_args": {"args": {"an_option_of_tomorrow": 3}}}
        file = Case(**{**vars(case), "data": data}).write(place)
        assert import_file(file).unknown == ("an_option_of_tomorrow",), case.trainer


def test_the_corpus_is_large_and_none_is_there_twice() -> None:
    assert len(CASES) >= 120
    assert not [name for name, count in Counter(case.id for case in CASES).items() if count > 1]
    assert min(Counter(case.trainer for case in CASES).values()) >= 12
