"""Adapter files that work elsewhere: key names, header, read-back, rolling names.

Input is the live adapter, output a safetensors file in the names of kohya, of diffusers or of
ComfyUI. A file is read back as a stranger's would be and compared with the live adapter before it
is published. The same input gives the same bytes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lora_trainer.common.errors import InputError, MachineError, RequestError, TrainingStopped
from lora_trainer.common.files import disk_error, retry_while_open
from lora_trainer.config.declare import Precision
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.layout import DENOISER, TensorInfo
from lora_trainer.families.base.traits import FileFormat
from lora_trainer.lora.adapter_size import AdapterKind
from lora_trainer.lora.tensors import DTYPES, AdapterTensors, ModuleTensors, split_key
from lora_trainer.lora_file.base_layers import LayerNames, Shape
from lora_trainer.lora_file.embedding import embedding_path
from lora_trainer.lora_file.joined_rows import FileModule, file_modules, join
from lora_trainer.lora_file.key_formats import (
    ALPHA,
    SCALED,
    STRONG,
    AdapterContents,
    file_endings,
)
from lora_trainer.lora_file.metadata import ExportInfo, metadata
from lora_trainer.lora_file.read import FOLDED
from lora_trainer.lora_file.read_tensors import open_adapter, tensor_bytes, tensor_info
from lora_trainer.lora_file.tensor_file import Body, ordered, write_tensors

# Factors that readers multiply as matrices: a convolution's kernel is flattened into the rows.
_FLAT = frozenset({"w1_b", "w2_b"})


class Unwritable(TrainingStopped):
    """Values that are not finite, or do not fit the precision of the file."""


def contents_of(tensors: AdapterTensors) -> AdapterContents:
    """Return the contents of an adapter that decide its format; every module is looked up once."""
    kinds, names, has_bias = set[AdapterKind](), set[str](), False
    ranks, alphas = Counter[int](), Counter[float]()
    for module in tensors.values():
        kinds.add(module.kind)
        names |= module.tensors.keys()
        has_bias |= "bias" in module.tensors and module.kind != "norm"
        ranks[module.rank] += 1
        if module.kind == "lora":
            alphas[module.scale * module.rank] += 1
    return AdapterContents(
        kinds=frozenset(kinds),
        dora=bool(names & {"magnitude", "input_magnitude"}),
        text=any(split_key(key)[0].startswith("text_encoder") for key in tensors),
        bias=has_bias,
        input_dora="input_magnitude" in names,
        rank=ranks.most_common(1)[0][0],
        lora_alpha=alphas.most_common(1)[0][0] if alphas else 1.0,
    )


def write_export(
    path: Path,
    tensors: AdapterTensors,
    *,
    family: Family,
    info: ExportInfo,
    format: FileFormat,
    precision: Precision,
    layers: Mapping[str, Shape] | None = None,
) -> None:
    """Publish a trained adapter at `path` once it reads back right.

    `layers` are all of the denoiser's, which a format with joined layers needs. Raises TrainingStopped when a value
    is not finite or does not fit `precision`, or a module differs by more than rounding explains, and MachineError
    when the disk refuses or gives other bytes back.
    """
    alpha = contents_of(tensors).lora_alpha
    form = FileForm(
        family=family, format=format, precision=precision, lora_alpha=alpha, layers=layers or {}
    )
    try:
        write_modules(
            path, tensors, form, entries=lambda _: metadata(info), in_memory=True, force=True
        )
    except RequestError as error:  # the run's folder is gone, which nobody asked for here
        raise MachineError(error.found, fix=error.fix) from None


def write_modules(
    path: Path,
    modules: AdapterTensors,
    form: FileForm,
    *,
    entries: Callable[[float | None], Mapping[str, str]],
    in_memory: bool = False,
    force: bool,
) -> None:
    """Write an adapter; the file appears at `path` when it has been read back and compared with the modules.

    `entries` gives the header's entries but the hashes, for the alpha that most modules state. Modules are looked
    up several times, one at a time; `in_memory` keeps what the file has of them, which is a third faster. Raises
    as `write_tensors` and `FileForm.tensors`, and TrainingStopped for a file that does not hold the adapter.
    """

    def of_module(module: FileModule) -> dict[str, Tensor]:
        return form.tensors(module, modules)

    tensors_of = cache(of_module) if in_memory else of_module
    infos, module_of = dict[str, TensorInfo](), dict[str, FileModule]()
    alphas = Counter[float | None]()
    for module in form.modules(modules):
        tensors = tensors_of(module)
        infos |= {name: tensor_info(tensor) for name, tensor in tensors.items()}
        module_of |= dict.fromkeys(tensors, module)
        strengths = (float(tensor) for name, tensor in tensors.items() if name.endswith(ALPHA))
        alphas[next(strengths, None)] += 1
    # The entry keeps `inspect` from taking the missing alpha for a lost one.
    strength = {FOLDED: "multiplied in"} if None in alphas else {}

    def bodies() -> Iterator[Body]:
        # A file begins with the widest dtype, so a module's alpha is not beside its factors: a module that is
        # not held in memory is made twice.
        last, tensors = None, dict[str, Tensor]()
        for name in ordered(infos):
            if module_of[name] is not last:
                last = module_of[name]
                tensors = tensors_of(last)
            yield tensor_bytes(tensors[name])

    write_tensors(
        path,
        ordered(infos),
        bodies(),
        metadata={**entries(alphas.most_common(1)[0][0]), **strength},
        force=force,
        check=lambda file: check_written(file, modules, form),
    )


def final_export_name(name: str) -> str:
    """Return the file name of a run's final export."""
    return f"{name}.safetensors"


