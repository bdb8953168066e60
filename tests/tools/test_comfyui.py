"""A LoRA put into workflows of ComfyUI and drawn there. What ComfyUI answers is that of version 0.29, recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.numpy import save_file

from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from lora_trainer.tools.comfyui import draw as drawing
from lora_trainer.tools.comfyui.draw import Wish, draw
from lora_trainer.tools.comfyui.server import ComfyUI
from lora_trainer.tools.comfyui.workflow import Workflow, read_workflow
from tests.fakes.comfyui import NODES, FakeComfyUI, serving
from tests.fakes.runs import run_cli

Graph = dict[str, Any]
UNET = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
TEXT = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"


def node(kind: str, **inputs: Any) -> Graph:
    return {"class_type": kind, "inputs": inputs}


def plain() -> Graph:
    """The workflow that ComfyUI begins with."""
    return {
        "4": node("CheckpointLoaderSimple", ckpt_name="sd15.safetensors"),
        "5": node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "6": node("CLIPTextEncode", text="a house", clip=["4", 1]),
        "7": node("CLIPTextEncode", text="blurry", clip=["4", 1]),
        "3": node(
            "KSampler",
            seed=5,
            model=["4", 0],
            positive=["6", 0],
            negative=["7", 0],
            latent_image=["5", 0],
        ),
        "8": node("VAEDecode", samples=["3", 0], vae=["4", 2]),
        "9": node("SaveImage", filename_prefix="x", images=["8", 0]),
    }


def guided() -> Graph:
    """A workflow of FLUX.1: the model goes to the scheduler too, the text through a node for guidance."""
    return {
        "1": node("UNETLoader", unet_name="flux.safetensors", weight_dtype="default"),
        "2": node("DualCLIPLoader", clip_name1="t5", clip_name2="clip_l", type="flux"),
        "3": node(
            "CLIPTextEncodeFlux", clip=["2", 0], clip_l="a house", t5xxl="a house", guidance=3.5
        ),
        "4": node("FluxGuidance", conditioning=["3", 0], guidance=3.5),
        "5": node("BasicGuider", model=["1", 0], conditioning=["4", 0]),
        "6": node("BasicScheduler", model=["1", 0], scheduler="simple", steps=4, denoise=1.0),
        "7": node("SamplerCustomAdvanced", noise=["10", 0], guider=["5", 0], sigmas=["6", 0]),
    }


def controlled() -> Graph:
    """A workflow in which both sides go through a ControlNet, and the text comes from a node of its own."""
    graph = plain()
    graph["20"] = node("PrimitiveStringMultiline", value="a house")
    graph["6"]["inputs"]["text"] = ["20", 0]
    graph["21"] = node("ControlNetLoader", control_net_name="c.safetensors")
    graph["22"] = node(
        "ControlNetApplyAdvanced",
        positive=["6", 0],
        negative=["7", 0],
        control_net=["21", 0],
        strength=1.0,
    )
    graph["3"]["inputs"] |= {"positive": ["22", 0], "negative": ["22", 1]}
    return graph


def put_in(
    graph: Graph, *, prompt: str | None = None, on_text: bool = False, loader: str | None = None
) -> Graph:
    made = Workflow(graph, lambda name: NODES.get(name, {})).with_lora(
        "mine/cat.safetensors", strength=0.8, on_text=on_text, prompt=prompt, loader=loader
    )
    return dict(made)


def test_the_lora_stands_between_the_model_and_all_that_use_it() -> None:
    before = plain()
    made = put_in(before)
    assert made["10"] == node(
        "LoraLoaderModelOnly", lora_name="mine/cat.safetensors", model=["4", 0], strength_model=0.8
    )
    assert made["3"]["inputs"]["model"] == ["10", 0]
    assert made["6"]["inputs"]["clip"] == ["4", 1]
    assert made["8"]["inputs"]["vae"] == ["4", 2]
    assert before == plain(), "the workflow of the user is changed"
    both = put_in(guided())
    assert {both[number]["inputs"]["model"][0] for number in ("5", "6")} == {"8"}


def test_a_lora_of_the_text_encoder_goes_behind_that_too() -> None:
    made = put_in(plain(), on_text=True)
    assert made["10"]["class_type"] == "LoraLoader"
    assert made["10"]["inputs"]["strength_clip"] == 0.8
    assert made["6"]["inputs"]["clip"] == made["7"]["inputs"]["clip"] == ["10", 1]


def test_a_workflow_that_has_this_lora_gets_its_strength_alone() -> None:
    graph = put_in(plain(), on_text=True)
    graph["10"]["inputs"] |= {"strength_model": 0.1, "strength_clip": 0.1}
    made = put_in(graph)
    assert len(made) == len(graph)
    assert made["10"]["inputs"]["strength_model"] == made["10"]["inputs"]["strength_clip"] == 0.8


@pytest.mark.parametrize(
    ("graph", "places"),
    [
        (plain, {("6", "text")}),
        (guided, {("3", "clip_l"), ("3", "t5xxl")}),
        (controlled, {("20", "value")}),
    ],
)
def test_a_prompt_replaces_that_of_the_positive_side(
    graph: Callable[[], Graph], places: set[tuple[str, str]]
) -> None:
    made = put_in(graph(), prompt="zcat asleep")
    texts = {
        (number, name)
        for number, each in made.items()
        for name, value in each["inputs"].items()
        if value == "zcat asleep"
    }
    assert texts == places
    if graph is not guided:
        assert made["7"]["inputs"]["text"] == "blurry"


def test_several_models_are_told_apart_by_their_node() -> None:
    graph = plain()
    graph["30"] = node("UNETLoader", unet_name="refiner.safetensors", weight_dtype="default")
    with pytest.raises(
        RequestError, match=r"loads 2 models: 4 \(CheckpointLoaderSimple\), 30 \(UNETLoader\)"
    ):
        put_in(graph)
    assert put_in(graph, loader="4")["31"]["inputs"]["model"] == ["4", 0]
    with pytest.raises(RequestError, match="node 5 does not load a model"):
        put_in(graph, loader="5")


def test_a_text_that_is_put_together_is_left_alone() -> None:
    graph = plain()
    graph["20"] = node("StringConcatenate", string_a="a", string_b="b", delimiter=" ")
    graph["6"]["inputs"]["text"] = ["20", 0]
    with pytest.raises(RequestError, match="no prompt is found in the workflow"):
        put_in(graph, prompt="zcat")


def test_a_workflow_comes_from_its_file_or_from_a_picture(tmp_path: Path) -> None:
    file = tmp_path / "flow.json"
    file.write_text(json.dumps(plain()), encoding="utf-8")
    assert read_workflow(file) == plain()
    told = PngInfo()
    told.add_text("prompt", json.dumps(plain()))
    Image.new("RGB", (8, 8)).save(tmp_path / "saved.png", pnginfo=told)
    assert read_workflow(tmp_path / "saved.png") == plain()
    file.write_text(json.dumps({"nodes": [], "links": []}), encoding="utf-8")
    with pytest.raises(InputError, match=r"ComfyUI's editor\. Fix: use \"Export \(API\)\""):
        read_workflow(file)
    Image.new("RGB", (8, 8)).save(tmp_path / "other.png")
    with pytest.raises(InputError, match="holds no workflow"):
        read_workflow(tmp_path / "other.png")
    file.write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="cannot be read as a workflow"):
        read_workflow(file)


@pytest.fixture
def comfyui() -> Iterator[FakeComfyUI]:
    with serving(FakeComfyUI(loras=["other.safetensors", "mine\\cat.safetensors"])) as fake:
        fake.has_drawn(plain())
        yield fake


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    """A LoRA for SD1.5 with a layer of the denoiser and one of the text encoder."""
    tensors = {
        f"{layer}.{side}.weight": np.ones(shape, np.float16)
        for layer, width in ((UNET, 320), (TEXT, 768))
        for side, shape in (("lora_down", (4, width)), ("lora_up", (width, 4)))
    }
    file = tmp_path / "cat.safetensors"
    save_file(tensors, file, metadata={"modelspec.trigger_phrase": "zcat"})
    return file


def asked(comfyui: FakeComfyUI, lora: Path, *options: str) -> int:
    output = lora.parent / "drawn"
    return run_cli(
        ["comfyui", str(lora), f"--server={comfyui.address}", f"--output={output}", *options]
    )


def test_the_command_draws_without_and_with_the_lora(
    comfyui: FakeComfyUI, lora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(comfyui, lora) == 0
    without, with_lora = comfyui.queued
    assert [graph["10"]["inputs"]["strength_model"] for graph in (without, with_lora)] == [0, 1]
    assert with_lora["10"]["inputs"]["strength_clip"] == 1
    assert with_lora["10"]["inputs"]["lora_name"] == "mine\\cat.safetensors"
    assert with_lora["6"]["inputs"]["text"] == "zcat, a house"
    assert with_lora["3"]["inputs"]["seed"] == 5
    files = sorted((lora.parent / "drawn").iterdir())
    assert [file.name for file in files] == ["cat-x0.png", "cat-x1.png"]
    with Image.open(files[1]) as opened:
        assert opened.getpixel((0, 0)) == (100, 0, 0)
        assert opened.info["parameters"] == "zcat, a house"
    assert "the same picture" not in capsys.readouterr().out
    # What was drawn for this program is not the workflow of the next time, and no picture is replaced.
    assert asked(comfyui, lora, "--prompt=sits", "--strength=0.5") == 0
    assert len(comfyui.queued[-1]) == len(plain()) + 1
    assert comfyui.queued[-1]["6"]["inputs"]["text"] == "sits"
    assert asked(comfyui, lora, "--strength=1") == 0
    assert (lora.parent / "drawn" / "cat-x1-2.png").is_file()


def test_a_lora_without_effect_is_said(
    comfyui: FakeComfyUI, lora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comfyui.ignores = True
    assert asked(comfyui, lora) == 0
    assert drawing.NO_EFFECT in " ".join(capsys.readouterr().out.split())


def nowhere(fake: FakeComfyUI) -> None:
    fake.loras = ["other.safetensors"]


def idle(fake: FakeComfyUI) -> None:
    fake.history.clear()


def refusing(fake: FakeComfyUI) -> None:
    errors = [{"message": "Value not in list", "details": "ckpt_name: 'a' not in []"}]
    fake.refuses = {
        "error": {"message": "Prompt outputs failed validation", "details": ""},
        "node_errors": {"4": {"class_type": "CheckpointLoaderSimple", "errors": errors}},
    }


def out_of_memory(fake: FakeComfyUI) -> None:
    fake.fails = "Allocation on device"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (nowhere, "ComfyUI does not find cat.safetensors among its 1 LoRAs"),
        (idle, "has not drawn anything since it was started"),
        (refusing, "node 4 (CheckpointLoaderSimple): Value not in list: ckpt_name: 'a' not in []"),
        (out_of_memory, "ComfyUI could not draw: node 7 (KSampler): Allocation on device"),
    ],
)
def test_what_comfyui_refuses_is_said_in_one_line(
    damage: Callable[[FakeComfyUI], None],
    said: str,
    comfyui: FakeComfyUI,
    lora: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(comfyui)
    assert asked(comfyui, lora) == 3
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert not list(lora.parent.glob("drawn/*"))


def test_other_programs_and_no_program_are_told_apart(lora: Path) -> None:
    for address in ("ftp://127.0.0.1", "http://", "127.0.0.1:x", "http://me@127.0.0.1"):
        with pytest.raises(RequestError, match="not the address of a ComfyUI"):
            ComfyUI(address)
    wish = Wish(strengths=[1])
    with pytest.raises(LoraTrainError, match="cannot be reached at http://127.0.0.1:9"):
        list(draw(lora, server=ComfyUI("127.0.0.1:9"), wish=wish, output=lora.parent))
    other = FakeComfyUI(loras={})  # type: ignore[arg-type]  # what is tested: a list is expected
    with serving(other), pytest.raises(LoraTrainError, match="does not say its list of LoRAs"):
        list(draw(lora, server=ComfyUI(other.address), wish=wish, output=lora.parent))


def test_stopping_takes_the_workflow_back(
    comfyui: FakeComfyUI, lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ComfyUI, "drawings", stopped)
    with pytest.raises(KeyboardInterrupt):
        list(draw(lora, server=ComfyUI(comfyui.address), wish=Wish(), output=lora.parent))
    assert comfyui.cancelled == ["asked-1"]
