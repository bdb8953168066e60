"""Pictures of a LoRA, drawn by a running ComfyUI with a workflow of its user.

Inputs: a LoRA file that ComfyUI finds in its folder, the address of ComfyUI, strengths. Outputs: a PNG for each
strength, where strength 0 is the base alone; everything else of the workflow stays as it is, its seed too.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from lora_trainer.common.files import disk_error, write_atomic
from lora_trainer.lora_file.base_layers import check_usable
from lora_trainer.lora_file.tensor_file import open_checked

from .server import ComfyUI
from .workflow import Workflow, is_graph, read_workflow

STRENGTHS = (0.0, 1.0)
MAX_STRENGTH = 10.0
# Names of tensors of text encoders: of kohya, of diffusers and of ComfyUI itself.
_OF_TEXT = re.compile(r"lora_te\d?_|text_encoder(?:_\d)?\.|text_encoders\.")
_TRIGGER = "modelspec.trigger_phrase"
NO_EFFECT = (
    "all strengths give the same picture: the model of the workflow is not the base of this LoRA, or the sampler "
    "uses another model than the one that the LoRA was put behind"
)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What ComfyUI is to draw.

    An empty `strengths` stands for `STRENGTHS`; `workflow`: a file, None for the last one that ComfyUI finished;
    `prompt`: None for that of the workflow, with the trigger in front where it is missing; `loader`: the number of
    the node that loads the model, needed where there are several.
    """

    strengths: Sequence[float] = ()
    workflow: Path | None = None
    prompt: str | None = None
    loader: str | None = None


def draw(file: Path, *, server: ComfyUI, wish: Wish, output: Path) -> Iterator[Path]:
    """Draw with a LoRA; yield each picture's file in `output` once it is written, a PNG with its prompt.

    Raises InputError for a file that is not a LoRA or that ComfyUI does not find, RequestError for strengths that are
    not any, MachineError where ComfyUI cannot be reached; whatever it refuses is said in its own words. What waits or
    runs there is taken back when the caller stops.
    """
    strengths = _checked(wish.strengths or STRENGTHS)
    check_usable(file, names=None)
    name = _name_there(server, file)
    on_text, trigger = _facts(file)
    workflow = _workflow(server, wish)
    prompt = wish.prompt if wish.prompt is not None else _with_trigger(workflow, trigger)
    graphs = [
        workflow.with_lora(
            name, strength=strength, on_text=on_text, prompt=prompt, loader=wish.loader
        )
        for strength in strengths
    ]
    written = ", ".join(workflow.prompts()) if prompt is None else prompt
    for graph, strength in zip(graphs, strengths, strict=True):
        picture = _drawn(server, graph)
        target = _unused(output / picture_name(file.stem, strength))
        _save(picture, target, prompt=written)
        yield target


def picture_name(stem: str, strength: float) -> str:
    """Return the name of the picture that a file of this name gives at a strength, in an empty folder."""
    return f"{stem}-x{strength:g}.png"


def all_the_same(files: Sequence[Path]) -> bool:
    """Return whether several pictures have the same pixels."""
    pixels = set()
    for file in files:
        with Image.open(file) as opened:
            pixels.add((opened.size, opened.convert("RGB").tobytes()))
    return len(files) > 1 and len(pixels) == 1


def _checked(strengths: Sequence[float]) -> list[float]:
    for strength in strengths:
        if not math.isfinite(strength) or abs(strength) > MAX_STRENGTH:
            raise RequestError(
                f"{strength:g} is not a strength",
                fix=f"use numbers from -{MAX_STRENGTH:g} to {MAX_STRENGTH:g}",
            )
    return sorted(set(strengths))


def _name_there(server: ComfyUI, file: Path) -> str:
    """Return the name under which ComfyUI knows a file: the one in the fewest folders that ends so."""
    there = server.loras()
    # On Windows ComfyUI's names have the separators of Windows.
    same = [name for name in there if PurePosixPath(name.replace("\\", "/")).name == file.name]
    if not same:
        raise InputError(
            f"ComfyUI does not find {file.name} among its {len(there)} LoRAs",
            fix="copy the file into its folder models/loras",
        )
    return min(same, key=lambda name: (len(PurePosixPath(name.replace("\\", "/")).parts), name))


def _facts(file: Path) -> tuple[bool, str]:
    """Return whether a file changes text encoders, and its trigger."""
    with open_checked(file) as opened:
        on_text = any(_OF_TEXT.match(key) for key in opened.entries)
        return on_text, opened.metadata.get(_TRIGGER, "")


def _workflow(server: ComfyUI, wish: Wish) -> Workflow:
    if wish.workflow is not None:
        return Workflow(read_workflow(wish.workflow), server.node_class)
    for graph in filter(is_graph, server.drawn_last()):
        found = Workflow(graph, server.node_class)
        if found.draws():
            return found
    raise InputError(
        f"ComfyUI at {server.address} has not drawn anything since it was started",
        fix="draw there once with a workflow for the base of this LoRA, or name one with --workflow",
    )


def _with_trigger(workflow: Workflow, trigger: str) -> str | None:
    """Return the prompt of a workflow with the trigger in front, None where it needs no other prompt."""
    prompts = workflow.prompts()
    if not trigger or len(prompts) != 1 or trigger.casefold() in prompts[0].casefold():
        return None
    return f"{trigger}, {prompts[0]}"


def _drawn(server: ComfyUI, graph: Mapping[str, Any]) -> Image.Image:
    """Return the first picture of a workflow, which is taken back where somebody stops this."""
    prompt_id = server.queue(graph)
    try:
        found = server.drawings(prompt_id)
    except KeyboardInterrupt:
        with suppress(LoraTrainError):  # it is stopped here all the same
            server.cancel(prompt_id)
        raise
    if not found:
        raise InputError(
            "the workflow ended without a picture",
            fix="use one that ends in Save Image or Preview Image",
        )
    return server.picture(found[0])


def _unused(wanted: Path) -> Path:
    """Return the first of NAME.png, NAME-2.png, ... that does not exist."""
    target, number = wanted, 1
    while target.exists():
        number += 1
        target = wanted.with_stem(f"{wanted.stem}-{number}")
    return target


def _save(picture: Image.Image, target: Path, *, prompt: str) -> None:
    """Write a picture as PNG, with its prompt where A1111 and this program look for it."""
    told = PngInfo()
    told.add_text("parameters", prompt)
    data = io.BytesIO()
    picture.save(data, format="PNG", pnginfo=told)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(target.parent, error) from error
    write_atomic(target, data.getvalue(), durable=False)
