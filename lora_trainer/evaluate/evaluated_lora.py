"""The adapter to validate, from a run folder or a single file, and the settings it was trained with.

Input: a run folder or a file, and optionally another base; output: a EvaluatedLora, whose settings prepare the
dataset as training did, so that the same images are held out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.config.config import all_settings, flatten
from lora_trainer.config.running import Config
from lora_trainer.lora_file.header import file_of, holds_adapter
from lora_trainer.lora_file.read import read_contents
from lora_trainer.run.run_folder import read_run
from lora_trainer.run.sample_lora import adapter_of, stated_settings

KEPT_SECTIONS = ("base.", "data.", "objective.", "adapter.", "sampling.")
KEPT_SETTINGS = (
    "hardware.threads",
    "train.seed",
    "train.precision",
    "memory.text_encoder_precision",
)
OF_THIS_MACHINE = (
    "hardware.threads",
    "data.cache_dir",
    "data.cache_max_gib",
    "data.prefetch_steps",
)


@dataclass(frozen=True, kw_only=True)
class EvaluatedLora:
    """An adapter file, with the settings of its training that a validation needs.

    `has_settings`: the file or run states them. `fingerprint` is of the dataset at training time, "" where
    none is recorded.
    """

    file: Path
    run: Path | None
    settings: Mapping[str, Any]
    has_settings: bool
    fingerprint: str


def evaluated_lora_of(path: Path, *, base: str | None) -> EvaluatedLora:
    """Read the adapter's file and settings; raises InputError and RequestError, as `sample` does."""
    if path.is_dir() and not holds_adapter(path):
        file, record = adapter_of(path), read_run(path)
        settings = dict(record["settings"])
        source = base or str(record["base"]["source"])
        settings_kept = _kept(settings, elsewhere=base is not None)
        return EvaluatedLora(
            file=file,
            run=path,
            settings=settings_kept | {"base.model": source},
            has_settings=True,
            fingerprint=str(record["dataset"]["fingerprint"]),
        )
    config: Config | None = stated_settings(read_contents(path).metadata)
    base_model = base or (config.base.model if config else None)
    if base_model in (None, "auto"):
        raise RequestError(
            f"{path.name} does not say which base it was trained on",
            fix="name the base with --base",
        )
    settings = flatten(config) if config else {}
    return EvaluatedLora(
        file=file_of(path),
        run=None,
        settings=_kept(settings, elsewhere=True) | {"base.model": base_model},
        has_settings=config is not None,
        fingerprint="",
    )


def _kept(settings: Mapping[str, Any], *, elsewhere: bool) -> dict[str, Any]:
    """Return the settings to reuse; `elsewhere`: paths may be of another machine or base, so drop them."""
    paths = {info.key for info in all_settings() if info.path}
    setting_keys = {info.key for info in all_settings()}
    return {
        key: value
        for key, value in settings.items()
        if key in setting_keys
        and (key.startswith(KEPT_SECTIONS) or key in KEPT_SETTINGS)
        and value != "auto"
        and not (elsewhere and key in (*paths, *OF_THIS_MACHINE))
    }
