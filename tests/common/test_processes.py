"""What a process sets before torch is imported."""

from __future__ import annotations

import pytest
from torch._native import common_utils

from lora_trainer.common import processes


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
