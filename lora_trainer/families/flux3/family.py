"""FLUX.3 Image Klein, base and distilled: a Qwen3-VL text encoder, FLUX.2's VAE, a block list for each kind of token.

The network reads a text in windows of 80 tokens, padding included and without a mask: `text` [B, L, 20480] has the
whole window, and `text_mask` [B, L] is 1 on all of it. Caches and `predict` have 2x2 squares of the VAE's latents as
channels, as in FLUX.2. Reference images have blocks of their own, which are loaded for a training with references, and
stand behind the image in the joint ones. The distilled release is a flow map: it also
reads the time that a step jumps to, which is the image's own in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.facts import BaseRelease, Conditioning, Guidance
from lora_trainer.families.base.flow import (
    FlowFamily,
    TransformerTraits,
    encoders,
    in_one_length,
    target_endings,
)
from lora_trainer.families.base.layout import Header, Layout
from lora_trainer.families.base.references import References, joined
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.base.stated import Stated
from lora_trainer.families.base.text.qwen3_vl import (
    QWEN3_VL_INNER,
    QWEN3_VL_UNREAD,
    Qwen3VLEncoder,
    text_processor,
)
from lora_trainer.families.base.text.transformers_encoder import text_config
from lora_trainer.families.base.traits import AdapterFormats, AdapterNames, Blocks, PipelineTraits
from lora_trainer.families.files.weight_files import read_header
from lora_trainer.families.flux2.family import SquareLatents, token_positions

if TYPE_CHECKING:
    from torch import Tensor, nn

WINDOW = 80
"""Texts are padded to a multiple of this many tokens, and the network attends to the padding."""
FLOW_MAP = "flow map"
"""How the distilled release was distilled."""
IMAGE_SCALE = 0.5
"""Rows and columns of an image count half as much as tokens of a text."""
# As many as the blocks of diffusers' pipeline say. The release reads one alone at up to 4 megapixels, here at most 1.
REFERENCES = References(most=10)
# Keys of the configuration that tell whether a network has the sizes of the release.
SIZES = ("num_layers", "num_single_layers", "num_attention_heads", "attention_head_dim")
# The embedder of the time that a step of the distilled release jumps to, in the original names and in diffusers'.
TARGET_TIME = frozenset({"ref_time_in.in_layer.weight", "target_timestep_embedder.linear_1.weight"})


class Flux3Encoder(Qwen3VLEncoder):
    """Every fourth state of Qwen3-VL 4B behind its chat template, in whole windows."""

    layers = tuple(range(4, 33, 4))
    padding_side = "right"
    ending = ""

    def template(self, prompt: str) -> str:
        tokenizer: Any = self.tokenizers[self.last]
        text: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return text

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return `ids` and `mask` [B, tokens] of the longest window, and `window`, which is 1 on each text's own."""
        import torch
        from torch.nn.functional import pad

        tokens = super().tokenize(prompts)
        windows = -(-tokens["mask"].sum(dim=1) // WINDOW) * WINDOW
        longest = int(windows.max())
        missing = (0, longest - tokens["ids"].shape[1])
        filler = self.tokenizers[self.last].pad_token_id
        return {
            "ids": pad(tokens["ids"], missing, value=filler),
            "mask": pad(tokens["mask"], missing),
            "window": (torch.arange(longest) < windows[:, None]).long(),
        }

    def positions(self, mask: Tensor) -> Tensor:
        # Padding stands at 1, as with the transformers of the release's training.
        return super().positions(mask).masked_fill(mask == 0, 1)

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        import torch

        states, _ = self.states(tokens)
        text = torch.cat(states, dim=-1)
        window = tokens["window"].to(text.device)
        return {"text": text * window[..., None].to(text), "text_mask": window}


class NormalisedLatents(SquareLatents):
    """FLUX.2's latents, which the blocks before the decoder return normalised and in squares."""

    def decode(self, vae: Any, latents: Tensor, size_px: tuple[int, int]) -> Tensor:
        from torch.nn.functional import pixel_shuffle

        shift, scale = self.statistics(vae)
        return super().decode(vae, pixel_shuffle(latents.float() * scale + shift, 2), size_px)


class Flux3(FlowFamily):
    """The family of FLUX.3 Image Klein (Black Forest Labs 2026) and its fine-tunes."""

    name = "flux3"
    text = encoders(
        # 32 of 36 blocks.
        replace(text_network("qwen3vl_4b"), parameters=3_618_742_272),
        encoder=Flux3Encoder,
        unread=QWEN3_VL_UNREAD,
        inner=QWEN3_VL_INNER,
        blocks=max(Flux3Encoder.layers),
        masked=True,
        one_length=True,
    )
    traits = TransformerTraits(
        class_name="Flux3Transformer2DModel",
        # `SquareLatents` folds the squares into channels: the denoiser has one token per latent.
        patch=1,
        endings=target_endings(
            tuple(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
            transformer=("ff.linear_in", "ff.linear_out"),  # the modulation lies outside the blocks
        ),
        block_pattern=r"(?:mode_blocks\.\w+|\w+)\.\d+(?=\.)",
        # The last norm: diffusers has scale before shift, the original code the reverse.
        swapped_layers=("norm_out.linear",),
        fp32_in_files=("query_norm", "key_norm"),
        unread=("repa_projectors",),  # heads that only the release's own training used
        reference_layers={"image_cond": "image"},
    )
    pipeline = PipelineTraits(
        class_name="Flux3ModularPipeline",
        blocks=Blocks(
            class_name="Flux3AutoBlocks",
            encoding=("text_encoder",),
            editing="image_conditioned",
            unused=("prompt_upsampler",),
            class_of=lambda architecture: (
                "Flux3DistilledAutoBlocks" if architecture.get("flow_map") else "Flux3AutoBlocks"
            ),
        ),
        text_arguments={"text": "prompt_embeds"},
        guidance=lambda architecture, distilled: Guidance(
            two_passes=not architecture.get("flow_map", False), embedded=False
        ),
        reads_vae=True,
        processor=text_processor,
    )
    formats = AdapterFormats(
        written=("comfyui", "diffusers"),
        refused={
            "kohya": "no program is known to read FLUX.3 in it; use output.format=comfyui, the release's own names, "
            "which diffusers reads"
        },
        names=AdapterNames(kohya="flux3_klein", modelspec="Flux.3-klein/lora"),
        comfyui_prefix="diffusion_model.",
        original=frozenset({"comfyui"}),
        joins=False,
    )
    latents = NormalisedLatents()

    # ---- facts

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        is_flow_map = not TARGET_TIME.isdisjoint(self.denoiser_names(header))
        return next(each for each in self.published if each.distilled == is_flow_map)

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        """Return whether a base is a flow map, which its tensors or its configuration say.

        Raises InputError for a text encoder that its denoiser does not read.
        """
        text = text_config(layout.folder, kind="qwen3_vl")["text_config"]
        width = len(Flux3Encoder.layers) * text["hidden_size"]
        if width != plain.architecture["joint_attention_dim"]:
            raise InputError(
                f"the text encoder of {layout.folder} gives {width} channels, its denoiser reads "
                f"{plain.architecture['joint_attention_dim']}",
                fix="give denoiser and text encoder of one release",
            )
        if (single := layout.part_file("denoiser")) is not None:
            released = self.file_release(single, read_header(single)).architecture
            changed = {**plain.architecture, "flow_map": released.get("flow_map", False)}
            plain = replace(plain, architecture=changed)
        return replace(plain, distilled=bool(plain.architecture.get("flow_map", False)))

    def as_stated(self, release: BaseRelease, stated: Stated) -> BaseRelease:
        if release.distilled:  # by its tensors, whatever it is called
            is_file = stated.file is not None
            return self.as_distilled(release, FLOW_MAP, steps=stated.steps(), is_file=is_file)
        return super().as_stated(release, stated)

    def as_distilled(
        self, release: BaseRelease, kind: str, *, steps: int = 0, is_file: bool = False
    ) -> BaseRelease:
        is_flow_map = release.architecture.get("flow_map", False)
        told = replace(release, variant="klein" if is_flow_map else "klein-base")
        told = super().as_distilled(told, kind, steps=steps, is_file=is_file)
        own, released = told.architecture, self.published[0].architecture
        # The published assistant is of the published network.
        fits = all(own.get(key) == released[key] for key in SIZES)
        return told if fits else replace(told, assistant=None)

    # ---- training

    def references_of(self, release: BaseRelease) -> References | None:
        return REFERENCES

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        return in_one_length(partial(_velocity, denoiser), noisy, timesteps, conditioning)


FAMILY = Flux3()


def _velocity(
    network: Any, noisy: Tensor, timesteps: Tensor, text: Tensor, *references: Tensor
) -> Tensor:
    """Run the network on texts of one length and on the latents of references."""
    levels = timesteps / 1000  # the network multiplies by 1000 again
    conditions = {}
    if references:
        positions = [
            _positions(each, levels, place=place) for place, each in enumerate(references, 1)
        ]
        conditions = {
            "image_cond_hidden_states": joined([_tokens(each) for each in references], 1),
            "image_cond_ids": joined(positions, 0),
        }
    velocity = network(
        hidden_states=_tokens(noisy),
        encoder_hidden_states=text,
        timestep=levels,
        # A step of no length: the velocity at this very time, as SimpleTuner trains it.
        target_timestep=levels if network.config.flow_map else None,
        img_ids=_positions(noisy, levels),
        txt_ids=token_positions(text, tokens=text.shape[1]),
        return_dict=False,
        **conditions,
    )[0]
    unpacked: Tensor = velocity.transpose(1, 2).reshape(noisy.shape)
    return unpacked


def _tokens(latents: Tensor) -> Tensor:
    return latents.flatten(2).transpose(1, 2)


def _positions(latents: Tensor, levels: Tensor, *, place: int = 0) -> Tensor:
    """Return the positions [tokens, 4] of an image's tokens; `place` 0: the noisy one, 1: the first reference."""
    rows, columns = latents.shape[2:]
    positions = token_positions(latents, rows=rows, columns=columns).to(levels) * IMAGE_SCALE
    positions[:, 3] = -place  # before the first token of the text
    return positions
