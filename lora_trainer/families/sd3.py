"""Stable Diffusion 3 medium, 3.5 medium and large: MMDiT (Esser et al. 2024, arXiv 2403.03206).

Conditioning: `text` [B, 77 + 256, 4096] of two CLIPs and T5, `pooled` [B, 2048]. 3.5 medium has a second
attention among the image tokens alone (`attn2`). Single files have ComfyUI's layout; their header gives the
denoiser's sizes, so one companion serves all releases.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import (
    AdapterFormats,
    AdapterNames,
    BaseFacts,
    BaseRelease,
    Conditioning,
    Header,
    Layout,
    OtherNames,
    Part,
    TextEncoder,
)
from lora_trainer.families.base_files.base_folder import (
    AGAIN,
    components,
    part_file,
    read_header,
    text_file,
)
from lora_trainer.families.base_files.network_files import (
    ENCODER_PREFIX,
    denoiser_shapes,
    holds_vae,
)
from lora_trainer.families.facts import STABILITY
from lora_trainer.families.flow import (
    FLUX_VAE,
    FLUX_VAE_PARAMETERS,
    JOINT_ATTENTION,
    JOINT_FEED_FORWARD,
    FlowFamily,
    target_endings,
)
from lora_trainer.families.text.clip import read_padding_as_text
from lora_trainer.families.text.text_layers import CLIP_G, CLIP_L_PROJECTED, T5_XXL, TextNetwork
from lora_trainer.families.text.transformers_encoder import TransformersEncoder

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

CLIP_TOKENS = 77
T5 = "text_encoder_3"
T5_TOKENS = 256
ENDINGS = target_endings(
    (*JOINT_ATTENTION, *(f"attn2.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))),
    transformer=JOINT_FEED_FORWARD,
    modulation=("norm1.linear", "norm1_context.linear"),
)
# The last block drops its text output. Its text query therefore changes nothing, and ComfyUI stores shift
# and scale of its text modulation in the other order, so an adapter of it would do the wrong thing there.
UNUSED_IN_LAST_BLOCK = ("attn.add_q_proj", "norm1_context.linear")
LATENT_CHANNELS = 16
TEXT_NETWORKS = (CLIP_L_PROJECTED, CLIP_G, T5_XXL)
"""CLIP-L's projection is the identity, which files of it leave out."""

MEDIUM: Mapping[str, Any] = {
    "_class_name": "SD3Transformer2DModel",
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": LATENT_CHANNELS,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "out_channels": LATENT_CHANNELS,
    # Side in tokens of the table of positions, of which an image takes the middle
    # (PatchEmbed.cropped_pos_embed in diffusers); larger images raise.
    "pos_embed_max_size": 384,
    "dual_attention_layers": list(range(13)),
    "qk_norm": "rms_norm",
}
LARGE: Mapping[str, Any] = {
    **MEDIUM,
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "pos_embed_max_size": 192,
    "dual_attention_layers": [],
}
FIRST_MEDIUM: Mapping[str, Any] = {
    **MEDIUM,
    "pos_embed_max_size": 192,
    "dual_attention_layers": [],
    "qk_norm": None,
}


