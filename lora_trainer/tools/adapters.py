"""Adapter files opened with the right names and written anew, as all tools do; `convert` does only that.

Input is a file and, where it is not the public release, the base it was made for; modules are read one at a time,
when looked up, and checked for numbers that are none. Output is a file in the names of kohya, of diffusers or of
ComfyUI, with the same bytes that an export of the live adapter would have. It appears when it is whole and every
module has been read back. Where a format states no strength, it is multiplied into the tensors, in fp32 if their own
precision would round it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lora_trainer import families
from lora_trainer.common.errors import InputError, LoraTrainError, RequestError, TrainingStopped
from lora_trainer.common.wording import is_hub_id
from lora_trainer.config.declare import Precision
from lora_trainer.config.inputs import MINIATURES, BaseSettings
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.families.base.traits import FileFormat
from lora_trainer.families.files.locate import describe
from lora_trainer.lora.adapter import denoiser_layers
from lora_trainer.lora.adapter_size import AdapterKind
from lora_trainer.lora.tensors import AdapterTensors, ModuleTensors
from lora_trainer.lora_file.base_layers import (
    Fit,
    LayerNames,
    Shape,
    check_usable,
    released_names,
)
from lora_trainer.lora_file.embedding import embedding_path, trained_words
from lora_trainer.lora_file.inspect import changes_nothing
from lora_trainer.lora_file.key_formats import (
    FormatRequest,
    format_for,
    format_notes,
)
from lora_trainer.lora_file.metadata import (
    NETWORK_ARGUMENTS,
    NETWORK_MODULE,
    network_entries,
    stated_base,
)
from lora_trainer.lora_file.read import DIFFUSERS_METADATA, FOLDED, Contents
from lora_trainer.lora_file.read_tensors import OpenAdapter, open_adapter
from lora_trainer.lora_file.tensor_file import HASHES, file_of, refuse_existing
from lora_trainer.lora_file.write import (
    FileForm,
    Unwritable,
    contents_of,
    write_modules,
)

SUFFIX = ".safetensors"
# An adapter file and the weight on its update.
Weighted = tuple[Path, float]
# The modules of several adapters that change one layer, and the weight on the update of each.
Parts = Sequence[tuple[ModuleTensors, float]]


@dataclass(frozen=True, kw_only=True)
class WeightedSources:
    """Adapters of one base and the weight on the update of each."""

    sources: Sequence[OpenAdapter]
    weights: Sequence[float]

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The layers that any of the adapters changes, as "component.module", sorted."""
        return tuple(sorted({key for source in self.sources for key in source}))

    def modules(self, key: str) -> Parts:
        """Return (module, weight) of each adapter that changes a layer."""
        pairs = zip(self.sources, self.weights, strict=True)
        return [(source[key], weight) for source, weight in pairs if key in source]


@contextmanager
def open_source(
    path: Path, *, base: str | None = None, names: LayerNames | None = None
) -> Iterator[OpenAdapter]:
    """Open an adapter file; `base` is the model it was made for, the family's public release by default.

    `names` finds the layers of a base that is open already. Raises InputError where the file is not a whole
    adapter, its family is not known or it has modules that the base lacks or has in another size.
    """
    if names is None and base is not None:
        facts = describe(BaseSettings(model=base))
        names = _names_in(families.family(facts.family), facts.release.architecture)
    contents, fit = check_usable(path, names=names)
    names = names or _names_of(contents, fit)
    with open_adapter(path, names=names, must_be_finite=True) as adapter:
        yield adapter


def open_weighted(
    inputs: Sequence[Weighted],
    stack: ExitStack,
    *,
    base: str | None = None,
    names: LayerNames | None = None,
) -> WeightedSources:
    """Open adapter files, at least one, until `stack` closes; raises as `open_source`, and for updates of zeros."""
    opened = (open_source(file, base=base, names=names) for file, _ in inputs)
    sources = [stack.enter_context(each) for each in opened]
    for source in sources:
        if changes_nothing(source.contents):
            raise InputError(
                f"{source.contents.name} changes nothing: all its updates are zero",
                fix="leave it out; nothing was learned, or saving it went wrong",
            )
    return WeightedSources(sources=sources, weights=[weight for _, weight in inputs])


