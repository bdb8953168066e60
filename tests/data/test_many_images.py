"""Three times as many images take three times the work in each pass over a dataset, not nine times.

Counted are the lines of the package that run, by function: seconds would say it only of a hundred thousand images.
`benchmarks/large_dataset.py`, whose passes these are, measures those.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from benchmarks import large_dataset
from lora_trainer.common import errors

# More than the captions that are encoded side by side.
FEW, MANY = 80, 240
PACKAGE = str(Path(errors.__file__).parents[1])
MOST = 2 * MANY / FEW
"""So many times the lines of few images may a function run for many; what grows with the square runs nine times."""
LEAST = 20 * MANY
"""A function that runs fewer lines does not count: it has some for the first images only."""


class Lines:
    """Counts the lines that run in each function of the package, loops of comprehensions too, in all new threads."""

    def __init__(self) -> None:
        self.of: Counter[CodeType] = Counter()

    def __enter__(self) -> Counter[CodeType]:
        threading.settrace(self._called)
        sys.settrace(self._called)
        return self.of

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]  # typeshed knows no way to end it

    def _called(self, frame: FrameType, event: str, given: Any) -> Any:
        return self._ran if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _ran(self, frame: FrameType, event: str, given: Any) -> Any:
        if event == "line":
            self.of[frame.f_code] += 1
        return self._ran


def lines(folder: Path, images: int, *, may_encode: bool) -> Counter[CodeType]:
    with Lines() as found:
        measured = large_dataset._measured(folder, may_encode=may_encode)
    assert measured["encoded"] == (measured["entries"] if may_encode else 0)
    assert measured["images"] > 0.9 * images
    return found


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[int, Counter[CodeType]]]:
    """Return the lines by whether entries are encoded, and by how many images there are."""
    found: dict[bool, dict[int, Counter[CodeType]]] = {True: {}, False: {}}
    for images in (FEW, MANY):
        folder = tmp_path_factory.mktemp("many") / str(images)
        large_dataset._make_dataset(folder / "dataset", count=images)
        for may_encode in (True, False):
            found[may_encode][images] = lines(folder, images, may_encode=may_encode)
    return found


@pytest.mark.parametrize("may_encode", [True, False])
def test_no_pass_over_a_dataset_looks_at_all_images_for_each(
    counted: dict[bool, dict[int, Counter[CodeType]]], may_encode: bool
) -> None:
    few, many = (counted[may_encode][images] for images in (FEW, MANY))
    assert sum(many.values()) > 20 * LEAST
    growing = {
        f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}": (few[code], count)
        for code, count in many.items()
        if count > LEAST and count > MOST * few[code]
    }
    assert growing == {}
