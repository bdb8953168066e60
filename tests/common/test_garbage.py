"""The collector of cycles rests during long loops, and only then; freed memory goes back to the system."""

from __future__ import annotations

import gc
import platform

import psutil
import pytest

from lora_trainer.common.processes import gc_disabled, give_back_heap


def test_the_collector_rests_inside_and_goes_on_after_also_after_a_failure() -> None:
    @gc_disabled()
    def fail() -> None:
        with gc_disabled():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the inner one leaves it to the outer one"
        raise ValueError("mine")

    for _ in range(2):
        assert gc.isenabled()
        with pytest.raises(ValueError, match="mine"):
            fail()
    assert gc.isenabled()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_freed_memory_goes_back_to_the_system() -> None:
    """Half a GiB in pieces as of a training step, the last of which keeps all before it in the heap."""
    pieces = [bytearray(b"x" * 2**17) for _ in range(2**12)]
    last = pieces[-1]
    pieces.clear()
    kept = psutil.Process().memory_info().rss
    give_back_heap()
    assert kept - psutil.Process().memory_info().rss > 2**28
    assert len(last) == 2**17
