"""Every value a setting can have goes from the page through the draft to the command line as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import assume, settings
from hypothesis import given as examples
from hypothesis import strategies as st
from lora_trainer.gui import expert_edit, launch
from lora_trainer.gui.drafts import Draft
from lora_trainer.gui.expert_text import text_of, value_of
from lora_trainer.gui.workplace import Workplace

from lora_trainer.cli import main
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.config import SettingInfo, all_settings, build_config, flatten
from lora_trainer.config.forms import Kind
from lora_trainer.config.layers import read_settings_text

EMPTY = Draft(id="0" * 12)
EDITABLE = [info for info in all_settings() if info.key != expert_edit.FOLDER]
OWN_FIELDS = (expert_edit.BASE, expert_edit.NAME)


def values_of(info: SettingInfo) -> st.SearchStrategy[Any]:
    """Return values that the setting's form says are right."""
    form = info.form
    kinds: Mapping[str, st.SearchStrategy[Any]] = {
        "switch": st.booleans(),
        "choice": st.sampled_from(form.words or ("",)),
        "text": st.text(max_size=30),
        "list": st.lists(st.text(max_size=20), max_size=4),
        "mapping": st.dictionaries(
            st.text(max_size=10).map(re.escape), st.integers(1, 1000), max_size=3
        ),
    }
    if info.key in OWN_FIELDS:
        return st.from_regex("[a-z]{1,8}", fullmatch=True)
    if form.kind == "number" and form.whole:
        found: st.SearchStrategy[Any] = st.integers(int(form.low or 0), int(form.high or 1))
    elif form.kind == "number":
        found = st.floats(
            form.low, form.high, exclude_min=form.above_low, exclude_max=form.below_high
        )
    else:
        found = kinds[form.kind]
    if form.kind == "number" and form.words:
        found |= st.sampled_from(form.words)
    if not form.nullable:
        return found
    return found.filter(lambda value: str(value).strip() != "") | st.none()  # empty is none


def around(info: SettingInfo) -> dict[str, Any]:
    """Return the settings that this one needs beside it."""
    beside = {key: values[0] for key, values in info.only_for.items() if key in NEEDED}
    return {"train.batch_size": 4096} if info.key == "memory.micro_batch" else beside


NEEDED = ("adapter.kind", "adapter.targets", "adapter.text_encoder")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    (folder / "photos").mkdir()
    return folder / "photos"


def understood(words: launch.Words) -> dict[str, Any]:
    """Return the settings that the real command line reads in these words."""
    _, bound, _ = main.app.parse_args(list(words), exit_on_error=False, print_error=False)
    name = bound.arguments.get("name")
    settings: dict[str, Any] = bound.arguments["options"].keywords(name=name)["settings"]
    return settings


@pytest.mark.parametrize("kind", get_args(Kind))
@settings(max_examples=40)
@examples(data=st.data())
def test_a_value_arrives_as_it_was_chosen(kind: Kind, data: Any, images: Path) -> None:
    info = data.draw(st.sampled_from([info for info in EDITABLE if info.form.kind == kind]))
    value = data.draw(values_of(info))
    beside = around(info)
    try:
        wanted = flatten(build_config({**beside, info.key: value}))[info.key]
    except RequestError:
        assume(False)
    text = text_of(info, wanted)
    draft = replace(EMPTY, dataset=str(images), settings=beside)
    draft = expert_edit.changed(draft, key=info.key, text=text)
    work = Workplace(runs=images.parent)
    arrived = flatten(build_config(understood(launch.train_words(draft, work))))
    assert arrived[info.key] == wanted
    pasted = expert_edit.replaced(EMPTY, text=expert_edit.as_json(expert_edit.given(draft))).draft
    assert expert_edit.given(pasted) == expert_edit.given(draft)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("train.batch_size", "many"),
        ("train.batch_size", ""),
        ("adapter.rank", "1.5"),
        ("optimizer.learning_rate", "NaN"),
        ("adapter.rank_pattern", '{"attn": 0}'),
        ("adapter.lokr_factor", "4"),
        ("data.max_aspect", "1e999"),
        ("data.resolution", "[[1]]"),
    ],
)
def test_the_impossible_is_refused_in_the_words_of_the_command_line(
    key: str, text: str, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError) as refused:
        expert_edit.changed(EMPTY, key=key, text=text)
    assert main.run(["plan", str(images), f"--set={key}={text}"]) == 2
    assert capsys.readouterr().err.strip() == f"error: {refused.value}"


def test_a_name_that_is_no_setting_is_refused() -> None:
    with pytest.raises(RequestError, match=r"Did you mean 'adapter\.rank'"):
        expert_edit.changed(EMPTY, key="adapter.rang", text="4")


