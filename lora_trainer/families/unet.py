"""The base class of the U-Net families: folders and checkpoints, noise levels, loading, names, sampling.

The time and size embeddings and the first and last convolution never get an adapter: they hold few
weights, and a small change of them disturbs every image.

A family states its pipeline, its CLIP encoders and the traits of its U-Net (`owns`), and overrides the
members that differ. A base is a diffusers folder with `unet`, `vae`, `scheduler` and CLIP text encoders,
each part replaceable by a file (`Layout`). Prediction type and noise levels come from the facts, so an
override of the facts reaches training, samples and plain pipelines.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lora_trainer.config.config import Targets
from lora_trainer.families.base import (
    AUTOENCODER_KL,
    BY_TWO_PASSES,
    DENOISER,
    AdapterFormats,
    AdapterTargets,
    BaseFacts,
    Conditioning,
    Family,
    FileFormat,
    Header,
    ImageEncoder,
    Layout,
    NetworkTraits,
    OtherNames,
    Part,
    PartFacts,
    Sampler,
    TextEncoder,
    TextInputs,
    WeightPlace,
)
from lora_trainer.families.base_files import unet_file
from lora_trainer.families.base_files.base_folder import (
    components,
    part_file,
    part_folder,
    read_json,
    tokenizer_files,
    weights,
)
from lora_trainer.families.base_files.unet_config import UNET_CLASS, read_unet
from lora_trainer.families.base_files.unet_file import UNetTraits, config_traits, header_traits
from lora_trainer.families.base_files.unet_layers import checkpoint_names, weight_places
from lora_trainer.families.base_files.unet_parts import (
    V_PREDICTION,
    ZERO_TERMINAL_SNR,
    clip_size,
    count_text,
    count_unet,
    count_vae,
    levels,
    number,
    training_marks,
)
from lora_trainer.families.images.unet_images import (
    UNetSampler,
    VaeEncoder,
    in_float32,
    load_vae,
    sampling_scheduler,
    stated_prediction,
)
from lora_trainer.families.text import clip
from lora_trainer.families.text.chunks import Chunks
from lora_trainer.families.text.text_layers import clip_layers

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from torch import Tensor, nn

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
# proj_in and proj_out are 1x1 convolutions in SD 1 and linear in SD 2 and SDXL (`use_linear_projection`).
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


class UNetFamily(Family):
    """A family whose denoiser is a `UNet2DConditionModel` that predicts noise or velocity."""

    pipeline_class: str
    """diffusers' text-to-image pipeline."""
    released_unet: Mapping[str, Any]
    """diffusers' configuration of the releases' U-Net; it fixes the block numbers in checkpoint names."""
    texts: tuple[clip.ClipPart, ...]
    """The CLIP encoders, in the order of the pipeline."""
    text_encoder_class: ClassVar[type[clip.ClipEncoder]] = clip.ClipEncoder
    formats = AdapterFormats(
        written=("kohya", "diffusers"),
        refused={
            "comfyui": "ComfyUI reads kohya's names for U-Net families, and so does everything else; use kohya"
        },
    )
    traits = NetworkTraits(
        precisions=("bf16", "fp16", "fp32"),
        block_pattern=r".*?\.transformer_blocks\.\d+(?=\.)",
        # 1-3 % of the weights, and the only way of the timestep into a resnet.
        quantization_skip=("time_emb_proj",),
        vae_peak=AUTOENCODER_KL,
    )

    @cached_property
    def text(self) -> TextInputs:  # type: ignore[override]  # follows from the encoders
        """Layers go up to the largest encoder's number, because miniature bases have other numbers."""
        return TextInputs(
            layers={
                part.component: clip_layers(
                    layers=clip.MAX_LAYERS, width=part.released.width, inner=part.released.inner
                )
                for part in self.texts
            },
            roles={part.component: part.role for part in self.texts},
            multiple=1,
            one_length=False,
            encoder_files=False,
            trainable=True,
            prompt_weights=True,
            chunks=True,
            new_token_keys={part.component: part.embedding for part in self.texts},
        )

    # ---- to implement besides the members of `Family`

    @abstractmethod
    def owns(self, traits: UNetTraits) -> bool:
        """Return whether a U-Net with these traits is of this family."""

    def added_conditioning(self, conditioning: Conditioning) -> Mapping[str, Tensor] | None:
        """Return the U-Net's `added_cond_kwargs`, None for a U-Net without added conditioning."""
        return None

    def sampler_arguments(
        self, conditioning: Conditioning, negative: Conditioning
    ) -> Mapping[str, Any]:
        """Return the pipeline's arguments for encoded prompts on the device, in the denoiser's dtype."""
        return {
            "prompt_embeds": conditioning["text"],
            "negative_prompt_embeds": negative["text"],
        }

    # ---- facts

    def detect(self, folder: Path) -> bool:
        classes = components(folder)
        encoders = {name for name in classes if name.startswith("text_encoder")}
        if "unet" not in classes or encoders != {part.component for part in self.texts}:
            return False
        traits = config_traits(read_json(folder / "unet" / "config.json"))
        return traits is not None and self.owns(traits)

    def detect_file(self, header: Header) -> frozenset[Part]:
        traits, vae = header_traits(header), unet_file.vae_shape(header)
        if traits is None:
            # The VAEs of SD 1, SD 2 and SDXL have equal tensors; they differ in the scale, which no file
            # states. A VAE alone in its file therefore belongs to each of these families.
            alone = vae is not None and vae[0] == 4 and unet_file.only_vae(header)
            return frozenset({"vae"} if alone else ())
        if not self.owns(traits):
            return frozenset()
        parts: set[Part] = {"denoiser"}
        if vae is not None and vae[0] == 4:
            parts.add("vae")
        # With one of SDXL's two encoders missing, both come from the companion: the part is all or nothing.
        if all(_starts(header, part.checkpoint) for part in self.texts):
            parts.add("text_encoder")
        return frozenset(parts)

    def facts(self, layout: Layout, *, source: str, identities: Mapping[str, str]) -> BaseFacts:
        unet = _unet_config(layout)
        vae = read_json(part_folder(layout, "vae", "vae") / "config.json")
        scheduler = read_json(layout.folder / "scheduler" / "scheduler_config.json")
        text = read_json(layout.folder / self.texts[0].component / "config.json")
        for part in self.texts:
            tokenizer_files(layout.folder / part.tokenizer)  # raises where there is none
        marks = training_marks(part_file(layout, "denoiser"))
        vae_factor = 2 ** (len(levels(vae)) - 1)
        counted = {
            "denoiser": count_unet(layout, unet, parameters_of=self._parameters_of),
            "vae": count_vae(layout, vae),
            "text_encoder": sum(count_text(layout, part) for part in self.texts),
        }
        return BaseFacts(
            family=self.name,
            source=source,
            layout=layout,
            # sample_size is the side of the latents: 64 in SD 1, 96 in SD 2.1, 128 in SDXL.
            resolution_px=number(unet, "sample_size") * vae_factor,
            # Each level but the last halves the latents, and the way up must meet the same sizes again.
            bucket_step_px=vae_factor * 2 ** (len(levels(unet)) - 1),
            latent_channels=number(vae, "latent_channels"),
            vae_factor=vae_factor,
            max_tokens=number(text, "max_position_embeddings"),
            prediction="v_prediction"
            if V_PREDICTION in marks
            else stated_prediction(scheduler, layout.folder),
            guidance=BY_TWO_PASSES,
            patch=1,
            clip_skips=self.clip_skips(layout),
            parts={
                part: PartFacts(parameters=count, identity=identities.get(part, ""))
                for part, count in counted.items()
            },
            architecture=unet,
            scheduler=scheduler,
            zero_terminal_snr=ZERO_TERMINAL_SNR in marks
            or bool(scheduler.get("rescale_betas_zero_snr", False)),
        )

    def clip_skips(self, layout: Layout | None) -> Mapping[int, int]:
        """Return by `base.clip_skip` the layer of the text encoder that it means, counted from the last (1)."""
        return {skip: skip for skip in range(1, clip_size(layout, self.texts[0]).layers + 1)}

    def _parameters_of(self, architecture: Mapping[str, Any]) -> int:
        """Return the number of parameters of a U-Net; all but the releases' are built, without weights."""
        release = next(iter(self.releases.values()))
        # Compare the numbers that fix the network: configurations of equal networks differ in many other
        # keys. An equal one needs neither torch nor a network on `meta`, which a plan otherwise waits for.
        if read_unet(architecture) == read_unet(release.architecture):
            return release.parts["denoiser"].parameters
        import torch

        with torch.device("meta"):
            network = self.empty_denoiser(architecture)
        return sum(parameter.numel() for parameter in network.parameters())

    def facts_from_file(self, file: Path, header: Header) -> BaseFacts:
        facts, marks = super().facts_from_file(file, header), training_marks(file)
        sizes = (header[name].shape for name in unet_file.unet_names(header).values())
        denoiser = PartFacts(parameters=sum(map(math.prod, sizes)))
        return replace(
            facts,
            parts={**facts.parts, "denoiser": denoiser},
            prediction="v_prediction" if V_PREDICTION in marks else facts.prediction,
            zero_terminal_snr=facts.zero_terminal_snr or ZERO_TERMINAL_SNR in marks,
        )

    def parts(self, layout: Layout) -> Mapping[str, tuple[Path, ...]]:
        single = part_file(layout, "text_encoder")
        folders = [layout.folder / part.component for part in self.texts]
        tokenizers = [layout.folder / part.tokenizer for part in self.texts]
        return {
            "denoiser": _files(layout, "denoiser", "unet"),
            "vae": _files(layout, "vae", "vae"),
            "text_encoder": (
                *((single,) if single else (file for each in folders for file in weights(each))),
                *(folder / "config.json" for folder in folders),
                *(file for folder in tokenizers for file in tokenizer_files(folder)),
            ),
        }

    def checkpoint_weights(self, header: Header) -> Mapping[str, WeightPlace]:
        return weight_places(header, self.texts)

    # ---- costs

    def prompt_shapes(
        self, architecture: Mapping[str, Any], *, text_tokens: int
    ) -> Mapping[str, tuple[int, ...]]:
        unet = read_unet(architecture)
        text = {"text": (1, text_tokens, unet.text_width)}
        return {**text, "pooled": (1, unet.pooled_width)} if unet.pooled_width else text

    def text_adapter_shapes(self, facts: BaseFacts) -> Mapping[str, Mapping[str, tuple[int, int]]]:
        return {
            part.component: clip.target_shapes(self.trained_size(part, facts))
            for part in self.texts
        }

    def trained_size(self, part: clip.ClipPart, facts: BaseFacts) -> clip.ClipSize:
        """Return the size of a text encoder without its last layers that `clip_skip` drops."""
        size = clip_size(facts.layout, part)
        return replace(size, layers=size.layers - (facts.clip_skip - 1))

    # ---- networks

    def load_image_encoder(self, facts: BaseFacts, *, device: torch.device) -> ImageEncoder:
        return VaeEncoder(vae=load_vae(facts.located).to(device))

    def load_text_encoder(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> TextEncoder:
        layout = facts.located
        return self.text_encoder_class(
            networks={
                part.component: clip.load_network(
                    layout, part, dtype=dtype, device=device, clip_skip=facts.clip_skip
                )
                for part in self.texts
            },
            tokenizers=clip.load_tokenizers(layout, self.texts),
            chunks=_chunks(facts),
        )

    def empty_denoiser(self, architecture: Mapping[str, Any]) -> nn.Module:
        from diffusers import UNet2DConditionModel

        network: nn.Module = UNet2DConditionModel.from_config(dict(architecture))
        return network

    def load_denoiser(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        from accelerate import init_empty_weights

        with init_empty_weights():
            network = self.empty_denoiser(facts.architecture)
        single = part_file(facts.located, "denoiser")
        if single is not None:
            unet_file.load_unet(single, network, dtype=dtype)
        else:
            folder = part_folder(facts.located, "denoiser", "unet")
            unet_file.load_unet_folder(folder, network, dtype=dtype)
        return network.eval().requires_grad_(False).to(device)

    # ---- training

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        prediction: Tensor = denoiser(
            noisy,
            timesteps,
            encoder_hidden_states=conditioning["text"],
            added_cond_kwargs=self.added_conditioning(conditioning),
            return_dict=False,
        )[0]
        return prediction

    def lora_targets(self, network: nn.Module, targets: AdapterTargets) -> list[str]:
        if targets == "text_encoder":
            return clip.text_targets(network)
        endings = tuple(f".{ending}" for ending in ENDINGS[targets])
        return [name for name, _ in network.named_modules() if name.endswith(endings)]

    # ---- files

    def lora_key_name(self, format: FileFormat, component: str, module: str) -> str:
        if component == DENOISER:
            prefix = "lora_unet_" if format == "kohya" else "unet."
        else:
            part = next(part for part in self.texts if part.component == component)
            prefix = f"{part.kohya}_" if format == "kohya" else f"{component}."
            module = clip.stable_name(module)
        return prefix + (module.replace(".", "_") if format == "kohya" else module)

    def layer_names(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherNames:
        return OtherNames(layers=checkpoint_names(shapes, architecture=self.released_unet))

    # ---- images

    def build_sampler(
        self,
        facts: BaseFacts,
        *,
        denoiser: nn.Module,
        device: torch.device,
        decode_on: torch.device | None = None,
    ) -> Sampler:
        # None keeps from_pretrained from loading the text encoders: the sampler gets encoded prompts.
        absent = {name: None for part in self.texts for name in (part.component, part.tokenizer)}
        # Without a VAE the pipeline runs on the denoiser's device; the VAE moves there only to decode.
        pipeline = self._pipeline(facts, unet=denoiser, vae=None, **absent)
        # A pipeline without a VAE assumes 8 pixels a latent; the embedded miniature base has its own number.
        pipeline.vae_scale_factor = facts.vae_factor
        pipeline.set_progress_bar_config(disable=True)
        vae = load_vae(facts.located)
        return UNetSampler(
            pipeline=pipeline,
            vae=vae,
            device=device,
            decode_on=decode_on or device,
            arguments=self.sampler_arguments,
        )

    def plain_pipeline(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> DiffusionPipeline:
        text = self.load_text_encoder(facts, dtype=dtype, device=device)
        assert isinstance(text, clip.ClipEncoder)
        vae = load_vae(facts.located).to(device)
        vae.decode = in_float32(vae.decode)
        pipeline: DiffusionPipeline = self._pipeline(
            facts,
            unet=self.load_denoiser(facts, dtype=dtype, device=device).eval(),
            vae=vae,
            **text.networks,
            **{part.tokenizer: text.tokenizers[part.component] for part in self.texts},
        )
        return pipeline

    def pipeline_arguments(
        self,
        pipeline: Any,
        facts: BaseFacts,
        prompt: str,
        negative: str,
        *,
        guidance_scale: float,
    ) -> Mapping[str, Any]:
        """Return the pipeline's arguments; chunked prompts are encoded with the pipeline's own encoders."""
        if facts.chunks == 1:
            return {"prompt": prompt, "negative_prompt": negative, "guidance_scale": guidance_scale}
        encoder = self.text_encoder_class(
            networks={part.component: getattr(pipeline, part.component) for part in self.texts},
            tokenizers={part.component: getattr(pipeline, part.tokenizer) for part in self.texts},
            chunks=_chunks(facts),
        )
        first = getattr(pipeline, self.texts[0].tokenizer)
        texts = [
            {
                name: tensor.to(pipeline.device, pipeline.unet.dtype)
                for name, tensor in encoder.encode_prompts(
                    [pipeline.maybe_convert_prompt(text, first)]  # new words of several tokens
                ).items()
            }
            for text in (prompt, negative)
        ]
        return {**self.sampler_arguments(*texts), "guidance_scale": guidance_scale}

    def _pipeline(self, facts: BaseFacts, **components: Any) -> Any:
        import diffusers

        extras = self.pipeline_extras()
        return getattr(diffusers, self.pipeline_class).from_pretrained(
            facts.located.folder,
            scheduler=sampling_scheduler(facts),
            use_safetensors=True,
            **components,
            **extras,
        )

    def pipeline_extras(self) -> Mapping[str, Any]:
        """Return arguments that switch off the pipeline's optional components."""
        return {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}


def _unet_config(layout: Layout) -> Mapping[str, Any]:
    """Return the U-Net's configuration; files of other programs may leave the class out."""
    config = read_json(part_folder(layout, "denoiser", "unet") / "config.json")
    return {"_class_name": UNET_CLASS, **config}


def _files(layout: Layout, part: Part, subfolder: str) -> tuple[Path, ...]:
    folder, single = part_folder(layout, part, subfolder), part_file(layout, part)
    return (*((single,) if single else weights(folder)), folder / "config.json")


def _chunks(facts: BaseFacts) -> Chunks:
    return Chunks(count=facts.chunks, width=facts.max_tokens)


def _starts(header: Header, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in header)
