"""Stable Diffusion 2.x: what is special to it. The rest is in `test_unet_family` and `test_single_file`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import Layout, Prediction
from lora_trainer.families.sd2 import FAMILY, TELLING_WEIGHT, checkpoint_prediction
from tests.fakes.family_bases import CPU, base_of, facts_of
from tests.fakes.ldm_file import write_checkpoint


def test_the_text_is_the_last_layer_of_a_shortened_encoder() -> None:
    """Files hold one layer more than the configuration, whose output is not read."""
    encoder = FAMILY.load_text_encoder(facts_of("sd2"), dtype=torch.float32, device=CPU)
    network = encoder.networks["text_encoder"]
    assert network.config.hidden_act == "gelu"
    tokens = encoder.tokenize(["a"])
    with torch.no_grad():
        layers = network(tokens["text_encoder"], output_hidden_states=True)
    assert torch.equal(encoder.encode_prompts(["a"])["text"], layers.last_hidden_state)


# ---- what a checkpoint predicts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("deviation", "prediction"), [(0.13, "v_prediction"), (0.06, "epsilon"), (None, None)]
)
def test_a_checkpoint_s_prediction_is_told_from_a_weight(
    dtype: torch.dtype, deviation: float | None, prediction: Prediction | None, tmp_path: Path
) -> None:
    tensors = {"a": torch.ones(7), "z": torch.zeros(3)}
    if deviation is not None:
        values = torch.randn(320, generator=torch.Generator().manual_seed(0))
        tensors[TELLING_WEIGHT] = (5 + deviation * values / values.std()).to(dtype)
    file = tmp_path / "checkpoint.safetensors"
    save_file(tensors, file)
    assert checkpoint_prediction(file) == prediction


def test_it_wins_over_the_companion_s_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_checkpoint(base_of("sd2"), tmp_path / "file.safetensors", FAMILY.texts)
    layout = Layout(folder=base_of("sd2"), files={"denoiser": file})
    told = "lora_trainer.families.sd2.TELLING_WEIGHT"

    def facts(weight: str) -> tuple[Prediction, int]:
        monkeypatch.setattr(told, weight)
        found = FAMILY.facts(layout, source="x")
        return found.prediction, found.resolution_px

    assert facts("absent") == ("v_prediction", 16), "the companion's"
    assert facts("model.diffusion_model.out.0.bias") == ("epsilon", 512), "zeros at the start"


def test_a_hostile_weight_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.safetensors"
    entry = f'{{"{TELLING_WEIGHT}":{{"dtype":"F32","shape":[1],"data_offsets":[0,3]}}}}'
    file.write_bytes(len(entry).to_bytes(8, "little") + entry.encode() + b"abc")
    with pytest.raises(InputError, match="is no tensor"):
        checkpoint_prediction(file)