def step_export_name(name: str, *, step: int) -> str:
    """Return the file name of a rolling export."""
    return f"{name}-step{step:08d}.safetensors"


def best_export_name(name: str) -> str:
    """Return the file name of the export of a run's best step."""
    return f"{name}-best.safetensors"


def prune_exports(folder: Path, *, name: str, keep_last: int) -> list[Path]:
    """Remove a run's rolling exports but the `keep_last` newest by step, and their embeddings.

    Returns the removed exports. Call it after the newest is published. Nothing that is not named like
    a rolling export of `name` is touched. Raises MachineError when the disk refuses.
    """
    pattern = re.compile(rf"{re.escape(name)}-step(\d{{8,}})\.safetensors")
    matches_of = {path: pattern.fullmatch(path.name) for path in folder.iterdir()}
    steps = {path: int(match[1]) for path, match in matches_of.items() if match}
    oldest_first = sorted(steps, key=lambda path: steps[path])
    removed = oldest_first[: max(0, len(oldest_first) - keep_last)]
    for path in removed:
        try:
            retry_while_open(path.unlink)
            embedding_path(path).unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(path, error) from error
    return removed


@dataclass(frozen=True, kw_only=True)
class FileForm:
    """How a file states an adapter.

    kohya files state the strength of LoRAs as `alpha`, one for all modules (`lora_alpha`, the most frequent),
    because diffusers 0.42 gives attention layers the most frequent alpha. The rest of a module's strength is
    multiplied into `up`. In the other formats the whole strength is multiplied in, because their readers disagree
    about where it is written. The same is done for a LoHa and a LoKr, whose alpha in kohya files is their rank
    (docs/formats.md).
    """

    family: Family
    format: FileFormat
    """A format that `key_formats.format_for` allows."""
    precision: Precision
    lora_alpha: float
    layers: Mapping[str, Shape] = field(default_factory=dict)
    """All layers of the denoiser with their shapes, for formats that join several layers into one weight."""

    def modules(self, keys: Iterable[str]) -> tuple[FileModule, ...]:
        """Return the modules of the file; raises as `joined_rows.file_modules`."""
        return file_modules(keys, family=self.family, format=self.format, layers=self.layers)

    def tensors(self, part: FileModule, modules: AdapterTensors) -> dict[str, Tensor]:
        """Return the file's tensors of one of `modules()` by name, rounded, on the CPU.

        Raises Unwritable for values, InputError for rows of a Kronecker product and as `joined_rows.join`.
        """
        key, name, module = part.layers[0][0], part.name, join(part, modules)
        if module.rows is not None:
            raise InputError(
                f"{key} has some rows of a Kronecker product only (LoKr of joined layers), which no "
                "file with one weight for each layer can state",
                fix="make a LoRA of it with `lora-train resize --rank`, or merge it with --into",
            )
        component, _ = split_key(key)
        alpha, strength = self._alpha(module), 1.0
        if module.kind in SCALED and module.scale * module.rank != alpha:
            # Readers compute alpha / rank; the rest of scale = alpha / rank x strength is in the tensors.
            strength = module.scale if alpha is None else module.scale * module.rank / alpha
        endings = file_endings(self.format, module.kind, component=component)
        tensors: dict[str, Tensor] = {}
        for role, tensor in module.tensors.items():
            wide = _float64(tensor)
            # A DoRA magnitude scales the base's weight and not the update, so it is rounded to as many
            # digits as its readers allow.
            digits: Precision = self.precision
            # Each product takes the strength once, as s (A B) * (C D) = (s A B) * (C D) in a LoHa.
            if role in STRONG:
                wide = wide * strength
            if role in _FLAT:
                wide = wide.flatten(1)
            if role in ("by_output", "by_input") and wide.dim() > 1:
                wide = wide[None]  # as LyCORIS broadcasts it over the weight of a convolution
            if role in ("magnitude", "input_magnitude"):
                wide = _magnitude(wide, module, role, self.format)
                # diffusers tells a file's format by its first tensor, and files begin with the widest
                # dtype: that must stay a factor's.
                half = self.format == "diffusers" and self.precision != "fp32"
                digits = "fp16" if half else "fp32"
            ending = endings[role.removeprefix("input_")]
            tensors[f"{name}{ending}"] = _rounded(wide, key=key, precision=digits)
        if module.kind == "ia3":
            is_input = float("by_input" in module.tensors)
            tensors[f"{name}{endings['on_input']}"] = torch.tensor(is_input)
        if alpha is not None:  # in fp32, as readers take it with .item()
            tensors[f"{name}{ALPHA}"] = torch.tensor(alpha, dtype=torch.float32)
        return tensors

    def _alpha(self, module: ModuleTensors) -> float | None:
        """Return the alpha that the file states, None where the strength is multiplied into the factors.

        The alpha of an OFT is a limit on its rotations; 0 is none. That of a LoHa and a LoKr is the rank, as
        LyCORIS 4.1 merges alpha / rank squared. Readers of ComfyUI's names take an alpha for all kinds,
        but diffusers 0.42 refuses it beside a LoRA or a LoKr.
        """
        if module.kind == "oft":
            return None if self.format == "diffusers" else 0.0
        if module.kind not in SCALED or self.format != "kohya":
            return None
        return self.lora_alpha if module.kind == "lora" else float(module.rank)


