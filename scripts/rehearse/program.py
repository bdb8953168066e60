"""`lora-train` in a process that sees a pretended card: every module as it is, but for what a card computes.

Convolutions give memory of the right shape in the place of cuDNN's, and the loss and norm that a step reads back are
numbers in the place of what no kernel wrote. The file `COUNTS_VARIABLE` names gets a line for each event of a training:
its kind, its step and the driver's counts.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from math import prod
from pathlib import Path
from typing import Any

COUNTS_VARIABLE, MEMORY_VARIABLE = "PRETENDED_COUNTS", "PRETENDED_RAM_GIB"
FAULT_VARIABLE = "PRETENDED_FAULT"
_NO_NUMBERS = 0.5
_IN_USE_BYTES = 4 << 30
_RESERVED_ELEMENTS = 1 << 20
_HASHED_BYTES = 1 << 28
_WHOLE = ("problem", "change", "out_of_memory")
"""Kinds of events of which every field is written."""
_ENCODERS = "lora_trainer.families."
"""Modules whose results for the host are latents and embeddings, which may not all be zero."""


def _sides(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def install_convolutions() -> Any:
    """Answer aten's convolutions on the card; the returned library has to be kept."""
    import torch
    from torch import Tensor

    def output(
        image: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        transposed: bool,
        output_padding: list[int],
        groups: int,
    ) -> Tensor:
        for other in (weight, *([] if bias is None else [bias])):
            if (other.device, other.dtype) != (image.device, image.dtype):
                raise RuntimeError(
                    f"input {image.dtype} on {image.device}, weight or bias {other.dtype} on {other.device}"
                )
        count = image.dim() - 2
        # A list of one number holds for all dimensions.
        steps, pads, gaps, more = (
            list(given) * (count if len(given) == 1 else 1)
            for given in (stride, padding, dilation, output_padding)
        )
        kernels = weight.shape[2:]
        if transposed:
            channels = weight.shape[1] * groups
            sides = [
                (size - 1) * steps[i] - 2 * pads[i] + gaps[i] * (kernels[i] - 1) + 1 + more[i]
                for i, size in enumerate(image.shape[2:])
            ]
        else:
            channels = weight.shape[0]
            sides = [
                _sides(size, kernels[i], steps[i], pads[i], gaps[i])
                for i, size in enumerate(image.shape[2:])
            ]
        return image.new_empty((image.shape[0], channels, *sides))

    def gradients(
        gradient: Tensor, image: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        wanted = rest[-1]
        return (
            torch.empty_like(image) if wanted[0] else None,
            torch.empty_like(weight) if wanted[1] else None,
            gradient.new_empty(gradient.shape[1]) if wanted[2] else None,
        )

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel.*")
        library.impl("convolution", output, "CUDA")
        library.impl("convolution_backward", gradients, "CUDA")
    return library


def give_numbers() -> None:
    """Let the host read numbers where no kernel wrote any: a step's loss and norm, latents, texts' embeddings."""
    import torch
    from torch import Tensor

    from lora_trainer.network.pinned_memory import AsyncRead

    read = AsyncRead.read

    def numbers(self: Any) -> list[float]:
        return [_NO_NUMBERS] * len(read(self))

    AsyncRead.read = numbers  # type: ignore[method-assign]  # what the card would have written
    found = Tensor.nonzero

    def nonzero(self: Tensor, *words: Any, **named: Any) -> Any:
        # A sampler asks where its timestep stands in its table: at the beginning.
        if self.is_cuda and not named:
            return torch.zeros(1, self.dim(), dtype=torch.int64, device=self.device)
        return found(self, *words, **named)

    Tensor.nonzero = nonzero  # type: ignore[method-assign, assignment]  # as above
    to_host = Tensor.cpu
    largest = Tensor.max

    def maximum(self: Tensor, *words: Any, **named: Any) -> Any:
        # A pipeline asks for the longest of a few texts, whose lengths the host has written.
        if self.is_cuda and not self.is_floating_point() and not words and not named:
            return largest(to_host(self)).to(self.device)
        return largest(self, *words, **named)

    Tensor.max = maximum  # type: ignore[method-assign, assignment]  # as above
    generator = torch.Generator().manual_seed(0)

    def cpu(self: Tensor, *words: Any, **named: Any) -> Tensor:
        copied = to_host(self, *words, **named)
        reader = sys._getframe(1).f_globals["__name__"]
        if copied.is_floating_point() and reader.startswith(_ENCODERS):
            copied.normal_(std=_NO_NUMBERS, generator=generator)
        return copied

    Tensor.cpu = cpu  # type: ignore[method-assign, assignment]  # as above


def pretend_host_memory(ram_gib: float) -> None:
    """Let the machine have this much memory; the weights of networks reserve theirs without filling it.

    Large files of zeros are told apart by their names: reading 60 GB for their hashes takes minutes.

    A base of zeros is as large in memory as a real one once it was copied: Qwen-Image's text encoder has 15 GiB, its
    denoiser in int8 20 GB. The codes of quantised layers come from the card, and what comes from it takes no memory.
    """
    import psutil
    import torch
    from transformers import core_model_loading

    from lora_trainer.common.files import sha256_bytes
    from lora_trainer.common.memo import HashMemo
    from lora_trainer.families.files.weight_files import TensorReader
    from lora_trainer.network.block_swap import PackedBlock
    from lora_trainer.network.pinned_memory import whole_pages

    real = psutil.virtual_memory
    size_bytes = int(ram_gib * (1 << 30))

    def virtual_memory() -> Any:
        return real()._replace(total=size_bytes, available=size_bytes - _IN_USE_BYTES)

    psutil.virtual_memory = virtual_memory

    def move_to_host(self: Any) -> None:
        self.host = whole_pages(self.bytes)
        self.host_views = self.views(self.host)
        for slot, packed in zip(self._slots, self.host_views, strict=True):
            slot.owner[slot.name] = packed

    PackedBlock.move_to_host = move_to_host  # type: ignore[method-assign]  # the blocks are zeros
    copied = core_model_loading._materialize_copy

    def reserved(tensor: Any, device: Any = None, dtype: Any = None) -> Any:
        if not hasattr(tensor, "get_shape") or prod(tensor.get_shape()) < _RESERVED_ELEMENTS:
            return copied(tensor, device, dtype)
        return torch.empty(tensor.get_shape(), dtype=dtype or copied(tensor[:1]).dtype)

    core_model_loading._materialize_copy = reserved
    read = TensorReader.read

    def reserved_by_name(self: Any, name: str) -> Any:
        shape = self._tensors[name].shape
        if prod(shape) < _RESERVED_ELEMENTS:
            return read(self, name)
        return torch.empty(shape, dtype=self.dtype_of(name))

    TensorReader.read = reserved_by_name  # type: ignore[method-assign]  # the files hold zeros
    hashed = HashMemo.sha256

    def sha256(self: Any, path: Path | str) -> str:
        size_bytes = Path(path).stat().st_size
        if size_bytes < _HASHED_BYTES:
            return hashed(self, path)
        return sha256_bytes(f"{path} {size_bytes}".encode())

    HashMemo.sha256 = sha256  # type: ignore[method-assign]  # the files hold zeros


def count_events(file: Path) -> None:
    """Write the driver's counts and the bytes of tensors at each event of a training.

    Memory peaks are since the line before.
    """
    import torch

    from lora_trainer.queue import commands
    from scripts.rehearse.card import Counter

    counter = Counter()

    def heard(event: Any) -> None:
        row = (
            {"event": event.kind, **event.fields} if event.kind in _WHOLE else {"event": event.kind}
        )
        row["step"] = getattr(event, "step", None)
        if torch.cuda.is_initialized():
            now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            row["tensors"] = {"bytes": now, "peak_bytes": peak}
            torch.cuda.reset_peak_memory_stats()
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({**row, "counts": counter.now()}, default=str) + "\n")
        counter.forget_peaks()

    commands.download_listeners = lambda environment: (heard,)


def main() -> None:
    from lora_trainer.common.processes import quiet_libraries

    quiet_libraries()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    kept = install_convolutions()
    give_numbers()
    if MEMORY_VARIABLE in os.environ:
        pretend_host_memory(float(os.environ[MEMORY_VARIABLE]))
    if COUNTS_VARIABLE in os.environ:
        count_events(Path(os.environ[COUNTS_VARIABLE]))
    if fault := os.environ.get(FAULT_VARIABLE):
        from scripts.rehearse.planted import plant

        plant(fault)
    from lora_trainer.cli.main import main as command

    assert kept is not None
    command()


if __name__ == "__main__":
    main()
