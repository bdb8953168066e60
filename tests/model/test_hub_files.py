"""First runs from the Hub: what is fetched of each real release's files, and that it is enough.

`tests.hub_files` of a family's tiny.toml lists the files: `read` is what loading a release needs, `left` the rest of
what is there, each with where the list was found. A folder is made from a family's tiny base; files to be left hold no
model, so that one that is fetched shows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file, save_file

from lora_trainer import families
from lora_trainer.common.errors import InputError, MachineError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.files.hub_files import fetch, wanted
from lora_trainer.families.files.locate import describe, locate
from tests.checkpoint_files import layouts
from tests.checkpoint_files.cases import Case
from tests.checkpoint_files.files import write
from tests.checkpoint_files.layouts import Shapes
from tests.fakes.family_bases import (
    base_of,
    copy_of,
    edit_json,
    encoder_of,
    facts_at,
    facts_of,
    image_encoder_of,
    network_of,
    pipeline_of,
    side_of,
)
from tests.fakes.hub_server import REVISION, HubServer, hub_in_process
from tests.fakes.ldm_file import write_checkpoint
from tests.fakes.runs import apart, events, run_cli, settings_of, toy
from tests.fakes.tiny_base import released_files, t5_tokenizer

KLEIN = "black-forest-labs/FLUX.2-klein-base-4B"
PROMPT = "a photo of a red square"


_STEMS = {"model", "diffusion_pytorch_model"}
_INDEX = ".safetensors.index.json"


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


LISTS = released_files()


def publish(hub: HubServer, source: str, base: Path, *, name: str | None = None) -> None:
    """Offer a tiny base with exactly the files of a release, under its id or another name."""
    read, left, name = LISTS[source]["read"], LISTS[source]["left"], name or source
    folder = hub.folders[name] = base.with_name(f"{base.name} as released") / name
    for file in (*read, *left):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
    for file in left:
        (folder / file).write_bytes(b"not to be fetched")
    for file in read:
        if not file.endswith((".safetensors", _INDEX)):
            _write_text(base, folder, file, read=read)
    weights = [file for file in read if file.endswith(".safetensors")]
    for part in {file.partition("/")[0] for file in weights}:
        shards = [file for file in weights if file.startswith(f"{part}/")]
        _write_weights(base / part, folder, shards)


def _write_weights(part: Path, folder: Path, names: Sequence[str]) -> None:
    (file,) = [path for path in part.glob("*.safetensors") if path.stem in _STEMS]
    tensors, where = load_file(file), {}
    for number, name in enumerate(names):
        own = sorted(tensors)[number :: len(names)]
        save_file({key: tensors[key] for key in own}, folder / name, {"format": "pt"})
        where |= dict.fromkeys(own, Path(name).name)
    if len(names) > 1:
        index = {"metadata": {"total_size": 1}, "weight_map": where}
        path = folder / part.name / f"{file.stem}{_INDEX}"
        path.write_text(json.dumps(index))


def _write_text(base: Path, folder: Path, name: str, *, read: Sequence[str]) -> None:
    target, source = folder / name, base / name
    if not source.is_file() and (own := base / "tokenizer" / source.name).is_file():
        source = own  # the release has its tokenizer beside the text encoder
    place = source.parent
    match target.name:
        case "generation_config.json":
            target.write_text("{}")
        # Of a processor that reads pictures too; the tokenizer beside it is all that is loaded.
        case (
            "preprocessor_config.json" | "processor_config.json" | "video_preprocessor_config.json"
        ):
            target.write_text("{}")
        case "chat_template.jinja" if not source.is_file():  # Qwen-Image reads none of it
            target.write_text("{{ messages[0].content }}")
        case "vocab.json":
            target.write_text(json.dumps(_tokenizer(place)["model"]["vocab"]))
        case "merges.txt":
            pairs = _tokenizer(place)["model"]["merges"]
            target.write_text("#version: 0.2\n" + "\n".join(map(" ".join, pairs)) + "\n")
        case "added_tokens.json":
            added = _tokenizer(place)["added_tokens"]
            target.write_text(json.dumps({token["content"]: token["id"] for token in added}))
        case "special_tokens_map.json":
            settings = read_json(place / "tokenizer_config.json")
            named = {key: value for key, value in settings.items() if key.endswith("_token")}
            target.write_text(json.dumps(named))
        case "tokenizer_config.json":
            settings, template = read_json(source), source.with_name("chat_template.jinja")
            has_own_file = name.replace(target.name, template.name) in read
            if template.is_file() and not has_own_file:
                settings["chat_template"] = template.read_text(encoding="utf-8")
            target.write_text(json.dumps(settings))
        case "spiece.model" | "tokenizer.model":
            target.write_bytes(spiece(_tokenizer(place)["model"]["vocab"]))
        case _:
            shutil.copyfile(source, target)


def _tokenizer(place: Path) -> Any:
    return read_json(place / "tokenizer.json")


def spiece(pieces: Sequence[tuple[str, float]]) -> bytes:
    """Return SentencePiece's own file of a T5 vocabulary, written by the message classes of transformers."""
    from transformers.utils import sentencepiece_model_pb2_new as messages

    model = messages.ModelProto()
    for number, (text, score) in enumerate(pieces):
        kind = {0: 3, 1: 3, 2: 2}.get(number, 1)  # control, control, unknown, normal
        model.pieces.add(piece=text, score=score, type=kind)
    model.trainer_spec.unk_id = 2
    model.trainer_spec.model_type = 1
    model.normalizer_spec.name = "identity"
    written: bytes = model.SerializeToString()
    return written


