"""Promise 6: the exported file draws what the trainer showed, in diffusers and by `sample`; its thumbnail."""

from __future__ import annotations

import base64
import io
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from lora_trainer.gui import drawing, drawing_process, jobs, lora_files
from lora_trainer.gui.library import try_prompts
from lora_trainer.gui.workplace import Workplace
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.run.samples import Bench, make_images
from tests.fakes.runs import QUIET, Toy, apart, pixels, problems, run_cli, toy

PROMPTS = ["a toy", "another --n mud --w 8 --h 24 --d 77 --l 3 --s 3"]
SETTINGS: dict[str, Any] = {
    "adapter__alpha": 6.5,
    "adapter__rank": 4,
    "adapter__targets": "all",
    "logging__trackers": [],
    "optimizer__learning_rate": 0.05,
    "optimizer__schedule": "constant",
    "sampling__guidance_scale": 5,
    "sampling__negative_prompt": "blurred",
    "sampling__prompts": PROMPTS,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A run with so high a learning rate that the adapter changes every pixel."""
    place = toy(tmp_path_factory.mktemp("elsewhere")).with_base()
    assert place.train(**SETTINGS) == 0
    return place


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shown(place: Toy, step: int, index: int = 0) -> Path:
    return place.run / "samples" / f"step-{step:08d}" / f"{index:02d}.png"


def sample(*arguments: str | Path) -> int:
    words = (str(argument) for argument in arguments)
    return run_cli(["sample", "--prompt", PROMPTS[0], *words])


def test_diffusers_alone_draws_what_the_trainer_showed(place: Toy) -> None:
    def drawn(place: Toy, index: int, file: Path | None) -> Any:
        pipeline = StableDiffusionPipeline.from_pretrained(
            place.base, safety_checker=None, requires_safety_checker=False
        )
        pipeline.set_progress_bar_config(disable=True)
        if file is not None:
            pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
        image = pipeline(
            ("a toy", "another")[index],
            negative_prompt=("blurred", "mud")[index],
            generator=torch.Generator().manual_seed((1234, 77)[index]),
            num_inference_steps=(2, 3)[index],
            guidance_scale=(5.0, 3.0)[index],
            width=(16, 8)[index],
            height=(16, 24)[index],
        ).images[0]
        return np.asarray(image, dtype=np.int16)

    for index in range(len(PROMPTS)):
        base, last = (pixels(shown(place, step, index)) for step in (0, 6))
        assert np.abs(drawn(place, index, None) - base).max() <= 2
        assert np.abs(drawn(place, index, place.run / "toy.safetensors") - last).max() <= 2
        assert np.abs(last - base).max() > 20, "or a file that does nothing would pass"
    # Saves at 2 and 4, samples at 3 and 6: the file of step 4 is between the two.
    between = drawn(place, 0, place.run / "toy-step00000004.safetensors")
    assert all(np.abs(between - pixels(shown(place, step))).max() > 2 for step in (3, 6))


def test_strengths_share_base_and_seed_and_files_have_their_names(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    out = tmp_path / "[odd] [/red]"
    strengths = ["--strength", "0", "--strength", "1"]
    assert sample(place.run, "--prompt", PROMPTS[1], *strengths, "--output", out) == 0
    files = [out / f"toy-{seed}-x{strength}.png" for seed in (1234, 77) for strength in (0, 1)]
    assert capsys.readouterr().out.splitlines() == list(map(str, files))
    for file, step, index in ((files[0], 0, 0), (files[1], 6, 0), (files[3], 6, 1)):
        assert apart(file, shown(place, step, index)) <= 2
    assert apart(*files[2:]) > 10


def test_a_bench_draws_each_file_with_one_base_and_the_same_bytes_as_the_command(
    place: Toy, tmp_path: Path
) -> None:
    """Another strength, another file and back, and a file that cannot be loaded between: each as if drawn alone."""
    last, saved = place.run / "toy.safetensors", place.run / "toy-step00000004.safetensors"
    tensors = load_file(saved)
    tensors[next(key for key in tensors if key.endswith(".weight"))] = torch.zeros(3, 5)
    save_file(tensors, tmp_path / "broken.safetensors", {"format": "pt"})
    bench, base, loaded = Bench(), str(place.base), list[Any]()

    def alone(file: Path, strength: float) -> bytes:
        out = tmp_path / f"{file.stem}-{strength}"
        assert sample(file, "--base", base, f"--strength={strength}", "--output", out) == 0
        return (out / f"{file.stem}-1234.png").read_bytes()

    def kept(file: Path, strength: float) -> bytes:
        drawn = make_images(
            file,
            prompts=PROMPTS[:1],
            base=base,
            output=tmp_path / "kept",
            seed=1234,
            strengths=[strength],
            bench=bench,
        )
        (image,) = drawn
        loaded.append(bench.pipeline)
        return image.read_bytes()

    half = alone(last, 0.5)
    assert kept(last, 1.0) == alone(last, 1.0) != half
    assert kept(last, 0.5) == half
    assert kept(saved, 1.0) == alone(saved, 1.0)
    with pytest.raises(Exception, match="size mismatch"):
        bench.load(tmp_path / "broken.safetensors", base=base)
    assert bench.pipeline is None, "nobody knows what is left in its networks"
    assert kept(last, 0.5) == half
    assert loaded[0] is loaded[1] is loaded[2]
    assert loaded[2] is not loaded[3]


def test_the_process_of_the_pages_draws_the_same_bytes_says_why_not_and_ends_when_nothing_waits(
    place: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = place.copy(tmp_path / "runs")
    work = Workplace(runs=copied.run.parent)
    last = lora_files.find(work, "toy/toy.safetensors")
    saved = lora_files.find(work, "toy/toy-step00000004.safetensors")
    out, base = tmp_path / "alone", str(place.base)
    for file in (last, saved):
        assert sample(file.path, "--base", base, "--strength=0.5", "--output", out) == 0
    monkeypatch.setattr(drawing, "_begin", lambda work, folder: None)
    wish = try_prompts.wish(
        prompts=PROMPTS[0], strengths="0.5", seed=None, base=base, others=[saved.ref]
    )
    drawn = try_prompts.start(work, last, wish)
    with pytest.raises(RequestError, match="drawn already"):
        try_prompts.start(work, last, wish)
    told = list[tuple[str, int]]()
    monkeypatch.setattr(
        drawing_process, "keep", lambda *, gpu_uuid, gpu_bytes: told.append((gpu_uuid, gpu_bytes))
    )
    monkeypatch.setattr(drawing_process, "_TOLD_EACH_S", 0.0)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        drawer = drawing_process.Drawer(work=work, kept_s=0)
        drawer.serve()
        assert drawing.Folder.of(work).process() is None, "it has ended and says so"
        assert {path.read_bytes() for path in try_prompts.images(work, drawn).values()} == {
            path.read_bytes() for path in out.iterdir()
        }
        assert told and set(told) == {("", 0)}, "without a GPU"
        far = drawing.far(drawn)
        assert far is not None and (far.pictures, far.step, far.steps) == (1, 1, 2)
        assert jobs.read(work, drawn.id).state == "finished"
        # The same process, asked again: for a file that is gone, and for one whose pictures nobody wants any more.
        saved.path.unlink()
        failed = jobs.hand_over(work, kind=try_prompts.KIND, about=drawn.about)
        drawing.ask(work, failed)
        drawer.serve()
        failed = jobs.read(work, failed.id)
        assert failed.exit_code == InputError.exit_code
        assert "toy-step00000004.safetensors" in failed.error()
        stopped = jobs.hand_over(work, kind=try_prompts.KIND, about=drawn.about)
        drawing.ask(work, stopped)
        drawing.stop(stopped)
        drawer.serve()
        assert jobs.read(work, stopped.id).exit_code == drawing.STOPPED
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_a_file_draws_with_the_base_given_and_does_not_say_where_its_own_was(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was trained with other sampling steps than a foreign file gets; it says so itself."""
    file = place.run / "toy.safetensors"
    assert sample(file, "--base", place.base) == 0
    assert apart(tmp_path / "samples" / "toy-1234.png", shown(place, 6)) <= 2
    capsys.readouterr()
    assert sample(file) in (2, 3)
    assert "--base" in capsys.readouterr().err


def test_a_run_that_has_not_finished_draws_with_its_newest_file_and_none_is_one_line(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = place.copy(tmp_path / "runs")
    (copied.run / "toy.safetensors").unlink()
    # A name is not a pattern of names.
    record, rolling = copied.run / "run.json", copied.run / "toy-step00000004.safetensors"
    record.write_text(record.read_text().replace('"name": "toy"', '"name": "t[o]y"'))
    rolling.rename(rolling.with_name("t[o]y-step00000004.safetensors"))
    assert sample(copied.run) == 0
    assert (tmp_path / "samples" / "t[o]y-step00000004-1234.png").is_file()
    for file in copied.run.glob("*.safetensors"):
        file.unlink()
    (tmp_path / "empty").mkdir()
    for target, code, why in (
        (copied.run, 3, "has no exported file yet"),
        (tmp_path / "empty", 3, "not a run folder"),
        (tmp_path / "absent.safetensors", 3, "absent.safetensors"),
        (place.run, 2, "a strength is not a finite number"),
    ):
        capsys.readouterr()
        assert sample(target, *(["--strength", "nan"] if code == 2 else [])) == code
        error = capsys.readouterr().err
        assert why in error and error.count("\n") == 1


DEEP = '{"data.folders":' + '{"a":' * 600 + "1" + "}" * 601


@pytest.mark.parametrize("text", ["{", '["a"]', "[" * 100_000, DEEP, None])
def test_a_file_that_does_not_say_its_base_needs_it(
    text: str | None, place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, tensors = tmp_path / "odd.safetensors", load_file(place.run / "toy.safetensors")
    save_file(tensors, file, metadata={"lora_train.settings": text} if text else None)
    assert sample(file) == 2
    error = capsys.readouterr().err
    assert "does not say which base it was trained on" in error and "--base" in error
    if text is None:
        assert sample(file, "--base", place.base) == 0
        assert (tmp_path / "samples" / "odd-1234.png").is_file()


def thumbnail(file: Path) -> tuple[str, tuple[int, int]] | None:
    """Return the mode and size of the thumbnail in the header of an exported file."""
    with safe_open(file, framework="np") as tensors:
        kind, _, data = tensors.metadata().get("modelspec.thumbnail", "").partition(";base64,")
    if not data:
        return None
    assert kind == "data:image/jpeg" and len(data) <= 48_000 * 4 / 3 + 4
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    return image.mode, image.size


def noise(file: Path, width_px: int, height_px: int) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (height_px, width_px, 3), dtype=np.uint8)
    file.parent.mkdir(parents=True)
    Image.fromarray(pixels).save(file)
    return file


def test_the_newest_sample_is_the_thumbnail_and_one_that_cannot_be_read_costs_the_thumbnail_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reduced and never enlarged; each export of the run finds another image."""
    sizes = {"a": (300, 600), "b": (8, 8), "cut": (64, 64), "nothing": (8, 8)}
    images = [noise(tmp_path / name / "00.png", *size) for name, size in sizes.items()]
    images[2].write_bytes(images[2].read_bytes()[:2000])
    images[3].write_bytes(b"nothing")
    left = iter([*images, tmp_path / "gone" / "00.png"])
    monkeypatch.setattr("lora_trainer.run.saving.own_samples", lambda _, up_to: [next(left)])
    place = toy(tmp_path, images=3).with_base()
    assert place.train(steps=5, output__save_every_steps=1, output__keep_last=9, **QUIET) == 0
    files = [place.run / f"toy-step{step:08d}.safetensors" for step in range(1, 5)]
    expected = [("RGB", (128, 256)), ("RGB", (8, 8)), None, None, None]
    assert list(map(thumbnail, (*files, place.run / "toy.safetensors"))) == expected
    rows = [row for row in problems(place.run) if "thumbnail" in row["what"]]
    assert [row["severity"] for row in rows] == ["note"] * 3
    for row, folder in zip(rows, ("cut", "nothing", "gone"), strict=True):
        assert f"{folder}/00.png" in row["what"]
        assert str(tmp_path) not in row["what"], "no path of this machine"
