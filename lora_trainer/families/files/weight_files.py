"""Weight files: the header and the tensors of safetensors and GGUF, and which quantisation is not read.

A header is read without torch. ComfyUI's layouts of quantised weights are in quantised_layouts.py. GGUF's format is
that of ggml (docs/gguf.md), with ComfyUI-GGUF's `comfy.gguf.orig_shape.NAME` for tensors that were reshaped before
quantisation; the package gguf is needed to load such a file, not to plan with it. Every function raises InputError
naming the file.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from safetensors import SafetensorError, safe_open

from lora_trainer.common.errors import InputError, MachineError
from lora_trainer.families.base.layout import Header, TensorInfo
from lora_trainer.families.files.foreign import FIRST_BYTES, ForeignFileError, check_first_bytes
from lora_trainer.families.files.hub_files import GGUF
from lora_trainer.families.files.quantised_layouts import (
    BESIDE_WEIGHTS,
    LAYOUT,
    UnreadLayoutError,
    WeightLayout,
    quantised_weights,
    stated_layers,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Largest header read of a safetensors file; the format allows 100 MB, the largest base models need 1 MB.
MAX_HEADER_BYTES = 16_000_000
MAX_TENSORS = 100_000
_TOO_MANY = f"it names more than {MAX_TENSORS:,} tensors"
MAX_DIMENSIONS = 16
MAX_KEY_LENGTH = 1_000
# How much of a file is mapped at a time while its tensors are read.
READ_BYTES = 2**28
# Tensors of fewer bytes are copied from a mapped file.
VIEWED_BYTES = 2**20
# Of Linux's mmap(2); Python names it from 3.13 on.
_MAP_NORESERVE = 0x4000
AGAIN = "download the base model again"
_Layouts = Mapping[str, WeightLayout | UnreadLayoutError]
_NO_PARAMETERS = ("position_ids", "running_mean", "running_var", "num_batches_tracked")
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
# What torch writes and reads with pickle, which can run any program when it is opened.
PICKLES = frozenset({".ckpt", ".pt", ".pth", ".bin", ".pkl"})
# What is read, in the words of every message and page.
READABLE = (
    "fp32, bf16, fp16, fp8 plain or with a scale per tensor or row, ComfyUI's int8 (ConvRot too), mxfp8 and nvfp4, "
    "and GGUF"
)
_USE_READABLE = (
    "use such a version of this model; lora-train quantises it again where memory asks for it"
)
# Kinds of quantisation that are not read -> endings of the tensors that give them away.
_QUANTISED = (
    (
        "bitsandbytes (NF4, INT8)",
        (".absmax", ".quant_map", ".SCB", ".quant_state.bitsandbytes__nf4"),
    ),
    ("SVDQuant (Nunchaku) or GPTQ", (".qweight", ".wscales")),
    ("fp8 in blocks", (".weight_scale_inv",)),
    ("torchao or quanto stores it", ("._data", ".weight_qdata", ":qdata")),
)
# Dtypes that no layer of an unquantised network has; I64 and I32 are positions.
_PACKED = frozenset({"I8", "U8", "I4", "U4", "F4", "F8_E8M0", "F6_E2M3", "F6_E3M2"})


def read_header(file: Path) -> Header:
    """Return the weights in a safetensors or GGUF file, by their shapes in the network, without their scales.

    Raises InputError for a truncated or foreign file.
    """
    tensors, layouts = _raw_header(file)
    header = dict[str, TensorInfo]()
    for name, info in tensors.items():
        # Scales are not layers: they would count as parameters, and no network has them.
        if is_beside_weight(name):
            continue
        layout = layouts.get(name)
        shape = layout.shape if isinstance(layout, WeightLayout) else info.shape
        header[name] = TensorInfo(dtype=info.dtype, shape=shape)
    return header


def is_beside_weight(name: str) -> bool:
    """Return whether a tensor describes the quantised weight beside it and is not a weight itself."""
    return name.rpartition(".")[2] in BESIDE_WEIGHTS


def _raw_header(file: Path) -> tuple[Header, _Layouts]:
    """Return all tensors of a weight file, scales too, and the layouts of its quantised weights by their names.

    A layout is an UnreadLayoutError where it is not read, that of the name "" where the whole file's list is not.
    """
    with _as_input_error(file):
        if file.suffix == GGUF:
            tensors: Header = _read_gguf(file)[0]
            check_limits(tensors)
            return tensors, {}
        with file.open("rb") as stream:
            header, start = safetensors_header(stream)
            tensors = {
                name: TensorInfo(dtype=entry["dtype"], shape=tuple(entry["shape"]))
                for name, entry in header.items()
                if name != "__metadata__"
            }
            check_limits(tensors)
            texts = dict[str, bytes]()
            for name in tensors:
                if name.rpartition(".")[2] == LAYOUT:
                    begin, end = header[name]["data_offsets"]
                    stream.seek(start + begin)
                    texts[name] = stream.read(min(end - begin, MAX_KEY_LENGTH))
    try:
        stated = stated_layers(tensors, texts, header.get("__metadata__") or {})
    except UnreadLayoutError as error:
        return tensors, {"": error}
    return tensors, dict(quantised_weights(tensors, stated))


@contextmanager
def _as_input_error(file: Path) -> Iterator[None]:
    """Turn what a truncated or foreign weight file raises into an InputError that names it."""
    try:
        yield
    except ForeignFileError as error:
        raise InputError(f"{file} {error.fault}, not weights", fix=error.fix) from None
    except (
        OSError, ValueError, SafetensorError, struct.error, MemoryError, OverflowError, AttributeError, KeyError,
        TypeError, IndexError, RecursionError,
    ) as error:  # fmt: skip
        kind = "GGUF" if file.suffix == GGUF else "safetensors"
        fault, fix = f"is not a whole {kind} file", AGAIN
        if "unknown variant" in str(error):  # a dtype that safetensors does not know
            fault, fix = (
                f"has numbers of a type that is not read; readable are {READABLE}",
                _USE_READABLE,
            )
        raise InputError(f"{file} {fault} ({error})", fix=fix) from None


def read_metadata(file: Path) -> Mapping[str, str]:
    """Return the texts that a weight file's header states beside its tensors; raises InputError as `read_header`."""
    with _as_input_error(file):
        if file.suffix == GGUF:
            values = _read_gguf(file)[1]
        else:
            with file.open("rb") as stream:
                values = safetensors_header(stream)[0].get("__metadata__") or {}
        return {key: value for key, value in values.items() if isinstance(value, str)}


