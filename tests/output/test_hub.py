"""What is uploaded, what is not, and what happens when the Hub does not answer. No network but this machine's."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.numpy import load_file, save_file

from lora_trainer import families
from lora_trainer.lora_file.metadata import SETTINGS_ENTRY
from lora_trainer.run.hub_upload import _drawn, _system_prompt
from tests.fakes.adapters import adapter_of, export
from tests.fakes.family_bases import base_of
from tests.fakes.hub_server import TOKEN, HubServer, hub_in_process
from tests.fakes.runs import Toy, events, problems, run_cli, toy

BASE = "stable-diffusion-v1-5/stable-diffusion-v1-5"
HEADER = {
    "modelspec.title": "Zibbo",
    "modelspec.trigger_phrase": "zibbo",
    "modelspec.description": "A creature.",
    "modelspec.license": "mit",
    "ss_sd_model_name": BASE,
}
KOHYA = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
NOBODY = "http://127.0.0.1:9"
DIFFUSERS = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
LORA = {f"{KOHYA}.lora_down.weight": (4, 320), f"{KOHYA}.lora_up.weight": (320, 4)}
LOHA = {"w1_a": (320, 4), "w1_b": (4, 320), "w2_a": (320, 4), "w2_b": (4, 320)}
DORA = {"lora_A.weight": (4, 320), "lora_B.weight": (320, 4), "lora_magnitude_vector": (320,)}
KINDS: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "lora": (LORA, "In ComfyUI, Forge, A1111 or InvokeAI: put"),
    "dora of diffusers": ({f"{DIFFUSERS}.{name}": shape for name, shape in DORA.items()}, ""),
    "dora of kohya": ({**LORA, f"{KOHYA}.dora_scale": (320, 1)}, "In ComfyUI or Forge: put"),
    "loha": (
        {f"{KOHYA}.hada_{name}": shape for name, shape in LOHA.items()},
        "In ComfyUI or Forge: put",
    ),
}
"""A file of each kind, and the sentence of its card that says which programs can read it."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run folder with all that must stay at home beside what is uploaded."""
    folder = tmp_path / "runs" / "zibbo"
    for name, prompt in {
        "step-00000100/00.png": "old",
        "step-00000200/00.png": "zibbo in a hat",
        "step-00000200/01.png": "from /home/jane/secret\nat night",
        "step-00000300/asked-00.png": "somebody's own prompt",
    }.items():
        file, info = folder / "samples" / name, PngInfo()
        info.add_text("parameters", f"{prompt}\nNegative prompt: \nSteps: 4, CFG scale: 5, Seed: 1")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), "red").save(file, pnginfo=info)
    Image.new("RGB", (4, 4)).save(folder / "samples" / "step-00000200" / "02.png")
    (folder / "states").mkdir()
    (folder / "states" / "state.safetensors").write_bytes(b"state")
    record = {"token": "hf_abcdefghijklmnopqrst", "base": {"source": BASE}}
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    write_lora(folder / "zibbo.safetensors", LORA)
    return folder


def write_lora(file: Path, shapes: dict[str, tuple[int, ...]], **header: str) -> None:
    tensors = {name: np.ones(shape, dtype=np.float32) for name, shape in shapes.items()}
    texts = {f"modelspec.{name}": text for name, text in header.items()}
    save_file(tensors, file, metadata=HEADER | texts)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Return the Hub that answers instead of the real one, where somebody is logged in."""
    with hub_in_process(monkeypatch) as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def publish(run: Path, *more: str) -> int:
    file = str(run / "zibbo.safetensors")
    return run_cli(["publish", file, "--repository", "jane/zibbo", *more])


def card(run: Path, hub: HubServer) -> tuple[str, dict[str, Any]]:
    """Return the published card's text, and what the Hub reads of its head."""
    assert publish(run) == 0
    text = hub.files["jane/zibbo"]["README.md"].decode()
    return text, dict(yaml.safe_load(text.split("---\n")[1]))


