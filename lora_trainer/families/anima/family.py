"""Anima: the transformer of Cosmos Predict 2 on the text of Qwen3-0.6B, by way of a network of its own.

That network, the text conditioner (`llm_adapter` in the release's files), reads Qwen3's states of a prompt and answers
in the place of T5: a row for each of T5's tokens of the same prompt. It is frozen, its output is what is cached, and
so a training step runs the transformer alone. Conditioning: `text` [B, L, 1024] and `text_mask` [B, L], L of T5's
tokens; `predict` fills up to 512 rows with zeros, which the transformer attends to, as it was trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import RequestError
from lora_trainer.families.base.facts import BaseRelease, Conditioning
from lora_trainer.families.base.flow import (
    FlowFamily,
    TransformerTraits,
    encoders,
    target_endings,
)
from lora_trainer.families.base.latents import VideoLatents
from lora_trainer.families.base.layout import Header, Layout
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.base.text.transformers_encoder import (
    QWEN3_UNREAD,
    TransformersEncoder,
    text_config,
)
from lora_trainer.families.base.traits import (
    VIDEO_VAE,
    AdapterFormats,
    AdapterNames,
    Blocks,
    PipelineTraits,
)
from lora_trainer.families.files.base_parts import components
from lora_trainer.families.files.weight_files import read_header

if TYPE_CHECKING:
    from torch import Tensor, nn

ENCODER, CONDITIONER = "text_encoder", "text_conditioner"
ROWS = 512
"""Rows of text that the transformer was trained with, `min_sequence_length` of the text conditioner."""
BLOCK = re.compile(r"(?:transformer_)?blocks\.(\d+)\.")
MAX_TOKENS_PX = 2048
"""diffusers' transformer has positions for 128 tokens a side, of 16 px each."""