def safetensors_header(stream: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the header of a whole safetensors file, parsed, and where its tensors begin.

    Raises ValueError, SafetensorError, RecursionError or OSError for any other file.
    """
    check_first_bytes(stream.read(FIRST_BYTES), name=stream.name)
    stream.seek(0)
    # The first 8 bytes are the header's length: any other file gives an absurd number here.
    length = int.from_bytes(stream.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length:,} bytes")
    text = stream.read(length)
    # A tensor's entry has three brackets and, with `MAX_DIMENSIONS`, at most 19 commas. Counted before the header is
    # parsed, which takes many times its bytes.
    brackets = text.count(b"{") + text.count(b"[")
    if brackets > 4 * MAX_TENSORS or text.count(b",") > 20 * MAX_TENSORS:
        raise ValueError(_TOO_MANY)
    header: dict[str, Any] = json.loads(text)
    try:
        with safe_open(stream.name, framework="numpy"):  # checks that the file is whole
            pass
    except SafetensorError:
        # Of a header that nobody has checked yet; a download that stopped early has a good one.
        with suppress(AttributeError, LookupError, TypeError):
            ends = [header[name]["data_offsets"][1] for name in header.keys() - {"__metadata__"}]
            needed_bytes, here_bytes = 8 + length + max(ends, default=0), stream.seek(0, 2)
            if here_bytes < needed_bytes:
                raise ValueError(
                    f"{here_bytes:,} bytes, its header says {needed_bytes:,}"
                ) from None
        raise
    # safetensors takes an entry as a list of its fields too.
    if not all(isinstance(each, dict) for each in header.values() if each is not None):
        raise ValueError("an entry that is not an object")
    return header, 8 + length


def check_limits(tensors: Header) -> None:
    """Raise ValueError for more tensors, longer names or more dimensions than any model has."""
    if len(tensors) > MAX_TENSORS:
        raise ValueError(_TOO_MANY)
    if any(len(name) > MAX_KEY_LENGTH for name in tensors):
        raise ValueError(f"a tensor's name of more than {MAX_KEY_LENGTH:,} characters")
    if any(len(info.shape) > MAX_DIMENSIONS for info in tensors.values()):
        raise ValueError(f"a tensor of more than {MAX_DIMENSIONS} dimensions")
    if any(length < 0 for info in tensors.values() for length in info.shape):
        raise ValueError("a tensor of negative size")


def refuse_quantised(file: Path) -> None:
    """Raise InputError for weights in a quantisation that is not read: taken as numbers they are noise."""
    if kind := unread_quantisation(file):
        raise _unread(file, kind)


def _unread(file: Path, kind: str) -> InputError:
    return InputError(
        f"{file.name} is quantised {kind}; readable are {READABLE}", fix=_USE_READABLE
    )


def unread_quantisation(file: Path) -> str:
    """Return the quantisation that is not read, to follow "quantised"; empty if all of a file's tensors are read."""
    tensors, layouts = _raw_header(file)
    for kind, endings in _QUANTISED:
        if first := next((name for name in tensors if name.endswith(endings)), None):
            return f"as {kind} ({first})"
    for layout in layouts.values():
        if isinstance(layout, UnreadLayoutError):
            return str(layout)
    readable = GGUF_TYPES if file.suffix == GGUF else _FLOATS
    for name, info in tensors.items():
        if name in layouts or is_beside_weight(name):
            continue
        # Norms, biases and buffers keep their type in quantised files and say nothing.
        is_weight = name.endswith("weight") and info.dtype not in readable
        if len(info.shape) > 1 and (is_weight or info.dtype in _PACKED):
            return f"({name} is {info.dtype})"
    return ""


def holds_scales(file: Path) -> bool:
    """Return whether a file has weights that are numbers only together with scales beside them."""
    return bool(_raw_header(file)[1])


def read_tensors(
    file: Path, names: Mapping[str, str], *, dtype: torch.dtype, fp32: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return tensors cast to `dtype`, wanted name -> tensor; `names` maps it to the name in the file.

    `fp32` as in `TensorReader`, which raises InputError for a broken file.
    """
    with TensorReader(file, dtype=dtype, fp32=fp32) as reader:
        return {name: reader.read(stored) for name, stored in names.items()}


class TensorReader:
    """Reads tensors of a file one by one, cast to `dtype`, or to float32 with a part of their name in `fp32`.

    Quantised weights are restored in float32, some rows at a time; tensors stored in `dtype` are views of the mapped
    file. Pages of a mapped file that were read count as memory of the process until the mapping is closed.
    The file is mapped anew for every `READ_BYTES`, so a float32 base does not lie in memory beside its bf16
    copy. Small tensors are copied, and with `copies` all: one view keeps all that was read of its mapping in memory.
    Raises InputError for a broken file.
    """

    def __init__(
        self, file: Path, *, dtype: torch.dtype, fp32: Collection[str] = (), copies: bool = False
    ) -> None:
        self._file, self._dtype, self._mapping = file, dtype, ExitStack()
        self._fp32 = frozenset(fp32)
        self._viewed_bytes = math.inf if copies else VIEWED_BYTES
        self._tensors, self._layouts = _raw_header(file)
        self._mapped: Any = None
        self._left_bytes = 0
        if file.suffix == GGUF:
            require_gguf(file)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; reading goes on with a new mapping."""
        self._mapped, self._left_bytes = None, 0
        self._mapping.close()

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which the tensor of that name is read."""
        import torch

        return self._dtype if self._fp32.isdisjoint(name.split(".")) else torch.float32

    def read(self, name: str) -> Tensor:
        """Return the tensor of that name in the file."""
        if self._left_bytes <= 0:
            self.close()
            self._open()
        if self._file.suffix == GGUF:
            return self._read_gguf(name)
        try:
            stored: Tensor = self._mapped.get_tensor(name)
            self._left_bytes -= stored.nbytes
            match self._layouts.get(name, self._layouts.get("")):
                case WeightLayout() as layout:
                    from lora_trainer.families.files.dequantise import dequantised

                    beside = {each: self._mapped.get_tensor(each) for each in layout.beside}
                    return dequantised(stored, layout, beside, dtype=self.dtype_of(name))
                case UnreadLayoutError() as error:
                    raise _unread(self._file, str(error))
            return stored.to(self.dtype_of(name), copy=stored.nbytes < self._viewed_bytes)
        except SafetensorError as error:
            raise self._broken(error) from None

    def _open(self) -> None:
        self._left_bytes = READ_BYTES
        if self._file.suffix == GGUF:
            from gguf import GGUFReader

            self._mapped = {each.name: each for each in GGUFReader(str(self._file)).tensors}
            return
        try:
            self._mapped = self._mapping.enter_context(safe_open(self._file, framework="pt"))
        except SafetensorError as error:
            raise self._broken(error) from None
        except (RuntimeError, OSError) as error:
            # torch maps a file as memory that may be written, and Linux refuses more of that than the machine has:
            # a file of 41 GB on a machine of 32 GB.
            if "mmap" not in str(error):
                raise
            if sys.platform != "linux":
                raise MachineError(
                    f"{self._file} of {self._file.stat().st_size / 1e9:.1f} GB cannot be mapped into memory",
                    fix="enlarge the page file, or use a smaller version of this model, such as fp8",
                ) from None
            self._mapped = _Unreserved(self._file)

    def _read_gguf(self, name: str) -> Tensor:
        import torch
        from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor

        kind, packed = self._mapped[name].tensor_type, self._mapped[name].data
        self._left_bytes -= packed.nbytes
        values = torch.from_numpy(packed.copy())
        if kind.name not in ("F32", "F16"):
            values = dequantize_gguf_tensor(GGUFParameter(values, quant_type=kind))
        return values.reshape(self._tensors[name].shape).to(self.dtype_of(name))

    def _broken(self, error: SafetensorError) -> InputError:
        return InputError(f"{self._file} is not a whole safetensors file ({error})", fix=AGAIN)


class _Unreserved:
    """A safetensors file, mapped without a claim on memory for what might be written; read as `safe_open` reads.

    The mapping ends with the last tensor that is a view of it. On Linux.
    """

    def __init__(self, file: Path) -> None:
        from mmap import MAP_PRIVATE, PROT_READ, PROT_WRITE

        with file.open("rb") as stream:
            self._header, self._start = safetensors_header(stream)
            self._bytes = mmap(
                stream.fileno(), 0, flags=MAP_PRIVATE | _MAP_NORESERVE, prot=PROT_READ | PROT_WRITE
            )

    def get_tensor(self, name: str) -> Tensor:
        import torch
        from safetensors.torch import _TYPES as DTYPES

        entry = self._header[name]
        start, end = entry["data_offsets"]
        dtype: Any = DTYPES[entry["dtype"]]
        if start == end:
            return torch.empty(entry["shape"], dtype=dtype)
        count = (end - start) // dtype.itemsize
        flat = torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=self._start + start)
        return flat.reshape(entry["shape"])


def count_parameters(
    files: Iterable[Path], *, reads: Callable[[str], bool] = lambda name: True
) -> int:
    """Count the parameters in safetensors files; position ids and batch statistics are none.

    `reads` tells of a tensor's name whether it is loaded.
    """
    return sum(
        math.prod(info.shape)
        for file in files
        for name, info in read_header(file).items()
        if not name.endswith(_NO_PARAMETERS) and reads(name)
    )


# ---- GGUF

# Number of each type that diffusers can read -> its name, numbers and bytes of one block.
_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
}  # fmt: skip
GGUF_TYPES = frozenset(name for name, _, _ in _TYPES.values())
# Types of ggml that diffusers does not read.
_UNREAD_TYPES: Mapping[int, str] = {
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
# Number of each type of value -> its code in struct.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Most entries of a list: a broken length must not fill the memory.
_MOST = 1_000_000


class _Cursor:
    """Reads values of a GGUF header; struct.error past its end, ValueError for impossible lengths."""

    def __init__(self, data: mmap) -> None:
        self.data, self.at = data, 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def count(self) -> int:
        count = int(self.number("Q"))
        if count > _MOST:
            raise ValueError(f"a list of {count:,} entries")
        return count

    def text(self) -> str:
        length = self.count()
        if self.at + length > len(self.data):
            raise ValueError("a text beyond the header's end")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int | None = None) -> Any:
        """Read a value of that kind; None: its kind stands before it."""
        if kind is None:
            kind = int(self.number("I"))
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        inner = int(self.number("I"))
        # The format nests without limit, and a broken file could exhaust the stack.
        if inner == _ARRAY:
            raise ValueError("a list of lists")
        return [self.value(inner) for _ in range(self.count())]


def _read_gguf(file: Path) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """Return a GGUF file's tensors and the other values of its header.

    Raises OSError, struct.error, KeyError or ValueError (UnicodeDecodeError too) for a broken file.
    """
    # Mapped, not read: nobody knows the length of the header before its end.
    with file.open("rb") as stream:
        check_first_bytes(stream.read(FIRST_BYTES), name=file.name)
        mapped_file = mmap(stream.fileno(), 0, access=ACCESS_READ)
    with mapped_file as mapped:
        cursor = _Cursor(mapped)
        if mapped[:4] != b"GGUF" or struct.unpack_from("<I", mapped, 4)[0] not in (2, 3):
            raise ValueError("it is not a GGUF file of version 2 or 3")
        cursor.at = 8
        tensor_count, value_count = cursor.count(), cursor.count()
        values = {cursor.text(): cursor.value() for _ in range(value_count)}
        tensors, end = dict[str, TensorInfo](), 0
        for _ in range(tensor_count):
            name = cursor.text()
            dimensions = int(cursor.number("I"))
            if dimensions > 8:
                raise ValueError(f"a tensor of {dimensions} dimensions")
            # ggml lists the fastest dimension first, torch last.
            shape = tuple(int(cursor.number("Q")) for _ in range(dimensions))[::-1]
            kind, offset = int(cursor.number("I")), int(cursor.number("Q"))
            unread = _UNREAD_TYPES.get(kind, f"type {kind}")
            dtype, numbers, size = _TYPES.get(kind, (unread, 1, 0))
            # Offsets count from the start of the tensors' data; a quantised tensor is whole blocks of numbers.
            end = max(end, offset + math.prod(shape) // numbers * size)
            original = values.get(f"comfy.gguf.orig_shape.{name}", shape)
            if math.prod(original) != math.prod(shape):
                raise ValueError(f"{name} has the shapes {list(shape)} and {list(original)}")
            tensors[name] = TensorInfo(dtype=dtype, shape=tuple(map(int, original)))
        alignment = max(1, int(values.get("general.alignment", 32)))
        # The data start at the next multiple of the alignment behind the header (-(-a // b) rounds up).
        needed_bytes = -(-cursor.at // alignment) * alignment + end
        # A download that stopped early has a whole header; the last tensor of a whole file may be padded.
        if len(mapped) < needed_bytes:
            raise ValueError(f"{len(mapped):,} bytes, its header says {needed_bytes:,}")
        return tensors, values


def require_gguf(file: Path) -> None:
    """Raise MachineError when the package that reads GGUF is not installed."""
    if find_spec("gguf") is None:
        raise MachineError(
            f"{file.name} is a GGUF, which the package gguf reads, and that is not installed",
            fix="pip install gguf, or give the base model as .safetensors",
        )
