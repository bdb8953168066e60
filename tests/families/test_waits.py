"""A pass through a network copies nothing from host memory and reads nothing back: the host would wait for the device.

The device is `meta`, which computes nothing: what is copied to it, and from where, is the same as on a GPU, and a
value that is read from it is an error.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lora_trainer import families
from lora_trainer.costs.trace import empty_conditioning
from lora_trainer.families.base.facts import IMAGE_PLACES, TEXT_LENGTHS
from lora_trainer.families.base.noise_levels import Level
from lora_trainer.families.base.references import with_references
from lora_trainer.training.dataloader import Sample
from lora_trainer.training.loss import collate
from tests.fakes.family_bases import denoiser_of, facts_of

CPU, META = torch.device("cpu"), torch.device("meta")
FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


class _Made(TorchFunctionMode):
    """Notes tensors that are made of Python's numbers on the device: torch makes them in host memory and copies."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in FROM_NUMBERS and result.device != CPU:
            self.found.append(f"{function.__name__} {tuple(result.shape)}")
        if function in INDEXING and args[0].device != CPU:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.found += [f"index {each}" for each in index if isinstance(each, list)]
        return result


class Copies(TorchDispatchMode):
    """Notes what moves between host memory and the device; single numbers go with a kernel's start."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._made = _Made(self.found)

    def __enter__(self) -> Self:
        super().__enter__()
        self._made.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._made.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
        on_host = [tensor for tensor in tensors if tensor.device == CPU]
        is_copy = "copy" in str(function)
        moved = [tensor for tensor in on_host if is_copy or tensor.dim()]
        if moved and len(on_host) < len(tensors):
            self.found.append(f"{function} {[tuple(tensor.shape) for tensor in moved]}")
        return result


@cache
def on_meta(name: str) -> nn.Module:
    return denoiser_of(name).to(META)


def sample_of(name: str, *, text_tokens: int) -> Sample:
    """Return a sample of zeros whose text has this many tokens."""
    family, facts = families.family(name), facts_of(name)
    prompt = family.text.shapes(facts.release.architecture, text_tokens=text_tokens)
    traced = empty_conditioning(family, facts, prompt=prompt, dtype=torch.float32)
    latents = torch.zeros(facts.latent_channels, 16, 16)
    return Sample(
        sample="an image",
        latents=latents,
        noise=latents,
        level=Level(timestep=500, alpha=0.5, sigma=0.5, signal=None),
        weight=1.0,
        conditioning={
            key: torch.ones_like(told, device=CPU)
            for key, told in traced.items()
            if key != TEXT_LENGTHS
        },
    )


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # diffusers' own
@pytest.mark.parametrize("shares", [(1,), (2, 1)], ids=["one", "two of unlike texts"])
@pytest.mark.parametrize("name", families.NAMES)
def test_a_pass_copies_nothing_and_reads_nothing(name: str, shares: tuple[int, ...]) -> None:
    tokens = facts_of(name).text_tokens
    samples = [sample_of(name, text_tokens=tokens // share) for share in shares]
    batch = collate(samples, device=META, precision=torch.float32).on(META)
    inputs = on_meta(name), batch.latents, batch.timesteps, batch.conditioning
    family = families.family(name)
    with torch.no_grad():
        family.predict(*inputs)  # the first pass may fill tables
        with Copies() as copies:
            family.predict(*inputs)
    assert copies.found == []


def editing_in_sequence() -> list[str]:
    """Return the families whose references are tokens; Kontext and Qwen-Image-Edit have the networks of these."""
    return [name for name in families.editing() if name not in {"sd15", "sd2", "sdxl"}]


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # diffusers' own
@pytest.mark.parametrize("name", editing_in_sequence())
def test_a_pass_with_references_copies_nothing_and_reads_nothing(name: str) -> None:
    family, facts = families.family(name), facts_of(name)
    reads = next(each.references for each in family.releases.values() if each.references)
    sizes = ((8, 4), (4, 12))[: reads.most]
    latents = [torch.zeros(facts.latent_channels, *size) for size in sizes]
    places = torch.tensor([[3, 9][: len(sizes)]])
    samples = [
        replace(
            sample,
            conditioning={
                **sample.conditioning,
                **({IMAGE_PLACES: places} if reads.in_text else {}),
                **with_references(latents),
            },
        )
        for sample in (sample_of(name, text_tokens=facts.text_tokens // share) for share in (2, 1))
    ]
    batch = collate(samples, device=META, precision=torch.float32).on(META)
    inputs = with_reference_layers(name), batch.latents, batch.timesteps, batch.conditioning
    with torch.no_grad():
        family.predict(*inputs)
        with Copies() as copies:
            family.predict(*inputs)
    assert copies.found == []


def with_reference_layers(name: str) -> nn.Module:
    facts = facts_of(name).for_references()
    if not facts.has_reference_layers:
        return on_meta(name)
    with META:
        return families.family(name).training_denoiser(facts.release.architecture, references=True)
