"""The settings of what goes in: the base model, and the images with their captions and caches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from lora_trainer.settings.declare import (
    MASKED,
    NO_REGULARISATION,
    NOT_EMBEDDED,
    TAGS_IN_ORDER,
    AutoCaptionTokens,
    AutoPixels,
    CaptionWords,
    EpochCount,
    Repeats,
    Section,
    Separator,
    Share,
    TagCount,
    setting,
)

CaptionLines = Literal["join", "one"]
OWN_FOLDER = "."
"""The name in `data.folders` of the pictures that lie in no subfolder."""


class BaseSettings(Section):
    model: str = setting(
        "auto",
        "base model: `embedded`, a diffusers folder or a Hub id; auto: by hardware",
        path=True,
    )
    revision: str | None = setting(
        None, "Hub branch, tag or commit of the base model", not_for=NOT_EMBEDDED
    )
    vae: str | None = setting(
        None, "another VAE: a .safetensors file or a folder with config.json", path=True
    )
    companion: str = setting(
        "auto",
        "diffusers folder or Hub id for what a single-file checkpoint lacks; auto: the family's release",
        not_for=NOT_EMBEDDED,
        path=True,
    )
    prediction: Literal["auto", "epsilon", "v_prediction", "flow"] = setting(
        "auto", "what the base predicts; auto: what its files say"
    )
    clip_skip: int = setting(
        1,
        "layer, from the last one, that Stable Diffusion 1 and 2 read text from; 2: as anime bases do",
        ge=1,
        le=12,
    )
    assistant: str | None = setting(
        None,
        "LoRA file that undoes a base's distillation while training; neither sampled nor exported",
        path=True,
    )


class FolderSettings(Section):
    """What one subfolder of the dataset has of its own; none of a field of `data`: as it is there."""

    repeats: Repeats | None = setting(None, "times each image is seen per epoch")
    weight: Annotated[float, Field(gt=0, le=100)] = setting(
        1.0, "factor on the loss of its images in training"
    )
    flip: bool | None = setting(None, "also train mirrored images")
    trigger: Annotated[str, Field(max_length=100)] | None = setting(
        None, "word put in front of captions that lack it; empty text: none"
    )
    caption_prefix: CaptionWords | None = setting(None, "text put in front of each caption")
    caption_suffix: CaptionWords | None = setting(None, "text put behind each caption")
    caption_lines: CaptionLines | None = setting(None, "several captions of a picture: join or one")
    wildcards: bool | None = setting(None, "read {a|b} in captions as one of these, drawn anew")
    shuffle_tags: bool | None = setting(None, "shuffle the comma-separated tags of a caption")
    keep_tokens: TagCount | None = setting(None, "leading tags that stay in place")
    keep_tokens_separator: Separator | None = setting(None, "mark around the tags to shuffle")
    secondary_separator: Separator | None = setting(None, "mark between tags that stay together")
    tag_dropout: Share | None = setting(None, "share of tags left out of a caption")
    caption_dropout: Share | None = setting(None, "share of samples with an empty caption")
    caption_dropout_every_epochs: EpochCount | None = setting(
        None, "every so many epochs all captions are empty; 0: never"
    )
    regularisation: bool = setting(
        False, "its images show others of the class, to keep it as it is; they get no trigger"
    )

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write only what is the folder's own: the rest would hide it in plans and run.json."""
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        return {name: value for name, value in handler(self).items() if value != defaults[name]}


