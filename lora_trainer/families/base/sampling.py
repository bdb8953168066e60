"""Images of a base: the sampler with the denoiser in training, and diffusers' own pipeline on prompts. Torch-free to
import.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lora_trainer.common.processes import give_back_heap
from lora_trainer.families.base.facts import (
    ON_HOST,
    BaseFacts,
    Conditioning,
    image_places,
    with_text_lengths,
)
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.modular import modular_images
from lora_trainer.families.base.text.transformers_encoder import load_tokenizer
from lora_trainer.families.base.traits import PipelineTraits
from lora_trainer.families.files.base_parts import load_base_vae, tokenizer_folder

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from PIL import Image
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The base's own pipeline with the denoiser in training, on encoded prompts; the VAE decodes in float32."""

    pipeline: Any
    denoiser: nn.Module
    vae: Any
    device: torch.device
    family: Family
    facts: BaseFacts
    sigmas: Callable[[int], Sequence[float] | None] = lambda steps: None
    """The base's own noise levels of as many steps, None where the pipeline makes them."""

    def image(
        self,
        conditioning: Conditioning,
        negative: Conditioning,
        *,
        seed: int,
        size_px: tuple[int, int],
        steps: int,
        guidance_scale: float,
        references: Sequence[Image.Image] = (),
        seen: Callable[[torch.Tensor, torch.Tensor], None] = lambda latents, pixels: None,
    ) -> Image.Image:
        """Return one RGB image of (width, height); equal to the plain pipeline's with a CPU generator of `seed`.

        `references` are as large as they are trained with. `seen` gets the pipeline's latents and the pixels,
        [1, 3, H, W] in [-1, 1], that the VAE made of them.
        """
        latents = self.latents(
            conditioning,
            negative,
            seed=seed,
            size_px=size_px,
            steps=steps,
            guidance_scale=guidance_scale,
            references=references,
        )
        give_back_heap()  # decoding makes far larger tensors than a denoising step leaves
        pixels = self.decoded(latents, size_px)
        seen(latents, pixels)
        return as_image(pixels)

    def latents(
        self,
        conditioning: Conditioning,
        negative: Conditioning,
        *,
        seed: int,
        size_px: tuple[int, int],
        steps: int,
        guidance_scale: float,
        references: Sequence[Image.Image] = (),
    ) -> torch.Tensor:
        """Return the latents of one image as the family's pipeline has them at its end."""
        import torch

        sigmas = self.sigmas(steps)
        vae = borrowed_vae(self.vae, self.device)
        with appended(
            self.family, self.facts, self.denoiser, references, text=conditioning, vae=vae
        ) as is_appended:
            is_given = bool(references) and not is_appended
            latents: torch.Tensor = (self.edit if is_given else self.pipeline)(
                **(self._reference_arguments(references, size_px) if is_given else {}),
                **_arguments(
                    self.family.pipeline,
                    self._moved(conditioning),
                    self._moved(negative),
                    guidance_scale=guidance_scale,
                    steps=steps,
                ),
                # On the CPU, so that a seed gives the same noise on every device.
                generator=torch.Generator().manual_seed(seed),
                width=size_px[0],
                height=size_px[1],
                num_inference_steps=steps,
                **({} if sigmas is None else {"sigmas": list(sigmas)}),
                output_type="latent",
            ).images.to(self.device)
        return latents

    def decoded(self, latents: torch.Tensor, size_px: tuple[int, int]) -> torch.Tensor:
        """Return the pixels, float32 [1, 3, H, W] in [-1, 1], that the VAE makes of latents."""
        import torch

        try:
            vae = self.vae.to(self.device)
            with torch.no_grad():
                return self.family.latents.decode(vae, latents, size_px)
        finally:
            # Also after an error: training needs the memory, most of all when decoding ran out of it.
            self.vae.to("cpu")

    def _reference_arguments(
        self, references: Sequence[Image.Image], size_px: tuple[int, int]
    ) -> Mapping[str, Any]:
        assert self.facts.references is not None, f"{self.facts.source} reads no references"
        return self.facts.references.drawing(references, size_px)

    @cached_property
    def edit(self) -> Any:
        """The pipeline that draws with references, made when the first image is drawn with some."""
        vae = borrowed_vae(self.vae, self.device)
        pipeline = editing_pipeline(self.family, self.facts, self.pipeline, latents_of=vae)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def _moved(self, conditioning: Conditioning) -> Conditioning:
        dtype = next(self.denoiser.parameters()).dtype
        return {
            name: tensor
            if name in ON_HOST
            else tensor.to(self.device, dtype if tensor.is_floating_point() else None)
            for name, tensor in with_text_lengths(conditioning).items()
        }


