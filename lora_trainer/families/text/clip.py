"""CLIP text encoders: tokenizing, embedding with gradients, prompt weights, loading from folders and files.

A `ClipPart` states the place and the names of one encoder in files. Output is `text`, the hidden states
that the U-Net attends to; a pair of encoders also returns `pooled`.

Prompt weights act on the hidden states h as in Stable Diffusion web UI and kohya's trainers: a token i of
weight w_i gets w_i h_i * mean(h) / mean(w h), with means over tokens and channels of one chunk, so weighted
words grow relative to the rest while the mean stays the same. The ratio is left out where a mean is near
zero or the means differ in sign, because it would then explode or flip the states. Pooled outputs have no
tokens and stay unchanged.

A long prompt is split into chunks with a begin and an end each; of the joined hidden states the first begin
and the last end are kept: 77, 152 or 227 tokens for 1, 2 or 3 chunks, as in kohya's trainers
(`max_token_length` 75, 150, 225) and diffusers' community pipelines. Web user interfaces keep every begin
and end. Torch-free to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lora_trainer.common.caption_markup import NewWord, Weighted, words_of
from lora_trainer.families.base import WEIGHTS, TextEncoder
from lora_trainer.families.base_files.base_parts import (
    converted,
    fill,
    part_file,
    tokenizer_of,
    whole,
)
from lora_trainer.families.base_files.weight_files import read_header, read_tensors
from lora_trainer.families.facts import AROUND, Conditioning, Layout
from lora_trainer.families.releases import BY_ROLE, text_layers

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import CLIPTokenizer, PreTrainedTokenizerBase

Value = TypeVar("Value")
NEGLIGIBLE = 0.02
"""Fraction of the root mean square below which a mean counts as zero: the final layer norm leaves means
close to zero, and a ratio of two such means says nothing about strength."""


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """`count` chunks of `width` tokens, begin and end included; a longer prompt is truncated."""

    count: int
    width: int

    @property
    def room(self) -> int:
        """Largest number of prompt tokens that all chunks hold, begin and end excluded."""
        return self.count * (self.width - AROUND)

    def row(
        self, values: Sequence[Value], *, begin: Value, end: Value, padding: Value
    ) -> list[Value]:
        """Return the `count` * `width` values of a prompt's tokens laid out in chunks.

        `values` has one entry per prompt token. A chunk behind the prompt's end equals the chunk of an
        empty prompt.
        """
        room, row = self.width - AROUND, list[Value]()
        # All chunks, also those behind the prompt's end: the rows of a batch have one length.
        for first in range(0, self.room, room):
            part = values[first : min(first + room, self.room)]
            row += [begin, *part, end, *[padding] * (room - len(part))]
        return row

    def apart(self, tokens: Tensor) -> Tensor:
        """Split tokens [B, count * width] into the encoder's rows [B * count, width]."""
        return tokens.reshape(-1, self.width)

    def joined(self, states: Tensor) -> Tensor:
        """Join hidden states [B * count, width, C] to those of whole prompts, [B, room + 2, C]."""
        import torch

        if self.count == 1:
            return states
        texts = states.unflatten(0, (-1, self.count))
        # texts: [B, count, width, C]; leave out the begin and the end of every chunk.
        inner = texts[:, :, 1:-1].flatten(1, 2)
        return torch.cat([texts[:, 0, :1], inner, texts[:, -1, -1:]], dim=1)


def emphasised(hidden: Tensor, weights: Tensor | None) -> Tensor:
    """Apply weights [B, tokens] to hidden states [B, tokens, width]; None returns the states unchanged."""
    import torch

    if weights is None:
        return hidden
    states = hidden.float()
    weighted = states * weights.to(states.device, states.dtype).unsqueeze(-1)
    before, after = (values.mean(dim=(1, 2), keepdim=True) for values in (states, weighted))
    strength = states.square().mean(dim=(1, 2), keepdim=True).sqrt()
    # Times the sign of `before` both means are positive where they agree in sign; the
    # smaller one then shows whether either is near zero.
    both = torch.minimum(before * before.sign(), after * before.sign())
    has_mean, one = both > NEGLIGIBLE * strength, torch.ones_like(after)
    # Choose before dividing: torch.where passes gradients through both branches, and 0 * (1 / 0) is NaN.
    scale = torch.where(has_mean, before, one) / torch.where(has_mean, after, one)
    return (weighted * scale).to(hidden.dtype)


TEXT_MODEL = "text_model."
MAX_LAYERS = 32
"""Layers of the largest CLIP text encoder in use, OpenCLIP's bigG."""
TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "mlp.fc1", "mlp.fc2")


@dataclass(frozen=True, kw_only=True)
class ClipSize:
    """The numbers that fix the shapes of an encoder: layers, their width, and the width of their MLP."""

    layers: int
    width: int
    inner: int