def test_base_and_name_are_those_of_the_draft() -> None:
    draft = expert_edit.changed(EMPTY, key="base.model", text="me/model")
    draft = expert_edit.changed(draft, key="output.name", text="owl")
    assert (draft.base, draft.name, dict(draft.settings)) == ("me/model", "owl", {})
    assert expert_edit.given(draft) == {"base.model": "me/model", "output.name": "owl"}
    assert expert_edit.without(draft, key="base.model").base == ""
    assert expert_edit.changed(draft, key="base.model", text="auto").base == ""
    with pytest.raises(RequestError, match="cannot be the name of a run"):
        expert_edit.changed(draft, key="output.name", text="../owl")


def test_the_runs_folder_is_not_changed_but_said(images: Path) -> None:
    with pytest.raises(RequestError, match="runs folder of this interface"):
        expert_edit.changed(EMPTY, key="output.folder", text="/elsewhere")
    edited = expert_edit.replaced(EMPTY, text='{"output.folder": "/x", "adapter.rank": 4}')
    assert edited.draft.settings == {"adapter.rank": 4}
    assert "output.folder was left out" in edited.note


def test_a_started_training_keeps_its_settings() -> None:
    with pytest.raises(RequestError, match="started already"):
        expert_edit.changed(replace(EMPTY, started_as="000001"), key="adapter.rank", text="4")


def test_reset_leaves_the_others() -> None:
    draft = replace(EMPTY, settings={"adapter.rank": 4, "train.seed": 1})
    assert expert_edit.without(draft, key="adapter.rank").settings == {"train.seed": 1}


def test_half_a_character_is_refused() -> None:
    for text in ("a \ud800", '["\\ud800"]'):
        with pytest.raises(RequestError, match="half a character"):
            expert_edit.changed(EMPTY, key="sampling.prompts", text=text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"adapter.rank": 4, "train": {"seed": 7}}', "settings.json"),
        ("adapter.rank = 4\n[train]\nseed = 7\n", "mine.toml"),
        (
            '{"settings": {"adapter.rank": {"value": 4, "origin": "x"}, "train.seed": 7}}',
            "plan.json",
        ),
    ],
)
def test_a_settings_file_replaces_all(text: str, name: str) -> None:
    before = replace(EMPTY, settings={"data.flip": True})
    edited = expert_edit.replaced(before, text=text, name=name)
    assert edited.draft.settings == {"adapter.rank": 4, "train.seed": 7}
    written = expert_edit.as_json(expert_edit.given(edited.draft))
    assert read_settings_text(written, name="x").values == {"adapter.rank": 4, "train.seed": 7}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"adapter.rank": 4\n "train.seed": 7}', "line 2, column 2: not JSON"),
        ('{\n  "adapter.rang": 4}', "line 2, column 3: unknown setting 'adapter.rang'"),
        ('{"adapter.rank": 4,\n  "train.seed": -1}', "train.seed is in line 2, column 3"),
        ("[1]", "holds a list"),
    ],
)
def test_a_mistake_in_the_file_has_a_place(text: str, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        expert_edit.replaced(EMPTY, text=text)
    assert said in str(refused.value)


def test_no_text_is_no_change() -> None:
    assert expert_edit.replaced(replace(EMPTY, settings={"train.seed": 1}), text=" ").draft == EMPTY


def test_lists_are_lines_unless_that_would_lose_something() -> None:
    info = expert_edit.setting("sampling.prompts")
    assert text_of(info, ["a cat", "[portrait] of a dog"]) == "a cat\n[portrait] of a dog"
    assert value_of(info, "a cat\n\n [portrait] of a dog\n") == ["a cat", " [portrait] of a dog"]
    for kept in (["two\nlines"], ["", "a"], ['["a"]'], ["a\r"]):
        assert json.loads(text_of(info, kept)) == kept
        assert value_of(info, text_of(info, kept)) == kept


@pytest.mark.parametrize("key", [info.key for info in EDITABLE if info.path])
def test_files_outside_of_the_allowed_folders_are_not_named(key: str, tmp_path: Path) -> None:
    inside = tmp_path / "data"
    inside.mkdir()
    work = Workplace(runs=tmp_path / "runs", roots=(inside,))

    def named(value: str) -> Draft:
        return expert_edit.changed(EMPTY, key=key, text=value)

    for fine in (f"{inside}/x.safetensors", "someone/model", "auto"):
        expert_edit.check_paths(named(fine), work)
    for outside in ("/etc/passwd", "../secret", "~/x", f"{inside}/../y", "passwd"):
        with pytest.raises(InputError, match="outside"):
            expert_edit.check_paths(named(outside), work)
    expert_edit.check_paths(named("/etc/passwd"), Workplace(runs=tmp_path))
