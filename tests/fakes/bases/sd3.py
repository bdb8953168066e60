"""A tiny random Stable Diffusion 3.5 base with a dual attention layer: three text encoders, a 16-channel VAE."""

from __future__ import annotations

from pathlib import Path

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import nn
from transformers import CLIPTextModelWithProjection, T5EncoderModel

from tests.fakes.bases.parts import (
    WIDTH,
    clip_tokenizer,
    enliven_matrices,
    flow_vae,
    saved,
    t5_tokenizer,
    tiny_clip,
    tiny_t5,
)

CLIP_L, CLIP_G, T5 = 8, 12, 24


def write_base(folder: Path, *, seed: int = 0, t5: bool = True) -> Path:
    """Write the base into `folder` and return it; without T5 as people leave it out: `null` in the index."""

    def build() -> StableDiffusion3Pipeline:
        return StableDiffusion3Pipeline(
            transformer=enliven_matrices(_transformer()),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=flow_vae(
                latent_channels=16,
                sample_size=32,
                mid_block_add_attention=False,
                scaling_factor=1.5305,
                shift_factor=0.0609,
            ),
            text_encoder=_clip(CLIP_L, activation="quick_gelu"),
            tokenizer=clip_tokenizer(),
            text_encoder_2=_clip(CLIP_G, activation="gelu"),
            tokenizer_2=clip_tokenizer(),
            text_encoder_3=_t5() if t5 else None,
            tokenizer_3=t5_tokenizer() if t5 else None,
        )

    return saved(folder, seed=seed, build=build)


def _transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=WIDTH // 8,
        joint_attention_dim=T5,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=CLIP_L + CLIP_G,
        out_channels=16,
        pos_embed_max_size=48,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def _clip(width: int, *, activation: str) -> CLIPTextModelWithProjection:
    network: CLIPTextModelWithProjection = tiny_clip(
        CLIPTextModelWithProjection, width=width, num_hidden_layers=2, hidden_act=activation
    )
    if width == CLIP_L:  # as in the public releases, whose checkpoints leave it out
        nn.init.eye_(network.text_projection.weight)
    return network


def _t5() -> T5EncoderModel:
    network = tiny_t5(
        width=T5,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        is_encoder_decoder=False,
    )
    nn.init.normal_(network.shared.weight)
    return network
