"""What a process sets before torch is imported, and what Python searches for garbage at its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._native import common_utils

from lora_trainer.common import processes
from tests.fakes.runs import python

SCRIPT = """
import atexit, gc, sys, types
from lora_trainer.common.processes import made_to_stay

# Called last: the newest goes first.
atexit.register(lambda: print("left out at the end:", gc.get_freeze_count() > 0))
with made_to_stay():
    for name in sys.argv[1:]:
        sys.modules[name] = types.ModuleType(name)
print("left out:", gc.get_freeze_count() > 0)
"""


def test_torch_compiles_no_kernel_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C compiler such a kernel ends the run; torch itself says that it reads the variable."""
    monkeypatch.delenv("TORCH_DISABLE_NATIVE_JIT", raising=False)
    is_disabled = common_utils.check_native_jit_disabled.__wrapped__  # its answer is remembered
    assert not is_disabled()
    processes.quiet_libraries()
    assert is_disabled()


def test_a_user_who_wants_them_gets_them() -> None:
    environment = {"TORCH_DISABLE_NATIVE_JIT": "0"}
    processes.without_compilers(environment)
    assert environment == {"TORCH_DISABLE_NATIVE_JIT": "0"}


def test_what_a_library_compiles_at_its_import_is_compiled_when_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[dict[str, Any]] = []

    def compile_now(function: Any, **options: Any) -> Any:
        compiled.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile_now)
    with processes.compiled_when_called():

        @torch.compile
        def doubled(number: int) -> int:
            return 2 * number

        halved = torch.compile(dynamic=False)(lambda number: number / 2)
    assert vars(torch)["compile"] is compile_now and compiled == []
    assert [doubled(2), doubled(number=3), halved(8)] == [4, 6, 4]
    assert compiled == [{}, {"dynamic": False}], "each once"


@pytest.mark.parametrize(("modules", "at_the_end"), [((), True), (("triton._C.libtriton",), False)])
def test_the_last_search_reaches_what_was_made_to_stay_for_triton_alone(
    modules: tuple[str, ...], at_the_end: bool
) -> None:
    done = python(SCRIPT, *modules)
    assert done.stdout == f"left out: True\nleft out at the end: {at_the_end}\n", done.stderr
