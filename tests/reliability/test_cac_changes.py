"""CAC-03, 07 and CAP-05: a change encodes exactly the entries it affects, and no old one is used.

There is no setting of clip skip; the choice of a layer would belong to the key as the precision does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from lora_trainer.common.errors import InputError
from tests.fakes.studio import PROMPT, Studio, draw

Figure = Callable[..., None]
VAE_FILE, TEXT_FILE = "diffusion_pytorch_model.safetensors", "model.safetensors"


# ---- CAC-03


Make = Callable[[Studio], object]


def another_weight(part: str, file: str) -> Make:
    def make(studio: Studio) -> None:
        studio.base = copytree(studio.base, studio.folder.with_name("other base"))
        weights = load_file(studio.base / part / file)
        next(iter(weights.values())).view(-1)[0] += 0.5
        save_file(weights, studio.base / part / file, metadata={"format": "pt"})

    return make


def settings(**values: Any) -> Make:
    def make(studio: Studio) -> None:
        studio.settings = studio.settings.model_copy(update=values)

    return make


def fields(**values: Any) -> Make:
    def make(studio: Studio) -> None:
        for name, value in values.items():
            setattr(studio, name, value)

    return make


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


CAPTIONS = tuple(f"image number {index}" for index in range(3))
ALL_TEXTS = ("", PROMPT, *CAPTIONS)
WITH_TRIGGER = tuple(f"sks, {caption}" for caption in CAPTIONS)
CHANGES: dict[str, tuple[Make, int, tuple[str, ...]]] = {
    "a caption": (lambda one: write(one.folder / "p1.txt", "another"), 0, ("another",)),
    "the bytes of an image": (lambda one: draw(one.folder / "p0.png", seed=77), 1, ()),
    "the resolution": (fields(resolution_px=24), 3, ()),
    "the rule of the buckets": (fields(max_aspect=1.0), 2, ()),
    "mirroring": (settings(flip=True), 3, ()),
    "what is behind a transparent image": (settings(alpha_background="black"), 1, ()),
    "the VAE": (another_weight("vae", VAE_FILE), 3, ()),
    "the text encoder": (another_weight("text_encoder", TEXT_FILE), 0, ALL_TEXTS),
    "the precision of the text encoder": (fields(precision="bf16"), 0, ALL_TEXTS),
    "how many tokens are read": (fields(max_tokens=40), 0, ALL_TEXTS),
    "the trigger": (settings(trigger="sks"), 0, WITH_TRIGGER),
    "a prompt of the samples": (fields(prompt="another"), 0, ("another",)),
}
"""What is changed about a studio of three images, the latents and the texts to encode again."""


@pytest.mark.parametrize("name", CHANGES)
def test_cac_03_a_change_encodes_exactly_what_it_affects(
    name: str, studio: Studio, figure: Figure
) -> None:
    make, latents, texts = CHANGES[name]
    picture = Image.open(studio.folder / "p2.png").convert("RGBA")
    picture.putalpha(128)  # half transparent, so that its background matters
    picture.save(studio.folder / "p2.png")
    studio.encode()
    make(studio)
    assert studio.work() == (latents, sorted(texts))
    figure("stale_cache", tried=1, detected=1, needless=0)


HARMLESS: dict[str, Make] = {
    "repeats": settings(repeats=5),
    "caption dropout": settings(caption_dropout=0.5),
    "what may be bad": settings(max_bad_fraction=0.5, max_megapixels=50.0),
    "a background without a transparent image": settings(alpha_background="black"),
    "the denoiser": another_weight("unet", VAE_FILE),
    "spaces around a caption": lambda studio: write(
        studio.folder / "p1.txt", f"  {CAPTIONS[1]}\r\n"
    ),
    "times of files": lambda studio: os.utime(studio.folder / "p0.png", (0, 0)),
    "names": lambda studio: [
        (studio.folder / f"p0{suffix}").rename(studio.folder / f"new{suffix}")
        for suffix in (".png", ".txt")
    ],
}


def test_cac_03_other_changes_encode_nothing(studio: Studio, figure: Figure) -> None:
    studio.encode()
    for name, make in HARMLESS.items():
        make(studio)
        assert studio.work() == (0, []), name
    figure("harmless_changes", tried=len(HARMLESS), needless=0)


# ---- CAP-05


def test_cap_05_a_picture_that_changes_while_it_is_cached_is_never_mixed_in(studio: Studio) -> None:
    wanted = studio.needs()
    draw(studio.folder / "p2.png", seed=5)
    with pytest.raises(InputError, match=r"p2.png.*changed while in use.*start the run again"):
        studio.encode(wanted)
    assert studio.work() == (1, sorted(ALL_TEXTS)), "two were encoded before, as they still are"
