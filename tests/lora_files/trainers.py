"""LoRA files as trainers write them: keys and tensors by the rules in their code, at the versions named.

`CASES` is the corpus: each has the trainer, the family its base is of, and the layers that were trained
with how they are spelt. A `Part` of a file is some layers in one spelling and one kind of adapter. Facts:
sd-scripts 48d368f, musubi-tuner 30c658c, OneTrainer 23df383, ai-toolkit 27a03a9, SimpleTuner bc8e6ab,
DiffSynth-Studio fed7b18, x-flux, LyCORIS f49d30d, diffusers 58eb52c.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tests.lora_files import kinds as k
from tests.lora_files import layers as a
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


def split(layers: Iterable[Layer]) -> list[Layer]:
    """Return layers in diffusers' names, joined ones apart."""
    return [part for layer in layers for part in layer.split()]


def only(layers: Iterable[Layer], *ends: str) -> list[Layer]:
    return [layer for layer in layers if layer.name.endswith(ends)]


AB = ("lora_A.weight", "lora_B.weight", "alpha")
AB_DEFAULT = ("lora_A.default.weight", "lora_B.default.weight", "alpha")
OLD = ("lora.down.weight", "lora.up.weight", "alpha")
PROCESSOR = ("_lora.down.weight", "_lora.up.weight", "alpha")
PEFT = k.lora(alpha=None, ends=AB)
KOHYA, LOCON = k.lora(), k.lora(rank=4, alpha=2.0)
ORIGINAL = k.lora(ends=AB)
UNET, TE, TE1, TE2, TE3 = (flat(f"lora_{name}_") for name in ("unet", "te", "te1", "te2", "te3"))
MIX = flat("lora_transformer_")
TRANSFORMER, COMFY, BARE = dotted("transformer."), dotted("diffusion_model."), dotted("")
KOHYA_FLUX = {"ss_network_module": "networks.lora_flux", "ss_base_model_version": "flux1"}
UNETS = {"sd15": a.SD15, "sd2": a.SD2, "sdxl": a.SDXL}
CLIPS = {"sd15": 768, "sd2": 1024, "sdxl": 768}


def named(layers: Iterable[Layer]) -> list[Layer]:
    """Return U-Net layers in diffusers' names: SD 1 and 2 have them in kohya's files too."""
    return split(layers)


def kohya_unet(family: str) -> list[Layer]:
    return list(UNETS[family]) if family == "sdxl" else named(UNETS[family])


def kohya_text(family: str, kind: k.Kind = KOHYA) -> tuple[Part, ...]:
    if family != "sdxl":
        return (Part(a.clip(CLIPS[family]), TE, kind, "text_encoder"),)
    return (
        Part(a.clip(768), TE1, kind, "text_encoder"),
        Part(a.clip(1280), TE2, kind, "text_encoder_2"),
    )


