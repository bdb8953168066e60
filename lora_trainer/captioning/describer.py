"""Sentences by vision-language models that transformers runs with its own classes.

Input is a model's folder; code that lies in it is never run and pickles are never opened. Three ways
of asking: a chat model gets a request in words, Florence-2 the name of a task, BLIP nothing. The
likeliest word is always taken, so that an image gets the same caption again.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from lora_trainer.captioning.captioners import (
    CaptionRequest,
    ModelCaption,
    OutOfRoom,
    Shown,
    UnusableModel,
    known_as,
    no_room,
    one_line,
    weight_files,
)
from lora_trainer.captioning.json_answers import MAX_TOKENS as JSON_TOKENS
from lora_trainer.captioning.json_answers import form_of
from lora_trainer.common.errors import InputError, LoraTrainError, MachineError, RequestError
from lora_trainer.config.declare import (
    QUANTIZATIONS,
    BasePrecision,
    Precision,
    Quantization,
    weight_bytes,
)
from lora_trainer.families.files.weight_files import count_parameters
from lora_trainer.hardware.device_calls import free_and_total_bytes
from lora_trainer.hardware.machine import GIB, free_ram_bytes
from lora_trainer.network.out_of_memory import free_memory, is_out_of_memory
from lora_trainer.network.quantize import quantizable, quantize
from lora_trainer.run.device import CPU, best_device

REQUEST = (
    "Describe this image in one or two plain sentences for training an image generator: who or "
    "what is shown, what it does, the surroundings, the light and the style. "
    "Begin with the subject itself."
)
# Of an editing pair, whose caption is an instruction.
EDIT_REQUEST = (
    "The last image was made from {before}. Write the instruction that leads to it, as one gives it to "
    "an image editor: one or two plain sentences that begin with a verb. Say what changes, and nothing "
    "of what stays."
)
# More reference images than any base here reads.
MOST_REFERENCES = 10
TASKS = ("<CAPTION>", "<DETAILED_CAPTION>", "<MORE_DETAILED_CAPTION>")
TASK = "<DETAILED_CAPTION>"
MAX_TOKENS = 150
# The parts that read the image, which stay in 16 bits.
EYES = ("visual", "vision_tower", "vision_model", "multi_modal_projector")
_NAMES: Mapping[torch.dtype, Precision] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
# Of an image as a model sees it: a chat model spends a token on every few hundred.
MAX_PIXELS = 1024 * 1024
GPU_BATCH = 4
# What a few images take beside the weights; a guess, running out is handled as well.
WORKSPACE_BYTES = GIB


@dataclass(frozen=True, kw_only=True)
class Describer:
    """A loaded model, how its images are prepared, and its prompt (None: it takes none)."""

    model: Any
    processor: Any
    text: str | None
    edit_texts: Mapping[int, str]
    """The prompt for an image that was made from so many others; empty for a model that sees one image."""
    is_chat: bool
    max_tokens: int
    whole: bool
    torch_device: torch.device
    dtype: torch.dtype
    precision: BasePrecision

    @property
    def batch_size(self) -> int:
        """Images at a time: a processor gains nothing from several."""
        return 1 if self.torch_device.type == "cpu" else GPU_BATCH

    @property
    def device(self) -> str:
        return str(self.torch_device)

    def compares(self, references: int) -> bool:
        """Return whether it sees an image together with so many reference images, and says what changed."""
        return references in self.edit_texts

    def describe(self, pictures: Sequence[Shown]) -> list[ModelCaption]:
        """Return a description of each image, or what changed in it; raises OutOfRoom when memory runs out."""
        try:
            return self._described(pictures)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        free_memory()  # outside of the `except` block, whose error holds the tensors
        raise OutOfRoom

    @torch.inference_mode()
    def _described(self, pictures: Sequence[Shown]) -> list[ModelCaption]:
        images = [_shrunk(picture.image) for picture in pictures]
        if self.text is None:
            inputs = self.processor(images=images, return_tensors="pt")
        else:
            texts = [self.edit_texts.get(len(one.references), self.text) for one in pictures]
            seen = [
                [*map(_shrunk, one.references), image]
                if self.compares(len(one.references))
                else [image]
                for one, image in zip(pictures, images, strict=True)
            ]
            given = seen if self.is_chat else images
            inputs = self.processor(images=given, text=texts, padding=True, return_tensors="pt")
        inputs = inputs.to(self.torch_device, self.dtype)
        tokens = self.model.generate(
            **inputs,
            max_new_tokens=self.max_tokens,
            do_sample=False,
            num_beams=1,
            forced_eos_token_id=None,  # else a caption that is cut looks like one that ended
        )
        if self.is_chat:  # the request comes first
            tokens = tokens[:, inputs["input_ids"].shape[1] :]
        tokenizer = self.processor.tokenizer
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        ended = set(tokenizer.all_special_ids)
        return [
            _description(text, cut=int(row[-1]) not in ended, whole=self.whole)
            for text, row in zip(texts, tokens.cpu(), strict=True)
        ]


def load_describer(folder: Path, request: CaptionRequest) -> Describer:
    """Load the model in `folder`.

    Raises InputError for files that do not fit, RequestError for a prompt it has no use for, and
    MachineError for a device that is missing or too small.
    """
    name = request.model
    torch_device, dtype = _device(request.device)
    try:
        kind = json.loads((folder / "config.json").read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UnusableModel(name, f"has no config.json that can be read ({error})") from None
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise UnusableModel(
            name, f"is of type {kind!r}, which transformers does not run without foreign code"
        )
    with _misfits_named(name):
        processor = _processor(folder)
        text, is_chat = _text_beside(processor, request)
        edit_texts = _edit_texts(processor, request) if is_chat else {}
    precision = _fitting(folder, name, torch_device, dtype)
    # Computed in 16 bits on a processor too where 32 do not fit.
    dtype = {"bf16": torch.bfloat16}.get(precision, dtype)
    with _misfits_named(name):
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model, loading = loaded
        if precision in QUANTIZATIONS:
            quantize(model, precision, device=torch_device, skip=EYES)
        model = model.to(torch_device).eval()
    if absent := sorted(loading["missing_keys"]):  # they would be random numbers
        raise UnusableModel(
            name, f"lacks {len(absent)} weights of {type(model).__name__}, such as {absent[0]}"
        )
    return Describer(
        model=model,
        processor=processor,
        text=text,
        edit_texts=edit_texts,
        is_chat=is_chat,
        max_tokens=request.max_tokens or _most_tokens(request),
        whole=request.json_for is not None,
        torch_device=torch_device,
        dtype=dtype,
        precision=precision,
    )


class _PicturesOnly:
    """Leaves out the video part of a processor: it needs torchvision, and there are no videos here."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        parts: list[str] = super().get_attributes()  # type: ignore[misc]  # of the class it is mixed into
        return [part for part in parts if part != "video_processor"]


