"""FLUX.2 klein, 4B and 9B, distilled and base: a Qwen3 text encoder, a VAE normalised per channel.

Caches, `predict` and the denoiser have 2x2 squares of the VAE's latents as channels, [B, 128, H/16, W/16].
FLUX.2-dev has the same architecture and names but another text encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.config.config import Targets
from lora_trainer.families import transformer_names
from lora_trainer.families.base import (
    AUTOENCODER_KL,
    DENOISER,
    AdapterFormats,
    AdapterNames,
    BaseFacts,
    Conditioning,
    FileFormat,
    Guidance,
    Header,
    Layout,
    NetworkTraits,
    OtherNames,
    Part,
    Sampler,
    TextEncoder,
    TextInputs,
)
from lora_trainer.families.base_files.base_folder import part_file, read_json
from lora_trainer.families.base_files.transformer_file import check_companion, part_tensors
from lora_trainer.families.flow import (
    WITHOUT_FP16,
    BaseRelease,
    FlowFamily,
    text_name,
    transformer_name,
)
from lora_trainer.families.images.flow_images import FlowSampler
from lora_trainer.families.text.qwen3 import (
    MAX_TOKENS,
    UNREAD,
    PromptFormat,
    load_qwen3,
    text_config,
)
from lora_trainer.families.text.text_layers import QWEN3_4B
from lora_trainer.families.traits import APACHE, FLUX_DEV, INDEXED_BLOCK
from lora_trainer.families.transformer_names import other_names

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from torch import Tensor, nn

# The layers that diffusers' pipeline joins; the default of diffusers' training script differs from it.
PROMPT = PromptFormat(layers=(9, 18, 27), padded=True, thinking=False)
ATTENTION = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    # Single-stream blocks: one matrix joins q, k, v and the MLP's input, another both outputs.
    *(f"attn.{name}" for name in ("to_qkv_mlp_proj", "to_out")),
)
TRANSFORMER = (
    *ATTENTION,
    *(f"ff.{name}" for name in ("linear_in", "linear_out")),
    *(f"ff_context.{name}" for name in ("linear_in", "linear_out")),
)
IN_FILE = "double_stream_modulation_img.lin.weight"
IN_DIFFUSERS = "double_stream_modulation_img.linear.weight"
# At 200 steps the sampler's shift equals FLUX.1's, exp of a line in the tokens; fewer steps shift more.
SCHEDULER: Mapping[str, Any] = {
    "num_train_timesteps": 1000,
    "use_dynamic_shifting": True,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "shift": 3.0,
}
VAE: Mapping[str, Any] = {"latent_channels": 32, "block_out_channels": [128, 256, 512, 512]}
VAE_PARAMETERS = 84_046_115


ARCHITECTURE: Mapping[str, Any] = {
    "_class_name": "Flux2Transformer2DModel",
    "patch_size": 1,
    # 32 channels of the VAE times the four latents of a square.
    "in_channels": 128,
    "out_channels": None,
    "attention_head_dim": 128,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    # Image, row, column and index in the text (`_positions`) share the 128 channels of a head.
    "axes_dims_rope": [32, 32, 32, 32],
    "rope_theta": 2000,
    "eps": 1e-6,
    "guidance_embeds": False,
}
# joint_attention_dim is three layers of the text encoder: 2560 each of Qwen3-4B, 4096 of Qwen3-8B.
SIZES: Mapping[str, Mapping[str, int]] = {
    "4B": {
        "num_layers": 5,
        "num_single_layers": 20,
        "num_attention_heads": 24,
        "joint_attention_dim": 7680,
    },
    "9B": {
        "num_layers": 8,
        "num_single_layers": 24,
        "num_attention_heads": 32,
        "joint_attention_dim": 12_288,
    },
}
DENOISER_PARAMETERS = {"4B": 3_875_544_576, "9B": 9_078_581_248}
TEXT_PARAMETERS = {"4B": 4_022_468_096, "9B": 7_568_405_504}
HEAD_PARAMETERS = {"4B": 0, "9B": 622_329_856}
"""Parameters of a language head that is separate from the embedding: downloaded, never loaded."""


def _release(size: str, *, distilled: bool) -> BaseRelease:
    denoiser, text = DENOISER_PARAMETERS[size], TEXT_PARAMETERS[size]
    return BaseRelease(
        ids=(f"black-forest-labs/FLUX.2-klein-{'' if distilled else 'base-'}{size}",),
        architecture={**ARCHITECTURE, **SIZES[size]},
        vae=VAE,
        scheduler=SCHEDULER,
        parameters={"denoiser": denoiser, "vae": VAE_PARAMETERS, "text_encoder": text},
        max_tokens=MAX_TOKENS,
        download_bytes=2 * (denoiser + VAE_PARAMETERS + text + HEAD_PARAMETERS[size]),
        variant=_variant(size.lower(), distilled=distilled),
        distilled=distilled,
    )


def _size(architecture: Mapping[str, Any]) -> str:
    """Return "4b" or "9b", "" for another size."""
    sizes = (size for size, numbers in SIZES.items() if numbers.items() <= architecture.items())
    return next(sizes, "").lower()


def _variant(size: str, *, distilled: bool) -> str:
    return "-".join(word for word in ("klein", "" if distilled else "base", size) if word)


def _is_distilled(file_name: str) -> bool:
    name = file_name.lower()
    return "klein" in name and "base" not in name


class Flux2(FlowFamily):
    """The family of FLUX.2 klein (Black Forest Labs 2026) and its fine-tunes."""

    name = "flux2"
    formats = AdapterFormats(
        written=("diffusers", "comfyui"),
        refused={
            "kohya": "to_q, to_k and to_v are one weight in its names; use output.format=diffusers, which "
            "ComfyUI, InvokeAI and diffusers read",
        },
    )
    pipeline_class = "Flux2KleinPipeline"
    denoiser_class = "Flux2Transformer2DModel"
    text_folders = ("text_encoder",)
    text = TextInputs(
        layers={"text_encoder": QWEN3_4B},
        roles={"text_encoder": "qwen3_4b"},
        multiple=1,
        one_length=False,
        encoder_files=True,
    )
    traits = NetworkTraits(
        precisions=WITHOUT_FP16,
        block_pattern=INDEXED_BLOCK,
        quantization_skip=(),
        vae_peak=AUTOENCODER_KL,
    )
    unread_text = UNREAD
    tokenizer_folders = ("tokenizer",)
    native_latents = 64
    patch = (
        1  # `normalised` folds the squares into channels, so the denoiser has one token per latent
    )
    published = tuple(
        _release(size, distilled=distilled) for size in ("4B", "9B") for distilled in (False, True)
    )
    licences = {
        source: APACHE if source.endswith("4B") else FLUX_DEV
        for release in published
        for source in release.ids
    }

    # ---- facts

    def max_tokens(self, layout: Layout) -> int:
        return MAX_TOKENS

    def targets(self, targets: Targets) -> tuple[str, ...]:
        """Return the endings; "all" equals "transformer" because the modulation lies outside the blocks."""
        return ATTENTION if targets == "attention" else TRANSFORMER

    def guidance(self, architecture: Mapping[str, Any], *, distilled: bool) -> Guidance:
        """Return two passes for the undistilled: distilled releases ignore the guidance scale."""
        embedded = bool(architecture.get("guidance_embeds", True))  # diffusers' own default
        return Guidance(two_passes=not distilled, embedded=embedded)

    def prompt_shapes(
        self, architecture: Mapping[str, Any], *, text_tokens: int
    ) -> Mapping[str, tuple[int, ...]]:
        return {"text": (1, text_tokens, int(architecture["joint_attention_dim"]))}

    def latent_shape(self, vae: Mapping[str, Any]) -> tuple[int, int]:
        channels, factor = super().latent_shape(vae)
        return 4 * channels, 2 * factor

    def detect_file(self, header: Header) -> frozenset[Part]:
        tensors = part_tensors(header, "denoiser")
        is_flux2 = IN_FILE in tensors or IN_DIFFUSERS in tensors
        return frozenset({"denoiser"}) if is_flux2 else frozenset()

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        tensors = part_tensors(header, "denoiser")
        texts = (tensors.get(name) for name in ("txt_in.weight", "context_embedder.weight"))
        shape = next((text.shape for text in texts if text is not None), ())
        for release in self.published:
            sizes = release.architecture
            heads, distilled = sizes["num_attention_heads"], _is_distilled(file.name)
            expected = (heads * sizes["attention_head_dim"], sizes["joint_attention_dim"])
            if shape == expected and release.distilled == distilled:
                return release
        raise InputError(
            f"{file.name} is a FLUX.2 with a text input of {list(shape)}, which no klein has",
            fix="give FLUX.2 klein 4B or 9B, or a fine-tune of one",
        )

    def architecture(self, layout: Layout) -> Mapping[str, Any]:
        config, text = super().architecture(layout), text_config(layout.folder)
        width, joint_width = len(PROMPT.layers) * text["hidden_size"], config["joint_attention_dim"]
        if width != joint_width:
            raise InputError(
                f"the text encoder of {layout.folder} gives {width} channels, its denoiser reads {joint_width}",
                fix="give denoiser and text encoder of one release",
            )
        if (single := part_file(layout, "denoiser")) is not None:
            inner = config["num_attention_heads"] * config["attention_head_dim"]
            check_companion(
                single,
                shapes={"txt_in.weight": (inner, width), "context_embedder.weight": (inner, width)},
                blocks={
                    **dict.fromkeys(("double_blocks", "transformer_blocks"), config["num_layers"]),
                    **dict.fromkeys(
                        ("single_blocks", "single_transformer_blocks"), config["num_single_layers"]
                    ),
                },
            )
        if part_file(layout, "vae") is not None:
            raise InputError(
                "a FLUX.2 VAE cannot be read from a single file",
                fix="give a folder with its config.json and weights: --set base.vae=FOLDER",
            )
        return config

    def release(self, architecture: Mapping[str, Any], layout: Layout) -> tuple[str, bool]:
        """Return (variant, distilled), distilled by the pipeline's index or by a single file's name.

        A single file has no index: "klein" in its name without "base" means distilled.
        """
        distilled = bool(read_json(layout.folder / "model_index.json").get("is_distilled", False))
        single = part_file(layout, "denoiser")
        if single is not None and "klein" in single.name.lower():
            distilled = _is_distilled(single.name)
        return _variant(_size(architecture), distilled=distilled), distilled

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        size = _size(facts.architecture)
        # As ai-toolkit and musubi-tuner write them.
        return AdapterNames(
            kohya=f"flux2_klein_{size}".rstrip("_"),
            modelspec=f"{f'Flux.2-klein-{size}'.rstrip('-')}/lora",
        )

    # ---- networks

    def normalised(self, vae: nn.Module, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Fold squares of latents into channels, then scale by (x - mean) / deviation of the VAE's batch norm."""
        # The VAE's batch norm is never run: it holds the latents' mean and variance, and the pipeline
        # applies them by hand as here (Flux2KleinPipeline.__call__, before it decodes).
        shift, scale = _statistics(vae)
        return (_squares(mean) - shift) / scale, _squares(std) / scale

    def load_text_encoder(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> TextEncoder:
        return load_qwen3(self, facts.located, format=PROMPT, dtype=dtype, device=device)

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        text = conditioning["text"]
        velocity = denoiser(
            hidden_states=noisy.flatten(2).transpose(1, 2),
            encoder_hidden_states=text,
            # The network multiplies by 1000 again.
            timestep=timesteps / 1000,
            guidance=conditioning.get("guidance"),
            img_ids=_positions(noisy, rows=noisy.shape[2], columns=noisy.shape[3]),
            txt_ids=_positions(text, tokens=text.shape[1]),
            return_dict=False,
        )[0]
        unpacked: Tensor = velocity.transpose(1, 2).reshape(noisy.shape)
        return unpacked

    # ---- files

    def lora_key_name(self, format: FileFormat, component: str, module: str) -> str:
        if component != DENOISER:
            return text_name(format, component, module, roles=self.text.roles)
        return transformer_name(module)

    def layer_names(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherNames:
        # The last norm: diffusers has scale before shift, the original code the reverse.
        return other_names(transformer_names.FLUX2, shapes, swapped={"norm_out.linear"})

    # ---- images

    def build_sampler(
        self,
        facts: BaseFacts,
        *,
        denoiser: nn.Module,
        device: torch.device,
        decode_on: torch.device | None = None,
    ) -> Sampler:
        sampler = super().build_sampler(
            facts, denoiser=denoiser, device=device, decode_on=decode_on
        )
        assert isinstance(sampler, FlowSampler)
        pipeline, vae = sampler.pipeline, sampler.vae
        # The pipeline reads the VAE's statistics even with output_type="latent", so it gets these without
        # the network; its own factor counts latents before they are folded to squares.
        pipeline.vae = SimpleNamespace(bn=vae.bn, config=vae.config)
        pipeline.vae_scale_factor = facts.vae_factor // 2
        return sampler

    def sampler_arguments(
        self, conditioning: Conditioning, negative: Conditioning, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        return {
            "prompt_embeds": conditioning["text"],
            "negative_prompt_embeds": negative["text"],
            "guidance_scale": guidance_scale,  # distilled releases ignore it
        }

    def prompt_arguments(
        self, prompt: str, negative: str, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        """Return the plain pipeline's arguments; it has no negative prompt and guides against the empty prompt."""
        return {"prompt": prompt, "guidance_scale": guidance_scale}

    def latents_to_decode(
        self, pipeline: DiffusionPipeline, vae: nn.Module, latents: Tensor, size_px: tuple[int, int]
    ) -> Tensor:
        return latents.float()  # the pipeline itself undoes normalisation and squares


FAMILY = Flux2()


def _squares(latents: Tensor) -> Tensor:
    """Fold [B, C, H, W] to [B, 4 C, H/2, W/2]; channels vary slowest, then row and column in the square."""
    from torch.nn.functional import pixel_unshuffle

    # The order of channels is that of the pipeline's `_patchify_latents`; another one would
    # train, too, and give an adapter of no use elsewhere.
    return pixel_unshuffle(latents, 2)


def _statistics(vae: Any) -> tuple[Tensor, Tensor]:
    norm = vae.bn
    mean, variance = norm.running_mean, norm.running_var
    deviation = (variance + vae.config.batch_norm_eps).sqrt()
    return mean.view(1, -1, 1, 1), deviation.view(1, -1, 1, 1)


def _positions(like: Tensor, *, rows: int = 1, columns: int = 1, tokens: int = 1) -> Tensor:
    """Return int64 [rows columns tokens, 4]: image (always 0), row, column, index in the text."""
    import torch

    axes = [torch.arange(count, device=like.device) for count in (1, rows, columns, tokens)]
    return torch.cartesian_prod(*axes)
