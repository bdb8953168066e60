"""Exported files in diffusers: the loaded pipeline computes what the adapter computes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel

from lora_trainer.common.errors import RequestError
from lora_trainer.families import MODULES, family
from lora_trainer.families.base import FileFormat
from lora_trainer.lora.adapter_size import AdapterKind
from lora_trainer.lora.tensors import AdapterTensors, ModuleTensors, update
from lora_trainer.lora_file.formats import format_for
from lora_trainer.lora_file.write import contents_of, export_bytes, write_export
from tests.fakes.adapters import (
    adapted,
    adapter_for,
    draw_lokr,
    draw_module,
    export_info,
    read_back,
)
from tests.fakes.family_bases import CPU, denoiser_of, facts_of

FAMILY = family("sd15")
BOTH: tuple[FileFormat, ...] = ("kohya", "diffusers")


@pytest.fixture(scope="module")
def unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=2,
        norm_num_groups=8,
    ).requires_grad_(False)


@pytest.fixture(scope="module")
def clip() -> CLIPTextModel:
    torch.manual_seed(1)
    config = CLIPTextConfig(
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        vocab_size=50,
        bos_token_id=0,
        eos_token_id=1,
    )
    return CLIPTextModel(config).requires_grad_(False).eval()


def everywhere(unet: UNet2DConditionModel, **options: Any) -> dict[str, ModuleTensors]:
    """Return an adapter on every layer the family can adapt, convolutions too."""
    return adapter_for("denoiser", unet, FAMILY.lora_targets(unet, "all"), **options)


def predicted(unet: torch.nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    noisy = torch.randn(2, 4, 8, 8, generator=generator)
    text = torch.randn(2, 7, 32, generator=generator)
    with torch.no_grad():
        found: Tensor = unet(noisy, torch.tensor([10, 700]), encoder_hidden_states=text).sample
    return found


def embedded(clip: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = clip(torch.arange(14).reshape(2, 7)).last_hidden_state
    return found


def loaded(unet: UNet2DConditionModel, clip: CLIPTextModel, path: Path) -> StableDiffusionPipeline:
    """Load `path` with plain `load_lora_weights` into a whole pipeline."""
    pipeline = StableDiffusionPipeline(
        vae=AutoencoderKL(block_out_channels=(8,), norm_num_groups=4),
        text_encoder=copy.deepcopy(clip),
        tokenizer=None,
        unet=copy.deepcopy(unet),
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.load_lora_weights(path)
    return pipeline


def exported(path: Path, tensors: AdapterTensors, format: FileFormat, **options: Any) -> Path:
    written = {"precision": "fp32", **options}
    write_export(path, tensors, family=FAMILY, info=export_info(), format=format, **written)
    return path


def assert_same(found: Tensor, live: Tensor, base: Tensor) -> None:
    assert (base - live).abs().max() > 0.05, (
        "the adapter must matter for this test to mean anything"
    )
    assert (found - live).abs().max() <= 1e-4


@pytest.mark.parametrize("format", BOTH)
@pytest.mark.parametrize(
    "scale", [0.375, 3.0, 1.5 / 4**0.5], ids=["alpha<rank", "alpha>rank", "rslora"]
)
def test_unet_with_convolutions_and_a_strength(
    format: FileFormat,
    scale: float,
    unet: UNet2DConditionModel,
    clip: CLIPTextModel,
    tmp_path: Path,
) -> None:
    tensors = everywhere(unet, scale=scale)
    path = exported(tmp_path / "a.safetensors", tensors, format)
    assert_same(
        predicted(loaded(unet, clip, path).unet),
        predicted(adapted(unet, tensors)),
        predicted(unet),
    )


@pytest.mark.parametrize("format", BOTH)
def test_ranks_and_strengths_by_module(
    format: FileFormat, unet: UNet2DConditionModel, clip: CLIPTextModel, tmp_path: Path
) -> None:
    """As LoCon and rank patterns make them: every module has its own rank and its own alpha."""
    names = FAMILY.lora_targets(unet, "all")
    tensors = {
        f"denoiser.{name}": draw_module(
            tuple(unet.get_parameter(f"{name}.weight").shape),
            rank=1 + number % 5,
            scale=0.3 + 0.2 * (number % 3),
            seed=number,
        )
        for number, name in enumerate(names)
    }
    path = exported(tmp_path / "a.safetensors", tensors, format)
    assert_same(
        predicted(loaded(unet, clip, path).unet),
        predicted(adapted(unet, tensors)),
        predicted(unet),
    )


@pytest.mark.parametrize("format", BOTH)
def test_trained_text_encoder(
    format: FileFormat, unet: UNet2DConditionModel, clip: CLIPTextModel, tmp_path: Path
) -> None:
    text = adapter_for(
        "text_encoder", clip, FAMILY.lora_targets(clip, "text_encoder"), scale=0.7, rank=3
    )
    tensors = {**everywhere(unet), **text}
    pipeline = loaded(unet, clip, exported(tmp_path / "a.safetensors", tensors, format))
    assert_same(embedded(pipeline.text_encoder), embedded(adapted(clip, text)), embedded(clip))
    live = adapted(unet, everywhere(unet))
    assert_same(predicted(pipeline.unet), predicted(live), predicted(unet))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_dora_in_the_diffusers_format(
    precision: str, unet: UNet2DConditionModel, clip: CLIPTextModel, tmp_path: Path
) -> None:
    """The magnitudes scale the base's weights: they must not be rounded to bf16 with the factors."""
    tensors = everywhere(unet, dora=True)
    path = exported(tmp_path / "a.safetensors", tensors, "diffusers", precision=precision)
    found, live = predicted(loaded(unet, clip, path).unet), predicted(adapted(unet, tensors))
    assert (predicted(unet) - live).abs().max() > 0.05
    allowed = {"fp32": 1e-4, "fp16": 2e-3, "bf16": 1e-2}[precision]
    assert (found - live).abs().max() <= allowed


