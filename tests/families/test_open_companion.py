"""R10: a checkpoint of a gated release trains with its VAE and encoders as files, and nothing from the gate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers

from lora_trainer import families
from lora_trainer.common.errors import MachineError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families import flux
from lora_trainer.families.base_files import open_companion
from lora_trainer.families.base_files.base_folder import read_json, weights
from lora_trainer.families.locate import describe, locate
from lora_trainer.families.text.text_layers import BY_ROLE
from tests.checkpoint_files import layouts
from tests.checkpoint_files.cases import Case
from tests.checkpoint_files.files import write
from tests.checkpoint_files.layouts import Shapes
from tests.fakes.family_bases import base_of, facts_of, side_of
from tests.fakes.hub import FakeHub, fake_hub
from tests.fakes.runs import Toy, events, run_cli, toy

SDXL, CHROMA = "stabilityai/stable-diffusion-xl-base-1.0", "lodestones/Chroma1-HD"
TABLE = read_json(open_companion.FILE)
CHECKPOINTS: Mapping[str, tuple[Shapes, str]] = {
    "flux1-dev": (layouts.flux(), flux.FAMILY.published[0].ids[0]),
    "flux1-schnell": (layouts.flux(guidance=False), flux.FAMILY.published[1].ids[0]),
    "sd3.5_medium": (layouts.sd3(), "stabilityai/stable-diffusion-3.5-medium"),
    "sd3.5_large": (
        layouts.sd3(depth=38, dual=0, positions=192),
        "stabilityai/stable-diffusion-3.5-large",
    ),
}
ENCODERS: Mapping[str, Shapes] = {
    "clip_l": layouts.clip(),
    "clip_g": layouts.clip(width=1280, layers=32, projection=True),
    "t5xxl": layouts.t5(),
}


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


def parameters(network: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("name", TABLE["configs"])
def test_a_configuration_builds_the_released_network(name: str) -> None:
    config = TABLE["configs"][name]
    with torch.device("meta"):
        if "_class_name" in config:
            vae = getattr(diffusers, config["_class_name"]).from_config(config)
            assert parameters(vae) == 83_819_683
            return
        kind = getattr(transformers, config["architectures"][0])
        network = kind(kind.config_class(**config))
    projection = 768 * 768 if name == "clip_l_projected" else 0
    assert parameters(network) == BY_ROLE[name.removesuffix("_projected")].parameters + projection


@pytest.mark.parametrize(
    ("family", "scale", "shift"), [("flux", 0.3611, 0.1159), ("sd3", 1.5305, 0.0609)]
)
def test_the_latents_are_scaled_as_released(family: str, scale: float, shift: float) -> None:
    vae = TABLE["configs"][TABLE["families"][family]["vae"]]
    assert (vae["scaling_factor"], vae["shift_factor"]) == (scale, shift)


def as_files(checkpoint: str, folder: Path) -> BaseSettings:
    """Write a checkpoint, its VAE and encoders: real headers, no numbers."""
    folder.mkdir()
    shapes, _ = CHECKPOINTS[checkpoint]

    def file(name: str, shapes: Shapes) -> str:
        return str(write(Case(name, shapes, file=f"{name}.safetensors"), folder))

    encoders = ["clip_l", "t5xxl"] if checkpoint.startswith("flux") else list(ENCODERS)
    return BaseSettings(
        model=file(checkpoint, shapes),
        vae=file("ae", layouts.vae(latent=16, quant=False)),
        text_encoders=tuple(file(name, ENCODERS[name]) for name in encoders),
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
    known = families.known_base(CHECKPOINTS[checkpoint][1])
    assert known is not None
    for name, part in known.parts.items():
        if name != "vae":  # the corpus' VAE has its encoder and a few layers more
            assert facts.parts[name].parameters == pytest.approx(part.parameters, rel=0.01)
    assert (facts.variant, facts.distilled, facts.max_tokens, facts.scheduler) == (
        known.variant,
        known.distilled,
        known.max_tokens,
        known.scheduler,
    )
    assert {**known.architecture} == {key: facts.architecture[key] for key in known.architecture}
    assert all("tokenizer" in name for names in hub.fetched for name in names)
    assert len(hub.fetched) == 2
    assert describe(settings) == locate(settings) == facts and len(hub.fetched) == 2
    (facts.located.folder / "vae" / "config.json").unlink()
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


def tiny_table(base: Path) -> dict[str, Any]:
    """Return the table for the tiny base: its own configurations."""
    parts = TABLE["families"]["flux"]
    configs = {
        name: read_json(base / component / "config.json")
        for component, name in parts.items()
        if component != "pipeline"
    }
    return {**TABLE, "configs": configs}


def test_a_training_is_that_with_the_folder(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, side_px = base_of("flux"), side_of(facts_of("flux"))
    models = tmp_path / "models"
    models.mkdir()
    parts = ("transformer", "vae", "text_encoder", "text_encoder_2")
    files = {part: models / f"{part}.safetensors" for part in parts}
    for part, file in files.items():
        (source,) = weights(base / part)
        shutil.copyfile(source, file)
    table = tmp_path / "table.json"
    table.write_text(json.dumps(tiny_table(base)))
    monkeypatch.setattr(open_companion, "FILE", table)
    open_companion._table.cache_clear()
    architecture = read_json(base / "transformer" / "config.json")
    scheduler = read_json(base / "scheduler" / "scheduler_config.json")
    vae_config = read_json(base / "vae" / "config.json")
    tiny = replace(
        flux.FAMILY.published[0],
        architecture=architecture,
        scheduler=scheduler,
        vae=vae_config,
        parameters={name: part.parameters for name, part in facts_of("flux").parts.items()},
    )
    releases = (tiny,)
    monkeypatch.setattr(flux.Flux, "published", releases)
    monkeypatch.setattr(flux, "FAMILY", flux.Flux())  # whose releases are not cached yet
    place = toy(tmp_path / "place")

    def losses(name: str, model: Path, **settings: Any) -> list[float]:
        other = Toy(folder=place.folder)
        line = other.arguments("--name", name, data__resolution=side_px, **settings)
        line[line.index("--base") + 1] = str(model)
        assert run_cli(line) == 0
        return [row["loss"] for row in events(place.runs / name, "step")]

    text_encoders = [str(files["text_encoder_2"]), str(files["text_encoder"])]
    vae = str(files["vae"])
    apart = losses("files", files["transformer"], base__vae=vae, base__text_encoders=text_encoders)
    assert apart and apart == losses("folder", base)
    open_companion._table.cache_clear()
