"""Narrow random networks of every family, with the names and the blocks of the releases.

Output is a `Base`: the denoiser in diffusers' layout, its trainable text encoders, and where each
weight lies in the layout that ComfyUI, Forge and A1111 hold (q, k and v are one matrix there).
Only widths, depths of transformers and vocabularies differ from the releases; the width of the
prompt of a U-Net does not, as InvokeAI tells families by it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import diffusers
import torch
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from lora_trainer import families
from lora_trainer.families.base.family import Family
from lora_trainer.families.files.unet_file import ldm_module

SD3_HEAD = 64
"""ComfyUI takes the width of SD3 as 64 times its depth."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a weight lies in another layout: rows `start` to `start + rows` of a matrix."""

    name: str
    start: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Base:
    """A family's networks, and by weight ("blocks.0.to_q.weight") its place in the original layout."""

    family: Family
    denoiser: nn.Module
    texts: Mapping[str, nn.Module]
    places: Mapping[str, Place]

    def original(self) -> dict[str, Tensor]:
        """Return the denoiser's tensors in the original layout."""
        state = self.denoiser.state_dict()
        parts: dict[str, list[tuple[int, Tensor]]] = {}
        for name, place in self.places.items():
            parts.setdefault(place.name, []).append((place.start, state[name]))
        return {
            name: torch.cat([tensor for _, tensor in sorted(found, key=lambda part: part[0])])
            for name, found in parts.items()
        }


def base_of(name: str, *, seed: int = 0) -> Base:
    """Return the networks of a family."""
    torch.manual_seed(seed)
    denoiser = DENOISERS[name]().requires_grad_(False)
    texts = {
        component: _clip(width=width, projected=projected).requires_grad_(False)
        for component, width, projected in _TEXTS.get(name, ())
    }
    for network in (denoiser, *texts.values()):
        for parameter in network.parameters():
            parameter.normal_(std=0.2)
    return with_places(name, denoiser, texts)


def with_places(name: str, denoiser: nn.Module, texts: Mapping[str, nn.Module]) -> Base:
    """Return networks of a family with the places of their weights in the original layout."""
    unet = name in _TEXTS
    places = _unet_places(denoiser) if unet else _transformer_places(denoiser, _RULES[name])
    return Base(family=families.family(name), denoiser=denoiser, texts=texts, places=places)


# ---- where a weight lies


def _unet_places(unet: nn.Module) -> dict[str, Place]:
    architecture = {"_class_name": "UNet2DConditionModel", **dict(unet.config)}
    found = {}
    for name, tensor in unet.state_dict().items():
        module, _, end = name.rpartition(".")
        other = f"{ldm_module(module, architecture=architecture)}.{end}"
        found[name] = Place(name=other, start=0, rows=tensor.shape[0])
    return found


def _transformer_places(network: nn.Module, rules: Mapping[str, str]) -> dict[str, Place]:
    """Weights and biases of modules that a rule names; rows of one matrix follow each other in rule order."""
    found: dict[str, Place] = {}
    used: dict[str, int] = {}
    state = network.state_dict()
    for pattern, other in rules.items():
        for name, tensor in state.items():
            match = re.fullmatch(rf"{pattern}\.(weight|bias)", name)
            if match is None or name in found:
                continue
            target = f"{match.expand(other)}.{match[match.lastindex or 1]}"
            start = used.get(target, 0)
            used[target] = start + tensor.shape[0]
            found[name] = Place(name=target, start=start, rows=tensor.shape[0])
    return found


