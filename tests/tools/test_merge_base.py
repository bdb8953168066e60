"""Adapters in the weights of a base: base plus deltas, everything else byte for byte, or nothing at all."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.lora.low_rank import lora
from lora_trainer.tools.adapters import Weighted
from lora_trainer.tools.base_weights import open_base
from lora_trainer.tools.merge_base import bake
from scripts.readers.networks import with_places
from tests.fakes.family_bases import CPU, base_of, copy_of, denoiser_of, facts_at, facts_of
from tests.fakes.ldm_file import write_checkpoint
from tests.fakes.runs import contents
from tests.fakes.tool_files import adapter_of, deltas, networks_of, saved

UNETS = ["sd15", "sd2", "sdxl"]
MANY = "diffusion_pytorch_model.safetensors.index.json"


def adapter_file(path: Path, name: str = "sd15", **options: Any) -> Path:
    own = families.family(name).formats.written[0]
    chosen = dict(list(adapter_of(name, **options).items())[::2])
    return saved(path, name, chosen, format=own)


def checkpoint(path: Path, name: str, **options: Any) -> Path:
    return write_checkpoint(base_of(name), path, families.family(name).texts, **options)


def weights(base: Path) -> dict[str, Tensor]:
    with open_base(str(base)) as opened:
        return {key: place.weight().clone() for key, place in opened.places.items()}


def largest_error(base: Path, baked: Path, files: Mapping[Path, float]) -> float:
    """Return max |baked - (base + sum of weighted deltas)| over all layers."""
    before, after = weights(base), weights(baked)
    assert before.keys() == after.keys()
    wanted = {key: value.double() for key, value in before.items()}
    for file, weight in files.items():
        for key, value in deltas(file, base).items():
            wanted[key] = wanted[key] + weight * value
    assert all(after[key].dtype == before[key].dtype for key in wanted)
    return max(float((after[key].double() - wanted[key]).abs().max()) for key in wanted)


def inputs(files: Mapping[Path, float]) -> list[Weighted]:
    return [Weighted(file=file, weight=weight) for file, weight in files.items()]


# ---- folders


@pytest.mark.parametrize("name", families.MODULES)
def test_a_folder_gets_the_sum_of_the_deltas(name: str, tmp_path: Path) -> None:
    files = {
        adapter_file(tmp_path / "a.safetensors", name, text=True, scale=0.7): 0.6,
        adapter_file(tmp_path / "b.safetensors", name, rank=2): -1.1,
    }
    done = bake(inputs(files), base=str(base_of(name)), output=tmp_path / "baked")
    assert largest_error(base_of(name), done.file, files) < 1e-6
    assert families.detect(done.file).name == done.family == name
    before, after = contents(base_of(name)), contents(done.file)
    changed = {Path(file).parts[0] for file in before if before[file] != after[file]}
    assert before.keys() == after.keys() and changed <= {"unet", "transformer", *networks_of(name)}
    assert not done.notes


@pytest.mark.parametrize("options", [{"dora": True}, {"kind": "oft"}, {"kind": "loha"}])
def test_every_kind_goes_by_the_weights_of_the_base(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """The second of two DoRAs sees the base too, not what the first has made of it."""
    files = {
        adapter_file(tmp_path / "a.safetensors", **options): 0.6,
        adapter_file(tmp_path / "b.safetensors", **options, size=0.3): 1.0,
    }
    done = bake(inputs(files), base=str(base_of("sd15")), output=tmp_path / "baked")
    assert largest_error(base_of("sd15"), done.file, files) < 1e-6


# peft says it of any second adapter.
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
@pytest.mark.parametrize("name", ["sd15", "flux"])
def test_diffusers_draws_from_the_baked_base_what_it_draws_with_the_adapters(
    name: str, tmp_path: Path
) -> None:
    files = {
        adapter_file(tmp_path / "a.safetensors", name, text=name == "sd15", scale=0.7): 0.6,
        adapter_file(tmp_path / "b.safetensors", name, rank=2): 0.8,
    }
    done = bake(inputs(files), base=str(base_of(name)), output=tmp_path / "baked")
    family = families.family(name)
    loaded = family.plain_pipeline(facts_of(name), dtype=torch.float32, device=CPU)
    for number, file in enumerate(files):
        loaded.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name=f"n{number}")
    loaded.set_adapters(["n0", "n1"], list(files.values()))
    plain = family.plain_pipeline(facts_at(done.file), dtype=torch.float32, device=CPU)
    untouched = family.plain_pipeline(facts_of(name), dtype=torch.float32, device=CPU)
    found = [drawn(pipeline, family, name) for pipeline in (plain, loaded, untouched)]
    assert float((found[0] - found[1]).abs().max()) < 1e-4
    assert float((found[0] - found[2]).abs().max()) > 1e-2, "the adapters must matter"


def drawn(pipeline: Any, family: families.Family, name: str) -> Tensor:
    pipeline.set_progress_bar_config(disable=True)
    side = max(2 * facts_of(name).bucket_step_px, 16)
    return torch.as_tensor(
        pipeline(
            **family.pipeline_arguments(pipeline, facts_of(name), "a toy", "", guidance_scale=3.0),
            generator=torch.Generator().manual_seed(1),
            num_inference_steps=2,
            width=side,
            height=side,
            output_type="np",
        ).images
    )


def test_shards_stay_shards(tmp_path: Path) -> None:
    base = sharded(tmp_path / "base")
    files = {adapter_file(tmp_path / "a.safetensors", text=True): 0.6}
    done = bake(inputs(files), base=str(base), output=tmp_path / "baked")
    assert largest_error(base, done.file, files) < 1e-6
    assert contents(base).keys() == contents(done.file).keys()
    index = Path("unet") / MANY
    assert (base / index).read_bytes() == (done.file / index).read_bytes()
    whole = UNet2DConditionModel.from_pretrained(done.file / "unet")
    opened = whole.state_dict()
    for key, value in weights(done.file).items():
        component, _, module = key.partition(".")
        assert component != "denoiser" or torch.equal(opened[f"{module}.weight"], value), key


def sharded(folder: Path) -> Path:
    base = copy_of("sd15", folder)
    unet = UNet2DConditionModel.from_pretrained(base / "unet")
    shutil.rmtree(base / "unet")
    unet.save_pretrained(base / "unet", max_shard_size="40KB")
    assert len(list((base / "unet").glob("*.safetensors"))) > 3
    return base


def test_what_would_lack_the_adapters_is_left_out_and_named(tmp_path: Path) -> None:
    base = copy_of("sd15", tmp_path / "base")
    (base / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"old weights")
    (base / "whole.ckpt").write_bytes(b"all of it")
    (base / "vae" / "kept.bin").write_bytes(b"not changed by adapters")
    (base / "README.md").write_text("kept")
    (base / ".cache").mkdir()
    file = adapter_file(tmp_path / "a.safetensors")
    done = bake(inputs({file: 1.0}), base=str(base), output=tmp_path / "baked")
    left = contents(base).keys() - contents(done.file).keys()
    assert left == {"unet/diffusion_pytorch_model.bin", "whole.ckpt"}
    assert len(done.notes) == 2 and all("was left out" in note for note in done.notes)
    assert (done.file / "vae" / "kept.bin").read_bytes() == b"not changed by adapters"


def test_both_variants_of_a_component_are_changed(tmp_path: Path) -> None:
    base = copy_of("sd15", tmp_path / "base")
    whole = base / "unet" / "diffusion_pytorch_model.safetensors"
    half = whole.with_name("diffusion_pytorch_model.fp16.safetensors")
    save_file({key: value.half() for key, value in load_file(whole).items()}, half)
    file = adapter_file(tmp_path / "a.safetensors")
    done = bake(inputs({file: 1.0}), base=str(base), output=tmp_path / "baked")
    wide, narrow = (load_file(done.file / "unet" / each.name) for each in (whole, half))
    for key, value in wide.items():
        assert narrow[key].dtype == torch.float16
        assert torch.allclose(narrow[key].float(), value, atol=2e-3), key


# ---- checkpoints in one file


@pytest.mark.parametrize("name", UNETS)
def test_a_checkpoint_gets_the_sum_of_the_deltas(name: str, tmp_path: Path) -> None:
    """Of SD 2 and SDXL the second text encoder has query, key and value in one matrix."""
    base = checkpoint(tmp_path / "base.safetensors", name, marks=("v_pred",))
    files = {
        adapter_file(tmp_path / "a.safetensors", name, text=True, scale=0.7): 0.6,
        adapter_file(tmp_path / "b.safetensors", name, text=True, rank=2): -1.1,
    }
    done = bake(inputs(files), base=str(base), output=tmp_path / "baked.safetensors")
    assert largest_error(base, done.file, files) < 1e-6
    before, after = load_file(base), load_file(done.file)
    assert list(before) == list(after), "names in their order"
    touched = {key for key in before if not torch.equal(before[key], after[key])}
    assert touched and all(not key.startswith("first_stage_model.") for key in touched)
    assert all(key.endswith(("weight", "in_proj_weight")) for key in touched)
    assert "v_pred" in after


@pytest.mark.parametrize("name", UNETS)
def test_a_checkpoint_and_its_folder_become_the_same_model(name: str, tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base.safetensors", name)
    file = adapter_file(tmp_path / "a.safetensors", name, text=True)
    single = bake(inputs({file: 0.7}), base=str(base), output=tmp_path / "one.safetensors")
    folder = bake(inputs({file: 0.7}), base=str(base_of(name)), output=tmp_path / "many")
    one, many = weights(single.file), weights(folder.file)
    shared = one.keys() & many.keys()
    assert {key for key in many if ".text_projection" not in key} <= shared
    for key in shared:
        assert torch.equal(one[key].flatten(), many[key].flatten()), key


LAST_NORM = "denoiser.norm_out.linear"


def transformer(path: Path, name: str) -> Path:
    """Write a tiny base's transformer as its publisher does, q, k and v in one weight, shift before scale."""
    network = denoiser_of(name)
    tensors = with_places(name, network, {}).original()
    if name != "qwen":  # which has diffusers' names throughout
        last = network.state_dict()["norm_out.linear.weight"]
        tensors["final_layer.adaLN_modulation.1.weight"] = last.roll(len(last) // 2, 0)
    save_file(
        {f"model.diffusion_model.{key}": each.contiguous() for key, each in tensors.items()}, path
    )
    return path


@pytest.mark.parametrize("name", ["flux", "sd3", "qwen"])
def test_a_transformer_in_one_file_and_its_folder_become_the_same(
    name: str, tmp_path: Path
) -> None:
    base = transformer(tmp_path / "base.safetensors", name)
    before = weights(base)[LAST_NORM]
    modules = dict(list(adapter_of(name).items())[::2])
    up, down = torch.randn(len(before), 2), torch.randn(2, before.shape[1])
    modules[LAST_NORM] = lora(up=up, down=down, inputs=(before.shape[1],), scale=1.0)
    own = families.family(name).formats.written[0]
    file = saved(tmp_path / "a.safetensors", name, modules, format=own)
    single = bake(inputs({file: 0.7}), base=str(base), output=tmp_path / "one.safetensors")
    folder = bake(inputs({file: 0.7}), base=str(base_of(name)), output=tmp_path / "many")
    one, many = weights(single.file), weights(folder.file)
    assert modules.keys() <= one.keys() <= many.keys()
    assert [key for key in one if not torch.equal(one[key], many[key])] == []
    assert not torch.equal(one[LAST_NORM], before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_weights_keep_their_dtype_and_are_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base.safetensors", "sd15", dtype=dtype)
    files = {
        adapter_file(tmp_path / "a.safetensors", scale=0.7): 0.6,
        adapter_file(tmp_path / "b.safetensors", rank=2): -1.1,
    }
    done = bake(inputs(files), base=str(base), output=tmp_path / "baked.safetensors")
    before, after = weights(base), weights(done.file)
    added = [(weight, deltas(file, base)) for file, weight in files.items()]
    for key in added[0][1]:
        wanted = before[key].float()
        for weight, each in added:
            wanted = wanted + weight * each[key].float()
        assert after[key].dtype == dtype
        off = (after[key].float() - wanted.to(dtype).float()).abs()
        assert float((off > 0).float().mean()) < 0.01, "but for ties, the rounded sum"


def test_hashes_in_a_header_are_those_of_the_new_tensors(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base.safetensors", "sd15")
    stated = {"modelspec.hash_sha256": "0xold", "modelspec.title": "mine"}
    save_file(load_file(base), base, metadata=stated)
    file = adapter_file(tmp_path / "a.safetensors")
    done = bake(inputs({file: 1.0}), base=str(base), output=tmp_path / "baked.safetensors")
    with safe_open(done.file, framework="pt") as opened:
        found = opened.metadata()
    assert found.keys() == {*stated, "modelspec.merged_from"}
    assert found["modelspec.merged_from"] == "base, a"
    assert found["modelspec.title"] == "mine"
    assert len(found["modelspec.hash_sha256"]) == 66


# ---- refusals: nothing is left behind


def refused(tmp_path: Path, kind: type[Exception], match: str, **asked: Any) -> None:
    before = contents(tmp_path)
    with pytest.raises(kind, match=match):
        bake(**asked)
    assert contents(tmp_path) == before
    assert not [path for path in tmp_path.rglob(".tmp-*")]


def test_a_sum_beyond_the_dtype_is_refused(tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.float8_e4m3fn):
        base = checkpoint(tmp_path / "base.safetensors", "sd15", dtype=dtype)
        file = adapter_file(tmp_path / "a.safetensors", size=3.0)
        refused(tmp_path, RequestError, "its dtype ends at", base=str(base),
                inputs=inputs({file: 1e5}), output=tmp_path / "no.safetensors")  # fmt: skip


def test_another_base_is_refused(tmp_path: Path) -> None:
    file = adapter_file(tmp_path / "a.safetensors", "sd2")
    refused(tmp_path, InputError, "made for|lacks", base=str(base_of("sdxl")),
            inputs=inputs({file: 1.0}), output=tmp_path / "no")  # fmt: skip
    file = adapter_file(tmp_path / "b.safetensors", "sd15")
    refused(tmp_path, InputError, "the layer is 64x64", base="embedded",
            inputs=inputs({file: 1.0}), output=tmp_path / "no")  # fmt: skip


def test_a_share_of_inputs_that_the_layer_does_not_have_is_refused(tmp_path: Path) -> None:
    """The size of an IA3 is not in its header."""
    name = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    file = tmp_path / "a.safetensors"
    save_file({f"{name}.weight": torch.ones(7), f"{name}.on_input": torch.tensor(1.0)}, file)
    refused(tmp_path, InputError, "in another size", base=str(base_of("sd15")),
            inputs=inputs({file: 1.0}), output=tmp_path / "no")  # fmt: skip


@pytest.mark.parametrize("kind", ["integers", "scales"])
def test_a_quantised_base_is_refused(kind: str, tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base.safetensors", "sd15")
    tensors = load_file(base)
    name = next(key for key in tensors if key.endswith("attn1.to_q.weight"))
    if kind == "integers":
        tensors[name] = tensors[name].to(torch.int8)
    else:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name.removesuffix('weight')}scale_weight"] = torch.tensor(0.5)
    save_file(tensors, base)
    file = adapter_file(tmp_path / "a.safetensors")
    refused(tmp_path, InputError, "is quantised", base=str(base), inputs=inputs({file: 1.0}),
            output=tmp_path / "no.safetensors")  # fmt: skip


def test_nothing_is_replaced_that_the_result_is_made_from(tmp_path: Path) -> None:
    base = copy_of("sd15", tmp_path / "base")
    inside = adapter_file(base / "a.safetensors")
    file = adapter_file(tmp_path / "b.safetensors")
    single = checkpoint(tmp_path / "one.safetensors", "sd15")
    for asked, match in (
        ({"output": base}, "lies in the base"),
        ({"output": base / "new"}, "lies in the base"),
        ({"output": single, "base": str(single)}, "would be replaced"),
        ({"output": file, "base": str(single)}, "would be replaced"),
        ({"output": base, "base": str(base_of("sd15")), "inputs": inputs({inside: 1.0})},
         "would be replaced"),
    ):  # fmt: skip
        defaults = {"base": str(base), "inputs": inputs({file: 1.0}), "force": True}
        refused(tmp_path, RequestError, match, **{**defaults, **asked})


def test_outputs_that_cannot_be_are_refused(tmp_path: Path) -> None:
    folder, file = base_of("sd15"), adapter_file(tmp_path / "a.safetensors")
    single = checkpoint(tmp_path / "one.safetensors", "sd15")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("dear diary")
    for base, output, force, match in (
        (folder, "no.safetensors", False, "names a file"),
        (single, "no", False, "does not end with .safetensors"),
        (single, "a.safetensors", False, "exists already"),
        (folder, "full", False, "exists already"),
        (folder, "full", True, "will not replace it"),
        (folder, "absent/new", False, "does not exist"),
    ):
        refused(tmp_path, RequestError, match, base=str(base), output=tmp_path / output,
                inputs=inputs({file: 1.0}), force=force)  # fmt: skip


def test_force_replaces_a_base_as_a_whole(tmp_path: Path) -> None:
    file = adapter_file(tmp_path / "a.safetensors")
    old = copy_of("sd15", tmp_path / "baked")
    (old / "old.txt").touch()
    bake(inputs({file: 1.0}), base=str(base_of("sd15")), output=old, force=True)
    assert not (old / "old.txt").exists()
    assert largest_error(base_of("sd15"), old, {file: 1.0}) < 1e-6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "baked"]


def test_a_folder_that_cannot_take_its_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = adapter_file(tmp_path / "a.safetensors")
    copy_of("sd15", tmp_path / "baked")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.startswith(".tmp-") and not self.name.endswith("-old"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    refused(tmp_path, Exception, "Input/output error", base=str(base_of("sd15")),
            inputs=inputs({file: 1.0}), output=tmp_path / "baked", force=True)  # fmt: skip
