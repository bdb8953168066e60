"""Checkpoints that people have: their header, named by publisher and version, and what is to be read in them.

`CASES` is the corpus. A file is read as family and variant, with its prediction type and the parts that it
lacks, or refused with a sentence that says which model it is.
"""

# ruff: noqa: E501  # a row of the table is one line

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.checkpoint_files import layouts as a
from tests.checkpoint_files.layouts import Shapes, linear, prefixed

UNET, VAE = "model.diffusion_model.", "first_stage_model."


@dataclass(frozen=True)
class Case:
    """One file: `refused` is what the refusal says, "" for a base of `family`; `missing` parts are downloaded."""

    name: str
    shapes: Shapes
    family: str = ""
    variant: str = ""
    prediction: str = "flow"
    missing: str = ""
    refused: str = ""
    dtype: str = "BF16"
    scales: str = ""
    file: str = "model.safetensors"
    metadata: Mapping[str, str] = field(default_factory=dict)


def whole_unet(shapes: Shapes, *, family: str) -> Shapes:
    """Return a checkpoint of A1111 and ComfyUI: U-Net, VAE and text encoders."""
    text = {
        "sd15": prefixed("cond_stage_model.transformer.", a.clip()),
        "sd2": prefixed("cond_stage_model.model.", a.open_clip(width=1024, layers=24)),
        "sdxl": prefixed("conditioner.embedders.0.transformer.", a.clip())
        | prefixed("conditioner.embedders.1.model.", a.open_clip(width=1280, layers=32)),
    }[family]
    return prefixed(UNET, shapes) | prefixed(VAE, a.vae()) | text


