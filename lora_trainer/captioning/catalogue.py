"""Captioning models: those known by a short name, and where the files of any of them are.

Input is what the user wrote: a short name, a folder or a Hub id. Output is a folder that holds what
its kind of model needs. Torch-free. What a model is, its files say: `selected_tags.csv` makes it a
tagger, `config.json` a language model of transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from lora_trainer.common.errors import InputError, RequestError, did_you_mean
from lora_trainer.families.hub_files import cached_snapshot, fetch

Writes = Literal["sentences", "tags"]
TAGGER_FILES = ("model.onnx", "selected_tags.csv")
DEFAULT = "florence2"
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_TEXTS = frozenset({".json", ".txt", ".model", ".jinja"})
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")
_NEEDED = {
    "tags": " and ".join(TAGGER_FILES),
    "sentences": "config.json, model.safetensors, the tokenizer and preprocessor_config.json",
}


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A released model; `memory_gib` is computed from its parameters in 16 bits, not measured."""

    name: str
    source: str
    writes: Writes
    good_for: str
    licence: str
    download_gb: float
    memory_gib: float


KNOWN = (
    KnownModel(
        name="florence2",
        source="florence-community/Florence-2-large",
        writes="sentences",
        good_for="photographs and drawings, two or three plain sentences; small and quick",
        licence="MIT",
        download_gb=1.6,
        memory_gib=3,
    ),
    KnownModel(
        name="florence2-base",
        source="florence-community/Florence-2-base",
        writes="sentences",
        good_for="the same with a third of the memory, on a processor too",
        licence="MIT",
        download_gb=0.5,
        memory_gib=2,
    ),
    KnownModel(
        name="blip",
        source="Salesforce/blip-image-captioning-base",
        writes="sentences",
        good_for="one short sentence; for bases with a short prompt, on any machine",
        licence="BSD-3-Clause",
        download_gb=1.0,
        memory_gib=2,
    ),
    KnownModel(
        name="blip-large",
        source="Salesforce/blip-image-captioning-large",
        writes="sentences",
        good_for="one short sentence, a little closer to the image",
        licence="BSD-3-Clause",
        download_gb=1.9,
        memory_gib=2,
    ),
    KnownModel(
        name="qwen2.5-vl",
        source="Qwen/Qwen2.5-VL-7B-Instruct",
        writes="sentences",
        good_for="the most exact sentences of these; does as --prompt asks",
        licence="Apache-2.0",
        download_gb=16.6,
        memory_gib=19,
    ),
    KnownModel(
        name="qwen3-vl",
        source="Qwen/Qwen3-VL-4B-Instruct",
        writes="sentences",
        good_for="exact sentences; does as --prompt asks; for GPUs of 12 GB and more",
        licence="Apache-2.0",
        download_gb=8.9,
        memory_gib=11,
    ),
    KnownModel(
        name="qwen3-vl-2b",
        source="Qwen/Qwen3-VL-2B-Instruct",
        writes="sentences",
        good_for="the same for GPUs of 6 to 8 GB",
        licence="Apache-2.0",
        download_gb=4.3,
        memory_gib=6,
    ),
    KnownModel(
        name="wd14",
        source="SmilingWolf/wd-eva02-large-tagger-v3",
        writes="tags",
        good_for="drawings in anime style, for bases that were trained with such tags",
        licence="Apache-2.0",
        download_gb=1.3,
        memory_gib=3,
    ),
    KnownModel(
        name="wd14-vit",
        source="SmilingWolf/wd-vit-tagger-v3",
        writes="tags",
        good_for="the same, smaller and quicker on a processor",
        licence="Apache-2.0",
        download_gb=0.4,
        memory_gib=2,
    ),
)
"""Sizes and licences as their publishers state them; none of these weights was at hand here."""


