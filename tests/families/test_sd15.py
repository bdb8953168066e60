"""Stable Diffusion 1.x: what is special to it. The rest is in `test_unet_family` and `test_single_file`."""

from __future__ import annotations

from lora_trainer import families
from lora_trainer.families.base import Layout
from lora_trainer.families.locate import EMBEDDED_FOLDER
from lora_trainer.families.sd15 import FAMILY


def test_the_embedded_base_is_of_this_family() -> None:
    assert families.detect(EMBEDDED_FOLDER) is FAMILY
    facts = FAMILY.facts(Layout(folder=EMBEDDED_FOLDER), source="embedded")
    assert (facts.resolution_px, facts.bucket_step_px, facts.vae_factor) == (64, 8, 4)
    assert facts.prediction == "epsilon" and not facts.zero_terminal_snr


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
