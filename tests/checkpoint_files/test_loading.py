"""Text encoders in files of their own and quantised files load to the weights that stand in them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.base import BaseFacts
from lora_trainer.families.base_files.base_folder import (
    read_header,
    read_tensors,
    refuse_quantised,
    weights,
)
from lora_trainer.families.flow import FlowFamily
from lora_trainer.families.locate import describe, with_choices
from tests.checkpoint_files import layouts
from tests.checkpoint_files.cases import Case
from tests.checkpoint_files.files import write
from tests.fakes.family_bases import CPU, base_of

FLOWS = [name for name in families.MODULES if isinstance(families.family(name), FlowFamily)]


def text_weights(facts: BaseFacts) -> Mapping[str, Tensor]:
    encoder = families.family(facts.family).load_text_encoder(
        facts, dtype=torch.float32, device=CPU
    )
    return {
        f"{component}.{name}": tensor
        for component, network in encoder.networks.items()
        for name, tensor in network.state_dict().items()
    }


def encoder_copies(name: str, folder: Path) -> list[str]:
    """Copy the text encoders of a tiny base to files whose names say nothing, the last encoder first."""
    family = families.family(name)
    assert isinstance(family, FlowFamily)
    files = []
    for number, component in enumerate(reversed([*family.text_folders])):
        (source,) = weights(base_of(name) / component)
        files.append(str(shutil.copy(source, folder / f"{number}.safetensors")))
    return files


@pytest.mark.parametrize("name", FLOWS)
def test_encoders_are_found_by_what_they_are(name: str, tmp_path: Path) -> None:
    files = encoder_copies(name, tmp_path)
    settings = BaseSettings(model=str(base_of(name)), text_encoders=tuple(files))
    facts, plain = describe(settings), describe(BaseSettings(model=str(base_of(name))))
    family = families.family(name)
    assert {str(path) for path in facts.located.text.values()} == set(files)
    assert facts.parts == plain.parts
    assert set(files) <= set(map(str, family.parts(facts.located)["text_encoder"]))
    read, wanted = text_weights(facts), text_weights(plain)
    assert read.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(read[key], wanted[key])] == []


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_families_without_encoder_files_say_so(name: str, tmp_path: Path) -> None:
    settings = BaseSettings(
        model=str(base_of(name)), text_encoders=(str(tmp_path / "a.safetensors"),)
    )
    with pytest.raises(InputError, match=f"family {name} reads its text encoders"):
        describe(settings)


def test_a_file_that_is_no_encoder_of_the_family_is_named(tmp_path: Path) -> None:
    vae = base_of("flux") / "vae" / "diffusion_pytorch_model.safetensors"
    (qwen,) = weights(base_of("zimage") / "text_encoder")
    for file, said in ((vae, "is a VAE"), (qwen, "is the text encoder Qwen3")):
        settings = BaseSettings(model=str(base_of("flux")), text_encoders=(str(file),))
        with pytest.raises(InputError, match=f"{said}.*family flux has clip_l, t5xxl"):
            describe(settings)


def test_scales_of_blocks_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    weight = torch.ones(4, 8).to(torch.float8_e4m3fn)
    save_file({"a.weight": weight, "a.weight_scale": torch.ones(4, 2)}, file)
    with pytest.raises(InputError, match="8 scales for the 4 rows of a.weight"):
        read_tensors(file, {"a.weight": "a.weight"}, dtype=torch.float32)
    save_file({"a.weight": torch.ones(4, 8, dtype=torch.uint8)}, file)
    with pytest.raises(InputError, match="is quantised"):
        refuse_quantised(file, read_header(file))


def test_gguf_is_read_to_its_values(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="optional: only GGUF bases need it")
    from gguf.quants import dequantize, quantize

    file = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(str(file), "flux")
    generator = torch.Generator().manual_seed(3)
    plain = {name: torch.randn(8, 64, generator=generator) for name in ("a.weight", "b.weight")}
    wanted = {"a.weight": plain["a.weight"]}
    writer.add_tensor("a.weight", plain["a.weight"].numpy())
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = quantize(plain["b.weight"].numpy(), kind)
    writer.add_tensor("b.weight", packed, raw_dtype=kind)
    wanted["b.weight"] = torch.from_numpy(dequantize(packed, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(file)
    assert {name: info.shape for name, info in header.items()} == dict.fromkeys(wanted, (8, 64))
    read = read_tensors(file, {name: name for name in wanted}, dtype=torch.float32)
    for name, tensor in wanted.items():
        torch.testing.assert_close(read[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_gguf_says_which_prediction_is_assumed(tmp_path: Path) -> None:
    case = Case("SD 2 GGUF", layouts.network("sd2"), "sd2", dtype="Q8_0", file="sd2.gguf")
    settings = BaseSettings(model=str(write(case, tmp_path)))
    facts = describe(settings)
    assert facts.prediction == "v_prediction" and facts.assumed is not None
    assert "taken for v_prediction" in facts.assumed.sentence
    assert "base.prediction=epsilon" in facts.assumed.setting
    chosen = settings.model_copy(update={"prediction": "epsilon"})
    facts = with_choices(facts, chosen, zero_terminal_snr=None)
    assert (facts.prediction, facts.assumed) == ("epsilon", None)
