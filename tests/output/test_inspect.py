"""Adapter files from anywhere: recognised, described, and refused when they are none."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from lora_trainer.common.errors import InputError
from lora_trainer.lora_file.inspect import inspect_file

Arrays = Mapping[str, np.ndarray[Any, Any]]
BLOCK = "down_blocks.0.attentions.0.transformer_blocks.0"


def linear(
    module: str, *, rank: int = 4, inputs: int = 8, alpha: float | None = 2.0, names: str = "kohya"
) -> Arrays:
    """Return the tensors of one module, in the names of kohya, peft or old diffusers."""
    down, up = {
        "kohya": ("lora_down.weight", "lora_up.weight"),
        "peft": ("lora_A.weight", "lora_B.weight"),
        "named": ("lora_A.default.weight", "lora_B.default.weight"),
        "old": ("lora.down.weight", "lora.up.weight"),
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


def saved(path: Path, *modules: Arrays, metadata: dict[str, str] | None = None) -> Path:
    merged = {name: array for tensors in modules for name, array in tensors.items()}
    path.write_bytes(save(merged, metadata=metadata))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


def kinds(found: Any) -> list[str]:
    return [problem.kind for problem in found.problems]


def only_problem(found: Any) -> Any:
    (problem,) = found.problems
    return problem


# ---- what is recognised


def test_a_kohya_file(file: Path) -> None:
    saved(
        file,
        linear(kohya(f"{BLOCK}.attn1.to_q")),
        linear(kohya(f"{BLOCK}.attn2.to_k"), inputs=768),
        metadata={
            "ss_base_model_version": "sd_v1",
            "ss_network_dim": "4",
            "ss_network_alpha": "2.0",
        },
    )
    assert inspect_file(file).to_json() == {
        "family": "sd15",
        "format": "kohya",
        "kinds": ["lora"],
        "rank": 4,
        "alpha": 2.0,
        "modules": 2,
        "norms": {"down_blocks.0": pytest.approx(136.4698, rel=1e-6)},
        "metadata": {
            "ss_base_model_version": "sd_v1",
            "ss_network_dim": "4",
            "ss_network_alpha": "2.0",
        },
        "problems": [],
    }


def test_differing_ranks_and_alphas_are_ranges(file: Path) -> None:
    saved(
        file,
        linear(kohya(f"{BLOCK}.attn1.to_q"), rank=4, alpha=2.0),
        linear(kohya(f"{BLOCK}.attn1.to_k"), rank=16, alpha=0.5),
    )
    found = inspect_file(file).to_json()
    assert found["rank"] == {"min": 4, "max": 16}
    assert found["alpha"] == {"min": 0.5, "max": 2.0}


def test_a_diffusers_file_has_its_alpha_in_the_metadata(file: Path) -> None:
    config = {"unet.r": 4, "unet.lora_alpha": 3.5, "unet.alpha_pattern": {"x": 8}}
    saved(
        file,
        linear(f"unet.{BLOCK}.attn2.to_k", inputs=768, alpha=None, names="peft"),
        metadata={"lora_adapter_metadata": json.dumps(config)},
    )
    found = inspect_file(file)
    assert (found.format, found.family, found.problems) == ("diffusers", "sd15", ())
    assert found.alpha is not None
    assert (found.alpha.low, found.alpha.high) == (3.5, 8.0)


@pytest.mark.parametrize(
    ("module", "names", "expected"),
    [
        ("lora_te_text_model_encoder_layers_0_mlp_fc1", "kohya", "kohya"),
        ("lora_te2_text_model_encoder_layers_0_mlp_fc1", "kohya", "kohya"),
        ("lora_unet_double_blocks_0_img_attn_qkv", "kohya", "kohya"),
        ("diffusion_model.layers.0.attention.qkv", "peft", "comfyui"),
        ("diffusion_model.layers.0.attention.qkv", "kohya", "comfyui"),
        ("base_model.model.layers.0.q", "named", "peft"),
        ("transformer.single_transformer_blocks.0.attn.to_q", "peft", "diffusers"),
        ("text_encoder_2.layers.0.q", "peft", "diffusers"),
        (f"unet.{BLOCK}.attn1.processor.to_q_lora", "old", "diffusers"),
        (f"{BLOCK}.attn1.to_q", "peft", "unknown"),
    ],
)
def test_key_formats(file: Path, module: str, names: str, expected: str) -> None:
    if names == "old":  # to_q_lora.down.weight, as diffusers wrote it in 2023
        module = module.removesuffix("_lora") + "_"
        tensors = {
            key.replace("_.lora", "_lora"): a
            for key, a in linear(module, alpha=None, names=names).items()
        }
    else:
        tensors = dict(linear(module, alpha=None, names=names))
    found = inspect_file(saved(file, tensors))
    assert (found.format, found.modules) == (expected, 1)


@pytest.mark.parametrize(
    ("module", "inputs", "version", "expected"),
    [
        (kohya(f"{BLOCK}.attn2.to_k"), 768, None, "sd15"),
        (kohya(f"{BLOCK}.attn2.to_v"), 1024, None, "sd2"),
        (kohya("down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"), 2048, None, "sdxl"),
        ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k", 2048, None, "sdxl"),
        ("unet.down_blocks.2.attentions.0.transformer_blocks.7.attn1.to_q", 8, None, "sdxl"),
        ("lora_te2_text_model_encoder_layers_0_mlp_fc1", 8, None, "sdxl"),
        ("diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k", 768, None, "sd15"),
        (f"unet.{BLOCK}.attn2.processor.to_k", 768, None, "sd15"),
        ("transformer.single_transformer_blocks.1.attn.to_q", 8, None, "flux"),
        ("lora_unet_double_blocks_0_img_attn_qkv", 8, None, "flux"),
        (kohya(f"{BLOCK}.attn2.to_k"), 64, None, "sd15"),
        (kohya("down_blocks.0.resnets.0.conv1"), 8, None, "unknown"),
        (kohya("down_blocks.0.resnets.0.conv1"), 8, "sdxl_base_v1-0", "sdxl"),
        (kohya("down_blocks.0.resnets.0.conv1"), 8, "sd_v1", "sd15"),
        (kohya("down_blocks.0.resnets.0.conv1"), 8, "wan2.1", "unknown"),
        ("diffusion_model.blocks.0.attention.qkv", 8, None, "unknown"),
    ],
)
def test_families(file: Path, module: str, inputs: int, version: str | None, expected: str) -> None:
    metadata = {"ss_base_model_version": version} if version else None
    names = "kohya" if module.startswith("lora_") else "peft"
    saved(file, linear(module, inputs=inputs, names=names), metadata=metadata)
    assert inspect_file(file).family == expected


@pytest.mark.parametrize(
    ("dtype", "data", "expected"),
    [
        ("BF16", b"\x20\x40", 2.5),
        ("F16", b"\x00\x41", 2.5),
        ("F64", struct.pack("<d", 2.5), 2.5),
        ("I64", b"\3" + bytes(7), 3.0),
    ],
)
def test_alphas_of_every_dtype(file: Path, dtype: str, data: bytes, expected: float) -> None:
    weights = dict.fromkeys(("lora_down.weight", "lora_up.weight"), ("F32", [1, 1], bytes(4)))
    file.write_bytes(
        raw(
            {
                f"lora_unet_a.{name}": entry
                for name, entry in {**weights, "alpha": (dtype, [], data)}.items()
            }
        )
    )
    assert inspect_file(file).to_json()["alpha"] == expected


def lycoris(module: str, kind: str) -> Arrays:
    """Return a LoHa, LoKr or OFT of a [6, 8] weight in LyCORIS's names, drawn at random."""
    shapes = {
        "loha": {f"hada_w{n}_{s}": (6, 2) if s == "a" else (2, 8) for n in (1, 2) for s in "ab"},
        "lokr": {"lokr_w1": (2, 4), "lokr_w2_a": (3, 2), "lokr_w2_b": (2, 2)},
        "whole": {"lokr_w1": (2, 4), "lokr_w2": (3, 2)},
        "oft": {"oft_blocks": (2, 3, 3)},
    }[kind]
    draw = np.random.default_rng(0)
    tensors = {
        f"{module}.{name}": draw.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    return {**tensors, f"{module}.alpha": np.array(0.0 if kind == "oft" else 1.0, np.float32)}


def test_the_strength_of_our_own_dotted_files_is_no_riddle(file: Path) -> None:
    bare = linear("unet.a", alpha=None, names="peft")
    assert kinds(inspect_file(saved(file, bare))) == ["missing-alpha"]
    saved(file, bare, metadata={"lora_train.strength": "multiplied in"})
    assert kinds(inspect_file(file)) == []


def test_an_alpha_that_is_no_strength_contradicts_nothing(file: Path) -> None:
    stated = {"ss_network_alpha": "8", "ss_network_dim": "3"}
    oft = lycoris("lora_unet_a", "oft")
    assert kinds(inspect_file(saved(file, oft, metadata=stated))) == []
    stated = {"ss_network_alpha": "8", "ss_network_args": json.dumps({"rs_lora": "True"})}
    assert kinds(inspect_file(saved(file, linear("lora_unet_a"), metadata=stated))) == []


# ---- norms


def plain_update(tensors: Arrays, module: str) -> np.ndarray[Any, Any]:
    """Return the update at strength 1 by its definition."""
    at = {name.removeprefix(f"{module}."): np.asarray(a, np.float64) for name, a in tensors.items()}
    if "lora_down.weight" in at:
        found = at["lora_up.weight"] @ at["lora_down.weight"].reshape(
            len(at["lora_down.weight"]), -1
        )
    elif "hada_w1_a" in at:
        found = (at["hada_w1_a"] @ at["hada_w1_b"]) * (at["hada_w2_a"] @ at["hada_w2_b"])
    else:
        right = at["lokr_w2"] if "lokr_w2" in at else at["lokr_w2_a"] @ at["lokr_w2_b"]
        found = np.kron(at["lokr_w1"], right)
    return np.asarray(found)


@pytest.mark.parametrize(("kind", "scale"), [("loha", 0.5), ("lokr", 0.5), ("whole", 1.0)])
def test_norms_of_lycoris_kinds(file: Path, kind: str, scale: float) -> None:
    tensors = lycoris(kohya("mid_block.a"), kind)
    expected = scale * np.linalg.norm(plain_update(tensors, kohya("mid_block.a")))
    assert inspect_file(saved(file, tensors)).norms == {"mid_block": pytest.approx(expected)}


@settings(max_examples=30, deadline=None)
@given(
    rank=st.integers(1, 9),
    sides=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
)
def test_norms_are_those_of_the_matrices(
    rank: int,
    sides: tuple[int, int],
    seed: int,
    dtype: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    draw = np.random.default_rng(seed)
    tensors = {
        "unet.a.lora_down.weight": draw.normal(size=(rank, sides[0], 3, 3)).astype(dtype),
        "unet.a.lora_up.weight": draw.normal(size=(sides[1], rank)).astype(dtype),
        "unet.a.alpha": np.array(2.0, np.float32),
    }
    path = saved(tmp_path_factory.getbasetemp() / "norms.safetensors", tensors)
    expected = 2 / rank * np.linalg.norm(plain_update(tensors, "unet.a"))
    assert inspect_file(path).norms == {"other": pytest.approx(expected, rel=1e-6)}


def test_norms_add_up_by_block_in_their_order(file: Path) -> None:
    names = ("up_blocks.10.a", "up_blocks.2.a", "up_blocks.2.b", "mid_block.a")
    saved(file, *(linear(f"unet.{name}", alpha=None, names="peft") for name in names))
    norms = inspect_file(file).norms
    assert list(norms) == ["mid_block", "up_blocks.2", "up_blocks.10"]
    one = 4 * np.sqrt(48)  # four equal products of ones in each of 6 x 8 elements
    assert norms["up_blocks.2"] == pytest.approx(one * np.sqrt(2))


def test_the_strength_that_diffusers_states_counts(file: Path) -> None:
    stated = {"lora_adapter_metadata": json.dumps({"unet.lora_alpha": 2})}
    bare = linear("unet.a", alpha=None, names="peft")
    assert inspect_file(saved(file, bare, metadata=stated)).norms["other"] == pytest.approx(
        2 * np.sqrt(48)
    )


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", "input_blocks.4"),
        ("lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q", "mid_block"),
        ("transformer.single_transformer_blocks.12.attn.to_q", "single_transformer_blocks.12"),
        ("transformer.transformer_blocks.3.attn.to_q", "transformer_blocks.3"),
        ("lora_transformer_transformer_blocks_3_attn_to_q", "transformer_blocks.3"),
        ("lora_unet_double_blocks_7_img_attn_qkv", "double_blocks.7"),
        ("diffusion_model.layers.29.attention.to_q", "layers.29"),
        ("base_model.model.layers.0.q", "layers.0"),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1", "text_encoder.layers.0"),
        ("lora_te2_text_model_encoder_layers_31_mlp_fc1", "text_encoder_2.layers.31"),
        ("text_encoder_2.text_model.encoder.layers.1.mlp.fc1", "text_encoder_2.layers.1"),
        ("unet.conv_in", "other"),
    ],
)
def test_blocks_of_modules(module: str, block: str, file: Path) -> None:
    assert list(inspect_file(saved(file, linear(module))).norms) == [block]


