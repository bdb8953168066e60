"""A disk that hangs: with this folder on PYTHONPATH whatever opens or lists a file below a folder named
`slow-disk` waits until the file `go` lies beside that folder, as it does on a disk that has to spin up.
"""

from __future__ import annotations

import builtins
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _waiting(act: Callable[..., Any]) -> Callable[..., Any]:
    def wait_and_act(path: Any = ".", *more: Any, **options: Any) -> Any:
        parts = Path(os.fsdecode(path)).parts if isinstance(path, (str, bytes, Path)) else ()
        if "slow-disk" in parts:
            go = Path(*parts[: parts.index("slow-disk")], "go")
            while not go.exists():
                time.sleep(0.01)
        return act(path, *more, **options)

    return wait_and_act


builtins.open = io.open = _waiting(io.open)
os.open, os.scandir, os.listdir = map(_waiting, (os.open, os.scandir, os.listdir))
