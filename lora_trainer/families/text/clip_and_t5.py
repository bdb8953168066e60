"""The three text encoders of Stable Diffusion 3: CLIP-L, OpenCLIP bigG and T5, as diffusers' pipeline joins them.

Input is a base's layout; outputs are `text` [B, 77 + 256, width of T5] and `pooled` [B, widths of both
CLIPs]. A folder whose model_index.json has `text_encoder_3: [null, null]` is used without T5: its
256 tokens are zeros. A checkpoint with encoders must have all three. Torch-free to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lora_trainer.families.base import Conditioning, Header, Layout, TextEncoder
from lora_trainer.families.base_files.base_folder import components, text_file
from lora_trainer.families.text.clip import read_padding_as_text
from lora_trainer.families.text.t5 import (
    NetworkLoader,
    count_tokens,
    hidden_states,
    load_tokenizer,
    padded,
    room,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """One text encoder: its folders, transformers class, number of tokens and prefix in single files."""

    component: str
    tokenizer: str
    network: str
    tokens: int
    checkpoint: str


CLIP_L = Encoder(
    component="text_encoder",
    tokenizer="tokenizer",
    # Its pooled vector is the one after the projection; CLIP-L's projection is the identity (`load_encoder_file`).
    network="CLIPTextModelWithProjection",
    tokens=77,
    checkpoint="text_encoders.clip_l.transformer.",
)
CLIP_G = replace(
    CLIP_L,
    component="text_encoder_2",
    tokenizer="tokenizer_2",
    checkpoint="text_encoders.clip_g.transformer.",
)
T5 = Encoder(
    component="text_encoder_3",
    tokenizer="tokenizer_3",
    network="T5EncoderModel",
    tokens=256,
    checkpoint="text_encoders.t5xxl.transformer.",
)
ENCODERS = (CLIP_L, CLIP_G, T5)


def encoders_of(layout: Layout) -> tuple[Encoder, ...]:
    """Return the encoders of a base; a folder whose model_index.json has no T5 gives the two CLIPs."""
    if text_file(layout, T5.component) or T5.component in components(layout.folder):
        return ENCODERS
    return CLIP_L, CLIP_G


def holds_encoders(header: Header) -> bool:
    """Return whether a checkpoint holds all three encoders; one without T5 uses its companion's encoders."""
    return all(any(name.startswith(encoder.checkpoint) for name in header) for encoder in ENCODERS)


def load_encoder(
    loader: NetworkLoader, layout: Layout, *, width: int, dtype: torch.dtype, device: torch.device
) -> TextEncoder:
    """Load tokenizers and networks; `width` is T5's, for the zeros of a base without T5."""
    import transformers

    networks = {
        encoder.component: loader.load_text_network(
            getattr(transformers, encoder.network),
            layout,
            encoder.component,
            dtype=dtype,
            device=device,
        )
        for encoder in encoders_of(layout)
    }
    tokenizers = {
        encoder.component: load_tokenizer(layout.folder / encoder.tokenizer)
        for encoder in encoders_of(layout)
    }
    for component in (CLIP_L.component, CLIP_G.component):
        read_padding_as_text(tokenizers[component])
    return SD3TextEncoder(
        networks=networks,
        tokenizers=tokenizers,
        width=width,
    )


@dataclass(frozen=True, kw_only=True)
class SD3TextEncoder(TextEncoder):
    """CLIP-L and bigG side by side, then T5 along the sequence (Esser et al. 2024, figure 2)."""

    networks: Mapping[str, nn.Module]
    tokenizers: Mapping[str, PreTrainedTokenizerBase]
    width: int

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        return {
            encoder.component: padded(
                self.tokenizers[encoder.component], prompts, length=encoder.tokens
            )[0]
            for encoder in ENCODERS
            if encoder.component in self.networks
        }

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, 77 + 256, width] and `pooled` [B, widths of both CLIPs]."""
        import torch
        from torch.nn.functional import pad

        clips = [self._clip(encoder, tokens) for encoder in (CLIP_L, CLIP_G)]
        clip = torch.cat([output.hidden_states[-2] for output in clips], dim=-1)
        if (
            T5.component in self.networks
        ):  # without a mask: the base was trained on unmasked padding
            t5 = hidden_states(self.networks[T5.component], tokens[T5.component])
        else:
            # As StableDiffusion3Pipeline._get_t5_prompt_embeds without a third encoder.
            t5 = clip.new_zeros((len(clip), T5.tokens, self.width))
        # CLIP's 768 + 1280 channels get zeros up to the 4096 of T5, so that both are tokens of one sequence.
        text = torch.cat([pad(clip, (0, t5.shape[-1] - clip.shape[-1])), t5], dim=-2)
        return {"text": text, "pooled": torch.cat([output.text_embeds for output in clips], dim=-1)}

    def count_tokens(self, prompt: str) -> int:
        return count_tokens(self.tokenizers[self._longest().component], prompt)

    def prompt_room(self) -> int:
        longest = self._longest()
        return room(self.tokenizers[longest.component], length=longest.tokens)

    def _longest(self) -> Encoder:
        return T5 if T5.component in self.networks else CLIP_L

    def _clip(self, encoder: Encoder, tokens: Mapping[str, Tensor]) -> Any:
        network = self.networks[encoder.component]
        ids = tokens[encoder.component].to(next(network.parameters()).device)
        return network(ids, output_hidden_states=True)
