"""The key format of an exported file, by the family's formats and the kind of adapter.

Input is the contents of an adapter, planned or trained; output a format, or a RequestError before any
work is done. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lora_trainer.common.errors import RequestError
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.families.base import Family, FileFormat
from lora_trainer.lora.adapter_size import KIND_NAMES, AdapterKind

FormatRequest = Literal["auto"] | FileFormat
# Measured by scripts/readers, see docs/formats.md.
_DORA = (
    "diffusers drops the magnitudes of DoRA from files in this format, ComfyUI and Forge divide by the "
    "norms of the base's weights instead of the changed ones, A1111 and InvokeAI by norms along the "
    "wrong axis, which ruins the image; output.format=diffusers keeps DoRA exact in diffusers"
)
_DORA_IN_DIFFUSERS = (
    "only diffusers reads DoRA in this format; ComfyUI and Forge drop the magnitudes, InvokeAI refuses "
    "the file"
)
_TEXT_IN_COMFYUI = "only ComfyUI finds the text encoders' layers under these names"
_MISSED: Mapping[AdapterKind, str] = {
    "loha": "diffusers cannot load a LoHa, InvokeAI only those of U-Nets; ComfyUI can",
    "lokr": "diffusers and InvokeAI load the LoKr of some families only; ComfyUI can",
    "oft": "diffusers, Forge and InvokeAI cannot load an OFT; ComfyUI and A1111 can",
    "oft_in": "of the programs checked, only OneTrainer loads an OFT of inputs",
    "glora": "diffusers cannot load a GLoRA; ComfyUI, Forge and A1111 can",
    "ia3": "diffusers, ComfyUI and Forge cannot load an IA3; A1111 can",
    "full": "diffusers cannot load whole differences; ComfyUI, Forge and A1111 can",
    "norm": "diffusers cannot load changes of norms; ComfyUI, Forge and A1111 can",
}


@dataclass(frozen=True, kw_only=True)
class AdapterContents:
    """The contents of an adapter that decide its format: kinds, DoRA, trained text encoders, biases.

    `input_dora`: DoRA magnitudes of some layers are per input, as in OneTrainer's files.
    """

    kinds: frozenset[AdapterKind]
    dora: bool
    text: bool
    bias: bool = False
    input_dora: bool = False


def planned_contents(adapter: AdapterSettings) -> AdapterContents:
    """Return the contents of the adapter that these settings train."""
    return AdapterContents(
        kinds=frozenset({adapter.kind}), dora=adapter.dora, text=adapter.text_encoder
    )


def format_for(family: Family, requested: FormatRequest, contents: AdapterContents) -> FileFormat:
    """Return the format of a file; `auto` is the family's first format that can hold the adapter.

    Raises RequestError with the reason where the family or the kind does not allow the requested format.
    """
    refused = {format: _refusal(format, contents) for format in family.formats.written}
    possible = [format for format, reason in refused.items() if reason is None]
    if not possible:
        reasons = "; ".join(f"{format}: {reason}" for format, reason in refused.items())
        raise RequestError(
            f"no file format of {family.name} can hold this adapter ({reasons})",
            fix="make a LoRA of it with `lora-train resize --rank`, or train with --set adapter.kind=lora",
        )
    if requested == "auto":
        return possible[0]
    reason = refused.get(requested) or family.formats.refused.get(requested)
    if requested in possible:
        return requested
    raise RequestError(
        f"output.format={requested} is not possible for {family.name}: {reason or 'no program reads it'}",
        fix=f"use --set output.format={possible[0]}",
    )


def format_notes(format: FileFormat, contents: AdapterContents) -> tuple[str, ...]:
    """Return a sentence per loss that programs have when they read such a file."""
    dora = (_DORA_IN_DIFFUSERS if format == "diffusers" else _DORA,) if contents.dora else ()
    text = (_TEXT_IN_COMFYUI,) if contents.text and format == "comfyui" else ()
    return (*dora, *text, *(_MISSED[kind] for kind in sorted(contents.kinds) if kind in _MISSED))


def _refusal(format: FileFormat, contents: AdapterContents) -> str | None:
    others = sorted(contents.kinds - {"lora"})
    if format == "diffusers" and others:
        name = KIND_NAMES[others[0]]
        return f"{name} is not written in it, because diffusers cannot load it again under its own names"
    if format == "diffusers" and contents.bias:
        return "changes of biases are not written in it, because diffusers has no names for them"
    if format == "diffusers" and contents.input_dora:
        return "DoRA's input magnitudes are not written in it, because peft reads output magnitudes only"
    return None
