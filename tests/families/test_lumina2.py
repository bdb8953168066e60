"""Lumina-Image 2.0 against diffusers: facts, text, the pipeline's step, padded batches, images, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Lumina2Pipeline
from safetensors.torch import load_file, save_file

from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.base import BaseFacts, Layout
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
