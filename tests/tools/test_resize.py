"""Lower ranks: what is kept is measured, no rank is higher than asked for, none is lower than needed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer.common.errors import RequestError
from lora_trainer.lora.tensors import ModuleTensors
from tests.fakes.family_bases import base_of
from tests.fakes.tool_files import adapter_of, deltas, distance, energy, saved, tool

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
    asked = tool(
        "resize", file, rank=2, output=tmp_path / "c.safetensors", base=base, format="kohya"
    )
    assert (kept["format"], asked["format"]) == ("diffusers", "kohya")
    assert distance(deltas(asked["file"], base), deltas(kept["file"], base)) < 1e-6


@pytest.mark.parametrize(
    ("name", "options"), [("qwen", {"kind": "lokr", "rank": 1}), ("sd15", {"dora": True})]
)
def test_other_kinds_become_lora_with_the_weights_of_the_base_where_they_need_them(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    base, adapter = base_of(name), adapter_of(name, **options)
    file = saved(tmp_path / "a.safetensors", name, adapter, format="kohya")
    output = tmp_path / "b.safetensors"
    tool("resize", file, energy=1, output=output, base=base, precision="fp32")
    assert distance(deltas(output, base), deltas(file, base)) < 1e-5
    seen = tool("inspect", output)
    assert (seen["kinds"], seen["format"], seen["problems"]) == (["lora"], "kohya", [])


def test_what_depends_on_the_base_is_refused_without_it(tmp_path: Path) -> None:
    layer = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    blocks = {f"{layer}.oft_blocks": torch.zeros(20, 64, 64), f"{layer}.alpha": torch.tensor(0.0)}
    file = tmp_path / "a.safetensors"
    save_file(blocks, file)
    with pytest.raises(RequestError, match="what OFT changes depends on the base's weights"):
        tool("resize", file, rank=1, output=tmp_path / "b.safetensors")
    assert list(tmp_path.iterdir()) == [file]


def test_an_update_of_zero_stays_zero(tmp_path: Path) -> None:
    tensors, base = falling("sd15"), base_of("sd15")
    for module in tensors.values():
        module.tensors["up"].zero_()
    file = saved(tmp_path / "a.safetensors", "sd15", tensors)
    done = tool("resize", file, energy=0.5, output=tmp_path / "b.safetensors", base=base)
    assert done["energy"] == 1.0
    assert {cut["new_rank"] for cut in done["cuts"].values()} == {1}
    assert energy(deltas(done["file"], base)) == 0


def test_limits_that_are_none_are_refused(tmp_path: Path) -> None:
    for limits, said in (
        ({}, "nothing says how much"),
        ({"ratio": 2, "energy": 0.5}, "two answers"),
        ({"rank": 0}, "--rank 0"),
        ({"ratio": 0.5}, "--ratio 0.5"),
        ({"ratio": math.inf}, "--ratio inf"),
        ({"energy": 0}, "--energy 0"),
        ({"energy": math.nan}, "--energy nan"),
    ):
        with pytest.raises(RequestError, match=said):
            tool(
                "resize",
                tmp_path / "absent.safetensors",
                output=tmp_path / "b.safetensors",
                **limits,
            )
