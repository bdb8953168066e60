"""Sums of adapters, exact or cut: ranks add up, what is kept is measured, no rank is higher or lower than asked for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.lora.tensors import ModuleTensors
from tests.fakes.adapters import (
    Draws,
    adapter_of,
    deltas,
    distance,
    energy,
    entries_of,
    networks_of,
    saved,
    tool,
    weighted,
)
from tests.fakes.family_bases import base_of

BASE = "sd15"


def adapter(seed: int, *, name: str = BASE, **options: Any) -> dict[str, ModuleTensors]:
    """Return an adapter on every third layer."""
    return adapter_of(name, every=3, seed=seed, **options)


def written(path: Path, seed: int, *, name: str = BASE, **options: Any) -> Path:
    how = {key: options.pop(key) for key in ("format", "precision") if key in options}
    return saved(path, name, adapter(seed, name=name, **options), **how)


def weighted_sum(files: dict[Path, float], *, name: str = BASE) -> dict[str, torch.Tensor]:
    added: dict[str, torch.Tensor] = {}
    for file, weight in files.items():
        for key, value in deltas(file, base_of(name)).items():
            added[key] = added.get(key, 0) + weight * value
    return added


def merged(files: dict[Path, float], *, name: str = BASE, **options: Any) -> dict[str, Any]:
    (folder,) = {file.parent for file in files}
    output = folder / "sum.safetensors"
    return tool("merge", *weighted(files), output=output, base=base_of(name), **options)


def summed(
    files: dict[Path, float], *, name: str = BASE, within: float = 1e-6, **options: Any
) -> dict[str, Any]:
    """Merge files and compare the result with the sum of their updates."""
    done = merged(files, name=name, **options)
    assert distance(deltas(done["file"], base_of(name)), weighted_sum(files, name=name)) < within
    return done


# ---- exact sums


@pytest.mark.parametrize(("name", "precision"), [("sdxl", "bf16"), ("qwen", "fp32")])
def test_the_sum_is_the_sum_in_every_family(name: str, precision: str, tmp_path: Path) -> None:
    """Half precision adds up without rounding."""
    files = {
        written(
            tmp_path / f"{seed}.safetensors", seed, name=name, precision=precision, **options
        ): w
        for seed, w, options in ((1, 0.6, {"rank": 3, "scale": 0.7}), (2, -1.1, {"scale": 1.3}))
    }
    done = summed(files, name=name)
    assert done["precision"] == "fp32"
    assert any("fp32" in note for note in done["notes"]) == (precision == "bf16")
    own = tool("inspect", next(iter(files)))["format"]
    assert (done["rank"], done["energy"], done["format"]) == (7, 1.0, own)
    assert not tool("inspect", done["file"])["problems"]


def test_one_strength_for_all_is_stated_and_no_bit_moves(tmp_path: Path) -> None:
    """Equal strengths need not be multiplied in, so that fp16 stays fp16."""
    files = {
        written(tmp_path / "a.safetensors", 1, precision="fp16", scale=0.3): 0.6,
        written(tmp_path / "b.safetensors", 2, precision="fp16", scale=0.3): 0.6,
    }
    done = merged(files)
    assert (done["precision"], done["notes"]) == ("fp16", [])
    ours, theirs = load_file(done["file"]), [load_file(file) for file in files]
    for key, tensor in ours.items():
        if ".lora_" in key:
            side = 0 if ".lora_down" in key else 1
            assert torch.equal(tensor, torch.cat([each[key] for each in theirs], dim=side)), key


def test_kinds_mix_and_modules_need_not_be_the_same(tmp_path: Path) -> None:
    loha, text = adapter(1, kind="loha", rank=1), adapter(2, text=True)
    files = {
        saved(tmp_path / "a.safetensors", BASE, loha, format="kohya"): 1.4,
        saved(tmp_path / "b.safetensors", BASE, text, format="diffusers"): 0.5,
        written(tmp_path / "c.safetensors", 3, kind="lokr", rank=1): 1.0,
    }
    assert summed(files)["modules"] == len(loha.keys() | text.keys())
    # A LoHa states its kernels flattened, a LoRA does not.
    files[written(tmp_path / "d.safetensors", 4, kind="loha")] = 0.5
    assert summed(files, rank=99, within=1e-5, force=True)["energy"] == pytest.approx(1)


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_one_file_with_a_weight_is_the_same_file_at_another_strength(
    kind: str, tmp_path: Path
) -> None:
    done = summed({written(tmp_path / "a.safetensors", 1, kind=kind): -0.3})
    assert tool("inspect", done["file"])["kinds"] == [kind]


@pytest.mark.parametrize("options", [{"dora": True}, {"kind": "oft"}])
def test_what_is_not_linear_is_refused_with_the_way_out(
    options: dict[str, Any], tmp_path: Path
) -> None:
    file = written(tmp_path / "a.safetensors", 1, **options)
    plain = written(tmp_path / "b.safetensors", 2)
    for files in ({file: 0.5}, {file: 1.0, plain: 1.0}):
        with pytest.raises(RequestError, match="with --into"):
            merged(files)
    assert sorted(tmp_path.iterdir()) == [file, plain]
    summed({file: 1.0})
    # A LoRA can be made of it, as the weights of the base are known.
    done = summed({file: 0.5, plain: 1.0}, rank=64, within=1e-5, force=True)
    assert done["energy"] == pytest.approx(1)


def test_differences_and_biases_add_up_with_their_weights(tmp_path: Path) -> None:
    key, files, sums = "denoiser.mid_block.resnets.0.conv1", {}, dict[str, torch.Tensor]()
    shape = networks_of(BASE)["denoiser"].get_parameter(f"{key[9:]}.weight").shape
    for seed, weight in ((1, 0.5), (2, -2.0)):
        draw = Draws(seed)
        tensors = {"difference": draw(*shape), "bias": draw(shape[0])}
        sums = {name: sums.get(name, 0) + weight * each for name, each in tensors.items()}
        if seed == 2:  # as some trainers write kernels
            tensors["difference"] = tensors["difference"].flatten(1)
        module = ModuleTensors(kind="full", tensors=tensors, rank=1, scale=1.0)
        files[saved(tmp_path / f"{seed}.safetensors", BASE, {key: module})] = weight
    (stem,) = {name.rpartition(".")[0] for name in load_file(merged(files)["file"])}
    total = load_file(tmp_path / "sum.safetensors")
    torch.testing.assert_close(total[f"{stem}.diff"], sums["difference"])
    torch.testing.assert_close(total[f"{stem}.diff_b"], sums["bias"])
    one, other = files
    save_file({f"{stem}.diff": torch.ones(8, 4)}, other, metadata=entries_of(one))
    with pytest.raises(InputError, match="different base models"):
        tool("merge", one, other, output=tmp_path / "no.safetensors")


def test_a_sum_of_full_rank_is_refused_and_made_where_it_is_cut(tmp_path: Path) -> None:
    files = {written(tmp_path / f"{n}.safetensors", n, kind="loha"): 0.5 for n in (1, 2)}
    with pytest.raises(RequestError, match="its LoHa update has full rank"):
        merged(files)
    assert summed(files, rank=64, within=1e-5)["energy"] == pytest.approx(1)


@pytest.mark.parametrize("whole", ["w1", "w2"])
def test_a_kronecker_product_with_a_whole_factor_adds_up(whole: str, tmp_path: Path) -> None:
    """Of a convolution the second factor has the kernel."""
    key = "denoiser.mid_block.resnets.0.conv1"
    out, fan_in, *kernel = networks_of(BASE)["denoiser"].get_parameter(f"{key[9:]}.weight").shape
    files = {}
    sides = {"w1": (2, 2, []), "w2": (out // 2, fan_in // 2, kernel)}
    for seed in (1, 2):
        draw, tensors = Draws(seed), dict[str, torch.Tensor]()
        for name, (rows, columns, inner) in sides.items():
            if name == whole:
                tensors[name] = draw(rows, columns, *inner)
            else:
                tensors |= {f"{name}_a": draw(rows, 1), f"{name}_b": draw(1, columns, *inner)}
        module = ModuleTensors(kind="lokr", tensors=tensors, rank=1, scale=0.3)
        files[saved(tmp_path / f"{seed}.safetensors", BASE, {key: module})] = 0.5
    assert summed(files)["rank"] == (4 if whole == "w1" else 2 * min(out, fan_in * 9) // 2)


# ---- cut sums


@pytest.mark.parametrize("times", [1, 6])
def test_a_cut_sum_is_the_best_of_its_rank_and_says_what_is_left(
    times: int, tmp_path: Path
) -> None:
    """Also where the factors side by side have more columns than the weight has sides."""
    files = {
        written(tmp_path / "a.safetensors", 1, scale=0.7): 0.6,
        written(tmp_path / "b.safetensors", 2, scale=1.3): 1.0,
    }
    words, base = weighted(files) * times, base_of(BASE)
    done = tool("merge", *words, output=tmp_path / "cut.safetensors", base=base, rank=2)
    whole = {key: times * value for key, value in weighted_sum(files).items()}
    cut = deltas(done["file"], base)
    best = {}
    for key, value in whole.items():
        left, values, right = torch.linalg.svd(value.flatten(1), full_matrices=False)
        best[key] = (left[:, :2] * values[:2] @ right[:2]).reshape(value.shape)
    assert distance(cut, best) < 1e-5
    assert done["energy"] == pytest.approx(energy(cut) / energy(whole), rel=1e-6)
    assert 0.2 < done["energy"] < 0.99
    assert done["rank"] == 2


# ---- refusals, headers and arguments


def test_adapters_of_two_families_are_refused(tmp_path: Path) -> None:
    one = written(tmp_path / "a.safetensors", 1, name="sd2")
    other = written(tmp_path / "b.safetensors", 1, name="sdxl")
    with pytest.raises(InputError, match="a.safetensors is for sd2, b.safetensors for sdxl"):
        tool("merge", one, other, output=tmp_path / "no.safetensors")
    assert sorted(tmp_path.iterdir()) == [one, other]


def test_the_header_names_the_files_and_keeps_what_they_share(tmp_path: Path) -> None:
    files = {}
    for name, author in (("one", "me"), ("two", "you")):
        settings = json.dumps({"base.model": "a/b", "data.trigger": author})
        entries = {"modelspec.author": author, "lora_train.settings": settings}
        files[saved(tmp_path / f"{name}.safetensors", BASE, adapter(1), **entries)] = 1.0
    found = entries_of(merged(files)["file"])
    assert found["modelspec.merged_from"] == "one, two"
    assert found["modelspec.title"] == found["ss_output_name"] == "sum"
    assert found["ss_base_model_version"] == "sd_v1"
    assert "modelspec.author" not in found
    assert found["lora_train.settings"] == '{"base.model": "a/b"}'


def test_a_weight_stands_behind_the_last_colon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not a weight is part of the file's name; a file whose name ends like a weight is that file."""
    monkeypatch.chdir(tmp_path)
    base, plain = base_of(BASE), written(tmp_path / "a.safetensors", 1)
    one = deltas(plain, base)
    plain.rename("v:2")
    (tmp_path / "folder:1").mkdir()
    for link in ("w.safetensors", "folder:1/a.safetensors"):
        Path(link).hardlink_to("v:2")
    options = {"output": "sum.safetensors", "base": base, "force": True}
    for text, weight in (
        ("w.safetensors", 1.0),
        ("w.safetensors:-2", -2.0),
        ("folder:1/a.safetensors:.5", 0.5),
        ("v:2", 1.0),
    ):
        done = tool("merge", text, **options)
        wanted = {key: weight * value for key, value in one.items()}
        assert distance(deltas(done["file"], base), wanted) < 1e-6, text
    with pytest.raises(InputError, match=r"C:\\loras\\a.safetensors does not exist"):
        tool("merge", r"C:\loras\a.safetensors", **options)
    for number in ("0", "nan", "inf"):
        with pytest.raises(RequestError, match="has weight"):
            tool("merge", f"w.safetensors:{number}", **options)


