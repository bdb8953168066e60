"""Whether Black Forest Labs' own network of FLUX.2 dev predicts what the trainer's predicts.

`python -m scripts.readers.bfl_flux2 --checkout DIR --commit SHA` with a checkout of black-forest-labs/flux2 and the
package einops: narrow random networks in both layouts, at several sizes and seeds; the largest difference of the
predictions, relative to the largest prediction.
"""

from __future__ import annotations

import sys
from typing import Any

import diffusers
import torch
from torch import Tensor

from lora_trainer import families
from scripts.readers.cases import arguments
from tests.fakes.original_names import original_names
from tests.fakes.tiny_base import enliven

NAME = "flux2dev"
SIZES = ((8, 8, 7), (12, 6, 31), (4, 10, 64))
"""Rows and columns of the image and tokens of the text."""


def main() -> None:
    given = arguments(__doc__ or "")
    sys.path.insert(0, str(given.checkout / "src"))
    print(f"black-forest-labs/flux2 at {given.commit}")
    for seed, (rows, columns, tokens) in enumerate(SIZES):
        torch.manual_seed(seed)
        ours, theirs = _networks()
        noisy, text = torch.randn(2, 8, rows, columns), torch.randn(2, tokens, 24)
        sigma, scale = torch.rand(2), torch.tensor([3.5, 1.0])
        told = {"text": text, "guidance": scale}
        with torch.no_grad():
            predicted = families.family(NAME).predict(ours, noisy, 1000 * sigma, told)
            expected = _predicted(theirs, noisy, sigma, text, scale)
        error = float((predicted - expected).abs().max() / expected.abs().max())
        print(f"{rows}x{columns}, {tokens} tokens: largest difference {error:.1e} of the largest")


def _networks() -> tuple[Any, Any]:
    """Return a random network of diffusers and one of the release's own code with its weights."""
    from flux2.model import Flux2, Flux2Params  # type: ignore[import-not-found]  # the checkout's

    ours = diffusers.Flux2Transformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 4, 4, 4),
    ).eval()
    with torch.no_grad():
        enliven(ours)
    theirs = Flux2(
        Flux2Params(
            in_channels=8,
            context_in_dim=24,
            hidden_size=32,
            num_heads=2,
            depth=2,
            depth_single_blocks=3,
            axes_dim=[4, 4, 4, 4],
        )
    ).eval()
    theirs.load_state_dict(original_names(NAME, ours.state_dict()), strict=True)
    return ours, theirs


def _predicted(network: Any, noisy: Tensor, sigma: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Return the network's velocity [B, C, H, W], with positions as its sampling code makes them."""
    batch, _, rows, columns = noisy.shape
    zero = torch.arange(1)
    image_ids = torch.cartesian_prod(zero, torch.arange(rows), torch.arange(columns), zero)
    text_ids = torch.cartesian_prod(zero, zero, zero, torch.arange(text.shape[1]))
    velocity: Tensor = network(
        x=noisy.flatten(2).transpose(1, 2),
        x_ids=image_ids.expand(batch, -1, -1),
        timesteps=sigma,
        ctx=text,
        ctx_ids=text_ids.expand(batch, -1, -1),
        guidance=scale,
    )
    return velocity.transpose(1, 2).unflatten(2, (rows, columns))


if __name__ == "__main__":
    main()
