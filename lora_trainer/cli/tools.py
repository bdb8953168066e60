"""The commands on finished files: convert, merge, resize, extract, describe, publish.

Nothing here computes, and torch is imported only when a command runs. A command that ends in an error or is
interrupted leaves no file behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from lora_trainer.cli.options import Json, Reply
from lora_trainer.common.errors import RequestError, StoppedBySignal
from lora_trainer.common.quiet import quiet_libraries
from lora_trainer.config.config import Precision, Targets
from lora_trainer.families.base import FileFormat
from lora_trainer.lora_file.fitting_base import check_usable
from lora_trainer.lora_file.formats import FormatRequest

if TYPE_CHECKING:
    from lora_trainer.tools.results import Result

Output = Annotated[Path, Parameter(help="file to write")]
Force = Annotated[bool, Parameter(negative="", help="replace an existing output")]
MadeFor = Annotated[
    str | None,
    Parameter(
        name="--base", help="base model of the adapter [default: the family's public release]"
    ),
]
OwnPrecision = Annotated[
    Precision | None, Parameter(help="fp32, bf16 or fp16 [default: the input's]")
]
Entry = Annotated[str | None, Parameter(help="text of this entry, empty to remove it")]
OwnFormat = Annotated[
    FormatRequest,
    Parameter(help="key names of the result [default: the input's, or one that fits]"),
]


def convert(
    file: Path,
    /,
    *,
    format: Annotated[FileFormat, Parameter(help="key names of the result")],
    output: Annotated[
        Path | None, Parameter(help="file to write [default: FILE-FORMAT.safetensors]")
    ] = None,
    precision: OwnPrecision = None,
    base: MadeFor = None,
    force: Force = False,
    json: Json = False,
) -> Reply:
    """Write an adapter in the key names of kohya, diffusers or ComfyUI; its updates stay the same."""
    _check_first(file, base=base)
    with _nothing_left_behind():
        from lora_trainer.tools.convert import convert

        return _answer(
            convert(
                file, format=format, output=output, precision=precision, base=base, force=force
            ),
            as_json=json,
        )


def merge(
    files: list[str],
    /,
    *,
    output: Output,
    into: Annotated[
        str | None,
        Parameter(help="merge the sum into this base model: folder, .safetensors or Hub id"),
    ] = None,
    rank: Annotated[
        int | None, Parameter(help="reduce the sum to this rank [default: keep it exact]")
    ] = None,
    format: OwnFormat = "auto",
    precision: OwnPrecision = None,
    base: MadeFor = None,
    force: Force = False,
    json: Json = False,
) -> Reply:
    """Add up adapters, each FILE or FILE:WEIGHT, to one adapter, or into a base model with --into."""
    with _nothing_left_behind():
        from lora_trainer.tools.merge import merge, parse_weighted
        from lora_trainer.tools.merge_base import bake

        inputs = [parse_weighted(text) for text in files]
        if into is None:
            merged = merge(
                inputs,
                output=output,
                rank=rank,
                format=format,
                precision=precision,
                base=base,
                force=force,
            )
            return _answer(merged, as_json=json)
        _refuse_beside_into(rank=rank, format=format, precision=precision, base=base)
        return _answer(bake(inputs, base=into, output=output, force=force), as_json=json)


def resize(
    file: Path,
    /,
    *,
    output: Output,
    rank: Annotated[int | None, Parameter(help="highest rank of a layer")] = None,
    ratio: Annotated[
        float | None, Parameter(help="keep singular values of at least the largest / RATIO")
    ] = None,
    energy: Annotated[
        float | None,
        Parameter(help="use the lowest rank that keeps this share of the squared singular values"),
    ] = None,
    format: OwnFormat = "auto",
    precision: OwnPrecision = None,
    base: MadeFor = None,
    force: Force = False,
    json: Json = False,
) -> Reply:
    """Cut a LoRA, LoHa or LoKr to a lower rank by its singular values; the result is a LoRA."""
    with _nothing_left_behind():
        from lora_trainer.tools.resize import ResizeLimits, resize

        return _answer(
            resize(
                file,
                ResizeLimits(rank=rank, ratio=ratio, energy=energy),
                output=output,
                format=format,
                precision=precision,
                base=base,
                force=force,
            ),
            as_json=json,
        )


def extract(
    tuned: str,
    base: str,
    /,
    *,
    output: Output,
    rank: Annotated[
        int | None, Parameter(help="rank of every layer, or with --energy the highest")
    ] = None,
    energy: Annotated[
        float | None,
        Parameter(help="use the lowest rank that keeps this share of the squared singular values"),
    ] = None,
    targets: Annotated[Targets, Parameter(help="layers of the denoiser to include")] = "all",
    format: Annotated[
        FormatRequest, Parameter(help="key names of the result [default: the most widely read]")
    ] = "auto",
    precision: Annotated[Precision, Parameter(help="precision of the result")] = "fp16",
    force: Force = False,
    json: Json = False,
) -> Reply:
    """Write the difference of TUNED and BASE, two base models of one family, as a LoRA."""
    with _nothing_left_behind():
        from lora_trainer.tools.extract import extract

        return _answer(
            extract(
                tuned,
                base,
                output=output,
                rank=rank,
                energy=energy,
                targets=targets,
                format=format,
                precision=precision,
                force=force,
            ),
            as_json=json,
        )


def describe(
    file: Path,
    /,
    *,
    title: Entry = None,
    description: Entry = None,
    author: Entry = None,
    license: Entry = None,
    trigger: Annotated[
        str | None, Parameter(help="trigger words that evoke the concept in a prompt")
    ] = None,
    tags: Annotated[str | None, Parameter(help="search tags, separated by commas")] = None,
    output: Annotated[
        Path | None, Parameter(help="file to write [default: FILE; its tensors stay the same]")
    ] = None,
    force: Force = False,
    json: Json = False,
) -> Reply:
    """Write title, author, tags and other texts into an adapter's header; an empty text removes one."""
    with _nothing_left_behind():
        from lora_trainer.tools.describe import Description, describe

        texts = Description(
            title=title,
            description=description,
            author=author,
            license=license,
            trigger=trigger,
            tags=tags,
        )
        result = describe(file, texts, output=output or file, force=force or output is None)
        if json:
            return Reply(value={"file": str(result.file), "changed": result.changed}, as_json=True)
        changed = ", ".join(result.changed) or "nothing"
        return Reply(value=f"wrote {result.file}\nchanged: {changed}", as_json=False)


