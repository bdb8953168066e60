"""Names for weight files that are no base model of a supported family, by tables of tensor names and shapes.

Each row is a model and its marks. A mark is a tensor's name that the file must have (`*` stands for any
text), `!name` one that it must not have, `name[1]=9` one whose shape has that size in that dimension. Names
count without the prefix of the denoiser. Facts from ComfyUI's model_detection, diffusers' single_file_utils,
sd-scripts' model_util and ComfyUI-GGUF's converter. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from functools import cache

from lora_trainer.families.base import Header, TensorInfo

# The longest first: "model." also starts "model.diffusion_model.".
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "model.")
_UNET = "input_blocks.0.0.weight"
# 2816: 1280 of pooled text and six numbers of 256. The refiner's 2560 has
# five, with an aesthetic score for the target size.
_SDXL = f"{_UNET}[0]=320 label_emb.0.0.weight[1]=2816"
_SDXL_NAMED = "conv_in.weight[0]=320 add_embedding.linear_1.weight[1]=2816"
# vector_in and proj_mlp keep FLUX.2 klein 4B out, which is as wide and has as many
# input channels as FLUX.1 Canny: it was called that before.
_FLUX = (
    "img_in.weight[0]=3072 vector_in.in_layer.weight double_blocks.0.img_attn.qkv.weight "
    "single_blocks.0.linear1.weight"
)
_FLUX_NAMED = "x_embedder.weight[0]=3072 single_transformer_blocks.0.proj_mlp.weight"
_TEXT = "*attn2.to_k.weight"

OTHER_MODELS: tuple[tuple[str, str], ...] = (
    ("a ControlNet", "control_model.input_hint_block.0.weight"),
    ("a ControlNet", "input_hint_block.0.weight"),
    ("a ControlNet", "controlnet_cond_embedding.conv_in.weight"),
    ("a ControlNet of a transformer", "controlnet_blocks.0.weight"),
    ("a ControlNet of a transformer", "controlnet_x_embedder.weight"),
    ("a ControlNet (LLLite)", "lllite_*"),
    ("a T2I adapter", "adapter.body.0.*"),
    ("a T2I adapter", "body.0.block1.weight"),
    ("an IP-Adapter", "ip_adapter.*"),
    ("an IP-Adapter", "image_proj.proj.weight"),
    ("FLUX.1 Redux, an image prompt adapter", "redux_up.weight"),
    ("an AnimateDiff motion module", "*motion_modules.0.*"),
    ("an upscaler (ESRGAN)", "1.sub.0.RDB1.conv1.0.weight"),
    ("an upscaler (ESRGAN)", "conv_first.weight body.0.rdb1.conv1.weight"),
    ("an embedding (textual inversion)", "emb_params"),
    ("an embedding (textual inversion)", "clip_l clip_g"),
    ("a tiny VAE (TAESD)", "decoder.1.weight encoder.0.weight"),
    ("a tiny VAE (TAESD)", "decoder.layers.0.weight encoder.layers.0.weight"),
    # ---- U-Nets
    ("Stable Video Diffusion", "*time_stack.0.attn1.to_q.weight"),
    ("SDXL inpainting", f"{_UNET}[1]=9 label_emb.0.0.weight[1]=2816"),
    ("SDXL inpainting", "conv_in.weight[1]=9 add_embedding.linear_1.weight[1]=2816"),
    ("SDXL InstructPix2Pix, an editing model", f"{_UNET}[1]=8 label_emb.0.0.weight"),
    ("SDXL InstructPix2Pix, an editing model", "conv_in.weight[1]=8 add_embedding.linear_1.weight"),
    ("the SDXL refiner", "label_emb.0.0.weight[1]=2560"),
    ("the SDXL refiner", "add_embedding.linear_1.weight[1]=2560"),
    ("Kolors", "label_emb.0.0.weight[1]=5632"),
    ("Kolors", "encoder_hid_proj.weight"),
    ("Kolors", "add_embedding.linear_1.weight[1]=5632"),
    ("SDXL with EDM's noise levels (CosXL, Playground)", "edm_*"),
    ("KOALA, a pruned SDXL", f"{_SDXL} !input_blocks.8.0.in_layers.0.weight"),
    ("KOALA, a pruned SDXL", f"{_SDXL_NAMED} !down_blocks.2.resnets.1.conv1.weight"),
    ("Segmind SSD-1B, a pruned SDXL",
     f"{_SDXL} !middle_block.1.proj_in.weight input_blocks.7.1.transformer_blocks.3.norm1.weight"),
    ("Segmind Vega, a pruned SDXL", f"{_SDXL} !middle_block.1.proj_in.weight"),
    ("Segmind SSD-1B, a pruned SDXL",
     f"{_SDXL_NAMED} !mid_block.attentions.0.proj_in.weight "
     "down_blocks.2.attentions.0.transformer_blocks.3.norm1.weight"),
    ("Segmind Vega, a pruned SDXL", f"{_SDXL_NAMED} !mid_block.attentions.0.proj_in.weight"),
    ("a pruned SDXL",
     f"{_SDXL} input_blocks.7.1.norm.weight !input_blocks.7.1.transformer_blocks.9.norm1.weight"),
    ("Stable unCLIP", "label_emb.0.0.weight[1]=2048"),
    ("Stable unCLIP", "label_emb.0.0.weight[1]=1536"),
    ("the Stable Diffusion x4 upscaler", f"{_UNET}[1]=7"),
    ("the Stable Diffusion x4 upscaler", "conv_in.weight[1]=7"),
    ("Stable Diffusion 2 depth", f"{_UNET}[1]=5"),
    ("Stable Diffusion 2 depth", "conv_in.weight[1]=5 down_blocks.0.resnets.0.conv1.weight"),
    ("Stable Diffusion 2 inpainting", f"{_UNET}[1]=9 {_TEXT}[1]=1024"),
    ("Stable Diffusion 2 inpainting", f"conv_in.weight[1]=9 {_TEXT}[1]=1024"),
    ("Stable Diffusion 1 inpainting", f"{_UNET}[1]=9"),
    ("Stable Diffusion 1 inpainting",
     f"conv_in.weight[1]=9 down_blocks.0.resnets.0.conv1.weight {_TEXT}"),
    ("InstructPix2Pix, an editing model", f"{_UNET}[1]=8"),
    ("InstructPix2Pix, an editing model", "conv_in.weight[1]=8 down_blocks.0.resnets.0.conv1.weight"),
    ("a pruned Stable Diffusion (BK-SDM, Segmind, SDXS)",
     "conv_in.weight[0]=320 !down_blocks.0.resnets.1.conv1.weight !add_embedding.linear_1.weight "
     "down_blocks.0.resnets.0.conv1.weight"),
    ("a pruned Stable Diffusion (BK-SDM, Segmind)",
     "conv_in.weight[0]=320 down_blocks.0.resnets.0.conv1.weight !mid_block.resnets.0.conv1.weight"),
    ("Stable Cascade", "clf.1.weight"),
    ("Würstchen or Stable Cascade", "clip_txt_pooled_mapper.weight"),
    # ---- FLUX and networks built like it
    ("FLUX.1 Fill, an inpainting model", f"{_FLUX} img_in.weight[1]=384"),
    ("FLUX.1 Fill, an inpainting model", f"{_FLUX_NAMED} x_embedder.weight[1]=384"),
    ("FLUX.1 Canny or Depth, a control model", f"{_FLUX} img_in.weight[1]=128"),
    ("FLUX.1 Canny or Depth, a control model", f"{_FLUX_NAMED} x_embedder.weight[1]=128"),
    ("Flex.2, a control and inpainting model", f"{_FLUX} img_in.weight[1]=196"),
    ("LongCat-Image", f"{_FLUX} txt_in.weight[1]=3584"),
    ("Ovis-Image", f"{_FLUX} txt_in.weight[1]=2048"),
    ("a pruned FLUX.1 (FLUX.1 lite, Flex.1)", f"{_FLUX} !double_blocks.18.img_attn.qkv.weight"),
    ("a pruned FLUX.1 (FLUX.1 lite, Flex.1)",
     f"{_FLUX_NAMED} context_embedder.weight[1]=4096 !transformer_blocks.18.attn.to_q.weight"),
    ("Chroma Radiance, which works on pixels", "nerf_*"),
    ("FLUX.2 dev (32B)", "double_stream_modulation_img.lin.weight[1]=6144"),
    ("FLUX.2 dev (32B)", "double_stream_modulation_img.linear.weight[1]=6144"),
    ("HunyuanVideo", "txt_in.individual_token_refiner.blocks.0.*"),
    ("HunyuanImage or HunyuanVideo 1.5", "byt5_in.fc1.weight"),
    # ---- other transformers
    ("Wan, a video model", "blocks.0.self_attn.norm_q.weight patch_embedding.weight"),
    ("Wan, a video model", "condition_embedder.time_proj.weight patch_embedding.weight"),
    ("Anima", "llm_adapter.blocks.0.cross_attn.q_proj.weight"),
    ("Cosmos Predict 2", "blocks.0.mlp.layer1.weight blocks.0.adaln_modulation_cross_attn.1.weight"),
    ("Cosmos", "blocks.block0.blocks.0.block.attn.to_q.0.weight"),
    ("Sana", "blocks.0.mlp.inverted_conv.conv.weight"),
    ("Sana", "transformer_blocks.0.ff.conv_inverted.weight"),
    ("PixArt", "t_block.1.weight y_embedder.y_embedding"),
    ("PixArt", "adaln_single.linear.weight pos_embed.proj.weight"),
    ("LTX-Video", "adaln_single.linear.weight patchify_proj.weight"),
    ("LTX-Video", "adaln_single.linear.weight scale_shift_table proj_in.weight"),
    ("Hunyuan-DiT", "mlp_t5.0.weight"),
    ("Hunyuan-DiT", "text_embedder.linear_1.weight time_extra_emb.pooler.k_proj.weight"),
    ("AuraFlow", "double_layers.0.attn.w1q.weight"),
    ("AuraFlow", "joint_transformer_blocks.0.attn.add_k_proj.weight"),
    ("HiDream", "caption_projection.0.linear.weight double_stream_blocks.0.*"),
    ("Mochi, a video model", "t5_yproj.weight"),
    ("CogView 4", "transformer_blocks.0.norm1.linear.weight patch_embed.text_proj.weight"),
    ("Kandinsky 5", "visual_transformer_blocks.0.*"),
    ("Kandinsky 2", "add_embedding.image_norm.weight"),
    ("OmniGen 2", "time_caption_embed.timestep_embedder.linear_1.bias"),
    ("Lumina Next", "layers.0.attention.wq.weight layers.0.attention_y_norm.weight"),
    ("Stable Audio", "transformer.rotary_pos_emb.inv_freq"),
    ("Qwen-Image-Layered", "time_text_embed.addition_t_embedding.weight transformer_blocks.0.img_mod.1.weight"),
    ("Qwen-Image-Edit, an editing model", "__index_timestep_zero__ transformer_blocks.0.img_mod.1.weight"),
)  # fmt: skip
"""Models that are no text-to-image base of a supported family; the first row that fits counts."""

NAMED_MODELS: tuple[tuple[str, str, str], ...] = (
    ("FLUX.1 Kontext, an editing model", "flux", r"kontext"),
    ("Qwen-Image-Edit, an editing model", "qwen", r"qwen.*edit"),
    ("Z-Image-Edit, an editing model", "zimage", r"z.?image.?edit"),
)
"""Model, family and file name (a pattern) of releases with the tensors of their text-to-image base."""

ENCODERS: tuple[tuple[str, str, str], ...] = (
    # T5 has position biases in its first block only, so UMT5's second block is looked for before T5.
    ("UMT5-XXL", "umt5", "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"),
    ("T5", "t5", "encoder.block.0.layer.1.DenseReluDense.wi_0.weight"),
    ("T5", "t5", "encoder.block.0.layer.1.DenseReluDense.wi.weight"),
    ("Gemma 3", "gemma3", "*post_feedforward_layernorm.weight *self_attn.q_norm.weight"),
    ("Gemma 2", "gemma2", "*post_feedforward_layernorm.weight"),
    ("Qwen3", "qwen3", "model.layers.0.self_attn.q_norm.weight"),
    ("Qwen3", "qwen3", "layers.0.self_attn.q_norm.weight"),
    ("Qwen2.5-VL", "qwen25", "model.layers.0.self_attn.k_proj.bias visual.blocks.0.*"),
    ("Qwen2.5-VL", "qwen25", "model.language_model.layers.0.self_attn.k_proj.bias"),
    ("Qwen2.5", "qwen25", "model.layers.0.self_attn.k_proj.bias"),
    ("a Llama or Mistral language model", "llama", "model.layers.0.self_attn.k_proj.weight"),
    ("CLIP", "clip", "text_model.encoder.layers.0.layer_norm1.weight"),
    ("CLIP", "clip", "encoder.layers.0.layer_norm1.weight embeddings.token_embedding.weight"),
    ("OpenCLIP", "openclip", "transformer.resblocks.0.ln_1.weight token_embedding.weight"),
    ("a GGUF language model", "gguf", "blk.0.attn_q.weight"),
    ("T5 in GGUF", "gguf", "enc.blk.0.attn_q.weight"),
)
"""Name, kind and marks of text encoders in files of their own."""
_VAES = (
    ("the VAE of Wan or Qwen-Image", "decoder.middle.0.residual.0.gamma"),
    ("the VAE of FLUX.2", "decoder.conv_in.weight bn.running_mean"),
    ("a VAE", "decoder.conv_in.weight"),
    ("a VAE", "first_stage_model.decoder.conv_in.weight"),
    ("a VAE", "vae.decoder.conv_in.weight"),
    ("a CLIP vision encoder", "vision_model.encoder.layers.0.layer_norm1.weight"),
    ("a CLIP vision encoder", "visual.transformer.resblocks.0.ln_1.weight"),
)
_MARK = re.compile(r"(!?)(.+?)(?:\[(\d)\]=(\d+))?")
_WIDTHS: Mapping[str, tuple[str, ...]] = {
    "clip": ("final_layer_norm.weight",),
    "t5": ("encoder.final_layer_norm.weight",),
    "qwen3": ("layers.0.input_layernorm.weight",),
    "qwen25": ("layers.0.input_layernorm.weight",),
    "gemma2": ("layers.0.input_layernorm.weight",),
}
"""Kind of a text encoder -> ending of a tensor whose length is the encoder's width."""


