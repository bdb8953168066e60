"""Folders of images that another trainer's file names, as one dataset with `data.folders`.

A dataset here is one folder; what its subfolders have of their own stands in `data.folders`. Input: the
folders with their settings, as the file has them, Windows paths included. Output: the dataset's folder and
settings in the findings; folders that lie apart are named with what to do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.config import OWN_FOLDER, FolderSettings, build_config
from lora_trainer.dataset.listing import list_dataset
from lora_trainer.importing.foreign_settings import Findings
from lora_trainer.importing.rules import THERE, Foreign, carry

_WINDOWS = re.compile(r"^[A-Za-z]:|\\")
_IN_DATA = frozenset(FolderSettings.model_fields) - {"weight", "regularisation"}


@dataclass(kw_only=True)
class ImageFolder:
    """One folder of images: its path, the key that names it, its own settings as (value, key) by field."""

    path: PurePath
    key: str
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    regularisation: bool = False


def path_of(text: Any) -> PurePath:
    """Return a path as the system that wrote it reads it: `C:\\images` has two parts everywhere."""
    words = str(text)
    return PureWindowsPath(words) if _WINDOWS.search(words) else PurePosixPath(words)


def stem_of(text: Any) -> str:
    """Return a file's name without folders and extension."""
    return path_of(text).stem


def named_file(
    foreign: Foreign, option: str, parse: Callable[[str], Any], fits: Callable[[Any], bool]
) -> Any:
    """Return the contents of a further file that an option names, None where no fitting one is there."""
    file_name = foreign.on(option)
    if file_name is None:
        foreign.stay("is not given", option)
        return None
    path = path_of(file_name)
    for file in (foreign.beside / path, foreign.beside / path.name):
        try:
            content = parse(file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError):
            continue
        if fits(content):
            foreign.findings.stays(option, f"{file.name} is read too")
            return content
    why = "no such file here that fits: put it beside this one, or import it by itself"
    foreign.findings.lacks(option, str(file_name), why)
    return None


def set_folders(foreign: Foreign, folders: Sequence[ImageFolder]) -> None:
    """Set the dataset and what its subfolders have of their own; each folder counts once, as first named."""
    findings = foreign.findings
    different: dict[PurePath, ImageFolder] = {}
    for folder in folders:
        earlier = different.setdefault(folder.path, folder)
        if earlier is not folder:
            findings.stays(folder.key, "is named before; its settings there count")
    distinct_folders = list(different.values())
    trained = [folder for folder in distinct_folders if not folder.regularisation]
    others = [folder for folder in distinct_folders if folder.regularisation]
    if not trained:
        return
    root = _common_root([folder.path for folder in distinct_folders])
    if (
        root is None
        and len(others) == 1
        and _common_root([one.path for one in trained]) is not None
    ):
        (other,) = others
        findings.set("data.regularisation_dir", str(other.path), other.key)
        distinct_folders, root = trained, _common_root([folder.path for folder in trained])
    if root is None:
        _lie_apart(findings, distinct_folders)
    else:
        findings.dataset = str(root)
    for folder in distinct_folders:
        alone = len(distinct_folders) == 1
        name = OWN_FOLDER if folder.path == root else folder.path.name
        _set_own(foreign, folder, "data" if alone else f"data.folders.{name}")
        why = "is the DATASET of the command" if alone else f"lies in the DATASET as {name}"
        if folder.key not in findings.named:
            findings.stays(folder.key, why)


def _set_own(foreign: Foreign, folder: ImageFolder, target: str) -> None:
    findings = foreign.findings
    if folder.regularisation:
        findings.set(f"{target}.regularisation", True, folder.key)
    for name, (value, key) in folder.settings.items():
        names = () if key == THERE else (key,)
        if target != "data":
            findings.set(f"{target}.{name}", value, *names, note="" if names else THERE)
        elif name in _IN_DATA and not names:
            findings.set(f"data.{name}", value, note=THERE)
        elif name in _IN_DATA:
            carry(findings, f"data.{name}", key, value)
        else:
            findings.stays(key, "there is one folder, all of its images count alike")


def _common_root(paths: Sequence[PurePath]) -> PurePath | None:
    """Return the folder in which all lie, or that is one of them and holds the others."""
    if len(paths) == 1:
        return paths[0]
    for root in dict.fromkeys((paths[0].parent, *paths)):
        if all(path == root or path.parent == root for path in paths):
            return root
    return None


