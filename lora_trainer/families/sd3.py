"""Stable Diffusion 3 medium, 3.5 medium and large: MMDiT (Esser et al. 2024, arXiv 2403.03206).

Conditioning: `text` [B, 77 + 256, 4096] of two CLIPs and T5, `pooled` [B, 2048]. 3.5 medium has a second
attention among the image tokens alone (`attn2`). Single files have ComfyUI's layout; their header gives the
denoiser's sizes, so one companion serves all releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.config.config import Targets
from lora_trainer.families import transformer_names
from lora_trainer.families.base import (
    AUTOENCODER_KL,
    BY_TWO_PASSES,
    DENOISER,
    AdapterFormats,
    AdapterNames,
    AdapterTargets,
    BaseFacts,
    Conditioning,
    FileFormat,
    Guidance,
    Header,
    Layout,
    NetworkTraits,
    OtherNames,
    Part,
    TextEncoder,
    TextInputs,
)
from lora_trainer.families.base_files.base_folder import part_file
from lora_trainer.families.base_files.sd3_file import file_architecture
from lora_trainer.families.base_files.transformer_file import (
    holds_vae,
    part_tensors,
)
from lora_trainer.families.flow import (
    BaseRelease,
    FlowFamily,
    text_name,
    transformer_name,
)
from lora_trainer.families.text.clip_and_t5 import (
    ENCODERS,
    T5,
    encoders_of,
    holds_encoders,
    load_encoder,
)
from lora_trainer.families.text.text_layers import CLIP_G, CLIP_L, T5_XXL
from lora_trainer.families.traits import INDEXED_BLOCK, STABILITY
from lora_trainer.families.transformer_names import other_names

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from torch import Tensor, nn

ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "attn2.to_q",
    "attn2.to_k",
    "attn2.to_v",
    "attn2.to_out.0",
)
TRANSFORMER = (
    *ATTENTION,
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
)
MODULATION = ("norm1.linear", "norm1_context.linear")
ENDINGS: Mapping[Targets, tuple[str, ...]] = {
    "attention": ATTENTION,
    "transformer": TRANSFORMER,
    "all": (*TRANSFORMER, *MODULATION),
}
# The last block drops its text output. Its text query therefore changes nothing, and ComfyUI stores shift
# and scale of its text modulation in the other order, so an adapter of it would do the wrong thing there.
UNUSED_IN_LAST_BLOCK = ("attn.add_q_proj", "norm1_context.linear")
LATENT_CHANNELS = 16

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
        "vae": 83_819_683,
        "text_encoder": 123_650_304 + 694_659_840 + 4_762_310_656,  # CLIP-L, bigG, T5-XXL
    }
    return BaseRelease(
        ids=(f"stabilityai/{name}",),
        architecture=architecture,
        vae={"latent_channels": LATENT_CHANNELS, "block_out_channels": [128, 256, 512, 512]},
        scheduler={"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
        parameters=parameters,
        max_tokens=T5.tokens,
        download_bytes=2 * sum(parameters.values()),
        variant=variant,
        distilled=variant.endswith("turbo"),
    )


class StableDiffusion3(FlowFamily):
    """The family of Stable Diffusion 3 and 3.5."""

    name = "sd3"
    pipeline_class = "StableDiffusion3Pipeline"
    denoiser_class = "SD3Transformer2DModel"
    text_folders = tuple(encoder.component for encoder in ENCODERS)
    text = TextInputs(
        layers={"text_encoder": CLIP_L, "text_encoder_2": CLIP_G, "text_encoder_3": T5_XXL},
        roles={
            "text_encoder": "clip_l",
            "text_encoder_2": "clip_g",
            "text_encoder_3": "t5xxl",
        },
        multiple=1,
        one_length=False,
        encoder_files=True,
    )
    native_latents = 128
    patch = 2
    traits = NetworkTraits(
        # ComfyUI runs it in fp16 as it is, without a clamp.
        precisions=("bf16", "fp16", "fp32"),
        block_pattern=INDEXED_BLOCK,
        quantization_skip=(),
        vae_peak=AUTOENCODER_KL,
    )
    tokenizer_folders = tuple(encoder.tokenizer for encoder in ENCODERS)
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
    licences = {source: STABILITY for release in published for source in release.ids}

    # ---- facts

    def facts(self, layout: Layout, *, source: str, identities: Mapping[str, str]) -> BaseFacts:
        """Read facts; only its name marks a distilled release, so a renamed one counts as undistilled."""
        facts = super().facts(layout, source=source, identities=identities)
        if facts.architecture["in_channels"] != facts.latent_channels:
            raise InputError(
                f"the denoiser of {source} takes {facts.architecture['in_channels']} channels, its VAE "
                f"gives {facts.latent_channels}",
                fix="give a text-to-image base, no inpainting or control model",
            )
        turbo = "turbo" in Path(source).name.lower()
        release = facts.variant + ("-turbo" if turbo else "")
        with_t5 = T5 in encoders_of(layout)
        return replace(
            facts, distilled=turbo, variant=release if with_t5 else f"{release} without T5"
        )

    def max_tokens(self, layout: Layout) -> int:
        # The longest limit counts: each CLIP truncates the same prompt at its own 77 tokens.
        return encoders_of(layout)[-1].tokens

    def guidance(self, architecture: Mapping[str, Any], *, distilled: bool) -> Guidance:
        return BY_TWO_PASSES

    def prompt_shapes(
        self, architecture: Mapping[str, Any], *, text_tokens: int
    ) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of `text` and `pooled`: each text is padded to the limits of its encoders."""
        tokens = ENCODERS[0].tokens + T5.tokens
        return {
            "text": (1, tokens, int(architecture["joint_attention_dim"])),
            "pooled": (1, int(architecture["pooled_projection_dim"])),
        }

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
        parts: set[Part] = set()
        tensors, vae = part_tensors(header, "denoiser"), part_tensors(header, "vae")
        for first, block in (
            ("x_embedder.proj.weight", "joint_blocks.0.context_block.adaLN_modulation.1.weight"),
            ("pos_embed.proj.weight", "transformer_blocks.0.attn.add_q_proj.weight"),
        ):
            patches = tensors.get(first)
            # [width, latent channels, 2, 2]. A slice does not raise for a damaged tensor of fewer dimensions.
            if block in tensors and patches and patches.shape[1:2] == (LATENT_CHANNELS,):
                parts.add("denoiser")
        # Other families' VAEs have the same shape: accept one beside an SD 3 denoiser or alone in its file.
        if holds_vae(header, latent_channels=LATENT_CHANNELS) and (
            parts or len(vae) == len(header)
        ):
            parts.add("vae")
        if holds_encoders(header):
            parts.add("text_encoder")
        return frozenset(parts)

    def encoders(self, layout: Layout) -> tuple[str, ...]:
        return tuple(encoder.component for encoder in encoders_of(layout))

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
        width = int(facts.architecture["joint_attention_dim"])
        return load_encoder(self, facts.located, width=width, dtype=dtype, device=device)

    def plain_pipeline(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> DiffusionPipeline:
        import torch
        from diffusers import StableDiffusion3Pipeline

        layout, cpu = facts.located, torch.device("cpu")
        # from_pretrained raises for a missing component unless it is passed as None.
        absent = (
            dict.fromkeys((T5.component, T5.tokenizer)) if T5 not in encoders_of(layout) else {}
        )
        pipeline: DiffusionPipeline = StableDiffusion3Pipeline.from_pretrained(
            layout.folder,
            transformer=self.load_denoiser(facts, dtype=dtype, device=cpu),
            vae=self.load_vae(layout, dtype=dtype),
            use_safetensors=True,
            **self._spiece_tokenizers(layout),
            **self._text_in_files(facts, dtype=dtype),
            dtype=dtype,
            **absent,
        )
        return pipeline.to(device)

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

    def targets(self, targets: Targets) -> tuple[str, ...]:
        return ENDINGS[targets]

    def lora_targets(self, network: nn.Module, targets: AdapterTargets) -> list[str]:
        config: Any = network.config
        last = f"transformer_blocks.{config.num_layers - 1}."
        unused = {last + ending for ending in UNUSED_IN_LAST_BLOCK}
        return [name for name in super().lora_targets(network, targets) if name not in unused]

    def lora_key_name(self, format: FileFormat, component: str, module: str) -> str:
        if component != DENOISER:
            return text_name(format, component, module, roles=self.text.roles)
        return transformer_name(module)

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
        return other_names(transformer_names.SD3, shapes, swapped={"norm_out.linear", *text_norm})

    # ---- images

    def prompt_arguments(
        self, prompt: str, negative: str, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        return {"prompt": prompt, "negative_prompt": negative, "guidance_scale": guidance_scale}

    def sampler_arguments(
        self, conditioning: Conditioning, negative: Conditioning, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        return {
            "prompt_embeds": conditioning["text"],
            "pooled_prompt_embeds": conditioning["pooled"],
            "negative_prompt_embeds": negative["text"],
            "negative_pooled_prompt_embeds": negative["pooled"],
            "guidance_scale": guidance_scale,
        }


FAMILY = StableDiffusion3()
