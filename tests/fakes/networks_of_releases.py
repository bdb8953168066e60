"""Text encoders and VAEs of the public releases at their true size, as their configurations state them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import diffusers
import transformers
from torch import nn

from lora_trainer import families
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.tables import family_table
from tests.fakes.tiny_base import tiny_table

COMPANIONS = Path(families.__file__).parent / "files" / "open_companions.json"
OPEN = json.loads(COMPANIONS.read_text(encoding="utf-8"))["configs"]
CONFIGS = json.loads(Path(__file__).with_name("part_configs.json").read_text(encoding="utf-8"))
"""Configurations that are not published with the program: a key that is left out has its class's default."""


def configs(kind: str) -> dict[str, Mapping[str, Any]]:
    """Return the configurations of text encoders or VAEs by name: of shared_parts.toml's, and what families bring."""
    known: dict[str, Mapping[str, Any]] = dict(CONFIGS[kind])
    for name in families.NAMES:
        known |= tiny_table(name)["tests"].get(kind, {})
    return known


TEXTS: Mapping[str, Mapping[str, Any]] = OPEN | configs("text_encoders")
"""ComfyUI's name of an encoder -> its configuration."""
VAES = {name: family_table(name)["shared"]["vae"] for name in families.NAMES}


def texts(name: str, facts: BaseFacts) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each text encoder as it is published and the part of it that is loaded."""
    for part in families.family(name).text.networks.values():
        is_qwen3, kind, role = part.kind == "qwen3", part.network, part.role
        if is_qwen3:
            kind = "Qwen3ForCausalLM"
            role = (
                "qwen3_8b"
                if facts.release.architecture.get("joint_attention_dim") == 12_288
                else role
            )
        elif part.role == "clip_l" and kind.endswith("WithProjection"):
            role = "clip_l_projected"
        if hasattr(diffusers, kind):
            conditioner = getattr(diffusers, kind)(**TEXTS[role])
            yield conditioner, conditioner
            continue
        network_class = getattr(transformers, kind)
        network = network_class(network_class.config_class(**TEXTS[role]))
        whole = network.model if is_qwen3 else network
        text = families.family(name).text
        loaded: Any = whole.get_submodule(text.inner)
        if not text.reads(f"{text.inner}.norm.weight"):
            loaded = deepcopy(loaded)
            del loaded.layers[text.blocks or len(loaded.layers) :], loaded.norm
        yield network, loaded


def vae(kind: str) -> Any:
    entries = dict(configs("vaes")[kind])
    return getattr(diffusers, entries.pop("_class_name"))(**entries)
