"""What is told of a LoRA: the texts in its header, and the picture beside it.

Inputs: a file of the library, the samples of its training and what was drawn to try it. Outputs: the texts by their
names, the pictures that can become its preview, and the preview itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from PIL import Image

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import write_atomic
from lora_trainer.reporting.sample_files import SAMPLES, own_samples
from lora_trainer.tools.describe import describe

from ..lora_files import PREVIEW_SUFFIX, LoraFile, step_of
from ..sharing import png_bytes
from ..workplace import Workplace
from . import try_prompts
from .preview import preview_of, small_url

_MAX_PREVIEWS = 24
_CHOICE_PX = 192


def save_texts(file: LoraFile, texts: Mapping[str, str]) -> Sequence[str]:
    """Write the texts into the header of a file; return the names of those that have changed."""
    changed = describe(file.path, dict(texts), output=file.path, force=True)
    return [key.partition(".")[2].replace("_", " ") for key in changed]


def preview_choices(work: Workplace, file: LoraFile) -> dict[str, Path]:
    """Return the pictures that can become the preview, by the name a page knows them by."""
    return dict(list(_drawn(work, file))[:_MAX_PREVIEWS])


def chosen_preview(work: Workplace, file: LoraFile, name: str) -> Path:
    """Return one of the choices; raises RequestError for any other name."""
    found = preview_choices(work, file)
    if name not in found:
        raise RequestError("this picture is not there any more", fix="reload the page")
    return found[name]


def write_preview(file: LoraFile, picture: Path) -> Path:
    """Make a picture the preview; raises InputError for what is none, MachineError."""
    target = file.path.with_name(f"{file.path.stem}{PREVIEW_SUFFIX}")
    write_atomic(target, png_bytes(picture))
    return target


def shown_choices(work: Workplace, file: LoraFile) -> Sequence[Mapping[str, Any]]:
    """Return what choices.html shows: each picture by its name, a small copy, and whether it is the one shown now.

    One that was brought stands before them, without a name.
    """
    now = preview_of(file)
    marked = None if now is None else _pixels(now, now.stat().st_mtime_ns)
    found = [
        {
            "name": name,
            "url": small_url(image, size_px=_CHOICE_PX),
            "chosen": marked is not None and _pixels(image, image.stat().st_mtime_ns) == marked,
        }
        for name, image in preview_choices(work, file).items()
    ]
    if now is not None and not any(each["chosen"] for each in found):
        own = {"name": "", "url": small_url(now, size_px=_CHOICE_PX), "chosen": True}
        return [own, *found]
    return found


@lru_cache(maxsize=_MAX_PREVIEWS * 16)
def _pixels(image: Path, changed_ns: int) -> str | None:
    """Return what tells pictures apart whose files differ: a preview is written anew; None for what cannot be read."""
    try:
        with Image.open(image) as opened:
            picture = opened.convert("RGB")
            return sha256(f"{picture.size}".encode() + picture.tobytes()).hexdigest()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def _drawn(work: Workplace, file: LoraFile) -> Iterator[tuple[str, Path]]:
    for image in own_samples(file.path.parent / SAMPLES, up_to=step_of(file)):
        yield f"sample {image.parent.name}/{image.name}", image
    for job in try_prompts.of_file(work, file):
        for image in try_prompts.images(work, job).values():
            yield f"try {image.parent.name}/{image.name}", image
