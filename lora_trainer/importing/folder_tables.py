"""Folders of images as trainers name them, and what depends on them: sizes, and the steps of epochs.

A dataset here is one folder; what its subfolders have of their own stands in `data.folders`. Folders that lie
apart are named with what to do. Input: tables of a foreign file, or of a further file that it names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.config import build_config
from lora_trainer.config.inputs import OWN_FOLDER, FolderSettings
from lora_trainer.dataset.listing import list_dataset
from lora_trainer.importing.foreign import THERE, Foreign, Sourced

_WINDOWS = re.compile(r"^[A-Za-z]:|\\")
_IN_DATA = frozenset(FolderSettings.model_fields) - {"weight", "regularisation"}


def path_of(text: Any) -> PurePath:
    """Return a path as the system that wrote it reads it: `C:\\images` has two parts everywhere."""
    words = str(text)
    return PureWindowsPath(words) if _WINDOWS.search(words) else PurePosixPath(words)


def tables_of(value: Any) -> list[Mapping[str, Any]]:
    """Return the tables of a list, none where it is not a list."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def table_under(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the table under a key, an empty one where there is none; raises RequestError for any other value."""
    table = data.get(key, {})
    if not isinstance(table, Mapping):
        raise RequestError(f"{key} is not a table", fix=f"write [{key}] above its keys")
    return table


def named_file(
    foreign: Foreign,
    option: str,
    parse: Callable[[str], Any],
    fits: Callable[[Any], object] = lambda _: True,
    read: Callable[[Foreign], None] | None = None,
) -> Any:
    """Return the contents of a further file that an option names, None where no fitting one is there.

    Those that `fits` returns flat, or under their names, count as values of the file from then on, and are the
    data of which `read` sets settings.
    """
    file_name = foreign.on(option)
    if file_name is None:
        return None
    path = path_of(file_name)
    beside = foreign.beside
    places = (beside / path, beside / path.name, beside.parent / path) if beside else ()
    for file in places:
        try:
            content = parse(file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError):
            continue
        if fitting := fits(content):
            foreign.values |= fitting if isinstance(fitting, dict) else {}
            foreign.stays(option, f"{file.name} is read too")
            if read is not None:
                foreign.data = content
                read(foreign)
            return content
    why = "no such file here that fits: put it beside this one, or import it by itself"
    if beside is None:
        why = "is another file, which is not read with this one: import it by itself"
    foreign.lacks(option, str(file_name), why)
    return None


# ---- one folder


class FolderTable(dict[str, Any]):
    """The table of one folder with what the tables around it say, later ones win.

    Each layer is a table and what stands before its keys in the file; `names` has the flat key of each value.
    `path` is that of the images, `key` names it, `settings` are the folder's own by field, `references` the folders
    of its reference images, each with its key.
    """

    path: PurePath
    key: str
    regularisation = False
    references: tuple[Sourced, ...] = ()

    def __init__(self, *layers: tuple[Mapping[str, Any], str]) -> None:
        self.names: dict[str, str] = {}
        self.settings: dict[str, Sourced] = {}
        for layer, prefix in layers:
            self.update(layer)
            self.names |= {key: f"{prefix}{key}" for key in layer}

    def name(self, key: str) -> str:
        """Return a key's flat key, `THERE` if it is missing."""
        return self.names.get(key, THERE)

    def sourced(self, key: str, default: Any = None) -> Sourced:
        """Return a value and its flat key; null is what a missing key is."""
        value = self.get(key)
        return default if value is None else value, self.name(key)


