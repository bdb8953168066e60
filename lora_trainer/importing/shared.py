"""What trainers say in different words about the same things: adapters, timesteps, loss, text encoders, folders.

Input: foreign keys, and where it takes more than reading them their values. Output: settings, and one line
for each thing that is only approximated or missing here. A dataset here is one folder; what its subfolders have of
their own stands in `data.folders`. Folders that lie apart are named with what to do.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, Literal

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.config import build_config
from lora_trainer.config.inputs import OWN_FOLDER, FolderSettings
from lora_trainer.dataset.listing import list_dataset
from lora_trainer.importing.foreign import THERE, Foreign, Sourced, shown
from lora_trainer.importing.rules import table_of, words

Distribution = Literal["uniform", "sigmoid", "logit_normal", "mode", "cosmap"]
FULL_RANK = 1024
WHOLE = 1e6
"""A rank that stands for whole matrices."""


def set_model(foreign: Foreign, name: str, key: str, models: Mapping[str, Any]) -> None:
    """Set how the base is trained, from the names of the trainer's table; raises RequestError for others."""
    if name not in (*models["flow"], *models["noise"]):
        raise RequestError(
            f"{key}={shown(name)} is a model that is not trained here; docs/models.md lists those that are",
            fix=f"use a file for {', '.join((*models['noise'], *models['flow']))}",
        )
    foreign.is_flow = name in models["flow"]
    foreign.trains_text = not foreign.is_flow


def read_adapter(
    foreign: Foreign,
    table: Mapping[str, Any],
    *,
    kind: Sourced | None = None,
    rank: Sourced | None = None,
    alpha_key: str = "",
) -> str:
    """Set kind, rank and alpha from the keys that a trainer's table names; return the kind.

    `[adapter]` has the keys of `kind`, `rank` and `alpha` with what they are there by default; without
    `default_alpha` it is the rank. The arguments come in place of the table's.
    """
    spec = table["adapter"]
    word, key = kind or (foreign.word(spec["kind"], "lora"), spec["kind"])
    ours: str
    another = ("lora", "adapters here are lora, loha, lokr and oft")
    ours, why = table_of("words")["kinds"].get(str(word).lower(), another)
    foreign.set("adapter.kind", ours, key)
    if why:
        foreign.is_nearest(key, f"{word}: adapter.kind={ours}, {why}")
    number, key = rank or (foreign.number(spec["rank"]), spec["rank"])
    _set_rank(foreign, number, key, alpha_key or spec.get("alpha", THERE), spec)
    return ours


def _set_rank(
    foreign: Foreign, rank: float | None, key: str, alpha_key: str, spec: Mapping[str, Any]
) -> None:
    alpha, default_alpha = foreign.number(alpha_key), spec.get("default_alpha")
    chosen = spec["default_rank"] if rank is None else int(rank)
    if rank is not None and chosen > FULL_RANK:
        how = "whole matrices there, the highest rank here"
        foreign.is_nearest(key, f"{rank:g}: adapter.rank={FULL_RANK}, {how}")
        alpha, default_alpha, chosen = None, None, FULL_RANK
    if chosen < 1:
        foreign.lacks(key, rank, "is no rank: what it is there by default is used")
        chosen = spec["default_rank"]
    foreign.set("adapter.rank", chosen, key)
    if foreign.settings["adapter.kind"] == "oft":
        if alpha_key in foreign.values:
            foreign.stays(alpha_key, "a rotation has no alpha")
        return
    value = alpha or (chosen if default_alpha is None or alpha == 0 else default_alpha)
    if value > chosen * 100:
        how = f"{value:g}: adapter.alpha={chosen * 100}, the most of this rank"
        foreign.is_nearest(alpha_key, how)
        value = chosen * 100
    foreign.set("adapter.alpha", value, alpha_key)


def set_convolutions(foreign: Foreign, rank: Any, key: str, alpha: Any, alpha_key: str) -> None:
    """Set that convolutions larger than 1x1 are trained too, and their rank and alpha."""
    foreign.set("adapter.targets", "all", key)
    foreign.carry("adapter.conv_rank", key, rank)
    if foreign.settings["adapter.kind"] != "oft":
        foreign.carry("adapter.conv_alpha", alpha_key, alpha)


