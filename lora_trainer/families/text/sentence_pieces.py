"""T5's vocabulary from SentencePiece's own file, for tokenizers that were published without tokenizer.json.

`spiece.model` is a protocol buffer (sentencepiece_model.proto of github.com/google/sentencepiece). transformers
would need two more packages to parse it, although `tokenizers` does the tokenizing either way. Torch-free.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base_files.base_folder import AGAIN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPIECE = "spiece.model"
# Numbers of fields in the messages ModelProto, SentencePiece, TrainerSpec and NormalizerSpec.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE = 1, 2
_MODEL_TYPE, _UNKNOWN = 3, 40
_CHARACTERS = 2
_UNIGRAM = 1
# Wire types: the lower three bits of a field's key say how its value is encoded.
_VARINT, _EIGHT_BYTES, _SIZED, _FOUR_BYTES = 0, 1, 2, 5


@dataclass(frozen=True, kw_only=True)
class SentencePieces:
    """A unigram vocabulary: (piece, log probability) by token id, the id of `unk`, and the compiled
    character normalisation (b"": none)."""

    pieces: tuple[tuple[str, float], ...]
    unknown: int
    characters: bytes


def read_pieces(file: Path) -> SentencePieces:
    """Read SentencePiece's file; raises InputError for any other file and for other kinds of model."""
    pieces, unknown, kind, characters = [], 0, _UNIGRAM, b""
    try:
        for field, value in _fields(file.read_bytes()):
            if field == _PIECE:
                piece = dict(_fields(value))
                # Protocol buffers may leave out a field with its default value: a missing score is 0.0.
                (score,) = struct.unpack("<f", piece.get(_SCORE, b"\0" * 4))
                pieces.append((piece[_TEXT].decode(), score))
            elif field == _TRAINER:
                trainer = dict(_fields(value))
                # The defaults of sentencepiece_model.proto: unk_id 0, model_type UNIGRAM.
                unknown = int(trainer.get(_UNKNOWN, 0))
                kind = int(trainer.get(_MODEL_TYPE, _UNIGRAM))
            elif field == _NORMALIZER:
                characters = dict(_fields(value)).get(_CHARACTERS, b"")
                if not isinstance(characters, bytes):
                    raise TypeError("the characters of its normalizer are a number")
    except (OSError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise InputError(f"{file} is no SentencePiece model ({error})", fix=AGAIN) from None
    if not pieces or kind != _UNIGRAM:
        raise InputError(
            f"{file} holds {len(pieces)} pieces of a model of kind {kind}, not a unigram vocabulary",
            fix="give a base model with the T5 tokenizer it was made with",
        )
    return SentencePieces(pieces=tuple(pieces), unknown=unknown, characters=characters)


def load_spiece_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder that has SPIECE and no tokenizer.json, without network access."""
    from tokenizers import Tokenizer, models, normalizers
    from transformers import AutoTokenizer

    pieces = read_pieces(folder / SPIECE)
    tokenizer = Tokenizer(models.Unigram(list(pieces.pieces), unk_id=pieces.unknown))
    if pieces.characters:
        tokenizer.normalizer = normalizers.Precompiled(pieces.characters)
    # AutoTokenizer adds special tokens and settings from the folder's JSON files to the written vocabulary.
    with tempfile.TemporaryDirectory(prefix="lora-train-") as whole:
        for settings in folder.glob("*.json"):
            shutil.copyfile(settings, Path(whole) / settings.name)
        tokenizer.save(str(Path(whole) / "tokenizer.json"))
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            whole, local_files_only=True
        )
    return loaded


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a message's fields: varints as int, all other values as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _SIZED:
            size, at = _varint(data, at)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"field {number} is of kind {kind}")
        if at + size > len(data):
            raise ValueError(f"it ends within field {number}")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a varint (groups of seven bits, the lowest first); return (value, offset behind it)."""
    value = shift = 0
    while True:
        # Past the end this is an IndexError, which `read_pieces` turns into its InputError.
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
