"""A LoRA made ready for others: file, preview and A1111's card in a folder, or a repository of the Hub.

Inputs: a file of the library, samples drawn with it and what its user says about it. Outputs: what others will miss
in it, its preview, NAME.safetensors, NAME.preview.png, NAME.json in a folder, never in place of something else, and
the job that publishes. The folder of another program's LoRAs is chosen once and remembered.
"""

from __future__ import annotations

import filecmp
import io
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.event_kinds import Severity
from lora_trainer.common.files import (
    TEMPORARY_PREFIX,
    disk_error,
    json_bytes,
    read_json_object,
    write_atomic,
)
from lora_trainer.common.wording import public_text
from lora_trainer.config.inputs import MINIATURES
from lora_trainer.families.files.recognise import a1111_version
from lora_trainer.lora_file.inspect import Inspection, inspect_file
from lora_trainer.lora_file.metadata import steps_trained
from lora_trainer.lora_file.tensor_file import whole_or_absent
from lora_trainer.reporting.sample_files import SAMPLES, own_samples
from lora_trainer.run.hub_upload import WRITE_REFUSED, shared_samples

from . import command_lines, jobs
from .brought import SUFFIX
from .library.preview import preview_of
from .lora_files import PREVIEW_SUFFIX, LoraFile, unused
from .workplace import Workplace

MAX_PREVIEW_PX = 1536
PUBLISH = "publish"
# Where ComfyUI, Forge and A1111 look for LoRAs, below their own folder.
_BELOW = ("models/loras", "models/Lora", "ComfyUI/models/loras", "webui/models/Lora")
_LORA_FOLDERS = frozenset({"lora", "loras"})
_REMEMBERED = "program.json"
_MAX_PIXELS = 64_000_000