def set_text_encoder(
    foreign: Foreign, *, trained: bool, key: str, rates: Sequence[tuple[str, float]] = ()
) -> None:
    """Set whether text encoders are trained, and at which rate; `rates` are by foreign key."""
    if trained and foreign.trains_text is False:
        why = "the text encoders of this base are not trained here"
        if key in foreign.values:
            foreign.lacks(key, foreign.values[key], why)
        else:
            how = f"are trained {THERE}, those of this base are not here"
            foreign.is_nearest("text encoders", how)
        note = "those of this base are not trained"
        trained, rates = False, ()
        foreign.set("adapter.text_encoder", False, note=note)
    else:
        foreign.set("adapter.text_encoder", trained, key)
    if not trained:
        return
    for number, (name, rate) in enumerate(rates):
        if foreign.settings.get("optimizer.name") == "prodigy":
            if name in foreign.values and name not in foreign.named:
                foreign.stays(name, "Prodigy finds one rate for everything")
        elif number == 0:
            foreign.carry("optimizer.text_encoder_learning_rate", name, rate)
        elif rate != rates[0][1]:
            foreign.lacks(name, rate, f"all text encoders have one rate, {rates[0][1]:g}")
        elif name in foreign.values and name not in foreign.named:
            foreign.stays(name, "is the rate of all text encoders")


def set_timesteps(
    foreign: Foreign,
    distribution: Distribution,
    key: str,
    *,
    mean: Sourced = (0.0, THERE),
    std: Sourced = (1.0, THERE),
    shift: Sourced = (1.0, THERE),
) -> None:
    """Set which timesteps are drawn, and for flow matching how they are shifted towards noise."""
    if distribution in ("sigmoid", "logit_normal"):
        distribution = "sigmoid" if (mean[0], std[0]) == (0.0, 1.0) else "logit_normal"
    foreign.set("objective.timestep_sampling", distribution, key)
    if distribution == "logit_normal":
        for setting, (value, name) in (("logit_mean", mean), ("logit_std", std)):
            foreign.carry(f"objective.{setting}", name, value)
    value, name = shift
    if foreign.is_flow is False:
        return
    if value == "resolution":
        foreign.set("objective.flow_shift", value, name)
    elif value > 0:
        foreign.carry("objective.flow_shift", name, value)
    else:
        foreign.lacks(name, value, "is no shift: 1 is none")


