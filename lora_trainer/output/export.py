"""Adapter files that work elsewhere: key names, header, read-back, rolling names.

Input is the live adapter as LoraPairs keyed by denoiser module, output is a safetensors file with
the names of kohya (read by ComfyUI, Forge, A1111, InvokeAI and diffusers) or of diffusers. A file
is compared with the live adapter before it is published. The same input gives the same bytes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor

from lora_trainer.config import Precision
from lora_trainer.errors import MachineError, TrainingStopped
from lora_trainer.families.base import Family
from lora_trainer.files import disk_error, sha256_bytes, sha256_file, write_atomic
from lora_trainer.output.adapter_tensors import DTYPES, PEFT_METADATA, AdapterTensors, LoraPair
from lora_trainer.output.fidelity import explained_by_rounding, matches
from lora_trainer.output.metadata import ExportInfo, SubsetSummary, metadata

__all__ = [
    "AdapterTensors",
    "ExportInfo",
    "Format",
    "LoraPair",
    "SubsetSummary",
    "export_bytes",
    "final_export_name",
    "metadata",
    "prune_exports",
    "read_back",
    "step_export_name",
    "write_export",
]

Format = Literal["kohya", "diffusers"]
_LEGACY_HASH_START, _LEGACY_HASH_END = 0x100000, 0x110000


def export_bytes(
    tensors: AdapterTensors,
    *,
    alpha: float,
    family: Family,
    format: Format,
    precision: Precision,
    metadata: Mapping[str, str],
) -> bytes:
    """Return the safetensors file of an adapter whose updates are up @ down * alpha / rank.

    The header gets `metadata`, hashes of the tensor bytes and, for diffusers, the strength.
    Raises TrainingStopped when a value is not finite or does not fit `precision`.
    """
    if PEFT_METADATA in metadata:
        raise ValueError(f"{PEFT_METADATA} is written here and only into diffusers files")
    rounded = {
        module: LoraPair(
            down=_rounded(pair.down, module=module, precision=precision),
            up=_rounded(pair.up, module=module, precision=precision),
        )
        for module, pair in tensors.items()
    }
    if format == "kohya":
        return _sealed(_kohya_tensors(rounded, alpha=alpha, family=family), metadata)
    strength = {PEFT_METADATA: _peft_metadata(tensors, alpha=alpha, family=family)}
    return _sealed(_diffusers_tensors(rounded, family=family), {**metadata, **strength})


def read_back(
    data: bytes | Path, tensors: AdapterTensors, *, alpha: float, family: Family
) -> float:
    """Read an exported file as a loader would; return the largest relative error of an update.

    The error is |read - live| / |live| in Frobenius norm, infinite where the live update is zero
    and the file's is not. Raises TrainingStopped when modules are missing, unknown or misshapen.
    """
    content = data.read_bytes() if isinstance(data, Path) else data
    found = matches(content, tensors, alpha=alpha, family=family)
    return max((match.relative_error for match in found), default=0.0)


def write_export(
    path: Path,
    tensors: AdapterTensors,
    *,
    family: Family,
    info: ExportInfo,
    format: Format,
    precision: Precision,
) -> float:
    """Publish an adapter at `path` once it reads back right; return the largest relative error.

    Raises TrainingStopped when a module differs by more than rounding to `precision` explains, and
    MachineError when the disk refuses or gives other bytes back.
    """
    data = export_bytes(
        tensors,
        alpha=info.alpha,
        family=family,
        format=format,
        precision=precision,
        metadata=metadata(info),
    )
    worst = 0.0
    for match in matches(data, tensors, alpha=info.alpha, family=family):
        pair, error = tensors[match.module], match.relative_error
        if match.error > explained_by_rounding(pair, scale=match.scale, precision=precision):
            raise TrainingStopped(
                f"{path.name} would differ from the adapter in {match.module} by {error:.1e}",
                fix="report this as a bug; the saved states are unharmed",
            )
        worst = max(worst, error)
    write_atomic(path, data)
    if sha256_file(path) != sha256_bytes(data):
        raise MachineError(
            f"{path} reads back with other bytes than were written",
            fix="check the disk or choose another folder with --output",
        )
    return worst


def final_export_name(name: str) -> str:
    """Return the file name of a run's final export."""
    return f"{name}.safetensors"


def step_export_name(name: str, *, step: int) -> str:
    """Return the file name of a rolling export."""
    return f"{name}-step{step:08d}.safetensors"


