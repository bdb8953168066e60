"""Loops that make hundreds of thousands of objects and no cycles, without the collector's attention.

It would look at all of them, and at the million of an imported torch, again and again: a quarter of the
time that a dataset of 100,000 pictures takes to plan.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the collector of cycles from running while the block, or the function, runs."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
