"""`convert`, and the writing of an adapter that need not fit into memory, which the other tools share.

Input are modules that are read when looked up, output a file in the names of kohya, of diffusers or
of ComfyUI, with the same bytes that an export of the live adapter would have. The file appears when
it is whole and every module has been read back. Where a format states no strength, it is multiplied
into the tensors, in fp32 if their own precision would round it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_trainer import __version__
from lora_trainer.common.errors import InputError, RequestError, TrainingStopped
from lora_trainer.common.wording import public_source, public_text
from lora_trainer.config.declare import Precision
from lora_trainer.families.base import BaseFacts, Family, FileFormat
from lora_trainer.lora.tensors import AdapterTensors, ModuleTensors
from lora_trainer.lora_file.formats import AdapterContents, FormatRequest, format_for, format_notes
from lora_trainer.lora_file.header import file_of
from lora_trainer.lora_file.metadata import SETTINGS_ENTRY, kohya_entries, stated_base
from lora_trainer.lora_file.read import DIFFUSERS_METADATA, FOLDED
from lora_trainer.lora_file.stream import HASHES, refuse_existing
from lora_trainer.lora_file.write import FileForm, common_alpha, contents_of, write_modules
from lora_trainer.tools.adapters import open_source

SUFFIX = ".safetensors"
_NOT_CARRIED = frozenset({*HASHES, DIFFUSERS_METADATA, FOLDED})
"""Header entries about the tensors of the old file; peft's settings would be a second strength."""
_MODULE, _ARGUMENTS = "ss_network_module", "ss_network_args"


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """The file or folder that a tool wrote: `facts` about it are lines for people, `values` for scripts.

    `notes` are for both, such as losses that readers will have.
    """

    file: Path
    family: str
    facts: tuple[str, ...]
    notes: tuple[str, ...]
    values: Mapping[str, Any]

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
class Summary:
    """The facts about an adapter that its header states: `rank` and `alpha` are those of most modules."""

    rank: int
    alpha: float
    contents: AdapterContents


class _ToolForm(FileForm):
    """A form of file that names the option which widens it."""

    def tensors(self, key: str, module: ModuleTensors) -> dict[str, Tensor]:
        """Return the file's tensors of one module by name; raises RequestError for values beyond the precision."""
        try:
            return super().tensors(key, module)
        except TrainingStopped as error:
            raise RequestError(error.found, fix="write it with --precision fp32") from None

    def exact(self, modules: AdapterTensors) -> bool:
        """Say whether this precision holds every value as fp32 would."""
        fp32 = replace(self, precision="fp32")
        for key, module in modules.items():
            try:
                rounded = self.tensors(key, module)
            except RequestError:
                return False
            exact = fp32.tensors(key, module)
            if not all(torch.equal(rounded[name].float(), exact[name]) for name in exact):
                return False
        return True


