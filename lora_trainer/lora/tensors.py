"""An adapter as plain tensors, whatever its kind: training hands them to exports, tools read them from files.

Names are those of LyCORIS (Yeh et al. 2023, arXiv 2309.14859), which ComfyUI and Forge read, without
their prefixes. All mathematics of an adapter's change to a weight is `update`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lora_trainer.config.declare import Precision
from lora_trainer.lora.adapter_size import ModuleUpdate, rotated_size

DTYPES: Mapping[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


ModuleTensors = ModuleUpdate[Tensor]
# By "component.module", such as "denoiser.mid_block.attentions.0.proj_in" or "text_encoder.encoder....".
AdapterTensors = Mapping[str, ModuleTensors]


def split_key(key: str) -> tuple[str, str]:
    """Return (component, module) of a key of `AdapterTensors`."""
    component, _, module = key.partition(".")
    return component, module


def update(module: ModuleTensors, weight: Tensor | None = None) -> Tensor:
    """Return the update that the module adds to a weight, [out, in, ...], float32 or float64 if a tensor is.

    Without `weight` the kernel of a convolution may come out flattened ([out, in x kernel]). Raises
    ValueError when the update needs the weight and none is given.
    """
    if module.needs_weight and weight is None:
        raise ValueError(f"the update of {module.kind} depends on the weight it changes")
    # float32 at least: half precision would round the update itself.
    values = (*module.tensors.values(), *(() if weight is None else (weight,)))
    double = any(tensor.dtype == torch.float64 for tensor in values)
    dtype = torch.float64 if double else torch.float32
    tensors = {name: tensor.to(dtype) for name, tensor in module.tensors.items()}
    weight = None if weight is None else weight.to(dtype)
    change = _change(module, tensors, weight)
    if module.rows is not None:
        change = change[slice(*module.rows)]
    change = change if weight is None else change.reshape(weight.shape)
    if not module.dora:
        return change
    assert weight is not None
    changed = weight + change
    name, axis = ("magnitude", 0) if "magnitude" in tensors else ("input_magnitude", 1)
    norms = torch.linalg.vector_norm(changed.transpose(0, axis).flatten(1), dim=1)
    return _along(axis, tensors[name].reshape(-1) / norms, changed) * changed - weight


def _change(module: ModuleTensors, tensors: Mapping[str, Tensor], weight: Tensor | None) -> Tensor:
    """Return the update without DoRA."""
    match module.kind:
        case "lora":
            return low_rank(tensors["down"], tensors["up"]) * module.scale
        case "loha":
            first = tensors["w1_a"] @ tensors["w1_b"]
            return first * (tensors["w2_a"] @ tensors["w2_b"]) * module.scale
        case "lokr":
            first, second = _factor(tensors, "w1"), _factor(tensors, "w2")
            shaped = first.reshape(*first.shape, *(1,) * (second.dim() - 2))
            return torch.kron(shaped, second.contiguous()) * module.scale
        case "full" | "norm":
            return tensors["difference"]
    assert weight is not None
    match module.kind:
        case "oft":
            matrices = rotation(tensors["blocks"])
            if matrices.dim() == 4:
                turned = butterfly(matrices, weight)
            else:  # each group of outputs by the transpose of its matrix, as LyCORIS and ComfyUI read it
                grouped = weight.reshape(*matrices.shape[:2], -1)
                turned = (matrices.mT @ grouped).reshape(weight.shape)
            if "rescale" in tensors:
                turned = _along(0, tensors["rescale"], turned) * turned
            return turned - weight
        case "oft_in":
            return _rotate_inputs(tensors["skew"], weight) - weight
        case "ia3":
            name, axis = ("by_output", 0) if "by_output" in tensors else ("by_input", 1)
            return _along(axis, tensors[name], weight) * weight
    # glora
    turned = torch.einsum("oi...,ij->oj...", weight, tensors["a1"] @ tensors["a2"])
    added = low_rank(tensors["b2"], tensors["b1"]).reshape(weight.shape)
    return (turned + added) * module.scale


def low_rank(down: Tensor, up: Tensor) -> Tensor:
    """Return up x down, [out, in, ...], of `down` [r, in, ...] and `up` [out, r(, 1, 1)]."""
    return (up.flatten(1) @ down.flatten(1)).reshape(up.shape[0], *down.shape[1:])


def rotation(blocks: Tensor) -> Tensor:
    """Return the Cayley transform (I + Q) (I - Q)^-1, Q = blocks - blocks^T; zero blocks: exactly I.

    Qiu et al. 2023, arXiv 2306.07280, section 3.4; [count, size, size].
    """
    skew = blocks - blocks.mT
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    # I - Q of a skew Q can always be inverted; `solve` would wait for the device to check that.
    turned: Tensor = torch.linalg.solve_ex(
        identity - skew, identity + skew
    ).result  # the factors commute
    return turned


def butterfly(matrices: Tensor, weight: Tensor) -> Tensor:
    """Turn groups of output channels of `weight` [out, ...] in rounds, channels ever farther apart.

    `matrices` [rounds, count, size, size]. BOFT (Liu et al. 2024, arXiv 2311.06243) in LyCORIS's order.
    """
    turned = weight.flatten(1)
    for number, blocks in enumerate(matrices):
        stride = 2**number * blocks.shape[-1] // 2
        pairs = turned.unflatten(0, (-1, 2, stride)).transpose(1, 2)
        mixed = blocks @ pairs.reshape(*blocks.shape[:2], -1)
        turned = mixed.reshape(pairs.shape).transpose(1, 2).reshape(turned.shape)
    return turned.reshape(weight.shape)


def _rotate_inputs(skew: Tensor, weight: Tensor) -> Tensor:
    """Return `weight` [out, in, ...] with groups of inputs turned; one group's rotation may serve all.

    As OneTrainer and peft compute it: four terms of the series of the Cayley transform, the inputs
    of a linear layer turned before it, the kernels of a convolution turned themselves.
    """
    size = rotated_size(skew.shape[1])
    upper = skew.new_zeros(skew.shape[0], size, size)
    rows, columns = torch.triu_indices(size, size, 1)
    upper[:, rows, columns] = skew
    turn = upper - upper.mT
    squared = turn @ turn
    turned = torch.eye(size, dtype=skew.dtype) + 2 * (turn + squared + squared @ turn)
    turned = turned + squared @ squared
    grouped = weight.reshape(weight.shape[0], -1, 1, size)
    matrix = turned.mT if weight.dim() == 2 else turned
    return (grouped @ matrix).reshape(weight.shape)


def _along(axis: int, values: Tensor, like: Tensor) -> Tensor:
    """Shape [out] (axis 0) or [in] (1) so that it multiplies a weight [out, in, ...] along that axis."""
    return values.reshape(-1, *(1,) * (like.dim() - 1 - axis))


def _factor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a factor of a lokr, full or as the product of two; a kernel may be unflattened."""
    if name in tensors:
        return tensors[name]
    return low_rank(tensors[f"{name}_b"], tensors[f"{name}_a"])
