"""FLUX.2 klein, 4B and 9B, distilled and base: a Qwen3 text encoder, a VAE normalised per channel.

Caches, `predict` and the denoiser have 2x2 squares of the VAE's latents as channels, [B, 128, H/16, W/16].
FLUX.2 dev, a family of its own, has the same network and VAE but another text encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.facts import BaseFacts, BaseRelease, Conditioning, Guidance
from lora_trainer.families.base.flow import (
    JOINT_ATTENTION,
    FlowFamily,
    TransformerTraits,
    encoders,
    target_endings,
)
from lora_trainer.families.base.latents import VaeLatents
from lora_trainer.families.base.layout import Header, Layout
from lora_trainer.families.base.references import References, joined, references_in
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.base.text.transformers_encoder import (
    QWEN3_UNREAD,
    Qwen3Encoder,
    qwen3_config,
)
from lora_trainer.families.base.traits import AdapterNames, PipelineTraits
from lora_trainer.families.files.base_parts import components, read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

# Keys of the configuration that differ between the sizes of klein.
SIZES = ("num_layers", "num_single_layers", "num_attention_heads", "joint_attention_dim")


# The first axis of a token's position is 10 for those of the first reference, 20 for the second and so on.
REFERENCE_TIME = 10
# As many as Black Forest Labs state for klein; they recommend at most 6 with dev (docs.bfl.ai, "Image Editing").
REFERENCES = References(most=4)

# The class of dev's text encoder, by which folders of dev and klein are told apart.
MISTRAL = "Mistral3ForConditionalGeneration"


class KleinEncoder(Qwen3Encoder):
    """Qwen3 without thinking, and the layers that diffusers' pipeline joins; its training script has others."""

    layers = (9, 18, 27)
    padded = True
    thinking = False


