"""Adapter files from anywhere: recognised, described, and refused when they are none."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save
from safetensors.torch import save_file

from lora_trainer.common.errors import InputError
from tests.fakes.adapters import body_of, tool

Arrays = Mapping[str, np.ndarray[Any, Any]]
BLOCK = "down_blocks.0.attentions.0.transformer_blocks.0"


def linear(
    module: str, *, rank: int = 4, inputs: int = 8, alpha: float | None = 2.0, names: str = "kohya"
) -> Arrays:
    """Return the tensors of one module, in the names of kohya or peft."""
    down, up = {
        "kohya": ("lora_down.weight", "lora_up.weight"),
        "peft": ("lora_A.weight", "lora_B.weight"),
        "named": ("lora_A.default.weight", "lora_B.default.weight"),
    }[names]
    tensors: dict[str, np.ndarray[Any, Any]] = {
        f"{module}.{down}": np.ones((rank, inputs), np.float16),
        f"{module}.{up}": np.ones((6, rank), np.float16),
    }
    if alpha is not None:
        tensors[f"{module}.alpha"] = np.array(alpha, np.float32)
    return tensors


def kohya(module: str) -> str:
    return "lora_unet_" + module.replace(".", "_")


def saved(path: Path, *modules: Arrays, metadata: Mapping[str, str] | None = None) -> Path:
    merged = {name: array for tensors in modules for name, array in tensors.items()}
    path.write_bytes(save(merged, metadata=None if metadata is None else dict(metadata)))
    return path


def inspected(path: Path, *modules: Arrays, metadata: Mapping[str, str] | None = None) -> Any:
    return tool("inspect", saved(path, *modules, metadata=metadata))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


def kinds(seen: Any) -> list[str]:
    return [problem["kind"] for problem in seen["problems"]]


# ---- what is recognised


STATED = {"ss_base_model_version": "sd_v1", "ss_network_dim": "4", "ss_network_alpha": "2.0"}
PEFT = json.dumps({"unet.r": 4, "unet.lora_alpha": 3.5, "unet.alpha_pattern": {"x": 8}})
TO_K, CONV = kohya(f"{BLOCK}.attn2.to_k"), kohya("down_blocks.0.resnets.0.conv1")
SECOND = "lora_te2_text_model_encoder_layers_0_mlp_fc1"
SEEN: Sequence[tuple[Arrays, Mapping[str, str], Mapping[str, Any]]] = [
    (
        {**linear(kohya(f"{BLOCK}.attn1.to_q")), **linear(TO_K, inputs=768)},
        STATED,
        {
            "family": "sd15", "format": "kohya", "kinds": ["lora"], "rank": 4, "alpha": 2.0,
            "modules": 2, "norms": {"down_blocks.0": pytest.approx(136.4698, rel=1e-6)},
            "metadata": STATED, "problems": [],
        },
    ),
    (
        linear(f"unet.{BLOCK}.attn2.to_k", inputs=768, alpha=None, names="peft"),
        {"lora_adapter_metadata": PEFT},
        {"format": "diffusers", "family": "sd15", "problems": [], "alpha": {"min": 3.5, "max": 8.0}},
    ),
    # Formats
    (linear(SECOND), {}, {"format": "kohya", "family": "sdxl"}),
    (linear("diffusion_model.layers.0.attention.qkv"), {}, {"format": "comfyui"}),
    (linear("base_model.model.layers.0.q", names="named"), {}, {"format": "peft"}),
    (linear("text_encoder.layers.0.q", names="peft"), {}, {"format": "diffusers", "family": "unknown"}),
    (linear(f"{BLOCK}.attn1.to_q", names="peft"), {}, {"format": "unknown", "modules": 1}),
    # Metadata decide only where the tensors do not.
    (linear(kohya(f"{BLOCK}.attn2.to_v"), inputs=1024), STATED, {"family": "sd2"}),
    (linear(TO_K, inputs=64), {}, {"family": "sd15"}),  # a small base of ours
    (linear(CONV), {}, {"family": "unknown"}),
    (linear(CONV), {"ss_base_model_version": "sdxl_base_v1-0"}, {"family": "sdxl"}),
    (linear(CONV), STATED, {"family": "sd15"}),
    (linear(CONV), {"ss_base_model_version": "wan2.1"}, {"family": "unknown"}),
    (linear("diffusion_model.blocks.0.attention.qkv"), {}, {"family": "unknown"}),
]  # fmt: skip


def test_what_is_recognised(file: Path) -> None:
    for tensors, metadata, expected in SEEN:
        seen = inspected(file, tensors, metadata=metadata)
        assert {key: seen[key] for key in expected} == expected
    assert seen.keys() == SEEN[0][2].keys()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_every_number_of_a_narrow_dtype_is_read(dtype: torch.dtype, file: Path) -> None:
    """As the norm of each byte's number: fp8 in two forms, and bf16, which numpy has not."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(dtype) if dtype.itemsize == 1 else (codes.float() * 1e30).to(dtype)
    finite = numbers[numbers.float().isfinite()]
    one = torch.ones(1, 1, dtype=torch.float32)
    tensors = {}
    for index in range(len(finite)):
        tensors[f"unet.up_blocks.{index}.lora_down.weight"] = finite[index].reshape(1, 1)
        tensors[f"unet.up_blocks.{index}.lora_up.weight"] = one
    save_file({key: each.clone() for key, each in tensors.items()}, file)
    norms = tool("inspect", file)["norms"]
    for index, number in enumerate(finite.double().abs().tolist()):
        assert norms[f"up_blocks.{index}"] == pytest.approx(number, rel=1e-7), index
    for number in (*numbers[~numbers.float().isfinite()], torch.tensor(torch.nan).to(dtype)):
        pair = {"unet.a.lora_down.weight": number.reshape(1, 1).clone()}
        save_file({**pair, "unet.a.lora_up.weight": one}, file)
        assert "not-finite" in kinds(tool("inspect", file)), number
    for integers in (np.int64, np.int32, np.uint8, np.float16, np.float64):
        alpha = {"lora_unet_a.alpha": np.array(200, integers)}
        assert inspected(file, A, alpha)["alpha"] == 200, integers


