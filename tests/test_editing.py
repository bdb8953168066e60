"""A LoRA that edits, by the real command: from pairs of reference images and an image to the sample images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from lora_trainer import families
from lora_trainer.cache.cache_plan import SampleSource, SampleView, SeeingTexts
from lora_trainer.cache.store import CacheKey
from lora_trainer.checkpoint.states import ADAPTER
from lora_trainer.lora_file.read import read_contents
from lora_trainer.run.image_losses import _with_other_captions
from tests.fakes.family_bases import base_of, copy_of, edit_json, unet_that_edits
from tests.fakes.runs import (
    BETWEEN_SAVES,
    Toy,
    apart,
    assert_same_run,
    events,
    last_state,
    problems,
    run_cli,
    run_in_processes,
    run_killed,
    toy,
    trajectory,
)
from tests.fakes.studio import draw
from tests.fakes.training import distance

pytestmark = pytest.mark.timeout(400)  # a loaded machine is not a failure
SETTINGS: Mapping[str, Any] = {
    "adapter__rank": 4,
    "data__reference_dropout": 0.2,
    # A pipeline refuses references with a side below 64 px.
    "data__reference_resolution": 96,
    "data__validation_fraction": 0.25,
    "logging__trackers": [],
    "memory__gradient_checkpointing": "none",
    "memory__micro_batch": 2,
    "optimizer__learning_rate": 0.02,
    "optimizer__schedule": "constant",
    "output__precision": "fp32",
    "sampling__every_steps": 5,
    "sampling__prompts": [],
    "train__batch_size": 2,
    "train__precision": "fp32",
    "train__validate_every_steps": 5,
}


@dataclass(frozen=True, kw_only=True)
class Place(Toy):
    """Four images of which three have a reference, of another shape each, and one has two."""

    name: str

    @property
    def base(self) -> Path:
        return base_of(self.name)

    def command(self, run: str, *more: str, **settings: Any) -> list[str]:
        chosen = {**SETTINGS, "data__resolution": 32, **settings}
        return self.arguments("--name", run, *more, steps=5, **chosen)


def pairs(folder: Path, name: str) -> Place:
    place = Place(folder=toy(folder, images=4).folder, name=name)
    for index, size in enumerate(((96, 96), (110, 72), (64, 96))):
        write(place.dataset / "references", index, size)
    write(place.dataset / "references_2", 0, (72, 80))
    return place


def write(folder: Path, index: int, size: tuple[int, int], *, seed: int = 50) -> None:
    folder.mkdir(exist_ok=True)
    draw(folder / f"p{index}.png", seed=seed + index, size=size)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Pairs with an uninterrupted run `whole`, and a killed one beside it."""
    place = pairs(tmp_path_factory.mktemp("editing"), "flux2")
    assert run_cli(place.command("whole", output__measure=True)) == 0
    run_killed([(place.command("killed"), BETWEEN_SAVES)])
    return place


def test_a_killed_run_of_pairs_goes_on_to_the_same_bits(place: Place) -> None:
    assert run_cli(place.command("killed", "--resume")) == 0
    assert_same_run(place.runs / "killed", place.runs / "whole")


def test_passes_of_one_image_give_the_same_numbers(place: Place) -> None:
    assert run_cli(place.command("single", memory__micro_batch=1, sampling__every_steps=0)) == 0
    one, two = (trajectory(place.runs / run) for run in ("single", "whole"))
    for row, other in zip(one, two, strict=True):
        assert row[1:] == pytest.approx(other[1:], rel=1e-4)


def test_references_are_in_what_is_trained_and_drawn(place: Place) -> None:
    whole = place.runs / "whole"
    said = [each["what"] for each in problems(whole) if each["severity"] != "note"]
    assert said == ["images without a reference image (1): p3.png"]
    (cached,) = events(whole, "cached")
    # Four images and four references, each once.
    assert cached["latents"] == 8
    plain = {"data__references": "none", "data__reference_dropout": 0.0}
    assert run_cli(place.command("plain", **plain)) == 0
    assert events(place.runs / "plain", "cached")[0]["latents"] == 0, (
        "the images themselves are known"
    )
    for run in (whole, place.runs / "plain"):
        assert events(run, "sample")[-1]["images"]
    first = "samples/step-00000000/00.png"
    assert apart(whole / first, place.runs / "plain" / first) > 5, "the same seed and prompt"
    before, after = (
        {event["step"]: event["loss"] for event in events(place.runs / run, "validation")}
        for run in ("plain", "whole")
    )
    assert before[0] != after[0]