def unets() -> Iterator[Case]:
    nothing, both = "configurations", "VAE, the text encoders"
    plain = {"sd15": a.sd1(), "sd2": a.sd2(), "sdxl": a.sdxl()}
    named = {"sd15": a.sd1(ldm=False), "sd2": a.sd2(ldm=False), "sdxl": a.sdxl(ldm=False)}
    names = {
        "sd15": ("runwayml v1-5-pruned-emaonly", "CompVis sd-v1-4", "Anything V3", "Realistic Vision 5.1"),
        "sd2": ("stabilityai v2-1_512-ema-pruned", "Waifu Diffusion 1.5"),
        "sdxl": ("stabilityai sd_xl_base_1.0", "Illustrious-XL v0.1", "Pony Diffusion V6 XL", "Animagine XL 4.0"),
    }  # fmt: skip
    for family, titles in names.items():
        for title, dtype in zip(titles, ("F32", "F16", "BF16", "F8_E4M3"), strict=False):
            shapes = whole_unet(plain[family], family=family)
            yield Case(title, shapes, family, "", "epsilon", nothing, dtype=dtype)
        for title, shapes in (
            ("ComfyUI ModelSave of the U-Net", prefixed(UNET, plain[family])),
            ("UNETLoader file without a prefix", plain[family]),
            ("diffusers unet/diffusion_pytorch_model.fp16", named[family]),
        ):
            yield Case(f"{title} {family}", shapes, family, "", "epsilon", both, dtype="F16")
        yield Case(
            f"checkpoint with an averaged copy {family}",
            whole_unet(plain[family], family=family) | {"model_ema.decay": ()},
            family, "", "epsilon", nothing,
        )  # fmt: skip
    xl = whole_unet(a.sdxl(), family="sdxl")
    yield Case(
        "NoobAI-XL v-pred 1.0",
        xl | {"v_pred": (), "ztsnr": ()},
        "sdxl",
        "",
        "v_prediction",
        nothing,
    )
    yield Case(
        "Laxhar v-pred 0.5 without ztsnr", xl | {"v_pred": ()}, "sdxl", "", "v_prediction", nothing
    )
    yield Case(
        "Comfy-Org SDXL scaled fp8",
        xl,
        "sdxl",
        "",
        "epsilon",
        nothing,
        dtype="F8_E4M3",
        scales="scale_weight",
    )
    yield Case(
        "city96 SDXL Q8_0", a.sdxl(), "sdxl", "", "epsilon", both, dtype="Q8_0", file="sdxl.gguf"
    )
    yield Case(
        "city96 SD 1.5 Q4_K", a.sd1(), "sd15", "", "epsilon", both, dtype="Q8_0", file="sd15.gguf"
    )

    for title, family, shapes, refused in (
        ("runwayml sd-v1-5-inpainting", "sd15", a.sd1(inputs=9), "Stable Diffusion 1 inpainting"),
        ("stabilityai 512-inpainting-ema", "sd2", a.sd2(inputs=9), "Stable Diffusion 2 inpainting"),
        ("stabilityai 512-depth-ema", "sd2", a.sd2(inputs=5), "Stable Diffusion 2 depth"),
        ("timbrooks instruct-pix2pix", "sd15", a.sd1(inputs=8), "InstructPix2Pix"),
        ("stabilityai sd21-unclip-h", "sd2", a.sd2(added=2048), "Stable unCLIP"),
        ("stabilityai x4-upscaler-ema", "sd2", a.sd2(inputs=7), "x4 upscaler"),
        ("diffusers sdxl-inpainting-0.1", "sdxl", a.sdxl(inputs=9), "SDXL inpainting"),
        ("diffusers sdxl-instructpix2pix-768", "sdxl", a.sdxl(inputs=8), "SDXL InstructPix2Pix"),
        ("stabilityai cosxl", "sdxl", a.sdxl() | {"edm_vpred.sigma_max": ()}, "EDM's noise levels"),
        ("playgroundai playground-v2.5", "sdxl", a.sdxl() | {"edm_mean": (4,)}, "EDM's noise levels"),
        ("Kwai Kolors", "sdxl", a.sdxl(added=5632), "Kolors"),
    ):  # fmt: skip
        prefixed_marks = {k: v for k, v in shapes.items() if k.startswith("edm")}
        bare = {k: v for k, v in shapes.items() if k not in prefixed_marks}
        yield Case(title, whole_unet(bare, family=family) | prefixed_marks, refused=refused)
    refiner = a.unet(
        channels=(384, 768, 1536, 1536), depths=(0, 4, 4, 0), middle=4, text=1280, flat=True, added=2560
    )  # fmt: skip
    yield Case("stabilityai sd_xl_refiner_1.0", prefixed(UNET, refiner), refused="the SDXL refiner")
    pruned = {
        "Segmind SSD-1B": (a.sdxl(depths=(0, 2, 4), middle=0), "SSD-1B"),
        "Segmind-Vega": (a.sdxl(depths=(0, 1, 2), middle=0), "Vega"),
        "etri-vilab koala-700m": (a.sdxl(depths=(0, 2, 5), middle=None, resnets=1), "KOALA"),
    }
    for title, (shapes, refused) in pruned.items():
        yield Case(title, whole_unet(shapes, family="sdxl"), refused=refused)
    for title, shapes, refused in (
        ("Segmind SSD-1B unet", a.sdxl(ldm=False, depths=(0, 2, 4), middle=0), "SSD-1B"),
        ("Segmind-Vega unet", a.sdxl(ldm=False, depths=(0, 1, 2), middle=0), "Vega"),
        ("koala-1b unet", a.sdxl(ldm=False, depths=(0, 2, 6), middle=6, resnets=1), "KOALA"),
        ("segmind small-sd unet", a.unet(ldm=False, resnets=1), "pruned Stable Diffusion"),
        ("segmind tiny-sd unet", a.unet(ldm=False, resnets=1, middle=None), "pruned Stable Diffusion"),
        ("diffusers stable-diffusion-inpainting unet", a.sd1(ldm=False, inputs=9), "1 inpainting"),
        ("diffusers sd2 inpainting unet", a.sd2(ldm=False, inputs=9), "2 inpainting"),
        ("diffusers sdxl inpainting unet", a.sdxl(ldm=False, inputs=9), "SDXL inpainting"),
    ):  # fmt: skip
        yield Case(title, shapes, refused=refused)
    svd = {"input_blocks.1.1.time_stack.0.attn1.to_q.weight": (320, 320)}
    yield Case("stabilityai svd_xt", prefixed(UNET, a.sd1(inputs=8) | svd), refused="Stable Video")


