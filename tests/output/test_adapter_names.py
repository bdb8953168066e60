"""The spellings of modules and tensors in files of every trainer."""

from __future__ import annotations

import pytest

from lora_trainer.families import family
from lora_trainer.lora_file.names import LayerNames, file_names


def key_of(names: LayerNames, spelling: str) -> str:
    """Return the only layer that a spelling stands for."""
    (layer,) = names.find(spelling)
    return layer.key


CLIP = "text_model.encoder.layers.3.self_attn.q_proj"


@pytest.mark.parametrize("module", [CLIP, CLIP.removeprefix("text_model.")])
@pytest.mark.parametrize(
    "spelling",
    [
        "lora_te_text_model_encoder_layers_3_self_attn_q_proj",
        "lora_te1_text_model_encoder_layers_3_self_attn_q_proj",
        "lora_te1_encoder_layers_3_self_attn_q_proj",
        "text_encoder.text_model.encoder.layers.3.self_attn.q_proj",
        "text_encoder.encoder.layers.3.self_attn.q_proj",
        "text_encoder.text_model.encoder.layers.3.self_attn.to_q",
    ],
)
def test_spellings_of_a_text_module(spelling: str, module: str) -> None:
    """Whatever transformers calls it today, files have all of these."""
    found = file_names(family("sd15"), {"text_encoder": [module]})
    assert key_of(found, spelling) == f"text_encoder.{module}"


def test_two_text_encoders_are_kept_apart() -> None:
    both = {"denoiser": [], "text_encoder": [CLIP], "text_encoder_2": [CLIP]}
    found = file_names(family("sdxl"), both)
    flat = CLIP.replace(".", "_")
    assert key_of(found, f"lora_te1_{flat}") == f"text_encoder.{CLIP}"
    assert key_of(found, f"lora_te2_{flat}") == f"text_encoder_2.{CLIP}"
    assert key_of(found, f"text_encoder_2.{CLIP}") == f"text_encoder_2.{CLIP}"


# ---- names of the releases' own code


@pytest.mark.parametrize(
    ("name", "module", "original"),
    [
        ("sd15", "down_blocks.0.downsamplers.0.conv", "input_blocks.3.0.op"),
        ("sd15", "up_blocks.0.upsamplers.0.conv", "output_blocks.2.1.conv"),
        ("sd2", "up_blocks.1.upsamplers.0.conv", "output_blocks.5.2.conv"),
        ("sdxl", "down_blocks.1.attentions.0.proj_in", "input_blocks.4.1.proj_in"),
        ("sdxl", "down_blocks.2.resnets.1.time_emb_proj", "input_blocks.8.0.emb_layers.1"),
        ("sdxl", "up_blocks.0.upsamplers.0.conv", "output_blocks.2.2.conv"),
    ],
)
@pytest.mark.parametrize("prefix", ["lora_unet_", "lycoris_", "diffusion_model."])
def test_modules_of_a_unet_are_found_by_the_names_of_checkpoints(
    name: str, module: str, original: str, prefix: str
) -> None:
    """The numbers are those of the published bases, whichever modules have an adapter."""
    spelling = prefix + (original if prefix.endswith(".") else original.replace(".", "_"))
    names = file_names(family(name), {"denoiser": [module]})
    assert key_of(names, spelling) == f"denoiser.{module}"


def test_modules_that_no_release_has_keep_their_own_names() -> None:
    module = "down_blocks.7.resnets.0.conv1"
    assert not file_names(family("sdxl"), {"denoiser": []}).find(f"unet.{module}")
    assert file_names(family("sdxl"), {"denoiser": [module]}).find(f"unet.{module}")
    assert family("sdxl").layer_names({module: ()}).layers == {}
