"""The base class of the flow-matching transformer families: what they have in common, and how they are recognised.

A family states its classes, text encoders and releases and implements prediction. A base is a diffusers
folder with `transformer`, `vae`, a scheduler, and one or more text encoders, each part replaceable by a file
(`Layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.config.declare import Precision, Targets
from lora_trainer.families.base.facts import TEXT_LENGTHS, Conditioning
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.references import references_in
from lora_trainer.families.base.releases import TextNetwork
from lora_trainer.families.base.text.transformers_encoder import TransformersEncoder
from lora_trainer.families.base.texts import TextInputs
from lora_trainer.families.base.traits import (
    INDEXED_BLOCK,
    AdapterFormats,
    FileFormat,
    NetworkTraits,
)
from lora_trainer.families.files import base_parts

if TYPE_CHECKING:
    from torch import Tensor, nn


# Attention of blocks that attend to image and text at once.
JOINT_ATTENTION = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
)
JOINT_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")


def target_endings(
    attention: tuple[str, ...], *, transformer: tuple[str, ...], modulation: tuple[str, ...] = ()
) -> Mapping[Targets, tuple[str, ...]]:
    """Return the endings of the layers of each kind of targets, of which each kind contains the one before."""
    both = (*attention, *transformer)
    return {"attention": attention, "transformer": both, "all": (*both, *modulation)}


def position_ids(latents: Tensor, *, place: int = 0) -> Tensor:
    """Return float32 [H/2 W/2, 3]: place, row, column of each token of [B, C, H, W]; the noisy image is at place 0."""
    import torch

    rows = torch.arange(latents.shape[-2] // 2, device=latents.device)
    columns = torch.arange(latents.shape[-1] // 2, device=latents.device)
    grid = torch.cartesian_prod(rows, columns).reshape(-1, 2).float()
    return torch.nn.functional.pad(grid, (1, 0), value=float(place))


def text_lengths(conditioning: Conditioning) -> list[int]:
    """Return each text's number of tokens without padding; without `TEXT_LENGTHS` they are read from the mask."""
    lengths = conditioning.get(TEXT_LENGTHS)
    if lengths is None:
        lengths = conditioning["text_mask"].sum(dim=1)
    return lengths.tolist()


def recomputed(blocks: nn.ModuleList) -> nn.ModuleList:
    """Return a list of blocks that gradient checkpointing reaches; diffusers gives it to some lists of a network only.

    The network calls each block with its inputs in the order of the block's arguments, named or not.
    """
    from torch import is_grad_enabled
    from torch.nn import ModuleList

    class Recomputed(ModuleList):
        # diffusers sets both where it finds the first.
        gradient_checkpointing = False
        _gradient_checkpointing_func: Any

        def __iter__(self) -> Iterator[Any]:
            given = super().__iter__()
            if self.gradient_checkpointing and is_grad_enabled():
                return (partial(self._recompute, block) for block in given)
            return given

        def _recompute(self, block: nn.Module, *args: Any, **named: Any) -> Any:
            return self._gradient_checkpointing_func(block, *args, *named.values())

    return Recomputed(blocks)


def in_one_length(
    run: Callable[..., Tensor],
    noisy: Tensor,
    timesteps: Tensor,
    conditioning: Conditioning,
) -> Tensor:
    """Call `run` with noisy latents, timesteps and texts of one length, once for each length; return what it returns.

    No call needs a mask. The latents of references, where there are some, are further arguments.
    """
    import torch

    text, lengths = conditioning["text"], text_lengths(conditioning)
    references = references_in(conditioning)
    if len(set(lengths)) == 1:
        return run(noisy, timesteps, text[:, : lengths[0]], *references)
    predicted: dict[int, Tensor] = {}
    for length in sorted(set(lengths)):
        rows = [row for row, row_length in enumerate(lengths) if row_length == length]

        def alike(tensor: Tensor, rows: Sequence[int] = rows) -> Tensor:
            # By slices: a list of rows would be copied to the device, and the host would wait for it.
            return torch.cat([tensor[row : row + 1] for row in rows])

        texts = alike(text)[:, :length]
        part = run(alike(noisy), alike(timesteps), texts, *map(alike, references))
        predicted |= zip(rows, part.split(1), strict=True)
    return torch.cat([predicted[row] for row in range(len(lengths))])


def refuse_channels(source: str, architecture: Mapping[str, Any], *, allowed: int) -> None:
    """Raise InputError for a network with more inputs than noisy latents."""
    if architecture["in_channels"] != allowed:
        raise InputError(
            f"{source} takes {architecture['in_channels']} channels: an inpainting, fill or control release; "
            f"its VAE and a text-to-image release have {allowed}",
            fix="use a text-to-image release or a base fine-tuned from one",
        )


def encoders(
    *networks: TextNetwork,
    encoder: type[TransformersEncoder],
    components: tuple[str, ...] = ("text_encoder", "text_encoder_2", "text_encoder_3"),
    **options: Any,
) -> TextInputs:
    """Return the text encoders, in the order of the pipeline; `options` are further fields."""
    by_component = dict(zip(components, networks, strict=False))
    return TextInputs(
        networks=by_component,
        prefixes={
            component: base_parts.ENCODER_PREFIX.format(role=network.role)
            for component, network in by_component.items()
        },
        encoder=encoder,
        encoder_files=True,
        **options,
    )


@dataclass(frozen=True, kw_only=True)
class TransformerTraits(NetworkTraits):
    """Facts of a diffusion transformer, with those that most have."""

    folder: str = "transformer"
    patch: int = 2
    shares_vae: bool = True
    # In fp16 activations of large transformers pass 65,504 and the loss is NaN: FLUX.1 (sd-scripts #1571,
    # #1595, #1846), FLUX.2 and Z-Image (musubi-tuner #795, #897; Z-Image #14). Inference programs clamp them.
    precisions: tuple[Precision, ...] = ("bf16", "fp32")
    block_pattern: str = INDEXED_BLOCK
    # 768, 640 and 512 px of 1024: what trainers' presets for small GPUs have (OneTrainer, kohya_ss, ai-toolkit).
    sides: tuple[float, ...] = (0.75, 0.625, 0.5)


@dataclass(frozen=True, kw_only=True)
class TransformerFormats(AdapterFormats):
    """Key formats of the adapters of most diffusion transformers."""

    written: tuple[FileFormat, ...] = ("diffusers", "comfyui")
    refused: Mapping[FileFormat, str] = field(
        default_factory=lambda: {
            "kohya": "its names fuse q, k and v into one layer, which would triple the rank; use "
            "output.format=diffusers, which diffusers and ComfyUI read",
        }
    )


class FlowFamily(Family):
    """A family of diffusion transformers trained by flow matching (Lipman et al. 2022, arXiv 2210.02747)."""

    formats: AdapterFormats = TransformerFormats()

    def detect(self, folder: Path) -> bool:
        classes = base_parts.components(folder)
        # A folder saved from another pipeline of the same network (image to image) is as good a base.
        return classes.get("") == self.pipeline.class_name or (
            classes.get("transformer") == self.traits.class_name
        )
