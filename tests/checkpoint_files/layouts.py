"""Tensor names and shapes of base models in the layouts that their publishers use, at the released sizes.

Every function returns name -> shape. Facts: the releases' own configurations, ComfyUI 006dd0a, diffusers
58eb52c, ComfyUI-GGUF 795e451; names are made by rules written here, not by the code under test.
"""

from __future__ import annotations

from collections.abc import Sequence

Shapes = dict[str, tuple[int, ...]]


def linear(name: str, out: int, fan_in: int, *, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (out, fan_in), **({f"{name}.bias": (out,)} if bias else {})}


def norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def conv(name: str, out: int, fan_in: int, kernel: int = 3) -> Shapes:
    return {f"{name}.weight": (out, fan_in, kernel, kernel), f"{name}.bias": (out,)}


def prefixed(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


# ---- U-Nets


def _block(name: str, width: int, text: int) -> Shapes:
    shapes: Shapes = {}
    for attention, source in (("attn1", width), ("attn2", text)):
        shapes |= linear(f"{name}.{attention}.to_q", width, width, bias=False)
        shapes |= linear(f"{name}.{attention}.to_k", width, source, bias=False)
        shapes |= linear(f"{name}.{attention}.to_v", width, source, bias=False)
        shapes |= linear(f"{name}.{attention}.to_out.0", width, width)
    shapes |= linear(f"{name}.ff.net.0.proj", 8 * width, width)
    shapes |= linear(f"{name}.ff.net.2", width, 4 * width)
    for number in (1, 2, 3):
        shapes |= norm(f"{name}.norm{number}", width)
    return shapes


def _attention(name: str, width: int, text: int, depth: int, *, flat: bool) -> Shapes:
    shapes = norm(f"{name}.norm", width)
    for end in ("proj_in", "proj_out"):
        shapes |= (
            linear(f"{name}.{end}", width, width)
            if flat
            else conv(f"{name}.{end}", width, width, 1)
        )
    for number in range(depth):
        shapes |= _block(f"{name}.transformer_blocks.{number}", width, text)
    return shapes


def _resnet(name: str, out: int, fan_in: int, *, ldm: bool) -> Shapes:
    names = (
        ("in_layers.0", "in_layers.2", "emb_layers.1", "out_layers.0", "out_layers.3")
        if ldm
        else ("norm1", "conv1", "time_emb_proj", "norm2", "conv2")
    )
    first, one, time, second, two = (f"{name}.{end}" for end in names)
    shapes = norm(first, fan_in) | conv(one, out, fan_in) | linear(time, out, 1280)
    shapes |= norm(second, out) | conv(two, out, out)
    if out != fan_in:
        shapes |= conv(f"{name}.{'skip_connection' if ldm else 'conv_shortcut'}", out, fan_in, 1)
    return shapes


def unet(
    *,
    ldm: bool = True,
    channels: Sequence[int] = (320, 640, 1280, 1280),
    depths: Sequence[int] = (1, 1, 1, 0),
    up_depths: Sequence[Sequence[int]] | None = None,
    middle: int | None = 1,
    resnets: int = 2,
    text: int = 768,
    flat: bool = False,
    added: int = 0,
    inputs: int = 4,
) -> Shapes:
    """Return a U-Net in the checkpoints' layout, or in diffusers'; `middle` None: no middle block, 0: one resnet."""
    width = channels[0]
    time, first, label = (
        (("time_embed.0", "time_embed.2"), "input_blocks.0.0", ("label_emb.0.0", "label_emb.0.2"))
        if ldm
        else (
            ("time_embedding.linear_1", "time_embedding.linear_2"),
            "conv_in",
            ("add_embedding.linear_1", "add_embedding.linear_2"),
        )
    )
    shapes = linear(time[0], 4 * width, width) | linear(time[1], 4 * width, 4 * width)
    shapes |= conv(first, width, inputs)
    if added:
        shapes |= linear(label[0], 4 * width, added) | linear(label[1], 4 * width, 4 * width)
    skips, current, number = [width], width, 1
    for level, out in enumerate(channels):
        for index in range(resnets):
            resnet = f"input_blocks.{number}.0" if ldm else f"down_blocks.{level}.resnets.{index}"
            shapes |= _resnet(resnet, out, current, ldm=ldm)
            if depths[level]:
                name = (
                    f"input_blocks.{number}.1" if ldm else f"down_blocks.{level}.attentions.{index}"
                )
                shapes |= _attention(name, out, text, depths[level], flat=flat)
            current = out
            skips.append(current)
            number += 1
        if level < len(channels) - 1:
            name = (
                f"input_blocks.{number}.0.op" if ldm else f"down_blocks.{level}.downsamplers.0.conv"
            )
            shapes |= conv(name, current, current)
            skips.append(current)
            number += 1
    if middle is not None:
        names = (
            ("middle_block.0", "middle_block.1", "middle_block.2")
            if ldm
            else ("mid_block.resnets.0", "mid_block.attentions.0", "mid_block.resnets.1")
        )
        shapes |= _resnet(names[0], current, current, ldm=ldm)
        if middle:
            shapes |= _attention(names[1], current, text, middle, flat=flat)
            shapes |= _resnet(names[2], current, current, ldm=ldm)
    number = 0
    for up, (out, depth) in enumerate(zip(reversed(channels), reversed(list(depths)), strict=True)):
        inner = up_depths[up] if up_depths else [depth] * (resnets + 1)
        for index in range(resnets + 1):
            resnet = f"output_blocks.{number}.0" if ldm else f"up_blocks.{up}.resnets.{index}"
            shapes |= _resnet(resnet, out, current + skips.pop(), ldm=ldm)
            if inner[index]:
                name = f"output_blocks.{number}.1" if ldm else f"up_blocks.{up}.attentions.{index}"
                shapes |= _attention(name, out, text, inner[index], flat=flat)
            current = out
            number += 1
        if up < len(channels) - 1:
            at = 2 if depth else 1
            name = (
                f"output_blocks.{number - 1}.{at}.conv"
                if ldm
                else f"up_blocks.{up}.upsamplers.0.conv"
            )
            shapes |= conv(name, current, current)
    ends = ("out.0", "out.2") if ldm else ("conv_norm_out", "conv_out")
    return shapes | norm(ends[0], width) | conv(ends[1], 4, width)


XL = {
    "channels": (320, 640, 1280),
    "depths": (0, 2, 10),
    "middle": 10,
    "text": 2048,
    "flat": True,
    "added": 2816,
}


def sd1(*, ldm: bool = True, inputs: int = 4) -> Shapes:
    return unet(ldm=ldm, inputs=inputs)


def sd2(*, ldm: bool = True, inputs: int = 4, added: int = 0) -> Shapes:
    return unet(ldm=ldm, inputs=inputs, added=added, text=1024, flat=True)


def sdxl(*, ldm: bool = True, **changes: object) -> Shapes:
    return unet(ldm=ldm, **{**XL, **changes})  # type: ignore[arg-type]  # the values of XL are of several types


# ---- transformers

_QKV = ("to_q", "to_k", "to_v")
_ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")


def _named_joint(name: str, width: int, *, inner: int = 4, flux2: bool = False) -> Shapes:
    shapes: Shapes = {}
    for part in (*_QKV, *_ADDED, "to_out.0", "to_add_out"):
        shapes |= linear(f"{name}.attn.{part}", width, width, bias=not flux2)
    for part in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        shapes[f"{name}.attn.{part}.weight"] = (128,)
    return shapes


def flux(
    *,
    inputs: int = 64,
    guidance: bool = True,
    blocks: int = 19,
    singles: int = 38,
    text: int = 4096,
    chroma: bool = False,
    width: int = 3072,
) -> Shapes:
    """Return FLUX.1 or Chroma in the original layout."""
    shapes = linear("img_in", width, inputs) | linear("txt_in", width, text)
    shapes |= linear("final_layer.linear", 64, width)
    if chroma:
        shapes |= linear("distilled_guidance_layer.in_proj", 5120, 64)
        shapes |= linear("distilled_guidance_layer.out_proj", width, 5120)
        for number in range(5):
            name = f"distilled_guidance_layer.layers.{number}"
            shapes |= linear(f"{name}.in_layer", 5120, 5120)
            shapes |= linear(f"{name}.out_layer", 5120, 5120)
            shapes[f"distilled_guidance_layer.norms.{number}.scale"] = (5120,)
    else:
        embedders = {"time_in": 256, "vector_in": 768, **({"guidance_in": 256} if guidance else {})}
        for name, fan_in in embedders.items():
            shapes |= linear(f"{name}.in_layer", width, fan_in)
            shapes |= linear(f"{name}.out_layer", width, width)
        shapes |= linear("final_layer.adaLN_modulation.1", 2 * width, width)
    for number in range(blocks):
        for stream in ("img", "txt"):
            name = f"double_blocks.{number}.{stream}"
            if not chroma:
                shapes |= linear(f"{name}_mod.lin", 6 * width, width)
            shapes |= linear(f"{name}_attn.qkv", 3 * width, width)
            shapes |= linear(f"{name}_attn.proj", width, width)
            shapes |= linear(f"{name}_mlp.0", 4 * width, width)
            shapes |= linear(f"{name}_mlp.2", width, 4 * width)
            for end in ("query_norm", "key_norm"):
                shapes[f"{name}_attn.norm.{end}.scale"] = (128,)
    for number in range(singles):
        name = f"single_blocks.{number}"
        shapes |= linear(f"{name}.linear1", 7 * width, width)
        shapes |= linear(f"{name}.linear2", width, 5 * width)
        if not chroma:
            shapes |= linear(f"{name}.modulation.lin", 3 * width, width)
        for end in ("query_norm", "key_norm"):
            shapes[f"{name}.norm.{end}.scale"] = (128,)
    return shapes


def flux_named(
    *, inputs: int = 64, guidance: bool = True, blocks: int = 19, chroma: bool = False
) -> Shapes:
    """Return FLUX.1 or Chroma in diffusers' layout."""
    width = 3072
    shapes = linear("x_embedder", width, inputs) | linear("context_embedder", width, 4096)
    shapes |= linear("proj_out", 64, width)
    if chroma:
        shapes |= linear("distilled_guidance_layer.in_proj", 5120, 64)
        shapes |= linear("distilled_guidance_layer.out_proj", width, 5120)
    else:
        embedders = {"timestep_embedder": 256, "text_embedder": 768}
        embedders |= {"guidance_embedder": 256} if guidance else {}
        for name, fan_in in embedders.items():
            shapes |= linear(f"time_text_embed.{name}.linear_1", width, fan_in)
            shapes |= linear(f"time_text_embed.{name}.linear_2", width, width)
        shapes |= linear("norm_out.linear", 2 * width, width)
    for number in range(blocks):
        name = f"transformer_blocks.{number}"
        shapes |= _named_joint(name, width)
        for end in ("ff", "ff_context"):
            shapes |= linear(f"{name}.{end}.net.0.proj", 4 * width, width)
            shapes |= linear(f"{name}.{end}.net.2", width, 4 * width)
        if not chroma:
            shapes |= linear(f"{name}.norm1.linear", 6 * width, width)
            shapes |= linear(f"{name}.norm1_context.linear", 6 * width, width)
    for number in range(38):
        name = f"single_transformer_blocks.{number}"
        for part in _QKV:
            shapes |= linear(f"{name}.attn.{part}", width, width)
        shapes |= linear(f"{name}.proj_mlp", 4 * width, width)
        shapes |= linear(f"{name}.proj_out", width, 5 * width)
        if not chroma:
            shapes |= linear(f"{name}.norm.linear", 3 * width, width)
    return shapes


def flux2(
    *, width: int = 3072, text: int = 7680, blocks: int = 5, singles: int = 20, named: bool = False
) -> Shapes:
    ends = {
        "img": "x_embedder" if named else "img_in",
        "txt": "context_embedder" if named else "txt_in",
    }
    lin = "linear" if named else "lin"
    shapes = linear(ends["img"], width, 128, bias=False)
    shapes |= linear(ends["txt"], width, text, bias=False)
    for stream in ("double_stream_modulation_img", "double_stream_modulation_txt"):
        shapes |= linear(f"{stream}.{lin}", 6 * width, width, bias=False)
    shapes |= linear(f"single_stream_modulation.{lin}", 3 * width, width, bias=False)
    for number in range(blocks):
        if named:
            name = f"transformer_blocks.{number}"
            shapes |= _named_joint(name, width, flux2=True)
            for end in ("ff", "ff_context"):
                shapes |= linear(f"{name}.{end}.linear_in", 6 * width, width, bias=False)
                shapes |= linear(f"{name}.{end}.linear_out", width, 3 * width, bias=False)
            continue
        for stream in ("img", "txt"):
            name = f"double_blocks.{number}.{stream}"
            shapes |= linear(f"{name}_attn.qkv", 3 * width, width, bias=False)
            shapes |= linear(f"{name}_attn.proj", width, width, bias=False)
            shapes |= linear(f"{name}_mlp.0", 6 * width, width, bias=False)
            shapes |= linear(f"{name}_mlp.2", width, 3 * width, bias=False)
    for number in range(singles):
        block = "single_transformer_blocks" if named else "single_blocks"
        into, out = ("attn.to_qkv_mlp_proj", "attn.to_out") if named else ("linear1", "linear2")
        shapes |= linear(f"{block}.{number}.{into}", 9 * width, width, bias=False)
        shapes |= linear(f"{block}.{number}.{out}", width, 4 * width, bias=False)
    return shapes


def sd3(*, depth: int = 24, dual: int = 13, normed: bool = True, positions: int = 384) -> Shapes:
    width = 64 * depth
    shapes = conv("x_embedder.proj", width, 16, 2) | linear("context_embedder", width, 4096)
    shapes["pos_embed"] = (1, positions**2, width)
    for name, fan_in in (("t_embedder", 256), ("y_embedder", 2048)):
        shapes |= linear(f"{name}.mlp.0", width, fan_in) | linear(f"{name}.mlp.2", width, width)
    shapes |= linear("final_layer.linear", 64, width)
    for number in range(depth):
        for stream in ("x_block", "context_block"):
            name = f"joint_blocks.{number}.{stream}"
            last = number == depth - 1 and stream == "context_block"
            chunks = 2 if last else 9 if stream == "x_block" and number < dual else 6
            shapes |= linear(f"{name}.adaLN_modulation.1", chunks * width, width)
            shapes |= linear(f"{name}.attn.qkv", 3 * width, width)
            if normed:
                shapes |= {f"{name}.attn.ln_{part}.weight": (64,) for part in "qk"}
            if not last:
                shapes |= linear(f"{name}.attn.proj", width, width)
                shapes |= linear(f"{name}.mlp.fc1", 4 * width, width)
                shapes |= linear(f"{name}.mlp.fc2", width, 4 * width)
            if stream == "x_block" and number < dual:
                shapes |= linear(f"{name}.attn2.qkv", 3 * width, width)
                shapes |= linear(f"{name}.attn2.proj", width, width)
    return shapes


def sd3_named(*, depth: int = 24, dual: int = 13, positions: int = 384) -> Shapes:
    width = 64 * depth
    shapes = conv("pos_embed.proj", width, 16, 2) | linear("context_embedder", width, 4096)
    shapes["pos_embed.pos_embed"] = (1, positions**2, width)
    for name, fan_in in (("timestep_embedder", 256), ("text_embedder", 2048)):
        shapes |= linear(f"time_text_embed.{name}.linear_1", width, fan_in)
        shapes |= linear(f"time_text_embed.{name}.linear_2", width, width)
    for number in range(depth):
        name = f"transformer_blocks.{number}"
        shapes |= _named_joint(name, width)
        if number < dual:
            for part in (*_QKV, "to_out.0"):
                shapes |= linear(f"{name}.attn2.{part}", width, width)
        shapes |= linear(f"{name}.ff.net.0.proj", 4 * width, width)
        shapes |= linear(f"{name}.ff.net.2", width, 4 * width)
    return shapes


def zimage(
    *, width: int = 3840, text: int = 2560, named: bool = False, padded: bool = True
) -> Shapes:
    """Return Z-Image; with `padded` False and other widths Lumina Image 2, which it continues."""
    shapes = linear("cap_embedder.1", width, text) | {"cap_embedder.0.weight": (text,)}
    shapes |= linear("all_x_embedder.2-1" if named else "x_embedder", width, 64)
    if padded:
        shapes |= {"cap_pad_token": (1, width), "x_pad_token": (1, width)}
    for block, count in (("layers", 30), ("noise_refiner", 2), ("context_refiner", 2)):
        for number in range(count):
            name = f"{block}.{number}"
            if named:
                for part in (*_QKV, "to_out.0"):
                    shapes |= linear(f"{name}.attention.{part}", width, width, bias=False)
            else:
                shapes |= linear(f"{name}.attention.qkv", 3 * width, width, bias=False)
                shapes |= linear(f"{name}.attention.out", width, width, bias=False)
            shapes |= linear(f"{name}.feed_forward.w1", 10240, width, bias=False)
            shapes |= linear(f"{name}.feed_forward.w2", width, 10240, bias=False)
            shapes |= linear(f"{name}.feed_forward.w3", 10240, width, bias=False)
    return shapes


def qwen(*, blocks: int = 60) -> Shapes:
    width = 3072
    shapes = linear("img_in", width, 64) | linear("txt_in", width, 3584)
    shapes |= {"txt_norm.weight": (3584,)} | linear("proj_out", 64, width)
    for number in range(blocks):
        name = f"transformer_blocks.{number}"
        shapes |= _named_joint(name, width)
        for stream in ("img", "txt"):
            shapes |= linear(f"{name}.{stream}_mod.1", 6 * width, width)
            shapes |= linear(f"{name}.{stream}_mlp.net.0.proj", 4 * width, width)
            shapes |= linear(f"{name}.{stream}_mlp.net.2", width, 4 * width)
    return shapes


# ---- VAEs and text encoders


def vae(*, latent: int = 4, ldm: bool = True, quant: bool = True) -> Shapes:
    shapes = conv("encoder.conv_in", 128, 3) | conv("encoder.conv_out", 2 * latent, 512)
    shapes |= conv("decoder.conv_in", 512, latent) | conv("decoder.conv_out", 3, 128)
    for side in ("encoder", "decoder"):
        for level, width in enumerate((128, 256, 512, 512)):
            way = "down" if side == "encoder" else "up"
            for index in range(2):
                name = (
                    f"{side}.{way}.{level}.block.{index}"
                    if ldm
                    else f"{side}.{way}_blocks.{level}.resnets.{index}"
                )
                shapes |= conv(f"{name}.conv1", width, width) | conv(f"{name}.conv2", width, width)
    if quant:
        shapes |= conv("quant_conv", 2 * latent, 2 * latent, 1)
        shapes |= conv("post_quant_conv", latent, latent, 1)
    return shapes


def clip(*, width: int = 768, layers: int = 12, projection: bool = False) -> Shapes:
    shapes: Shapes = {
        "text_model.embeddings.token_embedding.weight": (49408, width),
        "text_model.embeddings.position_embedding.weight": (77, width),
        **norm("text_model.final_layer_norm", width),
    }
    for number in range(layers):
        name = f"text_model.encoder.layers.{number}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear(f"{name}.self_attn.{part}", width, width)
        shapes |= linear(f"{name}.mlp.fc1", 4 * width, width)
        shapes |= linear(f"{name}.mlp.fc2", width, 4 * width)
        shapes |= norm(f"{name}.layer_norm1", width) | norm(f"{name}.layer_norm2", width)
    return shapes | ({"text_projection.weight": (width, width)} if projection else {})


def open_clip(*, width: int, layers: int) -> Shapes:
    shapes: Shapes = {
        "token_embedding.weight": (49408, width),
        "positional_embedding": (77, width),
        "text_projection": (width, width),
        "logit_scale": (),
        **norm("ln_final", width),
    }
    for number in range(layers):
        name = f"transformer.resblocks.{number}"
        shapes |= {f"{name}.attn.in_proj_weight": (3 * width, width)}
        shapes |= {f"{name}.attn.in_proj_bias": (3 * width,)}
        shapes |= linear(f"{name}.attn.out_proj", width, width)
        shapes |= linear(f"{name}.mlp.c_fc", 4 * width, width)
        shapes |= linear(f"{name}.mlp.c_proj", width, 4 * width)
        shapes |= norm(f"{name}.ln_1", width) | norm(f"{name}.ln_2", width)
    return shapes


def t5(*, width: int = 4096, inner: int = 10240, layers: int = 24, umt5: bool = False) -> Shapes:
    shapes: Shapes = {"shared.weight": (32128, width), "encoder.final_layer_norm.weight": (width,)}
    for number in range(layers):
        name = f"encoder.block.{number}.layer"
        for part in "qkvo":
            shapes |= linear(f"{name}.0.SelfAttention.{part}", width, width, bias=False)
        if umt5 or number == 0:
            shapes[f"{name}.0.SelfAttention.relative_attention_bias.weight"] = (32, 64)
        for part in ("wi_0", "wi_1"):
            shapes |= linear(f"{name}.1.DenseReluDense.{part}", inner, width, bias=False)
        shapes |= linear(f"{name}.1.DenseReluDense.wo", width, inner, bias=False)
    return shapes


def language_model(
    *, width: int, layers: int, normed: bool = False, biased: bool = False, visual: bool = False
) -> Shapes:
    """Return Qwen3 (`normed`), Qwen2.5 (`biased`, with `visual` its VL), or a Llama."""
    shapes: Shapes = {"model.embed_tokens.weight": (151936, width), "model.norm.weight": (width,)}
    for number in range(layers):
        name = f"model.layers.{number}"
        for part in ("q_proj", "k_proj", "v_proj"):
            shapes |= linear(f"{name}.self_attn.{part}", width, width, bias=biased)
        if normed:
            shapes |= {f"{name}.self_attn.{part}.weight": (128,) for part in ("q_norm", "k_norm")}
        shapes[f"{name}.input_layernorm.weight"] = (width,)
        shapes |= linear(f"{name}.mlp.up_proj", 4 * width, width, bias=False)
    return shapes | ({"visual.blocks.0.attn.qkv.weight": (3840, 1280)} if visual else {})
