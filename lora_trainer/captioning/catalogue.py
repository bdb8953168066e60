"""Captioning models: what is asked of one, those known by a short name, where the files of any of them are.

Input is what the user wrote: options, and a short name, a folder or a Hub id. Output is a folder that holds
what its kind of model needs. Torch-free. What a model is, its files say: `selected_tags.csv` makes it a
tagger, `config.json` a language model of transformers.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from cyclopts import Parameter

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
    """A released model, a row of `catalogue.toml`; `memory_gib` is computed, not measured."""

    name: str
    source: str
    writes: Writes
    good_for: str
    licence: str
    download_gb: float
    memory_gib: float


def _known_models() -> tuple[KnownModel, ...]:
    text = files(__package__).joinpath("catalogue.toml").read_text("utf-8")
    return tuple(KnownModel(name=name, **row) for name, row in tomllib.loads(text).items())


KNOWN = _known_models()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CaptionRequest:
    """The options of `lora-train caption` that say which captions are written; None where the kind of model decides.

    :param overwrite: replace existing captions too; --undo restores the old ones
    :param output: folder for the captions [default: beside the images]
    :param prefix: words before each caption, as typed
    :param suffix: words after each caption, as typed; include a comma if you want one
    :param trigger: word to put first in captions that do not contain it
    :param prompt: instruction for models that take one [default: describe in two sentences]
    :param max_tokens: longest caption, in tokens [default: 150]
    :param threshold: for taggers: lowest probability of a tag [default: 0.35]
    :param character_threshold: for taggers: lowest probability of a character's name [default: 0.85]
    :param device: device that runs the model
    """

    model: Annotated[
        str,
        Parameter(
            help=f"{', '.join(model.name for model in KNOWN)}; or the folder or Hub id of a model of the same kinds"
        ),
    ] = DEFAULT
    overwrite: bool = False
    images: Annotated[
        list[str], Parameter(consume_multiple=True, help="only these images of the dataset")
    ] = field(default_factory=list)
    output: Path | None = None
    prefix: str = ""
    suffix: str = ""
    trigger: str | None = None
    prompt: str | None = None
    max_tokens: int | None = None
    threshold: float | None = None
    character_threshold: float | None = None
    device: Literal["auto", "cuda", "cpu"] = "auto"

    def refuse_unfit(self, writes: Writes) -> None:
        """Raise RequestError for options that this kind of model has no use for, and for bad numbers."""
        of_text = {"--prompt": self.prompt, "--max-tokens": self.max_tokens}
        of_tags = {
            "--threshold": self.threshold,
            "--character-threshold": self.character_threshold,
        }
        for name, value in (of_text if writes == "tags" else of_tags).items():
            if value is not None:
                raise RequestError(
                    f"{name} is not for {self.model}, which writes {writes}",
                    fix=f"leave {name} out",
                )
        for name, share in of_tags.items():
            if share is not None and not 0 < share <= 1:
                raise RequestError(f"{name} {share:g} is no probability", fix="give 0.05 to 0.95")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= 4096:
            raise RequestError(
                f"--max-tokens {self.max_tokens}", fix="give a number from 1 to 4096"
            )

    def decisive(self, source: str) -> dict[str, object]:
        """Return the values that decide the text of captions: a call with others is another call."""
        elsewhere = ("images", "output", "device")
        values = {name: value for name, value in vars(self).items() if name not in elsewhere}
        return {**values, "model": source}


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
