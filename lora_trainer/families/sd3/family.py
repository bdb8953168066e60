"""Stable Diffusion 3 medium, 3.5 medium and large: MMDiT (Esser et al. 2024, arXiv 2403.03206).

Conditioning: `text` [B, 77 + 256, 4096] of two CLIPs and T5, `pooled` [B, 2048]. 3.5 medium has a second
attention among the image tokens alone (`attn2`). Single files have ComfyUI's layout; the denoiser's number
of parameters tells the releases apart, so one companion serves all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.families.base.facts import BaseFacts, BaseRelease, Conditioning
from lora_trainer.families.base.flow import (
    JOINT_ATTENTION,
    JOINT_FEED_FORWARD,
    FlowFamily,
    TransformerFormats,
    TransformerTraits,
    encoders,
    refuse_channels,
    target_endings,
)
from lora_trainer.families.base.layout import Header, Layout
from lora_trainer.families.base.releases import CLIP_L_PROJECTED, text_network
from lora_trainer.families.base.text.transformers_encoder import TransformersEncoder
from lora_trainer.families.base.traits import AdapterNames, PipelineTraits
from lora_trainer.families.files.base_parts import elements, encoders_in

if TYPE_CHECKING:
    from torch import Tensor, nn

CLIP_TOKENS = 77
T5 = "text_encoder_3"
T5_TOKENS = 256


class SD3TextEncoder(TransformersEncoder):
    """CLIP-L and bigG side by side, then T5 along the sequence (Esser et al. 2024, figure 2).

    A folder whose model_index.json has `text_encoder_3: [null, null]` is used without T5: its 256 tokens are zeros.
    """

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Return `text` [B, 77 + 256, width of T5] and `pooled` [B, widths of both CLIPs]."""
        import torch
        from torch.nn.functional import pad

        clips = [
            self.run(name, tokens[name], output_hidden_states=True)
            for name in ("text_encoder", "text_encoder_2")
        ]
        clip = torch.cat([output.hidden_states[-2] for output in clips], dim=-1)
        # Zeros as StableDiffusion3Pipeline._get_t5_prompt_embeds has them without a third encoder.
        width = self.facts.release.architecture["joint_attention_dim"]
        t5 = clip.new_zeros((len(clip), T5_TOKENS, width))
        if T5 in self.networks:  # without a mask: the base was trained on unmasked padding
            t5 = self.run(T5, tokens[T5])[0]
        # CLIP's 768 + 1280 channels get zeros up to the 4096 of T5, so that both are tokens of one sequence.
        text = torch.cat([pad(clip, (0, t5.shape[-1] - clip.shape[-1])), t5], dim=-2)
        return {"text": text, "pooled": torch.cat([output.text_embeds for output in clips], dim=-1)}


class StableDiffusion3(FlowFamily):
    """The family of Stable Diffusion 3 and 3.5."""

    name = "sd3"
    text = encoders(
        # CLIP-L's projection is the identity, which files of it leave out.
        *(CLIP_L_PROJECTED, text_network("clip_g"), text_network("t5xxl")),
        encoder=SD3TextEncoder,
        optional=T5,
        tokens=CLIP_TOKENS + T5_TOKENS,  # each text is padded to the limits of its encoders
    )
    formats = TransformerFormats(
        unread=dict.fromkeys(
            ("diffusers", "comfyui"),
            "Forge reads nothing of it, A1111 the attention of the image alone; ComfyUI and diffusers read all of it",
        ),
    )
    traits = TransformerTraits(
        class_name="SD3Transformer2DModel",
        endings=target_endings(
            (*JOINT_ATTENTION, *(f"attn2.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))),
            transformer=JOINT_FEED_FORWARD,
            modulation=("norm1.linear", "norm1_context.linear"),
        ),
        # The last block drops its text output. Its text query therefore changes nothing, and ComfyUI stores shift
        # and scale of its text modulation in the other order, so an adapter of it would do the wrong thing there.
        unused_in_last_block=("attn.add_q_proj", "norm1_context.linear"),
        # Of the text norms the last block's has two parts, the others six.
        swapped_layers=("norm_out.linear", "norm1_context.linear"),
        shares_vae=False,  # of FLUX.1's shape, scaled otherwise
        precisions=("bf16", "fp16", "fp32"),  # ComfyUI runs it in fp16 as it is, without a clamp
    )
    pipeline = PipelineTraits(class_name="StableDiffusion3Pipeline")

    # ---- facts

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        source, (channels, _) = plain.ids[0], self.latents.shape(plain.vae)
        single, architecture = layout.part_file("denoiser"), plain.architecture
        if single is not None:
            nearest = self._nearest(plain.parameters["denoiser"])
            # One companion serves all releases; a network of another size is the companion's.
            if math.isclose(
                plain.parameters["denoiser"], nearest.parameters["denoiser"], rel_tol=0.02
            ):
                architecture = {**architecture, **nearest.architecture}
        refuse_channels(source, architecture, allowed=channels)
        variant = "medium" if architecture.get("dual_attention_layers") else "large"
        if architecture.get("qk_norm") is None:
            variant = "3-medium"
        with_t5 = T5 in encoders_in(layout, self.text)
        return replace(
            plain,
            architecture=architecture,
            # The longest limit counts: each CLIP truncates the same prompt at its own 77 tokens.
            max_tokens=T5_TOKENS if with_t5 else CLIP_TOKENS,
            variant=variant + ("" if with_t5 else " without T5"),
        )

    def as_distilled(
        self, release: BaseRelease, kind: str, *, steps: int = 0, is_file: bool = False
    ) -> BaseRelease:
        size, blank, rest = release.variant.partition(" ")
        turbo = "-turbo" if kind else ""
        told = replace(release, variant=f"{size.removesuffix('-turbo')}{turbo}{blank}{rest}")
        return super().as_distilled(told, kind, steps=steps, is_file=is_file)

    def _nearest(self, parameters: int) -> BaseRelease:
        """Return the undistilled release whose denoiser has about as many parameters."""
        undistilled = [each for each in self.published if not each.distilled]
        return min(undistilled, key=lambda each: abs(each.parameters["denoiser"] - parameters))

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        return self._nearest(elements(header, self.denoiser_names(header).values()))

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        """Return `3-medium`, `3-5-medium` or `3-5-large` as kohya's name, as sd-scripts writes it."""
        size = facts.release.variant.partition(" ")[0].removesuffix("-turbo")
        version = size if size.startswith("3-") else f"3-5-{size}"
        return AdapterNames(
            kohya=version, modelspec=f"stable-diffusion-3-{version.removeprefix('3-')}/lora"
        )

    # ---- training

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        prediction: Tensor = denoiser(
            hidden_states=noisy,
            # This class reads 1000 sigma as it is; those of FLUX.1, FLUX.2
            # and Chroma multiply by 1000 themselves.
            timestep=timesteps,
            encoder_hidden_states=conditioning["text"],
            pooled_projections=conditioning["pooled"],
            return_dict=False,
        )[0]
        return prediction


FAMILY = StableDiffusion3()
