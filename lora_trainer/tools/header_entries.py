"""Header entries of adapters made from others: those that still hold are carried over, the rest stated anew.

Input is the metadata of the input files, output entries without hashes, which the writer adds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from lora_trainer import __version__
from lora_trainer.common.wording import public_source, public_text
from lora_trainer.families.base import BaseFacts, Family
from lora_trainer.lora_file.metadata import ALGORITHMS
from lora_trainer.lora_file.stream import HASHES
from lora_trainer.lora_file.strength import DIFFUSERS_METADATA, FOLDED
from lora_trainer.tools.adapter_writer import Summary

NOT_CARRIED = frozenset({*HASHES, DIFFUSERS_METADATA, FOLDED})
"""They describe the tensors of the old file; peft's settings would be a second strength."""
_SETTINGS, _BASE = "lora_train.settings", "base.model"
_MODULE, _ARGUMENTS = "ss_network_module", "ss_network_args"


def carried(metadata: Mapping[str, str], summary: Summary, *, resized: bool) -> dict[str, str]:
    """Return the entries of an adapter made from one other, of another rank if `resized`."""
    kept_entries = {key: value for key, value in metadata.items() if key not in NOT_CARRIED}
    if resized:
        for key in (_MODULE, _ARGUMENTS):
            kept_entries.pop(key, None)
    return {**_network(summary), **kept_entries, **_strength(summary)}


def merged(
    files: Sequence[tuple[str, Mapping[str, str]]], summary: Summary, *, title: str
) -> dict[str, str]:
    """Return the entries of a sum of adapters, (name, metadata): those that all share, and their names."""
    first, *others = [metadata for _, metadata in files]
    common = {
        key: value
        for key, value in first.items()
        if all(other.get(key) == value for other in others)
    }
    bases = {stated_base(metadata) for _, metadata in files}
    if len(bases) == 1 and (base := bases.pop()) is not None:
        common.setdefault(_SETTINGS, _made_for(base))
    names = ", ".join(public_text(name) for name, _ in files)
    return {
        **carried(common, summary, resized=True),
        "ss_output_name": public_text(title),
        "modelspec.title": public_text(title),
        "modelspec.merged_from": names,
    }


def extracted(
    tuned: str, base: str, *, family: Family, facts: BaseFacts, title: str, summary: Summary
) -> dict[str, str]:
    """Return the entries of the difference between two base models."""
    return {
        **_network(summary),
        **_strength(summary),
        "ss_base_model_version": family.adapter_names(facts).kohya,
        "ss_sd_model_name": public_source(base),
        "ss_output_name": public_text(title),
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": family.adapter_names(facts).modelspec,
        "modelspec.implementation": "diffusers",
        "modelspec.title": public_text(title),
        "modelspec.description": f"{public_source(tuned)} minus {public_source(base)}",
        "lora_train.version": __version__,
        _SETTINGS: _made_for(public_source(base)),
    }


def stated_base(metadata: Mapping[str, str]) -> str | None:
    """Return the base model that our own entries name, None where there are none."""
    try:
        source = json.loads(metadata.get(_SETTINGS, "{}"))[_BASE]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return source if isinstance(source, str) else None


def _made_for(base: str) -> str:
    return json.dumps({_BASE: base})


def _network(summary: Summary) -> dict[str, str]:
    """Return with which of kohya's networks an adapter of this kind is read."""
    others = sorted(summary.contents.kinds - {"lora"})
    arguments = (
        {"algo": ALGORITHMS[others[0] if others else "lora"]}
        if others or summary.contents.dora
        else {}
    )
    if summary.contents.dora:
        arguments |= {"dora_wd": "True", "wd_on_output": "True"}
    return {
        _MODULE: "lycoris.kohya" if arguments else "networks.lora",
        _ARGUMENTS: json.dumps(arguments),
    }


def _strength(summary: Summary) -> dict[str, str]:
    alpha = float(f"{summary.alpha:.7g}")  # as far as the float32 in the tensors is meant
    return {"ss_network_dim": str(summary.rank), "ss_network_alpha": str(alpha)}
