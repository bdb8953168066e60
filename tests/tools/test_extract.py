"""The difference of two bases: a known LoRA comes back, and what no LoRA reaches is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer import families
from lora_trainer.common.errors import InputError
from tests.fakes.adapters import (
    adapter_of,
    checkpoint,
    deltas,
    distance,
    energy,
    entries_of,
    saved,
    tool,
)
from tests.fakes.family_bases import base_of, copy_of
from tests.fakes.runs import run_cli

RANK = 3
LOW_RANK = "lora_trainer.lora.low_rank"
UNET = Path("unet/diffusion_pytorch_model.safetensors")


def known(path: Path, name: str, **options: Any) -> Path:
    """Write an adapter of low rank on every third layer."""
    return saved(path, name, adapter_of(name, every=3, rank=RANK, **options))


def tuned_by(file: Path, base: Path) -> Path:
    """Bake an adapter into its base; return the new folder, beside the file."""
    return Path(tool("merge", file, into=base, output=file.with_name("tuned"))["file"])


def extracted(tuned: object, base: object, folder: Path, **options: Any) -> dict[str, Any]:
    limits = {} if options.keys() & {"rank", "energy"} else {"rank": RANK}
    return tool("extract", tuned, base, output=folder / "f.safetensors", **limits, **options)


@pytest.mark.parametrize("name", families.NAMES)
def test_a_known_lora_comes_back_in_every_family(name: str, tmp_path: Path) -> None:
    base, file = base_of(name), known(tmp_path / "known.safetensors", name, text=True)
    done = extracted(tuned_by(file, base), base, tmp_path, precision="fp32")
    wanted, found = deltas(file, base), deltas(done["file"], base)
    # A format that has q, k and v as one layer holds zeros for those of them that are equal.
    changed, moved = (
        {key: each[key] for key in each if each[key].any()} for each in (wanted, found)
    )
    assert found.keys() == wanted.keys()
    assert changed.keys() == done["cuts"].keys(), "layers that are equal get none"
    assert distance(moved, changed) < 1e-5
    assert done["energy"] == pytest.approx(1, abs=1e-9)
    assert (done["unreached"], done["family"]) == (0, name)
    unread = families.family(name).formats.unread.get(done["format"])
    lost = [unread.replace("output.format=", "--format ")] if unread else []  # as tools spell it
    assert done["notes"] == lost, "what programs lose of the format"
    # Of FLUX.2's adapters those of dev are told by their width, which a tiny base does not have.
    problems = [found["kind"] for found in tool("inspect", done["file"])["problems"]]
    assert problems == (["metadata-disagrees"] if name == "flux2dev" else [])


@pytest.mark.parametrize(
    ("name", "layout"), [("sd15", "folders"), ("sd2", "mixed"), ("sdxl", "checkpoints")]
)
def test_what_no_lora_reaches_is_measured_in_folders_and_checkpoints(
    name: str, layout: str, tmp_path: Path
) -> None:
    base, file = base_of(name), known(tmp_path / "known.safetensors", name, text=True)
    tuned = tuned_by(file, base)
    moves = {
        "mid_block.resnets.0.norm1.weight": 2.0,  # a norm
        "down_blocks.0.resnets.0.conv1.bias": 0.5,  # a bias
        "time_embedding.linear_1.weight": 0.1,  # a layer outside the targets
    }
    text = {
        "text_model.embeddings.token_embedding.weight": 0.01,
        "text_model.final_layer_norm.bias": 0.7,
        "text_model.encoder.layers.0.layer_norm1.weight": 0.3,
        "text_model.encoder.layers.0.self_attn.k_proj.bias": 0.2,
    }
    out_of_reach = 0.0
    for part, updates in ((UNET, moves), (Path("text_encoder/model.safetensors"), text)):
        tensors = load_file(tuned / part)
        bare = {key.removeprefix("text_model."): key for key in tensors}
        for key, move in updates.items():
            own = bare[key.removeprefix("text_model.")]
            tensors[own] += move
            out_of_reach += move**2 * tensors[own].numel()
        save_file(tensors, tuned / part)
    one, other = tuned, base
    if layout != "folders":
        one = checkpoint(tmp_path / "tuned.safetensors", name, base=tuned)
    if layout == "checkpoints":
        other = checkpoint(tmp_path / "base.safetensors", name)
    done = extracted(one, other, tmp_path, precision="fp32")
    assert distance(deltas(done["file"], base), deltas(file, base)) < 1e-5
    reached = energy(deltas(file, base))
    assert done["unreached"] == pytest.approx(out_of_reach / (out_of_reach + reached), rel=1e-4)


# ---- ranks and energies


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose every layer differs by a matrix of full rank with falling values."""
    folder = copy_of("sd15", tmp_path_factory.mktemp("dense") / "tuned")
    tensors = load_file(folder / UNET)
    generator = torch.Generator().manual_seed(0)
    for key, value in tensors.items():
        if value.ndim > 1:
            noise = torch.randn(value.flatten(1).shape, generator=generator)
            left, values, right = torch.linalg.svd(noise, full_matrices=False)
            fall = 0.8 ** torch.arange(len(values))
            tensors[key] = value + 0.1 * (left * fall @ right).reshape(value.shape)
    save_file(tensors, folder / UNET)
    return folder


