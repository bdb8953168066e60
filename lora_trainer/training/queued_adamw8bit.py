"""AdamW in 8 bits that never waits for the device: bitsandbytes' kernels, on many tensors at once.

The library updates each tensor by itself and waits for it: 836 starts and waits a step for the adapter of FLUX.1. Here
tensors are joined into pieces of some million elements, each at a multiple of the library's block of 256 elements, so
that its kernels quantise the same blocks with the same bits. A step whose gradients are not finite is undone on the
device (`found_inf`, as torch's fused optimizers have it). The host learns of it before the update of the next step, by
when the device has had that answer for long, so that such a step does not count in the correction of the averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import bitsandbytes.functional as kernels
import torch
from bitsandbytes.optim import AdamW8bit
from torch import Tensor

from lora_trainer.network.pinned_memory import AsyncRead

# bitsandbytes' block of elements with one scale.
BLOCK = 256
# Of a piece. The step makes copies of one piece at a time: 14 bytes an element.
PIECE_ELEMENTS = 2 * 2**20


@cache
def code_of_zero(*, is_signed: bool) -> int:
    """Return the byte for zero in a state, from a map on the host: one on the device is waited for."""
    return int(kernels.create_dynamic_map(signed=is_signed).abs().argmin())


class _Piece:
    """Tensors of one group that are updated by one kernel; their states are views of the piece's."""

    def __init__(self, parameters: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
        self.parameters, first = parameters, states[0]
        self.in_8_bits = first["state1"].dtype == torch.uint8
        self.starts, self.elements = list[int](), 0
        for parameter in parameters:
            self.starts.append(self.elements)
            self.elements += -(-parameter.numel() // BLOCK) * BLOCK
        self.names = ("state1", "state2", *(("absmax1", "absmax2") if self.in_8_bits else ()))
        self.joined = {
            name: torch.zeros(
                self.elements // (BLOCK if name.startswith("absmax") else 1),
                dtype=first[name].dtype,
                device=parameters[0].device,
            )
            for name in self.names
        }
        if (
            self.in_8_bits
        ):  # the elements between tensors stay zero, whatever scale their block gets
            for name, is_signed in (("state1", True), ("state2", False)):
                self.joined[name].fill_(code_of_zero(is_signed=is_signed))
        self._views: dict[str, list[Tensor]] = {}
        self.take(states)

    def take(self, states: Sequence[dict[str, Any]]) -> None:
        """Move the tensors' states into the piece, unless they are there: a resume replaces them."""
        for name in self.names:
            views = self._views.get(name)
            if views is not None and all(
                state[name] is view for state, view in zip(states, views, strict=True)
            ):
                continue
            fresh = [state[name] for state in states]
            self._views[name] = [
                view.view_as(each)
                for view, each in zip(self._of(self.joined[name], name), fresh, strict=True)
            ]
            torch._foreach_copy_(self._views[name], fresh)
            for state, view in zip(states, self._views[name], strict=True):
                state[name] = view

    def _of(self, joined: Tensor, name: str = "") -> Iterator[Tensor]:
        """Yield the part of each tensor."""
        size = BLOCK if name.startswith("absmax") else 1
        for start, parameter in zip(self.starts, self.parameters, strict=True):
            first = start // size
            yield joined[first : first + -(-parameter.numel() // size)]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensors one after another, with zeros between them."""
        joined = torch.zeros(self.elements, dtype=tensors[0].dtype, device=tensors[0].device)
        torch._foreach_copy_(self.parts(joined), list(tensors))
        return joined

    def parts(self, joined: Tensor) -> list[Tensor]:
        """Return views of joined tensors in the shapes of the parameters."""
        shapes = (parameter.shape for parameter in self.parameters)
        return [part.view(shape) for part, shape in zip(self._of(joined), shapes, strict=True)]


class QueuedAdamW8bit(AdamW8bit):  # type: ignore[misc]  # the library has no types
    """bitsandbytes' AdamW8bit, with states of the same names and bits; heeds `found_inf`."""

    initialized: bool
    _step_supports_amp_scaling = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._pieces = list[tuple[int, _Piece]]()
        # Whether the last step was undone, and the states that counted it.
        self._undone: AsyncRead | None = None
        self._counted = list[dict[str, Any]]()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is None, "the trainer computes gradients itself"
        if not self.initialized:
            self.check_overrides()
            self.to_gpu()
            self.initialized = True
        self._settle()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        is_good = None if found_inf is None else found_inf == 0
        if found_inf is not None:
            self._undone = AsyncRead(found_inf.reshape(1))
        if not self._pieces:
            self._pieces = [*self._made_pieces()]
        for number, piece in self._pieces:
            self._update(number, piece, is_good)

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        state: dict[str, Any] = super().state_dict()
        return state

    def _settle(self) -> None:
        """Take the last step out of the count where it was undone; waits for that step's answer, no later one."""
        undone, counted = self._undone, self._counted
        self._undone, self._counted = None, []
        if undone is not None and undone.read() != [0.0]:
            for state in counted:
                state["step"] -= 1

    def _made_pieces(self) -> Iterator[tuple[int, _Piece]]:
        """Yield the number of a group and a piece of it, until all tensors with gradients are in one."""
        for number, group in enumerate(self.param_groups):
            waiting: dict[tuple[torch.dtype, torch.dtype, int], list[Tensor]] = {}
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.init_state(group, parameter, number, index)
                state = self.state[parameter]
                key = (parameter.dtype, state["state1"].dtype, state["step"])
                alike = waiting.setdefault(key, [])
                alike.append(parameter)
                if sum(tensor.numel() for tensor in alike) >= PIECE_ELEMENTS:
                    yield number, self._piece(alike)
                    alike.clear()
            for alike in filter(None, waiting.values()):
                yield number, self._piece(alike)

    def _piece(self, parameters: Sequence[Tensor]) -> _Piece:
        return _Piece(tuple(parameters), [self.state[parameter] for parameter in parameters])

    def _update(self, number: int, piece: _Piece, is_good: Tensor | None) -> None:
        group, states = (
            self.param_groups[number],
            [self.state[parameter] for parameter in piece.parameters],
        )
        piece.take(states)
        gradients = [each.grad for each in piece.parameters if each.grad is not None]
        if len(gradients) < len(states) or len({state["step"] for state in states}) > 1:
            self._update_each(number, piece, is_good)
            return
        for state in states:
            state["step"] += 1
        self._counted += states
        weights, slopes = piece.join(piece.parameters), piece.join(gradients)
        changed = {"weights": weights, **piece.joined}
        before = {} if is_good is None else {name: each.clone() for name, each in changed.items()}
        first, joined = states[0], piece.joined
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        shared = {"weight_decay": decay, "gnorm_scale": 1.0, "skip_zeros": self.args.skip_zeros}
        step, rate, epsilon = first["step"], group["lr"], group["eps"]
        if piece.in_8_bits:
            kernels.optimizer_update_8bit_blockwise(
                self.optimizer_name, slopes, weights, joined["state1"], joined["state2"],
                beta1, beta2, 0.0, 0.0, epsilon, step, rate, first["qmap1"], first["qmap2"],
                joined["absmax1"], joined["absmax2"], **shared,
            )  # fmt: skip
        else:
            kernels.optimizer_update_32bit(
                self.optimizer_name, slopes, weights, joined["state1"], beta1, epsilon, step,
                rate, joined["state2"], beta2, 0.0, 0.0, **shared,
            )  # fmt: skip
        for name, old in before.items():
            torch.where(is_good, changed[name], old, out=changed[name])  # type: ignore[arg-type]
        torch._foreach_copy_(list(piece.parameters), piece.parts(weights))

    def _update_each(self, number: int, piece: _Piece, is_good: Tensor | None) -> None:
        """Update the tensors that have a gradient by themselves: others are left out, and steps differ then."""
        for index, parameter in enumerate(self.param_groups[number]["params"]):
            if parameter.grad is None or not any(parameter is each for each in piece.parameters):
                continue
            state = self.state[parameter]
            changed = [parameter, *(state[name] for name in piece.names)]
            before = [] if is_good is None else [each.clone() for each in changed]
            self.update_step(self.param_groups[number], parameter, number, index)
            self._counted.append(state)
            for new, old in zip(changed, before, strict=False):
                new.copy_(torch.where(is_good, new, old))  # type: ignore[arg-type]
