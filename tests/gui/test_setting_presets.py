"""Settings kept under a name are files that the command line reads; nothing is written over unasked."""

from __future__ import annotations

from pathlib import Path

import pytest
from lora_trainer.gui import setting_presets
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import RequestError
from lora_trainer.config.layers import resolve

VALUES = {"adapter.rank": 4, "sampling.prompts": ["\u00fc", "a\nb"]}


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(runs=tmp_path)


def test_a_preset_is_listed_and_read_by_the_command_line(work: Workplace) -> None:
    file = setting_presets.save(work, VALUES, name=" my owl ")
    setting_presets.save(work, VALUES, name="a")
    assert setting_presets.names(work) == ["a", "my owl"]
    resolved = resolve(
        family="sd15",
        tier="10-12",
        priority="balanced",
        preset=str(file),
        config_file=None,
        overrides={},
    )
    assert resolved.config.adapter.rank == 4
    assert resolved.config.sampling.prompts == ("\u00fc", "a\nb")
    assert file.read_text(encoding="utf-8") == setting_presets.text(work, name="my owl")


def test_a_name_in_use_is_replaced_when_asked_only(work: Workplace) -> None:
    setting_presets.save(work, VALUES, name="a")
    with pytest.raises(RequestError, match="there is a preset 'a'"):
        setting_presets.save(work, {"adapter.rank": 8}, name="a")
    assert '"adapter.rank": 4' in setting_presets.text(work, name="a")
    setting_presets.save(work, {"adapter.rank": 8}, name="a", over=True)
    assert '"adapter.rank": 8' in setting_presets.text(work, name="a")


@pytest.mark.parametrize("name", ["", " ", "../a", ".a", "a/b", "a\0", "x" * 200])
def test_a_name_is_no_path(work: Workplace, name: str) -> None:
    with pytest.raises(RequestError):
        setting_presets.save(work, VALUES, name=name)
    with pytest.raises(RequestError):
        setting_presets.text(work, name=name)
    assert setting_presets.names(work) == []


def test_nothing_is_not_saved(work: Workplace) -> None:
    with pytest.raises(RequestError, match="nothing is changed"):
        setting_presets.save(work, {}, name="a")


def test_what_is_not_there_cannot_be_loaded(work: Workplace) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        setting_presets.text(work, name="b")