class AnimaEncoder(TransformersEncoder):
    """Qwen3's last states after the norm, and T5's ids for the text conditioner; the prompt stands alone in both."""

    padding_side = "right"

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return T5's `ids` and `mask`, and Qwen3's `source_ids` and `source_mask`, as long as their longest prompt."""
        length = self.facts.release.max_tokens
        ids, mask = self.tokens_of(CONDITIONER, prompts, length=length, padding="longest")
        source_ids, source_mask = self.tokens_of(ENCODER, prompts, length=length, padding="longest")
        if source_ids.shape[1] == 0:  # Qwen3 has no token for an empty prompt
            source_ids = source_mask = mask.new_zeros(len(prompts), 1)
        return {"ids": ids, "mask": mask, "source_ids": source_ids, "source_mask": source_mask}

    def count_tokens(self, prompt: str) -> int:
        """Return the larger number of both tokenizers: T5 has fewer words, but no Chinese."""
        return max(
            len(each(prompt, add_special_tokens=False, verbose=False).input_ids)
            for each in self.tokenizers.values()
        )

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        mask = tokens["source_mask"]
        # Of an empty prompt one token is seen, whose states are zero: attention to nothing at all is not a number
        # in some kernels, and attention to zeros is zero.
        seen = mask.clone()
        seen[:, 0] = 1
        outputs = self.run(ENCODER, tokens["source_ids"], seen, use_cache=False)
        states = outputs.last_hidden_state
        conditioner = self.networks[CONDITIONER]
        device = next(conditioner.parameters()).device
        text = conditioner(
            source_hidden_states=states * mask.to(states)[..., None],
            target_input_ids=tokens["ids"].to(device),
            target_attention_mask=tokens["mask"].to(device),
            source_attention_mask=seen.to(device),
        )
        length = tokens["ids"].shape[1]
        return {"text": text[:, :length], "text_mask": tokens["mask"].to(device)}


class Anima(FlowFamily):
    """The family of Anima (CircleStone Labs 2026) and its fine-tunes."""

    name = "anima"
    text = encoders(
        text_network("qwen3_06b"),
        text_network("llm_adapter"),
        encoder=AnimaEncoder,
        components=(ENCODER, CONDITIONER),
        inside={CONDITIONER: "llm_adapter."},
        tokenizers={CONDITIONER: "t5_tokenizer"},
        unread=QWEN3_UNREAD,
        width="text_embed_dim",
        masked=True,
    )
    traits = TransformerTraits(
        class_name="CosmosTransformer3DModel",
        endings=target_endings(
            tuple(
                f"{part}.{name}"
                for part in ("attn1", "attn2")
                for name in ("to_q", "to_k", "to_v", "to_out.0")
            ),
            transformer=("ff.net.0.proj", "ff.net.2"),
            # What ZenTrainer and sd-scripts leave out by default too.
            modulation=tuple(f"norm{part}.linear_{n}" for part in (1, 2, 3) for n in (1, 2)),
        ),
        vae_peak=VIDEO_VAE,
    )
    pipeline = PipelineTraits(
        class_name="AnimaModularPipeline",
        blocks=Blocks(
            class_name="AnimaAutoBlocks", encoding=("text_encoder", "denoise.text_conditioning")
        ),
        text_arguments={"text": "prompt_embeds"},
        as_read=lambda *texts: [{"text": whole(each["text"])} for each in texts],
    )
    formats = AdapterFormats(
        written=("comfyui", "diffusers"),
        refused={
            "kohya": "diffusers does not read it; use output.format=comfyui, which ComfyUI and diffusers read"
        },
        names=AdapterNames(kohya="anima", modelspec="anima/lora"),
        comfyui_prefix="diffusion_model.",
        original=frozenset({"comfyui"}),
        joins=False,
        unread={
            "diffusers": "ComfyUI finds no layer of Anima under these names; output.format=comfyui has those it reads",
        },
    )
    latents = VideoLatents()

    # ---- facts

    def detect(self, folder: Path) -> bool:
        # Cosmos Predict 2 has the same transformer, and text of T5.
        return components(folder).get(CONDITIONER) == self.text.networks[CONDITIONER].network

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        """Return the release with a single file's own number of blocks: there are releases of 28 and of 36."""
        text_config(layout.folder, kind="qwen3")  # raises for another text encoder
        single = layout.part_file("denoiser")
        return plain if single is None else self._as_deep(plain, read_header(single))

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        return self._as_deep(self.published[0], header)

    def _as_deep(self, release: BaseRelease, header: Header) -> BaseRelease:
        blocks = {match[1] for name in self.denoiser_names(header) if (match := BLOCK.match(name))}
        return replace(release, architecture={**release.architecture, "num_layers": len(blocks)})

    def empty_denoiser(self, architecture: Mapping[str, Any]) -> nn.Module:
        """Build it without torchvision, of which diffusers 0.42.1 uses one function, for the padding mask."""
        from types import SimpleNamespace

        from diffusers.models.transformers import transformer_cosmos

        if not hasattr(transformer_cosmos, "transforms"):
            transformer_cosmos.transforms = SimpleNamespace(
                functional=SimpleNamespace(resize=_nearest),
                InterpolationMode=SimpleNamespace(NEAREST="nearest"),
            )
        return super().empty_denoiser(architecture)

    # ---- training

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        height, width = noisy.shape[-2:]
        most = MAX_TOKENS_PX // 8
        if max(height, width) > most:
            raise RequestError(
                f"an image of {max(height, width)} latents a side, but the base has positions for {most}",
                fix=f"lower data.resolution or data.max_aspect: {MAX_TOKENS_PX} px a side are the most of Anima",
            )
        frames = denoiser(
            hidden_states=noisy.unsqueeze(2),
            timestep=timesteps / 1000,
            encoder_hidden_states=whole(conditioning["text"]),
            padding_mask=noisy.new_zeros(1, 1, height, width),  # no pixel is padding
            return_dict=False,
        )[0]
        prediction: Tensor = frames.squeeze(2)
        return prediction


FAMILY = Anima()


def whole(text: Tensor) -> Tensor:
    """Return texts [B, L, D] with all rows, zeros behind those of their tokens."""
    import torch

    return torch.nn.functional.pad(text, (0, 0, 0, ROWS - text.shape[1]))


def _nearest(mask: Tensor, size: Sequence[int], interpolation: object) -> Tensor:
    """Resize as `torchvision.transforms.functional.resize` does without interpolation."""
    import torch

    return torch.nn.functional.interpolate(mask, size=tuple(size), mode="nearest")