def prune_exports(folder: Path, *, name: str, keep_last: int) -> list[Path]:
    """Remove a run's rolling exports but the `keep_last` newest by step; return the removed.

    Call it after the newest is published. Nothing that is not named like a rolling export of `name`
    is touched. Raises MachineError when the disk refuses.
    """
    pattern = re.compile(rf"{re.escape(name)}-step(\d{{8,}})\.safetensors")
    found = {path: pattern.fullmatch(path.name) for path in folder.iterdir()}
    steps = {path: int(match[1]) for path, match in found.items() if match}
    oldest_first = sorted(steps, key=lambda path: steps[path])
    removed = oldest_first[: max(0, len(oldest_first) - keep_last)]
    for path in removed:
        try:
            path.unlink()
        except OSError as error:
            raise disk_error(path, error) from error
    return removed


def _rounded(tensor: Tensor, *, module: str, precision: Precision) -> Tensor:
    exact = tensor.detach().to(device="cpu", dtype=torch.float32)
    if not exact.isfinite().all():
        raise TrainingStopped(
            f"the adapter of {module} holds values that are not finite numbers",
            fix="resume from an earlier state with a lower optimizer.learning_rate",
        )
    rounded = exact.to(DTYPES[precision]).contiguous()
    if not rounded.isfinite().all():
        largest, limit = exact.abs().max(), torch.finfo(rounded.dtype).max
        raise TrainingStopped(
            f"the adapter of {module} reaches {largest:.3g}, {precision} ends at {limit:.3g}",
            fix="export with --set output.precision=fp32",
        )
    return rounded


def _kohya_tensors(
    tensors: AdapterTensors, *, alpha: float, family: Family
) -> list[tuple[str, Tensor]]:
    named = []
    for module, pair in tensors.items():
        name = family.kohya_module(module)
        # Alpha stays fp32, where it is exact; readers take it with .item().
        named.append((f"{name}.alpha", torch.tensor(alpha, dtype=torch.float32)))
        named.append((f"{name}.lora_down.weight", pair.down))
        named.append((f"{name}.lora_up.weight", pair.up))
    return named


def _diffusers_tensors(tensors: AdapterTensors, *, family: Family) -> list[tuple[str, Tensor]]:
    named = []
    for module, pair in tensors.items():
        name = family.diffusers_module(module)
        named.append((f"{name}.lora_A.weight", pair.down))
        named.append((f"{name}.lora_B.weight", pair.up))
    return named


def _peft_metadata(tensors: AdapterTensors, *, alpha: float, family: Family) -> str:
    """Return arguments of peft's LoraConfig, each under the component's name ("unet.r")."""
    names = {module: family.diffusers_module(module).partition(".") for module in tensors}
    ranks = {names[module][2]: pair.rank for module, pair in tensors.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0] if ranks else 1
    others = {f"^{re.escape(name)}": r for name, r in sorted(ranks.items()) if r != rank}
    config = {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(ranks),
        "rank_pattern": others,
        "alpha_pattern": {},
        "lora_bias": False,
        "use_dora": False,
    }
    components = sorted({component for component, _, _ in names.values()})
    return json.dumps(
        {f"{part}.{key}": value for part in components for key, value in config.items()}
    )


def _sealed(named: list[tuple[str, Tensor]], entries: Mapping[str, str]) -> bytes:
    """Serialise with the hashes readers look for; safetensors itself orders metadata by chance."""
    if len(dict(named)) < len(named):
        raise ValueError("two modules share one name in the file")
    plain = save(dict(named))
    start = 8 + int.from_bytes(plain[:8], "little")
    layout, body = json.loads(plain[8:start]), plain[start:]
    digest = sha256_bytes(body)
    # kohya's legacy hash: 64 KiB at 1 MiB of the file as it would be with the ss_ entries alone.
    training = {key: value for key, value in entries.items() if key.startswith("ss_")}
    as_kohya = _header(layout, training) + body[:_LEGACY_HASH_END]
    hashes = {
        "modelspec.hash_sha256": f"0x{digest}",
        "sshs_model_hash": digest,
        "sshs_legacy_hash": sha256_bytes(as_kohya[_LEGACY_HASH_START:_LEGACY_HASH_END])[:8],
    }
    return _header(layout, {**entries, **hashes}) + body


def _header(layout: Mapping[str, Any], entries: Mapping[str, str]) -> bytes:
    """Return the length prefix and the JSON header, padded so that tensors stay aligned."""
    ordered = {"__metadata__": dict(sorted(entries.items())), **layout}
    text = json.dumps(ordered, ensure_ascii=False).encode()
    padded = text + b" " * (-len(text) % 8)
    return len(padded).to_bytes(8, "little") + padded
