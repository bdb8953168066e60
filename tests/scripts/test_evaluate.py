"""The colour measurement that judges the embedded base, on drawn scenes whose colours are known."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

FOLDER = Path(__file__).parents[2] / "scripts" / "base"
MODULES = ("colour_measure", "scenes")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The scripts' modules, which find each other by their folder, as when run from there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield {name: importlib.import_module(name) for name in MODULES}
        for name in MODULES:
            sys.modules.pop(name)


def test_the_colours_of_drawn_scenes_are_recognised(scripts: dict[str, ModuleType]) -> None:
    drawn = [scripts["scenes"].scene(5, index) for index in range(300)]
    single = [
        one for one in drawn if " left of " not in one.caption and " above " not in one.caption
    ]
    seen = [scripts["colour_measure"].look(one.image) for one in single]
    pairs = list(zip(seen, single, strict=True))
    assert len(pairs) > 150
    objects = sum(found.object_colour == one.object_colour for found, one in pairs)
    backgrounds = sum(found.background_colour == one.background_colour for found, one in pairs)
    assert objects >= 0.98 * len(pairs)
    assert backgrounds >= 0.98 * len(pairs)


def test_lab_values_are_those_of_the_standard(scripts: dict[str, ModuleType]) -> None:
    colours = np.array([(255, 255, 255), (0, 0, 0), (255, 0, 0), (0, 0, 255), (119, 119, 119)])
    # White, black, the primaries red and blue, and a middle gray of lightness 50 (D65, 2 degrees).
    wanted = [(100, 0, 0), (0, 0, 0), (53.24, 80.09, 67.20), (32.30, 79.19, -107.86), (50.03, 0, 0)]
    np.testing.assert_allclose(scripts["colour_measure"].lab(colours), wanted, atol=0.02)


def test_each_colour_is_its_own_nearest_and_the_larger_one_names_an_object(
    scripts: dict[str, ModuleType],
) -> None:
    measure, colours = scripts["colour_measure"], scripts["scenes"].COLOURS
    indices = measure.nearest(measure.lab(np.array(list(colours.values()))))
    assert [measure.NAMES[index] for index in indices] == list(colours)
    image = Image.new("RGB", (64, 64), colours["yellow"])
    seen = measure.look(image)
    assert (seen.object_colour, seen.background_colour) == (None, "yellow")
    image.paste(colours["blue"], (16, 16, 48, 40))
    image.paste(colours["red"], (16, 40, 48, 48))
    seen = measure.look(image)
    assert (seen.object_colour, seen.background_colour) == ("blue", "yellow")