def transformers() -> Iterator[Case]:
    clip_t5 = prefixed("text_encoders.clip_l.transformer.", a.clip()) | prefixed(
        "text_encoders.t5xxl.transformer.", a.t5()
    )
    flux, both = a.flux(), "VAE, the text encoders"
    vae = prefixed("vae.", a.vae(latent=16, quant=False))
    for title, shapes, variant in (
        ("BFL flux1-dev", flux, "dev"),
        ("BFL flux1-schnell", a.flux(guidance=False), "schnell"),
        ("BFL flux1-krea-dev", flux, "dev"),
        ("diffusers-named FLUX.1 dev", a.flux_named(), "dev"),
        ("diffusers-named FLUX.1 schnell", a.flux_named(guidance=False), "schnell"),
    ):
        yield Case(title, shapes, "flux", variant, missing=both)
    yield Case("BFL flux1-dev.sft", flux, "flux", "dev", missing=both, file="flux1-dev.sft")
    yield Case("Kijai flux1-dev-fp8", flux, "flux", "dev", missing=both, dtype="F8_E4M3")
    yield Case("Kijai flux1-dev-fp8-e5m2", flux, "flux", "dev", missing=both, dtype="F8_E5M2")
    yield Case(
        "Comfy-Org flux scaled fp8", flux, "flux", "dev", missing=both, dtype="F8_E4M3",
        scales="scale_weight",
    )  # fmt: skip
    yield Case(
        "ComfyUI mixed fp8 with weight_scale", prefixed(UNET, flux), "flux", "dev", missing=both,
        dtype="F8_E4M3", scales="weight_scale",
    )  # fmt: skip
    for kind in ("Q8_0", "Q4_K", "Q5_0", "BF16"):
        yield Case(
            f"city96 FLUX.1-dev-gguf {kind}", flux, "flux", "dev", missing=both, dtype=kind,
            file=f"flux1-dev-{kind}.gguf",
        )  # fmt: skip
    yield Case(
        "city96 FLUX.1-schnell-gguf", a.flux(guidance=False), "flux", "schnell", missing=both,
        dtype="Q8_0", file="flux1-schnell-Q8_0.gguf",
    )  # fmt: skip
    whole = prefixed(UNET, flux) | vae | clip_t5
    yield Case(
        "Comfy-Org flux1-dev-fp8 all in one",
        whole,
        "flux",
        "dev",
        missing="tokenizers",
        dtype="F8_E4M3",
    )
    yield Case(
        "Forge FLUX with VAE and CLIP only",
        prefixed(UNET, flux) | vae | prefixed("text_encoders.clip_l.transformer.", a.clip()),
        "flux", "dev", missing="t5xxl",
    )  # fmt: skip

    chroma = a.flux(chroma=True)
    yield Case("lodestones Chroma1-HD", chroma, "chroma", missing=both)
    yield Case(
        "lodestones Chroma1-HD fp8 scaled",
        chroma,
        "chroma",
        missing=both,
        dtype="F8_E4M3",
        scales="scale_weight",
    )
    yield Case(
        "silveroxides Chroma GGUF", chroma, "chroma", missing=both, dtype="Q8_0", file="chroma.gguf"
    )
    yield Case("diffusers-named Chroma", a.flux_named(chroma=True), "chroma", missing=both)

    large = a.sd3(depth=38, dual=0, positions=192)
    first = a.sd3(dual=0, normed=False, positions=192)
    clips = prefixed("text_encoders.clip_l.transformer.", a.clip()) | prefixed(
        "text_encoders.clip_g.transformer.", a.clip(width=1280, layers=32, projection=True)
    )
    t5 = prefixed("text_encoders.t5xxl.transformer.", a.t5())
    sd3_vae = prefixed(VAE, a.vae(latent=16, quant=False))
    for title, shapes, variant, missing in (
        ("stabilityai sd3.5_medium", a.sd3(), "medium", "the text encoders"),
        ("stabilityai sd3.5_large", large, "large", "the text encoders"),
        ("stabilityai sd3_medium", first, "3-medium", "the text encoders"),
    ):
        yield Case(title, prefixed(UNET, shapes) | sd3_vae, "sd3", variant, missing=missing)
    yield Case("stabilityai sd3.5_large_turbo", prefixed(UNET, large) | sd3_vae, "sd3", "large-turbo",
               missing="the text encoders", file="sd3.5_large_turbo.safetensors")  # fmt: skip
    yield Case(
        "stabilityai sd3_medium_incl_clips",
        prefixed(UNET, first) | sd3_vae | clips,
        "sd3",
        "3-medium",
        missing="t5xxl",
    )
    yield Case(
        "stabilityai sd3_medium_incl_clips_t5xxlfp8",
        prefixed(UNET, first) | sd3_vae | clips | t5,
        "sd3",
        "3-medium",
        missing="tokenizers",
    )
    yield Case("Comfy-Org sd3.5_large_fp8_scaled", prefixed(UNET, large) | sd3_vae | clips | t5, "sd3", "large",
               missing="tokenizers", dtype="F8_E4M3", scales="scale_weight")  # fmt: skip
    yield Case("diffusers-named SD 3.5 medium", a.sd3_named(), "sd3", "medium", missing=both)
    yield Case(
        "diffusers-named SD 3.5 large",
        a.sd3_named(depth=38, dual=0, positions=192),
        "sd3",
        "large",
        missing=both,
    )
    yield Case(
        "city96 stable-diffusion-3.5-large-gguf",
        large,
        "sd3",
        "large",
        missing=both,
        dtype="Q8_0",
        file="sd3.5_large-Q8_0.gguf",
    )

    small, big = a.flux2(), a.flux2(width=4096, text=12288, blocks=8, singles=24)
    for title, shapes, file, variant in (
        ("BFL flux-2-klein-4b", small, "flux-2-klein-4b.safetensors", "klein-4b"),
        ("BFL flux-2-klein-base-4b", small, "flux-2-klein-base-4b.safetensors", "klein-base-4b"),
        ("BFL flux-2-klein-9b", big, "flux-2-klein-9b.safetensors", "klein-9b"),
        ("BFL flux-2-klein-base-9b", big, "flux-2-klein-base-9b.safetensors", "klein-base-9b"),
        (
            "diffusers-named FLUX.2 klein 4B",
            a.flux2(named=True),
            "style.safetensors",
            "klein-base-4b",
        ),
        ("unsloth klein 9B GGUF", big, "flux-2-klein-9b-Q8_0.gguf", "klein-9b"),
    ):
        dtype = "Q8_0" if file.endswith("gguf") else "BF16"
        yield Case(title, shapes, "flux2", variant, missing=both, dtype=dtype, file=file)
    for title, shapes, file, variant in (
        ("Comfy-Org z_image_turbo_bf16", a.zimage(), "z_image_turbo_bf16.safetensors", "turbo"),
        ("Comfy-Org z_image_bf16", a.zimage(), "z_image_bf16.safetensors", "base"),
        ("diffusers-named Z-Image", a.zimage(named=True), "tuned.safetensors", "base"),
        ("jayn7 Z-Image-Turbo-GGUF", a.zimage(), "z_image_turbo-Q8_0.gguf", "turbo"),
    ):
        dtype = "Q8_0" if file.endswith("gguf") else "BF16"
        yield Case(title, shapes, "zimage", variant, missing=both, dtype=dtype, file=file)
    yield Case("all-in-one Z-Image-Turbo", prefixed(UNET, a.zimage()) | vae
               | prefixed("text_encoders.qwen3_4b.transformer.", a.language_model(width=2560, layers=36, normed=True)),
               "zimage", "turbo", missing="configurations", file="zImageTurbo_aio.safetensors")  # fmt: skip
    lumina = a.zimage(width=2304, text=2304, padded=False)
    yield Case("Alpha-VLLM Lumina Image 2", lumina, "lumina2", missing=both, dtype="BF16")
    yield Case("Comfy-Org lumina_2", prefixed(UNET, lumina) | vae
               | prefixed("text_encoders.gemma2_2b.transformer.", a.language_model(width=2304, layers=26)),
               "lumina2", missing="configurations", dtype="BF16", file="lumina_2.safetensors")  # fmt: skip
    for title, shapes, dtype, scales, file in (
        ("Comfy-Org qwen_image_bf16", a.qwen(), "BF16", "", "qwen_image_bf16.safetensors"),
        (
            "Comfy-Org qwen_image_fp8_e4m3fn",
            prefixed(UNET, a.qwen()),
            "F8_E4M3",
            "",
            "qwen_image_fp8.safetensors",
        ),
        (
            "lightx2v qwen_image_fp8_scaled",
            a.qwen(),
            "F8_E4M3",
            "scale_weight",
            "qwen_scaled.safetensors",
        ),
        ("Qwen-Image-Pruning 13B", a.qwen(blocks=40), "BF16", "", "pruned.safetensors"),
        ("city96 Qwen-Image-gguf", a.qwen(), "Q8_0", "", "qwen-image-Q8_0.gguf"),
    ):
        yield Case(title, shapes, "qwen", missing=both, dtype=dtype, scales=scales, file=file)


