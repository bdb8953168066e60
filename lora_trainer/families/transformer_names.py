"""Names of the diffusion transformers' layers in adapter files, where they differ from diffusers' names.

Each table maps a name in such files to the diffusers layers it stands for, in the order of their rows: the
releases' own code fuses several layers into one weight. `#` stands for any number. Sources are the
conversions of diffusers 0.42 and the trainers' own code; torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from lora_trainer.families.traits import OtherNames

Names = Mapping[str, tuple[str, ...]]
_NUMBER = re.compile(r"(?<![A-Za-z\d])\d+(?![A-Za-z\d])")


def _layers(block: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{block}.{name}" for name in names)


_JOINT, _SINGLE = "transformer_blocks.#", "single_transformer_blocks.#"
_IMAGE_QKV = _layers(_JOINT, "attn.to_q", "attn.to_k", "attn.to_v")
_TEXT_QKV = _layers(_JOINT, "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_SECOND_QKV = _layers(_JOINT, "attn2.to_q", "attn2.to_k", "attn2.to_v")
_SINGLE_QKV = _layers(_SINGLE, "attn.to_q", "attn.to_k", "attn.to_v")
# The rows of FLUX.1's linear1: query, key, value, then the input of the MLP.
_SINGLE_IN = (*_SINGLE_QKV, f"{_SINGLE}.proj_mlp")

_EMBEDDERS: Names = {"img_in": ("x_embedder",), "txt_in": ("context_embedder",)}
_FINAL: Names = {
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}
_FUSED: Names = {
    # Names that OneTrainer and diffusers give to fused layers.
    f"{_JOINT}.attn.qkv": _IMAGE_QKV,
    f"{_JOINT}.attn.added_qkv": _TEXT_QKV,
    f"{_JOINT}.attn2.qkv": _SECOND_QKV,
    f"{_JOINT}.attn.to_qkv": _IMAGE_QKV,
    f"{_JOINT}.attn.to_added_qkv": _TEXT_QKV,
    f"{_SINGLE}.qkv_mlp": _SINGLE_IN,
    f"{_SINGLE}.attn.to_qkv": _SINGLE_QKV,
}
_DOUBLE: Names = {
    "double_blocks.#.img_attn.qkv": _IMAGE_QKV,
    "double_blocks.#.txt_attn.qkv": _TEXT_QKV,
    "double_blocks.#.img_attn.proj": (f"{_JOINT}.attn.to_out.0",),
    "double_blocks.#.txt_attn.proj": (f"{_JOINT}.attn.to_add_out",),
}
_MLP: Names = {
    "double_blocks.#.img_mlp.0": (f"{_JOINT}.ff.net.0.proj",),
    "double_blocks.#.img_mlp.2": (f"{_JOINT}.ff.net.2",),
    "double_blocks.#.txt_mlp.0": (f"{_JOINT}.ff_context.net.0.proj",),
    "double_blocks.#.txt_mlp.2": (f"{_JOINT}.ff_context.net.2",),
}
_SINGLE_STREAM: Names = {
    "single_blocks.#.linear1": _SINGLE_IN,
    "single_blocks.#.linear2": (f"{_SINGLE}.proj_out",),
}
_XLABS: Names = {
    # x-flux puts LoRA inside attention processors; readers remove that infix before the look-up.
    "double_blocks.#.qkv1": _IMAGE_QKV,
    "double_blocks.#.qkv2": _TEXT_QKV,
    "double_blocks.#.proj1": (f"{_JOINT}.attn.to_out.0",),
    "double_blocks.#.proj2": (f"{_JOINT}.attn.to_add_out",),
    "single_blocks.#.qkv": _SINGLE_QKV,
    "single_blocks.#.proj": (f"{_SINGLE}.proj_out",),
}
_DIFFSYNTH_JOINT: Names = {
    "blocks.#.attn.a_to_qkv": _IMAGE_QKV,
    "blocks.#.attn.b_to_qkv": _TEXT_QKV,
    **{
        f"blocks.#.attn.{stream}_to_{part}": (layer,)
        for stream, layers in (("a", _IMAGE_QKV), ("b", _TEXT_QKV))
        for part, layer in zip("qkv", layers, strict=True)
    },
    "blocks.#.attn.a_to_out": (f"{_JOINT}.attn.to_out.0",),
    "blocks.#.attn.b_to_out": (f"{_JOINT}.attn.to_add_out",),
    "blocks.#.ff_a.0": (f"{_JOINT}.ff.net.0.proj",),
    "blocks.#.ff_a.2": (f"{_JOINT}.ff.net.2",),
    "blocks.#.ff_b.0": (f"{_JOINT}.ff_context.net.0.proj",),
    "blocks.#.ff_b.2": (f"{_JOINT}.ff_context.net.2",),
    "blocks.#.norm1_a.linear": (f"{_JOINT}.norm1.linear",),
    "blocks.#.norm1_b.linear": (f"{_JOINT}.norm1_context.linear",),
}
_DIFFSYNTH_FLUX: Names = {
    **_DIFFSYNTH_JOINT,
    "single_blocks.#.to_qkv_mlp": _SINGLE_IN,
    "single_blocks.#.a_to_q": _SINGLE_QKV[:1],
    "single_blocks.#.a_to_k": _SINGLE_QKV[1:2],
    "single_blocks.#.a_to_v": _SINGLE_QKV[2:],
    "single_blocks.#.proj_in_besides_attn": (f"{_SINGLE}.proj_mlp",),
    "single_blocks.#.proj_out": (f"{_SINGLE}.proj_out",),
    "single_blocks.#.norm.linear": (f"{_SINGLE}.norm.linear",),
}


def _embedder(theirs: str, ours: str) -> Names:
    return {
        f"{theirs}.in_layer": (f"{ours}.linear_1",),
        f"{theirs}.out_layer": (f"{ours}.linear_2",),
    }


FLUX: Names = {
    **_EMBEDDERS,
    **_embedder("time_in", "time_text_embed.timestep_embedder"),
    **_embedder("guidance_in", "time_text_embed.guidance_embedder"),
    **_embedder("vector_in", "time_text_embed.text_embedder"),
    **_FINAL,
    **_DOUBLE,
    **_MLP,
    "double_blocks.#.img_mod.lin": (f"{_JOINT}.norm1.linear",),
    "double_blocks.#.txt_mod.lin": (f"{_JOINT}.norm1_context.linear",),
    **_SINGLE_STREAM,
    "single_blocks.#.modulation.lin": (f"{_SINGLE}.norm.linear",),
    **_FUSED,
    **_XLABS,
    **_DIFFSYNTH_FLUX,
}
CHROMA: Names = {
    **_EMBEDDERS,
    "final_layer.linear": ("proj_out",),
    **_embedder("distilled_guidance_layer.layers.#", "distilled_guidance_layer.layers.#"),
    **_DOUBLE,
    **_MLP,
    **_SINGLE_STREAM,
    **_FUSED,
    **_DIFFSYNTH_FLUX,
}
FLUX2: Names = {
    **_EMBEDDERS,
    **_embedder("time_in", "time_guidance_embed.timestep_embedder"),
    **_embedder("guidance_in", "time_guidance_embed.guidance_embedder"),
    **_FINAL,
    **{
        f"{name}.lin": (f"{name}.linear",)
        for name in (
            "double_stream_modulation_img",
            "double_stream_modulation_txt",
            "single_stream_modulation",
        )
    },
    **_DOUBLE,
    "double_blocks.#.img_mlp.0": (f"{_JOINT}.ff.linear_in",),
    "double_blocks.#.img_mlp.2": (f"{_JOINT}.ff.linear_out",),
    "double_blocks.#.txt_mlp.0": (f"{_JOINT}.ff_context.linear_in",),
    "double_blocks.#.txt_mlp.2": (f"{_JOINT}.ff_context.linear_out",),
    # diffusers leaves FLUX.2's matrix of q, k, v and the MLP whole, unlike FLUX.1's.
    "single_blocks.#.linear1": (f"{_SINGLE}.attn.to_qkv_mlp_proj",),
    "single_blocks.#.linear2": (f"{_SINGLE}.attn.to_out",),
    **_FUSED,
}
SD3: Names = {
    "x_embedder.proj": ("pos_embed.proj",),
    "t_embedder.mlp.0": ("time_text_embed.timestep_embedder.linear_1",),
    "t_embedder.mlp.2": ("time_text_embed.timestep_embedder.linear_2",),
    "y_embedder.mlp.0": ("time_text_embed.text_embedder.linear_1",),
    "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2",),
    **_FINAL,
    "joint_blocks.#.x_block.attn.qkv": _IMAGE_QKV,
    "joint_blocks.#.context_block.attn.qkv": _TEXT_QKV,
    "joint_blocks.#.x_block.attn2.qkv": _SECOND_QKV,
    "joint_blocks.#.x_block.attn.proj": (f"{_JOINT}.attn.to_out.0",),
    "joint_blocks.#.context_block.attn.proj": (f"{_JOINT}.attn.to_add_out",),
    "joint_blocks.#.x_block.attn2.proj": (f"{_JOINT}.attn2.to_out.0",),
    "joint_blocks.#.x_block.mlp.fc1": (f"{_JOINT}.ff.net.0.proj",),
    "joint_blocks.#.x_block.mlp.fc2": (f"{_JOINT}.ff.net.2",),
    "joint_blocks.#.context_block.mlp.fc1": (f"{_JOINT}.ff_context.net.0.proj",),
    "joint_blocks.#.context_block.mlp.fc2": (f"{_JOINT}.ff_context.net.2",),
    "joint_blocks.#.x_block.adaLN_modulation.1": (f"{_JOINT}.norm1.linear",),
    "joint_blocks.#.context_block.adaLN_modulation.1": (f"{_JOINT}.norm1_context.linear",),
    **_FUSED,
    **_DIFFSYNTH_JOINT,
}
ZIMAGE: Names = {
    # diffusers keeps embedders by size of patch: 2 latents a side, 1 frame.
    "x_embedder": ("all_x_embedder.2-1",),
    "final_layer.linear": ("all_final_layer.2-1.linear",),
    "final_layer.adaLN_modulation.1": ("all_final_layer.2-1.adaLN_modulation.1",),
    **{
        f"{blocks}.#.attention.qkv": _layers(
            f"{blocks}.#", "attention.to_q", "attention.to_k", "attention.to_v"
        )
        for blocks in ("layers", "noise_refiner", "context_refiner")
    },
    **{
        f"{blocks}.#.attention.out": (f"{blocks}.#.attention.to_out.0",)
        for blocks in ("layers", "noise_refiner", "context_refiner")
    },
}
LUMINA2: Names = {
    f"{blocks}.#.{theirs}": _layers(f"{blocks}.#", *ours)
    for blocks in ("layers", "noise_refiner", "context_refiner")
    for theirs, ours in {
        "attention.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "attention.out": ("attn.to_out.0",),
        **{f"feed_forward.w{n}": (f"feed_forward.linear_{n}",) for n in (1, 2, 3)},
        "adaLN_modulation.1": ("norm1.linear",),
    }.items()
}
QWEN: Names = {
    f"{_JOINT}.attn.to_qkv": _IMAGE_QKV,
    f"{_JOINT}.attn.to_added_qkv": _TEXT_QKV,
}


def other_names(tables: Names, layers: Iterable[str], *, swapped: Iterable[str] = ()) -> OtherNames:
    """Return the entries of `tables` for existing `layers`, with numbers in place of `#`."""
    by_template: dict[str, list[tuple[str, ...]]] = {}
    present = set(layers)
    for layer in present:
        numbers = tuple(_NUMBER.findall(layer))
        by_template.setdefault(_NUMBER.sub("#", layer), []).append(numbers)
    filled: dict[str, tuple[str, ...]] = {}
    for name, parts in tables.items():
        # The 1 of `linear_1` counts as a number too, so `linear_2` comes to the same template and
        # fills the same entry a second time, which changes nothing.
        for numbers in by_template.get(_NUMBER.sub("#", parts[0]), ()):
            joined = tuple(_filled(part, numbers) for part in parts)
            # A fused name whose layers are not all there would stand for other rows.
            if present.issuperset(joined):
                filled[_filled(name, numbers)] = joined
    return OtherNames(layers=filled, swapped=frozenset(swapped))


def _filled(template: str, numbers: tuple[str, ...]) -> str:
    """Fill a layer's numbers into a template, the block's number first; surplus numbers are ignored."""
    for number in numbers[: template.count("#")]:
        template = template.replace("#", number, 1)
    return template
