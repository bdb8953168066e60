"""Whole runs with all options of captions, masks, priors, noise, loss, average, new tokens and text encoders at once.

One training with everything is killed at three points and resumed, split otherwise, exported and drawn; what
belongs to one option is read from what it left.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from lora_trainer.checkpoint.states import ADAPTER
from lora_trainer.lora_file.inspect import inspect_file
from lora_trainer.reporting.run_record import read as read_record
from lora_trainer.run import prepare
from tests.fakes.family_bases import copy_of
from tests.fakes.runs import (
    QUIET,
    ROOT,
    Point,
    Toy,
    apart,
    assert_same_run,
    events,
    listing,
    problems,
    run_cli,
    run_killed_elsewhere,
    same_tensors,
    settings_of,
    toy,
    trajectory,
    write_dataset,
    write_priors,
)
from tests.test_prepare import PROCESSOR

pytestmark = pytest.mark.timeout(600)  # a loaded machine is not a failure
EVERYTHING = str(ROOT / "tests" / "fakes" / "everything.toml")
KILLS: dict[str, Point] = {
    "caching": ("lora_trainer.cache.store", "Cache.write", 3, False),
    "step": ("lora_trainer.training.loss", "Model.losses_of", 30, True),
    "best": ("lora_trainer.run.saving", "write_atomic", 1, False),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The uninterrupted run, and one killed at each point; the one killed while caching has its own cache."""
    place = toy(tmp_path_factory.mktemp("options"), images=4).with_base()
    write_dataset(place.dataset / "more", images=2, first=4, name="m")
    for file in place.dataset.rglob("*.txt"):
        lines = [f"toy ||| {{red|blue}} hat, a;;;b, (c:1.4), d{line} ||| x" for line in range(2)]
        file.write_text("\n".join(lines))
    (place.folder / "priors.json").write_text(json.dumps(write_priors(place)))
    before = listing(place.dataset), listing(place.folder / "others")
    assert run_cli(command(place, "toy")) == 0
    assert (listing(place.dataset), listing(place.folder / "others")) == before
    run_killed_elsewhere([(command(place, name), point) for name, point in KILLS.items()])
    return place


def command(place: Toy, name: str, *more: str, **changes: Any) -> list[str]:
    priors = json.loads((place.folder / "priors.json").read_text())
    if name == "caching":
        changes["data__cache_dir"] = str(place.folder / "cache of its own")
    shown: dict[str, Any] = {"sampling__prompts": ["a zwx toy"], "train__validate_every_steps": 2}
    shown["output__measure"] = name == "toy"
    named = ("--name", name, "--config", EVERYTHING)
    return place.arguments(*named, *more, **{**shown, **priors, **changes})


def state(run: Path, step: int, prefix: str) -> dict[str, Any]:
    """Return the tensors of a state whose names begin so."""
    tensors = load_file(run / "states" / f"step-{step:08d}" / ADAPTER)
    return {name: tensors[name] for name in tensors if name.startswith(prefix)}


def exported(run: Path) -> dict[str, Any]:
    """Return the denoiser's adapter in an exported file, by the names of the state."""
    file = load_file(run / f"{run.name}.safetensors")
    return {key: file[key] for key in file if "unet" in key and not key.endswith("alpha")}


