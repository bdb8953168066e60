"""The base class of the flow-matching transformer families: folders, loading, shift, sampling.

A family states its classes and parts and implements text, prediction, targets and names. A base is a
diffusers folder with `transformer`, `vae`, a scheduler, and one or more text encoders, each part
replaceable by a file (`Layout`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.config.config import Precision, Targets
from lora_trainer.families.base import (
    AdapterTargets,
    BaseFacts,
    Conditioning,
    Family,
    FileFormat,
    Guidance,
    Header,
    ImageEncoder,
    Layout,
    Part,
    PartFacts,
    Sampler,
)
from lora_trainer.families.base_files.base_folder import (
    AGAIN,
    components,
    count_parameters,
    part_file,
    part_folder,
    read_json,
    text_file,
    tokenizer_files,
    variant,
    weights,
)
from lora_trainer.families.base_files.transformer_file import (
    PARTS_IN_FILES,
    encoder_parameters,
    load_encoder_file,
    load_transformer,
    original_names,
    parameters_in,
    whole,
)
from lora_trainer.families.base_files.unet_file import load_vae as load_vae_file
from lora_trainer.families.images.flow_images import FlowImageEncoder, FlowSampler
from lora_trainer.families.text.t5 import has_spiece_only, load_tokenizer

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from torch import Tensor, nn


WITHOUT_FP16: tuple[Precision, ...] = ("bf16", "fp32")
"""In fp16 activations of large transformers pass 65,504 and the loss is NaN: FLUX.1 (sd-scripts #1571, #1595,
#1846), FLUX.2 and Z-Image (musubi-tuner #795, #897; Z-Image #14). Inference programs clamp them."""


@dataclass(frozen=True, kw_only=True)
class BaseRelease:
    """A public release that can be planned without a download: Hub ids, configurations, sizes.

    `vae` has the keys that `latent_shape` reads, `scheduler` the keys that `BaseFacts.flow_shift` reads.
    """

    ids: tuple[str, ...]
    architecture: Mapping[str, Any]
    vae: Mapping[str, Any]
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[Part, int]
    max_tokens: int
    download_bytes: int
    variant: str = ""
    distilled: bool = False


class FlowFamily(Family):
    """A family of diffusion transformers trained by flow matching (Lipman et al. 2022, arXiv 2210.02747)."""

    pipeline_class: str
    """diffusers' text-to-image pipeline; `detect` looks for its name in model_index.json."""
    denoiser_class: str
    """diffusers' transformer class."""
    text_folders: tuple[str, ...]
    """Folders of the text encoders, in the order of the pipeline."""
    tokenizer_folders: tuple[str, ...]
    unread_text: tuple[str, ...] = ()
    """Prefixes of tensors in the text encoders' files that are never loaded and so cost no memory."""
    published: tuple[BaseRelease, ...]
    """The public releases, the default one first."""
    native_latents: int
    """Side of an image of the native resolution, in latents: 128 for 1024 px at 8 px per latent."""
    patch: int
    """Side of the square of latents that becomes one token."""

    # ---- to implement besides the members of `Family`

    @abstractmethod
    def max_tokens(self, layout: Layout) -> int:
        """Return the token limit of a prompt, special tokens included."""

    @abstractmethod
    def targets(self, targets: Targets) -> tuple[str, ...]:
        """Return the endings of the names of the block modules that get an adapter."""

    @abstractmethod
    def guidance(self, architecture: Mapping[str, Any], *, distilled: bool) -> Guidance:
        """Return how a base follows a guidance scale."""

    def latent_shape(self, vae: Mapping[str, Any]) -> tuple[int, int]:
        """Return (channels, pixels per latent) of `predict`'s latents, from the VAE's configuration."""
        return int(vae["latent_channels"]), 2 ** (len(vae["block_out_channels"]) - 1)

    def normalised(self, vae: nn.Module, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of a posterior [B, C, H, W] scaled for the denoiser: (x - shift) scale."""
        config: Any = vae.config
        shift, scale = config.shift_factor or 0.0, config.scaling_factor
        # An offset moves the mean of a distribution and not its deviation.
        return (mean - shift) * scale, std * scale

    def encoders(self, layout: Layout) -> tuple[str, ...]:
        """Return the components of the text encoders that a base has."""
        return self.text_folders

    def release(self, architecture: Mapping[str, Any], layout: Layout) -> tuple[str, bool]:
        """Return (variant, distilled) of a base; ("", False) for a family of one release."""
        return "", False

    def architecture(self, layout: Layout) -> Mapping[str, Any]:
        """Return the denoiser's configuration; override it where a single file may differ from its companion."""
        return read_json(part_folder(layout, "denoiser", "transformer") / "config.json")

    def scheduler(self, layout: Layout) -> Mapping[str, Any]:
        """Return the scheduler's configuration; override it where a single file needs another scheduler."""
        return read_json(layout.folder / "scheduler" / "scheduler_config.json")

    # ---- facts

    @cached_property
    def releases(self) -> Mapping[str, BaseFacts]:
        return {
            source: self._release_facts(source, release)
            for release in self.published
            for source in release.ids
        }

    def _release_facts(self, source: str, release: BaseRelease) -> BaseFacts:
        channels, factor = self.latent_shape(release.vae)
        return BaseFacts(
            family=self.name,
            source=source,
            layout=None,
            resolution_px=self.native_latents * factor,
            bucket_step_px=self.bucket_step_px(factor),
            latent_channels=channels,
            vae_factor=factor,
            max_tokens=release.max_tokens,
            prediction="flow",
            guidance=self.guidance(release.architecture, distilled=release.distilled),
            patch=self.patch,
            parts={part: PartFacts(parameters=count) for part, count in release.parameters.items()},
            architecture=release.architecture,
            scheduler=release.scheduler,
            variant=release.variant,
            distilled=release.distilled,
            download_bytes=release.download_bytes,
        )

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        """Return the release a single file has the sizes of; raises InputError when none has them."""
        return self.published[0]

    def facts_from_file(self, file: Path, header: Header) -> BaseFacts:
        facts = self.releases[self.file_release(file, header).ids[0]]
        denoiser = PartFacts(parameters=parameters_in(file, "denoiser"))
        return replace(facts, parts={**facts.parts, "denoiser": denoiser})

    def detect(self, folder: Path) -> bool:
        classes = components(folder)
        # A folder saved from another pipeline of the same network (image to image) is as good a base.
        return classes.get("") == self.pipeline_class or (
            classes.get("transformer") == self.denoiser_class
        )

    def facts(self, layout: Layout, *, source: str, identities: Mapping[str, str]) -> BaseFacts:
        architecture = self.architecture(layout)
        channels, factor = self.latent_shape(
            read_json(part_folder(layout, "vae", "vae") / "config.json")
        )
        files = self.parts(layout)
        # Counting opens weights only: a missing configuration would else be noticed when networks are loaded.
        for file in (file for part_files in files.values() for file in part_files):
            if not file.is_file():
                raise InputError(f"base model file {file} is missing", fix=AGAIN)
        counted = {
            part: self._count(layout, part, part_files) for part, part_files in files.items()
        }
        release, distilled = self.release(architecture, layout)
        return BaseFacts(
            family=self.name,
            source=source,
            layout=layout,
            resolution_px=self.native_latents * factor,
            bucket_step_px=self.bucket_step_px(factor),
            latent_channels=channels,
            vae_factor=factor,
            max_tokens=self.max_tokens(layout),
            prediction="flow",
            guidance=self.guidance(architecture, distilled=distilled),
            patch=self.patch,
            parts={
                part: PartFacts(parameters=count, identity=identities.get(part, ""))
                for part, count in counted.items()
            },
            architecture=architecture,
            scheduler=self.scheduler(layout),
            variant=release,
            distilled=distilled,
        )

    def bucket_step_px(self, vae_factor: int) -> int:
        """Return the step of bucket sides: a sixteenth of the native size, in whole tokens."""
        token_px = vae_factor * self.patch
        # 64 px at a native size of 1024 px, which is sd-scripts' default `bucket_reso_steps`. A finer step
        # gives more buckets, and with them more images that find no others of their shape for a batch.
        return max(token_px, self.native_latents * vae_factor // 16 // token_px * token_px)

    def parts(self, layout: Layout) -> Mapping[str, tuple[Path, ...]]:
        tokenizers = [
            layout.folder / tokenizer
            for component, tokenizer in zip(self.text_folders, self.tokenizer_folders, strict=True)
            if component in self.encoders(layout)
        ]
        return {
            "denoiser": self._part(layout, "denoiser", "transformer"),
            "vae": self._part(layout, "vae", "vae"),
            "text_encoder": (
                *(file for name in self.encoders(layout) for file in _text_files(layout, name)),
                *(file for folder in tokenizers for file in tokenizer_files(folder)),
            ),
        }

    def _count(self, layout: Layout, part: str, files: tuple[Path, ...]) -> int:
        # Equal to `part in PARTS_IN_FILES`, but mypy learns the literal type from it.
        file_part = next((candidate for candidate in PARTS_IN_FILES if candidate == part), None)
        if file_part is not None and (single := part_file(layout, file_part)) is not None:
            return parameters_in(single, file_part)
        if part == "text_encoder":
            return sum(self._count_text(layout, name) for name in self.encoders(layout))
        return count_parameters(file for file in files if file.suffix == ".safetensors")

    def _count_text(self, layout: Layout, component: str) -> int:
        file = text_file(layout, component)
        if file is None:
            return count_parameters(weights(layout.folder / component), unread=self.unread_text)
        return encoder_parameters(file, self.text.roles[component], unread=self.unread_text)

    def _part(self, layout: Layout, part: Part, subfolder: str) -> tuple[Path, ...]:
        folder, single = part_folder(layout, part, subfolder), part_file(layout, part)
        return (*((single,) if single else weights(folder)), folder / "config.json")

    # ---- networks

    def load_text_network(
        self, kind: Any, layout: Layout, component: str, *, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        """Load a text encoder of transformers' class `kind` from its file or folder, frozen."""
        folder, file = layout.folder / component, text_file(layout, component)
        if file is None:
            network = whole(kind, folder, dtype=dtype, variant=variant(folder))
        else:
            role = self.text.roles[component]
            network = load_encoder_file(
                kind, file, folder, role=role, unread=self.unread_text, dtype=dtype
            )
        return network.requires_grad_(False).eval().to(device)

    def empty_denoiser(self, architecture: Mapping[str, Any]) -> nn.Module:
        network: nn.Module = _diffusers(self.denoiser_class).from_config(dict(architecture))
        return network

    def load_denoiser(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        layout, kind = facts.located, _diffusers(self.denoiser_class)
        network: nn.Module
        if (single := part_file(layout, "denoiser")) is not None:
            convert = original_names(self.denoiser_class, facts.architecture)
            network = load_transformer(
                kind, single, facts.architecture, convert=convert, dtype=dtype
            )
        else:
            folder = part_folder(layout, "denoiser", "transformer")
            network = whole(kind, folder, dtype=dtype, variant=variant(folder))
        return network.requires_grad_(False).eval().to(device)

    def load_image_encoder(self, facts: BaseFacts, *, device: torch.device) -> ImageEncoder:
        vae = self.load_vae(facts.located)
        return FlowImageEncoder(vae=vae.to(device), family=self)

    def load_vae(self, layout: Layout, *, dtype: torch.dtype | None = None) -> nn.Module:
        """Load the VAE frozen, on the CPU, in `dtype` (None: float32, because some VAEs overflow in fp16)."""
        import torch
        from accelerate import init_empty_weights

        folder, single = part_folder(layout, "vae", "vae"), part_file(layout, "vae")
        # The class is the folder's, not the family's: `base.vae` may name another VAE with the same latents.
        kind = _diffusers(str(read_json(folder / "config.json")["_class_name"]))
        if single is not None:
            with init_empty_weights():
                vae = kind.from_config(kind.load_config(folder))
            vae = load_vae_file(single, vae, dtype=dtype or torch.float32)
        else:
            vae = whole(
                kind,
                folder,
                dtype=dtype or torch.float32,
                variant=variant(folder),
            )
        frozen: nn.Module = vae.requires_grad_(False).eval()
        return frozen

    def lora_targets(self, network: nn.Module, targets: AdapterTargets) -> list[str]:
        assert targets != "text_encoder", f"{self.name} does not train its text encoders"
        endings = tuple(f".{ending}" for ending in self.targets(targets))
        return [
            name
            for name, module in network.named_modules()
            # `to_out` and `net` are also names of ModuleLists and activations, which have no weight.
            if name.endswith(endings) and hasattr(module, "weight")
        ]

    # ---- images

    @abstractmethod
    def sampler_arguments(
        self, conditioning: Conditioning, negative: Conditioning, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        """Return the pipeline's arguments for encoded prompts on the device, in the denoiser's dtype."""

    def latents_to_decode(
        self, pipeline: DiffusionPipeline, vae: nn.Module, latents: Tensor, size_px: tuple[int, int]
    ) -> Tensor:
        """Return the VAE's input, float32, from the pipeline's output with `output_type="latent"`.

        It is the inverse of `normalised`, for pipelines whose latents are [B, C, H, W].
        """
        config: Any = vae.config
        decoded: Tensor = latents.float() / config.scaling_factor + (config.shift_factor or 0.0)
        return decoded

    @abstractmethod
    def prompt_arguments(
        self, prompt: str, negative: str, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        """Return the plain pipeline's arguments that mean the same as `sampler_arguments`."""

    def pipeline_arguments(
        self,
        pipeline: DiffusionPipeline,
        facts: BaseFacts,
        prompt: str,
        negative: str,
        *,
        guidance_scale: float,
    ) -> Mapping[str, Any]:
        return self.prompt_arguments(prompt, negative, guidance_scale=guidance_scale)

    def build_sampler(
        self,
        facts: BaseFacts,
        *,
        denoiser: nn.Module,
        device: torch.device,
        decode_on: torch.device | None = None,
    ) -> Sampler:
        kind, folder = _diffusers(self.pipeline_class), facts.located.folder
        # None keeps from_pretrained from loading the text encoders (9.5 GB for
        # T5-XXL): the sampler gets encoded prompts.
        encoders = dict.fromkeys((*self.text_folders, *self.tokenizer_folders))
        # Without a VAE the pipeline runs on the denoiser's device; the VAE moves there only to decode.
        pipeline = kind.from_pretrained(
            folder,
            transformer=denoiser,
            vae=None,
            scheduler=_scheduler(facts),
            use_safetensors=True,
            **encoders,
        )
        pipeline.vae_scale_factor = facts.vae_factor
        pipeline.set_progress_bar_config(disable=True)
        vae = self.load_vae(facts.located)
        return FlowSampler(
            pipeline=pipeline, vae=vae, device=device, decode_on=decode_on or device, family=self
        )

    def plain_pipeline(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> DiffusionPipeline:
        import torch

        layout = facts.located
        pipeline = _diffusers(self.pipeline_class).from_pretrained(
            layout.folder,
            **self._spiece_tokenizers(layout),
            # from_pretrained looks for weights in the folder only, and a made companion's folder has none.
            **self._text_in_files(facts, dtype=dtype),
            transformer=self.load_denoiser(facts, dtype=dtype, device=torch.device("cpu")),
            vae=self.load_vae(layout, dtype=dtype),  # these pipelines pass latents to it uncast
            scheduler=_scheduler(facts),
            dtype=dtype,
            use_safetensors=True,
        )
        return pipeline.to(device)

    def _spiece_tokenizers(self, layout: Layout) -> Mapping[str, Any]:
        """Return by folder the tokenizers that transformers alone cannot read: a bare spiece.model."""
        folders = {name: layout.folder / name for name in self.tokenizer_folders}
        return {
            name: load_tokenizer(folder)
            for name, folder in folders.items()
            if has_spiece_only(folder)
        }

    def _text_in_files(self, facts: BaseFacts, *, dtype: torch.dtype) -> Mapping[str, nn.Module]:
        import torch

        layout = facts.located
        in_files = [name for name in self.encoders(layout) if text_file(layout, name)]
        if not in_files:
            return {}
        # This loads the folder's encoders too and drops them. Only a plain pipeline of a base with
        # some encoders in files pays for it, and such a base is rare.
        encoder = self.load_text_encoder(facts, dtype=dtype, device=torch.device("cpu"))
        return {name: encoder.networks[name] for name in in_files}


def _text_files(layout: Layout, component: str) -> tuple[Path, ...]:
    folder, file = layout.folder / component, text_file(layout, component)
    return (*((file,) if file else weights(folder)), folder / "config.json")


def transformer_name(module: str) -> str:
    """Return the module key that ComfyUI and diffusers share: `transformer.` and diffusers' module name.

    ComfyUI maps such keys of to_q, to_k and to_v to rows of its fused weight, for every kind of adapter.
    """
    return f"transformer.{module}"


_TEXT_MODELS = {"clip": "text_model.", "qwen": "model.", "gemma": "model."}
"""Start of an encoder's ComfyUI name -> prefix of its layers' names in the public releases."""


def text_name(format: FileFormat, component: str, module: str, *, roles: Mapping[str, str]) -> str:
    """Return the key of a text encoder's layer: ComfyUI names the encoder, other formats its folder."""
    role = roles[component]
    # "qwen25_7b" -> "qwen", "clip_l" -> "clip"; "t5xxl" is in no table, as T5's layers have no prefix.
    start = _TEXT_MODELS.get(role.partition("_")[0].rstrip("0123456789"), "")
    # Every name starts with an empty text, hence the blank, with which no name starts.
    whole = module if module.startswith((start or " ", "text_projection")) else start + module
    if format == "comfyui":
        return f"text_encoders.{role}.transformer.{whole}"
    if format == "kohya":
        # kohya counts the encoders from 1: `text_encoder` is te1, `text_encoder_2` is te2.
        number = component.rpartition("_")[2]
        return f"lora_te{number if number.isdigit() else 1}_{whole}".replace(".", "_")
    return f"{component}.{whole}"


def _scheduler(facts: BaseFacts) -> Any:
    return _diffusers(str(facts.scheduler["_class_name"])).from_config(dict(facts.scheduler))


def _diffusers(name: str) -> Any:
    import diffusers

    return getattr(diffusers, name)


def public_architectures(family: Family) -> tuple[Mapping[str, Any], ...]:
    """Return the denoiser's configuration of each public release of any family, the default one first."""
    if isinstance(family, FlowFamily):
        return tuple(release.architecture for release in family.published)
    return (next(iter(family.releases.values())).architecture,)
