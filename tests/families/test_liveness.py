"""Peaks of hand-made tapes, counted by hand: what is kept, recomputed and when it is freed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lora_trainer.config.config import CHECKPOINTING, Checkpointing
from lora_trainer.costs.liveness import cost_of
from lora_trainer.costs.sample_cost import Layer, SampleCost, Tape

ROW = 40  # bytes of ten fp32 numbers
MIDDLE = 4  # bytes of the adapter's one number of rank 1
LAYER = Layer(name="to_q", group="attention", fan_in=10, out=10, parameters=100)


def cost(tape: Tape, *, checkpointing: Checkpointing) -> SampleCost:
    return cost_of(tape, checkpointing=checkpointing, conditioning_bytes=0)


def adapted(rank: int = 1) -> Tape:
    """Return a tape with adapters that are operations of their own."""
    return Tape(element_bytes=4, rank=rank, wide_adapter=True)


@pytest.mark.parametrize(("checkpointing", "saved_rows"), [("none", 4), ("full", 3)])
def test_a_segment_keeps_its_input_and_brings_back_its_inside(
    checkpointing: Checkpointing, saved_rows: int
) -> None:
    """Activations t -> a -> b -> c after the adapted layer; a and b are made in a segment.

    Kept: the layer's input, the middle, t, b and, without checkpointing, a. The peak is at the
    segment's last operation: input, middle, t and a, and the gradients of b and a.
    """
    tape = adapted()
    t = tape.linear(tape.array(10), LAYER)
    with tape.segment("blocks.0"):
        b = tape.activation(tape.activation(t))
    tape.activation(b)
    found = cost(tape, checkpointing=checkpointing)
    assert found.saved_bytes == saved_rows * ROW + MIDDLE
    peak_rows = 6 if checkpointing == "none" else 5
    assert found.saved_bytes + found.temporary_bytes == peak_rows * ROW + MIDDLE


def test_the_input_of_a_segment_lives_until_its_first_operation_is_done() -> None:
    """t -> a (three rows) -> b (one number): at a, input, middle, t and two gradients live."""
    tape = adapted()
    t = tape.linear(tape.array(10), LAYER)
    wide = Layer(name="conv", group="other", fan_in=10, out=30, parameters=300)
    with tape.segment("blocks.0"):
        tape.copy(tape.conv(t, wide, positions=1), elements=1)
    found = cost(tape, checkpointing="full")
    assert found.saved_bytes == 2 * ROW + MIDDLE
    assert found.saved_bytes + found.temporary_bytes == (2 + 3 + 1) * ROW + MIDDLE


def test_without_an_adapter_nothing_needs_a_gradient() -> None:
    tape = adapted(rank=0)
    tape.activation(tape.linear(tape.array(10), LAYER))
    found = cost(tape, checkpointing="none")
    assert found.saved_bytes == found.adapter_saved_bytes == 0
    assert found.step_flops == found.forward_flops == 2 * 10 * 10


def test_a_wide_adapter_beside_a_16_bit_layer_keeps_an_fp32_copy_of_its_input() -> None:
    tape = Tape(element_bytes=2, rank=1, wide_adapter=True)
    tape.linear(tape.array(10), LAYER)
    assert cost(tape, checkpointing="none").adapter_saved_bytes == ROW + MIDDLE


def test_adapters_that_are_one_with_their_layers_keep_an_input_once_and_as_it_is() -> None:
    """Two layers read x; the convolution keeps what they made for itself, and its adapter no more."""
    tape = Tape(element_bytes=2, rank=1, targets="all")
    x = tape.array(10)
    tape.linear(x, LAYER)
    y = tape.linear(x, LAYER)
    conv = Layer(name="conv", group="convolution", fan_in=10, out=10, parameters=100)
    tape.conv(y, conv, positions=1)
    found = cost(tape, checkpointing="none")
    assert (found.saved_bytes, found.adapter_saved_bytes) == (2 * ROW / 2, 0)


def test_one_operation_runs_to_its_end_when_recomputed_and_makes_its_middle_again() -> None:
    tape = Tape(element_bytes=4, rank=1)
    with tape.segment("blocks.0"):
        tape.linear(tape.linear(tape.array(10), LAYER), LAYER)
    once, twice = cost(tape, checkpointing="none"), cost(tape, checkpointing="full")
    layer, way = 2 * 10 * 10, 2 * 10
    assert once.forward_flops == 2 * (layer + 2 * way)
    # Both: the gradients of B, of the middle and of A, and the middle; the second: of its input.
    assert once.step_flops - once.forward_flops == 2 * 4 * way + way + layer
    assert twice.step_flops - once.step_flops == once.forward_flops


def test_flops_of_a_step() -> None:
    """The first layer's input needs no gradient; the adapter takes twice its forward pass."""
    tape = adapted()
    tape.linear(tape.array(10), LAYER)
    found = cost(tape, checkpointing="none")
    layer, adapter = 2 * 10 * 10, 2 * 10 + 2 * 10
    assert found.forward_flops == layer + adapter
    assert found.step_flops == layer + 3 * adapter