def _names_of(contents: Contents, fit: Fit) -> LayerNames:
    """Return the names in the release that the file's modules fit, else in the base that our metadata name."""
    if fit.exact and fit.names is not None:
        return fit.names
    family, source = families.family(fit.family), stated_base(contents.metadata)
    # A file is not a reason to look into any folder: only the embedded bases and Hub ids are.
    if source is not None and (source in MINIATURES or is_hub_id(source)):
        facts = None
        with suppress(LoraTrainError):  # not on this machine: the public release is what there is
            facts = describe(BaseSettings(model=source))
        if facts is not None and facts.family == family.name:
            return _names_in(family, facts.release.architecture)
    return fit.names or released_names(family.name, 0)


def _names_in(family: Family, architecture: Mapping[str, Any]) -> LayerNames:
    # The sizes of this base's text encoders are in its weights only; those of the release may be others.
    text = {component: list(modules) for component, modules in family.text.layers.items()}
    return LayerNames(family, {DENOISER: denoiser_layers(family, architecture), **text})


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """The file or folder that a tool wrote."""

    file: Path
    family: str
    facts: tuple[str, ...]
    """Lines about it for people."""
    notes: tuple[str, ...]
    """Lines for people and scripts, such as losses that readers will have."""
    values: Mapping[str, Any]
    """Values for scripts."""

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        file = str(self.file)
        return {"file": file, "family": self.family, "notes": self.notes, **self.values}

    def text(self) -> str:
        """Return the file, the facts and the notes, a line each."""
        notes = (f"note: {note}" for note in self.notes)
        return "\n".join([f"wrote {self.file}", *self.facts, *notes])

    def with_more(self, *facts: str, notes: Iterable[str] = (), **values: Any) -> ToolResult:
        """Return the result with more facts and values at the end, and more notes at the start."""
        return replace(
            self,
            facts=(*self.facts, *facts),
            notes=(*notes, *self.notes),
            values={**self.values, **values},
        )


@dataclass(frozen=True, kw_only=True)
class AdapterTarget:
    """The adapter file that a tool has to write."""

    path: Path
    format: FormatRequest = "auto"
    precision: Precision | None = None
    """None: the precision of its input."""
    force: bool = False

    def check(self, reason: str = "") -> None:
        """Raise RequestError where the file cannot be written, before any work is done.

        `reason` begins the sentence about a name that is none of a file of tensors.
        """
        name = self.path.name
        if self.path.suffix != SUFFIX:
            fault = f"{reason}--output {name} does not end with {SUFFIX}"
            raise RequestError(fault, fix=f"call it {name}{SUFFIX}")
        refuse_existing(self.path, force=self.force)

    def write(
        self,
        modules: AdapterTensors,
        *,
        family: Family,
        default: Precision,
        entries: Mapping[str, str],
        layers: Mapping[str, Shape],
        exact: bool = False,
    ) -> ToolResult:
        """Write an adapter; `entries` are the header's, but for hashes, rank and alpha.

        `layers` are all of the denoiser's, with their shapes.

        Without a precision it is `default`; with `exact` it is fp32 instead where `default` would round, and
        a note says so. Modules are looked up several times, one at a time. Raises RequestError with the reason
        where the format cannot hold the adapter, for values beyond the precision and for an output that
        exists, unless `force`, and MachineError when the disk refuses.
        """
        contents = contents_of(modules)
        try:
            format = format_for(family, self.format, contents)
        except RequestError as error:
            raise RequestError(_as_option(error.found), fix=_as_option(error.fix)) from None
        notes = [_as_option(note) for note in format_notes(family, format, contents)]
        form = FileForm(
            family=family,
            format=format,
            precision=self.precision or default,
            lora_alpha=contents.lora_alpha,
            layers=layers,
        )
        rounds = exact and self.precision is None and default != "fp32"
        if rounds and not _is_exact(form, modules):
            form = replace(form, precision="fp32")
            notes.insert(
                0, f"written in fp32, as {default} would round it; --precision {default} rounds"
            )
        rank = contents.rank
        others: list[AdapterKind] = sorted(contents.kinds - {"lora"})
        network = network_entries(others[0] if others else "lora", dora=contents.dora)

        def with_strength(alpha: float | None) -> dict[str, str]:
            # As far as the float32 in the tensors is meant.
            stated_alpha = str(float(f"{rank if alpha is None else alpha:.7g}"))
            strength = {"ss_network_dim": str(rank), "ss_network_alpha": stated_alpha}
            return {**network, **entries, **strength}

        try:
            write_modules(self.path, modules, form, entries=with_strength, force=self.force)
        except Unwritable as error:
            raise RequestError(error.found, fix="write it with --precision fp32") from None
        except TrainingStopped as error:
            raise InputError(error.found, fix="report this as a bug; nothing was written") from None
        count, precision = len(modules), form.precision
        return ToolResult(
            file=self.path,
            family=family.name,
            facts=(f"{family.name}, {format} format, {precision}, {count} modules",),
            notes=tuple(notes),
            values={"format": format, "precision": precision, "modules": count, "rank": rank},
        )


