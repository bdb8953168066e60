"""The parts of a base model, in folders and in single files: found, counted, checked and loaded.

A part is a folder with config.json and weights, or a file. ComfyUI's all-in-one files put
`model.diffusion_model.`, `vae.` or `first_stage_model.` and `text_encoders.` before the names of each part;
files of one part have none. A VAE has the names of the latent diffusion code, of Wan, the video model that
Qwen-Image's comes from, or diffusers'. Every function raises InputError naming the part and the file: one of
another size than its companion before a weight is loaded, one that lacks tensors while loading. Torch-free to
import.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.facts import BaseFacts, BaseRelease
from lora_trainer.families.base.layout import Header, Layout
from lora_trainer.families.base.releases import TextNetwork
from lora_trainer.families.base.texts import TextInputs
from lora_trainer.families.base.unet_numbers import UNET_CLASS
from lora_trainer.families.files.hub_files import MODULAR_INDEX, TEXT_SUFFIXES, index_in
from lora_trainer.families.files.weight_files import (
    AGAIN,
    holds_scales,
    read_header,
    read_tensors,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Returns tensors of a file, wanted name -> tensor, by names in the file.
ReadTensors = Callable[[Path, Mapping[str, str]], dict[str, "Tensor"]]
# Layer in a file -> the layers of diffusers' network that it stands for, in the order of their rows.
JoinedNames = Mapping[str, Sequence[str]]
COMPANION = "name the base model it was made from with --set base.companion=..."
_VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "spiece.model"})
_STEMS = ("diffusion_pytorch_model", "model")


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


def config_value(config: Mapping[str, Any], key: str, kind: type) -> Any:
    """Return a value of a configuration; raises InputError for another type, and for 0 and an empty list."""
    value = config.get(key)
    if not isinstance(value, kind) or not value:
        network = config.get("_class_name", "a text encoder")
        allowed = "a whole number" if kind is int else "a list of whole numbers"
        raise InputError(
            f"config.json of {network} has {key}={value!r}, allowed is {allowed}", fix=AGAIN
        )
    return value


def components(folder: Path) -> Mapping[str, str]:
    """Return component name -> class name of a diffusers folder, plain or modular; empty without an index.

    The pipeline's own class has the key "".
    """
    index = index_in(folder)
    if index is None:
        return {}
    index_json = read_json(index)
    classes = {
        name: kind
        for name, value in index_json.items()
        if isinstance(value, list) and (kind := _class_in(value))
    }
    return {"": str(index_json.get("_class_name", "")), **classes}


def _class_in(entry: Sequence[Any]) -> str:
    """Return the class in a component's entry of an index, "" where it states none.

    A plain index has [library, class]. A modular one has a third value, where the component is loaded from, and the
    first two are null unless it was saved with the component.
    """
    if len(entry) == 3 and isinstance(entry[2], dict):
        hint = entry[2].get("type_hint")
        entry = entry[:2] if entry[1] is not None or not isinstance(hint, list) else hint
    return entry[1] if len(entry) == 2 and isinstance(entry[1], str) else ""


def elsewhere(folder: Path, text: TextInputs, *, parts: Iterable[str]) -> Mapping[str, str]:
    """Return component -> repository of what a modular folder names and does not hold itself.

    Of the `parts` and text encoders: its index may name others too, such as a network that rewrites prompts.
    """
    index = index_in(folder)
    if index is None or index.name != MODULAR_INDEX:
        return {}
    entries = ((name, value) for name, value in read_json(index).items() if isinstance(value, list))
    needed = {name: folder / name for name in (*parts, *text.networks)} | {
        text.tokenizer_of(name): tokenizer_folder(folder, name, text) for name in text.networks
    }
    places = {
        name: value[2]
        for name, value in entries
        if len(value) == 3 and isinstance(value[2], dict)
        if name in needed and not needed[name].is_dir()
    }
    return {
        name: str(place.get("pretrained_model_name_or_path") or "no repository")
        for name, place in places.items()
    }


def scheduler_config(folder: Path, *, stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the scheduler's configuration, for a modular folder without one `stated`: its blocks make it."""
    index, scheduler = index_in(folder), folder / "scheduler"
    if index is not None and index.name == MODULAR_INDEX and not scheduler.is_dir():
        return stated
    return read_json(scheduler / "scheduler_config.json")


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