@dataclass(frozen=True, kw_only=True)
class ClipPart:
    """One CLIP text encoder of a family.

    `role` is ComfyUI's name of it, `component` its folder and its name in adapter keys, `checkpoint` the
    prefix of its weights in single-file checkpoints; a prefix that ends with `model.` means OpenCLIP's layout,
    with `transformer.` transformers'.
    """

    role: str
    checkpoint: str
    component: str = "text_encoder"

    @property
    def network(self) -> str:
        """The class of transformers."""
        return BY_ROLE[self.role].network

    @property
    def released(self) -> ClipSize:
        """The size of the public releases' encoder."""
        return ClipSize(width=BY_ROLE[self.role].width, **BY_ROLE[self.role].sizes)

    @property
    def tokenizer(self) -> str:
        """The tokenizer's folder."""
        return tokenizer_of(self.component)


@dataclass(kw_only=True, eq=False)
class ClipEncoder(TextEncoder):
    """CLIP encoders and their tokenizers, by component; the U-Net reads the last hidden state."""

    networks: Mapping[str, nn.Module]
    tokenizers: Mapping[str, CLIPTokenizer]
    chunks: Chunks
    word: NewWord | None = None

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return int64 [B, tokens of all chunks] by component."""
        return {
            component: self._numbers_of(prompts, tokenizer)
            for component, tokenizer in self.tokenizers.items()
        }

    def learn(self, word: NewWord) -> None:
        self.word = word

    def numbers(self, text: str) -> Mapping[str, Sequence[int]]:
        return {
            component: list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
            for component, tokenizer in self.tokenizers.items()
        }

    def _numbers_of(self, prompts: Sequence[str], tokenizer: CLIPTokenizer) -> Tensor:
        import torch

        begin, *_, end = tokenizer("").input_ids  # an empty prompt has special tokens only
        rows = [
            self.chunks.row(
                [number for number, _ in self._read([(prompt, 1.0)], tokenizer)],
                begin=begin,
                end=end,
                # The end token for CLIP-L, "!" (0) for OpenCLIP. The network sees the padding: CLIP
                # gets no mask, in training as in diffusers' pipelines.
                padding=tokenizer.pad_token_id,
            )
            for prompt in prompts
        ]
        return torch.tensor(rows)

    def _read(self, parts: Sequence[Weighted], tokenizer: CLIPTokenizer) -> list[tuple[int, float]]:
        """Return number and weight of each token; a token has the weight of its last letter."""
        text, letters = words_of(parts), [weight for words, weight in parts for _ in words]
        tokens, first = list[tuple[int, float]](), 0
        for index, piece in enumerate([text] if self.word is None else self.word.split(text)):
            if self.word is not None and index > 0:
                tokens += [(number, letters[first]) for number in self.word.numbers]
                first += len(self.word.text)
            # verbose=False: transformers' warning on truncation would repeat the report of our caption check.
            read = tokenizer(
                piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            for number, (_, end) in zip(read.input_ids, read["offset_mapping"], strict=True):
                tokens.append((number, letters[first + end - 1]))
            first += len(piece)
        return tokens

    def tokenize_weighted(self, parts: Sequence[Weighted]) -> Mapping[str, Tensor]:
        import torch

        tokens = dict(self.tokenize([words_of(parts)]))
        for component, tokenizer in self.tokenizers.items():
            weights = [weight for _, weight in self._read(parts, tokenizer)]
            row = self.chunks.row(
                weights, begin=1.0, end=1.0, padding=1.0
            )  # special tokens weigh 1
            tokens[component + WEIGHTS] = torch.tensor([row])
        return tokens

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, tokens, width]: the states after the final norm, for Stable Diffusion 1 and 2."""
        ((component, network),) = self.networks.items()
        return {"text": self._text(tokens, component, self._outputs(tokens, component)[0])}

    def _outputs(self, tokens: Mapping[str, Tensor], component: str, **options: Any) -> Any:
        """Run one network on all chunks of all texts at once."""
        network = self.networks[component]
        device = next(network.parameters()).device
        return network(self.chunks.apart(tokens[component]).to(device), **options)

    def _text(self, tokens: Mapping[str, Tensor], component: str, states: Tensor) -> Tensor:
        """Apply prompt weights to the hidden states of all chunks and join the chunks to whole prompts."""
        weights = tokens.get(component + WEIGHTS)
        apart = None if weights is None else self.chunks.apart(weights)
        return self.chunks.joined(emphasised(states, apart))

    def count_tokens(self, prompt: str) -> int:
        return len(self._read([(prompt, 1.0)], next(iter(self.tokenizers.values()))))

    def prompt_room(self) -> int:
        return self.chunks.room


