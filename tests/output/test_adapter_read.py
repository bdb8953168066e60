"""Adapter files of other trainers: modules, kinds and strength, as their own readers take them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from lora_trainer.common.errors import InputError
from lora_trainer.families import family
from lora_trainer.families.base import FileFormat
from lora_trainer.lora.tensors import ModuleTensors, update
from lora_trainer.lora_file.header import HeaderEntry
from lora_trainer.lora_file.names import file_names
from lora_trainer.lora_file.read import SpeltAdapter
from lora_trainer.lora_file.read_tensors import open_adapter, read_tensors
from lora_trainer.lora_file.write import export_bytes
from tests.fakes.adapters import Draws, adapter_for, draw_module, small_adapter, with_magnitude

FAMILY = family("sd15")
BLOCK = "down_blocks.0.attentions.0.transformer_blocks.0"
Q, OUT, CONV = f"{BLOCK}.attn1.to_q", f"{BLOCK}.attn1.to_out.0", "mid_block.resnets.0.conv1"
TEXT = "text_model.encoder.layers.0.mlp.fc1"
MODULES = {"denoiser": [Q, OUT, CONV], "text_encoder": [TEXT]}
NAMES = file_names(FAMILY, MODULES)
FLAT = "lora_unet_" + Q.replace(".", "_")
draw = Draws()
DOWN, UP = draw(4, 8), draw(6, 4)
KEY = f"denoiser.{Q}"


def pair(down: str, up: str, **extra: Tensor) -> dict[str, Tensor]:
    return {down: DOWN, up: UP, **extra}


def read(tensors: Mapping[str, Tensor], **metadata: str) -> dict[str, ModuleTensors]:
    return read_tensors(save(dict(tensors), metadata=metadata or None), names=NAMES)


def only(tensors: Mapping[str, Tensor], **metadata: str) -> ModuleTensors:
    (module,) = read(tensors, **metadata).values()
    return module


# ---- spellings and strength


@pytest.mark.parametrize(
    ("tensors", "key", "scale"),
    [
        (
            pair(f"{FLAT}.lora_down.weight", f"{FLAT}.lora_up.weight")
            | {f"{FLAT}.alpha": torch.tensor(1.5)},
            KEY,
            0.375,
        ),
        (pair(f"{FLAT}.lora_down.weight", f"{FLAT}.lora_up.weight"), KEY, 1.0),
        (pair(f"unet.{Q}.lora_A.weight", f"unet.{Q}.lora_B.weight"), KEY, 1.0),
        (
            pair(f"unet.{Q}.lora_A.weight", f"unet.{Q}.lora_B.weight")
            | {f"unet.{Q}.alpha": torch.tensor(8, dtype=torch.int64)},
            KEY,
            2.0,
        ),
        (
            pair(
                f"unet.{BLOCK}.attn1.processor.to_out_lora.down.weight",
                f"unet.{BLOCK}.attn1.processor.to_out_lora.up.weight",
            ),
            f"denoiser.{OUT}",
            1.0,
        ),
        (pair(f"unet.{Q}.lora.down.weight", f"unet.{Q}.lora.up.weight"), KEY, 1.0),
        (
            pair(
                f"base_model.model.{Q}.lora_A.default.weight",
                f"base_model.model.{Q}.lora_B.default.weight",
            ),
            KEY,
            1.0,
        ),
        (
            pair(f"diffusion_model.{Q}.lora_A.weight", f"diffusion_model.{Q}.lora_B.weight"),
            KEY,
            1.0,
        ),
        (
            pair(
                f"text_encoder.{TEXT}.lora_linear_layer.down.weight",
                f"text_encoder.{TEXT}.lora_linear_layer.up.weight",
            ),
            f"text_encoder.{TEXT}",
            1.0,
        ),
    ],
)
def test_spellings_of_every_trainer(tensors: Mapping[str, Tensor], key: str, scale: float) -> None:
    found = read(tensors)
    assert found.keys() == {key}
    module = found[key]
    assert (module.kind, module.rank, module.scale) == ("lora", 4, scale)
    assert torch.equal(module.tensors["down"], DOWN)
    assert torch.equal(module.tensors["up"], UP)


STATED = {
    "unet.r": 4,
    "unet.lora_alpha": 2,
    "unet.alpha_pattern": {f"^{OUT}".replace(".", "\\."): 8, "conv1": 1},
    "text_encoder.lora_alpha": 12,
}


@pytest.mark.parametrize(
    ("module", "scale"),
    [
        (f"unet.{Q}", 0.5),
        (f"unet.{OUT}", 2.0),
        (f"unet.{CONV}", 0.25),
        (f"text_encoder.{TEXT}", 3.0),
    ],
)
def test_alphas_that_diffusers_states_in_the_header(module: str, scale: float) -> None:
    tensors = pair(f"{module}.lora_A.weight", f"{module}.lora_B.weight")
    assert only(tensors, lora_adapter_metadata=json.dumps(STATED)).scale == scale


def test_rslora_in_the_header() -> None:
    stated = json.dumps({"unet.lora_alpha": 2, "unet.use_rslora": True})
    tensors = pair(f"unet.{Q}.lora_A.weight", f"unet.{Q}.lora_B.weight")
    assert only(tensors, lora_adapter_metadata=stated).scale == 1.0


@pytest.mark.parametrize(
    "odd", ["[1", "[]", "null", '{"unet.lora_alpha": "2"}', '{"unet.lora_alpha": NaN}']
)
def test_what_the_header_states_unreadably_is_not_stated(odd: str) -> None:
    tensors = pair(f"unet.{Q}.lora_A.weight", f"unet.{Q}.lora_B.weight")
    assert only(tensors, lora_adapter_metadata=odd).scale == 1.0


@pytest.mark.timeout(20)
def test_a_hostile_pattern_does_not_hang() -> None:
    evil = {"unet.lora_alpha": 2, "unet.alpha_pattern": {"(a|a)*" * 20 + "$": 1, "(.+)+x": 3}}
    tensors = pair(f"unet.{Q}.lora_A.weight", f"unet.{Q}.lora_B.weight")
    assert only(tensors, lora_adapter_metadata=json.dumps(evil)).scale == 0.5


def test_peft_has_its_settings_in_a_file_of_their_own(tmp_path: Path) -> None:
    tensors = pair(f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight")
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(save(tensors))
    assert read_tensors(file, names=NAMES)[KEY].scale == 1.0
    config = {"r": 4, "lora_alpha": 32, "alpha_pattern": {}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read_tensors(file, names=NAMES)[KEY].scale == 8.0


# ---- kinds


def test_lycoris_kinds() -> None:
    flat = "lora_unet_" + CONV.replace(".", "_")
    loha = {
        f"{flat}.hada_w{n}_{s}": draw(*shape)
        for n in (1, 2)
        for s, shape in (("a", (6, 2)), ("b", (2, 72)))
    }
    module = only({**loha, f"{flat}.alpha": torch.tensor(1.0)})
    assert (module.kind, module.rank, module.scale) == ("loha", 2, 0.5)
    lokr = {f"{flat}.lokr_w1": draw(2, 4), f"{flat}.lokr_w2": draw(3, 2, 3, 3)}
    module = only({**lokr, f"{flat}.alpha": torch.tensor(16.0)})
    assert (module.kind, module.rank, module.scale) == ("lokr", 16, 1.0), "alpha counts for nothing"
    thin = {
        f"{flat}.lokr_w1": draw(2, 4),
        f"{flat}.lokr_w2_a": draw(3, 5),
        f"{flat}.lokr_w2_b": draw(5, 18),
    }
    module = only({**thin, f"{flat}.alpha": torch.tensor(10.0)})
    assert (module.kind, module.rank, module.scale) == ("lokr", 5, 2.0)
    module = only({f"{flat}.oft_blocks": draw(2, 3, 3), f"{flat}.alpha": torch.tensor(0.0)})
    assert (module.kind, module.rank, module.scale) == ("oft", 3, 1.0)


def test_the_middle_matrix_of_lycoris_is_multiplied_into_the_first() -> None:
    flat = "lora_unet_" + CONV.replace(".", "_")
    down, mid, up = draw(2, 3, 1, 1), draw(4, 2, 3, 3), draw(5, 4, 1, 1)
    module = only(
        {
            f"{flat}.lora_down.weight": down,
            f"{flat}.lora_mid.weight": mid,
            f"{flat}.lora_up.weight": up,
        }
    )
    wanted = torch.einsum("or,rjhw,ji->oihw", up[:, :, 0, 0], mid, down[:, :, 0, 0])
    assert (module.rank, module.tensors.keys()) == (4, {"down", "up"})
    torch.testing.assert_close(update(module).float(), wanted)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("dora_scale", (6, 1)),
        ("lora_magnitude_vector", (6,)),
        ("lora_magnitude_vector", (1, 6, 1, 1)),
    ],
)
def test_magnitudes_by_output(name: str, shape: tuple[int, ...]) -> None:
    magnitude = draw(6)
    tensors = pair(f"unet.{Q}.lora_A.weight", f"unet.{Q}.lora_B.weight")
    module = only({**tensors, f"unet.{Q}.{name}": magnitude.reshape(shape)})
    assert module.dora and torch.equal(module.tensors["magnitude"], magnitude)


# ---- our own files come back as they went


@pytest.mark.parametrize("format", ["kohya", "diffusers"])
@pytest.mark.parametrize("dora", [False, True])
def test_our_own_files_come_back(format: FileFormat, dora: bool) -> None:
    network = torch.nn.ModuleDict(
        {"linear": torch.nn.Linear(8, 6), "conv": torch.nn.Conv2d(4, 6, 3)}
    )
    tensors = adapter_for("denoiser", network, ["linear", "conv"], dora=dora, scale=0.7)
    data = export_bytes(
        tensors, family=FAMILY, format=format, precision="fp32", metadata={"a": "b"}
    )
    names = file_names(FAMILY, {"denoiser": ["linear", "conv"]})
    for key, module in read_tensors(data, names=names).items():
        weight = network.get_parameter(f"{key.partition('.')[2]}.weight").detach()
        torch.testing.assert_close(
            update(module, weight), update(tensors[key], weight), rtol=1e-5, atol=1e-6
        )


def test_modules_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(
        export_bytes(
            small_adapter(), family=FAMILY, format="kohya", precision="fp16", metadata={"a": "b"}
        )
    )
    modules = [key.partition(".")[2] for key in small_adapter()]
    with open_adapter(file, names=file_names(FAMILY, {"denoiser": modules})) as adapter:
        assert (len(adapter), adapter.metadata["a"]) == (3, "b")
        assert list(adapter) == sorted(small_adapter())
        assert f"denoiser.{modules[0]}" in adapter and "denoiser.other" not in adapter
        read: list[str] = []
        real = SpeltAdapter.array

        def counting(spelt: SpeltAdapter, entry: HeaderEntry) -> Any:
            read.append(entry.key)
            return real(spelt, entry)

        monkeypatch.setattr(SpeltAdapter, "array", counting)
        iterator = iter(adapter.items())
        assert f"denoiser.{modules[0]}" in adapter
        assert read == [], "nothing before it is asked for"
        _, module = next(iterator)
        assert len(read) == 3 and module.tensors["down"].dtype == torch.float16


# ---- refused


def spoilt(**changes: Any) -> dict[str, Tensor]:
    return {**pair(f"unet.{Q}.lora_A.weight", f"unet.{Q}.lora_B.weight"), **changes}


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (
            spoilt(**{"unet.other.lora_A.weight": DOWN, "unet.other.lora_B.weight": UP}),
            "1 of 2 modules that the base model lacks, first 'unet.other'",
        ),
        ({f"unet.{Q}.lora_A.weight": DOWN}, "lacks tensors"),
        ({f"unet.{Q}.alpha": torch.tensor(1.0)}, "lacks tensors"),
        (spoilt(emb_params=torch.ones(2)), "1 tensors of no known kind, first 'emb_params'"),
        (spoilt(**{f"unet.{Q}.lora_B.bias": torch.ones(5)}), "5 numbers of bias for 6 outputs"),
        (
            spoilt(**{f"{FLAT}.lora_down.weight": DOWN, f"{FLAT}.lora_up.weight": UP}),
            "names one module twice",
        ),
        (
            spoilt(**{f"unet.{Q}.lora_A.default.weight": DOWN}),
            "two tensors for the down",
        ),
        (spoilt(**{f"unet.{Q}.lora_B.weight": draw(6, 5)}), "different rank"),
        (spoilt(**{f"unet.{Q}.dora_scale": torch.ones(1, 6)}), "6 magnitudes for 8 inputs"),
        (spoilt(**{f"unet.{Q}.dora_scale": torch.ones(8, 1)}), "8 magnitudes for 6 outputs"),
        (spoilt(**{f"unet.{Q}.alpha": torch.tensor(float("nan"))}), "alpha of nan"),
        (spoilt(**{f"unet.{Q}.alpha": torch.ones(2)}), "cannot be used"),
        ({f"unet.{Q}.oft_blocks": torch.ones(2, 3, 4)}, "rotations of shape"),
        ({f"unet.{Q}.oft_blocks": torch.ones(9, 3, 2, 2)}, "is a BOFT of 9 rounds"),
        ({}, "holds no adapter"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    tensors: Mapping[str, Tensor], reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "odd.safetensors"
    file.write_bytes(save({key: tensor.clone() for key, tensor in tensors.items()}))
    for source in (file, file.read_bytes()):
        with pytest.raises(InputError, match=reason) as raised:
            read_tensors(source, names=NAMES)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"PK\3\4" + bytes(30), save({"a": DOWN})[:-1]])
def test_what_is_no_whole_file_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(content)
    for source in (file, content):
        with pytest.raises(InputError):
            read_tensors(source, names=NAMES)
    with pytest.raises(InputError, match="does not exist"):
        read_tensors(tmp_path / "absent", names=NAMES)


def test_dora_survives_every_format() -> None:
    """The magnitude's shape differs by format and reader; its values do not."""
    module = with_magnitude(draw_module((6, 8)), torch.ones(6, 8))
    for format in FAMILY.formats.written:
        data = export_bytes(
            {KEY: module}, family=FAMILY, format=format, precision="fp32", metadata={}
        )
        found = read_tensors(data, names=NAMES)[KEY]
        assert torch.equal(found.tensors["magnitude"], module.tensors["magnitude"])
