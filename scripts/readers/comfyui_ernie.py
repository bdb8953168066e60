"""Whether ComfyUI's own network of ERNIE-Image predicts what the trainer's predicts, alone and with an exported LoRA.

`python -m scripts.readers.comfyui_ernie --checkout DIR --commit SHA`: narrow random networks of three seeds and sizes,
whose weights ComfyUI's network takes by the same names; texts of unequal length in one batch here and one by one
there; a random LoRA of every layer in each format, loaded by ComfyUI's key maps and patches. Printed is the largest
difference relative to the largest prediction. Needs its packages torchsde, einops, comfy-kitchen and comfy-aimdo.
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

# Width, heads, blocks, channels of the axes of positions, width of the text, rows and columns of latents.
SIZES = (
    (32, 2, 2, (4, 6, 6), 24, 8, 12),
    (64, 4, 3, (4, 4, 8), 64, 7, 5),  # text as wide as the network, which then has no `text_proj`
    (96, 3, 1, (8, 12, 12), 40, 16, 4),
)


def main() -> None:
    given = arguments(__doc__ or "")
    start_comfyui(given)
    import comfy.model_base

    for seed in range(len(SIZES)):
        *_, text_width, rows, columns = SIZES[seed]
        base = _base(seed)
        tensors = adapter(base, "locon")
        assert tensors is not None
        texts = [torch.randn(1, length, text_width) for length in (7, 12)]
        noisy, sigma = torch.randn(2, 8, rows, columns), torch.tensor([0.3, 0.85])
        theirs = _theirs(_comfy(base, seed), noisy, sigma, texts)
        compare(f"base, seed {seed}", _ours(seed, {}, noisy, sigma, texts), theirs)
        for format in base.family.formats.written:
            network = _comfy(base, seed)
            with TemporaryDirectory() as folder:
                file = Path(folder) / "a.safetensors"
                layers = layer_shapes(base.denoiser)
                export(file, tensors, name="ernie", format=format, layers=layers)
                kind = comfy.model_base.ErnieImage
                count = patched(network, file, kind=kind, unet_config={})
                print(f"{format}: {count} of {len(load_file(file)) // 2} modules patch a weight")
            ours = _ours(seed, tensors, noisy, sigma, texts)
            compare(f"LoRA, {format}", ours, _theirs(network, noisy, sigma, texts))


def _base(seed: int) -> Base:
    width, heads, blocks, axes, text_width, _, _ = SIZES[seed]
    torch.manual_seed(seed)
    denoiser = diffusers.ErnieImageTransformer2DModel(
        hidden_size=width,
        num_attention_heads=heads,
        num_layers=blocks,
        ffn_hidden_size=2 * width,
        in_channels=8,
        out_channels=8,
        text_in_dim=text_width,
        rope_axes_dim=axes,
    ).requires_grad_(False)
    for parameter in denoiser.parameters():
        parameter.normal_(std=0.2)
    return Base(family=families.family("ernie"), denoiser=denoiser, texts={}, places={})


def _comfy(base: Base, seed: int) -> nn.Module:
    """Return ComfyUI's network with the weights of a base."""
    import comfy.ops
    from comfy.ldm.ernie.model import ErnieImageModel

    width, heads, blocks, axes, text_width, _, _ = SIZES[seed]
    network = ErnieImageModel(
        hidden_size=width,
        num_attention_heads=heads,
        num_layers=blocks,
        ffn_hidden_size=2 * width,
        in_channels=8,
        out_channels=8,
        text_in_dim=text_width,
        rope_axes_dim=axes,
        dtype=torch.float32,
        device="cpu",
        operations=comfy.ops.disable_weight_init,
    )
    network.load_state_dict(base.denoiser.state_dict(), strict=True)
    loaded: nn.Module = network.eval()
    return loaded


def _ours(
    seed: int, tensors: AdapterTensors, noisy: Tensor, sigma: Tensor, texts: list[Tensor]
) -> Tensor:
    """Return the family's prediction of a padded batch."""
    base = _base(seed)
    add_updates(tensors, base.denoiser)
    return batch_prediction(base.family, base.denoiser, noisy, sigma, texts)


def _theirs(network: Any, noisy: Tensor, sigma: Tensor, texts: list[Tensor]) -> Tensor:
    with torch.no_grad():
        rows = [
            network(noisy[n : n + 1], 1000 * sigma[n : n + 1], text) for n, text in enumerate(texts)
        ]
        return torch.cat(rows)


if __name__ == "__main__":
    main()