class ClipPairEncoder(ClipEncoder):
    """Several encoders side by side; the U-Net reads the layer before the last of each.

    Podell et al. 2023 (arXiv 2307.01952), section 2.1. The last encoder has a projection.
    """

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, tokens, sum of widths] and the last encoder's `pooled` [B, projection].

        Of several chunks only the first gives `pooled`, as in kohya's trainers.
        """
        import torch

        outputs = [
            self._outputs(tokens, component, output_hidden_states=True)
            for component in self.networks
        ]
        states = [
            # States before the final norm, unlike those of Stable
            # Diffusion 1 with `clip_skip`, which are normed.
            self._text(tokens, component, output.hidden_states[-2])
            for component, output in zip(self.networks, outputs, strict=True)
        ]
        # The rows of a prompt's chunks follow each other, so every count-th row is a first chunk.
        pooled = outputs[-1].text_embeds[:: self.chunks.count]
        return {"text": torch.cat(states, dim=-1), "pooled": pooled}


def load_network(
    layout: Layout,
    part: ClipPart,
    *,
    dtype: torch.dtype,
    device: torch.device,
    clip_skip: int = 1,
) -> nn.Module:
    """Load one encoder frozen, from the checkpoint that holds it or else from its folder.

    The last `clip_skip` - 1 layers are deleted, so the final norm reads an earlier layer's output, as in
    web user interfaces and kohya's trainers.
    """
    import transformers

    kind, folder = getattr(transformers, part.network), layout.folder / part.component
    single = part_file(layout, "text_encoder")
    if single is None:
        network = whole(kind, folder, dtype=dtype)
    else:
        config = kind.config_class.from_pretrained(folder, local_files_only=True)
        network = _load_from_file(single, kind, config, prefix=part.checkpoint, dtype=dtype)
    if clip_skip > 1:
        _drop_last_layers(network, clip_skip - 1)
    return network.requires_grad_(False).eval().to(device)


def _load_from_file(
    file: Path, kind: Any, config: Any, *, prefix: str, dtype: torch.dtype
) -> nn.Module:
    """Build a CLIP encoder from the tensors of a file that start with `prefix`."""
    from accelerate import init_empty_weights
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    # accelerate's context leaves buffers real: CLIP's position ids are in no file and would stay on `meta`.
    with init_empty_weights():
        network: nn.Module = kind(config)
    names = {name: name for name in read_header(file) if name.startswith(prefix)}
    tensors = read_tensors(file, names, dtype=dtype)
    if prefix.endswith(".model."):
        full = tensors
        tensors = converted(
            file, lambda: convert_open_clip_checkpoint(network, full, prefix=prefix)
        )
    bare = {name.removeprefix(prefix).removeprefix(TEXT_MODEL): tensors[name] for name in tensors}
    short_names = {name: name.removeprefix(TEXT_MODEL) for name in network.state_dict()}
    # Files also hold layers beyond the configured number, projections and position ids: all unused here.
    return fill(
        network,
        {name: bare[short] for name, short in short_names.items() if short in bare},
        file=file,
        part="text_encoder",
    )


def _drop_last_layers(network: Any, count: int) -> None:
    # transformers 5 dropped `text_model.` from the path, so look for its end.
    layers = next(
        module for name, module in network.named_modules() if name.endswith("encoder.layers")
    )
    network.config.num_hidden_layers -= count
    del layers[network.config.num_hidden_layers :]


def load_clip_tokenizer(folder: Path) -> CLIPTokenizer:
    """Load a tokenizer in which the character that it pads with is text in captions."""
    from transformers import CLIPTokenizer

    tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(folder)
    read_padding_as_text(tokenizer)
    return tokenizer


def read_padding_as_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a tokenizer that pads with an ordinary character tokenize that character in captions normally.

    OpenCLIP pads with token 0, which is "!"; the configurations of Stable Diffusion 2 and of bigG therefore
    name "!" as a special token. transformers then tokenizes "wow!" with token 0 for "!" instead of token
    256 ("!" at the end of a word), which OpenCLIP, ComfyUI, A1111 and sd-scripts use.
    """
    if tokenizer.pad_token not in (tokenizer.bos_token, tokenizer.eos_token):
        tokenizer.split_special_tokens = True


def text_targets(network: nn.Module) -> list[str]:
    """Return the linear layers of attention and MLP, in module order."""
    return [
        name
        for name, _ in network.named_modules()
        if "encoder.layers." in name and name.endswith(TARGETS)
    ]


def target_shapes(size: ClipSize) -> dict[str, tuple[int, int]]:
    """Return (fan_in, out) of each layer of `text_targets`."""
    layers = text_layers("clip", layers=size.layers, width=size.width, inner=size.inner)
    return {
        name: (shape[1], shape[0])
        for name, shape in layers.items()
        if name.startswith("encoder.") and name.endswith(TARGETS)
    }