def test_recomputing_repeats_the_forward_pass_as_far_as_something_is_kept() -> None:
    """The layer and the adapter's way down, whose output the way up keeps before it runs."""
    tape = adapted()
    with tape.segment("blocks.0"):
        tape.linear(tape.array(10), LAYER)
    once, twice = cost(tape, checkpointing="none"), cost(tape, checkpointing="full")
    assert twice.step_flops - once.step_flops == 2 * 10 * 10 + 2 * 10
    assert twice.kernels == once.kernels + 2


def test_a_pass_without_gradients_frees_what_was_read_and_is_not_held() -> None:
    """x -> a -> b -> c holds two rows at a time; a variable that keeps x alive makes it three."""
    free, held = adapted(rank=0), adapted(rank=0)
    for tape in (free, held):
        x = tape.array(10)
        tape.activation(tape.activation(tape.activation(x)))
    held.hold(x)
    assert cost(free, checkpointing="none").forward_bytes == 2 * ROW
    assert cost(held, checkpointing="none").forward_bytes == 3 * ROW


def test_recomputing_needs_what_passes_by_inside_a_segment() -> None:
    """Something wide that needs no gradient is added to t: no more than t, b and it live in forward.

    Saved: the layer's input, the middle, t, the segment's other input and its output, which is used up
    when the segment runs again. Then the output's gradient waits beside the wide rows and b.
    """
    tape = adapted()
    t = tape.linear(tape.array(10), LAYER)
    with tape.segment("blocks.0"):
        b = tape.add(t, tape.copy(tape.array(10), elements=100))
        output = tape.activation(b)
    tape.activation(output)
    found = cost(tape, checkpointing="full")
    assert found.saved_bytes == 4 * ROW + MIDDLE
    assert found.saved_bytes + found.temporary_bytes == (3 + 1 + 10 + 1) * ROW + MIDDLE


def test_recomputing_stops_at_the_last_thing_kept() -> None:
    """The activation keeps its input before it runs, so that neither it nor what follows runs again."""
    flops = 2 * 10 * 10
    tape = adapted()
    t = tape.linear(tape.array(10), LAYER)
    plain = Layer(name="proj", group="other", fan_in=10, out=10, parameters=100)
    with tape.segment("blocks.0"):
        tape.linear(tape.activation(tape.linear(t, plain)), plain)
    kept, recomputed = (cost(tape, checkpointing=on) for on in ("none", "full"))
    assert recomputed.step_flops == kept.step_flops + flops
    assert recomputed.kernels == kept.kernels + 1


def test_what_keeps_its_own_output_runs_again() -> None:
    tape = adapted()
    q = tape.linear(tape.array(10), LAYER)
    with tape.segment("blocks.0"):
        tape.attention(q, q, q, heads=1, channels=10)
    kept, recomputed = (cost(tape, checkpointing=on) for on in ("none", "full"))
    assert recomputed.step_flops == kept.step_flops + 4 * 10


def test_gradients_of_two_halves_are_joined_when_both_are_there() -> None:
    """Kept: input, middle, wide and the gate's output. At the product two halves' gradients join its own."""
    tape = adapted()
    wide = tape.linear(tape.array(10), LAYER)
    value, gate = tape.halves(wide)
    tape.product(value, tape.activation(gate))
    found = cost(tape, checkpointing="none")
    assert found.saved_bytes == 2.5 * ROW + MIDDLE
    assert found.saved_bytes + found.temporary_bytes == (2.5 + 1.5) * ROW + MIDDLE


# ---- kinds of checkpointing


