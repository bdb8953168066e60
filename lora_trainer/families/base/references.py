"""How a base reads reference images: how many, at which size, their names in the conditioning. Torch-free to import.

A base that edits reads the noisy image and, behind it in one sequence, the latents of one or more references, which
get no noise. A U-Net has no sequence: it reads one reference as more channels of the image. Its family states a
`References`; `predict` finds the latents among the conditioning (`references_in`) and returns the prediction of the
noisy image alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_NAME = "reference_"


@dataclass(frozen=True, kw_only=True)
class References:
    """How a base reads reference images."""

    most: int
    """References of one image that it reads."""
    least: int = 0
    """1: it draws nothing without a reference."""
    side_px: int = 1024
    """Side of the square that has the most pixels a reference is read with."""
    tokens: int = 1
    """Sides of a reference are multiples of so many tokens."""
    grows: bool = False
    """Whether smaller references are enlarged to that many pixels."""
    sizes_px: tuple[tuple[int, int], ...] = ()
    """The (width, height) that references have at full size, the nearest in shape; empty: any."""
    pipeline: str = ""
    """diffusers' pipeline that draws with references; "": the one that draws without them."""
    arguments: Callable[[tuple[int, int]], Mapping[str, Any]] = lambda size_px: {}
    """Its arguments to draw an image of (width, height) with references as large as they are given."""
    seen_tokens: Callable[[tuple[int, int]], int] | None = None
    """Tokens that a reference of (width, height) adds to the text, where text encoders see it; None: they do not."""
    read_tokens: Callable[[tuple[int, int]], int] | None = None
    """Tokens that text encoders read of it, where not all of them are added to the text; None: they are."""
    in_text: bool = False
    """Its latents stand within the text, at `IMAGE_PLACES`, and attend to what is before them only."""
    as_channels: bool = False
    """Its latents are more channels of the image's: it is as large as the image, and adds no tokens."""
    scale: float = 1.0
    """What the VAE's normalised latents of a reference are multiplied by, for a base that reads them otherwise."""
    appended: (
        Callable[[Any, Sequence[Tensor], Sequence[int]], AbstractContextManager[None]] | None
    ) = None
    """Lets a denoiser read latents [1, C, h, w] beside every image, while the block runs, those within the text at its
    `image_places`; for bases that draw with references in the pipeline without them, as theirs would scale references
    to another size."""

    def size_px(
        self, width_px: int, height_px: int, *, side_px: int, token_px: int
    ) -> tuple[int, int]:
        """Return the size at which a reference is read, of at most `side_px` squared pixels.

        Its shape is kept but for less than one step, which is cropped: width and height are never swapped.
        """
        if self.sizes_px and side_px >= self.side_px:
            ratio = width_px / height_px
            return min(self.sizes_px, key=lambda size: abs(math.log(size[0] / size[1] / ratio)))
        area = min(side_px, self.side_px) ** 2
        # In whole numbers where the image fits already: a rounding error would cost it a step.
        scale = math.sqrt(area / (width_px * height_px))
        if width_px * height_px == area or (not self.grows and scale > 1):
            scale = 1.0
        step_px = self.tokens * token_px
        width, height = (
            max(step_px, int(side * scale) // step_px * step_px) for side in (width_px, height_px)
        )
        return width, height

    def text_tokens(self, sizes_px: Iterable[tuple[int, int]]) -> int:
        """Return the tokens that references of these (width, height) add to a text."""
        return sum(map(self.seen_tokens, sizes_px)) if self.seen_tokens else 0

    def encoded_tokens(self, sizes_px: Iterable[tuple[int, int]]) -> int:
        """Return the tokens that text encoders read of references of these (width, height)."""
        return (
            sum(map(self.read_tokens, sizes_px)) if self.read_tokens else self.text_tokens(sizes_px)
        )

    def drawing(self, images: Sequence[Any], size_px: tuple[int, int]) -> Mapping[str, Any]:
        """Return the pipeline's arguments to draw with these images as references."""
        from PIL import ImageOps

        given = list(images) if self.most > 1 else images[0]
        if self.as_channels:  # its pipeline draws an image as large as the reference
            given = ImageOps.fit(images[0], size_px)
        return {"image": given, **self.arguments(size_px)}


def with_references(latents: Sequence[Tensor], *, scale: float = 1.0) -> Mapping[str, Tensor]:
    """Return the conditioning of references: normalised latents [C, h, w], by name, batch 1."""
    if scale != 1.0:
        latents = [latent * scale for latent in latents]
    return {f"{_NAME}{place}": latent.unsqueeze(0) for place, latent in enumerate(latents)}


def references_in(conditioning: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the latents [B, C, h, w] of each reference, the first one first."""
    count = sum(name.startswith(_NAME) for name in conditioning)
    return [conditioning[f"{_NAME}{place}"] for place in range(count)]


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return tensors as one along a dimension; one alone as it is, without a copy."""
    import torch

    return torch.cat(list(parts), dim=dim) if len(parts) > 1 else parts[0]
