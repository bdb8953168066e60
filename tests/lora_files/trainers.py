"""LoRA files as trainers write them: keys and tensors by the rules in their code, at the versions named.

`CASES` is the corpus: one file for each spelling of a family's layers, and one for each kind of adapter. A `Part`
of a file is some layers in one spelling and one kind. Facts: sd-scripts 48d368f, musubi-tuner 30c658c, OneTrainer
23df383, ai-toolkit 27a03a9, SimpleTuner bc8e6ab, DiffSynth-Studio fed7b18, x-flux, LyCORIS f49d30d, diffusers 58eb52c.
"""

from __future__ import annotations

import math
import re
import tomllib
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.lora_files import kinds as k
from tests.lora_files import layers as a
from tests.lora_files.kinds import Written
from tests.lora_files.layers import Layer

Spell = Callable[[str], str]


def flat(prefix: str) -> Spell:
    return lambda name: f"{prefix}{name}".replace(".", "_")


def dotted(prefix: str) -> Spell:
    return lambda name: f"{prefix}{name}"


@dataclass(frozen=True)
class Part:
    """Some layers of one component, how their names are spelt, and what is written for each."""

    layers: Iterable[Layer]
    spell: Spell
    kind: k.Kind
    component: str = "denoiser"


@dataclass(frozen=True)
class Case:
    """One file: `refused` is why the tools cannot read it layer by layer, "" where they can."""

    name: str
    family: str
    parts: tuple[Part, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def split(layers: Iterable[Layer]) -> list[Layer]:
    """Return layers in diffusers' names, joined ones apart: SD 1 and 2 have them in kohya's files too."""
    return [part for layer in layers for part in layer.split()]


def bare(*ends: str, **options: object) -> k.Kind:
    """Return a LoRA whose file states no alpha."""
    return k.lora(alpha=None, ends=(*ends, "alpha"), **options)


AB = ("lora_A.weight", "lora_B.weight")
PROCESSOR = bare("_lora.down.weight", "_lora.up.weight")
DEFAULT = bare("lora_A.default.weight", "lora_B.default.weight")
KINDS: Mapping[str, k.Kind] = {
    "kohya": k.lora(),
    "locon": k.lora(rank=4, alpha=2.0),
    "peft": bare(*AB),
    "original": k.lora(ends=(*AB, "alpha")),
    "old": bare("lora.down.weight", "lora.up.weight"),
    "default": DEFAULT,
    "processor": PROCESSOR,
}
"""Kinds that files.toml has by a name; others are a function of `kinds`, or "peft", with their options."""
STATED = {
    "sd15": "sd_v1", "sd2": "sd_v2", "sdxl": "sdxl_base_v1-0", "sd3": "3-5-medium", "flux": "flux1",
    "flux2": "flux2", "chroma": "chroma", "zimage": "zimage", "qwen": "qwen_image",
}  # fmt: skip


LISTING = tomllib.loads(Path(__file__).with_name("files.toml").read_text(encoding="utf-8"))


def kind_of(kind: str | Mapping[str, Mapping[str, Any]]) -> k.Kind:
    if isinstance(kind, str):
        return KINDS[kind]
    ((name, options),) = kind.items()
    write: k.Kind = bare(*AB, **options) if name == "peft" else getattr(k, name)(**options)
    return write


def layers_of(part: Mapping[str, Any]) -> list[Layer]:
    """Return the layers of a part in files.toml: of `layers`, a release or a text encoder."""
    if "layers" in part:
        layers = layers_of(LISTING["layers"][part["layers"]])
    elif "text" in part:
        encoder = part.get("encoder", "text_encoder")
        layers = a.text(part["text"], encoder, prefix=part.get("prefix", ""))
    else:
        options = {key: part[key] for key in ("number", "dimensions") if key in part}
        layers = a.release(
            part["release"], LISTING["names"].get(part["names"], part["names"]), **options
        )
    layers = split(layers) if part.get("split") else layers
    ends = tuple(part.get("ends", ("",)))
    layers = [layer for layer in layers if layer.name.endswith(ends)]
    layers = layers[slice(*part.get("slice", (None,)))]
    assert layers, part
    return layers


def listed() -> Iterable[Case]:
    """Yield the files of files.toml; one with `ways` is a file for each of these kinds."""
    for file in LISTING["file"]:
        ways, name = file.pop("ways", {"": ""}), file.pop("name")
        for way, kind in ways.items():
            parts = []
            for part in file["parts"]:
                own = kind if part["kind"] == "WAY" else part["kind"]
                spell = (flat if part["spelt"].endswith("_") else dotted)(part["spelt"])
                component = part.get("component", "denoiser")
                parts.append(Part(layers_of(part), spell, kind_of(own), component))
            yield Case(name.replace("WAY", way), **{**file, "parts": tuple(parts)})


def renamed() -> Iterable[Case]:
    """Yield files whose names are no layers' with a prefix."""

    def case(name: str, family: str, *parts: Part) -> Case:
        return Case(name, family, parts)

    attention = ("to_q", "to_k", "to_v", "to_out.0")
    sd15, sdxl = (
        [layer for layer in split(layers) if layer.name.endswith(attention)]
        for layers in map(layers_of, ({"layers": "SD15"}, {"layers": "SDXL"}))
    )

    def processor(name: str) -> str:
        return re.sub(r"\.attn([12])\.", r".attn\1.processor.", name).removesuffix(".0")

    def clip_old(name: str) -> str:
        return "text_encoder." + name.replace("_proj", "").replace("self_attn.", "self_attn.to_")

    old = Part(sd15, processor, PROCESSOR)
    yield case("diffusers 0.17 attention processors sd15", "sd15", old)
    old = Part(sdxl, lambda name: f"unet.{processor(name)}", PROCESSOR)
    yield case("diffusers 0.18 attention processors sdxl", "sdxl", old)
    clip = [layer for layer in a.text("sd15", prefix="text_model.") if "self_attn" in layer.name]
    ends = ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight")
    text = Part(clip, clip_old, bare(*ends), "text_encoder")
    denoiser = Part(sd15, dotted("unet."), bare(*AB))
    yield case("diffusers 0.20 with text sd15", "sd15", denoiser, text)
    (qkv,) = a.release("flux", r"double_blocks\.4\.img_attn\.qkv")
    fused = Layer("transformer_blocks.4.attn.to_qkv", qkv.parts, (3072,))
    single, spell = split(a.release("flux", r"single_blocks\.3\.")), dotted("transformer.")
    parts = (Part([fused], spell, bare(*AB)), Part(single, spell, bare(*AB)))
    yield case("diffusers 0.42 flux fused projections", "flux", *parts)
    names = {
        "double_blocks": "blocks", "img_attn.qkv": "attn.a_to_qkv", "txt_attn.qkv": "attn.b_to_qkv",
        "img_attn.proj": "attn.a_to_out", "txt_attn.proj": "attn.b_to_out", "img_mlp.": "ff_a.",
        "txt_mlp.": "ff_b.", "img_mod.lin": "norm1_a.linear", "txt_mod.lin": "norm1_b.linear",
        "linear1": "to_qkv_mlp", "linear2": "proj_out", "modulation.lin": "norm.linear",
    }  # fmt: skip

    def diffsynth(name: str) -> str:
        for old_name, new in names.items():
            name = name.replace(old_name, new)
        return f"pipe.dit.{name}"

    yield case(
        "DiffSynth-Studio 2 flux pipe prefix",
        "flux",
        Part(layers_of({"layers": "FLUX"}), diffsynth, DEFAULT),
    )
    named = {
        layer.name.partition(".2.")[2]: layer
        for layer in a.release("flux", r"(double|single)_blocks\.2\.")
    }
    joined, out = named["linear1"], named["linear2"]
    single = [
        Layer("single_blocks.2.processor.qkv", joined.parts[:3], (3072,)),
        Layer("single_blocks.2.processor.proj", out.parts, out.inputs),
    ]
    yield case("x-flux single blocks", "flux", Part(single, dotted(""), PROCESSOR))
    double = []
    for number, side in enumerate(("img", "txt"), start=1):
        layers = [
            Layer(f"double_blocks.2.processor.{end}", named[f"{side}_attn.{end}"].parts, (3072,))
            for end in ("qkv", "proj")
        ]
        kind = bare(f"_lora{number}.down.weight", f"_lora{number}.up.weight")
        double.append(Part(layers, dotted(""), kind))
    yield case("x-flux double blocks", "flux", *double)


CASES: tuple[Case, ...] = (*listed(), *renamed())


# ---- files, and what each layer's weight must change by


LARGE = 2**24
"""Layers of more numbers than this are read, but not compared: their updates take a second each."""


@dataclass(frozen=True)
class Expected:
    """The rows of what was written for a layer that one layer in diffusers' names has."""

    written: Written
    layer: Layer
    rows: slice
    seed: int

    @cached_property
    def base_weight(self) -> Tensor:
        """The base's weight, made up, of the whole layer; zeros where the update does not read it."""
        shape = (self.layer.out, *self.layer.inputs)
        if not self.written.based:
            return torch.zeros(shape)
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed))

    @property
    def delta(self) -> Tensor:
        """What the weight changes by, float64."""
        return self.written.delta(self.base_weight, self.rows)

    @property
    def numbers(self) -> int:
        """How many numbers the layer's weight has."""
        return (self.rows.stop - self.rows.start) * math.prod(self.layer.inputs)


