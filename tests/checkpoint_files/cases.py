"""Checkpoints that people have: their header, named by publisher and version, and what is to be read in them.

`CASES` is the corpus. A file is read as family and variant, with its prediction type and the parts that it
lacks, or refused with a sentence that says which model it is. Of signatures.toml there is one row of each kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.checkpoint_files import layouts as a
from tests.checkpoint_files.layouts import UNET, Shapes, network, prefixed, whole_unet, without


@dataclass(frozen=True)
class Case:
    """One file: `refused` is what the refusal says, "" for a base of `family`; `missing` parts are downloaded.

    `beside` are tensors with a dtype and bytes of their own, `stored` those with a dtype of their own. `layout` is
    ComfyUI's name of the layout of the blocks' matrices.
    """

    name: str
    shapes: Shapes
    family: str = ""
    variant: str = ""
    missing: str = ""
    prediction: str = "flow"
    refused: str = ""
    dtype: str = "BF16"
    scales: str = ""
    layout: str = ""
    file: str = "model.safetensors"
    metadata: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)
    stored: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)


BOTH, NOTHING = "VAE, the text encoders", "configurations"
FP8: dict[str, Any] = {"dtype": "F8_E4M3"}


def gguf(kind: str, file: str) -> dict[str, Any]:
    return {"dtype": kind, "file": f"{file}.gguf"}


def unets() -> Iterator[Case]:
    for family, dtype in {"sd15": "F32", "sd2": "F16", "sdxl": "F8_E4M3"}.items():
        unet = network(family)
        files: tuple[tuple[str, Shapes, str], ...] = (
            ("A1111", whole_unet(family, unet), NOTHING),
            ("ComfyUI's ModelSave", prefixed(UNET, unet), BOTH),
            ("ComfyUI's UNETLoader", unet, BOTH),
            ("diffusers", network(family, original=False), BOTH),
        )
        for title, shapes, missing in files:
            yield Case(f"{title} {family}", shapes, family, "", missing, "epsilon", dtype=dtype)
    xl = whole_unet("sdxl", network("sdxl"))
    for title, marks in {"v-pred": ("v_pred",), "v-pred 1.0": ("v_pred", "ztsnr")}.items():
        shapes = xl | dict.fromkeys(marks, ())
        yield Case(f"NoobAI-XL {title}", shapes, "sdxl", "", NOTHING, "v_prediction")
    for family in ("sd15", "sd2", "sdxl"):
        wide = network(family) | {"input_blocks.0.0.weight": (320, 8, 3, 3)}
        yield Case(f"instruct-pix2pix {family}", wide, family, "", BOTH, "epsilon")
    yield Case("averaged copy", xl | {"model_ema.decay": ()}, "sdxl", "", NOTHING, "epsilon")
    yield Case("scaled fp8 SDXL", xl, "sdxl", "", NOTHING, "epsilon", scales="scale_weight", **FP8)
    yield Case("city96 SDXL", network("sdxl"), "sdxl", "", BOTH, "epsilon", **gguf("Q8_0", "sdxl"))


def transformers() -> Iterator[Case]:
    flux, vae = network("flux"), prefixed("vae.", a.vae(16))
    clip_l, clip_g, t5, qwen, gemma = (
        prefixed(f"text_encoders.{role}.transformer.", a.text(role))
        for role in ("clip_l", "clip_g", "t5xxl", "qwen3_4b", "gemma2_2b")
    )
    whole = prefixed(UNET, flux) | vae | clip_l
    sd3 = prefixed(UNET, network("sd3", 2)) | prefixed(a.VAE, a.vae(16))
    large = prefixed(UNET, network("sd3", 1)) | prefixed(a.VAE, a.vae(16))
    klein = prefixed(UNET, network("flux2")) | prefixed("vae.", a.vae(32))
    texts, lumina = "the text encoders", network("lumina2")
    rows: tuple[tuple[str, Shapes, str, str, str, dict[str, Any]], ...] = (
        ("flux1-dev", flux, "flux", "dev", BOTH, {}),
        ("flux1-dev.sft", flux, "flux", "dev", BOTH, {"file": "flux1-dev.sft"}),
        ("flux1-schnell", network("flux", 1), "flux", "schnell", BOTH, {}),
        ("diffusers dev", network("flux", original=False), "flux", "dev", BOTH, {}),
        ("diffusers schnell", network("flux", 1, original=False), "flux", "schnell", BOTH, {}),
        ("fp8-e5m2 dev", flux, "flux", "dev", BOTH, {"dtype": "F8_E5M2"}),
        ("weight_scale dev", prefixed(UNET, flux), "flux", "dev", BOTH, FP8 | {"scales": "weight_scale"}),
        *(
            (f"city96 dev {kind}", flux, "flux", "dev", BOTH, gguf(kind, f"flux1-dev-{kind}"))
            for kind in ("Q8_0", "Q4_K", "BF16")
        ),
        ("flux1-dev all in one", whole | t5, "flux", "dev", "tokenizers", FP8),
        ("flux1-dev without T5", whole, "flux", "dev", "t5xxl", {}),
        ("Chroma1-HD", network("chroma"), "chroma", "", BOTH, {}),
        ("diffusers Chroma", network("chroma", original=False), "chroma", "", BOTH, {}),
        ("sd3_medium", sd3, "sd3", "3-medium", texts, {}),
        ("sd3_medium_incl_clips", sd3 | clip_l | clip_g, "sd3", "3-medium", "t5xxl", {}),
        ("sd3_medium_incl_all", sd3 | clip_l | clip_g | t5, "sd3", "3-medium", "tokenizers", {}),
        ("sd3.5_medium", network("sd3"), "sd3", "medium", BOTH, {}),
        ("sd3.5_large", large, "sd3", "large", texts, {}),
        ("sd3.5_large_turbo", large, "sd3", "large-turbo", texts, {"file": "sd3.5_large_turbo.safetensors"}),
        ("diffusers SD 3.5 medium", network("sd3", original=False), "sd3", "medium", BOTH, {}),
        ("flux-2-klein-4b", network("flux2"), "flux2", "klein-4b", BOTH, {"file": "flux-2-klein-4b.safetensors"}),
        ("klein-base-9b", network("flux2", 1), "flux2", "klein-base-9b", BOTH, gguf("Q8_0", "flux-2-klein-base-9b")),
        # Its VAE cannot be read from a file and is downloaded all the same.
        ("klein with a VAE", klein, "flux2", "klein-base-4b", BOTH, {}),
        ("diffusers klein", network("flux2", original=False), "flux2", "klein-base-4b", BOTH, {}),
        ("flux2-dev", network("flux2dev"), "flux2dev", "dev", BOTH, {"file": "flux2-dev.safetensors"}),
        ("city96 FLUX.2 dev", network("flux2dev"), "flux2dev", "dev", BOTH, gguf("Q4_K", "flux2-dev-Q4_K_M")),
        ("diffusers FLUX.2 dev", network("flux2dev", original=False), "flux2dev", "dev", BOTH, {}),
        ("z_image_turbo", network("zimage"), "zimage", "turbo", BOTH, {"file": "z_image_turbo_bf16.safetensors"}),
        ("diffusers Z-Image", network("zimage", original=False), "zimage", "base", BOTH, {}),
        ("all-in-one Z-Image", prefixed(UNET, network("zimage")) | vae | qwen, "zimage", "base", NOTHING, {}),
        ("Lumina Image 2", lumina, "lumina2", "", BOTH, {}),
        ("lumina_2", prefixed(UNET, lumina) | vae | gemma, "lumina2", "", NOTHING, {}),
        ("krea2_raw_bf16", network("krea2"), "krea2", "raw", BOTH, {}),
        ("Krea 2 turbo", network("krea2"), "krea2", "turbo", BOTH, {"file": "turbo.safetensors"}),
        ("ComfyUI's Krea 2", prefixed(UNET, network("krea2")), "krea2", "raw", BOTH, {}),
        ("diffusers Krea 2", network("krea2", original=False), "krea2", "raw", BOTH, {}),
        ("KREA-2 in GGUF", network("krea2"), "krea2", "raw", BOTH, gguf("Q4_K", "Krea-2-Raw-Q4_K_M")),
        ("ernie-image", network("ernie"), "ernie", "base", BOTH, {"file": "ernie-image.safetensors"}),
        ("ERNIE-Image-Turbo", network("ernie"), "ernie", "turbo", BOTH, {"file": "ernie-image-turbo.safetensors"}),
        ("ComfyUI's ERNIE-Image", prefixed(UNET, network("ernie")), "ernie", "base", BOTH, {}),
        ("unsloth ERNIE Turbo", network("ernie"), "ernie", "turbo", BOTH, gguf("Q4_K", "ernie-image-turbo-UD-Q4_K_M")),
        ("qwen_image", prefixed(UNET, network("qwen")), "qwen", "", BOTH, FP8),
        ("Edit-2511", network("qwen") | {"__index_timestep_zero__": (0,)}, "qwen", "edit-plus", BOTH, {}),
        ("qwen_image_edit", network("qwen"), "qwen", "edit", BOTH, {"file": "qwen_image_edit_fp8.safetensors"}),
        ("Qwen-Image-Pruning", without(network("qwen"), r"transformer_blocks\.[45]\d"), "qwen", "", BOTH, {}),
    )  # fmt: skip
    for title, shapes, family, variant, missing, more in rows:
        yield Case(title, shapes, family, variant, missing, **more)


def quantised() -> Iterator[Case]:
    """Yield files of Comfy-Org, black-forest-labs and users in ComfyUI's layouts, most of them by their names."""
    zimage, klein, qwen = network("zimage"), network("flux2", 1), prefixed(UNET, network("qwen"))
    fp8, convrot = {"layout": "float8_e4m3fn"}, {"layout": "int8_tensorwise"}
    rows: tuple[tuple[str, Shapes, str, str, dict[str, Any]], ...] = (
        ("z_image_turbo_int8_convrot", zimage, "zimage", "turbo", convrot),
        ("z_image_turbo_nvfp4", zimage, "zimage", "turbo", {"layout": "nvfp4"}),
        ("z_image_int8_convrot", zimage, "zimage", "base", convrot | {"dtype": "F32"}),
        ("flux-2-klein-9b-fp8", klein, "flux2", "klein-9b", fp8),
        ("flux-2-klein-base-9b-nvfp4", klein, "flux2", "klein-base-9b", {"layout": "nvfp4"}),
        ("qwen_image_mxfp8", qwen, "qwen", "", {"layout": "mxfp8"}),
        ("qwen_image_fp8mixed", qwen, "qwen", "", fp8),
        ("krea2_turbo_fp8_scaled", network("krea2"), "krea2", "turbo", fp8),
        ("krea2_raw_int8_convrot", network("krea2"), "krea2", "raw", convrot),
        (
            "krea2_turbo_mxfp8",
            prefixed(UNET, network("krea2")),
            "krea2",
            "turbo",
            {"layout": "mxfp8"},
        ),
        ("krea2_turbo_nvfp4", network("krea2"), "krea2", "turbo", {"layout": "nvfp4"}),
        ("ernie-image-turbo_fp8_scaled", network("ernie"), "ernie", "turbo", fp8),
        ("ernie-image_int8_convrot", network("ernie"), "ernie", "base", convrot),
        ("ernie-image_mxfp8", network("ernie"), "ernie", "base", {"layout": "mxfp8"}),
        ("ernie-image_nvfp4", network("ernie"), "ernie", "base", {"layout": "nvfp4"}),
        ("flux1-dev-mxfp8", network("flux"), "flux", "dev", {"layout": "mxfp8"}),
        ("flux1-dev-int8_convrot", network("flux"), "flux", "dev", convrot),
        ("chroma1-hd_nvfp4", network("chroma"), "chroma", "", {"layout": "nvfp4"}),
        ("sd3.5_large_fp8_scaled", network("sd3", 1), "sd3", "large", fp8),
        ("lumina2_mxfp8", network("lumina2"), "lumina2", "", {"layout": "mxfp8"}),
        ("sdxl_int8_convrot", whole_unet("sdxl", network("sdxl")), "sdxl", "", convrot),
    )
    for title, shapes, family, variant, more in rows:
        missing, prediction = (NOTHING, "epsilon") if family == "sdxl" else (BOTH, "flow")
        file = f"{title}.safetensors"
        yield Case(title, shapes, family, variant, missing, prediction, file=file, **more)