def tokenizer_folder(folder: Path, component: str, text: TextInputs) -> Path:
    """Return the folder of a text encoder's tokenizer: its own, or the encoder's where it lies there."""
    own, beside = folder / text.tokenizer_of(component), folder / component
    lies_beside = not own.is_dir() and any((beside / name).is_file() for name in _VOCABULARIES)
    return beside if lies_beside else own


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of a tokenizer; raises InputError when there is no vocabulary."""
    files = {path.name: path for path in folder.glob("*") if path.suffix in TEXT_SUFFIXES}
    if not files.keys() & _VOCABULARIES:
        raise InputError(
            f"base model part {folder} has none of {', '.join(sorted(_VOCABULARIES))}", fix=AGAIN
        )
    if "vocab.json" in files and not files.keys() & {"tokenizer.json", "merges.txt"}:
        raise InputError(f"base model part {folder} has vocab.json without merges.txt", fix=AGAIN)
    return tuple(sorted(files.values()))


def whole(kind: Any, folder: Path, *, dtype: torch.dtype, **options: Any) -> nn.Module:
    """Load a network of diffusers or transformers from its folder; raises InputError when tensors are missing.

    Both libraries would leave missing tensors random or uninitialised and only log a warning. `options`: another
    configuration than the folder's.
    """
    network: nn.Module
    network, report = kind.from_pretrained(
        folder,
        output_loading_info=True,
        use_safetensors=True,
        dtype=dtype,
        variant="fp16" if ".fp16" in weights(folder)[0].name else None,
        **options,
    )
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"base model part {folder} lacks {len(missing)} tensors, first {missing[0]}", fix=AGAIN
        )
    return network


@contextmanager
def _errors_only() -> Iterator[None]:
    """Keep transformers from logging what is not an error."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


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


VAE = "first_stage_model."
VAE_PREFIXES = (VAE, "vae.")
VAE_MODULES = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
# Starts of tensors that VAE training code left in files of a VAE alone.
_EXTRAS = tuple(
    f"{start}{name}" for start in ("", *VAE_PREFIXES) for name in ("loss.", "model_ema.")
)


def part_names(header: Header, *prefixes: str) -> dict[str, str]:
    """Return the tensors behind the first of the prefixes that a file has, name without it -> name in the file.

    A file of one part alone has no prefix, and then all tensors are returned.
    """
    for prefix in prefixes:
        if names := {name.removeprefix(prefix): name for name in header if name.startswith(prefix)}:
            return names
    return {name: name for name in header}


def vae_names(header: Header) -> dict[str, str]:
    """Return the VAE's tensors, name without prefix -> name in the file."""
    names = part_names(header, *VAE_PREFIXES).items()
    return {name: full for name, full in names if name.startswith(VAE_MODULES)}


def vae_shape(header: Header) -> tuple[int, int] | None:
    """Return (latent channels, channels of the first level) of an image VAE in a file, else None."""
    shapes = {name: header[full].shape for name, full in vae_names(header).items()}
    decoder = shapes.get("decoder.conv_in.weight", ())
    encoder = shapes.get("encoder.conv_in.weight", ())
    return (decoder[1], encoder[0]) if len(decoder) == len(encoder) == 4 else None


def holds_vae(header: Header, *, latent_channels: int, alone: bool = False) -> bool:
    """Return whether a file has a whole image VAE with `latent_channels`, with `alone` one and nothing else."""
    shape = vae_shape(header)
    if shape is None or shape[0] != latent_channels:
        return False
    rest = header.keys() - set(vae_names(header).values())
    return not alone or all(name.startswith(_EXTRAS) for name in rest)


def load_base_vae(layout: Layout) -> Any:
    """Load the VAE frozen, on the CPU, in float32; raises InputError when weights do not fit."""
    import diffusers
    import torch
    from accelerate import init_empty_weights

    folder, single = layout.part_folder("vae", "vae"), layout.part_file("vae")
    # The class is the folder's, not the family's: `base.vae` may name another VAE with the same latents.
    config = read_json(folder / "config.json")
    kind = getattr(diffusers, str(config.get("_class_name", "AutoencoderKL")))
    vae: Any
    if single is None:
        vae = whole(kind, folder, dtype=torch.float32)
    else:
        with init_empty_weights():
            vae = kind.from_config(config)
        fill(
            vae, _tensors(single, vae), file=single, part="vae", fix="give a VAE made for this base"
        )
    return vae.requires_grad_(False).eval()


def _tensors(file: Path, vae: Any) -> dict[str, Tensor]:
    """Return a file's tensors in diffusers' names, float32."""
    import torch
    from diffusers.loaders.single_file_utils import (
        convert_ldm_vae_checkpoint,
        convert_wan_vae_to_diffusers,
    )

    header = read_header(file)
    if type(vae).__name__ == "AutoencoderKLQwenImage":
        names = part_names(header, *VAE_PREFIXES)
        tensors = read_tensors(file, names, dtype=torch.float32)
        is_wan = "conv1.weight" in tensors
        return converted(file, lambda: convert_wan_vae_to_diffusers(tensors)) if is_wan else tensors
    tensors = read_tensors(file, vae_names(header), dtype=torch.float32)
    if any(".down_blocks." in name for name in tensors):
        vae._fix_state_dict_keys_on_load(tensors)  # old diffusers files: attention's former names
        return tensors
    prefixed = {VAE + name: tensor for name, tensor in tensors.items()}
    return converted(file, lambda: convert_ldm_vae_checkpoint(prefixed, vae.config))


