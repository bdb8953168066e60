"""Adapter files from anywhere: recognised, described, and refused when they are none."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
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


def linear(
    module: str, *, rank: int = 4, inputs: int = 8, alpha: float = 2.0, names: str = "kohya"
) -> Arrays:
    """Return the tensors of one module, in the names of kohya or peft; an alpha of 0 is not written."""
    down, up = {
        "kohya": ("lora_down.weight", "lora_up.weight"),
        "peft": ("lora_A.weight", "lora_B.weight"),
        "named": ("lora_A.default.weight", "lora_B.default.weight"),
    }[names]
    tensors: dict[str, np.ndarray[Any, Any]] = {
        f"{module}.{down}": np.ones((rank, inputs), np.float16),
        f"{module}.{up}": np.ones((6, rank), np.float16),
    }
    if alpha:
        tensors[f"{module}.alpha"] = np.array(alpha, np.float32)
    return tensors


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


FILES = tomllib.loads(Path(__file__).with_name("inspected.toml").read_text(encoding="utf-8"))[
    "file"
]


@pytest.mark.parametrize(
    "case", FILES, ids=lambda case: str(case.get("problems", case.get("seen")))
)
def test_what_a_file_is_and_what_readers_will_stumble_over(
    case: dict[str, Any], file: Path
) -> None:
    others = {
        key: np.full(shape, number, dtype)
        for key, (shape, number, dtype) in case.get("tensors", {}).items()
    }
    modules = (linear(**options) for options in case.get("modules", ()))
    seen = inspected(file, *modules, others, metadata=case.get("metadata", {}))
    expected = {"format": seen["format"], **case.get("seen", {})}
    norms = expected.pop("norms", seen["norms"])
    assert {key: seen[key] for key in expected} == expected
    assert seen.keys() == FILES[0]["seen"].keys() | {"problems"}
    assert seen["norms"] == pytest.approx(norms, rel=1e-6)
    assert (seen["format"] == "mixed") == ("mixed-formats" in kinds(seen))
    if "problems" in case:
        found = seen["problems"]
        for each, (kind, severity, words) in zip(found, case["problems"], strict=True):
            assert (each["kind"], each["severity"]) == (kind, severity) and words in each["what"]


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
    layers = (linear(f"unet.{name}", alpha=0, names="peft") for name in names)
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


A = linear("lora_unet_a")


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
    "empty": (b"", "is empty, not weights"),
    "cut in the tensors": (WHOLE[:-1], "cut off"),
    "longer": (WHOLE + b"x", "not fully covered"),
    "pickle": (b"\x80\x02}q\x00." + bytes(60), "pickle"),
    "too many": (
        described(dict.fromkeys(map(str, range(100_001)), EMPTY)),
        "not an adapter: it names more than 100,000",
    ),
    "dtype": (described({"a": {**EMPTY, "dtype": "F8_E8M0"}}), "numbers of F8_E8M0 in 'a'"),
    "dimensions": (described({"a": {**EMPTY, "shape": [0] * 17}}), "more than 16 dimensions"),
    "no LoRA": (save({"model.diffusion_model.out.weight": np.ones(3)}), "no LoRA"),
    "vectors of no words": (save({"emb_params": np.ones(3)}), "no LoRA (as in embeddings"),
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
    for path, expected in ((file, "does not exist"), (file.parent, "is a folder without")):
        with pytest.raises(InputError, match=expected):
            tool("inspect", path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.timeout(10)
def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(InputError, match="is not a file"):
        tool("inspect", tmp_path / "pipe.safetensors")