def other_model(header: Header, *, family: str, file_name: str) -> str | None:
    """Return which model without a text-to-image family of ours a file is; `family` is the one it resembles."""
    tensors = _unprefixed(header)
    model_names = (
        model
        for model, base, pattern in NAMED_MODELS
        if base == family and re.search(pattern, file_name.lower())
    )
    return _first(tensors, OTHER_MODELS) or next(model_names, None)


def lone_part(header: Header) -> str | None:
    """Return "a VAE" and the like for a file of one part of a model, None for another file."""
    return _first(header, _VAES)


def text_encoder(header: Header) -> tuple[str, str, int] | None:
    """Return name, kind and width of the text encoder that a file holds, None where it holds none.

    The width is 0 where the table of widths does not know the kind.
    """
    for name, kind, marks in ENCODERS:
        if _fits(header, marks):
            endings = _WIDTHS.get(kind, ())
            widths = [header[key].shape for key in header if endings and key.endswith(endings)]
            return name, kind, next((shape[0] for shape in widths if shape), 0)
    return None


def _unprefixed(header: Header) -> Header:
    for prefix in PREFIXES:
        # One stray tensor ("model.x" beside a network without prefix) makes no prefix.
        if sum(name.startswith(prefix) for name in header) > len(header) // 10:
            return {name.removeprefix(prefix): info for name, info in header.items()}
    return header


def _first(tensors: Header, table: Iterable[tuple[str, str]]) -> str | None:
    return next((model for model, marks in table if _fits(tensors, marks)), None)


def _fits(tensors: Mapping[str, TensorInfo], marks: str) -> bool:
    return all(_has(tensors, *mark) for mark in _parsed(marks))


def _has(
    tensors: Header, absent: bool, name: str, pattern: re.Pattern[str] | None, axis: int, size: int
) -> bool:
    if pattern is None:
        infos = [tensors[name]] if name in tensors else []
    else:
        infos = [info for key, info in tensors.items() if pattern.match(key)]
    if size:
        infos = [info for info in infos if len(info.shape) > axis and info.shape[axis] == size]
    return bool(infos) != absent


@cache
def _parsed(marks: str) -> tuple[tuple[bool, str, re.Pattern[str] | None, int, int], ...]:
    parsed = []
    for mark in marks.split():
        match = _MARK.fullmatch(mark)
        assert match is not None
        absent, name, axis, size = match.groups()
        pattern = re.compile(translate(name)) if "*" in name else None
        parsed.append((bool(absent), name, pattern, int(axis or 0), int(size or 0)))
    return tuple(parsed)
