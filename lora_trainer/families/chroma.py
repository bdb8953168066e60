"""Chroma: FLUX.1 schnell without modulation layers and CLIP, undistilled, with texts of their own length.

Conditioning: `text` [B, tokens, 4096] of T5 with one token of padding, `text_mask` [B, tokens]. The network
was trained with all further padding masked out, so no further padding is passed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_trainer.config.config import Targets
from lora_trainer.families import transformer_names
from lora_trainer.families.base import (
    AUTOENCODER_KL,
    BY_TWO_PASSES,
    DENOISER,
    AdapterFormats,
    AdapterNames,
    AdapterTargets,
    BaseFacts,
    Conditioning,
    FileFormat,
    Guidance,
    Header,
    Layout,
    NetworkTraits,
    OtherNames,
    Part,
    TextEncoder,
    TextInputs,
)
from lora_trainer.families.base_files.transformer_file import (
    holds_vae,
    part_tensors,
)
from lora_trainer.families.flow import (
    WITHOUT_FP16,
    BaseRelease,
    FlowFamily,
    text_name,
    transformer_name,
)
from lora_trainer.families.flux import (
    BLOCKS,
    ENDINGS,
    LATENT_CHANNELS,
    T5_PARAMETERS,
    VAE,
    VAE_PARAMETERS,
    decodable_tokens,
)
from lora_trainer.families.images.flow_images import pack, position_ids, unpack
from lora_trainer.families.text.t5 import (
    count_tokens,
    hidden_states,
    load_tokenizer,
    padded,
    room,
)
from lora_trainer.families.text.text_layers import T5_XXL
from lora_trainer.families.traits import APACHE, INDEXED_BLOCK
from lora_trainer.families.transformer_names import other_names

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

MAX_TOKENS = 512
IN_FILE = frozenset(
    {
        "img_in.weight",
        "txt_in.weight",
        "distilled_guidance_layer.in_proj.weight",
        "double_blocks.0.img_attn.qkv.weight",
        "single_blocks.0.linear1.weight",
        "final_layer.linear.weight",
    }
)
"""Names in the original layout; Chroma Radiance, which works on pixels without a VAE, lacks the last."""
IN_DIFFUSERS = frozenset(
    {
        "x_embedder.weight",
        "distilled_guidance_layer.in_proj.weight",
        "single_transformer_blocks.0.proj_mlp.weight",
    }
)
RELEASE = BaseRelease(
    ids=("lodestones/Chroma1-HD", "lodestones/Chroma1-Base"),
    architecture={
        "_class_name": "ChromaTransformer2DModel",
        "patch_size": 1,
        "in_channels": 4 * LATENT_CHANNELS,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "approximator_num_channels": 64,
        "approximator_hidden_dim": 5120,
        "approximator_layers": 5,
    },
    vae=VAE,
    parameters={
        "denoiser": 8_899_983_424,
        "vae": VAE_PARAMETERS,
        "text_encoder": T5_PARAMETERS,
    },
    max_tokens=MAX_TOKENS,
    download_bytes=27_490_000_000,
)


class Chroma(FlowFamily):
    """The family of Chroma1-HD, Chroma1-Base and everything fine-tuned from them."""

    name = "chroma"
    formats = AdapterFormats(
        written=("diffusers", "comfyui"),
        refused={
            "kohya": "its names fuse q, k and v into one layer, which would triple the rank; ComfyUI and "
            "diffusers read the diffusers format",
        },
    )
    pipeline_class = "ChromaPipeline"
    denoiser_class = "ChromaTransformer2DModel"
    text_folders = ("text_encoder",)
    text = TextInputs(
        layers={"text_encoder": T5_XXL},
        roles={"text_encoder": "t5xxl"},
        multiple=1,
        # `predict` runs one pass per text length, so samples are batched by it.
        one_length=True,
        encoder_files=True,
    )
    native_latents = 128
    patch = 2
    traits = NetworkTraits(
        precisions=WITHOUT_FP16,
        block_pattern=INDEXED_BLOCK,
        # It makes the modulation of all blocks.
        quantization_skip=("distilled_guidance_layer",),
        vae_peak=AUTOENCODER_KL,
    )
    tokenizer_folders = ("tokenizer",)
    published = (RELEASE,)
    licences = dict.fromkeys(RELEASE.ids, APACHE)

    # ---- facts

    def detect_file(self, header: Header) -> frozenset[Part]:
        denoiser = part_tensors(header, "denoiser")
        parts: set[Part] = {"vae"} if holds_vae(header, latent_channels=LATENT_CHANNELS) else set()
        if denoiser.keys() >= IN_FILE or denoiser.keys() >= IN_DIFFUSERS:
            parts.add("denoiser")
        return frozenset(parts)

    def max_tokens(self, layout: Layout) -> int:
        return MAX_TOKENS

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        return AdapterNames(kohya="chroma", modelspec="chroma/lora")

    def guidance(self, architecture: Mapping[str, Any], *, distilled: bool) -> Guidance:
        return BY_TWO_PASSES

    def prompt_shapes(
        self, architecture: Mapping[str, Any], *, text_tokens: int
    ) -> Mapping[str, tuple[int, ...]]:
        return {
            "text": (1, text_tokens, int(architecture["joint_attention_dim"])),
            "text_mask": (1, text_tokens),
        }

    # ---- networks

    def load_text_encoder(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> TextEncoder:
        from transformers import T5EncoderModel

        layout, folder = facts.located, facts.located.folder
        network = self.load_text_network(
            T5EncoderModel, layout, "text_encoder", dtype=dtype, device=device
        )
        return ChromaTextEncoder(
            networks={"text_encoder": network},
            tokenizer=load_tokenizer(folder / "tokenizer"),
            max_tokens=facts.max_tokens,
        )

    def empty_denoiser(self, architecture: Mapping[str, Any]) -> nn.Module:
        with _without_upstream_warning():
            return super().empty_denoiser(architecture)

    def load_denoiser(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        with _without_upstream_warning():
            return super().load_denoiser(facts, dtype=dtype, device=device)

    # ---- training

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Run one forward pass per text length in the batch, so that no pass needs a mask.

        A mask would rule out flash attention and store a bias of tokens^2 for each block, and
        diffusers 0.42.1 does not pass it to the single blocks under gradient checkpointing. Reading
        the lengths synchronises with the device once.
        """
        import torch

        text, mask = conditioning["text"], conditioning["text_mask"]
        if mask.is_meta:  # cost tracing: the mask has no values, and its one sample no padding
            return _velocity(denoiser, noisy, timesteps, text)
        lengths = [int(length) for length in mask.sum(dim=1).tolist()]
        if len(set(lengths)) == 1:
            return _velocity(denoiser, noisy, timesteps, text[:, : lengths[0]])
        groups = {
            length: [row for row, row_length in enumerate(lengths) if row_length == length]
            for length in sorted(set(lengths))
        }
        parts = [
            _velocity(denoiser, noisy[rows], timesteps[rows], text[rows, :length])
            for length, rows in groups.items()
        ]
        order = torch.tensor([row for rows in groups.values() for row in rows])
        # `order` lists the batch's rows as grouped by length; its argsort puts them back.
        return torch.cat(parts)[order.argsort().to(noisy.device)]

    def targets(self, targets: Targets) -> tuple[str, ...]:
        return ENDINGS[targets]

    def lora_targets(self, network: nn.Module, targets: AdapterTargets) -> list[str]:
        names = super().lora_targets(network, targets)
        return [name for name in names if name.startswith(BLOCKS)]

    def lora_key_name(self, format: FileFormat, component: str, module: str) -> str:
        if component != DENOISER:
            return text_name(format, component, module, roles=self.text.roles)
        return transformer_name(module)

    def layer_names(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherNames:
        return other_names(transformer_names.CHROMA, shapes)

    # ---- images

    def prompt_arguments(
        self, prompt: str, negative: str, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        return {"prompt": prompt, "negative_prompt": negative, "guidance_scale": guidance_scale}

    def sampler_arguments(
        self, conditioning: Conditioning, negative: Conditioning, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        return {
            "prompt_embeds": conditioning["text"],
            # Floats would be added to the scores instead of masking (see `plain_pipeline`).
            "prompt_attention_mask": conditioning["text_mask"].bool(),
            "negative_prompt_embeds": negative["text"],
            "negative_prompt_attention_mask": negative["text_mask"].bool(),
            "guidance_scale": guidance_scale,
        }

    def latents_to_decode(
        self, pipeline: DiffusionPipeline, vae: nn.Module, latents: Tensor, size_px: tuple[int, int]
    ) -> Tensor:
        return decodable_tokens(vae, latents, size_px)

    def plain_pipeline(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> DiffusionPipeline:
        """Return diffusers' pipeline with a boolean attention mask.

        diffusers 0.42.1 makes the mask of floats, which attention adds to the scores instead of masking
        (diffusers issue 12116): padding then dilutes short prompts, unlike in training and other programs.
        """
        pipeline = super().plain_pipeline(facts, dtype=dtype, device=device)
        prepare = pipeline._prepare_attention_mask

        def as_booleans(*, attention_mask: Tensor | None = None, **other: Any) -> Tensor | None:
            mask = None if attention_mask is None else attention_mask.bool()
            prepared: Tensor | None = prepare(attention_mask=mask, **other)
            return prepared

        pipeline._prepare_attention_mask = as_booleans
        return pipeline


@dataclass(frozen=True, kw_only=True)
class ChromaTextEncoder(TextEncoder):
    """T5 with masked padding; its output ends with one padding token."""

    networks: Mapping[str, nn.Module]
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return `ids` and `mask` [B, tokens] of the longest prompt's length plus one padding token."""
        ids, mask = padded(self.tokenizer, prompts, length=self.max_tokens)
        longest = min(int(mask.sum(dim=1).max()) + 1, self.max_tokens)
        return {"ids": ids[:, :longest], "mask": mask[:, :longest]}

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, tokens, channels], zero beyond each prompt, and `text_mask` [B, tokens]."""
        import torch

        states = hidden_states(self.networks["text_encoder"], tokens["ids"], mask=tokens["mask"])
        mask = tokens["mask"].to(states.device)
        positions = torch.arange(mask.shape[1], device=mask.device)
        # `<=` and not `<`: the first token of padding stays visible, as in the base's training
        # (ChromaPipeline._get_t5_prompt_embeds in diffusers).
        visible = positions <= mask.sum(dim=1, keepdim=True)
        return {"text": states * visible[..., None], "text_mask": visible.long()}

    def count_tokens(self, prompt: str) -> int:
        return count_tokens(self.tokenizer, prompt)

    def prompt_room(self) -> int:
        return room(self.tokenizer, length=self.max_tokens)


FAMILY = Chroma()


@contextmanager
def _without_upstream_warning() -> Iterator[None]:
    # diffusers 0.42.1 builds this network with a class that diffusers itself deprecated.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`FluxPosEmbed` is deprecated")
        yield


def _velocity(denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
    """Return the prediction [B, C, H, W] for texts [B, tokens, channels] of one length."""
    velocity: Tensor = denoiser(
        hidden_states=pack(noisy),
        timestep=timesteps / 1000,
        encoder_hidden_states=text,
        txt_ids=text.new_zeros(text.shape[1], 3),
        img_ids=position_ids(noisy),
        return_dict=False,
    )[0]
    return unpack(velocity, height=noisy.shape[-2], width=noisy.shape[-1])
