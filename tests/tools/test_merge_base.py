"""Adapters in the weights of a base: base plus deltas, everything else byte for byte, or nothing at all."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import LoraTrainError
from lora_trainer.tools.base_weights import open_base
from scripts.readers.networks import with_places
from tests.fakes.adapters import (
    adapter_of,
    body_of,
    checkpoint,
    deltas,
    draw_module,
    entries_of,
    networks_of,
    saved,
    tool,
    weighted,
)
from tests.fakes.family_bases import base_of, copy_of, denoiser_of
from tests.fakes.runs import contents


def adapter_file(path: Path, name: str = "sd15", **options: Any) -> Path:
    return saved(path, name, adapter_of(name, every=2, **options))


def baked(files: Mapping[Path, float], base: Path | str, output: Path, **options: Any) -> Path:
    return Path(tool("merge", *weighted(files), into=base, output=output, **options)["file"])


def weights(base: Path) -> dict[str, Tensor]:
    with open_base(str(base)) as opened:
        return {key: place.weight().clone() for key, place in opened.places.items()}


def largest_error(base: Path, result: Path, files: Mapping[Path, float]) -> float:
    """Return max |result - (base + sum of weighted deltas)| over all layers."""
    before, after = weights(base), weights(result)
    assert before.keys() == after.keys()
    wanted = {key: value.double() for key, value in before.items()}
    for file, weight in files.items():
        for key, value in deltas(file, base).items():
            wanted[key] = wanted[key] + weight * value
    assert all(after[key].dtype == before[key].dtype for key in wanted)
    return max(float((after[key].double() - wanted[key]).abs().max()) for key in wanted)


# ---- folders


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_a_folder_gets_the_sum_of_the_deltas(name: str, tmp_path: Path) -> None:
    files = {
        adapter_file(tmp_path / "a.safetensors", name, text=True, scale=0.7): 0.6,
        adapter_file(tmp_path / "b.safetensors", name, rank=2): -1.1,
    }
    done = tool("merge", *weighted(files), into=base_of(name), output=tmp_path / "baked")
    result = Path(done["file"])
    assert largest_error(base_of(name), result, files) < 1e-6
    assert families.detect(result).name == done["family"] == name
    before, after = contents(base_of(name)), contents(result)
    changed = {Path(file).parts[0] for file in before if before[file] != after[file]}
    assert before.keys() == after.keys() and changed <= {"unet", "transformer", *networks_of(name)}
    assert not done["notes"]


@pytest.mark.parametrize("options", [{"dora": True}, {"kind": "oft"}])
def test_every_kind_goes_by_the_weights_of_the_base(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """The second of two DoRAs sees the base too, not what the first has made of it."""
    files = {
        adapter_file(tmp_path / "a.safetensors", **options): 0.6,
        adapter_file(tmp_path / "b.safetensors", **options, size=0.3): 1.0,
    }
    result = baked(files, base_of("sd15"), tmp_path / "baked")
    assert largest_error(base_of("sd15"), result, files) < 1e-6


def test_biases_and_norms_change_too(tmp_path: Path) -> None:
    base, file = base_of("sd15"), tmp_path / "a.safetensors"
    unet = Path("unet") / "diffusion_pytorch_model.safetensors"
    before = load_file(base / unet)
    conv, norm = "mid_block.resnets.0.conv1", "mid_block.resnets.0.norm1"
    out, inputs, *kernel = before[f"{conv}.weight"].shape
    changed, normed = (f"lora_unet_{name.replace('.', '_')}" for name in (conv, norm))
    tensors = {
        f"{changed}.lora_down.weight": torch.zeros(1, inputs, *kernel),
        f"{changed}.lora_up.weight": torch.zeros(out, 1, 1, 1),
        f"{changed}.diff_b": torch.full((out,), 0.25),
        "lora_unet_conv_in.diff_b": torch.ones(len(before["conv_in.bias"])),  # and nothing else
        f"{normed}.w_norm": torch.full((inputs,), 0.5),
        f"{normed}.b_norm": torch.full((inputs,), -1.0),
    }
    save_file(tensors, file)
    after = load_file(baked({file: 2.0}, base, tmp_path / "baked") / unet)
    moves = {f"{conv}.bias": 0.5, f"{norm}.weight": 1.0, f"{norm}.bias": -2.0, "conv_in.bias": 2.0}
    for key, value in before.items():
        torch.testing.assert_close(after[key], value + moves.get(key, 0.0), rtol=0, atol=1e-6)


def test_shards_and_variants_change_and_what_would_lack_the_adapters_is_left_out(
    tmp_path: Path,
) -> None:
    base = copy_of("sd15", tmp_path / "base")
    unet = UNet2DConditionModel.from_pretrained(base / "unet")
    half = base / "unet" / "diffusion_pytorch_model.fp16.safetensors"
    save_file({key: value.half() for key, value in unet.state_dict().items()}, half)
    (base / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    unet.save_pretrained(base / "unet", max_shard_size="40KB")
    assert len(list((base / "unet").glob("*.safetensors"))) > 4
    (base / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"old weights")
    (base / "whole.ckpt").write_bytes(b"all of it")
    (base / "vae" / "kept.bin").write_bytes(b"not changed by adapters")
    (base / "README.md").write_text("kept")
    (base / ".cache").mkdir()
    files = {adapter_file(tmp_path / "a.safetensors", text=True): 0.6}
    done = tool("merge", *weighted(files), into=base, output=tmp_path / "baked")
    result = Path(done["file"])
    assert largest_error(base, result, files) < 1e-6
    before, after = contents(base), contents(result)
    assert before.keys() - after.keys() == {"unet/diffusion_pytorch_model.bin", "whole.ckpt"}
    assert len(done["notes"]) == sum("was left out" in note for note in done["notes"]) == 2
    for kept in ("vae/kept.bin", "unet/diffusion_pytorch_model.safetensors.index.json"):
        assert after[kept] == before[kept]
    wide, narrow = weights(result), load_file(result / "unet" / half.name)
    for key, value in narrow.items():
        assert value.dtype == torch.float16
        if (exact := wide.get(f"denoiser.{key.removesuffix('.weight')}")) is not None:
            assert torch.allclose(value.float(), exact, atol=2e-3), key


# ---- checkpoints in one file


@pytest.mark.parametrize("name", ["sd2", "sdxl"])
def test_a_checkpoint_gets_the_sum_of_the_deltas_as_its_folder_does(
    name: str, tmp_path: Path
) -> None:
    """Of SD 2 and SDXL the second text encoder has query, key and value in one matrix."""
    base = checkpoint(tmp_path / "base.safetensors", name, marks=("v_pred",))
    stated = {"modelspec.hash_sha256": "0xold", "modelspec.title": "mine"}
    save_file(load_file(base), base, metadata=stated)
    files = {
        adapter_file(tmp_path / "a.safetensors", name, text=True, scale=0.7): 0.6,
        adapter_file(tmp_path / "b.safetensors", name, text=True, rank=2): -1.1,
    }
    result = baked(files, base, tmp_path / "baked.safetensors")
    assert largest_error(base, result, files) < 1e-6
    before, after = load_file(base), load_file(result)
    assert list(before) == list(after), "names in their order"
    touched = {key for key in before if not torch.equal(before[key], after[key])}
    assert touched and all(not key.startswith("first_stage_model.") for key in touched)
    assert all(key.endswith(("weight", "in_proj_weight")) for key in touched)
    assert "v_pred" in after
    entries, body = entries_of(result), body_of(result)
    assert entries == {
        "modelspec.hash_sha256": f"0x{sha256(body).hexdigest()}",
        "modelspec.merged_from": "base, a, b",
        "modelspec.title": "mine",
    }
    one, many = weights(result), weights(baked(files, base_of(name), tmp_path / "many"))
    shared = one.keys() & many.keys()
    assert {key for key in many if ".text_projection" not in key} <= shared
    assert [key for key in shared if not torch.equal(one[key].flatten(), many[key].flatten())] == []


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_a_transformer_in_one_file_and_its_folder_become_the_same(
    name: str, tmp_path: Path
) -> None:
    """As its publisher writes it, of a width that no release has: q, k and v in one weight, shift before scale."""
    base, network = tmp_path / "base.safetensors", denoiser_of(name)
    last, state = "denoiser.norm_out.linear", network.state_dict()
    before = state["norm_out.linear.weight"]
    tensors = with_places(name, network, {}).original()
    swapped = {"final_layer.adaLN_modulation.1": "norm_out"}
    if name == "sd3":  # and of the text in the last block
        swapped["joint_blocks.1.context_block.adaLN_modulation.1"] = (
            "transformer_blocks.1.norm1_context"
        )
    for original, layer in swapped.items():
        weight = state[f"{layer}.linear.weight"]
        tensors[f"{original}.weight"] = weight.roll(len(weight) // 2, 0)
    named = {f"model.diffusion_model.{key}": each.contiguous() for key, each in tensors.items()}
    save_file(named, base)
    modules = {**adapter_of(name, every=2), last: draw_module(tuple(before.shape), rank=2)}
    files = {saved(tmp_path / "a.safetensors", name, modules): 0.7}
    one = weights(baked(files, base, tmp_path / "one.safetensors"))
    many = weights(baked(files, base_of(name), tmp_path / "many"))
    assert modules.keys() <= one.keys() <= many.keys()
    assert [key for key in one if not torch.equal(one[key], many[key])] == []
    assert not torch.equal(one[last], before)
    words = (tmp_path / "one.safetensors", base)
    done = tool("extract", *words, rank=4, output=tmp_path / "back.safetensors")
    assert done["cuts"].keys() == modules.keys() - {last}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_weights_keep_their_dtype_and_are_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base.safetensors", "sd15", dtype=dtype)
    files = {
        adapter_file(tmp_path / "a.safetensors", scale=0.7): 0.6,
        adapter_file(tmp_path / "b.safetensors", rank=2): -1.1,
    }
    before, after = weights(base), weights(baked(files, base, tmp_path / "baked.safetensors"))
    added = [(weight, deltas(file, base)) for file, weight in files.items()]
    for key in added[0][1]:
        wanted = before[key].float()
        for weight, each in added:
            wanted = wanted + weight * each[key].float()
        assert after[key].dtype == dtype
        off = (after[key].float() - wanted.to(dtype).float()).abs()
        assert float((off > 0).float().mean()) < 0.01, "but for ties, the rounded sum"


@pytest.mark.parametrize("option", ["into", "base"])
def test_modules_and_weights_come_and_go_one_by_one(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: a base of 60 GB is merged in the memory of a layer."""
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            tensors = [result] if isinstance(result, Tensor) else result.tensors.values()
            seen.extend(map(weakref.ref, tensors))
            alive.append(sum(each() is not None for each in seen))
            return result

        return call

    for owner, name in (
        ("lora_trainer.lora_file.read_tensors:OpenAdapter", "__getitem__"),
        ("lora_trainer.tools.merge_base", "read_tensor"),
    ):
        holder = resolve_name(owner)
        monkeypatch.setattr(holder, name, watched(getattr(holder, name)))
    files = weighted({adapter_file(tmp_path / f"{n}.safetensors", rank=n): 0.5 for n in (2, 3)})
    output = tmp_path / ("result" if option == "into" else "result.safetensors")
    tool("merge", *files, output=output, **{option: base_of("sd15")})
    assert max(alive) <= 8 < 100 < len(seen)


