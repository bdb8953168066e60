"""Files of other trainers in use: `validate` adds the update they hold, `init_from` says why it cannot go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.lora.adapter import inject
from lora_trainer.lora.lora_hooks import attach_lora
from lora_trainer.lora.tensors import ModuleTensors
from lora_trainer.tools.adapters import open_source
from scripts.readers.trees import Tree
from tests.lora_files.files import Expected, build, some
from tests.lora_files.trainers import CASES


def opened(name: str, folder: Path) -> tuple[str, ModuleTensors, Expected, Tree]:
    """Return one layer of a file: its name, its tensors, what was written, and a base with this layer alone."""
    (case,) = (case for case in CASES if case.name == f"LyCORIS 3.2 {name} sd15")
    file = folder / "a.safetensors"
    written = build(case, file, most=2)
    norms = {key: each for key, each in written.items() if each.written.kind == "norm"}
    ((key, expected),) = some(norms or written, most=1).items()
    with open_source(file) as source:
        module = source[key]
    layer = key.removeprefix("denoiser.")
    weight = expected.base_weight[expected.rows]
    return layer, module, expected, Tree().hold({f"{layer}.weight": weight})


@pytest.mark.parametrize("name", ["LoCon tucker", "BOFT", "GLoRA", "full with biases"])
def test_validate_adds_what_the_file_holds(name: str, tmp_path: Path) -> None:
    key, module, expected, base = opened(name, tmp_path)
    layer = base.get_submodule(key)
    is_linear = isinstance(layer, nn.Linear)
    x = torch.randn(2, expected.layer.inputs[0], *(() if is_linear else (5, 5)))
    apply = F.linear if is_linear else F.conv2d
    wanted = apply(x, expected.delta.float(), expected.written.bias)
    before = layer(x)
    with attach_lora({"denoiser": base}, {f"denoiser.{key}": module}).at(1.0):
        change = layer(x) - before
    assert float((change - wanted).norm() / wanted.norm()) < 1e-4


def test_what_cannot_be_measured_or_continued_is_refused_with_the_reason(tmp_path: Path) -> None:
    key, module, _, base = opened("train_norm", tmp_path)
    with pytest.raises(InputError, match="changes the norm"):
        attach_lora({"denoiser": base}, {f"denoiser.{key}": module})
    for name, kind, reason in (
        ("GLoRA", "lora", "a glora adapter, which is not trained here"),
        ("LoHa", "lora", "adapter.kind=loha"),
        ("BOFT", "oft", "has rank 8"),
    ):
        key, module, _, base = opened(name, tmp_path)
        settings = AdapterSettings(kind=kind, rank=module.rank, conv_rank=module.rank)
        modules = {"denoiser": [key]}
        adapter = inject({"denoiser": base}, modules=modules, settings=settings, alpha=1.0, seed=0)
        with pytest.raises(RequestError, match=reason):
            adapter.load_tensors({f"denoiser.{key}": module})
