"""FLUX.2 dev: the network and the VAE of FLUX.2 klein at eight times its size, on the text of Mistral Small 3.2.

The network reads the guidance scale, so an image is drawn in one pass per step and without a negative prompt. Of
the language model's 40 blocks the network reads three outputs, the last of them after block 30; the other ten
blocks, the vision tower and the language head are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.facts import BaseFacts, BaseRelease, Conditioning, Guidance
from lora_trainer.families.base.flow import encoders
from lora_trainer.families.base.layout import Header, Layout
from lora_trainer.families.base.references import References
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.base.text.transformers_encoder import MaskedEncoder, text_config
from lora_trainer.families.base.traits import AdapterNames, PipelineTraits
from lora_trainer.families.files.base_parts import components
from lora_trainer.families.flux2.family import MISTRAL, Flux2, SquareLatents

if TYPE_CHECKING:
    from torch import Tensor

# Starts of the names of what reads no text: vision tower and language head, by new and old names of transformers.
NOT_READ = (
    *("model.vision_tower.", "model.multi_modal_projector.", "lm_head."),
    *("vision_tower.", "multi_modal_projector.", "language_model.lm_head."),
    "tekken_model",  # ComfyUI's file brings the tokenizer as a tensor of bytes
)
# The pipeline takes these out of a prompt: as special tokens they stand for a picture.
PICTURE = "[IMG]"


class MistralEncoder(MaskedEncoder):
    """Mistral Small behind BFL's system message; the states after three of its blocks, joined."""

    layers = (10, 20, 30)
    padded = True  # the network gets no mask and reads the padding too
    adds_special_tokens = False  # the chat template begins with <s>

    def template(self, prompt: str) -> str:
        # diffusers' own constant: a line break in the middle of its first sentence is a token of the text.
        from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

        said = {"system": SYSTEM_MESSAGE, "user": prompt.replace(PICTURE, "")}
        tokenizer: Any = self.tokenizers[self.last]
        text: str = tokenizer.apply_chat_template(
            [
                {"role": role, "content": [{"type": "text", "text": words}]}
                for role, words in said.items()
            ],
            tokenize=False,
            add_generation_prompt=False,
        )
        return text

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        import torch

        states, _ = self.states(tokens)
        return {"text": torch.cat([states[layer] for layer in self.layers], dim=-1)}


class TokenLatents(SquareLatents):
    """klein's latents, which dev's pipeline returns as tokens, normalised and in squares."""

    def decode(self, vae: Any, latents: Tensor, size_px: tuple[int, int]) -> Tensor:
        from torch.nn.functional import pixel_shuffle

        _, factor = self.shape(vae.config)
        width, height = (side // factor for side in size_px)
        squares = latents.float().transpose(1, 2).unflatten(2, (height, width))
        shift, scale = self.statistics(vae)
        return super().decode(vae, pixel_shuffle(squares * scale + shift, 2), size_px)


class Flux2Dev(Flux2):
    """The family of FLUX.2 dev (Black Forest Labs 2025) and its fine-tunes."""

    name = "flux2dev"
    text = encoders(
        text_network("mistral3_24b"),
        encoder=MistralEncoder,
        unread=NOT_READ,
        inner="model.language_model",
        blocks=max(MistralEncoder.layers),
    )
    pipeline = PipelineTraits(
        class_name="Flux2Pipeline",
        takes_negative=False,
        as_read=lambda prompt, negative: (prompt, {}),  # it has no argument for a negative text
        guidance=lambda architecture, distilled: Guidance(
            two_passes=False, embedded=bool(architecture.get("guidance_embeds", True))
        ),
        reads_vae=True,
    )
    latents = TokenLatents()

    # ---- facts

    def detect(self, folder: Path) -> bool:
        """Return whether it is dev's folder: klein's has the same network and VAE."""
        classes = components(folder)
        return classes.get("") == self.pipeline.class_name or (
            classes.get("transformer") == self.traits.class_name
            and classes.get("text_encoder") == MISTRAL
        )

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        return self.published[0]

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        """Return the release; raises InputError for a text encoder that its denoiser does not read."""
        config = text_config(layout.folder, kind="mistral3")
        width = len(MistralEncoder.layers) * config["text_config"]["hidden_size"]
        if width != plain.architecture["joint_attention_dim"]:
            raise InputError(
                f"the text encoder of {layout.folder} gives {width} channels, its denoiser reads "
                f"{plain.architecture['joint_attention_dim']}",
                fix="give denoiser and text encoder of one release",
            )
        return plain

    def as_distilled(
        self, release: BaseRelease, kind: str, *, steps: int = 0, is_file: bool = False
    ) -> BaseRelease:
        told = replace(release, variant="dev")
        return super(Flux2, self).as_distilled(told, kind, steps=steps, is_file=is_file)

    def references_of(self, release: BaseRelease) -> References | None:
        # What Black Forest Labs recommends at most.
        return References(most=6)

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        # ai-toolkit's name of it, and musubi-tuner's.
        return AdapterNames(kohya="flux2", modelspec="Flux.2-dev/lora")


FAMILY = Flux2Dev()
