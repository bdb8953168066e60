"""Find a base model on this machine, in the Hub's cache or on the Hub, and read its facts.

A source is `embedded`, a diffusers folder, a single-file checkpoint or a Hub id. `describe` uses no network;
`locate` may download: safetensors in one precision, configs and tokenizers, never pickles, other frameworks'
weights or safety checkers. An unusable source raises here, before anything is cached. Torch-free: everything
follows from configs and headers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

from lora_trainer import families
from lora_trainer.common.errors import InputError, MachineError, RequestError, first_line
from lora_trainer.common.memo import HashMemo
from lora_trainer.config.config import CHUNK_TOKENS, Auto, BaseSettings
from lora_trainer.families.base import BaseFacts, Family, Layout, Part
from lora_trainer.families.base_files import gguf_file
from lora_trainer.families.base_files.base_folder import AGAIN, SUFFIXES, read_header
from lora_trainer.families.base_files.open_companion import (
    OpenCompanion,
    is_makeable,
    open_companion,
)
from lora_trainer.families.single_files import (
    companion_of,
    encoder_files,
    facts_of_file,
    recognised,
)

_TEXTS = frozenset({".json", ".txt", ".model", ".jinja"})
"""Configurations, vocabularies, SentencePiece's models, chat templates."""
_TOP_TEXTS = frozenset({"model_index.json", "config.json"})
ALL_ENCODERS = "text encoders"
_PART_FOLDERS: dict[str, re.Pattern[str]] = {
    "denoiser": re.compile(r"unet|transformer"),
    "vae": re.compile(r"vae"),
    ALL_ENCODERS: re.compile(r"text_encoder(_\d)?"),
}
"""Whole parts -> their folders; the first of several text encoders has the name of the part."""
_TEXT_FOLDERS = re.compile(r"scheduler|tokenizer(_\d)?")
# Marks of second copies of the same weights, as in `diffusion_pytorch_model.fp16.safetensors`.
_VARIANT = re.compile(r"\.(fp16|non_ema|bf16|ema)(?=[.-])")


def cached_snapshot(source: str, *, revision: str | None) -> Path | None:
    """Return the folder of a repository in the Hub's local cache, None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    # A repository of a VAE alone has no model_index.json.
    for name in ("model_index.json", "config.json"):
        cached_path = try_to_load_from_cache(source, name, revision=revision)
        # None: never asked for. The Hub's library also returns an object for files known to be absent there.
        if isinstance(cached_path, str):
            return Path(cached_path).parent
    return None


def download(source: str, *, revision: str | None, without: frozenset[str]) -> Path:
    """Return the local folder of a base model except the weights of the parts or components in `without`.

    Raises the errors of `fetch`.
    """
    return fetch(
        source,
        revision=revision,
        choose=partial(wanted, without=without),
        model_kind="base model",
        instead="give a local diffusers folder, or --base embedded",
    )


def fetch(
    source: str,
    *,
    revision: str | None,
    choose: Callable[[Iterable[str]], list[str]],
    model_kind: str,
    instead: str,
) -> Path:
    """Return the local folder of a repository with the files that `choose` selects from its list.

    Raises MachineError when the Hub cannot be reached or requires a licence to be accepted, and InputError
    for a repository that does not exist. In messages `model_kind` names the model ("base model") and
    `instead` an alternative to the download.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is re-exported
        GatedRepoError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        # Patterns alone cannot say "fp16 only where there is nothing else", so the list is read first.
        listed = HfApi().model_info(source, revision=revision).siblings or []
        files = choose(entry.rfilename for entry in listed)
        return Path(snapshot_download(source, revision=revision, allow_patterns=files))
    # A subclass of RepositoryNotFoundError, so it has to come first.
    except GatedRepoError:
        raise MachineError(
            f"{model_kind} {source} is gated",
            fix=f"accept its licence at huggingface.co/{source} and run `hf auth login`",
        ) from None
    except RevisionNotFoundError:
        raise InputError(
            f"{model_kind} {source} has no revision {revision!r}", fix="check base.revision"
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            f"there is no model {source!r} on the Hub that you can read",
            fix="check the name, or give a local folder",
        ) from None
    except (LocalEntryNotFoundError, HTTPError, OSError) as error:
        if (
            isinstance(error, OSError) and error.filename is not None
        ):  # the disk refused, not the network
            raise MachineError(
                f"{model_kind} {source} cannot be stored: {error.filename}: {error.strerror}",
                fix="free some space, or let HF_HOME name a folder that can be written",
            ) from None
        raise MachineError(
            f"{model_kind} {source} could not be downloaded ({_reason(error)})",
            fix=f"connect once, or {instead}",
        ) from None
    except (LookupError, TypeError, ValueError) as error:  # a login page, a proxy's own answer
        raise MachineError(
            f"{model_kind} {source} could not be downloaded: the server that answers is not the Hub "
            f"({type(error).__name__}: {first_line(error)[:200]})",
            fix="check the connection and HF_ENDPOINT, or give a local folder",
        ) from None