# ---- what is fetched


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub_in_process(monkeypatch) as hub:
        yield hub


def snapshot(source: str, folder: Path) -> Path:
    """Return where a repository lies in the cache."""
    return folder / "hub" / f"models--{source.replace('/', '--')}" / "snapshots" / REVISION


@pytest.mark.parametrize("source", LISTS)
def test_what_loading_needs_is_fetched_and_nothing_else(source: str) -> None:
    """R1: chat_template.jinja of klein and Qwen-Image was left; SDXL's spare VAE (335 MB) was fetched."""
    files = LISTS[source]
    assert wanted([*files["read"], *files["left"]], without=frozenset()) == files["read"]


@pytest.mark.parametrize("name", families.NAMES)
def test_a_release_is_read_from_the_files_it_has(name: str, hub: HubServer, tmp_path: Path) -> None:
    source = next(iter(families.family(name).releases))
    publish(hub, source, base_of(name))
    settings = BaseSettings(model=source, revision="v2")
    facts = locate(settings)
    assert facts.located.folder == snapshot(source, tmp_path)
    folder, fetched = facts.located.folder, [*hub.fetched]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert [path.relative_to(folder).as_posix() for path in files] == LISTS[source]["read"]
    assert describe(settings) == locate(settings) == facts and hub.fetched == fetched
    assert describe(BaseSettings(model=source, revision="other")).layout is None
    assert facts.parts == facts_of(name).parts
    ours, tiny = (encoder_of(each).encode_prompts([PROMPT]) for each in (facts, facts_of(name)))
    assert ours.keys() == tiny.keys()
    assert all(torch.equal(ours[key], tiny[key]) for key in tiny)
    one, other = (network_of(each).state_dict() for each in (facts, facts_of(name)))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    image_encoder_of(facts)
    pipeline_of(facts)


