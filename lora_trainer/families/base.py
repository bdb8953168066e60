"""The interface of a model family: facts, loading, encoding, prediction, names, images.

No module outside this folder names a family of ours (importing/ has the words of other trainers). Importing a
family does not import torch: facts are plain data, and its methods import the heavy libraries.

A new family is a module NAME.py with a `FAMILY`, of a subclass of `FlowFamily` (flow.py) or `UNetFamily`
(unet.py) rather than of `Family`; its name in `MODULES` (__init__.py), how its files are told apart
(signatures.toml), the names of its layers in others' files where they differ (transformer_names.toml), its
releases and new kinds of text encoder (releases.toml), and presets/NAME.json at the top of the repository.
scripts/write_layer_tables.py writes its rows in layer_tables.json, scripts/write_cost_tables.py those in
costs/cost_tables.json. docs/adding-a-family.md goes through it with an example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from lora_trainer.common.caption_markup import NewWord, Weighted
from lora_trainer.common.errors import InputError
from lora_trainer.common.processes import give_back_heap
from lora_trainer.config.declare import Targets
from lora_trainer.families.base_files.base_parts import (
    elements,
    load_base_vae,
    part_file,
    part_files,
    part_folder,
    read_json,
    tokenizer_of,
)
from lora_trainer.families.base_files.weight_files import AGAIN, count_parameters, read_header
from lora_trainer.families.facts import (
    BY_TWO_PASSES,
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
    PartFacts,
    TextInputs,
    WeightPlace,
)
from lora_trainer.families.latents import ImageEncoder, VaeLatents
from lora_trainer.families.releases import BaseRelease, released

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from PIL import Image
    from torch import Tensor, nn

AdapterTargets = Targets | Literal["text_encoder"]
WEIGHTS = ".weights"
"""Suffix of the key of an encoder's prompt weights; the key of its tokens has no suffix."""
_TEXT_MODELS = {"clip": "text_model.", "qwen": "model.", "gemma": "model."}
"""Start of an encoder's ComfyUI name -> prefix of its layers' names in the public releases."""