@dataclass(frozen=True, kw_only=True)
class RequestedModel:
    """A model that was asked for: where from, and where it is if it is on this machine."""

    source: str
    folder: Path | None
    catalogued: KnownModel | None

    @property
    def writes(self) -> Writes | None:
        """Tags or sentences; None where that shows only when it is here."""
        if self.folder is not None:
            return what_it_writes(self.folder)
        return None if self.catalogued is None else self.catalogued.writes


def find(name_or_folder: str) -> RequestedModel:
    """Return the model that a short name, a folder or a Hub id means, without downloading.

    Raises RequestError for a name that means nothing, InputError for a folder without a model.
    """
    catalogued = next(
        (model for model in KNOWN if name_or_folder in (model.name, model.source)), None
    )
    source = name_or_folder if catalogued is None else catalogued.source
    path = Path(source).expanduser()
    if catalogued is None and path.is_dir():
        _refuse_incomplete(path)
        return RequestedModel(source=source, folder=path, catalogued=None)
    if catalogued is None and not _is_hub_id(source):
        names = [model.name for model in KNOWN]
        raise RequestError(
            f"{name_or_folder!r} is no captioning model.{did_you_mean(name_or_folder, names)}",
            fix=f"give {', '.join(names)}, a folder, or a Hub id (owner/name)",
        )
    cached = cached_snapshot(source, revision=None)
    whole = cached is not None and not missing_files(cached)
    return RequestedModel(source=source, folder=cached if whole else None, catalogued=catalogued)


def located(model: RequestedModel, *, on_download: Callable[[], None]) -> Path:
    """Return the model's folder, downloading the files that are not here; `on_download` is called before that.

    Raises MachineError when the Hub cannot be reached, naming the files that are needed.
    """
    if model.folder is not None:
        return model.folder
    on_download()
    file_names = _NEEDED[model.writes] if model.writes else " or ".join(reversed(_NEEDED.values()))
    folder = fetch(
        model.source,
        revision=None,
        choose=wanted_files,
        model_kind="captioning model",
        instead=f"give --model a folder that holds {file_names}",
    )
    _refuse_incomplete(folder)
    return folder


def wanted_files(names: Iterable[str]) -> list[str]:
    """Choose the files of a repository that are read: no pickles, no code, one copy of the weights."""
    top = [path for path in map(PurePosixPath, names) if len(path.parts) == 1]
    if any(path.name == TAGGER_FILES[1] for path in top):
        return sorted(path.name for path in top if path.name in (*TAGGER_FILES, "config.json"))
    return sorted(
        path.name
        for path in top
        if path.suffix in _TEXTS or _WEIGHTS.fullmatch(path.name) is not None
    )


def what_it_writes(folder: Path) -> Writes:
    """Return whether the model in a folder writes tags or sentences."""
    return "tags" if any((folder / name).is_file() for name in TAGGER_FILES) else "sentences"


def missing_files(folder: Path) -> list[str]:
    """Return the files that a folder lacks to be a captioning model, empty for a whole one."""
    if what_it_writes(folder) == "tags":
        return [name for name in TAGGER_FILES if not (folder / name).is_file()]
    lacking = [] if (folder / "config.json").is_file() else ["config.json"]
    lacking += [file.name for file in weight_files(folder) if not file.is_file()]
    for names in (_PREPROCESSORS, _VOCABULARIES):
        if not any((folder / name).is_file() for name in names):
            lacking.append(names[0])
    return lacking


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files that hold the weights, also those that are not there."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        names = {Path(str(name)).name for name in index["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        names = set()
    return tuple(folder / name for name in sorted(names or {"model.safetensors"}))


def _refuse_incomplete(folder: Path) -> None:
    if lacking := missing_files(folder):
        raise InputError(
            f"captioning model {folder} lacks {', '.join(lacking)}",
            fix=f"give a folder that holds {_NEEDED[what_it_writes(folder)]}, or a Hub id",
        )


def _is_hub_id(source: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None and not source.startswith(".")
