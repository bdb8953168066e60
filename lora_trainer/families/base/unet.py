"""The base class of the U-Net families: folders and checkpoints, noise levels, names.

The time and size embeddings and the first and last convolution never get an adapter: they hold few
weights, and a small change of them disturbs every image.

A family states its pipeline and its CLIP encoders, and overrides the members that differ. A base is a
diffusers folder with `unet`, `vae`, `scheduler` and CLIP text encoders, each part replaceable by a file
(`Layout`). Prediction type and noise levels come from the facts, so an override of the facts reaches
training, samples and plain pipelines.

A U-Net with twice the input channels edits: the others are the latents of one reference, as in InstructPix2Pix
(Brooks et al. 2023, arXiv 2211.09800), whose pipeline takes them as the VAE makes them, without its scaling factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.facts import (
    Assumption,
    BaseFacts,
    BaseRelease,
    Conditioning,
    Prediction,
)
from lora_trainer.families.base.family import AdapterTargets, Family
from lora_trainer.families.base.layout import Header, Layout, WeightPlace
from lora_trainer.families.base.references import References, references_in
from lora_trainer.families.base.releases import text_layers
from lora_trainer.families.base.stated import V_MARKER, Stated
from lora_trainer.families.base.text import clip
from lora_trainer.families.base.traits import (
    AdapterFormats,
    NetworkTraits,
    OtherNames,
    PipelineTraits,
)
from lora_trainer.families.base.unet_numbers import DEFAULTS, UNET_CLASS
from lora_trainer.families.files import base_parts, unet_file

if TYPE_CHECKING:
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

    pipeline = PipelineTraits(
        class_name="StableDiffusionPipeline",
        absent={
            "safety_checker": None,
            "feature_extractor": None,
            "requires_safety_checker": False,
        },
    )
    traits = NetworkTraits(
        class_name=UNET_CLASS,
        folder="unet",
        endings={"attention": ATTENTION, "transformer": TRANSFORMER, "all": CONVOLUTION},
        patch=1,
        precisions=("bf16", "fp16", "fp32"),
        block_pattern=r".*?\.transformer_blocks\.\d+(?=\.)",
        # 1-3 % of the weights, and the only way of the timestep into a resnet.
        quantization_skip=("time_emb_proj",),
    )
    formats = AdapterFormats(
        written=("kohya", "diffusers"),
        refused={
            "comfyui": "ComfyUI reads kohya's names for U-Net families, and so does everything else; use kohya"
        },
        unread={
            "diffusers": "ComfyUI and Forge lose all attention layers of a file with these names, two thirds of it, "
            "and A1111, InvokeAI and sd-scripts read none of it; output.format=kohya is read by all of them"
        },
    )

    editor = "StableDiffusionInstructPix2PixPipeline"
    """diffusers' pipeline of a U-Net that edits."""

    # ---- facts

    @property
    def edits(self) -> bool:
        return True  # bases of users, made from any of its releases

    def references_of(self, release: BaseRelease) -> References | None:
        channels = base_parts.config_value(release.vae, "latent_channels", int)
        if release.architecture.get("in_channels") != 2 * channels:
            return None
        return References(
            most=1,
            least=1,
            as_channels=True,
            scale=1 / float(release.vae.get("scaling_factor", unet_file.DEFAULT_SCALE)),
            pipeline=self.editor,
        )

    def detect(self, folder: Path) -> bool:
        classes = base_parts.components(folder)
        encoders = {name for name in classes if name.startswith("text_encoder")}
        if "unet" not in classes or encoders != self.text.networks.keys():
            return False
        config = base_parts.read_json(folder / "unet" / "config.json")
        return _kind(config) == _kind(self.published[0].architecture)

    def facts_of(
        self, release: BaseRelease, *, source: str, layout: Layout | None = None
    ) -> BaseFacts:
        facts = super().facts_of(release, source=source, layout=layout)
        # sample_size is the side of the latents: 64 in SD 1, 96 in SD 2.1, 128 in SDXL. Each level but the
        # last halves the latents, and the way up must meet the same sizes again.
        levels = len(base_parts.config_value(release.architecture, "block_out_channels", list))
        native_side = base_parts.config_value(release.architecture, "sample_size", int)
        layers = unet_file.clip_sizes(layout, "text_encoder", self.text)["layers"]
        return replace(
            facts,
            resolution_px=native_side * facts.vae_factor,
            bucket_step_px=facts.vae_factor * 2 ** (levels - 1),
            # SDXL always reads the layer before the last, which 2 means in other programs.
            clip_skips={1: 1, 2: 1}
            if self.text.penultimate
            else {skip: skip for skip in range(1, layers + 1)},
        )

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        single, scheduler = layout.part_file("denoiser"), plain.scheduler
        if single is not None:
            # A file that edits has a companion that does not, or the reverse.
            channels = unet_file.input_channels(single)
            plain = replace(plain, architecture={**plain.architecture, "in_channels": channels})
            unet_file.check_unet_file(single, plain, self.published, folder=layout.folder)
        unet_file.check_vae(layout, plain.vae)
        text = base_parts.read_json(layout.folder / "text_encoder" / "config.json")
        described = replace(
            plain,
            max_tokens=base_parts.config_value(text, "max_position_embeddings", int),
            # The key is absent in the oldest releases.
            prediction=scheduler.get("prediction_type", "epsilon"),
            zero_terminal_snr=bool(scheduler.get("rescale_betas_zero_snr", False)),
        )
        if described.prediction not in ("epsilon", "v_prediction"):
            raise InputError(
                f"{layout.folder / 'scheduler'}: prediction_type={described.prediction!r}, allowed are epsilon "
                "and v_prediction",
                fix="use a base model that predicts epsilon or v_prediction",
            )
        return described

    def as_stated(self, release: BaseRelease, stated: Stated) -> BaseRelease:
        """Return it with the prediction type and the noise levels of a single file; a folder's scheduler has them."""
        if stated.file is not None:
            release = self._as_predicted(release, stated, stated.file)
        return super().as_stated(release, stated)

    def _as_predicted(self, release: BaseRelease, stated: Stated, file: Path) -> BaseRelease:
        said, measured = stated.predictions(), self.measured_prediction(file)
        prediction: Prediction = self.published[0].prediction
        if measured is not None:
            prediction = measured
        elif said:
            # Epsilon is the default that many programs write, velocity is written on purpose.
            prediction = "v_prediction" if "v_prediction" in said else said[0]
        told = replace(release, prediction=prediction, zero_terminal_snr=False)
        other = "epsilon" if prediction == "v_prediction" else "v_prediction"
        if prediction == "v_prediction" and stated.zero_terminal_snr():
            told = replace(told, zero_terminal_snr=True)
        if measured is None and len(said) > 1 and V_MARKER not in stated.markers:
            assumption = Assumption(
                sentence=f"name and metadata of {file.name} contradict each other about its prediction type: "
                f"{prediction} is assumed",
                advice=f"if that is wrong, use --set base.prediction={other}",
                key="base.prediction",
            )
            told = replace(told, assumed=(*told.assumed, assumption))
        if measured is None and not said and not stated.is_known(self.name):
            told = told.assuming(
                "its prediction type",
                prediction,
                key="base.prediction",
                other=other,
                name=file.name,
            )
        told = self._as_skipped(told, stated, file)
        has_levels = told.zero_terminal_snr or V_MARKER in stated.markers or measured is not None
        if prediction == "v_prediction" and said and not has_levels:
            told = told.assuming(
                "whether it has zero terminal SNR",
                "it has not",
                key="objective.zero_terminal_snr",
                other="true",
                name=file.name,
            )
        return told

    def _as_skipped(self, release: BaseRelease, stated: Stated, file: Path) -> BaseRelease:
        """Say which clip skip a file states: `base.clip_skip` is the user's, and 1 where it is not set."""
        skip = stated.clip_skip()
        if skip == 1 or self.text.penultimate:
            return release
        assumption = Assumption(
            sentence=f"the header of {file.name} states clip skip {skip}: 1 is used",
            advice=f"to train as it was trained, use --set base.clip_skip={skip}",
            key="base.clip_skip",
        )
        return replace(release, assumed=(*release.assumed, assumption))

    def measured_prediction(self, file: Path) -> Prediction | None:
        """Return the prediction type that a file's weights show, None where they show none."""
        return None

    def _count_text(self, layout: Layout, component: str, *, references: bool) -> int:
        single = layout.part_file("text_encoder")
        if single is None:
            return super()._count_text(layout, component, references=references)
        return unet_file.count_text(layout, component, self.text, single=single)

    def denoiser_names(self, header: Header) -> Mapping[str, str]:
        return unet_file.unet_names(header)

    def checkpoint_weights(self, header: Header) -> Mapping[str, WeightPlace]:
        return unet_file.weight_places(header, self.text.prefixes)

    def text_adapter_shapes(self, facts: BaseFacts) -> Mapping[str, Mapping[str, tuple[int, int]]]:
        shapes = {}
        for component, encoder in self.text.networks.items():
            sizes = unet_file.clip_sizes(facts.layout, component, self.text)
            unread = self.text.penultimate and "Projection" not in encoder.network
            layers = sizes["layers"] - (facts.clip_skip - 1) - unread
            trained = text_layers("clip", **{**sizes, "layers": layers}).items()
            shapes[component] = {
                name: (shape[1], shape[0])
                for name, shape in trained
                if name.startswith("encoder.") and name.endswith(clip.TARGETS)
            }
        return shapes

    # ---- training

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        import torch

        # Left out, a reference is black in InstructPix2Pix's training and guidance: zeros.
        wide = cast(Any, denoiser).config.in_channels == 2 * noisy.shape[1]
        if wide:
            references = references_in(conditioning) or [torch.zeros_like(noisy)]
            noisy = torch.cat([noisy, references[0].to(noisy.dtype)], dim=1)
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
            # Of an encoder that is read one layer before the last, the last layer gets a gradient through
            # `pooled` only.
            is_cut = self.text.penultimate and not hasattr(network, "text_projection")
            layers = cast(Any, network).config.num_hidden_layers
            unread = f"layers.{layers - 1}." if is_cut else "?"
            return [
                name
                for name, _ in network.named_modules()
                if "encoder.layers." in name and name.endswith(clip.TARGETS) and unread not in name
            ]
        return super().lora_targets(network, targets)

    # ---- files

    def layer_names(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherNames:
        return OtherNames(
            layers=unet_file.checkpoint_names(shapes, architecture=self.published[0].architecture)
        )


def _kind(architecture: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values that tell U-Nets of different families apart: other sizes may be a miniature base's.

    Broken widths are of no family.
    """
    config = {**DEFAULTS, **architecture}
    width, added = config["cross_attention_dim"], 0
    width = width[0] if isinstance(width, list) and width else width
    if config["addition_embed_type"] is not None:
        added = config["projection_class_embeddings_input_dim"]
    # Beside a vector of sizes the projections are SDXL's, which some folders do not state.
    linear = bool(config["use_linear_projection"] or added)
    are_whole = isinstance(width, int) and isinstance(added, int)
    # Twice as many edit.
    return (
        4 if config["in_channels"] == 8 else config["in_channels"],
        linear,
        bool(added),
        are_whole,
    )
