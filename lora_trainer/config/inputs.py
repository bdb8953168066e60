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
        "the model to train on: a file, a folder, a name on Hugging Face, or a small one that comes along",
        detail="`embedded` comes along, `embedded-edit` for pairs; auto: what suits the machine",
        path=True,
        hub=True,
        replans=True,
    )
    revision: str | None = setting(
        None,
        "version of the model on Hugging Face: a branch, tag or commit",
        not_for=NOT_EMBEDDED,
        replans=True,
    )
    vae: str | None = setting(
        None,
        "another VAE than the model's own: a .safetensors file or a folder with config.json",
        path=True,
        replans=True,
    )
    text_encoders: tuple[str, ...] = setting(
        (),
        "files of single text encoders, in any order; each is known by what is in it",
        path=True,
        replans=True,
    )
    companion: str = setting(
        "auto",
        "folder or Hugging Face name of parts that the model's file lacks; auto: the official ones",
        not_for=NOT_EMBEDDED,
        path=True,
        hub=True,
        replans=True,
    )
    prediction: Literal["auto", "epsilon", "v_prediction", "flow"] = setting(
        "auto",
        "what the model predicts: the noise, v or the flow; auto: read from its files",
        replans=True,
    )
    distilled: bool | Auto = setting(
        "auto",
        "whether the model draws in few steps (Turbo, Lightning, LCM, DMD ...); auto: by its name and files",
        replans=True,
    )
    clip_skip: Annotated[int, Field(ge=1, le=12)] = setting(
        1,
        "which layer of the text encoder is read, counted from the last; anime models mostly want 2",
        detail="For Stable Diffusion 1 and 2",
        replans=True,
    )
    system_prompt: SystemPrompt = setting(
        "auto",
        "sentence put before every prompt, for Lumina 2; auto: the model's own; empty: none",
        replans=True,
    )
    assistant: Assistant = setting(
        "auto",
        "LoRA that makes a few-step model trainable: a file, Hugging Face name or none; auto: the usual one",
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
        "size of training images: 1024 is 1024 x 1024 or another shape of that area; auto: the model's own",
        unit="px",
        headline=True,
        replans=True,
    )
    more_resolutions: tuple[Pixels, ...] = setting(
        (),
        "further sizes to train at; each time, an image takes one of all sizes at random",
        detail="Drawn anew in each epoch",
        unit="px",
        replans=True,
    )
    buckets: bool = setting(
        True,
        "keep the shape of each image; off: crop everything to a square",
        detail="Images of like shapes are trained together, in buckets",
        kohya=("ss_enable_bucket",),
    )
    max_aspect: Annotated[float, Field(ge=1.0, le=8.0)] = setting(
        2.0,
        "how long an image may be, longest side over shortest; longer ones are cropped",
        only_for={"data.buckets": (True,)},
    )
    repeats: Repeats = setting(
        1, "how often each image is used in an epoch; folders named like `10_name` set their own"
    )
    flip: bool = setting(
        False,
        "train mirrored images too; bad for text, logos and faces that are not symmetric",
        kohya=("ss_flip_aug",),
    )
    folders: dict[str, FolderSettings] = setting(
        {},
        "settings of single subfolders, as {NAME: {repeats, weight, ...}}; `.` is the folder itself",
    )
    trigger: Word | None = setting(
        None, "the word that calls your LoRA; it is put before captions that lack it"
    )
    regularisation_dir: str | None = setting(
        None,
        "folder of other images of the kind, such as other dogs, which shall stay as they are",
        path=True,
        min_length=1,
    )
    regularisation_ratio: Factor = setting(
        1.0,
        "regularisation images used for each image of yours",
        idle_with=NO_REGULARISATION,
    )
    class_word: Word | None = setting(
        None,
        "general word for what you train, such as `woman`, that shall keep its meaning",
        detail="It takes the place of the trigger word where the model's own prediction is kept",
        not_for={"objective.preservation_weight": (0.0,)},
    )
    caption_extensions: tuple[str, ...] = setting(
        (".txt", ".caption"),
        "endings of caption files beside the images; the first one found is used",
    )
    caption_fallback: Literal["none", "metadata", "file_name"] = setting(
        "none",
        "caption of an image that has none: text inside the image file, or its file name",
        detail="metadata: as PNG and EXIF have it",
    )
    caption_lines: CaptionLines = setting(
        "join", "several lines in a caption file: join them, or take one at random"
    )
    caption_prefix: CaptionWords = setting(
        "", "text put before each caption, behind the trigger word"
    )
    caption_suffix: CaptionWords = setting("", "text put after each caption")
    wildcards: bool = setting(False, "replace {a|b} in captions by a or b at random")
    shuffle_tags: bool = setting(
        False, "shuffle the comma-separated tags of a caption", kohya=("ss_shuffle_caption",)
    )
    keep_tokens: TagCount = setting(
        1,
        "how many first tags are never shuffled or left out, the trigger word included",
        idle_with=TAGS_IN_ORDER,
        kohya=("ss_keep_tokens",),
    )
    keep_tokens_separator: Separator | None = setting(
        None,
        "mark such as ||| behind the first tags and before the last ones that stay in place",
        detail="It replaces data.keep_tokens",
    )
    secondary_separator: Separator | None = setting(
        None, "mark such as ;;; between tags that are shuffled and left out together"
    )
    tag_dropout: Share = setting(
        0.0,
        "share of a caption's tags left out at random; fixed tags stay",
        kohya=("ss_caption_tag_dropout_rate",),
    )
    caption_dropout: Share = setting(
        0.0,
        "share of the images trained without their caption, at random",
        kohya=("ss_caption_dropout_rate",),
    )
    caption_dropout_every_epochs: EpochCount = setting(
        0,
        "leave out all captions in every n-th epoch; 0: never",
        kohya=("ss_caption_dropout_every_n_epochs",),
    )
    caption_variants: Annotated[int, Field(ge=1, le=64)] = setting(
        4,
        "how many versions of a caption are prepared, where something changes it at random",
        detail="By shuffling, dropout or wildcards",
        idle_with={**TAGS_IN_ORDER, "data.wildcards": (False,)},
    )
    caption_tokens: AutoCaptionTokens = setting(
        "auto",
        "longest caption in tokens, in chunks of 75, for CLIP models; auto: enough for your longest",
    )
    emphasis: bool = setting(
        False,
        "take (word:1.2), (word) and [word] in captions as stronger or weaker; CLIP models only",
    )
    validation_fraction: Annotated[float, Field(ge=0.0, le=0.5)] = setting(
        0.1,
        "share of the images kept aside to test the LoRA on; 0: none",
        detail="Rounded down",
        kohya=("ss_validation_split",),
    )
    alpha_background: str = setting(
        "white", "colour behind transparent images: a CSS name such as white, or #rrggbb"
    )
    masks: Literal["none", "files", "alpha"] = setting(
        "none",
        "which part of an image is learned: what masks show, or what is not transparent",
        detail="files: `NAME-masklabel.png` or `masks/NAME.png`; alpha: opaque pixels",
    )
    references: Literal["files", "none"] = setting(
        "files",
        "for pairs: what each image was before, from the folder `references`; none: not read",
        detail="`references/NAME.png`, `references_2/NAME.png` and so on",
    )
    reference_dirs: tuple[str, ...] = setting(
        (),
        "for pairs: folders elsewhere with what each image was before, under the same name",
        path=True,
    )
    reference_dropout: Share = setting(
        0.0,
        "for pairs: share trained without the image before, at random",
        not_for={"data.references": ("none",)},
    )
    reference_resolution: Pixels | None = setting(
        None,
        "for pairs: size that the images before are scaled down to; none: as the others",
        unit="px",
        replans=True,
        not_for={"data.references": ("none",)},
    )
    mask_background: BelowOne = setting(
        0.1,
        "how much the part outside of the mask counts; 0: it is not learned",
        only_for=MASKED,
    )
    min_score: Share = setting(
        0.8,
        "score of the images' check below which the training warns; 0: never",
        detail="With --strict it does not start",
        resume="free",
    )
    max_bad_fraction: Share = setting(
        0.1, "share of unusable images above which the training does not start", resume="free"
    )
    max_megapixels: Annotated[float, Field(gt=0, le=1000)] = setting(
        100.0, "larger images are refused before they are opened", unit="MP", resume="free"
    )
    cache_dir: str = setting(
        "auto",
        "folder for prepared images and captions; auto: your own cache folder",
        path=True,
        resume="free",
    )
    cache_max_gib: Annotated[float, Field(gt=0, le=100_000)] = setting(
        20.0, "disk space that prepared images and captions may take", unit="GiB", resume="free"
    )
    prefetch_steps: Annotated[int, Field(ge=1, le=64)] = setting(
        4, "steps that are prepared ahead, so that the GPU need not wait", resume="free"
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
