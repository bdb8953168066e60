"""Models from the Hugging Face Hub: what is in the local cache, and what to download.

Torch-free. Of a base model only what a training reads is fetched: safetensors in one precision,
configs and tokenizers, never pickles, other frameworks' weights or safety checkers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path, PurePosixPath

from lora_trainer.errors import InputError, MachineError, first_line
from lora_trainer.families.base import Part

_TEXTS = frozenset({".json", ".txt", ".model", ".jinja"})
"""Configurations, vocabularies, SentencePiece's models, chat templates."""
_TOP_TEXTS = frozenset({"model_index.json", "config.json"})
_PART_FOLDERS: dict[Part, re.Pattern[str]] = {
    "denoiser": re.compile(r"unet|transformer"),
    "vae": re.compile(r"vae"),
    "text_encoder": re.compile(r"text_encoder(_\d)?"),
}
_TEXT_FOLDERS = re.compile(r"scheduler|tokenizer(_\d)?")
_VARIANT = re.compile(r"\.(fp16|non_ema|bf16|ema)(?=[.-])")


def cached_snapshot(source: str, *, revision: str | None) -> Path | None:
    """Return the folder of a repository that is in the Hub's local cache, else None."""
    from huggingface_hub import try_to_load_from_cache

    for name in ("model_index.json", "config.json"):
        found = try_to_load_from_cache(source, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def download(source: str, *, revision: str | None, without: frozenset[Part]) -> Path:
    """Return the local folder of a base model with everything but the weights of parts in `without`.

    Raises what `fetch` raises.
    """
    return fetch(
        source,
        revision=revision,
        choose=partial(wanted, without=without),
        what="base model",
        instead="give a local diffusers folder, or --base embedded",
    )


def fetch(
    source: str,
    *,
    revision: str | None,
    choose: Callable[[Iterable[str]], list[str]],
    what: str,
    instead: str,
) -> Path:
    """Return the local folder of a repository with those of its files that `choose` keeps.

    Raises MachineError when the Hub cannot be reached or asks for a licence to be accepted, and
    InputError for a repository that does not exist; `what` names it there, `instead` is another way.
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
        listed = HfApi().model_info(source, revision=revision).siblings or []
        files = choose(entry.rfilename for entry in listed)
        return Path(snapshot_download(source, revision=revision, allow_patterns=files))
    except GatedRepoError:
        raise MachineError(
            f"{what} {source} is gated",
            fix=f"accept its licence at huggingface.co/{source} and run `hf auth login`",
        ) from None
    except RevisionNotFoundError:
        raise InputError(
            f"{what} {source} has no revision {revision!r}", fix="check base.revision"
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
                f"{what} {source} cannot be stored: {error.filename}: {error.strerror}",
                fix="free some space, or let HF_HOME name a folder that can be written",
            ) from None
        raise MachineError(
            f"{what} {source} could not be downloaded ({_reason(error)})",
            fix=f"connect once, or {instead}",
        ) from None
    except (LookupError, TypeError, ValueError) as error:  # a login page, a proxy's own answer
        raise MachineError(
            f"{what} {source} could not be downloaded: what answers is not the Hub "
            f"({type(error).__name__}: {first_line(error)[:200]})",
            fix="check the connection and HF_ENDPOINT, or give a local folder",
        ) from None


def _reason(error: Exception) -> str:
    response = getattr(error, "response", None)
    if response is not None:
        return f"the Hub answers {response.status_code}"
    return f"{type(error).__name__}: no connection, or offline mode"


def wanted(names: Iterable[str], *, without: frozenset[Part]) -> list[str]:
    """Choose files of a repository: texts, and of each folder's safetensors one precision.

    Full precision is preferred, as it is when loading; `fp16` where there is nothing else.
    """
    kept = [path for path in map(PurePosixPath, names) if _is_read(path)]
    chosen = [path for path in kept if path.suffix in _TEXTS and not _VARIANT.search(path.name)]
    weights = [path for path in kept if path.suffix == ".safetensors"]
    folders = {path.parent for path in weights}
    if len(folders) > 1:  # weights at the top are a second copy of the model
        folders.discard(PurePosixPath("."))
    for folder in folders:
        if not _is_part(folder.name, without):
            inside = [path for path in weights if path.parent == folder]
            plain = [path for path in inside if not _VARIANT.search(path.name)]
            chosen += plain or [path for path in inside if ".fp16." in path.name]
            if not plain:
                chosen += [
                    path for path in kept if path.parent == folder and _is_index_of_fp16(path)
                ]
    return sorted(map(str, chosen))


def _is_read(path: PurePosixPath) -> bool:
    """Say whether a file is at the top or in the folder of a component; others are exports and spares."""
    if len(path.parts) == 1:
        return path.suffix == ".safetensors" or path.name in _TOP_TEXTS
    folder = path.parts[0]
    known = _TEXT_FOLDERS.fullmatch(folder) or _is_part(folder, frozenset(_PART_FOLDERS))
    return len(path.parts) == 2 and bool(known)


def _is_index_of_fp16(path: PurePosixPath) -> bool:
    return path.suffix == ".json" and ".safetensors.index.fp16." in path.name


def _is_part(folder: str, parts: frozenset[Part]) -> bool:
    return any(_PART_FOLDERS[part].fullmatch(folder) for part in parts)