def test_a_first_run_from_the_hub_trains(tmp_path: Path, hub: HubServer) -> None:
    """R1: it ended in a traceback after the download.

    Under a name of its own: what is known of a release by its name is not the size of a tiny base.
    """
    own_name = "somebody/klein-tuned"
    publish(hub, KLEIN, base_of("flux2"), name=own_name)
    place = toy(tmp_path / "place", images=3)
    side_px = side_of(facts_of("flux2"))
    line = place.arguments(steps=2, data__resolution=side_px, data__validation_fraction=0.34)
    line[line.index("--base") + 1] = own_name
    assert run_cli(line) == 0
    assert (place.run / "toy.safetensors").is_file()
    missing = snapshot(own_name, tmp_path) / "tokenizer" / "chat_template.jinja"
    missing.unlink()  # as an earlier version left it, or a download that was cut
    assert locate(BaseSettings(model=own_name)).layout is not None
    assert missing.is_file()


def test_a_distilled_base_is_trained_with_the_assistant_published_for_it(
    tmp_path: Path, hub: HubServer
) -> None:
    """Fetched like the base, on in training, off in sample images; `none` trains without it."""
    base, place = "somebody/z-image-turbo-tuned", toy(tmp_path / "place", images=3)
    publish(hub, "Tongyi-MAI/Z-Image-Turbo", base_of("zimage"), name=base)
    settings = {"data__resolution": side_of(facts_of("zimage")), "sampling__every_steps": 2}

    def run(name: str, **more: Any) -> Path:
        line = place.arguments("--name", name, steps=2, **settings, **more)
        line[line.index("--base") + 1] = base
        assert run_cli(line) == 0
        return place.runs / name

    alone = run("alone", base__assistant="none")
    (assistant,) = [
        each.assistant for each in families.family("zimage").published if each.assistant
    ]
    offer(hub, assistant.id, tmp_path, {assistant.file: (alone / "alone.safetensors").read_bytes()})
    helped = run("helped")
    assert hub.fetched.count(assistant.file) == 1
    assert settings_of(helped)["base.assistant"] == assistant.source
    losses = [[row["loss"] for row in events(each, "step")] for each in (alone, helped)]
    assert losses[0] != losses[1]
    first = Path("samples") / "step-00000000" / "00.png"
    assert apart(alone / first, helped / first) == 0


# ---- a repository without a diffusers folder


def offer(hub: HubServer, source: str, place: Path, files: Mapping[str, bytes]) -> None:
    for name, content in {"README.md": b"a page", **files}.items():
        file = place / source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    hub.folders[source] = place / source


def tiny_checkpoint(folder: Path) -> bytes:
    file = folder / "tiny.safetensors"
    return write_checkpoint(base_of("sd15"), file, families.family("sd15").text).read_bytes()


def test_a_checkpoint_alone_is_downloaded_and_taken_as_a_file(
    hub: HubServer, tmp_path: Path
) -> None:
    """It was downloaded, and then refused as no diffusers folder. A VAE and a LoRA beside it are left."""
    source, name = "somebody/mix", "checkpoints/myMix_vPredV2.safetensors"
    others = {"vae/ae.safetensors": b"x", "loras/detail.safetensors": b"x", "old.ckpt": b"x"}
    offer(hub, source, tmp_path, {name: tiny_checkpoint(tmp_path), **others})
    settings = BaseSettings(model=source, companion=str(base_of("sd15")))
    with pytest.raises(MachineError, match="not on this machine"):
        describe(settings)
    facts = locate(settings)
    assert hub.fetched == [name]
    assert facts.located.files["denoiser"] == snapshot(source, tmp_path) / name
    assert (facts.source, facts.release.prediction) == (source, "v_prediction"), "as its name says"
    assert describe(settings) == locate(settings) == facts and hub.fetched == [name]


def test_a_checkpoint_that_another_program_fetched_is_not_the_base(
    hub: HubServer, tmp_path: Path
) -> None:
    """It lies in the cache beside a diffusers folder that nobody has fetched yet."""
    source, name = "somebody/both", "both.safetensors"
    publish(hub, KLEIN, base_of("flux2"), name=source)
    hub.folders[source] = copy_into(hub.folders[source])
    (hub.folders[source] / name).write_bytes(tiny_checkpoint(tmp_path))
    hf_hub_download(source, name)
    with pytest.raises(MachineError, match="not on this machine"):
        describe(BaseSettings(model=source))
    assert locate(BaseSettings(model=source)).family == "flux2"


