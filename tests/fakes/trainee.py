"""A tiny denoiser with a random adapter and a fixed batch, for tests of how a step is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.families.base.facts import IMAGE_PLACES, BaseFacts, Conditioning
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.lora.adapter import Adapter, inject
from lora_trainer.network.block_swap import base_tensors, repeated_blocks
from lora_trainer.network.compiling import CompiledBlocks
from tests.fakes.family_bases import denoiser_of, facts_of, side_of, told_of

PROMPTS = ("one toy", "two words more")
LAYERS = 4
"""Blocks of the denoisers that have one list of them; some tiny bases have fewer."""
LAYERS_OF_TWO = 3
"""Blocks in either list of those that have two."""


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A family's denoiser in training; its batch has a sample for each of `PROMPTS`."""

    family: Family
    facts: BaseFacts
    denoiser: nn.Module
    adapter: Adapter
    noisy: Tensor
    timesteps: Tensor
    conditioning: Conditioning

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.adapter.parameters()

    def predict(self, rows: slice = slice(None)) -> Tensor:
        """Run the denoiser on these samples."""
        told = {name: tensor[rows] for name, tensor in self.conditioning.items()}
        return self.family.predict(self.denoiser, self.noisy[rows], self.timesteps[rows], told)

    def loss(self, rows: slice = slice(None)) -> Tensor:
        return self.predict(rows).square().mean()

    def gradients(self, *, micro_batch: int = len(PROMPTS)) -> list[Tensor]:
        """Return the loss of a step and the gradient of each parameter, summed over micro-batches."""
        losses = []
        for first in range(0, len(PROMPTS), micro_batch):
            losses.append(self.loss(slice(first, first + micro_batch)))
            losses[-1].backward()
        found = [torch.stack([loss.detach() for loss in losses])]
        for parameter in self.parameters:
            assert parameter.grad is not None
            found.append(parameter.grad)
            parameter.grad = None
        return found


def trainee(
    name: str, *, prepare: Callable[[nn.Module], None] = lambda denoiser: None, **settings: Any
) -> Trainee:
    """Build one; equal calls give equal bits. `prepare` works on the denoiser before the adapter."""
    family, facts = families.family(name), facts_of(name)
    denoiser = _denoiser(name)
    prepare(denoiser)
    adapter = inject(
        {DENOISER: denoiser},
        modules={DENOISER: family.lora_targets(denoiser, "transformer")},
        settings=AdapterSettings(**{"rank": 4, **settings}),
        alpha=2.0,
        seed=0,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter.parameters():  # so that every gradient depends on all others
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    side = side_of(facts) // facts.vae_factor
    shape = (len(PROMPTS), facts.latent_channels, side, side)
    flow = facts.release.prediction == "flow"
    return Trainee(
        family=family,
        facts=facts,
        denoiser=denoiser,
        adapter=adapter,
        noisy=torch.randn(shape, generator=generator),
        timesteps=torch.tensor([300.0, 800.0]) if flow else torch.tensor([300, 800]),
        conditioning=told_of(name, PROMPTS),
    )


def in_16_bits(at: Trainee) -> Trainee:
    """Return one whose base and inputs are bfloat16, as on most GPUs; the adapter stays float32."""
    trained = {id(parameter) for parameter in at.parameters}
    for parameter in at.denoiser.parameters():
        if id(parameter) not in trained:
            parameter.data = parameter.data.to(torch.bfloat16)
    conditioning = {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value
        for name, value in at.conditioning.items()
    }
    return replace(at, noisy=at.noisy.to(torch.bfloat16), conditioning=conditioning)


def with_references_in_text(at: Trainee) -> Trainee:
    """Return one whose samples have two references each, of unlike sizes, behind 3 and 9 tokens of their texts."""
    generator = torch.Generator().manual_seed(2)
    references = {
        f"reference_{number}": torch.randn(
            len(PROMPTS), at.facts.latent_channels, *size, generator=generator
        )
        for number, size in enumerate(((4, 2), (2, 6)))
    }
    places = torch.tensor([[3, 9]] * len(PROMPTS))
    return replace(at, conditioning={**at.conditioning, **references, IMAGE_PLACES: places})


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Say whether all are equal bit by bit."""
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def compiled_calls(blocks: CompiledBlocks) -> list[int]:
    """Return a list that grows by the number of a block with every call of its compiled code."""
    calls: list[int] = []

    def counted(number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: calls.append(number) or forward(*args, **kwargs)  # type: ignore[func-returns-value]  # None, hence `or`

    blocks._compiled = [counted(*pair) for pair in enumerate(blocks._compiled)]
    return calls


def block_sizes(network: nn.Module) -> list[int]:
    """Return the number of base weights in each repeated block; works on `meta` too."""
    blocks = repeated_blocks(network).values()
    return [sum(owner[name].numel() for owner, name in base_tensors(block)) for block in blocks]


def _denoiser(name: str) -> nn.Module:
    """Return the tiny base's own denoiser, or one like it of more blocks."""
    architecture = dict(facts_of(name).release.architecture)
    layers = LAYERS_OF_TWO if "num_single_layers" in architecture else LAYERS
    settings = architecture.keys() & {"num_layers", "num_single_layers", "n_layers"}
    deeper = dict.fromkeys(settings, layers)
    if not deeper:
        return denoiser_of(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        denoiser = (
            families.family(name).training_denoiser(architecture | deeper).requires_grad_(False)
        )
        # Gates and outputs of some networks start at zero, which no gradient passes.
        for weights in denoiser.parameters():
            if weights.dim() > 1 and not weights.any():
                nn.init.normal_(weights, std=weights[0].numel() ** -0.5)
    return denoiser
