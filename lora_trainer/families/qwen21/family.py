"""Qwen-Image 2.1 and its Turbo: one causal stream of text and images on the last states of Qwen3-VL 8B.

Conditioning: `text` [B, L, 4096], the prompt within a template whose system message is dropped, and `text_mask` [B, L].
Qwen3-VL sees reference images before the prompt. `text` lacks its states of their places, where the denoiser has their
latents, 2x2 for each; `image_places` [B, references] says how many tokens are before each image. Text attends to what
is before it only, a reference to itself too, and both are modulated as at t = 0. The images' positions depend on the
text's length, so that all texts of one forward pass have one length. The VAE has four channels, colours and opacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from lora_trainer.families.base.facts import (
    IMAGE_PLACES,
    BaseFacts,
    BaseRelease,
    Conditioning,
    image_places,
)
from lora_trainer.families.base.flow import (
    FlowFamily,
    TransformerTraits,
    encoders,
    in_one_length,
    target_endings,
)
from lora_trainer.families.base.latents import VideoLatents, statistics
from lora_trainer.families.base.layout import Header, Layout
from lora_trainer.families.base.references import References
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.base.tables import family_table
from lora_trainer.families.base.text.qwen3_vl import (
    QWEN3_VL_HEAD,
    QWEN3_VL_INNER,
    QWEN3_VL_LAST_NORM,
    QWEN3_VL_SEEING,
    QWEN3_VL_SIGHT,
    Qwen3VLEncoder,
    holds_itself,
    text_processor,
)
from lora_trainer.families.base.text.transformers_encoder import text_config
from lora_trainer.families.base.traits import AdapterFormats, AdapterNames, PipelineTraits, VaePeak
from lora_trainer.families.files.base_parts import read_json
from lora_trainer.families.files.recognise import fits

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
# Keys of the configuration that tell the published network from a larger or smaller one.
SIZES = ("num_layers", "num_attention_heads", "attention_head_dim")
# Pixels along a side of a reference's places in a text, and the tokens of the words around it: `<image1>`, begin, end.
PLACE_PX, AROUND_IMAGE = 32, 6
# Latents in a place.
IN_PLACE = 4
# The noise levels that Turbo was distilled to, as its model_index.json has them; its scheduler leaves them as they are.
TURBO_SIGMAS = (1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568)


class Qwen21Encoder(Qwen3VLEncoder):
    """The states behind the last block of Qwen3-VL 8B, before the norm that follows it."""

    layers = (-1,)
    last_norm = False
    padding_side = "left"
    system = SYSTEM

    @property
    def free_tokens(self) -> int:  # type: ignore[override]  # as the pipeline counts them, by the tokenizer
        return len(self.tokenizers[self.last](SYSTEM).input_ids)

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        # The empty prompt is one blank, as in the pipeline.
        return super().tokenize([prompt or " " for prompt in prompts])

    def tokenize_seeing(self, prompt: str, images: Sequence[Image]) -> Mapping[str, Tensor]:
        return super().tokenize_seeing(prompt or " ", images)

    def before_image(self, number: int) -> str:
        return f"{' ' if number > 1 else ''}<image{number}>"

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        read = super().embed(tokens)
        if "mm_token_type_ids" not in tokens:
            return read
        # One text, without padding.
        is_place = tokens["mm_token_type_ids"][0, self.free_tokens :].bool()
        begins = is_place & ~is_place.roll(1)
        before = (~is_place).cumsum(0)[begins]
        words = (~is_place).nonzero()[:, 0].to(read["text"].device)
        return {
            "text": read["text"][:, words],
            "text_mask": read["text_mask"][:, ~is_place],
            IMAGE_PLACES: before[None],
        }


class OpaqueLatents(VideoLatents):
    """Latents of pictures with opacity; those of a training are opaque. Each latent is a token of the network."""

    native_side = 64
    # SimpleTuner draws.
    are_drawn = True
    vae_peak = VaePeak(encoding=966, decoding=1584, blocked=(1063, 1737))

    def is_in(self, header: Header, *, channels: int, alone: bool) -> bool:
        return any(fits(header, marks) for marks in family_table("qwen21")["files"]["vae"])

    def posterior(self, vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        from torch.nn.functional import pad

        # The fourth channel is opacity, 1 everywhere.
        return super().posterior(vae, pad(pixels, (0, 0, 0, 0, 0, 1), value=1.0))

    def decode(self, vae: Any, latents: Tensor, size_px: tuple[int, int]) -> Tensor:
        _, factor = self.shape(vae.config)
        width, height = (side // factor for side in size_px)
        frame = latents.float().transpose(1, 2).unflatten(2, (1, height, width))
        shift, scale = statistics(vae, like=frame)
        return decoded_frame(vae, frame * scale + shift)[:, :3, 0]


def decoded_frame(vae: Any, frame: Tensor) -> Tensor:
    """Return float32 pixels [B, 4, 1, H, W] as `vae.decode` does, without the maps that it keeps for a next frame.

    They are half of its memory, 6 of 12 GiB for an image of 1024 px; the pixels are the same bits.
    """
    pixels: Tensor = vae.decoder(vae.post_quant_conv(frame), first_chunk=True)
    return pixels.clamp(-1.0, 1.0)


def _texts_alone(pipeline: Any) -> None:
    """Let the pipeline read texts with the language model alone, and draw pictures without opacity."""
    decode = pipeline.vae.decode
    holds_itself(pipeline, "model")
    pipeline.vae.decode = lambda *args, **options: [
        each[:, :3] for each in decode(*args, **options)
    ]


def turbo_sigmas(facts: BaseFacts, steps: int) -> Sequence[float] | None:
    """Return the noise levels of a distilled base, between those it was distilled to for another number of steps."""
    if not facts.release.distilled:
        return None
    import numpy as np

    known = [*TURBO_SIGMAS, 0.0]
    places = np.linspace(0, len(TURBO_SIGMAS), steps, endpoint=False)
    return [float(level) for level in np.interp(places, range(len(known)), known)]


class QwenImage21(FlowFamily):
    """The family of Qwen-Image 2.1 (Qwen team 2026) and its fine-tunes."""

    name = "qwen21"
    text = encoders(
        text_network("qwen3vl_8b"),
        encoder=Qwen21Encoder,
        unread=(*QWEN3_VL_HEAD, *QWEN3_VL_LAST_NORM),
        sight=QWEN3_VL_SIGHT,
        inner=QWEN3_VL_INNER,
        seeing=QWEN3_VL_SEEING,
        width="context_in_dim",
        masked=True,
        one_length=True,
        tokenizers={"text_encoder": "processor"},
    )
    traits = TransformerTraits(
        class_name="QwenImage21Transformer2DModel",
        patch=1,
        endings=target_endings(
            tuple(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
            transformer=tuple(f"img_mlp.{name}" for name in ("gate_layer", "proj", "out")),
        ),
        # Turbo is drawn with noise levels of its own; SimpleTuner shifts by the image's size.
        shifts_by_tokens=True,
        vae_peak=OpaqueLatents.vae_peak,
    )
    pipeline = PipelineTraits(
        class_name="QwenImage21Pipeline",
        text_arguments={"text": "prompt_embeds", "text_mask": "prompt_embeds_mask"},
        scale_argument="true_cfg_scale",
        states=lambda facts: {"sample_sigmas": None},
        sigmas=turbo_sigmas,
        processor=text_processor,
        mend=_texts_alone,
    )
    formats = AdapterFormats(
        names=AdapterNames(kohya="qwen_image_2.1", modelspec="Qwen-Image-2.1/lora"),
        written=("comfyui", "diffusers"),
        refused={
            "kohya": "no program is known to read Qwen-Image 2.1 in it; use output.format=comfyui, which ComfyUI reads"
        },
        comfyui_prefix="diffusion_model.",
        # ComfyUI's files of the release have gate and up of the MLP as one layer.
        original=frozenset({"comfyui"}),
        unread={
            "comfyui": "diffusers reads the attention layers only under these names; output.format=diffusers has those "
            "it reads",
            "diffusers": "ComfyUI reads the attention layers only under these names, as its files join two layers of "
            "the MLP; output.format=comfyui has those it reads",
        },
    )
    latents = OpaqueLatents()

    # ---- facts

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        """Return whether a folder is distilled, which noise levels in the pipeline's index say."""
        text_config(layout.folder, kind="qwen3_vl")  # raises for another text encoder
        if layout.part_file("denoiser") is not None:
            return plain
        index = read_json(layout.folder / "model_index.json")
        return replace(plain, distilled=bool(index.get("sample_sigmas")))

    def as_distilled(
        self, release: BaseRelease, kind: str, *, steps: int = 0, is_file: bool = False
    ) -> BaseRelease:
        """Return it with the variant's name, and a single file with the scheduler of its release."""
        variant = "turbo" if kind else "base"
        told = replace(release, variant=variant)
        if is_file:
            scheduler = next(each for each in self.published if each.variant == variant).scheduler
            told = replace(told, scheduler={**told.scheduler, **scheduler})
        told = super().as_distilled(told, kind, steps=steps, is_file=is_file)
        own, released = told.architecture, self.published[0].architecture
        # The published assistant is of the published network.
        fits = all(own.get(key) == released[key] for key in SIZES)
        return told if fits else replace(told, assistant=None)

    # ---- networks

    def empty_denoiser(self, architecture: Mapping[str, Any]) -> nn.Module:
        network = super().empty_denoiser(architecture)
        attends: Any = network
        attends.set_attn_processor(_attention())
        return network

    # ---- training

    def references_of(self, release: BaseRelease) -> References | None:
        return REFERENCES

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        run = partial(_velocity, denoiser, image_places(conditioning))
        return in_one_length(run, noisy, timesteps, conditioning)