# ---- what is wrong


def test_lycoris_factors_without_their_partners(file: Path) -> None:
    tensors = dict(lycoris("lora_unet_a", "loha"))
    del tensors["lora_unet_a.hada_w2_b"]
    found = inspect_file(saved(file, tensors, linear("lora_unet_b")))
    assert (found.modules, kinds(found)) == (1, ["factors-missing"])


def test_missing_alphas(file: Path) -> None:
    found = inspect_file(saved(file, linear("lora_unet_a"), linear("lora_unet_b", alpha=None)))
    problem = only_problem(found)
    assert (problem.kind, problem.severity) == ("missing-alpha", "warning")
    assert "lora_unet_b" in problem.what
    bare = only_problem(inspect_file(saved(file, linear("unet.a", alpha=None, names="peft"))))
    assert (bare.kind, bare.severity) == ("missing-alpha", "note")


def test_factors_without_their_partner(file: Path) -> None:
    tensors = {**linear("lora_unet_a"), **linear("lora_unet_b"), **linear("lora_unet_c")}
    del tensors["lora_unet_b.lora_up.weight"], tensors["lora_unet_c.lora_down.weight"]
    found = inspect_file(saved(file, tensors))
    assert found.modules == 1
    assert kinds(found) == ["down-without-up", "up-without-down"]
    assert "lora_unet_b" in found.problems[0].what
    assert "lora_unet_c" in found.problems[1].what


