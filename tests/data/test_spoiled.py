"""The dataset gate sees spoiled data: copies, broken images and empty captions, as docs/scores.md tells."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from PIL import Image

from tests.data.test_quality import photo
from tests.fakes.runs import contents, run_cli

EXAMPLE = Path(__file__).resolve().parents[2] / "datasets" / "example"
GATE, MARGIN = 0.8, 0.05
"""The default of data.min_score, and what lies at least between it and each score; see docs/scores.md."""


def duplicate(path: Path, rng: random.Random, others: list[Path]) -> None:
    """Make an image a copy of one of the others, recompressed or scaled."""
    with Image.open(rng.choice(others)) as opened:
        image = opened.convert("RGB")
    factor = rng.uniform(0.8, 1.5)
    scaled = image.resize((round(image.width * factor), round(image.height * factor)))
    kind = rng.choice(("PNG", "JPEG"))
    (scaled if kind == "PNG" else image).save(path, kind)


def damage(path: Path, rng: random.Random, _: list[Path]) -> None:
    """Cut an image off, empty it, fill it with noise or text, or paint it over."""
    data, painted = path.read_bytes(), io.BytesIO()
    Image.new("RGB", (64, 64), tuple(rng.randbytes(3))).save(painted, "PNG")
    others = (b"", rng.randbytes(len(data)), b"<html>404</html>", painted.getvalue())
    path.write_bytes(rng.choice((data[: len(data) // 3], *others)))


def uncaption(path: Path, rng: random.Random, _: list[Path]) -> None:
    """Leave blanks in a caption, or remove it."""
    path.with_suffix(".txt").write_text(" \n ")
    if rng.randrange(2):
        path.with_suffix(".txt").unlink()


Spoil = Callable[[Path, random.Random, list[Path]], None]
FAULTS: tuple[tuple[Spoil, float], ...] = (
    (duplicate, 1 / 2), (damage, 1 / 2), (uncaption, 1 / 3),
)  # fmt: skip


def spoilt(good: Path, copy: Path, how: Spoil, share: float, *, seed: int) -> float:
    """Return the score of a copy in which a share of the images is spoilt."""
    shutil.copytree(good, copy)
    rng = random.Random(seed)
    pictures = sorted(path for path in copy.iterdir() if path.suffix in (".png", ".jpg", ".webp"))
    chosen = rng.sample(pictures, int(len(pictures) * share))
    for path in chosen:
        how(path, rng, [other for other in pictures if other not in chosen])
    return scored(copy)


def reported(folder: Path, cache: Path) -> Any:
    """Return what the command says of a folder."""
    said = io.StringIO()
    with redirect_stdout(said):
        line = ["check", str(folder), "--set", f"data.cache_dir={cache}", "--json"]
        assert run_cli(line) == 0
    return json.loads(said.getvalue())


def scored(folder: Path) -> float:
    """Return the score that the command gives a folder; it warns below the gate."""
    report = reported(folder, folder.parent / "cache")
    assert ("below data.min_score" in json.dumps(report["findings"])) == (report["score"] < GATE)
    return float(report["score"])


def test_the_example_needs_no_word_is_not_written_to_and_spoiled_copies_are_below_the_gate(
    tmp_path: Path,
) -> None:
    before = contents(EXAMPLE)
    report = reported(EXAMPLE, tmp_path / "cache")
    assert (len(report["pictures"]), report["findings"]) == (16, [])
    assert contents(EXAMPLE) == before and report["score"] > GATE + MARGIN
    for number, (how, share) in enumerate(FAULTS):
        assert spoilt(EXAMPLE, tmp_path / f"{number}", how, share, seed=0) < GATE - MARGIN


def test_a_fault_in_fifty_stays_above_the_gate(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir()
    for number in range(50):  # distinct images with detail at every scale
        photo(number, (64, 64)).save(good / f"{number:03}.png")
        (good / f"{number:03}.txt").write_text(f"zibbo, image {number}, outside")
    best = scored(good)
    for number, (how, _) in enumerate(FAULTS):
        score = spoilt(good, tmp_path / f"{number}", how, 1 / 50, seed=2)
        assert GATE + MARGIN < score < best