def _magnitude(tensor: Tensor, module: ModuleTensors, role: str, format: FileFormat) -> Tensor:
    """Return a DoRA magnitude in the shape that readers of the format want."""
    down = module.tensors.get("down")
    if format == "diffusers":  # peft: [out] for a linear layer, [1, out, 1, ...] for a convolution
        kernel = module.tensors["down"].ndim - 2
        return tensor.reshape(1, -1, *(1,) * kernel) if kernel else tensor
    if down is None or role == "input_magnitude" or module.kind != "lora":
        return tensor
    return tensor.reshape(-1, *(1,) * (down.ndim - 1))


def _rounded(tensor: Tensor, *, key: str, precision: Precision) -> Tensor:
    if not tensor.isfinite().all():
        raise Unwritable(
            f"the adapter of {key} holds values that are not finite numbers",
            fix="resume from an earlier state with a lower optimizer.learning_rate",
        )
    rounded = tensor.to(DTYPES[precision]).contiguous()
    if not rounded.isfinite().all():
        largest, limit = tensor.abs().max(), torch.finfo(rounded.dtype).max
        raise Unwritable(
            f"the adapter of {key} reaches {largest:.3g}, {precision} ends at {limit:.3g}",
            fix="export with --set output.precision=fp32",
        )
    return rounded


