"""Promise 6: the exported file in a plain diffusers pipeline gives the image that the trainer showed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from numpy.typing import NDArray
from PIL import Image

from tests.fakes.runs import Toy, events, toy

MOST_APART = 2  # of 255: what rounding to fp16 in another order may do
CASES: dict[str, dict[str, Any]] = {
    "diffusers": {"output__format": "diffusers", "adapter__rank": 2, "adapter__alpha": 8},
    "kohya": {
        "output__format": "kohya",
        "output__precision": "fp32",
        "adapter__rank": 4,
        "adapter__alpha": 6.5,
        "adapter__targets": "all",
    },
}
PROMPTS = ["a toy with 2 legs", "something else"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Runs with so high a learning rate that the adapter changes every pixel."""
    place = toy(tmp_path_factory.mktemp("elsewhere")).with_base()
    for name, settings in CASES.items():
        training: dict[str, Any] = {
            "optimizer__learning_rate": 0.05,
            "optimizer__schedule": "constant",
            "sampling__prompts": PROMPTS,
            "sampling__negative_prompt": "blurred",
            "sampling__guidance_scale": 5,
            "logging__trackers": [],
        }
        assert place.train("--name", name, **training, **settings) == 0
    return place


def elsewhere(place: Toy, prompt: str, seed: int, file: Path | None) -> NDArray[np.int16]:
    """Return the pixels that a program which knows only diffusers makes."""
    pipeline = StableDiffusionPipeline.from_pretrained(
        place.base, safety_checker=None, requires_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    if file is not None:
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    image = pipeline(
        prompt,
        negative_prompt="blurred",
        generator=torch.Generator().manual_seed(seed),
        num_inference_steps=2,
        guidance_scale=5.0,
        width=16,
        height=16,
    ).images[0]
    return np.asarray(image, dtype=np.int16)


def apart(first: NDArray[np.int16], second: NDArray[np.int16]) -> int:
    return int(np.abs(first - second).max())


def shown(run: Path, step: int) -> list[tuple[str, int, NDArray[np.int16]]]:
    """Return prompt, seed and pixels of the trainer's samples of a step."""
    (row,) = (row for row in events(run, "sample") if row["step"] == step)
    return [
        (image["prompt"], image["seed"], np.asarray(Image.open(run / image["file"]), np.int16))
        for image in row["images"]
    ]


@pytest.mark.parametrize("name", CASES)
def test_the_file_gives_the_image_the_trainer_showed(name: str, place: Toy) -> None:
    run = place.runs / name
    images = shown(run, 6)
    assert [(prompt, seed) for prompt, seed, _ in images] == [
        (PROMPTS[0], 1234),
        (PROMPTS[1], 1235),
    ]
    for (prompt, seed, pixels), (_, _, untrained) in zip(images, shown(run, 0), strict=True):
        made = elsewhere(place, prompt, seed, run / f"{name}.safetensors")
        assert apart(made, pixels) <= MOST_APART
        base = elsewhere(place, prompt, seed, None)
        assert apart(base, untrained) <= MOST_APART
        assert apart(made, base) > 10 * MOST_APART, "or a file that does nothing would pass"


def test_a_rolling_export_gives_the_image_of_its_step(place: Toy) -> None:
    """Saves at 2 and 4, samples at 3 and 6: the file of step 4 is between the two."""
    run = place.runs / "kohya"
    prompt, seed, after_3 = shown(run, 3)[0]
    made = elsewhere(place, prompt, seed, run / "kohya-step00000004.safetensors")
    assert apart(made, after_3) > MOST_APART
    assert apart(made, shown(run, 6)[0][2]) > MOST_APART