def _reason(error: Exception) -> str:
    response = getattr(error, "response", None)
    if response is not None:
        return f"the Hub answers {response.status_code}"
    return f"{type(error).__name__}: no connection, or offline mode"


def wanted(names: Iterable[str], *, without: frozenset[str]) -> list[str]:
    """Choose the files of a repository to download: texts, and each folder's safetensors in one precision.

    Full precision is preferred, as it is when loading; `fp16` is chosen if there is no other.
    """
    readable = [path for path in map(PurePosixPath, names) if _is_read(path)]
    chosen = [path for path in readable if path.suffix in _TEXTS and not _VARIANT.search(path.name)]
    weights = [path for path in readable if path.suffix == ".safetensors"]
    folders = {path.parent for path in weights}
    if len(folders) > 1:  # weights at the top are a second copy of the model
        folders.discard(PurePosixPath("."))
    for folder in folders:
        if not _is_part(folder.name, without):
            inside = [path for path in weights if path.parent == folder]
            plain = [path for path in inside if not _VARIANT.search(path.name)]
            chosen += plain or [path for path in inside if ".fp16." in path.name]
            # diffusers finds shards through this index; `_VARIANT` has kept it out of the texts above.
            if not plain:
                chosen += [
                    path for path in readable if path.parent == folder and _is_index_of_fp16(path)
                ]
    return sorted(map(str, chosen))


def _is_read(path: PurePosixPath) -> bool:
    """Say whether a file is at the top or in a component's folder; others are exports or duplicates."""
    if len(path.parts) == 1:
        return path.suffix == ".safetensors" or path.name in _TOP_TEXTS
    folder = path.parts[0]
    is_component = _TEXT_FOLDERS.fullmatch(folder) or _is_part(folder, frozenset(_PART_FOLDERS))
    return len(path.parts) == 2 and bool(is_component)


def _is_index_of_fp16(path: PurePosixPath) -> bool:
    return path.suffix == ".json" and ".safetensors.index.fp16." in path.name


def _is_part(folder: str, parts: frozenset[str]) -> bool:
    """Say whether a folder is one of `parts`: a whole part ("vae"), or a component of the text encoders."""
    return folder in parts - _PART_FOLDERS.keys() or any(
        pattern.fullmatch(folder) for part, pattern in _PART_FOLDERS.items() if part in parts
    )


EMBEDDED = "embedded"
EMBEDDED_FOLDER = Path(__file__).resolve().parents[1] / "embedded"
_PICKLES = frozenset({".ckpt", ".pt", ".pth", ".bin", ".pkl"})


def describe(settings: BaseSettings) -> BaseFacts:
    """Return facts of `settings.model` without downloading: from its files, or by name for well-known ids.

    Raises InputError for a source that cannot be a base and MachineError for one not on this machine.
    """
    source = settings.model
    layout, family = _find(settings)
    if layout is not None:
        return _facts(layout, family, source=source)
    if family is not None and (file := Path(source).expanduser()).is_file():
        return facts_of_file(settings, file, family)
    facts = families.known_base(source)
    if facts is None:
        raise MachineError(
            f"base model {source!r} is not on this machine, and its name is not that of a well-known base",
            fix="start the training once to download it, or give a local diffusers folder",
        )
    return replace(facts, source=source)


