"""Qwen-Image and Qwen-Image-2512: a joint transformer on Qwen2.5-VL's text (Wu et al. 2025, arXiv 2508.02324).

Conditioning: `text` [B, L, 3584], the prompt within a template whose first 34 tokens are dropped, and
`text_mask` [B, L]. The VAE is a video VAE; an image is a video of one frame. Editing models are other
pipelines and refused. Single files have diffusers' names, with or without ComfyUI's prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.config.config import Targets
from lora_trainer.families import transformer_names
from lora_trainer.families.base import (
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
    ImageEncoder,
    Latents,
    Layout,
    NetworkTraits,
    OtherNames,
    Part,
    TextEncoder,
    TextInputs,
    VaePeak,
)
from lora_trainer.families.base_files.base_folder import (
    SUFFIXES,
    components,
    count_parameters,
    part_file,
    read_header,
    read_json,
)
from lora_trainer.families.base_files.qwen_files import (
    LATENT_CHANNELS,
    count_blocks,
    is_text_to_image,
    is_vae,
    load_frame_vae,
)
from lora_trainer.families.flow import WITHOUT_FP16, BaseRelease, FlowFamily, text_name
from lora_trainer.families.images.flow_images import FlowImageEncoder, pack, unpack
from lora_trainer.families.text.qwen2_vl import MAX_TOKENS, UNREAD, check_text_encoder, load_qwen_vl
from lora_trainer.families.text.text_layers import QWEN25_VL_7B
from lora_trainer.families.traits import APACHE, INDEXED_BLOCK
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
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
)
MODULATION = ("img_mod.1", "txt_mod.1")
ENDINGS: Mapping[Targets, tuple[str, ...]] = {
    "attention": ATTENTION,
    "transformer": TRANSFORMER,
    "all": (*TRANSFORMER, *MODULATION),
}
# The last block drops its text output: these layers change nothing and would get no gradient.
UNUSED_IN_LAST_BLOCK = (
    "attn.add_q_proj",
    "attn.to_add_out",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
)
FILE_NAMES: Mapping[FileFormat, str] = {"diffusers": "transformer.", "comfyui": "diffusion_model."}
OTHER_MODELS = ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope", "zero_cond_t")
"""Settings of the denoiser that only editing and layered models switch on."""

ARCHITECTURE: Mapping[str, Any] = {
    "_class_name": "QwenImageTransformer2DModel",
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": LATENT_CHANNELS,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "guidance_embeds": False,
    "axes_dims_rope": [16, 56, 56],
}
SCHEDULER: Mapping[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift": 1.0,
    # Only the sampler stretches its schedule to end at 0.02; `flow_shift` takes no notice of it.
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
PARAMETERS: Mapping[Part, int] = {
    "denoiser": 20_430_401_088,
    "vae": 126_892_531,
    "text_encoder": 7_070_619_136,
}
UNREAD_PARAMETERS = 1_221_547_520
"""Parameters of the text encoder's vision tower and language head: downloaded, never loaded."""


