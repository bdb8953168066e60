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


def dataset_of(folder: Path, images: int) -> Path:
    """Write distinct images with detail at every scale and captions; 16 are the example itself."""
    if images == 16:
        return Path(shutil.copytree(EXAMPLE, folder))
    folder.mkdir()
    for number in range(images):
        photo(number, (64, 64)).save(folder / f"{number:03}.png")
        (folder / f"{number:03}.txt").write_text(f"zibbo, image {number}, outside")
    return folder


def pictures_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".png", ".jpg", ".webp"))


def duplicated(folder: Path, rng: random.Random, chosen: list[Path]) -> None:
    """Make images copies of one of the others, recompressed or scaled."""
    others = [path for path in pictures_in(folder) if path not in chosen]
    for path in chosen:
        with Image.open(rng.choice(others)) as opened:
            image = opened.convert("RGB")
        factor = rng.uniform(0.8, 1.5)
        scaled = image.resize((round(image.width * factor), round(image.height * factor)))
        kind = rng.choice(("PNG", "JPEG"))
        (scaled if kind == "PNG" else image).save(path, kind)


def broken(folder: Path, rng: random.Random, chosen: list[Path]) -> None:
    """Cut images off, empty them, fill them with noise or text, or paint them over."""
    for path in chosen:
        data, painted = path.read_bytes(), io.BytesIO()
        Image.new("RGB", (64, 64), tuple(rng.randbytes(3))).save(painted, "PNG")
        others = (b"", rng.randbytes(len(data)), b"<html>404</html>", painted.getvalue())
        path.write_bytes(rng.choice((data[: len(data) // 3], *others)))


def uncaptioned(folder: Path, rng: random.Random, chosen: list[Path]) -> None:
    """Leave blanks in captions, or remove them."""
    for path in chosen:
        path.with_suffix(".txt").write_text(" \n ")
        if rng.randrange(2):
            path.with_suffix(".txt").unlink()


Spoil = Callable[[Path, random.Random, list[Path]], None]
FAULTS: tuple[tuple[Spoil, float], ...] = (
    (duplicated, 1 / 2), (broken, 1 / 2), (uncaptioned, 1 / 3),
)  # fmt: skip


def spoilt(good: Path, copy: Path, how: Spoil, share: float, *, seed: int) -> float:
    """Return the score of a copy in which a share of the images is spoilt."""
    shutil.copytree(good, copy, dirs_exist_ok=True)
    rng, pictures = random.Random(seed), pictures_in(copy)
    how(copy, rng, rng.sample(pictures, int(len(pictures) * share)))
    return scored(copy)


def reported(folder: Path, cache: Path) -> Any:
    """Return what the command says of a folder."""
    said = io.StringIO()
    with redirect_stdout(said):
        line = ["check", str(folder), "--set", f"data.cache_dir={cache}", "--json"]
        assert run_cli(line) == 0
    return json.loads(said.getvalue())


def scored(folder: Path) -> float:
    """Return the score that the command gives a folder, and that it warns below the gate."""
    report = reported(folder, folder.parent / "cache")
    assert ("below data.min_score" in json.dumps(report["findings"])) == (report["score"] < GATE)
    return float(report["score"])


def test_the_example_dataset_needs_no_word_and_is_not_written_to(tmp_path: Path) -> None:
    before = contents(EXAMPLE)
    report = reported(EXAMPLE, tmp_path)
    assert (len(report["pictures"]), report["findings"]) == (16, [])
    assert contents(EXAMPLE) == before


def test_spoiled_copies_are_below_the_gate(tmp_path: Path) -> None:
    good = dataset_of(tmp_path / "good", 16)
    assert scored(good) > GATE + MARGIN
    for number, (how, share) in enumerate(FAULTS):
        assert spoilt(good, tmp_path / f"{number}", how, share, seed=0) < GATE - MARGIN


def test_a_fault_in_fifty_stays_above_the_gate(tmp_path: Path) -> None:
    good = dataset_of(tmp_path / "good", 50)
    best = scored(good)
    for number, (how, _) in enumerate(FAULTS):
        score = spoilt(good, tmp_path / f"{number}", how, 1 / 50, seed=2)
        assert GATE + MARGIN < score < best