@contextmanager
def appended(
    family: Family,
    facts: BaseFacts,
    denoiser: Any,
    references: Sequence[Image.Image],
    *,
    text: Conditioning,
    vae: Any,
) -> Iterator[bool]:
    """Let the denoiser read the latents of references beside every image, where the family draws so; yield whether.

    `text` is the prompt, encoded with them.
    """
    import numpy as np
    import torch

    from lora_trainer.families.base.latents import ImageEncoder

    traits = facts.references
    if not references or traits is None or traits.appended is None:
        yield False
        return
    encoder = ImageEncoder(vae=vae, latents=family.latents)
    latents = []
    for image in references:
        pixels = torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1)[None]
        latents.append(encoder.encode_images(pixels / 127.5 - 1)[0].mean[None])
    with traits.appended(denoiser, latents, image_places(text)):
        yield True


def editing_pipeline(
    family: Family, facts: BaseFacts, pipeline: Any, *, latents_of: Any = None
) -> Any:
    """Return the pipeline that draws with references, with the networks of the one that draws without.

    With a VAE `latents_of` it takes encoded prompts and returns latents of that VAE, else it is whole.
    """
    traits = facts.references
    assert traits is not None, f"{facts.source} reads no references"
    if (blocks := family.pipeline.blocks) is not None:
        return modular_images(
            replace(blocks, workflow=blocks.editing),
            pipeline.components,
            architecture=facts.release.architecture,
            latents_of=latents_of,
        )
    editing = pipeline
    if traits.pipeline:
        import diffusers

        kind = getattr(diffusers, traits.pipeline)
        # Also what the family's pipelines are made without, as far as this one asks for it.
        asked = inspect.signature(kind).parameters
        parts = {**family.pipeline.absent, **pipeline.components}
        editing = kind(**{name: each for name, each in parts.items() if name in asked})
    if traits.as_channels:
        # The VAE's latents are in its own float32, and stand beside the image's in the denoiser's dtype.
        prepared = editing.prepare_image_latents
        editing.prepare_image_latents = lambda *args, **named: prepared(*args, **named).to(
            editing.unet.dtype
        )
    if latents_of is not None:
        editing.vae, editing.vae_scale_factor = latents_of, pipeline.vae_scale_factor
    return editing


def borrowed_vae(vae: Any, device: torch.device) -> Any:
    """Return a VAE as a pipeline needs it that is given references: on `device` only while it encodes one."""
    from torch import float32, no_grad
    from torch.nn import Module

    class Borrowed(Module):
        device: torch.device
        config, dtype = vae.config, float32
        bn = getattr(vae, "bn", None)

        def encode(self, pixels: torch.Tensor) -> Any:
            try:
                with no_grad():
                    return vae.to(device).encode(pixels.to(device, float32))
            finally:
                vae.to("cpu")

    Borrowed.device = device  # a class cannot read the argument of its own name
    return Borrowed()


def as_image(pixels: torch.Tensor) -> Image.Image:
    """Return [1, 3, H, W] in [-1, 1] as an RGB image."""
    from diffusers.image_processor import VaeImageProcessor

    image: Image.Image = VaeImageProcessor().postprocess(pixels, output_type="pil")[0]
    return image