def test_factors_of_different_rank(file: Path) -> None:
    tensors = {
        **linear("lora_unet_a", rank=4),
        "lora_unet_a.lora_up.weight": np.ones((6, 5), np.float16),
    }
    assert kinds(inspect_file(saved(file, tensors))) == ["rank-differs"]


def test_mixed_formats(file: Path) -> None:
    found = inspect_file(saved(file, linear("lora_unet_a"), linear("unet.b", names="peft")))
    assert found.format == "mixed"
    assert kinds(found) == ["mixed-formats"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_values_that_are_no_numbers(file: Path, value: float, dtype: Any) -> None:
    spoilt = np.ones((6, 4), dtype)
    spoilt[-1, -1] = value
    found = inspect_file(
        saved(file, {**linear("lora_unet_a"), "lora_unet_a.lora_up.weight": spoilt})
    )
    assert kinds(found) == ["not-finite"]
    assert "lora_unet_a.lora_up.weight" in found.problems[0].what


def test_metadata_that_contradicts_the_tensors(file: Path) -> None:
    stated = {
        "ss_network_alpha": "16",
        "ss_network_dim": "32",
        "ss_base_model_version": "sdxl_base_v1-0",
    }
    found = inspect_file(
        saved(file, linear(kohya(f"{BLOCK}.attn2.to_k"), inputs=768), metadata=stated)
    )
    assert kinds(found) == ["metadata-disagrees"] * 3
    assert [problem.what for problem in found.problems] == [
        "ss_network_alpha says 16, the tensors say 2",
        "ss_network_dim says 32, the tensors say 4",
        "ss_base_model_version says sdxl, the tensors say sd15",
    ]


def test_odd_metadata_is_no_problem(file: Path) -> None:
    odd = {"ss_network_alpha": "None", "ss_network_dim": "Dynamic", "lora_adapter_metadata": "[1"}
    assert kinds(inspect_file(saved(file, linear("unet.a", names="peft"), metadata=odd))) == [
        "alpha-twice"
    ]


def test_two_alphas_make_diffusers_fail(file: Path) -> None:
    config = {"lora_adapter_metadata": json.dumps({"unet.lora_alpha": 2})}
    assert kinds(inspect_file(saved(file, linear("lora_unet_a"), metadata=config))) == [
        "alpha-twice"
    ]


def test_a_flipped_bit_is_seen_where_the_file_states_its_hash(file: Path) -> None:
    plain = saved(file, linear("lora_unet_a")).read_bytes()
    body = plain[8 + struct.unpack("<Q", plain[:8])[0] :]
    digest = "0x" + sha256(body).hexdigest()
    data = saved(
        file, linear("lora_unet_a"), metadata={"modelspec.hash_sha256": digest}
    ).read_bytes()
    assert kinds(inspect_file(file)) == []
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert kinds(inspect_file(file)) == ["hash-differs"]


def test_dora_and_foreign_tensors_are_named(file: Path) -> None:
    extra = {
        "lora_unet_a.dora_scale": np.ones((6, 1), np.float16),
        "emb_params": np.ones(3, np.float16),
    }
    found = inspect_file(saved(file, linear("lora_unet_a"), extra))
    assert kinds(found) == ["dora", "unknown-keys"]
    assert "emb_params" in found.problems[1].what


# ---- what is refused


def raw(tensors: Mapping[str, tuple[str, list[int], bytes]], **header: Any) -> bytes:
    """Return a safetensors file made by hand; `header` entries are added or replace tensors."""
    layout: dict[str, Any] = {}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        layout[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    return framed(json.dumps({**layout, **header}).encode(), body)


def framed(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def entry(key: str = "a", dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> bytes:
    layout = {key: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}
    return framed(json.dumps(layout).encode(), bytes(4))


def many(count: int) -> bytes:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return framed(json.dumps(dict.fromkeys(map(str, range(count)), empty)).encode())


WHOLE = save(
    {"lora_unet_a.lora_down.weight": np.ones((4, 8)), "lora_unet_a.lora_up.weight": np.ones((8, 4))}
)
REFUSED = {
    "empty": (b"", "not a safetensors file"),
    "short": (b"\x01\x00\x00", "not a safetensors file"),
    "text": (b"<html>not found</html>", "not a safetensors file"),
    "huge header": (struct.pack("<Q", 2**63) + b"{}", "not a safetensors file"),
    "cut in the header": (WHOLE[:60], "cut off"),
    "cut in the tensors": (WHOLE[:-1], "cut off"),
    "longer": (WHOLE + b"x", "not fully covered"),
    "zip pickle": (b"PK\x03\x04\x00\x00\x08\x08" + bytes(60), "pickle"),
    "pickle": (b"\x80\x02}q\x00." + bytes(60), "pickle"),
    "not JSON": (framed(b"{'a': 1}"), "JSON"),
    "not UTF-8": (framed(b'{"\xff\xfe": 1}'), "not a safetensors file"),
    "deep": (framed(b"[" * 200_000), "JSON"),
    "list": (framed(b"[1, 2]"), "JSON"),
    "crowded": (framed(b"[" * 400_001), "more tensors than"),
    "too many tensors": (many(100_001), "more than 100,000 tensors"),
    "long name": (entry(key="a" * 1001), "of 1,000 characters"),
    "metadata number": (framed(b'{"__metadata__": {"a": 1}}'), "JSON"),
    "unknown dtype": (entry(dtype="F8_E8M0", shape=(4,)), "'a' in 1 dimensions of F8_E8M0"),
    "dimensions": (entry(shape=(1,) * 17), "'a' in 17 dimensions"),
    "negative shape": (entry(shape=(-1,)), "JSON"),
    "shape too large": (entry(shape=(2**62, 2**62)), "not a safetensors file"),
    "hole": (entry(offsets=(4, 8)), "`a`"),
    "no LoRA": (save({"model.diffusion_model.out.weight": np.ones(3)}), "no LoRA"),
    "no tensors": (framed(b"{}"), "no tensors, but no LoRA"),
    "LoHa": (
        save({"lora_unet_a.hada_w1_a": np.ones((3, 3)), "lora_unet_a.alpha": np.ones(())}),
        "no LoRA",
    ),
    "halves only": (save({"lora_unet_a.lora_down.weight": np.ones((3, 3))}), "no LoRA"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_adapter_is_refused_in_one_line(name: str, file: Path) -> None:
    content, expected = REFUSED[name]
    file.write_bytes(content)
    with pytest.raises(InputError) as raised:
        inspect_file(file)
    assert raised.value.exit_code == 3
    assert expected in str(raised.value)
    assert str(file) in str(raised.value)
    assert len(str(raised.value)) < 500


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        inspect_file(tmp_path / "absent.safetensors")
    with pytest.raises(InputError, match="is no file"):
        inspect_file(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.timeout(10)
def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(InputError, match="is no file"):
        inspect_file(tmp_path / "pipe.safetensors")


GOOD = save(
    dict(linear(kohya(f"{BLOCK}.attn2.to_k"), inputs=768)),
    metadata={"ss_base_model_version": "sd_v1", "ss_network_alpha": "2.0"},
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_headers_are_described_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    file = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    data = bytearray(GOOD)
    for position, value in changes:
        data[position] = value
    file.write_bytes(data)
    with suppress(InputError):
        json.dumps(inspect_file(file).to_json())


def test_inspecting_imports_no_torch() -> None:
    code = "import sys, lora_trainer.lora_file.inspect; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
