"""The public releases: parameters counted in networks built from their configurations, sizes, names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import diffusers
import pytest
import torch
import transformers
from torch import nn

from lora_trainer import families
from lora_trainer.families.base import BaseFacts
from lora_trainer.families.base_files import open_companion
from lora_trainer.families.base_files.base_folder import read_json

SOURCES = [(name, source) for name in families.MODULES for source in families.family(name).releases]
OPEN = read_json(open_companion.FILE)["configs"]
TEXTS: Mapping[str, Mapping[str, Any]] = {
    "CLIP-L": OPEN["clip_l"],
    "CLIP-L projected": OPEN["clip_l_projected"],
    "CLIP-H": OPEN["clip_g"]
    | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23}
    | {"num_attention_heads": 16},
    "bigG": OPEN["clip_g"],
    "T5-XXL": OPEN["t5xxl"],
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12_288, "tie_word_embeddings": False},
    "Gemma 2 2B": {},  # the defaults of its class
    "Qwen2.5-VL-7B": {
        "text_config": {
            "vocab_size": 152_064,
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
        },
    },
}
QWEN3 = {
    "vocab_size": 151_936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
ENCODERS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "sd15": (("CLIPTextModel", "CLIP-L"),),
    "sd2": (("CLIPTextModel", "CLIP-H"),),
    "sdxl": (("CLIPTextModel", "CLIP-L"), ("CLIPTextModelWithProjection", "bigG")),
    "sd3": (
        ("CLIPTextModelWithProjection", "CLIP-L projected"),
        ("CLIPTextModelWithProjection", "bigG"),
        ("T5EncoderModel", "T5-XXL"),
    ),
    "flux": (("CLIPTextModel", "CLIP-L"), ("T5EncoderModel", "T5-XXL")),
    "flux2": (("Qwen3ForCausalLM", "Qwen3-4B"),),
    "flux2 9B": (("Qwen3ForCausalLM", "Qwen3-8B"),),
    "chroma": (("T5EncoderModel", "T5-XXL"),),
    "zimage": (("Qwen3ForCausalLM", "Qwen3-4B"),),
    "qwen": (("Qwen2_5_VLForConditionalGeneration", "Qwen2.5-VL-7B"),),
    "lumina2": (("Gemma2Model", "Gemma 2 2B"),),
}
BF16 = ("flux2", "qwen", "sd3", "lumina2")
"""Families whose download is counted: every parameter in two bytes, those that are not loaded too."""


def texts(name: str, facts: BaseFacts) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each text encoder as it is published and the part of it that is loaded."""
    wide = facts.architecture.get("joint_attention_dim") == 12_288
    for kind, config in ENCODERS[f"{name} 9B" if name == "flux2" and wide else name]:
        network_class = getattr(transformers, kind)
        values = {**(QWEN3 if "Qwen3" in config else {}), **TEXTS[config]}
        network = network_class(network_class.config_class(**values))
        loaded = network.model if kind == "Qwen3ForCausalLM" else network
        yield network, loaded.model.language_model if name == "qwen" else loaded


