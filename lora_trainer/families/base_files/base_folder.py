"""Reading a base model's folders and files without loading a weight: JSON, headers, shards, counts.

Input is a `Layout`; every function raises InputError naming the part and the missing file. Torch-free.
"""

from __future__ import annotations

import json
import math
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from lora_trainer.common.errors import InputError
from lora_trainer.families.base_files import gguf_file
from lora_trainer.families.facts import Header, Layout, Part, TensorInfo

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MAX_HEADER_BYTES = 16_000_000
"""Largest header read of a safetensors file; the format allows 100 MB, the largest base models need 1 MB."""
MAX_TENSORS = 100_000
_TOO_MANY = f"it names more than {MAX_TENSORS:,} tensors"
MAX_DIMENSIONS = 16
MAX_KEY_LENGTH = 1_000
READ_BYTES = 2**28
"""How much of a file is mapped at a time while its tensors are read."""
AGAIN = "download the base model again"
COMPANION = "name the base model it was made from with --set base.companion=..."
CHAT_TEMPLATE = "chat_template.jinja"
_TOKENIZER_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})
_VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "spiece.model"})
_NO_PARAMETERS = ("position_ids", "running_mean", "running_var", "num_batches_tracked")
_STEMS = ("diffusion_pytorch_model", "model")
SUFFIXES = frozenset({".safetensors", ".sft", gguf_file.SUFFIX})
"""Suffixes of single files; `.sft` is safetensors under the name that FLUX.1's first release used."""
_WEIGHT_SCALES = ("scale_weight", "weight_scale")
"""Names of an fp8 weight's scale, a number or one per row, beside it (ComfyUI's former and present names)."""
BESIDE_WEIGHTS = (*_WEIGHT_SCALES, "scale_input", "input_scale", "scaled_fp8", "comfy_quant")
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_QUANTISED = (
    ("bitsandbytes (NF4, INT8)", (".absmax", ".quant_map", ".SCB")),
    ("NVFP4", (".weight_scale_2",)),
    ("SVDQuant (Nunchaku) or GPTQ", (".qweight", ".wscales")),
    ("fp8 in blocks", (".weight_scale_inv",)),
)
"""Kinds of quantisation that are not read -> endings of the tensors that give them away."""


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a base model."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"base model file {file} is missing or not JSON ({error})", fix=AGAIN
        ) from None
    if not isinstance(value, dict):
        raise InputError(f"base model file {file} is not a JSON object", fix=AGAIN)
    return value


def whole_number(config: Mapping[str, Any], key: str) -> int:
    """Return an integer of a configuration; raises InputError when it is missing or no integer."""
    if not isinstance(value := config.get(key), int):
        raise _wrong_value(config, key, allowed="a whole number")
    return value


def level_count(config: Mapping[str, Any]) -> int:
    """Return the number of a network's resolution levels; raises InputError for no list of channels."""
    key = "block_out_channels"
    channels = config.get(key)
    if not (isinstance(channels, list) and channels and all(isinstance(n, int) for n in channels)):
        raise _wrong_value(config, key, allowed="a list of whole numbers")
    return len(channels)


def _wrong_value(config: Mapping[str, Any], key: str, *, allowed: str) -> InputError:
    network = config.get("_class_name", "a text encoder")
    found = f"config.json of {network} has {key}={config.get(key)!r}, allowed is {allowed}"
    return InputError(found, fix=AGAIN)


def components(folder: Path) -> Mapping[str, str]:
    """Return component name -> class name of a diffusers folder; empty without model_index.json.

    The pipeline's own class has the key "".
    """
    index = folder / "model_index.json"
    if not index.is_file():
        return {}
    index_json = read_json(index)
    classes = {
        name: value[1]
        for name, value in index_json.items()
        if isinstance(value, list) and len(value) == 2 and isinstance(value[1], str)
    }
    return {"": str(index_json.get("_class_name", "")), **classes}


