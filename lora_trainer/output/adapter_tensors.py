"""An adapter as plain tensors: what training hands to exports, and the dtypes files may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_trainer.config import Precision

DTYPES: Mapping[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
PEFT_METADATA = "lora_adapter_metadata"
"""Header entry from which diffusers takes the strength; it refuses `.alpha` tensors beside it."""


@dataclass(frozen=True, kw_only=True)
class LoraPair:
    """The fp32 masters of one module; its update is up @ down * alpha / rank.

    Linear: down [r, in], up [out, r]. Conv2d: down [r, in, kh, kw], up [out, r, 1, 1].
    """

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        """Width of the update."""
        return self.down.shape[0]


AdapterTensors = Mapping[str, LoraPair]
"""Pairs by the denoiser's module name, such as "mid_block.attentions.0.proj_in"."""
