"""Adapters in the weights of a base: base plus deltas, everything else byte for byte, or nothing at all."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.lora.low_rank import lora
from lora_trainer.lora_file.read_tensors import OpenAdapter
from lora_trainer.tools import merge_base
from lora_trainer.tools.base_weights import open_base
from lora_trainer.tools.merge import merge
from lora_trainer.tools.merge_base import bake
from scripts.readers.networks import with_places
from tests.fakes.family_bases import base_of, copy_of, denoiser_of
from tests.fakes.runs import contents
from tests.fakes.tool_files import (
    adapter_of,
    checkpoint,
    deltas,
    entries_of,
    networks_of,
    saved,
    weighted,
)

UNETS = ["sd15", "sd2", "sdxl"]
MANY = "diffusion_pytorch_model.safetensors.index.json"


def adapter_file(path: Path, name: str = "sd15", **options: Any) -> Path:
    own = families.family(name).formats.written[0]
    chosen = dict(list(adapter_of(name, **options).items())[::2])
    return saved(path, name, chosen, format=own)


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


# ---- folders


@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux", "qwen"])
def test_a_folder_gets_the_sum_of_the_deltas(name: str, tmp_path: Path) -> None:
    files = {
        adapter_file(tmp_path / "a.safetensors", name, text=True, scale=0.7): 0.6,
        adapter_file(tmp_path / "b.safetensors", name, rank=2): -1.1,
    }
    done = bake(weighted(files), base=str(base_of(name)), output=tmp_path / "baked")
    assert largest_error(base_of(name), done.file, files) < 1e-6
    assert families.detect(done.file).name == done.family == name
    before, after = contents(base_of(name)), contents(done.file)
    changed = {Path(file).parts[0] for file in before if before[file] != after[file]}
    assert before.keys() == after.keys() and changed <= {"unet", "transformer", *networks_of(name)}
    assert not done.notes


@pytest.mark.parametrize("options", [{"dora": True}, {"kind": "oft"}])
def test_every_kind_goes_by_the_weights_of_the_base(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """The second of two DoRAs sees the base too, not what the first has made of it."""
    files = {
        adapter_file(tmp_path / "a.safetensors", **options): 0.6,
        adapter_file(tmp_path / "b.safetensors", **options, size=0.3): 1.0,
    }
    done = bake(weighted(files), base=str(base_of("sd15")), output=tmp_path / "baked")
    assert largest_error(base_of("sd15"), done.file, files) < 1e-6


def test_shards_stay_shards(tmp_path: Path) -> None:
    base = sharded(tmp_path / "base")
    files = {adapter_file(tmp_path / "a.safetensors", text=True): 0.6}
    done = bake(weighted(files), base=str(base), output=tmp_path / "baked")
    assert largest_error(base, done.file, files) < 1e-6
    assert contents(base).keys() == contents(done.file).keys()
    index = Path("unet") / MANY
    assert (base / index).read_bytes() == (done.file / index).read_bytes()


def sharded(folder: Path) -> Path:
    base = copy_of("sd15", folder)
    unet = UNet2DConditionModel.from_pretrained(base / "unet")
    shutil.rmtree(base / "unet")
    unet.save_pretrained(base / "unet", max_shard_size="40KB")
    assert len(list((base / "unet").glob("*.safetensors"))) > 3
    return base


def test_both_variants_change_and_what_would_lack_the_adapters_is_left_out(tmp_path: Path) -> None:
    base = copy_of("sd15", tmp_path / "base")
    (base / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"old weights")
    (base / "whole.ckpt").write_bytes(b"all of it")
    (base / "vae" / "kept.bin").write_bytes(b"not changed by adapters")
    (base / "README.md").write_text("kept")
    (base / ".cache").mkdir()
    whole = base / "unet" / "diffusion_pytorch_model.safetensors"
    half = whole.with_name("diffusion_pytorch_model.fp16.safetensors")
    save_file({key: value.half() for key, value in load_file(whole).items()}, half)
    file = adapter_file(tmp_path / "a.safetensors")
    done = bake(weighted({file: 1.0}), base=str(base), output=tmp_path / "baked")
    left = contents(base).keys() - contents(done.file).keys()
    assert left == {"unet/diffusion_pytorch_model.bin", "whole.ckpt"}
    assert len(done.notes) == 2 and all("was left out" in note for note in done.notes)
    assert (done.file / "vae" / "kept.bin").read_bytes() == b"not changed by adapters"
    wide, narrow = (load_file(done.file / "unet" / each.name) for each in (whole, half))
    for key, value in wide.items():
        assert narrow[key].dtype == torch.float16
        assert torch.allclose(narrow[key].float(), value, atol=2e-3), key


# ---- checkpoints in one file


@pytest.mark.parametrize("name", UNETS)
def test_a_checkpoint_gets_the_sum_of_the_deltas_as_its_folder_does(
    name: str, tmp_path: Path
) -> None:
    """Of SD 2 and SDXL the second text encoder has query, key and value in one matrix."""
    base = checkpoint(tmp_path / "base.safetensors", name, marks=("v_pred",))
    files = {
        adapter_file(tmp_path / "a.safetensors", name, text=True, scale=0.7): 0.6,
        adapter_file(tmp_path / "b.safetensors", name, text=True, rank=2): -1.1,
    }
    done = bake(weighted(files), base=str(base), output=tmp_path / "baked.safetensors")
    assert largest_error(base, done.file, files) < 1e-6
    before, after = load_file(base), load_file(done.file)
    assert list(before) == list(after), "names in their order"
    touched = {key for key in before if not torch.equal(before[key], after[key])}
    assert touched and all(not key.startswith("first_stage_model.") for key in touched)
    assert all(key.endswith(("weight", "in_proj_weight")) for key in touched)
    assert "v_pred" in after
    folder = bake(weighted(files), base=str(base_of(name)), output=tmp_path / "many")
    one, many = weights(done.file), weights(folder.file)
    shared = one.keys() & many.keys()
    assert {key for key in many if ".text_projection" not in key} <= shared
    assert [key for key in shared if not torch.equal(one[key].flatten(), many[key].flatten())] == []


LAST_NORM = "denoiser.norm_out.linear"


def transformer(path: Path, name: str) -> Path:
    """Write a tiny base's transformer as its publisher does, q, k and v in one weight, shift before scale."""
    network = denoiser_of(name)
    tensors = with_places(name, network, {}).original()
    last = network.state_dict()["norm_out.linear.weight"]
    tensors["final_layer.adaLN_modulation.1.weight"] = last.roll(len(last) // 2, 0)
    save_file(
        {f"model.diffusion_model.{key}": each.contiguous() for key, each in tensors.items()}, path
    )
    return path


@pytest.mark.parametrize("name", ["flux", "sd3"])
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
    single = bake(weighted({file: 0.7}), base=str(base), output=tmp_path / "one.safetensors")
    folder = bake(weighted({file: 0.7}), base=str(base_of(name)), output=tmp_path / "many")
    one, many = weights(single.file), weights(folder.file)
    assert modules.keys() <= one.keys() <= many.keys()
    assert [key for key in one if not torch.equal(one[key], many[key])] == []
    assert not torch.equal(one[LAST_NORM], before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_weights_keep_their_dtype_and_are_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base.safetensors", "sd15", dtype=dtype)
    files = {
        adapter_file(tmp_path / "a.safetensors", scale=0.7): 0.6,
        adapter_file(tmp_path / "b.safetensors", rank=2): -1.1,
    }
    done = bake(weighted(files), base=str(base), output=tmp_path / "baked.safetensors")
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
    done = bake(weighted({file: 1.0}), base=str(base), output=tmp_path / "baked.safetensors")
    found = entries_of(done.file)
    assert found.keys() == {*stated, "modelspec.merged_from"}
    assert found["modelspec.merged_from"] == "base, a"
    assert found["modelspec.title"] == "mine"
    assert len(found["modelspec.hash_sha256"]) == 66


@pytest.mark.parametrize("tool", ["bake", "merge"])
def test_modules_and_weights_come_and_go_one_by_one(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: a base of 60 GB is merged in the memory of a layer."""
    seen: list[weakref.ref[Tensor]] = []
    most = 0

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal most
            result = function(*arguments)
            tensors = [result] if isinstance(result, Tensor) else result.tensors.values()
            seen.extend(map(weakref.ref, tensors))
            most = max(most, sum(each() is not None for each in seen))
            return result

        return call

    monkeypatch.setattr(OpenAdapter, "__getitem__", watched(OpenAdapter.__getitem__))
    monkeypatch.setattr(merge_base, "read_tensor", watched(merge_base.read_tensor))
    files = weighted({adapter_file(tmp_path / f"{n}.safetensors", rank=n): 0.5 for n in (2, 3)})
    base, output = str(base_of("sd15")), tmp_path / "result"
    if tool == "bake":
        bake(files, base=base, output=output)
    else:
        merge(files, output=output.with_suffix(".safetensors"), base=base)
    assert most <= 8 < 100 < len(seen)


# ---- refusals: nothing is left behind


def refused(tmp_path: Path, kind: type[Exception], match: str, **asked: Any) -> None:
    before = contents(tmp_path)
    with pytest.raises(kind, match=match):
        bake(**asked)
    assert contents(tmp_path) == before
    assert not [path for path in tmp_path.rglob(".tmp-*")]


def test_a_sum_beyond_the_dtype_is_refused(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base.safetensors", "sd15", dtype=torch.float8_e4m3fn)
    file = adapter_file(tmp_path / "a.safetensors", size=3.0)
    refused(tmp_path, RequestError, "its dtype ends at", base=str(base),
            inputs=weighted({file: 1e5}), output=tmp_path / "no.safetensors")  # fmt: skip


def test_another_base_is_refused(tmp_path: Path) -> None:
    file = adapter_file(tmp_path / "a.safetensors", "sd2")
    refused(tmp_path, InputError, "made for|lacks", base=str(base_of("sdxl")),
            inputs=weighted({file: 1.0}), output=tmp_path / "no")  # fmt: skip
    file = adapter_file(tmp_path / "b.safetensors", "sd15")
    refused(tmp_path, InputError, "the layer is 64x64", base="embedded",
            inputs=weighted({file: 1.0}), output=tmp_path / "no")  # fmt: skip


def test_a_share_of_inputs_that_the_layer_does_not_have_is_refused(tmp_path: Path) -> None:
    """The size of an IA3 is not in its header."""
    name = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    file = tmp_path / "a.safetensors"
    save_file({f"{name}.weight": torch.ones(7), f"{name}.on_input": torch.tensor(1.0)}, file)
    refused(tmp_path, InputError, "in another size", base=str(base_of("sd15")),
            inputs=weighted({file: 1.0}), output=tmp_path / "no")  # fmt: skip


def test_a_quantised_base_is_refused(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base.safetensors", "sd15")
    file, tensors = adapter_file(tmp_path / "a.safetensors"), load_file(base)
    name = next(key for key in tensors if key.endswith("attn1.to_q.weight"))
    scale = {f"{name.removesuffix('weight')}scale_weight": torch.tensor(0.5)}
    for quantised in (
        {name: tensors[name].to(torch.int8)},
        {name: tensors[name].to(torch.float8_e4m3fn), **scale},
    ):
        save_file({**tensors, **quantised}, base)
        refused(tmp_path, InputError, "is quantised", base=str(base), inputs=weighted({file: 1.0}),
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
        ({"output": base, "base": str(base_of("sd15")), "inputs": weighted({inside: 1.0})},
         "would be replaced"),
    ):  # fmt: skip
        defaults = {"base": str(base), "inputs": weighted({file: 1.0}), "force": True}
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
                inputs=weighted({file: 1.0}), force=force)  # fmt: skip


def test_force_replaces_a_base_as_a_whole(tmp_path: Path) -> None:
    file = adapter_file(tmp_path / "a.safetensors")
    old = copy_of("sd15", tmp_path / "baked")
    (old / "old.txt").touch()
    bake(weighted({file: 1.0}), base=str(base_of("sd15")), output=old, force=True)
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
            inputs=weighted({file: 1.0}), output=tmp_path / "baked", force=True)  # fmt: skip
