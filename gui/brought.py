"""LoRA files that somebody brought from elsewhere: `<runs>/.loras/NAME.safetensors`, beside the runs.

Inputs: a file that a browser sent, under any name. Outputs: a copy of it in the workspace, once it is known to be a
whole LoRA, or why it is refused. Its name as a place in the library is that of the folder, which no run can have.
"""

from __future__ import annotations

import filecmp
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.common.errors import InputError, MachineError
from lora_trainer.common.files import disk_error, locked
from lora_trainer.families.files.weight_files import PICKLES
from lora_trainer.lora_file.embedding import holds_vectors
from lora_trainer.lora_file.key_formats import other_kind
from lora_trainer.lora_file.read import read_contents

from .upload_names import numbered, safe_name
from .uploads import copy_whole
from .workplace import Workplace

FOLDER = ".loras"
SUFFIX = ".safetensors"
_LOCK_WITHIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A file as it lies in the workspace; `was_there`: the same one had been brought before."""

    path: Path
    was_there: bool


def folder_of(work: Workplace) -> Path:
    """Return where they lie; nothing may be there yet."""
    return work.runs / FOLDER


def take_in(work: Workplace, sent: Path, name: str) -> Taken:
    """Keep a file that was sent, under the name its owner has for it; raises InputError, MachineError.

    What is refused stays where it waits.
    """
    plain = checked_name(name)
    _refuse_other_than_lora(sent, plain)
    folder = folder_of(work)
    busy = MachineError("another page adds a LoRA", fix="try again in a moment")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(work.own / "loras.lock", within_s=_LOCK_WITHIN_S, busy=busy):
            for other in sorted(folder.glob(f"*{SUFFIX}")):
                if not other.is_symlink() and filecmp.cmp(sent, other, shallow=False):
                    return Taken(path=other, was_there=True)
            stems = numbered(Path(plain).stem)
            target = next(
                path for stem in stems if not (path := folder / f"{stem}{SUFFIX}").exists()
            )
            copy_whole(sent, target)
            return Taken(path=target, was_there=False)
    except OSError as error:
        raise disk_error(folder, error) from error


def checked_name(name: str) -> str:
    """Return the name that a file gets; raises InputError for a kind that is not read."""
    plain = safe_name(name)
    ending = Path(plain).suffix.lower()
    if ending in PICKLES:
        raise InputError(
            f"{plain} is a pickle, which can run any program when it is opened",
            fix="get the LoRA as a .safetensors file",
        )
    if ending != SUFFIX:
        raise InputError(
            f"{plain or 'the file'} is not a {SUFFIX} file", fix="choose the file of a LoRA"
        )
    return f"{Path(plain).stem}{SUFFIX}"


def _refuse_other_than_lora(sent: Path, name: str) -> None:
    """Raise InputError about a file, by the name that its owner has for it, unless it is a whole LoRA."""
    try:
        contents = read_contents(sent)
    except InputError as error:
        raise InputError(error.found.replace(str(sent), name), fix=error.fix) from None
    keys = contents.opened.entries
    if holds_vectors(keys):
        raise InputError(
            f"{name} is an embedding, the vectors of a new word, and not a LoRA",
            fix="use it in the program that you draw with",
        )
    if not contents.whole:
        fix = "choose the file of a LoRA"
        if kind := other_kind(contents.unknown):
            raise InputError(f"{name} is one of the {kind}, which are not read here", fix=fix)
        if keys and len(contents.unknown) == len(keys):
            raise InputError(
                f"{name} is not a LoRA but, by its tensors, a model or a part of one", fix=fix
            )
        raise InputError(f"{name} is not a LoRA", fix=fix)