def test_file_images_and_card_are_uploaded_and_nothing_else(
    run: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = run / "embeddings" / "zibbo_emb.safetensors"
    words.parent.mkdir()
    words.write_bytes(b"vectors")
    assert publish(run) == 0
    assert capsys.readouterr().out == f"published at {hub.address}/jane/zibbo\n"
    uploaded = hub.files["jane/zibbo"]
    assert hub.private == {"jane/zibbo": True} and TOKEN in hub.tokens
    assert uploaded.keys() == {
        "README.md",
        "zibbo.safetensors",
        "embeddings/zibbo_emb.safetensors",
        "samples/00.png",
        "samples/01.png",
        "samples/02.png",
    }
    assert uploaded["zibbo.safetensors"] == (run / "zibbo.safetensors").read_bytes()
    newest = run / "samples" / "step-00000200" / "00.png"
    assert uploaded["samples/00.png"] == newest.read_bytes()
    assert b"`embedding:zibbo_emb`" in uploaded["README.md"]
    # A card that somebody wrote is left alone, and public is only when asked.
    (run / "offered").mkdir()
    (run / "offered" / "README.md").touch()
    hub.folders["jane/zibbo"] = run / "offered"
    assert publish(run, "--public") == 0
    assert hub.files["jane/zibbo"].keys() == uploaded.keys() - {"README.md"}
    assert hub.private == {"jane/zibbo": False}


def test_the_card_is_what_the_hub_reads(run: Path, hub: HubServer) -> None:
    text, head = card(run, hub)
    assert head["tags"] == ["text-to-image", "diffusers", "lora", "template:sd-lora"]
    assert head["base_model"] == BASE and head["library_name"] == "diffusers"
    assert (head["instance_prompt"], head["license"]) == ("zibbo", "mit")
    assert head["widget"] == [
        {"text": "zibbo in a hat", "output": {"url": "samples/00.png"}},
        {"text": "from [path]\nat night", "output": {"url": "samples/01.png"}},
        {"text": "-", "output": {"url": "samples/02.png"}},
    ]
    for words in ("# Zibbo\n", "\n\n<Gallery />\n\n", "A creature.", "Put `zibbo`"):
        assert words in text
    (code,) = (block.removeprefix("python\n") for block in text.split("```") if "import" in block)
    compile(code, "snippet", "exec")
    assert '("jane/zibbo", weight_name="zibbo.safetensors")\n' in code
    assert '"zibbo in a hat"' in code and "jane/secret" not in text and "\n\n\n" not in text


def test_the_card_draws_as_the_samples_were_drawn(run: Path, hub: HubServer) -> None:
    """diffusers' own 50 steps at 7.5 burn a few-step base; Z-Image's pipeline counts guidance one less."""
    settings = json.dumps({"sampling.steps": 8, "sampling.guidance_scale": 1.0})
    headed = HEADER | {SETTINGS_ENTRY: settings}
    tensors = {name: np.ones(shape, dtype=np.float32) for name, shape in LORA.items()}
    save_file(tensors, run / "zibbo.safetensors", metadata=headed)
    text, _ = card(run, hub)
    assert '("zibbo in a hat", num_inference_steps=8, guidance_scale=1)' in text
    assert _drawn(headed, "zimage") == {"num_inference_steps": 8, "guidance_scale": 0.0}
    assert _drawn(headed, "qwen") == {"num_inference_steps": 8, "true_cfg_scale": 1.0}
    assert _drawn({}, "zimage") == {}


def blocks_card(name: str, base: str, run: Path, hub: HubServer) -> str:
    """Return the code on the card of a LoRA for a base that diffusers knows as blocks."""
    settings = {"sampling.steps": 2, "sampling.guidance_scale": 3.0}
    headed = HEADER | {SETTINGS_ENTRY: json.dumps(settings), "ss_sd_model_name": base}
    file = run / "zibbo.safetensors"
    export(file, adapter_of(name), name=name, format="comfyui")
    save_file(load_file(file), file, metadata=headed)
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    record["base"]["source"] = base
    (run / "run.json").write_text(json.dumps(record), encoding="utf-8")
    text, _ = card(run, hub)
    (code,) = (block.removeprefix("python\n") for block in text.split("```") if "import" in block)
    compile(code, "snippet", "exec")
    return code


@pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks`:UserWarning")  # diffusers' own
def test_the_card_draws_with_blocks_where_there_is_no_plain_pipeline(
    run: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    base = "circlestone-labs/Anima-Base-v1.0-Diffusers"
    code = blocks_card("anima", base, run, hub)
    for here, there in {base: str(base_of("anima")), "jane/zibbo": str(run), "cuda": "cpu"}.items():
        code = code.replace(json.dumps(here), json.dumps(there))
    names: dict[str, Any] = {}
    code = code.replace("bfloat16", "float32").replace("(prompt=", "(width=32, height=16, prompt=")
    exec(code, names)  # what a card tells people to run
    assert names["image"].size == (32, 16)
    assert names["pipeline"].guider.guidance_scale == 3.0
    base = "black-forest-labs/flux-3-image-klein"
    code = blocks_card("flux3", f"{base}-base", run, hub)
    assert "= Flux3AutoBlocks()" in code and "guidance_scale=3)" in code
    assert 'blocks.sub_blocks.pop("prompt_upsampler")' in code
    code = blocks_card("flux3", base, run, hub)
    assert "= Flux3DistilledAutoBlocks()" in code and "guid" not in code


def test_the_card_says_what_to_put_before_a_prompt(run: Path, hub: HubServer) -> None:
    def asked(prompt: str, family: str = "lumina2") -> tuple[str, dict[str, str]]:
        return _system_prompt({SETTINGS_ENTRY: json.dumps({"base.system_prompt": prompt})}, family)

    own = families.family("lumina2").text.system_prompt
    assert own is not None
    assert asked("auto") == asked(own) == (f"{own} <Prompt Start> ", {})
    assert asked("Be brief.") == ("Be brief. <Prompt Start> ", {"system_prompt": "Be brief."})
    assert asked("") == ("", {"system_prompt": ""})
    assert asked("auto", "sdxl") == _system_prompt({}, "lumina2") == ("", {})
    linear = "diffusion_model.layers.0.attention.qkv.lora_"
    tensors = {
        f"{linear}A.weight": np.ones((4, 2304), dtype=np.float32),
        f"{linear}B.weight": np.ones((3840, 4), dtype=np.float32),
    }
    settings = {SETTINGS_ENTRY: json.dumps({"base.system_prompt": "Be brief."})}
    save_file(tensors, run / "zibbo.safetensors", metadata=HEADER | settings)
    text, _ = card(run, hub)
    assert "begin the prompt with `Be brief. <Prompt Start>`." in text
    assert 'system_prompt="Be brief.").images[0]' in text


def test_a_run_that_tells_nothing_of_its_dataset_publishes_no_prompts(
    run: Path, hub: HubServer
) -> None:
    settings = json.dumps({"output.dataset_in_header": False})
    tensors = {name: np.ones(shape, dtype=np.float32) for name, shape in LORA.items()}
    save_file(
        tensors, run / "zibbo.safetensors", metadata={**HEADER, "lora_train.settings": settings}
    )
    text, head = card(run, hub)
    assert [one["text"] for one in head["widget"]] == ["zibbo"] * 3 and "in a hat" not in text
    sample = hub.files["jane/zibbo"]["samples/00.png"]
    assert b"in a hat" not in sample and Image.open(io.BytesIO(sample)).size == (8, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_card_knows_who_can_read_the_file(kind: str, run: Path, hub: HubServer) -> None:
    shapes, programs = KINDS[kind]
    write_lora(run / "zibbo.safetensors", shapes)
    text, _ = card(run, hub)
    assert ("```" in text) == (kind in ("lora", "dora of diffusers"))
    assert programs in text and ("put `zibbo.safetensors`" in text) == bool(programs)


def test_a_base_that_is_not_on_the_hub_is_not_linked(
    run: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a trigger that has to be quoted, and where a folder has the name of a repository."""
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(run / "samples")
    write_lora(run / "zibbo.safetensors", LORA, trigger_phrase='a "quoted" \\ trigger')
    for source, base in (("owner/base", "owner/base"), ("/models/base", None), ("here/base", None)):
        (tmp_path / "here" / "base").mkdir(parents=True, exist_ok=True)
        (run / "run.json").write_text(json.dumps({"base": {"source": source}}), encoding="utf-8")
        text, head = card(run, hub)
        assert "widget" not in head and "<Gallery" not in text
        assert (head.get("base_model"), "```" in text) == (base, base is not None)
        assert base or "The base model is base." in text
        for block in text.split("```"):
            if "import" in block:
                compile(block.removeprefix("python\n"), "snippet", "exec")


# ---- what can go wrong


def test_an_upload_that_fails_is_one_line_that_says_what_to_do(
    run: Path, hub: HubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a sample that is removed meanwhile, and a card that is refused."""
    sample = run / "samples" / "step-00000200" / "01.png"

    def error() -> str:
        capsys.readouterr()
        assert publish(run) == 4
        line = capsys.readouterr().err
        assert "was not uploaded" in line and line.count("\n") == 1
        return line

    def remove(*_: Any, **__: Any) -> None:
        sample.unlink()

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("Invalid metadata in README.md")

    for name, does in (("create_repo", remove), ("create_commit", refuse)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"huggingface_hub.HfApi.{name}", does)
            error()
    assert not sample.exists()
    for hub.refuses, fix in ((401, "hf auth login"), (403, "make a token that may write")):
        assert fix in error()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", NOBODY)
    assert "hf upload jane/zibbo" in error()


def test_a_finished_training_is_uploaded_and_a_failure_is_its_problem(
    tmp_path: Path,
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place: Toy = toy(tmp_path).with_base()
    asked: dict[str, Any] = {"output__hub_repo": "jane/toy", "sampling__every_steps": 0}
    hub.refuses = 403
    assert place.train(**asked) == 0
    assert "was not uploaded" in problems(place.run)[-1]["what"]
    hub.refuses = 0
    assert place.train("--resume", **asked) == 0
    (uploaded,) = events(place.run, "uploaded")
    assert uploaded["address"] == f"{hub.address}/jane/toy" and uploaded["private"]
    assert hub.files["jane/toy"].keys() == {"README.md", "toy.safetensors"}
    # Without a login, or with a name that no repository can have, nothing is trained in vain.
    monkeypatch.delenv("HF_TOKEN")
    for repository, code in (("jane/toy", 4), ("toy", 2), ("a/b/c", 2), ("/toy", 2), ("../x", 2)):
        capsys.readouterr()
        assert place.train("--name", "new", **asked | {"output__hub_repo": repository}) == code
        told = capsys.readouterr().err
        assert ("hf auth login" if code == 4 else "owner/name") in told
    assert not (place.runs / "new").exists()
