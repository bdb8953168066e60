"""Chroma against diffusers: what padding may not do, facts, losses, images, adapters, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lora_trainer.families.base import BaseFacts, Conditioning, Layout, TextEncoder
from lora_trainer.families.chroma import FAMILY
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.bases.chroma import write_base
from tests.fakes.bases.flux import WIDTH
from tests.fakes.low_rank import draw

CPU = torch.device("cpu")
SHORT, LONG = "a red square", "a photo of the blue one, on the left"
AT = torch.tensor([400.0])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("chroma") / "base")


@pytest.fixture(scope="module")
def facts(base: Path) -> BaseFacts:
    return FAMILY.facts(Layout(folder=base), source="tiny")


@pytest.fixture(scope="module")
def encoder(facts: BaseFacts) -> TextEncoder:
    return FAMILY.load_text_encoder(facts, dtype=torch.float32, device=CPU)


@pytest.fixture
def denoiser(facts: BaseFacts) -> nn.Module:
    return FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)


# ---- text, which ends where it ends


def test_a_text_longer_than_its_mask_is_cut_there(
    denoiser: nn.Module, encoder: TextEncoder
) -> None:
    """A batch of one that was padded for another batch; what lies behind the mask is not zero."""
    alone = encoder.encode_prompts([SHORT])
    longer = {
        "text": torch.cat([alone["text"], draw(1, 7, WIDTH)], dim=1),
        "text_mask": F.pad(alone["text_mask"], (0, 7)),
    }
    noisy = draw(1, 16, 4, 6)
    assert torch.equal(
        FAMILY.predict(denoiser, noisy, AT, longer), FAMILY.predict(denoiser, noisy, AT, alone)
    )


def test_gradient_checkpointing_changes_no_loss_of_a_padded_batch(
    facts: BaseFacts, encoder: TextEncoder
) -> None:
    """diffusers 0.42.1 forgets the mask of single blocks under checkpointing."""
    denoiser: Any = FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)
    told = encoder.encode_prompts([SHORT, LONG])
    noisy = draw(2, 16, 4, 6).requires_grad_()
    times = torch.tensor([300.0, 600.0])
    plain = FAMILY.predict(denoiser, noisy, times, told)
    denoiser.enable_gradient_checkpointing()
    denoiser.train()
    again = FAMILY.predict(denoiser, noisy, times, told)
    assert torch.equal(again, plain)


# ---- what diffusers computes


def masked_velocity(
    denoiser: nn.Module, noisy: Tensor, sigma: Tensor, told: Conditioning
) -> Tensor:
    """Return the raw network's prediction with a mask over padded text, by another packing."""
    rows, columns = noisy.shape[-2] // 2, noisy.shape[-1] // 2
    places = [[0.0, row, column] for row in range(rows) for column in range(columns)]
    tokens = F.pixel_unshuffle(noisy, 2).flatten(2).transpose(1, 2)
    text = F.pad(told["text"], (0, 0, 0, 5), value=3.0)
    mask = F.pad(told["text_mask"], (0, 5)).bool()
    velocity = denoiser(
        hidden_states=tokens,
        timestep=sigma,
        encoder_hidden_states=text,
        txt_ids=torch.zeros(text.shape[1], 3),
        img_ids=torch.tensor(places),
        attention_mask=F.pad(mask, (0, rows * columns), value=True),
        return_dict=False,
    )[0]
    return F.pixel_shuffle(velocity.transpose(1, 2).unflatten(2, (rows, columns)), 2)


def test_the_loss_is_the_flow_matching_loss_of_the_masked_network(
    denoiser: nn.Module, encoder: TextEncoder
) -> None:
    told = encoder.encode_prompts([SHORT, LONG])
    latents, noise = draw(2, 16, 6, 10), draw(2, 16, 6, 10, seed=1)
    sigma = torch.tensor([0.2, 0.85])
    noisy = add_noise(latents, noise, 1 - sigma, sigma)
    predicted = FAMILY.predict(denoiser, noisy, 1000 * sigma, told)
    losses = sample_losses(predicted, target(latents, noise, 1 - sigma, sigma, "flow"))

    level = sigma[:, None, None, None]
    velocity = masked_velocity(denoiser, (1 - level) * latents + level * noise, sigma, told)
    expected = ((velocity - (noise - latents)) ** 2).reshape(2, -1).mean(1)
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=0)
