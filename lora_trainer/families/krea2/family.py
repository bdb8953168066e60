"""Krea 2, Raw and Turbo: one stream of text and image tokens on twelve inner states of Qwen3-VL 4B.

Conditioning: `text` [B, L, 12 x 2560], the states of each token one after another, without padding, and `text_mask`
[B, L]. diffusers' pipeline and Krea's own code put padding between the prompt and what follows it. Their masks keep
it from every other token, and text has no positions in the network, so that its place and number change nothing.
The VAE is Qwen-Image's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.facts import BaseRelease, Conditioning
from lora_trainer.families.base.flow import (
    FlowFamily,
    TransformerTraits,
    encoders,
    position_ids,
    recomputed,
    target_endings,
)
from lora_trainer.families.base.latents import pack, unpack
from lora_trainer.families.base.layout import Layout
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.base.text.qwen3_vl import QWEN3_VL_UNREAD, USER_TURN, Qwen3VLEncoder
from lora_trainer.families.base.text.transformers_encoder import text_config
from lora_trainer.families.base.traits import (
    VIDEO_VAE,
    AdapterFormats,
    AdapterNames,
    PipelineTraits,
)
from lora_trainer.families.files.base_parts import read_json
from lora_trainer.families.qwen.family import TEMPLATE, TEMPLATE_TOKENS, FrameLatents

if TYPE_CHECKING:
    from torch import Tensor, nn


class Krea2Encoder(Qwen3VLEncoder):
    """Every third state of Qwen3-VL 4B from the second on, behind Qwen-Image's system prompt."""

    layers = tuple(range(2, 36, 3))
    free_tokens = TEMPLATE_TOKENS
    system = TEMPLATE.partition(USER_TURN)[0]


def by_state(text: Tensor) -> Tensor:
    """Return [B, L, 12, 2560] of `text`."""
    states: Tensor = text.unflatten(-1, (len(Krea2Encoder.layers), -1))
    return states


def _as_read(*texts: Conditioning) -> Sequence[Mapping[str, Any]]:
    """Return the texts as the pipeline takes them: of one length, because it counts the tokens of the first only."""
    from torch.nn.utils.rnn import pad_sequence

    text = pad_sequence([each["text"][0] for each in texts], batch_first=True)
    mask = pad_sequence([each["text_mask"][0] for each in texts], batch_first=True)
    rows = zip(by_state(text).split(1), mask.bool().split(1), strict=True)
    return [{"text": states, "text_mask": is_token} for states, is_token in rows]


class Krea2(FlowFamily):
    """The family of Krea 2 (Krea 2026, krea.ai/blog/krea-2-technical-report) and its fine-tunes."""

    name = "krea2"
    text = encoders(
        replace(text_network("qwen3vl_4b"), network="Qwen3VLModel"),
        encoder=Krea2Encoder,
        unread=QWEN3_VL_UNREAD,
        inner="language_model",
        width="num_text_layers text_hidden_dim",
        masked=True,
    )
    traits = TransformerTraits(
        class_name="Krea2Transformer2DModel",
        # Also those of the text's own blocks, which Krea's trainer, ai-toolkit and musubi-tuner adapt too.
        endings=target_endings(
            tuple(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "to_gate")),
            transformer=tuple(f"ff.{name}" for name in ("gate", "up", "down")),
        ),
        refiners=("text_fusion.",),
        vae_peak=VIDEO_VAE,
        fp32_in_files=("scale",),
    )
    pipeline = PipelineTraits(
        class_name="Krea2Pipeline",
        text_arguments={"text": "prompt_embeds", "text_mask": "prompt_embeds_mask"},
        as_read=_as_read,
        scale_offset=1.0,  # prompt + scale (prompt - negative)
        # A distilled release is drawn with one shift for all sizes.
        states=lambda facts: {"is_distilled": facts.release.distilled, "patch_size": 2},
    )
    formats = AdapterFormats(
        written=("comfyui", "diffusers", "kohya"),
        refused={},
        names=AdapterNames(kohya="krea2", modelspec="Krea-2/lora"),  # as ai-toolkit names it
        comfyui_prefix="diffusion_model.",
        # Behind ComfyUI's prefix diffusers knows the names of Krea's own code only. musubi-tuner has those, too.
        original=frozenset({"comfyui", "kohya"}),
        joins=False,
        unread={
            "kohya": "diffusers does not read these names; output.format=comfyui has those that it and ComfyUI read"
        },
    )
    latents = FrameLatents()

    # ---- facts

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        """Return whether a folder is distilled, which the pipeline's index says; InputError for other text states."""
        text_config(layout.folder, kind="qwen3_vl")  # raises for another text encoder
        index = read_json(layout.folder / "model_index.json")
        states = tuple(index.get("text_encoder_select_layers") or Krea2Encoder.layers)
        if states != Krea2Encoder.layers:
            raise InputError(
                f"{layout.folder} reads the states {list(states)} of its text encoder, allowed are "
                f"{list(Krea2Encoder.layers)}",
                fix="give Krea 2 or a fine-tune of it",
            )
        if layout.part_file("denoiser") is not None:
            return plain
        return replace(plain, distilled=bool(index.get("is_distilled", False)))

    def as_distilled(
        self, release: BaseRelease, kind: str, *, steps: int = 0, is_file: bool = False
    ) -> BaseRelease:
        told = replace(release, variant="turbo" if kind else "raw")
        return super().as_distilled(told, kind, steps=steps, is_file=is_file)

    # ---- networks

    def empty_denoiser(self, architecture: Mapping[str, Any]) -> nn.Module:
        """Let gradient checkpointing reach the text's blocks, which read twelve states of each token."""
        network: Any = super().empty_denoiser(architecture)
        text = network.text_fusion
        text.layerwise_blocks = recomputed(text.layerwise_blocks)
        text.refiner_blocks = recomputed(text.refiner_blocks)
        whole: nn.Module = network
        return whole

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        from torch.nn.functional import pad

        batch, _, height, width = noisy.shape
        text = by_state(conditioning["text"])
        tokens = denoiser(
            hidden_states=pack(noisy),
            encoder_hidden_states=text,
            timestep=timesteps / 1000,
            # Every text token stands at 0, 0, 0; one table for the whole batch.
            position_ids=pad(position_ids(noisy), (0, 0, text.shape[1], 0)),
            # A single text has no padding, and without a mask attention can use its fastest kernel.
            encoder_attention_mask=conditioning["text_mask"].bool() if batch > 1 else None,
            return_dict=False,
        )[0]
        return unpack(tokens, height=height, width=width)


FAMILY = Krea2()
