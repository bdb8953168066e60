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
from lora_trainer.families.base import (
    AdapterFormats,
    AdapterNames,
    BaseFacts,
    BaseRelease,
    Conditioning,
    Guidance,
    Header,
    Layout,
    Sampler,
)
from lora_trainer.families.base_files.base_folder import part_file, read_json
from lora_trainer.families.base_files.network_files import denoiser_shapes
from lora_trainer.families.facts import APACHE, FLUX_DEV
from lora_trainer.families.flow import JOINT_ATTENTION, FlowFamily, target_endings
from lora_trainer.families.text.text_layers import QWEN3_4B
from lora_trainer.families.text.transformers_encoder import (
    QWEN3_TOKENS,
    QWEN3_UNREAD,
    Qwen3Encoder,
    qwen3_config,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

ENDINGS = target_endings(
    # Single-stream blocks: one matrix joins q, k, v and the MLP's input, another both outputs.
    (*JOINT_ATTENTION, "attn.to_qkv_mlp_proj", "attn.to_out"),
    transformer=tuple(
        f"{stream}.{name}"
        for stream in ("ff", "ff_context")
        for name in ("linear_in", "linear_out")
    ),  # the modulation lies outside the blocks
)
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
        max_tokens=QWEN3_TOKENS,
        download_bytes=2 * (denoiser + VAE_PARAMETERS + text + HEAD_PARAMETERS[size]),
        variant=_variant(size.lower(), distilled=distilled),
        distilled=distilled,
        licence=APACHE if size == "4B" else FLUX_DEV,
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


class KleinEncoder(Qwen3Encoder):
    """Qwen3 without thinking, and the layers that diffusers' pipeline joins; its training script has others."""

    layers = (9, 18, 27)
    padded = True
    thinking = False


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
    text_networks = (QWEN3_4B,)
    text_encoder_class = KleinEncoder
    unread_text = QWEN3_UNREAD
    native_latents = 64
    patch = 1  # `normalised` folds the squares into channels: the denoiser has one token per latent
    endings = ENDINGS
    file_marks = (
        frozenset({"double_stream_modulation_img.lin.weight"}),
        frozenset({"double_stream_modulation_img.linear.weight"}),
    )
    vae_files = False
    negative_prompt = False  # the pipeline guides against the empty prompt
    # The last norm: diffusers has scale before shift, the original code the reverse.
    swapped_layers = frozenset({"norm_out.linear"})
    published = tuple(
        _release(size, distilled=distilled) for size in ("4B", "9B") for distilled in (False, True)
    )
    # ---- facts

    def guidance(self, architecture: Mapping[str, Any], *, distilled: bool) -> Guidance:
        """Return two passes for the undistilled: distilled releases ignore the guidance scale."""
        embedded = bool(architecture.get("guidance_embeds", True))  # diffusers' own default
        return Guidance(two_passes=not distilled, embedded=embedded)

    def latent_shape(self, vae: Mapping[str, Any]) -> tuple[int, int]:
        channels, factor = super().latent_shape(vae)
        return 4 * channels, 2 * factor

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        shapes = denoiser_shapes(header)
        shape = shapes.get("txt_in.weight", shapes.get("context_embedder.weight", ()))
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
        config, text = super().architecture(layout), qwen3_config(layout.folder)
        width = len(KleinEncoder.layers) * text["hidden_size"]
        if width != config["joint_attention_dim"]:
            raise InputError(
                f"the text encoder of {layout.folder} gives {width} channels, its denoiser reads "
                f"{config['joint_attention_dim']}",
                fix="give denoiser and text encoder of one release",
            )
        if part_file(layout, "vae") is not None:
            raise InputError(
                "a FLUX.2 VAE cannot be read from a single file",
                fix="give a folder with its config.json and weights: --set base.vae=FOLDER",
            )
        return config

    def companion_sizes(
        self, config: Mapping[str, Any], layout: Layout
    ) -> tuple[Mapping[str, tuple[int, ...]], Mapping[str, int]]:
        inner = config["num_attention_heads"] * config["attention_head_dim"]
        shape = (inner, config["joint_attention_dim"])
        double, single = config["num_layers"], config["num_single_layers"]
        return dict.fromkeys(("txt_in.weight", "context_embedder.weight"), shape), {
            **dict.fromkeys(("double_blocks", "transformer_blocks"), double),
            **dict.fromkeys(("single_blocks", "single_transformer_blocks"), single),
        }

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

    def normalised(self, vae: Any, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Fold squares of latents into channels, then scale by (x - mean) / deviation of the VAE's batch norm."""
        # The VAE's batch norm is never run: it holds the latents' mean and variance, and the pipeline
        # applies them by hand as here (Flux2KleinPipeline.__call__, before it decodes).
        shift, scale = _statistics(vae)
        return (_squares(mean) - shift) / scale, _squares(std) / scale

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

    # ---- images

    def build_sampler(
        self,
        facts: BaseFacts,
        *,
        denoiser: nn.Module,
        device: torch.device,
    ) -> Sampler:
        sampler = super().build_sampler(facts, denoiser=denoiser, device=device)
        # The pipeline reads the VAE's statistics even with output_type="latent", so it gets these without
        # the network; its own factor counts latents before they are folded to squares.
        sampler.pipeline.vae = SimpleNamespace(bn=sampler.vae.bn, config=sampler.vae.config)
        sampler.pipeline.vae_scale_factor = facts.vae_factor // 2
        return sampler

    def latents_to_decode(self, vae: Any, latents: Tensor, size_px: tuple[int, int]) -> Tensor:
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
