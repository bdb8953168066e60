"""Captioning models: their options, those known by a short name, where their files are; and the taggers.

Input is what the user wrote: options, and a short name, a folder or a Hub id. What a model is, its files say:
`selected_tags.csv` makes it a tagger, `config.json` a language model of transformers, a `Describer`. Both describe
upright RGB images, `batch_size` at a time, the same way for the same image, on their `device`, and raise `OutOfRoom`
when memory runs out. A WD tagger is an ONNX file that gives every tag of `selected_tags.csv` a probability. Input are
images padded to a square with white and given as 0 to 255 in the order blue, green, red. Output are tags above a
threshold: characters first, then the likeliest. Nothing here needs torch; taggers need onnxruntime.
"""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import numpy as np
from cyclopts import Parameter
from PIL import Image

from lora_trainer.common.errors import (
    BROKEN_PACKAGE,
    InputError,
    MachineError,
    RequestError,
    did_you_mean,
    package_problem,
)
from lora_trainer.common.files import user_path
from lora_trainer.common.wording import is_hub_id
from lora_trainer.families.files.hub_files import cached_snapshot, fetch

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
class CaptioningModel:
    """A captioning model.

    `catalogue.toml` states the optional fields of the released models. Of another model only `writes` is known, once
    the model is on this machine.
    """

    source: str
    """Where the model is from."""
    folder: Path | None = None
    """Its folder, if it is on this machine."""
    name: str | None = None
    """Short name of a released model."""
    title: str | None = None
    """What its publisher calls it, with its size."""
    writes: Writes | None = None
    good_for: str | None = None
    licence: str | None = None
    download_gb: float | None = None
    memory_gib: float | None = None
    """Computed, not measured."""
    memory_8_bit_gib: float | None = None
    """The same with the blocks of its language model in 8 bits."""
    offered_for: Literal["sentences", "tags", "exact"] | None = None
    """What it is the first choice for."""
    offered_on: Literal["gpu", "cpu", "any"] = "any"
    """The machines for which it is: with a GPU, without one."""
    also: Sequence[str] = ()
    """Short names of earlier releases of this program."""
    system: str | None = None
    """Sentence that it was trained to read before the request."""
    prompt: str | None = None
    """Request that it was trained with, in place of the one for all."""
    max_tokens: int | None = None
    """Longest caption in tokens, in place of the length for all."""


