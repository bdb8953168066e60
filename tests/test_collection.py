"""The collector of cycles rests during long loops, and only then."""

from __future__ import annotations

import gc

import pytest

from lora_trainer.common.gc_control import gc_disabled


def test_the_collector_rests_inside_and_goes_on_after() -> None:
    assert gc.isenabled()
    with gc_disabled():
        assert not gc.isenabled()
        with gc_disabled():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the inner one leaves it to the outer one"
    assert gc.isenabled()


def test_it_goes_on_after_a_failure_and_works_on_functions() -> None:
    @gc_disabled()
    def fail() -> None:
        assert not gc.isenabled()
        raise ValueError("mine")

    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            fail()
        assert gc.isenabled()