def sd_scripts() -> Iterable[Case]:
    for family, layers in UNETS.items():
        whole = kohya_unet(family)
        yield Case(
            f"sd-scripts 0.9 networks.lora {family}",
            family,
            (Part(whole, UNET, KOHYA), *kohya_text(family)),
        )
        more = a.SDXL_CONVOLUTIONS if family == "sdxl" else named(a.UNET_CONVOLUTIONS)
        yield Case(
            f"sd-scripts 0.9 networks.lora conv_dim {family}",
            family,
            (Part([*whole, *more], UNET, LOCON),),
        )
        turned = only(whole, "to_q", "to_k", "to_v", "to_out.0")
        yield Case(
            f"sd-scripts 0.9 networks.oft {family}",
            family,
            (Part(turned, flat("oft_unet_"), k.diag_oft(constraint=1e-4)),),
            {
                "ss_base_model_version": {
                    "sd15": "sd_v1",
                    "sd2": "sd_v2",
                    "sdxl": "sdxl_base_v1-0",
                }[family]
            },
        )
        yield Case(
            f"sd-scripts 0.6 networks.dylora {family}",
            family,
            (Part(whole, UNET, k.lora(rank=4, alpha=4.0)),),
        )
        assert layers
    flux = Part(a.FLUX, UNET, KOHYA)
    clip_part = Part(a.clip(768), TE1, KOHYA, "text_encoder")
    t5_part = Part(a.t5(), TE3, KOHYA, "text_encoder_2")
    yield Case("sd-scripts sd3 branch networks.lora_flux", "flux", (flux,), KOHYA_FLUX)
    yield Case("sd-scripts sd3 branch networks.lora_flux with CLIP", "flux", (flux, clip_part))
    yield Case(
        "sd-scripts sd3 branch networks.lora_flux with CLIP and T5",
        "flux",
        (flux, clip_part, t5_part),
    )
    yield Case(
        "sd-scripts sd3 branch networks.lora_flux in_dims",
        "flux",
        (flux, Part(a.FLUX_IN, UNET, LOCON)),
    )
    yield Case(
        "sd-scripts sd3 branch networks.lora_flux one block",
        "flux",
        (Part(a.single_block(7), UNET, KOHYA),),
    )
    turned = only(a.FLUX, "proj")
    yield Case(
        "sd-scripts sd3 branch networks.oft_flux",
        "flux",
        (Part(turned, flat("oft_unet_"), k.diag_oft(blocks=96, constraint=1e-4)),),
    )
    yield Case(
        "sd-scripts 0.10 networks.lora_flux chroma", "chroma", (Part(a.CHROMA, UNET, KOHYA),)
    )
    yield Case(
        "sd-scripts 0.10 networks.lora_flux chroma stated",
        "chroma",
        (Part(a.CHROMA[:3], UNET, KOHYA),),
        {"modelspec.architecture": "chroma/lora"},
    )
    for size, blocks in (("medium", a.SD3_MEDIUM), ("large", a.SD3_LARGE)):
        yield Case(
            f"sd-scripts sd3 branch networks.lora_sd3 {size}", "sd3", (Part(blocks, UNET, KOHYA),)
        )
    text = (
        Part(a.clip(768), TE1, KOHYA, "text_encoder"),
        Part(a.clip(1280), TE2, KOHYA, "text_encoder_2"),
        Part(a.t5(), TE3, KOHYA, "text_encoder_3"),
    )
    yield Case(
        "sd-scripts sd3 branch networks.lora_sd3 with all encoders",
        "sd3",
        (Part(a.SD3_MEDIUM, UNET, KOHYA), *text),
    )
    yield Case(
        "sd-scripts sd3 branch networks.lora_sd3 emb_dims",
        "sd3",
        (Part([*a.SD3_MEDIUM, *a.SD3_OUTER], UNET, KOHYA),),
    )


def musubi() -> Iterable[Case]:
    yield Case("musubi-tuner 0.2 lora_flux Kontext", "flux", (Part(a.FLUX, UNET, KOHYA),))
    for name, layers, family in (
        ("lora_flux_2 klein 4B", a.FLUX2_4B, "flux2"),
        ("lora_flux_2 klein 9B", a.FLUX2_9B, "flux2"),
        ("lora_qwen_image", a.QWEN, "qwen"),
        ("lora_zimage", split(a.ZIMAGE), "zimage"),
        ("lora_zimage for ComfyUI", a.ZIMAGE, "zimage"),
    ):
        yield Case(f"musubi-tuner 0.2 {name}", family, (Part(layers, UNET, KOHYA),))
        yield Case(
            f"musubi-tuner 0.2 {name} converted to other", family, (Part(layers, COMFY, ORIGINAL),)
        )
    attention = only(a.QWEN, "to_q", "add_k_proj", "img_mlp.net.2")
    yield Case("musubi-tuner 0.2 loha Qwen-Image", "qwen", (Part(attention, UNET, k.loha()),))
    yield Case("musubi-tuner 0.2 lokr Qwen-Image", "qwen", (Part(attention, UNET, k.lokr()),))
    yield Case(
        "musubi-tuner 0.2 lokr whole Z-Image",
        "zimage",
        (Part(only(split(a.ZIMAGE), "to_q", "w2"), UNET, k.lokr(whole=True, factor=4)),),
    )
    fused = only(a.FLUX2_4B, "qkv", "linear1")
    yield Case("musubi-tuner 0.2 lokr FLUX.2", "flux2", (Part(fused, UNET, k.lokr(factor=16)),))


