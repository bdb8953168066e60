"""Which model family an adapter file is for, from its module names, the widths of its tensors and its metadata.

Families this program cannot train are named too, because "this file is for SDXL" is what helps.
Torch-free; input is what the header says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

UNKNOWN = "unknown"
_TEXT_WIDTHS = {768: "sd15", 1024: "sd2", 2048: "sdxl"}
_MODULES = (
    ("flux", re.compile(r"double_blocks|single_blocks|single_transformer_blocks")),
    ("sdxl", re.compile(r"lora_te2_|text_encoder_2|(?<!single_)transformer_blocks_[1-9]")),
)
_VERSIONS = {"sdxl": "sdxl", "sd_v1": "sd15", "sd_v2": "sd2", "flux1": "flux"}
_CROSS_ATTENTION = re.compile(r"attn2(?:_processor)?_to_[kv]$")
_UNET_ATTENTION = re.compile(
    r"(?:(?:down|up)_blocks_\d+|mid_block)_attentions_\d+_transformer_blocks_0_attn2"
)


def adapter_family(shapes: Mapping[str, tuple[int, ...]], *, metadata: Mapping[str, str]) -> str:
    """Name the family of an adapter; `shapes` has each module's down matrix [rank, in, ...]."""
    names = {module: module.replace(".", "_") for module in shapes}
    widths = {
        shapes[module][1]
        for module, name in names.items()
        if _CROSS_ATTENTION.search(name) and len(shapes[module]) > 1
    }
    known = {_TEXT_WIDTHS[width] for width in widths & _TEXT_WIDTHS.keys()}
    if len(known) == 1:
        return known.pop()
    for family, pattern in _MODULES:
        if any(pattern.search(name) for name in names.values()):
            return family
    if stated := stated_family(metadata):
        return stated
    # Small bases with the architecture of Stable Diffusion 1 have text embeddings of any width.
    small = widths and any(_UNET_ATTENTION.search(name) for name in names.values())
    return "sd15" if small else UNKNOWN


def stated_family(metadata: Mapping[str, str]) -> str | None:
    """Return the family that `ss_base_model_version` names, None where it is absent or not known."""
    version = metadata.get("ss_base_model_version", "")
    return next((family for start, family in _VERSIONS.items() if version.startswith(start)), None)
