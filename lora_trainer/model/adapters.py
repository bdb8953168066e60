"""The LoRA (Hu et al. 2021, arXiv 2106.09685) on a frozen denoiser, behind a seam of named tensor pairs.

peft does the injection and the forward pass; nothing outside this module knows that. Masters are
float32 whatever the base's dtype. Each pair is initialised from its own counter-based generator, so
the adapter depends on (seed, module name) and not on what else is adapted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from lora_trainer.errors import RequestError
from lora_trainer.output.export import LoraPair
from lora_trainer.randomness import Stream, draw_seed

_NAME = "default"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The trainable pairs by module name; `alpha / rank` scales the update."""

    pairs: Mapping[str, tuple[nn.Parameter, nn.Parameter]]
    rank: int
    alpha: float

    def parameters(self) -> list[nn.Parameter]:
        """Return down, up of every module in module order: the optimizer's order."""
        return [parameter for pair in self.pairs.values() for parameter in pair]

    def tensors(self) -> dict[str, LoraPair]:
        """Return the live float32 pairs, detached, on their device."""
        return {
            name: LoraPair(down=down.detach(), up=up.detach())
            for name, (down, up) in self.pairs.items()
        }

    def state(self) -> dict[str, Tensor]:
        """Return {"module.down" | "module.up": tensor} for a resume state."""
        return {
            f"{name}.{side}": parameter.detach()
            for name, pair in self.pairs.items()
            for side, parameter in zip(("down", "up"), pair, strict=True)
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy a resume state in; raises RequestError when it belongs to another adapter."""
        own = self.state()
        if state.keys() != own.keys() or any(state[name].shape != own[name].shape for name in own):
            raise RequestError(
                "the saved state belongs to an adapter of another rank or other layers",
                fix="resume with the run's own adapter settings, or start a new run",
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])

    @contextmanager
    def rounded(self, dtype: torch.dtype) -> Iterator[None]:
        """Hold the values an export in `dtype` holds while the block runs, then the exact ones again."""
        parameters = self.parameters()
        exact = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(parameter.to(dtype))
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(parameters, exact, strict=True):
                    parameter.copy_(value)


def inject(
    denoiser: nn.Module, *, modules: Sequence[str], rank: int, alpha: float, seed: int
) -> Adapter:
    """Put a LoRA pair on each named module and return the pairs; the update starts at zero."""
    if not modules:
        raise RequestError(
            "no layer of this base matches adapter.targets", fix="choose other adapter.targets"
        )
    # init_lora_weights=False leaves peft's own draw from the global generator; ours replaces it below.
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # annotated int, used as a float
        target_modules=list(modules),
        init_lora_weights=False,
    )
    inject_adapter_in_model(config, denoiser, adapter_name=_NAME)
    pairs = {}
    for name in modules:
        layer = denoiser.get_submodule(name)
        assert isinstance(layer, LoraLayer), f"peft did not adapt {name}"
        down, up = layer.lora_A[_NAME].float().weight, layer.lora_B[_NAME].float().weight
        assert isinstance(down, nn.Parameter) and isinstance(up, nn.Parameter)
        _initialise(name, down, up, seed)
        pairs[name] = (down, up)
    return Adapter(pairs=pairs, rank=rank, alpha=alpha)


def _initialise(name: str, down: nn.Parameter, up: nn.Parameter, seed: int) -> None:
    generator = torch.Generator().manual_seed(draw_seed(seed, Stream.ADAPTER_INIT, name))
    with torch.no_grad():
        values = torch.empty(down.shape, dtype=torch.float32)
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        down.copy_(values)
        up.zero_()
