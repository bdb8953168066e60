"""The settings of the inputs: the base model, and the images with their captions and caches."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, Self

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer

from lora_trainer.config.declare import (
    CHUNK_TOKENS,
    A_co,
    Auto,
    BelowOne,
    Factor,
    Needs,
    Section,
    Share,
    Word,
    setting,
)

Pixels = Annotated[int, Field(ge=16, le=4096)]
AutoCaptionTokens = (
    Annotated[int, Field(ge=CHUNK_TOKENS, le=3 * CHUNK_TOKENS, multiple_of=CHUNK_TOKENS)] | Auto
)
Repeats = Annotated[int, Field(ge=1, le=1000)]
TagCount = Annotated[int, Field(ge=0, le=50)]
EpochCount = Annotated[int, Field(ge=0, le=10_000)]
Separator = Annotated[str, Field(min_length=1, max_length=20)]
CaptionWords = Annotated[str, Field(max_length=1000)]
SystemPrompt = Annotated[str, Field(max_length=1000)]
CaptionLines = Literal["join", "one"]
NO_ASSISTANT = "none"
# Runs of releases before the word have null.
Assistant = Annotated[str, BeforeValidator(lambda value: NO_ASSISTANT if value is None else value)]
# The key in `data.folders` of the images directly in the dataset folder.
OWN_FOLDER = "."
NO_FOLDERS: Needs = {"data.folders": ({},)}
TAGS_IN_ORDER: Needs = {"data.shuffle_tags": (False,), "data.tag_dropout": (0.0,), **NO_FOLDERS}
MASKED = {"data.masks": ("files", "alpha")}
NO_REGULARISATION: Needs = {"data.regularisation_dir": (None,), **NO_FOLDERS}
# The base models that come along; the second edits, and is for pairs of images.
EMBEDDED, EMBEDDED_EDIT = "embedded", "embedded-edit"
MINIATURES = (EMBEDDED, EMBEDDED_EDIT)
NOT_EMBEDDED = {"base.model": MINIATURES}


class BaseSettings(Section):
    model: str = setting(
        "auto",
        "base model: `embedded`, `embedded-edit`, a checkpoint, a diffusers folder, a Hub id; auto by machine",
        path=True,
        hub=True,
        replans=True,
    )
    revision: str | None = setting(
        None, "Hub branch, tag or commit of the base model", not_for=NOT_EMBEDDED, replans=True
    )
    vae: str | None = setting(
        None,
        "another VAE: a .safetensors file or a folder with config.json",
        path=True,
        replans=True,
    )
    text_encoders: tuple[str, ...] = setting(
        (),
        "files of single text encoders, in any order; their tensors say which is which",
        path=True,
        replans=True,
    )
    companion: str = setting(
        "auto",
        "diffusers folder or Hub id with the parts that a checkpoint lacks; auto: the family's release",
        not_for=NOT_EMBEDDED,
        path=True,
        hub=True,
        replans=True,
    )
    prediction: Literal["auto", "epsilon", "v_prediction", "flow"] = setting(
        "auto", "prediction type of the base; auto: read from its files", replans=True
    )
    distilled: bool | Auto = setting(
        "auto",
        "the base draws in few steps (Turbo, Lightning, LCM, DMD...); auto: by its files and its name",
        replans=True,
    )
    clip_skip: Annotated[int, Field(ge=1, le=12)] = setting(
        1,
        "text encoder layer, from the last, for Stable Diffusion 1 and 2; 2 is usual for anime bases",
        replans=True,
    )
    system_prompt: SystemPrompt = setting(
        "auto",
        "sentence put before every prompt, for Lumina 2; auto: the base's own, by its name; empty: none",
        replans=True,
    )
    assistant: Assistant = setting(
        "auto",
        "LoRA that undoes a distillation in training: a file, Hub id or none; auto: the one published",
        path=True,
        hub=True,
        replans=True,
    )


class FolderSettings(Section):
    """Settings of one subfolder of the dataset; None: the value of the field in `data`."""

    repeats: Repeats | None = setting(None, "number of times each image is used per epoch")
    weight: Factor = setting(1.0, "factor on the loss of its images in training")
    flip: bool | None = setting(None, "also train mirrored images")
    trigger: Annotated[str, Field(max_length=100)] | None = setting(
        None, "word put before captions that lack it; empty text: no word"
    )
    caption_prefix: CaptionWords | None = setting(None, "text put before each caption")
    caption_suffix: CaptionWords | None = setting(None, "text put after each caption")
    caption_lines: CaptionLines | None = setting(None, "several captions of an image: join or one")
    wildcards: bool | None = setting(None, "replace {a|b} in captions by a or b at random")
    shuffle_tags: bool | None = setting(None, "shuffle the comma-separated tags of a caption")
    keep_tokens: TagCount | None = setting(None, "leading tags that stay in place")
    keep_tokens_separator: Separator | None = setting(None, "mark around the tags to shuffle")
    secondary_separator: Separator | None = setting(None, "mark between tags that stay together")
    tag_dropout: Share | None = setting(None, "fraction of tags left out of a caption")
    caption_dropout: Share | None = setting(None, "fraction of samples with an empty caption")
    caption_dropout_every_epochs: EpochCount | None = setting(
        None, "leave out all captions in every n-th epoch; 0: never"
    )
    regularisation: bool = setting(
        False, "regularisation images: others of the class, which should not change; no trigger"
    )

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write only values that differ from the defaults: plans and run.json stay readable."""
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        return {name: value for name, value in handler(self).items() if value != defaults[name]}