def read_folders(
    foreign: Foreign,
    tables: Iterable[Mapping[str, Any]],
    name: str,
    *around: tuple[Mapping[str, Any], str],
    skip: Callable[[FolderTable], str] = lambda _: "",
) -> Iterator[FolderTable]:
    """Yield the folders of a list of tables; when all were taken they are set.

    `around` are the layers around each table; `skip` says why one is not trained, if it is not. `[folders]` of the
    trainer's table has the keys of the `path` (the first that is given), of our `fields`, of the tags to `keep` in
    front, of the captions' `extension`, of `regularisation`, of folders of `references` and of masks by kind.
    """
    keys = foreign.table["folders"]
    folders: list[FolderTable] = []
    for number, table in enumerate(tables):
        prefix = f"{name}[{number}]."
        folder = FolderTable(*around, (table, prefix))
        if why := skip(folder):
            for key in folder.names.values():
                foreign.stays(key, why)
            continue
        paths = [key for key in keys["path"] if isinstance(folder.get(key), str) and folder[key]]
        if not paths:
            foreign.untrained += (prefix,)
            continue
        folder.path, folder.key = path_of(folder[paths[0]]), folder.name(paths[0])
        folder.settings = {"repeats": (1, THERE)} | {
            ours: folder.sourced(key)
            for key, ours in keys["fields"].items()
            if folder.get(key) not in (None, "", False)
        }
        if folder.settings.keys() & {"shuffle_tags", "tag_dropout"}:
            folder.settings["keep_tokens"] = folder.sourced(keys.get("keep", ""), 0)
        folder.regularisation = folder.get(keys.get("regularisation", "")) is True
        if foreign.edits is not False:
            folder.references = tuple(
                (path, folder.name(key))
                for key in keys.get("references", ())
                for path in paths_in(folder.get(key))
            )
        extension, key = folder.sourced(keys.get("extension", ""))
        if extension:
            add_extension(foreign, f".{str(extension).removeprefix('.')}", key)
        masks = [key for key in keys.get("masks", {}) if folder.get(key)]
        if masks:
            least, key = folder.sourced("mask_min_value", 0.0)
            low = float(least) if isinstance(least, int | float) and 0 <= least < 1 else 0.0
            set_masks(
                foreign, keys["masks"][masks[0]], folder.name(masks[0]), background=(low, key)
            )
        folders.append(folder)
        yield folder
    set_folders(foreign, folders)


def paths_in(value: Any) -> list[str]:
    """Return the paths in a value: one, several or none."""
    values = value if isinstance(value, list) else [value]
    return [path for path in values if isinstance(path, str) and path]


def add_extension(foreign: Foreign, extension: Any, key: str) -> None:
    """Add to the extensions of caption files."""
    before = foreign.settings.get("data.caption_extensions", [])
    if extension:
        unique = list(dict.fromkeys([*before, str(extension)]))
        foreign.set("data.caption_extensions", unique, key)


def set_masks(foreign: Foreign, kind: str, key: str, *, background: Sourced) -> None:
    """Set where masks come from, and how much the rest of an image counts."""
    foreign.set("data.masks", kind, key)
    foreign.set("data.mask_background", *background)
    if key.endswith("mask_path"):
        foreign.is_nearest(key, "masks are looked for in a folder masks/ beside the images")


# ---- the folders together


def set_folders(foreign: Foreign, folders: Sequence[FolderTable]) -> None:
    """Set the dataset and what its subfolders have of their own; each folder counts once, as first named."""
    different: dict[PurePath, FolderTable] = {}
    for folder in folders:
        if different.setdefault(folder.path, folder) is not folder:
            foreign.stays(folder.key, "is named before; its settings there count")
    every = list(different.values())
    trained = [folder for folder in every if not folder.regularisation]
    others = [folder for folder in every if folder.regularisation]
    if not trained:
        return
    _set_references(foreign, trained)
    root = _common_root(every)
    if root is None and len(others) == 1 and _common_root(trained) is not None:
        foreign.set("data.regularisation_dir", str(others[0].path), others[0].key)
        every, root = trained, _common_root(trained)
    if root is not None:
        foreign.dataset = str(root)
    places = ", ".join(dict.fromkeys(str(folder.path.parent) for folder in every))
    names = [folder.path.name for folder in every]
    twice = sorted({name for name in names if names.count(name) > 1})
    renamed = f", give {' and '.join(twice)} names of their own" if twice else ""
    for folder in every if root is None else ():
        foreign.without_equivalent[folder.key] = (
            f"{folder.path}: the folders lie apart ({places}), a dataset is one folder: make one, put links "
            f"to all of them into it{renamed}"
        )
        foreign.named.add(folder.key)
    for folder in every:
        name = OWN_FOLDER if folder.path == root else folder.path.name or str(folder.path)
        target = "data" if len(every) == 1 else f"data.folders.{name}"
        if folder.regularisation:
            foreign.set(f"{target}.regularisation", True, folder.key)
        for field, (value, key) in folder.settings.items():
            if target != "data" or (field in _IN_DATA and key == THERE):
                foreign.set(f"{target}.{field}", value, key)
            elif field in _IN_DATA:
                foreign.carry(f"data.{field}", key, value)
            else:
                foreign.stays(key, "there is one folder, all of its images count alike")
        if folder.key not in foreign.named:
            alone = "is the folder with your images, which is chosen apart from the settings"
            why = alone if len(every) == 1 else f"lies in the folder with your images as {name}"
            foreign.stays(folder.key, why)


