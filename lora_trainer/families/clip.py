"""CLIP text encoders: tokenizing, embedding with gradients, loading from folders and checkpoints.

A `ClipPart` says where one encoder lies and what it is called in files. Output is `text`, the hidden
states that the U-Net attends to; a pair of encoders also gives `pooled`. Importing this needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_trainer.caption_markup import Weighted, words_of
from lora_trainer.families.base import WEIGHTS, Conditioning, Layout, NewWord, TextEncoder
from lora_trainer.families.emphasis import emphasised, token_weights
from lora_trainer.families.folder import part_file, variant
from lora_trainer.families.single_file import load_clip

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import CLIPTokenizer

TEXT_MODEL = "text_model."
MAX_LAYERS = 32
"""Of the largest one in use, OpenCLIP's bigG."""
TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "mlp.fc1", "mlp.fc2")


@dataclass(frozen=True, kw_only=True)
class ClipSize:
    """What decides the shapes of an encoder's layers: how many, their width and that of their MLP."""

    layers: int
    width: int
    inner: int


@dataclass(frozen=True, kw_only=True)
class ClipPart:
    """One CLIP text encoder of a family; `released` is the size of the public releases'.

    `component` is its folder and its name in adapter keys, `network` its transformers class,
    `tokenizer` the tokenizer's folder, `kohya` the prefix of its adapter in kohya's files, and
    `checkpoint` the prefix of its weights in single-file checkpoints: OpenCLIP's layout where that
    ends with `model.`, transformers' where it ends with `transformer.`. `embedding` is the key of its
    vectors in embedding files.
    """

    component: str = "text_encoder"
    network: str = "CLIPTextModel"
    tokenizer: str = "tokenizer"
    kohya: str = "lora_te"
    checkpoint: str
    released: ClipSize
    embedding: str = "emb_params"


class ClipEncoder(TextEncoder):
    """CLIP encoders and their tokenizers, by component; the U-Net reads the last hidden state."""

    def __init__(
        self,
        *,
        networks: Mapping[str, nn.Module],
        tokenizers: Mapping[str, CLIPTokenizer],
        max_tokens: int,
    ) -> None:
        self.networks = networks
        self.tokenizers = tokenizers
        self.max_tokens = max_tokens
        self.word: NewWord | None = None

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        return {
            component: self._numbers_of(prompts, tokenizer)
            for component, tokenizer in self.tokenizers.items()
        }

    def learn(self, word: NewWord) -> None:
        self.word = word

    def numbers(self, text: str) -> Mapping[str, Sequence[int]]:
        return {
            component: self._plain_numbers(text, tokenizer)
            for component, tokenizer in self.tokenizers.items()
        }

    def _numbers_of(self, prompts: Sequence[str], tokenizer: CLIPTokenizer) -> Tensor:
        import torch

        padded: Tensor = tokenizer(
            list(prompts),
            padding="max_length",
            max_length=self.max_tokens,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        if self.word is None:
            return padded
        begin, *_, end = tokenizer("").input_ids
        for row, prompt in enumerate(prompts):
            if len(self.word.split(prompt)) > 1:
                room = self.max_tokens - 2
                found = [begin, *self._with_word(prompt, tokenizer, self.word)[:room], end]
                found += [tokenizer.pad_token_id] * (self.max_tokens - len(found))
                padded[row] = torch.tensor(found)
        return padded

    def _with_word(self, prompt: str, tokenizer: CLIPTokenizer, word: NewWord) -> list[int]:
        first, *rest = word.split(prompt)
        found = self._plain_numbers(first, tokenizer)
        for part in rest:
            found += [*word.numbers, *self._plain_numbers(part, tokenizer)]
        return found

    @staticmethod
    def _plain_numbers(text: str, tokenizer: CLIPTokenizer) -> list[int]:
        # Not verbose: what is cut is said in our own words.
        return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def tokenize_weighted(self, parts: Sequence[Weighted]) -> Mapping[str, Tensor]:
        weights = {
            component + WEIGHTS: token_weights(
                parts, tokenizer, max_tokens=self.max_tokens, word=self.word
            )
            for component, tokenizer in self.tokenizers.items()
        }
        return {**self.tokenize([words_of(parts)]), **weights}

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, tokens, width]: after the final norm, as Stable Diffusion 1 and 2 read it."""
        ((component, network),) = self.networks.items()
        text = network(tokens[component].to(device_of(network)))[0]
        return {"text": emphasised(text, tokens.get(component + WEIGHTS))}

    def count_tokens(self, prompt: str) -> int:
        tokenizer = next(iter(self.tokenizers.values()))
        if self.word is None:
            return len(self._plain_numbers(prompt, tokenizer))
        return len(self._with_word(prompt, tokenizer, self.word))

    def prompt_room(self) -> int:
        tokenizer = next(iter(self.tokenizers.values()))
        return self.max_tokens - len(tokenizer("").input_ids)


class ClipPairEncoder(ClipEncoder):
    """Several encoders side by side; the U-Net reads the layer before the last of each.

    Podell et al. 2023 (arXiv 2307.01952), section 2.1. The last encoder has a projection.
    """

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, tokens, sum of widths] and the last encoder's `pooled` [B, projection]."""
        import torch

        found = [
            network(tokens[component].to(device_of(network)), output_hidden_states=True)
            for component, network in self.networks.items()
        ]
        read = [
            emphasised(output.hidden_states[-2], tokens.get(component + WEIGHTS))
            for component, output in zip(self.networks, found, strict=True)
        ]
        return {"text": torch.cat(read, dim=-1), "pooled": found[-1].text_embeds}


