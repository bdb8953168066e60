"""Faults planted on purpose, to see which of them a rehearsal names.

Usage: python -m scripts.rehearse.planted --work FOLDER [--fault NAME ...]

Trains the smallest base on a pretended card of 8 GiB, once as it is and once with each fault, and prints what the
rehearsal said. Each takes as long as a cell. FOLDER is one of `scripts.rehearse`. Exits with 1 if a fault that a
pretended card shows was not named. In the process that trains, `plant` replaces parts of the trainer.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

KEPT_BYTES = 8 << 20
SOURCE = "stable-diffusion-v1-5/stable-diffusion-v1-5"
VRAM_GIB = 8
SETTINGS = ("memory.gradient_checkpointing=full",)
"""With everything recomputed, what is forgotten to be recomputed shows."""
SHARE_LEFT = 0.5
"""How much of what a step takes beside the weights is left to it when the card turns out smaller."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is planted, and why a pretended card cannot show it; empty: it can.

    A run that `recovers` has to end well beside it, by a change of its own that is told.
    """

    plant: Callable[[], None]
    unseen: str = ""
    settings: Sequence[str] = SETTINGS
    recovers: bool = False


def plant(name: str) -> None:
    """Plant a fault in this process."""
    FAULTS[name].plant()


def _another_device() -> None:
    _change_batches(lambda batch: replace(batch, timesteps=batch.timesteps.cpu()))


def _another_dtype() -> None:
    import torch

    from lora_trainer.training.loss import Model

    losses_of = Model.losses_of
    Model.losses_of = lambda self, batch: losses_of(replace(self, precision=torch.float32), batch)  # type: ignore[method-assign]  # planted


def _unpinned_copies() -> None:
    from lora_trainer.network import pinned_memory

    pinned_memory.pins_for = lambda device, *, in_place=False: False


def _kept_reference() -> None:
    from torch import nn

    from lora_trainer.training.loss import Model

    kept: list[Any] = []
    losses_of = Model.losses_of

    def keeping(self: Any, batch: Any) -> Any:
        layer = next(each for each in self.denoiser.modules() if isinstance(each, nn.Conv2d))
        hook = layer.register_forward_hook(lambda _, inputs, made: kept.append(made))
        try:
            return losses_of(self, batch)
        finally:
            hook.remove()

    Model.losses_of = keeping  # type: ignore[method-assign]  # planted


def _leak() -> None:
    import torch

    kept: list[Any] = []

    def leaking(batch: Any) -> Any:
        kept.append(torch.empty(KEPT_BYTES, dtype=torch.uint8, device=batch.latents.device))
        return batch

    _change_batches(leaking)


def _less_memory_than_the_card_says() -> None:
    import torch

    seen: list[int] = []

    def shrinking(batch: Any) -> Any:
        seen.append(torch.cuda.max_memory_allocated())
        if len(seen) == 3:
            torch.cuda.empty_cache()
            total, kept = torch.cuda.get_device_properties(0).total_memory, seen[0]
            torch.cuda.set_per_process_memory_fraction(
                (kept + SHARE_LEFT * (seen[-1] - kept)) / total
            )
        return batch

    _change_batches(shrinking)


def _loss_read() -> None:
    _change_losses(lambda losses: losses * (1.0 if losses.sum().item() else 2.0))


def _branch_on_a_tensor() -> None:
    _change_losses(lambda losses: losses.clone() if losses.isnan().any() else losses)


def _synchronised() -> None:
    import torch

    def waiting(losses: Any) -> Any:
        torch.cuda.synchronize()
        return losses

    _change_losses(waiting)


def _nothing_recomputed() -> None:
    from lora_trainer.run import build

    build.apply_checkpointing = lambda network, kind: None


def _second_copy() -> None:
    from lora_trainer.training.loss import Model

    copies: list[Any] = []
    losses_of = Model.losses_of

    def copied(self: Any, batch: Any) -> Any:
        if not copies:
            copies.append(copy.deepcopy(self.denoiser))
        return losses_of(self, batch)

    Model.losses_of = copied  # type: ignore[method-assign]  # planted


def _memory_given_back_in_each_step() -> None:
    import torch

    def emptied(losses: Any) -> Any:
        torch.cuda.empty_cache()
        return losses

    _change_losses(emptied)


def _no_wait_for_a_copy() -> None:
    from lora_trainer.network.pinned_memory import CopyStream

    CopyStream.wait = lambda self, event: None  # type: ignore[method-assign]  # planted


def _wrong_sign() -> None:
    from lora_trainer.training import loss

    add_noise = loss.add_noise
    loss.add_noise = lambda latents, noise, alpha, sigma: add_noise(latents, -noise, alpha, sigma)


def _change_batches(change: Callable[[Any], Any]) -> None:
    from lora_trainer.training.loss import Model

    losses_of = Model.losses_of
    Model.losses_of = lambda self, batch: losses_of(self, change(batch))  # type: ignore[method-assign]  # planted


def _change_losses(change: Callable[[Any], Any]) -> None:
    from lora_trainer.training.loss import Model

    losses_of = Model.losses_of
    Model.losses_of = lambda self, batch: change(losses_of(self, batch))  # type: ignore[method-assign]  # planted


FAULTS: Mapping[str, Fault] = {
    "a tensor on another device": Fault(plant=_another_device),
    "a tensor of another dtype": Fault(plant=_another_dtype),
    "copies from memory that is not pinned": Fault(plant=_unpinned_copies),
    "a reference to each step's activations": Fault(plant=_kept_reference),
    "a leak of 8 MiB a step": Fault(plant=_leak),
    "the loss read in each step": Fault(plant=_loss_read),
    "a branch on a tensor": Fault(plant=_branch_on_a_tensor),
    "the device synchronised in each step": Fault(plant=_synchronised),
    "nothing recomputed": Fault(plant=_nothing_recomputed),
    "a second copy of the weights": Fault(plant=_second_copy),
    "memory given back in each step": Fault(plant=_memory_given_back_in_each_step),
    "less memory than the card says": Fault(
        plant=_less_memory_than_the_card_says, settings=(), recovers=True
    ),
    "no wait for a copy on another stream": Fault(
        plant=_no_wait_for_a_copy,
        unseen="kernels do nothing there, so none reads a buffer too early",
    ),
    "noise of the wrong sign": Fault(
        plant=_wrong_sign, unseen="nothing is computed there; the tests of formulas see it"
    ),
}


def main() -> int:
    """Rehearse with each fault; return the exit code."""
    from scripts.rehearse.cell import cell_of, libraries_in, rehearse

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--fault", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    asked = parser.parse_args()
    work: Path = asked.work.resolve()
    libraries = libraries_in(work)
    missed = 0
    usual: Sequence[str] = ()
    for name in ("", *asked.fault):
        settings = FAULTS[name].settings if name else SETTINGS
        cell = cell_of(SOURCE, VRAM_GIB, "balanced", *settings, planted=name)
        outcome = rehearse(cell, folder=work, name="planted", libraries=libraries)
        if not name:
            # With everything recomputed so small a base takes less than is kept free for it.
            usual = outcome.faults
            print(f"as it is: {'; '.join(usual) or 'holds'}", flush=True)
            continue
        named = [fault for fault in outcome.faults if fault not in usual]
        unseen = FAULTS[name].unseen
        missed += not named and not unseen
        if FAULTS[name].recovers and any("exit code" in fault for fault in named):
            missed += 1
            named = ["the run did not recover", *named]
        said = "; ".join(named) or f"nothing seen{unseen and f', as expected: {unseen}'}"
        print(f"{name}: {said}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
