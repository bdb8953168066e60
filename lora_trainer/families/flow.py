"""The base class of the flow-matching transformer families: folders, loading, shift, sampling.

A family states its classes, text encoders and releases and implements prediction. A base is a diffusers
folder with `transformer`, `vae`, a scheduler, and one or more text encoders, each part replaceable by a file
(`Layout`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lora_trainer.config.declare import Targets
from lora_trainer.families.base import Family, TextEncoder, of_diffusers
from lora_trainer.families.base_files import base_parts
from lora_trainer.families.base_files.weight_files import count_parameters, read_header
from lora_trainer.families.facts import (
    AUTOENCODER_KL,
    INDEXED_BLOCK,
    AdapterFormats,
    BaseFacts,
    Header,
    Layout,
    NetworkTraits,
    OtherNames,
    Part,
    TextInputs,
)
from lora_trainer.families.recognise import fits, signature_tables
from lora_trainer.families.releases import TextNetwork, other_names
from lora_trainer.families.text.transformers_encoder import TransformersEncoder, load_tokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


JOINT_ATTENTION = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
)
"""Attention of blocks that attend to image and text at once."""
JOINT_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")


def target_endings(
    attention: tuple[str, ...], *, transformer: tuple[str, ...], modulation: tuple[str, ...] = ()
) -> Mapping[Targets, tuple[str, ...]]:
    """Return the endings of the layers of each kind of targets, of which each kind contains the one before."""
    both = (*attention, *transformer)
    return {"attention": attention, "transformer": both, "all": (*both, *modulation)}


def position_ids(latents: Tensor) -> Tensor:
    """Return float32 [H/2 W/2, 3]: 0, row, column of each token of [B, C, H, W]."""
    import torch

    rows = torch.arange(latents.shape[-2] // 2, device=latents.device)
    columns = torch.arange(latents.shape[-1] // 2, device=latents.device)
    grid = torch.cartesian_prod(rows, columns).reshape(-1, 2).float()
    # The first of the three axes is 0 for every token of a single image.
    return torch.nn.functional.pad(grid, (1, 0))


class FlowFamily(Family):
    """A family of diffusion transformers trained by flow matching (Lipman et al. 2022, arXiv 2210.02747)."""

    text_networks: tuple[TextNetwork, ...]
    """The text encoders, in the order of the pipeline."""
    text_encoder_class: ClassVar[type[TransformersEncoder]]
    unread_text: tuple[str, ...] = ()
    """Prefixes of tensors in the text encoders' files that are never loaded and so cost no memory."""
    text_width = "joint_attention_dim"
    """Key of the denoiser's configuration with the channels of the text."""
    masked_text = False
    """Whether texts keep their own length and come with a `text_mask`."""
    text_multiple = 1
    """The network pads texts to a multiple of this many tokens."""
    one_text_length = False
    """Whether the texts of one forward pass must have one length."""
    native_latents = 128
    """Side of an image of the native resolution, in latents: 128 for 1024 px at 8 px per latent."""
    patch = 2
    traits = NetworkTraits(
        # In fp16 activations of large transformers pass 65,504 and the loss is NaN: FLUX.1 (sd-scripts #1571,
        # #1595, #1846), FLUX.2 and Z-Image (musubi-tuner #795, #897; Z-Image #14). Inference programs clamp them.
        precisions=("bf16", "fp32"),
        block_pattern=INDEXED_BLOCK,
        quantization_skip=(),
        vae_peak=AUTOENCODER_KL,
    )
    formats = AdapterFormats(
        written=("diffusers", "comfyui"),
        refused={
            "kohya": "its names fuse q, k and v into one layer, which would triple the rank; use "
            "output.format=diffusers, which diffusers and ComfyUI read",
        },
    )
    vae_files = True
    """Whether the VAE is read from single files."""
    swapped_layers: frozenset[str] = frozenset()
    """Layers whose original code has shift before scale, where diffusers has the reverse."""
    denoiser_folder = "transformer"

    @cached_property
    def text_folders(self) -> Mapping[str, TextNetwork]:
        """Folder of each text encoder, which is its component's name -> the encoder."""
        return {
            f"text_encoder_{number}" if number > 1 else "text_encoder": network
            for number, network in enumerate(self.text_networks, start=1)
        }

    @cached_property
    def text(self) -> TextInputs:  # type: ignore[override]  # follows from the encoders
        return TextInputs(
            layers={name: network.layers for name, network in self.text_folders.items()},
            roles={name: network.role for name, network in self.text_folders.items()},
            multiple=self.text_multiple,
            one_length=self.one_text_length,
            encoder_files=True,
        )

    # ---- facts

    def sizes_px(self, architecture: Mapping[str, Any], vae_factor: int) -> tuple[int, int]:
        """Return the native size, and a sixteenth of it in whole tokens as the step of bucket sides."""
        # 64 px at a native size of 1024 px, which is sd-scripts' default `bucket_reso_steps`. A finer step
        # gives more buckets, and with them more images that find no others of their shape for a batch.
        native_px, token_px = self.native_latents * vae_factor, vae_factor * self.patch
        return native_px, max(token_px, native_px // 16 // token_px * token_px)

    def encoders(self, layout: Layout) -> Mapping[str, TextNetwork]:
        """Return the text encoders that a base has, by component."""
        return self.text_folders

    def detect(self, folder: Path) -> bool:
        classes = base_parts.components(folder)
        # A folder saved from another pipeline of the same network (image to image) is as good a base.
        return classes.get("") == self.pipeline_class or (
            classes.get("transformer") == self.denoiser_class
        )

    def detect_file(self, header: Header) -> frozenset[Part]:
        tensors = {name: header[full] for name, full in base_parts.denoiser_names(header).items()}
        parts: set[Part] = set()
        if any(fits(tensors, marks) for marks in signature_tables()["bases"][self.name]):
            parts.add("denoiser")
        channels = self.published[0].vae.get("latent_channels", 0)
        if self.vae_files and base_parts.holds_vae(header, latent_channels=channels):
            parts.add("vae")
        return frozenset(parts)

    def text_files(self, layout: Layout) -> tuple[Path, ...]:
        encoders = self.encoders(layout)
        texts = [
            base_parts.part_files(layout.folder / name, base_parts.text_file(layout, name))
            for name in encoders
        ]
        tokenizers = [
            base_parts.tokenizer_files(layout.folder / base_parts.tokenizer_of(name))
            for name in encoders
        ]
        return tuple(file for files in (*texts, *tokenizers) for file in files)

    def count_denoiser(self, header: Header) -> int:
        return base_parts.denoiser_parameters(header)

    def count_texts(self, layout: Layout) -> int:
        count = 0
        for component, network in self.encoders(layout).items():
            if (file := base_parts.text_file(layout, component)) is None:
                files = base_parts.weights(layout.folder / component)
                count += count_parameters(files, unread=self.unread_text)
                continue
            header, prefix = read_header(file), base_parts.ENCODER_PREFIX.format(role=network.role)
            names = base_parts.part_names(header, prefix).items()
            read = (full for name, full in names if not name.startswith(self.unread_text))
            count += base_parts.elements(header, read)
        return count

    def facts(self, layout: Layout, *, source: str) -> BaseFacts:
        facts = super().facts(layout, source=source)
        if (single := base_parts.part_file(layout, "denoiser")) is not None:
            base_parts.check_companion(single, facts.architecture, self.published)
        return facts

    def prompt_shapes(
        self, architecture: Mapping[str, Any], *, text_tokens: int
    ) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "text": (1, text_tokens, int(architecture[self.text_width]))
        }
        if "pooled_projection_dim" in architecture:
            shapes["pooled"] = (1, int(architecture["pooled_projection_dim"]))
        if self.masked_text:
            shapes["text_mask"] = (1, text_tokens)
        return shapes

    # ---- networks

    def load_text_network(
        self, layout: Layout, component: str, *, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        """Load a text encoder from its file or folder, frozen."""
        import transformers

        folder, file = layout.folder / component, base_parts.text_file(layout, component)
        encoder = self.text_folders[component]
        kind = getattr(transformers, encoder.network)
        if file is None:
            network = base_parts.whole(kind, folder, dtype=dtype)
        else:
            network = base_parts.load_encoder_file(
                kind, file, folder, role=encoder.role, unread=self.unread_text, dtype=dtype
            )
        return network.requires_grad_(False).eval().to(device)

    def load_text_encoder(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> TextEncoder:
        layout = facts.located
        names = self.encoders(layout)
        return self.text_encoder_class(
            networks={
                name: self.load_text_network(layout, name, dtype=dtype, device=device)
                for name in names
            },
            tokenizers={
                name: load_tokenizer(layout.folder / base_parts.tokenizer_of(name))
                for name in names
            },
            max_tokens=facts.max_tokens,
        )

    def load_denoiser(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        from accelerate import init_empty_weights

        layout, kind = facts.located, of_diffusers(self.denoiser_class)
        single = base_parts.part_file(layout, "denoiser")
        if single is None:
            folder = base_parts.part_folder(layout, "denoiser", "transformer")
            network = self.built(lambda: base_parts.whole(kind, folder, dtype=dtype))
        else:
            # Not under torch.device("meta"): accelerate's context leaves buffers real, and a
            # buffer that no file holds would stay without values.
            with init_empty_weights():
                network = self.empty_denoiser(facts.architecture)
            base_parts.load_denoiser_file(
                single, network, base_parts.denoiser_names(read_header(single)), dtype=dtype
            )
        return network.requires_grad_(False).eval().to(device)

    # ---- files

    def layer_names(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherNames:
        return other_names(self.name, shapes, swapped=self.swapped_layers)
