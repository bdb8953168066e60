"""Which model family an adapter file is for, from its module names, the widths of its tensors and its metadata.

Names are compared with `_` for `.`, so that kohya's, diffusers' and ComfyUI's spelling are one. Families
this program cannot train are named too where they are plain. Torch-free; input is what the header says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

UNKNOWN = "unknown"
Shapes = Mapping[str, tuple[int, ...]]
"""By module name, the shape of its down matrix: [rank, in, ...]."""

_UNET = re.compile(
    r"(?:(?:down|up)_blocks_\d+|mid_block)_(?:attentions|resnets|downsamplers|upsamplers)_"
    r"|(?:input|output)_blocks_\d+_\d|middle_block_\d"
)
_CROSS_ATTENTION = re.compile(r"transformer_blocks_\d+_attn2(?:_processor)?_to_[kv]$")
_TEXT_WIDTHS = {768: "sd15", 1024: "sd2", 2048: "sdxl"}
_DEEP = re.compile(r"_transformer_blocks_[1-9]")
"""Only SDXL's U-Net has more than one transformer block in a row."""
_SECOND_ENCODER = re.compile(r"lora_te2_|text_encoder_2_")
_IN_A1111 = {"sd15": "SD1", "sd2": "SD2", "sdxl": "SDXL"}

# What only one family has. Flux's successors first: they have most of its names.
_PLAIN = (
    ("flux2", r"to_qkv_mlp_proj|single_transformer_blocks_\d+_attn_to_out|(?:double|single)_stream_modulation"),
    ("flux2", r"(?<!single_)transformer_blocks_\d+_ff(?:_context)?_linear_(?:in|out)"),
    ("chroma", r"distilled_guidance_layer"),
    ("qwen", r"(?<!single_)transformer_blocks_\d+_(?:img|txt)_m(?:lp|od)_"),
    ("sd3", r"joint_blocks_\d+_(?:x|context)_block_|transformer_blocks_\d+_attn2_(?:to|add)_"),
    ("zimage", r"(?:^|_)layers_\d+_attention_to_|(?:noise|context)_refiner_\d+_attention_to_"),
)  # fmt: skip
_PLAIN_NAMES = tuple((family, re.compile(pattern)) for family, pattern in _PLAIN)
_FLUX = re.compile(r"(?:double|single)_blocks_\d+_|single_transformer_blocks_\d+_")
_FLUX2_WIDTHS = {4096, 6144}  # klein 9B, dev; klein 4B is as wide as FLUX.1
_JOINT = re.compile(r"(?:^|lora_unet_|transformer_|model_)transformer_blocks_(\d+)_attn_")
"""Blocks that attend to image and text at once: SD 3, FLUX.1 without its single blocks, Qwen-Image."""
_SD3_WIDTHS = {1536, 2432}
_FLUX_DOUBLE_BLOCKS = 19
_SINGLE_STREAM = re.compile(r"(?:^|_)layers_\d+_(?:attention_(?:qkv|out)$|feed_forward_w[123]$)")
_LUMINA2_WIDTH = 2304

_VERSIONS = tuple(
    (family, re.compile(pattern))
    for family, pattern in (
        ("sdxl", r"sdxl|stable-diffusion-xl"),
        ("sd15", r"sd-v1|sd-?1\.?[45]|stable-diffusion-v1"),
        ("sd2", r"sd-v2|sd-?2\.[01]|stable-diffusion-v2"),
        ("sd3", r"sd-?3|stable-diffusion-v?3|3-(?:5-)?(?:medium|large)"),  # sd-scripts: the latter
        ("flux2", r"flux[-.]?2"),
        ("flux", r"flux"),
        ("chroma", r"chroma"),
        ("zimage", r"z-?image"),
        ("qwen", r"qwen-?image"),
    )
)


