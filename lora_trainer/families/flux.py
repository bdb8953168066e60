"""FLUX.1 dev and schnell: a transformer of joint and single blocks, CLIP's pooled text and T5's tokens.

Dev was distilled with an embedded guidance scale; schnell was distilled to few steps without guidance.
Conditioning: `text` [B, 512 or 256, 4096] with padding unmasked as in the base's training, `pooled`
[B, 768], and `guidance` [B] for dev.

An example of a family; how to add one is said at the top of base.py, step by step in docs/adding-a-family.md.
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
from lora_trainer.families.base_files.base_folder import part_file, read_header
from lora_trainer.families.base_files.transformer_file import (
    holds_vae,
    part_tensors,
)
from lora_trainer.families.flow import (
    WITHOUT_FP16,
    BaseRelease,
    FlowFamily,
    text_name,
    transformer_name,
)
from lora_trainer.families.images.flow_images import pack, position_ids, unpack
from lora_trainer.families.text.t5 import (
    PooledT5Encoder,
    load_tokenizer,
)
from lora_trainer.families.text.text_layers import CLIP_L, T5_XXL
from lora_trainer.families.traits import APACHE, FLUX_DEV, INDEXED_BLOCK
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
)
TRANSFORMER = (
    *ATTENTION,
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
    "proj_mlp",
    "proj_out",
)
MODULATION = ("norm1.linear", "norm1_context.linear", "norm.linear")
ENDINGS: Mapping[Targets, tuple[str, ...]] = {
    "attention": ATTENTION,
    "transformer": TRANSFORMER,
    "all": (*TRANSFORMER, *MODULATION),
}
BLOCKS = ("transformer_blocks.", "single_transformer_blocks.")
REFUSED: Mapping[FileFormat, str] = {
    "kohya": "its names fuse q, k and v into one layer, which would triple the rank; ComfyUI, Forge, "
    "InvokeAI and diffusers read the diffusers format",
}
IN_FILE = frozenset(
    {
        "img_in.weight",
        "txt_in.weight",
        "vector_in.in_layer.weight",
        "double_blocks.0.img_attn.qkv.weight",
        "single_blocks.0.linear1.weight",
    }
)
"""Names in the original layout; no other family has all of them."""
IN_DIFFUSERS = frozenset(
    {
        "x_embedder.weight",
        "context_embedder.weight",
        "time_text_embed.text_embedder.linear_1.weight",
        "single_transformer_blocks.0.proj_mlp.weight",
        "single_transformer_blocks.0.norm.linear.weight",
    }
)
_GUIDANCE = frozenset(
    {"guidance_in.in_layer.weight", "time_text_embed.guidance_embedder.linear_1.weight"}
)
LATENT_CHANNELS = 16
DEV: Mapping[str, Any] = {
    "_class_name": "FluxTransformer2DModel",
    "patch_size": 1,
    "in_channels": 4 * LATENT_CHANNELS,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}
VAE: Mapping[str, Any] = {
    "latent_channels": LATENT_CHANNELS,
    "block_out_channels": [128, 256, 512, 512],
}
DYNAMIC_SHIFT: Mapping[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
VAE_PARAMETERS = 83_819_683
T5_PARAMETERS = 4_762_310_656
CLIP_PARAMETERS = 123_060_480
DEV_RELEASE = BaseRelease(
    ids=("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-Krea-dev"),
    architecture=DEV,
    vae=VAE,
    scheduler=DYNAMIC_SHIFT,
    parameters={
        "denoiser": 11_901_408_320,
        "vae": VAE_PARAMETERS,
        "text_encoder": CLIP_PARAMETERS + T5_PARAMETERS,
    },
    max_tokens=512,
    download_bytes=33_740_000_000,
    variant="dev",
)
SCHNELL_RELEASE = replace(
    DEV_RELEASE,
    ids=("black-forest-labs/FLUX.1-schnell",),
    architecture={**DEV, "guidance_embeds": False},
    scheduler={**DYNAMIC_SHIFT, "shift": 1.0, "use_dynamic_shifting": False},
    parameters={**DEV_RELEASE.parameters, "denoiser": 11_891_178_560},
    max_tokens=256,
    download_bytes=33_720_000_000,
    variant="schnell",
    distilled=True,
)
RELEASES = (DEV_RELEASE, SCHNELL_RELEASE)


class Flux(FlowFamily):
    """The family of FLUX.1 dev, schnell, and everything fine-tuned from them."""

    name = "flux"
    formats = AdapterFormats(written=("diffusers", "comfyui"), refused=REFUSED)
    pipeline_class = "FluxPipeline"
    denoiser_class = "FluxTransformer2DModel"
    text_folders = ("text_encoder", "text_encoder_2")
    text = TextInputs(
        layers={"text_encoder": CLIP_L, "text_encoder_2": T5_XXL},
        roles={"text_encoder": "clip_l", "text_encoder_2": "t5xxl"},
        multiple=1,
        one_length=False,
        encoder_files=True,
    )
    native_latents = 128
    patch = 2
    traits = NetworkTraits(
        precisions=WITHOUT_FP16,
        block_pattern=INDEXED_BLOCK,
        quantization_skip=(),
        vae_peak=AUTOENCODER_KL,
    )
    tokenizer_folders = ("tokenizer", "tokenizer_2")
    published = RELEASES
    licences = {
        **dict.fromkeys(DEV_RELEASE.ids, FLUX_DEV),
        **dict.fromkeys(SCHNELL_RELEASE.ids, replace(APACHE, is_gated=True)),
    }

    # ---- facts

    def detect_file(self, header: Header) -> frozenset[Part]:
        denoiser = part_tensors(header, "denoiser")
        parts: set[Part] = {"vae"} if holds_vae(header, latent_channels=LATENT_CHANNELS) else set()
        if denoiser.keys() >= IN_FILE or denoiser.keys() >= IN_DIFFUSERS:
            parts.add("denoiser")
        return frozenset(parts)

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        # Dev and schnell differ in no name and no shape but the embedder of the guidance scale.
        return RELEASES[0 if _reads_guidance(file) else 1]

    def facts(self, layout: Layout, *, source: str, identities: Mapping[str, str]) -> BaseFacts:
        facts = super().facts(layout, source=source, identities=identities)
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
        return RELEASES[0 if _reads_guidance(single) else 1].scheduler

    def max_tokens(self, layout: Layout) -> int:
        return self._release(self.architecture(layout)).max_tokens

    def release(self, architecture: Mapping[str, Any], layout: Layout) -> tuple[str, bool]:
        return (release := self._release(architecture)).variant, release.distilled

    def _release(self, architecture: Mapping[str, Any]) -> BaseRelease:
        return RELEASES[0 if architecture.get("guidance_embeds", False) else 1]

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        return AdapterNames(kohya="flux1", modelspec=f"flux-1-{facts.variant}/lora")

    def guidance(self, architecture: Mapping[str, Any], *, distilled: bool) -> Guidance:
        """Return the embedded scale of dev; schnell has no guidance."""
        return Guidance(two_passes=False, embedded=bool(architecture.get("guidance_embeds", False)))

    def prompt_shapes(
        self, architecture: Mapping[str, Any], *, text_tokens: int
    ) -> Mapping[str, tuple[int, ...]]:
        return {
            "text": (1, text_tokens, int(architecture["joint_attention_dim"])),
            "pooled": (1, int(architecture["pooled_projection_dim"])),
        }

    # ---- networks

    def load_text_encoder(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> TextEncoder:
        from transformers import CLIPTextModel, T5EncoderModel

        clip_tokenizer, t5_tokenizer = (
            load_tokenizer(facts.located.folder / name) for name in self.tokenizer_folders
        )
        return PooledT5Encoder(
            networks={
                name: self.load_text_network(kind, facts.located, name, dtype=dtype, device=device)
                for name, kind in zip(
                    self.text_folders, (CLIPTextModel, T5EncoderModel), strict=True
                )
            },
            clip_tokenizer=clip_tokenizer,
            t5_tokenizer=t5_tokenizer,
            max_tokens=facts.max_tokens,
        )

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

    def targets(self, targets: Targets) -> tuple[str, ...]:
        return ENDINGS[targets]

    def lora_targets(self, network: nn.Module, targets: AdapterTargets) -> list[str]:
        names = super().lora_targets(network, targets)
        return [name for name in names if name.startswith(BLOCKS)]

    def lora_key_name(self, format: FileFormat, component: str, module: str) -> str:
        if component != DENOISER:
            return text_name(format, component, module, roles=self.text.roles)
        return transformer_name(module)

    def layer_names(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherNames:
        # The last norm: diffusers has scale before shift, the original code the reverse.
        return other_names(transformer_names.FLUX, shapes, swapped={"norm_out.linear"})

    # ---- images

    def sampler_arguments(
        self, conditioning: Conditioning, negative: Conditioning, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        return {
            "prompt_embeds": conditioning["text"],
            "pooled_prompt_embeds": conditioning["pooled"],
            "guidance_scale": guidance_scale,
        }

    def prompt_arguments(
        self, prompt: str, negative: str, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        """Return the plain pipeline's arguments; a guidance-distilled base takes no negative prompt."""
        return {"prompt": prompt, "guidance_scale": guidance_scale}

    def latents_to_decode(
        self, pipeline: DiffusionPipeline, vae: nn.Module, latents: Tensor, size_px: tuple[int, int]
    ) -> Tensor:
        return decodable_tokens(vae, latents, size_px)