FAMILY = QwenImage21()


def _attention() -> Any:
    """Return diffusers' attention, which also takes the pieces before the noisy image as tensors of their lengths.

    Text and reference in turn. Where they are numbers, as the network's own `forward` gives them, compiled blocks would
    have code for one length of texts only.
    """
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21AttnProcessor

    class PieceAttention(QwenImage21AttnProcessor):  # type: ignore[misc]  # its methods have no annotations
        def __call__(
            self, attn: Any, hidden_states: Tensor, *args: Any, segments: Any = None, **options: Any
        ) -> Tensor:
            if segments and not isinstance(segments[0], tuple):
                pieces, segments, begin, is_text = segments, [], 0, True
                for piece in pieces:
                    end = begin + piece.shape[0]
                    segments.append((begin, end, is_text))
                    begin, is_text = end, not is_text
            attended: Tensor = super().__call__(
                attn, hidden_states, *args, segments=segments, **options
            )
            return attended

    return PieceAttention()


def _velocity(
    network: Any,
    places: Sequence[int],
    noisy: Tensor,
    timesteps: Tensor,
    text: Tensor,
    *references: Tensor,
) -> Tensor:
    """Run the network on texts of one length and the images in and behind them, as its own `forward` does.

    That one reads where images stand in the text from a mask, which costs a wait for the device in every step and
    cannot be traced; here each reference stands behind as many tokens of the text as `places` says, the noisy image
    behind all.
    """
    import torch

    images = (*references, noisy)
    stream, ends = _stream(network, places, text, images)
    first = ends[-1]
    # The row behind the samples' own is that of t = 0, which all but the noisy image is modulated with.
    times = torch.cat([timesteps / 1000, timesteps.new_zeros(1)]).to(stream.dtype)
    embedded = network.time_text_embed(times, stream)
    is_noisy = torch.arange(stream.shape[1], device=stream.device) >= first
    block_inputs = (
        network.modulation(embedded),
        _positions(network.pos_embed, places, text.shape[1], images),
        None,  # the mask of another attention kernel
        is_noisy,
        *(None, None, None),  # what a sampler caches
        [is_noisy[begin:end] for begin, end in pairwise(ends)],
    )
    for block in network.transformer_blocks:
        if network.gradient_checkpointing and torch.is_grad_enabled():
            stream = network._gradient_checkpointing_func(block, stream, *block_inputs)
        else:
            stream = block(stream, *block_inputs)
    velocity = network.proj_out(network.norm_out(stream, embedded, is_noisy)[:, first:])
    unpacked: Tensor = velocity.transpose(1, 2).unflatten(2, noisy.shape[-2:])
    return unpacked


