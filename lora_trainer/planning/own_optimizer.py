"""An optimizer that is given as `module:Class`: made from its options, tried for a step, its state measured.

Importing this module imports no torch; its functions do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from lora_trainer.common.errors import LoraTrainError, RequestError, first_line
from lora_trainer.common.imports import imported

KEY, OPTIONS = "optimizer.name", "optimizer.options"


def own_optimizer(
    path: str, groups: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> Any:
    """Return the optimizer that `path` names for these parameter groups.

    Raises MachineError when its module cannot be imported, RequestError when it is not an optimizer of torch or
    cannot be made from the arguments.
    """
    import torch

    make = imported(path, key=KEY)
    try:
        optimizer = make([dict(group) for group in groups], **arguments)
    except LoraTrainError:
        raise
    except Exception as error:  # noqa: BLE001 - code that is not ours, with options that the user typed
        raise RequestError(
            f"{KEY}={path} cannot be made with {dict(arguments)}: {first_line(error)}",
            fix=f"correct {OPTIONS}, which are the arguments besides the learning rate",
        ) from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RequestError(
            f"{KEY}={path} is a {type(optimizer).__name__} and not an optimizer of torch",
            fix="name a class that is made from parameter groups and a learning rate",
        )
    return optimizer


def measured_states(path: str, options: Mapping[str, Any], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of each state that the optimizer keeps for a tensor of this shape, in fp32."""
    return _measured(path, json.dumps(dict(options), sort_keys=True), tuple(shape))


@cache
def _measured(path: str, options: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    import torch

    parameter = torch.nn.Parameter(torch.ones(shape))
    parameter.grad = torch.full(shape, 1e-3)
    arguments = {"lr": 1e-4, **json.loads(options)}
    optimizer = own_optimizer(path, [{"params": [parameter]}], arguments)
    try:
        optimizer.step()
    except Exception as error:  # noqa: BLE001 - code that is not ours
        raise RequestError(
            f"{KEY}={path} cannot take a step: {first_line(error)}",
            fix="use an optimizer whose step() needs nothing but gradients, or correct " + OPTIONS,
        ) from None
    tensors = (value for value in optimizer.state[parameter].values() if torch.is_tensor(value))
    # Single numbers, such as the count of steps, are left out as everywhere.
    return tuple(value.nbytes for value in tensors if value.dim())
