"""The U-Net modules that get an adapter, by the endings of diffusers' names, and their order. Torch-free.

The time and size embeddings and the first and last convolution never get an adapter: they hold few
weights, and a small change of them disturbs every image.
"""

from __future__ import annotations

from collections.abc import Mapping

from lora_trainer.families.costs import Targets

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
TRANSFORMER = (*ATTENTION, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
CONVOLUTION = (
    *TRANSFORMER,
    "conv1",
    "conv2",
    "conv_shortcut",
    "time_emb_proj",
    "downsamplers.0.conv",
    "upsamplers.0.conv",
)
ENDINGS: Mapping[Targets, tuple[str, ...]] = {
    "attention": ATTENTION,
    "transformer": TRANSFORMER,
    "all": CONVOLUTION,
}
_BLOCKS = ("down_blocks", "up_blocks", "mid_block")
_KINDS = ("attentions", "resnets", "downsamplers", "upsamplers")


def module_order(name: str) -> tuple[int, int, int]:
    """Return a key that sorts modules, named in the order they run, into the order of `named_modules`."""
    block, *rest = name.split(".")
    index = int(rest.pop(0)) if rest[0].isdecimal() else 0
    return _BLOCKS.index(block), index, _KINDS.index(rest[0])
