"""How adapter files spell things: the role of a tensor by the end of its key, a module by the rest.

Input is a key, or a family and its module names; output is plain names. Torch-free. What other
trainers write is listed here once, so that inspecting, reading and converting agree on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from lora_trainer.families.base import DENOISER, Family, FileFormat

Role = Literal[
    "alpha", "down", "up", "mid", "magnitude", "w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "blocks"
]
Kind = Literal["lora", "loha", "lokr", "oft"]

ENDINGS: Mapping[Kind, Mapping[Role, str]] = {
    "lora": {
        "down": ".lora_down.weight",
        "up": ".lora_up.weight",
        "magnitude": ".dora_scale",
    },
    "loha": {role: f".hada_{role}" for role in ("w1_a", "w1_b", "w2_a", "w2_b")},
    "lokr": {role: f".lokr_{role}" for role in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b")},
    "oft": {"blocks": ".oft_blocks"},
}
"""Ends of keys as kohya and LyCORIS write them, by kind and role; files with dotted names of
ComfyUI's own use them too, but for the two factors of a LoRA."""
PEFT_ENDINGS: Mapping[Role, str] = {
    "down": ".lora_A.weight",
    "up": ".lora_B.weight",
    "magnitude": ".lora_magnitude_vector",
}
ALPHA = ".alpha"

_KEY = re.compile(
    r"(?P<module>.+?)(?:"
    r"\.(?P<alpha>alpha)|"
    r"(?:\.lora_down|\.lora_A(?:\.\w+)?|[._]lora\.down|\.lora_linear_layer\.down)(?P<down>\.weight)|"
    r"(?:\.lora_up|\.lora_B(?:\.\w+)?|[._]lora\.up|\.lora_linear_layer\.up)(?P<up>\.weight)|"
    r"\.(?P<mid>lora_mid)\.weight|"
    r"\.(?P<magnitude>dora_scale|lora_magnitude_vector)(?:\.\w+)*|"
    r"\.(?P<factor>hada_w[12]_[ab]|lokr_w[12](?:_[ab])?)|"
    r"\.(?P<blocks>oft_blocks)"
    r")"
)
_FACTORS: Mapping[str, tuple[Kind, Role]] = {
    ending[1:]: (kind, role) for kind in ("loha", "lokr") for role, ending in ENDINGS[kind].items()
}
_ROLES: Mapping[str, tuple[Kind | None, Role]] = {
    "alpha": (None, "alpha"),
    "down": ("lora", "down"),
    "up": ("lora", "up"),
    "mid": ("lora", "mid"),
    "magnitude": ("lora", "magnitude"),
    "blocks": ("oft", "blocks"),
}
_ATTENTION = re.compile(r"(.+\.self_attn\.)(q|k|v|out)_proj")
_PREFIXES = ("", "unet.", "transformer.", "diffusion_model.", "base_model.model.")
"""Before the denoiser's module in files of diffusers, ComfyUI, ai-toolkit, DiffSynth and peft."""
_FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
"""The same where dots became underscores: kohya, OneTrainer, SimpleTuner."""


def parse_key(key: str) -> tuple[str, Kind | None, Role] | None:
    """Return (module as spelt, kind, role) of a tensor, None for what is no part of an adapter.

    The kind of an alpha is that of the tensors beside it. A magnitude is a LoRA's, which is the
    only kind trained with one here.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    group = match.lastgroup
    if match["factor"]:
        return (match["module"], *_FACTORS[match["factor"]])
    assert group is not None
    return (match["module"], *_ROLES[group])


def file_names(family: Family, modules: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return "component.module" by every spelling that files of any trainer have for it.

    `modules` has the module names of each component ("denoiser", "text_encoder", ...). What the
    family writes itself goes before what it only reads; of two modules that would share a
    spelling, the first keeps it.
    """
    found: dict[str, str] = {}
    keys = {
        f"{component}.{module}": (component, module)
        for component, names in modules.items()
        for module in names
    }
    for format in family.file_formats:
        for key, (component, module) in keys.items():
            found.setdefault(family.file_module(format, component, module), key)
    for key, (component, module) in keys.items():
        spellings = (
            _denoiser_spellings(module, family.checkpoint_module(module))
            if component == DENOISER
            else _text_spellings(component, module)
        )
        for spelling in spellings:
            found.setdefault(spelling, key)
    return found


def _denoiser_spellings(module: str, original: str | None) -> Iterator[str]:
    for name in (module, original):
        if name is not None:
            yield from (prefix + name for prefix in _PREFIXES)
            yield from (prefix + name.replace(".", "_") for prefix in _FLAT_PREFIXES)
    if ".to_" in module:
        # The attention processors that diffusers had until 2023 held the LoRA layers.
        processor = module.replace(".to_", ".processor.to_").removesuffix(".0")
        yield from (processor, f"unet.{processor}")


def _text_spellings(component: str, module: str) -> Iterator[str]:
    """CLIP lost its `text_model.` in transformers 5; files have it, or had it taken away."""
    number = component.rpartition("_")[2]
    flat = (f"lora_te{number}_",) if number.isdigit() else ("lora_te_", "lora_te1_")
    bare = module.removeprefix("text_model.")
    for name in (f"text_model.{bare}", bare):
        yield f"{component}.{name}"
        yield f"{component}.base_model.model.{name}"
        yield from (prefix + name.replace(".", "_") for prefix in flat)
        if processor := _ATTENTION.fullmatch(name):
            # Old diffusers named the projections of CLIP as those of its own attention.
            yield f"{component}.{processor[1]}to_{processor[2]}"


def file_endings(format: FileFormat, kind: Kind, *, component: str) -> Mapping[Role, str]:
    """Return the ends of keys that a file of this format has for this kind.

    transformers, which loads what is of a text encoder, wants magnitudes with `.weight`; diffusers,
    which loads the rest, without.
    """
    if format == "kohya" or kind != "lora":
        return ENDINGS[kind]
    if format == "comfyui":
        # ComfyUI knows the magnitude by LyCORIS's name only.
        return {**PEFT_ENDINGS, "magnitude": ENDINGS["lora"]["magnitude"]}
    if component == DENOISER:
        return PEFT_ENDINGS
    return {**PEFT_ENDINGS, "magnitude": f"{PEFT_ENDINGS['magnitude']}.weight"}
