"""Qwen3-VL as a text encoder: its language model, and its vision tower where a family's references are seen.

A family has a subclass that chooses the states it reads, the text around a prompt and its padding. Torch-free to
import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lora_trainer.families.base.facts import Conditioning
from lora_trainer.families.base.text.transformers_encoder import MaskedEncoder, without_padding

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

# Prefixes of the language head and of the vision tower in files, which no text goes through.
QWEN3_VL_HEAD, QWEN3_VL_SIGHT = ("lm_head.",), ("visual.", "model.visual.")
QWEN3_VL_UNREAD = (*QWEN3_VL_SIGHT, *QWEN3_VL_HEAD)
# The norm behind the last block, of an encoder without `last_norm`.
QWEN3_VL_LAST_NORM = ("language_model.norm.", "model.language_model.norm.", "model.norm.")
# The language model in `Qwen3VLForConditionalGeneration`; in `Qwen3VLModel` it is the end of this name.
QWEN3_VL_INNER = "model.language_model"
# The language model with the vision tower.
QWEN3_VL_SEEING = "model"
# Mean and deviation of the pixels' values, in [0, 1], that its vision tower was trained with.
SEEN_MEAN = SEEN_STD = (0.5, 0.5, 0.5)
# Where an image begins and ends in a text, and each of its places.
SEEN_START, SEEN_PLACE, SEEN_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


# Around a prompt in Qwen's chat format.
USER_TURN = "<|im_start|>user\n"
AFTER_PROMPT = "<|im_end|>\n<|im_start|>assistant\n"


def holds_itself(pipeline: Any, name: str) -> None:
    """Let a pipeline find the language model by the name at which it looks for it in a network of texts and images.

    Not as a submodule: a network that holds itself has no end.
    """
    network = pipeline.text_encoder
    object.__setattr__(network, name, network)


def text_processor(tokenizer: Any) -> Any:
    """Return what a pipeline takes for Qwen3-VL's processor: it reads texts only, and needs no torchvision."""
    from transformers import ProcessorMixin

    class TextProcessor(ProcessorMixin):
        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer = tokenizer

        def __call__(self, *, text: Any, **options: Any) -> Any:
            return self.tokenizer(text, **options)

        # One conversation, the only kind that the pipelines give.
        def apply_chat_template(self, conversation: Any, *args: Any, **options: Any) -> Any:
            return [self.tokenizer.apply_chat_template(conversation, *args, **options)]

        def save_pretrained(
            self, save_directory: Any, push_to_hub: bool = False, **options: Any
        ) -> Any:
            return self.tokenizer.save_pretrained(save_directory)

    return TextProcessor(tokenizer)


