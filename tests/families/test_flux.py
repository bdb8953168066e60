"""FLUX.1 against diffusers: facts, conditioning, losses, images, adapters, checkpoints of one file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from lora_trainer.families.base import BaseFacts, Conditioning, Layout
from lora_trainer.families.flux import FAMILY
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.bases.flux import write_base
from tests.fakes.low_rank import draw
from tests.fakes.original_names import original_names, split_at

CPU = torch.device("cpu")
PROMPTS = ("a red square", "a photo of the blue one, on the left")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("flux") / "dev")


@pytest.fixture(scope="module")
def facts(base: Path) -> BaseFacts:
    return FAMILY.facts(Layout(folder=base), source="tiny")


@pytest.fixture(scope="module")
def schnell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("flux") / "schnell", seed=1, guidance_embeds=False)


@pytest.fixture(scope="module")
def conditioning(facts: BaseFacts) -> Conditioning:
    encoder = FAMILY.load_text_encoder(facts, dtype=torch.float32, device=CPU)
    return encoder.encode_prompts(PROMPTS)


@pytest.fixture
def denoiser(facts: BaseFacts) -> nn.Module:
    return FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)


def folder_facts(folder: Path, **files: Path) -> BaseFacts:
    layout = Layout(folder=folder, files=files)  # type: ignore[arg-type]  # names of parts
    return FAMILY.facts(layout, source="tiny")


# ---- facts


def test_schnell_is_told_from_dev_by_its_guidance(facts: BaseFacts, schnell: Path) -> None:
    fast = folder_facts(schnell)
    assert (fast.variant, fast.distilled, fast.max_tokens) == ("schnell", True, 256)
    assert (facts.variant, facts.distilled, facts.max_tokens) == ("dev", False, 512)
    assert FAMILY.adapter_names(fast).modelspec == "flux-1-schnell/lora"
    assert FAMILY.adapter_names(facts).modelspec == "flux-1-dev/lora"
    assert FAMILY.adapter_names(fast).kohya == "flux1"
    assert fast.guidance.conditioning(3.5) == {}
    told = facts.guidance.conditioning(3.5)["guidance"]
    assert told.dtype == torch.float32
    assert told.tolist() == [3.5]


# ---- what diffusers computes


@pytest.mark.parametrize("guidance_scale", [1.0, 3.5])
def test_the_loss_is_that_of_diffusers_training_script(
    facts: BaseFacts, denoiser: nn.Module, conditioning: Conditioning, guidance_scale: float
) -> None:
    latents, noise = draw(2, 16, 6, 10), draw(2, 16, 6, 10, seed=1)
    sigma = torch.tensor([0.2, 0.85])
    told = facts.guidance.conditioning(guidance_scale)["guidance"]

    noisy = add_noise(latents, noise, 1 - sigma, sigma)
    predicted = FAMILY.predict(
        denoiser, noisy, 1000 * sigma, {**conditioning, "guidance": told.expand(2)}
    )
    losses = sample_losses(predicted, target(latents, noise, 1 - sigma, sigma, "flow"))

    mixed = (1 - sigma[:, None, None, None]) * latents + sigma[:, None, None, None] * noise
    rows = [[0.0, row, column] for row in range(3) for column in range(5)]
    velocity = denoiser(
        hidden_states=F.pixel_unshuffle(mixed, 2).flatten(2).transpose(1, 2),
        timestep=sigma,
        guidance=torch.full([1], guidance_scale).expand(2),
        pooled_projections=conditioning["pooled"],
        encoder_hidden_states=conditioning["text"],
        txt_ids=torch.zeros(512, 3),
        img_ids=torch.tensor(rows),
        return_dict=False,
    )[0]
    velocity = F.pixel_shuffle(velocity.transpose(1, 2).unflatten(2, (3, 5)), 2)
    expected = ((velocity - (noise - latents)) ** 2).reshape(2, -1).mean(1)
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=0)


# ---- adapters


def test_wider_targets_stay_inside_the_blocks(denoiser: nn.Module) -> None:
    linear = {name for name, module in denoiser.named_modules() if isinstance(module, nn.Linear)}
    inside = {name for name in linear if "_blocks." in name}
    everything = FAMILY.lora_targets(denoiser, "all")
    assert set(everything) == inside
    layers = FAMILY.lora_targets(denoiser, "transformer")
    assert set(everything) - set(layers) == {
        "transformer_blocks.0.norm1.linear",
        "transformer_blocks.0.norm1_context.linear",
        "single_transformer_blocks.0.norm.linear",
        "single_transformer_blocks.1.norm.linear",
    }
    assert "proj_out" in linear
    assert "proj_out" not in everything


# ---- checkpoints of one file


def write_file(file: Path, denoiser: nn.Module) -> Path:
    save_file(original_names("flux", denoiser.state_dict()), file)
    return file


def test_a_dev_file_beside_a_schnell_folder_is_dev_and_the_reverse(
    base: Path, schnell: Path, facts: BaseFacts, denoiser: nn.Module, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    dev = folder_facts(schnell, denoiser=write_file(tmp_path / "dev.safetensors", denoiser))
    assert (dev.variant, dev.max_tokens, dev.distilled) == ("dev", 512, False)
    assert dev.scheduler["use_dynamic_shifting"] is True
    other = FAMILY.load_denoiser(folder_facts(schnell), dtype=torch.float32, device=CPU)
    fast = folder_facts(base, denoiser=write_file(tmp_path / "schnell.safetensors", other))
    assert (fast.variant, fast.max_tokens, fast.distilled) == ("schnell", 256, True)
    assert fast.scheduler["use_dynamic_shifting"] is False
    split_at(monkeypatch, inner=32)
    loaded = FAMILY.load_denoiser(dev, dtype=torch.float32, device=CPU)
    assert loaded.state_dict().keys() == denoiser.state_dict().keys()
    sampler = FAMILY.build_sampler(fast, denoiser=other, device=CPU)
    assert sampler.pipeline.scheduler.config.shift == 1.0  # type: ignore[attr-defined]  # FlowSampler