# ---- transformers and text encoders

DENOISER_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.")
# `role` is ComfyUI's name of the encoder in an all-in-one file.
ENCODER_PREFIX = "text_encoders.{role}.transformer."
_OTHERS = ("text_encoders.", "text_encoder.", "conditioner.", "cond_stage_model.")


def denoiser_names(header: Header) -> dict[str, str]:
    """Return the denoiser's tensors, name without prefix -> name in the file."""
    # A file of a transformer alone has no prefix: its tensors are all that belong to no other part.
    other = (*VAE_PREFIXES, *_OTHERS, *VAE_MODULES)
    names = part_names(header, *DENOISER_PREFIXES).items()
    return {name: full for name, full in names if not name.startswith(other)}


def inner_names(header: Header, prefix: str) -> dict[str, str]:
    """Return the tensors of a network that stands among a denoiser's, name without prefixes -> name in the file."""
    names = part_names(header, *DENOISER_PREFIXES)
    return {
        name.removeprefix(prefix): full for name, full in names.items() if name.startswith(prefix)
    }


def elements(header: Header, names: Iterable[str]) -> int:
    """Count the numbers in the named tensors of a file."""
    return sum(math.prod(header[name].shape) for name in names)


def check_companion(file: Path, facts: BaseFacts, releases: Iterable[BaseRelease]) -> None:
    """Compare the size of a file's denoiser with its companion's, where that is a release's.

    Raises InputError for another size; a companion of no release is compared when weights are loaded.
    """
    count = facts.parts["denoiser"].parameters
    for release in releases:
        companion_count = release.parameters["denoiser"]
        if release.architecture.items() <= facts.release.architecture.items() and not math.isclose(
            count, companion_count, rel_tol=0.02
        ):
            raise unlike("the denoiser", file, count, facts.located.folder, companion_count)


def unlike(part: str, file: Path, count: int, folder: Path, companion_count: int) -> InputError:
    """Return the error of a part of another size than its companion's, 0 where only its shapes differ."""
    return InputError(
        f"{part} in {file} has {count:,} parameters, its companion's in {folder} "
        f"{f'{companion_count:,}' if companion_count else 'is another network'}",
        fix=COMPANION,
    )


def encoders_in(layout: Layout, text: TextInputs) -> Mapping[str, TextNetwork]:
    """Return the text encoders that a base has, by component; one that is optional may be in no file."""
    return {
        name: network
        for name, network in text.networks.items()
        if name != text.optional or layout.text_file(name) or name in components(layout.folder)
    }


def load_text_network(
    layout: Layout,
    component: str,
    text: TextInputs,
    *,
    dtype: torch.dtype,
    references: bool = False,
) -> nn.Module:
    """Load a text encoder of transformers from the file that holds it, or else from its folder, on the CPU.

    `references`: with what only reference images go through. Raises InputError when tensors are missing or have other
    shapes.
    """
    import torch
    import transformers
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    encoder = text.networks[component]
    folder, file = layout.folder / component, layout.text_file(component)
    if component in text.inside:
        return _load_inner(encoder.network, folder, file, text.inside[component], dtype=dtype)
    kind = getattr(transformers, encoder.network)
    if file is None and any(map(holds_scales, weights(folder))):
        return _restored(kind, folder, dtype=dtype)
    if file is None and not text.blocks:
        return whole(kind, folder, dtype=dtype)
    prefix = text.prefixes[component]
    config = kind.config_class.from_pretrained(folder, local_files_only=True)
    if text.blocks:
        config.get_text_config().num_hidden_layers = text.blocks
    if file is None:
        # transformers would log the blocks that are left out.
        with _errors_only():
            return whole(kind, folder, dtype=dtype, config=config)
    names = {
        name: full
        for name, full in part_names(read_header(file), prefix).items()
        if name.startswith("visual.") or text.reads(name, references=references)
    }
    state = read_tensors(file, names, dtype=dtype)
    if text.blocks:
        # ComfyUI's files of a model of text and images have the language model's own names.
        state = {
            f"{text.inner}.{name.removeprefix('model.')}"
            if re.match(r"model\.(?:layers|embed_tokens|norm)\.", name)
            else name: tensor
            for name, tensor in state.items()
        }
    if prefix.endswith(".model."):
        full, sizes = {prefix + name: state[name] for name in state}, SimpleNamespace(config=config)
        state = converted(file, lambda: convert_open_clip_checkpoint(sizes, full, prefix=prefix))
    # CLIP-L's pooled vector is used unprojected and its files have no projection: insert the identity.
    if kind.__name__ == "CLIPTextModelWithProjection" and encoder.role == "clip_l":
        state.setdefault("text_projection.weight", torch.eye(config.hidden_size, dtype=dtype))
    if "shared.weight" in state and "encoder.embed_tokens.weight" not in state:
        state["encoder.embed_tokens.weight"] = state["shared.weight"]  # one table, stored once
    try:
        loaded: nn.Module
        # Files also hold layers beyond the configured number, projections and position ids: unused here. transformers
        # would log them, and what the network has beside the text, which is not read.
        with _errors_only():
            loaded, report = kind.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by their names
            )
    except RuntimeError as error:
        detail = " ".join(str(error).split())[:300]
        raise InputError(
            f"the text encoder in {file} is not that of {folder / 'config.json'}: {detail}",
            fix=COMPANION,
        ) from None
    reads = partial(text.reads, references=references)
    missing = sorted(filter(reads, report["missing_keys"]))
    if missing or report["mismatched_keys"]:
        first = (missing or sorted(map(str, report["mismatched_keys"])))[0]
        raise InputError(
            f"the text encoder in {file} lacks tensors of {folder / 'config.json'}, first {first}",
            fix=COMPANION,
        )
    return loaded