def other_models() -> Iterator[Case]:
    flux = a.flux
    for title, shapes, refused in (
        ("BFL flux1-fill-dev", flux(inputs=384), "FLUX.1 Fill"),
        ("diffusers-named FLUX.1 Fill", a.flux_named(inputs=384), "FLUX.1 Fill"),
        ("BFL flux1-canny-dev", flux(inputs=128), "FLUX.1 Canny or Depth"),
        ("diffusers-named FLUX.1 Depth", a.flux_named(inputs=128), "FLUX.1 Canny or Depth"),
        ("ostris Flex.1-alpha", flux(blocks=8), "pruned FLUX.1"),
        ("Freepik flux.1-lite-8B", a.flux_named(blocks=8), "pruned FLUX.1"),
        ("ostris Flex.2-preview", flux(inputs=196, blocks=8), "Flex.2"),
        ("meituan LongCat-Image", flux(text=3584), "LongCat"),
        ("AIDC Ovis-Image-7B", flux(text=2048), "Ovis"),
        ("BFL flux1-redux-dev", linear("redux_up", 12288, 1152) | linear("redux_down", 4096, 12288), "Redux"),
        ("lodestones Chroma1-Radiance", flux(chroma=True) | {"nerf_image_embedder.embedder.0.weight": (64, 67)}, "Radiance"),
        ("BFL flux2-dev", a.flux2(width=6144, text=15360, blocks=8, singles=48), "FLUX.2 dev"),
        ("diffusers-named FLUX.2 dev", a.flux2(width=6144, text=15360, blocks=8, singles=48, named=True), "FLUX.2 dev"),
        ("Qwen-Image-Edit-2511", a.qwen() | {"__index_timestep_zero__": ()}, "Qwen-Image-Edit"),
        ("Qwen-Image-Layered", a.qwen() | linear("time_text_embed.addition_t_embedding", 3072, 2), "Layered"),
    ):  # fmt: skip
        yield Case(title, shapes, refused=refused)
    yield Case(
        "BFL flux1-kontext-dev", flux(), refused="Kontext", file="flux1-kontext-dev.safetensors"
    )
    yield Case(
        "Qwen-Image-Edit-2509",
        a.qwen(),
        refused="Edit",
        file="qwen_image_edit_2509_bf16.safetensors",
    )
    # Of models of no family a few tensors are enough: these are the ones that tell them apart.
    for title, names, refused in (
        ("Wan-AI Wan2.1-T2V-14B", "blocks.0.self_attn.norm_q.weight patch_embedding.weight head.modulation", "Wan"),
        ("diffusers Wan2.2", "condition_embedder.time_proj.weight patch_embedding.weight", "Wan"),
        ("tencent HunyuanVideo", "txt_in.individual_token_refiner.blocks.0.self_attn.qkv.weight img_in.proj.weight", "HunyuanVideo"),
        ("tencent HunyuanImage-2.1", "byt5_in.fc1.weight img_in.proj.weight", "HunyuanImage"),
        ("circlestone Anima", "llm_adapter.blocks.0.cross_attn.q_proj.weight blocks.0.mlp.layer1.weight", "Anima"),
        ("nvidia Cosmos-Predict2-2B", "blocks.0.mlp.layer1.weight blocks.0.adaln_modulation_cross_attn.1.weight", "Cosmos"),
        ("Efficient-Large-Model Sana", "blocks.0.mlp.inverted_conv.conv.weight y_embedder.y_proj.fc1.weight", "Sana"),
        ("PixArt-Sigma-XL-2", "t_block.1.weight y_embedder.y_embedding blocks.0.attn.qkv.weight", "PixArt"),
        ("diffusers PixArt-alpha", "adaln_single.linear.weight pos_embed.proj.weight caption_projection.linear_1.weight", "PixArt"),
        ("Lightricks LTX-Video", "adaln_single.linear.weight patchify_proj.weight scale_shift_table", "LTX-Video"),
        ("Tencent HunyuanDiT-v1.2", "mlp_t5.0.weight blocks.0.attn1.Wqkv.weight", "Hunyuan-DiT"),
        ("fal AuraFlow v0.3", "double_layers.0.attn.w1q.weight positional_encoding", "AuraFlow"),
        ("diffusers AuraFlow", "joint_transformer_blocks.0.attn.add_k_proj.weight", "AuraFlow"),
        ("HiDream-I1", "caption_projection.0.linear.weight double_stream_blocks.0.block.attn1.to_q.weight", "HiDream"),
        ("genmo mochi-1-preview", "t5_yproj.weight blocks.0.attn.qkv_x.weight", "Mochi"),
        ("stabilityai stable_cascade_stage_c", "clf.1.weight clip_txt_mapper.weight", "Stable Cascade"),
        ("stabilityai stable_cascade_stage_b", "clf.1.weight clip_mapper.weight", "Stable Cascade"),
        ("OmniGen2", "time_caption_embed.timestep_embedder.linear_1.bias layers.0.attn.to_q.weight", "OmniGen"),
        ("Alpha-VLLM Lumina-Next-SFT", "layers.0.attention.wq.weight layers.0.attention_y_norm.weight", "Lumina Next"),
        ("stable-audio-open", "transformer.rotary_pos_emb.inv_freq", "Stable Audio"),
        ("kandinskylab Kandinsky-5", "visual_transformer_blocks.0.cross_attention.key_norm.weight", "Kandinsky 5"),
        ("THUDM CogView4", "transformer_blocks.0.norm1.linear.weight patch_embed.text_proj.weight", "CogView"),
        ("lllyasviel control_v11p_sd15_canny", "control_model.input_hint_block.0.weight control_model.zero_convs.0.0.weight", "ControlNet"),
        ("diffusers controlnet-canny-sdxl-1.0", "controlnet_cond_embedding.conv_in.weight conv_in.weight", "ControlNet"),
        ("InstantX FLUX.1-dev-Controlnet-Union", "controlnet_blocks.0.weight x_embedder.weight", "ControlNet"),
        ("kohya ControlLLLite", "lllite_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q.down.0.weight", "ControlNet"),
        ("TencentARC t2iadapter_canny", "body.0.block1.weight conv_in.weight", "T2I adapter"),
        ("h94 ip-adapter_sd15", "ip_adapter.1.to_k_ip.weight image_proj.proj.weight", "IP-Adapter"),
        ("guoyww mm_sd_v15_v2", "down_blocks.0.motion_modules.0.temporal_transformer.proj_in.weight", "AnimateDiff"),
        ("Real-ESRGAN x4plus", "conv_first.weight body.0.rdb1.conv1.weight", "upscaler"),
        ("madebyollin taesd", "decoder.1.weight encoder.0.weight", "tiny VAE"),
        ("EasyNegative embedding", "emb_params", "embedding"),
        ("SDXL embedding", "clip_l clip_g", "embedding"),
        ("sd-scripts LoRA", "lora_unet_x.lora_down.weight lora_unet_x.lora_up.weight", "a LoRA"),
        ("diffusers old LoRA", "unet.x.lora.down.weight unet.x.lora.up.weight", "a LoRA"),
        ("LyCORIS LoKr", "lora_unet_x.lokr_w1 lora_unet_x.lokr_w2", "a LoRA"),
        ("unknown network", "body.first.weight", "an unknown architecture"),
    ):  # fmt: skip
        yield Case(title, dict.fromkeys(names.split(), (8, 8)), refused=refused)