@pytest.mark.parametrize(
    ("exact_side", "rank", "wanted"), [(512, 4, 0.99), (0, None, 0.9), (0, 5, None)]
)
def test_the_rank_is_the_lowest_that_will_do_and_the_energy_the_measured_one(
    exact_side: int,
    rank: int | None,
    wanted: float | None,
    dense: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large layers are decomposed by iteration: the same answers."""
    monkeypatch.setattr(f"{LOW_RANK}.EXACT_SIDE", exact_side)
    monkeypatch.setattr(f"{LOW_RANK}.OVERSAMPLING", 4)
    base = base_of("sd15")
    done = extracted(dense, base, tmp_path, rank=rank, energy=wanted, precision="fp32")
    after, before = load_file(dense / UNET), load_file(base / UNET)
    whole = {
        f"denoiser.{key.removesuffix('.weight')}": (after[key].double() - value).flatten(1)
        for key, value in before.items()
        if value.ndim > 1
    }
    found = deltas(done["file"], base)
    for key, cut in done["cuts"].items():
        values = torch.linalg.svdvals(whole[key]).square()
        shares = values.cumsum(0) / values.sum()
        lowest = len(values) if wanted is None else int((shares < wanted).sum()) + 1
        assert cut["new_rank"] == min(lowest, rank or lowest, len(values)), key
        kept = float(found[key].square().sum() / values.sum())
        assert cut["energy"] == pytest.approx(kept, rel=1e-5)
        assert cut["energy"] == pytest.approx(float(shares[cut["new_rank"] - 1]), rel=1e-4)
    reached = {key: whole[key] for key in done["cuts"]}
    assert done["energy"] == pytest.approx(energy(found) / energy(reached), rel=1e-5)


def test_the_same_models_give_the_same_bytes(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws are a layer's own: that others were left out changes nothing."""
    for name, value in (("EXACT_SIDE", 0), ("OVERSAMPLING", 2), ("ITERATIONS", 1)):
        monkeypatch.setattr(f"{LOW_RANK}.{name}", value)
    contents = set()
    for number in (1, 2):
        torch.manual_seed(number)
        done = extracted(dense, base_of("sd15"), tmp_path, rank=2, force=True)
        contents.add(Path(done["file"]).read_bytes())
    assert len(contents) == 1


# ---- precisions


def test_rounding_alone_is_no_difference_nor_are_layers_beside_the_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fine-tune published in half precision against a base in full: only its own layers differ."""
    base, file = base_of("sd15"), known(tmp_path / "known.safetensors", "sd15", size=0.5)
    tuned = tuned_by(file, base)
    done = extracted(tuned, base, tmp_path, targets="attention", force=True)
    wanted = deltas(file, base)
    taken = {key: value for key, value in wanted.items() if key in done["cuts"]}
    assert {key for key in wanted if ".attn" in key} == done["cuts"].keys()
    assert done["unreached"] == pytest.approx(1 - energy(taken) / energy(wanted), rel=1e-4)
    line = ["extract", str(tuned), str(base), f"--output={done['file']}", f"--rank={RANK}"]
    assert run_cli([*line, "--targets=attention", "--force"]) == 0
    shown = capsys.readouterr().out
    assert f"{100 * done['unreached']:.4g} % of the whole difference is out of reach" in shown
    half = checkpoint(tmp_path / "half.safetensors", "sd15", base=tuned, dtype=torch.bfloat16)
    done = extracted(half, base, tmp_path, force=True)
    assert done["cuts"].keys() == wanted.keys()
    assert done["unreached"] == 0
    assert distance(deltas(done["file"], base), wanted) < 0.05


def test_the_header_says_what_it_is_and_a_missing_text_encoder_is_named(tmp_path: Path) -> None:
    base, file = base_of("sd15"), known(tmp_path / "known.safetensors", "sd15", text=True)
    tuned = tuned_by(file, base)
    output = tmp_path / "my style.safetensors"
    found = entries_of(tool("extract", tuned, base, output=output, rank=RANK)["file"])
    assert found["modelspec.description"] == "tuned minus sd15"
    assert found["modelspec.title"] == found["ss_output_name"] == "my style"
    assert (found["ss_network_dim"], found["ss_network_alpha"]) == (str(RANK), str(float(RANK)))
    assert found["ss_base_model_version"] == "sd_v1"
    assert not [value for value in found.values() if str(tmp_path) in value]
    alone = checkpoint(tmp_path / "unet.safetensors", "sd15", base=tuned, parts=["denoiser"])
    done = extracted(alone, base, tmp_path)
    assert done["notes"] == ["text_encoder was not compared: only one of the models has it"]
    assert not [key for key in done["cuts"] if key.startswith("text_encoder")]


def test_models_that_have_no_difference_a_lora_can_hold_are_refused(tmp_path: Path) -> None:
    """A student with fewer layers is another architecture; the line says whose layers are missing."""
    base, small = base_of("sd15"), tmp_path / "small.safetensors"
    half = checkpoint(tmp_path / "half.safetensors", "sd15", dtype=torch.float16)
    whole = load_file(checkpoint(small, "sd15"))
    save_file({key: value for key, value in whole.items() if ".middle_block.1." not in key}, small)
    name = next(key for key in whole if key.endswith("attn1.to_v.weight"))
    other, spoilt = tmp_path / "other.safetensors", tmp_path / "spoilt.safetensors"
    save_file({**whole, name: whole[name][:-1].contiguous()}, other)
    save_file({**whole, name: torch.full_like(whole[name], torch.nan)}, spoilt)
    before = sorted(tmp_path.rglob("*"))
    for tuned, started, match in (
        (half, base, "are the same in every layer"),
        (base_of("sd2"), base_of("sdxl"), "is of family sd2, .* of sdxl"),
        (small, base, "layers that .*small.safetensors lacks.*distilled"),
        (base, small, "layers that .*small.safetensors lacks.*distilled"),
        (other, base, "in one model and .* in the other"),
        (spoilt, base, "attn1.to_v.weight .* NaN"),
    ):
        with pytest.raises(InputError, match=match):
            extracted(tuned, started, tmp_path)
        assert sorted(tmp_path.rglob("*")) == before
