"""Python's search for garbage, kept away from what lives as long as the process: imported modules, a loaded model."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def made_to_stay() -> Iterator[None]:
    """Search for no garbage while the block runs, and never again in what is alive at its end.

    Importing torch, diffusers and peft makes a million objects, which are looked through again and
    again as they grow: a sixth of the time of the imports.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
