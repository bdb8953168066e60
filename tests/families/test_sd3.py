"""Stable Diffusion 3 beside diffusers' own pipeline and training formula, on a tiny base and its single files."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.families.base import BaseFacts, Layout, TensorInfo
from lora_trainer.families.base_files.base_folder import read_header
from lora_trainer.families.sd3 import FAMILY
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.bases.sd3 import write_base
from tests.fakes.bases.tokenizers import t5_tokenizer
from tests.fakes.family_bases import CPU, copy_of, facts_at
from tests.fakes.hub import spiece
from tests.fakes.ldm_file import vae_tensors
from tests.fakes.original_names import original_names

PROMPTS = ["a red square", "many words " * 60, ""]
SIZE_PX = (48, 32)


@dataclass(frozen=True, kw_only=True)
class Base:
    folder: Path
    facts: BaseFacts
    pipeline: Any
    denoiser: Any


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = write_base(tmp_path_factory.mktemp("sd3") / "base")
    facts = facts_of(Layout(folder=folder))
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    denoiser = FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)
    return Base(folder=folder, facts=facts, pipeline=pipeline, denoiser=denoiser)


def facts_of(layout: Layout, *, source: str = "base") -> BaseFacts:
    return FAMILY.facts(layout, source=source)


def encoded(facts: BaseFacts, prompts: list[str]) -> dict[str, Tensor]:
    encoder = FAMILY.load_text_encoder(facts, dtype=torch.float32, device=CPU)
    return dict(encoder.encode_prompts(prompts))


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch(base: Base) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return latents, noise and conditioning of two samples."""
    return draw(1, 2, 16, 12, 8), draw(2, 2, 16, 12, 8), encoded(base.facts, PROMPTS[:2])


# ---- facts


def test_versions_are_those_that_sd_scripts_writes(base: Base, tmp_path: Path) -> None:
    assert FAMILY.adapter_names(base.facts).kohya == "3-5-medium"
    assert FAMILY.adapter_names(base.facts).modelspec == "stable-diffusion-3-5-medium/lora"
    turbo = FAMILY.releases.get("stabilityai/stable-diffusion-3.5-large-turbo")
    first = FAMILY.releases.get("stabilityai/stable-diffusion-3-medium-diffusers")
    assert turbo is not None and first is not None
    assert FAMILY.adapter_names(turbo).kohya == "3-5-large"
    assert FAMILY.adapter_names(first).kohya == "3-medium"
    assert FAMILY.adapter_names(first).modelspec == "stable-diffusion-3-medium/lora"
    named = facts_of(Layout(folder=base.folder), source="models/sd3.5-Turbo")
    assert named.distilled and named.variant == "medium-turbo"


# ---- encoding


def test_a_base_without_t5_has_zeros_in_its_place(base: Base, tmp_path: Path) -> None:
    folder = write_base(tmp_path / "base", t5=False)
    facts = facts_of(Layout(folder=folder))
    assert facts.max_tokens == 77 and facts.variant == "medium without T5"
    assert FAMILY.adapter_names(facts).kohya == "3-5-medium"
    pipeline: Any = FAMILY.plain_pipeline(facts, dtype=torch.float32, device=CPU)
    assert pipeline.text_encoder_3 is None
    with torch.no_grad():
        text, _, _, _ = pipeline.encode_prompt(
            PROMPTS[:1], None, None, do_classifier_free_guidance=False
        )
    found = encoded(facts, PROMPTS[:1])["text"]
    assert found[:, :77].any() and not found[:, 77:].any()
    torch.testing.assert_close(found, text)
    assert sampled(facts, guidance_scale=2.0) is not None


# ---- training


