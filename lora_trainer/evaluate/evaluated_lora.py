"""What is validated: the adapter file of a run or by itself, and the settings it was trained with.

Input: a run folder or a file, and the base if another is wanted; output: a EvaluatedLora, whose settings
prepare the dataset as training did, so that the same pictures are held out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.config.config import Config, all_settings, flatten
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
    """An adapter file; `settings` are those of its training that matter here.

    `known` says whether they are known at all, `fingerprint` is of the dataset as it was trained, ""
    where nobody wrote it down.
    """

    file: Path
    run: Path | None
    settings: Mapping[str, Any]
    known: bool
    fingerprint: str


def evaluated_lora_of(path: Path, *, base: str | None) -> EvaluatedLora:
    """Read what is to be validated; raises InputError and RequestError, as `sample` does."""
    if path.is_dir():
        file, record = adapter_of(path), read_run(path)
        settings = dict(record["settings"])
        source = base or str(record["base"]["source"])
        kept = _kept(settings, elsewhere=base is not None)
        return EvaluatedLora(
            file=file,
            run=path,
            settings=kept | {"base.model": source},
            known=True,
            fingerprint=str(record["dataset"]["fingerprint"]),
        )
    config: Config | None = stated_settings(read_contents(path).metadata)
    given = base or (config.base.model if config else None)
    if given in (None, "auto"):
        raise RequestError(
            f"{path.name} does not say which base it was trained on", fix="name it with --base"
        )
    settings = flatten(config) if config else {}
    return EvaluatedLora(
        file=path,
        run=None,
        settings=_kept(settings, elsewhere=True) | {"base.model": given},
        known=config is not None,
        fingerprint="",
    )


def _kept(settings: Mapping[str, Any], *, elsewhere: bool) -> dict[str, Any]:
    """Return what is taken over; `elsewhere`: paths in it are not of this machine or of another base."""
    paths = {info.key for info in all_settings() if info.path}
    known = {info.key for info in all_settings()}
    return {
        key: value
        for key, value in settings.items()
        if key in known
        and (key.startswith(KEPT_SECTIONS) or key in KEPT_SETTINGS)
        and value != "auto"
        and not (elsewhere and key in (*paths, *OF_THIS_MACHINE))
    }
