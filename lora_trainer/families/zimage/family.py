"""Z-Image, base and Turbo: a Qwen3 text encoder, FLUX.1's VAE, one stream of image and text tokens.

diffusers' network counts time from noise (0) to image (1) and predicts the velocity towards the image.
`predict` converts both to the convention of the flow families: timestep = 1000 sigma, target = noise - image.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from lora_trainer.families.base.facts import BaseRelease, Conditioning
from lora_trainer.families.base.flow import (
    FlowFamily,
    TransformerFormats,
    TransformerTraits,
    encoders,
    target_endings,
    text_lengths,
)
from lora_trainer.families.base.latents import MeanLatents
from lora_trainer.families.base.layout import Layout
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.base.stated import Stated
from lora_trainer.families.base.text.transformers_encoder import (
    QWEN3_UNREAD,
    Qwen3Encoder,
    qwen3_config,
)
from lora_trainer.families.base.traits import AdapterNames, PipelineTraits

if TYPE_CHECKING:
    from torch import Tensor, nn

# A Turbo that was trained back to a base keeps its scheduler's shift; publishers write de-turbo, De_Turbo and DeTurbo.
DE_TURBO = re.compile(r"de[-_ ]?turbo", re.IGNORECASE)


class ZImageEncoder(Qwen3Encoder):
    """Qwen3 with thinking on; the hidden states before its last layer."""

    layers = (-2,)
    thinking = True


class ZImage(FlowFamily):
    """The family of Z-Image (Z-Image team 2025, arXiv 2511.22699) and its fine-tunes."""

    name = "zimage"
    text = encoders(
        text_network("qwen3_4b"),
        encoder=ZImageEncoder,
        unread=QWEN3_UNREAD,
        width="cap_feat_dim",
        masked=True,
        multiple=32,  # diffusers' SEQ_MULTI_OF
    )
    traits = TransformerTraits(
        class_name="ZImageTransformer2DModel",
        endings=target_endings(
            tuple(f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
            transformer=tuple(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
            modulation=("adaLN_modulation.0",),
        ),
        refiners=("noise_refiner.", "context_refiner."),
    )
    pipeline = PipelineTraits(
        class_name="ZImagePipeline",
        text_arguments={"text": "prompt_embeds"},
        as_read=lambda *texts: [{"text": unpadded(each)} for each in texts],
        scale_offset=1.0,  # prompt + scale (prompt - negative)
    )
    latents = MeanLatents()
    formats = TransformerFormats(
        names=AdapterNames(kohya="zimage", modelspec="Z-Image/lora"),
        comfyui_prefix="diffusion_model.",
    )

    # ---- facts

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        """Return the release; base and Turbo have equal tensors, and a Turbo's folder has its scheduler's shift."""
        qwen3_config(layout.folder)  # raises for another text encoder
        if layout.part_file("denoiser") is not None:
            return plain
        return replace(plain, distilled=plain.scheduler.get("shift") == self._shift("turbo"))

    def as_distilled(
        self, release: BaseRelease, kind: str, *, steps: int = 0, is_file: bool = False
    ) -> BaseRelease:
        """Return it with the variant's name, and a single file with the shift of its release."""
        variant = "turbo" if kind else "base"
        told = replace(release, variant=variant)
        if is_file:
            told = replace(told, scheduler={**told.scheduler, "shift": self._shift(variant)})
        return super().as_distilled(told, kind, steps=steps, is_file=is_file)

    def as_stated(self, release: BaseRelease, stated: Stated) -> BaseRelease:
        told = super().as_stated(release, stated)
        if stated.file is not None and DE_TURBO.search(stated.name):
            return replace(told, scheduler={**told.scheduler, "shift": self._shift("turbo")})
        return told

    def _shift(self, variant: str) -> float:
        """Return the scheduler's shift of a release."""
        release = next(each for each in self.published if each.variant == variant)
        return float(release.scheduler["shift"])

    # ---- training

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        import torch

        images = denoiser(
            list(noisy.unsqueeze(2)),  # a list of [C, 1 frame, H, W]
            (1000 - timesteps) / 1000,  # time from noise (0) to image (1)
            unpadded(conditioning),
            return_dict=False,
        )[0]
        return -torch.stack(images).squeeze(2)  # towards the image -> noise - image


FAMILY = ZImage()


def unpadded(conditioning: Conditioning) -> list[Tensor]:
    """Split texts [B, L, D] into tensors [length, D] without padding."""
    lengths = text_lengths(conditioning)
    return [text[:length] for text, length in zip(conditioning["text"], lengths, strict=True)]