# ---- norms


def test_norms_add_up_by_block_in_their_order(file: Path) -> None:
    names = ("up_blocks.10.a", "up_blocks.2.a", "up_blocks.2.b", "mid_block.a")
    layers = (linear(f"unet.{name}", alpha=None, names="peft") for name in names)
    norms = inspected(file, *layers)["norms"]
    assert list(norms) == ["mid_block", "up_blocks.2", "up_blocks.10"]
    one = 4 * np.sqrt(48)  # four equal products of ones in each of 6 x 8 elements
    assert norms["up_blocks.2"] == pytest.approx(one * np.sqrt(2))
    blocks = {
        "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q": "input_blocks.4",
        "lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q": "mid_block",
        "transformer.single_transformer_blocks.12.attn.to_q": "single_transformer_blocks.12",
        "lora_transformer_transformer_blocks_3_attn_to_q": "transformer_blocks.3",
        "lora_unet_double_blocks_7_img_attn_qkv": "double_blocks.7",
        "diffusion_model.layers.29.attention.to_q": "layers.29",
        "base_model.model.layers.0.q": "layers.0",
        "lora_te_text_model_encoder_layers_0_mlp_fc1": "text_encoder.layers.0",
        "lora_te2_text_model_encoder_layers_31_mlp_fc1": "text_encoder_2.layers.31",
        "text_encoder_2.text_model.encoder.layers.1.mlp.fc1": "text_encoder_2.layers.1",
        "unet.conv_in": "other",
    }
    assert inspected(file, *map(linear, blocks))["norms"].keys() == set(blocks.values())


# ---- what is wrong


BARE = linear("unet.a", alpha=None, names="peft")
A, B = linear("lora_unet_a"), linear("lora_unet_b", alpha=None)
OFT = {"lora_unet_a.oft_blocks": np.ones((2, 3, 3)), "lora_unet_a.alpha": np.array(0.0)}
MAGNITUDE = {"lora_unet_a.dora_scale": np.ones((6, 1), np.float16)}
NAN, INFINITY = np.full((6, 4), np.nan, np.float16), np.full((6, 4), -np.inf)
RSLORA = json.dumps({"rs_lora": "True"})
PROBLEMS: Sequence[tuple[Sequence[Arrays], Mapping[str, str], Sequence[tuple[str, str, str]]]] = [
    ([A, B], {}, [("missing-alpha", "warning", "lora_unet_b")]),
    ([BARE], {}, [("missing-alpha", "note", "unet.a")]),
    ([BARE], {"lora_train.strength": "multiplied in"}, []),
    ([A, linear("unet.b", names="peft")], {}, [("mixed-formats", "error", "")]),
    ([A, {"lora_unet_a.lora_up.weight": NAN}], {}, [("not-finite", "error", "a.lora_up.weight")]),
    ([A, {"lora_unet_a.lora_up.weight": INFINITY}], {}, [("not-finite", "error", "a.lora_up")]),
    ([A, MAGNITUDE, {"emb_params": np.ones(3, np.float16)}], {},
     [("dora", "note", "1 modules"), ("unknown-keys", "warning", "emb_params")]),
    # An alpha that is no strength contradicts nothing, nor do numbers that are none.
    ([OFT], {"ss_network_alpha": "8", "ss_network_dim": "3"}, []),
    ([A], {"ss_network_alpha": "8", "ss_network_args": RSLORA}, []),
    ([linear("unet.a", names="peft")],
     {"ss_network_alpha": "None", "ss_network_dim": "Dynamic", "lora_adapter_metadata": "[1"},
     [("alpha-twice", "error", "lora_adapter_metadata")]),
    ([linear(kohya(f"{BLOCK}.attn2.to_k"), inputs=768)],
     {"ss_network_alpha": "16", "ss_network_dim": "32", "ss_base_model_version": "sdxl_base_v1-0"},
     [("metadata-disagrees", "warning", "ss_network_alpha says 16, the tensors say 2"),
      ("metadata-disagrees", "warning", "ss_network_dim says 32, the tensors say 4"),
      ("metadata-disagrees", "warning", "ss_base_model_version says sdxl, the tensors say sd15")]),
]  # fmt: skip