def _is_exact(form: FileForm, modules: AdapterTensors) -> bool:
    """Say whether the precision of a form holds every value as fp32 would."""
    fp32 = replace(form, precision="fp32")
    for module in form.modules(modules):
        try:
            rounded = form.tensors(module, modules)
        except Unwritable:
            return False
        exact = fp32.tensors(module, modules)
        if not all(torch.equal(rounded[name].float(), exact[name]) for name in exact):
            return False
    return True


def _as_option(text: str) -> str:
    plain = text.replace("--set output.format=", "output.format=")
    return plain.replace("output.format=", "--format ")


# ---- header entries


def carried(metadata: Mapping[str, str], *, resized: bool) -> dict[str, str]:
    """Return the entries of an adapter made from one other, of another rank if `resized`."""
    # Entries about the tensors of the old file; peft's settings would be a second strength.
    left_out = {*HASHES, DIFFUSERS_METADATA, FOLDED}
    left_out |= {NETWORK_MODULE, NETWORK_ARGUMENTS} if resized else set()
    return {key: value for key, value in metadata.items() if key not in left_out}


def notes_on_new_tokens(file: Path, target: Path, metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note where an adapter's new tokens, which are a file of their own, do not come along."""
    word, source, place = trained_words(metadata), embedding_path(file), embedding_path(target)
    if word is None or place.is_file():
        return ()
    where = f"{place.parent.name}/{place.name}"
    copied = source if source.is_file() else "the file that came with the adapter"
    return (f"it needs its new tokens for {word.text!r}: copy {copied} to {where} beside it",)


# ---- convert


def beside(file: Path, format: FileFormat) -> Path:
    """Return the name of a converted file where none is asked for; raises InputError as `file_of`."""
    file = file_of(file)
    return file.with_name(f"{file.stem}-{format}{SUFFIX}")


def convert(file: Path, target: AdapterTarget, *, base: str | None = None) -> ToolResult:
    """Write `file` in another format; `base` is the model it was made for, the family's release by default.

    Raises RequestError with the reason where the format cannot hold the adapter, InputError for a file
    that cannot be used and MachineError when the disk refuses; nothing is written then.
    """
    target.check()
    with open_source(file_of(file), base=base) as source:
        metadata = source.contents.metadata
        written = target.write(
            source,
            family=source.names.family,
            layers=source.names.layers[DENOISER],
            default=source.precision,
            entries=carried(metadata, resized=False),
            exact=True,
        )
        return written.with_more(notes=notes_on_new_tokens(file, target.path, metadata))
