"""Qwen-Image, 2512 and Edit: a joint transformer on Qwen2.5-VL's text (Wu et al. 2025, arXiv 2508.02324).

Conditioning: `text` [B, L, 3584], the prompt within a template whose first 34 tokens (64 in Edit) are dropped, and
`text_mask` [B, L]. The VAE is a video VAE; an image is a video of one frame. The Edit releases read reference images
twice: Qwen2.5-VL sees them before the prompt, and their latents stand behind the image's; Edit-2511 takes these at
time 0. Layered models are refused. Single files have diffusers' names, with or without ComfyUI's prefix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.facts import BaseFacts, BaseRelease, Conditioning
from lora_trainer.families.base.flow import (
    JOINT_ATTENTION,
    FlowFamily,
    TransformerTraits,
    encoders,
    target_endings,
)
from lora_trainer.families.base.latents import VideoLatents, pack, unpack
from lora_trainer.families.base.layout import Header, Layout
from lora_trainer.families.base.references import References, joined, references_in
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
    from PIL.Image import Image
    from torch import Tensor, nn

# The chat around a prompt: what the system says, and the user's turn.
CHAT = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
DESCRIBES = (
    "Describe the image by detailing the color, shape, size, texture, quantity, "
    "text, spatial relationships of the objects and background:"
)
EDITS = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain "
    "how the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate."
)
TEMPLATE = CHAT.format(DESCRIBES, "{}")
# Template tokens before the prompt: the language model reads them, the denoiser does not get them.
TEMPLATE_TOKENS, EDIT_TEMPLATE_TOKENS = 34, 64
# Prefixes of the language head and of the vision tower, in old and new names: 1.2 of 8.3 billion parameters.
UNREAD, SIGHT = ("lm_head.",), ("visual.", "model.visual.")
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
# Whether the denoiser takes references at time 0, and the mark of it in ComfyUI's files.
ZERO_TIME, TIME_MARK = "zero_cond_t", "__index_timestep_zero__"
# Pipelines of the releases that edit -> their variants.
EDITING = {"QwenImageEditPipeline": "edit", "QwenImageEditPlusPipeline": "edit-plus"}
# Sides of the squares of as many pixels as Qwen2.5-VL sees of a reference of the later releases; sides are multiples
# of 32 there. The first release shows it the pixels that the VAE gets.
SEEN_PX, SEEN_STEP_PX = 384, 32
# Sides of the squares of pixels that are one token of Qwen2.5-VL, and the fewest and most pixels it sees.
SIGHT_PX, FEWEST_SEEN_PX, MOST_SEEN_PX = 28, 3136, 12_845_056


class QwenVLEncoder(MaskedEncoder):
    """Qwen2.5-VL, which sees reference images before the prompt; the template's beginning is dropped from the text."""

    padding_side = "right"  # because `embed` drops the template's tokens at the front

    @property
    def free_tokens(self) -> int:  # type: ignore[override]  # by the release, which the instance knows
        return EDIT_TEMPLATE_TOKENS if self.edits else TEMPLATE_TOKENS

    @property
    def edits(self) -> bool:
        """Whether the release is one that edits."""
        return self.facts.references is not None

    def template(self, prompt: str) -> str:
        return CHAT.format(EDITS if self.edits else DESCRIBES, prompt)

    def tokenize_seeing(self, prompt: str, images: Sequence[Image]) -> Mapping[str, Tensor]:
        """Return what `Qwen2_5_VLModel` reads of a prompt and images: ids, mask, pixels and kinds of tokens."""
        several = self.facts.release.variant != EDITING["QwenImageEditPipeline"]
        said = "".join(
            f"Picture {number}: {PICTURE}" if several else PICTURE
            for number in range(1, len(images) + 1)
        )
        tokenizer: Any = self.tokenizers[self.last]
        ids = tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids
        if len(ids) > self.prompt_room():
            prompt = tokenizer.decode(ids[: self.prompt_room()])
        network: Any = self.networks[self.last]
        inputs = picture_processor(tokenizer, network.config.vision_config)(
            text=[self.template(said + prompt)],
            images=[_as_seen(image) if several else image for image in images],
            return_mm_token_type_ids=True,
            return_tensors="pt",
        )
        return {
            "ids": inputs["input_ids"],
            "mask": inputs["attention_mask"],
            **{name: inputs[name] for name in ("pixel_values", "image_grid_thw")},
            # Without them transformers 5 would take the tokens of an image for words in a row; Qwen-Image-Edit was
            # trained on rows and columns.
            "mm_token_type_ids": inputs["mm_token_type_ids"],
        }

    def states(self, tokens: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        network = self.networks[self.last]
        device = next(network.parameters()).device
        outputs = self.run(
            self.last,
            tokens["ids"],
            tokens["mask"],
            output_hidden_states=True,
            use_cache=False,
            **{
                name: each.to(device)
                for name, each in tokens.items()
                if name not in {"ids", "mask"}
            },
        )
        return outputs.hidden_states, tokens["mask"].to(outputs.hidden_states[0].device)

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        states, mask = self.states(tokens)
        mask = mask[:, self.free_tokens :]
        return {
            "text": states[-1][:, self.free_tokens :] * mask[..., None],
            "text_mask": mask,
        }


def picture_processor(tokenizer: Any, sight: Any) -> Any:
    """Return Qwen2.5-VL's processor for a vision tower, without its part for videos, which needs torchvision."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    whole: Any = transformers.Qwen2VLProcessor

    class PictureProcessor(whole):  # type: ignore[misc]  # its methods have no annotations
        @classmethod
        def get_attributes(cls) -> list[str]:
            parts: list[str] = super().get_attributes()
            return [part for part in parts if part != "video_processor"]

    images = Qwen2VLImageProcessorPil(
        patch_size=sight.patch_size,
        temporal_patch_size=sight.temporal_patch_size,
        merge_size=sight.spatial_merge_size,
        min_pixels=FEWEST_SEEN_PX,
        max_pixels=MOST_SEEN_PX,
    )
    return PictureProcessor(image_processor=images, tokenizer=tokenizer)


def seen_px(width_px: int, height_px: int) -> tuple[int, int]:
    """Return the (width, height) at which a release for several references has one seen, as its pipeline computes."""
    ratio = width_px / height_px
    width = math.sqrt(SEEN_PX**2 * ratio)
    sides = (round(side / SEEN_STEP_PX) * SEEN_STEP_PX for side in (width, width / ratio))
    return next(sides), next(sides)


def _as_seen(image: Image) -> Image:
    from diffusers.image_processor import VaeImageProcessor

    width, height = seen_px(*image.size)
    seen: Image = VaeImageProcessor().resize(image, height, width)
    return seen


def _seen_tokens(size_px: tuple[int, int]) -> int:
    """Return the tokens of a text for an image that is seen at that (width, height), and the words around it."""
    return math.prod(max(1, round(side / SIGHT_PX)) for side in size_px) + AROUND_PICTURE


# "Picture 1: ", where it begins and ends.
AROUND_PICTURE = 6


class FrameLatents(VideoLatents):
    """Latents that the pipeline holds as tokens."""

    def decode(self, vae: Any, latents: Tensor, size_px: tuple[int, int]) -> Tensor:
        _, factor = self.shape(vae.config)
        width, height = (side // factor for side in size_px)
        frame = unpack(latents.float(), height=height, width=width).unsqueeze(2)
        return super().decode(vae, frame, size_px)


class QwenImage(FlowFamily):
    """The family of Qwen-Image's releases that draw, and of those that edit."""

    name = "qwen"
    text = encoders(
        text_network("qwen25_7b"),
        encoder=QwenVLEncoder,
        unread=UNREAD,
        sight=SIGHT,
        inner="model.language_model",
        seeing="model",
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
        """Return whether a folder is a base that draws or edits; raises InputError for a layered model."""
        classes = components(folder)
        if classes.get("") in {self.pipeline.class_name, *EDITING}:
            return True
        if classes.get("transformer") == self.traits.class_name:
            raise InputError(
                f"{folder} is for {classes['']}, allowed are {self.pipeline.class_name} and {' and '.join(EDITING)}",
                fix="give a release that is not layered, such as Qwen/Qwen-Image or Qwen/Qwen-Image-Edit-2511",
            )
        return False

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        """Return the release with a single file's own number of blocks: some releases are pruned."""
        # Switches of the denoiser that only layered models have on, whatever pipeline the folder names.
        others = ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope")
        if foreign := [key for key in others if plain.architecture.get(key)]:
            raise InputError(
                f"the denoiser of {plain.ids[0]} has {', '.join(foreign)}: a layered model",
                fix="give a release such as Qwen/Qwen-Image or Qwen/Qwen-Image-Edit-2511",
            )
        text_config(layout.folder, kind="qwen2_5_vl")  # raises for another text encoder
        single = layout.part_file("denoiser")
        if single is None:
            variant = EDITING.get(components(layout.folder).get("", ""), "")
            if plain.architecture.get(ZERO_TIME):
                variant = variant or EDITING["QwenImageEditPlusPipeline"]
            return replace(plain, variant=variant)
        made_like = self.file_release(single, read_header(single))
        changed = {key: each for key, each in plain.architecture.items() if key != ZERO_TIME}
        if made_like.architecture.get(ZERO_TIME):
            changed[ZERO_TIME] = True
        plain = replace(plain, variant=made_like.variant, architecture=changed)
        return _as_deep(plain, read_header(single))

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        """Return the release that a file is made like.

        Edit-2511 has a mark in ComfyUI's files; otherwise the files of all releases are alike but for their names.
        """
        name = file.name.casefold()
        at_zero = TIME_MARK in denoiser_names(header) or bool(re.search("edit.*2511", name))
        if at_zero or "edit" in name:
            is_first = not at_zero and not re.search(r"edit.*(?:25\d\d|plus)", name)
            variant = EDITING["QwenImageEditPipeline" if is_first else "QwenImageEditPlusPipeline"]
            made_like = next(
                each
                for each in self.published
                if each.variant == variant
                and bool(each.architecture.get(ZERO_TIME, False)) == at_zero
            )
        else:
            made_like = self.published[0]
        return _as_deep(made_like, header)

    def denoiser_names(self, header: Header) -> Mapping[str, str]:
        names = super().denoiser_names(header).items()
        return {name: full for name, full in names if name != TIME_MARK}

    def references_of(self, release: BaseRelease) -> References | None:
        return READS.get(release.variant)

    def facts_of(
        self, release: BaseRelease, *, source: str, layout: Layout | None = None
    ) -> BaseFacts:
        facts = super().facts_of(release, source=source, layout=layout)
        if facts.references is None:
            return facts
        # Another template around the prompts, of the same encoder.
        reading = f"{facts.readings['text_encoder']} {release.variant}"
        return replace(facts, readings={**facts.readings, "text_encoder": reading})

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        names = super().adapter_names(facts)
        if facts.references is None:
            return names
        return replace(names, kohya="qwen_image_edit", modelspec="Qwen-Image-Edit/lora")

    # ---- training

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        # A single text has no padding, and without a mask attention can use its fastest kernel.
        mask = conditioning["text_mask"].bool() if len(noisy) > 1 else None
        references = references_in(conditioning)
        return _velocity(denoiser, noisy, timesteps, conditioning["text"], mask, references)


FAMILY = QwenImage()


def _velocity(
    network: Any,
    noisy: Tensor,
    timesteps: Tensor,
    text: Tensor,
    mask: Tensor | None,
    references: Sequence[Tensor],
) -> Tensor:
    """Run the network on one image a sample, as its own `forward` does; `mask` bool [B, L] is False on padding.

    That one copies the number of text tokens to the device wherever there is a mask, which costs a wait in every pass.
    The tokens of references stand behind those of the image.
    """
    import torch

    height, width = noisy.shape[-2:]
    pictures = [noisy, *references]
    image = network.img_in(joined([pack(each) for each in pictures], 1))
    text = network.txt_in(network.txt_norm(text))
    levels = (timesteps / 1000).to(image.dtype)
    own_tokens = height * width // 4
    at_zero = None
    if network.zero_cond_t:
        # The blocks read both times, and which of them a token has: 1 is time 0, where references are.
        levels = torch.cat([levels, levels * 0])
        at_zero = torch.zeros(image.shape[:2], dtype=torch.int, device=image.device)
        at_zero[:, own_tokens:] = 1
    embedded = network.time_text_embed(levels, image)
    # (frames, rows, columns) in tokens
    shapes = [[_shape(each) for each in pictures]]
    positions = network.pos_embed(shapes, max_txt_seq_len=text.shape[1], device=image.device)
    block_inputs = mask, embedded, positions, None, at_zero
    for block in network.transformer_blocks:
        if network.gradient_checkpointing and torch.is_grad_enabled():
            text, image = network._gradient_checkpointing_func(block, image, text, *block_inputs)
        else:
            text, image = block(image, text, *block_inputs)
    if network.zero_cond_t:
        embedded = embedded.chunk(2)[0]
    # The last layers see each token alone, and only those of the image are predicted.
    velocity = network.proj_out(network.norm_out(image[:, :own_tokens], embedded))
    return unpack(velocity, height=height, width=width)


def _shape(latents: Tensor) -> tuple[int, int, int]:
    return 1, latents.shape[-2] // 2, latents.shape[-1] // 2


@contextmanager
def _appended(
    network: nn.Module, references: Sequence[Tensor], places: Sequence[int]
) -> Iterator[None]:
    """Let the network's own `forward` read latents [1, C, h, w] behind every image: Edit's pipelines do nothing else.

    They would scale each reference to 1 megapixel.
    """
    import torch

    behind = torch.cat([pack(each) for each in references], dim=1)
    shapes = [_shape(each) for each in references]

    def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        image = named["hidden_states"]
        tokens = behind.to(image).expand(len(image), -1, -1)
        changed = {
            "hidden_states": torch.cat([image, tokens], dim=1),
            "img_shapes": [[*row, *shapes] for row in named["img_shapes"]],
        }
        return args, {**named, **changed}

    def after(_: nn.Module, args: Any, named: Any, output: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (output[0][:, : -behind.shape[1]],)

    hooks = (
        network.register_forward_pre_hook(before, with_kwargs=True),
        network.register_forward_hook(after, with_kwargs=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _reads(*, most: int, seen_tokens: Callable[[tuple[int, int]], int]) -> References:
    # Sides of references are multiples of 32 px in the pipelines: two tokens.
    return References(most=most, tokens=2, seen_tokens=seen_tokens, appended=_appended)


READS: Mapping[str, References] = {
    "edit": _reads(most=1, seen_tokens=_seen_tokens),
    # "Optimal with 1 to 3 images", as the card of Edit-2509 says.
    "edit-plus": _reads(most=3, seen_tokens=lambda size_px: _seen_tokens(seen_px(*size_px))),
}


def _as_deep(release: BaseRelease, header: Header) -> BaseRelease:
    """Return a release with the number of a file's blocks; pruned releases have fewer than 60."""
    pattern = re.compile(r"transformer_blocks\.(\d+)\.")
    blocks = {match[1] for name in denoiser_names(header) if (match := pattern.match(name))}
    return replace(release, architecture={**release.architecture, "num_layers": len(blocks)})