def blocks(count: int) -> Tape:
    """An adapted layer, then blocks of two activations, and a last copy of one number."""
    tape = adapted()
    x = tape.linear(tape.array(10), LAYER)
    for index in range(count):
        with tape.segment(f"blocks.{index}"):
            x = tape.activation(tape.activation(x))
    tape.copy(x, elements=1)
    return tape


def test_inputs_of_blocks_are_kept_on_the_device_or_on_the_host() -> None:
    """Kept too: the layer's input and middle. Nothing in these blocks is worth keeping."""
    saved = {kind: cost(blocks(5), checkpointing=kind).saved_bytes for kind in CHECKPOINTING}
    assert saved["none"] == (1 + 5 + 5) * ROW + MIDDLE
    assert saved["light"] == saved["selective"] == saved["full"] == (1 + 5) * ROW + MIDDLE
    assert saved["offloaded"] == (1 + 2) * ROW + MIDDLE


def products() -> Tape:
    """An adapted layer, and a block of a narrow and a wide product, attention, and what needs all three."""
    tape = adapted()
    x = tape.linear(tape.array(10), LAYER)
    grown = replace(LAYER, name="grown", group="other", fan_in=10, out=40)
    shrunk = replace(grown, name="shrunk", fan_in=40, out=10)
    with tape.segment("blocks.0"):
        wide = tape.activation(tape.linear(x, grown))
        q = tape.linear(wide, shrunk)
        tape.activation(tape.attention(q, q, q, heads=1, channels=10))
    return tape


def test_results_of_attention_and_products_are_kept_and_do_not_run_again() -> None:
    """One row: the products are 4 rows and 1 wide, attention 1 and the sum of its scores."""
    found = {kind: cost(products(), checkpointing=kind) for kind in CHECKPOINTING}
    full, attention, sums = found["full"], 4 * 10, 4
    assert found["selective"].saved_bytes == full.saved_bytes + (1 + 1) * ROW + sums
    assert found["light"].saved_bytes == full.saved_bytes + (4 + 1 + 1) * ROW + sums
    grown = shrunk = 2 * 10 * 40
    assert full.step_flops == found["none"].step_flops + grown + shrunk + attention
    assert found["selective"].step_flops == full.step_flops - shrunk - attention
    assert found["light"].step_flops == full.step_flops - grown - shrunk - attention
    kernels = [found[kind].kernels for kind in ("light", "selective", "full")]
    assert kernels == [full.kernels - 3, full.kernels - 2, full.kernels]


def test_offloaded_inputs_of_all_blocks_wait_on_the_host_and_two_also_on_the_device() -> None:
    full, offloaded = (cost(blocks(9), checkpointing=kind) for kind in ("full", "offloaded"))
    assert (full.host_bytes, offloaded.host_bytes) == (0, 9 * ROW)
    assert full.saved_bytes - offloaded.saved_bytes == 7 * ROW
    assert offloaded.step_flops == full.step_flops
    assert offloaded.kernels == full.kernels


def test_offloaded_inputs_return_one_block_before_they_are_needed() -> None:
    """At the second activation of a block: the layer's input and middle, this block's input and that
    of the block before, the inside, and the gradients of the block's output and inside."""
    for count in (4, 9):
        found = cost(blocks(count), checkpointing="offloaded")
        peak = found.saved_bytes + found.temporary_bytes
        assert peak == (1 + 2 + 1 + 2) * ROW + MIDDLE


def test_few_blocks_stay_on_the_device() -> None:
    full, offloaded = (cost(blocks(2), checkpointing=kind) for kind in ("full", "offloaded"))
    assert offloaded.saved_bytes == full.saved_bytes
    assert offloaded.host_bytes == 2 * ROW


def test_what_has_no_gradient_is_not_offloaded() -> None:
    """A text that every block reads stays on the device."""
    tape = adapted()
    text, x = tape.array(10), tape.linear(tape.array(10), LAYER)
    for index in range(4):
        with tape.segment(f"blocks.{index}"):
            x = tape.activation(tape.product(text, x))
    found = cost(tape, checkpointing="offloaded")
    assert found.host_bytes == 4 * ROW
    assert found.saved_bytes == (1 + 1 + 2) * ROW + MIDDLE


def test_a_segment_that_keeps_nothing_is_not_run_again() -> None:
    tape = adapted()
    with tape.segment("blocks.0"):
        x = tape.activation(tape.array(10))
    tape.linear(x, LAYER)
    kept, recomputed = (cost(tape, checkpointing=on) for on in ("none", "full"))
    assert recomputed == kept
