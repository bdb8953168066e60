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
from lora_trainer.families.base import (
    AUTOENCODER_KL,
    DENOISER,
    AdapterFormats,
    AdapterTargets,
    BaseFacts,
    BaseRelease,
    Conditioning,
    Family,
    FileFormat,
    Header,
    Layout,
    NetworkTraits,
    OtherNames,
    Part,
    PartFacts,
    Prediction,
    TextEncoder,
    TextInputs,
    WeightPlace,
)
from lora_trainer.families.base_files.base_folder import (
    components,
    level_count,
    part_file,
    part_files,
    part_folder,
    read_json,
    tokenizer_files,
    weights,
    whole_number,
)
from lora_trainer.families.base_files.network_files import holds_vae
from lora_trainer.families.base_files.unet_file import (
    V_PREDICTION,
    ZERO_TERMINAL_SNR,
    UNetTraits,
    clip_size,
    config_traits,
    count_text,
    count_unet,
    count_vae,
    elements,
    header_traits,
    load_unet,
    training_marks,
    unet_names,
    weight_places,
)
from lora_trainer.families.base_files.unet_layers import (
    UNET_CLASS,
    checkpoint_names,
    pooled_width,
    unet_numbers,
)
from lora_trainer.families.text import clip
from lora_trainer.families.text.text_layers import text_key, text_layers

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
            new_token_keys={part.component: part.embedding for part in self.texts},
        )

    # ---- to implement besides the members of `Family`

    @abstractmethod
    def owns(self, traits: UNetTraits) -> bool:
        """Return whether a U-Net with these traits is of this family."""

    # ---- facts

    def detect(self, folder: Path) -> bool:
        classes = components(folder)
        encoders = {name for name in classes if name.startswith("text_encoder")}
        if "unet" not in classes or encoders != {part.component for part in self.texts}:
            return False
        traits = config_traits(read_json(folder / "unet" / "config.json"))
        return traits is not None and self.owns(traits)

    def detect_file(self, header: Header) -> frozenset[Part]:
        traits = header_traits(header)
        if traits is None:
            # The VAEs of SD 1, SD 2 and SDXL have equal tensors; they differ in the scale, which no file
            # states. A VAE alone in its file therefore belongs to each of these families.
            alone = holds_vae(header, latent_channels=4, alone=True)
            return frozenset({"vae"} if alone else ())
        if not self.owns(traits):
            return frozenset()
        parts: set[Part] = {"denoiser"}
        if holds_vae(header, latent_channels=4):
            parts.add("vae")
        # With one of SDXL's two encoders missing, both come from the companion: the part is all or nothing.
        if all(any(name.startswith(part.checkpoint) for name in header) for part in self.texts):
            parts.add("text_encoder")
        return frozenset(parts)

    def sizes_px(self, architecture: Mapping[str, Any], vae_factor: int) -> tuple[int, int]:
        # sample_size is the side of the latents: 64 in SD 1, 96 in SD 2.1, 128 in SDXL. Each level but the
        # last halves the latents, and the way up must meet the same sizes again.
        step_px = vae_factor * 2 ** (level_count(architecture) - 1)
        return whole_number(architecture, "sample_size") * vae_factor, step_px

    def facts(self, layout: Layout, *, source: str) -> BaseFacts:
        # Files of other programs may leave the class out.
        config = read_json(part_folder(layout, "denoiser", "unet") / "config.json")
        unet = {"_class_name": UNET_CLASS, **config}
        vae = read_json(part_folder(layout, "vae", "vae") / "config.json")
        scheduler = read_json(layout.folder / "scheduler" / "scheduler_config.json")
        text = read_json(layout.folder / self.texts[0].component / "config.json")
        for part in self.texts:
            tokenizer_files(layout.folder / part.tokenizer)  # raises where there is none
        marks = training_marks(part_file(layout, "denoiser"))
        release = BaseRelease(
            ids=(source,),
            architecture=unet,
            vae=vae,
            scheduler=scheduler,
            parameters={
                "denoiser": count_unet(layout, unet, self.published),
                "vae": count_vae(layout, vae),
                "text_encoder": sum(count_text(layout, part) for part in self.texts),
            },
            max_tokens=whole_number(text, "max_position_embeddings"),
            prediction="v_prediction"
            if V_PREDICTION in marks
            else stated_prediction(scheduler, layout.folder),
            zero_terminal_snr=ZERO_TERMINAL_SNR in marks
            or bool(scheduler.get("rescale_betas_zero_snr", False)),
        )
        return self.facts_of(release, source=source, layout=layout)

    def clip_skips(self, layout: Layout | None) -> Mapping[int, int]:
        """Return by `base.clip_skip` the layer of the text encoder that it means, counted from the last (1)."""
        return {skip: skip for skip in range(1, clip_size(layout, self.texts[0]).layers + 1)}

    def facts_from_file(self, file: Path, header: Header) -> BaseFacts:
        facts, marks = next(iter(self.releases.values())), training_marks(file)
        denoiser = PartFacts(parameters=elements(header, unet_names(header).values()))
        return replace(
            facts,
            parts={**facts.parts, "denoiser": denoiser},
            prediction="v_prediction" if V_PREDICTION in marks else facts.prediction,
            zero_terminal_snr=facts.zero_terminal_snr or ZERO_TERMINAL_SNR in marks,
        )

    def parts(self, layout: Layout) -> Mapping[str, tuple[Path, ...]]:
        single = part_file(layout, "text_encoder")
        folders = [layout.folder / part.component for part in self.texts]
        tokenizers = [layout.folder / part.tokenizer for part in self.texts]
        return {
            "denoiser": part_files(
                part_folder(layout, "denoiser", "unet"), part_file(layout, "denoiser")
            ),
            "vae": part_files(part_folder(layout, "vae", "vae"), part_file(layout, "vae")),
            "text_encoder": (
                *((single,) if single else (file for each in folders for file in weights(each))),
                *(folder / "config.json" for folder in folders),
                *(file for folder in tokenizers for file in tokenizer_files(folder)),
            ),
        }

    def checkpoint_weights(self, header: Header) -> Mapping[str, WeightPlace]:
        return weight_places(header, self.texts)

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
        size = clip_size(facts.layout, part)
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
            network = self.empty_denoiser(facts.architecture)
        load_unet(facts.located, network, dtype=dtype)
        return network.eval().requires_grad_(False).to(device)

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

    def lora_key_name(self, format: FileFormat, component: str, module: str) -> str:
        if component != DENOISER:
            number = 1 if len(self.texts) > 1 else ""
            return text_key(format, component, module, roles=self.text.roles, number=number)
        return f"lora_unet_{module}".replace(".", "_") if format == "kohya" else f"unet.{module}"

    def layer_names(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherNames:
        return OtherNames(
            layers=checkpoint_names(shapes, architecture=self.published[0].architecture)
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