RANK = 8


def falling(name: str) -> dict[str, ModuleTensors]:
    """Return an adapter on every third layer whose singular values fall, as trained ones do."""
    found = adapter_of(name, every=3, rank=RANK, scale=0.7 / RANK)
    for module in found.values():
        up = module.tensors["up"]
        up *= (0.6 ** torch.arange(RANK)).reshape(1, -1, *(1,) * (up.ndim - 2))
    return found


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("sd15", {"rank": 3}),
        ("flux", {"ratio": 4}),
        ("qwen", {"energy": 0.9}),
        ("sdxl", {"rank": 2, "energy": 0.99}),
    ],
)
def test_each_rank_is_the_lowest_that_will_do_and_the_energy_the_measured_one(
    name: str, limits: dict[str, Any], tmp_path: Path
) -> None:
    file, base = saved(tmp_path / "a.safetensors", name, falling(name)), base_of(name)
    done = tool("resize", file, output=tmp_path / "b.safetensors", base=base, **limits)
    before, after = deltas(file, base), deltas(done["file"], base)
    assert done["energy"] == pytest.approx(energy(after) / energy(before), rel=1e-6)
    assert done["cuts"].keys() == before.keys()
    for key, cut in done["cuts"].items():
        kept = energy({key: after[key]}) / energy({key: before[key]})
        lost = energy({key: after[key] - before[key]}) / energy({key: before[key]})
        assert cut["energy"] == pytest.approx(kept, rel=1e-6) == pytest.approx(1 - lost, abs=1e-6)
        values = torch.linalg.svdvals(before[key].flatten(1))
        shares = values.square().cumsum(0) / values.square().sum()
        ranks = [limits.get("rank", RANK)]
        if "ratio" in limits:
            ranks.append(int((values >= values[0] / limits["ratio"]).sum()))
        if "energy" in limits:
            ranks.append(int((shares < limits["energy"]).sum()) + 1)
        assert (cut["old_rank"], cut["new_rank"]) == (RANK, min(ranks)), key
    assert len({cut["new_rank"] for cut in done["cuts"].values()}) > 1 or "rank" in limits


