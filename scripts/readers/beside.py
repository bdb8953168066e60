"""What comparisons with other programs' networks share: their start, their LoRA files, how far apart two answers are.

Used by the scripts beside this one that run ComfyUI's or SimpleTuner's networks on the weights of a narrow random base.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lora_trainer.families.base.family import Family
from lora_trainer.families.base.references import with_references
from lora_trainer.lora.tensors import AdapterTensors, update
from scripts.readers.stand_ins import stand_in
from tests.fakes.tiny_base import enliven

# Packages that ComfyUI imports and these networks do not use.
_UNUSED = (
    *("torchvision", "torchaudio", "kornia", "spandrel", "av", "aiohttp", "folder_paths"),
    "scipy",
)


def start_comfyui(given: Namespace, *, unused: Sequence[str] = _UNUSED) -> None:
    """Make the checkout's modules importable, for a processor, and say which commit it is."""
    stand_in(*unused)
    sys.path.insert(0, str(given.checkout))
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    print(f"ComfyUI at {given.commit}")


def start_simpletuner(given: Namespace) -> None:
    """Make the modules of its unpacked wheel importable, and say which version it is."""
    sys.path.insert(0, str(given.checkout))
    print(f"SimpleTuner at {given.commit}")


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
        # A layer that is some rows of a matrix there has these behind its name, and perhaps a function of the weight.
        name, offset, function = (key, None, None) if isinstance(key, str) else (*key, None)[:3]
        entry = [(1.0, patch, 1.0, offset, function)]
        with torch.no_grad():
            changed = comfy.lora.calculate_weight(entry, weights[name].clone(), name)
            weights[name].copy_(changed)
    return len(patches)


def add_updates(tensors: AdapterTensors, network: nn.Module) -> None:
    """Add the update of each module of an adapter to its weight."""
    for key, module in tensors.items():
        weight = network.get_parameter(f"{key.partition('.')[2]}.weight")
        weight.add_(update(module, weight).reshape(weight.shape))


def padded(texts: Sequence[Tensor]) -> Mapping[str, Tensor]:
    """Return texts [1, L, C] of several lengths as one batch, as the trainer's families get it."""
    masks = [torch.ones(text.shape[1], dtype=torch.long) for text in texts]
    return {
        "text": pad_sequence([text[0] for text in texts], batch_first=True),
        "text_mask": pad_sequence(masks, batch_first=True),
    }


def batch_prediction(
    family: Family,
    network: nn.Module,
    noisy: Tensor,
    sigma: Tensor,
    texts: Sequence[Tensor],
    references: Sequence[Tensor] = (),
) -> Tensor:
    """Return the family's prediction of a batch whose texts [1, L, C] are padded, without gradients.

    `references` are latents [B, C, h, w].
    """
    names = with_references([each[0] for each in references])
    told = {**padded(texts), **dict(zip(names, references, strict=True))}
    with torch.no_grad():
        return family.predict(network.eval(), noisy, 1000 * sigma, told)


def training_network(
    family: Family, sizes: Mapping[str, Any], *, seed: int, references: bool = False
) -> nn.Module:
    """Return a narrow random network as a training has it, for `references` or for texts alone."""
    torch.manual_seed(seed)
    architecture = {"_class_name": family.traits.class_name, **sizes}
    whole = family.training_denoiser(architecture, references=references)
    network = whole.eval().requires_grad_(False)
    enliven(network)
    return network


def compare(what: str, ours: Tensor, theirs: Tensor) -> None:
    error = float((ours - theirs).abs().max() / ours.abs().max())
    print(
        f"{what}: largest difference {error:.1e} of the largest prediction {ours.abs().max():.2f}"
    )
