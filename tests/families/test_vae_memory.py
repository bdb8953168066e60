"""What VAEs are planned with: counted on the real networks, on meta, at a size where attention is small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage

from lora_trainer import families
from lora_trainer.network.live_storages import LiveStorages

SIDE_PX = 256
AS_SD: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
}
BLOCK_CHANNELS = 16


class BlockedStorages(LiveStorages):
    """Also counts what oneDNN's convolutions make for a while: their input and result in blocks of channels.

    `blocked_bytes` is the peak with these. Measured on a processor for convolutions of 3 to 512 channels at 256
    and 512 px, fp32 and bf16: input and result in blocks, then both results (docs/LOG.md).
    """

    blocked_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if function.overloadpacket is torch.ops.aten.convolution:
            few = args[0].shape[1] < BLOCK_CHANNELS  # an input of 3 channels is taken as it is
            before = self.now_bytes - result.nbytes + (0 if few else in_blocks(args[0]))
            self.blocked_bytes = max(
                self.blocked_bytes, max(before, self.now_bytes) + in_blocks(result)
            )
        self.blocked_bytes = max(self.blocked_bytes, self.peak_bytes)
        return result


def in_blocks(tensor: torch.Tensor) -> int:
    channels = tensor.shape[1]
    return tensor.nbytes // channels * (-(-channels // BLOCK_CHANNELS) * BLOCK_CHANNELS)


def vae_of(name: str) -> tuple[Any, int]:
    """Return (VAE of a family's releases, channels of its latents)."""
    if name == "qwen":
        return AutoencoderKLQwenImage(), 16
    if name == "flux2":
        return AutoencoderKLFlux2(), 32
    channels = 4 if name in ("sd15", "sd2", "sdxl") else 16
    return AutoencoderKL(**AS_SD, latent_channels=channels), channels


@pytest.mark.parametrize("name", families.MODULES)
def test_a_vae_takes_what_is_planned(name: str) -> None:
    """Qwen-Image's was planned at 640 and 768 elements a pixel: 3.0 GiB for decoding 1024 px instead of 6.8."""
    family = families.family(name)
    frame = (1,) if name == "qwen" else ()
    with torch.device("meta"), torch.no_grad():
        vae, channels = vae_of(name)
        vae.eval().requires_grad_(False)
        pixels = torch.empty(1, 3, *frame, SIDE_PX, SIDE_PX)
        latents = torch.empty(1, channels, *frame, SIDE_PX // 8, SIDE_PX // 8)
        with BlockedStorages(ignored=[*vae.parameters(), *vae.buffers(), pixels]) as encoding:
            vae.encode(pixels)
        with BlockedStorages(ignored=[*vae.parameters(), *vae.buffers(), latents]) as decoding:
            vae.decode(latents)
    counted = [live.peak_bytes / 4 / SIDE_PX**2 for live in (encoding, decoding)]
    planned = [family.traits.vae_peak.encoding, family.traits.vae_peak.decoding]
    assert counted == pytest.approx(planned, rel=0.01)
    blocked = [live.blocked_bytes / 4 / SIDE_PX**2 for live in (encoding, decoding)]
    assert blocked == pytest.approx(family.traits.vae_peak.blocked, rel=0.01)
