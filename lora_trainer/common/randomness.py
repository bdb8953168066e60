"""Counter-based randomness: each draw is a pure function of its name, never of earlier draws.

A draw's name is (seed, stream, counters); the counters are its epoch, sample or step. A resume therefore
saves no generator state, batch splits and worker counts cannot change a draw, and two streams never share
numbers. After Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", with BLAKE2b as the mixing
function. Torch-free: consumers seed their own CPU generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import StrEnum


class Stream(StrEnum):
    """Purpose of a draw and part of its name: a new stream leaves the draws of all others unchanged."""

    ORDER = "order"
    RESOLUTION = "resolution"
    FLIP = "flip"
    CAPTION_VARIANT = "caption-variant"
    CAPTION_DROPOUT = "caption-dropout"
    REFERENCE_DROPOUT = "reference-dropout"
    TAG_SHUFFLE = "tag-shuffle"
    TAG_DROPOUT = "tag-dropout"
    WILDCARD = "wildcard"
    LATENT = "latent"
    TIMESTEP = "timestep"
    TIMESTEP_STRATUM = "timestep-stratum"
    INPUT_PERTURBATION = "input-perturbation"
    NOISE = "noise"
    KEPT_PROMPT = "kept-prompt"
    ADAPTER_INIT = "adapter-init"
    NEW_TOKENS = "new-tokens"
    ADAPTER_DROPOUT = "adapter-dropout"
    REGULARISATION = "regularisation"
    VALIDATION_SPLIT = "validation-split"
    VALIDATION_NOISE = "validation-noise"
    DRIFT_NOISE = "drift-noise"
    SAMPLE_IMAGE = "sample-image"


def draw_seed(seed: int, stream: Stream, *counters: int | str) -> int:
    """Return the 63-bit seed of one draw's generator (fits `torch.Generator.manual_seed`)."""
    # The separator and the type tags keep names apart that would join to equal text, such as 1 and "1".
    tagged = (f"i{one}" if isinstance(one, int) else f"s{one}" for one in counters)
    name = "\x1f".join([str(seed), stream.value, *tagged])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def draw_uniform(seed: int, stream: Stream, *counters: int | str) -> float:
    """Return one uniform number in [0, 1) with 53 random bits."""
    # 63 random bits minus 10 are the 53 bits of a float's mantissa: every result is exact and below 1.
    return (draw_seed(seed, stream, *counters) >> 10) / 2**53


def draw_choice(count: int, seed: int, stream: Stream, *counters: int | str) -> int:
    """Return a number of range(count), which must not be empty."""
    return int(draw_uniform(seed, stream, *counters) * count)


def shuffled(names: Iterable[str], seed: int, stream: Stream, *counters: int | str) -> list[str]:
    """Order `names` by a hash of each name; the input's order does not matter.

    Adding or removing a name leaves the relative order of the others unchanged.
    """
    return sorted(names, key=lambda name: (draw_seed(seed, stream, *counters, name), name))
