"""A kernel that has run before gives what it would give again; whole traces are in test_trace.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_trainer.costs import meta_kernels

ATEN = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def outcome(value: Any) -> Any:
    """Return the sizes of each output and of its storage."""
    if isinstance(value, Tensor):
        sizes = (value.shape, value.stride(), value.storage_offset(), value.dtype)
        return (*sizes, value.untyped_storage().nbytes())
    return type(value)(map(outcome, value)) if isinstance(value, list | tuple) else value


class Part:
    """A kernel whose output is part of a larger storage."""

    _schema = SimpleNamespace(is_mutable=False)
    overloadpacket = None

    def __call__(self) -> Tensor:
        return meta(8)[:4]


IMAGE, GROUPS = meta(2, 8, 6, 4), meta(8)
FLOPS = {"product": 2 * 3 * 4 * 5, "an output left out": 2 * 2 * 6 * 4 * 4 * 8 * 9}
CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "product": (ATEN.mm.default, (meta(3, 4), meta(5, 4).t())),
    "in another order": (ATEN.clone.default, (meta(3, 4, 5).transpose(0, 2),)),
    "several outputs": (
        ATEN.native_group_norm.default,
        (IMAGE, GROUPS, GROUPS, 2, 8, 24, 4, 1e-5),
    ),
    "an output left out": (
        ATEN.convolution_backward.default,
        (
            *(meta(2, 4, 6, 4), IMAGE, meta(4, 8, 3, 3), [4]),
            *([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]),
        ),
    ),
    "a whole number": (ATEN.add.Scalar, (meta(3, dtype=torch.int64), 1)),
    "an equal broken number": (ATEN.add.Scalar, (meta(3, dtype=torch.int64), 1.0)),
    "a list": (ATEN.cat.default, ([meta(2, 3), meta(4, 3)],)),
    "a view": (ATEN.narrow.default, (meta(9, 3), 0, 2, 4)),
    "a view of all": (ATEN.view.default, (meta(9, 3), [27])),
    "part of a larger storage": (Part(), ()),
    "values elsewhere": (ATEN.nonzero.default, (torch.tensor([1, 0, 1]),)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_second_time_is_as_the_first(case: str) -> None:
    function, args = CASES[case]
    given = {each.untyped_storage()._cdata for each in args if isinstance(each, Tensor)}
    for _ in range(3):
        result, flops = meta_kernels.run(function, args, {})
        assert flops == FLOPS.get(case, 0)
        assert outcome(result) == outcome(function(*args))
        made = result if isinstance(result, tuple) else (result,)
        storages = [each.untyped_storage()._cdata for each in made if each is not None]
        assert len({*storages}) == len(storages)
        assert given.isdisjoint(storages) == ("view" not in case)


def test_values_elsewhere_are_looked_at_each_time() -> None:
    for values, count in (([1, 0, 1], 2), ([1, 1, 1], 3)):
        found, _ = meta_kernels.run(ATEN.nonzero.default, (torch.tensor(values),), {})
        assert found.shape == (count, 1)


def test_what_writes_gives_the_tensor_that_it_wrote_to() -> None:
    for _ in range(2):
        sums = meta(3, 5)
        given = (sums, meta(3, 4), meta(4, 5))
        written, flops = meta_kernels.run(ATEN.addmm_.default, given, {})
        assert written is sums and flops == 2 * 3 * 4 * 5


def test_what_changes_a_storage_does_so_each_time() -> None:
    for _ in range(2):
        one, other = meta(3), meta(3)
        meta_kernels.run(ATEN.set_.source_Tensor, (one, other), {})
        assert one.untyped_storage()._cdata == other.untyped_storage()._cdata
        for size in (2, 5):
            meta_kernels.run(ATEN.resize_.default, (one, [size]), {})
            assert one.shape == (size,)


def test_a_kernel_runs_once_for_the_same_sizes() -> None:
    meta_kernels.run(ATEN.mm.default, (meta(11, 13), meta(13, 17)), {})
    before = meta_kernels._effect.cache_info()
    meta_kernels.run(ATEN.mm.default, (meta(11, 13), meta(13, 17)), {})
    after = meta_kernels._effect.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)