def _stream(
    network: Any, places: Sequence[int], text: Tensor, images: Sequence[Tensor]
) -> tuple[Tensor, Sequence[int]]:
    """Return the embedded tokens of a text with its images, and the ends of its pieces before the last image, 0 first.

    What the stream is joined of is freed here.
    """
    import torch

    words = network.txt_in(text)
    pieces: list[Tensor] = []
    for (first, last), image in zip(pairwise((0, *places, text.shape[1])), images, strict=True):
        pieces += [words[:, first:last], network.img_in(image.flatten(2).transpose(1, 2))]
    ends = [0, *accumulate(piece.shape[1] for piece in pieces[:-1])]
    return torch.cat(pieces, dim=1), ends


def _positions(rope: Any, places: Sequence[int], tokens: int, images: Sequence[Tensor]) -> Tensor:
    """Return the rotations of each token of a text of `tokens` with its images, complex [tokens of all, channels / 2].

    Text counts along all three axes. An image stands still on the first, where the text before it ended, and has rows
    and columns around 0; behind it text goes on after as many positions as its longer side has. The tables end with the
    rotations of negative positions.
    """
    import torch

    device = images[0].device
    rope.freqs = [table.to(device) for table in rope.freqs]  # as its own `forward` does
    pieces, position = [], 0
    for (first, last), image in zip(pairwise((0, *places, tokens)), images, strict=True):
        text = torch.arange(position, position + last - first, device=device)
        position += last - first
        height, width = image.shape[-2:]
        grid = torch.cartesian_prod(
            torch.full((1,), position, device=device),
            torch.arange(height, device=device) - (height - height // 2),
            torch.arange(width, device=device) - (width - width // 2),
        )
        pieces += [text.expand(3, -1), grid.T]
        position += max(height, width)
    axes = torch.cat(pieces, dim=1)
    return torch.cat([table[each] for table, each in zip(rope.freqs, axes, strict=True)], dim=-1)


@contextmanager
def _inserted(
    network: nn.Module, references: Sequence[Tensor], places: Sequence[int]
) -> Iterator[None]:
    """Let the network's own `forward` read latents [1, C, h, w] within every text, as its pipeline gives them to it.

    That one takes no encoded prompts beside images, and would scale each image to 1 megapixel.
    """
    import torch

    def filled(tensor: Tensor, value: float) -> Tensor:
        """Return [B, tokens, ...] with a value at the places of references."""
        pieces = list(tensor.tensor_split(list(places), dim=1))
        for number, each in enumerate(references, start=1):
            count = each.shape[-2] * each.shape[-1] // IN_PLACE
            shape = (len(tensor), count, *tensor.shape[2:])
            pieces.insert(2 * number - 1, tensor.new_full(shape, value))
        return torch.cat(pieces, dim=1)

    def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        image, mask = named["hidden_states"], named["encoder_hidden_states_mask"]
        tokens = [each.flatten(2).transpose(1, 2).to(image) for each in references]
        shapes = [(1, *each.shape[-2:]) for each in references]
        changed = {
            "hidden_states": torch.cat(
                [*(each.expand(len(image), -1, -1) for each in tokens), image], dim=1
            ),
            "encoder_hidden_states": filled(named["encoder_hidden_states"], 0.0),
            "encoder_hidden_states_mask": None if mask is None else filled(mask, 1),
            "img_mask": filled(named["img_mask"], True),
            "img_shapes": [[*shapes, *row] for row in named["img_shapes"]],
        }
        return args, {**named, **changed}

    hook = network.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


REFERENCES = References(
    most=10,  # "up to 10 reference images", as the release's page says
    # Sides are multiples of 32 px in the pipeline: two tokens.
    tokens=2,
    seen_tokens=lambda size_px: AROUND_IMAGE,
    read_tokens=lambda size_px: AROUND_IMAGE + math.prod(size_px) // PLACE_PX**2,
    in_text=True,
    appended=_inserted,
)
