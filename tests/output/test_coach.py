"""The coach: each planted fault is named, with the change of the next training; a sound run has no advice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lora_trainer.reporting.coach import Advice, coach
from lora_trainer.reporting.history import read_history
from lora_trainer.reporting.report import document
from tests.fakes.run_folder import EXPORT, PROMPTS, FakeRun

RATE = 2e-3


def finished(
    folder: Path,
    losses: dict[int, float],
    *,
    images: Any = (),
    levels: int = 3,
    doubt: str = "",
) -> FakeRun:
    """Return a run of 300 steps with these validation losses by step, 0 is the base's."""
    run = FakeRun(folder=folder, steps=300)
    run.emit("run_started", name="z", steps=300, resumed_from=None, every_steps={})
    for step, loss in losses.items():
        run.emit("validation", step=step, loss=loss, by_timestep=[], images=2, seconds=0.1)
    run.emit("step", step=300, loss=0.05, seconds=0.1)
    if images:
        run.emit("image_losses", step=300, seconds=1.0, levels=levels, images=images)
    run.emit("finished", step=300, early="", doubt=doubt, seconds=9.0, export=EXPORT)
    return run


def image(number: int, *, gain: float, own: float = 0.15, held_out: bool = False) -> dict[str, Any]:
    """Return the losses of an image of which this share of the error is gone, `own` of it by its own caption."""
    base = 0.1 + number / 100  # images differ in how hard they are
    lora = base * (1 - gain)
    return {
        "image": f"zibbo_{number:02d}.png",
        "held_out": held_out,
        "base": base,
        "lora": lora,
        "other_caption": lora / (1 - own),
    }


def peers(count: int = 12) -> list[dict[str, Any]]:
    return [image(n, gain=0.7 + 0.02 * (n % 4), own=0.1 + 0.02 * (n % 3)) for n in range(1, count)]


SOUND = {0: 0.16, 75: 0.10, 150: 0.085, 225: 0.08, 300: 0.0795}


def said(run: FakeRun, change: Callable[[dict[str, Any]], None] | None = None) -> list[Advice]:
    """Return the advice on a run, after a change of its run.json."""
    folder = run.write()
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    record["dataset"]["findings"] = []
    record["settings"] |= {"optimizer.name": "adamw", "optimizer.learning_rate": RATE}
    if change is not None:
        change(record)
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return coach(read_history(folder))


def changes(found: list[Advice]) -> list[tuple[str, dict[str, object]]]:
    return [(each.kind, dict(each.changes)) for each in found]


def test_a_sound_run_has_no_advice_and_an_unfinished_one_has_none(tmp_path: Path) -> None:
    assert said(finished(tmp_path / "sound", SOUND, images=peers())) == []
    killed = finished(tmp_path / "killed", {0: 0.1, 300: 0.2})
    killed.events = [row for row in killed.events if row["event"] != "finished"]
    assert said(killed) == []


@pytest.mark.parametrize(
    ("losses", "kind", "changed"),
    [
        ({0: 0.16, 150: 0.2, 300: 0.3}, "too-fast", {"optimizer.learning_rate": 6.7e-4}),
        ({0: 0.16, 150: 0.159, 300: 0.158}, "too-slow", {"optimizer.learning_rate": 6e-3}),
        ({0: 0.16, 150: 0.16, 300: 0.16}, "too-slow", {"optimizer.learning_rate": 0.018}),
        # It was better than the base before it became worse: too long, not too fast.
        ({0: 0.147, 15: 0.098, 150: 0.15, 300: 0.26}, "too-long", {"train.steps": 15}),
        ({**SOUND, 90: 0.07}, "too-long", {"train.steps": 90}),
        ({0: 0.16, 100: 0.14, 200: 0.12, 300: 0.1}, "too-short", {"train.steps": 450}),
    ],
)
def test_rate_and_length(
    tmp_path: Path, losses: dict[int, float], kind: str, changed: dict[str, object]
) -> None:
    run = finished(tmp_path, dict(sorted(losses.items())))
    (found,) = said(run)
    assert (found.kind, dict(found.changes)) == (kind, changed)
    assert str(next(iter(changed.values()))).rstrip("0") in found.label.replace(",", "")


def test_a_run_that_went_back_was_too_fast_though_it_ended_well(tmp_path: Path) -> None:
    run = finished(tmp_path, SOUND)
    why = "back to step 30: the loss is not a number"
    key = "optimizer.learning_rate factor"
    run.events.insert(
        2, {"event": "change", "key": key, "old": 1, "new": 0.5, "reason": why, "time": 1.0}
    )
    assert changes(said(run)) == [("too-fast", {"optimizer.learning_rate": 6.7e-4})]
    # An optimizer that finds its rate itself has no rate to change.
    own = {"optimizer.name": "prodigy"}
    (found,) = said(run, lambda record: record["settings"].update(own))
    assert (found.kind, dict(found.changes), found.label) == ("too-fast", {}, "")


def test_images_learned_by_heart(tmp_path: Path) -> None:
    losses = {0: 0.16, 100: 0.158, 200: 0.157, 300: 0.156}
    (found,) = said(finished(tmp_path, losses, images=peers()))
    assert (found.kind, dict(found.changes)) == ("by-heart", {"train.steps": 200})
    assert "74 % lower" in found.what and "saw 3 %" in found.what


