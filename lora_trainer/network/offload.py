"""Runs a network on a device from host memory: each layer's weights are copied there for its forward call.

For networks that only run forward, such as text encoders during caching. The network stays on the CPU for
its callers: inputs and outputs are on the CPU. The results are those of the device.
"""

from __future__ import annotations

import torch
from accelerate.utils import send_to_device
from diffusers.hooks import apply_group_offloading
from torch import nn


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
        lambda _, args, kwargs: send_to_device((args, kwargs), device), with_kwargs=True
    )
    network.register_forward_hook(lambda _, args, output: send_to_device(output, "cpu"))
