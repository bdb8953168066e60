"""Lumina-Image 2.0: Gemma 2 as text encoder, FLUX.1's VAE, one stream of image and text tokens.

Qin et al. 2025 (arXiv 2503.21758). Conditioning: `text` [B, L, 2304], the hidden states before Gemma's last
layer, and `text_mask` [B, L]. diffusers' network counts time from noise (0) to image (1) and predicts the
velocity towards the image; `predict` converts both to timestep = 1000 sigma, target = noise - image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lora_trainer.config.config import Targets
from lora_trainer.families import transformer_names
from lora_trainer.families.base import (
    AUTOENCODER_KL,
    BY_TWO_PASSES,
    DENOISER,
    AdapterFormats,
    AdapterNames,
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
from lora_trainer.families.base_files.base_folder import part_file
from lora_trainer.families.base_files.transformer_file import (
    check_companion,
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
from lora_trainer.families.text.t5 import count_tokens, load_tokenizer, room
from lora_trainer.families.text.text_layers import GEMMA2_2B
from lora_trainer.families.traits import APACHE, INDEXED_BLOCK
from lora_trainer.families.transformer_names import other_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MAX_TOKENS = 256
"""The limit of diffusers' pipeline, system prompt included."""
SYSTEM_PROMPT = (
    "You are an assistant designed to generate superior images with the superior degree of image-text "
    "alignment based on textual prompts or user prompts. <Prompt Start> "
)
"""diffusers' pipeline puts it before a prompt; the base was trained with it."""
ATTENTION = tuple(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))
TRANSFORMER = (*ATTENTION, *(f"feed_forward.linear_{number}" for number in (1, 2, 3)))
ENDINGS: Mapping[Targets, tuple[str, ...]] = {
    "attention": ATTENTION,
    "transformer": TRANSFORMER,
    "all": (*TRANSFORMER, "norm1.linear"),
}
IN_FILE = frozenset({"noise_refiner.0.attention.qkv.weight", "cap_embedder.1.weight"})
IN_DIFFUSERS = frozenset({"noise_refiner.0.attn.to_q.weight", "context_refiner.0.norm1.weight"})
ZIMAGE_ALONE = "cap_pad_token"
LATENT_CHANNELS = 16
ARCHITECTURE: Mapping[str, Any] = {
    "_class_name": "Lumina2Transformer2DModel",
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": LATENT_CHANNELS,
    "hidden_size": 2304,
    "num_layers": 26,
    "num_refiner_layers": 2,
    # Grouped queries: 24 heads of 96 channels read 8 of keys and values, 2304 + 768 + 768 rows when joined.
    "num_attention_heads": 24,
    "num_kv_heads": 8,
    "multiple_of": 256,
    "ffn_dim_multiplier": None,
    "norm_eps": 1e-5,
    "scaling_factor": 1.0,
    "axes_dim_rope": [32, 32, 32],
    "axes_lens": [300, 512, 512],
    "cap_feat_dim": 2304,
}
PARAMETERS: Mapping[Part, int] = {
    "denoiser": 2_609_769_152,
    "vae": 83_819_683,
    "text_encoder": 2_614_341_888,
}