def one_trainer() -> Iterable[Case]:
    encoders = {
        "flux": (
            a.FLUX,
            (
                ("text_encoder", a.clip(768), "lora_te1_", "clip_l"),
                ("text_encoder_2", a.t5(), "lora_te2_", "t5xxl"),
            ),
        ),
        "sd3": (
            a.SD3_MEDIUM,
            (
                ("text_encoder", a.clip(768), "lora_te1_", "clip_l"),
                ("text_encoder_2", a.clip(1280), "lora_te2_", "clip_g"),
                ("text_encoder_3", a.t5(), "lora_te3_", "t5xxl"),
            ),
        ),
        "chroma": (a.CHROMA, (("text_encoder", a.t5(), "lora_te1_", "t5xxl"),)),
        "qwen": (a.QWEN, (("text_encoder", a.qwen_vl(), "lora_te_", "qwen25_7b"),)),
        "zimage": (a.ZIMAGE, ()),
        "flux2": (a.FLUX2_4B, ()),
    }
    for family, (layers, texts) in encoders.items():
        apart = split(layers)
        kohya = [Part(text, flat(prefix), KOHYA, component) for component, text, prefix, _ in texts]
        old = [
            Part(text, flat("lora_te_") if family == "chroma" else flat(prefix), KOHYA, component)
            for component, text, prefix, _ in texts
        ]
        comfy = [
            Part(text, dotted(f"text_encoders.{role}.transformer."), ORIGINAL, component)
            for component, text, _, role in texts
        ]
        diffusers = [
            Part(text, dotted(f"{component}."), PEFT, component) for component, text, _, _ in texts
        ]
        yield Case(f"OneTrainer kohya {family}", family, (Part(layers, UNET, KOHYA), *kohya))
        yield Case(f"OneTrainer original {family}", family, (Part(layers, BARE, ORIGINAL),))
        yield Case(f"OneTrainer comfy {family}", family, (Part(layers, COMFY, ORIGINAL), *comfy))
        yield Case(
            f"OneTrainer diffusers {family}", family, (Part(apart, TRANSFORMER, PEFT), *diffusers)
        )
        legacy = TRANSFORMER if family in ("flux2", "zimage", "qwen") else MIX
        old_te = [
            Part(text, dotted(f"{component}."), KOHYA, component) for component, text, _, _ in texts
        ]
        yield Case(
            f"OneTrainer legacy {family}",
            family,
            (Part(apart, legacy, KOHYA), *(old if legacy is MIX else old_te)),
        )
    own = split(a.double_block(1))
    words = {
        "bundle_emb.zibbo.clip_l": (4, 768),
        "bundle_emb.zibbo.t5": (4, 4096),
        "bundle_emb.zibbo.t5_out": (4, 4096),
    }
    yield Case(
        "OneTrainer legacy flux with bundled embeddings",
        "flux",
        (Part(own, MIX, KOHYA),),
        extra=words,
    )
    some = only(own, "to_q", "to_out.0", "ff.net.2", "norm1.linear")
    yield Case(
        "OneTrainer legacy flux DoRA of inputs", "flux", (Part(some, MIX, k.lora(dora="in")),)
    )
    yield Case(
        "OneTrainer legacy flux DoRA of outputs", "flux", (Part(some, MIX, k.lora(dora="out")),)
    )
    yield Case(
        "OneTrainer diffusers flux DoRA of outputs",
        "flux",
        (Part(some, TRANSFORMER, k.lora(alpha=None, ends=AB, dora="peft")),),
    )
    yield Case(
        "OneTrainer kohya flux DoRA of outputs",
        "flux",
        (Part(a.FLUX[:2], UNET, k.lora(dora="out")),),
    )
    yield Case(
        "OneTrainer kohya flux DoRA of inputs",
        "flux",
        (Part(a.FLUX[:2], UNET, k.lora(dora="in")),),
        refused="magnitude for each input of joined layers",
    )
    yield Case("OneTrainer legacy flux LoHa", "flux", (Part(some[:2], MIX, k.loha()),))
    yield Case("OneTrainer legacy flux LoKr", "flux", (Part(some, MIX, k.lokr(factor=16)),))
    yield Case(
        "OneTrainer legacy flux LoKr DoRA",
        "flux",
        (Part(some[:2], MIX, k.lokr(factor=-1, dora="in")),),
    )
    yield Case("OneTrainer legacy flux OFT", "flux", (Part(some[:2], MIX, k.oft_v2()),))
    yield Case(
        "OneTrainer legacy flux OFT scaled, shared",
        "flux",
        (Part(some[:2], MIX, k.oft_v2(scaled=True, shared=True)),),
        {"modelspec.architecture": "Flux.1-dev/lora"},
    )
    for family in ("sd15", "sdxl"):
        apart = named(UNETS[family])
        convolutions = named(a.SDXL_CONVOLUTIONS if family == "sdxl" else a.UNET_CONVOLUTIONS)
        yield Case(
            f"OneTrainer legacy {family}",
            family,
            (Part([*apart, *convolutions], UNET, KOHYA), *kohya_text(family)),
        )
        yield Case(
            f"OneTrainer legacy {family} DoRA of inputs",
            family,
            (Part([*apart, *convolutions[:3]], UNET, k.lora(dora="in")),),
        )
        yield Case(
            f"OneTrainer legacy {family} LoKr tucker",
            family,
            (Part(convolutions, UNET, k.lokr(tucker=True)),),
        )
        yield Case(
            f"OneTrainer legacy {family} OFT",
            family,
            (Part([*apart[:4], convolutions[0]], UNET, k.oft_v2()),),
        )
        prefix = dotted("unet.")
        yield Case(
            f"OneTrainer diffusers {family}",
            family,
            (
                Part(apart, prefix, PEFT),
                *(
                    Part(part.layers, dotted(f"{part.component}."), PEFT, part.component)
                    for part in kohya_text(family)
                ),
            ),
        )
    roles = (("text_encoder", 768, "clip_l"), ("text_encoder_2", 1280, "clip_g"))
    yield Case(
        "OneTrainer comfy sdxl",
        "sdxl",
        (
            Part(a.SDXL, COMFY, ORIGINAL),
            *(
                Part(
                    a.clip(width), dotted(f"text_encoders.{role}.transformer."), ORIGINAL, component
                )
                for component, width, role in roles
            ),
        ),
    )