def shift_by_tokens(
    foreign: Foreign,
    key: str,
    word: str = "",
    *,
    high: float = 1.15,
    most: int = 4096,
    token_px: int = 16,
) -> Sourced:
    """Return the shift at the imported resolution, exp of a line in tokens: 0.5 at 256, `high` at `most`.

    For bases whose own sampler, objective.flow_shift=resolution, shifts in another way; that is said of the
    key, and the `word` in it.
    """
    side = foreign.settings.get("data.resolution", 1024)
    tokens = (side // token_px) ** 2
    shift = float(f"{math.exp(0.5 + (high - 0.5) * (tokens - 256) / (most - 256)):.5g}")
    says = f"{word}: " if word else ""
    foreign.is_nearest(key, f"{says}{shift:g}, that of this resolution")
    return shift, key


def set_timestep_range(foreign: Foreign, low: str, high: str) -> None:
    """Set the trained timesteps from keys of the first one and of the one after the last."""
    first, end = foreign.number(low), foreign.number(high)
    if first:
        foreign.carry("objective.min_timestep", low, int(first))
    if end:
        foreign.carry("objective.max_timestep", high, int(min(1000, end)) - 1)


def set_snr_weights(foreign: Foreign, key: str, *, gamma: float | None = None) -> None:
    """Set min-SNR weights where there is a gamma and the base is not trained by flow matching."""
    gamma = foreign.number(key) if gamma is None else gamma
    if gamma and foreign.is_flow:
        why = "flow matching has no signal-to-noise weights: it does nothing there"
        foreign.stays(key, why)
    elif gamma:
        foreign.set("objective.weighting", "min_snr", key)
        foreign.carry("objective.min_snr_gamma", key, gamma)
    if "objective.weighting" not in foreign.settings:
        foreign.set("objective.weighting", "none")


def set_huber(foreign: Foreign, delta: float, *keys: str) -> None:
    """Set the threshold of a Huber loss that is the same at all timesteps."""
    foreign.set("objective.huber_delta", min(1.0, delta), *keys)
    foreign.set("objective.huber_schedule", "constant")


def set_batch(
    foreign: Foreign, key: str, times_key: str, *, images: float | None = None, default: int = 1
) -> None:
    """Set the images per optimizer step: batch, `images` if it is not the key's value, times accumulation."""
    size = int((foreign.number(key, default) if images is None else images) or 1)
    rounds = int(foreign.number(times_key) or 1)
    names = [name for name in (key, times_key) if name in foreign.values]
    if size < 1 or rounds < 1:
        for name in names:
            foreign.lacks(name, foreign.values[name], "is no number of images")
        size, rounds, names = 1, 1, []
    foreign.set("train.batch_size", size * rounds, *names)
    if rounds > 1:
        foreign.set("memory.micro_batch", size, *names)


def set_precision(foreign: Foreign, key: str, *, missing: str) -> None:
    """Set the dtype of base and activations."""
    value = foreign.get(key, missing)
    try:
        precision = words(table_of("words")["dtypes"])(value)
    except ValueError as error:
        foreign.lacks(key, value, str(error))
        return
    if not (precision == "fp16" and foreign.is_flow):
        foreign.set("train.precision", precision, key)
    elif key in foreign.values:
        why = "what the plan chooses: bases of flow matching are not trained in fp16"
        foreign.is_nearest(key, f"{value}: train.precision is {why}")


def expand(foreign: Foreign, key: str) -> dict[str, Any]:
    """Put the options of an option among the keys of the file, as `key.option`; return them.

    They are a table, or `name=value` words in a list or a text.
    """
    value = foreign.values.get(key)
    if isinstance(value, Mapping):
        pairs = dict(value)
    else:
        parts = value if isinstance(value, list) else split_words(str(value or ""))
        halves = (str(part).strip("\"' ").partition("=") for part in parts)
        pairs = {name.strip(): text.strip() for name, _, text in halves if name.strip()}
    if pairs:
        del foreign.values[key]
        foreign.values |= {f"{key}.{name}": option for name, option in pairs.items()}
    return pairs


def split_words(text: str) -> list[str]:
    """Return the words of a command line."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


# ---- folders of images

_WINDOWS = re.compile(r"^[A-Za-z]:|\\")
_IN_DATA = frozenset(FolderSettings.model_fields) - {"weight", "regularisation"}


class FolderTable(dict[str, Any]):
    """The table of one folder with what the tables around it say, later ones win.

    Each layer is a table and what stands before its keys in the file; `names` has the flat key of each value.
    """

    def __init__(self, *layers: tuple[Mapping[str, Any], str]) -> None:
        self.names: dict[str, str] = {}
        for layer, prefix in layers:
            self.update(layer)
            self.names |= {key: f"{prefix}{key}" for key in layer}

    def name(self, key: str) -> str:
        """Return a key's flat key, `THERE` if it is missing."""
        return self.names.get(key, THERE)

    def sourced(self, key: str, default: Any = None) -> Sourced:
        """Return a value and its flat key."""
        return self.get(key, default), self.name(key)

    def fields(self, ours: Mapping[str, str]) -> dict[str, Sourced]:
        """Return the values that are not off, by our field of each key."""
        off = (None, "", False)
        return {
            setting: self.sourced(key)
            for key, setting in ours.items()
            if self.get(key, None) not in off
        }


@dataclass(kw_only=True)
class ImageFolder:
    """One folder of images: its path, the key that names it, its own settings by field."""

    path: PurePath
    key: str
    settings: dict[str, Sourced] = field(default_factory=dict)
    regularisation: bool = False


def read_folder(
    foreign: Foreign, table: FolderTable, keys: Mapping[str, Any], prefix: str
) -> ImageFolder | None:
    """Return the folder of a table with its own settings, None where it names none.

    `keys` are the table's: of the `path` (the first that is given), of our `fields`, of the tags to `keep` in
    front, of the captions' `extension`, of `regularisation` and of masks by kind. `prefix` stands before them.
    """
    key = next(
        (key for key in keys["path"] if isinstance(table.get(key), str) and table[key]), None
    )
    if key is None:
        foreign.untrained += (prefix,)
        return None
    folder = ImageFolder(path=path_of(table[key]), key=table.name(key))
    folder.settings = {"repeats": (1, THERE), **table.fields(keys["fields"])}
    if folder.settings.keys() & {"shuffle_tags", "tag_dropout"}:
        folder.settings["keep_tokens"] = table.sourced(keys.get("keep", ""), 0)
    folder.regularisation = table.get(keys.get("regularisation", "")) is True
    extension, name = table.sourced(keys.get("extension", ""))
    if extension:
        add_extension(foreign, f".{str(extension).removeprefix('.')}", name)
    for mask_key, kind in keys.get("masks", {}).items():
        if table.get(mask_key):
            least, name = table.sourced("mask_min_value", 0.0)
            low = float(least) if isinstance(least, int | float) and 0 <= least < 1 else 0.0
            set_masks(foreign, kind, table.name(mask_key), background=(low, name))
            break
    return folder


def read_folders(
    foreign: Foreign,
    tables: Iterable[Mapping[str, Any]],
    name: str,
    keys: Mapping[str, Any],
    *around: tuple[Mapping[str, Any], str],
) -> Iterator[tuple[ImageFolder, FolderTable]]:
    """Yield the folders of a list of tables with their tables; when all were taken they are set.

    `keys` are those of `read_folder`, `around` the layers around each table.
    """
    folders: list[ImageFolder] = []
    for number, table in enumerate(tables):
        prefix = f"{name}[{number}]."
        values = FolderTable(*around, (table, prefix))
        folder = read_folder(foreign, values, keys, prefix)
        if folder is not None:
            folders.append(folder)
            yield folder, values
    set_folders(foreign, folders)


def path_of(text: Any) -> PurePath:
    """Return a path as the system that wrote it reads it: `C:\\images` has two parts everywhere."""
    words = str(text)
    return PureWindowsPath(words) if _WINDOWS.search(words) else PurePosixPath(words)


def tables_of(value: Any) -> list[Mapping[str, Any]]:
    """Return the tables of a list, none where it is no list."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def named_file(
    foreign: Foreign,
    option: str,
    parse: Callable[[str], Any],
    fits: Callable[[Any], object],
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
    for file in (beside / path, beside / path.name, beside.parent / path):
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
    foreign.lacks(option, str(file_name), why)
    return None


# ---- folders


def set_folders(foreign: Foreign, folders: Sequence[ImageFolder]) -> None:
    """Set the dataset and what its subfolders have of their own; each folder counts once, as first named."""
    different: dict[PurePath, ImageFolder] = {}
    for folder in folders:
        if different.setdefault(folder.path, folder) is not folder:
            foreign.stays(folder.key, "is named before; its settings there count")
    every = list(different.values())
    trained = [folder for folder in every if not folder.regularisation]
    others = [folder for folder in every if folder.regularisation]
    if not trained:
        return
    root = _common_root(every)
    if root is None and len(others) == 1 and _common_root(trained) is not None:
        foreign.set("data.regularisation_dir", str(others[0].path), others[0].key)
        every, root = trained, _common_root(trained)
    if root is None:
        _lie_apart(foreign, every)
    else:
        foreign.dataset = str(root)
    for folder in every:
        name = OWN_FOLDER if folder.path == root else folder.path.name
        _set_own(foreign, folder, "data" if len(every) == 1 else f"data.folders.{name}")
        if folder.key not in foreign.named:
            alone = "is the DATASET of the command"
            why = alone if len(every) == 1 else f"lies in the DATASET as {name}"
            foreign.stays(folder.key, why)


def _set_own(foreign: Foreign, folder: ImageFolder, target: str) -> None:
    if folder.regularisation:
        foreign.set(f"{target}.regularisation", True, folder.key)
    for name, (value, key) in folder.settings.items():
        if target != "data" or (name in _IN_DATA and key == THERE):
            foreign.set(f"{target}.{name}", value, key)
        elif name in _IN_DATA:
            foreign.carry(f"data.{name}", key, value)
        else:
            foreign.stays(key, "there is one folder, all of its images count alike")


def _common_root(folders: Sequence[ImageFolder]) -> PurePath | None:
    """Return the folder in which all lie, or that is one of them and holds the others."""
    paths = [folder.path for folder in folders]
    if len(paths) == 1:
        return paths[0]
    for root in dict.fromkeys((paths[0].parent, *paths)):
        if all(root in (path, path.parent) for path in paths):
            return root
    return None


def _lie_apart(foreign: Foreign, folders: Sequence[ImageFolder]) -> None:
    places = ", ".join(dict.fromkeys(str(folder.path.parent) for folder in folders))
    names = [folder.path.name for folder in folders]
    twice = sorted({name for name in names if names.count(name) > 1})
    renamed = f", give {' and '.join(twice)} names of their own" if twice else ""
    for folder in folders:
        foreign.without_equivalent[folder.key] = (
            f"{folder.path}: the folders lie apart ({places}), a dataset is one folder: make one, put links "
            f"to all of them into it{renamed}"
        )
        foreign.named.add(folder.key)


def add_extension(foreign: Foreign, extension: Any, key: str) -> None:
    """Add to the extensions of caption files."""
    before = foreign.settings.get("data.caption_extensions", [])
    if extension:
        unique = list(dict.fromkeys([*before, str(extension)]))
        foreign.set("data.caption_extensions", unique, key)


def set_masks(foreign: Foreign, kind: str, key: str, *, background: Sourced = (0.0, THERE)) -> None:
    """Set where masks come from, and how much what lies outside of them counts."""
    foreign.set("data.masks", kind, key)
    foreign.set("data.mask_background", *background)
    if key.endswith("mask_path"):
        foreign.is_nearest(key, "masks are looked for in a folder masks/ beside the images")


# ---- length


def set_length(foreign: Foreign, epochs: float | None, key: str, *, whole: bool = False) -> None:
    """Set `train.steps` from epochs, for which the images are counted; nothing without epochs.

    Call it when the dataset, its repeats and the batch size are set. `whole`: images that do not fill a
    batch are left out there, and accumulation goes on over the end of an epoch.
    """
    if not epochs or epochs < 0:
        return
    samples = samples_per_epoch(foreign)
    if samples is None:
        why = "give train.steps = epochs x images with repeats / train.batch_size: the images are not there"
        foreign.lacks(key, epochs, why)
        return
    images = foreign.settings.get("train.batch_size", 1)
    at_once = foreign.settings.get("memory.micro_batch", images)
    steps = math.ceil(samples / images) * epochs
    if whole:
        steps = (samples // at_once) * epochs * at_once // images
    note = f"of {samples} images, repeats included"
    foreign.set("train.steps", max(1, math.ceil(min(steps, 1e15))), key, note=note)


def samples_per_epoch(foreign: Foreign) -> int | None:
    """Return how many samples an epoch has, None where the images are not on this machine."""
    if foreign.dataset is None:
        return None
    data = {key: value for key, value in foreign.settings.items() if key.startswith("data.")}
    try:
        root = foreign.beside / Path(foreign.dataset)
        listing = list_dataset(root, settings=build_config(data).data)
    except (InputError, RequestError, OSError, ValueError):
        return None
    return sum(image.repeats for image in listing.pictures)


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
    """Set `data.resolution`, a side of a square, and further ones; in steps of 64 px, as buckets need them."""
    sides = [round(math.sqrt(min(width * height, 2.0**24)) / 64) * 64 for width, height in sizes]
    sides = list(dict.fromkeys(min(4096, max(64, side)) for side in sides))
    foreign.set("data.resolution", sides[0], key)
    rounded = dict.fromkeys(
        f"{width:g} x {height:g}" for width, height in sizes if width != height or width % 64
    )
    if rounded:
        how = f"the side of a square of that area in steps of 64 px is {', '.join(map(str, sides))}"
        foreign.is_nearest(key, f"{', '.join(rounded)}: {how}")
    if len(sides) > 1:
        foreign.set("data.more_resolutions", sides[1:], key)


def read_size(value: Any) -> tuple[float, float]:
    """Return width and height of 512, "512", "512,768", "512x768" or [512, 768]; raises ValueError."""
    parts = re.split(r"[,x]", value) if isinstance(value, str) else value
    parts = list(parts) if isinstance(parts, list | tuple) else [parts]
    try:
        if any(isinstance(part, bool) for part in parts):
            raise TypeError
        sides = [float(part) for part in parts]
    except (TypeError, ValueError):
        raise ValueError("is no size") from None
    if not 1 <= len(sides) <= 2 or not all(1 <= side <= 100_000 for side in sides):
        raise ValueError("is no size")
    return sides[0], sides[-1]
