"""Every file of the corpus reads as in `readings.json`, and as the trainer's own code resolves it.

After a change of what is read: `python -m tests.importing.test_corpus` writes `readings.json` anew.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.config import layers
from lora_trainer.config.config import build_config, setting_keys
from lora_trainer.importing import reading
from lora_trainer.importing.foreign import Foreign
from lora_trainer.importing.words import settings_called
from scripts.trainers.measured import FILE, Numbers, add_images, different, explained, ours
from tests.fakes.family_bases import base_of
from tests.fakes.runs import run_cli, write_dataset
from tests.importing.corpus import ALL, CASES, Case

FILE_OF_READINGS = Path(__file__).with_name("readings.json")
READINGS: dict[str, Any] = json.loads(FILE_OF_READINGS.read_text(encoding="utf-8"))
FIRST = {(case.trainer, case.version): case.id for case in reversed(ALL) if not case.refused}
"""The case of each usual file that is kept whole."""
SETTLED = (
    "adapter.rank", "adapter.text_encoder", "optimizer.name", "optimizer.weight_decay",
    "optimizer.schedule", "objective.weighting", "objective.loss", "objective.timestep_sampling",
    "data.caption_dropout", "data.validation_fraction", "train.batch_size", "train.max_grad_norm",
)  # fmt: skip
"""What presets here would choose otherwise: a training file settles each of these."""


def flat_reading(imported: Any) -> dict[str, Any]:
    """Return settings, and what is said of keys that are none, by flat name."""
    rows = {f"nearest {key}": True for key in imported.nearest}
    rows |= {f"lacks {key}": True for key in imported.without_equivalent}
    rows |= {f"unknown {key}": True for key in imported.unknown}
    plain: dict[str, Any] = json.loads(json.dumps(imported.settings))
    # A slider's is the file itself, which lies in a folder of the test.
    dataset = Path(imported.dataset).name if imported.is_dataset else imported.dataset
    return {**plain, **rows, "dataset": dataset}


def difference(row: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return what another reading has otherwise; None: it lacks that."""
    changes = {key: value for key, value in row.items() if usual.get(key, ...) != value}
    return changes | dict.fromkeys(sorted(usual.keys() - row.keys()))


SAID_BESIDE = {
    "optimizer.weight_decay": ["optimizer", "optimizer_type", "type"],
    "optimizer.text_encoder_learning_rate": ["learning_rate", "lr"],
    "data.regularisation_dir": ["image_dir"],
    "output.keep_last": ["save_every_n_epochs"],
    "objective.prior": ["type"],
    "base.model": ["diffusers_path"],
}
"""Keys that say this only beside what they are for: nobody searches for it by that word."""


def keys_not_found(imported: Foreign) -> set[tuple[str, str]]:
    """Return keys of a file by which a search does not find the setting that they are read as."""
    keys = {*imported.values, *imported.called.values()}
    missing = set()
    for setting, source in imported.sources.items():
        for key in keys.intersection(source.split()) if setting in setting_keys() else ():
            word = re.sub(r"\[\d+\]", "", key).rpartition(".")[2]
            if setting not in settings_called(word) and word not in SAID_BESIDE.get(setting, ()):
                missing.add((setting, word))
    return missing


NUMBERS: dict[str, Numbers] = {
    name: numbers
    for trainer in json.loads(FILE.read_text(encoding="utf-8")).values()
    for name, numbers in trainer["cases"].items()
}


@pytest.mark.parametrize("case", ALL, ids=[case.id for case in ALL])
def test_a_file_reads_as_expected(case: Case, tmp_path: Path) -> None:
    add_images(tmp_path)
    file = case.write(tmp_path)
    if case.refused:
        with pytest.raises(LoraTrainError) as caught:
            reading.import_file(file)
        assert case.refused in caught.value.found
        assert case.trainer in caught.value.found, "the trainer is named"
        return
    imported = reading.import_file(file)
    assert imported.trainer.partition(" (")[0] == case.trainer
    first = FIRST[case.trainer, case.version]
    usual = {} if first == case.id else READINGS[first]
    assert difference(flat_reading(imported), usual) == READINGS[case.id]
    assert "hf_abcdef" not in json.dumps(imported.to_json()), "a token is nobody's setting"
    # Each of its keys is named.
    rows = [*imported.sources.values(), *imported.nearest, *imported.nothing_to_set]
    said = f" {' '.join([*rows, *imported.without_equivalent, *imported.unknown])} "
    data = {"[]": case.data} if isinstance(case.data, list) else case.data
    flat = next(flat for each in reading.TRAINERS if (flat := each.flat(data)) is not None)
    for key, value in flat.items():
        nested = isinstance(value, dict) and any(f"{key}.{name}" in said for name in value)
        plain = key.removeprefix("dataset.")
        assert nested or f" {key} " in said or f" {plain} " in said or f" {key}." in said, key
    assert not keys_not_found(imported), "a search for the key finds what it is read as"
    # What is written loads again.
    build_config(imported.settings)
    text = reading.settings_toml(imported)
    as_toml = layers.read_settings_text(text, name="ours.toml", toml=True).values
    assert as_toml == json.loads(json.dumps(imported.settings))
    assert (
        layers.read_settings_text(reading.settings_json(imported), name="a.json").values == as_toml
    )
    if "train.steps" in imported.settings or "adapter.rank" in imported.settings:
        assert not set(SETTLED) - imported.settings.keys()
    if case.id not in NUMBERS:
        return
    # A run has the trainer's own numbers, or it is said why not.
    theirs = NUMBERS[case.id]
    mine = ours(imported, theirs["family"])
    assert not {
        name: (mine[name], theirs[name])
        for name in different(mine, theirs)
        if not explained(name, imported, mine, theirs)
    }


def test_the_corpus_is_whole_and_a_written_file_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {case.id: case for case in ALL}
    assert len(names) == len(ALL) and NUMBERS.keys() <= names.keys()
    trainers = {trainer.name.partition(" (")[0] for trainer in reading.TRAINERS}
    assert {case.trainer for case in CASES} == trainers
    toml, dataset, base = tmp_path / "ours.toml", tmp_path / "set", base_of("flux")
    file = names["musubi-tuner-30c658c-two_folders"].write(tmp_path)
    assert run_cli(["import", str(file), "--output", str(toml)]) == 0
    values = reading.import_file(file).settings
    for number, folder in enumerate(values["data.folders"]):
        write_dataset(dataset / folder, images=4, first=4 * number)
    capsys.readouterr()
    sets = [f"data.cache_dir={tmp_path / 'cache'}", "base.companion=auto", "base.assistant=none"]
    line = ["plan", str(dataset), "--config", str(toml), "--base", str(base), "--json"]
    assert run_cli([*line, *(f"--set={one}" for one in sets)]) == 0
    plan = json.loads(capsys.readouterr().out)["settings"]
    for key, value in values.items():
        if key.startswith(("optimizer.", "adapter.", "objective.", "train.", "data.resolution")):
            assert plan[key]["value"] == pytest.approx(value), key


def write_readings() -> None:
    """Write how each case is read now."""
    rows: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as name:
        for case in ALL:
            if not case.refused:
                folder = Path(name) / "case"
                add_images(folder)
                rows[case.id] = flat_reading(reading.import_file(case.write(folder)))
                shutil.rmtree(folder)
    short = {
        case.id: difference(rows[case.id], {} if first == case.id else rows[first])
        for case in ALL
        if case.id in rows and (first := FIRST[case.trainer, case.version])
    }
    lines = [
        f"{json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in short.items()
    ]
    FILE_OF_READINGS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write_readings()