def _set_references(foreign: Foreign, folders: Sequence[FolderTable]) -> None:
    """Set the folders of reference images, which are for all images here: those of one folder, or the same of all."""
    if not any(folder.references for folder in folders):
        return
    different = {tuple(path for path, _ in folder.references) for folder in folders}
    if len(different) == 1:
        keys = list(dict.fromkeys(key for _, key in folders[0].references))
        foreign.set("data.reference_dirs", list(*different), *keys)
    for folder in folders:
        for path, key in folder.references:
            if key in foreign.named:
                continue
            if len(different) == 1:
                foreign.stays(key, "are the reference images of all folders")
            else:
                name = folder.path.name
                why = f"put it beside your images as references/{name}: it is not for all folders"
                foreign.lacks(key, path, why)


def _common_root(folders: Sequence[FolderTable]) -> PurePath | None:
    """Return the folder in which all lie, or that is one of them and holds the others."""
    paths = [folder.path for folder in folders]
    if len(paths) == 1:
        return paths[0]
    for root in dict.fromkeys((paths[0].parent, *paths)):
        if all(root in (path, path.parent) for path in paths):
            return root
    return None


# ---- length


def set_length(foreign: Foreign, epochs: float | None, key: str, *, whole: bool = False) -> None:
    """Set `train.steps` from epochs, for which the images are counted; nothing without epochs.

    Call it when the dataset, its repeats and the batch size are set. `whole`: images that do not fill a
    batch are left out there, and accumulation goes on over the end of an epoch.
    """
    if not epochs or epochs < 0:
        return
    data = {name: value for name, value in foreign.settings.items() if name.startswith("data.")}
    foreign.counts_images = True
    root = foreign.images
    if root is None and foreign.dataset is not None and foreign.beside is not None:
        root = foreign.beside / Path(foreign.dataset)
    samples = None
    if root is not None:
        with suppress(InputError, RequestError, OSError, ValueError):
            pictures = list_dataset(root, settings=build_config(data).data).pictures
            samples = sum(image.repeats for image in pictures)
    if samples is None:
        why = "give train.steps = epochs x images with repeats / train.batch_size: the images are not there"
        if foreign.beside is None:  # a page, to which they come later
            why = "becomes a number of steps as soon as the images are there"
        foreign.lacks(key, epochs, why)
        return
    images = foreign.settings.get("train.batch_size", 1)
    at_once = foreign.settings.get("memory.micro_batch", images)
    steps = math.ceil(samples / images) * epochs
    if whole:
        steps = (samples // at_once) * epochs * at_once // images
    note = f"of {samples} images, repeats included"
    foreign.set("train.steps", max(1, math.ceil(min(steps, 1e15))), key, note=note)


# ---- sizes


def set_sizes(foreign: Foreign, sizes: Sequence[Sourced]) -> bool:
    """Set the resolutions of all folders from (size, key) of each; return whether there is one."""
    exact: list[tuple[tuple[float, float], str]] = []
    for size, name in sizes:
        try:
            exact.append((read_size(size), name))
        except ValueError as error:
            foreign.lacks(name, size, str(error))
    if exact:
        set_resolutions(foreign, [size for size, _ in exact], exact[0][1])
        for _, name in exact:
            if name not in foreign.named:
                foreign.stays(name, "all folders are trained at all of the resolutions")
    return bool(exact)


def set_resolutions(foreign: Foreign, sizes: Sequence[tuple[float, float]], key: str) -> None:
    """Set `data.resolution`, a side of a square, and further ones; in steps of 64 px, as buckets need them.

    The largest comes first, as sample images are drawn at it.
    """
    sides = [round(math.sqrt(min(width * height, 2.0**24)) / 64) * 64 for width, height in sizes]
    sides = list(dict.fromkeys(min(4096, max(64, side)) for side in sides))
    largest, *others = sorted(sides, reverse=True)
    foreign.set("data.resolution", largest, key)
    rounded = dict.fromkeys(
        f"{width:g} x {height:g}" for width, height in sizes if width != height or width % 64
    )
    if rounded:
        how = f"the side of a square of that area in steps of 64 px is {', '.join(map(str, sides))}"
        foreign.is_nearest(key, f"{', '.join(rounded)}: {how}")
    if others:
        foreign.set("data.more_resolutions", others, key)


def read_size(value: Any) -> tuple[float, float]:
    """Return width and height of 512, "512", "512,768", "512x768" or [512, 768]; raises ValueError."""
    parts = re.split(r"[,x]", value) if isinstance(value, str) else value
    parts = list(parts) if isinstance(parts, list | tuple) else [parts]
    try:
        if any(isinstance(part, bool) for part in parts):
            raise TypeError
        sides = [float(part) for part in parts]
    except (TypeError, ValueError):
        raise ValueError("is not a size") from None
    if not 1 <= len(sides) <= 2 or not all(1 <= side <= 100_000 for side in sides):
        raise ValueError("is not a size")
    return sides[0], sides[-1]
