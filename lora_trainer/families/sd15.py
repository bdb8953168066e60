"""Stable Diffusion 1.x: one CLIP text encoder, a 4-channel VAE, a convolutional U-Net, epsilon prediction.

Also the family of the embedded miniature base, which is the same pipeline with small numbers: all
sizes are read from the base's own configs, none is assumed.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.errors import InputError
from lora_trainer.families.base import (
    BaseFacts,
    Conditioning,
    Encoders,
    Family,
    Latents,
    PartFacts,
    Prediction,
    Sampler,
)
from lora_trainer.families.costs import SampleCost, Targets, Workload
from lora_trainer.families.unet_costs import adapter_parameters, sample_cost

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderKL, StableDiffusionPipeline
    from PIL import Image
    from torch import Tensor, nn
    from transformers import CLIPTextModel, CLIPTokenizer

PARTS = {"denoiser": "unet", "vae": "vae", "text_encoder": "text_encoder"}
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
TRANSFORMER = (*ATTENTION, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
CONVOLUTION = (
    *TRANSFORMER,
    "conv1",
    "conv2",
    "conv_shortcut",
    "time_emb_proj",
    "downsamplers.0.conv",
    "upsamplers.0.conv",
)
ENDINGS: Mapping[Targets, tuple[str, ...]] = {
    "attention": ATTENTION,
    "transformer": TRANSFORMER,
    "all": CONVOLUTION,
}
# The public v1.5 release: its configuration and sizes, so that a plan needs no download.
SD15_ARCHITECTURE: Mapping[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": [
        "CrossAttnDownBlock2D",
        "CrossAttnDownBlock2D",
        "CrossAttnDownBlock2D",
        "DownBlock2D",
    ],
    "up_block_types": [
        "UpBlock2D",
        "CrossAttnUpBlock2D",
        "CrossAttnUpBlock2D",
        "CrossAttnUpBlock2D",
    ],
    "block_out_channels": [320, 640, 1280, 1280],
    "layers_per_block": 2,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
    "norm_num_groups": 32,
}
SD15_IDS = (
    "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "runwayml/stable-diffusion-v1-5",
    "benjamin-paine/stable-diffusion-v1-5",
)


class StableDiffusion1(Family):
    """The family of Stable Diffusion 1.1 to 1.5 and everything fine-tuned from them."""

    name = "sd15"
    default_source = SD15_IDS[0]
    base_model_version = "sd_v1"
    modelspec_architecture = "stable-diffusion-v1/lora"

    def known(self, source: str) -> BaseFacts | None:
        if source not in SD15_IDS:
            return None
        return BaseFacts(
            family=self.name,
            source=source,
            path=None,
            resolution_px=512,
            bucket_step_px=64,
            latent_channels=4,
            vae_factor=8,
            max_tokens=77,
            prediction="epsilon",
            parts={
                "denoiser": PartFacts(parameters=859_520_964),
                "vae": PartFacts(parameters=83_653_863),
                "text_encoder": PartFacts(parameters=123_060_480),
            },
            architecture=SD15_ARCHITECTURE,
            download_bytes=4_265_000_000,
        )

    def detect(self, folder: Path) -> bool:
        index = folder / "model_index.json"
        if not index.is_file():
            return False
        components = _read_json(index)
        one_encoder = "text_encoder_2" not in components and "transformer" not in components
        return (
            "unet" in components
            and one_encoder
            and _read_json(folder / "unet" / "config.json").get("in_channels", 4) == 4
        )

    def facts(self, folder: Path, *, source: str, identities: Mapping[str, str]) -> BaseFacts:
        unet = _read_json(folder / "unet" / "config.json")
        vae = _read_json(folder / "vae" / "config.json")
        scheduler = _read_json(folder / "scheduler" / "scheduler_config.json")
        tokens = int(_read_json(folder / "text_encoder" / "config.json")["max_position_embeddings"])
        _require(folder / "tokenizer", "vocab.json", "tokenizer.json")
        vae_factor = 2 ** (len(vae["block_out_channels"]) - 1)
        files = self.parts(folder)
        return BaseFacts(
            family=self.name,
            source=source,
            path=folder,
            resolution_px=int(unet["sample_size"]) * vae_factor,
            bucket_step_px=vae_factor * 2 ** (len(unet["block_out_channels"]) - 1),
            latent_channels=int(vae["latent_channels"]),
            vae_factor=vae_factor,
            max_tokens=tokens,
            prediction=_prediction(scheduler, folder),
            parts={
                part: PartFacts(
                    parameters=_count_parameters(files[part][0]), identity=identities.get(part, "")
                )
                for part in PARTS
            },
            architecture=unet,
        )

    def parts(self, folder: Path) -> Mapping[str, tuple[Path, ...]]:
        tokenizer = tuple(
            sorted(
                path
                for path in (folder / "tokenizer").glob("*")
                if path.suffix in {".json", ".txt"}
            )
        )
        return {
            "denoiser": (_weights(folder / "unet"), folder / "unet" / "config.json"),
            "vae": (_weights(folder / "vae"), folder / "vae" / "config.json"),
            "text_encoder": (
                _weights(folder / "text_encoder"),
                folder / "text_encoder" / "config.json",
                *tokenizer,
            ),
        }

    def sample_cost(self, facts: BaseFacts, workload: Workload) -> SampleCost:
        return sample_cost(
            facts.architecture, workload, vae_factor=facts.vae_factor, text_tokens=facts.max_tokens
        )

    def adapter_parameters(self, facts: BaseFacts, *, rank: int, targets: Targets) -> int:
        return adapter_parameters(facts.architecture, rank=rank, targets=targets)

    def load_encoders(self, facts: BaseFacts, *, device: torch.device) -> Encoders:
        import torch
        from transformers import CLIPTextModel, CLIPTokenizer

        folder = _folder(facts)
        vae = _load_vae(folder)
        text_encoder = CLIPTextModel.from_pretrained(
            folder,
            subfolder="text_encoder",
            dtype=torch.float32,
            variant=_variant(folder / "text_encoder"),
        )
        return _Encoders(
            vae=vae.requires_grad_(False).eval().to(device),
            text_encoder=text_encoder.requires_grad_(False).eval().to(device),
            tokenizer=CLIPTokenizer.from_pretrained(folder, subfolder="tokenizer"),
            max_tokens=facts.max_tokens,
        )

    def load_denoiser(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        from diffusers import UNet2DConditionModel

        folder = _folder(facts)
        unet = UNet2DConditionModel.from_pretrained(
            folder,
            subfolder="unet",
            dtype=dtype,
            variant=_variant(folder / "unet"),
            use_safetensors=True,
        )
        loaded: nn.Module = unet.requires_grad_(False).to(device)
        return loaded

    def alphas_cumprod(self, facts: BaseFacts) -> Tensor:
        from diffusers import DDPMScheduler

        scheduler = DDPMScheduler.from_pretrained(_folder(facts), subfolder="scheduler")
        levels: Tensor = scheduler.alphas_cumprod.double()
        return levels

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        prediction: Tensor = denoiser(
            noisy, timesteps, encoder_hidden_states=conditioning["text"], return_dict=False
        )[0]
        return prediction

    def lora_targets(self, denoiser: nn.Module, targets: Targets) -> list[str]:
        endings = ENDINGS[targets]
        return [
            name
            for name, _ in denoiser.named_modules()
            if any(name.endswith(f".{ending}") for ending in endings)
        ]

    def kohya_module(self, module: str) -> str:
        return "lora_unet_" + module.replace(".", "_")

    def diffusers_module(self, module: str) -> str:
        return f"unet.{module}"

    def build_sampler(
        self, facts: BaseFacts, *, denoiser: nn.Module, device: torch.device
    ) -> Sampler:
        from diffusers import StableDiffusionPipeline

        folder = _folder(facts)
        vae = _load_vae(folder)
        pipeline = StableDiffusionPipeline.from_pretrained(
            folder,
            unet=denoiser,
            vae=vae,
            text_encoder=None,
            tokenizer=None,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        pipeline.set_progress_bar_config(disable=True)
        return _Sampler(pipeline=pipeline, device=device)

    def plain_pipeline(self, facts: BaseFacts, *, device: torch.device) -> StableDiffusionPipeline:
        import torch
        from diffusers import StableDiffusionPipeline

        folder = _folder(facts)
        pipeline: StableDiffusionPipeline = StableDiffusionPipeline.from_pretrained(
            folder,
            dtype=torch.float32,
            variant=_variant(folder / "unet"),
            use_safetensors=True,
            safety_checker=None,
            requires_safety_checker=False,
        )
        return pipeline.to(device)


@dataclass(frozen=True, kw_only=True)
class _Encoders(Encoders):
    vae: AutoencoderKL
    text_encoder: CLIPTextModel
    tokenizer: CLIPTokenizer
    max_tokens: int

    def encode_images(self, pixels: Tensor) -> list[Latents]:
        import torch

        with torch.no_grad():
            posterior = self.vae.encode(pixels.to(self.vae.device)).latent_dist
        means = (posterior.mean * self.vae.config.scaling_factor).float().cpu()
        stds = (posterior.std * self.vae.config.scaling_factor).float().cpu()
        if not (means.isfinite().all() and stds.isfinite().all()):
            raise InputError(
                "the VAE gave latents that are not finite numbers",
                fix="use the base model's original VAE in fp32",
            )
        return [Latents(mean=mean, std=std) for mean, std in zip(means, stds, strict=True)]

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        import torch

        tokens = self.tokenizer(
            list(prompts),
            padding="max_length",
            max_length=self.max_tokens,
            truncation=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            hidden = self.text_encoder(tokens.input_ids.to(self.text_encoder.device))[0]
        return {"text": hidden.float().cpu()}

    def count_tokens(self, prompt: str) -> int:
        return len(self.tokenizer(prompt, add_special_tokens=False).input_ids)


@dataclass(frozen=True, kw_only=True)
class _Sampler(Sampler):
    pipeline: StableDiffusionPipeline
    device: torch.device

    def image(
        self,
        conditioning: Conditioning,
        negative: Conditioning,
        *,
        seed: int,
        size_px: tuple[int, int],
        steps: int,
        guidance_scale: float,
    ) -> Image.Image:
        import torch

        pipeline, dtype = self.pipeline, next(self.pipeline.unet.parameters()).dtype
        latents = pipeline(
            prompt_embeds=conditioning["text"].to(self.device, dtype),
            negative_prompt_embeds=negative["text"].to(self.device, dtype),
            generator=torch.Generator().manual_seed(seed),
            width=size_px[0],
            height=size_px[1],
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            output_type="latent",
        ).images
        vae = pipeline.vae.to(self.device)
        with torch.no_grad():
            pixels = vae.decode(latents.float() / vae.config.scaling_factor).sample
        vae.to("cpu")
        image: Image.Image = pipeline.image_processor.postprocess(pixels, output_type="pil")[0]
        return image


FAMILY = StableDiffusion1()


def _prediction(scheduler: Mapping[str, Any], folder: Path) -> Prediction:
    found = scheduler.get("prediction_type", "epsilon")  # absent in the oldest releases
    if found == "epsilon":
        return "epsilon"
    if found == "v_prediction":
        return "v_prediction"
    raise InputError(
        f"{folder / 'scheduler'}: prediction_type={found!r}, allowed are epsilon and v_prediction",
        fix="use a Stable Diffusion 1.x base with one of these",
    )


def _folder(facts: BaseFacts) -> Path:
    if facts.path is None:
        raise AssertionError(f"{facts.source} is known by name only; locate it before loading")
    return facts.path


def _load_vae(folder: Path) -> AutoencoderKL:
    """Load the VAE in float32, whatever the denoiser's dtype: in fp16 some overflow."""
    import torch
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(
        folder,
        subfolder="vae",
        dtype=torch.float32,
        variant=_variant(folder / "vae"),
        use_safetensors=True,
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"base model file {file} is missing or not JSON ({error})",
            fix="download the base model again",
        ) from None
    if not isinstance(value, dict):
        raise InputError(
            f"base model file {file} is not a JSON object", fix="download the base model again"
        )
    return value


