"""The picture that other programs show beside an adapter: `NAME.preview.png`.

Inputs: the last samples of the run and what was drawn to try the file. Outputs: these as buttons, and
the chosen one as a file beside the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import write_atomic
from lora_trainer.reporting.charts import Html, tag
from lora_trainer.reporting.sample_files import last_samples

from . import tries
from .library import small_url
from .lora_files import PREVIEW_SUFFIX, LoraFile
from .sharing import png_bytes
from .workplace import Workplace

_MAX_CHOICES = 24


def choices(work: Workplace, file: LoraFile) -> dict[str, Path]:
    """Return the pictures that can become the preview, by the name a page knows them by."""
    return dict(list(_pictures(work, file))[:_MAX_CHOICES])


def chosen(work: Workplace, file: LoraFile, name: str) -> Path:
    """Return one of the choices; raises RequestError for any other name."""
    found = choices(work, file)
    if name not in found:
        raise RequestError("this picture is not there any more", fix="reload the page")
    return found[name]


def write(file: LoraFile, picture: Path) -> Path:
    """Make a picture the preview; raises InputError for what is none, MachineError."""
    target = file.path.with_name(f"{file.path.stem}{PREVIEW_SUFFIX}")
    write_atomic(target, png_bytes(picture))
    return target


def choices_html(work: Workplace, file: LoraFile) -> Html:
    """Return the choices as buttons with pictures."""
    found = choices(work, file)
    if not found:
        return tag("p", "There are no samples of it yet; draw some under Try.", class_="quiet")
    buttons = (
        tag(
            "button",
            tag("img", src=small_url(image, size_px=192), alt="", loading="lazy"),
            type="button",
            data_choose=name,
            aria_label=f"Use as preview: {name}",
        )
        for name, image in found.items()
    )
    return tag("div", *buttons, class_="choices")


def _pictures(work: Workplace, file: LoraFile) -> Iterator[tuple[str, Path]]:
    for image in last_samples(file.path.parent / "samples"):
        yield f"sample {image.parent.name}/{image.name}", image
    for job in tries.of_file(work, file):
        for image in tries.images(work, job).values():
            yield f"try {image.parent.name}/{image.name}", image
