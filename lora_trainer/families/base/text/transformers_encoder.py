"""Text encoders of flow-matching families: CLIP with T5, and the language models Qwen3, Qwen2.5-VL and Gemma 2.

Tokens are int64 ids and masks on the CPU, hidden states float on the network's device. Conditioning is equal
to that of diffusers' pipelines; texts of varying length have zeros behind shorter prompts, and `text_mask`
[B, L]. Families differ in the template around a prompt, the layers they read, and padding; of Qwen3 a family
chooses layers, padding and thinking by a subclass. Torch-free to import.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.facts import Conditioning
from lora_trainer.families.base.texts import TextEncoder
from lora_trainer.families.files.base_parts import read_json
from lora_trainer.families.files.weight_files import AGAIN

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


SPIECE, CHAT_TEMPLATE = "spiece.model", "chat_template.jinja"
# The language head, which scores words: 0.6 of the 8.2 billion parameters of Qwen3-8B.
QWEN3_UNREAD = ("lm_head.",)


def load_tokenizer(folder: Path, *, kind: str) -> PreTrainedTokenizerBase:
    """Load CLIP's tokenizer, or one of the class that its own files declare, without network access.

    OpenCLIP pads with token 0, which is "!"; the configurations of Stable Diffusion 2 and of bigG therefore
    name "!" as a special token. transformers then tokenizes "wow!" with token 0 for "!" instead of token
    256 ("!" at the end of a word), which OpenCLIP, ComfyUI, A1111 and sd-scripts use.
    """
    from transformers import AutoTokenizer, CLIPTokenizer

    if kind == "clip":
        clip: CLIPTokenizer = CLIPTokenizer.from_pretrained(folder)
        # The character that it pads with is text in captions.
        if clip.pad_token not in (clip.bos_token, clip.eos_token):
            clip.split_special_tokens = True
        return clip
    # As in Chroma's releases.
    if (folder / SPIECE).is_file() and not (folder / "tokenizer.json").is_file():
        return load_spiece_tokenizer(folder)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, local_files_only=True
    )
    return tokenizer


class TransformersEncoder(TextEncoder):
    """Networks of transformers and their tokenizers; the last one reads the whole prompt."""

    free_tokens: ClassVar[int] = 0
    """Tokens of the template that do not count among `max_tokens`."""
    padding_side: ClassVar[str | None] = None
    """None: the tokenizer's own."""
    adds_special_tokens: ClassVar[bool] = True
    """The tokenizer puts its own special tokens around the template; False where the template has them."""

    def template(self, prompt: str) -> str:
        """Return the text that is tokenized for a prompt."""
        return prompt

    @property
    def last(self) -> str:
        """The component that reads the whole prompt."""
        return tuple(self.networks)[-1]

    def tokens_of(
        self, component: str, prompts: Sequence[str], *, length: int, padding: str = "max_length"
    ) -> tuple[Tensor, Tensor]:
        """Return ids and mask, int64 [B, length], truncated; `padding` "longest": as long as the longest."""
        side = {"padding_side": self.padding_side} if self.padding_side else {}
        tokens = self.tokenizers[component](
            [self.template(prompt) for prompt in prompts],
            padding=padding,
            **side,
            max_length=length,
            truncation=True,
            add_special_tokens=self.adds_special_tokens,
            return_tensors="pt",
        )
        return tokens["input_ids"], tokens["attention_mask"]

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the ids of each component, int64 [B, limit of its tokenizer]; the last one's is `max_tokens`."""
        return {
            name: self.tokens_of(
                name,
                prompts,
                length=self.facts.release.max_tokens
                if name == self.last
                else tokenizer.model_max_length,
            )[0]
            for name, tokenizer in self.tokenizers.items()
        }

    def count_tokens(self, prompt: str) -> int:
        # verbose=False: transformers' warning on truncation would repeat the report of our caption check.
        tokenizer = self.tokenizers[self.last]
        return len(tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids)

    def prompt_room(self) -> int:
        """Return the prompt tokens that fit beside special tokens and the empty template."""
        empty = self.tokenizers[self.last](
            self.template(""), add_special_tokens=self.adds_special_tokens
        )
        template_tokens = len(empty.input_ids)
        return self.facts.release.max_tokens + self.free_tokens - template_tokens


