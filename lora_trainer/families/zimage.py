"""Z-Image, base and Turbo: a Qwen3 text encoder, FLUX.1's VAE, one stream of image and text tokens.

diffusers' network counts time from noise (0) to image (1) and predicts the velocity towards the image.
`predict` converts both to the convention of the flow families: timestep = 1000 sigma, target = noise - image.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.families.facts import (
    AdapterNames,
    Assumption,
    BaseRelease,
    Conditioning,
    Header,
    Layout,
    PipelineTraits,
)
from lora_trainer.families.flow import (
    FlowFamily,
    TransformerFormats,
    TransformerTraits,
    encoders,
    target_endings,
    text_lengths,
)
from lora_trainer.families.latents import MeanLatents
from lora_trainer.families.releases import BY_ROLE
from lora_trainer.families.text.transformers_encoder import QWEN3_UNREAD, Qwen3Encoder, qwen3_config

if TYPE_CHECKING:
    from torch import Tensor, nn

# The scheduler's shift by release: De-Turbo is a Turbo that was trained back to a base.
SHIFTS: Mapping[str, float] = {"base": 6.0, "turbo": 3.0, "de-turbo": 3.0}
# File names of the base release; a fine-tune of either release may have any other name.
RELEASED = re.compile(r"z[-_ ]?image([-_ ]?base)?([-_ ](bf16|fp16|fp32|fp8\w*))?")


def _release_in_name(name: str) -> str | None:
    """Return the release that a folder's or file's name contains, None where it contains none."""
    # Publishers write de-turbo, De_Turbo and DeTurbo.
    letters = re.sub(r"[^a-z]", "", name.lower())
    if "turbo" in letters:
        return "de-turbo" if "deturbo" in letters else "turbo"
    return "base" if RELEASED.fullmatch(Path(name.lower()).stem) else None


class ZImageEncoder(Qwen3Encoder):
    """Qwen3 with thinking on; the hidden states before its last layer."""

    layers = (-2,)
    thinking = True


class ZImage(FlowFamily):
    """The family of Z-Image (Z-Image team 2025, arXiv 2511.22699) and its fine-tunes."""

    name = "zimage"
    text = encoders(
        BY_ROLE["qwen3_4b"],
        encoder=ZImageEncoder,
        unread=QWEN3_UNREAD,
        width="cap_feat_dim",
        masked=True,
        multiple=32,  # diffusers' SEQ_MULTI_OF
    )
    traits = TransformerTraits(
        class_name="ZImageTransformer2DModel",
        endings=target_endings(
            tuple(f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
            transformer=tuple(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
            modulation=("adaLN_modulation.0",),
        ),
    )
    pipeline = PipelineTraits(
        class_name="ZImagePipeline",
        text_arguments={"text": "prompt_embeds"},
        as_read=lambda *texts: [
            {"text": unpadded(each["text"], each["text_mask"])} for each in texts
        ],
        scale_offset=1.0,  # prompt + scale (prompt - negative)
    )
    latents = MeanLatents()
    formats = TransformerFormats(
        names=AdapterNames(kohya="zimage", modelspec="Z-Image/lora"),
        comfyui_prefix="diffusion_model.",
    )

    # ---- facts

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        named_release = _release_in_name(file.name)
        # False is 0, the base; True is 1, the Turbo.
        return self.published[named_release == "turbo"]

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        """Return the release; base and Turbo have equal tensors, so names and the scheduler's shift decide.

        A folder is a Turbo by its name or by its scheduler's shift. A single file is the release in its
        name and gets that release's shift; without a release in its name it counts as its companion's.
        """
        qwen3_config(layout.folder)  # raises for another text encoder
        single, assumed, scheduler = layout.part_file("denoiser"), None, plain.scheduler
        named_release = _release_in_name((single or Path(plain.ids[0])).name)
        companion_release = "turbo" if scheduler.get("shift") == SHIFTS["turbo"] else "base"
        if single is None and named_release == "base":
            # A folder named "Z-Image" still brings its own scheduler: trust that.
            named_release = None
        distilled = (named_release or companion_release) == "turbo"
        if single is not None and named_release is not None:
            scheduler = {**scheduler, "shift": SHIFTS[named_release]}
        elif single is not None:
            other = self.published[companion_release == "base"]
            assumed = Assumption(
                sentence=f"nothing in {single.name} tells Z-Image from Z-Image-Turbo: it is taken for "
                f"{'a Turbo' if distilled else 'the base'}, as its companion is",
                setting=f"if that is wrong, use --set base.companion={other.ids[0]}",
            )
        return replace(
            plain,
            scheduler=scheduler,
            variant="turbo" if distilled else "base",
            distilled=distilled,
            assumed=assumed,
        )

    # ---- training

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        import torch

        images = denoiser(
            list(noisy.unsqueeze(2)),  # a list of [C, 1 frame, H, W]
            (1000 - timesteps) / 1000,  # time from noise (0) to image (1)
            unpadded(conditioning["text"], conditioning["text_mask"]),
            return_dict=False,
        )[0]
        return -torch.stack(images).squeeze(2)  # towards the image -> noise - image


FAMILY = ZImage()


def unpadded(text: Tensor, mask: Tensor) -> list[Tensor]:
    """Split texts [B, L, D] into tensors [length, D] without padding."""
    return [states[:length] for states, length in zip(text, text_lengths(mask), strict=True)]