def part_folder(layout: Layout, part: Part, subfolder: str) -> Path:
    """Return the folder of a part's config.json: the folder in `layout.files`, else `subfolder`."""
    override = layout.files.get(part)
    return override if override is not None and override.is_dir() else layout.folder / subfolder


def part_file(layout: Layout, part: Part) -> Path | None:
    """Return the single file that holds a part's weights, None where they are in a folder."""
    override = layout.files.get(part)
    return override if override is not None and override.is_file() else None


def text_file(layout: Layout, component: str) -> Path | None:
    """Return the single file that holds a text encoder, None where it is in the layout's folder."""
    return layout.text.get(component, part_file(layout, "text_encoder"))


def weights(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a part's folder, full precision before fp16, shards in order.

    Raises InputError for a missing shard and for weights that exist as pickles only.
    """
    for variant in ("", ".fp16"):
        for stem in _STEMS:
            single = folder / f"{stem}{variant}.safetensors"
            index = folder / f"{stem}.safetensors.index{variant}.json"
            if single.is_file():
                return (single,)
            if index.is_file():
                return _shards(index)
    pickles = [path.name for path in folder.glob("*.bin")]
    contents = f"only {pickles[0]}, a pickle that can run code" if pickles else "no weights"
    raise InputError(
        f"base model part {folder} has {contents}; allowed is {_STEMS[0]}.safetensors or {_STEMS[1]}.safetensors",
        fix="download the safetensors version of the base model",
    )


def part_files(folder: Path, single: Path | None) -> tuple[Path, ...]:
    """Return the files of a part: its weights, in one file or in its folder, and its configuration."""
    return (*((single,) if single else weights(folder)), folder / "config.json")


def variant(folder: Path) -> str | None:
    """Return diffusers' `variant` argument that loads the files of `weights`."""
    return "fp16" if ".fp16" in weights(folder)[0].name else None


def tokenizer_of(component: str) -> str:
    """Return the folder of a text encoder's tokenizer, which is its name in the pipeline."""
    return component.replace("text_encoder", "tokenizer")


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of a tokenizer; raises InputError when there is no vocabulary."""
    files = {path.name: path for path in folder.glob("*") if path.suffix in _TOKENIZER_SUFFIXES}
    if not files.keys() & _VOCABULARIES:
        raise InputError(
            f"base model part {folder} has none of {', '.join(sorted(_VOCABULARIES))}", fix=AGAIN
        )
    if "vocab.json" in files and not files.keys() & {"tokenizer.json", "merges.txt"}:
        raise InputError(f"base model part {folder} has vocab.json without merges.txt", fix=AGAIN)
    return tuple(sorted(files.values()))


def check_chat_template(folder: Path) -> None:
    """Raise InputError when a language model's tokenizer has no chat template.

    Some releases keep the template in tokenizer_config.json, others in chat_template.jinja.
    """
    settings = folder / "tokenizer_config.json"
    # transformers raises for a missing template too, but only once the prompt is
    # encoded, after a download of 16 GB for FLUX.2 klein 4B.
    if not (folder / CHAT_TEMPLATE).is_file() and "chat_template" not in read_json(settings):
        raise InputError(
            f"base model part {folder} has no chat template: neither {CHAT_TEMPLATE} nor one in "
            f"{settings.name}",
            fix=AGAIN,
        )


def read_header(file: Path) -> Header:
    """Return the weights in a safetensors or GGUF file, without the scales of fp8 weights.

    Raises InputError for a truncated or foreign file.
    """
    is_gguf = file.suffix == gguf_file.SUFFIX
    try:
        tensors = gguf_file.read_gguf_header(file) if is_gguf else _safetensors_header(file)
        _check_count(tensors)
        if any(len(name) > MAX_KEY_LENGTH for name in tensors):
            raise ValueError(f"a tensor's name of more than {MAX_KEY_LENGTH:,} characters")
        if any(len(info.shape) > MAX_DIMENSIONS for info in tensors.values()):
            raise ValueError(f"a tensor of more than {MAX_DIMENSIONS} dimensions")
        if any(length < 0 for info in tensors.values() for length in info.shape):
            raise ValueError("a tensor of negative size")
    except (
        OSError, ValueError, SafetensorError, struct.error, MemoryError, OverflowError, AttributeError, KeyError,
        TypeError, IndexError, RecursionError,
    ) as error:  # fmt: skip
        kind = "GGUF" if is_gguf else "safetensors"
        fault, fix = f"is not a whole {kind} file", AGAIN
        if "unknown variant" in str(error):  # a dtype that safetensors does not know
            fault = "has numbers of a type that is not read"
            fix = "get a bf16, fp16 or fp8 version of this model"
        raise InputError(f"{file} {fault} ({error})", fix=fix) from None
    return {
        name: info
        for name, info in tensors.items()
        # Scales are no layers: they would count as parameters, and no network has them.
        if name.rpartition(".")[2] not in BESIDE_WEIGHTS
    }


def _safetensors_header(file: Path) -> dict[str, TensorInfo]:
    with file.open("rb") as stream:
        # The first 8 bytes are the header's length: any other file gives an absurd number here.
        length = int.from_bytes(stream.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length:,} bytes")
        if could_fill_memory(stream.read(length)):
            raise ValueError(_TOO_MANY)
    with safe_open(file, framework="numpy") as mapped:  # checks that the file is whole
        names = mapped.keys()
        _check_count(names)
        entries = {name: mapped.get_slice(name) for name in names}
        return {
            name: TensorInfo(dtype=entry.get_dtype(), shape=tuple(entry.get_shape()))
            for name, entry in entries.items()
        }


def could_fill_memory(header: bytes) -> bool:
    """Return whether a safetensors header has more brackets or commas than `MAX_TENSORS` tensors need.

    A tensor's entry has three brackets and, with `MAX_DIMENSIONS`, at most 19 commas. Counted before
    the header is parsed, which takes many times its bytes.
    """
    brackets = header.count(b"{") + header.count(b"[")
    return brackets > 4 * MAX_TENSORS or header.count(b",") > 20 * MAX_TENSORS


def _check_count(names: Collection[str]) -> None:
    if len(names) > MAX_TENSORS:
        raise ValueError(_TOO_MANY)


def refuse_quantised(file: Path, header: Header) -> None:
    """Raise InputError for weights in a quantisation that is not read: taken as numbers they are noise."""
    if kind := unread_quantisation(file, header):
        raise InputError(
            f"{file.name} is quantised {kind}; readable are fp32, bf16, fp16, fp8 plain or with a scale per "
            "tensor or row, and GGUF",
            fix="use such a version of this model; lora-train quantises it again where memory asks for it",
        )


def unread_quantisation(file: Path, header: Header) -> str:
    """Return the quantisation of weights that is not read, to follow "quantised"; empty if all are read."""
    for kind, endings in _QUANTISED:
        if first := next((name for name in header if name.endswith(endings)), None):
            return f"as {kind} ({first})"
    readable = gguf_file.TYPES if file.suffix == gguf_file.SUFFIX else _FLOATS
    for name, info in header.items():
        # Norms, biases and buffers keep their type in quantised files and say nothing.
        if len(info.shape) > 1 and name.endswith("weight") and info.dtype not in readable:
            return f"({name} is {info.dtype})"
    return ""


def read_tensors(file: Path, names: Mapping[str, str], *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tensors cast to `dtype`, wanted name -> tensor; `names` maps it to the name in the file.

    An fp8 weight is multiplied by its scale in float32; tensors stored in `dtype` are views of the mapped
    file. Pages of a mapped file that were read count as memory of the process until the mapping is closed.
    The file is mapped anew for every `READ_BYTES`, so a float32 base does not lie in memory beside its bf16
    copy. Raises InputError for a broken file.
    """
    if file.suffix == gguf_file.SUFFIX:
        return gguf_file.read_gguf_tensors(file, names, read_header(file), dtype=dtype)
    tensors: dict[str, Tensor] = {}
    unread = deque(names.items())
    try:
        while unread:
            with safe_open(file, framework="pt") as mapped:
                read_bytes, present = 0, set(mapped.keys())
                while unread and read_bytes < READ_BYTES:
                    name, stored_name = unread.popleft()
                    stored = mapped.get_tensor(stored_name)
                    read_bytes += stored.nbytes
                    # Of a name that does not end in "weight" nothing is removed; it has no scale.
                    stem = stored_name.removesuffix("weight")
                    scale_name = next(
                        (f"{stem}{end}" for end in _WEIGHT_SCALES if f"{stem}{end}" in present), ""
                    )
                    if scale_name and stem != stored_name:
                        stored = _scaled(file, stored_name, stored, mapped.get_tensor(scale_name))
                    tensors[name] = stored.to(dtype)
                    del stored  # a tensor of the file keeps the whole mapping open
    except SafetensorError as error:
        raise InputError(f"{file} is not a whole safetensors file ({error})", fix=AGAIN) from None
    return tensors


def _scaled(file: Path, name: str, stored: Tensor, scale: Tensor) -> Tensor:
    """Return an fp8 weight times its scale, float32; the scale is one number or one per row."""
    rows = scale.float().flatten()
    if len(rows) not in (1, len(stored)):
        raise InputError(
            f"{file} has {len(rows):,} scales for the {len(stored):,} rows of {name}; readable is one "
            "per tensor or row",
            fix="use the bf16 or fp16 version of this model",
        )
    return stored.float() * rows.reshape(-1, *[1] * (stored.dim() - 1))


def whole(kind: Any, folder: Path, **settings: Any) -> nn.Module:
    """Load a network of diffusers or transformers from its folder; raises InputError when tensors are missing.

    Both libraries would leave missing tensors random or uninitialised and only log a warning.
    """
    network: nn.Module
    network, report = kind.from_pretrained(
        folder, output_loading_info=True, use_safetensors=True, **settings
    )
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"base model part {folder} lacks {len(missing)} tensors, first {missing[0]}", fix=AGAIN
        )
    return network


