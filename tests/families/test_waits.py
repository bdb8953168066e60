"""A pass through a network copies nothing from host memory: the host would wait for the device until it is there.

The device is `meta`, which computes nothing: what is copied to it, and from where, is the same as on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lora_trainer import families
from lora_trainer.costs.trace import empty_conditioning
from tests.fakes.family_bases import denoiser_of, facts_of

META = torch.device("meta")


class Copies(TorchDispatchMode):
    """Notes the shapes of what moves between host memory and the device; single numbers go with a kernel's start."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[tuple[str, tuple[int, ...]]]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = str(function)
        if "copy" in name and isinstance(result, Tensor):
            read = [each for each in args if isinstance(each, Tensor)]
            if any(each.device != result.device for each in read):
                self.found.append((name, tuple(result.shape)))
        return result


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # diffusers' own
@pytest.mark.parametrize("name", families.NAMES)
def test_a_pass_copies_nothing_from_host_memory(name: str) -> None:
    family, facts = families.family(name), facts_of(name)
    denoiser = denoiser_of(name).to(META)
    prompt = family.text.shapes(facts.release.architecture, text_tokens=facts.text_tokens)
    conditioning = empty_conditioning(family, facts, prompt=prompt, dtype=torch.float32)
    noisy = torch.empty(1, facts.latent_channels, 16, 16, device=META)
    timesteps = torch.empty(1, device=META)
    with torch.no_grad():
        family.predict(denoiser, noisy, timesteps, conditioning)  # the first pass may fill tables
        with Copies() as copies:
            family.predict(denoiser, noisy, timesteps, conditioning)
    assert copies.found == []
