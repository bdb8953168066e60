"""Exported files in diffusers: each layer of the loaded pipeline has the weight that the adapter gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_trainer.families import family
from lora_trainer.lora.tensors import ModuleTensors, update
from tests.fakes.adapters import adapter_for, draw_lokr, exported
from tests.fakes.family_bases import CPU, facts_of
from tests.fakes.tool_files import networks_of


def adapter(name: str, kind: str) -> dict[str, ModuleTensors]:
    """Return an adapter on the text encoders and on every layer of the denoiser, convolutions too.

    As LoCon and rank patterns make them: every module has its own rank and its own alpha.
    """
    tensors = dict[str, ModuleTensors]()
    for component, network in networks_of(name).items():
        targets = "all" if component == "denoiser" else "text_encoder"
        for number, layer in enumerate(family(name).lora_targets(network, targets)):
            shape = tuple(network.get_parameter(f"{layer}.weight").shape)
            rank, scale = 1 + number % 5, 0.3 + number % 3
            if kind == "lokr":
                module = draw_lokr(shape, rank=1, scale=3.0, seed=number)
                tensors[f"{component}.{layer}"] = module
            else:
                options: dict[str, Any] = {"rank": rank, "scale": scale, "dora": kind == "dora"}
                tensors |= adapter_for(component, network, [layer], **options)
    return tensors


@pytest.mark.parametrize(
    ("name", "kind", "format"),
    [
        ("sd15", "lora", "kohya"),
        ("sd15", "dora", "diffusers"),
        ("flux", "dora", "diffusers"),  # loaded by another mixin, with the prefix `transformer`
        ("zimage", "lokr", "comfyui"),  # an alpha beside it would be refused
    ],
)
def test_diffusers_gives_each_layer_the_update_that_was_trained(
    name: str, kind: str, format: str, tmp_path: Path
) -> None:
    tensors, file = adapter(name, kind), tmp_path / "a.safetensors"
    if kind != "lora":
        tensors = dict(list(tensors.items())[::4])
    file.write_bytes(exported(tensors, name=name, format=format))
    pipeline: Any = family(name).plain_pipeline(facts_of(name), dtype=torch.float32, device=CPU)
    pipeline.load_lora_weights(tmp_path, weight_name=file.name)
    for key, module in tensors.items():
        component, _, path = key.partition(".")
        own = {"denoiser": "unet" if name == "sd15" else "transformer"}.get(component, component)
        layer = getattr(pipeline, own).get_submodule(path)
        layer.merge()
        weight = networks_of(name)[component].get_parameter(f"{path}.weight")
        change = update(module, weight).reshape(weight.shape)
        assert change.abs().max() > 0.001
        merged = layer.get_base_layer().weight
        torch.testing.assert_close(merged, weight + change, rtol=1e-5, atol=1e-5)


def test_names_are_those_that_readers_were_seen_to_take() -> None:
    """As docs/formats.md has them."""
    names: dict[tuple[str, Any, str], str] = {
        ("sd15", "kohya", "mid_block.resnets.0.conv1"): "lora_unet_mid_block_resnets_0_conv1",
        ("sd15", "diffusers", "mid_block.resnets.0.conv1"): "unet.mid_block.resnets.0.conv1",
        (
            "sdxl",
            "kohya",
            "up_blocks.0.attentions.1.proj_in",
        ): "lora_unet_output_blocks_1_1_proj_in",
        ("zimage", "comfyui", "layers.0.attn.to_q"): "diffusion_model.layers.0.attn.to_q",
        ("qwen", "kohya", "img_mlp.net.2"): "lora_unet_img_mlp_net_2",
    }
    for name in ("sd3", "flux", "flux2", "chroma"):
        names[name, "comfyui", "attn.to_q"] = "transformer.attn.to_q"
    for name in ("flux", "zimage"):
        names[name, "diffusers", "attn.to_q"] = "transformer.attn.to_q"
    for (name, format, layer), expected in names.items():
        assert family(name).lora_key_name(format, "denoiser", layer) == expected
