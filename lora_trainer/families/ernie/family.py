"""ERNIE-Image and its Turbo: one stream of image and text tokens, Ministral 3 3B, FLUX.2's VAE.

Conditioning: `text` [B, L, 3072], the states before the language model's last block, of the prompt as it stands, and
`text_mask` [B, L]. On the first of its three axes the image stands behind the text, at the text's own length, so that
the network needs the lengths and makes nothing of the padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.facts import BaseRelease, Conditioning
from lora_trainer.families.base.flow import (
    FlowFamily,
    TransformerTraits,
    encoders,
    target_endings,
    text_lengths,
)
from lora_trainer.families.base.layout import Layout
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.base.text.transformers_encoder import (
    MaskedEncoder,
    text_config,
    without_padding,
)
from lora_trainer.families.base.traits import AdapterFormats, AdapterNames, PipelineTraits
from lora_trainer.families.flux2dev.family import NOT_READ
from lora_trainer.families.flux3.family import NormalisedLatents

if TYPE_CHECKING:
    from torch import Tensor, nn


class MinistralEncoder(MaskedEncoder):
    """Ministral 3 without its chat template; the states before its last block."""

    layer = -2

    def template(self, prompt: str) -> str:
        tokenizer: Any = self.tokenizers[self.last]
        # A text of no tokens at all is its beginning alone, as in the pipeline.
        is_empty = not prompt and not tokenizer("").input_ids
        return tokenizer.bos_token if is_empty else prompt

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        states, _ = self.states(tokens)
        return without_padding(states[self.layer], tokens["mask"])


class ErnieLatents(NormalisedLatents):
    """FLUX.2's latents, with the 1e-5 of ERNIE-Image's pipeline, where the release's VAE states 1e-4."""

    variance_eps = 1e-5


class Ernie(FlowFamily):
    """The family of ERNIE-Image (Baidu 2026, github.com/baidu/ERNIE-Image) and its fine-tunes."""

    name = "ernie"
    text = encoders(
        text_network("ministral3_3b"),
        encoder=MinistralEncoder,
        unread=NOT_READ,
        inner="language_model",
        blocks=26,  # all, as diffusers' pipeline counts from the last; the norm behind them is not read
        width="text_in_dim",
        masked=True,
    )
    traits = TransformerTraits(
        class_name="ErnieImageTransformer2DModel",
        # `ErnieLatents` folds the squares into channels: the denoiser has one token per latent.
        patch=1,
        endings=target_endings(
            tuple(f"self_attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
            transformer=tuple(f"mlp.{name}" for name in ("gate_proj", "up_proj", "linear_fc2")),
        ),  # the modulation lies outside the blocks
    )
    pipeline = PipelineTraits(
        class_name="ErnieImagePipeline",
        # The network that rewrites prompts is neither downloaded nor loaded.
        absent={"pe": None, "pe_tokenizer": None},
        text_arguments={"text": "prompt_embeds"},
        as_read=lambda *texts: [{"text": [*_unpadded(each)]} for each in texts],
    )
    formats = AdapterFormats(
        written=("comfyui", "diffusers"),
        refused={
            "kohya": "diffusers does not read its names; use output.format=comfyui, which diffusers and ComfyUI read",
        },
        # As ai-toolkit and OneTrainer write them.
        names=AdapterNames(kohya="ernie_image", modelspec="Ernie/lora"),
        comfyui_prefix="diffusion_model.",
    )
    latents = ErnieLatents()

    # ---- facts

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        """Return the release; raises InputError for a text encoder that its denoiser does not read."""
        width = text_config(layout.folder, kind="mistral3")["text_config"]["hidden_size"]
        if width != plain.architecture["text_in_dim"]:
            raise InputError(
                f"the text encoder of {layout.folder} gives {width} channels, its denoiser reads "
                f"{plain.architecture['text_in_dim']}",
                fix="give denoiser and text encoder of one release",
            )
        return plain

    def as_distilled(
        self, release: BaseRelease, kind: str, *, steps: int = 0, is_file: bool = False
    ) -> BaseRelease:
        told = replace(release, variant="turbo" if kind else "base")
        return super().as_distilled(told, kind, steps=steps, is_file=is_file)

    # ---- networks

    def empty_denoiser(self, architecture: Mapping[str, Any]) -> nn.Module:
        """Let positions be traced, and give the layers of the MLPs samples first, as adapters take them."""
        network: Any = super().empty_denoiser(architecture)
        embed = network.pos_embed.forward

        def forward(places: Tensor) -> Tensor:
            # diffusers switches autocast off there, which a `meta` device does not have.
            shape = (*places.shape[:2], 1, network.head_dim)
            angles: Tensor = places.new_empty(shape) if places.is_meta else embed(places)
            return angles

        network.pos_embed.forward = forward
        for block in network.layers:
            # diffusers has tokens first but in attention, where samples first is a view: several layers read a copy.
            block.self_attention.register_forward_pre_hook(lambda _, args: (args[0].contiguous(),))
            block.mlp.register_forward_pre_hook(
                lambda _, args: (args[0].transpose(0, 1).contiguous(),)
            )
            block.mlp.register_forward_hook(lambda _, args, result: result.transpose(0, 1))
        whole: nn.Module = network
        return whole

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        velocity: Tensor = denoiser(
            hidden_states=noisy,
            timestep=timesteps,
            text_bth=conditioning["text"],
            text_lens=conditioning["text_mask"].sum(dim=1),
            return_dict=False,
        )[0]
        return velocity


FAMILY = Ernie()


def _unpadded(conditioning: Conditioning) -> list[Tensor]:
    """Split texts [B, L, D] into tensors [length, D] without padding."""
    lengths = text_lengths(conditioning)
    return [text[:length] for text, length in zip(conditioning["text"], lengths, strict=True)]