def decodable_tokens(vae: nn.Module, latents: Tensor, size_px: tuple[int, int]) -> Tensor:
    """Return the VAE's input, float32 [B, C, H, W], from packed latents [B, tokens, 4 C]."""
    config: Any = vae.config
    factor = 2 ** (len(config.block_out_channels) - 1)
    # Sizes in pixels are (width, height), tensors [..., height, width].
    width, height = (side // factor for side in size_px)
    unpacked = unpack(latents.float(), height=height, width=width)
    decoded: Tensor = unpacked / config.scaling_factor + config.shift_factor
    return decoded


FAMILY = Flux()


def _reads_guidance(file: Path) -> bool:
    return bool(_GUIDANCE & part_tensors(read_header(file), "denoiser").keys())


def _require_text_to_image(in_channels: int, *, source: str) -> None:
    # Fill has 384 channels: 64 of noise, 64 of the masked image, 256 of the mask at full resolution (8 x 8
    # x 4). Control releases have 128, noise and the control image.
    if in_channels != 4 * LATENT_CHANNELS:
        raise InputError(
            f"{source} takes {in_channels} channels: a fill or control release; "
            f"text-to-image has {4 * LATENT_CHANNELS}",
            fix="use FLUX.1-dev or a base fine-tuned from it",
        )
