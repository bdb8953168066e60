"""The base class of the U-Net families: folders and checkpoints, noise levels, loading, names, sampling.

The time and size embeddings and the first and last convolution never get an adapter: they hold few
weights, and a small change of them disturbs every image.

A family states its pipeline, its CLIP encoders and the traits of its U-Net (`owns`), and overrides the
members that differ. A base is a diffusers folder with `unet`, `vae`, `scheduler` and CLIP text encoders,
each part replaceable by a file (`Layout`). Prediction type and noise levels come from the facts, so an
override of the facts reaches training, samples and plain pipelines.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import AdapterTargets, Family, TextEncoder
from lora_trainer.families.base_files import base_parts, unet_file
from lora_trainer.families.base_files.weight_files import AGAIN, read_header, read_tensors
from lora_trainer.families.facts import (
    AUTOENCODER_KL,
    UNET_CLASS,
    AdapterFormats,
    BaseFacts,
    Conditioning,
    Header,
    Layout,
    NetworkTraits,
    OtherNames,
    Part,
    Prediction,
    TextInputs,
    WeightPlace,
    pooled_width,
    unet_numbers,
)
from lora_trainer.families.releases import BaseRelease, text_layers
from lora_trainer.families.text import clip

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
# proj_in and proj_out are 1x1 convolutions in SD 1 and linear in SD 2 and SDXL (`use_linear_projection`).
TRANSFORMER = (*ATTENTION, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
CONVOLUTION = (
    *TRANSFORMER,
    "conv1",
    "conv2",
    "conv_shortcut",
    "time_emb_proj",
    "downsamplers.0.conv",
    "upsamplers.0.conv",
)


class UNetFamily(Family):
    """A family whose denoiser is a `UNet2DConditionModel` that predicts noise or velocity."""

    texts: tuple[clip.ClipPart, ...]
    """The CLIP encoders, in the order of the pipeline."""
    pipeline_class = "StableDiffusionPipeline"
    absent_components = {
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
    denoiser_class = UNET_CLASS
    denoiser_folder = "unet"
    endings = {"attention": ATTENTION, "transformer": TRANSFORMER, "all": CONVOLUTION}
    text_encoder_class: ClassVar[type[clip.ClipEncoder]] = clip.ClipEncoder
    formats = AdapterFormats(
        written=("kohya", "diffusers"),
        refused={
            "comfyui": "ComfyUI reads kohya's names for U-Net families, and so does everything else; use kohya"
        },
    )
    traits = NetworkTraits(
        precisions=("bf16", "fp16", "fp32"),
        block_pattern=r".*?\.transformer_blocks\.\d+(?=\.)",
        # 1-3 % of the weights, and the only way of the timestep into a resnet.
        quantization_skip=("time_emb_proj",),
        vae_peak=AUTOENCODER_KL,
    )

    @cached_property
    def text(self) -> TextInputs:  # type: ignore[override]  # follows from the encoders
        """Layers go up to the largest encoder's number, because miniature bases have other numbers."""
        return TextInputs(
            layers={
                part.component: text_layers(
                    "clip",
                    layers=clip.MAX_LAYERS,
                    width=part.released.width,
                    inner=part.released.inner,
                )
                for part in self.texts
            },
            roles={part.component: part.role for part in self.texts},
            multiple=1,
            one_length=False,
            encoder_files=False,
            trainable=True,
            prompt_weights=True,
            chunks=True,
            new_token_keys={
                part.component: part.role if len(self.texts) > 1 else "emb_params"
                for part in self.texts
            },
        )

    # ---- to implement besides the members of `Family`

    @abstractmethod
    def owns(self, traits: unet_file.UNetTraits) -> bool:
        """Return whether a U-Net with these traits is of this family."""

    # ---- facts

    def detect(self, folder: Path) -> bool:
        classes = base_parts.components(folder)
        encoders = {name for name in classes if name.startswith("text_encoder")}
        if "unet" not in classes or encoders != {part.component for part in self.texts}:
            return False
        traits = unet_file.config_traits(base_parts.read_json(folder / "unet" / "config.json"))
        return traits is not None and self.owns(traits)

    def detect_file(self, header: Header) -> frozenset[Part]:
        traits = unet_file.header_traits(header)
        if traits is None:
            # The VAEs of SD 1, SD 2 and SDXL have equal tensors; they differ in the scale, which no file
            # states. A VAE alone in its file therefore belongs to each of these families.
            alone = base_parts.holds_vae(header, latent_channels=4, alone=True)
            return frozenset({"vae"} if alone else ())
        if not self.owns(traits):
            return frozenset()
        parts: set[Part] = {"denoiser"}
        if base_parts.holds_vae(header, latent_channels=4):
            parts.add("vae")
        # With one of SDXL's two encoders missing, both come from the companion: the part is all or nothing.
        if all(any(name.startswith(part.checkpoint) for name in header) for part in self.texts):
            parts.add("text_encoder")
        return frozenset(parts)

    def sizes_px(self, architecture: Mapping[str, Any], vae_factor: int) -> tuple[int, int]:
        # sample_size is the side of the latents: 64 in SD 1, 96 in SD 2.1, 128 in SDXL. Each level but the
        # last halves the latents, and the way up must meet the same sizes again.
        step_px = vae_factor * 2 ** (base_parts.level_count(architecture) - 1)
        return base_parts.whole_number(architecture, "sample_size") * vae_factor, step_px

    def described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        single, scheduler = base_parts.part_file(layout, "denoiser"), plain.scheduler
        if single is not None:
            unet_file.check_unet_file(single, plain, self.published, folder=layout.folder)
        unet_file.check_vae(layout, plain.vae)
        text = base_parts.read_json(layout.folder / self.texts[0].component / "config.json")
        marks = unet_file.training_marks(single)
        return replace(
            plain,
            max_tokens=base_parts.whole_number(text, "max_position_embeddings"),
            prediction="v_prediction"
            if unet_file.V_PREDICTION in marks
            else stated_prediction(scheduler, layout.folder),
            zero_terminal_snr=unet_file.ZERO_TERMINAL_SNR in marks
            or bool(scheduler.get("rescale_betas_zero_snr", False)),
        )

    def count_denoiser(self, header: Header) -> int:
        return base_parts.elements(header, unet_file.unet_names(header).values())

    def count_texts(self, layout: Layout) -> int:
        return sum(unet_file.count_text(layout, part) for part in self.texts)

    def clip_skips(self, layout: Layout | None) -> Mapping[int, int]:
        """Return by `base.clip_skip` the layer of the text encoder that it means, counted from the last (1)."""
        return {
            skip: skip for skip in range(1, unet_file.clip_size(layout, self.texts[0]).layers + 1)
        }

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        release, marks = self.published[0], unet_file.training_marks(file)
        return replace(
            release,
            prediction="v_prediction" if unet_file.V_PREDICTION in marks else release.prediction,
            zero_terminal_snr=release.zero_terminal_snr or unet_file.ZERO_TERMINAL_SNR in marks,
        )

    def text_files(self, layout: Layout) -> tuple[Path, ...]:
        single = base_parts.part_file(layout, "text_encoder")
        folders = [layout.folder / part.component for part in self.texts]
        tokenizers = [layout.folder / part.tokenizer for part in self.texts]
        return (
            *(
                (single,)
                if single
                else (file for each in folders for file in base_parts.weights(each))
            ),
            *(folder / "config.json" for folder in folders),
            *(file for folder in tokenizers for file in base_parts.tokenizer_files(folder)),
        )

    def checkpoint_weights(self, header: Header) -> Mapping[str, WeightPlace]:
        return unet_file.weight_places(header, self.texts)

    # ---- costs

    def prompt_shapes(
        self, architecture: Mapping[str, Any], *, text_tokens: int
    ) -> Mapping[str, tuple[int, ...]]:
        unet = unet_numbers(architecture)
        text = {"text": (1, text_tokens, int(unet["cross_attention_dim"]))}
        pooled = pooled_width(unet)
        return {**text, "pooled": (1, pooled)} if pooled else text

    def text_adapter_shapes(self, facts: BaseFacts) -> Mapping[str, Mapping[str, tuple[int, int]]]:
        return {
            part.component: clip.target_shapes(self.trained_size(part, facts))
            for part in self.texts
        }

    def trained_size(self, part: clip.ClipPart, facts: BaseFacts) -> clip.ClipSize:
        """Return the size of a text encoder without its last layers that `clip_skip` drops."""
        size = unet_file.clip_size(facts.layout, part)
        return replace(size, layers=size.layers - (facts.clip_skip - 1))

    # ---- networks

    def load_text_encoder(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> TextEncoder:
        layout = facts.located
        return self.text_encoder_class(
            networks={
                part.component: clip.load_network(
                    layout, part, dtype=dtype, device=device, clip_skip=facts.clip_skip
                )
                for part in self.texts
            },
            tokenizers={
                part.component: clip.load_clip_tokenizer(layout.folder / part.tokenizer)
                for part in self.texts
            },
            chunks=_chunks(facts),
        )

    def load_denoiser(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        from accelerate import init_empty_weights

        with init_empty_weights():
            network: Any = self.empty_denoiser(facts.architecture)
        layout = facts.located
        tensors: dict[str, Tensor] = {}
        if single := base_parts.part_file(layout, "denoiser"):
            names = unet_file.unet_names(read_header(single))
            base_parts.load_denoiser_file(
                single, network, names, dtype=dtype, prefix=unet_file.UNET
            )
        else:
            folder = base_parts.part_folder(layout, "denoiser", "unet")
            # Read in pieces: a float32 base must not lie in memory beside its bf16 copy.
            for file in base_parts.weights(folder):
                own_names = {name: name for name in read_header(file)}
                tensors |= read_tensors(file, own_names, dtype=dtype)
            network._fix_state_dict_keys_on_load(tensors)  # attention has other names in old files
            ours = "its config.json"
            base_parts.fill(network, tensors, file=folder, part="denoiser", config=ours, fix=AGAIN)
        loaded: nn.Module = network.eval().requires_grad_(False).to(device)
        return loaded

    # ---- training

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        added = None
        # SDXL reads the pooled text and the sizes of the image too; its pipeline fills in a sample's own size.
        if "time_ids" in conditioning:
            added = {"text_embeds": conditioning["pooled"], "time_ids": conditioning["time_ids"]}
        prediction: Tensor = denoiser(
            noisy,
            timesteps,
            encoder_hidden_states=conditioning["text"],
            added_cond_kwargs=added,
            return_dict=False,
        )[0]
        return prediction

    def lora_targets(self, network: nn.Module, targets: AdapterTargets) -> list[str]:
        if targets == "text_encoder":
            return clip.text_targets(network)
        return super().lora_targets(network, targets)

    # ---- files

    def layer_names(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherNames:
        return OtherNames(
            layers=unet_file.checkpoint_names(shapes, architecture=self.published[0].architecture)
        )

    # ---- images

    def sampling_scheduler(self, facts: BaseFacts) -> Any:
        """Return the base's own sampler, or DDIM where the base's sampler cannot start from pure noise."""
        import diffusers

        # A base may name a scheduler that this diffusers does not have.
        kind: Any = getattr(
            diffusers, str(facts.scheduler.get("_class_name", "")), diffusers.DDIMScheduler
        )
        config = facts.scheduler_config()
        if "rescale_betas_zero_snr" not in kind._get_init_keys(kind):
            # A class without the parameter (PNDM, Stable Diffusion 1's) would warn and start from a level with
            # signal in it. DDIM can, and is the sampler of Lin et al. 2023 (arXiv 2305.08891).
            if facts.zero_terminal_snr:
                kind = diffusers.DDIMScheduler
            else:
                config.pop("rescale_betas_zero_snr")
        return kind.from_config(config)

    def pipeline_arguments(
        self,
        pipeline: Any,
        facts: BaseFacts,
        prompt: str,
        negative: str,
        *,
        guidance_scale: float,
    ) -> Mapping[str, Any]:
        """Return the pipeline's arguments; chunked prompts are encoded with the pipeline's own encoders."""
        if facts.chunks == 1:
            return super().pipeline_arguments(
                pipeline, facts, prompt, negative, guidance_scale=guidance_scale
            )
        encoder = self.text_encoder_class(
            networks={part.component: getattr(pipeline, part.component) for part in self.texts},
            tokenizers={part.component: getattr(pipeline, part.tokenizer) for part in self.texts},
            chunks=_chunks(facts),
        )
        first = getattr(pipeline, self.texts[0].tokenizer)
        texts = [
            {
                name: tensor.to(pipeline.device, pipeline.unet.dtype)
                for name, tensor in encoder.encode_prompts(
                    [pipeline.maybe_convert_prompt(text, first)]  # new words of several tokens
                ).items()
            }
            for text in (prompt, negative)
        ]
        return self.sampler_arguments(*texts, guidance_scale=guidance_scale)


def _chunks(facts: BaseFacts) -> clip.Chunks:
    return clip.Chunks(count=facts.chunks, width=facts.max_tokens)


def stated_prediction(scheduler: Mapping[str, Any], folder: Path) -> Prediction:
    """Return the prediction type in a scheduler's configuration; raises InputError for `sample`."""
    prediction = scheduler.get("prediction_type", "epsilon")  # absent in the oldest releases
    if prediction == "epsilon":
        return "epsilon"
    if prediction == "v_prediction":
        return "v_prediction"
    raise InputError(
        f"{folder / 'scheduler'}: prediction_type={prediction!r}, allowed are epsilon and v_prediction",
        fix="use a base model that predicts epsilon or v_prediction",
    )
