"""The text encoders of the releases: class, sizes, the layers that adapter files may change and their names there.

Layers have names and shapes [out, in].

Names are those of transformers without the prefixes `text_model.`, `model.` and `language_model.`, which
some versions of transformers and some trainers add and others leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def clip_layers(*, layers: int, width: int, inner: int) -> Layers:
    """Return the layers of a CLIP text encoder."""
    square = ("k_proj", "v_proj", "q_proj", "out_proj")
    block: Layers = {f"self_attn.{name}": (width, width) for name in square}
    block |= {"layer_norm1": (width,), "mlp.fc1": (inner, width), "mlp.fc2": (width, inner)}
    block |= {"layer_norm2": (width,)}
    blocks = {
        f"encoder.layers.{n}.{name}": shape for n in range(layers) for name, shape in block.items()
    }
    # CLIP-L projects 768 channels to 768, bigG 1280 to 1280.
    return {**blocks, "final_layer_norm": (width,), "text_projection": (width, width)}


def t5_layers(*, layers: int, width: int, inner: int) -> Layers:
    """Return the layers of T5's encoder, whose heads are as wide together as its states."""
    block: Layers = {f"layer.0.SelfAttention.{name}": (width, width) for name in "qkvo"}
    block |= {f"layer.1.DenseReluDense.{name}": (inner, width) for name in ("wi_0", "wi_1")}
    block |= {"layer.1.DenseReluDense.wo": (width, inner)}
    return {
        f"encoder.block.{n}.{name}": shape for n in range(layers) for name, shape in block.items()
    }


def qwen_layers(*, layers: int, width: int, inner: int, queries: int, keys: int) -> Layers:
    """Return the layers of a Qwen or Gemma language model; `queries`, `keys`: the widths of all heads together."""
    block: Layers = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    return {f"layers.{n}.{name}": shape for n in range(layers) for name, shape in block.items()}


_LAYERS = {"clip": clip_layers, "t5": t5_layers}


def _network(role: str, row: Mapping[str, Any]) -> TextNetwork:
    layers: Any = _LAYERS.get(row["kind"], qwen_layers)
    facts = {key: value for key, value in row.items() if key != "sizes"}
    return TextNetwork(role=role, layers=layers(width=row["width"], **row["sizes"]), **facts)


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