def test_of_several_checkpoints_none_is_guessed_and_none_downloaded(
    hub: HubServer, tmp_path: Path
) -> None:
    sizes = {f"mix-{kind}.safetensors": b"x" for kind in ("bf16", "fp8")} | {"mix-Q8_0.gguf": b"x"}
    offer(hub, "somebody/sizes", tmp_path, sizes)
    with pytest.raises(InputError, match="holds 3 checkpoints") as raised:
        locate(BaseSettings(model="somebody/sizes"))
    assert all(name in raised.value.found for name in sizes)
    assert "hf download" in raised.value.fix
    folder = hub.folders["somebody/sizes"]
    for path in (folder, str(folder)):
        with pytest.raises(InputError, match="holds 3 checkpoints") as raised:
            describe(BaseSettings(model=str(path)))
        assert "give the path of the one" in raised.value.fix
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"model.ckpt": b"x"}, "pickles only"),
        ({"config.json": b"{}", "model-00001-of-00002.safetensors": b"x"}, "no weights of a base"),
        ({}, "no weights of a base"),
    ],
)
def test_a_repository_without_a_base_is_refused_before_a_download(
    files: Mapping[str, bytes], said: str, hub: HubServer, tmp_path: Path
) -> None:
    offer(hub, "somebody/else", tmp_path, files)
    with pytest.raises(InputError, match=said):
        locate(BaseSettings(model="somebody/else"))
    file = tmp_path / "tiny.safetensors"
    file.write_bytes(tiny_checkpoint(tmp_path))
    said = r"base\.companion somebody/else has no model_index\.json: it is not a diffusers folder"
    with pytest.raises(InputError, match=said):
        locate(BaseSettings(model=str(file), companion="somebody/else"))
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"transformer/config.json": {"quantization_config": {"quant_method": "bitsandbytes"}}}, "as bitsandbytes"),
        ({"model_index.json": {"_class_name": "MochiPipeline", "transformer": ["diffusers", "X"]}}, "not a base model"),
    ],
)  # fmt: skip
def test_what_configurations_tell_is_told_before_the_weights_come(
    change: Mapping[str, Any], said: str, hub: HubServer
) -> None:
    name = f"somebody/{said.split()[-1]}"
    publish(hub, KLEIN, base_of("flux2"), name=name)
    folder = copy_into(hub.folders[name])
    hub.folders[name] = folder
    for file, values in change.items():
        edit_json(folder / file, **values)
    with pytest.raises(InputError, match=said):
        locate(BaseSettings(model=name))
    assert hub.fetched and not any(file.endswith(".safetensors") for file in hub.fetched)


def copy_into(folder: Path) -> Path:
    return Path(shutil.copytree(folder, folder.with_name(f"{folder.name} changed")))


# ---- SentencePiece's own file


def base_with_pieces(folder: Path) -> Path:
    """Return a copy of the tiny Chroma that has T5's vocabulary as its releases have it."""
    tokenizer = copy_of("chroma", folder) / "tokenizer"
    (tokenizer / "tokenizer.json").unlink()
    (tokenizer / "spiece.model").write_bytes(spiece(list(t5_tokenizer()._vocab_scores)))
    return folder


def test_a_vocabulary_in_sentencepieces_file_gives_the_same_tokens(tmp_path: Path) -> None:
    """To the encoder, and to the pipeline: transformers alone cannot read it."""
    facts = facts_at(base_with_pieces(tmp_path / "base"))
    encoders: list[Any] = [encoder_of(each) for each in (facts, facts_of("chroma"))]
    found, plain = (encoder.tokenizers["text_encoder"] for encoder in encoders)
    assert type(found) is type(plain) and found.model_max_length == plain.model_max_length
    pipeline = pipeline_of(facts)
    settings = {"padding": "max_length", "max_length": 64, "truncation": True}
    for text in (PROMPT, "", "  two  spaces ", "blue</s> on é 日本", "x" * 900):
        assert found([text], **settings) == plain([text], **settings)
        assert pipeline.tokenizer(text).input_ids == plain(text).input_ids


