"""Layers of the public releases as the trainers see them, written down apart from the product's tables.

A `Layer` has the name in the releases' own code, the layers in diffusers' names that it stands for with
their numbers of outputs, and the shape of one output's weights. Facts: the releases' model code.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """One weight of the release: `parts` are (diffusers' name, outputs) in the order of its rows."""

    name: str
    parts: tuple[tuple[str, int], ...]
    inputs: tuple[int, ...]

    @property
    def out(self) -> int:
        return sum(out for _, out in self.parts)

    def split(self) -> list[Layer]:
        """Return the same as diffusers has it: a layer for each part, in its own names."""
        return [Layer(name, ((name, out),), self.inputs) for name, out in self.parts]


def one(name: str, ours: str, out: int, *inputs: int) -> Layer:
    return Layer(name, ((ours, out),), inputs)


def joined(
    name: str, block: str, names: tuple[str, ...], outs: tuple[int, ...], width: int
) -> Layer:
    parts = tuple((f"{block}.{each}", out) for each, out in zip(names, outs, strict=True))
    return Layer(name, parts, (width,))


def double_block(i: int, *, d: int = 3072, mods: bool = True) -> list[Layer]:
    ours, theirs = f"transformer_blocks.{i}", f"double_blocks.{i}"
    layers = []
    for stream, attn, out, ff in (
        ("img", ("attn.to_q", "attn.to_k", "attn.to_v"), "attn.to_out.0", "ff"),
        (
            "txt",
            ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            "attn.to_add_out",
            "ff_context",
        ),
    ):
        layers += [
            joined(f"{theirs}.{stream}_attn.qkv", ours, attn, (d, d, d), d),
            one(f"{theirs}.{stream}_attn.proj", f"{ours}.{out}", d, d),
            one(f"{theirs}.{stream}_mlp.0", f"{ours}.{ff}.net.0.proj", 4 * d, d),
            one(f"{theirs}.{stream}_mlp.2", f"{ours}.{ff}.net.2", d, 4 * d),
        ]
    if mods:
        layers += [
            one(f"{theirs}.img_mod.lin", f"{ours}.norm1.linear", 6 * d, d),
            one(f"{theirs}.txt_mod.lin", f"{ours}.norm1_context.linear", 6 * d, d),
        ]
    return layers


def single_block(i: int, *, d: int = 3072, mods: bool = True) -> list[Layer]:
    ours, theirs = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
    names = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    layers = [
        joined(f"{theirs}.linear1", ours, names, (d, d, d, 4 * d), d),
        one(f"{theirs}.linear2", f"{ours}.proj_out", d, 5 * d),
    ]
    if mods:
        layers.append(one(f"{theirs}.modulation.lin", f"{ours}.norm.linear", 3 * d, d))
    return layers


FLUX = [*double_block(0), *double_block(18), *single_block(37)]
FLUX_IN = [
    one("img_in", "x_embedder", 3072, 64),
    one("txt_in", "context_embedder", 3072, 4096),
    one("time_in.in_layer", "time_text_embed.timestep_embedder.linear_1", 3072, 256),
    one("guidance_in.out_layer", "time_text_embed.guidance_embedder.linear_2", 3072, 3072),
    one("vector_in.in_layer", "time_text_embed.text_embedder.linear_1", 3072, 768),
]
CHROMA = [*double_block(3, mods=False), *single_block(5, mods=False)]
CHROMA_GUIDANCE = [
    one(
        "distilled_guidance_layer.layers.2.in_layer",
        "distilled_guidance_layer.layers.2.linear_1",
        5120,
        5120,
    ),
    one("distilled_guidance_layer.in_proj", "distilled_guidance_layer.in_proj", 5120, 64),
]


def flux2_blocks(d: int, *, double: int, single: int) -> list[Layer]:
    ours, theirs = f"transformer_blocks.{double}", f"double_blocks.{double}"
    lone, lone_theirs = f"single_transformer_blocks.{single}.attn", f"single_blocks.{single}"
    layers = []
    for stream, attn, out, ff in (
        ("img", ("attn.to_q", "attn.to_k", "attn.to_v"), "attn.to_out.0", "ff"),
        (
            "txt",
            ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            "attn.to_add_out",
            "ff_context",
        ),
    ):
        layers += [
            joined(f"{theirs}.{stream}_attn.qkv", ours, attn, (d, d, d), d),
            one(f"{theirs}.{stream}_attn.proj", f"{ours}.{out}", d, d),
            one(f"{theirs}.{stream}_mlp.0", f"{ours}.{ff}.linear_in", 6 * d, d),
            one(f"{theirs}.{stream}_mlp.2", f"{ours}.{ff}.linear_out", d, 3 * d),
        ]
    return [
        *layers,
        one(f"{lone_theirs}.linear1", f"{lone}.to_qkv_mlp_proj", 9 * d, d),
        one(f"{lone_theirs}.linear2", f"{lone}.to_out", d, 4 * d),
    ]


FLUX2_4B = flux2_blocks(3072, double=4, single=19)
FLUX2_9B = flux2_blocks(4096, double=7, single=23)


def sd3_block(i: int, *, d: int = 1536, dual: bool = True) -> list[Layer]:
    ours, theirs = f"transformer_blocks.{i}", f"joint_blocks.{i}"
    image, text = (
        ("attn.to_q", "attn.to_k", "attn.to_v"),
        ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    )
    layers = [
        joined(f"{theirs}.x_block.attn.qkv", ours, image, (d, d, d), d),
        joined(f"{theirs}.context_block.attn.qkv", ours, text, (d, d, d), d),
        one(f"{theirs}.x_block.attn.proj", f"{ours}.attn.to_out.0", d, d),
        one(f"{theirs}.context_block.attn.proj", f"{ours}.attn.to_add_out", d, d),
        one(f"{theirs}.x_block.mlp.fc1", f"{ours}.ff.net.0.proj", 4 * d, d),
        one(f"{theirs}.x_block.mlp.fc2", f"{ours}.ff.net.2", d, 4 * d),
        one(f"{theirs}.context_block.mlp.fc1", f"{ours}.ff_context.net.0.proj", 4 * d, d),
        one(f"{theirs}.context_block.mlp.fc2", f"{ours}.ff_context.net.2", d, 4 * d),
        one(
            f"{theirs}.x_block.adaLN_modulation.1",
            f"{ours}.norm1.linear",
            (9 if dual else 6) * d,
            d,
        ),
        one(f"{theirs}.context_block.adaLN_modulation.1", f"{ours}.norm1_context.linear", 6 * d, d),
    ]
    if dual:
        second = ("attn2.to_q", "attn2.to_k", "attn2.to_v")
        layers.append(joined(f"{theirs}.x_block.attn2.qkv", ours, second, (d, d, d), d))
        layers.append(one(f"{theirs}.x_block.attn2.proj", f"{ours}.attn2.to_out.0", d, d))
    return layers


SD3_MEDIUM = sd3_block(0)
SD3_LARGE = sd3_block(30, d=2432, dual=False)
SD3_OUTER = [
    one("context_embedder", "context_embedder", 1536, 4096),
    one("t_embedder.mlp.0", "time_text_embed.timestep_embedder.linear_1", 1536, 256),
    one("x_embedder.proj", "pos_embed.proj", 1536, 16, 2, 2),
    one("y_embedder.mlp.2", "time_text_embed.text_embedder.linear_2", 1536, 1536),
    one("final_layer.linear", "proj_out", 64, 1536),
]


def zimage_block(block: str, *, time: bool = True) -> list[Layer]:
    d = 3840
    layers = [
        joined(
            f"{block}.attention.qkv",
            block,
            ("attention.to_q", "attention.to_k", "attention.to_v"),
            (d, d, d),
            d,
        ),
        one(f"{block}.attention.out", f"{block}.attention.to_out.0", d, d),
        one(f"{block}.feed_forward.w1", f"{block}.feed_forward.w1", 10240, d),
        one(f"{block}.feed_forward.w2", f"{block}.feed_forward.w2", d, 10240),
        one(f"{block}.feed_forward.w3", f"{block}.feed_forward.w3", 10240, d),
    ]
    if time:
        layers.append(one(f"{block}.adaLN_modulation.0", f"{block}.adaLN_modulation.0", 15360, 256))
    return layers


ZIMAGE = [
    *zimage_block("layers.29"),
    *zimage_block("noise_refiner.1"),
    *zimage_block("context_refiner.0", time=False),
]
_QWEN = {
    "attn.to_q": (3072, 3072),
    "attn.to_k": (3072, 3072),
    "attn.to_v": (3072, 3072),
    "attn.to_out.0": (3072, 3072),
    "attn.add_q_proj": (3072, 3072),
    "attn.add_k_proj": (3072, 3072),
    "attn.add_v_proj": (3072, 3072),
    "attn.to_add_out": (3072, 3072),
    "img_mlp.net.0.proj": (12288, 3072),
    "img_mlp.net.2": (3072, 12288),
    "txt_mlp.net.0.proj": (12288, 3072),
    "txt_mlp.net.2": (3072, 12288),
    "img_mod.1": (18432, 3072),
    "txt_mod.1": (18432, 3072),
}
QWEN = [
    one(f"transformer_blocks.{i}.{name}", f"transformer_blocks.{i}.{name}", out, width)
    for i in (0, 59)
    for name, (out, width) in _QWEN.items()
]


# ---- U-Nets: (release's name, diffusers' name)


def unet_transformer(theirs: str, ours: str, *, width: int, text: int, linear: bool) -> list[Layer]:
    kernel = () if linear else (1, 1)
    inner = f"{ours}.transformer_blocks.0"
    own = {
        "attn1.to_q": (width, width),
        "attn1.to_k": (width, width),
        "attn1.to_v": (width, width),
        "attn1.to_out.0": (width, width),
        "attn2.to_q": (width, width),
        "attn2.to_k": (width, text),
        "attn2.to_v": (width, text),
        "attn2.to_out.0": (width, width),
        "ff.net.0.proj": (8 * width, width),
        "ff.net.2": (width, 4 * width),
    }
    deep = [] if text != 2048 else [("transformer_blocks.1.attn1.to_q", width, width)]
    return [
        *(one(f"{theirs}.{name}", f"{ours}.{name}", out, size) for name, out, size in deep),
        one(f"{theirs}.proj_in", f"{ours}.proj_in", width, width, *kernel),
        one(f"{theirs}.proj_out", f"{ours}.proj_out", width, width, *kernel),
        *(
            one(f"{theirs}.transformer_blocks.0.{name}", f"{inner}.{name}", out, size)
            for name, (out, size) in own.items()
        ),
    ]


SD15 = [
    *unet_transformer(
        "input_blocks.1.1", "down_blocks.0.attentions.0", width=320, text=768, linear=False
    ),
    *unet_transformer(
        "middle_block.1", "mid_block.attentions.0", width=1280, text=768, linear=False
    ),
    *unet_transformer(
        "output_blocks.9.1", "up_blocks.3.attentions.0", width=320, text=768, linear=False
    ),
]
SD2 = [
    *unet_transformer(
        "input_blocks.4.1", "down_blocks.1.attentions.0", width=640, text=1024, linear=True
    ),
    *unet_transformer(
        "output_blocks.11.1", "up_blocks.3.attentions.2", width=320, text=1024, linear=True
    ),
]
SDXL = [
    *unet_transformer(
        "input_blocks.4.1", "down_blocks.1.attentions.0", width=640, text=2048, linear=True
    ),
    *unet_transformer(
        "middle_block.1", "mid_block.attentions.0", width=1280, text=2048, linear=True
    ),
    *unet_transformer(
        "output_blocks.5.1", "up_blocks.1.attentions.2", width=640, text=2048, linear=True
    ),
]
UNET_CONVOLUTIONS = [  # of SD 1.x and 2.x
    one("input_blocks.1.0.in_layers.2", "down_blocks.0.resnets.0.conv1", 320, 320, 3, 3),
    one("input_blocks.1.0.emb_layers.1", "down_blocks.0.resnets.0.time_emb_proj", 320, 1280),
    one("input_blocks.3.0.op", "down_blocks.0.downsamplers.0.conv", 320, 320, 3, 3),
    one(
        "input_blocks.4.0.skip_connection", "down_blocks.1.resnets.0.conv_shortcut", 640, 320, 1, 1
    ),
]
SDXL_CONVOLUTIONS = [
    one("input_blocks.1.0.in_layers.2", "down_blocks.0.resnets.0.conv1", 320, 320, 3, 3),
    one(
        "input_blocks.4.0.skip_connection", "down_blocks.1.resnets.0.conv_shortcut", 640, 320, 1, 1
    ),
    one("input_blocks.3.0.op", "down_blocks.0.downsamplers.0.conv", 320, 320, 3, 3),
    one("output_blocks.5.2.conv", "up_blocks.1.upsamplers.0.conv", 640, 640, 3, 3),
    one("time_embed.0", "time_embedding.linear_1", 1280, 320),
    one("label_emb.0.0", "add_embedding.linear_1", 1280, 2816),
]


# ---- text encoders, by what transformers calls their layers in full


def clip(width: int, *, layer: int = 3) -> list[Layer]:
    start = f"text_model.encoder.layers.{layer}"
    sizes = {
        **{f"self_attn.{each}_proj": (width, width) for each in ("q", "k", "v", "out")},
        "mlp.fc1": (4 * width, width),
        "mlp.fc2": (width, 4 * width),
    }
    return [
        one(f"{start}.{name}", f"{start.removeprefix('text_model.')}.{name}", out, size)
        for name, (out, size) in sizes.items()
    ]


def t5(layer: int = 11) -> list[Layer]:
    start = f"encoder.block.{layer}.layer"
    sizes = {
        **{f"0.SelfAttention.{each}": (4096, 4096) for each in "qkvo"},
        "1.DenseReluDense.wi_0": (10240, 4096),
        "1.DenseReluDense.wi_1": (10240, 4096),
        "1.DenseReluDense.wo": (4096, 10240),
    }
    return [
        one(f"{start}.{name}", f"{start}.{name}", out, size) for name, (out, size) in sizes.items()
    ]


def qwen_vl(layer: int = 20) -> list[Layer]:
    start = f"model.layers.{layer}"
    sizes = {
        "self_attn.q_proj": (3584, 3584),
        "self_attn.k_proj": (512, 3584),
        "mlp.gate_proj": (18944, 3584),
        "mlp.down_proj": (3584, 18944),
    }
    return [
        one(f"{start}.{name}", f"layers.{layer}.{name}", out, size)
        for name, (out, size) in sizes.items()
    ]