class MaskedEncoder(TransformersEncoder):
    """One network whose texts keep their length; families say which states they read."""

    padded: ClassVar[bool] = False
    """Each prompt has all `max_tokens` tokens and no mask."""

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return `ids` and `mask` [B, tokens] of the longest prompt's length."""
        length = self.facts.release.max_tokens + self.free_tokens
        padding = "max_length" if self.padded else "longest"
        ids, mask = self.tokens_of(self.last, prompts, length=length, padding=padding)
        return {"ids": ids, "mask": mask}

    def states(self, tokens: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the hidden states [B, tokens, channels] of all layers, the embeddings first, and the mask."""
        outputs = self.run(
            self.last, tokens["ids"], tokens["mask"], output_hidden_states=True, use_cache=False
        )
        return outputs.hidden_states, tokens["mask"].to(outputs.hidden_states[0].device)


def without_padding(states: Tensor, mask: Tensor) -> Conditioning:
    """Return `text` [B, L, D] of states without the tokens of padding, zeros behind shorter texts, and `text_mask`.

    By the mask [B, tokens], not by length: whether a tokenizer pads at the left or at the right is in its own files.
    `mask` is the tokenizer's, in host memory: the host would wait for the device to read one there.
    """
    from torch.nn.utils.rnn import pad_sequence

    texts = []
    for row, is_token in zip(states, mask, strict=True):
        first, count = int(is_token.argmax()), int(is_token.sum())
        texts.append(row[first : first + count])
    masks = [mask.new_ones(len(text)) for text in texts]
    return {
        "text": pad_sequence(texts, batch_first=True),
        "text_mask": pad_sequence(masks, batch_first=True),
    }


# ---- language models


def text_config(folder: Path, *, kind: str) -> Mapping[str, Any]:
    """Return the text encoder's configuration; raises InputError for a network of another `kind`."""
    config = read_json(folder / "text_encoder" / "config.json")
    if config.get("model_type") != kind:
        raise InputError(
            f"{folder / 'text_encoder'} is a text encoder of type {config.get('model_type')!r}, "
            f"allowed is {kind!r}",
            fix="give the base's own text encoder",
        )
    return config


def qwen3_config(folder: Path) -> Mapping[str, Any]:
    """Return Qwen3's configuration; raises InputError for another network or a missing chat template.

    Some releases keep the template in tokenizer_config.json, others in chat_template.jinja.
    """
    config, tokenizer = text_config(folder, kind="qwen3"), folder / "tokenizer"
    settings = tokenizer / "tokenizer_config.json"
    # transformers raises for a missing template too, but only once the prompt is
    # encoded, after a download of 16 GB for FLUX.2 klein 4B.
    if not (tokenizer / CHAT_TEMPLATE).is_file() and "chat_template" not in read_json(settings):
        raise InputError(
            f"base model part {tokenizer} has no chat template: neither {CHAT_TEMPLATE} nor one in "
            f"{settings.name}",
            fix=AGAIN,
        )
    return config


class Qwen3Encoder(MaskedEncoder):
    """Qwen3 behind its chat template."""

    layers: ClassVar[tuple[int, ...]]
    """Indices of the hidden states (0: embeddings, -2: before the last layer), joined along the channels."""
    thinking: ClassVar[bool]
    """The chat template's `enable_thinking`."""

    def template(self, prompt: str) -> str:
        tokenizer: Any = self.tokenizers[self.last]
        text: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=self.thinking,
        )
        return text

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        import torch

        states, _ = self.states(tokens)
        # The layers' channels one after another, as Flux2KleinPipeline._get_qwen3_prompt_embeds orders them.
        text = torch.cat([states[layer] for layer in self.layers], dim=-1)
        # klein's network gets no mask and reads the padding too.
        return {"text": text} if self.padded else without_padding(text, tokens["mask"])


