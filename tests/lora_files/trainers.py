"""LoRA files as trainers write them: keys and tensors by the rules in their code, at the versions named.

`CASES` is the corpus: one file for each spelling of a family's layers, and one for each kind of adapter. A `Part`
of a file is some layers in one spelling and one kind. Facts: sd-scripts 48d368f, musubi-tuner 30c658c, OneTrainer
23df383, ai-toolkit 27a03a9, SimpleTuner bc8e6ab, DiffSynth-Studio fed7b18, x-flux, LyCORIS f49d30d, diffusers 58eb52c.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

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


def case(name: str, family: str, *parts: Part, **more: object) -> Case:
    return Case(name, family, parts, **more)


def split(layers: Iterable[Layer]) -> list[Layer]:
    """Return layers in diffusers' names, joined ones apart: SD 1 and 2 have them in kohya's files too."""
    return [part for layer in layers for part in layer.split()]


def only(layers: Iterable[Layer], *ends: str) -> list[Layer]:
    return [layer for layer in layers if layer.name.endswith(ends)]


def bare(*ends: str, **options: object) -> k.Kind:
    """Return a LoRA whose file states no alpha."""
    return k.lora(alpha=None, ends=(*ends, "alpha"), **options)


AB = ("lora_A.weight", "lora_B.weight")
OLD = bare("lora.down.weight", "lora.up.weight")
PROCESSOR = bare("_lora.down.weight", "_lora.up.weight")
DEFAULT = bare("lora_A.default.weight", "lora_B.default.weight")
PEFT, ORIGINAL = bare(*AB), k.lora(ends=(*AB, "alpha"))
KOHYA, LOCON = k.lora(), k.lora(rank=4, alpha=2.0)
UNET, TE, TE1, TE2, TE3 = (flat(f"lora_{name}_") for name in ("unet", "te", "te1", "te2", "te3"))
MIX, LYCORIS, OFT = (flat(f"{name}_") for name in ("lora_transformer", "lycoris", "oft_unet"))
TRANSFORMER, COMFY, BARE = dotted("transformer."), dotted("diffusion_model."), dotted("")
DIFFUSERS_UNET, PEFT_FOLDER = dotted("unet."), dotted("base_model.model.")
UNETS = {"sd15": a.SD15, "sd2": a.SD2, "sdxl": a.SDXL}
STATED = {
    "sd15": "sd_v1", "sd2": "sd_v2", "sdxl": "sdxl_base_v1-0", "sd3": "3-5-medium", "flux": "flux1",
    "flux2": "flux2", "chroma": "chroma", "zimage": "zimage", "qwen": "qwen_image",
}  # fmt: skip


def kohya_unet(family: str) -> list[Layer]:
    return list(UNETS[family]) if family == "sdxl" else split(UNETS[family])


def unet_texts(family: str) -> list[tuple[str, list[Layer], Spell, str]]:
    """Return (component, layers, kohya's spelling, ComfyUI's name) of a U-Net's text encoders."""
    first = ("text_encoder", a.clip(family), TE1 if family == "sdxl" else TE, "clip_l")
    return [first, *([SECOND_CLIP] if family == "sdxl" else [])]


T5 = a.text("chroma")
FIRST_CLIP = ("text_encoder", a.clip("flux"), TE1, "clip_l")
SECOND_CLIP = ("text_encoder_2", a.clip("sdxl", "text_encoder_2"), TE2, "clip_g")
BASES: Mapping[str, tuple[list[Layer], list[tuple[str, list[Layer], Spell, str]]]] = {
    "flux": (a.FLUX, [FIRST_CLIP, ("text_encoder_2", T5, TE2, "t5xxl")]),
    "sd3": (a.SD3_MEDIUM, [FIRST_CLIP, SECOND_CLIP, ("text_encoder_3", T5, TE3, "t5xxl")]),
    "chroma": (a.CHROMA, [("text_encoder", T5, TE1, "t5xxl")]),
    "qwen": (a.QWEN, [("text_encoder", a.text("qwen", prefix="model."), TE, "qwen25_7b")]),
    "zimage": (a.ZIMAGE, []),
    "flux2": (a.FLUX2_4B, []),
}