def build(case: Case, path: Path, *, most: int | None = None) -> dict[str, Expected]:
    """Write the file of a case; return what is expected by "component.layer".

    With only the first `most` layers of every part its names may fit several families: the header then
    says which, as kohya's trainers write it.
    """
    tensors, expected = dict[str, Tensor](), dict[str, Expected]()
    for part in case.parts:
        for layer in list(part.layers)[:most]:
            seed = zlib.crc32(f"{case.name}{part.component}{layer.name}".encode())
            written = part.kind(layer, torch.Generator().manual_seed(seed))
            spelt = part.spell(layer.name)
            for end, tensor in written.tensors.items():
                key = f"{spelt}{end}" if end.startswith("_") else f"{spelt}.{end}"
                assert key not in tensors
                tensors[key] = tensor.contiguous()
            begin = 0
            for name, out in layer.parts:
                rows = slice(begin, begin + out)
                expected[f"{part.component}.{name}"] = Expected(written, layer, rows, seed)
                begin += out
    for key, shape in case.extra.items():
        tensors[key] = torch.zeros(shape)
    stated = {} if most is None else {"ss_base_model_version": STATED[case.family]}
    save_file(tensors, path, metadata={**case.metadata, **stated} or None)
    return expected


def some(expected: Mapping[str, Expected], *, most: int) -> dict[str, Expected]:
    """Return a few small layers of every kind and component, parts of joined ones first."""
    order = sorted(
        (key for key in expected if expected[key].numbers < LARGE),
        key=lambda key: (-len(expected[key].layer.parts), zlib.crc32(key.encode())),
    )
    groups: dict[tuple[str, str], list[str]] = {}
    for key in order:
        groups.setdefault((key.partition(".")[0], expected[key].written.kind), []).append(key)
    first = [keys[0] for keys in groups.values()]
    return {key: expected[key] for key in list(dict.fromkeys([*first, *order]))[:most]}
