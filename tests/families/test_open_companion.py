"""R10: a checkpoint of a gated release trains with its VAE and encoders as files, and nothing from the gate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from lora_trainer import families
from lora_trainer.common.errors import MachineError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.locate import describe, locate
from tests.checkpoint_files import layouts
from tests.checkpoint_files.cases import Case
from tests.checkpoint_files.files import write
from tests.checkpoint_files.layouts import Shapes
from tests.fakes.family_bases import base_of
from tests.fakes.hub import FakeHub, fake_hub

SDXL, CHROMA = "stabilityai/stable-diffusion-xl-base-1.0", "lodestones/Chroma1-HD"
LATENTS = {"flux": (0.3611, 0.1159), "sd3": (1.5305, 0.0609)}
CHECKPOINTS: Mapping[str, tuple[str, int, str]] = {
    "flux1-dev": ("flux", 0, "black-forest-labs/FLUX.1-dev"),
    "flux1-schnell": ("flux", 1, "black-forest-labs/FLUX.1-schnell"),
    "sd3_medium": ("sd3", 2, "stabilityai/stable-diffusion-3-medium-diffusers"),
    "sd3.5_medium": ("sd3", 0, "stabilityai/stable-diffusion-3.5-medium"),
    "sd3.5_large": ("sd3", 1, "stabilityai/stable-diffusion-3.5-large"),
}
"""File -> family, number of the architecture in layer_tables.json, release."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """Return a Hub that has the open repositories and no gated one."""
    hub = fake_hub(tmp_path / "hub", monkeypatch)
    hub.publish(SDXL, base_of("sdxl"))
    hub.publish(CHROMA, base_of("chroma"))
    return hub


def as_files(checkpoint: str, folder: Path) -> BaseSettings:
    """Write a checkpoint, its VAE and encoders: real headers, no numbers."""
    folder.mkdir()
    family, release, _ = CHECKPOINTS[checkpoint]

    def file(name: str, shapes: Shapes) -> str:
        return str(write(Case(name, shapes, file=f"{name}.safetensors"), folder))

    roles = families.family(family).text.roles.values()
    return BaseSettings(
        model=file(checkpoint, layouts.network(family, release)),
        vae=file("ae", layouts.vae(16)),
        text_encoders=tuple(file(role, layouts.text(role)) for role in roles),
    )


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_nothing_but_tokenizers_of_open_repositories_is_fetched(
    checkpoint: str, hub: FakeHub, tmp_path: Path
) -> None:
    settings = as_files(checkpoint, tmp_path / "models")
    before = describe(settings)
    assert before.layout is None
    assert before.missing == f"tokenizers of {CHROMA} and {SDXL}"
    assert 0 < before.download_bytes < 10e6
    facts = locate(settings)
    known = families.known_base(CHECKPOINTS[checkpoint][2])
    assert known is not None
    for name, part in known.parts.items():
        if name != "vae":  # the corpus' VAE has its two ends
            assert facts.parts[name].parameters == pytest.approx(part.parameters, rel=0.01)
    assert (facts.variant, facts.distilled, facts.max_tokens, facts.scheduler) == (
        known.variant,
        known.distilled,
        known.max_tokens,
        known.scheduler,
    )
    assert {**known.architecture} == {key: facts.architecture[key] for key in known.architecture}
    vae = json.loads((facts.located.folder / "vae/config.json").read_text())
    assert (vae["scaling_factor"], vae["shift_factor"]) == LATENTS[facts.family]
    # The name is a digest of the configurations: a folder made by an earlier version is used.
    assert checkpoint != "sd3_medium" or facts.located.folder.name.endswith("-d1be56f4e47e")
    assert all("tokenizer" in name for names in hub.fetched for name in names)
    assert len(hub.fetched) == 2
    assert describe(settings) == locate(settings) == facts and len(hub.fetched) == 2
    for pattern in ("vae/config.json", "tokenizer/*"):
        for file in facts.located.folder.glob(pattern):
            file.unlink()
        assert describe(settings).layout is None and locate(settings) == facts, "made anew"


def test_weights_that_are_missing_come_from_the_gated_release(hub: FakeHub, tmp_path: Path) -> None:
    settings = as_files("flux1-dev", tmp_path / "models")
    for lacking in ({"vae": None}, {"text_encoders": settings.text_encoders[:1]}):
        fewer = settings.model_copy(update=lacking)
        assert "FLUX.1-dev" in describe(fewer).missing
        with pytest.raises(MachineError) as raised:
            locate(fewer)
        assert "base.vae and base.text_encoders" in raised.value.fix
    assert hub.fetched == []
