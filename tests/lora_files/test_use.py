"""Files of other trainers in use: `validate` adds the update they hold, `init_from` continues or says why not."""

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
from lora_trainer.lora.tensors import ModuleTensors, split_key, update
from lora_trainer.tools.adapters import open_source
from scripts.readers.trees import Tree
from tests.lora_files.files import Expected, build, some
from tests.lora_files.trainers import CASES, Case

LYCORIS = {
    case.name.removeprefix("LyCORIS 3.2 ").removesuffix(" sd15"): case
    for case in CASES
    if case.name.startswith("LyCORIS") and case.family == "sd15"
}


def opened(case: Case, folder: Path) -> tuple[str, ModuleTensors, Expected, Tree]:
    """Return one layer of a file: its key, its tensors, what was written, and a base with this layer alone."""
    file = folder / "a.safetensors"
    ((key, expected),) = some(build(case, file, most=2), most=1).items()
    with open_source(file) as source:
        module = source[key]
    weight = expected.base_weight[expected.rows]
    return key, module, expected, Tree().hold({f"{split_key(key)[1]}.weight": weight})


@pytest.mark.parametrize("name", sorted(LYCORIS.keys() - {"train_norm"}))
def test_validate_adds_what_the_file_holds(name: str, tmp_path: Path) -> None:
    key, module, expected, base = opened(LYCORIS[name], tmp_path)
    layer = base.get_submodule(split_key(key)[1])
    is_linear = isinstance(layer, nn.Linear)
    x = torch.randn(2, expected.layer.inputs[0], *(() if is_linear else (5, 5)))
    apply = F.linear if is_linear else F.conv2d
    wanted = apply(x, expected.delta.float(), expected.written.bias)
    before = layer(x)
    strength = attach_lora({"denoiser": base}, {key: module})
    with strength.at(1.0):
        change = layer(x) - before
    assert float((change - wanted).norm() / wanted.norm()) < 1e-4


def test_validate_says_that_norms_are_not_measured(tmp_path: Path) -> None:
    key, module, _, base = opened(LYCORIS["train_norm"], tmp_path)
    with pytest.raises(InputError, match="changes the norm"):
        attach_lora({"denoiser": base}, {key: module})


def continued(key: str, module: ModuleTensors, base: Tree, kind: str) -> ModuleTensors:
    """Return what a training of this kind holds after `train.init_from`."""
    component, name = split_key(key)
    adapter = inject(
        {component: base},
        modules={component: [name]},
        settings=AdapterSettings(kind=kind, rank=module.rank, conv_rank=module.rank),
        alpha=1.0,
        seed=0,
    )
    adapter.load_tensors({key: module})
    return adapter.tensors()[key]


@pytest.mark.parametrize(
    ("name", "kind"), [("LoCon", "lora"), ("LoCon tucker", "lora"), ("LoHa", "loha")]
)
def test_a_training_starts_from_the_update_of_a_file(name: str, kind: str, tmp_path: Path) -> None:
    key, module, expected, base = opened(LYCORIS[name], tmp_path)
    change = update(continued(key, module, base, kind)).double().reshape(expected.delta.shape)
    assert float((change - expected.delta).norm() / expected.delta.norm()) < 1e-5


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("GLoRA", "lora", "a glora adapter, which is not trained here"),
        ("IA3 of outputs", "lora", "a ia3 adapter, which is not trained here"),
        ("full", "lora", "a full adapter, which is not trained here"),
        ("LoHa", "lora", "adapter.kind=loha"),
        ("BOFT", "oft", "has rank 8"),
        ("diag-OFT rescaled", "oft", "has rescale in"),
    ],
)
def test_what_cannot_be_continued_is_refused_with_the_reason(
    name: str, kind: str, reason: str, tmp_path: Path
) -> None:
    key, module, _, base = opened(LYCORIS[name], tmp_path)
    with pytest.raises(RequestError, match=reason):
        continued(key, module, base, kind)
