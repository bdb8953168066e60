"""Which formats can hold a file's contents; that a run's format fits its adapter, tests/test_prepare.py shows."""

from __future__ import annotations

from typing import Any

import pytest

from lora_trainer.common.errors import RequestError
from lora_trainer.families.base import AdapterFormats
from lora_trainer.lora_file import formats


class SomeFamily:
    """A family without kohya's format."""

    name = "some"
    formats = AdapterFormats(written=("diffusers", "comfyui"), refused={"kohya": "nobody finds it"})


FAMILY: Any = SomeFamily()
PLAIN: dict[str, Any] = {"kinds": frozenset({"lora"}), "dora": False, "text": False}


@pytest.mark.parametrize(
    ("held", "format", "reason"),
    [
        ({"bias": True}, "diffusers", "biases"),
        ({"dora": True, "input_dora": True}, "diffusers", "output magnitudes only"),
        ({}, "kohya", "nobody finds it"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(held: Any, format: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        formats.format_for(FAMILY, format, formats.AdapterContents(**{**PLAIN, **held}))


def test_a_file_of_mixed_kinds_is_judged_by_all_of_them_and_what_readers_miss_is_noted() -> None:
    mixed = formats.AdapterContents(**{**PLAIN, "kinds": frozenset({"lora", "lokr"})})
    assert formats.format_for(FAMILY, "auto", mixed) == "comfyui"
    (note,) = formats.format_notes("comfyui", formats.AdapterContents(**{**PLAIN, "text": True}))
    assert "only ComfyUI" in note
    assert formats.format_notes("kohya", formats.AdapterContents(**PLAIN)) == ()
