"""Tiny random bases: real classes in the configurations of each family's tiny.toml, tokenizers made offline.

`pipeline` names diffusers' class; a table is a part with its class, `like` one of tiny_parts.toml with other entries;
`draws` is the order of what takes random numbers where parts are not just made as they stand in the file.
Every character has a token of its own, so any two prompts differ and none has unknown tokens.
"""

from __future__ import annotations

import string
import tomllib
import warnings
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    AddedToken,
    CLIPTokenizer,
    GemmaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    T5Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lora_trainer import families
from lora_trainer.families.base.tables import FAMILIES
from lora_trainer.families.base.text.qwen3_vl import text_processor
from lora_trainer.families.files.locate import EMBEDDED_FOLDER

PARTS = tomllib.loads(Path(__file__).with_name("tiny_parts.toml").read_text(encoding="utf-8"))
WORDS = tomllib.loads(Path(__file__).with_name("tokenizers.toml").read_text(encoding="utf-8"))
QWEN = WORDS["qwen"]
PRINTABLE = string.ascii_letters + string.digits + string.punctuation


def tiny_table(name: str) -> dict[str, Any]:
    """Return the contents of a family's tiny.toml."""
    return tomllib.loads((FAMILIES / name / "tiny.toml").read_text(encoding="utf-8"))


def released_files() -> dict[str, dict[str, Any]]:
    """Return the files of releases on the Hub by id, as `tests.hub_files` of the families lists them."""
    files: dict[str, dict[str, Any]] = {}
    for name in families.NAMES:
        files |= tiny_table(name)["tests"]["hub_files"]
    return files


