"""Whether ComfyUI's own network of Lumina 2 predicts with an exported LoRA what the trainer's predicts.

`python -m scripts.readers.comfyui_lumina2 --checkout DIR --commit SHA`: a narrow random network in both layouts, a
random LoRA written as a training does and loaded by ComfyUI's key maps and patches; the largest difference of
the predictions, with and without the LoRA, relative to the largest prediction.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_trainer.lora.adapter import layer_shapes
from lora_trainer.lora.tensors import AdapterTensors
from scripts.readers.beside import add_updates, compare, padded, patched, start_comfyui
from scripts.readers.cases import adapter, arguments
from scripts.readers.networks import Base, base_of
from tests.fakes.adapters import export


def main() -> None:
    given = arguments(__doc__ or "")
    start_comfyui(given)
    base = base_of("lumina2")
    tensors = adapter(base, "locon")
    assert tensors is not None
    text, noisy, sigma = torch.randn(1, 7, 12), torch.randn(1, 4, 8, 8), torch.tensor([0.3])
    network = _comfy_network(base)
    compare("base", _ours(base, {}, noisy, sigma, text), _theirs(network, noisy, sigma, text))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "a.safetensors"
        layers = layer_shapes(base.denoiser)
        export(file, tensors, name="lumina2", format="comfyui", layers=layers)
        import comfy.model_base

        count = patched(network, file, kind=comfy.model_base.Lumina2, unet_config={})
        print(f"{count} of {len(load_file(file)) // 2} modules of the file patch a weight")
    compare("LoRA", _ours(base, tensors, noisy, sigma, text), _theirs(network, noisy, sigma, text))


def _comfy_network(base: Base) -> nn.Module:
    """Return ComfyUI's network with the weights of a base."""
    import comfy.ops
    from comfy.ldm.lumina.model import NextDiT

    config: Any = base.denoiser.config
    network = NextDiT(
        patch_size=config.patch_size,
        in_channels=config.in_channels,
        dim=config.hidden_size,
        n_layers=config.num_layers,
        n_refiner_layers=config.num_refiner_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_kv_heads,
        multiple_of=config.multiple_of,
        norm_eps=config.norm_eps,
        qk_norm=True,
        cap_feat_dim=config.cap_feat_dim,
        axes_dims=config.axes_dim_rope,
        axes_lens=config.axes_lens,
        dtype=torch.float32,
        device="cpu",
        operations=comfy.ops.disable_weight_init,
    )
    own, state = base.denoiser.state_dict(), dict[str, Tensor]()
    spelt = base.family.layer_names(dict.fromkeys(layer_shapes(base.denoiser), ())).layers
    names = {part: (name, parts) for name, parts in spelt.items() for part in parts}
    for key, tensor in own.items():
        module, _, end = key.rpartition(".")
        name, parts = names.get(module, (module, (module,)))
        if module == parts[0]:
            rows = [own[f"{part}.{end}"] for part in parts]
            state[f"{name}.{end}"] = torch.cat(rows) if len(rows) > 1 else tensor
    if hasattr(
        network, "norm_final"
    ):  # of the releases; no program uses it, and newer ones have none
        state["norm_final.weight"] = torch.ones(config.hidden_size)
    network.load_state_dict(state, strict=True)
    loaded: nn.Module = network.eval()
    return loaded


def _ours(
    base: Base, tensors: AdapterTensors, noisy: Tensor, sigma: Tensor, text: Tensor
) -> Tensor:
    """Return the family's prediction, with the update of each module added to its weight."""
    network = base_of(base.family.name).denoiser
    add_updates(tensors, network)
    with torch.no_grad():
        return base.family.predict(network.eval(), noisy, sigma * 1000, padded([text]))


def _theirs(network: Any, noisy: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    with torch.no_grad():
        prediction: Tensor = network(noisy, sigma, text, text.shape[1], attention_mask=None)
        return prediction


if __name__ == "__main__":
    main()
