"""Lumina-Image 2.0: Gemma 2 as text encoder, FLUX.1's VAE, one stream of image and text tokens.

Qin et al. 2025 (arXiv 2503.21758). Conditioning: `text` [B, L, 2304], the hidden states before Gemma's last
layer, and `text_mask` [B, L]. diffusers' network counts time from noise (0) to image (1) and predicts the
velocity towards the image; `predict` converts both to timestep = 1000 sigma, target = noise - image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lora_trainer.families.base import (
    AdapterFormats,
    AdapterNames,
    BaseFacts,
    BaseRelease,
    Conditioning,
    Layout,
    Part,
)
from lora_trainer.families.facts import APACHE
from lora_trainer.families.flow import FLUX_VAE, FLUX_VAE_PARAMETERS, FlowFamily, target_endings
from lora_trainer.families.text.text_layers import GEMMA2_2B
from lora_trainer.families.text.transformers_encoder import LUMINA_SYSTEM_PROMPT, Gemma2Encoder

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

ENDINGS = target_endings(
    tuple(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    transformer=tuple(f"feed_forward.linear_{number}" for number in (1, 2, 3)),
    modulation=("norm1.linear",),
)
IN_FILE = frozenset({"noise_refiner.0.attention.qkv.weight", "cap_embedder.1.weight"})
IN_DIFFUSERS = frozenset({"noise_refiner.0.attn.to_q.weight", "context_refiner.0.norm1.weight"})
ARCHITECTURE: Mapping[str, Any] = {
    "_class_name": "Lumina2Transformer2DModel",
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "hidden_size": 2304,
    "num_layers": 26,
    "num_refiner_layers": 2,
    # Grouped queries: 24 heads of 96 channels read 8 of keys and values, 2304 + 768 + 768 rows when joined.
    "num_attention_heads": 24,
    "num_kv_heads": 8,
    "multiple_of": 256,
    "ffn_dim_multiplier": None,
    "norm_eps": 1e-5,
    "scaling_factor": 1.0,
    "axes_dim_rope": [32, 32, 32],
    "axes_lens": [300, 512, 512],
    "cap_feat_dim": 2304,
}
PARAMETERS: Mapping[Part, int] = {
    "denoiser": 2_609_769_152,
    "vae": FLUX_VAE_PARAMETERS,
    "text_encoder": GEMMA2_2B.parameters,
}


class Lumina2(FlowFamily):
    """The family of Lumina-Image 2.0 and its fine-tunes."""

    name = "lumina2"
    formats = AdapterFormats(
        written=("diffusers",),
        refused=dict.fromkeys(
            ("kohya", "comfyui"),
            "q, k and v are one weight of unequal parts in its names, and ComfyUI reads to_q, to_k and to_v only "
            "where they are equal (Z-Image); use output.format=diffusers, which diffusers reads",
        ),
    )
    pipeline_class = "Lumina2Pipeline"
    denoiser_class = "Lumina2Transformer2DModel"
    text_networks = (GEMMA2_2B,)
    text_encoder_class = Gemma2Encoder
    unread_text = ("spiece_model",)  # ComfyUI's files bring the tokenizer as a tensor of bytes
    text_width = "cap_feat_dim"
    masked_text = True
    endings = ENDINGS
    file_marks = (IN_FILE, IN_DIFFUSERS)
    foreign_marks = frozenset({"cap_pad_token"})  # Z-Image's
    metadata = AdapterNames(kohya="lumina2", modelspec="lumina-2/lora")  # as sd-scripts writes it
    published = (
        BaseRelease(
            ids=("Alpha-VLLM/Lumina-Image-2.0",),
            architecture=ARCHITECTURE,
            vae=FLUX_VAE,
            scheduler={"use_dynamic_shifting": False, "shift": 6.0},
            parameters=PARAMETERS,
            max_tokens=256,  # the limit of diffusers' pipeline, system prompt included
            download_bytes=2 * sum(PARAMETERS.values()),  # in bf16
            licence=APACHE,
        ),
    )

    def companion_sizes(
        self, config: Mapping[str, Any], layout: Layout
    ) -> tuple[Mapping[str, tuple[int, ...]], Mapping[str, int]]:
        shape = (int(config["hidden_size"]), int(config["cap_feat_dim"]))
        embedders = ("cap_embedder.1.weight", "time_caption_embed.caption_embedder.1.weight")
        blocks = {"layers": config["num_layers"], "noise_refiner": config["num_refiner_layers"]}
        return dict.fromkeys(embedders, shape), blocks

    def built(self, build: Callable[[], nn.Module]) -> nn.Module:
        return _recomputing_refiners(build())

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        towards_image: Tensor = denoiser(
            hidden_states=noisy,
            timestep=(1000 - timesteps) / 1000,  # time from noise (0) to image (1)
            encoder_hidden_states=conditioning["text"],
            encoder_attention_mask=_TextMask.of(conditioning["text_mask"]),
            return_dict=False,
        )[0]
        return -towards_image

    # ---- images

    def sampler_arguments(
        self, conditioning: Conditioning, negative: Conditioning, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        """Return the pipeline's arguments: both texts must have one length, so the shorter is padded."""
        from torch.nn.functional import pad

        longest = max(texts["text"].shape[1] for texts in (conditioning, negative))

        def padded(texts: Conditioning) -> tuple[Tensor, Tensor]:
            missing = longest - texts["text"].shape[1]
            return pad(texts["text"], (0, 0, 0, missing)), pad(texts["text_mask"], (0, missing))

        text, mask = padded(conditioning)
        negative_text, negative_mask = padded(negative)
        return {
            "prompt_embeds": text,
            "prompt_attention_mask": mask,
            "negative_prompt_embeds": negative_text,
            "negative_prompt_attention_mask": negative_mask,
            "guidance_scale": guidance_scale,
        }

    def pipeline_arguments(
        self, pipeline: Any, facts: BaseFacts, prompt: str, negative: str, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        """Return the plain pipeline's arguments; it puts no system prompt before a negative prompt."""
        negative = LUMINA_SYSTEM_PROMPT + negative if negative else ""
        return {"prompt": prompt, "negative_prompt": negative, "guidance_scale": guidance_scale}


@dataclass(frozen=True, kw_only=True)
class _TextMask:
    """The members of a mask [B, L] that the network uses, with each text's length known beforehand.

    The network asks a tensor for the lengths: that waits for the device, and a meta tensor has no values.
    """

    mask: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> _TextMask:
        import torch

        batch, longest = mask.shape
        # A single text has no padding; costs are traced without padding.
        full_length = batch == 1 or mask.is_meta
        lengths = [longest] * batch if full_length else mask.sum(dim=1).tolist()
        return cls(mask=mask, lengths=torch.tensor(lengths, device="cpu"))

    @property
    def shape(self) -> torch.Size:
        return self.mask.shape

    def sum(self, dim: int) -> Tensor:
        return self.lengths

    def bool(self) -> Tensor:
        return self.mask.bool()


def _recomputing_refiners(network: Any) -> nn.Module:
    """Let gradient checkpointing reach the refiner blocks: diffusers 0.42.1 recomputes `layers` only."""
    from torch import is_grad_enabled
    from torch.nn import ModuleList

    # Without it swapped weights were overwritten before the backward pass of the refiners,
    # and torch refused ("modified by an inplace operation").
    class Refiner(ModuleList):
        gradient_checkpointing = False  # diffusers sets it where it is, with the function to use
        _gradient_checkpointing_func: Any

        def __iter__(self) -> Iterator[Any]:
            blocks = super().__iter__()
            if self.gradient_checkpointing and is_grad_enabled():
                return (partial(self._gradient_checkpointing_func, block) for block in blocks)
            return blocks

    network.noise_refiner = Refiner(network.noise_refiner)
    network.context_refiner = Refiner(network.context_refiner)
    refined: nn.Module = network
    return refined


FAMILY = Lumina2()