def _lie_apart(findings: Findings, folders: Sequence[ImageFolder]) -> None:
    places = ", ".join(dict.fromkeys(str(folder.path.parent) for folder in folders))
    names = [folder.path.name for folder in folders]
    twice = sorted({name for name in names if names.count(name) > 1})
    renamed = f", give {' and '.join(twice)} names of their own" if twice else ""
    for folder in folders:
        findings.without_equivalent[folder.key] = (
            f"{folder.path}: the folders lie apart ({places}), a dataset is one folder: make one, put links "
            f"to all of them into it{renamed}"
        )
        findings.named.add(folder.key)


def set_length(
    foreign: Foreign, *, epochs: float | None, source: str, whole_batches: bool = False
) -> None:
    """Set `train.steps` from epochs, for which the images are counted; nothing without epochs.

    Call it when the dataset, its repeats and the batch size are set. `whole_batches`: images that do not
    fill a batch are left out there, and accumulation goes on over the end of an epoch.
    """
    findings = foreign.findings
    if not epochs or epochs < 0:
        return
    samples = samples_per_epoch(foreign)
    if samples is None:
        why = "give train.steps = epochs x images with repeats / train.batch_size: the images are not there"
        findings.lacks(source, epochs, why)
        return
    images = findings.values.get("train.batch_size", 1)
    at_once = findings.values.get("memory.micro_batch", images)
    steps = math.ceil(samples / images) * epochs
    if whole_batches:
        steps = (samples // at_once) * epochs * at_once // images
    note = f"of {samples} images, repeats included"
    findings.set("train.steps", max(1, math.ceil(steps)), source, note=note)


def samples_per_epoch(foreign: Foreign) -> int | None:
    """Return how many samples an epoch has, None where the images are not on this machine."""
    findings = foreign.findings
    if findings.dataset is None:
        return None
    data_settings = {
        key: value for key, value in findings.values.items() if key.startswith("data.")
    }
    try:
        root = foreign.beside / Path(findings.dataset)
        listing = list_dataset(root, settings=build_config(data_settings).data)
    except (InputError, RequestError, OSError, ValueError):
        return None
    return sum(image.repeats for image in listing.pictures)


def set_resolutions(foreign: Foreign, sizes: Sequence[tuple[float, float]], source: str) -> None:
    """Set `data.resolution`, a side of a square, and further ones; in steps of 64 px, as buckets need them."""
    findings = foreign.findings
    exact = [math.sqrt(width * height) for width, height in sizes]
    sides = [min(4096, max(64, round(side / 64) * 64)) for side in exact]
    sides = list(dict.fromkeys(sides))
    findings.set("data.resolution", sides[0], source)
    rounded = [
        f"{width:g} x {height:g}" for width, height in sizes if width != height or width % 64
    ]
    rounded = list(dict.fromkeys(rounded))
    if rounded:
        how = f"the side of a square of that area in steps of 64 px is {', '.join(map(str, sides))}"
        findings.is_nearest(source, f"{', '.join(rounded)}: {how}")
    if len(sides) > 1:
        findings.set("data.more_resolutions", sides[1:], source)


def set_sizes(foreign: Foreign, sizes: Sequence[tuple[Any, str]]) -> bool:
    """Set the resolutions of all folders from (size, key) of each; return whether there is one."""
    exact: list[tuple[tuple[float, float], str]] = []
    for size, name in sizes:
        try:
            exact.append((read_size(size), name))
        except ValueError as error:
            foreign.findings.lacks(name, size, str(error))
    if exact:
        set_resolutions(foreign, [size for size, _ in exact], exact[0][1])
        for _, name in exact:
            if name not in foreign.findings.named:
                foreign.findings.stays(name, "all folders are trained at all of the resolutions")
    return bool(exact)


def read_size(value: Any) -> tuple[float, float]:
    """Return width and height of 512, "512", "512,768", "512x768" or [512, 768]; raises ValueError."""
    parts = re.split(r"[,x]", value) if isinstance(value, str) else value
    parts = list(parts) if isinstance(parts, list | tuple) else [parts]
    if not 1 <= len(parts) <= 2 or any(isinstance(part, bool) for part in parts):
        raise ValueError("is no size")
    try:
        sides = [float(part) for part in parts]
    except (TypeError, ValueError):
        raise ValueError("is no size") from None
    if not all(1 <= side <= 100_000 for side in sides):
        raise ValueError("is no size")
    return sides[0], sides[-1]
