"""A weight file that is larger than the machine's memory is read: its base may well fit once it is quantised."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest
import torch

from lora_trainer.families.files.weight_files import TensorReader

NUMBERS = torch.arange(512, dtype=torch.float32).bfloat16()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the page file decides")
def test_a_file_larger_than_the_memory_is_read(tmp_path: Path) -> None:
    """Linux refuses torch's own mapping of it: "unable to mmap ... Cannot allocate memory"."""
    room = psutil.virtual_memory().total + psutil.swap_memory().total
    columns = room // 2  # of bf16: two rows of it are twice the room
    hole = 4 * columns
    header = json.dumps(
        {
            "first": {"dtype": "BF16", "shape": [16, 32], "data_offsets": [0, 1024]},
            "hole": {"dtype": "BF16", "shape": [2, columns], "data_offsets": [1024, 1024 + hole]},
            "last": {"dtype": "BF16", "shape": [512], "data_offsets": [1024 + hole, 2048 + hole]},
            "none": {"dtype": "F32", "shape": [0], "data_offsets": [2048 + hole, 2048 + hole]},
        }
    ).encode()
    values = NUMBERS.view(torch.uint8).numpy().tobytes()
    file = tmp_path / "large.safetensors"
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header + values)
        out.seek(hole, 1)
        out.write(values)
    with TensorReader(file, dtype=torch.bfloat16) as reader:
        first, last, none = (reader.read(name) for name in ("first", "last", "none"))
        view = reader.read("hole")
    assert torch.equal(first, NUMBERS.reshape(16, 32)) and torch.equal(last, NUMBERS)
    assert none.shape == (0,) and none.dtype == torch.bfloat16
    assert view.shape == (2, columns) and view[1, -1] == 0, "a view outlives the reader"