def _require(folder: Path, *names: str) -> None:
    if not any((folder / name).is_file() for name in names):
        raise InputError(
            f"base model part {folder} has none of {', '.join(names)}",
            fix="download the base model again",
        )


def _weights(folder: Path) -> Path:
    """Return the safetensors file of a part, full precision before fp16; pickles are refused."""
    stem = "model" if folder.name == "text_encoder" else "diffusion_pytorch_model"
    for name in (f"{stem}.safetensors", f"{stem}.fp16.safetensors"):
        if (folder / name).is_file():
            return folder / name
    pickles = [path.name for path in folder.glob("*.bin")]
    found = f"only {pickles[0]}, a pickle that can run code" if pickles else "no weights"
    raise InputError(
        f"base model part {folder} has {found}; allowed is {stem}.safetensors",
        fix="download the safetensors version of the base model",
    )


def _variant(folder: Path) -> str | None:
    return "fp16" if _weights(folder).name.endswith(".fp16.safetensors") else None


def _count_parameters(file: Path) -> int:
    """Count parameters from a safetensors header; raises InputError when the file is cut short."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        end = max((int(entry["data_offsets"][1]) for entry in entries), default=0)
        parameters = int(sum(math.prod(entry["shape"]) for entry in entries))
    except (
        OSError, ValueError, struct.error, MemoryError, OverflowError, AttributeError, KeyError, TypeError, IndexError,
    ) as error:  # fmt: skip
        raise InputError(
            f"{file} is not a whole safetensors file ({error})", fix="download the base model again"
        ) from None
    if file.stat().st_size != 8 + length + end:
        raise InputError(
            f"{file} has {file.stat().st_size:,} bytes, its header says {8 + length + end:,}",
            fix="download the base model again",
        )
    return parameters
