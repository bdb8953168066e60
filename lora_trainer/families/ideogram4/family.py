"""Ideogram 4: one stream of text and image tokens on thirteen inner states of Qwen3-VL 8B, captions in JSON.

Conditioning: `text` [B, L, 4096 x 13], the thirteen values of a channel one after another, without padding, and
`text_mask` [B, L]. diffusers' pipeline pads at the left to 2048 tokens; its masks keep padding from every other token,
and the places of a text's tokens are counted from its first, so that padding changes nothing.
Latents are FLUX.2's with another order of channels. diffusers' network counts time from noise (0) to image (1) and
predicts the velocity towards the image; `predict` converts both to timestep = 1000 sigma, target = noise - image. A
second network of the release, `unconditional_transformer`, predicts without text where images are drawn with guidance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lora_trainer.families.base.facts import BaseRelease, Conditioning
from lora_trainer.families.base.flow import (
    FlowFamily,
    TransformerTraits,
    encoders,
    target_endings,
)
from lora_trainer.families.base.layout import Layout
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.base.text.qwen3_vl import (
    QWEN3_VL_LAST_NORM,
    QWEN3_VL_UNREAD,
    Qwen3VLEncoder,
    holds_itself,
)
from lora_trainer.families.base.text.transformers_encoder import text_config, without_padding
from lora_trainer.families.base.traits import AdapterFormats, AdapterNames, PipelineTraits
from lora_trainer.families.flux2.family import SquareLatents
from lora_trainer.families.ideogram4.captions import JSON_CAPTIONS

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Places of image tokens begin here on all three axes, so that no text token has one of them.
IMAGE_PLACE = 65_536
# The release's recipes draw their last steps, one of sixteen, with this scale.
LAST_SCALE, LAST_STEPS = 3.0, 16


class Ideogram4Encoder(Qwen3VLEncoder):
    """Every third state of Qwen3-VL 8B and its last before the norm, channel by channel."""

    layers = (*range(1, 35, 3), 36)
    last_norm = False
    adds_special_tokens = False

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        import torch

        states, _ = self.states(tokens)
        return without_padding(torch.stack(states, dim=-1).flatten(2), tokens["mask"])


class TokenLatents(SquareLatents):
    """FLUX.2's latents with the channels of a square's first latent before those of its second.

    The statistics of the release's VAE have that order too.
    """

    def posterior(self, vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale = self.statistics(vae)
        latents = vae.encode(pixels).latent_dist
        return (_squares(latents.mean) - shift) / scale, _squares(latents.std) / scale

    def decode(self, vae: Any, latents: Tensor, size_px: tuple[int, int]) -> Tensor:
        from torch.nn.functional import pixel_shuffle

        shift, scale = self.statistics(vae)
        squares = (latents.float() * scale + shift).unflatten(1, (4, -1))
        by_channel = squares.transpose(1, 2).flatten(1, 2)
        return super().decode(vae, pixel_shuffle(by_channel, 2), size_px)


def _squares(latents: Tensor) -> Tensor:
    """Return [B, 4 C, H/2, W/2]: row and column in the square vary slowest, then the channel."""
    from torch.nn.functional import pixel_unshuffle

    by_channel = pixel_unshuffle(latents, 2).unflatten(1, (-1, 4))
    squares: Tensor = by_channel.transpose(1, 2).flatten(1, 2)
    return squares


def recipe(scale: float, steps: int) -> Mapping[str, Any]:
    """Return the pipeline's arguments as in the release's recipes of 48, 20 and 12 steps.

    The last steps have a lower guidance scale; few steps spread over the noise levels in another way.
    """
    last = math.ceil(steps / LAST_STEPS)
    return {
        "guidance_schedule": [scale] * (steps - last) + [min(scale, LAST_SCALE)] * last,
        "mu": 0.5 if steps <= 12 else 0.0,
        "std": 1.75 if steps <= 20 else 1.5,
    }


@dataclass(frozen=True, kw_only=True)
class Images:
    """Draws latents as `Ideogram4Pipeline` does, of a text that is already encoded, which that does not take."""

    scheduler: Any
    denoiser: Any
    unguided: Any
    pixels_a_token: int

    def __call__(
        self,
        *,
        text: Tensor,
        guidance_schedule: Sequence[float],
        mu: float,
        std: float,
        num_inference_steps: int,
        width: int,
        height: int,
        generator: torch.Generator,
        output_type: str,
    ) -> SimpleNamespace:
        """Return `images` [1, channels, rows, columns] of latents, the only `output_type`."""
        import torch
        from diffusers.pipelines.ideogram4.pipeline_ideogram4 import (
            _logit_normal_sigmas,
            _resolution_aware_mu,
        )

        assert output_type == "latent", f"{output_type} is not drawn here"
        device = text.device
        side_px, channels = self.pixels_a_token, self.denoiser.config.in_channels
        rows, columns = height // side_px, width // side_px
        mean = _resolution_aware_mu(height=height, width=width, base_mu=mu)
        sigmas = _logit_normal_sigmas(num_inference_steps, mean, std=std)
        self.scheduler.set_timesteps(sigmas=sigmas.tolist(), device=device)
        # Tokens, as the pipeline has them: a seed gives its noise.
        noise = torch.randn(1, rows * columns, channels, generator=generator)
        latents = noise.transpose(1, 2).unflatten(2, (rows, columns)).to(device)
        with torch.no_grad():
            for scale, timestep in zip(guidance_schedule, self.scheduler.timesteps, strict=True):
                noisy, time = latents.to(text.dtype), timestep.float()[None]
                velocity = _velocity(self.denoiser, noisy, time, text).float()
                if scale != 1:
                    plain = _velocity(self.unguided, noisy, time, text[:, :0]).float()
                    velocity = plain + scale * (velocity - plain)
                latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        return SimpleNamespace(images=latents)


class Ideogram4(FlowFamily):
    """The family of Ideogram 4 (Ideogram 2026) and its fine-tunes."""

    name = "ideogram4"
    text = encoders(
        replace(text_network("qwen3vl_8b"), network="Qwen3VLModel", parameters=7_568_401_408),
        encoder=Ideogram4Encoder,
        unread=(*QWEN3_VL_UNREAD, *QWEN3_VL_LAST_NORM),
        inner="language_model",
        width="llm_features_dim",
        json_captions=JSON_CAPTIONS,
        masked=True,
    )
    traits = TransformerTraits(
        class_name="Ideogram4Transformer2DModel",
        # `TokenLatents` folds the squares into channels: the denoiser has one token per latent.
        patch=1,
        endings=target_endings(
            tuple(f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
            transformer=tuple(f"feed_forward.w{number}" for number in (1, 2, 3)),
        ),
        unshifted_px=512,
    )
    pipeline = PipelineTraits(
        class_name="Ideogram4Pipeline",
        absent={"unconditional_transformer": None, "prompt_enhancer_head": None},
        text_arguments={"text": "text"},
        as_read=lambda prompt, negative: (prompt, {}),
        takes_negative=False,
        reads_vae=True,
        scales=recipe,
        images=lambda facts, denoiser, unguided: Images(
            scheduler=facts.release.sampling_scheduler(),
            denoiser=denoiser,
            unguided=unguided,
            pixels_a_token=facts.vae_factor,
        ),
        unguided="unconditional_transformer",
        mend=partial(holds_itself, name="language_model"),
    )
    formats = AdapterFormats(
        names=AdapterNames(
            kohya="ideogram4", modelspec="Ideogram/lora"
        ),  # ai-toolkit's, OneTrainer's
        written=("comfyui", "diffusers"),
        refused={
            "kohya": "its names have q, k and v as one layer too; use output.format=comfyui, which ComfyUI and "
            "diffusers read"
        },
        comfyui_prefix="diffusion_model.",
        # ComfyUI has no names for to_q, to_k and to_v of this network.
        original=frozenset({"comfyui"}),
        unread={
            "diffusers": "ComfyUI finds no layer of Ideogram 4 under these names; output.format=comfyui has those it "
            "reads"
        },
    )
    latents = TokenLatents()

    # ---- facts

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        text_config(layout.folder, kind="qwen3_vl")  # raises for another text encoder
        # Ideogram's own folders have a configuration with keys of its own code.
        released = self.published[0].architecture
        own = {key: value for key, value in plain.architecture.items() if key in released}
        return replace(plain, architecture={**released, **own})

    # ---- networks

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        # A single text has no padding, and without a mask attention can use its fastest kernel.
        mask = conditioning["text_mask"] if len(noisy) > 1 else None
        return _velocity(denoiser, noisy, timesteps, conditioning["text"], mask)


FAMILY = Ideogram4()


def _velocity(
    network: Any, noisy: Tensor, timesteps: Tensor, text: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return the velocity towards the noise, as the network's own `forward` does for the tokens of the image.

    That one has each token's text, 53,248 channels that are zero for image tokens, and masks [L, L] where none is
    needed. `text` may have no tokens; `mask` is 0 on those that are padding.
    """
    import torch
    from torch.nn.functional import silu

    (_, tokens, _), (*_, rows, columns) = text.shape, noisy.shape
    device = noisy.device
    stream = network.input_proj(noisy.flatten(2).transpose(1, 2))
    kinds = network.embed_image_indicator(torch.arange(2, device=device))
    stream = stream + kinds[1]
    if tokens:
        read = network.llm_cond_proj(network.llm_cond_norm(text)) + kinds[0]
        stream = torch.cat([read, stream], dim=1)
    times = silu(network.adaln_proj(_time(network, timesteps, stream.dtype)[:, None]))
    angles = _angles(network.rotary_emb, _places(tokens, rows, columns, device))[None]
    rotations = angles.cos().to(stream.dtype), angles.sin().to(stream.dtype)
    attended = None
    if mask is not None:
        is_read = torch.nn.functional.pad(mask.bool(), (0, rows * columns), value=True)
        attended = is_read[:, None, None]
    for block in network.layers:
        if network.gradient_checkpointing and torch.is_grad_enabled():
            stream = network._gradient_checkpointing_func(block, stream, attended, rotations, times)
        else:
            stream = block(stream, attended, rotations, times)
    velocity = network.final_layer(stream[:, tokens:], conditioning=times)
    unpacked: Tensor = velocity.transpose(1, 2).unflatten(2, (rows, columns))
    return -unpacked