# ---- T5's vocabulary from SentencePiece's own file, where it was published without tokenizer.json
#
# `spiece.model` is a protocol buffer (sentencepiece_model.proto of github.com/google/sentencepiece). transformers
# would need two more packages to parse it, although `tokenizers` does the tokenizing either way.

# Numbers of fields in the messages ModelProto, SentencePiece, TrainerSpec and NormalizerSpec.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE = 1, 2
_MODEL_TYPE, _UNKNOWN = 3, 40
_CHARACTERS = 2
_UNIGRAM = 1
# Wire types: the lower three bits of a field's key say how its value is encoded.
_VARINT, _SIZED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}


def read_pieces(file: Path) -> tuple[list[tuple[str, float]], int, bytes]:
    """Return (piece, log probability) by token id, the id of `unk`, and the compiled normalisation (b"": none).

    Raises InputError for any other file than SentencePiece's and for other kinds of model.
    """
    pieces, unknown, kind, characters = [], 0, _UNIGRAM, b""
    try:
        for field, value in _fields(file.read_bytes()):
            if field == _PIECE:
                piece = dict(_fields(value))
                # Protocol buffers may leave out a field with its default value: a missing score is 0.0.
                (score,) = struct.unpack("<f", piece.get(_SCORE, b"\0" * 4))
                pieces.append((piece[_TEXT].decode(), score))
            elif field == _TRAINER:
                trainer = dict(_fields(value))
                # The defaults of sentencepiece_model.proto: unk_id 0, model_type UNIGRAM.
                unknown = int(trainer.get(_UNKNOWN, 0))
                kind = int(trainer.get(_MODEL_TYPE, _UNIGRAM))
            elif field == _NORMALIZER:
                characters = dict(_fields(value)).get(_CHARACTERS, b"")
                if not isinstance(characters, bytes):
                    raise TypeError("the characters of its normalizer are a number")
    except (OSError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise InputError(f"{file} is not a SentencePiece model ({error})", fix=AGAIN) from None
    if not pieces or kind != _UNIGRAM:
        raise InputError(
            f"{file} holds {len(pieces)} pieces of a model of kind {kind}, not a unigram vocabulary",
            fix="give a base model with the T5 tokenizer it was made with",
        )
    return pieces, unknown, characters


def load_spiece_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder that has SPIECE and no tokenizer.json, without network access."""
    from tokenizers import Tokenizer, models, normalizers
    from transformers import AutoTokenizer

    pieces, unknown, characters = read_pieces(folder / SPIECE)
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=unknown))
    if characters:
        tokenizer.normalizer = normalizers.Precompiled(characters)
    # AutoTokenizer adds special tokens and settings from the folder's JSON files to the written vocabulary.
    with tempfile.TemporaryDirectory(prefix="lora-train-") as whole:
        for settings in folder.glob("*.json"):
            shutil.copyfile(settings, Path(whole) / settings.name)
        tokenizer.save(str(Path(whole) / "tokenizer.json"))
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            whole, local_files_only=True
        )
    return loaded


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a message's fields: varints as int, all other values as bytes."""
    at = 0

    def varint() -> int:
        """Decode groups of seven bits, the lowest first."""
        nonlocal at
        value = shift = 0
        while True:
            # Past the end this is an IndexError, which `read_pieces` turns into its InputError.
            byte = data[at]
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            yield number, varint()
            continue
        size = varint() if kind == _SIZED else _FIXED_BYTES[kind]
        if at + size > len(data):
            raise ValueError(f"it ends within field {number}")
        yield number, data[at : at + size]
        at += size
