"""Whether the programs that write a kind make the same of its files and of what `convert` writes for them.

`python -m scripts.readers.own_code --checkout DIR --commit SHA [--family NAME]` compares, for each file of
tests/lora_files with rotations or IA3, and peft's with DoRA, the update of two layers by the original tensors,
by the converted ones and by the kind's formula. Rotations of inputs are computed by the checkout, of OneTrainer;
those of outputs by sd-scripts, beside it as `sd-scripts`, or lycoris-lora from the package index, which computes
IA3 too; DoRA by peft. In float64: their casts to float32 are switched off, as 1e-5 of an update is 1e-9 of a
weight.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.common.errors import LoraTrainError
from lora_trainer.tools.adapters import AdapterTarget, convert
from scripts.readers.cases import TOLERANCE, arguments
from scripts.readers.stand_ins import stand_in
from tests.lora_files.trainers import CASES, Case, build

KINDS = ("ia3", "oft", "oft_in")


def layer_of(weight: Tensor) -> nn.Module:
    """Return a layer with this weight, float64."""
    if weight.dim() == 2:
        layer: Any = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    else:
        layer = nn.Conv2d(weight.shape[1], weight.shape[0], tuple(weight.shape[2:]), bias=False)
    layer.weight.data = weight
    return layer


def dora_by_peft(tensors: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    """Return the change of a weight that peft merges; alpha is the rank where the file states none."""
    config = LoraConfig(r=len(tensors["lora_A.weight"]), use_dora=True, target_modules=["0"])
    config.lora_alpha = config.r
    model: Any = get_peft_model(nn.Sequential(layer_of(weight)), config).double()
    layer = model.base_model.model[0]
    layer.lora_A["default"].weight.data = tensors["lora_A.weight"].double()
    layer.lora_B["default"].weight.data = tensors["lora_B.weight"].double()
    magnitude = layer.lora_magnitude_vector["default"].weight
    ends = ("lora_magnitude_vector", "lora_magnitude_vector.weight")  # diffusers', peft's
    values = next(tensors[end] for end in ends if end in tensors)
    magnitude.data = values.double().reshape(magnitude.shape)
    merged: Tensor = model.merge_and_unload()[0].weight
    return merged - weight


def update(kind: str, tensors: Mapping[str, Tensor], weight: Tensor, *, by: str) -> Tensor:
    """Return the change of a weight [out, in, ...] by the code of the program that writes the kind."""
    if kind == "lora":
        return dora_by_peft(tensors, weight)
    if kind == "oft_in":
        from modules.module.oft_utils import OFTRotationModule

        skew = tensors["oft_R.weight"].double()
        size = round((1 + math.sqrt(1 + 8 * skew.shape[1])) / 2)
        scaled, shared = "oft_R.scaled_oft" in tensors, skew.shape[0] == 1
        matrix = weight.flatten(1)
        rotation = OFTRotationModule(
            *skew.shape, size, matrix.shape[1], block_share=shared, oft_scaled=scaled
        ).double()
        rotation.weight.data = skew
        if weight.dim() > 2:  # of convolutions it turns the rows of the weight
            return (rotation(matrix) - matrix).reshape(weight.shape)
        inputs = torch.eye(matrix.shape[1], dtype=torch.float64)
        return nn.functional.linear(rotation(inputs), matrix).T - matrix
    if kind == "oft" and by == "sd-scripts":
        from networks.oft import OFTModule

        blocks = tensors["oft_blocks"].double()
        alpha = float(tensors["alpha"])
        turning = OFTModule("layer", layer_of(weight), dim=len(blocks), alpha=alpha).double()
        turning.oft_blocks.data, turning.I = blocks, turning.I.double()
        grouped = weight.reshape(*blocks.shape[:2], -1)
        turned = torch.einsum("k n m, k n ... -> k m ...", turning.get_weight(1.0), grouped)
        return turned.reshape(weight.shape) - weight
    from lycoris.modules import DiagOFTModule, IA3Module

    if kind == "oft":
        blocks, rescale = tensors["oft_blocks"].double(), tensors.get("rescale")
        module = DiagOFTModule(
            "layer",
            layer_of(weight),
            lora_dim=blocks.shape[1],
            constraint=float(tensors["alpha"]),
            rescaled=rescale is not None,
        ).double()
        module.block_num, module.block_size = blocks.shape[:2]  # its own has the smaller side first
        module.oft_blocks.data = blocks
        if rescale is not None:
            module.rescale.copy_(rescale.double())
    else:
        on_input = bool(tensors["on_input"])
        module = IA3Module("layer", layer_of(weight), train_on_input=on_input).double()
        module.weight.copy_(tensors["weight"])
    merged: Tensor = module.get_merged_weight(1.0)[0]
    return merged.reshape(weight.shape) - weight


def of_module(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors of one layer of a file by the ends of their keys."""
    return {
        key.removeprefix(f"{prefix}."): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{prefix}.")
    }


