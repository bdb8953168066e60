"""Captioning models themselves: what they say of images, which files they are, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from lora_trainer.captioning import catalogue, describer
from lora_trainer.captioning.catalogue import (
    KNOWN,
    find,
    located,
    missing_files,
    wanted_files,
)
from lora_trainer.captioning.describer import Describer, load_describer
from lora_trainer.captioning.tagger import Tagger, load_tagger, spelled
from lora_trainer.common.errors import InputError, LoraTrainError, MachineError, RequestError
from tests.fakes.captioners import LANGUAGE_KINDS, tiny_captioner, tiny_tagger
from tests.fakes.odd_pictures import picture

ROOT = Path(__file__).resolve().parents[2]
PICTURES = [
    Image.new("RGB", (100, 80), "red"),
    Image.radial_gradient("L").convert("RGB"),
    picture(200, 60),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that saves a tiny model of a kind, once."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny_captioner(kind, folder / kind)
        return made[kind]

    return model


def tiny_describer(folder: Path, *, prompt: str | None = None, max_tokens: int = 12) -> Describer:
    return load_describer(folder, name="tiny", device="cpu", prompt=prompt, max_tokens=max_tokens)


# ---- sentences


@pytest.mark.parametrize("kind", LANGUAGE_KINDS)
def test_words_depend_on_the_picture_alone(kind: str, models: Callable[[str], Path]) -> None:
    """Not on the images beside it, nor on chance: the same again from a model loaded anew."""
    first = tiny_describer(models(kind)).describe(PICTURES)
    again = tiny_describer(models(kind))
    assert [again.describe([one])[0] for one in PICTURES] == first
    assert len({said.text for said in first}) > 1
    (limited,) = tiny_describer(models(kind), max_tokens=1).describe(PICTURES[:1])
    assert limited.cut, "a caption that reached its limit is marked"


@pytest.mark.parametrize("kind", ["qwen3-vl", "florence2"])
def test_what_is_asked_shows_in_the_words(kind: str, models: Callable[[str], Path]) -> None:
    prompt = {"qwen3-vl": "Name the colours.", "florence2": "<CAPTION>"}[kind]
    asked = tiny_describer(models(kind), prompt=prompt).describe(PICTURES)
    plain = tiny_describer(models(kind)).describe(PICTURES)
    assert asked != plain
    assert not any("Describe" in one.text or "assistant" in one.text for one in plain)


@pytest.mark.parametrize(
    ("text", "cut", "kept"),
    [
        ("A cat. It sleeps on a", True, "A cat."),
        ("A cat that sleeps on a", True, "A cat that sleeps on a"),
        ("A cat. It sleeps", False, "A cat. It sleeps"),
        ("Version 2.5 of a", True, "Version 2.5 of a"),
    ],
)
def test_of_a_cut_caption_whole_sentences_stay(text: str, cut: bool, kept: str) -> None:
    assert describer._description(text, cut=cut).text == kept


def test_large_pictures_are_made_smaller_first() -> None:
    assert describer._shrunk(Image.new("RGB", (4096, 2048))).size == (1448, 724)
    small = Image.new("RGB", (700, 900))
    assert describer._shrunk(small) is small


# ---- what cannot be loaded


def changed(folder: Path, target: Path, **values: object) -> Path:
    """Return a copy of a model whose config says something else."""
    shutil.copytree(folder, target)
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return target


def test_code_that_comes_with_a_model_is_not_run(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    kinds = {"model_type": "mine", "auto_map": {"AutoConfig": "evil.Evil"}}
    folder = changed(models("blip"), tmp_path / "own", **kinds)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(InputError, match="without foreign code"):
        tiny_describer(folder)
    native = changed(models("blip"), tmp_path / "native", auto_map=kinds["auto_map"])
    shutil.copy(folder / "evil.py", native)
    tiny_describer(native)  # transformers' own class is there: that one is taken
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_not_there_are_not_made_up(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = changed(models("blip"), tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    lost = next(name for name in weights if "text_decoder" in name)
    del weights[lost]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="lacks 1 weights of BlipForConditionalGeneration"):
        tiny_describer(folder)


def test_a_config_that_does_not_fit_is_one_line(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = changed(models("florence2"), tmp_path / "m", vision_config={"depths": "many"})
    with pytest.raises(InputError, match="does not load") as caught:
        tiny_describer(folder)
    assert "\n" not in str(caught.value)


def test_a_request_in_words_is_refused_where_nobody_would_read_it(
    models: Callable[[str], Path],
) -> None:
    for kind in ("florence2", "blip"):
        with pytest.raises(RequestError, match="prompt"):
            tiny_describer(models(kind), prompt="Describe the hat.")


def test_a_model_too_large_is_refused_before_it_is_loaded(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describer, "free_ram_bytes", lambda: describer.WORKSPACE_BYTES + 1000)
    monkeypatch.delattr(describer, "AutoModelForImageTextToText")
    with pytest.raises(MachineError, match=r"needs about 1.0 GiB on cpu, 1.0 are free"):
        tiny_describer(models("blip"))


def test_a_card_that_is_not_there_is_named(models: Callable[[str], Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(MachineError, match="finds no GPU"):
        load_describer(models("blip"), name="tiny", device="cuda", prompt=None, max_tokens=5)


# ---- tags

TAGS = [
    ("blue_sky", "0"),
    ("^_^", "0"),
    ("red_hair", "0"),
    ("safe", "9"),
    ("series", "3"),
    ("rei_(eva)", "4"),
]
"""As likely as the image is blue, green, red; then half as likely as blue, green, red."""


def tags_of(
    folder: Path, colour: tuple[int, int, int], *, at: float = 0.35, character_at: float = 0.4
) -> str:
    tagger = tagger_in(folder, at=at, character_at=character_at)
    return tagger.describe([Image.new("RGB", (4, 4), colour)])[0].text


def tagger_in(folder: Path, *, at: float = 0.35, character_at: float = 0.4) -> Tagger:
    return load_tagger(
        folder, name="tiny", device="cpu", threshold=at, character_threshold=character_at
    )


@pytest.fixture
def tagger_folder(tmp_path: Path) -> Path:
    return tiny_tagger(tmp_path / "tagger", tags=TAGS)


@pytest.mark.parametrize(
    ("colour", "tags"),
    [
        ((255, 0, 0), "rei (eva), red hair"),
        ((0, 120, 200), "blue sky, ^_^"),
        ((0, 80, 0), ""),
    ],
)
def test_tags_are_characters_then_the_likeliest(
    colour: tuple[int, int, int], tags: str, tagger_folder: Path
) -> None:
    assert tags_of(tagger_folder, colour) == tags


def test_each_threshold_decides_on_its_own_tags(tagger_folder: Path) -> None:
    assert tags_of(tagger_folder, (200, 0, 0), at=0.8) == ""
    assert tags_of(tagger_folder, (200, 0, 0), at=0.3, character_at=0.9) == "red hair"
    assert tags_of(tagger_folder, (200, 0, 0), at=0.8, character_at=0.3) == "rei (eva)"


def test_pictures_are_padded_to_a_square_with_white(tagger_folder: Path) -> None:
    tagger = tagger_in(tagger_folder, at=0.45)
    wide = Image.new("RGB", (8, 4), "red")
    assert tagger.describe([wide])[0].text == "rei (eva), red hair, blue sky, ^_^"


def test_a_file_for_a_fixed_number_of_pictures_is_filled_up(tmp_path: Path) -> None:
    tagger = tagger_in(tiny_tagger(tmp_path, tags=TAGS, batch=3))
    pictures = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    said = [one.text for one in tagger.describe(pictures)]
    assert (tagger.batch_size, said) == (3, ["rei (eva), red hair", "blue sky"])


def test_underscores_become_spaces_but_in_faces() -> None:
    tags = ("saber_(fate)", "v-shaped_eyebrows", "^_^", "<o>_<o>", "0_0")
    assert [spelled(tag) for tag in tags] == ["saber (fate)", "v-shaped eyebrows", *tags[2:]]


def test_a_tagger_with_files_that_do_not_fit_is_refused(tmp_path: Path) -> None:
    many = tiny_tagger(tmp_path / "many", tags=TAGS)
    with (many / "selected_tags.csv").open("a") as file:
        file.write("6,seventh,0,1\n")
    with pytest.raises(InputError, match="not what its tags need"):
        tags_of(many, (0, 0, 0))
    columns = tiny_tagger(tmp_path / "columns", tags=TAGS)
    (columns / "selected_tags.csv").write_text("id,tag\n1,hat\n")
    with pytest.raises(InputError, match="no selected_tags.csv that can be read"):
        tagger_in(columns)
    torn = tiny_tagger(tmp_path / "torn", tags=TAGS)
    (torn / "model.onnx").write_bytes(b"no such thing")
    with pytest.raises(InputError, match="no model.onnx that can be run"):
        tagger_in(torn)


def test_without_onnxruntime_the_extra_is_named(
    tagger_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(MachineError, match="onnxruntime") as caught:
        tagger_in(tagger_folder)
    assert "lora-train[caption]" in caught.value.fix


# ---- which model is meant


def test_known_names_and_sources_are_unique_and_in_the_docs() -> None:
    assert len({model.name for model in KNOWN}) == len({model.source for model in KNOWN})
    assert catalogue.DEFAULT in {model.name for model in KNOWN}
    assert all(find(model.name).source == find(model.source).source for model in KNOWN)
    rows = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8").splitlines()
    for model in KNOWN:
        row = (
            f"| `{model.name}` | {model.source} | {model.writes} | {model.licence} "
            f"| {model.download_gb:g} | {model.memory_gib:g} | {model.good_for} |"
        )
        assert row in rows


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (
            ["model.onnx", "model.safetensors", "selected_tags.csv", "config.json", "x.msgpack"],
            ["config.json", "model.onnx", "selected_tags.csv"],
        ),
        (
            [
                "config.json",
                "chat_template.jinja",
                "merges.txt",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.fp16.safetensors",
                "modeling_own.py",
                "onnx/model.safetensors",
                "pytorch_model.bin",
                "tf_model.h5",
            ],
            [
                "chat_template.jinja",
                "config.json",
                "merges.txt",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
            ],
        ),
    ],
)
def test_of_a_repository_only_what_is_read_is_wanted(names: list[str], chosen: list[str]) -> None:
    assert wanted_files(names) == chosen


@pytest.mark.parametrize("kind", LANGUAGE_KINDS)
def test_what_is_downloaded_is_whole(
    kind: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """The names that are chosen of a repository are all that loading needs."""
    source = models(kind)
    for name in wanted_files([file.name for file in source.iterdir()]):
        shutil.copy(source / name, tmp_path)
    assert missing_files(tmp_path) == []
    tiny_describer(tmp_path)


def test_a_folder_that_lacks_something_says_what(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    for lost in ("model.safetensors", "config.json", "preprocessor_config.json"):
        folder = changed(models("blip"), tmp_path / lost)
        (folder / lost).unlink()
        with pytest.raises(InputError, match=f"lacks {lost}"):
            find(str(folder))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "../../model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").touch()
    with pytest.raises(InputError, match="lacks model-2.safetensors, preprocessor_config.json"):
        find(str(folder))


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [
        ("florense2", RequestError, "Did you mean 'florence2'"),
        ("somebody/something", MachineError, "model.onnx and selected_tags.csv"),
        ("blip", MachineError, "holds config.json, model.safetensors, the tokenizer"),
    ],
)
def test_what_is_not_here_says_what_to_do(
    asked: str, kind: type[LoraTrainError], said: str
) -> None:
    """The network is off in tests, as it may be for a user."""
    told: list[str] = []
    with pytest.raises(kind) as caught:
        located(find(asked), on_download=lambda: told.append(asked))
    assert said in str(caught.value)
    assert told == ([asked] if kind is MachineError else [])
