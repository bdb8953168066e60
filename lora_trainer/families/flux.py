"""FLUX.1 dev and schnell: a transformer of joint and single blocks, CLIP's pooled text and T5's tokens.

Dev was distilled with an embedded guidance scale; schnell was distilled to few steps without guidance.
Conditioning: `text` [B, 512 or 256, 4096] with padding unmasked as in the base's training, `pooled`
[B, 768], and `guidance` [B] for dev.

An example of a family; how to add one is said at the top of base.py, step by step in docs/adding-a-family.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import (
    AdapterNames,
    BaseFacts,
    BaseRelease,
    Conditioning,
    Guidance,
    Header,
    Layout,
)
from lora_trainer.families.base_files.base_folder import part_file, read_header
from lora_trainer.families.base_files.network_files import denoiser_names
from lora_trainer.families.flow import (
    JOINT_ATTENTION,
    JOINT_FEED_FORWARD,
    FlowFamily,
    pack,
    position_ids,
    target_endings,
    unpack,
)
from lora_trainer.families.text.text_layers import BY_ROLE
from lora_trainer.families.text.transformers_encoder import PooledT5Encoder

if TYPE_CHECKING:
    from torch import Tensor, nn

ENDINGS = target_endings(
    JOINT_ATTENTION,
    transformer=(*JOINT_FEED_FORWARD, "proj_mlp", "proj_out"),
    modulation=("norm1.linear", "norm1_context.linear", "norm.linear"),
)
_GUIDANCE = frozenset(
    {"guidance_in.in_layer.weight", "time_text_embed.guidance_embedder.linear_1.weight"}
)
LATENT_CHANNELS = 16


class Flux(FlowFamily):
    """The family of FLUX.1 dev, schnell, and everything fine-tuned from them."""

    name = "flux"
    pipeline_class = "FluxPipeline"
    denoiser_class = "FluxTransformer2DModel"
    text_networks = (BY_ROLE["clip_l"], BY_ROLE["t5xxl"])
    text_encoder_class = PooledT5Encoder
    endings = ENDINGS
    packed_latents = True
    negative_prompt = False  # a guidance-distilled base takes none
    # The last norm: diffusers has scale before shift, the original code the reverse.
    swapped_layers = frozenset({"norm_out.linear"})

    # ---- facts

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        # Dev and schnell differ in no name and no shape but the embedder of the guidance scale.
        return self.published[0 if _reads_guidance(file) else 1]

    def facts(self, layout: Layout, *, source: str) -> BaseFacts:
        facts = super().facts(layout, source=source)
        _require_text_to_image(int(facts.architecture["in_channels"]), source=source)
        return facts

    def architecture(self, layout: Layout) -> Mapping[str, Any]:
        """Return the folder's configuration with `guidance_embeds` of the single file.

        A dev file may have a schnell folder as companion, or the reverse.
        """
        config, single = super().architecture(layout), part_file(layout, "denoiser")
        return config if single is None else {**config, "guidance_embeds": _reads_guidance(single)}

    def scheduler(self, layout: Layout) -> Mapping[str, Any]:
        config, single = super().scheduler(layout), part_file(layout, "denoiser")
        # A companion of the other release brings its shift along: dev's grows
        # with the image, schnell's is 1, none at all.
        if single is None or _reads_guidance(single) == super().architecture(layout).get(
            "guidance_embeds", False
        ):
            return config
        return self.published[0 if _reads_guidance(single) else 1].scheduler

    def max_tokens(self, layout: Layout) -> int:
        return self._release(self.architecture(layout)).max_tokens

    def release(self, architecture: Mapping[str, Any], layout: Layout) -> tuple[str, bool]:
        return (release := self._release(architecture)).variant, release.distilled

    def _release(self, architecture: Mapping[str, Any]) -> BaseRelease:
        return self.published[0 if architecture.get("guidance_embeds", False) else 1]

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        return AdapterNames(kohya="flux1", modelspec=f"flux-1-{facts.variant}/lora")

    def guidance(self, architecture: Mapping[str, Any], *, distilled: bool) -> Guidance:
        """Return the embedded scale of dev; schnell has no guidance."""
        return Guidance(two_passes=False, embedded=bool(architecture.get("guidance_embeds", False)))

    # ---- training

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        text = conditioning["text"]
        velocity: Tensor = denoiser(
            hidden_states=pack(noisy),
            # The network multiplies by 1000 again, and the guidance scale likewise.
            timestep=timesteps / 1000,
            guidance=conditioning.get("guidance"),
            pooled_projections=conditioning["pooled"],
            encoder_hidden_states=text,
            # All text tokens stand at position 0, as in
            # FluxPipeline.encode_prompt: T5's states carry their order.
            txt_ids=text.new_zeros(text.shape[1], 3),
            img_ids=position_ids(noisy),
            return_dict=False,
        )[0]
        return unpack(velocity, height=noisy.shape[-2], width=noisy.shape[-1])


FAMILY = Flux()


def _reads_guidance(file: Path) -> bool:
    return bool(_GUIDANCE & denoiser_names(read_header(file)).keys())


def _require_text_to_image(in_channels: int, *, source: str) -> None:
    # Fill has 384 channels: 64 of noise, 64 of the masked image, 256 of the mask at full resolution (8 x 8
    # x 4). Control releases have 128, noise and the control image.
    if in_channels != 4 * LATENT_CHANNELS:
        raise InputError(
            f"{source} takes {in_channels} channels: a fill or control release; "
            f"text-to-image has {4 * LATENT_CHANNELS}",
            fix="use FLUX.1-dev or a base fine-tuned from it",
        )