def test_what_keeps_its_rank_keeps_its_bits_and_its_format_unless_another_is_asked_for(
    tmp_path: Path,
) -> None:
    base, output = base_of("sd15"), tmp_path / "b.safetensors"
    file = saved(tmp_path / "a.safetensors", "sd15", falling("sd15"), format="diffusers")
    done = tool("resize", file, rank=RANK, output=output, base=base)
    assert (done["energy"], done["format"]) == (1.0, "diffusers")
    first, last = load_file(file), load_file(output)
    assert first.keys() == last.keys()
    assert all(torch.equal(first[key], last[key]) for key in first)
    kept = tool("resize", file, rank=2, output=output, base=base, force=True)
    options = {"output": tmp_path / "c.safetensors", "base": base, "format": "kohya"}
    asked = tool("resize", file, rank=2, **options)
    assert (kept["format"], asked["format"]) == ("diffusers", "kohya")
    assert distance(deltas(asked["file"], base), deltas(kept["file"], base)) < 1e-6
    # A LoRA of zeros is not cut to "100 % of the energy" but named.
    zero = {key: each * 0 if "lora_B" in key else each for key, each in first.items()}
    save_file(zero, file, metadata=entries_of(file))
    for command, limits in (("resize", {"energy": 0.5}), ("merge", {})):
        with pytest.raises(InputError, match="changes nothing: all its updates are zero"):
            tool(command, file, output=output, base=base, force=True, **limits)
    problems = {one["kind"]: one["severity"] for one in tool("inspect", file)["problems"]}
    assert problems["zeros"] == "error"
    some = {key: each * (0 if "mid_block" in key else 1) for key, each in first.items()}
    save_file(some, file, metadata={**entries_of(file), "ss_network_dim": "nan"})
    problems = {one["kind"]: one["severity"] for one in tool("inspect", file)["problems"]}
    assert problems["some-zeros"] == "note" and problems["metadata-no-number"] == "warning"