class QwenImage(FlowFamily):
    """The family of Qwen-Image's text-to-image releases."""

    name = "qwen"
    pipeline_class = "QwenImagePipeline"
    denoiser_class = "QwenImageTransformer2DModel"
    text_folders = ("text_encoder",)
    text = TextInputs(
        layers={"text_encoder": QWEN25_VL_7B},
        roles={"text_encoder": "qwen25_7b"},
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
        # A video VAE pads each map by two frames and caches maps for a next frame, which an image never has.
        vae_peak=VaePeak(encoding=970, decoding=1740, blocked=(1260, 2026)),
    )
    tokenizer_folders = ("tokenizer",)
    unread_text = UNREAD
    # InvokeAI reads LoKr in kohya's names and nothing in ComfyUI's.
    formats = AdapterFormats(written=("diffusers", "kohya", "comfyui"), refused={})
    published = (
        BaseRelease(
            ids=("Qwen/Qwen-Image", "Qwen/Qwen-Image-2512"),
            architecture=ARCHITECTURE,
            vae={"z_dim": LATENT_CHANNELS, "temperal_downsample": [False, True, True]},
            scheduler=SCHEDULER,
            parameters=PARAMETERS,
            max_tokens=MAX_TOKENS,
            download_bytes=2 * (sum(PARAMETERS.values()) + UNREAD_PARAMETERS),
        ),
    )
    licences = {source: APACHE for release in published for source in release.ids}

    # ---- facts

    def detect(self, folder: Path) -> bool:
        """Return whether a folder is a text-to-image base; raises InputError for an editing model."""
        classes = components(folder)
        if classes.get("") == self.pipeline_class:
            return True
        if classes.get("transformer") == self.denoiser_class:
            raise InputError(
                f"{folder} is for {classes['']}, allowed is {self.pipeline_class}",
                fix="give a text-to-image release such as Qwen/Qwen-Image, no editing or layered one",
            )
        return False

    def detect_file(self, header: Header) -> frozenset[Part]:
        if is_vae(header):
            return frozenset({"vae"})
        return frozenset({"denoiser"}) if is_text_to_image(header) else frozenset()

    def facts(self, layout: Layout, *, source: str, identities: Mapping[str, str]) -> BaseFacts:
        facts = super().facts(layout, source=source, identities=identities)
        foreign = [name for name in OTHER_MODELS if facts.architecture.get(name)]
        if foreign:
            raise InputError(
                f"the denoiser of {source} has {', '.join(foreign)}: an editing or layered model",
                fix="give a text-to-image release such as Qwen/Qwen-Image",
            )
        check_text_encoder(layout.folder)
        return facts

    def architecture(self, layout: Layout) -> Mapping[str, Any]:
        """Return the configuration with a single file's own number of blocks: some releases are pruned."""
        configured, single = super().architecture(layout), part_file(layout, "denoiser")
        if single is None:
            return configured
        return {**configured, "num_layers": count_blocks(read_header(single))}

    def facts_from_file(self, file: Path, header: Header) -> BaseFacts:
        facts = super().facts_from_file(file, header)
        return replace(
            facts, architecture={**facts.architecture, "num_layers": count_blocks(header)}
        )

    def max_tokens(self, layout: Layout) -> int:
        return MAX_TOKENS

    def guidance(self, architecture: Mapping[str, Any], *, distilled: bool) -> Guidance:
        return BY_TWO_PASSES

    def prompt_shapes(
        self, architecture: Mapping[str, Any], *, text_tokens: int
    ) -> Mapping[str, tuple[int, ...]]:
        width = int(architecture["joint_attention_dim"])
        return {"text": (1, text_tokens, width), "text_mask": (1, text_tokens)}

    def latent_shape(self, vae: Mapping[str, Any]) -> tuple[int, int]:
        # diffusers spells the key so. It has an entry for each halving of the image's
        # sides, True where the number of frames is halved too.
        return int(vae["z_dim"]), 2 ** len(vae["temperal_downsample"])

    def _count(self, layout: Layout, part: str, files: tuple[Path, ...]) -> int:
        # The base class counts a VAE by names of AutoencoderKL. A file in Wan's names (`conv1`,
        # `conv2`) would be counted in part, so all its tensors are.
        if part == "text_encoder":
            return super()._count(layout, part, files)
        return count_parameters(file for file in files if file.suffix in SUFFIXES)

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        return AdapterNames(kohya="qwen_image", modelspec="Qwen-Image/lora")

    # ---- networks

    def load_vae(self, layout: Layout, *, dtype: torch.dtype | None = None) -> nn.Module:
        single = part_file(layout, "vae")
        if single is None:
            return super().load_vae(layout, dtype=dtype)
        config = read_json(layout.folder / "vae" / "config.json")
        return load_frame_vae(single, config, dtype=dtype).requires_grad_(False).eval()

    def load_image_encoder(self, facts: BaseFacts, *, device: torch.device) -> ImageEncoder:
        return _FrameEncoder(vae=self.load_vae(facts.located).to(device), family=self)

    def load_text_encoder(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> TextEncoder:
        return load_qwen_vl(self, facts.located, dtype=dtype, device=device)

    # ---- training and files

    def normalised(self, vae: nn.Module, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Standardise one frame's posterior [B, C, 1, H, W] per channel; return mean and deviation [B, C, H, W]."""
        shift, scale = _statistics(vae, like=mean)
        return ((mean - shift) / scale).squeeze(2), (std / scale).squeeze(2)

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        batch, _, height, width = noisy.shape
        tokens = denoiser(
            hidden_states=pack(noisy),
            timestep=timesteps / 1000,
            encoder_hidden_states=conditioning["text"],
            # A single text has no padding, and without a mask attention can use its fastest kernel.
            encoder_hidden_states_mask=conditioning["text_mask"] if batch > 1 else None,
            # (frames, rows, columns) in tokens; editing models list their input images behind the first entry.
            img_shapes=[[(1, height // 2, width // 2)]] * batch,
            return_dict=False,
        )[0]
        return unpack(tokens, height=height, width=width)

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
        if format == "kohya":
            return "lora_unet_" + module.replace(".", "_")
        return FILE_NAMES[format] + module

    def layer_names(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherNames:
        return other_names(transformer_names.QWEN, shapes)

    # ---- images

    def sampler_arguments(
        self, conditioning: Conditioning, negative: Conditioning, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        prompt = {
            "prompt_embeds": conditioning["text"],
            "prompt_embeds_mask": conditioning["text_mask"],
            "true_cfg_scale": guidance_scale,
        }
        # The pipeline warns of a negative prompt that a scale up to 1 leaves unused.
        if guidance_scale <= 1:
            return prompt
        return {
            **prompt,
            "negative_prompt_embeds": negative["text"],
            "negative_prompt_embeds_mask": negative["text_mask"],
        }

    def prompt_arguments(
        self, prompt: str, negative: str, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        """Return the plain pipeline's arguments: it guides by `true_cfg_scale` and ignores `guidance_scale`."""
        arguments = {"prompt": prompt, "true_cfg_scale": guidance_scale}
        return arguments if guidance_scale <= 1 else {**arguments, "negative_prompt": negative}

    def latents_to_decode(
        self, pipeline: DiffusionPipeline, vae: nn.Module, latents: Tensor, size_px: tuple[int, int]
    ) -> Tensor:
        width, height = (side // pipeline.vae_scale_factor for side in size_px)
        # [B, C, 1 frame, H, W], as the VAE decodes videos.
        frame = unpack(latents.float(), height=height, width=width).unsqueeze(2)
        shift, scale = _statistics(vae, like=frame)
        return frame * scale + shift


@dataclass(frozen=True, kw_only=True)
class _FrameEncoder(FlowImageEncoder):
    """Encodes an image as a video of one frame."""

    def encode_images(self, pixels: Tensor) -> list[Latents]:
        return super().encode_images(pixels.unsqueeze(2))


FAMILY = QwenImage()


def _statistics(vae: nn.Module, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of the latents by channel, [1, C, 1, 1, 1]."""
    config: Any = vae.config
    mean, std = like.new_tensor(config.latents_mean), like.new_tensor(config.latents_std)
    return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)