def test_a_changed_reference_is_encoded_again_and_nothing_else(
    place: Place, tmp_path: Path
) -> None:
    dataset = shutil.copytree(place.dataset, tmp_path / "toy")
    write(dataset / "references", 1, (110, 72), seed=90)
    line = place.command("changed", sampling__every_steps=0, train__validate_every_steps=0)
    line[0], line[line.index("--steps") + 1] = str(dataset), "2"
    assert run_cli(line) == 0
    cached = events(place.runs / "changed", "cached")[0]
    assert (cached["latents"], cached["texts"], cached["masks"]) == (1, 0, 0)


def test_a_finished_file_edits_an_image_as_the_training_showed(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = place.runs / "whole"
    images = events(whole, "sample")[-1]["images"]
    sample = next(each for each in images if each["prompt"] == "a toy with 0 legs")
    references = sorted(place.dataset.glob("references*/p0.png"))
    line = [
        "sample",
        str(whole),
        "--prompt",
        f"{sample['prompt']} --s 2",
        "--output",
        str(tmp_path),
    ]
    line += ["--seed", str(sample["seed"])]
    for each in references:
        line += ["--reference", str(each)]
    assert len(references) == 2 and run_cli(line) == 0
    (drawn,) = tmp_path.glob("*.png")
    assert apart(drawn, whole / sample["file"]) <= 2
    capsys.readouterr()
    assert run_cli([*line, *(["--reference", str(references[0])] * 4)]) == 2
    assert "reads at most 4" in " ".join(capsys.readouterr().err.split())


def test_the_plan_says_what_references_cost(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked(**settings: Any) -> list[str]:
        line = place.command("planned", **settings)
        return [
            "plan",
            *line[:3],
            *line[7:-2],
        ]  # without the folder of the runs, the steps and the name

    capsys.readouterr()
    assert run_cli(asked()) == 0
    assert "3 of 4 images have 1 to 2; a step computes" in " ".join(capsys.readouterr().out.split())
    peaks = []
    for references in ("files", "none"):
        line = asked(data__references=references, data__reference_dropout=0.0)
        assert run_cli([*line, "--json"]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["memory"]["phases"]["training"])
    assert peaks[0] > peaks[1]


def test_the_file_says_that_it_was_trained_on_pairs(place: Place) -> None:
    metadata = read_contents(place.runs / "whole" / "whole.safetensors").metadata
    assert metadata["lora_train.references"] == "2"


def test_a_base_that_does_not_edit_refuses_pairs(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Place(folder=place.folder, other_runs=tmp_path, name="sd15")
    capsys.readouterr()
    line = other.command("refused", data__reference_dropout=0.0)
    assert run_cli(line) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "references/ holds reference images, which" in said
    assert "(family sd15) does not read" in said and "flux2" in said


def test_a_release_that_edits_beside_one_that_does_not(place: Place, tmp_path: Path) -> None:
    """FLUX.1 dev and Kontext have the same network: the folder's index tells them apart."""
    line = place.command("kontext", data__reference_dropout=0.0, sampling__steps=1)
    base = copy_of("flux", tmp_path / "base")
    line[2], line[line.index("--steps") + 1] = str(base), "2"
    line = [each.replace("sampling.every_steps=5", "sampling.every_steps=2") for each in line]
    line = [each.replace("validate_every_steps=5", "validate_every_steps=2") for each in line]
    assert run_cli(line) == 2, "dev reads no references"
    edit_json(base / "model_index.json", _class_name="FluxKontextPipeline")
    shutil.rmtree(shutil.copytree(place.dataset, tmp_path / "toy") / "references_2")
    line[0] = str(tmp_path / "toy")
    assert run_cli(line) == 0
    run = place.runs / "kontext"
    assert events(run, "cached")[0]["latents"] == 7
    assert len(events(run, "sample")[-1]["images"]) > 1


def test_layers_that_only_references_go_through_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = pairs(tmp_path, "flux3")

    every = {"sampling__every_steps": 5, "train__validate_every_steps": 0}

    def run(name: str, *more: str, **settings: Any) -> Path:
        assert run_cli(place.command(name, *more, **{**every, **settings})) == 0
        return place.runs / name

    def planned(**settings: Any) -> int:
        line = place.command("planned", **settings)
        capsys.readouterr()
        assert run_cli(["plan", *line[:3], *line[7:-2], "--json"]) == 0
        plan: int = json.loads(capsys.readouterr().out)["memory"]["phases"]["training"]
        return plan

    trained = {"data__validation_fraction": 0, "output__measure": True}
    with_pairs = run("pairs", **trained)
    run_killed([(place.command("killed", **trained, **every), BETWEEN_SAVES)])
    assert_same_run(run("killed", "--resume", **trained), with_pairs)
    plain = {"data__references": "none", "data__reference_dropout": 0.0}
    alone = run("alone", data__validation_fraction=0, sampling__every_steps=0, **plain)
    layers = [
        {
            key
            for key in read_contents(each / f"{each.name}.safetensors").parts
            if "image_cond" in key
        }
        for each in (with_pairs, alone)
    ]
    assert layers[0] and not layers[1]
    assert planned() > planned(**plain)
    sample = events(with_pairs, "sample")[-1]["images"][0]
    index = int(sample["prompt"].split()[3])
    line = ["sample", str(with_pairs), "--prompt", f"{sample['prompt']} --s 2"]
    line += ["--output", str(tmp_path / "drawn"), "--seed", str(sample["seed"])]
    for each in sorted(place.dataset.glob(f"references*/p{index}.png")):
        line += ["--reference", str(each)]
    assert "--reference" in line and run_cli(line) == 0
    (drawn,) = (tmp_path / "drawn").glob("*.png")
    assert apart(drawn, with_pairs / sample["file"]) <= 2


def test_two_processes_with_pairs_are_one_training(tmp_path: Path) -> None:
    """A step may give references to one of them only: the layers of references get their gradient from it alone."""
    place = pairs(tmp_path, "flux3")
    few = {"sampling__every_steps": 5, "output__measure": True}
    one, two = (place.command(name, data__reference_dropout=0.3, **few) for name in ("one", "two"))
    assert run_cli(one) == 0
    log = tmp_path / "two.log"
    assert run_in_processes(two, 2, log) == [0, 0], log.read_text()
    ours, theirs = (place.runs / name for name in ("two", "one"))
    for row, other in zip(trajectory(ours), trajectory(theirs), strict=True):
        assert row[1:] == pytest.approx(other[1:], rel=1e-4)
    losses = [[row["loss"] for row in events(each, "validation")] for each in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    states = [load_file(last_state(each) / ADAPTER) for each in (ours, theirs)]
    assert states[0].keys() == states[1].keys()
    of_references = {key for key in states[1] if "image_cond" in key}
    assert of_references and of_references < states[1].keys()
    for keys in (of_references, states[1].keys() - of_references):
        numbers = [[state[key] for key in sorted(keys)] for state in states]
        assert distance(*numbers) < 1e-3
    left = [
        {file.relative_to(run).as_posix().replace(run.name, "NAME") for file in run.rglob("*.*")}
        for run in (ours, theirs)
    ]
    assert left[0] - left[1] == set() or all("process" in name for name in left[0] - left[1])
    assert left[1] <= left[0]


@pytest.fixture(scope="module", params=["qwen", "qwen21"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Pairs for a base whose text encoder sees the references, with a run `whole`."""
    place = pairs(tmp_path_factory.mktemp("seen"), request.param)
    base = copy_of(request.param, place.folder / "base")
    if request.param == "qwen":
        edit_json(base / "model_index.json", _class_name="QwenImageEditPlusPipeline")
        edit_json(base / "transformer" / "config.json", zero_cond_t=True)
    place = SeenPlace(folder=place.folder, name=request.param)
    assert run_cli(place.command("whole", output__measure=True)) == 0
    return place


@dataclass(frozen=True, kw_only=True)
class SeenPlace(Place):
    @property
    def base(self) -> Path:
        return self.folder / "base"

    def command(self, run: str, *more: str, **settings: Any) -> list[str]:
        own: dict[str, Any] = {}
        if self.name == "qwen21":
            # It has 16 pixels for each latent; joined layers are parted by the widths of the releases alone.
            own = {"data__resolution": 64, "output__format": "diffusers"}
        return super().command(run, *more, **own, **settings)


def test_a_killed_run_goes_on_to_the_same_bits_where_texts_see_the_references(seen: Place) -> None:
    run_killed([(seen.command("killed"), BETWEEN_SAVES)])
    assert run_cli(seen.command("killed", "--resume")) == 0
    assert_same_run(seen.runs / "killed", seen.runs / "whole")


def test_texts_are_read_with_the_references_that_are_seen(seen: Place) -> None:
    (cached,) = events(seen.runs / "whole", "cached")
    assert cached["latents"] == 8
    # Of the three images with references the caption and the empty text, with the references and, for the share of
    # samples that drops them, without: 6 + 3 + 1; the caption of the fourth image: 1.
    assert cached["texts"] == 11
    one, two = (
        {event["step"]: event["loss"] for event in events(seen.runs / "whole", "validation")}[step]
        for step in (0, 5)
    )
    assert two < one


def test_a_changed_reference_is_seen_anew_and_nothing_else(seen: Place, tmp_path: Path) -> None:
    dataset = shutil.copytree(seen.dataset, tmp_path / "toy")
    write(dataset / "references", 1, (110, 72), seed=90)
    line = seen.command("changed", sampling__every_steps=0, train__validate_every_steps=0)
    line[0], line[line.index("--steps") + 1] = str(dataset), "2"
    assert run_cli(line) == 0
    (cached,) = events(seen.runs / "changed", "cached")
    # Its latents; of its image the caption and the empty text.
    assert (cached["latents"], cached["texts"], cached["masks"]) == (1, 2, 0)


def test_a_finished_file_edits_what_its_text_encoder_sees(seen: Place, tmp_path: Path) -> None:
    whole = seen.runs / "whole"
    images = events(whole, "sample")[-1]["images"]
    sample = next(each for each in images if each["prompt"] == "a toy with 0 legs")
    line = ["sample", str(whole), "--prompt", f"{sample['prompt']} --s 2"]
    line += ["--output", str(tmp_path), "--seed", str(sample["seed"])]
    for each in sorted(seen.dataset.glob("references*/p0.png")):
        line += ["--reference", str(each)]
    assert run_cli(line) == 0
    (drawn,) = tmp_path.glob("*.png")
    assert apart(drawn, whole / sample["file"]) <= 2
    assert run_cli(["validate", str(whole), str(seen.dataset), "--json"]) == 0


def test_mirrored_images_are_read_with_mirrored_references(seen: Place) -> None:
    few = {"sampling__every_steps": 0, "train__validate_every_steps": 0}
    line = seen.command("views", data__flip=True, **few)
    line[line.index("--steps") + 1] = "2"
    assert run_cli(line) == 0
    (cached,) = events(seen.runs / "views", "cached")
    assert (cached["latents"], cached["texts"]) == (8, 6)


def test_captions_change_places_though_the_images_of_one_folder_are_mirrored() -> None:
    """Each image is measured with another caption, which its own references may have been seen with."""
    keys = [CacheKey.of("text", text=str(number)) for number in range(4)]
    seeing = [SeeingTexts(texts=(key,), of_class=(), empty=key) for key in keys[2:]]
    views = [SampleView(latents=keys[0], geometry={}, seeing=each) for each in seeing]
    sources = [
        SampleSource(views=(views[0],) * 2, texts=(keys[0],), size_px=(8, 8)),
        SampleSource(views=(views[1],), texts=(keys[1],), size_px=(8, 8)),
    ]
    records: Any = [SimpleNamespace(caption=caption) for caption in ("a cat", "a dog")]
    swapped = _with_other_captions(records, sources)
    assert [one.texts for one in swapped] == [(keys[1],), (keys[0],)]
    assert [one.views[0].seeing for one in swapped] == [seeing[1], seeing[0]]
    # A text that was read with other numbers of references has no place for these.
    fewer = [replace(sources[0], references_px=((8, 8),)), sources[1]]
    assert [one.texts for one in _with_other_captions(records, fewer)] == [(keys[0],), (keys[1],)]


def test_a_unet_that_edits_is_trained_killed_and_resumed(tmp_path: Path) -> None:
    """A reference of another shape is cut as its image is, and left out at times; samples are drawn with it."""
    place = Place(folder=toy(tmp_path, images=3).folder, name="sd15")
    for index, size in enumerate(((64, 64), (96, 64), (64, 96))):
        write(place.dataset / "references", index, size)
    base = unet_that_edits("sd15", tmp_path / "base").located.folder

    def command(run: str, *more: str) -> list[str]:
        own = {"data__reference_resolution": None, "output__measure": run == "whole"}
        line = place.command(run, *more, data__resolution=64, **own)
        line[line.index("--base") + 1] = str(base)
        return line

    assert run_cli(command("whole")) == 0
    (cached,) = events(place.runs / "whole", "cached")
    assert cached["latents"] == 6
    assert events(place.runs / "whole", "sample")[-1]["images"]
    run_killed([(command("killed"), BETWEEN_SAVES)])
    assert run_cli(command("killed", "--resume")) == 0
    assert_same_run(place.runs / "killed", place.runs / "whole")
    other = [*command("other"), "--set", "data.reference_resolution=64"]
    assert run_cli(other) == 2


def test_families_that_edit_are_said() -> None:
    assert "flux2" in families.editing() and "zimage" not in families.editing()


def test_mirrored_images_other_sizes_and_validate_have_their_references(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"sampling__every_steps": 0, "train__validate_every_steps": 0}
    line = place.command("views", data__flip=True, data__more_resolutions=[64], **few)
    line[line.index("--steps") + 1] = "2"
    assert run_cli(line) == 0
    # As they are and at 32 px all are known. New: four images and four references mirrored, and at 64 px the three
    # trained images both ways. References keep their own size.
    assert events(place.runs / "views", "cached")[0]["latents"] == 8 + 6
    capsys.readouterr()
    assert run_cli(["validate", str(place.runs / "whole"), str(place.dataset), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"]["gain"] > 0.5