@pytest.mark.parametrize(
    ("name", "options"), [("qwen", {"kind": "lokr", "rank": 1}), ("sd15", {"dora": True})]
)
def test_other_kinds_become_lora_with_the_weights_of_the_base_where_they_need_them(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    base, adapter = base_of(name), adapter_of(name, **options)
    file, output = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    saved(file, name, adapter, format="kohya", ss_network_module="lycoris.kohya")
    tool("resize", file, energy=1, output=output, base=base, precision="fp32")
    assert distance(deltas(output, base), deltas(file, base)) < 1e-5
    seen = tool("inspect", output)
    assert (seen["kinds"], seen["format"], seen["problems"]) == (["lora"], "kohya", [])
    assert seen["metadata"]["ss_network_module"] == "networks.lora"


def test_what_depends_on_the_base_is_refused_without_it(tmp_path: Path) -> None:
    layer = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    blocks = {
        f"{layer}.oft_blocks": torch.full((20, 64, 64), 0.01),
        f"{layer}.alpha": torch.tensor(0.0),
    }
    file = tmp_path / "a.safetensors"
    save_file(blocks, file)
    with pytest.raises(RequestError, match="the change by OFT depends on the base's weights"):
        tool("resize", file, rank=1, output=tmp_path / "b.safetensors")
    assert list(tmp_path.iterdir()) == [file]


def test_limits_that_are_none_are_refused(tmp_path: Path) -> None:
    for limits, said in (
        ({}, "no limit for the ranks is given.*give --rank, --ratio or --energy"),
        ({"ratio": 2, "energy": 0.5}, "cannot be combined"),
        ({"rank": 0}, "--rank 0"),
        ({"ratio": 0.5}, "--ratio 0.5"),
        ({"ratio": math.inf}, "--ratio inf"),
        ({"energy": 0}, "--energy 0"),
        ({"energy": math.nan}, "--energy nan"),
    ):
        with pytest.raises(RequestError, match=said):
            tool("resize", tmp_path / "absent", output=tmp_path / "b.safetensors", **limits)
    with pytest.raises(
        RequestError, match="no limit for the ranks is given.*give --rank or --energy"
    ):
        tool("extract", tmp_path, tmp_path, output=tmp_path / "b.safetensors")