@pytest.mark.parametrize("precondition_outputs", [False, True])
def test_loss_is_that_of_the_training_script(base: Base, precondition_outputs: bool) -> None:
    """diffusers/examples/dreambooth/train_dreambooth_lora_sd3.py.

    Without preconditioning of outputs the losses are equal. With it (the script's default) the script
    compares -sigma v + noisy with the latents, which is sigma^2 times our loss.
    """
    latents, noise, conditioning = batch(base)
    sigma = torch.tensor([0.25, 0.9])
    with torch.no_grad():
        noisy = add_noise(latents, noise, 1 - sigma, sigma)
        prediction = FAMILY.predict(base.denoiser, noisy, 1000 * sigma, conditioning)
        ours = sample_losses(prediction, target(latents, noise, 1 - sigma, sigma, "flow"))
        wide = sigma.view(2, 1, 1, 1)
        mixed = (1 - wide) * latents + wide * noise
        raw = base.pipeline.transformer(
            mixed,
            timestep=sigma * 1000,
            encoder_hidden_states=conditioning["text"],
            pooled_projections=conditioning["pooled"],
        ).sample
    if precondition_outputs:
        theirs = (mixed - wide * raw - latents).square().flatten(1).mean(1)
        torch.testing.assert_close(sigma**2 * ours, theirs, rtol=1e-5, atol=1e-6)
    else:
        theirs = (raw - (noise - latents)).square().flatten(1).mean(1)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# ---- images


def sampled(facts: BaseFacts, *, guidance_scale: float) -> np.ndarray:
    conditioning = encoded(facts, [PROMPTS[0], ""])
    prompt, negative = (
        {name: value[i : i + 1] for name, value in conditioning.items()} for i in (0, 1)
    )
    denoiser = FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)
    image = FAMILY.build_sampler(facts, denoiser=denoiser, device=CPU).image(
        prompt, negative, seed=5, size_px=SIZE_PX, steps=3, guidance_scale=guidance_scale
    )
    return np.asarray(image, dtype=np.int16)


# ---- single files


