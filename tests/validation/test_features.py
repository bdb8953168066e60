"""Images as vectors: alike images are near, sets of the same kind too; CLIP only where it is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageFilter, ImageOps

from lora_trainer.common.errors import InputError
from lora_trainer.evaluate import features

COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")


def picture(colour: str, *, seed: int = 0, size_px: tuple[int, int] = (64, 64)) -> Image.Image:
    image = Image.new("RGB", size_px, colour)
    draw = random.Random(seed)
    for _ in range(40):
        spot = (draw.randrange(size_px[0]), draw.randrange(size_px[1]))
        image.putpixel(spot, (255, 255, 255))
    return image


def test_alike_pictures_are_near_and_their_layout_counts() -> None:
    left = Image.new("RGB", (64, 64), "white")
    left.paste("red", (0, 0, 32, 64))
    soft = picture("red", size_px=(96, 128)).filter(ImageFilter.GaussianBlur(1))
    images = [picture("red"), soft, picture("blue"), left, left, ImageOps.mirror(left)]
    encoded = features.find_features().encode(images)
    red, soft_red, blue, one, same, mirrored = encoded
    near, far = features.distances(red[None], torch.stack([soft_red, blue]))[0].tolist()
    assert near < 0.5 * far
    assert red.shape == (168,)
    assert torch.equal(one, same)
    assert (one - mirrored).norm() > 0.3
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(30, 8, generator=generator) for _ in range(2))
    assert abs(features.set_distance(first, second)) < 0.2
    assert features.set_distance(first, second + 1) > 1


def test_a_clip_model_in_a_folder_is_used_by_name(tmp_path: Path) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    sizes = {"hidden_size": 16, "intermediate_size": 16, "image_size": 32, "patch_size": 16}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "projection_dim": 8}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = CLIPVisionConfig(**sizes, **layers)
        CLIPVisionModelWithProjection(config).save_pretrained(tmp_path)
    found = features.find_features(str(tmp_path))
    encoded = found.encode([picture(colour) for colour in COLOURS[:3]])
    assert "CLIP" in found.name and encoded.shape == (3, 8)
    assert torch.allclose(encoded.norm(dim=1), torch.ones(3))


def test_a_clip_model_that_is_not_here_or_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nor in the local Hub cache"):
        features.find_features("nobody/nothing")
    with pytest.raises(InputError, match="cannot be loaded"):
        features.find_features(str(tmp_path))


def test_copies_of_trained_pictures_are_told_from_new_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(12, 16, generator=generator)
    captions = [f"image {index}" for index in range(12)]
    album = features.ReferenceImages(
        features=pictures, captions=captions, trained=[index < 8 for index in range(12)]
    )
    prompts = [f"image {index}" for index in range(8, 12)]
    new = torch.randn(4, 16, generator=generator)
    copies = pictures[:4] + 0.1 * new
    told_new, told_copied = (features.copy_ratio(found, prompts, album) for found in (new, copies))
    assert told_new is not None and told_copied is not None
    assert 0.8 < told_new < 1.25
    assert told_copied < 0.85
    own = features.copy_ratio(pictures[8:] + 0.1 * new, prompts, album)
    assert own is not None and own < 1.25, "the image whose caption is the prompt is left out"
    alone = features.ReferenceImages(features=pictures, captions=captions, trained=[True] * 12)
    assert features.copy_ratio(new, prompts, alone) is None
