"""What a run hands to its training: a base quantised as its family wants, planned micro-batches, a cap on a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lora_trainer.common.files import read_json_object
from lora_trainer.config.config import build_config
from lora_trainer.families import family
from lora_trainer.network.quantize import QuantizedLinear
from lora_trainer.run import device, prepare
from lora_trainer.training.actions import Progress
from lora_trainer.training.loop import run
from lora_trainer.training.step import Training
from tests.fakes.family_bases import base_of, facts_at, side_of
from tests.fakes.runs import SIZES_PX, toy


def test_a_training_gets_a_base_in_few_bits_and_the_planned_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings: list[Training] = []

    def running(training: Training, start: Progress) -> Progress:
        trainings.append(training)
        return run(training, start)

    monkeypatch.setattr("lora_trainer.run.session.run", running)
    place = toy(tmp_path, sizes=SIZES_PX[:2])  # none upright, so that sides are not alike
    shutil.copytree(base_of("chroma"), place.base)
    facts = facts_at(place.base)
    settings = {"memory__base_precision": "int8", "train__batch_size": 3}
    assert place.train(steps=2, data__resolution=2 * side_of(facts), **settings) == 0
    assert (place.run / "toy.safetensors").is_file()
    (training,) = trainings
    whole = set(family("chroma").traits.quantization_skip)
    layers = dict(training.model.denoiser.named_modules())
    quantised = [name for name, layer in layers.items() if isinstance(layer, QuantizedLinear)]
    assert quantised and whole
    assert not [name for name in quantised if set(name.split(".")) & whole]
    planned = read_json_object(place.run / "run.json")["plan"]["memory"]["images_at_once"]
    sides = [tuple(int(side) // facts.vae_factor for side in size.split("x")) for size in planned]
    assert any(width != height for width, height in sides)
    assert training.images_at_once == {
        (height, width): count
        for (width, height), count in zip(sides, planned.values(), strict=True)
    }


def test_a_cap_is_set_at_the_start_of_a_run_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Mapping[str, Any]] = []
    monkeypatch.setattr(device, "cap_allocator", lambda **limits: seen.append(limits))
    card = SimpleNamespace(index=0, free_bytes=7)
    settings = {"hardware.vram_limit_gib": 6, "hardware.threads": torch.get_num_threads()}
    prepared = SimpleNamespace(
        config=build_config({"train.precision": "fp32", **settings}),
        hardware=SimpleNamespace(gpus=(card,)),
        processes=1,
    )
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(device, "planned_device", lambda _: cuda)
    monkeypatch.setattr(device, "name_of", str)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    device.setup_torch(cast(prepare.Prepared, prepared))
    assert seen == [{"limit_bytes": 6 * 2**30, "free_bytes": 7, "device": cuda}]
