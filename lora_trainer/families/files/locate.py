"""Find a base model on this machine, in the Hub's cache or on the Hub, and read its facts.

A source is `embedded`, `embedded-edit`, a diffusers folder, a single-file checkpoint or a Hub id. `describe` uses no
network; `locate` may download. An unusable source raises here, before anything is cached. Torch-free: everything
follows from configs and headers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from lora_trainer import families
from lora_trainer.common.errors import InputError, MachineError, RequestError, first_line
from lora_trainer.common.files import user_path
from lora_trainer.common.memo import HashMemo
from lora_trainer.config.declare import CHUNK_TOKENS, Auto
from lora_trainer.config.inputs import EMBEDDED_EDIT, MINIATURES, BaseSettings
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.layout import Layout, Part
from lora_trainer.families.base.tables import family_table
from lora_trainer.families.files.base_parts import elsewhere, read_json
from lora_trainer.families.files.hub_files import (
    GGUF,
    SUFFIXES,
    OnBytes,
    cached_snapshot,
    checkpoint_in,
    fetch,
    unheard,
    wanted,
    wanted_base,
    wanted_companion,
)
from lora_trainer.families.files.single_files import (
    Checkpoint,
    encoder_files,
    known_release,
    open_checkpoint,
)
from lora_trainer.families.files.weight_files import (
    AGAIN,
    PICKLES,
    READABLE,
    read_header,
    refuse_quantised,
    require_gguf,
)

EMBEDDED_FOLDER = Path(__file__).resolve().parents[2] / "embedded"
# The miniature that edits has a U-Net of its own, and every other part of the other's.
EMBEDDED_UNETS = {EMBEDDED_EDIT: EMBEDDED_FOLDER.with_name("embedded_edit")}


def describe(settings: BaseSettings) -> BaseFacts:
    """Return facts of `settings.model` without downloading: from its files, or by name for well-known ids.

    Raises InputError for a source that cannot be a base and MachineError for one not on this machine.
    """
    source = settings.model
    layout, family, checkpoint = _find(settings)
    if layout is not None:
        return _facts(layout, family, source=source)
    if checkpoint is not None:
        return checkpoint.facts_alone()
    return known_release(source, name=f"base model {source!r}")


def locate(settings: BaseSettings, *, on_bytes: OnBytes = unheard) -> BaseFacts:
    """Return facts of `settings.model` on this machine, downloading missing files from the Hub.

    Raises InputError for an unusable source and MachineError when the Hub cannot be reached.
    """
    source = settings.model
    layout, family, _ = _find(settings)
    if layout is not None:
        # A cached repository that cannot be read is an interrupted download: finish it below.
        with suppress(InputError):
            return _facts(layout, family, source=source)
    layout, family, _ = _find(settings, on_bytes=on_bytes)
    assert layout is not None
    return _facts(layout, family, source=source)


def _facts(layout: Layout, family: Family | None, *, source: str) -> BaseFacts:
    """Return the facts of a base; raises InputError if a config lacks a value or has a wrong one."""
    try:
        if layout.part_file("denoiser") is None:
            _check_configurations(layout.folder, source=source)
        family = family or families.detect(layout.folder)
        return family.facts(layout, source=source)
    # A config.json may hold any JSON, and computing with its values can fail in any of these ways.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        detail = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise InputError(
            f"a config.json of base model {source} lacks a value or has a wrong one ({detail})",
            fix=AGAIN,
        ) from error


def with_choices(
    facts: BaseFacts, settings: BaseSettings, *, zero_terminal_snr: bool | Auto
) -> BaseFacts:
    """Return `facts` with the settings that override the files; raises RequestError for impossible ones."""
    release = facts.release
    prediction = release.prediction if settings.prediction == "auto" else settings.prediction
    zero = release.zero_terminal_snr if zero_terminal_snr == "auto" else zero_terminal_snr
    if (prediction == "flow") != (release.prediction == "flow"):
        raise RequestError(
            f"base.prediction={prediction}, but {facts.source} is of family {facts.family}",
            fix="leave base.prediction at auto",
        )
    if prediction == "flow" and zero:
        raise RequestError(
            f"objective.zero_terminal_snr does not apply to {facts.source}: flow matching starts at pure noise",
            fix="leave it at auto",
        )
    # Lin et al. 2023 (arXiv 2305.08891), section 3.2: at zero SNR the input is the noise that epsilon predicts.
    if zero and prediction == "epsilon":
        raise RequestError(
            "zero terminal SNR with epsilon prediction: pure noise says nothing about the image",
            fix="use --set base.prediction=v_prediction, or --set objective.zero_terminal_snr=false",
        )
    facts = facts.with_clip_skip(settings.clip_skip)
    facts = facts.with_system_prompt(settings.system_prompt)
    family = families.family(facts.family)
    if settings.distilled != "auto" and settings.distilled != release.distilled:
        is_file = facts.layout is None or facts.layout.part_file("denoiser") is not None
        kind = "few-step" if settings.distilled else ""
        release = family.as_distilled(release, kind, is_file=is_file)
        guidance = family.pipeline.guidance(release.architecture, release.distilled)
        facts = replace(facts, guidance=guidance)
    chosen = {
        "base.prediction": settings.prediction != "auto",
        "base.distilled": settings.distilled != "auto",
        "base.clip_skip": settings.clip_skip != 1,
        "objective.zero_terminal_snr": zero_terminal_snr != "auto",
    }
    release = replace(
        release,
        prediction=prediction,
        zero_terminal_snr=zero,
        assumed=tuple(each for each in release.assumed if not chosen[each.key]),
    )
    return replace(facts, release=release)


def with_caption_tokens(facts: BaseFacts, caption_tokens: int | Auto) -> BaseFacts:
    """Return `facts` with captions of as many chunks as `data.caption_tokens` needs; one for auto."""
    if caption_tokens == "auto" or not families.family(facts.family).text.chunks:
        return facts
    return replace(facts, chunks=caption_tokens // CHUNK_TOKENS)


def identified(facts: BaseFacts, memo: HashMemo) -> BaseFacts:
    """Return `facts` of a local base with the content hash of each part filled in."""
    parts = {}
    for name, files in families.family(facts.family).parts(facts.located).items():
        # The folder is left out of the hash: the same base in another place keeps its cache.
        joined = "\n".join(f"{path.name} {memo.sha256(path)}" for path in files)
        identity = hashlib.sha256(joined.encode()).hexdigest()
        parts[name] = replace(facts.parts[name], identity=identity)
    return replace(facts, parts=parts)


def _find(
    settings: BaseSettings, *, on_bytes: OnBytes | None = None
) -> tuple[Layout | None, Family | None, Checkpoint | None]:
    """Return the layout, None if not on this machine, the family if the files tell it, and a single file."""
    source = settings.model
    path = Path(user_path(source))
    if path.is_file() and path.suffix not in PICKLES:
        checkpoint = open_checkpoint(settings, path)
        return _find_beside(checkpoint, on_bytes=on_bytes), checkpoint.family, checkpoint
    folder = _folder(source, revision=settings.revision, on_bytes=on_bytes, kind="base")
    if folder is None:
        return None, None, None
    if (only := checkpoint_in(folder)) is not None:
        checkpoint = open_checkpoint(settings, only)
        return _find_beside(checkpoint, on_bytes=on_bytes), checkpoint.family, checkpoint
    files: dict[Part, Path] = {}
    if source in EMBEDDED_UNETS:
        files["denoiser"] = EMBEDDED_UNETS[source]
    if settings.vae is None and not settings.text_encoders:
        return Layout(folder=folder, files=files), None, None
    family = families.detect(folder)
    if settings.vae is not None:
        files["vae"] = _find_vae(settings, family, on_bytes=on_bytes)
    text = encoder_files(settings, family, {}, None, folder=folder)
    return Layout(folder=folder, files=files, text=text), family, None


def _find_beside(checkpoint: Checkpoint, *, on_bytes: OnBytes | None) -> Layout | None:
    """Return the layout of a checkpoint and its companion, None if that is not on this machine."""
    settings, family = checkpoint.settings, checkpoint.family
    files: dict[Part, Path] = dict.fromkeys(checkpoint.parts, checkpoint.file)
    if settings.vae is not None:
        files["vae"] = _find_vae(settings, family, on_bytes=on_bytes)
    folder = _companion_folder(checkpoint, on_bytes=on_bytes)
    if folder is None:
        return None
    companion_family = families.detect(folder)
    # Families are single instances of their modules.
    if companion_family is not family:
        raise InputError(
            f"base.companion {checkpoint.companion} is of family {companion_family.name}, "
            f"{checkpoint.file.name} is {family.name}",
            fix=f"name a {family.name} folder, or leave base.companion at auto",
        )
    # The folder may bring other widths, so the encoders are matched again now that it is known.
    text = checkpoint.encoders(folder=folder)
    if on_bytes is not None:
        for component_file in {*files.values(), *text.values()}:
            # A plan reads GGUF headers without the package gguf; a training
            # fails here, before anything is cached.
            if component_file.suffix == GGUF:
                require_gguf(component_file)
    return Layout(folder=folder, files=files, text=text)


def _companion_folder(checkpoint: Checkpoint, *, on_bytes: OnBytes | None) -> Path | None:
    """Return a checkpoint's companion folder: as made before, from the Hub's cache, or with `on_bytes` made now.

    The folder made before comes first: with another one of the same content a resume would find another
    text encoder.
    """
    settings = checkpoint.settings
    source, makeable = checkpoint.companion, checkpoint.open_companion
    if makeable is not None:
        if makeable.is_made():
            return makeable.folder
        return cached_snapshot(source, revision=None) if on_bytes is None else makeable.make()
    try:
        return _folder(
            source,
            revision=None,
            on_bytes=on_bytes,
            without=checkpoint.present,
            kind="default companion" if settings.companion == "auto" else "named companion",
        )
    except MachineError as error:
        if settings.companion != "auto" or (
            "companion" not in family_table(checkpoint.family.name)
        ):
            raise
        raise MachineError(
            error.found,
            fix=f"{error.fix}, or give its VAE and text encoders as files with base.vae and "
            "base.text_encoders",
        ) from None


def _find_vae(settings: BaseSettings, family: Family, *, on_bytes: OnBytes | None) -> Path:
    """Return the file or folder of `base.vae`; raises InputError when it holds no VAE for the family."""
    assert settings.vae is not None
    path = Path(user_path(settings.vae))
    if path.is_file() and path.suffix in SUFFIXES:
        header = read_header(path)
        refuse_quantised(path)
        if "vae" not in family.detect_file(header):
            raise InputError(
                f"base.vae {path.name} holds no VAE of family {family.name}",
                fix="give a VAE made for this base, as a folder if it is FLUX.2's, or leave base.vae out",
            )
        return path
    folder = _folder(settings.vae, revision=None, on_bytes=on_bytes, kind="vae")
    if folder is None:
        raise MachineError(
            f"base.vae {settings.vae} is not on this machine",
            fix="start the training once to download it, or give a local file",
        )
    inside = folder / "vae" if (folder / "vae" / "config.json").is_file() else folder
    if not (inside / "config.json").is_file():
        raise InputError(
            f"base.vae {settings.vae} has no config.json", fix="give a VAE folder or file"
        )
    return inside


def _folder(
    source: str,
    *,
    revision: str | None,
    on_bytes: OnBytes | None,
    without: frozenset[str] = frozenset(),
    kind: Literal["base", "default companion", "named companion", "vae"],
) -> Path | None:
    """Return the local folder of a source, None if it is not on this machine; with `on_bytes` download it.

    A source of the kind "base" may hold a checkpoint alone, which is then all that is downloaded; a VAE's has no index.
    """
    if source in MINIATURES:
        return EMBEDDED_FOLDER
    path = Path(user_path(source))
    if path.is_dir():
        return path
    if path.suffix in PICKLES:
        raise InputError(
            f"base model {path.name} is a pickle, which can run code when opened",
            fix="give the safetensors version",
        )
    if _is_path(source):
        raise InputError(
            f"base model {source!r} does not exist",
            fix="give an existing file or folder, a Hub id (owner/name) or `embedded`",
        )
    if on_bytes is not None:
        choices: dict[str, Callable[..., list[str]]] = {
            "base": partial(wanted_base, source=source),
            "default companion": wanted,
            "named companion": partial(wanted_companion, source=source),
            "vae": wanted,
        }
        return fetch(
            source,
            revision=revision,
            choose=partial(choices[kind], without=without),
            model_kind="base model",
            instead="give a local diffusers folder, or --base embedded",
            on_bytes=on_bytes,
            check=partial(_check_configurations, source=source),
        )
    return cached_snapshot(source, revision=revision)


def _check_configurations(folder: Path, *, source: str) -> None:
    """Raise InputError for a diffusers folder of another family, without a part, or in an unread quantisation."""
    family = families.detect(folder)
    parts = (family.traits.folder, "vae", "scheduler")
    for name, repository in elsewhere(folder, family.text, parts=parts).items():
        raise InputError(
            f"{source} has no folder {name}: its index says that it is loaded from {repository}",
            fix="give a folder or repository that has all parts of the base",
        )
    for file in sorted(folder.glob("*/config.json")):
        quantised = read_json(file).get("quantization_config")
        if isinstance(quantised, dict):
            method = str(quantised.get("quant_method", "unknown"))[:40]
            raise InputError(
                f"{source} is quantised as {method} ({file.parent.name}/config.json); readable are {READABLE}",
                fix="use the release that it was made from; lora-train quantises it where memory asks for it",
            )


def _is_path(source: str) -> bool:
    path = Path(user_path(source))
    # A Hub id is owner/name, with exactly one slash.
    is_id = source.count("/") == 1 and not source.startswith((".", "~"))
    return path.is_absolute() or path.suffix in SUFFIXES or not is_id
