"""Settings files: JSON and TOML, nested and flat, and mistakes named by file, line and column."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.common.errors import RequestError
from lora_trainer.config.config import setting_keys
from lora_trainer.config.layers import read_settings_file


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nested.json", '{"train": {"steps": 7},\n "optimizer": {"learning_rate": 0.5}}'),
        ("flat.json", '{"train.steps": 7, "optimizer.learning_rate": 0.5}'),
        ("mixed.json", '{"train": {"steps": 7}, "optimizer.learning_rate": 0.5}'),
        ("bom.json", '\ufeff{"train.steps": 7, "optimizer.learning_rate": 0.5}'),
        ("schema.json", '{"$schema": "x", "train.steps": 7, "optimizer.learning_rate": 0.5}'),
        ("shared.json", '{"settings": {"train.steps": 7, "optimizer.learning_rate": 0.5}}'),
        (
            "plan.json",
            '{"tier": "cpu", "settings": {"train.steps": {"value": 7, "origin": "default"},'
            ' "optimizer.learning_rate": {"value": 0.5, "origin": "default", "reason": ""}}}',
        ),
        ("nested.toml", "[train]\nsteps = 7\n[optimizer]\nlearning_rate = 0.5"),
        ("dotted.toml", "train.steps = 7\noptimizer.learning_rate = 0.5"),
        ("quoted.toml", '"train.steps" = 7\n"optimizer.learning_rate" = 0.5'),
        ("wrapped.TOML", "[settings.train]\nsteps = 7\n[settings.optimizer]\nlearning_rate = 0.5"),
    ],
)
def test_every_way_to_write_settings_means_the_same(tmp_path: Path, name: str, text: str) -> None:
    read = read_settings_file(written(tmp_path, name, text))
    assert read.values == {"train.steps": 7, "optimizer.learning_rate": 0.5}


@pytest.mark.parametrize(
    ("name", "text", "place", "said"),
    [
        ("a.json", '{\n  "train": {"stepz": 7}}', ":2:13", "Did you mean 'train.steps'?"),
        ("a.json", '{\n  "lerning_rate": 7}', ":2:3", "Did you mean 'optimizer.learning_rate'?"),
        ("a.json", '{"train": {"steps": 7,}}', ":1:23", "not JSON"),
        ("a.json", '{"train.steps": 1,\n "train": {"steps": 7}}', ":2:12", "set twice"),
        ("a.json", '{"train.steps": 1, "train.steps": 2}', "", "occurs twice"),
        ("a.json", '{"train": 5}', ":1:2", "unknown setting 'train'"),
        ("a.json", '{"train.steps": NaN}', "", "NaN is not a number"),
        ("a.json", "[1, 2]", "", "holds a list"),
        ("a.json", "[" * 100_000, "", "Fix"),
        ("a.toml", "[train]\n\nstepz = 7", ":3:1", "Did you mean 'train.steps'?"),
        ("a.toml", "[train]\nsteps = = 7", ":2:9", "not TOML"),
        ("a.toml", "[train]\nsteps = 1\nsteps = 2\n", ":3:10", "not TOML"),
        ("a.toml", "x = " + "[" * 100_000, "", "Fix"),
    ],
)
def test_a_mistake_is_named_with_its_place(
    tmp_path: Path, name: str, text: str, place: str, said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        read_settings_file(written(tmp_path, name, text))
    assert f"{name}{place}" in str(caught.value)
    assert said in str(caught.value)


def test_all_unknown_keys_are_named_at_once(tmp_path: Path) -> None:
    file = written(tmp_path, "a.json", '{"train": {"a": 1},\n "data": {"b": 2}}')
    with pytest.raises(RequestError, match=r"a\.json:1:12.*'train\.a'.*a\.json:2:11.*'data\.b'"):
        read_settings_file(file)


@pytest.mark.parametrize("name", ["missing.json", "missing.toml"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match=name):
        read_settings_file(tmp_path / name)


@pytest.mark.parametrize("name", ["binary.json", "binary.toml"])
def test_bytes_that_are_no_text_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(RequestError, match=name):
        read_settings_file(tmp_path / name)


def test_a_file_may_name_its_family(tmp_path: Path) -> None:
    assert read_settings_file(written(tmp_path, "a.json", '{"family": "sdxl"}')).family == "sdxl"
    assert read_settings_file(written(tmp_path, "b.json", "{}")).family is None


@given(
    keys=st.lists(st.sampled_from(setting_keys()), unique=True),
    indent=st.sampled_from([None, 0, 1, 4]),
    noise=st.text(max_size=8),
)
def test_places_point_at_the_key_itself(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], indent: int | None, noise: str
) -> None:
    """Values that look like JSON must not move the place of a key."""
    nested: dict[str, dict[str, str]] = {}
    for key in keys:
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = f'{{"{noise}": [,'
    text = json.dumps(nested, indent=indent)
    file = written(tmp_path_factory.mktemp("places"), "a.json", text)
    lines = text.splitlines()
    for key, place in read_settings_file(file).places.items():
        line, column = (int(number) for number in place.split(":")[-2:])
        leaf = json.dumps(key.split(".")[1])
        assert lines[line - 1][column - 1 :].startswith(leaf)
