"""Captioning models themselves, through the command: what they say of images, which files they are, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from lora_trainer.captioning import captioners, describer
from lora_trainer.common.errors import MachineError
from lora_trainer.hardware.machine import GIB
from lora_trainer.network.quantize import QuantizedLinear
from tests.fakes.captioners import tiny_captioner, tiny_tagger
from tests.fakes.runs import run_cli

ROOT = Path(__file__).resolve().parents[2]
PICTURES = (
    Image.new("RGB", (100, 80), "red"),
    Image.radial_gradient("L").convert("RGB"),
    Image.linear_gradient("L").convert("RGB").resize((200, 60)),
)
Models = Callable[[str], Path]
Caption = Callable[..., Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return a function that saves a tiny model of a kind, once: the files that are downloaded of a repository."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            whole, made[kind] = tiny_captioner(kind, folder / f"whole {kind}"), folder / kind
            made[kind].mkdir()
            for name in captioners.wanted_files([file.name for file in whole.iterdir()]):
                shutil.copy(whole / name, made[kind])
        return made[kind]

    return model


@pytest.fixture
def caption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Caption:
    """Return a function that captions images by the command, which ends with `code`.

    It returns the events, the captions with whether each was cut, and the error that says a fix.
    """

    def run(
        model: object,
        *words: str,
        code: int = 0,
        pictures: Sequence[Image.Image] = PICTURES,
        references: Sequence[Image.Image] = (),
    ) -> Any:
        shutil.rmtree(tmp_path / "pictures", ignore_errors=True)
        (tmp_path / "pictures" / "references").mkdir(parents=True)
        for folder, images in (("", pictures), ("references", references)):
            for number, one in enumerate(images):
                one.save(tmp_path / "pictures" / folder / f"{number}.png")
        capsys.readouterr()
        line = ["caption", str(tmp_path / "pictures"), "--model", str(model), "--json", *words]
        assert run_cli(line) == code
        out, errors = capsys.readouterr()
        rows = [json.loads(row) for row in out.splitlines()]
        said = [(row["caption"], row["cut"]) for row in rows if row["event"] == "caption"]
        fixes = [line for line in errors.splitlines() if "Fix: " in line]
        assert len(fixes) == (code != 0)
        return SimpleNamespace(rows=rows, said=said, error="".join(fixes))

    return run


# ---- sentences


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [
        ("qwen3-vl", "Name the colours."),
        ("joycaption", "Name the colours."),
        ("florence2", "<CAPTION>"),
        ("blip", ""),
    ],
)
def test_words_depend_on_the_picture_and_what_is_asked_alone(
    kind: str, prompt: str, models: Models, caption: Caption, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the images beside it, nor on chance: the same again from a model loaded anew."""
    alone = caption(models(kind), "--max-tokens", "12").said
    assert not any("Describe" in text or "assistant" in text for text, _ in alone)
    if prompt:
        assert caption(models(kind), "--max-tokens", "12", "--prompt", prompt).said != alone
    monkeypatch.setattr(describer.Describer, "batch_size", len(PICTURES))
    assert caption(models(kind), "--max-tokens", "12").said == alone
    assert len(alone) == len(PICTURES) and len({text for text, _ in alone}) > 1
    limited = caption(models(kind), "--max-tokens", "1").said
    assert limited and all(cut for _, cut in limited), "a caption at its limit is marked"


def test_a_chat_model_compares_the_images_of_a_pair_and_others_say_that_they_do_not(
    models: Models, caption: Caption
) -> None:
    chat = models("qwen3-vl")
    request = captioners.CaptionRequest(model=str(chat), device="cpu")
    asked = describer.load_describer(chat, request).edit_texts
    assert "the one before it" in asked[1] and "the 3 before it" in asked[3]
    assert asked[3].count("image_pad") == 4
    few = ("--max-tokens", "12")
    plain = caption(chat, *few).said
    paired, other = (
        caption(chat, *few, references=images) for images in (PICTURES[:1], PICTURES[1:2])
    )
    assert plain[0] != paired.said[0] != other.said[0], "it depends on the reference"
    assert plain[1:] == paired.said[1:], "an image without a reference is described"
    assert not [row for row in paired.rows if row["event"] == "problem"]
    florence = caption(models("florence2"), references=PICTURES[:1])
    (said,) = [row for row in florence.rows if row["event"] == "problem"]
    assert "(1) get captions of what they show" in said["what"]
    assert florence.said == caption(models("florence2")).said


