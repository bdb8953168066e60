"""FLUX.1 dev, schnell and Kontext: a transformer of joint and single blocks, CLIP's pooled text and T5's tokens.

Dev was distilled with an embedded guidance scale; schnell was distilled to few steps without guidance. Kontext is dev
trained to edit: it reads one reference image behind the noisy one, whose tokens have 1 on the first axis.
Conditioning: `text` [B, 512 or 256, 4096] with padding unmasked as in the base's training, `pooled`
[B, 768], and `guidance` [B] for dev.

An example of a family; docs/adding-a-family.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.families.base.facts import BaseFacts, BaseRelease, Conditioning, Guidance
from lora_trainer.families.base.flow import (
    JOINT_ATTENTION,
    JOINT_FEED_FORWARD,
    FlowFamily,
    TransformerTraits,
    encoders,
    position_ids,
    refuse_channels,
    target_endings,
)
from lora_trainer.families.base.latents import PackedLatents, pack, unpack
from lora_trainer.families.base.layout import Header, Layout
from lora_trainer.families.base.references import References, joined, references_in
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.base.text.transformers_encoder import TransformersEncoder
from lora_trainer.families.base.traits import AdapterNames, PipelineTraits
from lora_trainer.families.files.base_parts import components, denoiser_names
from lora_trainer.families.files.weight_files import read_header

if TYPE_CHECKING:
    from torch import Tensor, nn

ENDINGS = target_endings(
    JOINT_ATTENTION,
    transformer=(*JOINT_FEED_FORWARD, "proj_mlp", "proj_out"),
    modulation=("norm1.linear", "norm1_context.linear", "norm.linear"),
)
_GUIDANCE = frozenset(
    {"guidance_in.in_layer.weight", "time_text_embed.guidance_embedder.linear_1.weight"}
)
LATENT_CHANNELS = 16


# The pipeline of a folder of Kontext.
KONTEXT_PIPELINE = "FluxKontextPipeline"
# The sizes of references that Kontext was trained with (diffusers' PREFERRED_KONTEXT_RESOLUTIONS), upright ones; each
# lying down, too.
_UPRIGHT = (
    *((672, 1568), (688, 1504), (720, 1456), (752, 1392)),
    *((800, 1328), (832, 1248), (880, 1184), (944, 1104)),
)
KONTEXT = References(
    most=1,
    grows=True,
    sizes_px=(*_UPRIGHT, (1024, 1024), *((height, width) for width, height in _UPRIGHT)),
    pipeline=KONTEXT_PIPELINE,
    # Else it would draw 1 megapixel whatever is asked for, and stretch the reference to one of its sizes.
    arguments=lambda size_px: {"max_area": size_px[0] * size_px[1], "_auto_resize": False},
)


class PooledT5Encoder(TransformersEncoder):
    """CLIP (`text_encoder`) for one pooled vector, T5 (`text_encoder_2`) for the tokens."""

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, max_tokens, channels], padding included, and `pooled` [B, channels]."""
        return {
            "text": self.run("text_encoder_2", tokens["text_encoder_2"])[0],
            # Before CLIP's projection, as FluxPipeline._get_clip_prompt_embeds.
            "pooled": self.run("text_encoder", tokens["text_encoder"]).pooler_output,
        }


class Flux(FlowFamily):
    """The family of FLUX.1 dev, schnell, and everything fine-tuned from them."""

    name = "flux"
    text = encoders(text_network("clip_l"), text_network("t5xxl"), encoder=PooledT5Encoder)
    traits = TransformerTraits(
        class_name="FluxTransformer2DModel",
        endings=ENDINGS,
        # The last norm: diffusers has scale before shift, the original code the reverse.
        swapped_layers=("norm_out.linear",),
    )
    pipeline = PipelineTraits(
        class_name="FluxPipeline",
        takes_negative=False,  # a guidance-distilled base takes none
        # The embedded scale of dev; schnell has no guidance.
        guidance=lambda architecture, distilled: Guidance(
            two_passes=False, embedded=bool(architecture.get("guidance_embeds", False))
        ),
    )
    latents = PackedLatents()

    # ---- facts

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        # Dev and schnell differ in no name and no shape but the embedder of the guidance scale, Kontext from dev in
        # none at all.
        if not _reads_guidance(file):
            return self.published[1]
        return self.published[2 if "kontext" in file.name.casefold() else 0]

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        """Return the release by the network's guidance input.

        A dev file may have a schnell folder as companion, or the reverse.
        """
        # Fill has 384 channels: 64 of noise, 64 of the masked image, 256 of the mask at full resolution (8 x 8
        # x 4). Control releases have 128, noise and the control image.
        refuse_channels(plain.ids[0], plain.architecture, allowed=4 * LATENT_CHANNELS)
        in_folder = bool(plain.architecture.get("guidance_embeds", False))
        single = layout.part_file("denoiser")
        embeds = in_folder if single is None else _reads_guidance(single)
        release = self.published[0 if embeds else 1]
        if single is not None:
            release = self.file_release(single, {})
        elif components(layout.folder).get("") == KONTEXT_PIPELINE:
            release = self.published[2]
        return replace(
            plain,
            architecture={**plain.architecture, "guidance_embeds": embeds},
            # A companion of the other release brings its shift along: dev's grows
            # with the image, schnell's is 1, none at all.
            scheduler=plain.scheduler if embeds == in_folder else release.scheduler,
            max_tokens=release.max_tokens,
            variant=release.variant,
            distilled=release.distilled,
        )

    def as_distilled(
        self, release: BaseRelease, kind: str, *, steps: int = 0, is_file: bool = False
    ) -> BaseRelease:
        """Return it; schnell is distilled whatever its name says, as its tensors show."""
        if release.variant == "schnell":
            kind = "schnell"
        return super().as_distilled(release, kind, steps=steps, is_file=is_file)

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        return AdapterNames(kohya="flux1", modelspec=f"flux-1-{facts.release.variant}/lora")

    def references_of(self, release: BaseRelease) -> References | None:
        return KONTEXT if release.variant == "kontext" else None

    # ---- training

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        guidance, pooled = conditioning.get("guidance"), conditioning["pooled"]
        return velocity(
            denoiser,
            noisy,
            timesteps,
            conditioning["text"],
            references=references_in(conditioning),
            guidance=guidance,
            pooled_projections=pooled,
        )


FAMILY = Flux()


def velocity(
    denoiser: nn.Module,
    noisy: Tensor,
    timesteps: Tensor,
    text: Tensor,
    *,
    references: Sequence[Tensor] = (),
    **more: Any,
) -> Tensor:
    """Return the prediction [B, C, H, W] of a network of FLUX.1's kind for texts [B, tokens, channels]."""
    pictures = [noisy, *references]
    positions = [position_ids(each, place=place) for place, each in enumerate(pictures)]
    tokens: Tensor = denoiser(
        hidden_states=joined([pack(each) for each in pictures], 1),
        # The network multiplies by 1000 again, and the guidance scale likewise.
        timestep=timesteps / 1000,
        encoder_hidden_states=text,
        # All text tokens stand at position 0, as in
        # FluxPipeline.encode_prompt: T5's states carry their order.
        txt_ids=text.new_zeros(text.shape[1], 3),
        img_ids=joined(positions, 0),
        return_dict=False,
        **more,
    )[0]
    height, width = noisy.shape[-2:]
    return unpack(tokens[:, : height * width // 4], height=height, width=width)


def _reads_guidance(file: Path) -> bool:
    return bool(_GUIDANCE & denoiser_names(read_header(file)).keys())