# ---- refusals: nothing is left behind


def refused(folder: Path, match: str, *words: Path | str, **options: Any) -> None:
    before = contents(folder)
    with pytest.raises(LoraTrainError, match=match):
        tool("merge", *words, **options)
    assert contents(folder) == before
    assert not [path for path in folder.rglob(".tmp-*")]


def test_a_base_that_the_adapter_does_not_fit_is_refused(tmp_path: Path) -> None:
    file, output = tmp_path / "a.safetensors", tmp_path / "no"
    adapter_file(file, "sd2")
    refused(tmp_path, "made for|lacks", file, into=base_of("sdxl"), output=output)
    adapter_file(file, "sd15")
    refused(tmp_path, "the layer is 64x64", file, into="embedded", output=output)
    # The size of an IA3 of inputs is not in its header.
    name = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    save_file({f"{name}.weight": torch.ones(7), f"{name}.on_input": torch.tensor(1.0)}, file)
    refused(tmp_path, "in another size", file, into=base_of("sd15"), output=output)
    adapter_file(file, size=3.0)
    base, output = tmp_path / "base.safetensors", tmp_path / "no.safetensors"
    checkpoint(base, "sd15", dtype=torch.float8_e4m3fn)
    refused(tmp_path, "its dtype ends at", f"{file}:1e5", into=base, output=output)
    tensors = load_file(base)
    name = next(key for key in tensors if key.endswith("attn1.to_q.weight"))
    scale = f"{name.removesuffix('weight')}scale_weight"
    for quantised in ({name: tensors[name].to(torch.int8)}, {scale: torch.tensor(0.5)}):
        save_file({**tensors, **quantised}, base)
        refused(tmp_path, "is quantised", file, into=base, output=output)