def _time(network: Any, timesteps: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the embedding of 1 - sigma.

    In float32 up to the first layer, as in ComfyUI; diffusers' pipeline rounds the time to the network's dtype first.
    """
    from diffusers.models.transformers.transformer_ideogram4 import _sinusoidal_embedding
    from torch.nn.functional import silu

    embedding = network.t_embedding
    # In the order of the others' operations: in float32 a phase of ten thousand has steps of a thousandth.
    waves = _sinusoidal_embedding(1e4 * (1.0 - timesteps.float() / 1000.0), embedding.dim)
    embedded: Tensor = embedding.mlp_out(silu(embedding.mlp_in(waves.to(dtype))))
    return embedded


def _angles(rope: Any, places: Tensor) -> Tensor:
    """Return the angles of each token, float32 [tokens, channels of a head], as the network's `rotary_emb` has them.

    That one switches autocast off, which a meta device has not. Every third frequency is the row's, and every third
    the column's, as far as their sections go; all others are those of time.
    """
    import torch

    by_axis = places.float()[..., None] * rope.inv_freq.float()
    angles = by_axis[:, 0].clone()
    for axis in (1, 2):
        own = slice(axis, 3 * rope.mrope_section[axis], 3)
        angles[:, own] = by_axis[:, axis, own]
    return torch.cat([angles, angles], dim=-1)


def _places(tokens: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Return int64 [tokens + rows columns, 3]: text counts along all axes, the image has time 0, row and column."""
    import torch

    text = torch.arange(tokens, device=device)[:, None].expand(-1, 3)
    sides = [torch.arange(count, device=device) for count in (1, rows, columns)]
    return torch.cat([text, torch.cartesian_prod(*sides) + IMAGE_PLACE])