@dataclass(kw_only=True, eq=False)
class Qwen3VLEncoder(MaskedEncoder):
    """The language model of Qwen3-VL; `networks` has its `Qwen3VLTextModel`, or `Qwen3VLModel` to see images.

    `free_tokens` are those at the front of the template, which are read and then dropped from the text.
    """

    layers: ClassVar[tuple[int, ...]]
    """Numbers of the blocks behind which states are read (0: the embeddings), joined along the channels."""
    last_norm: ClassVar[bool] = True
    """Whether the state behind the last block goes through the network's last norm."""
    system: ClassVar[str] = ""
    """The system message before the prompt, with its marks."""
    ending: ClassVar[str] = AFTER_PROMPT
    """What follows a prompt, also one that is cut. The end of `template` is cut off with the prompt."""

    def __post_init__(self) -> None:
        from torch import nn

        if not self.last_norm:
            # Since transformers 5 the last of `hidden_states` is the normed one. A network without that norm gives
            # the other, and calls in several threads (network/offload.py) need no hook.
            network: Any = self.networks[self.last]
            getattr(network, "language_model", network).norm = nn.Identity()

    def template(self, prompt: str) -> str:
        return f"{self.system}{USER_TURN}{prompt}"

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return `ids` and `mask` [B, tokens], with `ending` behind each prompt."""
        return self._tokens([self.template(prompt) for prompt in prompts])

    def before_image(self, number: int) -> str:
        """Return the words before an image, the first of which is number 1, and behind the image before it."""
        return ""

    def tokenize_seeing(self, prompt: str, images: Sequence[Image]) -> Mapping[str, Tensor]:
        """Return what `Qwen3VLModel` reads of a prompt behind images: ids, mask, pixels and kinds of tokens.

        Images (RGB) are seen as large as they are; their sides are multiples of those of a place, 32 px.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        network: Any = self.networks[self.last]
        sight = network.config.vision_config
        reader = Qwen2VLImageProcessorPil(
            patch_size=sight.patch_size,
            temporal_patch_size=sight.temporal_patch_size,
            merge_size=sight.spatial_merge_size,
            image_mean=SEEN_MEAN,
            image_std=SEEN_STD,
            do_resize=False,
        )
        pixels = reader(list(images), return_tensors="pt")
        places = pixels["image_grid_thw"].prod(dim=1) // sight.spatial_merge_size**2
        shown = "".join(
            f"{self.before_image(number)}{SEEN_START}{SEEN_PLACE * count}{SEEN_END}"
            for number, count in enumerate(places.tolist(), start=1)
        )
        tokenizer: Any = self.tokenizers[self.last]
        alone, beside = (len(tokenizer(self.template(each)).input_ids) for each in ("", shown))
        tokens = self._tokens([self.template(shown + prompt)], more=beside - alone)
        is_place = tokens["ids"] == tokenizer.convert_tokens_to_ids(SEEN_PLACE)
        return {
            **tokens,
            **{name: pixels[name] for name in ("pixel_values", "image_grid_thw")},
            # Without them transformers 5 cannot give an image's tokens their rows and columns.
            "mm_token_type_ids": is_place.int(),
        }

    def _tokens(self, texts: Sequence[str], *, more: int = 0) -> Mapping[str, Tensor]:
        """Return `ids` and `mask` of texts with `ending` behind them, which may be `more` tokens longer than usual."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        tokenizer, ending = self.tokenizers[self.last], self._ending_ids()
        room = self.facts.release.max_tokens + self.free_tokens - len(ending) + more
        read = tokenizer(texts, truncation=True, max_length=room).input_ids
        rows = [torch.tensor([*ids, *ending]) for ids in read]
        side = self.padding_side or tokenizer.padding_side
        pad = tokenizer.pad_token_id
        return {
            "ids": pad_sequence(rows, batch_first=True, padding_value=pad, padding_side=side),
            "mask": pad_sequence(
                [torch.ones_like(row) for row in rows], batch_first=True, padding_side=side
            ),
        }

    def prompt_room(self) -> int:
        return super().prompt_room() - len(self._ending_ids())

    def _ending_ids(self) -> list[int]:
        tokenizer = self.tokenizers[self.last]
        return list(tokenizer(self.ending, add_special_tokens=False).input_ids)

    def positions(self, mask: Tensor) -> Tensor:
        """Return the place of each token [B, tokens] of a mask: tokens are counted, padding is not."""
        return (mask.cumsum(dim=-1) - 1).clamp(min=0)

    def states(self, tokens: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the states of `layers`, each [B, tokens, channels], and the mask, both with the dropped tokens."""
        network = self.networks[self.last]
        device = next(network.parameters()).device
        seen = ("pixel_values", "image_grid_thw", "mm_token_type_ids")
        options = {name: tokens[name].to(device) for name in seen if name in tokens}
        if not options:
            places = self.positions(tokens["mask"]).to(device)
            # Time, row and column, which are equal for text; images have theirs from the network.
            options = {"position_ids": places.expand(3, *places.shape)}
        outputs = self.run(
            self.last,
            tokens["ids"],
            tokens["mask"],
            output_hidden_states=True,
            use_cache=False,
            **options,
        )
        states = tuple(outputs.hidden_states[layer] for layer in self.layers)
        return states, tokens["mask"].to(device)

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, tokens, channels of all layers] without padding and dropped tokens, and `text_mask`."""
        import torch

        states, _ = self.states(tokens)
        read = without_padding(torch.cat(states, dim=-1), tokens["mask"])
        return {name: each[:, self.free_tokens :] for name, each in read.items()}
