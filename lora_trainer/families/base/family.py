"""The interface of a model family: facts, loading, prediction, names.

No module outside this folder names a family of ours (importing/ has the words of other trainers). Importing a
family does not import torch: facts are plain data, and its methods import the heavy libraries.

A new family is a folder NAME/ with a family.py whose `FAMILY` is of a subclass of `FlowFamily` (flow.py) or
`UNetFamily` (unet.py) rather than of `Family`; docs/adding-a-family.md goes through it with an example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from lora_trainer.common.errors import InputError
from lora_trainer.config.declare import Targets
from lora_trainer.families.base.facts import BaseFacts, BaseRelease, Conditioning, PartFacts
from lora_trainer.families.base.latents import DECODING, VaeLatents
from lora_trainer.families.base.layout import DENOISER, PARTS, Header, Layout, Part, WeightPlace
from lora_trainer.families.base.references import References
from lora_trainer.families.base.releases import few_step_drawing, other_names, released
from lora_trainer.families.base.stated import Stated, stated_by_name, stated_in
from lora_trainer.families.base.tables import family_table
from lora_trainer.families.base.text.transformers_encoder import load_tokenizer
from lora_trainer.families.base.texts import TextEncoder, TextInputs, reading_of
from lora_trainer.families.base.traits import (
    AdapterFormats,
    AdapterNames,
    FileFormat,
    NetworkTraits,
    OtherNames,
    PipelineTraits,
)
from lora_trainer.families.base.unet_numbers import UNET_CLASS
from lora_trainer.families.files import base_parts
from lora_trainer.families.files.hub_files import SAFETENSORS
from lora_trainer.families.files.recognise import fits
from lora_trainer.families.files.weight_files import (
    AGAIN,
    count_parameters,
    read_header,
    read_tensors,
    refuse_quantised,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

AdapterTargets = Targets | Literal["text_encoder"]
# Kind of an encoder -> prefix of its layers' names in the public releases.
_TEXT_MODELS = {
    "clip": "text_model.",
    "qwen3": "model.",
    "qwen25": "model.",
    "qwen3vl": "model.",
    "gemma2": "model.",
}


class Quantise(Protocol):
    """Quantises layers of a network whose tensors have no values yet: `settle` gives them to a layer."""

    def __call__(self, network: nn.Module, *, settle: Callable[[nn.Module], None]) -> None: ...


class Family(ABC):
    """One model family; instances hold no state."""

    name: str
    text: TextInputs
    traits: NetworkTraits
    pipeline: PipelineTraits
    formats: AdapterFormats
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
        native_px, token_px = self.latents.native_side * factor, factor * self.traits.patch
        stated_prompt = release.system_prompt
        system_prompt = self.text.system_prompt if stated_prompt is None else stated_prompt
        return BaseFacts(
            release=release,
            family=self.name,
            source=source,
            layout=layout,
            download_bytes=release.download_bytes if layout is None else 0,
            resolution_px=native_px,
            # 64 px at a native size of 1024 px, which is sd-scripts' default `bucket_reso_steps`. A finer step
            # gives more buckets, and with them more images that find no others of their shape for a batch.
            bucket_step_px=max(token_px, native_px // 16 // token_px * token_px),
            latent_channels=channels,
            vae_factor=factor,
            guidance=self.pipeline.guidance(release.architecture, release.distilled),
            references=self.references_of(release),
            patch=self.traits.patch,
            shifts_by_tokens=self.traits.shifts_by_tokens,
            unshifted_px=self.traits.unshifted_px,
            readings={
                "vae": reading_of(type(self.latents), beside=DECODING),
                "text_encoder": reading_of(self.text.encoder),
            },
            parts={part: PartFacts(parameters=count) for part, count in release.parameters.items()},
            system_prompt=system_prompt,
        )

    @property
    def edits(self) -> bool:
        """Whether the family has bases that read reference images."""
        return any(each.references for each in self.releases.values())

    def references_of(self, release: BaseRelease) -> References | None:
        """Return how a release reads reference images; None: it reads none."""
        return None

    @abstractmethod
    def detect(self, folder: Path) -> bool:
        """Return whether a diffusers folder is of this family, from its JSON files alone."""

    def detect_file(self, header: Header) -> frozenset[Part]:
        """Return the parts a single-file checkpoint of this family holds; empty: not of this family."""
        names = dict(self.denoiser_names(header))
        for (
            start
        ) in self.text.inside.values():  # what tells a family from another with its denoiser
            inner = base_parts.inner_names(header, start).items()
            names |= {start + name: full for name, full in inner}
        tensors = {name: header[full] for name, full in names.items()}
        is_own = any(fits(tensors, marks) for marks in family_table(self.name)["files"]["base"])
        parts: set[Part] = {"denoiser"} if is_own else set()
        channels = self.published[0].vae.get("latent_channels", 0)
        # VAEs of several families have equal tensors and differ in the scale, which no file states. One alone in
        # its file belongs to each of these families.
        alone = not (is_own or self.traits.shares_vae)
        if self.latents.is_in(header, channels=channels, alone=alone):
            parts.add("vae")
        # With one of SDXL's two encoders missing, both come from the companion: the part is all or nothing.
        prefixes = () if self.text.encoder_files else self.text.prefixes.values()
        if is_own and prefixes and all(any(n.startswith(p) for n in header) for p in prefixes):
            parts.add("text_encoder")
        return frozenset(parts)

    def facts(self, layout: Layout, *, source: str) -> BaseFacts:
        """Read facts from configs and safetensors headers; raises InputError naming a missing part."""
        folder = layout.part_folder("denoiser", self.traits.folder)
        # Files of other programs may leave the class out.
        architecture = {
            "_class_name": self.traits.class_name,
            **base_parts.read_json(folder / "config.json"),
        }
        # Counting opens weights only: a missing configuration would else be noticed when networks are loaded.
        files = self.parts(layout)
        for file in (file for each in files.values() for file in each):
            if not file.is_file():
                raise InputError(f"base model file {file} is missing", fix=AGAIN)
        vae_folder = layout.part_folder("vae", "vae")
        counts = {part: self._count(layout, part) for part in PARTS}
        plain = BaseRelease(
            ids=(source,),
            architecture=architecture,
            vae=base_parts.read_json(vae_folder / "config.json"),
            scheduler=base_parts.scheduler_config(
                layout.folder, stated=self.published[0].scheduler
            ),
            parameters=counts,
            max_tokens=self.published[0].max_tokens,
            drawing=self.published[0].drawing,
        )
        single = layout.part_file("denoiser")
        stated = stated_by_name(source) if single is None else stated_in(single)
        described = self.as_stated(self._described(plain, layout), stated)
        if self.references_of(described) is not None:
            described = replace(
                described, reference_parameters=self._for_references(layout, counts)
            )
        facts = self.facts_of(described, source=source, layout=layout)
        if single is not None:
            base_parts.check_companion(single, facts, self.published)
        return facts

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        """Return the release in a folder with the facts that files and names add; InputError for a relative."""
        return plain

    def as_stated(self, release: BaseRelease, stated: Stated) -> BaseRelease:
        """Return a release with what its name, its metadata and its markers state of it.

        What a single file leaves open is assumed from the file alone, whatever its companion is.
        """
        release = replace(release, system_prompt=stated.system_prompt(self.name))
        kind = stated.distillation(self.name)
        if kind is None and release.distilled:  # by its tensors, or by its folder's configurations
            kind = "few-step"
        is_file = stated.file is not None
        told = self.as_distilled(release, kind or "", steps=stated.steps(), is_file=is_file)
        if kind is not None or stated.file is None:
            return told
        return told.assuming(
            "whether it was distilled to draw in few steps",
            "it was not",
            key="base.distilled",
            other="true",
            name=stated.file.name,
        )

    def as_distilled(
        self, release: BaseRelease, kind: str, *, steps: int = 0, is_file: bool = False
    ) -> BaseRelease:
        """Return a release as distilled to few steps in that way, or as undistilled with kind "".

        `steps` are those that its name states. `is_file`: a single file has the scheduler of what it is; a folder
        brings its own.
        """
        variant = release.variant.partition(" ")[0]
        rows = [each for each in self.published if each.distilled == bool(kind)]
        same = next((each for each in rows if each.variant == variant), None)
        if kind:
            drawing = same.drawing if same else few_step_drawing(self.name, kind)
            drawing = replace(drawing, steps=steps or drawing.steps)
        else:
            drawing = (same or self.published[0]).drawing
        return replace(
            release,
            distilled=bool(kind),
            distillation=kind,
            drawing=drawing,
            assistant=same.assistant if same else None,
        )

    def parts(self, layout: Layout) -> Mapping[str, tuple[Path, ...]]:
        """Return the files of each of `PARTS`; their hash is the part's identity."""
        folders: Mapping[Part, str] = {"denoiser": self.traits.folder, "vae": "vae"}
        files: dict[str, tuple[Path, ...]] = {
            part: base_parts.part_files(layout.part_folder(part, folder), layout.part_file(part))
            for part, folder in folders.items()
        }
        encoders = base_parts.encoders_in(layout, self.text)
        texts = [
            file
            for name in encoders
            for file in base_parts.part_files(layout.folder / name, layout.text_file(name))
        ]
        if not self.text.encoder_files:
            # The order is a part of the identity: weights before configurations, a checkpoint once.
            texts = sorted(dict.fromkeys(texts), key=lambda file: file.name == "config.json")
        tokenizers = (
            base_parts.tokenizer_folder(layout.folder, name, self.text) for name in encoders
        )
        vocabularies = [file for each in tokenizers for file in base_parts.tokenizer_files(each)]
        return {**files, "text_encoder": (*texts, *vocabularies)}

    def _count(self, layout: Layout, part: Part, *, references: bool = False) -> int:
        """Count the parameters of a part, with the layers for `references` or without."""
        if part == "text_encoder":
            encoders = base_parts.encoders_in(layout, self.text)
            return sum(
                self._count_text(layout, component, references=references) for component in encoders
            )
        if (single := layout.part_file(part)) is None:
            folder = layout.part_folder(part, "vae" if part == "vae" else self.traits.folder)
            files = base_parts.weights(folder)
            for file in files:
                refuse_quantised(file)
            reads = (
                partial(self.traits.reads, references=references)
                if part == "denoiser"
                else lambda name: True
            )
            return count_parameters(files, reads=reads)
        header = read_header(single)
        if part != "denoiser":
            return base_parts.elements(header, self.latents.names(header))
        names = [*self.denoiser_names(header).values()]
        names += self._reference_names(header).values() if references else ()
        return base_parts.elements(header, names)

    def _reference_names(self, header: Header) -> Mapping[str, str]:
        """Return `denoiser_names` of the tensors that only reference images go through."""
        names = base_parts.denoiser_names(header).items()
        return {name: full for name, full in names if self.traits.is_for_references(name)}

    def _for_references(self, layout: Layout, counts: Mapping[Part, int]) -> Mapping[Part, int]:
        """Return how many parameters parts have for references alone, beside their `counts`."""
        apart: Mapping[Part, bool] = {
            "denoiser": bool(self.traits.reference_layers),
            "text_encoder": bool(self.text.sight),
        }
        return {
            part: self._count(layout, part, references=True) - counts[part]
            for part, is_apart in apart.items()
            if is_apart
        }

    def _count_text(self, layout: Layout, component: str, *, references: bool) -> int:
        """Count the used parameters of a text encoder; raises InputError for a file that lacks some."""
        reads = partial(self.text.reads, references=references)
        if (file := layout.text_file(component)) is None:
            files = base_parts.weights(layout.folder / component)
            for each in files:
                refuse_quantised(each)
            return count_parameters(files, reads=reads)
        header = read_header(file)
        if component in self.text.inside:
            inner = base_parts.inner_names(header, self.text.inside[component])
            return base_parts.elements(header, (inner or base_parts.part_names(header)).values())
        names = base_parts.part_names(header, self.text.prefixes[component]).items()
        read = (full for name, full in names if reads(name))
        return base_parts.elements(header, read)

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        """Return the release a single file is made like; raises InputError when none has its sizes."""
        return self.published[0]

    def denoiser_names(self, header: Header) -> Mapping[str, str]:
        """Return the denoiser's tensors in a single file, name without prefix -> name in the file."""
        inside = tuple(self.text.inside.values())
        names = base_parts.denoiser_names(header).items()
        return {
            name: full
            for name, full in names
            if not name.startswith(inside) and self.traits.reads(name)
        }

    def checkpoint_weights(self, header: Header) -> Mapping[str, WeightPlace]:
        """Return where a single-file checkpoint keeps each "component.module"; empty where that is unknown."""
        return {}

    def text_adapter_shapes(self, facts: BaseFacts) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        """Return (fan_in, out) of each module in the text encoders' `lora_targets`, by component."""
        return {}

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        """Return the names of this base in an adapter's metadata."""
        assert self.formats.names is not None
        return self.formats.names

    # ---- networks

    def load_text_encoder(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> TextEncoder:
        """Load tokenizers and text networks in `dtype`, frozen.

        The last `clip_skip` - 1 layers are deleted, so the final norm reads an earlier layer's output, as in
        web user interfaces and kohya's trainers. Of a language model that is loaded in part the norm is taken out:
        it would read the output of a block in the middle.
        """
        from torch.nn import Identity

        layout, text = facts.located, self.text
        networks: dict[str, nn.Module] = {}
        tokenizers: dict[str, Any] = {}
        for component, encoder in base_parts.encoders_in(layout, text).items():
            sees = facts.has_reference_layers and bool(text.sight)
            network: Any = base_parts.load_text_network(
                layout, component, text, dtype=dtype, references=sees
            )
            if facts.clip_skip > 1:
                # transformers 5 dropped `text_model.` from the path, so look for its end.
                layers = next(
                    module
                    for name, module in network.named_modules()
                    if name.endswith("encoder.layers")
                )
                network.config.num_hidden_layers -= facts.clip_skip - 1
                del layers[network.config.num_hidden_layers :]
            # Of Qwen2.5-VL the vision tower and the language head are freed here.
            used: Any = network.get_submodule(text.seeing if sees else text.inner)
            if text.blocks:
                used.norm = Identity()
            networks[component] = used.requires_grad_(False).eval().to(device)
            folder = base_parts.tokenizer_folder(layout.folder, component, text)
            tokenizers[component] = load_tokenizer(folder, kind=encoder.kind)
        return text.encoder(networks=networks, tokenizers=tokenizers, facts=facts)

    def load_denoiser(
        self,
        facts: BaseFacts,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantise: Quantise | None = None,
    ) -> nn.Module:
        """Load the denoiser frozen, in `dtype` but for what diffusers keeps in float32.

        With `quantise` its tensors are made one by one, as that asks for them: the network is never in memory whole
        in `dtype`.
        """
        from accelerate import init_empty_weights

        # Not under torch.device("meta"): accelerate's context leaves buffers real, and a
        # buffer that no file holds would stay without values.
        with init_empty_weights():
            network: Any = self.training_denoiser(
                facts.release.architecture, references=facts.has_reference_layers
            )
        fp32 = (*fp32_parts(network), *self.traits.fp32_in_files)
        loaded: nn.Module
        if quantise is None:
            read = partial(read_tensors, dtype=dtype, fp32=fp32)
            self._fill_denoiser(facts.located, network, read)
            loaded = network.eval().requires_grad_(False).to(device)
            return loaded
        from lora_trainer.families.files.deferred import DeferredFiles, settle

        with DeferredFiles(dtype=dtype, fp32=fp32) as files:
            self._fill_denoiser(facts.located, network, files.tensors)
            network.eval().requires_grad_(False)
            quantise(network, settle=partial(settle, device=device))
            for module in network.modules():
                settle(module, device=device)
        loaded = network.to(device)
        return loaded

    def unguided_bytes(self, facts: BaseFacts) -> int:
        """Return the bytes of the files of `pipeline.unguided`, 0 where the base has none.

        A release that is not on this machine brings it, as large as the denoiser in 16 bits.
        """
        name = self.pipeline.unguided
        if not name:
            return 0
        if facts.layout is None:
            return 2 * facts.parts["denoiser"].parameters
        files = (facts.layout.folder / name).glob(f"*{SAFETENSORS}")
        return sum(file.stat().st_size for file in files)

    def load_unguided(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> nn.Module | None:
        """Return the network of `pipeline.unguided`, None where the base has none.

        Its weights stay in its files: those of a layer come to `device` when the layer is called, and go.
        """
        layout, name = facts.located, self.pipeline.unguided
        folder = layout.folder / name
        if not name or not any(folder.glob(f"*{SAFETENSORS}")):
            return None
        from accelerate import init_empty_weights

        from lora_trainer.families.files.deferred import DeferredFiles, settled_when_called

        with init_empty_weights():
            network = self.empty_denoiser(base_parts.read_json(folder / "config.json"))
        fp32 = (*fp32_parts(network), *self.traits.fp32_in_files)
        with DeferredFiles(dtype=dtype, fp32=fp32) as files:
            own = replace(layout, files={"denoiser": folder})
            self._fill_denoiser(own, network, files.tensors)
        network.eval().requires_grad_(False)
        settled_when_called(network, device=device)
        return network

    def _fill_denoiser(self, layout: Layout, network: Any, read: base_parts.ReadTensors) -> None:
        shapes = {
            name.removesuffix(".weight"): tuple(tensor.shape)
            for name, tensor in network.state_dict().items()
            if name.endswith(".weight")
        }
        joined = self.layer_names(shapes).layers
        references = any(map(self.traits.is_for_references, shapes))
        if single := layout.part_file("denoiser"):
            header = read_header(single)
            names = {
                **self.denoiser_names(header),
                **(self._reference_names(header) if references else {}),
            }
            base_parts.load_denoiser_file(single, network, names, read, joined)
            return
        folder = layout.part_folder("denoiser", self.traits.folder)
        tensors: dict[str, Tensor] = {}
        # Read in pieces: a float32 base must not lie in memory beside its bf16 copy.
        for file in base_parts.weights(folder):
            wanted = filter(partial(self.traits.reads, references=references), read_header(file))
            tensors |= read(file, {name: name for name in wanted})
        network._fix_state_dict_keys_on_load(tensors)  # attention has other names in old files
        own = network.state_dict()
        if joined and not own.keys() <= tensors.keys():
            # A release in the names of its own code, of which diffusers has no conversion.
            tensors = base_parts.converted(
                folder, lambda: base_parts.parted(tensors, network, joined)
            )
        # Of a transformer diffusers leaves tensors out that it does not know.
        if self.traits.class_name != UNET_CLASS:
            tensors = {name: tensors[name] for name in own if name in tensors}
        base_parts.fill(
            network, tensors, file=folder, part="denoiser", config="its config.json", fix=AGAIN
        )

    def training_denoiser(
        self, architecture: Mapping[str, Any], *, references: bool = False
    ) -> nn.Module:
        """Build the denoiser without what no training reads, weights undefined; call under a `meta` device.

        `references`: with the layers that only reference images go through.
        """
        network = self.empty_denoiser(architecture)
        reads = partial(self.traits.reads, references=references)
        for name in [name for name, _ in network.named_modules() if not reads(name)]:
            parent, _, child = name.rpartition(".")
            if reads(parent):
                delattr(network.get_submodule(parent), child)
        return network

    def empty_denoiser(self, architecture: Mapping[str, Any]) -> nn.Module:
        """Build the denoiser from its configuration, weights undefined; call under a `meta` device."""
        import diffusers

        network: nn.Module = getattr(diffusers, self.traits.class_name).from_config(
            dict(architecture)
        )
        return network

    # ---- training

    @abstractmethod
    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Run one forward pass: [B, C, H, W] -> prediction of the same shape.

        A base that edits finds the latents of references in `conditioning` (`references_in`).
        `timesteps` is int64 [B] in [0, 999] for epsilon and v, float32 [B] = 1000 sigma for flow.
        """

    def lora_targets(self, network: nn.Module, targets: AdapterTargets) -> list[str]:
        """Return the full module names that get an adapter, in module order.

        `network` is the denoiser, or with `targets` "text_encoder" a text network of a family that trains them.
        """
        assert targets != "text_encoder", f"{self.name} does not train its text encoders"
        endings = tuple(f".{ending}" for ending in self.traits.endings[targets])
        unused = [
            f"transformer_blocks.{cast(Any, network).config['num_layers'] - 1}.{ending}"
            for ending in self.traits.unused_in_last_block
        ]
        return [
            name
            for name, module in network.named_modules()
            # `to_out` and `net` are also names of ModuleLists and activations, which have no weight. That of a
            # quantised layer is a property, which would restore it.
            if name.endswith(endings)
            and (hasattr(type(module), "weight") or hasattr(module, "weight"))
            and name not in unused
        ]

    def without_refiners(self, layers: Iterable[str], *, refiners: bool) -> list[str]:
        """Return the layers that get an adapter: all, or those that are not in a refiner."""
        return [name for name in layers if refiners or not name.startswith(self.traits.refiners)]

    # ---- files

    def lora_key_name(self, format: FileFormat, component: str, module: str) -> str:
        """Return the name of a module in a file of that format, one of `formats.written`.

        `component` is `denoiser`, `text_encoder`, ...; `module` the name in the network that
        `load_denoiser` or `load_text_encoder` gives.
        """
        if component in self.text.inside and format != "diffusers":
            component, module = DENOISER, self.text.inside[component] + module
        if component != DENOISER:
            role = self.text.roles[component]
            start = _TEXT_MODELS.get(self.text.networks[component].kind, "")  # T5's have none
            # Every name starts with an empty text, hence the blank, with which no name starts. transformers 5
            # dropped the prefix of CLIP's layers, which files have.
            is_whole = module.startswith((start or " ", "text_projection"))
            whole_name = module if is_whole else start + module
            if format == "comfyui":
                return f"text_encoders.{role}.transformer.{whole_name}"
            if format != "kohya":
                return f"{component}.{whole_name}"
            number = component.rpartition("_")[2]
            if not number.isdigit():  # kohya writes no number where a U-Net has one encoder
                number = "" if self.text.trainable and len(self.text.roles) == 1 else "1"
            return f"lora_te{number}_{whole_name}".replace(".", "_")
        if format == "kohya":
            return f"lora_unet_{module}".replace(".", "_")
        prefix = self.formats.comfyui_prefix if format == "comfyui" else f"{self.traits.folder}."
        return prefix + module

    def layer_names(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherNames:
        """Return the other names of denoiser layers of these shapes [out, in, ...]; () where unknown."""
        swapped = frozenset(
            name
            for name, shape in shapes.items()
            if name.endswith(self.traits.swapped_layers)
            and len(shape) == 2
            and shape[0] == 2 * shape[1]
        )
        return other_names(self.name, shapes, swapped=swapped)


def fp32_parts(network: nn.Module) -> tuple[str, ...]:
    """Return parts of names of the parameters that are in float32 whatever the network's dtype, as in diffusers."""
    declared: Any = getattr(network, "_keep_in_fp32_modules", None)
    return tuple(declared or ())
