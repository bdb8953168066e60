"""A tiny random Qwen-Image base: a one-layer Qwen2.5-VL, a video VAE for single frames, two blocks."""

from __future__ import annotations

from pathlib import Path

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import nn
from transformers import (
    AddedToken,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
)

from tests.fakes.bases.parts import WIDTH, enliven_matrices, qwen2_tokenizer, saved

CHANNELS = 16
_TEMPLATE_WORDS = (
    *("system", "Describe", " the", " image", " by", " detailing", " color", " shape", " size"),
    *(" texture", " quantity", " text", " spatial", " relationships", " of", " objects", " and"),
    *(" background", "user"),
)
"""Tokens of their own, so that the prompt template begins with 34 tokens, as in the release."""


def write_base(folder: Path, *, seed: int = 0) -> Path:
    """Write the base into `folder` and return it."""
    return saved(folder, seed=seed, build=_pipeline)


def _pipeline() -> QwenImagePipeline:
    vae = enliven_matrices(
        AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=CHANNELS,
            dim_mult=[1, 1],
            num_res_blocks=1,
            temperal_downsample=[False],
        )
    )
    text_encoder = _text_encoder()
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(2, 2, 4),
    )
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02, use_dynamic_shifting=True
        ),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=_tokenizer(),
        transformer=enliven_matrices(transformer),
    )


def _tokenizer() -> Qwen2Tokenizer:
    tokenizer = qwen2_tokenizer()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in _TEMPLATE_WORDS])
    return tokenizer


def _text_encoder() -> Qwen2_5_VLForConditionalGeneration:
    tokenizer = _tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 2],
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "patch_size": 4,
        "fullatt_block_indexes": [0],
        "window_size": 8,
    }
    network = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    )
    nn.init.normal_(network.model.language_model.embed_tokens.weight)
    return network