def converted(
    file: Path, convert: Callable[[], Mapping[str, Tensor]], fix: str = AGAIN
) -> dict[str, Tensor]:
    """Return what one of diffusers' conversions returns; raises InputError where it misses tensors."""
    try:
        return dict(convert())
    except (KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise InputError(f"{file} lacks tensors of its layout ({error})", fix=fix) from None


def fill(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    file: Path,
    part: str,
    config: str = "its companion's config.json",
    fix: str = COMPANION,
) -> nn.Module:
    """Make the tensors a network's parameters; raises InputError when names or shapes differ."""
    try:
        # The parameters are on meta: assign=True makes the file's tensors the parameters, without a copy.
        network.load_state_dict(dict(tensors), strict=True, assign=True)
    except RuntimeError as error:
        detail = " ".join(str(error).split())[:300]
        raise InputError(
            f"the {part} in {file} is not that of {config} ({detail})", fix=fix
        ) from None
    return network


def count_parameters(files: Iterable[Path], *, unread: tuple[str, ...] = ()) -> int:
    """Count the parameters in safetensors files; position ids and batch statistics are none.

    `unread` are prefixes of tensors that loading leaves out.
    """
    return sum(
        math.prod(info.shape)
        for file in files
        for name, info in read_header(file).items()
        if not name.endswith(_NO_PARAMETERS) and not name.startswith(unread)
    )


def _shards(index: Path) -> tuple[Path, ...]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise InputError(f"base model file {index} lists no weights", fix=AGAIN)
    # Keep only each file's last path component: an index must not point outside its folder.
    files = [index.parent / Path(str(name)).name for name in sorted(set(names.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise InputError(
            f"base model part {index.parent} lacks {len(missing)} of {len(files)} shards, first {missing[0]}",
            fix=AGAIN,
        )
    return tuple(files)