def locate(settings: BaseSettings) -> BaseFacts:
    """Return facts of `settings.model` on this machine, downloading missing files from the Hub.

    Raises InputError for an unusable source and MachineError when the Hub cannot be reached.
    """
    source = settings.model
    layout, family = _find(settings)
    if layout is not None:
        try:
            return _facts(layout, family, source=source)
        except InputError:
            if not _from_hub(settings):
                raise
            # A cached repository that cannot be read is an interrupted download: finish it below.
    layout, family = _find(settings, fetch=True)
    assert layout is not None
    return _facts(layout, family, source=source)


def _facts(layout: Layout, family: Family | None, *, source: str) -> BaseFacts:
    """Return the facts of a base; raises InputError if a config lacks a value or has a wrong one."""
    try:
        family = family or families.detect(layout.folder)
        return family.facts(layout, source=source, identities={})
    # A config.json may hold any JSON, and computing with its values can fail in any of these ways.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        detail = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise InputError(
            f"a config.json of base model {source} lacks a value or has a wrong one ({detail})",
            fix=AGAIN,
        ) from error


def with_choices(
    facts: BaseFacts, settings: BaseSettings, *, zero_terminal_snr: bool | None
) -> BaseFacts:
    """Return `facts` with the settings that override the files; raises RequestError for impossible ones."""
    prediction = facts.prediction if settings.prediction == "auto" else settings.prediction
    zero = facts.zero_terminal_snr if zero_terminal_snr is None else zero_terminal_snr
    if (prediction == "flow") != (facts.prediction == "flow"):
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
    is_chosen = settings.prediction != "auto" and prediction != "flow"
    assumed = None if is_chosen else facts.assumed  # flow families assume other facts than this one
    return replace(facts, prediction=prediction, zero_terminal_snr=zero, assumed=assumed)


