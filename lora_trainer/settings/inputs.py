"""The settings of what goes in: the base model, and the images with their captions and caches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lora_trainer.settings.declare import (
    NOT_EMBEDDED,
    SHUFFLING,
    AutoPixels,
    Section,
    setting,
)


class BaseSettings(Section):
    model: str = setting(
        "auto",
        "base model: `embedded`, a diffusers folder or a Hub id; auto: by hardware",
        path=True,
    )
    revision: str | None = setting(
        None, "Hub branch, tag or commit of the base model", not_for=NOT_EMBEDDED
    )
    vae: str | None = setting(
        None, "another VAE: a .safetensors file or a folder with config.json", path=True
    )
    companion: str = setting(
        "auto",
        "diffusers folder or Hub id for what a single-file checkpoint lacks; auto: the family's release",
        not_for=NOT_EMBEDDED,
        path=True,
    )
    prediction: Literal["auto", "epsilon", "v_prediction", "flow"] = setting(
        "auto", "what the base predicts; auto: what its files say"
    )
    assistant: str | None = setting(
        None,
        "LoRA file that undoes a base's distillation while training; neither sampled nor exported",
        path=True,
    )


class DataSettings(Section):
    resolution: AutoPixels = setting(
        "auto", "side of the square whose area every bucket has; auto: the base's own", unit="px"
    )
    more_resolutions: tuple[Annotated[int, Field(ge=16, le=4096)], ...] = setting(
        (),
        "other resolutions: each sample is trained at one of all of them, drawn anew in every epoch",
        unit="px",
    )
    buckets: bool = setting(
        True, "keep aspect ratios by training in buckets; off: crop everything square"
    )
    max_aspect: float = setting(
        2.0,
        "longest bucket side over the shortest",
        ge=1.0,
        le=8.0,
        only_for={"data.buckets": (True,)},
    )
    repeats: int = setting(
        1, "times each image is seen per epoch; `10_name` folders set their own", ge=1, le=1000
    )
    flip: bool = setting(
        False, "also train mirrored images (bad for text, logos, asymmetric people)"
    )
    trigger: str | None = setting(
        None, "word put in front of captions that lack it", min_length=1, max_length=100
    )
    caption_extensions: tuple[str, ...] = setting(
        (".txt", ".caption"), "caption files beside the image, first wins"
    )
    caption_dropout: float = setting(
        0.0, "share of samples trained with an empty caption", ge=0.0, le=1.0
    )
    shuffle_tags: bool = setting(False, "shuffle the comma-separated tags of a caption")
    keep_tokens: int = setting(
        1, "leading tags that shuffling leaves in place", ge=0, le=50, only_for=SHUFFLING
    )
    caption_variants: int = setting(
        4, "shuffled variants encoded per caption when shuffling", ge=1, le=64, only_for=SHUFFLING
    )
    validation_fraction: float = setting(
        0.1,
        "share of images held out for the validation loss, rounded down; 0: none",
        ge=0.0,
        le=0.5,
    )
    alpha_background: str = setting(
        "white", "colour put behind transparent images: a CSS name or #rrggbb"
    )
    max_bad_fraction: float = setting(
        0.1, "share of unusable images above which the run refuses", ge=0.0, le=1.0
    )
    max_megapixels: float = setting(
        100.0, "larger images are refused from their header", unit="MP", gt=0, le=1000
    )
    cache_dir: str = setting(
        "auto", "cache of latents and text embeddings; auto: the user's cache folder", path=True
    )
    cache_max_gib: float = setting(20.0, "size cap of the cache", unit="GiB", gt=0, le=100_000)
    prefetch_steps: int = setting(4, "optimizer steps prepared ahead of the device", ge=1, le=64)