class TextEncoder(ABC):
    """Tokenizers and text networks on one device, for caching and for training the text encoders."""

    networks: Mapping[str, nn.Module]
    """Component name ("text_encoder", "text_encoder_2") -> network, in the family's order."""

    @abstractmethod
    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return token ids (and masks) int64 [B, ...] by name, on the CPU, truncated to the networks' limits."""

    @abstractmethod
    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Run the networks on tokens of `tokenize`; with gradients where enabled, result on the device."""

    def learn(self, word: NewWord) -> None:
        """Tokenize `word` as new tokens from now on; for `new_token_keys` families."""
        raise AssertionError("these text encoders learn no new words")

    def numbers(self, text: str) -> Mapping[str, Sequence[int]]:
        """Return a text's token ids by component, without special tokens; for `new_token_keys` families."""
        raise AssertionError("these text encoders learn no new words")

    def tokenize_weighted(self, parts: Sequence[Weighted]) -> Mapping[str, Tensor]:
        """Tokenize the joined parts and add each token's prompt weight, float32 [1, ...], under
        names that end in `WEIGHTS`; for families that `supports_prompt_weights`."""
        raise AssertionError("these text encoders do not weigh words")

    @abstractmethod
    def count_tokens(self, prompt: str) -> int:
        """Return the number of tokens of `prompt` before truncation, without special tokens and template."""

    @abstractmethod
    def prompt_room(self) -> int:
        """Return the largest `count_tokens` of a prompt that is not truncated."""

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """Encode texts to float32 (masks: int64) tensors on the CPU, without gradients."""
        return self.encode_tokens(self.tokenize(prompts))

    def encode_tokens(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Encode tokens of `tokenize` to float32 (masks: int64) tensors on the CPU, without gradients."""
        import torch

        with torch.no_grad():
            conditioning = self.embed(tokens)
        return {
            name: (tensor.float() if tensor.is_floating_point() else tensor).cpu()
            for name, tensor in conditioning.items()
        }


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The base's own pipeline with the denoiser in training, on encoded prompts; the VAE decodes in float32."""

    pipeline: Any
    denoiser: nn.Module
    vae: Any
    device: torch.device
    family: Family

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
        """Return one RGB image of (width, height); equal to the plain pipeline's with a CPU generator of `seed`."""
        import torch
        from diffusers.image_processor import VaeImageProcessor

        latents = self.pipeline(
            **self.family.sampler_arguments(
                self._moved(conditioning), self._moved(negative), guidance_scale=guidance_scale
            ),
            # On the CPU, so that a seed gives the same noise on every device.
            generator=torch.Generator().manual_seed(seed),
            width=size_px[0],
            height=size_px[1],
            num_inference_steps=steps,
            output_type="latent",
        ).images.to(self.device)
        give_back_heap()  # decoding makes far larger tensors than a denoising step leaves
        try:
            vae = self.vae.to(self.device)
            with torch.no_grad():
                pixels = self.family.latents.decode(vae, latents, size_px)
        finally:
            # Also after an error: training needs the memory, most of all when decoding ran out of it.
            self.vae.to("cpu")
        image: Image.Image = VaeImageProcessor().postprocess(pixels, output_type="pil")[0]
        return image

    def _moved(self, conditioning: Conditioning) -> Conditioning:
        dtype = next(self.denoiser.parameters()).dtype
        return {
            name: tensor.to(self.device, dtype if tensor.is_floating_point() else None)
            for name, tensor in conditioning.items()
        }


class Family(ABC):
    """One model family; instances hold no state."""

    name: str
    pipeline_class: str
    """diffusers' text-to-image pipeline."""
    denoiser_class: str
    """diffusers' class of the denoiser."""
    denoiser_folder: ClassVar[str]
    """The denoiser's folder and its name in the pipeline."""
    text: TextInputs
    traits: NetworkTraits
    formats: AdapterFormats
    metadata: AdapterNames
    """Names of the family's bases in an adapter's metadata, for a family whose releases share them."""
    endings: Mapping[Targets, tuple[str, ...]]
    """Endings of the names of the modules that get an adapter."""
    unused_in_last_block: tuple[str, ...] = ()
    """Layers that change nothing there, because the last of `transformer_blocks` drops its text output."""
    absent_components: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Arguments that switch off the pipeline's optional components."""
    patch = 1
    """Side of the square of latents that becomes one token."""
    negative_prompt = True
    """Whether the pipeline takes a negative prompt."""
    text_arguments: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"text": "prompt_embeds", "pooled": "pooled_prompt_embeds"}
    )
    """Conditioning of a prompt -> the pipeline's argument for it."""
    scale_argument = "guidance_scale"
    scale_offset = 0.0
    """How much less the pipeline's guidance scale is than ours, prompt + (scale - 1) (prompt - negative)."""
    comfyui_prefix = "transformer."
    """ComfyUI maps diffusers' own keys of to_q, to_k and to_v to rows of its fused weight."""
    latents = VaeLatents()
    """How the denoiser sees the VAE's latents."""

    # ---- facts, without torch

    @property
    def published(self) -> tuple[BaseRelease, ...]:
        """The public releases, known without their files (releases.toml).

        The first is offered on a GPU when no base is named, and is the companion of single-file checkpoints.
        """
        return released(self.name)

    @cached_property
    def releases(self) -> Mapping[str, BaseFacts]:
        """Facts of the public releases by Hub id."""
        return {
            source: self.facts_of(release, source=source)
            for release in self.published
            for source in release.ids
        }

    def facts_of(
        self, release: BaseRelease, *, source: str, layout: Layout | None = None
    ) -> BaseFacts:
        """Return the facts of a release, or of the base in `layout` that is described like one."""
        channels, factor = self.latents.shape(release.vae)
        resolution_px, step_px = self.sizes_px(release.architecture, factor)
        return BaseFacts(
            family=self.name,
            source=source,
            layout=layout,
            resolution_px=resolution_px,
            bucket_step_px=step_px,
            latent_channels=channels,
            vae_factor=factor,
            max_tokens=release.max_tokens,
            prediction=release.prediction,
            guidance=self.guidance(release.architecture, distilled=release.distilled),
            patch=self.patch,
            clip_skips=self.clip_skips(layout),
            parts={part: PartFacts(parameters=count) for part, count in release.parameters.items()},
            architecture=release.architecture,
            scheduler=release.scheduler,
            variant=release.variant,
            distilled=release.distilled,
            zero_terminal_snr=release.zero_terminal_snr,
            download_bytes=release.download_bytes,
            assumed=release.assumed,
        )

    @abstractmethod
    def sizes_px(self, architecture: Mapping[str, Any], vae_factor: int) -> tuple[int, int]:
        """Return the side of a native image and the step of bucket sides."""

    def guidance(self, architecture: Mapping[str, Any], *, distilled: bool) -> Guidance:
        """Return how a base follows a guidance scale."""
        return BY_TWO_PASSES

    def clip_skips(self, layout: Layout | None) -> Mapping[int, int]:
        """Return by `base.clip_skip` the layer of the text encoder that it means, counted from the last (1)."""
        return {1: 1}

    @abstractmethod
    def detect(self, folder: Path) -> bool:
        """Return whether a diffusers folder is of this family, from its JSON files alone."""

    @abstractmethod
    def detect_file(self, header: Header) -> frozenset[Part]:
        """Return the parts a single-file checkpoint of this family holds; empty: not of this family."""

    def facts(self, layout: Layout, *, source: str) -> BaseFacts:
        """Read facts from configs and safetensors headers; raises InputError naming a missing part."""
        config = read_json(part_folder(layout, "denoiser", self.denoiser_folder) / "config.json")
        # Files of other programs may leave the class out.
        architecture = {"_class_name": self.denoiser_class, **config}
        # Counting opens weights only: a missing configuration would else be noticed when networks are loaded.
        files = self.parts(layout)
        for file in (file for each in files.values() for file in each):
            if not file.is_file():
                raise InputError(f"base model file {file} is missing", fix=AGAIN)
        plain = BaseRelease(
            ids=(source,),
            architecture=architecture,
            vae=read_json(part_folder(layout, "vae", "vae") / "config.json"),
            scheduler=read_json(layout.folder / "scheduler" / "scheduler_config.json"),
            parameters={
                "denoiser": self._count(layout, "denoiser", files["denoiser"]),
                "vae": self._count(layout, "vae", files["vae"]),
                "text_encoder": self.count_texts(layout),
            },
            max_tokens=self.published[0].max_tokens,
        )
        return self.facts_of(self.described(plain, layout), source=source, layout=layout)

    def described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        """Return the release in a folder with the facts that files and names add; InputError for a relative."""
        return plain

    def _count(self, layout: Layout, part: Part, files: Sequence[Path]) -> int:
        """Count the parameters in the files of a network, whose last is config.json."""
        if (single := part_file(layout, part)) is None:
            return count_parameters(files[:-1])
        header = read_header(single)
        if part == "denoiser":
            return self.count_denoiser(header)
        return elements(header, self.latents.names(header))

    @abstractmethod
    def count_texts(self, layout: Layout) -> int:
        """Count the used parameters of the text encoders; raises InputError for files that lack some."""

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        """Return the release a single file is made like; raises InputError when none has its sizes."""
        return self.published[0]

    @abstractmethod
    def count_denoiser(self, header: Header) -> int:
        """Count the parameters of the denoiser in a single file."""

    def facts_from_file(self, file: Path, header: Header) -> BaseFacts:
        """Return the facts of a single file without its companion: its release's, and its own denoiser's size."""
        release = self.file_release(file, header)
        sizes = {**release.parameters, "denoiser": self.count_denoiser(header)}
        return self.facts_of(replace(release, parameters=sizes), source=release.ids[0])

    def parts(self, layout: Layout) -> Mapping[str, tuple[Path, ...]]:
        """Return the files of each of `PARTS`; their hash is the part's identity."""
        folders: dict[Part, str] = {"denoiser": self.denoiser_folder, "vae": "vae"}
        files: dict[str, tuple[Path, ...]] = {
            part: part_files(part_folder(layout, part, folder), part_file(layout, part))
            for part, folder in folders.items()
        }
        return {**files, "text_encoder": self.text_files(layout)}

    @abstractmethod
    def text_files(self, layout: Layout) -> tuple[Path, ...]:
        """Return the files of the text encoders and tokenizers."""

    def checkpoint_weights(self, header: Header) -> Mapping[str, WeightPlace]:
        """Return where a single-file checkpoint keeps each "component.module"; empty where that is unknown."""
        return {}

    @abstractmethod
    def prompt_shapes(
        self, architecture: Mapping[str, Any], *, text_tokens: int
    ) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each conditioning tensor of a text of `text_tokens` tokens, batch 1.

        `text_tokens` counts like `max_tokens`. Names that end in `mask` are int64, all others float.
        """

    def text_adapter_shapes(self, facts: BaseFacts) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        """Return (fan_in, out) of each module in the text encoders' `lora_targets`, by component."""
        return {}

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        """Return the names of this base in an adapter's metadata."""
        return self.metadata

    # ---- networks

    def load_image_encoder(self, facts: BaseFacts, *, device: torch.device) -> ImageEncoder:
        """Load the VAE in float32, frozen; in fp16 some overflow."""
        vae = load_base_vae(facts.located).to(device)
        return ImageEncoder(vae=vae, latents=self.latents)

    @abstractmethod
    def load_text_encoder(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> TextEncoder:
        """Load tokenizers and text networks in `dtype`, frozen."""

    @abstractmethod
    def load_denoiser(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        """Load the denoiser frozen, in `dtype`."""

    def empty_denoiser(self, architecture: Mapping[str, Any]) -> nn.Module:
        """Build the denoiser from its configuration, weights undefined; call under a `meta` device."""
        kind = of_diffusers(self.denoiser_class)
        return self.built(lambda: kind.from_config(dict(architecture)))

    def built(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Return the denoiser that `build` makes; for families whose network needs something around it."""
        return build()

    # ---- training

    @abstractmethod
    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Run one forward pass: [B, C, H, W] -> prediction of the same shape.

        `timesteps` is int64 [B] in [0, 999] for epsilon and v, float32 [B] = 1000 sigma for flow.
        """

    def lora_targets(self, network: nn.Module, targets: AdapterTargets) -> list[str]:
        """Return the full module names that get an adapter, in module order.

        `network` is the denoiser, or with `targets` "text_encoder" a text network of a family that trains them.
        """
        assert targets != "text_encoder", f"{self.name} does not train its text encoders"
        endings = tuple(f".{ending}" for ending in self.endings[targets])
        unused = [
            f"transformer_blocks.{cast(Any, network).config['num_layers'] - 1}.{ending}"
            for ending in self.unused_in_last_block
        ]
        return [
            name
            for name, module in network.named_modules()
            # `to_out` and `net` are also names of ModuleLists and activations, which have no weight.
            if name.endswith(endings) and hasattr(module, "weight") and name not in unused
        ]

    # ---- files

    def lora_key_name(self, format: FileFormat, component: str, module: str) -> str:
        """Return the name of a module in a file of that format, of `file_formats`.

        `component` is `denoiser`, `text_encoder`, ...; `module` the name in the network that
        `load_denoiser` or `load_text_encoder` gives.
        """
        if component != DENOISER:
            # kohya writes no number where a U-Net has one encoder.
            number = "" if self.text.trainable and len(self.text.roles) == 1 else "1"
            return _text_key(format, component, module, roles=self.text.roles, number=number)
        if format == "kohya":
            return f"lora_unet_{module}".replace(".", "_")
        prefix = self.comfyui_prefix if format == "comfyui" else f"{self.denoiser_folder}."
        return prefix + module

    @abstractmethod
    def layer_names(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherNames:
        """Return the other names of denoiser layers of these shapes [out, in, ...]; () where unknown."""

    # ---- images

    def sampler_arguments(
        self, conditioning: Conditioning, negative: Conditioning, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        """Return the pipeline's arguments for encoded prompts on the device, in the denoiser's dtype."""
        arguments: dict[str, Any] = {self.scale_argument: guidance_scale - self.scale_offset}
        # Some pipelines warn of a negative prompt that a scale up to 1 leaves unused.
        texts = {"": conditioning, "negative_": negative if guidance_scale > 1 else {}}
        for prefix, tensors in texts.items():
            for name, argument in self.text_arguments.items():
                if name in tensors:
                    arguments[prefix + argument] = tensors[name]
        return arguments

    def build_pipeline(self, facts: BaseFacts, **components: Any) -> Any:
        """Return diffusers' pipeline with the base's scheduler and these components, the others of its folder."""
        return of_diffusers(self.pipeline_class).from_pretrained(
            facts.located.folder,
            scheduler=self.sampling_scheduler(facts),
            use_safetensors=True,
            **self.absent_components,
            **components,
        )

    def sampling_scheduler(self, facts: BaseFacts) -> Any:
        """Return the base's own sampler."""
        kind = of_diffusers(str(facts.scheduler["_class_name"]))
        return kind.from_config(dict(facts.scheduler))

    def build_sampler(
        self,
        facts: BaseFacts,
        *,
        denoiser: nn.Module,
        device: torch.device,
    ) -> Sampler:
        """Return a sampler around a denoiser that is on `device`, to which the VAE moves only while it decodes."""
        # None keeps from_pretrained from loading the text encoders (9.5 GB for T5-XXL): the sampler gets
        # encoded prompts. Without a VAE the pipeline runs on the denoiser's device.
        texts = self.text.roles
        absent = dict.fromkeys((*texts, *map(tokenizer_of, texts), "vae"))
        pipeline = self.build_pipeline(facts, **{self.denoiser_folder: denoiser}, **absent)
        # A pipeline without a VAE assumes 8 pixels a latent; the embedded miniature base has its own number.
        pipeline.vae_scale_factor = facts.vae_factor
        pipeline.set_progress_bar_config(disable=True)
        return Sampler(
            pipeline=pipeline,
            denoiser=denoiser,
            vae=load_base_vae(facts.located),
            device=device,
            family=self,
        )

    def pipeline_arguments(
        self,
        pipeline: DiffusionPipeline,
        facts: BaseFacts,
        prompt: str,
        negative: str,
        *,
        guidance_scale: float,
    ) -> Mapping[str, Any]:
        """Return the plain pipeline's arguments that reproduce the sampler's images.

        Prompts are encoded here where `facts` reads them in chunks.
        """
        arguments = {"prompt": prompt, self.scale_argument: guidance_scale - self.scale_offset}
        unused = not self.negative_prompt or guidance_scale <= 1
        return arguments if unused else {**arguments, "negative_prompt": negative}

    def plain_pipeline(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> DiffusionPipeline:
        """Return diffusers' own text-to-image pipeline with networks in `dtype` and the VAE in float32."""
        import torch

        cpu, names = torch.device("cpu"), self.text.roles
        text: Any = self.load_text_encoder(facts, dtype=dtype, device=cpu)
        tokenizers = {tokenizer_of(name): each for name, each in text.tokenizers.items()}
        vae = load_base_vae(facts.located)
        decode = vae.decode
        # Pipelines pass latents in the dtype of the networks.
        vae.decode = lambda latents, *args, **options: decode(latents.float(), *args, **options)
        pipeline: DiffusionPipeline = self.build_pipeline(
            facts,
            **{self.denoiser_folder: self.load_denoiser(facts, dtype=dtype, device=cpu)},
            vae=vae,
            # A base without one of its encoders (Stable Diffusion 3 without T5) has None in its place.
            **{**dict.fromkeys((*names, *map(tokenizer_of, names))), **text.networks, **tokenizers},
        )
        return pipeline.to(device)


def of_diffusers(name: str) -> Any:
    """Return diffusers' class of that name; importing diffusers takes seconds."""
    import diffusers

    return getattr(diffusers, name)


def _text_key(
    format: FileFormat, component: str, module: str, *, roles: Mapping[str, str], number: str
) -> str:
    """Return the key of a text encoder's layer: ComfyUI names the encoder, other formats its folder.

    kohya's names have the encoder's number; `number` is that of `text_encoder`.
    """
    role = roles[component]
    # "qwen25_7b" -> "qwen", "clip_l" -> "clip"; "t5xxl" is in no table, as T5's layers have no prefix.
    start = _TEXT_MODELS.get(role.partition("_")[0].rstrip("0123456789"), "")
    # Every name starts with an empty text, hence the blank, with which no name starts. transformers 5
    # dropped the prefix of CLIP's layers, which files have.
    whole_name = module if module.startswith((start or " ", "text_projection")) else start + module
    if format == "comfyui":
        return f"text_encoders.{role}.transformer.{whole_name}"
    if format == "kohya":
        own_number = component.rpartition("_")[2]
        number = own_number if own_number.isdigit() else number
        return f"lora_te{number}_{whole_name}".replace(".", "_")
    return f"{component}.{whole_name}"