def test_dora_of_a_text_encoder(
    unet: UNet2DConditionModel, clip: CLIPTextModel, tmp_path: Path
) -> None:
    text = adapter_for("text_encoder", clip, FAMILY.lora_targets(clip, "text_encoder"), dora=True)
    tensors = {**everywhere(unet, dora=True), **text}
    pipeline = loaded(unet, clip, exported(tmp_path / "a.safetensors", tensors, "diffusers"))
    assert_same(embedded(pipeline.text_encoder), embedded(adapted(clip, text)), embedded(clip))


def test_dora_of_a_transformer(tmp_path: Path) -> None:
    """Families without a U-Net are loaded by another mixin, with the prefix `transformer`."""
    torch.manual_seed(0)
    network = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(2, 2, 4),
    ).requires_grad_(False)
    transformer = family("flux")
    names = transformer.lora_targets(network, "transformer")
    tensors = adapter_for("denoiser", network, names, dora=True, scale=0.6)
    path = tmp_path / "a.safetensors"
    write_export(
        path,
        tensors,
        family=transformer,
        info=export_info(prediction="flow"),
        format="diffusers",
        precision="fp32",
    )
    fresh = copy.deepcopy(network)
    fresh.load_lora_adapter(str(path), prefix="transformer")
    inputs: Mapping[str, Tensor] = {
        "hidden_states": torch.randn(1, 4, 4),
        "encoder_hidden_states": torch.randn(1, 3, 8),
        "pooled_projections": torch.randn(1, 8),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(4, 3),
        "txt_ids": torch.zeros(3, 3),
    }
    with torch.no_grad():
        found, live, base = (
            model(**inputs).sample for model in (fresh, adapted(network, tensors), network)
        )
    assert (base - live).abs().max() > 0.01
    assert (found - live).abs().max() <= 1e-4


# ---- every family


KINDS: tuple[AdapterKind, ...] = ("lora", "loha", "lokr", "oft")