_CATALOGUE = tomllib.loads(files(__package__).joinpath("catalogue.toml").read_text("utf-8"))
KNOWN = {name: CaptioningModel(name=name, **row) for name, row in _CATALOGUE.items()}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CaptionRequest:
    """The options of `lora-train caption` that say which captions are written; None where the kind of model decides.

    :param overwrite: replace existing captions too; --undo restores the old ones
    :param output: folder for the captions [default: beside the images]
    :param prefix: words before each caption, as typed
    :param suffix: words after each caption, as typed; include a comma if you want one
    :param trigger: word to put first in captions that do not contain it
    :param prompt: instruction for models that take one, added to the request of --json-for
        [default: describe in two sentences; joycaption: a descriptive caption in a formal tone]
    :param max_tokens: longest caption, in tokens [default: 150; joycaption 300; with --json-for 3072]
    :param json_for: family whose captions are JSON, such as ideogram4; an answer that is not in its form is not written
    :param threshold: for taggers: lowest probability of a tag [default: 0.35]
    :param character_threshold: for taggers: lowest probability of a character's name [default: 0.85]
    :param device: device that runs the model
    """

    model: Annotated[
        str,
        Parameter(help=f"{', '.join(KNOWN)}; or the folder or Hub id of a model of the same kinds"),
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
    json_for: str | None = None
    threshold: float | None = None
    character_threshold: float | None = None
    device: Literal["auto", "cuda", "cpu"] = "auto"

    def refuse_unfit(self, writes: Writes) -> None:
        """Raise RequestError for options that this kind of model has no use for, and for bad numbers."""
        of_text = {
            "--prompt": self.prompt,
            "--max-tokens": self.max_tokens,
            "--json-for": self.json_for,
        }
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
        for name, words in (("--prefix", self.prefix), ("--suffix", self.suffix)):
            if self.json_for is not None and words:
                raise RequestError(
                    f"{name} would stand outside of the JSON object of a caption for {self.json_for}",
                    fix=f"leave {name} out; --trigger is put inside",
                )
        for name, share in of_tags.items():
            if share is not None and not 0 < share <= 1:
                raise RequestError(
                    f"{name} {share:g} is not a probability", fix="give 0.05 to 0.95"
                )
        if self.max_tokens is not None and not 1 <= self.max_tokens <= 4096:
            raise RequestError(
                f"--max-tokens {self.max_tokens}", fix="give a number from 1 to 4096"
            )

    def decisive(self, source: str) -> dict[str, object]:
        """Return the values that decide the text of captions: a call with others is another call."""
        elsewhere = ("images", "output", "device")
        values = {name: value for name, value in vars(self).items() if name not in elsewhere}
        return {**values, "model": source}


def known_as(name_or_folder: str) -> CaptioningModel:
    """Return what the catalogue says of a model; of one that it does not name only the source."""
    return next(
        (
            model
            for model in KNOWN.values()
            if name_or_folder in (model.name, model.source, *model.also)
        ),
        CaptioningModel(source=name_or_folder),
    )


def find(name_or_folder: str) -> CaptioningModel:
    """Return the model that a short name, a folder or a Hub id means, without downloading.

    Raises RequestError for a name that means nothing, InputError for a folder without a model.
    """
    model = known_as(name_or_folder)
    path = Path(user_path(model.source))
    if model.name is None and path.is_dir():
        _refuse_incomplete(path)
        return replace(model, folder=path, writes=what_it_writes(path))
    if model.name is None and not is_hub_id(model.source):
        raise RequestError(
            f"{name_or_folder!r} is not a captioning model.{did_you_mean(name_or_folder, KNOWN)}",
            fix=f"give {', '.join(KNOWN)}, a folder, or a Hub id (owner/name)",
        )
    cached = cached_snapshot(model.source, revision=None)
    if cached is None or missing_files(cached):
        return model
    return replace(model, folder=cached, writes=what_it_writes(cached))


def download(model: CaptioningModel) -> Path:
    """Download a model's files; return their folder.

    Raises MachineError when the Hub cannot be reached, naming the files that are needed.
    """
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


# ---- what they say


# A model's caption of one image, and whether it was cut at the limit of tokens.
ModelCaption = tuple[str, bool]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """An image to be captioned, and the reference images that it was made from, the first one first."""

    image: Image.Image
    references: tuple[Image.Image, ...] = ()


class OutOfRoom(Exception):
    """The device has no memory for so many images at a time."""


class UnusableModel(InputError):
    """A captioning model whose files do not fit the program that runs them."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"captioning model {name} {what}",
            fix="take another one; `lora-train caption --help` names those known",
        )


def no_room(name: str, what: str) -> MachineError:
    """Return the error of a model that is too large for the device."""
    return MachineError(
        f"captioning model {name} {what}",
        fix="end other programs that use it, take a smaller --model, or use --device cpu",
    )


# Categories that are written; 9, the rating, and the others are left out.
GENERAL, CHARACTER = "0", "4"
THRESHOLD = 0.35
CHARACTER_THRESHOLD = 0.85
GPU_BATCH = 8
_CUDA = "CUDAExecutionProvider"


@dataclass(frozen=True, kw_only=True)
class Tag:
    """A tag as it is written, where its probability stands, and the probability it needs."""

    text: str
    column: int
    is_character: bool
    threshold: float


@dataclass(frozen=True, kw_only=True)
class Tagger:
    """A loaded tagger."""

    name: str
    session: Any
    tags: tuple[Tag, ...]
    side_px: int
    fixed_batch: int | None
    """The number of images that its file requires, if it requires one."""

    @property
    def batch_size(self) -> int:
        """Images at a time: a processor gains nothing from several."""
        return self.fixed_batch or (GPU_BATCH if self.device == "cuda" else 1)

    @property
    def precision(self) -> str:
        return ""

    @property
    def device(self) -> str:
        return "cuda" if _CUDA in self.session.get_providers() else "cpu"

    def compares(self, references: int) -> bool:
        """Return whether it sees an image together with so many reference images: only its own tags are known."""
        return False

    def describe(self, pictures: Sequence[Shown]) -> list[ModelCaption]:
        """Return the tags of each image, comma-separated; raises OutOfRoom without memory."""
        squares = np.stack([_square(picture.image, self.side_px) for picture in pictures])
        filled = self.fixed_batch or len(squares)
        squares = np.concatenate([squares, squares[:1].repeat(filled - len(squares), axis=0)])
        try:
            feed = {self.session.get_inputs()[0].name: squares}
            probabilities = self.session.run(None, feed)[0]
        except Exception as error:  # noqa: BLE001 - onnxruntime's errors have no class of their own
            if "allocate memory" in str(error):
                raise OutOfRoom from None
            problem = f"has no {TAGGER_FILES[0]} that can be run ({one_line(error)})"
            raise UnusableModel(self.name, problem) from None
        if probabilities.shape[0] != filled or any(
            tag.column >= probabilities.shape[1] for tag in self.tags
        ):
            raise UnusableModel(self.name, f"answers {probabilities.shape}, not what its tags need")
        captions = []
        for row in probabilities[: len(pictures)]:
            likely = sorted(
                (not tag.is_character, -row[tag.column], tag.column, tag.text)
                for tag in self.tags
                if row[tag.column] >= tag.threshold
            )
            captions.append((", ".join(text for *_, text in likely), False))
        return captions


def load_tagger(folder: Path, request: CaptionRequest) -> Tagger:
    """Load the tagger in `folder`; raises InputError for unusable files, MachineError without
    onnxruntime or the device asked for."""
    name = request.model
    tags = _read_tags(folder / TAGGER_FILES[1], request)
    session = _session(folder / TAGGER_FILES[0], name=name, device=request.device)
    shape = session.get_inputs()[0].shape
    if len(shape) != 4 or not isinstance(shape[1], int) or shape[1:] != [shape[1], shape[1], 3]:
        raise UnusableModel(name, f"takes {shape}, not square images with three colours last")
    fixed = shape[0] if isinstance(shape[0], int) and shape[0] > 0 else None
    return Tagger(name=name, session=session, tags=tags, side_px=shape[1], fixed_batch=fixed)


def _read_tags(file: Path, request: CaptionRequest) -> tuple[Tag, ...]:
    """Return the general and character tags of a `selected_tags.csv`; raises InputError."""
    thresholds = {
        GENERAL: request.threshold or THRESHOLD,
        CHARACTER: request.character_threshold or CHARACTER_THRESHOLD,
    }
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            rows = [(row["name"], row["category"]) for row in csv.DictReader(stream)]
    except (OSError, ValueError, KeyError, csv.Error) as error:
        problem = f"has no {file.name} that can be read ({error})"
        raise UnusableModel(request.model, problem) from None
    # With spaces for underscores, but for faces drawn with signs: `^_^` has no two letters side by side.
    return tuple(
        Tag(
            text=tag.replace("_", " ") if re.search(r"[^\W_]{2}", tag) else tag,
            column=column,
            is_character=category == CHARACTER,
            threshold=thresholds[category],
        )
        for column, (tag, category) in enumerate(rows)
        if category in thresholds
    )


def _square(picture: Image.Image, side_px: int) -> Any:
    longer_px = max(picture.size)
    padded = Image.new("RGB", (longer_px, longer_px), "white")
    width_px, height_px = picture.size
    padded.paste(picture, ((longer_px - width_px) // 2, (longer_px - height_px) // 2))
    if longer_px != side_px:
        padded = padded.resize((side_px, side_px), Image.Resampling.BICUBIC)
    return np.asarray(padded, dtype=np.float32)[..., ::-1]


def _session(file: Path, *, name: str, device: str) -> Any:
    try:
        import onnxruntime
    except BROKEN_PACKAGE as error:
        raise MachineError(
            f"taggers need onnxruntime, {package_problem(error)}",
            fix='pip install "lora-train[caption]"',
        ) from None
    with_card = device != "cpu" and _CUDA in onnxruntime.get_available_providers()
    if device == "cuda" and not with_card:
        raise MachineError(
            "--device cuda, but this onnxruntime is built for processors only",
            fix="pip install onnxruntime-gpu in its place, or use --device cpu",
        )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors: the others are advice for who wrote the model
    try:
        return onnxruntime.InferenceSession(
            str(file),
            sess_options=options,
            providers=[*([_CUDA] if with_card else []), "CPUExecutionProvider"],
        )
    except Exception as error:  # noqa: BLE001 - as above
        problem = f"has no {TAGGER_FILES[0]} that can be run ({one_line(error)})"
        raise UnusableModel(name, problem) from None


def one_line(error: Exception) -> str:
    """Return the class and the beginning of the message of a library's error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
