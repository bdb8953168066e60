"""Runs a network on a device from host memory: each layer's weights are copied there for its forward call.

For networks that only run forward, such as text encoders during caching. The network stays on the CPU for
its callers: inputs and outputs are on the CPU. The results are those of the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.hooks import apply_group_offloading
from torch import Tensor, nn


def offload(network: nn.Module, device: torch.device) -> None:
    """Let a network on the CPU compute on `device`, one layer's weights at a time; it cannot be trained."""
    apply_group_offloading(
        network,
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
    )
    # Code outside the layers, such as masks and positions, runs on the device of the inputs.
    network.register_forward_pre_hook(
        lambda _, args, kwargs: (_moved(args, device), _moved(kwargs, device)), with_kwargs=True
    )
    network.register_forward_hook(lambda _, args, output: _moved(output, torch.device("cpu")))


def _moved(value: Any, device: torch.device) -> Any:
    """Return tensors, and mappings, lists and tuples of them, on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        moved = {key: _moved(item, device) for key, item in value.items()}
        return type(value)(**moved) if hasattr(value, "to_tuple") else moved
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    return value