def vae(name: str) -> nn.Module:
    if name == "qwen":
        return diffusers.AutoencoderKLQwenImage()  # the release's configuration is the default
    blocks = {"up_block_types": ("UpDecoderBlock2D",) * 4}
    if name == "flux2":
        return diffusers.AutoencoderKLFlux2(**blocks)
    is_unet = name in ("sd15", "sd2", "sdxl")
    return diffusers.AutoencoderKL(
        **blocks,
        down_block_types=("DownEncoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=4 if is_unet else 16,
        use_quant_conv=is_unet,
        use_post_quant_conv=is_unet,
    )


def numbers(network: nn.Module) -> int:
    """Count parameters, and buffers that are saved: SD3's table of positions."""
    tables = [b for n, b in network.state_dict().items() if n.endswith("pos_embed.pos_embed")]
    return sum(tensor.numel() for tensor in (*network.parameters(), *tables))


@pytest.mark.parametrize(("name", "source"), SOURCES, ids=lambda value: value)
def test_a_release_has_the_sizes_of_its_configuration(name: str, source: str) -> None:
    family = families.family(name)
    facts = families.known_base(source)
    assert facts is not None and facts.family == name and facts.source == source
    with torch.device("meta"):
        denoiser, image, encoders = (
            family.empty_denoiser(facts.architecture),
            vae(name),
            list(texts(name, facts)),
        )
    loaded = {
        "denoiser": numbers(denoiser),
        "vae": numbers(image),
        "text_encoder": sum(numbers(network) for _, network in encoders),
    }
    assert {part: each.parameters for part, each in facts.parts.items()} == loaded
    if name in BF16:
        published = sum(numbers(network) for network, _ in encoders)
        assert facts.download_bytes == 2 * (loaded["denoiser"] + loaded["vae"] + published)
    json.dumps(dict(facts.architecture))  # the planner's cost table is keyed by it


SIZES = {"sd15": (512, 64, 8), "sdxl": (1024, 32, 8), "flux2": (1024, 64, 16)}


@pytest.mark.parametrize("name", families.MODULES)
def test_native_size_and_step_of_buckets(name: str) -> None:
    for facts in families.family(name).releases.values():
        size = (facts.resolution_px, facts.bucket_step_px, facts.vae_factor)
        if name == "sd2":
            assert size == (512 if facts.prediction == "epsilon" else 768, 64, 8)
        else:
            assert size == SIZES.get(name, (1024, 64, 8))


SD = "stabilityai/stable-diffusion"
FACTS = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": ("sd_v1", "stable-diffusion-v1", "", False, None),
    f"{SD}-2-1-base": ("sd_v2", "stable-diffusion-v2-512", "", False, None),
    f"{SD}-2-1": ("sd_v2_v", "stable-diffusion-v2-768-v", "", False, None),
    f"{SD}-xl-base-1.0": ("sdxl_base_v1-0", "stable-diffusion-xl-v1-base", "", False, None),
    "black-forest-labs/FLUX.1-dev": ("flux1", "flux-1-dev", "dev", False, 3.158193),  # exp(1.15)
    "black-forest-labs/FLUX.1-schnell": ("flux1", "flux-1-schnell", "schnell", True, 1.0),
    "black-forest-labs/FLUX.2-klein-4B": ("flux2_klein_4b", "Flux.2-klein-4b", "klein-4b", True, 3.158193),
    "black-forest-labs/FLUX.2-klein-base-9B": ("flux2_klein_9b", "Flux.2-klein-9b", "klein-base-9b", False, 3.158193),
    "lodestones/Chroma1-HD": ("chroma", "chroma", "", False, 1.0),
    f"{SD}-3-medium-diffusers": ("3-medium", "stable-diffusion-3-medium", "3-medium", False, 3.0),
    f"{SD}-3.5-medium": ("3-5-medium", "stable-diffusion-3-5-medium", "medium", False, 3.0),
    f"{SD}-3.5-large-turbo": ("3-5-large", "stable-diffusion-3-5-large", "large-turbo", True, 3.0),
    "Tongyi-MAI/Z-Image-Turbo": ("zimage", "Z-Image", "turbo", True, 3.0),
    "Qwen/Qwen-Image": ("qwen_image", "Qwen-Image", "", False, None),
    "Alpha-VLLM/Lumina-Image-2.0": ("lumina2", "lumina-2", "", False, 6.0),
}  # fmt: skip
"""Release -> its names in metadata, variant, whether it is distilled, the published shift at 1024 px."""


@pytest.mark.parametrize("source", FACTS)
def test_facts_of_a_release(source: str) -> None:
    kohya, modelspec, variant, distilled, shift = FACTS[source]
    facts = families.known_base(source)
    assert facts is not None and (facts.variant, facts.distilled) == (variant, distilled)
    names = families.family(facts.family).adapter_names(facts)
    assert (names.kohya, names.modelspec) == (kohya, f"{modelspec}/lora")
    if shift is not None:
        assert facts.flow_shift(width_px=1024, height_px=1024) == pytest.approx(shift)