def lone_parts() -> Iterator[Case]:
    for title, shapes, refused in (
        ("stabilityai vae-ft-mse-840000", a.vae(), "a VAE alone"),
        ("madebyollin sdxl-vae-fp16-fix", a.vae(ldm=False), "a VAE alone"),
        ("BFL ae", a.vae(latent=16, quant=False), "a VAE alone"),
        ("Comfy-Org flux2-vae", a.vae(latent=32) | {"bn.running_mean": (128,)}, "VAE of FLUX.2 alone"),
        ("Comfy-Org qwen_image_vae", {"conv1.weight": (32, 32, 1, 1, 1), "decoder.middle.0.residual.0.gamma": (384, 1, 1, 1)}, "VAE of Wan or Qwen-Image alone"),
        ("comfyanonymous clip_l", a.clip(), "text encoder alone (CLIP)"),
        ("comfyanonymous clip_g", a.clip(width=1280, layers=32, projection=True), "text encoder alone (CLIP)"),
        ("comfyanonymous t5xxl_fp16", a.t5(), "text encoder alone (T5)"),
        ("Comfy-Org umt5_xxl_fp16", a.t5(umt5=True), "text encoder alone (UMT5-XXL)"),
        ("Comfy-Org qwen_3_4b", a.language_model(width=2560, layers=36, normed=True), "text encoder alone (Qwen3)"),
        ("Comfy-Org qwen_2.5_vl_7b", a.language_model(width=3584, layers=28, biased=True, visual=True), "text encoder alone (Qwen2.5-VL)"),
        ("laion CLIP-ViT-H-14", a.open_clip(width=1024, layers=24), "text encoder alone (OpenCLIP)"),
        ("openai clip_vision_l", {"vision_model.encoder.layers.0.layer_norm1.weight": (1024,)}, "CLIP vision"),
    ):  # fmt: skip
        yield Case(title, shapes, refused=re.escape(refused))


def quantised() -> Iterator[Case]:
    flux = a.flux()
    yield Case(
        "lllyasviel flux1-dev-bnb-nf4",
        flux | {"double_blocks.0.img_attn.qkv.weight.absmax": (1,)},
        refused="NF4",
    )
    yield Case(
        "Comfy-Org flux NVFP4",
        flux | {"double_blocks.0.img_attn.qkv.weight_scale_2": ()},
        refused="NVFP4",
    )
    yield Case(
        "mit-han-lab svdq-int4-flux.1-dev",
        flux | {"single_blocks.0.linear1.qweight": (8, 8)},
        refused="SVDQuant",
    )
    yield Case("int8 FLUX.1", flux, dtype="I8", refused="is quantised")
    yield Case(
        "IQ2_XXS FLUX.1 GGUF", flux, dtype="IQ2_XXS", file="flux.gguf", refused="is quantised"
    )


CASES = [*unets(), *transformers(), *other_models(), *lone_parts(), *quantised()]
