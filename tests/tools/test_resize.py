"""Lower ranks: what is kept is measured, no rank is higher than asked for, none is lower than needed."""

from __future__ import annotations

import math
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import RequestError
from lora_trainer.lora.tensors import ModuleTensors
from lora_trainer.lora_file.inspect import inspect_file
from lora_trainer.tools.resize import ResizeLimits, resize
from tests.fakes.family_bases import base_of
from tests.fakes.tool_files import adapter_of, deltas, distance, energy, saved

RANK = 8


def falling(name: str, **options: Any) -> dict[str, ModuleTensors]:
    """Return an adapter on every third layer whose singular values fall, as trained ones do."""
    found = dict(list(adapter_of(name, rank=RANK, scale=0.7 / RANK, **options).items())[::3])
    for module in found.values():
        if module.kind == "lora":
            up = module.tensors["up"]
            up *= (0.6 ** torch.arange(RANK)).reshape(1, -1, *(1,) * (up.ndim - 2))
    return found


def written(path: Path, name: str = "sd15", **options: Any) -> Path:
    own = families.family(name).formats.written[0]
    return saved(path, name, falling(name, **options), format=own)


def values_of(update: Tensor) -> Tensor:
    return torch.linalg.svdvals(update.flatten(1))


LIMITS = (ResizeLimits(rank=3), ResizeLimits(ratio=4), ResizeLimits(energy=0.9))


@pytest.mark.parametrize(
    ("name", "limits"), list(zip(["sd15", "flux", "qwen", "sdxl"], cycle(LIMITS)))
)  # noqa: B905 - a cycle has no end
def test_the_reported_energy_is_the_measured_one(
    name: str, limits: ResizeLimits, tmp_path: Path
) -> None:
    file, base = written(tmp_path / "a.safetensors", name), str(base_of(name))
    done = resize(file, limits, output=tmp_path / "b.safetensors", base=base)
    before, after = deltas(file, base), deltas(done.file, base)
    assert done.energy == pytest.approx(energy(after) / energy(before), rel=1e-6)
    for key, cut in done.cuts.items():
        kept = energy({key: after[key]}) / energy({key: before[key]})
        lost = energy({key: after[key] - before[key]}) / energy({key: before[key]})
        assert cut.energy == pytest.approx(kept, rel=1e-6) == pytest.approx(1 - lost, abs=1e-6)
        assert cut.old_rank == RANK >= cut.new_rank


def test_each_choice_of_a_rank_is_the_lowest_that_will_do(tmp_path: Path) -> None:
    file, base = written(tmp_path / "a.safetensors"), str(base_of("sd15"))
    before = deltas(file, base)
    for limits in (
        ResizeLimits(energy=0.93),
        ResizeLimits(ratio=5),
        ResizeLimits(rank=2, energy=0.99),
    ):
        done = resize(file, limits, output=tmp_path / "b.safetensors", base=base, force=True)
        for key, cut in done.cuts.items():
            values = values_of(before[key])
            shares = values.square().cumsum(0) / values.square().sum()
            if limits.ratio is not None:
                wanted = int((values >= values[0] / limits.ratio).sum())
            else:
                assert limits.energy is not None
                wanted = int((shares < limits.energy).sum()) + 1
            assert cut.new_rank == min(wanted, limits.rank or wanted), (key, limits)
        assert len({cut.new_rank for cut in done.cuts.values()}) > 1 or limits.rank == 2


def test_what_keeps_its_rank_keeps_its_bits(tmp_path: Path) -> None:
    file, base = written(tmp_path / "a.safetensors"), str(base_of("sd15"))
    done = resize(file, ResizeLimits(rank=RANK), output=tmp_path / "b.safetensors", base=base)
    assert done.energy == 1.0
    first, last = load_file(file), load_file(done.file)
    assert first.keys() == last.keys()
    assert all(torch.equal(first[key], last[key]) for key in first)


def test_other_kinds_become_lora(tmp_path: Path) -> None:
    adapter = adapter_of("qwen", kind="lokr", rank=1)
    file = saved(tmp_path / "a.safetensors", "qwen", adapter, format="kohya")
    base = str(base_of("qwen"))
    done = resize(file, ResizeLimits(energy=1.0), output=tmp_path / "b.safetensors", base=base)
    assert distance(deltas(done.file, base), deltas(file, base)) < 1e-5
    found = inspect_file(done.file)
    assert (found.kinds, found.format) == (("lora",), "kohya")
    assert not found.problems


def test_what_depends_on_the_base_is_approximated_with_its_weights(tmp_path: Path) -> None:
    adapter = adapter_of("sd15", dora=True)
    file = saved(tmp_path / "a.safetensors", "sd15", adapter, format="kohya")
    base, limits = str(base_of("sd15")), ResizeLimits(energy=1.0)
    done = resize(file, limits, output=tmp_path / "b.safetensors", base=base, precision="fp32")
    assert inspect_file(done.file).kinds == ("lora",)
    assert distance(deltas(done.file, base), deltas(file, base)) < 1e-5


def test_what_depends_on_the_base_is_refused_without_it(tmp_path: Path) -> None:
    layer = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    blocks = {f"{layer}.oft_blocks": torch.zeros(20, 64, 64), f"{layer}.alpha": torch.tensor(0.0)}
    file = tmp_path / "a.safetensors"
    save_file(blocks, file)
    with pytest.raises(RequestError, match="what OFT changes depends on the base's weights"):
        resize(file, ResizeLimits(rank=1), output=tmp_path / "b.safetensors")
    assert list(tmp_path.iterdir()) == [file]


def test_the_format_stays_or_is_the_one_asked_for(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.safetensors", "sd15", falling("sd15"), format="diffusers")
    base = str(base_of("sd15"))
    kept = resize(file, ResizeLimits(rank=2), output=tmp_path / "b.safetensors", base=base)
    asked = resize(
        file, ResizeLimits(rank=2), output=tmp_path / "c.safetensors", base=base, format="kohya"
    )
    assert (kept.format, asked.format) == ("diffusers", "kohya")
    assert distance(deltas(asked.file, base), deltas(kept.file, base)) < 1e-6


def test_an_update_of_zero_stays_zero(tmp_path: Path) -> None:
    tensors = falling("sd15")
    for module in tensors.values():
        module.tensors["up"].zero_()
    file = saved(tmp_path / "a.safetensors", "sd15", tensors, format="kohya")
    done = resize(
        file, ResizeLimits(energy=0.5), output=tmp_path / "b.safetensors", base=str(base_of("sd15"))
    )
    assert done.energy == 1.0
    assert {cut.new_rank for cut in done.cuts.values()} == {1}
    assert energy(deltas(done.file, base_of("sd15"))) == 0


def test_limits_that_are_none_are_refused(tmp_path: Path) -> None:
    for limits, said in (
        (ResizeLimits(), "nothing says how much"),
        (ResizeLimits(ratio=2, energy=0.5), "two answers"),
        (ResizeLimits(rank=0), "--rank 0"),
        (ResizeLimits(ratio=0.5), "--ratio 0.5"),
        (ResizeLimits(ratio=math.inf), "--ratio inf"),
        (ResizeLimits(energy=0), "--energy 0"),
        (ResizeLimits(energy=math.nan), "--energy nan"),
    ):
        with pytest.raises(RequestError, match=said):
            resize(tmp_path / "absent.safetensors", limits, output=tmp_path / "b.safetensors")
