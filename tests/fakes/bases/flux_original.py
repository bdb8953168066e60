"""FLUX.1 and Chroma networks in the layout of their releases, as ComfyUI and Civitai keep them.

The inverse of diffusers' conversion, written from the two networks: q, k and v are one matrix, a
single block's first layer holds them and the MLP's, and the last norm has shift before scale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from diffusers.loaders import single_file_utils
from pytest import MonkeyPatch
from torch import Tensor

DOUBLE = {
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
    "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
}
SINGLE = {
    "attn.norm_q.weight": "norm.query_norm.scale",
    "attn.norm_k.weight": "norm.key_norm.scale",
    "norm.linear": "modulation.lin",
    "proj_out": "linear2",
}
FUSED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "transformer_blocks": {
        "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    },
    "single_transformer_blocks": {
        "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    },
}
OUTSIDE = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "proj_out": "final_layer.linear",
}


def original_layout(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a diffusers transformer's tensors as the release has them."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        block = re.fullmatch(r"((?:single_)?transformer_blocks)\.(\d+)\.(.+)", name)
        if block is None:
            found |= _outside(name, tensor)
            continue
        kind, number, inside = block.groups()
        fused = FUSED[kind]
        start = f"{'single' if kind.startswith('single') else 'double'}_blocks.{number}."
        whole = next((key for key, parts in fused.items() if inside.startswith(parts)), None)
        if whole is None:
            found[start + _renamed(inside, SINGLE if kind.startswith("single") else DOUBLE)] = (
                tensor
            )
            continue
        end = inside.rsplit(".", 1)[-1]
        pieces = [state[f"{kind}.{number}.{part}.{end}"] for part in fused[whole]]
        found[f"{start}{whole}.{end}"] = torch.cat(pieces)
    return found


def split_at(patch: MonkeyPatch, *, inner: int) -> None:
    """Let diffusers' conversion, which knows one width only, split tensors of width `inner`."""
    split = torch.split
    known = 3072

    def scaled(tensor: Tensor, sizes: object, dim: int = 0) -> tuple[Tensor, ...]:
        if isinstance(sizes, tuple):
            sizes = [size * inner // known for size in sizes]
        return tuple(split(tensor, sizes, dim=dim))  # type: ignore[arg-type]  # what the caller gave

    patch.setattr(single_file_utils.torch, "split", scaled)


def _outside(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name.startswith("norm_out.linear."):
        scale, shift = tensor.chunk(2)
        end = name.rsplit(".", 1)[-1]
        return {f"final_layer.adaLN_modulation.1.{end}": torch.cat([shift, scale])}
    if name.startswith("distilled_guidance_layer."):
        renamed = name.replace("linear_1", "in_layer").replace("linear_2", "out_layer")
        norm = ".norms." in name
        return {renamed.replace(".weight", ".scale") if norm else renamed: tensor}
    return {_renamed(name, OUTSIDE): tensor}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    start = next(key for key in names if name.startswith(key))
    return names[start] + name.removeprefix(start)