def ai_toolkit() -> Iterable[Case]:
    plain = {"software": json.dumps({"name": "ai-toolkit"})}
    yield Case("ai-toolkit flux", "flux", (Part(split(a.FLUX), TRANSFORMER, PEFT),), plain)
    yield Case(
        "ai-toolkit sd15", "sd15", (Part(named(a.SD15), UNET, KOHYA), *kohya_text("sd15")), plain
    )
    yield Case("ai-toolkit sdxl", "sdxl", (Part(a.SDXL, UNET, KOHYA), *kohya_text("sdxl")), plain)
    for family, layers in (
        ("flux2", a.FLUX2_9B),
        ("chroma", a.CHROMA),
        ("qwen", a.QWEN),
        ("zimage", split(a.ZIMAGE)),
    ):
        yield Case(f"ai-toolkit {family}", family, (Part(layers, COMFY, PEFT),), plain)
    yield Case("ai-toolkit sd3", "sd3", (Part(split(a.SD3_LARGE), TRANSFORMER, PEFT),), plain)
    some = split(a.double_block(1))[:6]
    yield Case(
        "ai-toolkit flux LoKr old names",
        "flux",
        (Part(some, flat("lycoris_"), k.lokr(factor=16, whole=True)),),
        plain,
    )
    yield Case("ai-toolkit flux LoKr", "flux", (Part(some, TRANSFORMER, k.lokr(factor=16)),), plain)
    yield Case(
        "ai-toolkit chroma LoKr joined",
        "chroma",
        (Part([*a.CHROMA[:4], *a.CHROMA[-2:]], COMFY, k.lokr(factor=4, whole=True)),),
        plain | {"ss_base_model_version": "chroma"},
    )
    yield Case(
        "ai-toolkit flux2 whole differences",
        "flux2",
        (Part(only(a.FLUX2_9B, "img_attn.proj"), COMFY, k.full()),),
        plain,
    )