def _processor(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    whole: Any = PROCESSOR_MAPPING[type(config)]
    PictureProcessor: Any = type(whole.__name__, (_PicturesOnly, whole), {})
    processor = PictureProcessor.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    tokenizer = processor.tokenizer
    tokenizer.padding_side = "left"  # a chat model goes on where the text ends
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return processor


def _text_beside(processor: Any, request: CaptionRequest) -> tuple[str | None, bool]:
    """Return the text that goes with every image, and whether it is a chat."""
    name, prompt = request.model, request.prompt
    if request.json_for is not None and processor.chat_template is None:
        raise RequestError(
            f"{name} cannot be asked for JSON",
            fix="take a chat model; `lora-train caption --help` names those known",
        )
    if hasattr(processor, "task_prompts_without_inputs"):
        if prompt is not None and prompt not in TASKS:
            raise RequestError(
                f"{name} accepts only its own requests",
                fix=f"give as --prompt one of {', '.join(TASKS)}",
            )
        return prompt or TASK, False
    if processor.chat_template is not None:
        if request.json_for is not None:
            prompt = "\n\n".join(filter(None, (form_of(request.json_for).request, prompt)))
        return _chat(processor, prompt or known_as(name).prompt or REQUEST, name), True
    if prompt is not None:
        raise RequestError(f"{name} does not accept a request", fix="leave --prompt out")
    return None, False


def _edit_texts(processor: Any, request: CaptionRequest) -> dict[int, str]:
    """Return the chat about an image and those that it was made from, by their number; none that cannot be held."""
    if request.json_for is not None:  # which describes an image
        return {}
    texts = {}
    for count in range(1, MOST_REFERENCES + 1):
        before = "the one before it" if count == 1 else f"the {count} before it"
        prompt = request.prompt or EDIT_REQUEST.format(before=before)
        with suppress(UnusableModel):
            texts[count] = _chat(processor, prompt, request.model, images=count + 1)
    return texts


def _most_tokens(request: CaptionRequest) -> int:
    if request.json_for is not None:
        return JSON_TOKENS
    return known_as(request.model).max_tokens or MAX_TOKENS


def _chat(processor: Any, prompt: str, name: str, *, images: int = 1) -> str:
    """Return the chat that asks this of one image or of several, by the model's own template.

    Most templates get the image and the words as parts of the message. That of JoyCaption wants words alone, and puts
    the image before them by itself.
    """
    system = known_as(name).system
    first = [] if system is None else [{"role": "system", "content": system}]
    parts = [*([{"type": "image"}] * images), {"type": "text", "text": prompt}]
    problem = "puts no image into its chat"
    for content in (parts, prompt):
        chat = [*first, {"role": "user", "content": content}]
        try:
            text = str(processor.apply_chat_template(chat, add_generation_prompt=True))
        except (TypeError, TemplateError) as error:
            problem = f"has a chat template that cannot be used ({one_line(error)})"
            continue
        if text.count(processor.image_token) == images and prompt in text:
            return text
    raise UnusableModel(name, problem)


def _fitting(
    folder: Path, name: str, torch_device: torch.device, dtype: torch.dtype
) -> BasePrecision:
    """Return the most precise form in which the model fits the device; raises MachineError where none does.

    A GPU that is too small for 16 bits gets the blocks of the language model in 8 bits, else in 4; what reads
    the image stays in 16. A processor with too little memory for 32 bits gets 16.
    """
    try:
        parameters = count_parameters(weight_files(folder))
    except InputError as error:
        raise InputError(error.found, fix="download the captioning model again") from None
    whole: BasePrecision = _NAMES[dtype]
    needed = {whole: parameters * dtype.itemsize}
    ram_bytes = free_ram_bytes()
    if torch_device.type == "cpu":
        free_bytes = ram_bytes
        needed["bf16"] = parameters * torch.bfloat16.itemsize
    else:
        free_bytes = free_and_total_bytes(torch_device)[0]
        # It is read into host memory as a whole before its layers are encoded.
        if needed[whole] + WORKSPACE_BYTES > free_bytes and needed[whole] < ram_bytes:
            with _misfits_named(name):
                layers = _language_layers(folder)
            kinds: tuple[Quantization, ...] = ("int8", "nf4") if _has_nf4() else ("int8",)
            for kind in kinds:
                needed[kind] = needed[whole] + sum(
                    weight_bytes(fan_in=fan_in, out=out, precision=kind)
                    - weight_bytes(fan_in=fan_in, out=out, precision=whole)
                    for fan_in, out in layers
                )
    for precision, size in needed.items():
        if size + WORKSPACE_BYTES <= free_bytes:
            return precision
    least_bytes = min(needed.values()) + WORKSPACE_BYTES
    raise no_room(
        name,
        f"needs about {least_bytes / GIB:.1f} GiB on {torch_device}, {free_bytes / GIB:.1f} are free",
    )


def _language_layers(folder: Path) -> list[tuple[int, int]]:
    """Return (fan_in, out) of the layers that are encoded in fewer bits."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        network: Any = AutoModelForImageTextToText.from_config(config)
    return list(quantizable(network, skip=EYES).values())


def _has_nf4() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None


@contextmanager
def _misfits_named(name: str) -> Iterator[None]:
    """Turn an error of transformers while it loads a model into one line."""
    try:
        yield
    except ImportError as error:
        raise MachineError(
            f"captioning model {name} needs a package that is missing: {one_line(error)}",
            fix="pip install that package, or take another --model",
        ) from None
    except LoraTrainError:
        raise
    except Exception as error:  # noqa: BLE001 - files that do not fit make transformers raise anything
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise no_room(name, "does not fit into the memory") from None
        raise UnusableModel(name, f"does not load: {one_line(error)}") from None


def _device(device: str) -> tuple[torch.device, torch.dtype]:
    """Return where the model runs, and in which dtype; raises MachineError without the GPU asked for."""
    torch_device, has_bf16 = best_device() if device != "cpu" else (CPU, False)
    if torch_device.type == "cpu":
        if device not in ("auto", "cpu"):
            raise MachineError(
                f"--device {device}, but torch {torch.__version__} finds no GPU it can use",
                fix="use --device cpu, or see what lora-train doctor says",
            )
        return torch_device, torch.float32
    return torch_device, torch.bfloat16 if has_bf16 else torch.float16


def _shrunk(picture: Image.Image) -> Image.Image:
    width_px, height_px = picture.size
    scale = (MAX_PIXELS / (width_px * height_px)) ** 0.5
    if scale >= 1:
        return picture
    size = max(1, round(width_px * scale)), max(1, round(height_px * scale))
    return picture.resize(size, Image.Resampling.LANCZOS)


def _description(text: str, *, cut: bool, whole: bool = False) -> ModelCaption:
    """Return the caption; of one that was cut, the whole sentences where there are any, or all with `whole`."""
    if cut and not whole and (sentences := re.match(r".*[.!?](?=\s)", text, re.DOTALL)):
        text = sentences[0]
    return text, cut