def refused() -> Iterator[Case]:
    sd15, sd2, xl = (network(name) for name in ("sd15", "sd2", "sdxl"))
    xl_named = network("sdxl", original=False)
    flux, first = network("flux"), "input_blocks.0.0.weight"
    text_1280 = {name: (shape[0], 1280) for name, shape in xl.items() if "attn2.to_k" in name}
    rows: tuple[tuple[str, Shapes, str], ...] = (
        ("sd-v1-5-inpainting", prefixed(UNET, sd15 | {first: (320, 9, 3, 3)}), "Diffusion 1 inpainting"),
        ("512-inpainting-ema", prefixed(UNET, sd2 | {first: (320, 9, 3, 3)}), "Diffusion 2 inpainting"),
        ("diffusers sdxl-inpainting", xl_named | {"conv_in.weight": (320, 9, 3, 3)}, "SDXL inpainting"),
        ("sd21-unclip-h", sd2 | {"label_emb.0.0.weight": (1280, 2048)}, "Stable unCLIP"),
        ("cosxl", prefixed(UNET, xl) | {"edm_vpred.sigma_max": ()}, "EDM's noise levels"),
        ("Kolors", prefixed(UNET, xl | {"label_emb.0.0.weight": (1280, 5632)}), "Kolors"),
        ("refiner", xl | text_1280 | {"label_emb.0.0.weight": (1536, 2560)}, "the SDXL refiner"),
        ("SSD-1B", whole_unet("sdxl", without(xl, r"middle_block\.1")), "SSD-1B"),
        ("Vega", without(xl_named, r"mid_block\.att|.*_blocks\.[3-9]\."), "Vega"),
        ("koala-700m", without(xl, r"input_blocks\.8\."), "KOALA"),
        ("small-sd", without(network("sd15", original=False), r".*resnets\.1\."), "pruned Stable Diffusion"),
        ("svd_xt", sd15 | {"input_blocks.1.1.time_stack.0.attn1.to_q.weight": (8, 8)}, "Stable Video"),
        ("flux1-fill-dev", flux | {"img_in.weight": (3072, 384)}, "FLUX.1 Fill"),
        ("diffusers Depth", network("flux", original=False) | {"x_embedder.weight": (3072, 128)}, "Canny or Depth"),
        ("Flex.1-alpha", without(flux, r"double_blocks\.(?:[89]|1\d)\."), "pruned FLUX.1"),
        ("LongCat-Image", flux | {"txt_in.weight": (3072, 3584)}, "LongCat"),
        ("Chroma1-Radiance", network("chroma") | {"nerf_image_embedder.embedder.0.weight": (64, 67)}, "Radiance"),
        ("vae-ft-mse-840000", a.vae(), "a VAE alone"),
        ("flux2-vae", a.vae(32) | {"bn.running_mean": (128,)}, "VAE of FLUX.2 alone"),
        ("clip_l", a.text("clip_l"), "text encoder alone (CLIP)"),
        ("t5xxl_fp16", a.text("t5xxl"), "text encoder alone (T5)"),
        ("qwen_3_4b", a.text("qwen3_4b"), "text encoder alone (Qwen3)"),
        ("ministral-3-3b", a.text("ministral3_3b"), "text encoder alone (Ministral 3 3B)"),
        ("flux1-dev-bnb-nf4", flux | {"double_blocks.0.img_attn.qkv.weight.absmax": (1,)}, "NF4"),
        ("svdq-int4-flux.1", flux | {"single_blocks.0.linear1.qweight": (8, 8)}, "SVDQuant"),
    )  # fmt: skip
    for title, shapes, words in rows:
        yield Case(title, shapes, refused=re.escape(words))
    yield Case("int8 FLUX.1", flux, dtype="I8", refused="is quantised")
    yield Case("IQ2_XXS FLUX.1", flux, refused="is quantised", **gguf("IQ2_XXS", "flux"))
    # Of models of no family a few tensors are enough: these are the ones that tell them apart.
    for names, words in (
        ("blocks.0.self_attn.norm_q.weight patch_embedding.weight head.modulation", "Wan"),
        ("txt_in.individual_token_refiner.blocks.0.self_attn.qkv.weight", "HunyuanVideo"),
        ("control_model.input_hint_block.0.weight control_model.zero_convs.0.0.weight", "ControlNet"),
        ("ip_adapter.1.to_k_ip.weight image_proj.proj.weight", "IP-Adapter"),
        ("down_blocks.0.motion_modules.0.temporal_transformer.proj_in.weight", "AnimateDiff"),
        ("clip_l clip_g", "embedding"),
        ("lora_unet_x.lora_down.weight lora_unet_x.lora_up.weight", "a LoRA"),
        ("lora_unet_x.lokr_w1 lora_unet_x.lokr_w2", "a LoRA"),
        ("body.first.weight", "an unknown architecture"),
    ):  # fmt: skip
        yield Case(names, dict.fromkeys(names.split(), (8, 8)), refused=words)


CASES = [*unets(), *transformers(), *quantised(), *refused()]
