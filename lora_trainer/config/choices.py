"""Words of settings and their meaning: priorities, kinds of subject, formats of the weights of the base.

Torch-free. Kinds of subject (person, style, object) are presets of the settings for which the kind of image
itself is a reason; docs/concepts.md explains which settings stay equal and why. The sizes of the base's weights
in bytes are those of memory plan and network alike, so predicted and stored bytes are equal;
`network/quantize.py` implements the formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

Priority = Literal["speed", "balanced", "quality"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
Concept = Literal["any", "person", "style", "object"]
CONCEPT = "train.concept"

_BY_NAME = "the subject should appear with its words and not without them"
SETTINGS: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "any": {},
    "person": {
        "data.flip": (False, "faces are not symmetric"),
        "data.caption_dropout": (0.0, _BY_NAME),
    },
    "object": {
        "data.flip": (False, "lettering and handed shapes would be learned mirrored"),
        "data.caption_dropout": (0.0, _BY_NAME),
    },
    "style": {
        "data.flip": (True, "a mirrored image has the same style"),
        "data.caption_dropout": (0.1, "a style should appear with any words"),
    },
}
PROMPTS: Mapping[str, tuple[str, ...]] = {
    "any": ("{}", "{}, outdoors in sunlight", "{}, close-up", "{}, at night"),
    "person": (
        "{}, portrait, looking at the camera",
        "{}, standing in a city street, full body",
        "{}, sitting at a table, side view",
        "{}, smiling, in a garden",
    ),
    "object": (
        "{}, on a plain white background",
        "{}, on a wooden table",
        "{}, outdoors in sunlight",
        "{}, close-up from the side",
    ),
    "style": (
        "{}, portrait of a woman",
        "{}, a city street at night",
        "{}, mountains behind a lake",
        "{}, a cat on a chair",
    ),
}
"""Sample prompts for images without captions; `{}` stands for the trigger or the class word."""
VIEWS: Mapping[str, float] = {"style": 0.5}
"""Factor on `train.views`: a style is common to many images, and repeating an image too often teaches the
image itself."""


def rate_for_batch(rate: float, *, batch_size: int, preset_batch_size: int) -> float:
    """Scale a learning rate from `preset_batch_size` to `batch_size`, rounded to four digits.

    Another batch size changes the number of updates for the same images, and with it the rate. One update of
    Adam moves a weight by about one learning rate at any batch size, so the rate is scaled with the square
    root of the batch (Malladi et al. 2022, arXiv 2205.10287: for a batch kappa times as large, rate times
    sqrt(kappa) and steps over kappa keep updates x rate^2, the distance covered, constant). The paper also
    scales Adam's betas; they stay fixed here because their memory is short compared with any of these runs.
    """
    return float(f"{rate * math.sqrt(batch_size / preset_batch_size):.4g}")


# ---- formats of the frozen base's weights

Quantization = Literal["int8", "fp8", "nf4"]
BasePrecision = Literal["fp32", "bf16", "fp16", Quantization]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

INT8_MAX = 127.0
NF4_BLOCK = 64
"""Weights that share a scale."""
NF4_SCALES_BLOCK = 256
"""Scales, themselves in 8 bits, that share a scale (double quantisation)."""
NF4_SCALE_LEVELS = 256


def weight_bytes(*, fan_in: int, out: int, precision: BasePrecision) -> int:
    """Return the bytes of one linear layer's weight [out, fan_in] with its scales, without its bias.

    int8 and fp8 keep a float32 scale per output. nf4 (Dettmers et al. 2023, arXiv 2305.14314, as
    bitsandbytes stores it) keeps 4 bits a weight, an 8-bit scale per block, a float32 scale per block
    of scales, their float32 mean and the float32 table of the 8-bit scales: 4.13 bits a weight.
    """
    elements = fan_in * out
    match precision:
        case "fp32":
            return 4 * elements
        case "bf16" | "fp16":
            return 2 * elements
        case "int8" | "fp8":
            return elements + 4 * out
        case "nf4":
            scales = -(-elements // NF4_BLOCK)
            outer = -(-scales // NF4_SCALES_BLOCK)
            return -(-elements // 2) + scales + 4 * (outer + 1 + NF4_SCALE_LEVELS)


# ---- streamed blocks

BUFFERS = 2
"""Streamed blocks on the device at a time: one computes while the next one is copied."""


def streamed_indices(total: int, count: int) -> tuple[int, ...]:
    """Return the indices of `count` streamed blocks among `total` repeated ones, evenly spread.

    A copy hides behind the computation between two streamed blocks, so the gaps should be equally wide.
    """
    return tuple((2 * index + 1) * total // (2 * count) for index in range(count))


def moved_bytes(block_bytes: Sequence[int], count: int) -> int:
    """Return the host memory of `count` streamed blocks, which is also the most that a pass copies."""
    return sum(block_bytes[index] for index in streamed_indices(len(block_bytes), count))


def saved_bytes(block_bytes: Sequence[int], count: int) -> int:
    """Return the device memory that `count` streamed blocks free, net of their buffers.

    Below 0 where the buffers, each as large as the largest streamed block, take more than they replace.
    """
    chosen = [block_bytes[index] for index in streamed_indices(len(block_bytes), count)]
    return sum(chosen) - min(BUFFERS, count) * max(chosen, default=0)