def build_sampler(
    family: Family, facts: BaseFacts, *, denoiser: nn.Module, device: torch.device
) -> Sampler:
    """Return a sampler around a denoiser that is on `device`, to which the VAE moves only while it decodes."""
    vae = load_base_vae(facts.located)
    if (blocks := family.pipeline.blocks) is not None:
        components = {
            family.traits.folder: denoiser,
            "scheduler": facts.release.sampling_scheduler(),
        }
        images = modular_images(
            blocks, components, architecture=facts.release.architecture, latents_of=vae
        )
        images.set_progress_bar_config(disable=True)
        return Sampler(
            pipeline=images, denoiser=denoiser, vae=vae, device=device, family=family, facts=facts
        )
    if (images_of := family.pipeline.images) is not None:
        # In the dtype of the texts that it gets.
        dtype = next(denoiser.parameters()).dtype
        unguided = family.load_unguided(facts, dtype=dtype, device=device)
        return Sampler(
            pipeline=images_of(facts, denoiser, unguided or denoiser),
            denoiser=denoiser,
            vae=vae,
            device=device,
            family=family,
            facts=facts,
        )
    # None keeps from_pretrained from loading the text encoders (9.5 GB for T5-XXL): the sampler gets
    # encoded prompts. Without a VAE the pipeline runs on the denoiser's device.
    texts = family.text.roles
    absent: dict[str, Any] = dict.fromkeys((*texts, *map(family.text.tokenizer_of, texts), "vae"))
    if (processor := family.pipeline.processor) is not None:
        # The pipeline asks it while it is made.
        for name, encoder in family.text.networks.items():
            folder = tokenizer_folder(facts.located.folder, name, family.text)
            tokenizer = load_tokenizer(folder, kind=encoder.kind)
            absent[family.text.tokenizer_of(name)] = processor(tokenizer)
    pipeline = _pipeline(family, facts, **{family.traits.folder: denoiser}, **absent)
    # A pipeline without a VAE assumes 8 pixels a latent; the embedded miniature base has its own number.
    pipeline.vae_scale_factor = facts.vae_factor
    if family.pipeline.reads_vae:
        pipeline.vae = SimpleNamespace(bn=vae.bn, config=vae.config)  # without the network
        pipeline.vae_scale_factor //= 2
    pipeline.set_progress_bar_config(disable=True)
    return Sampler(
        pipeline=pipeline,
        denoiser=denoiser,
        vae=vae,
        device=device,
        family=family,
        facts=facts,
        sigmas=partial(family.pipeline.sigmas, facts),
    )


def _pipeline(family: Family, facts: BaseFacts, **components: Any) -> Any:
    """Return diffusers' pipeline with the base's scheduler and these components, the others of its folder."""
    import diffusers

    if (blocks := family.pipeline.blocks) is not None:
        return modular_images(
            blocks,
            {**components, "scheduler": facts.release.sampling_scheduler()},
            architecture=facts.release.architecture,
        )
    return getattr(diffusers, family.pipeline.class_name).from_pretrained(
        facts.located.folder,
        scheduler=facts.release.sampling_scheduler(),
        use_safetensors=True,
        **family.pipeline.absent,
        **family.pipeline.states(facts),
        **components,
    )


def _arguments(
    traits: PipelineTraits,
    conditioning: Conditioning,
    negative: Conditioning,
    *,
    guidance_scale: float,
    steps: int,
) -> dict[str, Any]:
    """Return the pipeline's arguments for encoded prompts on the device, in the denoiser's dtype."""
    prompt, negative_prompt = traits.as_read(conditioning, negative)
    arguments = _scale_arguments(traits, guidance_scale, steps)
    # Some pipelines warn of a negative prompt that a scale up to 1 leaves unused.
    texts = {"": prompt, "negative_": negative_prompt if guidance_scale > 1 else {}}
    for prefix, tensors in texts.items():
        for name, argument in traits.text_arguments.items():
            if name in tensors:
                arguments[prefix + argument] = tensors[name]
    return arguments


