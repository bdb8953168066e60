"""U-Nets that read a reference as more channels of the image: their prediction and images are diffusers' pipeline's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lora_trainer import families
from lora_trainer.config.inputs import DataSettings
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.costs.sample_cost import Workload
from lora_trainer.dataset.buckets import placing, placing_references
from lora_trainer.families.base.facts import BaseFacts, Conditioning, Geometry
from lora_trainer.families.base.references import with_references
from lora_trainer.families.base.sampling import build_sampler, editing_pipeline
from tests.fakes.family_bases import (
    CPU,
    base_of,
    encoder_of,
    facts_at,
    image_encoder_of,
    network_of,
    pipeline_of,
    unet_that_edits,
)
from tests.fakes.studio import draw

PROMPT = "make the left one blue"
SIZE_PX = (128, 64)
FAMILIES = ("sd15", "sd2", "sdxl")


@pytest.fixture(scope="module", params=FAMILIES)
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseFacts:
    folder = tmp_path_factory.mktemp(request.param)
    return unet_that_edits(request.param, folder / "base")


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Image.Image:
    file = tmp_path_factory.mktemp("picture") / "reference.png"
    draw(file, seed=2, size=SIZE_PX)
    return Image.open(file).convert("RGB")


def values(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image, dtype=np.float32))


def told(facts: BaseFacts, prompt: str) -> Conditioning:
    geometry = Geometry(original_px=SIZE_PX, corner_px=(0, 0), target_px=SIZE_PX)
    text = encoder_of(facts).encode_prompts([prompt])
    return {**text, **facts.release.geometry_conditioning(geometry)}


def test_the_prediction_with_a_reference_is_the_pipelines(
    facts: BaseFacts, picture: Image.Image
) -> None:
    family = families.family(facts.family)
    assert facts.references is not None
    pipeline = editing_pipeline(family, facts, pipeline_of(facts))
    calls: list[tuple[Any, Any]] = []
    pipeline.unet.register_forward_hook(lambda _, args, output: calls.append((args, output[0])))
    pipeline(
        **facts.references.drawing([picture], SIZE_PX), prompt=PROMPT, width=SIZE_PX[0], height=SIZE_PX[1],
        num_inference_steps=2, guidance_scale=1.0, generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    (seen, timestep), expected = calls[0]
    pixels = values(picture).permute(2, 0, 1)[None] / 127.5 - 1
    latents = image_encoder_of(facts).encode_images(pixels)[0].mean
    conditioning = told(facts, PROMPT)
    reference = with_references([latents], scale=facts.references.scale)
    with torch.no_grad():
        prediction, alone = (
            family.predict(
                network_of(facts), seen[:, :4], timestep.reshape(1), {**conditioning, **more}
            )
            for more in (reference, {})
        )
    torch.testing.assert_close(prediction, expected, rtol=0, atol=1e-4)
    assert (alone - expected).abs().max() > 1e-3, "the reference changes nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_image_with_a_reference_is_the_plain_pipelines(
    facts: BaseFacts, picture: Image.Image, dtype: torch.dtype
) -> None:
    family = families.family(facts.family)
    assert facts.references is not None
    sampler = build_sampler(family, facts, denoiser=network_of(facts, dtype), device=CPU)
    drawn = sampler.image(
        told(facts, PROMPT), told(facts, "blurry"), seed=5, size_px=SIZE_PX, steps=2, guidance_scale=4.0,
        references=[picture],
    )  # fmt: skip
    pipeline = editing_pipeline(family, facts, pipeline_of(facts, dtype))
    whole = pipeline(
        **facts.references.drawing([picture], SIZE_PX), prompt=PROMPT, negative_prompt="blurry",
        width=SIZE_PX[0], height=SIZE_PX[1], num_inference_steps=2, guidance_scale=4.0,
        generator=torch.Generator().manual_seed(5),
    ).images[0]  # fmt: skip
    assert drawn.size == whole.size == SIZE_PX
    # In bfloat16 the text encoders of the plain pipeline are in bfloat16 too.
    off = (values(drawn) - values(whole)).abs()
    assert off.max() <= 1 if dtype == torch.float32 else off.mean() < 12


def test_a_reference_has_the_size_of_its_image_and_costs_nothing(facts: BaseFacts) -> None:
    data = DataSettings()
    step_px, side_px = facts.bucket_step_px, facts.resolution_px
    images = placing(data, resolution_px=side_px, step_px=step_px)(3 * side_px, 2 * side_px)
    (reference,) = placing_references(data, facts=facts)(side_px, side_px, images)
    assert reference.bucket == images[0].bucket
    costs = BaseCosts(family=families.family(facts.family), facts=facts)
    alone, beside = (
        Workload(
            height_px=64, width_px=64, element_bytes=4, rank=4, targets="attention", checkpointing="none",
            references_px=sizes,
        )
        for sizes in ((), ((64, 64),))
    )  # fmt: skip
    assert costs.sample_cost(alone) == costs.sample_cost(beside)


def test_a_reference_of_another_shape_is_cut_and_not_stretched(facts: BaseFacts) -> None:
    assert facts.references is not None
    wide = Image.new("RGB", (300, 100), "red")
    wide.paste("blue", (100, 0, 200, 100))
    fitted = facts.references.drawing([wide], (64, 64))["image"]
    assert fitted.size == (64, 64)
    # The middle third, which is blue, but for the soft edges of scaling; stretched it would be a third of the width.
    assert np.array(fitted)[..., 2].min() > 200


def test_a_single_file_that_edits_takes_its_other_parts_from_a_base_that_does_not(
    facts: BaseFacts, tmp_path: Path
) -> None:
    single = facts.located.folder / "unet" / "diffusion_pytorch_model.safetensors"
    found = facts_at(base_of(facts.family), family=facts.family, denoiser=single)
    assert found.references is not None and found.references.as_channels
    network: Any = network_of(found)
    assert network.config.in_channels == 8
    # And the reverse: the folder edits, the file does not.
    plain = base_of(facts.family) / "unet" / "diffusion_pytorch_model.safetensors"
    found = facts_at(facts.located.folder, family=facts.family, denoiser=plain)
    assert found.references is None
