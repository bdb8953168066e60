"""Stable Diffusion 1.x: what is special to it. The rest is in `test_unet_family` and `test_single_file`."""

from __future__ import annotations

import pytest
import torch

from lora_trainer import families
from lora_trainer.families.base import Layout
from lora_trainer.families.base_files.unet_parts import clip_parameters
from lora_trainer.families.locate import EMBEDDED_FOLDER
from lora_trainer.families.sd15 import FAMILY, IDS
from tests.fakes.family_bases import facts_of

CLIP_L = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "max_position_embeddings": 77,
}


def test_the_embedded_base_is_of_this_family() -> None:
    assert families.detect(EMBEDDED_FOLDER) is FAMILY
    facts = FAMILY.facts(Layout(folder=EMBEDDED_FOLDER), source="embedded", identities={})
    assert (facts.resolution_px, facts.bucket_step_px, facts.vae_factor) == (64, 8, 4)
    assert facts.prediction == "epsilon" and not facts.zero_terminal_snr


@pytest.mark.parametrize("source", IDS)
def test_the_release_is_known_by_name(source: str) -> None:
    facts = FAMILY.releases.get(source)
    assert facts is not None and (facts.source, facts.resolution_px) == (source, 512)
    with torch.device("meta"):
        network = FAMILY.empty_denoiser(facts.architecture)
    assert sum(p.numel() for p in network.parameters()) == facts.parts["denoiser"].parameters
    assert clip_parameters(FAMILY.texts[0], CLIP_L) == facts.parts["text_encoder"].parameters
    levels = facts.alphas_cumprod()
    assert float(levels[0]) == pytest.approx(0.99915) and float(levels[-1]) == pytest.approx(
        0.00466, abs=1e-5
    )


def test_names_in_files() -> None:
    """transformers 5 left `text_model` out of its names; files have it, whatever it calls the module."""
    block = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0"
    layer = "encoder.layers.0.self_attn.q_proj"
    assert FAMILY.lora_key_name("kohya", "denoiser", block) == (
        "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_out_0"
    )
    assert FAMILY.lora_key_name("diffusers", "denoiser", block) == f"unet.{block}"
    for module in (layer, f"text_model.{layer}"):
        assert FAMILY.lora_key_name("kohya", "text_encoder", module) == (
            "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
        )
        assert FAMILY.lora_key_name("diffusers", "text_encoder", module) == (
            f"text_encoder.text_model.{layer}"
        )


def test_names_in_metadata() -> None:
    facts = facts_of("sd15")
    assert FAMILY.adapter_names(facts).kohya == "sd_v1"
    assert FAMILY.adapter_names(facts).modelspec == "stable-diffusion-v1/lora"