def some_of(name: str, kind: AdapterKind) -> dict[str, ModuleTensors]:
    """Return an adapter on every fourth layer."""
    denoiser = denoiser_of(name)
    names = family(name).lora_targets(denoiser, "all")[::4]
    if kind != "lokr":
        return adapter_for("denoiser", denoiser, names, kind=kind, rank=2, scale=0.3)
    shapes = [tuple(denoiser.get_parameter(f"{module}.weight").shape) for module in names]
    return {
        f"denoiser.{module}": draw_lokr(shape, rank=1, scale=3.0, seed=number)
        for number, (module, shape) in enumerate(zip(names, shapes, strict=True))
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODULES)
def test_every_family_writes_every_kind(name: str, kind: AdapterKind) -> None:
    """LyCORIS's kinds go where ComfyUI and A1111 look for them, with its names for their factors."""
    tensors = some_of(name, kind)
    if family(name).formats.written == ("diffusers",) and kind != "lora":
        with pytest.raises(RequestError, match="no file format"):
            format_for(family(name), "auto", contents_of(tensors))
        return
    format = format_for(family(name), "auto", contents_of(tensors))
    assert (format == "diffusers") == (
        kind == "lora" and family(name).formats.written[0] != "kohya"
    )
    data = export_bytes(tensors, family=family(name), format=format, precision="fp32", metadata={})
    assert read_back(data, tensors, family=family(name)) < 1e-6


@pytest.mark.parametrize(
    ("name", "format", "module", "key"),
    [
        ("sd15", "kohya", "mid_block.resnets.0.conv1", "lora_unet_mid_block_resnets_0_conv1"),
        ("sd15", "diffusers", "mid_block.resnets.0.conv1", "unet.mid_block.resnets.0.conv1"),
        (
            "sdxl",
            "kohya",
            "up_blocks.0.attentions.1.proj_in",
            "lora_unet_output_blocks_1_1_proj_in",
        ),
        ("sd3", "comfyui", "transformer_blocks.0.attn.to_q", None),
        ("flux", "diffusers", "single_transformer_blocks.0.proj_mlp", None),
        ("flux", "comfyui", "single_transformer_blocks.0.proj_mlp", None),
        ("flux2", "comfyui", "transformer_blocks.0.ff.linear_in", None),
        ("chroma", "comfyui", "transformer_blocks.0.attn.add_k_proj", None),
        ("zimage", "diffusers", "layers.0.attention.to_q", None),
        ("zimage", "comfyui", "layers.0.attention.to_q", "diffusion_model.layers.0.attention.to_q"),
        (
            "qwen",
            "kohya",
            "transformer_blocks.0.img_mlp.net.2",
            "lora_unet_transformer_blocks_0_img_mlp_net_2",
        ),
    ],
)
def test_names_are_those_that_readers_were_seen_to_take(
    name: str, format: FileFormat, module: str, key: str | None
) -> None:
    """As docs/formats.md has them; None stands for diffusers' name behind `transformer.`."""
    found = family(name).lora_key_name(format, "denoiser", module)
    assert found == (key or f"transformer.{module}")


@pytest.mark.parametrize("name", ["flux2", "zimage"])
def test_lokr_of_a_transformer_in_diffusers(name: str, tmp_path: Path) -> None:
    """diffusers refuses an alpha beside a LoKr: its strength must not be in there."""
    tensors = some_of(name, "lokr")
    data = export_bytes(
        tensors, family=family(name), format="comfyui", precision="fp32", metadata={}
    )
    (tmp_path / "a.safetensors").write_bytes(data)
    pipeline = family(name).plain_pipeline(facts_of(name), dtype=torch.float32, device=CPU)
    pipeline.load_lora_weights(tmp_path, weight_name="a.safetensors")
    base = denoiser_of(name)
    for key, module in tensors.items():
        path = key.partition(".")[2]
        layer: Any = pipeline.transformer.get_submodule(path)
        layer.merge()
        weight = base.get_parameter(f"{path}.weight")
        change = update(module, weight)
        assert change.abs().max() > 0.001
        torch.testing.assert_close(layer.get_base_layer().weight, weight + change)
