"""Lumina-Image 2.0 against diffusers: facts, text, the pipeline's step, padded batches, images, files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Lumina2Pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.config.config import BaseSettings
from lora_trainer.families.base import BaseFacts, Layout
from lora_trainer.families.base_files.base_folder import read_header
from lora_trainer.families.locate import describe
from lora_trainer.families.lumina2 import FAMILY
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.bases.lumina2 import write_base
from tests.families.test_zimage import draw

CPU = torch.device("cpu")
PROMPT = "a red square"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("lumina2"))


@pytest.fixture(scope="module")
def pipeline(base: Path) -> Any:
    return Lumina2Pipeline.from_pretrained(base)


def facts_of(folder: Path, **files: Path) -> BaseFacts:
    return FAMILY.facts(Layout(folder=folder, files=files), source="tiny")  # type: ignore[arg-type]  # names of parts


@pytest.mark.parametrize("prompt", [PROMPT, "", "a " * 300])
def test_a_text_is_encoded_as_the_pipeline_does(base: Path, pipeline: Any, prompt: str) -> None:
    """An empty text is encoded as the pipeline's negative prompt, without a system prompt."""
    encoder = FAMILY.load_text_encoder(facts_of(base), dtype=torch.float32, device=CPU)
    ours = encoder.encode_prompts([prompt])
    with torch.no_grad():
        text, mask, negative, negative_mask = pipeline.encode_prompt([prompt or PROMPT])
    if not prompt:
        text, mask = negative, negative_mask
    length = int(mask.sum())
    assert ours["text_mask"].tolist() == [[1] * length]
    torch.testing.assert_close(ours["text"][0], text[0, :length], atol=1e-5, rtol=1e-5)


def test_the_loss_is_that_of_the_pipelines_velocity(base: Path, pipeline: Any) -> None:
    """The pipeline gives 1 - t and negates the answer; neither batch nor padding changes a sample."""
    x, noise = draw(2, 4, 8, 6), draw(2, 4, 8, 6, seed=1)
    texts = [draw(5, 16, seed=2), draw(9, 16, seed=3)]
    sigma = torch.tensor([0.31, 0.87])
    padded, mask = torch.zeros(2, 9, 16), torch.zeros(2, 9, dtype=torch.int64)
    for index, text in enumerate(texts):
        padded[index, : len(text)], mask[index, : len(text)] = text, 1
    with torch.no_grad():
        predicted = FAMILY.predict(
            pipeline.transformer,
            add_noise(x, noise, 1 - sigma, sigma),
            1000 * sigma,
            {"text": padded, "text_mask": mask},
        )
    ours = sample_losses(predicted, target(x, noise, 1 - sigma, sigma, "flow"))
    for index, text in enumerate(texts):
        level = sigma[index]
        noisy = (1 - level) * x[index] + level * noise[index]
        with torch.no_grad():
            answer = pipeline.transformer(
                noisy[None],
                1 - level[None],
                text[None],
                torch.ones(1, len(text), dtype=torch.int64),
                return_dict=False,
            )[0][0]
        theirs = ((-answer - (noise[index] - x[index])) ** 2).mean()
        torch.testing.assert_close(ours[index], theirs, atol=1e-5, rtol=1e-5)
    assert ours[0] != pytest.approx(float(ours[1]), rel=1e-3)


def as_comfyui(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what Lumina's own code calls diffusers' tensors: q, k and v are one matrix."""
    renamed = {
        "time_caption_embed.caption_embedder.": "cap_embedder.",
        "time_caption_embed.timestep_embedder.linear_1.": "t_embedder.mlp.0.",
        "time_caption_embed.timestep_embedder.linear_2.": "t_embedder.mlp.2.",
        "norm_out.linear_1.": "final_layer.adaLN_modulation.1.",
        "norm_out.linear_2.": "final_layer.linear.",
        "attn.norm_q": "attention.q_norm",
        "attn.norm_k": "attention.k_norm",
        "attn.to_out.0": "attention.out",
        "attn.to_": "attention.to_",
        "norm1.linear": "adaLN_modulation.1",
        "norm1.norm": "attention_norm1",
        ".norm1.": ".attention_norm1.",
        ".norm2.": ".attention_norm2.",
        ".ffn_norm1.": ".ffn_norm1.",
        **{f"feed_forward.linear_{n}": f"feed_forward.w{n}" for n in (1, 2, 3)},
    }
    own: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for theirs, ours in renamed.items():
            name = name.replace(theirs, ours)
        own[name] = tensor
    for name in [name for name in own if name.endswith(".to_q.weight")]:
        block = name.removesuffix(".to_q.weight")
        own[f"{block}.qkv.weight"] = torch.cat(
            [own.pop(f"{block}.to_{part}.weight") for part in "qkv"]
        )
    return own


def test_the_text_encoder_is_read_from_comfyuis_file(base: Path, tmp_path: Path) -> None:
    """Its names begin with `model.`, and the tokenizer's model is a tensor of bytes."""
    state = load_file(base / "text_encoder" / "model.safetensors")
    file = tmp_path / "gemma.safetensors"
    named = {f"model.{name}": tensor for name, tensor in state.items()}
    save_file({**named, "spiece_model": torch.zeros(9, dtype=torch.uint8)}, file)
    facts = describe(BaseSettings(model=str(base), text_encoders=(str(file),)))
    assert facts.parts["text_encoder"].parameters == facts_of(base).parts["text_encoder"].parameters
    encoder = FAMILY.load_text_encoder(facts, dtype=torch.float32, device=CPU)
    read = encoder.networks["text_encoder"].state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("layout", ["diffusers", "ComfyUI"])
def test_a_single_file_is_told_from_z_image(base: Path, tmp_path: Path, layout: str) -> None:
    state = load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")
    own = state if layout == "diffusers" else as_comfyui(state)
    file = tmp_path / "denoiser.safetensors"
    save_file({f"model.diffusion_model.{name}": own[name] for name in own}, file)
    assert FAMILY.detect_file(read_header(file)) == {"denoiser"}
    facts = facts_of(base, denoiser=file)
    assert facts.parts["denoiser"].parameters == sum(map(Tensor.numel, state.values()))
    save_file({**own, "cap_pad_token": torch.zeros(1, 16)}, tmp_path / "zimage.safetensors")
    assert not FAMILY.detect_file(read_header(tmp_path / "zimage.safetensors"))
