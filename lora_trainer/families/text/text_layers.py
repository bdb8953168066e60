"""The text encoders of the releases: class, sizes, the layers that adapter files may change and their names there.

Layers have names and shapes [out, in].

Names are those of transformers without the prefixes `text_model.`, `model.` and `language_model.`, which
some versions of transformers and some trainers add and others leave out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lora_trainer.families.facts import FileFormat, release_tables

Layers = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class TextNetwork:
    """A text encoder as released.

    `role` is ComfyUI's name of it, `kind` that of `signatures.toml`, `network` its class in transformers,
    `width` the length of its hidden states; `parameters` are those that are loaded.
    """

    role: str
    kind: str
    network: str
    width: int
    parameters: int
    layers: Layers


def text_layers(kind: str, **sizes: int) -> Layers:
    """Return the layers of an encoder of that kind with `layers` blocks, in the order of releases.toml."""
    tables = release_tables()["text_layers"]
    rows: Mapping[str, Sequence[str]] = tables.get(kind) or tables["language_model"]
    shapes = {name: tuple(sizes[size] for size in shape) for name, shape in rows.items()}
    blocks = {
        name.replace("#", str(number)): shape
        for number in range(sizes["layers"])
        for name, shape in shapes.items()
        if "#" in name
    }
    return blocks | {name: shape for name, shape in shapes.items() if "#" not in name}


def _network(role: str, row: Mapping[str, Any]) -> TextNetwork:
    facts = {key: value for key, value in row.items() if key != "sizes"}
    layers = text_layers(row["kind"], width=row["width"], **row["sizes"])
    return TextNetwork(role=role, layers=layers, **facts)


BY_ROLE = {role: _network(role, row) for role, row in release_tables()["text_encoders"].items()}
# Stable Diffusion 3 reads CLIP-L's pooled vector after the projection.
CLIP_L_PROJECTED = replace(
    BY_ROLE["clip_l"], network="CLIPTextModelWithProjection", parameters=123_650_304
)


# ---- names in adapter files

_TEXT_MODELS = {"clip": "text_model.", "qwen": "model.", "gemma": "model."}
"""Start of an encoder's ComfyUI name -> prefix of its layers' names in the public releases."""


def text_key(
    format: FileFormat, component: str, module: str, *, roles: Mapping[str, str], number: int | str
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