def as_exported(tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the denoiser's tensors of a state by the names of an exported file."""
    sides = {"down": "lora_down.weight", "up": "lora_up.weight"}
    names = {}
    for name, tensor in tensors.items():
        module, _, side = name.removeprefix(f"{prefix}denoiser.").rpartition(".")
        names[f"lora_unet_{module.replace('.', '_')}.{sides[side]}"] = tensor
    return names


@pytest.mark.parametrize("name", KILLS)
def test_a_killed_run_goes_on_to_the_same_bits(name: str, place: Toy) -> None:
    run = place.runs / name
    assert not (run / f"{name}.safetensors").exists()
    assert run_cli(command(place, name, "--resume")) == 0
    (resumed,) = events(run, "resumed")
    assert resumed["exactness"] == "EXACT", resumed["differences"]
    assert_same_run(run, place.run)


def test_the_split_of_a_step_changes_rounding_alone_and_what_is_shown_no_training(
    place: Toy,
) -> None:
    """The split run also shows and exports what was trained, where the other one has its average."""
    assert run_cli(command(place, "split", memory__micro_batch=1, output__weights="trained")) == 0
    split = place.runs / "split"
    one, other = (
        # But for the best, which is another step's where others are validated.
        np.concatenate(
            [ours[name].ravel() for name in sorted(ours) if not name.startswith("best.")]
        )
        for ours in (state(run, 6, "") for run in (split, place.run))
    )
    # AdamW hides the scale of small gradients and shows their rounding (1 % of one tensor of 60 was seen), so steps
    # are compared more closely.
    assert np.linalg.norm(one - other) < 3e-3 * np.linalg.norm(other)
    for ours, theirs in zip(trajectory(split), trajectory(place.run), strict=True):
        assert ours == pytest.approx(theirs, rel=3e-5)
    shown, averaged = (
        [row["loss"] for row in events(at, "validation")] for at in (split, place.run)
    )
    assert shown[0] == pytest.approx(averaged[0], rel=1e-5), "the base"
    assert shown[-1] != pytest.approx(averaged[-1], rel=3e-5)


def test_the_average_is_exported_or_what_was_trained(place: Toy, tmp_path: Path) -> None:
    """The other one of a finished run takes a resume, which trains nothing."""
    run = place.copy(tmp_path / "runs").run
    trained, averaged = (
        as_exported(state(run, 6, f"{prefix}denoiser."), prefix) for prefix in ("", "average.")
    )
    assert same_tensors(exported(run), averaged) and not same_tensors(trained, averaged)
    (vectors,) = load_file(run / "embeddings" / "toy_emb.safetensors").values()
    assert np.array_equal(vectors, *state(run, 6, "average.new_tokens.").values())
    assert not np.array_equal(vectors, *state(run, 6, "new_tokens.").values())
    embeddings = {path.name for path in (run / "embeddings").iterdir()}
    assert embeddings == {f"{path.stem}_emb.safetensors" for path in run.glob("*.safetensors")}
    line = command(place, "toy", "--resume", output__weights="trained")
    line[line.index("--output") + 1] = str(run.parent)
    assert run_cli(line) == 0
    assert same_tensors(exported(run), trained)
    # With `output.keep_best`, because then what is validated decides what is kept.
    assert [row["exactness"] for row in events(run, "resumed")] == ["CHANGED"]
    assert trajectory(run) == trajectory(place.run)


def test_text_encoders_and_new_tokens_stop_when_they_are_asked_to(place: Toy) -> None:
    at = {step: state(place.run, step, "") for step in (2, 4, 6)}

    def changed(before: int, after: int) -> set[str]:
        moved = {name for name in at[2] if not np.array_equal(at[before][name], at[after][name])}
        return {name.partition(".")[0] for name in moved} - {"best"}

    parts = {name.partition(".")[0] for name in at[2]} - {"best"}
    assert parts == changed(2, 4) | {"text_encoder"} and "new_tokens" in changed(2, 4)
    assert changed(4, 6) == {"denoiser", "average"}, "averages go on to what the weights became"


def test_something_must_be_left_to_train(place: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    stopping: dict[str, Any] = {
        "adapter__new_tokens": 2,
        "adapter__text_encoder": True,
        "data__trigger": "toy",
        "optimizer__learning_rate_pattern": {"denoiser|down_blocks|up_blocks|mid_block": 0.0},
        "train__new_tokens_until": 0.7,
        "train__text_encoder_until": 0.5,
    }
    assert place.train("--name", "frozen", **stopping) == 2
    assert "nothing is left to train" in capsys.readouterr().err


def test_no_update_is_larger_than_the_limit(place: Toy) -> None:
    tensors = state(place.run, 6, "denoiser.")
    norms = []
    for name, down in tensors.items():
        if name.endswith(".down"):
            up = tensors[f"{name.removesuffix('down')}up"]
            norms.append(np.linalg.norm(up.reshape(len(up), -1) @ down.reshape(len(down), -1)))
    assert max(norms) == pytest.approx(0.05, rel=1e-4), "some reach it"


def test_the_run_and_its_file_say_what_is_trained(place: Toy) -> None:
    record = read_record(place.run)
    assert record.dataset.images == 6, "what is learned"
    assert len(record.plan.memory.images_at_once) > 3, "two resolutions"
    time = record.plan.time
    (started,) = events(place.run, "run_started")
    assert (started["images"], started["regularisation_images"]) == (5, 3)
    with safe_open(place.run / "toy.safetensors", framework="numpy") as file:
        header = file.metadata()
    expected = {
        "ss_ip_noise_gamma": "0.1",
        "ss_loss_type": "huber",
        "ss_network_dropout": "0.1",
        "ss_noise_offset": "0.05",
        "ss_num_reg_images": str(time.regularisation_per_epoch),
        "ss_prior_loss_weight": "0.8",
        "ss_scale_weight_norms": "0.05",
    }
    assert {key: header[key] for key in expected} == expected
    assert any(
        "images have no mask, so the whole image counts" in row["what"]
        for row in problems(place.run)
    )


def test_what_is_planned_is_what_is_encoded(place: Toy) -> None:
    """Of six images with two resolutions one is held out, those in `more` are mirrored too, three are priors."""
    run = place.runs / "caching"
    (cached,) = events(place.run, "cached")
    held_out = read_record(place.run).dataset.held_out
    mirrored = [name for name in ("more/m0.png", "more/m1.png") if name not in held_out]
    twice = len(held_out) - (2 - len(mirrored))
    assert cached["latents"] == 5 * 2 + 2 * len(mirrored) + 1 + (1 - twice) + 3 * 2
    files = (place.folder / "cache of its own").rglob("*.safetensors")
    planned = read_record(run).plan.disk["cache"]
    assert 0 < sum(file.stat().st_size for file in files) <= 1.2 * planned


def test_the_file_draws_what_the_trainer_showed_with_its_new_tokens(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = [place.run / "samples" / f"step-{step:08d}" / "00.png" for step in (0, 6)]
    assert apart(*shown) > 10
    line = ["--prompt", "a zwx toy", "--output", str(tmp_path)]
    assert run_cli(["sample", str(place.run), *line]) == 0
    assert apart(tmp_path / "toy-1234.png", shown[1]) <= 2
    alone = shutil.copy(place.run / "toy.safetensors", tmp_path)
    assert run_cli(["sample", alone, *line, "--base", str(place.base)]) == 3
    assert "toy_emb.safetensors" in capsys.readouterr().err
    embedding = place.run / "embeddings" / "toy_emb.safetensors"
    assert [problem.kind for problem in inspect_file(Path(alone)).problems] == ["needs-embedding"]
    assert inspect_file(embedding).embeddings == {"emb_params": (2, 16)}
    assert run_cli(["inspect", str(embedding)]) == 0
    assert "2 new tokens of 16 numbers" in capsys.readouterr().out
    whole = [str(place.run / "toy.safetensors"), "--base", str(place.base)]
    for tool in (["convert", *whole, "--format", "kohya"], ["resize", *whole, "--rank", "1"]):
        target = f"{tmp_path}/{tool[0]}.safetensors"
        assert run_cli([*tool, "--output", target]) == 0
        copied = f"copy {embedding} to embeddings/{tool[0]}_emb.safetensors"
        assert copied in capsys.readouterr().out


OTHERWISE: dict[str, Any] = {
    "data__class_word": "object",
    "data__emphasis": False,
    "data__folders": {"more": {"flip": True, "repeats": 2, "tag_dropout": 0.0}},
    "data__masks": "none",
    "data__regularisation_ratio": 0.2,
}
"""What the dataset becomes by them; weights of the loss are those of tests/train/test_priors.py."""


@pytest.fixture(scope="module")
def as_is(place: Toy) -> list[tuple[Any, ...]]:
    return two_steps(place, "as-is")


def two_steps(place: Toy, name: str, **changes: Any) -> list[tuple[Any, ...]]:
    quiet = {"output__measure": False, "output__save_every_steps": 0, "sampling__every_steps": 0}
    quiet |= {"train__validate_every_steps": 0, "train__text_encoder_until": 1.0}
    quiet |= {"output__keep_best": False}
    quiet |= {"train__batch_size": 9}
    line = command(place, name, **{**quiet, **changes})
    line[line.index("--steps") + 1] = "2"
    assert run_cli(line) == 0
    return trajectory(place.runs / name)


@pytest.mark.parametrize("key", OTHERWISE)
def test_each_setting_is_in_force(key: str, place: Toy, as_is: list[tuple[Any, ...]]) -> None:
    name = key.replace("_", "-")
    assert two_steps(place, name, **{key: OTHERWISE[key]}) != as_is


def test_keeping_the_best_trains_alike(place: Toy, as_is: list[tuple[Any, ...]]) -> None:
    best = two_steps(place, "best-kept", output__keep_best=True, train__validate_every_steps=1)
    assert best == as_is


def test_another_seed_draws_batches_captions_the_adapter_and_new_tokens_anew(place: Toy) -> None:
    """Where nothing is held out, no caption is read, and two steps change nothing."""
    losses, tensors = [], []
    for seed in (42, 7):
        still = {"optimizer__learning_rate": 1e-8, "optimizer__new_tokens_learning_rate": 1e-8}
        alone = {"data__validation_fraction": 0.0, "data__caption_dropout": 1.0}
        changes = {**still, **alone, "adapter__new_tokens_from": None, "train__seed": seed}
        losses.append(two_steps(place, f"seed-{seed}", **changes)[0][1])
        tensors.append(state(place.runs / f"seed-{seed}", 2, ""))
    assert losses[0] != losses[1]
    (cached,) = events(place.runs / "seed-7", "cached")
    assert cached["texts"] > 0, "captions are shuffled in other ways"
    before, after = tensors
    drawn_anew = {
        name.partition(".")[0]
        for name in before
        if not np.allclose(before[name], after[name], atol=1e-5)
    }
    assert {"denoiser", "text_encoder", "new_tokens"} <= drawn_anew


# ---- captions of more than 75 tokens, and clip skip

LONG = ", ".join("one of the toys" for _ in range(12))
MORE: dict[str, Any] = {
    "adapter__new_tokens": 2,
    "adapter__text_encoder": True,
    "data__class_word": "thing",
    "data__emphasis": True,
    "data__trigger": "zwx",
    "objective__preservation_weight": 0.5,
    "output__save_every_steps": 0,
    "sampling__prompts": ["zwx toy", f"zwx {LONG}"],
    "train__batch_size": 3,
}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Captions of two, three and one chunk."""
    long = toy(tmp_path_factory.mktemp("long"))
    copy_of("sd2", long.base)
    (long.dataset / "p1.txt").write_text(LONG)
    (long.dataset / "p2.txt").write_text(f"a (big:1.3) toy, {LONG}"[:60])
    assert long.train() == 0
    return long


def request(long: Toy, **settings: Any) -> prepare.Request:
    own = {"base.model": str(long.base), "data.resolution": 16}
    return prepare.Request(
        dataset=long.dataset, overrides={**own, "data.cache_dir": str(long.cache), **settings}
    )


def test_nothing_of_a_long_caption_is_lost(long: Toy) -> None:
    chunks = settings_of(long.run)["data.caption_tokens"] // 75
    assert chunks > 1
    assert not [row for row in problems(long.run) if row["code"] == "CAP-03"]
    with safe_open(long.run / "toy.safetensors", framework="numpy") as file:
        metadata = file.metadata()
    assert metadata["ss_max_token_length"] == str(75 * chunks)
    assert metadata["ss_clip_skip"] == "None"


def test_a_plan_says_how_much_is_read_and_check_what_is_cut(long: Toy) -> None:
    prepared = prepare.prepare(request(long), hardware=PROCESSOR)
    assert prepared.facts.chunks == settings_of(long.run)["data.caption_tokens"] // 75
    assert "of 6 have more than 75" in prepared.plan.origins["data.caption_tokens"].reason
    short = prepare.prepare(request(long, **{"data.caption_tokens": 75}), hardware=PROCESSOR)
    long_bytes, short_bytes = (one.plan.memory.phases["training"] for one in (prepared, short))
    assert long_bytes > short_bytes, "longer texts take more"
    (finding,) = [row for row in short.report.findings if row.kind == "caption-too-long"]
    assert "data.caption_tokens=auto" in finding.advice
    for tokens, room in ((75, 75), ("auto", 225)):
        asked = request(long, **{"data.caption_tokens": tokens})
        report, limit = prepare.examine(asked, hardware=PROCESSOR)
        assert (finding in report.findings) == (tokens == 75)
        assert limit is not None and limit["tokens"] == room


def test_what_is_read_changes_what_is_encoded_and_learned(long: Toy) -> None:
    (first,) = events(long.run, "cached")
    for name, change in (("cut", {"data__caption_tokens": 75}), ("skip", {"base__clip_skip": 2})):
        assert run_cli(long.arguments("--name", name, steps=2, **QUIET, **change)) == 0
        (cached,) = events(long.runs / name, "cached")
        assert (cached["texts"], cached["latents"]) == (first["texts"], 0)
        assert trajectory(long.runs / name)[0][1] != trajectory(long.run)[0][1]


def test_the_file_draws_what_the_trainer_showed(long: Toy, tmp_path: Path) -> None:
    """With text encoders, weights of words, a learned word, prior preservation, a long prompt and clip skip."""
    assert run_cli(long.arguments("--name", "more", steps=4, **MORE, base__clip_skip=2)) == 0
    run = long.runs / "more"
    assert settings_of(run)["data.caption_tokens"] > 75
    with safe_open(run / "more.safetensors", framework="numpy") as file:
        assert file.metadata()["ss_clip_skip"] == "2"
    prompts = [word for prompt in MORE["sampling__prompts"] for word in ("--prompt", prompt)]
    assert run_cli(["sample", str(run), *prompts, "--output", str(tmp_path)]) == 0
    shown = sorted((run / "samples" / "step-00000004").glob("*.png"))
    images = sorted(tmp_path.glob("*.png"))
    assert len(shown) == len(images) == 2
    assert all(apart(*pair) <= 2 for pair in zip(images, shown, strict=True))