def sd_scripts() -> Iterable[Case]:
    for family in UNETS:
        more = a.release(family, a.KERNELS)
        more = more if family == "sdxl" else split(more)
        text = [Part(layers, spell, KOHYA, name) for name, layers, spell, _ in unet_texts(family)]
        yield case(
            f"sd-scripts 0.9 networks.lora conv_dim {family}",
            family,
            Part(kohya_unet(family), UNET, KOHYA),
            Part(more, UNET, LOCON),
            *text,
        )
    turned = only(a.SDXL, "to_q", "to_k", "to_v", "to_out.0")
    rotations = Part(turned, OFT, k.diag_oft(constraint=1e-4))
    yield case(
        "sd-scripts 0.9 networks.oft sdxl",
        "sdxl",
        rotations,
        metadata={"ss_base_model_version": STATED["sdxl"]},
    )
    name = "sd-scripts sd3 branch networks.lora_flux"
    clip_and_t5 = (
        Part(a.clip("flux"), TE1, KOHYA, "text_encoder"),
        Part(T5, TE3, KOHYA, "text_encoder_2"),
    )
    yield case(f"{name} with CLIP and T5", "flux", Part(a.FLUX, UNET, KOHYA), *clip_and_t5)
    yield case(f"{name} in_dims", "flux", Part([*a.FLUX, *a.FLUX_IN], UNET, LOCON))
    single = a.release("flux", r"single_blocks\.7\.")
    yield case(f"{name} one block", "flux", Part(single, UNET, KOHYA))
    turned = only(a.FLUX, "proj")
    rotations = Part(turned, OFT, k.diag_oft(blocks=96, constraint=1e-4))
    yield case("sd-scripts sd3 branch networks.oft_flux", "flux", rotations)
    name, few = "sd-scripts 0.10 networks.lora_flux chroma", Part(a.CHROMA[:6], UNET, KOHYA)
    stated = {"modelspec.architecture": "chroma/lora"}
    yield case(f"{name} stated", "chroma", few, metadata=stated)
    name = "sd-scripts sd3 branch networks.lora_sd3"
    yield case(f"{name} large", "sd3", Part(a.SD3_LARGE, UNET, KOHYA))
    outer = Part([*a.SD3_MEDIUM, *a.SD3_OUTER], UNET, KOHYA)
    yield case(f"{name} emb_dims", "sd3", outer)


def musubi() -> Iterable[Case]:
    klein = Part(a.FLUX2_9B, UNET, KOHYA)
    yield case("musubi-tuner 0.2 lora_flux_2 klein 9B", "flux2", klein)
    yield case("musubi-tuner 0.2 lora_zimage", "zimage", Part(split(a.ZIMAGE), UNET, KOHYA))
    fused = only(a.FLUX2_4B, "qkv", "linear1")
    yield case("musubi-tuner 0.2 lokr FLUX.2", "flux2", Part(fused, UNET, k.lokr(factor=16)))


