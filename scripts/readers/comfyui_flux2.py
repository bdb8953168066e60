"""Whether ComfyUI's own network of FLUX.2 predicts what the trainer's predicts, and reads its LoRAs.

`python -m scripts.readers.comfyui_flux2 --checkout DIR --commit SHA`: narrow random networks of dev, which is told a
guidance scale, and of klein, which is not, in both layouts; alone and beside reference images. A random LoRA of every
layer is written in each format and loaded by ComfyUI's key maps and patches. Printed is the largest difference of the
predictions relative to the largest prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.families.base.references import with_references
from lora_trainer.lora.adapter import layer_shapes
from lora_trainer.lora.tensors import AdapterTensors
from scripts.readers.beside import add_updates, compare, patched, start_comfyui
from scripts.readers.cases import adapter, arguments
from scripts.readers.networks import Base
from tests.fakes.adapters import export
from tests.fakes.original_names import original_names

CHANNELS, HEADS, HEAD, TEXT = 8, 2, 32, 24
AXES = (8, 8, 8, 8)
"""Channels of a head for each axis of positions."""
SIZES = ((8, 12, 7), (12, 6, 31), (4, 10, 64))
"""Rows and columns of the image and tokens of the text."""


def main() -> None:
    given = arguments(__doc__ or "")
    start_comfyui(given)
    import comfy.model_base

    kind = comfy.model_base.Flux2
    for name, guidance in (("flux2dev", torch.tensor([3.5, 1.0])), ("flux2", None)):
        for seed, (rows, columns, tokens) in enumerate(SIZES):
            base = _base(name, told=guidance is not None, seed=seed)
            tensors = adapter(base, "locon")
            assert tensors is not None
            noisy, sigma = torch.randn(2, CHANNELS, rows, columns), torch.rand(2)
            text = torch.randn(2, tokens, TEXT)
            shown = [torch.randn(2, CHANNELS, *size) for size in ((6, 8), (4, 4))]
            for references in ([], shown):
                asked = (noisy, sigma, text, guidance, references)
                theirs = _theirs(_comfy(base), *asked)
                compare(f"{name}, {len(references)} references", _ours(base, {}, *asked), theirs)
            for format in base.family.formats.written:
                network, asked = _comfy(base), (noisy, sigma, text, guidance, shown)
                with TemporaryDirectory() as folder:
                    file = Path(folder) / "a.safetensors"
                    layers = layer_shapes(base.denoiser)
                    export(file, tensors, name=name, format=format, layers=layers)
                    count = patched(network, file, kind=kind, unet_config=_numbers(base))
                print(f"{name}, {format}: {count} of {len(tensors)} modules patch a weight")
                ours = _ours(base, tensors, *asked)
                compare(f"{name}, LoRA, {format}", ours, _theirs(network, *asked))


def _base(name: str, *, told: bool, seed: int) -> Base:
    """Return a narrow network; `told`: it is told a guidance scale."""
    torch.manual_seed(seed)
    denoiser = diffusers.Flux2Transformer2DModel(
        in_channels=CHANNELS,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=HEAD,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT,
        timestep_guidance_channels=256,  # ComfyUI's
        axes_dims_rope=AXES,
        guidance_embeds=told,
    ).requires_grad_(False)
    for parameter in denoiser.parameters():
        parameter.normal_(std=0.2)
    return Base(family=families.family(name), denoiser=denoiser.eval(), texts={}, places={})


def _numbers(base: Base) -> dict[str, Any]:
    """Return ComfyUI's configuration of a base, as `comfy.model_detection` makes it."""
    return {
        "image_model": "flux2",
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "vec_in_dim": None,
        "context_in_dim": TEXT,
        "hidden_size": HEADS * HEAD,
        "mlp_ratio": 3.0,
        "num_heads": HEADS,
        "depth": 2,
        "depth_single_blocks": 3,
        "axes_dim": list(AXES),
        "theta": 2000,
        "patch_size": 1,
        "qkv_bias": False,
        "ops_bias": False,
        "guidance_embed": bool(base.denoiser.config["guidance_embeds"]),
        "txt_ids_dims": [3],
        "global_modulation": True,
        "mlp_silu_act": True,
        "default_ref_method": "index",
        "ref_index_scale": 10.0,
    }


def _comfy(base: Base) -> nn.Module:
    """Return ComfyUI's network with the weights of a base."""
    import comfy.ops
    from comfy.ldm.flux.model import Flux
    from comfy.supported_models import Flux2

    network = Flux(
        **_numbers(base),
        dtype=torch.float32,
        device="cpu",
        operations=comfy.ops.disable_weight_init,
    )
    state = original_names(base.family.name, base.denoiser.state_dict())
    # The names of norms as ComfyUI changes them when it loads a file.
    renamed = Flux2.process_unet_state_dict(None, state)
    network.load_state_dict(renamed, strict=True)
    loaded: nn.Module = network.eval().requires_grad_(False)
    return loaded


def _ours(
    base: Base,
    tensors: AdapterTensors,
    noisy: Tensor,
    sigma: Tensor,
    text: Tensor,
    guidance: Tensor | None,
    references: Sequence[Tensor],
) -> Tensor:
    """Return the family's prediction, with the updates of an adapter."""
    before = {name: tensor.clone() for name, tensor in base.denoiser.state_dict().items()}
    told = {} if guidance is None else {"guidance": guidance}
    with torch.no_grad():
        add_updates(tensors, base.denoiser)
        names = with_references([each[0] for each in references])
        conditioning = {"text": text, **told, **dict(zip(names, references, strict=True))}
        predicted = base.family.predict(base.denoiser, noisy, 1000 * sigma, conditioning)
        base.denoiser.load_state_dict(before)
    return predicted


def _theirs(
    network: Any,
    noisy: Tensor,
    sigma: Tensor,
    text: Tensor,
    guidance: Tensor | None,
    references: Sequence[Tensor],
) -> Tensor:
    with torch.no_grad():
        predicted: Tensor = network(
            noisy, sigma, text, guidance=guidance, ref_latents=list(references) or None
        )
    return predicted


if __name__ == "__main__":
    main()