@pytest.mark.parametrize("damage", ["cut", "empty", "other kind"])
def test_a_file_that_is_no_vocabulary_is_refused_in_a_line(tmp_path: Path, damage: str) -> None:
    file = base_with_pieces(tmp_path / "base") / "tokenizer" / "spiece.model"
    whole = file.read_bytes()
    kinds = {
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "other kind": whole + b"\x12\x02\x18\x02",
    }
    file.write_bytes(kinds[damage])
    with pytest.raises(InputError, match=r"spiece\.model") as caught:
        encoder_of(facts_at(tmp_path / "base"))
    assert "\n" not in str(caught.value)


# ---- R10: a checkpoint of a gated release trains with its VAE and encoders as files, and nothing from the gate


SDXL, CHROMA = "stabilityai/stable-diffusion-xl-base-1.0", "lodestones/Chroma1-HD"
LATENTS = {"flux": (0.3611, 0.1159), "sd3": (1.5305, 0.0609)}
CHECKPOINTS: Mapping[str, tuple[str, int, str]] = {
    "flux1-dev": ("flux", 0, "black-forest-labs/FLUX.1-dev"),
    "flux1-schnell": ("flux", 1, "black-forest-labs/FLUX.1-schnell"),
    "sd3_medium": ("sd3", 2, "stabilityai/stable-diffusion-3-medium-diffusers"),
    "sd3.5_medium": ("sd3", 0, "stabilityai/stable-diffusion-3.5-medium"),
    "sd3.5_large": ("sd3", 1, "stabilityai/stable-diffusion-3.5-large"),
}
"""File -> family, number of the architecture in tables.json, release."""


