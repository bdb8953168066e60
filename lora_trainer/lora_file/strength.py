"""The strength of an adapter where tensors do not say it: peft's settings in the header or beside the file.

Input is a file's metadata, output the factor on a module's update. Torch-free. Nothing here is
believed to be well-formed: a setting that cannot be read counts as not stated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.families.base import DENOISER
from lora_trainer.lora_file.header import PEFT_FILE

DIFFUSERS_METADATA = "lora_adapter_metadata"
"""Header entry with peft's settings; diffusers refuses `.alpha` tensors beside it."""
FOLDED = "lora_train.strength"
"""Header entry of files whose strength is multiplied into the tensors: they lack an alpha on purpose."""
PEFT_CONFIG = "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class Strengths:
    """Settings of peft by component; without any, alpha is the rank and the factor 1."""

    settings: Mapping[str, Mapping[str, Any]]

    @property
    def stated(self) -> bool:
        """Whether there is an alpha at all."""
        return any(True for _ in self.alphas())

    @property
    def unsupported(self) -> str:
        """Why peft's kind of adapter cannot be read, "" where it can."""
        for settings in self.settings.values():
            kind = settings.get("peft_type", "LORA")
            if kind not in ("LORA", "LOHA", "LOKR", "OFT"):
                return f"is an adapter of peft's kind {kind}; LORA, LOHA, LOKR and OFT are read"
            # A rotation is the Cayley transform (I + Q)(I - Q)^-1 or, in peft, five terms of its series
            # (Neumann); other numbers of terms and coft's limit give other rotations.
            terms = settings.get("use_cayley_neumann", True) and settings.get(
                "num_cayley_neumann_terms", 5
            )
            if kind == "OFT" and (settings.get("coft") or terms != 5):
                return "is an OFT of peft with settings of its own (coft, Cayley without 5 terms)"
            if settings.get("fan_in_fan_out"):
                return "was made with fan_in_fan_out for layers that no base here has"
        return ""

    def alphas(self) -> Iterator[float]:
        """Yield every alpha that is stated, patterns included."""
        for settings in self.settings.values():
            values = (_alpha(settings), *_patterns(settings).values())
            yield from (value for value in map(_number, values) if value is not None)

    def scale_of(self, spelling: str, *, rank: int) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) for rsLoRA; 1 where no alpha is stated.

        `spelling` is the module's name in the file ("unet.down_blocks..."); `rank` 0: the tensors do not
        tell it, as of a LoKr of whole factors.
        """
        prefix, _, module = spelling.partition(".")
        component = prefix if prefix.startswith("text_encoder") else DENOISER
        # The settings beside a file of peft are of no component, those in a header of diffusers are of each.
        settings = self.settings.get(component, self.settings.get("", {}))
        alpha = _number(_alpha(settings))
        for pattern, value in _patterns(settings).items():
            # As in peft, the last pattern that matches wins.
            if _names(pattern, module) and (own_alpha := _number(value)) is not None:
                alpha = own_alpha
        rank = rank or int(_number(settings.get("r")) or 0)
        if alpha is None or rank < 1:
            return 1.0
        # rsLoRA (Kalajdzievski 2023, arXiv 2312.03732): updates of every rank get the same size.
        return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def read_strengths(metadata: Mapping[str, str], path: Path) -> Strengths:
    """Take the settings from the header, else from the file that peft writes beside its own."""
    if text := metadata.get(DIFFUSERS_METADATA):
        return Strengths(settings=_by_component(_json_object(text)))
    try:
        text = path.with_name(PEFT_CONFIG).read_text("utf-8") if path.name == PEFT_FILE else ""
    except (OSError, UnicodeError):
        text = ""
    return Strengths(settings={"": _json_object(text)} if text else {})


def _by_component(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort "unet.lora_alpha" and the like under this program's components."""
    by_component: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        part, _, setting = name.rpartition(".")
        component = part if part.startswith("text_encoder") else DENOISER
        by_component.setdefault(component, {})[setting] = value
    return by_component


def _alpha(settings: Mapping[str, Any]) -> Any:
    """Return peft's alpha, which has another name for LoHa and LoKr."""
    return settings.get("lora_alpha", settings.get("alpha"))


def _patterns(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    patterns = settings.get("alpha_pattern")
    return patterns if isinstance(patterns, dict) else {}


def _names(pattern: str, module: str) -> bool:
    """Match as peft does, but the end of a name only: a hostile pattern could match for ever."""
    plain = pattern.replace("\\", "")
    if plain.startswith("^"):
        return module == plain[1:]
    return module == plain or module.endswith(f".{plain}")


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