def test_a_model_is_asked_as_it_was_trained(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JoyCaption's sentence, request and length come with its name; its folder alone does not tell them."""
    joycaption = captioners.known_as("joycaption")
    assert captioners.find("qwen3-vl").source == captioners.known_as("qwen3-vl-4b").source
    folder, asked = models("joycaption"), captioners.CaptionRequest
    named = describer.load_describer(folder, asked(model="joycaption", device="cpu"))
    plain = describer.load_describer(folder, asked(model=str(folder), device="cpu"))
    assert joycaption.system and joycaption.prompt and named.text and plain.text
    assert named.text.index(joycaption.system) < named.text.index(joycaption.prompt)
    assert describer.REQUEST in plain.text and joycaption.system not in plain.text
    assert (named.max_tokens, plain.max_tokens) == (joycaption.max_tokens, describer.MAX_TOKENS)
    for text in (named.text, plain.text):
        assert text.count(named.processor.image_token) == 1
    told = asked(model="joycaption", prompt="What is it?", max_tokens=9, device="cpu")
    other = describer.load_describer(folder, told)
    assert other.max_tokens == 9 and other.text and "What is it?" in other.text
    named.processor.image_token = "<nowhere>"
    with pytest.raises(captioners.UnusableModel, match="chat"):
        describer._chat(named.processor, "What is it?", "joycaption")


@pytest.mark.parametrize("kind", ["qwen3-vl", "joycaption"])
def test_a_small_gpu_gets_the_language_model_in_fewer_bits(
    kind: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first precision that fits, from what the files say; what reads the image keeps its 16 bits."""
    folder = models(kind)
    layers = describer._language_layers(folder)
    assert layers and all(32 in layer for layer in layers)
    # As of 8 billion parameters, most of them in the language model's layers.
    monkeypatch.setattr(describer, "count_parameters", lambda _: 8_480_000_000)
    monkeypatch.setattr(describer, "_language_layers", lambda _: [(4096, 12288)] * 138)
    monkeypatch.setattr(describer, "free_ram_bytes", lambda: 32 * GIB)
    monkeypatch.setattr(describer, "_has_nf4", lambda: True)
    found = []
    for gib in (24, 16, 12, 8, 4):
        monkeypatch.setattr(
            describer, "free_and_total_bytes", lambda _, free=gib * GIB: (free, free)
        )
        try:
            card = torch.device("cuda")
            found.append(describer._fitting(folder, kind, card, torch.bfloat16))
        except MachineError as error:
            assert "needs about 7.2 GiB on cuda, 4.0 are free" in error.found
    assert found == ["bf16", "int8", "int8", "nf4"]
    monkeypatch.undo()
    monkeypatch.setattr(describer, "_fitting", lambda *_: "int8")
    whole = captioners.CaptionRequest(model=str(folder), max_tokens=8, device="cpu")
    loaded = describer.load_describer(folder, whole)
    stored = {
        name for name, module in loaded.model.named_modules() if isinstance(module, QuantizedLinear)
    }
    assert stored and not [name for name in stored if set(name.split(".")) & set(describer.EYES)]
    assert len(stored) == len(layers)
    assert len(loaded.describe([captioners.Shown(image=each) for each in PICTURES])) == len(
        PICTURES
    )


def test_of_a_cut_caption_whole_sentences_stay_and_large_pictures_are_made_smaller() -> None:
    for text, cut, kept in (
        ("A cat. It sleeps on a", True, "A cat."),
        ("A cat. It sleeps", False, "A cat. It sleeps"),
        ("Version 2.5 of a", True, "Version 2.5 of a"),
    ):
        assert describer._description(text, cut=cut) == (kept, cut)
    sizes = [describer._shrunk(Image.new("RGB", size)).size for size in ((4096, 2048), (700, 900))]
    assert sizes == [(1448, 724), (700, 900)]


# ---- what cannot be loaded


def changed(folder: Path, target: Path, **values: object) -> Path:
    """Return a copy of a model whose config says something else."""
    shutil.copytree(folder, target)
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return target


def test_code_that_comes_with_a_model_is_not_run(
    models: Models, tmp_path: Path, caption: Caption
) -> None:
    kinds = {"model_type": "mine", "auto_map": {"AutoConfig": "evil.Evil"}}
    folder = changed(models("blip"), tmp_path / "own", **kinds)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "without foreign code" in caption(folder, code=3).error
    native = changed(models("blip"), tmp_path / "native", auto_map=kinds["auto_map"])
    shutil.copy(folder / "evil.py", native)
    assert caption(native, "--max-tokens", "4").said, "transformers' own class is taken"
    assert not (tmp_path / "ran").exists()


def test_files_that_do_not_fit_are_one_line(
    models: Models, tmp_path: Path, caption: Caption
) -> None:
    from safetensors.torch import load_file, save_file

    folder = changed(models("blip"), tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    lost = next(name for name in weights if "text_decoder" in name)
    del weights[lost]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    lack = "lacks 1 weights of BlipForConditionalGeneration"
    assert lack in caption(folder, code=3).error, "not made up"
    odd = changed(models("florence2"), tmp_path / "odd", vision_config={"depths": "many"})
    assert "does not load" in caption(odd, code=3).error
    for kind in ("florence2", "blip"):
        error = caption(models(kind), "--prompt", "Describe the hat.", code=2).error
        assert "prompt" in error, "nobody would read a request in words"


def test_what_the_machine_has_no_room_for_is_refused_before_it_is_loaded(
    models: Models, caption: Caption, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        assert "finds no GPU" in caption(models("blip"), "--device", "cuda", code=4).error
    monkeypatch.setattr(describer, "free_ram_bytes", lambda: describer.WORKSPACE_BYTES + 1000)
    monkeypatch.delattr(describer, "AutoModelForImageTextToText")
    error = caption(models("blip"), "--device", "cpu", code=4).error
    assert "needs about 1.0 GiB on cpu, 1.0 are free" in error


# ---- tags

NAMES = ("blue_sky", "^_^", "red_hair", "safe", "series", "rei_(eva)", "0_0", "v-shaped_eyes")
TAGS = [*zip(NAMES, "00093400", strict=True)]
"""As likely as the image is blue, green, red; then half as likely, then a quarter."""
SIZE = (16, 16)


@pytest.fixture
def tagger(tmp_path: Path) -> Path:
    return tiny_tagger(tmp_path / "tagger", tags=TAGS)


def test_tags_are_characters_then_the_likeliest_above_their_thresholds(
    tagger: Path, caption: Caption
) -> None:
    """With spaces for underscores, but for faces; an image is padded to a square with white."""
    for colour, at, character_at, tags, size in (
        ((0, 120, 200), "0.35", "0.4", "blue sky, ^_^", SIZE),
        ((0, 255, 255), "0.2", "0.4", "blue sky, ^_^, 0_0, v-shaped eyes", SIZE),
        ((200, 0, 0), "0.3", "0.9", "red hair", SIZE),
        ((200, 0, 0), "0.8", "0.3", "rei (eva)", SIZE),
        ((255, 0, 0), "0.45", "0.4", "rei (eva), red hair, blue sky, ^_^", (32, 16)),
    ):
        words = ("--threshold", at, "--character-threshold", character_at)
        said = caption(tagger, *words, pictures=[Image.new("RGB", size, colour)]).said
        assert said == [(tags, False)]


def test_a_file_for_a_fixed_number_of_pictures_is_filled_up(
    tmp_path: Path, caption: Caption
) -> None:
    tagger = tiny_tagger(tmp_path / "three", tags=TAGS, batch=3)
    pictures = [Image.new("RGB", SIZE, colour) for colour in ("red", "blue", "red", "blue")]
    said = [text for text, _ in caption(tagger, pictures=pictures).said]
    assert said == ["red hair", "blue sky"] * 2


def test_a_tagger_that_cannot_be_run_is_refused(
    tagger: Path, tmp_path: Path, caption: Caption, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file, content, said in (
        ("columns", "selected_tags.csv", b"id,tag\n1,hat\n", "no selected_tags.csv that can be"),
        ("torn", "model.onnx", b"no such thing", "no model.onnx that can be run"),
    ):
        folder = tiny_tagger(tmp_path / name, tags=TAGS)
        (folder / file).write_bytes(content)
        assert said in caption(folder, code=3).error
    with (tagger / "selected_tags.csv").open("a") as stream:
        stream.write("8,ninth,0,1\n")
    assert "not what its tags need" in caption(tagger, code=3).error
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    remedy = 'onnxruntime, which is not installed. Fix: pip install "lora-train[caption]"'
    assert remedy in caption(tagger, code=4).error


# ---- which model is meant


def test_known_models_are_in_the_docs(caption: Caption) -> None:
    rows = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8").splitlines()
    assert captioners.DEFAULT in captioners.KNOWN
    for model in captioners.KNOWN.values():
        row = (
            f"| `{model.name}` | {model.source} | {model.writes} | {model.licence} "
            f"| {model.download_gb:g} | {model.memory_gib:g} | {model.good_for} |"
        )
        assert row in rows
        for name in (model.name, model.source):
            (plan,) = caption(name, "--dry-run").rows
            assert (plan["model"], plan["licence"]) == (model.source, model.licence)


def test_of_a_repository_only_what_is_read_is_wanted() -> None:
    read = {
        *("config.json", "chat_template.jinja", "merges.txt"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    }
    others = {
        *("model.fp16.safetensors", "modeling_own.py", "onnx/model.safetensors"),
        *("pytorch_model.bin", "tf_model.h5"),
    }
    assert captioners.wanted_files([*read, *others]) == sorted(read)
    tagger = ["config.json", "model.onnx", "selected_tags.csv"]
    assert captioners.wanted_files([*reversed(tagger), "model.safetensors", "x.msgpack"]) == tagger


def test_a_folder_that_lacks_something_says_what(
    models: Models, tmp_path: Path, caption: Caption
) -> None:
    for lost in ("model.safetensors", "config.json", "tokenizer.json", "preprocessor_config.json"):
        folder = changed(models("blip"), tmp_path / lost)
        (folder / lost).unlink()
        for other in ("vocab.txt",) if lost == "tokenizer.json" else ():
            (folder / other).unlink(missing_ok=True)
        assert f"lacks {lost}" in caption(folder, code=3).error
    index = {"weight_map": {"a": "model-1.safetensors", "b": "../../model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").touch()
    error = caption(folder, code=3).error
    assert "lacks model-2.safetensors, preprocessor_config.json" in error


def test_what_is_not_here_says_what_to_do(caption: Caption) -> None:
    """The network is off in tests, as it may be for a user."""
    for name, code, said in (
        ("florense2", 2, "Did you mean 'florence2'"),
        ("somebody/something", 4, "model.onnx and selected_tags.csv"),
        ("blip", 4, "holds config.json, model.safetensors, the tokenizer"),
    ):
        result = caption(name, code=code)
        assert said in result.error
        assert [row["event"] for row in result.rows] == (["downloading"] if code == 4 else [])
