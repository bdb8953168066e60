"""Files with the vectors of a new word, as A1111, Forge, ComfyUI and diffusers read textual inversions.

Input is one [tokens, width] array for each text encoder, by its key in such files; output
`embeddings/NAME_emb.safetensors` beside the adapter `NAME.safetensors`, in float32, read back before
anything relies on it. Vectors inside adapter files (`bundle_emb.` keys, as OneTrainer writes them)
are recognised but not written, because diffusers refuses such a file. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lora_trainer.common.caption_markup import NewWord
from lora_trainer.common.errors import InputError, TrainingStopped
from lora_trainer.common.files import disk_error
from lora_trainer.families.base.layout import Header, TensorInfo
from lora_trainer.lora_file.metadata import header_settings
from lora_trainer.lora_file.tensor_file import numbers, open_checked, ordered, refuse, write_tensors

FOLDER = "embeddings"
# Keys of the vectors: of the only text encoder, or of each of two (Stable Diffusion XL).
KEYS = ("emb_params", "clip_l", "clip_g")
BUNDLED = "bundle_emb."
# Header entry: the word in captions for which the vectors were trained.
WORD = "lora_train.word"

Vectors = Mapping[str, NDArray[np.float32]]


def embedding_path(adapter: Path) -> Path:
    """Return where the vectors belong that were trained with the adapter in a file."""
    return adapter.parent / FOLDER / f"{adapter.stem}_emb.safetensors"


def write_embedding(path: Path, vectors: Vectors, *, metadata: Mapping[str, str]) -> None:
    """Write a file; raises TrainingStopped for NaN or infinity and MachineError when the disk refuses."""
    for key, values in vectors.items():
        if not np.isfinite(values).all():
            raise TrainingStopped(
                f"the new tokens of {key} hold values that are not finite numbers",
                fix="resume from an earlier state with a lower optimizer.new_tokens_learning_rate",
            )
    tensors = ordered(
        {key: TensorInfo(dtype="F32", shape=values.shape) for key, values in vectors.items()}
    )
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise disk_error(path.parent, error) from error
    bodies = (vectors[key].astype("<f4").tobytes() for key in tensors)
    write_tensors(path, tensors, bodies, metadata=metadata, force=True)


def read_embedding(path: Path) -> Vectors:
    """Read the vectors of a file in the names of `KEYS`; raises InputError for any other."""
    try:
        with open_checked(path) as opened:
            if not holds_vectors(opened.entries):
                refuse(path, "holds no embedding")
            return {key: numbers(opened.read(each), each) for key, each in opened.entries.items()}
    except InputError as error:
        fix = "give a file with emb_params or clip_l, or export it again"
        raise InputError(error.found, fix=fix) from None


def holds_vectors(entries: Header) -> bool:
    """Say whether the tensors of a file are the vectors of a new word and nothing else."""
    return bool(entries) and all(
        key in KEYS and len(each.shape) == 2 for key, each in entries.items()
    )


def trained_vectors(adapter: Path, word: NewWord) -> Vectors:
    """Return the vectors that were trained with an adapter, where they belong or beside it; raises InputError."""
    own_place = embedding_path(adapter)
    for file in (own_place, adapter.with_name(own_place.name)):
        if file.is_file():
            return read_embedding(file)
    raise InputError(
        f"{adapter.name} was trained with new tokens for {word.text!r}, but their file is missing",
        fix=f"put {own_place.name} beside it",
    )


def trained_words(metadata: Mapping[str, str]) -> NewWord | None:
    """Return the new tokens that an adapter file of ours was trained with, by its header."""
    settings = header_settings(metadata)
    tokens, text = settings.get("adapter.new_tokens"), settings.get("data.trigger")
    if not isinstance(tokens, int) or not isinstance(text, str) or tokens < 1:
        return None
    return NewWord(text=text.strip(), tokens=tokens)
