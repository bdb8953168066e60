"""FLUX.2 klein against diffusers: facts, text, latents, loss of the training script, images, files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2KleinPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import BaseFacts, Layout
from lora_trainer.families.flux2 import FAMILY
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.bases.flux2 import write_base
from tests.fakes.original_names import original_names

CPU = torch.device("cpu")
PROMPT = "a red square"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("flux2"))


@pytest.fixture(scope="module")
def pipeline(base: Path) -> Any:
    loaded = Flux2KleinPipeline.from_pretrained(base)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def facts_of(folder: Path, **files: Path) -> BaseFacts:
    return FAMILY.facts(Layout(folder=folder, files=files), source="tiny")  # type: ignore[arg-type]  # names of parts


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- facts


def test_the_index_says_what_is_distilled(tmp_path: Path) -> None:
    facts = facts_of(write_base(tmp_path, distilled=True))
    assert (facts.variant, facts.distilled) == ("klein", True)


@pytest.mark.parametrize("size_px", [(1024, 1024), (768, 1344), (512, 512)])
def test_the_timestep_shift_is_the_samplers_for_many_steps(size_px: tuple[int, int]) -> None:
    facts = FAMILY.releases.get(next(iter(FAMILY.releases)))
    assert facts is not None
    width, height = size_px
    mu = compute_empirical_mu(width // 16 * (height // 16), 200)
    shift = facts.flow_shift(width_px=width, height_px=height)
    assert shift == pytest.approx(math.exp(mu), rel=1e-3)


# ---- encoding


def test_latents_are_squares_normalised_per_channel(base: Path, pipeline: Any) -> None:
    pixels = draw(2, 3, 32, 24).clamp(-1, 1)
    encoder = FAMILY.load_image_encoder(facts_of(base), device=CPU)
    ours = encoder.encode_images(pixels)
    with torch.no_grad():
        raw = pipeline.vae.encode(pixels).latent_dist
    norm = pipeline.vae.bn
    deviation = (norm.running_var + pipeline.vae.config.batch_norm_eps).sqrt().view(1, -1, 1, 1)

    def normalised(latents: Tensor) -> Tensor:
        squares = Flux2KleinPipeline._patchify_latents(latents)
        found: Tensor = (squares - norm.running_mean.view(1, -1, 1, 1)) / deviation
        return found

    drawn = draw(*raw.mean.shape, seed=1)
    drawn_squares = Flux2KleinPipeline._patchify_latents(drawn)
    for index, latents in enumerate(ours):
        torch.testing.assert_close(latents.mean, normalised(raw.mode())[index])
        torch.testing.assert_close(
            latents.mean + latents.std * drawn_squares[index],
            normalised(raw.mean + raw.std * drawn)[index],
        )


# ---- training


@pytest.mark.parametrize("guidance", [False, True])
def test_loss_is_that_of_the_training_script(tmp_path: Path, guidance: bool) -> None:
    """The formula: packed tokens, ids (0, row, column, 0) and (0, 0, 0, place), t / 1000, noise - x."""
    facts = facts_of(write_base(tmp_path, guidance=guidance))
    denoiser = FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)
    told = facts.guidance.conditioning(3.5)
    assert bool(told) is guidance
    x, noise, text = draw(2, 8, 4, 6), draw(2, 8, 4, 6, seed=1), draw(2, 20, 48, seed=2)
    sigma = torch.tensor([0.31, 0.87])
    with torch.no_grad():
        predicted = FAMILY.predict(
            denoiser,
            add_noise(x, noise, 1 - sigma, sigma),
            1000 * sigma,
            {"text": text, **{name: value.expand(2) for name, value in told.items()}},
        )
    ours = sample_losses(predicted, target(x, noise, 1 - sigma, sigma, "flow"))

    level = sigma[:, None, None, None]
    noisy = (1 - level) * x + level * noise
    tokens = torch.stack([noisy[:, :, row, column] for row in range(4) for column in range(6)], 1)
    with torch.no_grad():
        answer = denoiser(
            hidden_states=tokens,
            timestep=sigma,
            guidance=torch.full([2], 3.5) if guidance else None,
            encoder_hidden_states=text,
            txt_ids=torch.tensor([[0, 0, 0, place] for place in range(20)]),
            img_ids=torch.tensor([[0, row, column, 0] for row in range(4) for column in range(6)]),
            return_dict=False,
        )[0]
    wanted = torch.stack(
        [(noise - x)[:, :, row, column] for row in range(4) for column in range(6)], 1
    )
    theirs = ((answer - wanted) ** 2).mean(dim=(1, 2))
    assert theirs[0] != pytest.approx(float(theirs[1]), rel=1e-3)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


# ---- single files and refusals


def denoiser_state(base: Path) -> dict[str, Tensor]:
    return load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize(
    ("name", "distilled"),
    [("flux-2-klein-4b", True), ("flux-2-klein-base-4b", False), ("other", False)],
)
def test_the_name_of_a_single_file_says_what_is_distilled(
    base: Path, tmp_path: Path, name: str, distilled: bool
) -> None:
    save_file(original_names("flux2", denoiser_state(base)), tmp_path / f"{name}.safetensors")
    facts = facts_of(base, denoiser=tmp_path / f"{name}.safetensors")
    assert facts.distilled is distilled


def test_the_other_text_encoders_are_refused(tmp_path: Path) -> None:
    folder = write_base(tmp_path)
    config = folder / "text_encoder" / "config.json"
    found = json.loads(config.read_text())
    config.write_text(json.dumps({**found, "hidden_size": 24}))
    with pytest.raises(InputError, match="72 channels"):
        facts_of(folder)
    config.write_text(json.dumps({**found, "model_type": "mistral3"}))
    assert FAMILY.detect(folder)
    with pytest.raises(InputError, match="mistral3"):
        facts_of(folder)