def _scale_arguments(traits: PipelineTraits, guidance_scale: float, steps: int) -> dict[str, Any]:
    if traits.scales is not None:
        return dict(traits.scales(guidance_scale, steps))
    return {traits.scale_argument: guidance_scale - traits.scale_offset}


def pipeline_arguments(
    family: Family,
    pipeline: Any,
    facts: BaseFacts,
    prompt: str,
    negative: str,
    *,
    guidance_scale: float,
    steps: int,
    references: Sequence[Image.Image] = (),
) -> tuple[Mapping[str, Any], Conditioning]:
    """Return the plain pipeline's arguments that reproduce the sampler's images of as many steps, and the prompt.

    Prompts that `facts` reads in chunks, after another system prompt than the pipeline's or beside `references` are
    encoded here, with the pipeline's own encoders; the conditioning of another is empty.
    """
    traits, roles = family.pipeline, family.text.roles
    is_other = facts.system_prompt != family.text.system_prompt or facts.sees_references
    if facts.chunks > 1 or is_other:
        tokenizers = {name: getattr(pipeline, family.text.tokenizer_of(name)) for name in roles}
        if traits.processor is not None:
            tokenizers = {name: each.tokenizer for name, each in tokenizers.items()}
        networks = {name: getattr(pipeline, name) for name in roles}
        encoder = family.text.encoder(networks=networks, tokenizers=tokenizers, facts=facts)
        denoiser = getattr(pipeline, family.traits.folder)
        first = next(iter(tokenizers.values()))
        prompts = [prompt, negative]
        if family.text.new_token_keys:  # new words of several tokens
            prompts = [pipeline.maybe_convert_prompt(text, first) for text in prompts]
        texts = [
            {
                name: tensor
                if name in ON_HOST
                else tensor.to(
                    pipeline.device, denoiser.dtype if tensor.is_floating_point() else None
                )
                for name, tensor in encoder.encode_seeing(text, references).items()
            }
            for text in prompts
        ]
        encoded = _arguments(traits, *texts, guidance_scale=guidance_scale, steps=steps)
        return encoded, texts[0]
    arguments = {"prompt": prompt, **_scale_arguments(traits, guidance_scale, steps)}
    if traits.takes_negative and guidance_scale > 1:
        arguments["negative_prompt"] = traits.negative_prefix + negative if negative else ""
    return arguments, {}


def plain_pipeline(
    family: Family, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
) -> DiffusionPipeline:
    """Return diffusers' own text-to-image pipeline with networks in `dtype` and the VAE in float32."""
    import torch

    cpu, names = torch.device("cpu"), family.text.roles
    text: Any = family.load_text_encoder(facts, dtype=dtype, device=cpu)
    folder_of = family.text.tokenizer_of
    processed = family.pipeline.processor or (lambda tokenizer: tokenizer)
    tokenizers = {folder_of(name): processed(each) for name, each in text.tokenizers.items()}
    vae = load_base_vae(facts.located)
    decode, encode = vae.decode, vae.encode
    # Pipelines pass latents, and the pixels of references, in the dtype of the networks.
    vae.decode = lambda latents, *args, **options: decode(latents.float(), *args, **options)
    vae.encode = lambda pixels, *args, **options: encode(pixels.float(), *args, **options)
    pipeline: DiffusionPipeline = _pipeline(
        family,
        facts,
        **{family.traits.folder: family.load_denoiser(facts, dtype=dtype, device=cpu)},
        vae=vae,
        # A base without one of its encoders (Stable Diffusion 3 without T5) has None in its place.
        **{**dict.fromkeys((*names, *map(folder_of, names))), **text.networks, **tokenizers},
    )
    family.pipeline.mend(pipeline)
    pipeline = pipeline.to(device)
    if name := family.pipeline.unguided:
        # Now, because it stays in its files.
        unguided = family.load_unguided(facts, dtype=dtype, device=device)
        setattr(pipeline, name, unguided or getattr(pipeline, family.traits.folder))
    return pipeline
