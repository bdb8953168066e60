"""Lumina-Image 2.0: Gemma 2 as text encoder, FLUX.1's VAE, one stream of image and text tokens.

Qin et al. 2025 (arXiv 2503.21758). Conditioning: `text` [B, L, 2304], the hidden states before Gemma's last
layer, and `text_mask` [B, L]. diffusers' network counts time from noise (0) to image (1) and predicts the
velocity towards the image; `predict` converts both to timestep = 1000 sigma, target = noise - image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_trainer.families.base.facts import Conditioning
from lora_trainer.families.base.flow import (
    FlowFamily,
    TransformerTraits,
    encoders,
    recomputed,
    target_endings,
    text_lengths,
)
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.base.text.transformers_encoder import MaskedEncoder
from lora_trainer.families.base.traits import AdapterFormats, AdapterNames, PipelineTraits

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# diffusers' pipeline puts it before a prompt; the base was trained with it.
SYSTEM_PROMPT = (
    "You are an assistant designed to generate superior images with the superior degree of image-text "
    "alignment based on textual prompts or user prompts."
)
PROMPT_START = "<Prompt Start>"


def before_prompts(system_prompt: str) -> str:
    """Return what is put before a prompt, as the pipeline and sd-scripts do; people copy it with the mark."""
    words = system_prompt.strip().removesuffix(PROMPT_START).rstrip()
    return f"{words} {PROMPT_START} " if words else ""


class Gemma2Encoder(MaskedEncoder):
    """Gemma 2 on the prompt after the system prompt; an empty prompt is encoded alone, as in training.

    The pipeline pads to 256. The network cuts each text at its own length, so the result is the same.
    """

    padding_side = "right"  # the tokenizer's own is left; the pipeline sets right

    def template(self, prompt: str) -> str:
        return before_prompts(self.facts.system_prompt or "") + prompt if prompt else ""

    def prompt_room(self) -> int:
        text = before_prompts(self.facts.system_prompt or "").rstrip(" ")
        return self.facts.release.max_tokens - len(self.tokenizers[self.last](text).input_ids)

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        states, mask = self.states(tokens)
        return {"text": states[-2] * mask[..., None], "text_mask": mask}


def _of_one_length(*texts: Conditioning) -> list[Conditioning]:
    """Pad the shorter text: both must have one length."""
    from torch.nn.utils.rnn import pad_sequence

    padded = {
        key: pad_sequence([each[key][0] for each in texts], batch_first=True)
        for key in ("text", "text_mask")
    }
    return [{key: rows[n : n + 1] for key, rows in padded.items()} for n in range(len(texts))]


class Lumina2(FlowFamily):
    """The family of Lumina-Image 2.0 and its fine-tunes."""

    name = "lumina2"
    formats = AdapterFormats(
        names=AdapterNames(kohya="lumina2", modelspec="lumina-2/lora"),  # as sd-scripts writes it
        written=("comfyui", "diffusers"),
        refused={
            "kohya": "its names have q, k and v as one layer too; use output.format=comfyui, which ComfyUI reads"
        },
        comfyui_prefix="diffusion_model.",
        # ComfyUI has no names for to_q, to_k and to_v where they are of unequal size.
        original=frozenset({"comfyui"}),
        unread={
            "diffusers": "ComfyUI finds no layer of Lumina 2 under these names; output.format=comfyui has those it "
            "reads",
            "comfyui": "diffusers loads these names only of files that change all layers of each block "
            "(adapter.targets=all); output.format=diffusers has those it reads",
        },
    )
    text = encoders(
        text_network("gemma2_2b"),
        encoder=Gemma2Encoder,
        unread=("spiece_model",),  # ComfyUI's files bring the tokenizer as a tensor of bytes
        width="cap_feat_dim",
        masked=True,
        system_prompt=SYSTEM_PROMPT,
        before_prompts=before_prompts,
    )
    traits = TransformerTraits(
        class_name="Lumina2Transformer2DModel",
        endings=target_endings(
            tuple(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
            transformer=tuple(f"feed_forward.linear_{number}" for number in (1, 2, 3)),
            modulation=("norm1.linear",),
        ),
        refiners=("noise_refiner.", "context_refiner."),
        # sd-scripts' `nextdit_shift`, ai-toolkit's `lumina2_shift`, diffusion-pipe's `lumina_shift`.
        shifts_by_tokens=True,
    )
    pipeline = PipelineTraits(
        class_name="Lumina2Pipeline",
        text_arguments={"text": "prompt_embeds", "text_mask": "prompt_attention_mask"},
        as_read=_of_one_length,
        system_argument="system_prompt",
        negative_prefix=before_prompts(
            SYSTEM_PROMPT
        ),  # the pipeline puts it before the prompt only
    )

    def empty_denoiser(self, architecture: Mapping[str, Any]) -> nn.Module:
        """Let gradient checkpointing reach the refiner blocks: diffusers 0.42.1 recomputes `layers` only."""
        # Without it swapped weights were overwritten before the backward pass of the refiners,
        # and torch refused ("modified by an inplace operation").
        network: Any = super().empty_denoiser(architecture)
        network.noise_refiner = recomputed(network.noise_refiner)
        network.context_refiner = recomputed(network.context_refiner)
        refined: nn.Module = network
        return refined

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        import torch

        # They lie in host memory, and the network copies them for every pass, which waits for the device.
        positions: Any = denoiser.rope_embedder
        positions.freqs_cis = [table.to(noisy.device) for table in positions.freqs_cis]
        mask = conditioning["text_mask"]
        lengths = torch.tensor(text_lengths(conditioning), device="cpu")
        towards_image: Tensor = denoiser(
            hidden_states=noisy,
            timestep=(1000 - timesteps) / 1000,  # time from noise (0) to image (1)
            encoder_hidden_states=conditioning["text"],
            encoder_attention_mask=_TextMask(mask=mask, lengths=lengths),
            return_dict=False,
        )[0]
        return -towards_image


@dataclass(frozen=True, kw_only=True)
class _TextMask:
    """The members of a mask [B, L] that the network uses, with each text's length known beforehand.

    The network asks a tensor for the lengths: that waits for the device, and a meta tensor has no values.
    """

    mask: Tensor
    lengths: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.mask.shape

    def sum(self, dim: int) -> Tensor:
        return self.lengths

    def bool(self) -> Tensor:
        return self.mask.bool()


FAMILY = Lumina2()
