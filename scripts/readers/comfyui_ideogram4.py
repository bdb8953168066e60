"""Whether ComfyUI's own network of Ideogram 4 predicts what the trainer's predicts, and reads its LoRAs.

`python -m scripts.readers.comfyui_ideogram4 --checkout DIR --commit SHA`: a narrow random network in both layouts,
texts of several lengths, which the trainer pads and ComfyUI gets one by one; a random LoRA of all layers written in
ComfyUI's names and loaded by its key maps and patches. The largest difference of the predictions, relative to the
largest prediction, with text, without, and with the LoRA.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import diffusers
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.lora.adapter import layer_shapes
from lora_trainer.lora.tensors import AdapterTensors
from scripts.readers.beside import add_updates, batch_prediction, compare, patched, start_comfyui
from scripts.readers.cases import adapter, arguments
from scripts.readers.networks import Base
from tests.fakes.adapters import export
from tests.fakes.original_names import original_names

NUMBERS = {
    "in_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "adaln_dim": 24,
    "llm_features_dim": 65,
    "mrope_section": (6, 5, 5),
}
"""The configuration of the narrow network, by diffusers' names, which are ComfyUI's too."""


def main() -> None:
    given = arguments(__doc__ or "")
    start_comfyui(given)
    import comfy.model_base
    import comfy.model_management

    # Else it turns queries and keys with a kernel of its package comfy-kitchen.
    comfy.model_management.in_training = True
    base = _base()
    tensors = adapter(base, "locon")
    assert tensors is not None
    texts = [torch.randn(1, length, NUMBERS["llm_features_dim"]) for length in (7, 12)]
    noisy, sigma = torch.randn(2, NUMBERS["in_channels"], 8, 12), torch.tensor([0.3, 0.85])
    network = _comfy(base)
    compare("base", _ours(base, {}, noisy, sigma, texts), _theirs(network, noisy, sigma, texts))
    # Without a text ComfyUI runs the network that predicts without one; here they are the same.
    empty = [text[:, :0] for text in texts]
    without = torch.cat([network(_swapped(noisy), sigma, None)])
    compare("no text", _ours(base, {}, noisy, sigma, empty), _swapped(without, back=True))
    layers = layer_shapes(base.denoiser)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "a.safetensors"
        export(file, tensors, name="ideogram4", format="comfyui", layers=layers)
        count = patched(network, file, kind=comfy.model_base.Ideogram4, unet_config={})
        print(f"{count} of {len(load_file(file)) // 2} modules of the file patch a weight")
    ours = _ours(base, tensors, noisy, sigma, texts)
    compare("LoRA", ours, _theirs(network, noisy, sigma, texts))


def _base(*, seed: int = 0) -> Base:
    torch.manual_seed(seed)
    denoiser = diffusers.Ideogram4Transformer2DModel(**NUMBERS).requires_grad_(False)
    for parameter in denoiser.parameters():
        parameter.normal_(std=0.2)
    return Base(family=families.family("ideogram4"), denoiser=denoiser, texts={}, places={})


def _comfy(base: Base) -> nn.Module:
    """Return ComfyUI's network with the weights of a base."""
    import comfy.ops
    from comfy.ldm.ideogram4.model import Ideogram4Transformer2DModel

    network = Ideogram4Transformer2DModel(
        **NUMBERS,
        dtype=torch.float32,
        device="cpu",
        operations=comfy.ops.disable_weight_init,
    )
    network.load_state_dict(original_names("ideogram4", base.denoiser.state_dict()), strict=True)
    loaded: nn.Module = network.eval().requires_grad_(False)
    return loaded


def _swapped(latents: Tensor, *, back: bool = False) -> Tensor:
    """Return latents with channels in ComfyUI's order, the latent in its square varying fastest, or `back` in ours."""
    sides = (4, -1) if not back else (-1, 4)
    return latents.unflatten(1, sides).transpose(1, 2).flatten(1, 2)


def _ours(
    base: Base, tensors: AdapterTensors, noisy: Tensor, sigma: Tensor, texts: list[Tensor]
) -> Tensor:
    """Return the family's prediction of a padded batch."""
    network = _base().denoiser
    add_updates(tensors, network)
    return batch_prediction(base.family, network, noisy, sigma, texts)


def _theirs(network: Any, noisy: Tensor, sigma: Tensor, texts: list[Tensor]) -> Tensor:
    rows = [
        network(_swapped(noisy[n : n + 1]), sigma[n : n + 1], text) for n, text in enumerate(texts)
    ]
    return _swapped(torch.cat(rows), back=True)


if __name__ == "__main__":
    main()