def with_caption_tokens(facts: BaseFacts, caption_tokens: int | Auto) -> BaseFacts:
    """Return `facts` with captions of as many chunks as `data.caption_tokens` needs; one for auto."""
    if caption_tokens == "auto" or not families.family(facts.family).text.chunks:
        return facts
    return replace(facts, chunks=caption_tokens // CHUNK_TOKENS)


def identified(facts: BaseFacts, memo: HashMemo) -> BaseFacts:
    """Return `facts` of a local base with the content hash of each part filled in."""
    files = families.family(facts.family).parts(facts.located)
    identities = {part: _identity(paths, memo) for part, paths in files.items()}
    parts = {name: replace(part, identity=identities[name]) for name, part in facts.parts.items()}
    return replace(facts, parts=parts)


def base_files(facts: BaseFacts) -> Mapping[str, tuple[Path, ...]]:
    """Return the files of each part of a base that is on this machine."""
    return families.family(facts.family).parts(facts.located)


def _identity(files: tuple[Path, ...], memo: HashMemo) -> str:
    # The folder is left out of the hash: the same base in another place keeps its cache.
    joined = "\n".join(f"{path.name} {memo.sha256(path)}" for path in files)
    return hashlib.sha256(joined.encode()).hexdigest()


def _find(settings: BaseSettings, *, fetch: bool = False) -> tuple[Layout | None, Family | None]:
    """Return the layout, None if not on this machine, and the family if a file header tells it."""
    source = settings.model
    path = Path(source).expanduser()
    if path.suffix in SUFFIXES or (path.is_file() and path.suffix not in _PICKLES):
        return _find_file(settings, path, fetch=fetch)
    folder = _folder(source, revision=settings.revision, fetch=fetch)
    if folder is None:
        return None, None
    if settings.vae is None and not settings.text_encoders:
        return Layout(folder=folder), None
    family = families.detect(folder)
    files: dict[Part, Path] = {}
    if settings.vae is not None:
        files["vae"] = _find_vae(settings, family, fetch=fetch)
    text = encoder_files(settings, family, {}, None, folder=folder)
    return Layout(folder=folder, files=files, text=text), family


def _find_file(settings: BaseSettings, file: Path, *, fetch: bool) -> tuple[Layout | None, Family]:
    family, parts = recognised(file)
    header = read_header(file)
    files: dict[Part, Path] = dict.fromkeys(parts, file)
    if settings.vae is not None:
        files["vae"] = _find_vae(settings, family, fetch=fetch)
    release = family.facts_from_file(file, header) if settings.companion == "auto" else None
    companion = companion_of(settings, family, release) if release else settings.companion
    # The companion's folder may bring other widths, so the encoders are matched again once it is known.
    text = encoder_files(settings, family, header, file, folder=None)
    # `-` binds before `|`. Text encoders are left out of the download one by one, by component, because a
    # base's own file often has some of them only (CLIP without T5).
    without = frozenset[str](files) - {"text_encoder"} | text.keys()
    if "text_encoder" in files:
        without |= {ALL_ENCODERS, *family.text.roles}
    makeable = open_companion(release, without) if release else None
    if makeable is not None:
        folder = _open_folder(makeable, cached_snapshot(companion, revision=None), fetch=fetch)
    else:
        try:
            folder = _folder(companion, revision=None, fetch=fetch, without=without)
        except MachineError as error:
            if release is None or not is_makeable(family.name):
                raise
            raise MachineError(
                error.found,
                fix=f"{error.fix}, or give its VAE and text encoders as files with base.vae and "
                "base.text_encoders",
            ) from None
    if folder is None:
        return None, family
    companion_family = families.detect(folder)
    # Families are single instances of their modules.
    if companion_family is not family:
        raise InputError(
            f"base.companion {companion} is of family {companion_family.name}, {file.name} is {family.name}",
            fix=f"name a {family.name} folder, or leave base.companion at auto",
        )
    text = encoder_files(settings, family, header, file, folder=folder)
    if fetch:
        for component_file in {*files.values(), *text.values()}:
            # A plan reads GGUF headers without the package gguf; a training
            # fails here, before anything is cached.
            if component_file.suffix == gguf_file.SUFFIX:
                gguf_file.require_gguf(component_file)
    return Layout(folder=folder, files=files, text=text), family


def _open_folder(
    companion: OpenCompanion, cached_folder: Path | None, *, fetch: bool
) -> Path | None:
    """Return a checkpoint's companion folder: as made before, from the Hub's cache, or with `fetch` made now.

    The folder made before comes first: with another one of the same content a resume would find another
    text encoder.
    """
    if companion.is_made():
        return companion.folder()
    return companion.make(_fetch_tokenizers) if fetch else cached_folder


def _fetch_tokenizers(source: str, folders: tuple[str, ...]) -> Path:
    def choose(names: Iterable[str]) -> list[str]:
        paths = [PurePosixPath(name) for name in names]
        return [str(p) for p in paths if str(p.parent) in folders and p.suffix in _TEXTS]

    return fetch(
        source,
        revision=None,
        choose=choose,
        model_kind="tokenizer",
        instead="name a diffusers folder of this base with --set base.companion=FOLDER",
    )


def _find_vae(settings: BaseSettings, family: Family, *, fetch: bool) -> Path:
    """Return the file or folder of `base.vae`; raises InputError when it holds no VAE for the family."""
    assert settings.vae is not None
    path = Path(settings.vae).expanduser()
    if path.is_file() and path.suffix in SUFFIXES:
        if "vae" not in family.detect_file(read_header(path)):
            raise InputError(
                f"base.vae {path.name} holds no VAE of family {family.name}",
                fix="give a VAE made for this base, or leave base.vae out",
            )
        return path
    folder = _folder(settings.vae, revision=None, fetch=fetch)
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
    source: str, *, revision: str | None, fetch: bool, without: frozenset[str] = frozenset()
) -> Path | None:
    """Return the local folder of a source, None if it is not on this machine; with `fetch` download it."""
    if source == EMBEDDED:
        return EMBEDDED_FOLDER
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.suffix in _PICKLES:
        raise InputError(
            f"base model {path.name} is a pickle, which can run code when opened",
            fix="give the safetensors version",
        )
    if _is_path(source):
        raise InputError(
            f"base model {source!r} does not exist",
            fix="give an existing file or folder, a Hub id (owner/name) or `embedded`",
        )
    if fetch:
        return download(source, revision=revision, without=without)
    return cached_snapshot(source, revision=revision)


def _is_path(source: str) -> bool:
    path = Path(source).expanduser()
    # A Hub id is owner/name, with exactly one slash.
    return path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1


def _from_hub(settings: BaseSettings) -> bool:
    """Say whether the base, its VAE or its companion is named by a Hub id."""
    sources = [settings.model, settings.vae, settings.companion]
    return any(
        name is not None and name != EMBEDDED and not Path(name).expanduser().exists()
        for name in sources
    )
