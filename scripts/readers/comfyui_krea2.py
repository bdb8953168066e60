"""Whether ComfyUI's own network of Krea 2 predicts what the trainer's predicts, alone and with an exported LoRA.

`python -m scripts.readers.comfyui_krea2 --checkout DIR --commit SHA`: a narrow random network in both layouts, texts of
unequal length in one batch here and one by one there, and a random LoRA of every layer written in each format and
loaded by ComfyUI's key maps and patches. Printed is the largest difference relative to the largest prediction.
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

STATES, WIDTH = 12, 32
"""States of each token, and their width."""


def main() -> None:
    given = arguments(__doc__ or "")
    start_comfyui(given)
    import comfy.model_base

    base = _base()
    tensors = adapter(base, "locon")
    assert tensors is not None
    texts = [torch.randn(1, length, STATES * WIDTH) for length in (7, 12)]
    noisy, sigma = torch.randn(2, 16, 8, 12), torch.tensor([0.3, 0.85])
    compare(
        "base", _ours(base, {}, noisy, sigma, texts), _theirs(_comfy(base), noisy, sigma, texts)
    )
    layers = layer_shapes(base.denoiser)
    for format in base.family.formats.written:
        network = _comfy(base)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "a.safetensors"
            export(file, tensors, name="krea2", format=format, layers=layers)
            unet = {"layers": 2}
            count = patched(network, file, kind=comfy.model_base.Krea2, unet_config=unet)
            print(f"{format}: {count} of {len(tensors)} modules of the file patch a weight")
            assert len(load_file(file)) // len(tensors) in (2, 3)
        ours = _ours(base, tensors, noisy, sigma, texts)
        compare(f"LoRA, {format}", ours, _theirs(network, noisy, sigma, texts))


def _base(*, seed: int = 0) -> Base:
    """Return a narrow network; ComfyUI has two text blocks of each kind, heads and inner widths as here."""
    torch.manual_seed(seed)
    denoiser = diffusers.Krea2Transformer2DModel(
        num_layers=2,
        attention_head_dim=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=768,
        timestep_embed_dim=256,
        text_hidden_dim=WIDTH,
        num_text_layers=STATES,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=128,
    ).requires_grad_(False)
    for parameter in denoiser.parameters():
        parameter.normal_(std=0.2)
    return Base(family=families.family("krea2"), denoiser=denoiser, texts={}, places={})


def _comfy(base: Base) -> nn.Module:
    """Return ComfyUI's network with the weights of a base."""
    import comfy.ops
    from comfy.ldm.krea2.model import SingleStreamDiT

    network = SingleStreamDiT(
        features=256,
        heads=2,
        kvheads=1,
        layers=2,
        txtdim=WIDTH,
        txtheads=2,
        txtkvheads=2,
        txtlayers=STATES,
        dtype=torch.float32,
        device="cpu",
        operations=comfy.ops.disable_weight_init,
    )
    network.load_state_dict(original_names("krea2", base.denoiser.state_dict()), strict=True)
    loaded: nn.Module = network.eval()
    return loaded


def _ours(
    base: Base, tensors: AdapterTensors, noisy: Tensor, sigma: Tensor, texts: list[Tensor]
) -> Tensor:
    """Return the family's prediction of a padded batch."""
    network = _base().denoiser
    add_updates(tensors, network)
    return batch_prediction(base.family, network, noisy, sigma, texts)


def _theirs(network: Any, noisy: Tensor, sigma: Tensor, texts: list[Tensor]) -> Tensor:
    with torch.no_grad():
        rows = [network(noisy[n : n + 1], sigma[n : n + 1], text) for n, text in enumerate(texts)]
        return torch.cat(rows)


if __name__ == "__main__":
    main()
