"""What errors say: one line each, whatever a library puts into its own."""

from __future__ import annotations

import pytest

from lora_trainer.common.errors import first_line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("out of memory\nTried to allocate"), "out of memory"),
        (NotImplementedError(), "NotImplementedError"),
        (RuntimeError(""), "RuntimeError"),
    ],
)
def test_a_library_s_error_is_one_line_and_never_empty(error: Exception, said: str) -> None:
    assert first_line(error) == said
