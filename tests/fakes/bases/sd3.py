"""A tiny random Stable Diffusion 3.5 base with a dual attention layer: three text encoders, a 16-channel VAE."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from tests.fakes.bases.tokenizers import clip_tokenizer, t5_tokenizer

WIDTH, CLIP_L, CLIP_G, T5 = 16, 8, 12, 24


def write_base(folder: Path, *, seed: int = 0, t5: bool = True) -> Path:
    """Write the base into `folder` and return it; without T5 as people leave it out: `null` in the index."""
    tokenizer = clip_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = StableDiffusion3Pipeline(
            transformer=_alive(_transformer()),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_vae(),
            text_encoder=_clip(len(tokenizer), width=CLIP_L, activation="quick_gelu"),
            tokenizer=tokenizer,
            text_encoder_2=_clip(len(tokenizer), width=CLIP_G, activation="gelu"),
            tokenizer_2=clip_tokenizer(),
            text_encoder_3=_t5() if t5 else None,
            tokenizer_3=t5_tokenizer() if t5 else None,
        )
    pipeline.save_pretrained(folder)
    return folder


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


def _alive(network: nn.Module) -> nn.Module:
    """Draw every matrix anew: an output or a gate that starts at zero would hide what is before it."""
    for parameter in network.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.7 * parameter[0].numel() ** -0.5)
    return network


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=32,
        mid_block_add_attention=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _clip(vocabulary: int, *, width: int, activation: str) -> CLIPTextModelWithProjection:
    network = CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=77,
            hidden_act=activation,
            bos_token_id=vocabulary - 2,
            eos_token_id=vocabulary - 1,
            pad_token_id=vocabulary - 1,
        )
    )
    if width == CLIP_L:  # as in the public releases, whose checkpoints leave it out
        nn.init.eye_(network.text_projection.weight)
    return network


def _t5() -> T5EncoderModel:
    network = T5EncoderModel(
        T5Config(
            vocab_size=len(t5_tokenizer()),
            d_model=T5,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            feed_forward_proj="gated-gelu",
            relative_attention_num_buckets=8,
            relative_attention_max_distance=16,
            is_encoder_decoder=False,
        )
    )
    nn.init.normal_(network.shared.weight)
    return network
