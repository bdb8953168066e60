"""Cost of training on one sample: bytes, FLOPs and kernels, and the workload they belong to.

Values only, no torch. `base_costs.py` answers for any base, `trace.py` measures a network on `meta`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_trainer.config.declare import Checkpointing, Targets


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How one sample is trained; `element_bytes` is the size of the base's dtype.

    `micro_batch` samples go through the network together; some tensors that are views for one sample are
    copies for several. `wide_adapter`: the adapter reads fp32 copies of its inputs, as every kind but
    plain LoRA does.
    """

    height_px: int
    width_px: int
    element_bytes: int
    rank: int
    targets: Targets
    checkpointing: Checkpointing
    micro_batch: int = 1
    wide_adapter: bool = False


@dataclass(frozen=True, kw_only=True)
class SampleCost:
    """Cost of training on one sample; multiply all fields but `kernels` by the micro-batch.

    `saved_bytes` are alive between forward and backward; `adapter_saved_bytes` of them are a wide
    adapter's fp32 copies and rank-sized intermediates. `temporary_bytes` is the step's peak minus
    `saved_bytes`. `host_bytes` wait for backward in pinned host memory. `forward_bytes` is the peak of a
    pass without gradients, `conditioning_bytes` one prompt's text embedding in fp32.
    """

    saved_bytes: int
    adapter_saved_bytes: int
    temporary_bytes: int
    forward_bytes: int
    conditioning_bytes: int
    forward_flops: int
    step_flops: int
    kernels: int
    host_bytes: int = 0