def load_network(
    layout: Layout, part: ClipPart, *, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Load one encoder frozen, from the checkpoint that holds it or else from its folder."""
    import transformers

    kind, folder = getattr(transformers, part.network), layout.folder / part.component
    single = part_file(layout, "text_encoder")
    if single is None:
        network = kind.from_pretrained(
            layout.folder,
            subfolder=part.component,
            dtype=dtype,
            variant=variant(folder),
            use_safetensors=True,
        )
    else:
        config = kind.config_class.from_pretrained(folder, local_files_only=True)
        network = load_clip(single, kind, config, prefix=part.checkpoint, dtype=dtype)
    loaded: nn.Module = network.requires_grad_(False).eval().to(device)
    return loaded


def load_tokenizers(layout: Layout, parts: Sequence[ClipPart]) -> dict[str, CLIPTokenizer]:
    """Load the tokenizer of each encoder, by component."""
    from transformers import CLIPTokenizer

    return {
        part.component: CLIPTokenizer.from_pretrained(layout.folder, subfolder=part.tokenizer)
        for part in parts
    }


def layer_names() -> list[str]:
    """Return what the adapted layers of any CLIP encoder are called, without `text_model.`."""
    inner = [name if "." in name else f"self_attn.{name}" for name in TARGETS]
    return [f"encoder.layers.{number}.{name}" for number in range(MAX_LAYERS) for name in inner]


def text_targets(network: nn.Module) -> list[str]:
    """Return the linear layers of attention and MLP, in module order."""
    return [
        name
        for name, _ in network.named_modules()
        if "encoder.layers." in name and name.endswith(TARGETS)
    ]


def target_shapes(size: ClipSize) -> dict[str, tuple[int, int]]:
    """Return (fan_in, out) of each layer of `text_targets`."""
    inner = {"mlp.fc1": (size.width, size.inner), "mlp.fc2": (size.inner, size.width)}
    square = (size.width, size.width)
    return {
        f"encoder.layers.{number}.{name if name in inner else f'self_attn.{name}'}": inner.get(
            name, square
        )
        for number in range(size.layers)
        for name in TARGETS
    }


def stable_name(module: str) -> str:
    """Return a module's name as files have it: with `text_model.`, which transformers 5 left out."""
    return module if module.startswith((TEXT_MODEL, "text_projection")) else TEXT_MODEL + module


def device_of(network: Any) -> torch.device:
    """Return the device that a network's weights are on."""
    found: torch.device = next(network.parameters()).device
    return found