def simple_tuner() -> Iterable[Case]:
    alpha = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 8, "transformer.r": 2})}
    for family, layers in (
        ("flux", a.FLUX),
        ("sd3", a.SD3_MEDIUM),
        ("qwen", a.QWEN),
        ("zimage", a.ZIMAGE),
        ("flux2", a.FLUX2_4B),
    ):
        kind = k.lora(alpha=None, ends=AB, scale=4.0)
        yield Case(
            f"SimpleTuner 4 {family}",
            family,
            (
                Part(
                    only(
                        split(layers),
                        "to_q",
                        "to_k",
                        "to_v",
                        "to_out.0",
                        "add_q_proj",
                        "qkv_mlp_proj",
                    ),
                    TRANSFORMER,
                    kind,
                ),
            ),
            alpha,
        )
    flux = only(split(a.FLUX), "to_q", "to_k", "ff.net.2")
    yield Case(
        "SimpleTuner 4 flux LyCORIS LoKr",
        "flux",
        (Part(flux, flat("lycoris_"), k.lokr(factor=16)),),
        {"lycoris_config": "{}"},
    )
    yield Case(
        "SimpleTuner 4 sdxl LyCORIS LoKr",
        "sdxl",
        (Part(named(a.SDXL)[:9], flat("lycoris_"), k.lokr()),),
        {"lycoris_config": "{}"},
    )
    yield Case("SimpleTuner 4 flux2 for ComfyUI", "flux2", (Part(a.FLUX2_4B, COMFY, ORIGINAL),))
    yield Case("SimpleTuner 4 sdxl for ComfyUI", "sdxl", (Part(named(a.SDXL), UNET, KOHYA),))
    yield Case(
        "SimpleTuner 1 flux",
        "flux",
        (Part(split(a.FLUX)[:4], TRANSFORMER, k.lora(alpha=None, ends=OLD)),),
    )


