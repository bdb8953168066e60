"""Which format a file gets, and which are refused before any work is done."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.errors import RequestError
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.families.base import AdapterFormats, FileFormat
from lora_trainer.lora_file.formats import AdapterContents, format_for, format_notes, resolve_format


class Formats:
    """A family with these formats, the most widely read first."""

    name = "some"

    def __init__(self, *formats: FileFormat, refused: Mapping[FileFormat, str] | None = None):
        self.formats = AdapterFormats(written=formats, refused=refused or {})


UNET: Any = Formats("kohya", "diffusers", refused={"comfyui": "it reads kohya's names"})
TRANSFORMER: Any = Formats("diffusers", "comfyui", refused={"kohya": "nobody finds them"})
ONLY_DIFFUSERS: Any = Formats("diffusers")


def settings(**changes: Any) -> AdapterSettings:
    return AdapterSettings(**changes)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        (UNET, {}, "kohya"),
        (UNET, {"text_encoder": True}, "kohya"),
        (UNET, {"kind": "loha"}, "kohya"),
        (UNET, {"dora": True}, "kohya"),
        (TRANSFORMER, {}, "diffusers"),
        (TRANSFORMER, {"kind": "lokr"}, "comfyui"),
        (TRANSFORMER, {"text_encoder": True}, "diffusers"),
    ],
)
def test_auto_is_the_first_that_can_hold_the_adapter(
    family: Any, changes: dict[str, Any], expected: str
) -> None:
    assert resolve_format(family, "auto", adapter=settings(**changes)) == expected


@pytest.mark.parametrize("format", ["kohya", "diffusers"])
def test_what_is_asked_is_given_where_it_can_be(format: FileFormat) -> None:
    assert resolve_format(UNET, format, adapter=settings()) == format


@pytest.mark.parametrize(
    ("family", "format", "changes", "reason", "fix"),
    [
        (UNET, "comfyui", {}, "it reads kohya's names", "output.format=kohya"),
        (UNET, "diffusers", {"kind": "loha"}, "LoHa.*cannot load it again", "output.format=kohya"),
        (UNET, "diffusers", {"kind": "oft"}, "OFT.*cannot load it again", "output.format=kohya"),
        (TRANSFORMER, "kohya", {}, "nobody finds them", "output.format=diffusers"),
        (ONLY_DIFFUSERS, "auto", {"kind": "lokr"}, "no file format.*LoKr", "adapter.kind=lora"),
        (ONLY_DIFFUSERS, "kohya", {}, "no program reads it", "output.format=diffusers"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(
    family: Any, format: Any, changes: dict[str, Any], reason: str, fix: str
) -> None:
    with pytest.raises(RequestError, match=reason) as raised:
        resolve_format(family, format, adapter=settings(**changes))
    assert fix in raised.value.fix


def test_text_encoders_in_comfyuis_names_are_said_to_be_found_by_it_alone() -> None:
    assert resolve_format(TRANSFORMER, "comfyui", adapter=settings(text_encoder=True)) == "comfyui"
    contents = AdapterContents(kinds=frozenset({"lora"}), dora=False, text=True)
    (note,) = format_notes("comfyui", contents)
    assert "only ComfyUI" in note


@pytest.mark.parametrize(
    ("held", "reason"),
    [({"bias": True}, "biases"), ({"dora": True, "input_dora": True}, "output magnitudes only")],
)
def test_what_diffusers_has_no_names_for_is_refused_there(
    held: dict[str, Any], reason: str
) -> None:
    contents = AdapterContents(
        **{"kinds": frozenset({"lora"}), "dora": False, "text": False, **held}
    )
    with pytest.raises(RequestError, match=reason):
        format_for(UNET, "diffusers", contents)


def test_a_file_of_mixed_kinds_is_judged_by_all_of_them() -> None:
    contents = AdapterContents(kinds=frozenset({"lora", "lokr"}), dora=False, text=False)
    assert format_for(TRANSFORMER, "auto", contents) == "comfyui"


def test_readers_that_miss_something_are_named() -> None:
    dora = AdapterContents(kinds=frozenset({"lora"}), dora=True, text=False)
    assert "diffusers drops" in format_notes("kohya", dora)[0]
    assert "only diffusers reads DoRA" in format_notes("diffusers", dora)[0]
    plain = AdapterContents(kinds=frozenset({"lora"}), dora=False, text=False)
    assert all(format_notes(format, plain) == () for format in ("kohya", "diffusers", "comfyui"))


@pytest.mark.parametrize(
    ("kind", "missed"),
    [("loha", "diffusers cannot"), ("lokr", "some families"), ("oft", "Forge and InvokeAI cannot")],
)
def test_kinds_that_some_readers_lack_are_named(kind: str, missed: str) -> None:
    (note,) = format_notes(
        "kohya", AdapterContents(kinds=frozenset({kind}), dora=False, text=False)
    )
    assert missed in note and "ComfyUI" in note


def test_asking_costs_no_torch() -> None:
    code = "import sys, lora_trainer.lora_file.formats; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
