"""AuraFlow 0.3 and Pony V7: Pile-T5, SDXL's VAE, four joint blocks and 32 of one stream, learned positions.

Conditioning: `text` [B, max_tokens, 2048], zero behind the prompt's tokens. The network has no mask and reads the
padding, so every text has all tokens: 256 of AuraFlow, 768 of Pony V7.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.families.base.facts import BaseRelease, Conditioning
from lora_trainer.families.base.flow import (
    JOINT_ATTENTION,
    FlowFamily,
    TransformerFormats,
    TransformerTraits,
    encoders,
    target_endings,
)
from lora_trainer.families.base.layout import Header, Layout
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.base.stated import Stated
from lora_trainer.families.base.text.transformers_encoder import MaskedEncoder, text_config
from lora_trainer.families.base.traits import AdapterNames, PipelineTraits
from lora_trainer.families.files.weight_files import read_header

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

# Pony V7 has AuraFlow's tensors and was trained on longer texts.
PONY = re.compile(r"pony[-_. ]?(?:diffusion[-_. ]?)?v?7", re.IGNORECASE)
# The start of the names in the releases' own files.
OWN_PREFIX = "model."
# The table of positions, in the releases' own files and in diffusers'.
POSITIONS = ("positional_encoding", "pos_embed.pos_embed")


class PileT5Encoder(MaskedEncoder):
    """Pile-T5 with masked padding; zeros take the place of the padding's states."""

    padded = True

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        states, mask = self.states(tokens)
        return {"text": states[-1] * mask[..., None]}


class AuraFlow(FlowFamily):
    """The family of AuraFlow 0.3 (fal 2024), Pony V7 and everything fine-tuned from them."""

    name = "auraflow"
    text = encoders(text_network("pile_t5xl"), encoder=PileT5Encoder)
    traits = TransformerTraits(
        class_name="AuraFlowTransformer2DModel",
        endings=target_endings(
            JOINT_ATTENTION,
            transformer=tuple(
                f"{part}.{name}"
                for part in ("ff", "ff_context")
                for name in ("linear_1", "linear_2", "out_projection")
            ),
            modulation=("norm1.linear", "norm1_context.linear"),
        ),
        swapped_layers=("norm_out.linear",),
        shares_vae=False,  # of the shape of Stable Diffusion 1's, scaled otherwise
    )
    pipeline = PipelineTraits(
        class_name="AuraFlowPipeline",
        text_arguments={"text": "prompt_embeds", "mask": "prompt_attention_mask"},
        # The pipeline wants a mask beside each text and makes nothing of it.
        as_read=lambda *texts: [
            {**each, "mask": (each["text"] != 0).any(dim=-1)} for each in texts
        ],
    )
    formats = TransformerFormats(
        names=AdapterNames(kohya="auraflow", modelspec="auraflow-v1/lora"),
        refused={
            "kohya": "neither diffusers nor ComfyUI reads AuraFlow in it; use output.format=diffusers, which both read",
        },
    )

    # ---- facts

    def denoiser_names(self, header: Header) -> Mapping[str, str]:
        names = super().denoiser_names(header)
        return {name.removeprefix(OWN_PREFIX): full for name, full in names.items()}

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        text_config(layout.folder, kind="umt5")  # raises for another text encoder
        single = layout.part_file("denoiser")
        if single is not None:
            self._refuse_small(plain.ids[0], self._positions(read_header(single)))
        self._refuse_small(plain.ids[0], int(plain.architecture["pos_embed_max_size"]))
        return plain

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        self._refuse_small(file.name, self._positions(header))
        return super().file_release(file, header)

    def as_stated(self, release: BaseRelease, stated: Stated) -> BaseRelease:
        """Return it with the variant that its name states, and that variant's length of texts."""
        is_pony = any(PONY.search(text) for text in stated.texts)
        kind = next(each for each in self.published if is_pony == (each.variant == "pony-v7"))
        told = replace(release, variant=kind.variant, max_tokens=kind.max_tokens)
        return super().as_stated(told, stated)

    def _positions(self, header: Header) -> int:
        """Return the number of positions in a single file's table, 0 where it has none."""
        names = self.denoiser_names(header)
        found = (header[names[name]].shape for name in POSITIONS if name in names)
        return max((max(shape[:-1]) for shape in found), default=0)

    def _refuse_small(self, source: str, positions: int) -> None:
        """Raise InputError for AuraFlow 0.1 and 0.2, whose table fits nothing longer than a native square."""
        if 0 < math.isqrt(positions) * self.traits.patch <= self.latents.native_side:
            raise InputError(
                f"{source} has positions for images of at most 1024 px a side, as AuraFlow 0.1 and 0.2; images of "
                "other shapes than the square are longer",
                fix="use AuraFlow 0.3 (fal/AuraFlow-v0.3) or a base made from it",
            )

    # ---- training

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        side = math.isqrt(denoiser.get_parameter(POSITIONS[-1]).shape[1]) * self.traits.patch
        # diffusers would take positions of other rows for what is beside the table, or none.
        if max(noisy.shape[-2:]) > side:
            raise RequestError(
                f"an image of {max(noisy.shape[-2:])} latents a side, but the base has positions for {side}",
                fix="lower data.resolution or data.max_aspect: 1536 px a side are the most of AuraFlow 0.3",
            )
        prediction: Tensor = denoiser(
            noisy,
            encoder_hidden_states=conditioning["text"],
            timestep=timesteps / 1000,
            return_dict=False,
        )[0]
        return prediction


FAMILY = AuraFlow()