def publish(
    file: Path,
    /,
    *,
    repository: Annotated[
        str, Parameter(help="its name on the Hub: owner/name, or a name of your own account")
    ],
    public: Annotated[
        bool, Parameter(negative="", help="let everybody see it [default: only you]")
    ] = False,
    json: Json = False,
) -> Reply:
    """Upload a LoRA to the Hugging Face Hub, with its last samples and a model card; private by default."""
    from lora_trainer.tools.publish import publish

    address = publish(file, repository=repository, private=not public)
    if json:
        return Reply(value={"address": address, "private": not public}, as_json=True)
    return Reply(value=f"published at {address}", as_json=False)


def _check_first(file: Path, *, base: str | None) -> None:
    """Refuse a file whose header shows that it cannot be used before torch is imported, which takes seconds."""
    if base is None:
        check_usable(file, names=None)


@contextmanager
def _nothing_left_behind() -> Iterator[None]:
    """Run a command; on Ctrl-C raise StoppedBySignal saying that nothing was written.

    That is true because an output gets its name only once it is complete.
    """
    quiet_libraries()
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedBySignal(
            SIGINT, found="stopped, nothing was written", fix="run the command again"
        ) from None


def _answer(result: Result, *, as_json: bool) -> Reply:
    from lora_trainer.tools.results import result_json, result_text

    return Reply(value=result_json(result) if as_json else result_text(result), as_json=as_json)


def _refuse_beside_into(**options: Any) -> None:
    """Raise RequestError for options that apply to adapter files only."""
    for name, value in options.items():
        if value not in (None, "auto"):
            raise RequestError(
                f"--{name} cannot be combined with --into, whose result is a base model",
                fix=f"leave --{name} out",
            )
