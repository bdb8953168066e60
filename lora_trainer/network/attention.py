"""Selects the attention kernels of the denoiser. SDPA is the default of every diffusers network.

`set_attention_backend` silently does nothing on a U-Net, so xformers is switched on by the networks' own
method, and the processors are checked afterwards.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from lora_trainer.common.errors import BROKEN_PACKAGE, MachineError, first_line


def apply_attention(denoiser: nn.Module, kind: Literal["sdpa", "xformers"]) -> None:
    """Make `denoiser` use these kernels; raises MachineError when they cannot be used here."""
    if kind == "sdpa":
        return
    try:
        denoiser.enable_xformers_memory_efficient_attention()  # type: ignore[operator]
    except (*BROKEN_PACKAGE, ValueError) as error:
        raise MachineError(
            f"memory.attention=xformers cannot be used: {first_line(error)}",
            fix="use --set memory.attention=sdpa",
        ) from None
    processors = {type(processor).__name__ for processor in denoiser.attn_processors.values()}  # type: ignore[operator]
    if not all("XFormers" in name for name in processors):
        raise MachineError(
            f"memory.attention=xformers was accepted but {sorted(processors)} are in use",
            fix="use --set memory.attention=sdpa",
        )