def _release(
    name: str, architecture: Mapping[str, Any], denoiser: int, *, variant: str
) -> BaseRelease:
    parameters: Mapping[Part, int] = {
        "denoiser": denoiser,  # with the position table: a buffer that takes file space and memory too
        "vae": FLUX_VAE_PARAMETERS,
        "text_encoder": sum(network.parameters for network in TEXT_NETWORKS),
    }
    return BaseRelease(
        ids=(f"stabilityai/{name}",),
        architecture=architecture,
        vae=FLUX_VAE,
        scheduler={"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
        parameters=parameters,
        max_tokens=T5_TOKENS,
        download_bytes=2 * sum(parameters.values()),
        licence=STABILITY,
        variant=variant,
        distilled=variant.endswith("turbo"),
    )


@dataclass(frozen=True, kw_only=True)
class SD3TextEncoder(TransformersEncoder):
    """CLIP-L and bigG side by side, then T5 along the sequence (Esser et al. 2024, figure 2).

    A folder whose model_index.json has `text_encoder_3: [null, null]` is used without T5: its 256 tokens are zeros.
    """

    width: int = T5_XXL.width

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, 77 + 256, width of T5] and `pooled` [B, widths of both CLIPs]."""
        import torch
        from torch.nn.functional import pad

        clips = [
            self.run(name, tokens[name], output_hidden_states=True)
            for name in ("text_encoder", "text_encoder_2")
        ]
        clip = torch.cat([output.hidden_states[-2] for output in clips], dim=-1)
        # Zeros as StableDiffusion3Pipeline._get_t5_prompt_embeds has them without a third encoder.
        t5 = clip.new_zeros((len(clip), T5_TOKENS, self.width))
        if T5 in self.networks:  # without a mask: the base was trained on unmasked padding
            t5 = self.run(T5, tokens[T5])[0]
        # CLIP's 768 + 1280 channels get zeros up to the 4096 of T5, so that both are tokens of one sequence.
        text = torch.cat([pad(clip, (0, t5.shape[-1] - clip.shape[-1])), t5], dim=-2)
        return {"text": text, "pooled": torch.cat([output.text_embeds for output in clips], dim=-1)}


class StableDiffusion3(FlowFamily):
    """The family of Stable Diffusion 3 and 3.5."""

    name = "sd3"
    pipeline_class = "StableDiffusion3Pipeline"
    denoiser_class = "SD3Transformer2DModel"
    text_networks = TEXT_NETWORKS
    text_encoder_class = SD3TextEncoder
    endings = ENDINGS
    unused_in_last_block = UNUSED_IN_LAST_BLOCK
    file_marks = (
        frozenset(
            {"x_embedder.proj.weight", "joint_blocks.0.context_block.adaLN_modulation.1.weight"}
        ),
        frozenset({"pos_embed.proj.weight", "transformer_blocks.0.attn.add_q_proj.weight"}),
    )
    traits = replace(
        FlowFamily.traits,
        precisions=("bf16", "fp16", "fp32"),  # ComfyUI runs it in fp16 as it is, without a clamp
    )
    formats = AdapterFormats(
        written=("diffusers", "comfyui"),
        refused={
            "kohya": "its names for this family join query, key and value, which diffusers cannot read; "
            "ComfyUI reads the diffusers format too",
        },
    )
    published = (
        _release("stable-diffusion-3.5-medium", MEDIUM, 2_469_663_936, variant="medium"),
        _release("stable-diffusion-3.5-large", LARGE, 8_146_280_768, variant="large"),
        _release("stable-diffusion-3.5-large-turbo", LARGE, 8_146_280_768, variant="large-turbo"),
        _release(
            "stable-diffusion-3-medium-diffusers", FIRST_MEDIUM, 2_084_951_104, variant="3-medium"
        ),
    )

    # ---- facts

    def facts(self, layout: Layout, *, source: str) -> BaseFacts:
        """Read facts; only its name marks a distilled release, so a renamed one counts as undistilled."""
        facts = super().facts(layout, source=source)
        if facts.architecture["in_channels"] != facts.latent_channels:
            raise InputError(
                f"the denoiser of {source} takes {facts.architecture['in_channels']} channels, its VAE "
                f"gives {facts.latent_channels}",
                fix="give a text-to-image base, no inpainting or control model",
            )
        turbo = "turbo" in Path(source).name.lower()
        release = facts.variant + ("-turbo" if turbo else "")
        with_t5 = T5 in self.encoders(layout)
        return replace(
            facts, distilled=turbo, variant=release if with_t5 else f"{release} without T5"
        )

    def max_tokens(self, layout: Layout) -> int:
        # The longest limit counts: each CLIP truncates the same prompt at its own 77 tokens.
        return T5_TOKENS if T5 in self.encoders(layout) else CLIP_TOKENS

    def prompt_shapes(
        self, architecture: Mapping[str, Any], *, text_tokens: int
    ) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of `text` and `pooled`: each text is padded to the limits of its encoders."""
        return super().prompt_shapes(architecture, text_tokens=CLIP_TOKENS + T5_TOKENS)

    def architecture(self, layout: Layout) -> Mapping[str, Any]:
        configured, single = super().architecture(layout), part_file(layout, "denoiser")
        if single is None:
            return configured
        head_channels = int(configured["attention_head_dim"])
        return {**configured, **file_architecture(single, head_channels=head_channels)}

    def release(self, architecture: Mapping[str, Any], layout: Layout) -> tuple[str, bool]:
        if architecture.get("qk_norm") is None:
            return "3-medium", False
        return ("medium" if architecture.get("dual_attention_layers") else "large"), False

    def detect_file(self, header: Header) -> frozenset[Part]:
        parts, shapes = set(super().detect_file(header)), denoiser_shapes(header)
        patches = shapes.get("x_embedder.proj.weight", shapes.get("pos_embed.proj.weight", ()))
        # [width, latent channels, 2, 2]. A slice does not raise for a damaged tensor of fewer dimensions.
        if patches[1:2] != (LATENT_CHANNELS,):
            parts.discard("denoiser")
        # Other families' VAEs have the same shape: accept one beside an SD 3 denoiser or alone in its file.
        if "denoiser" not in parts and not holds_vae(
            header, latent_channels=LATENT_CHANNELS, alone=True
        ):
            parts.discard("vae")
        # A checkpoint without T5 uses its companion's encoders.
        prefixes = [ENCODER_PREFIX.format(role=network.role) for network in TEXT_NETWORKS]
        if all(any(name.startswith(prefix) for name in header) for prefix in prefixes):
            parts.add("text_encoder")
        return frozenset(parts)

    def encoders(self, layout: Layout) -> Mapping[str, TextNetwork]:
        """Return the encoders of a base; a folder whose model_index.json has no T5 gives the two CLIPs."""
        has_t5 = text_file(layout, T5) or T5 in components(layout.folder)
        return {
            name: network for name, network in self.text_folders.items() if has_t5 or name != T5
        }

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        # A header shows only heads x channels; the heads of all releases have 64 channels.
        sizes = file_architecture(file, head_channels=64)
        variant, _ = self.release(sizes, Layout(folder=file.parent))
        turbo = "-turbo" if variant == "large" and "turbo" in file.name.lower() else ""
        return next(each for each in self.published if each.variant == variant + turbo)

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        """Return `3-medium`, `3-5-medium` or `3-5-large` as kohya's name, as sd-scripts writes it."""
        size = facts.variant.partition(" ")[0].removesuffix("-turbo")
        version = size if size.startswith("3-") else f"3-5-{size}"
        return AdapterNames(
            kohya=version, modelspec=f"stable-diffusion-3-{version.removeprefix('3-')}/lora"
        )

    # ---- networks

    def load_text_encoder(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> TextEncoder:
        encoder = super().load_text_encoder(facts, dtype=dtype, device=device)
        assert isinstance(encoder, SD3TextEncoder)
        for component in ("text_encoder", "text_encoder_2"):
            read_padding_as_text(encoder.tokenizers[component])
        return replace(encoder, width=int(facts.architecture["joint_attention_dim"]))

    # ---- training and files

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        prediction: Tensor = denoiser(
            hidden_states=noisy,
            # This class reads 1000 sigma as it is; those of FLUX.1, FLUX.2
            # and Chroma multiply by 1000 themselves.
            timestep=timesteps,
            encoder_hidden_states=conditioning["text"],
            pooled_projections=conditioning["pooled"],
            return_dict=False,
        )[0]
        return prediction

    def layer_names(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherNames:
        """Return names; of the last norms diffusers has scale before shift, the original code the reverse.

        The last block's text norm is one of them: it has two parts, the other blocks' text norms have six.
        """
        text_norm = {
            layer
            for layer, shape in shapes.items()
            if layer.endswith("norm1_context.linear")
            and len(shape) == 2
            and shape[0] == 2 * shape[1]
        }
        return replace(
            super().layer_names(shapes), swapped=frozenset({"norm_out.linear", *text_norm})
        )

    # ---- images

    def sampler_arguments(
        self, conditioning: Conditioning, negative: Conditioning, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        return {
            **super().sampler_arguments(conditioning, negative, guidance_scale=guidance_scale),
            "pooled_prompt_embeds": conditioning["pooled"],
            "negative_pooled_prompt_embeds": negative["pooled"],
        }


_IN_FILE = (
    "joint_blocks",
    "x_block.attn2.qkv",
    "x_block.attn.ln_q",
    "pos_embed",
    "y_embedder.mlp.0.weight",
)
_IN_DIFFUSERS = (
    *("transformer_blocks", "attn2.to_q", "attn.norm_q", "pos_embed.pos_embed"),
    "time_text_embed.text_embedder.linear_1.weight",
)
"""Names in a file of the blocks, layers in them, the table of positions and the embedder of the pooled text."""


def file_architecture(file: Path, *, head_channels: int) -> Mapping[str, Any]:
    """Derive the configuration from the shapes in a file; raises InputError when tensors are missing."""
    shapes = denoiser_shapes(read_header(file))
    start, dual_layer, norm, positions, pooled = (
        _IN_DIFFUSERS if "pos_embed.proj.weight" in shapes else _IN_FILE
    )
    blocks = {int(match[1]) for name in shapes if (match := re.match(rf"{start}\.(\d+)\.", name))}
    dual = {block for block in blocks if f"{start}.{block}.{dual_layer}.weight" in shapes}
    normed = f"{start}.0.{norm}.weight" in shapes
    try:
        # The text is projected to the width of the tokens, so this layer's rows give it.
        width, text_width = shapes["context_embedder.weight"]
        return {
            "num_layers": max(blocks) + 1,
            "num_attention_heads": width // head_channels,
            "joint_attention_dim": text_width,
            "caption_projection_dim": width,
            "pooled_projection_dim": shapes[pooled][1],
            # The table is [1, side * side, width].
            "pos_embed_max_size": math.isqrt(shapes[positions][1]),
            "dual_attention_layers": sorted(dual),
            "qk_norm": "rms_norm" if normed else None,
        }
    except (KeyError, IndexError, ValueError) as error:
        raise InputError(f"the denoiser in {file} lacks tensors ({error})", fix=AGAIN) from None


FAMILY = StableDiffusion3()