@dataclass(frozen=True, kw_only=True)
class Remark:
    """Something that the users of the file will stumble over or miss."""

    severity: Severity
    what: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and whether all of it was there already."""

    files: tuple[Path, ...]
    was_there: bool


def remarks(inspection: Inspection, *, preview: Path | None) -> tuple[Remark, ...]:
    """Return what to look at before the file is given away, the gravest first."""
    order = ("error", "warning", "note")
    found = [*_of_file(inspection), *_of_texts(inspection, preview=preview)]
    return tuple(sorted(found, key=lambda remark: order.index(remark.severity)))


def _of_file(inspection: Inspection) -> Iterator[Remark]:
    for problem in inspection.problems:
        yield Remark(severity=problem.severity, what=problem.what, advice=problem.advice)
    if inspection.metadata.get("ss_sd_model_name") in MINIATURES:
        yield Remark(
            severity="warning",
            what="it is a try-out on the miniature, which A1111, Forge and ComfyUI do not have",
            advice="train the same images on another base for them",
        )
    if a1111_version(inspection.family) and inspection.format == "diffusers":
        yield Remark(
            severity="warning",
            what="its tensors have diffusers' names, which A1111 and Forge do not read for this model",
            advice="convert it to kohya's names under Tools, and export that file",
        )


def _of_texts(inspection: Inspection, *, preview: Path | None) -> Iterator[Remark]:
    told = inspection.metadata
    for key, what, advice in (
        ("modelspec.title", "it has no title", "give it one under Describe"),
        ("modelspec.trigger_phrase", "it names no trigger words", "leave it so if it needs none"),
        ("modelspec.description", "it has no description", "say what it is for, under Describe"),
        (
            "modelspec.license",
            "it names no license",
            "say under Describe what others may do with it",
        ),
    ):
        if not told.get(key):
            yield Remark(severity="note", what=what, advice=advice)
    if "ss_base_model_version" not in told:
        yield Remark(
            severity="warning",
            what="it does not say which base model it is for",
            advice="A1111 takes it for Stable Diffusion 1; choose the version there by hand",
        )
    if preview is None:
        yield Remark(severity="note", what="it has no preview", advice="choose one under Describe")


def card(inspection: Inspection, *, weight: float, notes: str) -> dict[str, Any]:
    """Return what A1111 and Forge show of a LoRA and put into the prompt; raises RequestError."""
    if not 0 <= weight <= 2:
        raise RequestError(f"{weight:g} is not a weight of a card", fix="use a number from 0 to 2")
    told = inspection.metadata
    return {
        "description": told.get("modelspec.description", ""),
        "sd version": a1111_version(inspection.family) or "Unknown",
        "activation text": told.get("modelspec.trigger_phrase", ""),
        "preferred weight": weight,
        "notes": public_text(notes.strip()),
    }


def export(file: LoraFile, folder: Path, *, preview: Path | None, card: dict[str, Any]) -> Exported:
    """Write file, preview and card into a folder, under a name that replaces nothing.

    Raises InputError for a preview that is not a picture, MachineError when the disk refuses.
    """
    small = {".json": json_bytes(card)}
    if preview is not None:
        small[PREVIEW_SUFFIX] = png_bytes(preview)
    stem = _free_stem(_made(folder), file.path, small)
    target = folder / f"{stem}{SUFFIX}"
    others = {folder / f"{stem}{suffix}": data for suffix, data in small.items()}
    files = (target, *others)
    was_there = all(path.exists() for path in files)
    if not target.exists():
        _copy(file.path, target)
    for path, data in others.items():
        if not path.exists():
            write_atomic(path, data)
    return Exported(files=files, was_there=was_there)


def export_checked(
    file: LoraFile, folder: Path, *, weight: float = 1.0, notes: str = "", zipped: bool = False
) -> tuple[Exported, tuple[Remark, ...]]:
    """Export a file with its preview and card; return what was written, and what others will miss.

    `zipped`: as one zip, see `zip_for_civitai`. Raises InputError for a file with errors, as nobody could use what is
    written, and as `export`.
    """
    inspection, preview = inspect_file(file.path), preview_of(file)
    found = remarks(inspection, preview=preview)
    if found and found[0].severity == "error":
        raise InputError(f"{file.path.name}: {found[0].what}", fix=found[0].advice)
    made_card = card(inspection, weight=weight, notes=notes)
    if not zipped:
        return export(file, folder, preview=preview, card=made_card), found
    with TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=_made(folder)) as inside:
        parts = export(file, Path(inside), preview=preview, card=made_card)
        return zip_for_civitai(file, inspection, parts, made_card, folder), found


def zip_for_civitai(
    file: LoraFile, inspection: Inspection, parts: Exported, card: Mapping[str, Any], folder: Path
) -> Exported:
    """Write a zip with an exported LoRA, its last samples and what the form of Civitai asks, under a name that is free.

    Civitai reads the prompt of a sample from its file, as A1111 writes it. Raises MachineError when the disk refuses.
    """
    drawn = own_samples(file.path.parent / SAMPLES, up_to=steps_trained(inspection.metadata))
    samples = shared_samples(drawn, inspection.metadata)
    target = unused(folder / f"{file.path.stem}.zip")
    # Nothing in it gets smaller by packing.
    with (
        whole_or_absent(target, force=False) as written,
        zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as archive,
    ):
        for path in parts.files:
            archive.write(path, path.name)
        for name, image in samples.items():
            archive.writestr(name, image if isinstance(image, bytes) else image.read_bytes())
        archive.writestr("ABOUT.txt", _about(inspection, card))
    return Exported(files=(target,), was_there=False)


def _about(inspection: Inspection, card: Mapping[str, Any]) -> str:
    """Return what a page for a LoRA asks, a line each; what nobody has said is left out."""
    told = inspection.metadata
    lines = {
        "Name": told.get("modelspec.title", ""),
        "Type": "LoRA",
        "Base model": told.get("ss_sd_model_name", "") or inspection.family,
        "Trigger words": card["activation text"],
        "Strength": f"{card['preferred weight']:g}",
        "License": told.get("modelspec.license", ""),
        "Steps": told.get("ss_steps", ""),
        "Description": card["description"],
        "Notes": card["notes"],
    }
    return "".join(f"{name}: {public_text(text)}\n" for name, text in lines.items() if text)


def program_folder(work: Workplace, text: str) -> Path:
    """Return the folder of LoRAs of another program that was typed, or of which the program was.

    Raises InputError for a folder that is not one, so that nothing is strewn over a disk.
    """
    folder = work.path(text, what="your program's folder of LoRAs")
    if not folder.is_dir():
        raise InputError(
            f"the folder {folder} does not exist", fix="type the path of an existing one"
        )
    below = next((folder / part for part in _BELOW if (folder / part).is_dir()), None)
    if below is not None:
        return below
    if folder.name.casefold() in _LORA_FOLDERS or any(folder.glob(f"*{SUFFIX}")):
        return folder
    raise InputError(
        f"{folder} is not a folder of LoRAs: it has another name and holds no {SUFFIX} file",
        fix="type ComfyUI's models/loras, Forge's models/Lora, or the program's own folder",
    )


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program that was copied to last: its folder of LoRAs and ComfyUI's address, empty before the first time."""

    folder: str = ""
    address: str = ""


