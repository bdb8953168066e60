"""Previews of a training: they cost no bit of it, no more time than is allowed, and no run that they fail in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from PIL import Image

from lora_trainer.reporting.history import read_history
from lora_trainer.run import previews
from lora_trainer.run.previews import Colours, Previews
from lora_trainer.training.actions import Progress
from lora_trainer.training.guards import GuardState
from tests.fakes.runs import STEPS, Toy, events, problems, toy, trajectory

REAL = {"sampling__preview": "real", "sampling__preview_steps": 1}
APPROXIMATE = {**REAL, "sampling__preview": "approximate"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A run without previews."""
    place = toy(tmp_path_factory.mktemp("previews")).with_base()
    assert place.train(sampling__preview="off") == 0
    return place


@pytest.fixture
def any_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let previews take whatever time they take: the steps of a toy are faster than any preview."""
    monkeypatch.setattr(previews, "PREVIEW_SHARE", 1e6)
    monkeypatch.setattr(previews, "PREVIEW_EVERY_S", 0.0)


def shown(run: Path) -> dict[int, tuple[int, int]]:
    """Return the sizes of a run's previews by step, as its records name them."""
    sizes = {}
    for preview in read_history(run).previews:
        with Image.open(run / preview.file) as image:
            sizes[preview.step] = image.size
    return sizes


@pytest.mark.usefixtures("any_share")
def test_a_training_with_previews_is_the_one_without_also_after_a_stop(place: Toy) -> None:
    every_step = list(range(STEPS + 1))
    assert not (place.run / "previews").exists()
    assert place.train("--name", "real", **REAL) == 0
    real = place.runs / "real"
    assert trajectory(real) == trajectory(place.run)
    assert list(shown(real)) == every_step
    assert set(shown(real).values()) == {(16, 16)}
    # Stopped half-way and resumed, in colours that were learned before.
    assert place.train("--name", "approximate", steps=3, **APPROXIMATE) == 0
    (place.runs / "approximate" / "samples" / "step-00000003" / "00.png").unlink()
    assert place.train("--resume", "--name", "approximate", **APPROXIMATE) == 0
    approximate = place.runs / "approximate"
    assert [row["step"] for row in events(approximate, "step")] == every_step[1:]
    assert list(shown(approximate)) == every_step
    assert {row["drawn"] for row in events(approximate, "preview")} == {"approximate"}


@pytest.mark.usefixtures("any_share")
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), KeyError("x")], ids=["memory", "other"]
)
def test_a_preview_that_fails_is_a_note_and_ends_the_previews(
    place: Toy, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    name = f"failed-{type(error).__name__}"
    monkeypatch.setattr(Previews, "_draw", fail)
    assert place.train("--name", name, **REAL) == 0
    assert trajectory(place.runs / name) == trajectory(place.run)
    (told,) = [row for row in problems(place.runs / name) if row["code"] == "TRN-03"]
    assert (told["severity"], told["what"].split(":")[0]) == ("note", "no previews from step 0 on")


@pytest.mark.parametrize(("cost_s", "first_of_lora"), [(0.05, [20]), (0.4, [20]), (30.0, [])])
def test_previews_take_their_share_of_the_time_and_no_more(
    cost_s: float, first_of_lora: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 steps of a second."""
    now_s, drawn = 0.0, list[int]()
    sampling = SimpleNamespace(preview="real", every_steps=60)
    config = SimpleNamespace(sampling=sampling, train=SimpleNamespace(steps=300))
    job = SimpleNamespace(
        prepared=SimpleNamespace(config=config, drawn_prompts=("a toy",)),
        folder=tmp_path,
        stop=lambda: None,
    )
    model = SimpleNamespace(device=torch.device("cpu"))
    samples = SimpleNamespace(parts=SimpleNamespace(model=model))
    made = Previews(job=cast(Any, job), samples=cast(Any, samples), clock=lambda: now_s)

    def draw(self: Previews, step: int, **_: object) -> None:
        nonlocal now_s
        now_s += cost_s
        drawn.append(step)

    monkeypatch.setattr(Previews, "_draw", draw)
    start = Progress(step=0, images=0, guard=GuardState(micro_batch=1))
    made(start)
    for step in range(1, 301):
        now_s += 1.0
        made(replace(start, step=step))
    assert drawn[0] == 0
    assert all(second - first >= 6 for first, second in zip(drawn, drawn[1:], strict=False))
    assert len(drawn) * cost_s <= 0.01 * now_s or drawn == [0], "the base's is drawn in any case"
    assert drawn[1:2] == first_of_lora
    assert len(drawn) == max(1, min(48, int(3.0 / cost_s)))
    made(replace(start, step=301, stopping=True))
    assert drawn[-1] <= 300, "a stop is not kept waiting"


@pytest.mark.parametrize("shape", ["latents", "one frame", "tokens"])
def test_colours_are_found_in_whatever_form_a_pipeline_has_its_latents(shape: str) -> None:
    """Pixels that follow from the latents by a linear map are drawn exactly, of an image that was not seen."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(5, 3, generator=generator) * 0.1

    def image(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        cells = torch.randn(rows, columns, 5, generator=generator)
        pixels = (cells @ weights + 0.1).clamp(-1, 1).permute(2, 0, 1)[None]
        if shape == "tokens":
            return cells.flatten(0, 1)[None], pixels
        latents = cells.permute(2, 0, 1)[None]
        return latents[:, :, None] if shape == "one frame" else latents, pixels

    colours = Colours()
    for rows, columns in ((16, 24), (20, 20)):
        latents, pixels = image(rows, columns)
        large = torch.nn.functional.interpolate(pixels, scale_factor=8.0)
        colours.learn(latents, large)
    latents, pixels = image(12, 18)
    drawn = Colours.from_json(colours.to_json()).decoded(latents, size_px=(18 * 8, 12 * 8))
    cell_px = 2 if shape == "tokens" else 1
    assert drawn.shape == (1, 3, 12 * cell_px, 18 * cell_px)
    assert torch.nn.functional.avg_pool2d(drawn, cell_px) == pytest.approx(pixels, abs=1e-4)
