"""How a family reads prompts: its text encoders, their names in files, and the networks on a device.

Torch-free to import; text/ has the encoders.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lora_trainer.common.caption_markup import NewWord, Weighted
from lora_trainer.families.base.facts import BaseFacts, Conditioning
from lora_trainer.families.base.releases import Shapes, TextNetwork
from lora_trainer.families.base.unet_numbers import TIME_IDS, UNET_CLASS, unet_numbers

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

# The number of a language model's block in the name of its tensor.
_BLOCK = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# What Python itself puts into a class.
_OF_EVERY_CLASS = vars(type("Plain", (), {"__doc__": "", "__annotations__": {}})).keys() | {
    "__firstlineno__",
    "__static_attributes__",
}
# Suffix of the key of an encoder's prompt weights; the key of its tokens has no suffix.
WEIGHTS = ".weights"


@dataclass(frozen=True, kw_only=True)
class JsonCaptions:
    """The form of a family's captions that are JSON objects.

    `faults` names what is wrong with an object, the worst first. `request` asks a vision-language model for a
    caption in this form, and `from_answer` returns what of its answer is kept: values that can only be meant one way
    are put right, others are left for `faults`.
    """

    faults: Callable[[Mapping[str, Any]], Iterable[str]]
    request: str
    from_answer: Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class TextInputs:
    """A family's text encoders, and how they read prompts.

    `networks`: component -> encoder as released, in the order of the pipeline. `prefixes`: component -> start of
    its tensors' names in checkpoints; one that ends with `.model.` means OpenCLIP's layout. `encoder` makes the
    `TextEncoder` of networks and tokenizers by component and the base's facts. `width`: key of the denoiser's
    configuration with the channels of the text, or keys whose product they are. `tokens`: length of every text, 0
    where that is `max_tokens`. `masked`: texts keep their own length and come with a `text_mask`. `multiple`: the
    network pads texts to a multiple of this many tokens. `one_length`: the texts of one forward pass must have one
    length. `inside`: component -> start of its tensors' names among the denoiser's, of a network of diffusers that
    files keep there; its input and output are text, so it runs with the encoders. `tokenizers`: component -> folder of
    its tokenizer, where that is not the encoder's name.
    `unread`: prefixes of tensors in the encoders' files that are never loaded and so cost no memory; `inner`: the
    part of a network that is kept. `sight`: prefixes of the tensors that only reference images go through, which are
    loaded for references, and `seeing`: the part that is then kept. Of a language model's blocks only the first
    `blocks` are kept, 0: all, whose last output is read before the final norm. `optional`: component that a base may
    lack. `penultimate`: the denoiser reads the layer before the last. `encoder_files`: single encoders can be read
    from files of their own (`Layout.text`).
    `json_captions`: of a family that is trained with captions in JSON, their form; None: captions are words.
    `system_prompt`: the sentence that the family's release puts before every prompt,
    None where its text has none; `before_prompts` returns what a system prompt puts before a prompt, marks included.
    A setting that needs a field which is False or empty is refused: `trainable` encoders,
    prompt weights as in `(word:1.2)`, prompts above the limit read in `chunks`, and new words
    (`new_token_keys`: component -> key of its vectors in embedding files).
    """

    networks: Mapping[str, TextNetwork]
    prefixes: Mapping[str, str]
    encoder: type[TextEncoder]
    width: str = "joint_attention_dim"
    tokens: int = 0
    masked: bool = False
    multiple: int = 1
    one_length: bool = False
    inside: Mapping[str, str] = field(default_factory=dict)
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    inner: str = ""
    sight: tuple[str, ...] = ()
    seeing: str = ""
    blocks: int = 0
    optional: str = ""
    penultimate: bool = False
    encoder_files: bool = False
    trainable: bool = False
    prompt_weights: bool = False
    chunks: bool = False
    new_token_keys: Mapping[str, str] = field(default_factory=dict)
    json_captions: JsonCaptions | None = None
    system_prompt: str | None = None
    before_prompts: Callable[[str], str] = lambda system_prompt: ""

    @cached_property
    def layers(self) -> Mapping[str, Shapes]:
        """By component the weights' shapes [out, in] of each layer in the public releases.

        Adapter files of any trainer may contain them.
        """
        return {component: network.layers for component, network in self.networks.items()}

    def reads(self, name: str, *, references: bool = False) -> bool:
        """Return whether a tensor of that name in the encoders' files is loaded, with `references` or without."""
        if name.startswith(self.unread) or (not references and name.startswith(self.sight)):
            return False
        match = _BLOCK.search(name)
        is_norm = name.endswith("norm.weight") and match is None
        return not self.blocks or (int(match[1]) < self.blocks if match else not is_norm)

    @cached_property
    def roles(self) -> Mapping[str, str]:
        """Component -> ComfyUI's name of the encoder ("clip_l", "t5xxl")."""
        return {component: network.role for component, network in self.networks.items()}

    def tokenizer_of(self, component: str) -> str:
        """Return the folder of a component's tokenizer, which is its name in the pipeline."""
        return self.tokenizers.get(component, component.replace("text_encoder", "tokenizer"))

    def batch_group_key(self, conditioning: Conditioning) -> int:
        """Return the key that the samples of one forward pass must share: their text's length, or 0."""
        return int(conditioning["text_mask"].sum()) if self.one_length else 0

    def shapes(
        self, architecture: Mapping[str, Any], *, text_tokens: int
    ) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each conditioning tensor of a text of `text_tokens` tokens, batch 1.

        `text_tokens` counts like `max_tokens`. Names that end in `mask` are int64, all others float.
        """
        tokens, is_unet = self.tokens or text_tokens, architecture.get("_class_name") == UNET_CLASS
        numbers = unet_numbers(architecture) if is_unet else architecture
        pooled = numbers.get("pooled_projection_dim")
        # A U-Net embeds the pooled text and the image's sizes together.
        if is_unet and (both := numbers["projection_class_embeddings_input_dim"]):
            pooled = int(both) - TIME_IDS * int(numbers["addition_time_embed_dim"])
        width = math.prod(int(numbers[key]) for key in self.width.split())
        shapes: dict[str, tuple[int, ...]] = {"text": (1, tokens, width)}
        if pooled:
            shapes["pooled"] = (1, int(pooled))
        if self.masked:
            shapes["text_mask"] = (1, tokens)
        return shapes


def reading_of(kind: type, *, beside: Collection[str] = ()) -> str:
    """Return the name of the way in which a class reads the outputs of a network, for the keys of cached entries.

    It is that of the class itself, or of the first of its bases behind which only `beside` is otherwise. A class may
    state another as its own `reading`, which classes derived from it do not take over.
    """
    unread = {*_OF_EVERY_CLASS, *beside}
    reads = next(each for each in kind.__mro__ if not vars(each).keys() <= unread)
    own = f"{reads.__module__.split('.')[-2]}.{reads.__name__}"
    return str(vars(reads).get("reading", own))


def one_by_one(calls: Sequence[Callable[[], Any]]) -> Sequence[Any]:
    """Return the result of the first call."""
    return [calls[0]()]


@dataclass(kw_only=True, eq=False)
class TextEncoder(ABC):
    """Tokenizers and text networks on one device, for caching and for training the text encoders.

    `networks` and `tokenizers` are by component ("text_encoder", "text_encoder_2"), in the family's order.
    `together` returns the results of the first of several calls of this encoder, of as many as run at once.
    """

    networks: Mapping[str, nn.Module]
    tokenizers: Mapping[str, Any]
    facts: BaseFacts
    together: Callable[[Sequence[Callable[[], Any]]], Sequence[Any]] = one_by_one

    @abstractmethod
    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return token ids (and masks) int64 [B, ...] by name, on the CPU, truncated to the networks' limits."""

    def tokenize_seeing(self, prompt: str, images: Sequence[Image]) -> Mapping[str, Tensor]:
        """Return the tokens of a prompt and of reference images, for bases whose text encoders see them."""
        raise AssertionError("these text encoders see no images")

    @abstractmethod
    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Run the networks on tokens of `tokenize`; with gradients where enabled, result on the device."""

    def learn(self, word: NewWord) -> None:
        """Tokenize `word` as new tokens from now on; for `new_token_keys` families."""
        raise AssertionError("these text encoders learn no new words")

    def numbers(self, text: str) -> Mapping[str, Sequence[int]]:
        """Return a text's token ids by component, without special tokens; for `new_token_keys` families."""
        raise AssertionError("these text encoders learn no new words")

    def tokenize_weighted(self, parts: Sequence[Weighted]) -> Mapping[str, Tensor]:
        """Tokenize the joined parts and add each token's prompt weight, float32 [1, ...], under
        names that end in `WEIGHTS`; for `prompt_weights` families."""
        raise AssertionError("these text encoders do not weigh words")

    @abstractmethod
    def count_tokens(self, prompt: str) -> int:
        """Return the number of tokens of `prompt` before truncation, without special tokens and template."""

    @abstractmethod
    def prompt_room(self) -> int:
        """Return the largest `count_tokens` of a prompt that is not truncated."""

    def run(self, component: str, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
        """Return a network's outputs; without a mask tokens attend to padding too."""
        network = self.networks[component]
        device = next(network.parameters()).device
        mask = None if mask is None else mask.to(device)
        return network(ids.to(device), attention_mask=mask, **options)

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """Encode texts to float32 (masks: int64) tensors on the CPU, without gradients."""
        return self.encode_tokens(self.tokenize(prompts))

    def encode_seeing(self, prompt: str, images: Sequence[Image]) -> Conditioning:
        """Encode a text and the reference images that it is read with, as `encode_prompts` does."""
        tokens = self.tokenize_seeing(prompt, images) if images else self.tokenize([prompt])
        return self.encode_tokens(tokens)

    def encode_tokens(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Encode tokens of `tokenize` to float32 (masks: int64) tensors on the CPU, without gradients."""
        import torch

        with torch.no_grad():
            conditioning = self.embed(tokens)
        return {
            name: (tensor.float() if tensor.is_floating_point() else tensor).cpu()
            for name, tensor in conditioning.items()
        }