def remembered(work: Workplace) -> Program:
    """Return the program that was copied to last."""
    try:
        told = read_json_object(work.own / _REMEMBERED)
    except RequestError:  # none yet, or damaged
        return Program()
    return Program(folder=str(told.get("folder", "")), address=str(told.get("address", "")))


def copy_to_program(
    work: Workplace, file: LoraFile, typed: str, *, address: str | None = None
) -> Exported:
    """Export a file into the folder of another program, and remember it with its address.

    Without an address the one that is remembered stays. Raises as `program_folder` and `export_checked`.
    """
    folder = program_folder(work, typed)
    done, _ = export_checked(file, folder)
    program = Program(
        folder=str(folder), address=remembered(work).address if address is None else address
    )
    work.own.mkdir(parents=True, exist_ok=True)
    write_atomic(work.own / _REMEMBERED, json_bytes(asdict(program)))
    return done


def publish(work: Workplace, file: LoraFile, *, repository: str, private: bool) -> jobs.Job:
    """Start `lora-train publish` for a file; raises RequestError while it runs already."""
    if not repository.strip():
        raise RequestError("no name is typed", fix="type a name for the page on the Hub")
    if any(job.state == "running" for job in published(work, file)):
        raise RequestError("this file is being published already", fix="wait for it")
    argv = [*command_lines.TRAINER, "publish", str(file.path), f"--repository={repository.strip()}"]
    argv += [] if private else ["--public"]
    return jobs.start(work, kind=PUBLISH, argv=argv, about={"file": file.ref})


def may_only_read(job: jobs.Job) -> bool:
    """Return whether the Hub refused a job that published, because its token may not write."""
    return WRITE_REFUSED in job.error()


def published(work: Workplace, file: LoraFile) -> list[jobs.Job]:
    """Return the jobs that published a file, the newest first."""
    return [job for job in jobs.find(work, kind=PUBLISH) if file.was(job.about.get("file"))]


def _made(folder: Path) -> Path:
    """Make a folder where there is none, and return it; raises MachineError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(folder, error) from error
    return folder


def _free_stem(folder: Path, source: Path, small: dict[str, bytes]) -> str:
    """Return the first of NAME, NAME-002, ... under which nothing else is."""
    number = 1
    while True:
        stem = source.stem if number == 1 else f"{source.stem}-{number:03d}"
        target = folder / f"{stem}{SUFFIX}"
        same = not target.exists() or filecmp.cmp(source, target, shallow=False)
        for suffix, data in small.items():
            path = folder / f"{stem}{suffix}"
            same = same and (not path.exists() or path.read_bytes() == data)
        if same:
            return stem
        number += 1


def _copy(source: Path, target: Path) -> None:
    with whole_or_absent(target, force=False) as written, source.open("rb") as read:
        shutil.copyfileobj(read, written)


def png_bytes(image: Path) -> bytes:
    """Return a picture as PNG without what else its file holds; raises InputError for what is none."""
    try:
        with Image.open(image) as opened:
            if opened.width * opened.height > _MAX_PIXELS:
                raise InputError(f"{image.name} is very large", fix="use a smaller picture")
            picture = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(
            f"{image.name} is not a picture: {error}", fix="use a PNG, JPEG or WebP file"
        ) from None
    picture.thumbnail((MAX_PREVIEW_PX, MAX_PREVIEW_PX))
    data = io.BytesIO()
    picture.save(data, format="PNG")
    return data.getvalue()