class DataSettings(Section):
    resolution: AutoPixels = setting(
        "auto",
        "side of the square whose area every bucket has; auto: the base's own",
        unit="px",
        headline=True,
    )
    more_resolutions: tuple[Annotated[int, Field(ge=16, le=4096)], ...] = setting(
        (),
        "other resolutions: each sample is trained at one of all of them, drawn anew in every epoch",
        unit="px",
    )
    buckets: bool = setting(
        True, "keep aspect ratios by training in buckets; off: crop everything square"
    )
    max_aspect: float = setting(
        2.0,
        "longest bucket side over the shortest",
        ge=1.0,
        le=8.0,
        only_for={"data.buckets": (True,)},
    )
    repeats: Repeats = setting(
        1, "times each image is seen per epoch; `10_name` folders set their own"
    )
    flip: bool = setting(
        False, "also train mirrored images (bad for text, logos, asymmetric people)"
    )
    folders: dict[str, FolderSettings] = setting(
        {}, "settings of subfolders by name, `.` the dataset's own: {NAME: {repeats, weight, ...}}"
    )
    trigger: str | None = setting(
        None, "word put in front of captions that lack it", min_length=1, max_length=100
    )
    regularisation_dir: str | None = setting(
        None,
        "folder of images that show others of the class, trained along to keep it as it is",
        path=True,
        min_length=1,
    )
    regularisation_ratio: float = setting(
        1.0,
        "regularisation images for each image of an epoch, all of them in turn",
        gt=0.0,
        le=100.0,
        idle_with=NO_REGULARISATION,
    )
    class_word: str | None = setting(
        None,
        "word that stands for the trigger where the class is to stay as it is, such as `woman`",
        min_length=1,
        max_length=100,
        not_for={"objective.preservation_weight": (0.0,)},
    )
    caption_extensions: tuple[str, ...] = setting(
        (".txt", ".caption"), "caption files beside the image, first wins"
    )
    caption_lines: CaptionLines = setting(
        "join", "several captions of a picture (lines of the file): joined, or one drawn anew"
    )
    caption_prefix: CaptionWords = setting(
        "", "text put in front of each caption; the trigger stands before it"
    )
    caption_suffix: CaptionWords = setting("", "text put behind each caption")
    wildcards: bool = setting(False, "read {a|b} in captions as one of these, drawn anew")
    shuffle_tags: bool = setting(False, "shuffle the comma-separated tags of a caption")
    keep_tokens: TagCount = setting(
        1, "leading tags neither shuffled nor left out, the trigger too", idle_with=TAGS_IN_ORDER
    )
    keep_tokens_separator: Separator | None = setting(
        None,
        "mark, as |||, after fixed tags and before fixed ones at the end; replaces keep_tokens",
    )
    secondary_separator: Separator | None = setting(
        None, "mark, as ;;;, between tags that are shuffled and left out together"
    )
    tag_dropout: Share = setting(0.0, "share of tags left out of a caption; kept ones never are")
    caption_dropout: Share = setting(0.0, "share of samples trained with an empty caption")
    caption_dropout_every_epochs: EpochCount = setting(
        0, "every so many epochs all captions are empty; 0: never"
    )
    caption_variants: int = setting(
        4,
        "texts encoded per caption where a rule draws them anew",
        ge=1,
        le=64,
        idle_with={**TAGS_IN_ORDER, "data.wildcards": (False,)},
    )
    caption_tokens: AutoCaptionTokens = setting(
        "auto",
        "tokens of a caption that CLIP alone reads, in chunks of 75; auto: what the longest needs",
    )
    emphasis: bool = setting(
        False, "read (word:1.2), (word), [word] as weights of words; CLIP text encoders only"
    )
    validation_fraction: float = setting(
        0.1,
        "share of images held out for the validation loss, rounded down; 0: none",
        ge=0.0,
        le=0.5,
    )
    alpha_background: str = setting(
        "white", "colour put behind transparent images: a CSS name or #rrggbb"
    )
    masks: Literal["none", "files", "alpha"] = setting(
        "none",
        "where the loss counts: `NAME-masklabel.png` or `masks/NAME.png`, or opaque parts of pictures",
    )
    mask_background: float = setting(
        0.1,
        "weight of what is black in a mask or transparent; 0: it may become anything",
        ge=0.0,
        lt=1.0,
        only_for=MASKED,
    )
    min_score: float = setting(
        0.8,
        "score of `check` below which a training warns, and --strict refuses; 0: never",
        ge=0.0,
        le=1.0,
    )
    max_bad_fraction: float = setting(
        0.1, "share of unusable images above which the run refuses", ge=0.0, le=1.0
    )
    max_megapixels: float = setting(
        100.0, "larger images are refused from their header", unit="MP", gt=0, le=1000
    )
    cache_dir: str = setting(
        "auto", "cache of latents and text embeddings; auto: the user's cache folder", path=True
    )
    cache_max_gib: float = setting(20.0, "size cap of the cache", unit="GiB", gt=0, le=100_000)
    prefetch_steps: int = setting(4, "optimizer steps prepared ahead of the device", ge=1, le=64)

    def of_folder(self, name: str) -> DataSettings:
        """Return the settings of the pictures in a subfolder, `.` those in none."""
        own = self.folders.get(name)
        if own is None:
            return self
        values = {key: value for key, value in own if key in type(self).model_fields}
        given = {key: value for key, value in values.items() if value is not None}
        return self.model_copy(update={**given, "trigger": None} if own.regularisation else given)

    @property
    def has_regularisation(self) -> bool:
        """Whether some images are there to keep the class as it is."""
        marked = any(map(self.is_regularisation, self.folders))
        return marked or self.regularisation_dir is not None

    def is_regularisation(self, folder: str) -> bool:
        """Say whether the pictures in a subfolder are there to keep the class as it is."""
        own = self.folders.get(folder)
        return own is not None and own.regularisation

    @property
    def triggers(self) -> tuple[str, ...]:
        """The words put in front of captions, each once."""
        words = (self.trigger, *(own.trigger for own in self.folders.values()))
        return tuple(dict.fromkeys(word.strip() for word in words if word and word.strip()))

    def weight_of(self, folder: str) -> float:
        """Return the factor on the loss of the pictures in a subfolder."""
        own = self.folders.get(folder)
        return 1.0 if own is None else own.weight