def adapter_family(shapes: Shapes, *, metadata: Mapping[str, str]) -> str:
    """Name the family of an adapter, `unknown` where neither names, widths nor metadata tell."""
    named = {module.replace(".", "_"): shape for module, shape in shapes.items()}
    stated = stated_family(metadata) or _version(metadata.get("modelspec.architecture", ""))
    if any(_UNET.search(name) for name in named):
        return _unet_family(named) or stated or _small_unet(named)
    return _transformer_family(named, stated) or _text_family(named) or stated or UNKNOWN


def stated_family(metadata: Mapping[str, str]) -> str | None:
    """Return the family that `ss_base_model_version` names, None where it is absent or not known."""
    return _version(metadata.get("ss_base_model_version", ""))


def a1111_version(family: str) -> str | None:
    """Return what A1111 and Forge call the models a family's LoRAs are for; None: they know no name."""
    return _IN_A1111.get(family)


def _version(stated: str) -> str | None:
    normal = stated.lower().replace("_", "-")
    return next((family for family, start in _VERSIONS if start.match(normal)), None)


# ---- U-Nets


def _unet_family(named: Shapes) -> str | None:
    widths = _widths(named, _CROSS_ATTENTION)
    known = {_TEXT_WIDTHS[width] for width in widths & _TEXT_WIDTHS.keys()}
    if len(known) == 1:
        return known.pop()
    deep = any(_DEEP.search(name) or _SECOND_ENCODER.search(name) for name in named)
    return "sdxl" if deep else None


def _small_unet(named: Shapes) -> str:
    """Small bases with the architecture of Stable Diffusion 1 have text embeddings of any width."""
    return "sd15" if _widths(named, _CROSS_ATTENTION) else UNKNOWN


# ---- transformers


def _transformer_family(named: Shapes, stated: str | None) -> str | None:
    for family, pattern in _PLAIN_NAMES:
        if any(pattern.search(name) for name in named):
            return family
    if any(_FLUX.search(name) for name in named):
        return _flux_family(named, stated)
    if any(_JOINT.search(name) for name in named):
        return _joint_family(named, stated)
    if any(_SINGLE_STREAM.search(name) for name in named):
        # Lumina 2 has the same names.
        return stated or (
            "lumina2" if _LUMINA2_WIDTH in _widths(named, _SINGLE_STREAM) else "zimage"
        )
    return None


def _flux_family(named: Shapes, stated: str | None) -> str:
    """FLUX.2 has other widths, and a narrower way back from its MLP: 3 (FLUX.1: 4) times its own.

    Chroma has FLUX.1's blocks to the last name and width: only metadata tells them apart.
    """
    if _widths(named, _FLUX) & _FLUX2_WIDTHS:
        return "flux2"
    outer, inner = (
        _widths(named, re.compile(r"qkv$|linear1$")),
        _widths(named, re.compile(r"img_mlp_2$")),
    )
    joined = _widths(named, re.compile(r"single_blocks_\d+_linear2$"))
    if any(wide == 3 * width for width in outer for wide in inner) or any(
        wide == 4 * width for width in outer for wide in joined
    ):
        return "flux2"
    return stated if stated in ("flux2", "chroma") else "flux"


def _joint_family(named: Shapes, stated: str | None) -> str:
    if _widths(named, _JOINT) & _SD3_WIDTHS:
        return "sd3"
    numbers = [int(found[1]) for name in named if (found := _JOINT.search(name))]
    if stated:
        return stated
    if 3072 in _widths(
        named, _JOINT
    ):  # FLUX.1 and Qwen-Image are as wide; the latter has 60 blocks
        return "qwen" if max(numbers) >= _FLUX_DOUBLE_BLOCKS else "flux"
    return "sd3"


def _text_family(named: Iterable[str]) -> str | None:
    """Adapters of text encoders alone: of SDXL where there is a second one and no third."""
    if any(re.search(r"lora_te3_|text_encoder_3_", name) for name in named):
        return "sd3"
    return "sdxl" if any(_SECOND_ENCODER.search(name) for name in named) else None


def _widths(named: Shapes, pattern: re.Pattern[str]) -> set[int]:
    """Return how wide the inputs of the modules are whose name the pattern finds."""
    return {shape[1] for name, shape in named.items() if len(shape) > 1 and pattern.search(name)}