@dataclass(frozen=True, kw_only=True)
class AdapterTarget:
    """The adapter file that a tool is to write; `precision` None: that of its input."""

    path: Path
    format: FormatRequest = "auto"
    precision: Precision | None = None
    force: bool = False

    def check(self) -> None:
        """Raise RequestError where the file cannot be written, before any work is done."""
        name, stem = self.path.name, self.path.stem
        if self.path.suffix != SUFFIX:
            fault = f"--output {name} does not end with {SUFFIX}"
            raise RequestError(fault, fix=f"call it {stem}{SUFFIX}")
        refuse_existing(self.path, force=self.force)

    def write(
        self,
        modules: AdapterTensors,
        *,
        family: Family,
        default: Precision,
        entries: Callable[[Summary], Mapping[str, str]],
        exact: bool = False,
    ) -> ToolResult:
        """Write an adapter; `entries` gives the header's entries but the hashes.

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
        notes = [_as_option(note) for note in format_notes(format, contents)]
        form = _ToolForm(
            family=family,
            format=format,
            precision=self.precision or default,
            lora_alpha=common_alpha(modules.values()),
        )
        rounds = exact and self.precision is None and default != "fp32"
        if rounds and not form.exact(modules):
            form = replace(form, precision="fp32")
            notes.insert(
                0, f"written in fp32, as {default} would round it; --precision {default} rounds"
            )
        rank = Counter(module.rank for module in modules.values()).most_common(1)[0][0]

        def with_strength(alpha: float | None) -> Mapping[str, str]:
            file_alpha = float(rank) if alpha is None else alpha
            return entries(Summary(rank=rank, alpha=file_alpha, contents=contents))

        try:
            write_modules(self.path, modules, form, entries=with_strength, force=self.force)
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
        return target.write(
            source,
            family=source.names.family,
            default=source.precision,
            entries=lambda summary: carried(source.metadata, summary, resized=False),
            exact=True,
        )


def _as_option(text: str) -> str:
    plain = text.replace("--set output.format=", "output.format=")
    return plain.replace("output.format=", "--format ")


# ---- header entries


def carried(metadata: Mapping[str, str], summary: Summary, *, resized: bool) -> dict[str, str]:
    """Return the entries of an adapter made from one other, of another rank if `resized`."""
    kept_entries = {key: value for key, value in metadata.items() if key not in _NOT_CARRIED}
    if resized:
        for key in (_MODULE, _ARGUMENTS):
            kept_entries.pop(key, None)
    return {**_network(summary), **kept_entries, **_strength(summary)}


def merged(
    files: Sequence[tuple[str, Mapping[str, str]]], summary: Summary, *, title: str
) -> dict[str, str]:
    """Return the entries of a sum of adapters, (name, metadata): those that all share, and their names."""
    first, *others = [metadata for _, metadata in files]
    common = {
        key: value
        for key, value in first.items()
        if all(other.get(key) == value for other in others)
    }
    bases = {stated_base(metadata) for _, metadata in files}
    if len(bases) == 1 and (base := bases.pop()) is not None:
        common.setdefault(SETTINGS_ENTRY, _made_for(base))
    names = ", ".join(public_text(name) for name, _ in files)
    return {
        **carried(common, summary, resized=True),
        "ss_output_name": public_text(title),
        "modelspec.title": public_text(title),
        "modelspec.merged_from": names,
    }


def extracted(
    tuned: str, base: str, *, family: Family, facts: BaseFacts, title: str, summary: Summary
) -> dict[str, str]:
    """Return the entries of the difference between two base models."""
    return {
        **_network(summary),
        **_strength(summary),
        "ss_base_model_version": family.adapter_names(facts).kohya,
        "ss_sd_model_name": public_source(base),
        "ss_output_name": public_text(title),
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": family.adapter_names(facts).modelspec,
        "modelspec.implementation": "diffusers",
        "modelspec.title": public_text(title),
        "modelspec.description": f"{public_source(tuned)} minus {public_source(base)}",
        "lora_train.version": __version__,
        SETTINGS_ENTRY: _made_for(public_source(base)),
    }


def _made_for(base: str) -> str:
    return json.dumps({"base.model": base})


def _network(summary: Summary) -> dict[str, str]:
    """Return with which of kohya's networks an adapter of this kind is read."""
    others = sorted(summary.contents.kinds - {"lora"})
    arguments = (
        {"algo": kohya_entries()["algorithms"][others[0] if others else "lora"]}
        if others or summary.contents.dora
        else {}
    )
    if summary.contents.dora:
        arguments |= {"dora_wd": "True", "wd_on_output": "True"}
    return {
        _MODULE: "lycoris.kohya" if arguments else "networks.lora",
        _ARGUMENTS: json.dumps(arguments),
    }


def _strength(summary: Summary) -> dict[str, str]:
    alpha = float(f"{summary.alpha:.7g}")  # as far as the float32 in the tensors is meant
    return {"ss_network_dim": str(summary.rank), "ss_network_alpha": str(alpha)}