def test_a_caption_that_does_not_fit_and_an_image_that_does_not_belong(tmp_path: Path) -> None:
    wrong, odd = image(21, gain=0.72, own=-0.2), image(22, gain=0.1, own=0.1)
    held_out = image(23, gain=0.1, own=-0.2, held_out=True)  # it was never trained
    run = finished(tmp_path / "both", SOUND, images=[*peers(), wrong, odd, held_out])
    caption, strange = said(run)
    assert (caption.kind, list(caption.images)) == ("caption", ["zibbo_21.png"])
    assert caption.what == "zibbo_21.png: another image's caption fits better than its own."
    assert (strange.kind, list(strange.images)) == ("image", ["zibbo_22.png"])
    few = finished(tmp_path / "few", SOUND, images=[*peers(), wrong, odd], levels=1)
    assert [each.kind for each in said(few)] == ["image"], "one noise level blames no caption"
    # Captions that are all alike tell nothing of one of them; nor does a training that learned nothing.
    alike = [dict(each, other_caption=each["lora"] * 1.001) for each in peers()]
    assert said(finished(tmp_path / "alike", SOUND, images=[*alike, wrong])) == []
    nothing = [image(n, gain=0.001 * n) for n in range(1, 12)]
    found = said(finished(tmp_path / "nothing", {0: 0.16, 300: 0.16}, images=[*nothing, wrong]))
    assert [each.kind for each in found] == ["too-slow"]


def drawn(
    folder: Path,
    first: list[tuple[int, int, int]],
    last: list[tuple[int, int, int]],
    *,
    line: str = "{} {}",
) -> FakeRun:
    """Return a run whose samples are squares of these colours, the base's and the last ones."""
    run = finished(folder, SOUND, images=peers())
    rows = []
    for step, colours in ((0, first), (300, last)):
        images = [
            {
                "prompt": line.format(PROMPTS[0], n),
                "seed": n,
                "file": f"samples/step-{step:08d}/{n:02d}.png",
            }
            for n in range(len(colours))
        ]
        rows.append(
            {"event": "sample", "step": step, "images": images, "seconds": 1.0, "time": 1.0}
        )
    run.events[1:1] = rows
    folder = run.write()
    for step, colours in ((0, first), (300, last)):
        for n, colour in enumerate(colours):
            pixels = np.full((16, 16, 3), colour, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"samples/step-{step:08d}/{n:02d}.png")
    return run


def test_prompts_that_did_not_change_and_prompts_that_became_one_image(tmp_path: Path) -> None:
    red, green, blue, dark = (200, 0, 0), (0, 200, 0), (0, 0, 200), (20, 20, 20)

    def advice(
        name: str, last: list[tuple[int, int, int]], *, line: str = "{} {}", **settings: object
    ) -> list[Advice]:
        folder = tmp_path / name
        run = drawn(folder, [red, green, blue], last, line=line)
        run.write = lambda: folder  # type: ignore[method-assign]  # its pictures are drawn already
        return said(run, lambda record: record["settings"].update(settings))

    assert advice("changed", [green, blue, dark]) == []
    (same,) = advice("same", [red, blue, dark], **{"data.trigger": ""})
    assert (same.kind, dict(same.changes)) == ("prompt", {})
    assert list(same.samples) == ["samples/step-00000300/00.png"]
    (lacks,) = advice("trigger", [red, blue, dark], **{"data.trigger": "zibbo"})
    assert "trigger word zibbo" in lacks.advice
    prompts = lacks.changes["sampling.prompts"]
    assert prompts == [f"zibbo, {PROMPTS[0]} 0", f"{PROMPTS[0]} 1", f"{PROMPTS[0]} 2"]
    (one,) = advice("collapsed", [dark, (22, 20, 20), (20, 22, 20)])
    assert (one.kind, dict(one.changes)) == ("prompt", {"optimizer.learning_rate": 6.7e-4})
    # Of a slider the image at strength 0 is the base's own.
    slider = "{} --m {}"
    assert advice("slider", [red, blue, green], line=slider) == []
    (still,) = advice("still", [red, green, dark], line=slider)
    assert "--m 1" in still.what and "--m 0" not in still.what
    assert dict(still.changes) == {"optimizer.learning_rate": 6e-3}
    # A sample that is no longer there is not looked at.
    for file in (tmp_path / "same" / "samples").rglob("*.png"):
        file.unlink()
    assert coach(read_history(tmp_path / "same")) == []


def test_images_that_look_the_same_and_the_report_says_all_of_it(tmp_path: Path) -> None:
    finding = {
        "kind": "near-duplicate",
        "severity": "warning",
        "file": "a.png",
        "what": "",
        "advice": "",
    }
    run = finished(tmp_path, {**SOUND, 300: 0.1})
    found = said(run, lambda record: record["dataset"].update(findings=[finding]))
    assert [each.kind for each in found] == ["too-long", "alike"]
    assert list(found[1].images) == ["a.png"]
    page = document(read_history(tmp_path))
    assert "What to do better" in page and found[0].what in page
    assert "--set train.steps=225" in page
