"""The text encoders of the releases: class, sizes, and the layers that adapter files may change, without torch.

Layers have names and shapes [out, in].

Names are those of transformers without the prefixes `text_model.`, `model.` and `language_model.`, which
some versions of transformers and some trainers add and others leave out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Layers = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class TextNetwork:
    """A text encoder as released.

    `role` is ComfyUI's name of it, `kind` that of `signatures.toml`, `network` its class in transformers,
    `width` the length of its hidden states; `parameters` are those that are loaded.
    """

    role: str
    kind: str
    network: str
    width: int
    parameters: int
    layers: Layers


def clip_layers(*, layers: int, width: int, inner: int) -> Layers:
    """Return the layers of a CLIP text encoder."""
    square = ("k_proj", "v_proj", "q_proj", "out_proj")
    block: Layers = {f"self_attn.{name}": (width, width) for name in square}
    block |= {"layer_norm1": (width,), "mlp.fc1": (inner, width), "mlp.fc2": (width, inner)}
    block |= {"layer_norm2": (width,)}
    blocks = {
        f"encoder.layers.{n}.{name}": shape for n in range(layers) for name, shape in block.items()
    }
    # CLIP-L projects 768 channels to 768, bigG 1280 to 1280.
    return {**blocks, "final_layer_norm": (width,), "text_projection": (width, width)}


def t5_xxl_layers() -> Layers:
    """Return the layers of T5-XXL's encoder."""
    width, inner = 4096, 10240
    block: Layers = {f"layer.0.SelfAttention.{name}": (width, width) for name in "qkvo"}
    block |= {f"layer.1.DenseReluDense.{name}": (inner, width) for name in ("wi_0", "wi_1")}
    block |= {"layer.1.DenseReluDense.wo": (width, inner)}
    return {f"encoder.block.{n}.{name}": shape for n in range(24) for name, shape in block.items()}


def qwen_layers(*, layers: int, width: int, inner: int, queries: int, keys: int) -> Layers:
    """Return the layers of a Qwen or Gemma language model; `queries`, `keys`: the widths of all heads together."""
    block: Layers = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    return {f"layers.{n}.{name}": shape for n in range(layers) for name, shape in block.items()}


CLIP_L = TextNetwork(
    role="clip_l",
    kind="clip",
    network="CLIPTextModel",
    width=768,
    parameters=123_060_480,
    layers=clip_layers(layers=12, width=768, inner=3072),
)
# Stable Diffusion 3 reads the pooled vector after the projection.
CLIP_L_PROJECTED = replace(CLIP_L, network="CLIPTextModelWithProjection", parameters=123_650_304)
CLIP_G = TextNetwork(
    role="clip_g",
    kind="clip",
    network="CLIPTextModelWithProjection",
    width=1280,
    parameters=694_659_840,
    layers=clip_layers(layers=32, width=1280, inner=5120),
)
T5_XXL = TextNetwork(
    role="t5xxl",
    kind="t5",
    network="T5EncoderModel",
    width=4096,
    parameters=4_762_310_656,
    layers=t5_xxl_layers(),
)
# Heads of 128 channels (Qwen) or 256 (Gemma): 32 and 8 of them in Qwen3-4B, 8 and 4 in Gemma 2, 28
# and 4 in Qwen2.5-VL. `queries` is therefore not always `width`.
QWEN3_4B = TextNetwork(
    role="qwen3_4b",
    kind="qwen3",
    network="Qwen3Model",
    width=2560,
    parameters=4_022_468_096,
    layers=qwen_layers(layers=36, width=2560, inner=9728, queries=4096, keys=1024),
)
GEMMA2_2B = TextNetwork(
    role="gemma2_2b",
    kind="gemma2",
    network="Gemma2Model",
    width=2304,
    parameters=2_614_341_888,
    layers=qwen_layers(layers=26, width=2304, inner=9216, queries=2048, keys=1024),
)
QWEN25_VL_7B = TextNetwork(
    role="qwen25_7b",
    kind="qwen25",
    network="Qwen2_5_VLForConditionalGeneration",
    width=3584,
    parameters=7_070_619_136,
    layers=qwen_layers(layers=28, width=3584, inner=18944, queries=3584, keys=512),
)
BY_ROLE = {
    network.role: network for network in (CLIP_L, CLIP_G, T5_XXL, QWEN3_4B, GEMMA2_2B, QWEN25_VL_7B)
}