class SquareLatents(VaeLatents):
    """Squares of latents folded into channels, normalised by the mean and deviation of the VAE's batch norm."""

    native_side = 64
    # The release's own autoencoder keeps the mean alone; diffusers' training scripts take `latent_dist.mode()`,
    # its pipelines "argmax".
    are_drawn = False
    variance_eps: float | None = None
    """What is added to the variance; None: what the VAE's configuration says."""

    def is_in(self, header: Header, *, channels: int, alone: bool) -> bool:
        return False  # its statistics are in no file that others write

    def shape(self, config: Mapping[str, Any]) -> tuple[int, int]:
        channels, factor = super().shape(config)
        return 4 * channels, 2 * factor

    def posterior(self, vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        from torch.nn.functional import pixel_unshuffle

        shift, scale = self.statistics(vae)
        latents = vae.encode(pixels).latent_dist
        # Channels vary slowest, then row and column in the square, as in the pipeline's `_patchify_latents`; another
        # order would train, too, and give an adapter of no use elsewhere.
        mean, std = pixel_unshuffle(latents.mean, 2), pixel_unshuffle(latents.std, 2)
        return (mean - shift) / scale, std / scale

    def statistics(self, vae: Any) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of the squares of latents by channel, [1, 4 C, 1, 1].

        The VAE's batch norm is never run: it holds the latents' mean and variance, and the pipelines apply them by
        hand as here (Flux2KleinPipeline.__call__, before it decodes).
        """
        norm, stated = vae.bn, vae.config.batch_norm_eps
        eps = stated if self.variance_eps is None else self.variance_eps
        deviation = (norm.running_var + eps).sqrt()
        return norm.running_mean.view(1, -1, 1, 1), deviation.view(1, -1, 1, 1)

    def decode(self, vae: Any, latents: Tensor, size_px: tuple[int, int]) -> Tensor:
        # The pipeline itself undoes normalisation and squares.
        pixels: Tensor = vae.decode(latents.float(), return_dict=False)[0]
        return pixels


class Flux2(FlowFamily):
    """The family of FLUX.2 klein (Black Forest Labs 2026) and its fine-tunes."""

    name = "flux2"
    text = encoders(text_network("qwen3_4b"), encoder=KleinEncoder, unread=QWEN3_UNREAD)
    traits = TransformerTraits(
        class_name="Flux2Transformer2DModel",
        # `SquareLatents` folds the squares into channels: the denoiser has one token per latent.
        patch=1,
        endings=target_endings(
            # Single-stream blocks: one matrix joins q, k, v and the MLP's input, another both outputs.
            (*JOINT_ATTENTION, "attn.to_qkv_mlp_proj", "attn.to_out"),
            transformer=tuple(
                f"{stream}.{name}"
                for stream in ("ff", "ff_context")
                for name in ("linear_in", "linear_out")
            ),  # the modulation lies outside the blocks
        ),
        # The last norm: diffusers has scale before shift, the original code the reverse.
        swapped_layers=("norm_out.linear",),
    )
    pipeline = PipelineTraits(
        class_name="Flux2KleinPipeline",
        takes_negative=False,  # the pipeline guides against the empty prompt
        # Distilled releases ignore the guidance scale; an embedded one is diffusers' own default.
        guidance=lambda architecture, distilled: Guidance(
            two_passes=not distilled, embedded=bool(architecture.get("guidance_embeds", True))
        ),
        states=lambda facts: {"is_distilled": facts.release.distilled},
        reads_vae=True,
    )
    latents = SquareLatents()

    # ---- facts

    def detect(self, folder: Path) -> bool:
        """Return whether it is klein's folder; dev's has the same network and another text encoder."""
        return super().detect(folder) and components(folder).get("text_encoder") != MISTRAL

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        names = self.denoiser_names(header)
        full = names.get("txt_in.weight", names.get("context_embedder.weight", ""))
        shape = header[full].shape if full else ()
        for release in self.published:
            sizes = release.architecture
            width = sizes["num_attention_heads"] * sizes["attention_head_dim"]
            if shape == (width, sizes["joint_attention_dim"]) and not release.distilled:
                return release
        raise InputError(
            f"{file.name} is a FLUX.2 with a text input of {list(shape)}, which no klein has",
            fix="give FLUX.2 klein 4B or 9B, or a fine-tune of one",
        )

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        """Return whether a folder is distilled, which the pipeline's index says; a single file has no index."""
        config, text = plain.architecture, qwen3_config(layout.folder)
        width = len(KleinEncoder.layers) * text["hidden_size"]
        if width != config["joint_attention_dim"]:
            raise InputError(
                f"the text encoder of {layout.folder} gives {width} channels, its denoiser reads "
                f"{config['joint_attention_dim']}",
                fix="give denoiser and text encoder of one release",
            )
        if layout.part_file("denoiser") is not None:
            return plain
        index = read_json(layout.folder / "model_index.json")
        return replace(plain, distilled=bool(index.get("is_distilled", False)))

    def as_distilled(
        self, release: BaseRelease, kind: str, *, steps: int = 0, is_file: bool = False
    ) -> BaseRelease:
        words = ("klein", "" if kind else "base", self._size(release.architecture))
        told = replace(release, variant="-".join(filter(None, words)))
        return super().as_distilled(told, kind, steps=steps, is_file=is_file)

    def _size(self, architecture: Mapping[str, Any]) -> str:
        """Return "4b" or "9b", "" for another size."""
        for release in self.published:
            if all(release.architecture[key] == architecture.get(key) for key in SIZES):
                return release.variant.rpartition("-")[2]
        return ""

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        size = self._size(facts.release.architecture)
        # As ai-toolkit and musubi-tuner write them.
        return AdapterNames(
            kohya=f"flux2_klein_{size}".rstrip("_"),
            modelspec=f"{f'Flux.2-klein-{size}'.rstrip('-')}/lora",
        )

    # ---- networks

    def references_of(self, release: BaseRelease) -> References | None:
        return REFERENCES

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        text, pictures = conditioning["text"], [noisy, *references_in(conditioning)]
        positions = [
            token_positions(each, time=REFERENCE_TIME * place, rows=rows, columns=columns)
            for place, each in enumerate(pictures)
            for rows, columns in [each.shape[2:]]
        ]
        velocity = denoiser(
            hidden_states=joined([each.flatten(2).transpose(1, 2) for each in pictures], 1),
            encoder_hidden_states=text,
            # The network multiplies by 1000 again.
            timestep=timesteps / 1000,
            guidance=conditioning.get("guidance"),
            img_ids=joined(positions, 0),
            txt_ids=token_positions(text, tokens=text.shape[1]),
            return_dict=False,
        )[0]
        # The references' tokens stand behind those of the image, which alone is predicted.
        own = velocity[:, : noisy.shape[2] * noisy.shape[3]]
        unpacked: Tensor = own.transpose(1, 2).reshape(noisy.shape)
        return unpacked


FAMILY = Flux2()


def token_positions(
    like: Tensor, *, time: int = 0, rows: int = 1, columns: int = 1, tokens: int = 1
) -> Tensor:
    """Return int64 [rows columns tokens, 4]: time (0 for the noisy image), row, column, index in the text."""
    import torch

    axes = [torch.arange(count, device=like.device) for count in (1, rows, columns, tokens)]
    axes[0] = axes[0] + time
    return torch.cartesian_prod(*axes)
