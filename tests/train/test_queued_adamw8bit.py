"""AdamW in 8 bits on joined tensors: the library's bits, steps undone on the device, and no answer waited for."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.optim import AdamW8bit
from torch import Tensor, nn

from lora_trainer.training import queued_adamw8bit
from lora_trainer.training.queued_adamw8bit import QueuedAdamW8bit

# Below and above the size from which states have 8 bits, whole blocks of 256 elements and not; a convolution.
SHAPES = ((16, 320), (320, 16), (4, 4), (7, 700), (5000,), (16, 32, 3, 3), (64, 64), (3,))
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued_adamw8bit, "PIECE_ELEMENTS", 11_000)


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def grouped(tensors: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": tensors[:5]}, {"params": tensors[5:], "lr": 3e-3}]


def walk(optimizer: torch.optim.Optimizer, tensors: list[nn.Parameter], *seeds: int) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape, generator=generator)
        optimizer.step()


def bits(optimizer: torch.optim.Optimizer, tensors: list[nn.Parameter]) -> list[Tensor]:
    """Return copies of the weights and of all states."""
    states = [optimizer.state[tensor] for tensor in tensors]
    names = ("state1", "state2", "absmax1", "absmax2")
    found = [state[name] for state in states for name in names if name in state]
    return [each.detach().clone() for each in (*tensors, *found)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_weights_and_states_have_the_bits_of_the_library() -> None:
    own, reference = parameters(), parameters()
    joined, single = (
        QueuedAdamW8bit(grouped(own), **OPTIONS),
        AdamW8bit(grouped(reference), **OPTIONS),
    )
    walk(joined, own, *range(5))
    walk(single, reference, *range(5))
    assert same(bits(joined, own), bits(single, reference))
    assert len(SHAPES) > len(joined._pieces) > 4, "fewer kernels than tensors"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_step_with_bad_gradients_changes_no_bit_and_the_next_one_is_as_good(bad: float) -> None:
    own = parameters()
    optimizer = QueuedAdamW8bit(grouped(own), **OPTIONS)
    walk(optimizer, own, 1, 2)
    before = bits(optimizer, own)
    for tensor in own:
        tensor.grad = torch.full_like(tensor, bad)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert same(bits(optimizer, own), before)
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    walk(optimizer, own, 3)
    after = bits(optimizer, own)
    assert not same(after, before) and all(each.isfinite().all() for each in after)


@pytest.mark.parametrize(
    ("bad_steps", "saved_after", "lacks_one"),
    [((1,), None, True), ((1, 2, 3), 3, False), ((3, 4), None, False)],
)
def test_a_step_that_is_undone_does_not_count_as_the_library_never_sees_it(
    bad_steps: tuple[int, ...], saved_after: int | None, lacks_one: bool
) -> None:
    """As fp16 has it, whose first steps overflow until the scale fits; a save may come between."""
    own, reference = parameters(), parameters()
    joined, single = (
        QueuedAdamW8bit(grouped(own), **OPTIONS),
        AdamW8bit(grouped(reference), **OPTIONS),
    )
    for step in range(1, 6):
        is_bad = step in bad_steps
        for optimizer, tensors in ((joined, own), (single, reference)):
            generator = torch.Generator().manual_seed(step)
            for tensor in tensors:
                gradient = torch.randn(tensor.shape, generator=generator)
                tensor.grad = gradient * torch.inf if is_bad else gradient
            if lacks_one and step == 2:
                tensors[0].grad = None
            if optimizer is joined:
                optimizer.found_inf = torch.tensor(float(is_bad))  # type: ignore[attr-defined]  # set by GradScaler
            if optimizer is joined or not is_bad:
                optimizer.step()
        if step == saved_after:
            saved = torch.load(_saved(joined.state_dict()), weights_only=False)
            joined = QueuedAdamW8bit(grouped(own), **OPTIONS)
            joined.load_state_dict(saved)
    assert same(bits(joined, own), bits(single, reference))
    counts = [joined.state[tensor]["step"] for tensor in own]
    assert counts == [single.state[tensor]["step"] for tensor in reference]


def test_a_resume_goes_on_with_the_same_bits() -> None:
    own, resumed = parameters(), parameters()
    first, second = (
        QueuedAdamW8bit(grouped(own), **OPTIONS),
        QueuedAdamW8bit(grouped(resumed), **OPTIONS),
    )
    walk(first, own, 1, 2)
    walk(second, resumed, 9)  # its states are there already, as those of a run that resumes
    state = {key: values for key, values in first.state_dict().items()}
    second.load_state_dict(torch.load(_saved(state), weights_only=False))
    for old, new in zip(own, resumed, strict=True):
        new.data.copy_(old)
    walk(first, own, 3, 4)
    walk(second, resumed, 3, 4)
    assert same(bits(first, own), bits(second, resumed))


def _saved(state: dict[str, object]) -> object:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_a_tensor_without_a_gradient_is_left_out_as_the_library_does() -> None:
    own, reference = parameters(), parameters()
    joined, single = (
        QueuedAdamW8bit(grouped(own), **OPTIONS),
        AdamW8bit(grouped(reference), **OPTIONS),
    )
    for optimizer, tensors in ((joined, own), (single, reference)):
        walk(optimizer, tensors, 1)
        generator = torch.Generator().manual_seed(2)
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape, generator=generator)
        tensors[0].grad = None
        optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        optimizer.step()
        walk(optimizer, tensors, 3)
    assert same(bits(joined, own), bits(single, reference))


def test_the_code_of_zero_is_that_of_the_maps_of_the_states() -> None:
    own = parameters()
    optimizer = QueuedAdamW8bit(grouped(own), **OPTIONS)
    walk(optimizer, own, 0)
    state = next(state for tensor in own if "qmap1" in (state := optimizer.state[tensor]))
    for codes, is_signed in ((state["qmap1"], True), (state["qmap2"], False)):
        assert codes[queued_adamw8bit.code_of_zero(is_signed=is_signed)] == 0