def one_trainer() -> Iterable[Case]:
    for family, (layers, texts) in BASES.items():
        kohya = [Part(text, spell, KOHYA, name) for name, text, spell, _ in texts]
        comfy = [
            Part(text, dotted(f"text_encoders.{role}.transformer."), ORIGINAL, name)
            for name, text, _, role in texts
        ]
        diffusers = [Part(text, dotted(f"{name}."), PEFT, name) for name, text, _, _ in texts]
        apart = Part(split(layers), TRANSFORMER, PEFT)
        yield case(f"OneTrainer kohya {family}", family, Part(layers, UNET, KOHYA), *kohya)
        yield case(f"OneTrainer comfy {family}", family, Part(layers, COMFY, ORIGINAL), *comfy)
        yield case(f"OneTrainer diffusers {family}", family, apart, *diffusers)
    yield case("OneTrainer original flux", "flux", Part(a.FLUX, BARE, ORIGINAL))
    t5 = Part(T5, TE, KOHYA, "text_encoder")
    yield case("OneTrainer legacy chroma", "chroma", Part(split(a.CHROMA), MIX, KOHYA), t5)
    own = split(a.release("flux", r"double_blocks\.1\."))
    words = {"bundle_emb.zibbo.clip_l": (4, 768), "bundle_emb.zibbo.t5_out": (4, 4096)}
    bundled = "OneTrainer legacy flux with bundled embeddings"
    yield case(bundled, "flux", Part(own, MIX, KOHYA), extra=words)
    some = only(own, "to_q", "to_out.0")
    for name, spell, layers, kind in (
        ("legacy flux DoRA of inputs", MIX, some, k.lora(dora="in")),
        ("legacy flux DoRA of outputs", MIX, some, k.lora(dora="out")),
        ("diffusers flux DoRA of outputs", TRANSFORMER, some, bare(*AB, dora="peft")),
        ("legacy flux LoKr DoRA", MIX, some, k.lokr(factor=-1, dora="in")),
    ):
        yield case(f"OneTrainer {name}", "flux", Part(layers, spell, kind))
    joined = Part(only(a.FLUX, "img_attn.qkv"), UNET, k.lora(dora="in"))
    reason = "magnitude for each input of joined layers"
    yield case("OneTrainer kohya flux DoRA of inputs", "flux", joined, refused=reason)
    name, turned = "OneTrainer legacy flux OFT scaled, shared", k.oft_v2(scaled=True, shared=True)
    stated = {"modelspec.architecture": "Flux.1-dev/lora"}
    yield case(name, "flux", Part(some, MIX, turned), metadata=stated)
    plain, kernels = split(a.SDXL), split(a.release("sdxl", a.KERNELS))
    yield case("OneTrainer legacy sdxl", "sdxl", Part([*plain, *kernels], UNET, KOHYA))
    inputs = Part([*plain, *kernels[:3]], UNET, k.lora(dora="in"))
    yield case("OneTrainer legacy sdxl DoRA of inputs", "sdxl", inputs)
    turned = Part([*plain[:4], kernels[0]], UNET, k.oft_v2())
    yield case("OneTrainer legacy sdxl OFT", "sdxl", turned)
    for family in ("sd15", "sdxl"):
        named = unet_texts(family)
        text = [Part(layers, dotted(f"{name}."), PEFT, name) for name, layers, _, _ in named]
        denoiser = Part(split(UNETS[family]), DIFFUSERS_UNET, PEFT)
        yield case(f"OneTrainer diffusers {family}", family, denoiser, *text)
    text = [
        Part(layers, dotted(f"text_encoders.{role}.transformer."), ORIGINAL, name)
        for name, layers, _, role in unet_texts("sdxl")
    ]
    yield case("OneTrainer comfy sdxl", "sdxl", Part(a.SDXL, COMFY, ORIGINAL), *text)