_DOUBLE, _SINGLE = r"transformer_blocks\.(\d+)\.", r"single_transformer_blocks\.(\d+)\."
_FLUX = {
    **{rf"{_DOUBLE}attn\.to_{part}": r"double_blocks.\1.img_attn.qkv" for part in "qkv"},
    **{rf"{_DOUBLE}attn\.add_{part}_proj": r"double_blocks.\1.txt_attn.qkv" for part in "qkv"},
    rf"{_DOUBLE}attn\.to_out\.0": r"double_blocks.\1.img_attn.proj",
    rf"{_DOUBLE}attn\.to_add_out": r"double_blocks.\1.txt_attn.proj",
    rf"{_DOUBLE}norm1\.linear": r"double_blocks.\1.img_mod.lin",
    rf"{_DOUBLE}norm1_context\.linear": r"double_blocks.\1.txt_mod.lin",
    rf"{_DOUBLE}ff\.net\.0\.proj": r"double_blocks.\1.img_mlp.0",
    rf"{_DOUBLE}ff\.net\.2": r"double_blocks.\1.img_mlp.2",
    rf"{_DOUBLE}ff_context\.net\.0\.proj": r"double_blocks.\1.txt_mlp.0",
    rf"{_DOUBLE}ff_context\.net\.2": r"double_blocks.\1.txt_mlp.2",
    **{rf"{_SINGLE}attn\.to_{part}": r"single_blocks.\1.linear1" for part in "qkv"},
    rf"{_SINGLE}proj_mlp": r"single_blocks.\1.linear1",
    rf"{_SINGLE}proj_out": r"single_blocks.\1.linear2",
    rf"{_SINGLE}norm\.linear": r"single_blocks.\1.modulation.lin",
    r"x_embedder": "img_in",
    r"context_embedder": "txt_in",
    r"proj_out": "final_layer.linear",
    r"time_text_embed\.timestep_embedder\.linear_1": "time_in.in_layer",
    r"time_text_embed\.timestep_embedder\.linear_2": "time_in.out_layer",
    r"time_text_embed\.text_embedder\.linear_1": "vector_in.in_layer",
    r"time_text_embed\.text_embedder\.linear_2": "vector_in.out_layer",
    r"time_text_embed\.guidance_embedder\.linear_1": "guidance_in.in_layer",
    r"time_text_embed\.guidance_embedder\.linear_2": "guidance_in.out_layer",
}
_RULES: Mapping[str, Mapping[str, str]] = {
    "flux": _FLUX,
    "chroma": _FLUX,
    "flux2": {
        **{rf"{_DOUBLE}attn\.to_{part}": r"double_blocks.\1.img_attn.qkv" for part in "qkv"},
        **{rf"{_DOUBLE}attn\.add_{part}_proj": r"double_blocks.\1.txt_attn.qkv" for part in "qkv"},
        rf"{_DOUBLE}attn\.to_out\.0": r"double_blocks.\1.img_attn.proj",
        rf"{_DOUBLE}attn\.to_add_out": r"double_blocks.\1.txt_attn.proj",
        rf"{_DOUBLE}ff\.linear_in": r"double_blocks.\1.img_mlp.0",
        rf"{_DOUBLE}ff\.linear_out": r"double_blocks.\1.img_mlp.2",
        rf"{_DOUBLE}ff_context\.linear_in": r"double_blocks.\1.txt_mlp.0",
        rf"{_DOUBLE}ff_context\.linear_out": r"double_blocks.\1.txt_mlp.2",
        rf"{_SINGLE}attn\.to_qkv_mlp_proj": r"single_blocks.\1.linear1",
        rf"{_SINGLE}attn\.to_out": r"single_blocks.\1.linear2",
        r"x_embedder": "img_in",
        r"context_embedder": "txt_in",
    },
    "sd3": {
        **{rf"{_DOUBLE}attn\.to_{part}": r"joint_blocks.\1.x_block.attn.qkv" for part in "qkv"},
        **{
            rf"{_DOUBLE}attn\.add_{part}_proj": r"joint_blocks.\1.context_block.attn.qkv"
            for part in "qkv"
        },
        **{rf"{_DOUBLE}attn2\.to_{part}": r"joint_blocks.\1.x_block.attn2.qkv" for part in "qkv"},
        rf"{_DOUBLE}attn\.to_out\.0": r"joint_blocks.\1.x_block.attn.proj",
        rf"{_DOUBLE}attn2\.to_out\.0": r"joint_blocks.\1.x_block.attn2.proj",
        rf"{_DOUBLE}attn\.to_add_out": r"joint_blocks.\1.context_block.attn.proj",
        rf"{_DOUBLE}norm1\.linear": r"joint_blocks.\1.x_block.adaLN_modulation.1",
        rf"{_DOUBLE}norm1_context\.linear": r"joint_blocks.\1.context_block.adaLN_modulation.1",
        rf"{_DOUBLE}ff\.net\.0\.proj": r"joint_blocks.\1.x_block.mlp.fc1",
        rf"{_DOUBLE}ff\.net\.2": r"joint_blocks.\1.x_block.mlp.fc2",
        rf"{_DOUBLE}ff_context\.net\.0\.proj": r"joint_blocks.\1.context_block.mlp.fc1",
        rf"{_DOUBLE}ff_context\.net\.2": r"joint_blocks.\1.context_block.mlp.fc2",
        r"pos_embed\.proj": "x_embedder.proj",
        r"context_embedder": "context_embedder",
    },
    "zimage": {
        **{rf"(.*\.attention)\.to_{part}": r"\1.qkv" for part in "qkv"},
        r"(.*\.attention)\.to_out\.0": r"\1.out",
        r"(.*\.feed_forward\.w[123])": r"\1",
        r"(.*\.adaLN_modulation\.\d)": r"\1",
    },
    "lumina2": {
        **{rf"(.*)\.attn\.to_{part}": r"\1.attention.qkv" for part in "qkv"},
        r"(.*)\.attn\.to_out\.0": r"\1.attention.out",
        **{rf"(.*\.feed_forward)\.linear_{n}": rf"\1.w{n}" for n in "123"},
        r"(.*)\.norm1\.linear": r"\1.adaLN_modulation.1",
    },
    "qwen": {r"(.*)": r"\1"},
}


