"""Tiny captioning models of the real classes with random weights, saved as their repositories are.

Three ways of being asked: a chat model, Florence-2 and BLIP; and a tagger as an ONNX file of a
handful of bytes. What they say is noise, but noise that depends on the image.
"""

from __future__ import annotations

import string
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BartTokenizer,
    BertTokenizer,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessorPil,
    CLIPImageProcessorPil,
    Florence2Config,
    Florence2ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

LETTERS = string.ascii_letters
_CHAT_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = (
    "{% if messages[0]['role'] == 'system' %}<|start_header_id|>system<|end_header_id|>"
    "{{ messages[0]['content'] }}<|eot_id|>{% set messages = messages[1:] %}{% endif %}"
    "{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>"
    "<|reserved_special_token_69|>"
    "{{ message['content'].replace('<|reserved_special_token_69|>', '').lstrip() }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)
_WIDTH: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}


def tiny_captioner(kind: str, folder: Path, *, is_brief: bool = False) -> Path:
    """Save a tiny model of the kind of Qwen3-VL, JoyCaption, Florence-2 or BLIP; return its folder.

    One that is brief ends after a few tokens, where others go on until they are cut.
    """
    torch.manual_seed(3)
    kinds = {"qwen3-vl": _chat, "joycaption": _words, "florence2": _tasks, "blip": _unasked}
    model, *parts = kinds[kind]()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # larger than usual, so that the image shows in the words
            torch.nn.init.normal_(parameter, std=0.4)
    if is_brief:
        model.generation_config.exponential_decay_length_penalty = (4, 8.0)
    for part in (model, *parts):
        part.save_pretrained(folder)
    return folder


