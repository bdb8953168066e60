"""Qwen-Image and Qwen-Image-2512: a joint transformer on Qwen2.5-VL's text (Wu et al. 2025, arXiv 2508.02324).

Conditioning: `text` [B, L, 3584], the prompt within a template whose first 34 tokens are dropped, and
`text_mask` [B, L]. The VAE is a video VAE; an image is a video of one frame. Editing models are other
pipelines and refused. Single files have diffusers' names, with or without ComfyUI's prefix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.facts import BaseRelease, Conditioning
from lora_trainer.families.base.flow import (
    JOINT_ATTENTION,
    FlowFamily,
    TransformerTraits,
    encoders,
    target_endings,
)
from lora_trainer.families.base.latents import VideoLatents, pack, unpack
from lora_trainer.families.base.layout import Header, Layout
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.base.text.transformers_encoder import MaskedEncoder, text_config
from lora_trainer.families.base.traits import (
    VIDEO_VAE,
    AdapterFormats,
    AdapterNames,
    PipelineTraits,
)
from lora_trainer.families.files.base_parts import components, denoiser_names
from lora_trainer.families.files.weight_files import read_header

if TYPE_CHECKING:
    from torch import Tensor, nn

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, "
    "text, spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}"
    "<|im_end|>\n<|im_start|>assistant\n"
)
# Template tokens before the prompt: the language model reads them, the denoiser does not get them.
TEMPLATE_TOKENS = 34
# Prefixes of the vision tower and the language head, in old and new names: 1.2 of 8.3 billion parameters.
UNREAD = ("visual.", "model.visual.", "lm_head.")


class QwenVLEncoder(MaskedEncoder):
    """The language model of Qwen2.5-VL; the template's beginning is dropped from the text."""

    free_tokens = TEMPLATE_TOKENS
    padding_side = "right"  # because `embed` drops the template's tokens at the front

    def template(self, prompt: str) -> str:
        return TEMPLATE.format(prompt)

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        states, mask = self.states(tokens)
        mask = mask[:, TEMPLATE_TOKENS:]
        return {
            "text": states[-1][:, TEMPLATE_TOKENS:] * mask[..., None],
            "text_mask": mask,
        }


class FrameLatents(VideoLatents):
    """Latents that the pipeline holds as tokens."""

    def decode(self, vae: Any, latents: Tensor, size_px: tuple[int, int]) -> Tensor:
        _, factor = self.shape(vae.config)
        width, height = (side // factor for side in size_px)
        frame = unpack(latents.float(), height=height, width=width).unsqueeze(2)
        return super().decode(vae, frame, size_px)


class QwenImage(FlowFamily):
    """The family of Qwen-Image's text-to-image releases."""

    name = "qwen"
    text = encoders(
        text_network("qwen25_7b"),
        encoder=QwenVLEncoder,
        unread=UNREAD,
        inner="model.language_model",
        masked=True,
    )
    traits = TransformerTraits(
        class_name="QwenImageTransformer2DModel",
        endings=target_endings(
            JOINT_ATTENTION,
            transformer=(
                *("img_mlp.net.0.proj", "img_mlp.net.2"),
                *("txt_mlp.net.0.proj", "txt_mlp.net.2"),
            ),
            modulation=("img_mod.1", "txt_mod.1"),
        ),
        # The last block drops its text output: these layers change nothing and would get no gradient.
        unused_in_last_block=(
            *("attn.add_q_proj", "attn.to_add_out"),
            *("txt_mlp.net.0.proj", "txt_mlp.net.2"),
        ),
        vae_peak=VIDEO_VAE,
    )
    pipeline = PipelineTraits(
        class_name="QwenImagePipeline",
        text_arguments={"text": "prompt_embeds", "text_mask": "prompt_embeds_mask"},
        scale_argument="true_cfg_scale",  # the pipeline ignores `guidance_scale`
    )
    # InvokeAI reads LoKr in kohya's names and nothing in ComfyUI's.
    formats = AdapterFormats(
        written=("diffusers", "kohya", "comfyui"),
        refused={},
        names=AdapterNames(kohya="qwen_image", modelspec="Qwen-Image/lora"),
        comfyui_prefix="diffusion_model.",
        unread={
            "comfyui": "InvokeAI does not recognise these names; output.format=diffusers has those it reads"
        },
    )
    latents = FrameLatents()

    # ---- facts

    def detect(self, folder: Path) -> bool:
        """Return whether a folder is a text-to-image base; raises InputError for an editing model."""
        classes = components(folder)
        if classes.get("") == self.pipeline.class_name:
            return True
        if classes.get("transformer") == self.traits.class_name:
            raise InputError(
                f"{folder} is for {classes['']}, allowed is {self.pipeline.class_name}",
                fix="give a text-to-image release such as Qwen/Qwen-Image, no editing or layered one",
            )
        return False

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        """Return the release with a single file's own number of blocks: some releases are pruned."""
        # Switches of the denoiser that only editing and layered models have on, whatever pipeline the folder names.
        others = ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope", "zero_cond_t")
        if foreign := [key for key in others if plain.architecture.get(key)]:
            raise InputError(
                f"the denoiser of {plain.ids[0]} has {', '.join(foreign)}: an editing or layered model",
                fix="give a text-to-image release such as Qwen/Qwen-Image",
            )
        text_config(layout.folder, kind="qwen2_5_vl")  # raises for another text encoder
        single = layout.part_file("denoiser")
        return plain if single is None else _as_deep(plain, read_header(single))

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        return _as_deep(self.published[0], header)

    # ---- training

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        # A single text has no padding, and without a mask attention can use its fastest kernel.
        mask = conditioning["text_mask"].bool() if len(noisy) > 1 else None
        return _velocity(denoiser, noisy, timesteps, conditioning["text"], mask)


FAMILY = QwenImage()


def _velocity(
    network: Any, noisy: Tensor, timesteps: Tensor, text: Tensor, mask: Tensor | None
) -> Tensor:
    """Run the network on one image a sample, as its own `forward` does; `mask` bool [B, L] is False on padding.

    That one copies the number of text tokens to the device wherever there is a mask, which costs a wait in every pass.
    """
    import torch

    height, width = noisy.shape[-2:]
    image = network.img_in(pack(noisy))
    text = network.txt_in(network.txt_norm(text))
    embedded = network.time_text_embed((timesteps / 1000).to(image.dtype), image)
    # (frames, rows, columns) in tokens; editing models list their input images behind the first entry.
    shapes = [[(1, height // 2, width // 2)]]
    positions = network.pos_embed(shapes, max_txt_seq_len=text.shape[1], device=image.device)
    block_inputs = mask, embedded, positions
    for block in network.transformer_blocks:
        if network.gradient_checkpointing and torch.is_grad_enabled():
            text, image = network._gradient_checkpointing_func(block, image, text, *block_inputs)
        else:
            text, image = block(image, text, *block_inputs)
    velocity = network.proj_out(network.norm_out(image, embedded))
    return unpack(velocity, height=height, width=width)


def _as_deep(release: BaseRelease, header: Header) -> BaseRelease:
    """Return a release with the number of a file's blocks; pruned releases have fewer than 60."""
    pattern = re.compile(r"transformer_blocks\.(\d+)\.")
    blocks = {match[1] for name in denoiser_names(header) if (match := pattern.match(name))}
    return replace(release, architecture={**release.architecture, "num_layers": len(blocks)})
