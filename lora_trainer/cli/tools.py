"""The commands on finished files: convert, merge, resize, extract, describe, publish.

Nothing here computes, and torch is imported only when a command runs. A command that ends in an error or is
interrupted leaves no file behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lora_trainer.cli.main import Json, Reply
from lora_trainer.common.errors import RequestError, StoppedBySignal
from lora_trainer.common.processes import quiet_libraries
from lora_trainer.config.declare import Precision, Targets
from lora_trainer.families.base.traits import FileFormat
from lora_trainer.lora_file.base_layers import check_usable
from lora_trainer.lora_file.key_formats import FormatRequest

if TYPE_CHECKING:
    from lora_trainer.tools.adapters import AdapterTarget, ToolResult

Energy = Annotated[
    float | None,
    Parameter(help="use the lowest rank that keeps this share of the squared singular values"),
]
Entry = Annotated[str | None, Parameter(help="text of this entry, empty to remove it")]
OwnFormat = Annotated[
    FormatRequest,
    Parameter(help="key names of the result [default: the input's, or one that fits]"),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """The options of commands that write an adapter from adapters.

    :param precision: fp32, bf16 or fp16 [default: the input's]
    :param base: base model of the adapter [default: the family's public release]
    :param force: replace an existing output
    """

    precision: Precision | None = None
    base: str | None = None
    force: bool = False


ADAPTER = AdapterOptions()


@contextmanager
def _nothing_left_behind() -> Iterator[None]:
    """Run a command; on Ctrl-C raise StoppedBySignal saying that nothing was written.

    That is true because an output gets its name only once it is complete.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedBySignal(
            SIGINT, found="stopped, nothing was written", fix="run the command again"
        ) from None


def _refuse_unusable(files: Iterable[Path], base: str | None) -> None:
    """Refuse adapters by their headers, before torch is imported, which takes seconds.

    Where a base is named, it says which layers there are. A file that is absent is named later, after wrong options.
    """
    for file in files if base is None else ():
        if file.exists():
            check_usable(file, names=None)


@_nothing_left_behind()
def convert(
    file: Path,
    /,
    *,
    format: FileFormat,
    output: Path | None = None,
    options: AdapterOptions = ADAPTER,
    json: Json = False,
) -> Reply:
    """Write an adapter in the key names of kohya, diffusers or ComfyUI; its updates stay the same.

    :param format: key names of the result
    :param output: file to write [default: FILE-FORMAT.safetensors]
    """
    _refuse_unusable([file], options.base)
    quiet_libraries()
    from lora_trainer.tools.adapters import beside, convert

    target = _target(output or beside(file, format), format, options)
    return _answer(convert(file, target, base=options.base), as_json=json)


@_nothing_left_behind()
def merge(
    files: list[str],
    /,
    *,
    output: Path,
    into: str | None = None,
    rank: int | None = None,
    format: OwnFormat = "auto",
    options: AdapterOptions = ADAPTER,
    json: Json = False,
) -> Reply:
    """Add up adapters, each FILE or FILE:WEIGHT, to one adapter, or into a base model with --into.

    :param output: file to write
    :param into: merge the sum into this base model: folder, .safetensors or Hub id
    :param rank: reduce the sum to this rank [default: keep it exact]
    """
    inputs = [_weighted(text) for text in files]
    _refuse_unusable((file for file, _ in inputs), into or options.base)
    quiet_libraries()
    from lora_trainer.tools.merge import merge
    from lora_trainer.tools.merge_base import bake

    if into is None:
        target = _target(output, format, options)
        return _answer(merge(inputs, target, rank=rank, base=options.base), as_json=json)
    for_adapters = {"rank": rank, "format": format, **vars(options)}
    for name, value in for_adapters.items():
        if name != "force" and value not in (None, "auto"):
            raise RequestError(
                f"--{name} cannot be combined with --into, whose result is a base model",
                fix=f"leave --{name} out",
            )
    return _answer(bake(inputs, base=into, output=output, force=options.force), as_json=json)


@_nothing_left_behind()
def resize(
    file: Path,
    /,
    *,
    output: Path,
    rank: int | None = None,
    ratio: float | None = None,
    energy: Energy = None,
    format: OwnFormat = "auto",
    options: AdapterOptions = ADAPTER,
    json: Json = False,
) -> Reply:
    """Cut a LoRA, LoHa or LoKr to a lower rank by its singular values; the result is a LoRA.

    :param output: file to write
    :param rank: highest rank of a layer
    :param ratio: keep singular values of at least the largest / RATIO
    """
    _refuse_unusable([file], options.base)
    quiet_libraries()
    from lora_trainer.tools.merge import RankLimits, resize

    limits = RankLimits(rank=rank, ratio=ratio, energy=energy)
    target = _target(output, format, options)
    return _answer(resize(file, limits, target, base=options.base), as_json=json)


@_nothing_left_behind()
def extract(
    tuned: str,
    base: str,
    /,
    *,
    output: Path,
    rank: int | None = None,
    energy: Energy = None,
    targets: Targets = "all",
    format: FormatRequest = "auto",
    precision: Precision = "fp16",
    force: bool = False,
    json: Json = False,
) -> Reply:
    """Write the difference of TUNED and BASE, two base models of one family, as a LoRA.

    :param output: file to write
    :param rank: rank of every layer, or with --energy the highest
    :param targets: layers of the denoiser to include
    :param format: key names of the result [default: the most widely read]
    :param precision: precision of the result
    :param force: replace an existing output
    """
    quiet_libraries()
    from lora_trainer.tools.extract import extract

    target = _target(output, format, AdapterOptions(precision=precision, force=force))
    result = extract(tuned, base, target, rank=rank, energy=energy, targets=targets)
    return _answer(result, as_json=json)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DescriptionOptions:
    """The texts of `describe`.

    :param trigger: trigger words that evoke the concept in a prompt
    :param tags: search tags, separated by commas
    """

    title: Entry = None
    description: Entry = None
    author: Entry = None
    license: Entry = None
    trigger: str | None = None
    tags: str | None = None


NO_TEXTS = DescriptionOptions()


@_nothing_left_behind()
def describe(
    file: Path,
    /,
    *,
    texts: DescriptionOptions = NO_TEXTS,
    output: Path | None = None,
    force: bool = False,
    json: Json = False,
) -> Reply:
    """Write title, author, tags and other texts into an adapter's header; an empty text removes one.

    :param output: file to write [default: FILE; its tensors stay the same]
    :param force: replace an existing output
    """
    quiet_libraries()
    from lora_trainer.tools.describe import describe

    target = output or file
    changed = describe(file, vars(texts), output=target, force=force or output is None)
    if json:
        return {"file": str(target), "changed": changed}
    return f"wrote {target}\nchanged: {', '.join(changed) or 'nothing'}"


def publish(
    file: Path,
    /,
    *,
    repository: str,
    public: bool = False,
    json: Json = False,
) -> Reply:
    """Upload a LoRA to the Hugging Face Hub, with its last samples and a model card; private by default.

    :param repository: its name on the Hub: owner/name, or a name of your own account
    :param public: let everybody see it [default: only you]
    """
    from lora_trainer.tools.describe import publish

    address = publish(file, repository=repository, private=not public)
    return {"address": address, "private": not public} if json else f"published at {address}"


def _target(output: Path, format: FormatRequest, options: AdapterOptions) -> AdapterTarget:
    from lora_trainer.tools.adapters import AdapterTarget

    precision, force = options.precision, options.force
    return AdapterTarget(path=output, format=format, precision=precision, force=force)


def _answer(result: ToolResult, *, as_json: bool) -> Reply:
    return result.to_json() if as_json else result.text()


def _weighted(text: str) -> tuple[Path, float]:
    """Read FILE or FILE:WEIGHT; raises RequestError for a weight that is not a number, or is 0."""
    name, colon, number = text.rpartition(":")
    if not colon or Path(text).exists():
        return Path(text), 1.0
    try:
        weight = float(number)
    except ValueError:
        return Path(text), 1.0  # a colon of the path
    if not math.isfinite(weight) or weight == 0:
        raise RequestError(f"{text} has weight {number}", fix="give a number other than 0")
    return Path(name), weight