@pytest.fixture(scope="module")
def checkpoint(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An all-in-one checkpoint of the tiny base."""
    tensors = {
        f"model.diffusion_model.{name}": tensor
        for name, tensor in original_names("sd3", base.denoiser.state_dict()).items()
    }
    for name, tensor in vae_tensors(base.folder).items():
        tensors[f"first_stage_model.{name}"] = tensor
    for folder, prefix in (
        ("text_encoder", "clip_l"),
        ("text_encoder_2", "clip_g"),
        ("text_encoder_3", "t5xxl"),
    ):
        for name, tensor in load_file(base.folder / folder / "model.safetensors").items():
            tensors[f"text_encoders.{prefix}.transformer.{name}"] = tensor
    del tensors["text_encoders.clip_l.transformer.text_projection.weight"]
    file = tmp_path_factory.mktemp("files") / "all.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file


def test_a_checkpoint_gives_what_its_folder_gives(
    base: Base, checkpoint: Path, tmp_path: Path
) -> None:
    parts = FAMILY.detect_file(read_header(checkpoint))
    assert parts == {"denoiser", "vae", "text_encoder"}
    companion = tmp_path / "companion"
    shutil.copytree(base.folder, companion)
    for weight in companion.rglob("*.safetensors"):
        weight.unlink()  # the companion of a whole checkpoint is configurations only
    config = companion / "transformer" / "config.json"
    other = json.loads(config.read_text()) | {"num_layers": 3, "dual_attention_layers": []}
    config.write_text(json.dumps(other))  # and may be that of another release
    layout = Layout(folder=companion, files=dict.fromkeys(parts, checkpoint))
    facts = facts_of(layout)
    assert facts.variant == "medium" and facts.max_tokens == 256
    assert facts.parts["denoiser"] == base.facts.parts["denoiser"]
    assert facts.parts["vae"] == base.facts.parts["vae"]
    denoiser = FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)
    for name, tensor in base.denoiser.state_dict().items():
        torch.testing.assert_close(denoiser.state_dict()[name], tensor, rtol=0, atol=0)
    wanted = encoded(base.facts, PROMPTS)
    for name, tensor in encoded(facts, PROMPTS).items():
        torch.testing.assert_close(tensor, wanted[name])
    pixels = draw(3, 1, 3, 32, 32)
    encoder = FAMILY.load_image_encoder(facts, device=CPU)
    expected = FAMILY.load_image_encoder(base.facts, device=CPU)
    mean = encoder.encode_images(pixels)[0].mean
    torch.testing.assert_close(mean, expected.encode_images(pixels)[0].mean)
    pipeline = FAMILY.plain_pipeline(facts, dtype=torch.float32, device=CPU)
    assert pipeline.text_encoder_3 is not None


def test_other_files_are_not_taken_for_a_base(checkpoint: Path) -> None:
    whole = read_header(checkpoint)

    def without(part: str) -> dict[str, TensorInfo]:
        return {name: info for name, info in whole.items() if part not in name}

    # With two of three text encoders it takes those of its companion.
    assert FAMILY.detect_file(without("t5xxl")) == {"denoiser", "vae"}
    assert FAMILY.detect_file(without("text_encoders.")) == {"denoiser", "vae"}
    assert FAMILY.detect_file(without("first_stage")) == {"denoiser", "text_encoder"}
    vae = {name: info for name, info in whole.items() if name.startswith("first_stage_model.")}
    assert FAMILY.detect_file(vae) == {"vae"}
    # Another family's checkpoint has a VAE of the same shape, with other weights.
    other = TensorInfo(dtype="F32", shape=(8, 8))
    assert not FAMILY.detect_file({**vae, "model.diffusion_model.double_blocks.0.weight": other})
    key = "model.diffusion_model.x_embedder.proj.weight"
    inpainting = {**whole, key: TensorInfo(dtype="F32", shape=(16, 33, 2, 2))}
    assert "denoiser" not in FAMILY.detect_file(inpainting)
    adapter = "joint_blocks.0.context_block.adaLN_modulation.1.lora_A.weight"
    assert not FAMILY.detect_file({adapter: other})


# ---- what is refused


def test_an_inpainting_denoiser_is_refused(base: Base, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(base.folder, folder)
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"in_channels": 33}))
    with pytest.raises(InputError, match="takes 33 channels, its VAE gives 16"):
        facts_of(Layout(folder=folder))


def test_checkpoints_that_cannot_be_read_are_refused(base: Base, tmp_path: Path) -> None:
    state = original_names("sd3", base.denoiser.state_dict())
    file = tmp_path / "file.safetensors"
    layout = Layout(folder=base.folder, files={"denoiser": file})
    save_file({name: state[name] for name in state if name != "y_embedder.mlp.0.weight"}, file)
    with pytest.raises(InputError, match=r"lacks tensors.*y_embedder"):
        facts_of(layout)
    gone = "joint_blocks.1.x_block.mlp.fc1.weight"
    save_file({name: state[name] for name in state if name != gone}, file)
    with pytest.raises(InputError, match=r"not that of its companion.*fc1"):
        FAMILY.load_denoiser(facts_of(layout), dtype=torch.float32, device=CPU)


def test_the_pipeline_reads_a_bare_sentencepiece_file(tmp_path: Path) -> None:
    """A companion made without the gated release has T5's spiece.model alone; transformers cannot read it."""
    folder = copy_of("sd3", tmp_path / "base")
    tokenizer = folder / "tokenizer_3"
    (tokenizer / "tokenizer.json").unlink()
    (tokenizer / "spiece.model").write_bytes(spiece(list(t5_tokenizer()._vocab_scores)))
    pipeline = families.family("sd3").plain_pipeline(
        facts_at(folder), dtype=torch.float32, device=CPU
    )
    prompt = "a photo of a red square"
    assert pipeline.tokenizer_3(prompt).input_ids == t5_tokenizer()(prompt).input_ids