def diffsynth() -> Iterable[Case]:
    kind = k.lora(alpha=None, ends=AB_DEFAULT)
    names = {
        "double_blocks": "blocks", "img_attn.qkv": "attn.a_to_qkv", "txt_attn.qkv": "attn.b_to_qkv",
        "img_attn.proj": "attn.a_to_out", "txt_attn.proj": "attn.b_to_out", "img_mlp.": "ff_a.",
        "txt_mlp.": "ff_b.", "img_mod.lin": "norm1_a.linear", "txt_mod.lin": "norm1_b.linear",
        "linear1": "to_qkv_mlp", "linear2": "proj_out", "modulation.lin": "norm.linear",
    }  # fmt: skip

    def spell(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    yield Case("DiffSynth-Studio 1 flux", "flux", (Part(a.FLUX, spell, kind),))
    yield Case(
        "DiffSynth-Studio 2 flux pipe prefix",
        "flux",
        (Part(a.FLUX, lambda name: f"pipe.dit.{spell(name)}", kind),),
    )
    yield Case(
        "DiffSynth-Studio 2 qwen",
        "qwen",
        (Part(a.QWEN, lambda name: name.replace("to_out.0", "to_out.0"), kind),),
    )
    yield Case("DiffSynth-Studio 2 zimage", "zimage", (Part(split(a.ZIMAGE), BARE, kind),))
    yield Case("DiffSynth-Studio 2 flux2", "flux2", (Part(split(a.FLUX2_4B), BARE, kind),))
    yield Case("DiffSynth-Studio 1 sdxl", "sdxl", (Part(named(a.SDXL), BARE, kind),))


def diffusers() -> Iterable[Case]:
    attention = ("to_q", "to_k", "to_v", "to_out.0")
    for family in ("sd15", "sdxl"):
        trained = only(named(UNETS[family]), *attention)
        old = [
            Layer(
                layer.name.replace("attn1.", "attn1.processor.")
                .replace("attn2.", "attn2.processor.")
                .removesuffix(".0"),
                layer.parts,
                layer.inputs,
            )
            for layer in trained
        ]
        joined_end = k.lora(alpha=None, ends=PROCESSOR)
        yield Case(
            f"diffusers 0.17 attention processors {family}", family, (Part(old, BARE, joined_end),)
        )
        yield Case(
            f"diffusers 0.18 attention processors {family}",
            family,
            (Part(old, dotted("unet."), joined_end),),
        )
        yield Case(
            f"diffusers 0.25 {family}",
            family,
            (Part(trained, dotted("unet."), k.lora(alpha=None, ends=OLD)),),
        )
        yield Case(f"diffusers 0.42 {family}", family, (Part(trained, dotted("unet."), PEFT),))
        clip_old = [
            Layer(
                layer.name.replace("_proj", "").replace("self_attn.", "self_attn.to_"),
                layer.parts,
                layer.inputs,
            )
            for layer in a.clip(768)
            if "self_attn" in layer.name
        ]
        ends = ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight", "alpha")
        yield Case(
            f"diffusers 0.20 with text {family}",
            family,
            (
                Part(trained, dotted("unet."), PEFT),
                Part(
                    clip_old, dotted("text_encoder."), k.lora(alpha=None, ends=ends), "text_encoder"
                ),
            ),
        )
    whole = {
        "lora_adapter_metadata": json.dumps(
            {"unet.lora_alpha": 4, "unet.use_rslora": True, "unet.r": 2}
        )
    }
    yield Case(
        "diffusers 0.42 sdxl rsLoRA in the header",
        "sdxl",
        (
            Part(
                only(named(a.SDXL), *attention),
                dotted("unet."),
                k.lora(alpha=None, ends=AB, scale=4 / 2**0.5),
            ),
        ),
        whole,
    )
    for family, layers in (
        ("flux", a.FLUX),
        ("sd3", a.SD3_MEDIUM),
        ("qwen", a.QWEN),
        ("zimage", a.ZIMAGE),
        ("flux2", a.FLUX2_9B),
        ("chroma", a.CHROMA),
    ):
        yield Case(
            f"peft 0.19 folder {family}",
            family,
            (Part(split(layers), dotted("base_model.model."), PEFT),),
            {"base_model": family},
        )
    yield Case(
        "peft 0.19 sdxl DoRA",
        "sdxl",
        (
            Part(
                named(a.SDXL)[2:9],
                dotted("base_model.model."),
                k.lora(alpha=None, ends=AB, dora="peft"),
            ),
        ),
    )
    yield Case(
        "diffusers 0.42 flux fused projections",
        "flux",
        (
            Part(
                [Layer("transformer_blocks.4.attn.to_qkv", a.double_block(4)[0].parts, (3072,))],
                TRANSFORMER,
                PEFT,
            ),
            Part(split(a.single_block(3)), TRANSFORMER, PEFT),
        ),
    )


def xlabs() -> Iterable[Case]:
    ends = PROCESSOR
    double, single = a.double_block(2), a.single_block(2)
    qkv = Layer("single_blocks.2.processor.qkv", single[0].parts[:3], (3072,))
    proj = Layer("single_blocks.2.processor.proj", single[1].parts, single[1].inputs)
    kind = k.lora(alpha=None, ends=ends)
    yield Case("x-flux single blocks", "flux", (Part([qkv, proj], BARE, kind),))
    first = k.lora(alpha=None, ends=("_lora1.down.weight", "_lora1.up.weight", "alpha"))
    second = k.lora(alpha=None, ends=("_lora2.down.weight", "_lora2.up.weight", "alpha"))
    image = [
        Layer(f"double_blocks.2.processor.{name}", double[place].parts, (3072,))
        for name, place in (("qkv", 0), ("proj", 1))
    ]
    text = [
        Layer(f"double_blocks.2.processor.{name}", double[place].parts, (3072,))
        for name, place in (("qkv", 4), ("proj", 5))
    ]
    yield Case("x-flux double blocks", "flux", (Part(image, BARE, first), Part(text, BARE, second)))
    yield Case(
        "x-flux in ComfyUI's names", "flux", (Part(image, COMFY, first), Part(text, COMFY, second))
    )


def lycoris() -> Iterable[Case]:
    ways: Mapping[str, k.Kind] = {
        "LoCon": LOCON,
        "LoCon tucker": k.lora(tucker=True),
        "LoCon DoRA": k.lora(dora="out"),
        "LoCon DoRA of inputs": k.lora(dora="in"),
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
        "full": k.full(),
        "full with biases": k.full(bias=True),
    }  # fmt: skip
    norms = [
        a.one("n", "down_blocks.0.resnets.0.norm1", 320),
        a.one("n", "mid_block.attentions.0.norm", 1280),
    ]
    for family in ("sd15", "sdxl"):
        linear = kohya_unet(family)[:9]
        convolutions = a.SDXL_CONVOLUTIONS if family == "sdxl" else named(a.UNET_CONVOLUTIONS)
        for name, kind in ways.items():
            yield Case(
                f"LyCORIS 3.2 {name} {family}",
                family,
                (Part([*linear, *convolutions[:3]], UNET, kind),),
            )
        yield Case(
            f"LyCORIS 3.2 train_norm {family}",
            family,
            (Part(linear, UNET, LOCON), Part(split(norms), UNET, k.norm())),
        )
    joint = [a.SD3_MEDIUM[0], a.SD3_MEDIUM[2]]
    for name in ("LoHa", "LoCon DoRA", "GLoRA", "IA3 of outputs", "IA3 of inputs", "full"):
        yield Case(f"LyCORIS 3.2 {name} sd3 joined", "sd3", (Part(joint, UNET, ways[name]),))
    yield Case(
        "LyCORIS 3.2 diag-OFT sd3 joined", "sd3", (Part(joint, UNET, k.diag_oft(blocks=96)),)
    )
    yield Case(
        "LyCORIS 3.2 diag-OFT sd3 across",
        "sd3",
        (Part(joint[:1], UNET, k.diag_oft(blocks=8)),),
        refused="turns outputs of joined layers",
    )
    yield Case(
        "LyCORIS 3.2 LoKr flux across",
        "flux",
        (Part(a.single_block(9)[:1], UNET, k.lokr(factor=16)),),
    )
    biased = k.lora(bias=True)
    yield Case(
        "ComfyUI extraction with biases sd15", "sd15", (Part(named(a.SD15)[:3], UNET, biased),)
    )


CASES: tuple[Case, ...] = tuple(
    case
    for trainer in (
        sd_scripts,
        musubi,
        one_trainer,
        ai_toolkit,
        simple_tuner,
        diffsynth,
        diffusers,
        xlabs,
        lycoris,
    )
    for case in trainer()
)
