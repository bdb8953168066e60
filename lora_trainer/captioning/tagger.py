"""What captioning models have in common, and tags by the WD taggers.

A captioning model, `Tagger` or `Describer`, describes upright RGB images, `batch_size` at a time, the same way for
the same image, on its `device`; it raises `OutOfRoom` when memory runs out. A WD tagger is an ONNX file
that gives every tag of `selected_tags.csv` a probability. Input are upright RGB images, padded to a square with
white and given as 0 to 255 in the order blue, green, red. Output are tags above a threshold: characters first,
then the likeliest. Needs onnxruntime and no torch.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lora_trainer.captioning.catalogue import TAGGER_FILES, CaptionRequest
from lora_trainer.common.errors import BROKEN_PACKAGE, InputError, MachineError, package_problem


@dataclass(frozen=True, kw_only=True)
class ModelCaption:
    """A model's caption of one image; `cut`: it ended at the limit of tokens."""

    text: str
    cut: bool = False


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
        fix="end what else uses it, take a smaller --model, or --device cpu",
    )


GENERAL, CHARACTER = "0", "4"
"""Categories that are written; 9, the rating, and the others are left out."""
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
    """A loaded tagger. `fixed_batch`: the number of images its file asks for, if it does."""

    name: str
    session: Any
    tags: tuple[Tag, ...]
    side_px: int
    fixed_batch: int | None

    @property
    def batch_size(self) -> int:
        """Images at a time: a processor gains nothing from several."""
        return self.fixed_batch or (GPU_BATCH if self.device == "cuda" else 1)

    @property
    def device(self) -> str:
        return "cuda" if _CUDA in self.session.get_providers() else "cpu"

    def describe(self, pictures: Sequence[Image.Image]) -> list[ModelCaption]:
        """Return the tags of each image, comma-separated; raises OutOfRoom without memory."""
        squares = np.stack([_square(picture, self.side_px) for picture in pictures])
        filled = self.fixed_batch or len(squares)
        squares = np.concatenate([squares, squares[:1].repeat(filled - len(squares), axis=0)])
        probabilities = self._probabilities(squares)
        if probabilities.shape[0] != filled or any(
            tag.column >= probabilities.shape[1] for tag in self.tags
        ):
            raise UnusableModel(self.name, f"answers {probabilities.shape}, not what its tags need")
        return [
            ModelCaption(text=", ".join(self._chosen(row)))
            for row in probabilities[: len(pictures)]
        ]

    def _probabilities(self, squares: Any) -> Any:
        try:
            return self.session.run(None, {self.session.get_inputs()[0].name: squares})[0]
        except Exception as error:  # noqa: BLE001 - onnxruntime's errors have no class of their own
            if "allocate memory" in str(error):
                raise OutOfRoom from None
            raise _not_to_be_run(self.name, error) from None

    def _chosen(self, probabilities: Any) -> list[str]:
        likely = [tag for tag in self.tags if probabilities[tag.column] >= tag.threshold]
        likely.sort(key=lambda tag: (not tag.is_character, -probabilities[tag.column], tag.column))
        return [tag.text for tag in likely]


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
    return tuple(
        Tag(
            text=_spelled(tag),
            column=column,
            is_character=category == CHARACTER,
            threshold=thresholds[category],
        )
        for column, (tag, category) in enumerate(rows)
        if category in thresholds
    )


def _spelled(tag: str) -> str:
    """Return a tag with spaces for underscores, but for the faces drawn with signs, such as `^_^`.

    A face has no two letters or digits side by side.
    """
    return tag.replace("_", " ") if re.search(r"[^\W_]{2}", tag) else tag


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
        raise _not_to_be_run(name, error) from None


def _not_to_be_run(name: str, error: Exception) -> UnusableModel:
    reason = " ".join(str(error).split())[:200]
    return UnusableModel(name, f"has no {TAGGER_FILES[0]} that can be run ({reason})")