def write_base(name: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a family's base, whose weights depend on `seed` alone, and return `folder`.

    `changes` by part are other entries of its configuration, or None for a part that is left out.
    """
    described = tiny_table(name)
    described.pop("tests", None)  # what tests know of its files
    for part, change in changes.items():
        described[part] = {**described[part], **change} if isinstance(change, dict) else change
    kind = getattr(diffusers, described.pop("pipeline"))
    tables = [part for part, value in described.items() if isinstance(value, dict)]
    steps = described.pop("draws", [])
    steps += [f"make {part}" for part in tables if f"make {part}" not in steps]
    parts = {
        part: TOKENIZERS[value]() if value in TOKENIZERS else value or None
        for part, value in described.items()
        if not isinstance(value, bool | dict)
    }
    flags = {key: value for key, value in described.items() if isinstance(value, bool)}
    with torch.random.fork_rng(), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`FluxPosEmbed` is deprecated")  # by diffusers
        torch.manual_seed(seed)
        for verb, place in map(str.split, steps):
            part = place.partition(".")[0]
            if verb != "make" and parts[part] is not None:
                DRAWS[verb](attrgetter(place)(SimpleNamespace(**parts)))
            elif described[part] is not None:
                parts[part] = make_part(described[part])
        if issubclass(kind, diffusers.ModularPipeline):
            modular: Any = kind()
            modular.update_components(**parts)
            modular.save_pretrained(str(folder), overwrite_modular_index=True)
            return folder
        pipeline = kind(**parts, **flags)
    pipeline.save_pretrained(folder)
    return folder


def make_part(entries: Mapping[str, Any]) -> Any:
    while "like" in entries:
        own = dict(entries)
        entries = {**PARTS[own.pop("like")], **own}
    # TOML has no null: "none" stands for it.
    values = {key: None if value == "none" else value for key, value in entries.items()}
    name = str(values.pop("class"))
    if hasattr(diffusers, name):
        return getattr(diffusers, name)(**values)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**values))


def enliven(network: nn.Module) -> None:
    """Redraw every weight: an output or a gate that starts at zero would hide what is before it."""
    for weights in network.parameters():
        if weights.dim() > 1:
            nn.init.normal_(weights, std=weights[0].numel() ** -0.5)
        else:
            weights.add_(0.1 * torch.randn_like(weights))


def _matrices(network: nn.Module) -> None:
    """Redraw every matrix, a little smaller, and leave the vectors."""
    for weights in network.parameters():
        if weights.dim() > 1:
            nn.init.normal_(weights, std=0.7 * max(1, weights[0].numel()) ** -0.5)


DRAWS: Mapping[str, Callable[[Any], object]] = {
    "enliven": enliven,
    "matrices": _matrices,
    "normal": nn.init.normal_,
    "uniform": lambda tensor: tensor.uniform_(0.5, 2.0),
    "eye": nn.init.eye_,
}


def clip_tokenizer(**settings: str) -> CLIPTokenizer:
    """Return the embedded base's tokenizer: 77 tokens, CLIP's classes."""
    tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(EMBEDDED_FOLDER / "tokenizer")
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    return tokenizer


def t5_tokenizer() -> T5Tokenizer:
    """Return a T5 tokenizer: `<pad>` 0, `</s>` 1, `<unk>` 2, words, then printable characters."""
    vocabulary = [
        *(("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)),
        *((word, -3.0) for word in WORDS["t5"]["words"]),
        *((character, -6.0) for character in PRINTABLE),
    ]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512)


def _gemma_tokenizer() -> GemmaTokenizer:
    """Return a Gemma tokenizer: special tokens, then printable characters and `▁` with a letter."""
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    merges = [("▁", letter) for letter in string.ascii_letters]
    names = [*special, "▁", *PRINTABLE, "\n", *map("".join, merges)]
    return GemmaTokenizer(
        vocab={name: index for index, name in enumerate(names)},
        merges=merges,  # type: ignore[arg-type]  # annotated as str, passed on to what takes pairs only
        add_bos_token=True,
        model_max_length=8192,
    )


def _qwen2_tokenizer(*, words: tuple[str, ...] = (), chat: str | None = None) -> Qwen2Tokenizer:
    """Return a byte-level tokenizer with the chat markers; 256 bytes, no merges but the first few."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("r", "e"), ("re", "d")]
    names = [*sorted(bytes_to_unicode().values()), *map("".join, merges), *QWEN["special"]]
    tokenizer = Qwen2Tokenizer(
        vocab={name: index for index, name in enumerate(names)},
        merges=merges,  # type: ignore[arg-type]  # annotated as str, passed on to what takes pairs only
        chat_template=chat,
        additional_special_tokens=QWEN["special"],
        model_max_length=131072,
        eos_token="<|im_end|>",
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def _mistral_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with Mistral's marks, `<s>` in front; the release has it within a processor."""
    known = WORDS["mistral"]
    names = [*known["special"], *sorted(bytes_to_unicode().values()), "Ġa"]
    vocabulary = {name: at for at, name in enumerate(names)}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "a")]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(known["special"])
    plain.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", names.index("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        padding_side="left",
        model_max_length=131072,
        chat_template=known["chat_template"],
    )


def _qwen3_vl_processor() -> Any:
    """Return a tokenizer in the place of Qwen3-VL's processor, under whose name it is saved."""
    processor = text_processor(_qwen2_tokenizer(chat=QWEN["chat_template"]))
    type(processor).__module__, type(processor).__name__ = "transformers", "Qwen3VLProcessor"
    return processor


TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "clip": clip_tokenizer,
    "clip padded with !": lambda: clip_tokenizer(pad_token="!"),  # as in SDXL's release
    "t5": t5_tokenizer,
    "gemma": _gemma_tokenizer,
    "qwen3": lambda: _qwen2_tokenizer(chat=QWEN["chat_template"]),
    "mistral": _mistral_tokenizer,
    "qwen3 vl processor": _qwen3_vl_processor,
    "qwen image": lambda: _qwen2_tokenizer(words=(*QWEN["template_words"], *QWEN["edit_words"])),
    # The end of the template has five tokens, as in the release.
    "qwen3 vl": lambda: _qwen2_tokenizer(
        words=(*QWEN["template_words"], "assistant"), chat=QWEN["chat_template"]
    ),
}
