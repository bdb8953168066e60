"""Files that are none, of nobody, or damaged: a reason in one line, or a reading that loads; never a traceback."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from lora_trainer.config.config import build_config
from lora_trainer.config.layers import read_settings_text
from lora_trainer.importing.reading import import_file, settings_toml
from tests.importing import cases_others, cases_sd_scripts
from tests.importing.corpus import Case

CASES = [*cases_sd_scripts.CASES, *cases_others.CASES]
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 10**30, 1.5, -0.5, 1e308, float("nan"), float("inf"), "", "x", "1e-4", "nan",
    "1e400", "0", "a\x00b", "\u2603" * 300, "C:\\x", "..", [], [1], [[1, 2], [3]], ["x", None], {}, {"a": {"b": 1}},
    [{"a": 1}], [[]], ["=", "a=", "=b"],
)  # fmt: skip
MUTATIONS = 500


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "a = = 1", "is no TOML"),
        ("a.json", "{", "is no JSON"),
        ("a.yaml", "a: [", "is no YAML"),
        ("a.yaml", "a: &x [1]\nb: *x\n", "aliases"),
        ("a.json", "[1, 2]", "is of no trainer"),
        ("a.json", "3", "holds no table"),
        (
            "a.json",
            json.dumps({"prompts": [{"target": "cat", "action": "erase"}]}),
            "is of no trainer",
        ),
        ("leco.toml", '[[prompts]]\ntarget = "cat"\naction = "erase"\n', "is of no trainer"),
        (
            "a.yaml",
            "model:\n  target: ldm.models.diffusion.ddpm.LatentDiffusion\n",
            "is of no trainer",
        ),
        ("a.json", json.dumps({"_class_name": "FluxPipeline"}), "is of no trainer"),
        ("ours.toml", "[adapter]\nrank = 4\n", "of this program already"),
        ("run.json", json.dumps({"settings": {"adapter.rank": 4}}), "of this program already"),
    ],
)
def test_what_is_nobodys_is_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        import_file(tmp_path / name)
    assert message in caught.value.found and "\n" not in caught.value.found
    assert caught.value.fix


def test_a_deep_and_a_large_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000 + "]" * 100_000, encoding="utf-8")
    (tmp_path / "deep.yaml").write_text("[" * 3000 + "]" * 3000, encoding="utf-8")
    (tmp_path / "large.json").write_text(json.dumps({"a": "x" * (5 << 20)}), encoding="utf-8")
    for name in ("deep.json", "deep.yaml", "large.json"):
        with pytest.raises(InputError):
            import_file(tmp_path / name)


@pytest.mark.parametrize("value", [1e308, -1, 1e30])
def test_a_size_or_a_length_of_no_sense_is_no_traceback(value: float, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"")
    data = {"model_family": "flux", "model_type": "lora", "resolution": value}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    assert 64 <= import_file(file).values["data.resolution"] <= 4096
    lengths = f'train_data_dir = "images"\nnetwork_dim = 4\nmax_train_epochs = {value}\n'
    (tmp_path / "their.toml").write_text(lengths, encoding="utf-8")
    try:
        import_file(tmp_path / "their.toml")
    except RequestError as error:
        assert "train.steps" in error.found


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value, tables and lists included."""
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def mutated(data: Any, draw: random.Random) -> Any:
    """Return a copy in which one to three values are odd, or gone."""
    result = json.loads(json.dumps(data))
    for _ in range(draw.randint(1, 3)):
        paths = list(leaves(result))
        if not paths:
            return result
        *parents, last = draw.choice(paths)
        place = result
        for part in parents:
            place = place[part]
        if draw.random() < 0.1:
            del place[last]
        else:
            place[last] = copy.deepcopy(draw.choice(ODD))
    return result


def test_damaged_values_give_a_reading_or_a_reason(tmp_path: Path) -> None:
    draw = random.Random(18)
    readings = 0
    for number in range(MUTATIONS):
        case = CASES[number % len(CASES)]
        suffix = ".json" if case.suffix == ".toml" else case.suffix  # TOML holds no null
        beside = {
            name: mutated(one, draw) for name, one in case.beside.items() if name.endswith(".json")
        }
        damaged = Case(
            **{**vars(case), "data": mutated(case.data, draw), "beside": beside, "suffix": suffix}
        )
        try:
            imported = import_file(damaged.write(tmp_path))
        except (RequestError, InputError) as error:
            assert isinstance(error, LoraTrainError) and error.found and error.fix, damaged.data
            continue
        readings += 1
        build_config(imported.values)
        json.dumps(imported.to_json())
        written = read_settings_text(settings_toml(imported), name="ours.toml", toml=True)
        build_config(written.values)
    assert readings > MUTATIONS / 2


def test_damaged_texts_give_a_reading_or_a_reason(tmp_path: Path) -> None:
    draw = random.Random(19)
    for number in range(170):
        case = CASES[number % len(CASES)]
        file = case.write(tmp_path)
        text = file.read_bytes()
        place = draw.randrange(len(text))
        cut = draw.choice((text[:place], text[:place] + bytes([draw.randrange(256)]) + text[place + 1 :],
                           text[:place] + text[draw.randrange(len(text)) :]))  # fmt: skip
        file.write_bytes(cut)
        try:
            build_config(import_file(file).values)
        except LoraTrainError as error:
            assert error.found and "\n" not in error.found
