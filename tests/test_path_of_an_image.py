"""The path of one image is the one that docs/architecture.md shows: its calls in order, its types, its depth."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from tests.fakes.runs import toy

pytestmark = pytest.mark.timeout(300)  # a loaded machine is not a failure

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lora_trainer"
ROW = re.compile(r"^\| (\d+) \| `([\w/]+\.py)` \| `(\w+)` \| (.*) \|$", re.MULTILINE)
MOST_CALLS, MOST_TYPES, MOST_DEPTH = 11, 8, 2


def shown() -> list[tuple[str, str]]:
    """Return (file, function) of each row of the page."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = ROW.findall(text)
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) <= MOST_CALLS
    types = {name for *_, words in rows for name in re.findall(r"`([A-Z]\w+)`", words)}
    assert len(types) <= MOST_TYPES
    sources = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert all(f"class {name}" in sources for name in types), "a type that is not there"
    return [(file, function) for _, file, function, _ in rows]


def test_an_image_goes_the_way_that_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shown()
    names = {(str(PACKAGE / file), function): (file, function) for file, function in path}
    called: dict[tuple[str, str], None] = {}
    depths: list[int] = []

    functions = frozenset(function for _, function in path)

    def note(frame: FrameType, event: str, argument: Any) -> None:
        # Called for each call of a Python function: returns None, so lines and returns are not traced.
        code = frame.f_code
        if code.co_name in functions and (row := names.get((code.co_filename, code.co_name))):
            called.setdefault(row)

    real = torch.Tensor.backward

    def backward(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        callers = []
        while frame is not None and frame.f_code.co_name != "_train":
            callers.append(frame.f_code.co_name)
            frame = frame.f_back
        assert frame is not None, "not called by the loop"
        depths.append(len(callers))
        return real(self, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    place = toy(tmp_path).with_base()
    threading.settrace(note)
    sys.settrace(note)
    try:
        code = place.train(steps=2, data__validation_fraction=0.0, sampling__every_steps=0)
    finally:
        sys.settrace(None)
        threading.settrace(None)
    assert code == 0
    assert list(called) == path
    assert depths and max(depths) <= MOST_DEPTH
