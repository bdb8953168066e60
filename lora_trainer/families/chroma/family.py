"""Chroma: FLUX.1 schnell without modulation layers and CLIP, undistilled, with texts of their own length.

Conditioning: `text` [B, tokens, 4096] of T5 with one token of padding, `text_mask` [B, tokens]. The network
was trained with all further padding masked out, so no further padding is passed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lora_trainer.families.base.facts import Conditioning
from lora_trainer.families.base.flow import (
    FlowFamily,
    TransformerFormats,
    TransformerTraits,
    encoders,
    in_one_length,
)
from lora_trainer.families.base.latents import PackedLatents
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.base.text.transformers_encoder import TransformersEncoder
from lora_trainer.families.base.traits import AdapterNames, PipelineTraits
from lora_trainer.families.flux.family import ENDINGS, velocity

if TYPE_CHECKING:
    from torch import Tensor, nn


class ChromaTextEncoder(TransformersEncoder):
    """T5 with masked padding; its output ends with one padding token."""

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return `ids` and `mask` [B, tokens] of the longest prompt's length plus one padding token."""
        ids, mask = self.tokens_of(self.last, prompts, length=self.facts.release.max_tokens)
        longest = min(int(mask.sum(dim=1).max()) + 1, self.facts.release.max_tokens)
        return {"ids": ids[:, :longest], "mask": mask[:, :longest]}

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, tokens, channels], zero beyond each prompt, and `text_mask` [B, tokens]."""
        import torch

        states = self.run(self.last, tokens["ids"], tokens["mask"])[0]
        mask = tokens["mask"]
        positions = torch.arange(mask.shape[1], device=mask.device)
        # `<=` and not `<`: the first token of padding stays visible, as in the base's training
        # (ChromaPipeline._get_t5_prompt_embeds in diffusers).
        visible = (positions <= mask.sum(dim=1, keepdim=True)).to(states.device)
        return {"text": states * visible[..., None], "text_mask": visible.long()}


def _mask_by_booleans(pipeline: Any) -> None:
    """Give diffusers' pipeline a boolean attention mask.

    diffusers 0.42.1 makes the mask of floats, which attention adds to the scores instead of masking
    (diffusers issue 12116): padding then dilutes short prompts, unlike in training and other programs.
    """
    prepare = pipeline._prepare_attention_mask

    def as_booleans(*, attention_mask: Tensor | None = None, **other: Any) -> Tensor | None:
        mask = None if attention_mask is None else attention_mask.bool()
        prepared: Tensor | None = prepare(attention_mask=mask, **other)
        return prepared

    pipeline._prepare_attention_mask = as_booleans


class Chroma(FlowFamily):
    """The family of Chroma1-HD, Chroma1-Base and everything fine-tuned from them."""

    name = "chroma"
    text = encoders(
        text_network("t5xxl"),
        encoder=ChromaTextEncoder,
        masked=True,
        one_length=True,  # `predict` runs one pass per text length, so samples are batched by it
    )
    traits = TransformerTraits(
        class_name="ChromaTransformer2DModel",
        endings=ENDINGS,
        quantization_skip=("distilled_guidance_layer",),  # it makes the modulation of all blocks
    )
    pipeline = PipelineTraits(
        class_name="ChromaPipeline",
        text_arguments={"text": "prompt_embeds", "text_mask": "prompt_attention_mask"},
        # Integers would be added to the scores instead of masking (see `_mask_by_booleans`).
        as_read=lambda *texts: [{**each, "text_mask": each["text_mask"].bool()} for each in texts],
        mend=_mask_by_booleans,
    )
    formats = TransformerFormats(
        names=AdapterNames(kohya="chroma", modelspec="chroma/lora"),
        unread=dict.fromkeys(
            ("diffusers", "comfyui"),
            "Forge reads nothing of it; ComfyUI and diffusers read all of it",
        ),
    )
    latents = PackedLatents()

    def empty_denoiser(self, architecture: Mapping[str, Any]) -> nn.Module:
        # diffusers 0.42.1 builds this network with a class that diffusers itself deprecated.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`FluxPosEmbed` is deprecated")
            network: Any = super().empty_denoiser(architecture)
        network.time_text_embed.guidance_proj = _zero_guidance(
            network.time_text_embed.guidance_proj
        )
        changed: nn.Module = network
        return changed

    # ---- training

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Run one forward pass per text length in the batch, so that no pass needs a mask.

        A mask would rule out flash attention and store a bias of tokens^2 for each block, and
        diffusers 0.42.1 does not pass it to the single blocks under gradient checkpointing.
        """
        return in_one_length(partial(velocity, denoiser), noisy, timesteps, conditioning)


def _zero_guidance(embedding: nn.Module) -> nn.Module:
    """Return a module whose answer lies where the network is, whatever it is asked.

    The guidance is always 0. diffusers embeds it in host memory in every pass, and the host waits for the copy.
    """
    import torch

    class ZeroGuidance(torch.nn.Module):
        embedded: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("embedded", embedding(torch.zeros(1)), persistent=False)

        def forward(self, guidance: Tensor) -> Tensor:
            return self.embedded.expand(len(guidance), -1)

    return ZeroGuidance()


FAMILY = Chroma()
