"""Whether ComfyUI's own network of Lumina 2 predicts with an exported LoRA what the trainer's predicts.

`python -m scripts.readers.comfyui_lumina2 --checkout DIR --commit SHA`: a narrow random network in both layouts, a
random LoRA written as a training does and loaded by ComfyUI's key maps and patches; the largest difference of
the predictions, with and without the LoRA, relative to the largest prediction.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_trainer.lora.adapter import layer_shapes
from lora_trainer.lora.tensors import AdapterTensors, update
from scripts.readers.cases import adapter, arguments
from scripts.readers.networks import Base, base_of
from scripts.readers.stand_ins import stand_in
from tests.fakes.adapters import export


def main() -> None:
    given = arguments(__doc__ or "")
    stand_in("torchvision", "torchaudio", "kornia", "spandrel", "av", "aiohttp", "folder_paths")
    sys.path.insert(0, str(given.checkout))
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    base = base_of("lumina2")
    tensors = adapter(base, "locon")
    assert tensors is not None
    text, noisy, sigma = torch.randn(1, 7, 12), torch.randn(1, 4, 8, 8), torch.tensor([0.3])
    network = _comfy_network(base)
    print(f"ComfyUI at {given.commit}")
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
    # A norm of the releases that no program uses.
    state["norm_final.weight"] = torch.ones(config.hidden_size)
    network.load_state_dict(state, strict=True)
    loaded: nn.Module = network.eval()
    return loaded


def patched(network: nn.Module, file: Path, *, kind: Any, unet_config: Mapping[str, Any]) -> int:
    """Load a file as ComfyUI does and change the weights; return how many it changes.

    `kind` is ComfyUI's class of the model, which its key maps ask for.
    """
    import comfy.lora
    import comfy.lora_convert

    class Model(kind):  # type: ignore[misc]  # a class that is not known here
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.diffusion_model = network
            self.model_config = SimpleNamespace(unet_config=unet_config)

    model = Model()
    keys = comfy.lora.model_lora_keys_unet(model, {})
    patches = comfy.lora.load_lora(comfy.lora_convert.convert_lora(load_file(file)), keys)
    weights = dict(model.named_parameters())
    for key, patch in patches.items():
        entry = [(1.0, patch, 1.0, None, None)]
        with torch.no_grad():
            changed = comfy.lora.calculate_weight(entry, weights[key].clone(), key)
            weights[key].copy_(changed)
    return len(patches)


def _ours(
    base: Base, tensors: AdapterTensors, noisy: Tensor, sigma: Tensor, text: Tensor
) -> Tensor:
    """Return the family's prediction, with the update of each module added to its weight."""
    network = base_of(base.family.name).denoiser
    for key, module in tensors.items():
        weight = network.get_parameter(f"{key.partition('.')[2]}.weight")
        weight.add_(update(module, weight).reshape(weight.shape))
    conditioning = {"text": text, "text_mask": torch.ones(text.shape[:2], dtype=torch.long)}
    with torch.no_grad():
        return base.family.predict(network.eval(), noisy, sigma * 1000, conditioning)


def _theirs(network: Any, noisy: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    with torch.no_grad():
        prediction: Tensor = network(noisy, sigma, text, text.shape[1], attention_mask=None)
        return prediction


def compare(what: str, ours: Tensor, theirs: Tensor) -> None:
    error = float((ours - theirs).abs().max() / ours.abs().max())
    print(
        f"{what}: largest difference {error:.1e} of the largest prediction {ours.abs().max():.2f}"
    )


if __name__ == "__main__":
    main()