class Lumina2(FlowFamily):
    """The family of Lumina-Image 2.0 and its fine-tunes."""

    name = "lumina2"
    formats = AdapterFormats(
        written=("diffusers",),
        refused=dict.fromkeys(
            ("kohya", "comfyui"),
            "q, k and v are one weight of unequal parts in its names, and ComfyUI reads to_q, to_k and to_v only "
            "where they are equal (Z-Image); use output.format=diffusers, which diffusers reads",
        ),
    )
    pipeline_class = "Lumina2Pipeline"
    denoiser_class = "Lumina2Transformer2DModel"
    text_folders = ("text_encoder",)
    text = TextInputs(
        layers={"text_encoder": GEMMA2_2B},
        roles={"text_encoder": "gemma2_2b"},
        multiple=1,
        one_length=False,
        encoder_files=True,
    )
    native_latents = 128
    patch = 2
    traits = NetworkTraits(
        precisions=WITHOUT_FP16,
        block_pattern=INDEXED_BLOCK,
        quantization_skip=(),
        vae_peak=AUTOENCODER_KL,
    )
    unread_text = ("spiece_model",)  # ComfyUI's files bring the tokenizer as a tensor of bytes
    tokenizer_folders = ("tokenizer",)
    published = (
        BaseRelease(
            ids=("Alpha-VLLM/Lumina-Image-2.0",),
            architecture=ARCHITECTURE,
            vae={"latent_channels": LATENT_CHANNELS, "block_out_channels": [128, 256, 512, 512]},
            scheduler={"use_dynamic_shifting": False, "shift": 6.0},
            parameters=PARAMETERS,
            max_tokens=MAX_TOKENS,
            download_bytes=2 * sum(PARAMETERS.values()),  # in bf16
        ),
    )
    licences = {source: APACHE for release in published for source in release.ids}

    # ---- facts

    def max_tokens(self, layout: Layout) -> int:
        return MAX_TOKENS

    def targets(self, targets: Targets) -> tuple[str, ...]:
        return ENDINGS[targets]

    def guidance(self, architecture: Mapping[str, Any], *, distilled: bool) -> Guidance:
        return BY_TWO_PASSES

    def prompt_shapes(
        self, architecture: Mapping[str, Any], *, text_tokens: int
    ) -> Mapping[str, tuple[int, ...]]:
        width = int(architecture["cap_feat_dim"])
        return {"text": (1, text_tokens, width), "text_mask": (1, text_tokens)}

    def detect_file(self, header: Header) -> frozenset[Part]:
        names = part_tensors(header, "denoiser").keys()
        if ZIMAGE_ALONE in names or not (names >= IN_FILE or names >= IN_DIFFUSERS):
            return frozenset()
        has_vae = holds_vae(header, latent_channels=LATENT_CHANNELS)
        return frozenset({"denoiser", "vae"} if has_vae else {"denoiser"})

    def architecture(self, layout: Layout) -> Mapping[str, Any]:
        config = super().architecture(layout)
        if (single := part_file(layout, "denoiser")) is not None:
            shape = (int(config["hidden_size"]), int(config["cap_feat_dim"]))
            check_companion(
                single,
                shapes={
                    "cap_embedder.1.weight": shape,
                    "time_caption_embed.caption_embedder.1.weight": shape,
                },
                blocks={
                    "layers": config["num_layers"],
                    "noise_refiner": config["num_refiner_layers"],
                },
            )
        return config

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        return AdapterNames(kohya="lumina2", modelspec="lumina-2/lora")  # as sd-scripts writes it

    # ---- networks

    def empty_denoiser(self, architecture: Mapping[str, Any]) -> nn.Module:
        return _recomputing_refiners(super().empty_denoiser(architecture))

    def load_denoiser(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        return _recomputing_refiners(super().load_denoiser(facts, dtype=dtype, device=device))

    def load_text_encoder(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> TextEncoder:
        from transformers import Gemma2Model

        network = self.load_text_network(
            Gemma2Model, facts.located, "text_encoder", dtype=dtype, device=device
        )
        tokenizer = load_tokenizer(facts.located.folder / "tokenizer")
        return Gemma2TextEncoder(networks={"text_encoder": network}, tokenizer=tokenizer)

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        towards_image: Tensor = denoiser(
            hidden_states=noisy,
            timestep=(1000 - timesteps) / 1000,  # time from noise (0) to image (1)
            encoder_hidden_states=conditioning["text"],
            encoder_attention_mask=_TextMask.of(conditioning["text_mask"]),
            return_dict=False,
        )[0]
        return -towards_image

    # ---- files

    def lora_key_name(self, format: FileFormat, component: str, module: str) -> str:
        if component != DENOISER:
            return text_name(format, component, module, roles=self.text.roles)
        return transformer_name(module)

    def layer_names(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherNames:
        return other_names(transformer_names.LUMINA2, shapes)

    # ---- images

    def sampler_arguments(
        self, conditioning: Conditioning, negative: Conditioning, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        """Return the pipeline's arguments: both texts must have one length, so the shorter is padded."""
        from torch.nn.functional import pad

        longest = max(texts["text"].shape[1] for texts in (conditioning, negative))

        def padded(texts: Conditioning) -> tuple[Tensor, Tensor]:
            missing = longest - texts["text"].shape[1]
            return pad(texts["text"], (0, 0, 0, missing)), pad(texts["text_mask"], (0, missing))

        text, mask = padded(conditioning)
        negative_text, negative_mask = padded(negative)
        return {
            "prompt_embeds": text,
            "prompt_attention_mask": mask,
            "negative_prompt_embeds": negative_text,
            "negative_prompt_attention_mask": negative_mask,
            "guidance_scale": guidance_scale,
        }

    def prompt_arguments(
        self, prompt: str, negative: str, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        """Return the plain pipeline's arguments; it puts no system prompt before a negative prompt."""
        negative = _with_system_prompt(negative)
        return {"prompt": prompt, "negative_prompt": negative, "guidance_scale": guidance_scale}


@dataclass(frozen=True, kw_only=True)
class Gemma2TextEncoder(TextEncoder):
    """Gemma 2 on the prompt after the system prompt; an empty prompt is encoded alone, as in training."""

    networks: Mapping[str, nn.Module]
    tokenizer: Any

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return `ids` and `mask` [B, tokens] of the longest prompt's length, padded at the end."""
        tokens = self.tokenizer(
            [_with_system_prompt(prompt) for prompt in prompts],
            # The pipeline pads to 256. The network cuts each text at its own length, so the result is the same.
            padding="longest",
            padding_side="right",  # the tokenizer's own is left; the pipeline sets right
            max_length=MAX_TOKENS,
            truncation=True,
            return_tensors="pt",
        )
        return {"ids": tokens["input_ids"], "mask": tokens["attention_mask"]}

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, tokens, channels], zero beyond each prompt, and `text_mask` [B, tokens]."""
        network = self.networks["text_encoder"]
        device = next(network.parameters()).device
        mask = tokens["mask"].to(device)
        states = network(
            input_ids=tokens["ids"].to(device),
            attention_mask=mask,
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states[-2]
        return {"text": states * mask[..., None], "text_mask": mask}

    def count_tokens(self, prompt: str) -> int:
        return count_tokens(self.tokenizer, prompt)

    def prompt_room(self) -> int:
        return room(self.tokenizer, length=MAX_TOKENS, template=SYSTEM_PROMPT.rstrip(" "))


def _with_system_prompt(prompt: str) -> str:
    return SYSTEM_PROMPT + prompt if prompt else ""


@dataclass(frozen=True, kw_only=True)
class _TextMask:
    """The members of a mask [B, L] that the network uses, with each text's length known beforehand.

    The network asks a tensor for the lengths: that waits for the device, and a meta tensor has no values.
    """

    mask: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> _TextMask:
        import torch

        batch, longest = mask.shape
        # A single text has no padding; costs are traced without padding.
        full_length = batch == 1 or mask.is_meta
        lengths = [longest] * batch if full_length else mask.sum(dim=1).tolist()
        return cls(mask=mask, lengths=torch.tensor(lengths, device="cpu"))

    @property
    def shape(self) -> torch.Size:
        return self.mask.shape

    def sum(self, dim: int) -> Tensor:
        return self.lengths

    def bool(self) -> Tensor:
        return self.mask.bool()


def _recomputing_refiners(network: Any) -> nn.Module:
    """Let gradient checkpointing reach the refiner blocks: diffusers 0.42.1 recomputes `layers` only."""
    from torch import is_grad_enabled
    from torch.nn import ModuleList

    # Without it swapped weights were overwritten before the backward pass of the refiners,
    # and torch refused ("modified by an inplace operation").
    class Refiner(ModuleList):
        gradient_checkpointing = False  # diffusers sets it where it is, with the function to use
        _gradient_checkpointing_func: Any

        def __iter__(self) -> Iterator[Any]:
            blocks = super().__iter__()
            if self.gradient_checkpointing and is_grad_enabled():
                return (partial(self._gradient_checkpointing_func, block) for block in blocks)
            return blocks

    network.noise_refiner = Refiner(network.noise_refiner)
    network.context_refiner = Refiner(network.context_refiner)
    refined: nn.Module = network
    return refined


FAMILY = Lumina2()