# A LoRA's alpha is a float32 in the file, by which its numbers are off on top of their own rounding.
_ALPHA_ROUNDING = 2e-7


def check_written(file: Path, tensors: AdapterTensors, form: FileForm) -> None:
    """Read a file back; raises TrainingStopped when a module is missing, or differs by more than rounding."""
    names: dict[str, dict[str, Shape]] = {}
    for key in tensors:
        component, layer = split_key(key)
        names.setdefault(component, {})[layer] = ()
    if DENOISER in names:
        names[DENOISER] |= form.layers
    try:
        with open_adapter(file, names=LayerNames(form.family, names)) as adapter:
            for module in form.modules(tensors):
                keys = tuple(key for key, _ in module.layers)
                if not adapter.contents.parts.keys() & {module.name} or not all(
                    key in adapter for key in keys
                ):
                    raise _not_the_adapter(f"{' and '.join(keys)} is missing")
                live = join(module, tensors)
                fault = _fault_of(live, adapter.module(module.name), precision=form.precision)
                if fault:
                    raise _not_the_adapter(f"{' and '.join(keys)} {fault}")
    except InputError as error:
        raise _not_the_adapter(error.found) from None


def _fault_of(live: ModuleTensors, read: ModuleTensors, *, precision: Precision) -> str:
    """Say how a module in a file differs from the live one, "" where rounding explains all."""
    if read.kind != live.kind or _shapes(read) != _shapes(live):
        return "has other tensors or shapes"
    # The numbers are compared and not the norm of the update: LoHa and LoKr multiply factors element by
    # element, where a bound on the norm would pass anything.
    slack, factor = _ALPHA_ROUNDING if live.kind == "lora" else 0.0, 1.0
    if live.kind in SCALED and read.scale != live.scale:
        if not read.scale:
            return "would differ by all of its strength"
        # A file of another strength must hold factors that make up for it.
        factor = live.scale / read.scale
    for name, tensor in live.tensors.items():
        exact = _float64(tensor) * (factor if name in STRONG else 1.0)
        number = _float64(read.tensors[name]).reshape(exact.shape)
        # A number moves by at most eps / 2 of itself, or half a subnormal spacing near zero. A fixed percentage
        # would refuse the tiny values of a first step and pass a wrong alpha in bf16.
        limits = torch.finfo(DTYPES[precision])
        spacing = exact.abs() * (limits.eps / 2 + slack) + limits.tiny * limits.eps / 2
        if not ((number - exact).abs() <= spacing).all():
            error = float((number - exact).norm() / exact.norm())
            return f"would differ by {error:.1e} in {name}"
    return ""


def _shapes(module: ModuleTensors) -> dict[str, tuple[int, ...]]:
    """Kernels may be flattened: readers take factors as matrices."""
    return {
        name: (tensor.shape[0], math.prod(tensor.shape[1:]))
        for name, tensor in sorted(module.tensors.items())
    }


def _not_the_adapter(fault: str) -> TrainingStopped:
    return TrainingStopped(
        f"the exported file does not hold the adapter: {fault}",
        fix="report this as a bug; the saved states are unharmed",
    )


def _float64(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().to(torch.float64)  # MPS has no float64