@pytest.mark.parametrize(("modules", "metadata", "problems"), PROBLEMS)
def test_what_readers_will_stumble_over_is_said(
    modules: Sequence[Arrays],
    metadata: Mapping[str, str],
    problems: Sequence[tuple[str, str, str]],
    file: Path,
) -> None:
    seen = inspected(file, *modules, metadata=metadata)
    assert [(each["kind"], each["severity"]) for each in seen["problems"]] == [
        (kind, severity) for kind, severity, _ in problems
    ]
    for each, (_, _, words) in zip(seen["problems"], problems, strict=True):
        assert words in each["what"]
    assert (seen["format"] == "mixed") == ("mixed-formats" in kinds(seen))


def test_factors_without_their_partner_or_of_another_rank(file: Path) -> None:
    tensors = {key: array for name in "abcd" for key, array in linear(f"lora_unet_{name}").items()}
    tensors |= {f"lora_unet_e.hada_{name}": np.ones((2, 2)) for name in ("w1_a", "w1_b", "w2_a")}
    del tensors["lora_unet_b.lora_up.weight"], tensors["lora_unet_c.lora_down.weight"]
    tensors["lora_unet_d.lora_up.weight"] = np.ones((6, 5), np.float16)
    seen = inspected(file, tensors)
    assert seen["modules"] == 2
    assert [(each["kind"], each["what"]) for each in seen["problems"]] == [
        (
            "factors-missing",
            "3 modules lack tensors, first 'lora_unet_b', which has only alpha, down",
        ),
        ("rank-differs", "1 modules have factors of different rank, first 'lora_unet_d'"),
    ]


def test_a_flipped_bit_is_seen_where_the_file_states_its_hash(file: Path) -> None:
    stated = {"modelspec.hash_sha256": f"0x{sha256(body_of(saved(file, A))).hexdigest()}"}
    assert kinds(inspected(file, A, metadata=stated)) == []
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert kinds(tool("inspect", file)) == ["hash-differs"]


# ---- what is refused


WHOLE = save(
    {"lora_unet_a.lora_down.weight": np.ones((4, 8)), "lora_unet_a.lora_up.weight": np.ones((8, 4))}
)
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def described(tensors: Mapping[str, Any]) -> bytes:
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header


REFUSED = {
    "empty": (b"", "not a safetensors file"),
    "cut in the tensors": (WHOLE[:-1], "cut off"),
    "longer": (WHOLE + b"x", "not fully covered"),
    "pickle": (b"\x80\x02}q\x00." + bytes(60), "pickle"),
    "too many": (
        described(dict.fromkeys(map(str, range(100_001)), EMPTY)),
        "no adapter: it names more than 100,000",
    ),
    "dtype": (described({"a": {**EMPTY, "dtype": "F8_E8M0"}}), "numbers of F8_E8M0 in 'a'"),
    "dimensions": (described({"a": {**EMPTY, "shape": [0] * 17}}), "more than 16 dimensions"),
    "no LoRA": (save({"model.diffusion_model.out.weight": np.ones(3)}), "no LoRA"),
    "LoHa": (save({"lora_unet_a.hada_w1_a": np.ones((3, 3))}), "no LoRA"),
}


def test_what_is_no_adapter_is_refused_in_one_line(file: Path) -> None:
    for content, expected in REFUSED.values():
        file.write_bytes(content)
        with pytest.raises(InputError) as raised:
            tool("inspect", file)
        assert raised.value.exit_code == 3
        assert expected in str(raised.value)
        assert str(file) in str(raised.value)
        assert len(str(raised.value)) < 500
    file.unlink()
    for path, expected in ((file, "does not exist"), (file.parent, "is no file")):
        with pytest.raises(InputError, match=expected):
            tool("inspect", path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.timeout(10)
def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(InputError, match="is no file"):
        tool("inspect", tmp_path / "pipe.safetensors")