# ---- the networks


def _unet(widths: tuple[int, ...], attended: tuple[bool, ...], **settings: object) -> nn.Module:
    down = tuple("CrossAttnDownBlock2D" if each else "DownBlock2D" for each in attended)
    up = tuple("CrossAttnUpBlock2D" if each else "UpBlock2D" for each in reversed(attended))
    return diffusers.UNet2DConditionModel(
        block_out_channels=widths,
        down_block_types=down,
        up_block_types=up,
        layers_per_block=2,
        norm_num_groups=4,
        **settings,
    )


def _sd15() -> nn.Module:
    return _unet(
        (8, 16, 32, 32), (True, True, True, False), cross_attention_dim=768, attention_head_dim=2
    )


def _sd2() -> nn.Module:
    return _unet(
        (8, 16, 32, 32),
        (True, True, True, False),
        cross_attention_dim=1024,
        attention_head_dim=[1, 2, 4, 4],
        use_linear_projection=True,
    )


def _sdxl() -> nn.Module:
    return _unet(
        (8, 16, 32),
        (False, True, True),
        cross_attention_dim=2048,
        attention_head_dim=[1, 2, 4],
        transformer_layers_per_block=[1, 2, 10],
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=32,
    )


def _sd3() -> nn.Module:
    depth = 2
    return diffusers.SD3Transformer2DModel(
        sample_size=16,
        in_channels=16,
        num_layers=depth,
        attention_head_dim=SD3_HEAD,
        num_attention_heads=depth,
        joint_attention_dim=24,
        caption_projection_dim=SD3_HEAD * depth,
        pooled_projection_dim=20,
        out_channels=16,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def _flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        guidance_embeds=True,
        axes_dims_rope=(2, 2, 4),
    )


def _chroma() -> nn.Module:
    return diffusers.ChromaTransformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        axes_dims_rope=(2, 2, 4),
        approximator_num_channels=8,
        approximator_hidden_dim=8,
        approximator_layers=1,
    )


def _flux2() -> nn.Module:
    return diffusers.Flux2Transformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        timestep_guidance_channels=16,
        axes_dims_rope=(2, 2, 2, 2),
        guidance_embeds=False,
    )


def _zimage() -> nn.Module:
    return diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=16,
        n_layers=2,
        n_refiner_layers=2,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=12,
        axes_dims=[2, 2, 4],
        axes_lens=[32, 16, 16],
    )


def _lumina2() -> nn.Module:
    return diffusers.Lumina2Transformer2DModel(
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=8,
        axes_dim_rope=(2, 2, 2),
        axes_lens=(32, 16, 16),
        cap_feat_dim=12,
    )


def _qwen() -> nn.Module:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        axes_dims_rope=(2, 2, 4),
    )


def _clip(*, width: int, projected: bool) -> nn.Module:
    config = CLIPTextConfig(
        vocab_size=20,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=width,
        max_position_embeddings=8,
        bos_token_id=18,
        eos_token_id=19,
        pad_token_id=19,
    )
    return CLIPTextModelWithProjection(config) if projected else CLIPTextModel(config)


DENOISERS: Mapping[str, Callable[[], nn.Module]] = {
    "sd15": _sd15,
    "sd2": _sd2,
    "sdxl": _sdxl,
    "sd3": _sd3,
    "flux": _flux,
    "flux2": _flux2,
    "chroma": _chroma,
    "zimage": _zimage,
    "lumina2": _lumina2,
    "qwen": _qwen,
}
_TEXTS: Mapping[str, tuple[tuple[str, int, bool], ...]] = {
    "sd15": (("text_encoder", 768, False),),
    "sd2": (("text_encoder", 1024, False),),
    "sdxl": (("text_encoder", 768, False), ("text_encoder_2", 1280, True)),
}