def others() -> Iterable[Case]:
    some = split(a.release("flux", r"double_blocks\.1\..*attn"))
    kronecker = Part(some, LYCORIS, k.lokr(factor=16, whole=True))
    yield case("ai-toolkit flux LoKr old names", "flux", kronecker)
    some = only(a.CHROMA, "img_attn.qkv", "img_mlp.0", "linear1", "linear2")
    kronecker = Part(some, COMFY, k.lokr(factor=4, whole=True))
    stated = {"ss_base_model_version": STATED["chroma"]}
    yield case("ai-toolkit chroma LoKr joined", "chroma", kronecker, metadata=stated)
    alpha = json.dumps({"transformer.lora_alpha": 8, "transformer.r": 2})
    stated = Part(split(a.FLUX), TRANSFORMER, bare(*AB, scale=4.0))
    yield case("SimpleTuner 4 flux", "flux", stated, metadata={"lora_adapter_metadata": alpha})
    kronecker = Part(split(a.SDXL)[:9], LYCORIS, k.lokr())
    yield case("SimpleTuner 4 sdxl LyCORIS LoKr", "sdxl", kronecker)
    yield case("SimpleTuner 1 flux", "flux", Part(split(a.FLUX)[:4], TRANSFORMER, OLD))
    names = {
        "double_blocks": "blocks", "img_attn.qkv": "attn.a_to_qkv", "txt_attn.qkv": "attn.b_to_qkv",
        "img_attn.proj": "attn.a_to_out", "txt_attn.proj": "attn.b_to_out", "img_mlp.": "ff_a.",
        "txt_mlp.": "ff_b.", "img_mod.lin": "norm1_a.linear", "txt_mod.lin": "norm1_b.linear",
        "linear1": "to_qkv_mlp", "linear2": "proj_out", "modulation.lin": "norm.linear",
    }  # fmt: skip

    def diffsynth(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return f"pipe.dit.{name}"

    yield case("DiffSynth-Studio 2 flux pipe prefix", "flux", Part(a.FLUX, diffsynth, DEFAULT))
    yield case("DiffSynth-Studio 2 zimage", "zimage", Part(split(a.ZIMAGE), BARE, DEFAULT))
    yield case("DiffSynth-Studio 1 sdxl", "sdxl", Part(split(a.SDXL), BARE, DEFAULT))
    named = {
        layer.name.partition(".2.")[2]: layer
        for layer in a.release("flux", r"(double|single)_blocks\.2\.")
    }
    joined, out = named["linear1"], named["linear2"]
    single = [
        Layer("single_blocks.2.processor.qkv", joined.parts[:3], (3072,)),
        Layer("single_blocks.2.processor.proj", out.parts, out.inputs),
    ]
    yield case("x-flux single blocks", "flux", Part(single, BARE, PROCESSOR))
    image, text = (
        [
            Layer(f"double_blocks.2.processor.{end}", named[f"{side}_attn.{end}"].parts, (3072,))
            for end in ("qkv", "proj")
        ]
        for side in ("img", "txt")
    )
    first, second = (bare(f"_lora{n}.down.weight", f"_lora{n}.up.weight") for n in (1, 2))
    yield case("x-flux double blocks", "flux", Part(image, BARE, first), Part(text, BARE, second))


def diffusers() -> Iterable[Case]:
    attention = ("to_q", "to_k", "to_v", "to_out.0")
    sd15, sdxl = (only(split(UNETS[family]), *attention) for family in ("sd15", "sdxl"))

    def processor(name: str) -> str:
        return re.sub(r"\.attn([12])\.", r".attn\1.processor.", name).removesuffix(".0")

    unet = DIFFUSERS_UNET
    old = Part(sd15, processor, PROCESSOR)
    yield case("diffusers 0.17 attention processors sd15", "sd15", old)
    old = Part(sdxl, lambda name: unet(processor(name)), PROCESSOR)
    yield case("diffusers 0.18 attention processors sdxl", "sdxl", old)
    yield case("diffusers 0.25 sdxl", "sdxl", Part(sdxl, unet, OLD))

    def clip_old(name: str) -> str:
        return "text_encoder." + name.replace("_proj", "").replace("self_attn.", "self_attn.to_")

    attention = [layer for layer in a.clip("sd15") if "self_attn" in layer.name]
    ends = ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight")
    text = Part(attention, clip_old, bare(*ends), "text_encoder")
    yield case("diffusers 0.20 with text sd15", "sd15", Part(sd15, unet, PEFT), text)
    rslora = json.dumps({"unet.lora_alpha": 4, "unet.use_rslora": True, "unet.r": 2})
    name, scaled = "diffusers 0.42 sdxl rsLoRA in the header", bare(*AB, scale=4 / 2**0.5)
    stated = {"lora_adapter_metadata": rslora}
    yield case(name, "sdxl", Part(sdxl, unet, scaled), metadata=stated)
    yield case("peft 0.19 folder flux2", "flux2", Part(split(a.FLUX2_9B), PEFT_FOLDER, PEFT))
    dora = Part(split(a.SDXL)[2:9], PEFT_FOLDER, bare(*AB, dora="peft"))
    yield case("peft 0.19 sdxl DoRA", "sdxl", dora)
    (qkv,) = a.release("flux", r"double_blocks\.4\.img_attn\.qkv")
    fused = Layer("transformer_blocks.4.attn.to_qkv", qkv.parts, (3072,))
    rest = Part(split(a.release("flux", r"single_blocks\.3\.")), TRANSFORMER, PEFT)
    parts = (Part([fused], TRANSFORMER, PEFT), rest)
    yield case("diffusers 0.42 flux fused projections", "flux", *parts)


def lycoris() -> Iterable[Case]:
    ways: Mapping[str, k.Kind] = {
        "LoCon": LOCON,
        "LoCon tucker": k.lora(tucker=True),
        "LoCon DoRA": k.lora(dora="out"),
        "LoHa": k.loha(),
        "LoHa tucker": k.loha(tucker=True),
        "LoHa DoRA": k.loha(dora="out"),
        "LoHa DoRA of inputs": k.loha(dora="in"),
        "LoKr": k.lokr(),
        "LoKr full_matrix": k.lokr(whole=True, alpha=7.0),
        "LoKr decompose_both": k.lokr(both=True),
        "LoKr tucker": k.lokr(tucker=True),
        "LoKr DoRA": k.lokr(dora="out"),
        "diag-OFT": k.diag_oft(size=16),
        "diag-OFT constraint": k.diag_oft(size=16, constraint=1e-4),
        "diag-OFT rescaled": k.diag_oft(size=16, rescaled=True),
        "BOFT": k.boft(),
        "GLoRA": k.glora(),
        "IA3 of outputs": k.ia3(on_input=False),
        "IA3 of inputs": k.ia3(on_input=True),
        "full with biases": k.full(bias=True),
    }
    linear = split(a.SD15)[:9]
    layers = [*linear, *split(a.release("sd15", a.KERNELS))[:3]]
    for name, kind in ways.items():
        yield case(f"LyCORIS 3.2 {name} sd15", "sd15", Part(layers, UNET, kind))
    norms = r"input_blocks\.1\.0\.in_layers\.0|middle_block\.1\.norm"
    norms = a.release("sd15", norms, dimensions=1)
    parts = (Part(linear, UNET, LOCON), Part(split(norms), UNET, k.norm()))
    yield case("LyCORIS 3.2 train_norm sd15", "sd15", *parts)
    joint = a.release("sd3", r"joint_blocks\.0\.x_block\.attn\.(qkv|proj)$")
    for name in ("LoHa", "LoCon DoRA", "GLoRA", "IA3 of outputs", "IA3 of inputs"):
        yield case(f"LyCORIS 3.2 {name} sd3 joined", "sd3", Part(joint, UNET, ways[name]))
    yield case("LyCORIS 3.2 full sd3 joined", "sd3", Part(joint, UNET, k.full()))
    rotations = Part(joint, UNET, k.diag_oft(blocks=96))
    yield case("LyCORIS 3.2 diag-OFT sd3 joined", "sd3", rotations)
    across = Part(only(joint, "qkv"), UNET, k.diag_oft(blocks=8))
    reason = "turns outputs of joined layers"
    yield case("LyCORIS 3.2 diag-OFT sd3 across", "sd3", across, refused=reason)
    across = Part(a.release("flux", r"single_blocks\.9\.linear1"), UNET, k.lokr(factor=16))
    yield case("LyCORIS 3.2 LoKr flux across", "flux", across)
    biased = Part(split(a.SD15)[:3], UNET, k.lora(bias=True))
    yield case("ComfyUI extraction with biases sd15", "sd15", biased)


TRAINERS = (sd_scripts, musubi, one_trainer, others, diffusers, lycoris)
CASES: tuple[Case, ...] = tuple(each for trainer in TRAINERS for each in trainer())


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