def test_outputs_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Nothing is replaced that the result is made from."""
    base, tiny = copy_of("sd15", tmp_path / "base"), base_of("sd15")
    inside = adapter_file(base / "a.safetensors")
    file = adapter_file(tmp_path / "b.safetensors")
    single = checkpoint(tmp_path / "one.safetensors", "sd15")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("dear diary")
    for source, into, output, match in (
        (file, base, base, "lies in the base"),
        (file, base, base / "new", "lies in the base"),
        (file, single, single, "would be replaced"),
        (file, single, file, "would be replaced"),
        (inside, tiny, base, "would be replaced"),
        (file, tiny, tmp_path / "no.safetensors", "names a file"),
        (
            file,
            single,
            tmp_path / "no-v1.5",
            "one file, --output no-v1.5 does not .* call it no-v1.5.s",
        ),
        (file, tiny, tmp_path / "full", "does not replace it"),
    ):
        refused(tmp_path, match, source, into=into, output=output, force=True)


def test_force_replaces_a_base_as_a_whole_or_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, old, rename = tmp_path / "a.safetensors", tmp_path / "baked", Path.rename
    adapter_file(file)
    copy_of("sd15", old)
    (old / "old.txt").touch()

    def failing(self: Path, target: Path) -> Path:
        if self.name.startswith(".tmp-") and not self.name.endswith("-old"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        options = {"into": base_of("sd15"), "output": old, "force": True}
        refused(tmp_path, "Input/output error", file, **options)
    baked({file: 1.0}, base_of("sd15"), old, force=True)
    assert not (old / "old.txt").exists()
    assert largest_error(base_of("sd15"), old, {file: 1.0}) < 1e-6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "baked"]