def kinds_of(case: Case) -> tuple[str, ...]:
    """Return the kinds of a file that are compared: of peft's, which no other program wrote, DoRA."""
    return ("lora",) if case.name.startswith("peft") and "DoRA" in case.name else KINDS


def outcome(case: Case, folder: Path) -> str:
    """Return how far the updates of one file are apart in all formats, in words."""
    file, output = folder / "a.safetensors", folder / "b.safetensors"
    expected = {
        key: each
        for key, each in build(case, file, most=2).items()
        if key.startswith("denoiser.") and each.written.kind in kinds_of(case)
    }
    spelt = {
        f"{part.component}.{name}": part.spell(layer.name)
        for part in case.parts
        for layer in part.layers
        for name, _ in layer.parts
    }
    original = load_file(file)
    words = []
    by = case.name.partition(" ")[0]
    first = {
        key: update(
            each.written.kind, of_module(original, spelt[key]), each.base_weight.double(), by=by
        )[each.rows]
        for key, each in expected.items()
    }
    formula = {key: each.delta for key, each in expected.items()}
    words.append(f"original {_compared(first, formula)}")
    for format in families.family(case.family).formats.written:
        try:
            target = AdapterTarget(path=output, format=format, precision="fp32", force=True)
            convert(file, target)
        except LoraTrainError:
            continue
        if kinds_of(case) == ("lora",) and format != "diffusers":
            continue  # peft reads no other names
        tensors = load_file(output)
        second = {}
        for key, each in expected.items():
            layer = key.partition(".")[2]
            name = families.family(case.family).lora_key_name(format, "denoiser", layer)
            module = of_module(tensors, name)
            rows = each.base_weight[each.rows].double()
            second[key] = update(each.written.kind, module, rows, by="LyCORIS")
        words.append(f"{format} to the original {_compared(second, first)}")
    return "; ".join(words)


def _compared(read: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    worst = max(
        float((read[key].reshape(each.shape) - each).norm() / each.norm())
        for key, each in wanted.items()
    )
    return f"{'equal' if worst <= TOLERANCE else 'OFF'} {worst:.0e}"


def main() -> None:
    """Print a line for every file of these kinds."""
    options = arguments(__doc__ or "")
    sys.path[:0] = [str(options.checkout), str(options.checkout.parent / "sd-scripts")]
    stand_in("torchvision", "torchvision.transforms")
    torch.set_grad_enabled(False)
    torch.Tensor.float = lambda tensor: tensor  # type: ignore[method-assign] # the cast
    print(f"OneTrainer at {options.commit}, lycoris-lora as installed")
    for case in CASES:
        if case.refused or (options.family and case.family not in options.family):
            continue
        if "BOFT" in case.name:  # ComfyUI reads it
            continue
        with TemporaryDirectory() as folder:
            kinds = {each.written.kind for each in build(case, Path(folder) / "a", most=1).values()}
            if kinds & set(kinds_of(case)):
                print(f"{case.name}: {outcome(case, Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