def _restored(kind: Any, folder: Path, *, dtype: torch.dtype) -> nn.Module:
    """Load a network of transformers from a folder of quantised weights, which transformers would take for numbers."""
    config = kind.config_class.from_pretrained(folder, local_files_only=True)
    state: dict[str, Tensor] = {}
    for file in weights(folder):
        state |= read_tensors(file, {name: name for name in read_header(file)}, dtype=dtype)
    network: nn.Module
    network, report = kind.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"base model part {folder} lacks {len(missing)} tensors, first {missing[0]}", fix=AGAIN
        )
    return network


def _load_inner(
    class_name: str, folder: Path, file: Path | None, prefix: str, *, dtype: torch.dtype
) -> nn.Module:
    """Load a network of diffusers that reads text from its folder, or from among a denoiser's tensors in a file."""
    import diffusers
    from accelerate import init_empty_weights

    kind = getattr(diffusers, class_name)
    if file is None:
        return whole(kind, folder, dtype=dtype)
    with init_empty_weights():
        network = kind.from_config(read_json(folder / "config.json"))
    header = read_header(file)
    names = inner_names(header, prefix) or part_names(
        header
    )  # a file of its own may have no prefix
    tensors = read_tensors(file, names, dtype=dtype)
    return fill(network, tensors, file=file, part="text conditioner").eval()


def parted(
    state: Mapping[str, Tensor], network: nn.Module, joined: JoinedNames
) -> dict[str, Tensor]:
    """Return tensors by the names of `network`: those of layers that are one in a file are its rows."""
    shapes = network.state_dict()
    own: dict[str, Tensor] = {}
    for name, tensor in state.items():
        layer, _, kind = name.rpartition(".")
        layers = [f"{each}.{kind}" for each in joined.get(layer, (layer,))]
        rows = [len(shapes[each]) for each in layers] if len(layers) > 1 else [len(tensor)]
        own |= zip(layers, tensor.split(rows), strict=True)
    return own


def load_denoiser_file(
    file: Path, network: Any, names: Mapping[str, str], read: ReadTensors, joined: JoinedNames
) -> nn.Module:
    """Fill a network of diffusers on `meta` with the tensors `names` of a file, which `read` reads.

    diffusers' own conversion renames and splits the tensors of the original layout, or `joined` says how.
    """
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    state = read(file, names)
    kind = type(network).__name__
    is_unet = kind == UNET_CLASS
    # A file in diffusers' own names is not converted; the strict loading says which tensors it lacks, and of
    # a U-Net which ones are foreign.
    is_original = not is_unet or "input_blocks.0.0.weight" in state
    if is_original and not state.keys() <= network.state_dict().keys():
        if kind not in SINGLE_FILE_LOADABLE_CLASSES:
            state = converted(file, lambda: parted(state, network, joined), fix=COMPANION)
            return fill(network, state, file=file, part="denoiser")
        convert = SINGLE_FILE_LOADABLE_CLASSES[kind]["checkpoint_mapping_fn"]
        prefix = DENOISER_PREFIXES[0] if is_unet else ""  # which that conversion reads
        # The conversions take out what they copy, so that no tensor lies in memory twice: hold none beside them.
        full = {prefix + name: state.pop(name) for name in list(state)}
        state = converted(
            file, lambda: convert(checkpoint=full, config=dict(network.config)), fix=COMPANION
        )
    return fill(network, state, file=file, part="denoiser")