@pytest.fixture
def open_hub(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """Return a Hub that has the open repositories and no gated one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    publish(hub, SDXL, base_of("sdxl"))
    publish(hub, CHROMA, base_of("chroma"))
    return hub


def as_files(checkpoint: str, folder: Path) -> BaseSettings:
    """Write a checkpoint, its VAE and encoders: real headers, no numbers."""
    folder.mkdir()
    family, release, _ = CHECKPOINTS[checkpoint]

    def file(name: str, shapes: Shapes) -> str:
        return str(write(Case(name, shapes, file=f"{name}.safetensors"), folder))

    roles = families.family(family).text.roles.values()
    return BaseSettings(
        model=file(checkpoint, layouts.network(family, release)),
        vae=file("ae", layouts.vae(16)),
        text_encoders=tuple(file(role, layouts.text(role)) for role in roles),
    )


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_nothing_but_tokenizers_of_open_repositories_is_fetched(
    checkpoint: str, open_hub: HubServer, tmp_path: Path
) -> None:
    settings = as_files(checkpoint, tmp_path / "models")
    before = describe(settings)
    assert before.layout is None
    assert before.missing == f"tokenizers of {CHROMA} and {SDXL}"
    assert 0 < before.download_bytes < 10e6
    facts = locate(settings)
    known = families.known_base(CHECKPOINTS[checkpoint][2])
    assert known is not None
    for name, part in known.parts.items():
        if name != "vae":  # the corpus' VAE has its two ends
            assert facts.parts[name].parameters == pytest.approx(part.parameters, rel=0.01)
    assert (
        facts.release.variant,
        facts.release.distilled,
        facts.release.max_tokens,
        facts.release.scheduler,
    ) == (
        known.release.variant,
        known.release.distilled,
        known.release.max_tokens,
        known.release.scheduler,
    )
    assert {**known.release.architecture} == {
        key: facts.release.architecture[key] for key in known.release.architecture
    }
    vae = json.loads((facts.located.folder / "vae/config.json").read_text())
    assert (vae["scaling_factor"], vae["shift_factor"]) == LATENTS[facts.family]
    # The name is a digest of the configurations: a folder made by an earlier version is used.
    assert checkpoint != "sd3_medium" or facts.located.folder.name.endswith("-d1be56f4e47e")
    fetched = [*open_hub.fetched]
    assert fetched and all("tokenizer" in name for name in fetched)
    assert describe(settings) == locate(settings) == facts and open_hub.fetched == fetched
    for pattern in ("vae/config.json", "tokenizer/*"):
        for file in facts.located.folder.glob(pattern):
            file.unlink()
        assert describe(settings).layout is None and locate(settings) == facts, "made anew"


def test_weights_that_are_missing_come_from_the_gated_release(
    open_hub: HubServer, tmp_path: Path
) -> None:
    settings = as_files("flux1-dev", tmp_path / "models")
    for lacking in ({"vae": None}, {"text_encoders": settings.text_encoders[:1]}):
        fewer = settings.model_copy(update=lacking)
        assert "FLUX.1-dev" in describe(fewer).missing
        with pytest.raises(MachineError) as raised:
            locate(fewer)
        assert "base.vae and base.text_encoders" in raised.value.fix
    assert open_hub.fetched == []


# ---- what is chosen and counted


def test_parts_that_a_checkpoint_brings_are_not_fetched() -> None:
    names = [
        *(
            f"{part}/{file}"
            for part in ("text_encoder", "text_encoder_2")
            for file in ("config.json", "model.safetensors")
        ),
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "unet/diffusion_pytorch_model.fp16.safetensors",
    ]
    assert wanted(names, without=frozenset()) == sorted(names)
    texts = ["text_encoder/config.json", "text_encoder_2/config.json", names[5]]
    assert (
        wanted(names, without=frozenset({"transformer", "unet", "text_encoder", "text_encoder_2"}))
        == texts
    )
    assert wanted(names, without=frozenset({"text_encoder"})) == sorted({*names} - {names[1]})


def test_a_download_is_counted_in_bytes_of_the_files_that_are_missing(
    hub: HubServer, tmp_path: Path
) -> None:
    """By the Hub's own library, from a server: one of the files is here already."""
    sizes = {"model_index.json": 20, "vae/config.json": 30, "unet/config.json": 40}
    weights = {"vae/diffusion_pytorch_model.safetensors": 15_000_000, "left_out.ckpt": 7}
    hub.folders["owner/name"] = offered = tmp_path / "offered"
    for name, size in (sizes | weights).items():
        (offered / name).parent.mkdir(parents=True, exist_ok=True)
        (offered / name).write_bytes(b"%c" % len(name) * size)
    hf_hub_download("owner/name", "unet/config.json")
    told = list[tuple[str, int, int]]()
    for counts in ([0, 15_000_050], []):  # the second time all is here
        folder = fetch(
            "owner/name",
            revision=None,
            choose=partial(wanted, without=frozenset()),
            model_kind="model",
            instead="",
            on_bytes=lambda *row: told.append(row),
        )
        here_bytes = [here for _, here, _ in told]
        assert [*here_bytes[:1], *here_bytes[-1:]] == counts and here_bytes == sorted(here_bytes)
        assert {row[::2] for row in told} == ({("owner/name", counts[1])} if counts else set())
        assert not counts or len(set(here_bytes)) > 3
        told.clear()
    assert (folder / "vae" / "config.json").is_file() and not (folder / "left_out.ckpt").exists()


def test_a_proxy_that_needs_a_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """httpx imports it when the first request is made."""

    def refused(*args: object, **named: object) -> None:
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refused)
    with pytest.raises(MachineError, match="socksio") as caught:
        fetch("a/b", revision=None, choose=list, model_kind="base model", instead="give a folder")
    assert "httpx[socks]" in (caught.value.fix or "")