def _chat() -> tuple[Any, ...]:
    names = [*sorted(bytes_to_unicode().values()), *_CHAT_SPECIAL]
    tokenizer = Qwen2Tokenizer(
        vocab={name: index for index, name in enumerate(names)},
        merges=[],
        chat_template=_CHAT,
        additional_special_tokens=list(_CHAT_SPECIAL),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    config = Qwen3VLConfig(
        text_config={
            **_WIDTH,
            "vocab_size": len(tokenizer),
            "num_key_value_heads": 2,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 4,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    pictures = Qwen2VLImageProcessorPil(
        min_pixels=64 * 64, max_pixels=128 * 128, patch_size=16, merge_size=2
    )
    return Qwen3VLForConditionalGeneration(config), tokenizer, pictures


def _words() -> tuple[Any, ...]:
    """Return JoyCaption's classes: Llava of Llama and SigLIP, whose template puts the image in by itself."""
    image = "<|reserved_special_token_69|>"
    special = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", image)
    special += ("<|start_header_id|>", "<|end_header_id|>")
    names = [*sorted(bytes_to_unicode().values()), *special]
    tokenizer = Qwen2Tokenizer(
        vocab={name: index for index, name in enumerate(names)},
        merges=[],
        additional_special_tokens=list(special),
        eos_token="<|eot_id|>",
        pad_token="<|end_of_text|>",
    )
    config = LlavaConfig(
        text_config=LlamaConfig(
            **_WIDTH,
            vocab_size=len(tokenizer),
            num_key_value_heads=2,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        vision_config=SiglipVisionConfig(**_WIDTH, image_size=28, patch_size=14),
        image_token_id=tokenizer.convert_tokens_to_ids(image),
        vision_feature_select_strategy="full",
        vision_feature_layer=-2,
        projector_hidden_act="gelu",
        image_seq_length=4,
    )
    processor = LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size={"height": 28, "width": 28}),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="full",
        chat_template=_WORDS,
        image_token=image,
        num_additional_image_tokens=0,
    )
    return LlavaForConditionalGeneration(config), processor


def _tasks() -> tuple[Any, ...]:
    special = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    names = [*special, *sorted(bytes_to_unicode().values()), "<image>"]
    tokenizer = BartTokenizer(
        vocab={name: index for index, name in enumerate(names)},
        merges=[],
        extra_special_tokens={"image_token": "<image>"},
    )
    ends = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    sides = {f"{side}_layers": 1 for side in ("encoder", "decoder")}
    sides |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    sides |= {f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")}
    eye = {"depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1]}
    config = Florence2Config(
        text_config={
            "model_type": "bart",
            "vocab_size": len(names),
            "d_model": 32,
            **sides,
            **ends,
        },
        vision_config={
            **eye,
            "embed_dim": [16, 32],
            "num_heads": [2, 4],
            "num_groups": [2, 4],
            "window_size": 4,
            "projection_dim": 32,
        },
        image_token_id=names.index("<image>"),
        **ends,
    )
    pictures = CLIPImageProcessorPil(
        size={"height": 32, "width": 32}, do_center_crop=False, image_seq_length=17
    )
    return Florence2ForConditionalGeneration(config), tokenizer, pictures


def _unasked() -> tuple[Any, ...]:
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]")
    words = [*special, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    tokenizer = BertTokenizer(
        vocab={word: index for index, word in enumerate(words)}, additional_special_tokens=["[DEC]"]
    )
    eye = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "projection_dim": 16}
    config = BlipConfig(
        text_config={
            **_WIDTH,
            "vocab_size": len(words),
            "encoder_hidden_size": 32,
            "bos_token_id": 5,
            "pad_token_id": 0,
            "sep_token_id": 3,
            "eos_token_id": 3,
        },
        vision_config={**eye, "num_attention_heads": 4, "image_size": 32, "patch_size": 16},
    )
    pictures = BlipImageProcessorPil(size={"height": 32, "width": 32})
    return BlipForConditionalGeneration(config), tokenizer, pictures


# ---- a tagger: onnx.proto by hand, as the package `onnx` would be needed for nothing else


def tiny_tagger(
    folder: Path, *, tags: Sequence[tuple[str, str]], side_px: int = 4, batch: int | None = None
) -> Path:
    """Save a tagger whose probabilities are the mean blue, green and red of an image, then halves.

    `tags` are (name, category). Tag 0 is as likely as the image is blue, 1 green, 2 red; a further
    one is half as likely as that three places before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{index},{name},{category},1" for index, (name, category) in enumerate(tags)]
    (folder / "selected_tags.csv").write_text(
        "\n".join(["tag_id,name,category,count", *rows]) + "\n", encoding="utf-8"
    )
    matrix = [
        [(0.5 ** (tag // 3)) / 255 if tag % 3 == colour else 0.0 for tag in range(len(tags))]
        for colour in range(3)
    ]
    shape = [batch or "batch", side_px, side_px, 3]
    (folder / "model.onnx").write_bytes(_onnx(shape, matrix))
    return folder


def _onnx(shape: Sequence[int | str], matrix: Sequence[Sequence[float]]) -> bytes:
    """Return ONNX bytes of: mean over height and width, then a matrix."""
    count = len(matrix[0])
    weights = struct.pack(f"<{len(matrix) * count}f", *(value for row in matrix for value in row))
    axes = [(1, "axes"), (8, 1), (8, 2), (20, 7)]
    keepdims = [(1, "keepdims"), (3, 0), (20, 2)]
    mean = [(1, "picture"), (2, "mean"), (4, "ReduceMean"), (5, axes), (5, keepdims)]
    product = [(1, "mean"), (1, "matrix"), (2, "probabilities"), (4, "MatMul")]
    tensor = [(1, len(matrix)), (1, count), (2, 1), (8, "matrix"), (9, weights)]
    graph = [
        *((1, mean), (1, product), (2, "tagger"), (5, tensor)),
        (11, _value("picture", shape)),
        (12, _value("probabilities", [shape[0], count])),
    ]
    return _message([(1, 8), (7, graph), (8, [(2, 13)])])


def _value(name: str, shape: Sequence[int | str]) -> list[tuple[int, Any]]:
    sides = [(1, [(1 if isinstance(side, int) else 2, side)]) for side in shape]
    return [(1, name), (2, [(1, [(1, 1), (2, sides)])])]


def _message(fields: Iterable[tuple[int, Any]]) -> bytes:
    """Return a message of Protocol Buffers: numbers, texts, bytes and messages by the number of their field."""
    data = b""
    for field, value in fields:
        if isinstance(value, int):
            data += _varint(field << 3) + _varint(value)
            continue
        content = value.encode() if isinstance(value, str) else value
        content = content if isinstance(content, bytes) else _message(content)
        data += _varint(field << 3 | 2) + _varint(len(content)) + content
    return data


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
