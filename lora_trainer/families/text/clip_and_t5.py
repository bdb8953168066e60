"""The three text encoders of Stable Diffusion 3: CLIP-L, OpenCLIP bigG and T5, as diffusers' pipeline joins them.

Input is a base's layout; outputs are `text` [B, 77 + 256, width of T5] and `pooled` [B, widths of both
CLIPs]. A folder whose model_index.json has `text_encoder_3: [null, null]` is used without T5: its
256 tokens are zeros. A checkpoint with encoders must have all three. Torch-free to import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import Conditioning, Header, Layout, TextEncoder
from lora_trainer.families.checkpoints.base_folder import (
    AGAIN,
    components,
    count_parameters,
    part_file,
    read_header,
    tokenizer_files,
    weights,
)
from lora_trainer.families.text.clip import read_padding_as_text
from lora_trainer.families.text.t5 import (
    count_tokens,
    hidden_states,
    load_text_network,
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
    if part_file(layout, "text_encoder") or T5.component in components(layout.folder):
        return ENCODERS
    return CLIP_L, CLIP_G


def holds_encoders(header: Header) -> bool:
    """Return whether a checkpoint holds all three encoders; one without T5 uses its companion's encoders."""
    return all(any(name.startswith(encoder.checkpoint) for name in header) for encoder in ENCODERS)


def text_files(layout: Layout) -> tuple[Path, ...]:
    """Return the files of all text encoders: weights, configurations, tokenizers."""
    single = part_file(layout, "text_encoder")
    files = [] if single is None else [single]
    for encoder in encoders_of(layout):
        folder = layout.folder / encoder.component
        files += () if single else weights(folder)
        files += (folder / "config.json", *tokenizer_files(layout.folder / encoder.tokenizer))
    return tuple(files)


def text_parameters(layout: Layout) -> int:
    """Count the parameters of all text encoders."""
    single = part_file(layout, "text_encoder")
    if single is None:
        return count_parameters(
            file for file in text_files(layout) if file.suffix == ".safetensors"
        )
    prefixes = tuple(encoder.checkpoint for encoder in ENCODERS)
    header = read_header(single).items()
    return sum(math.prod(info.shape) for name, info in header if name.startswith(prefixes))


def load_networks(
    layout: Layout, *, dtype: torch.dtype, device: torch.device
) -> dict[str, nn.Module]:
    """Load the encoders frozen, by component, from the checkpoint that holds them, else from folders."""
    import transformers

    single, networks = part_file(layout, "text_encoder"), {}
    for encoder in encoders_of(layout):
        kind, folder = getattr(transformers, encoder.network), layout.folder / encoder.component
        if single is None:
            network = load_text_network(kind, folder, dtype=dtype, device=device)
        else:
            network = _from_checkpoint(single, encoder, kind, folder, dtype=dtype).to(device)
        networks[encoder.component] = network
    return networks


def load_encoder(
    layout: Layout, *, width: int, dtype: torch.dtype, device: torch.device
) -> TextEncoder:
    """Load tokenizers and networks; `width` is T5's, for the zeros of a base without T5."""
    tokenizers = {
        encoder.component: load_tokenizer(layout.folder / encoder.tokenizer)
        for encoder in encoders_of(layout)
    }
    for component in (CLIP_L.component, CLIP_G.component):
        read_padding_as_text(tokenizers[component])
    return SD3TextEncoder(
        networks=load_networks(layout, dtype=dtype, device=device),
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
            t5 = clip.new_zeros((len(clip), T5.tokens, self.width))
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


def _from_checkpoint(
    file: Path, encoder: Encoder, kind: Any, folder: Path, *, dtype: torch.dtype
) -> nn.Module:
    """Build one encoder from its tensors in a checkpoint (fp8 too); raises InputError for missing tensors."""
    import torch
    from safetensors import safe_open

    config = kind.config_class.from_pretrained(folder, local_files_only=True)
    names = [name for name in read_header(file) if name.startswith(encoder.checkpoint)]
    with safe_open(file, framework="pt") as tensors:
        state = {
            name.removeprefix(encoder.checkpoint): tensors.get_tensor(name).to(dtype)
            for name in names
        }
    # CLIP-L's pooled vector is used unprojected and checkpoints have no projection: insert the identity.
    if encoder is CLIP_L:
        state.setdefault("text_projection.weight", torch.eye(config.hidden_size, dtype=dtype))
    network, report = kind.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"{file} lacks {len(missing)} tensors of {encoder.component}, first {missing[0]}",
            fix=AGAIN,
        )
    loaded: nn.Module = network.requires_grad_(False).eval()
    return loaded
