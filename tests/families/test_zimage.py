"""Z-Image against diffusers: facts, text, loss of the training script, padded batches, images, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.families.base import BaseFacts, Layout
from lora_trainer.families.zimage import FAMILY
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.bases.zimage import write_base
from tests.fakes.original_names import original_names

CPU = torch.device("cpu")
PROMPT = "a red square"
LONG = "a photo of a red square and of a blue square beside it, on the table"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("zimage"))


@pytest.fixture(scope="module")
def pipeline(base: Path) -> Any:
    return ZImagePipeline.from_pretrained(base)


def facts_of(folder: Path, *, source: str = "tiny", **files: Path) -> BaseFacts:
    return FAMILY.facts(Layout(folder=folder, files=files), source=source)  # type: ignore[arg-type]  # names of parts


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- facts


@pytest.mark.parametrize(
    ("shift", "source", "distilled"),
    [
        (6.0, "Tongyi-MAI/Z-Image", False),
        (3.0, "a/folder", True),
        (6.0, "me/My_Turbo_Mix", True),
        (3.0, "ostris/Z-Image-De-Turbo", False),
        (6.0, "turbo/z-image", False),
    ],
)
def test_shift_and_name_tell_a_turbo(
    tmp_path: Path, shift: float, source: str, distilled: bool
) -> None:
    facts = facts_of(write_base(tmp_path, shift=shift), source=source)
    assert (facts.variant, facts.distilled) == ("turbo" if distilled else "base", distilled)


# ---- training


def test_loss_is_that_of_the_training_script(base: Path, pipeline: Any) -> None:
    """The formula: time (1000 - t) / 1000, the network's answer negated, against noise - x."""
    x, noise = draw(2, 4, 8, 6), draw(2, 4, 8, 6, seed=1)
    texts = [draw(5, 16, seed=2), draw(9, 16, seed=3)]
    sigma = torch.tensor([0.31, 0.87])
    padded = torch.zeros(2, 9, 16)
    mask = torch.zeros(2, 9, dtype=torch.int64)
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

    for index, text in enumerate(texts):  # one by one: neither batch nor padding changes a sample
        level = sigma[index]
        noisy = (1 - level) * x[index] + level * noise[index]
        time = (1000 - 1000 * level[None]) / 1000
        with torch.no_grad():
            answer = pipeline.transformer([noisy[:, None]], time, [text], return_dict=False)[0][0]
        theirs = ((-answer[:, 0] - (noise[index] - x[index])) ** 2).mean()
        torch.testing.assert_close(ours[index], theirs, atol=1e-5, rtol=1e-5)
    assert ours[0] != pytest.approx(float(ours[1]), rel=1e-3)


# ---- single files and refusals


def denoiser_state(base: Path) -> dict[str, Tensor]:
    return load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize(
    ("name", "beside", "variant", "shift", "told"),
    [
        ("z_image_turbo_bf16", 6.0, "turbo", 3.0, True),
        ("zImageTurbo_v2", 6.0, "turbo", 3.0, True),
        ("z_image_de_turbo_v1_bf16", 6.0, "base", 3.0, True),
        ("z_image_bf16", 6.0, "base", 6.0, True),
        ("z_image_bf16", 3.0, "base", 6.0, True),
        ("my_mix", 6.0, "base", 6.0, False),
        ("my_mix", 3.0, "turbo", 3.0, False),
    ],
)
def test_a_single_file_has_the_scheduler_of_its_release(
    tmp_path: Path, name: str, beside: float, variant: str, shift: float, told: bool
) -> None:
    """R3: a Turbo's file took shift 6 from the base release's folder beside it, instead of 3."""
    base, file = write_base(tmp_path / "base", shift=beside), tmp_path / f"{name}.safetensors"
    save_file(original_names("zimage", denoiser_state(base)), file)
    facts = facts_of(base, source=str(file), denoiser=file)
    assert (facts.variant, facts.distilled) == (variant, variant == "turbo")
    assert facts.flow_shift(width_px=64, height_px=64) == shift
    sampler = FAMILY.build_sampler(
        facts,
        denoiser=FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU),
        device=CPU,
    )
    assert sampler.pipeline.scheduler.config.shift == shift  # type: ignore[attr-defined]  # a flow sampler's
    assert (facts.assumed is None) is told
    if facts.assumed is not None:
        other = "Z-Image" if variant == "turbo" else "Z-Image-Turbo"
        assert facts.assumed.setting.endswith(f"--set base.companion=Tongyi-MAI/{other}")
