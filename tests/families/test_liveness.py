"""Peaks of hand-made tapes, counted by hand: what is kept, recomputed and when it is freed."""

from __future__ import annotations

import pytest

from lora_trainer.families.costs import Layer, SampleCost, Tape
from lora_trainer.families.liveness import cost_of

ROW = 40  # bytes of ten fp32 numbers
MIDDLE = 4  # bytes of the adapter's one number of rank 1
LAYER = Layer(name="to_q", group="attention", fan_in=10, out=10, parameters=100)


def cost(tape: Tape, *, checkpointing: bool) -> SampleCost:
    return cost_of(tape, checkpointing=checkpointing, conditioning_bytes=0)


def adapted(rank: int = 1) -> Tape:
    return Tape(element_bytes=4, rank=rank)


@pytest.mark.parametrize(("checkpointing", "saved_rows"), [(False, 4), (True, 3)])
def test_a_segment_keeps_its_input_and_brings_back_its_inside(
    checkpointing: bool, saved_rows: int
) -> None:
    """Activations t -> a -> b -> c after the adapted layer; a and b are made in a segment.

    Kept: the layer's input, the middle, t, b and, without checkpointing, a. The peak is at the
    segment's last operation: input, middle, t and a, and the gradients of b and a.
    """
    tape = adapted()
    t = tape.linear(tape.array(10), LAYER)
    with tape.segment():
        b = tape.activation(tape.activation(t))
    tape.activation(b)
    found = cost(tape, checkpointing=checkpointing)
    assert found.saved_bytes == saved_rows * ROW + MIDDLE
    peak_rows = 5 if checkpointing else 6
    assert found.saved_bytes + found.temporary_bytes == peak_rows * ROW + MIDDLE


def test_the_input_of_a_segment_lives_until_its_first_operation_is_done() -> None:
    """t -> a (three rows) -> b (one number): at a, input, middle, t and two gradients live."""
    tape = adapted()
    t = tape.linear(tape.array(10), LAYER)
    with tape.segment():
        tape.copy(tape.activation(t, 30), elements=1)
    found = cost(tape, checkpointing=True)
    assert found.saved_bytes == 2 * ROW + MIDDLE
    assert found.saved_bytes + found.temporary_bytes == (2 + 3 + 1) * ROW + MIDDLE


def test_without_an_adapter_nothing_needs_a_gradient() -> None:
    tape = adapted(rank=0)
    tape.activation(tape.linear(tape.array(10), LAYER))
    found = cost(tape, checkpointing=False)
    assert found.saved_bytes == found.adapter_saved_bytes == 0
    assert found.step_flops == found.forward_flops == 2 * 10 * 10


def test_an_adapter_beside_a_16_bit_layer_keeps_an_fp32_copy_of_its_input() -> None:
    tape = Tape(element_bytes=2, rank=1)
    tape.linear(tape.array(10), LAYER)
    assert cost(tape, checkpointing=False).adapter_saved_bytes == ROW + MIDDLE


def test_flops_of_a_step() -> None:
    """The first layer's input needs no gradient; the adapter takes twice its forward pass."""
    tape = adapted()
    tape.linear(tape.array(10), LAYER)
    found = cost(tape, checkpointing=False)
    layer, adapter = 2 * 10 * 10, 2 * 10 + 2 * 10
    assert found.forward_flops == layer + adapter
    assert found.step_flops == layer + 3 * adapter


def test_recomputing_repeats_the_forward_pass_of_the_segment() -> None:
    tape = adapted()
    with tape.segment():
        tape.linear(tape.array(10), LAYER)
    once, twice = cost(tape, checkpointing=False), cost(tape, checkpointing=True)
    assert twice.step_flops - once.step_flops == once.forward_flops
    assert twice.kernels > once.kernels


def test_a_pass_without_gradients_frees_what_was_read_and_is_not_held() -> None:
    """x -> a -> b -> c holds two rows at a time; a variable that keeps x alive makes it three."""
    free, held = adapted(rank=0), adapted(rank=0)
    for tape in (free, held):
        x = tape.array(10)
        tape.activation(tape.activation(tape.activation(x)))
    held.hold(x)
    assert cost(free, checkpointing=False).forward_bytes == 2 * ROW
    assert cost(held, checkpointing=False).forward_bytes == 3 * ROW


def test_recomputing_needs_what_passes_by_inside_a_segment() -> None:
    """Something wide that needs no gradient is added to t: no more than t, b and it live in forward.

    Saved: the layer's input, the middle, t, the segment's other input and its output, which is used up
    when the segment runs again. Then the output's gradient waits beside the wide rows and b.
    """
    tape = adapted()
    t = tape.linear(tape.array(10), LAYER)
    with tape.segment():
        b = tape.add(t, tape.copy(tape.array(10), elements=100))
        output = tape.activation(b)
    tape.activation(output)
    found = cost(tape, checkpointing=True)
    assert found.saved_bytes == 4 * ROW + MIDDLE
    assert found.saved_bytes + found.temporary_bytes == (3 + 1 + 10 + 1) * ROW + MIDDLE


def test_recomputing_stops_at_the_last_thing_kept() -> None:
    """The layer after the activation keeps nothing, so torch does not run it a second time."""
    flops = 2 * 10 * 10
    tape = adapted()
    t = tape.linear(tape.array(10), LAYER)
    plain = Layer(name="proj", group="other", fan_in=10, out=10, parameters=100)
    with tape.segment():
        tape.linear(tape.activation(tape.linear(t, plain)), plain)
    kept, recomputed = (cost(tape, checkpointing=on) for on in (False, True))
    assert recomputed.step_flops == kept.step_flops + flops
    assert recomputed.kernels == kept.kernels + 2


def test_a_segment_that_keeps_nothing_is_not_run_again() -> None:
    tape = adapted()
    with tape.segment():
        x = tape.activation(tape.array(10))
    tape.linear(x, LAYER)
    kept, recomputed = (cost(tape, checkpointing=on) for on in (False, True))
    assert recomputed == kept
