"""Images of the U-Net families: schedulers, the VAE, and samples from a denoiser in training.

Training, samples and plain pipelines all take their scheduler from the facts of a base (prediction type,
whether the last timestep is pure noise), so an override of the facts reaches all three. The VAE runs in
float32 beside a denoiser of any dtype, because some VAEs overflow in fp16. Torch is imported inside calls only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.common.gc_control import give_back_heap
from lora_trainer.families.base import (
    BaseFacts,
    Conditioning,
    ImageEncoder,
    Latents,
    Layout,
    Prediction,
    Sampler,
)
from lora_trainer.families.base_files import unet_file
from lora_trainer.families.base_files.base_folder import part_file, part_folder, variant

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor


def sampling_scheduler(facts: BaseFacts) -> Any:
    """Return the base's own sampler, or DDIM where the base's sampler cannot start from pure noise."""
    import diffusers

    # A base may name a scheduler that this diffusers does not have.
    kind: Any = getattr(
        diffusers, str(facts.scheduler.get("_class_name", "")), diffusers.DDIMScheduler
    )
    config = facts.scheduler_config()
    if "rescale_betas_zero_snr" not in kind._get_init_keys(kind):
        # A class without the parameter (PNDM, Stable Diffusion 1's) would warn and start from a level with
        # signal in it. DDIM can, and is the sampler of Lin et al. 2023 (arXiv 2305.08891).
        if facts.zero_terminal_snr:
            kind = diffusers.DDIMScheduler
        else:
            config.pop("rescale_betas_zero_snr")
    return kind.from_config(config)


def stated_prediction(scheduler: Mapping[str, Any], folder: Path) -> Prediction:
    """Return the prediction type in a scheduler's configuration; raises InputError for `sample`."""
    prediction = scheduler.get("prediction_type", "epsilon")  # absent in the oldest releases
    if prediction == "epsilon":
        return "epsilon"
    if prediction == "v_prediction":
        return "v_prediction"
    raise InputError(
        f"{folder / 'scheduler'}: prediction_type={prediction!r}, allowed are epsilon and v_prediction",
        fix="use a base model that predicts epsilon or v_prediction",
    )


def load_vae(layout: Layout) -> Any:
    """Load the VAE in float32, frozen, on the CPU."""
    import torch
    from accelerate import init_empty_weights
    from diffusers import AutoencoderKL

    folder, single = part_folder(layout, "vae", "vae"), part_file(layout, "vae")
    if single is not None:
        with init_empty_weights():
            vae = AutoencoderKL.from_config(AutoencoderKL.load_config(folder))
        vae = unet_file.load_vae(single, vae, dtype=torch.float32)
    else:
        vae = AutoencoderKL.from_pretrained(
            folder, dtype=torch.float32, variant=variant(folder), use_safetensors=True
        )
    return vae.requires_grad_(False).eval()


def in_float32(decode: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a float32 VAE's `decode` for a pipeline that passes latents in its own, narrower dtype."""

    def decode_in_float32(latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        return decode(latents.float(), *args, **kwargs)

    return decode_in_float32


@dataclass(frozen=True, kw_only=True)
class VaeEncoder(ImageEncoder):
    """A VAE whose posterior is scaled by its own factor."""

    vae: Any

    def encode_images(self, pixels: Tensor) -> list[Latents]:
        import torch

        with torch.no_grad():
            posterior = self.vae.encode(pixels.to(self.vae.device)).latent_dist
        means = (posterior.mean * self.vae.config.scaling_factor).float().cpu()
        stds = (posterior.std * self.vae.config.scaling_factor).float().cpu()
        if not (means.isfinite().all() and stds.isfinite().all()):
            raise InputError(
                "the VAE gave latents that are not finite numbers",
                fix="use the base model's original VAE, or another with --set base.vae=FILE",
            )
        return [Latents(mean=mean, std=std) for mean, std in zip(means, stds, strict=True)]


@dataclass(frozen=True, kw_only=True)
class UNetSampler(Sampler):
    """The base's own pipeline with the denoiser in training; the VAE decodes in float32."""

    pipeline: Any
    vae: Any
    device: torch.device
    decode_on: torch.device
    arguments: Callable[[Conditioning, Conditioning], Mapping[str, Any]]
    """The pipeline's arguments for encoded prompts and negative prompts."""

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
        from diffusers.image_processor import VaeImageProcessor

        latents = self.pipeline(
            **self.arguments(self._moved(conditioning), self._moved(negative)),
            # On the CPU, so that a seed gives the same noise on every device.
            generator=torch.Generator().manual_seed(seed),
            width=size_px[0],
            height=size_px[1],
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            output_type="latent",
        ).images.to(self.decode_on)
        give_back_heap()  # decoding makes far larger tensors than a denoising step leaves
        try:
            vae = self.vae.to(self.decode_on)
            with torch.no_grad():
                pixels = vae.decode(latents.float() / vae.config.scaling_factor).sample
        finally:
            # Also after an error: training needs the memory, most of all when decoding ran out of it.
            self.vae.to("cpu")
        image: Image.Image = VaeImageProcessor().postprocess(pixels, output_type="pil")[0]
        return image

    def _moved(self, conditioning: Conditioning) -> Conditioning:
        dtype = next(self.pipeline.unet.parameters()).dtype
        return {
            name: tensor.to(self.device, dtype if tensor.is_floating_point() else None)
            for name, tensor in conditioning.items()
        }