class DataSettings(Section, Generic[A_co]):
    resolution: Pixels | A_co = setting(
        "auto",
        "side of a square with the area of every bucket; auto: the base's native size",
        unit="px",
        headline=True,
        replans=True,
    )
    more_resolutions: tuple[Pixels, ...] = setting(
        (),
        "further resolutions; each sample uses one of all resolutions, drawn at random in each epoch",
        unit="px",
        replans=True,
    )
    buckets: bool = setting(
        True,
        "keep aspect ratios by training in buckets; off: crop everything square",
        kohya=("ss_enable_bucket",),
    )
    max_aspect: Annotated[float, Field(ge=1.0, le=8.0)] = setting(
        2.0, "longest bucket side over the shortest", only_for={"data.buckets": (True,)}
    )
    repeats: Repeats = setting(
        1, "number of times each image is used per epoch; `10_name` folders set their own"
    )
    flip: bool = setting(
        False,
        "also train mirrored images (bad for text, logos, asymmetric people)",
        kohya=("ss_flip_aug",),
    )
    folders: dict[str, FolderSettings] = setting(
        {}, "settings of subfolders, {NAME: {repeats, weight, ...}}; `.`: images in no subfolder"
    )
    trigger: Word | None = setting(None, "word put before captions that lack it")
    regularisation_dir: str | None = setting(
        None,
        "folder of regularisation images: others of the class, so that training does not change them",
        path=True,
        min_length=1,
    )
    regularisation_ratio: Factor = setting(
        1.0,
        "regularisation images per image of an epoch, taken in turn",
        idle_with=NO_REGULARISATION,
    )
    class_word: Word | None = setting(
        None,
        "word that replaces the trigger in preservation samples, such as `woman`",
        not_for={"objective.preservation_weight": (0.0,)},
    )
    caption_extensions: tuple[str, ...] = setting(
        (".txt", ".caption"),
        "extensions of caption files beside an image; the first that exists wins",
    )
    caption_fallback: Literal["none", "metadata", "file_name"] = setting(
        "none",
        "captions of images without any: text inside the image (PNG, EXIF), or its file name",
    )
    caption_lines: CaptionLines = setting(
        "join", "several lines in a caption file: join them, or draw one line at random"
    )
    caption_prefix: CaptionWords = setting("", "text put before each caption, after the trigger")
    caption_suffix: CaptionWords = setting("", "text put after each caption")
    wildcards: bool = setting(False, "replace {a|b} in captions by a or b at random")
    shuffle_tags: bool = setting(
        False, "shuffle the comma-separated tags of a caption", kohya=("ss_shuffle_caption",)
    )
    keep_tokens: TagCount = setting(
        1,
        "leading tags never shuffled or left out, the trigger included",
        idle_with=TAGS_IN_ORDER,
        kohya=("ss_keep_tokens",),
    )
    keep_tokens_separator: Separator | None = setting(
        None,
        "mark such as ||| after fixed leading tags and before fixed last tags; replaces keep_tokens",
    )
    secondary_separator: Separator | None = setting(
        None, "mark such as ;;; between tags that are shuffled and left out together"
    )
    tag_dropout: Share = setting(
        0.0,
        "fraction of tags left out of a caption, fixed tags excepted",
        kohya=("ss_caption_tag_dropout_rate",),
    )
    caption_dropout: Share = setting(
        0.0, "fraction of samples trained with an empty caption", kohya=("ss_caption_dropout_rate",)
    )
    caption_dropout_every_epochs: EpochCount = setting(
        0,
        "leave out all captions in every n-th epoch; 0: never",
        kohya=("ss_caption_dropout_every_n_epochs",),
    )
    caption_variants: Annotated[int, Field(ge=1, le=64)] = setting(
        4,
        "texts encoded per caption where shuffling, dropout or wildcards change it at random",
        idle_with={**TAGS_IN_ORDER, "data.wildcards": (False,)},
    )
    caption_tokens: AutoCaptionTokens = setting(
        "auto",
        "token limit of captions for CLIP families, in chunks of 75; auto: enough for the longest",
    )
    emphasis: bool = setting(
        False, "read (word:1.2), (word), [word] as prompt weights; CLIP text encoders only"
    )
    validation_fraction: Annotated[float, Field(ge=0.0, le=0.5)] = setting(
        0.1,
        "fraction of images held out for the validation loss, rounded down; 0: none",
        kohya=("ss_validation_split",),
    )
    alpha_background: str = setting(
        "white", "background colour of transparent images: a CSS name or #rrggbb"
    )
    masks: Literal["none", "files", "alpha"] = setting(
        "none",
        "region of the loss: `NAME-masklabel.png` or `masks/NAME.png` (files), or opaque pixels (alpha)",
    )
    references: Literal["files", "none"] = setting(
        "files",
        "reference images of editing pairs: `references/NAME.png`, `references_2/NAME.png`; none: not read",
    )
    reference_dirs: tuple[str, ...] = setting(
        (),
        "folders of reference images elsewhere, in the order of the references; files named as the images",
        path=True,
    )
    reference_dropout: Share = setting(
        0.0,
        "fraction of samples trained without their reference images",
        not_for={"data.references": ("none",)},
    )
    reference_resolution: Pixels | None = setting(
        None,
        "side of a square with the area that reference images are scaled down to; none: data.resolution",
        unit="px",
        replans=True,
        not_for={"data.references": ("none",)},
    )
    mask_background: BelowOne = setting(
        0.1,
        "loss weight of black or transparent regions; 0: training ignores them",
        only_for=MASKED,
    )
    min_score: Share = setting(
        0.8,
        "score of `check` below which training warns and --strict refuses to start; 0: never",
        resume="free",
    )
    max_bad_fraction: Share = setting(
        0.1, "fraction of unusable images above which the run refuses to start", resume="free"
    )
    max_megapixels: Annotated[float, Field(gt=0, le=1000)] = setting(
        100.0, "larger images are refused before they are decoded", unit="MP", resume="free"
    )
    cache_dir: str = setting(
        "auto",
        "cache of latents and text embeddings; auto: the user's cache folder",
        path=True,
        resume="free",
    )
    cache_max_gib: Annotated[float, Field(gt=0, le=100_000)] = setting(
        20.0, "size cap of the cache", unit="GiB", resume="free"
    )
    prefetch_steps: Annotated[int, Field(ge=1, le=64)] = setting(
        4, "optimizer steps prepared ahead of the device", resume="free"
    )

    def of_folder(self, name: str) -> Self:
        """Return the settings of the images in a subfolder; `.`: images directly in the dataset folder."""
        folder = self._folder(name)
        if folder is None:
            return self
        values = {key: value for key, value in folder if key in type(self).model_fields}
        overrides = {key: value for key, value in values.items() if value is not None}
        return self.model_copy(
            update={**overrides, "trigger": None} if folder.regularisation else overrides
        )

    @property
    def has_regularisation(self) -> bool:
        """Whether the dataset has regularisation images."""
        marked = any(map(self.is_regularisation, self.folders))
        return marked or self.regularisation_dir is not None

    def is_regularisation(self, folder: str) -> bool:
        """Return whether the images in a subfolder are regularisation images."""
        settings = self._folder(folder)
        return settings is not None and settings.regularisation

    @property
    def triggers(self) -> tuple[str, ...]:
        """The trigger words of the dataset and its folders, without repetition."""
        words = (self.trigger, *(folder.trigger for folder in self.folders.values()))
        return tuple(dict.fromkeys(word.strip() for word in words if word and word.strip()))

    def weight_of(self, folder: str) -> float:
        """Return the factor on the loss of the images in a subfolder."""
        settings = self._folder(folder)
        return 1.0 if settings is None else settings.weight

    def _folder(self, name: str) -> FolderSettings | None:
        """Return the settings of a subfolder, or of the folder around it (`reg` for `reg/1_cat`)."""
        while name and name not in self.folders:
            name = name.rpartition("/")[0]
        return self.folders.get(name)
