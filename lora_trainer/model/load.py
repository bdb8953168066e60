"""Where a base model is and what it is: from what the user wrote to a local folder and its facts.

Torch-free. `locate` may download from the Hub; `base_facts` reads configs and safetensors headers and,
when asked, hashes the parts so that caches know exactly which weights made them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lora_trainer import families
from lora_trainer.errors import InputError, MachineError
from lora_trainer.families.base import BaseFacts
from lora_trainer.files import HashMemo

EMBEDDED = "embedded"
EMBEDDED_FOLDER = Path(__file__).resolve().parents[1] / "embedded"
DOWNLOAD_PATTERNS = ("model_index.json", "*/*.json", "*/*.txt", "*/*.safetensors")
PICKLE_SUFFIXES = frozenset({".ckpt", ".pt", ".pth", ".bin"})


def find_local(source: str) -> Path | None:
    """Return the local folder of a base, or None when it would have to be downloaded.

    Raises InputError for a file, a pickle, or a path that does not exist.
    """
    if source == EMBEDDED:
        return EMBEDDED_FOLDER
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.suffix in PICKLE_SUFFIXES:
        raise InputError(
            f"base model {path.name} is a pickle, which can run code when opened",
            fix="give the safetensors version in diffusers layout",
        )
    if path.is_file():
        raise InputError(
            f"base model {path.name} is a single file; this version reads diffusers folders, Hub ids and `embedded`",
            fix="give a folder with model_index.json",
        )
    looks_like_path = path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1
    if looks_like_path:
        raise InputError(
            f"base model {source!r} does not exist",
            fix="give an existing folder, a Hub id (owner/name) or `embedded`",
        )
    return _cached_snapshot(source)


def locate(source: str, *, revision: str | None) -> Path:
    """Return the local folder of a base, downloading it from the Hub if need be.

    Raises InputError for an unusable path and MachineError when the Hub cannot be reached.
    """
    return find_local(source) or _download(source, revision)


def describe(source: str) -> BaseFacts:
    """Return facts without downloading or hashing: from the folder, or by name for well-known ids."""
    folder = find_local(source)
    if folder is not None:
        return families.detect(folder).facts(folder, source=source, identities={})
    facts = families.known_base(source)
    if facts is None:
        raise MachineError(
            f"base model {source!r} is not on this machine and not known by name",
            fix="start the training once to download it, or give a local diffusers folder",
        )
    return facts


def identified(facts: BaseFacts, memo: HashMemo) -> BaseFacts:
    """Return `facts` of a local base with the content hash of each part filled in."""
    assert facts.path is not None
    family = families.family(facts.family)
    identities = _identities(family.parts(facts.path), memo)
    parts = {name: replace(part, identity=identities[name]) for name, part in facts.parts.items()}
    return replace(facts, parts=parts)


def _identities(parts: Mapping[str, tuple[Path, ...]], memo: HashMemo) -> dict[str, str]:
    found = {}
    for part, files in parts.items():
        joined = "\n".join(f"{path.name} {memo.sha256(path)}" for path in files)
        found[part] = hashlib.sha256(joined.encode()).hexdigest()
    return found


def _cached_snapshot(source: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    index = try_to_load_from_cache(source, "model_index.json")
    return Path(index).parent if isinstance(index, str) else None


def _download(source: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(
            snapshot_download(source, revision=revision, allow_patterns=list(DOWNLOAD_PATTERNS))
        )
    except GatedRepoError:
        raise MachineError(
            f"base model {source} is gated",
            fix="accept its licence on the Hub and run `hf auth login`",
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            f"there is no model {source!r} on the Hub that you can read",
            fix="check the name, or give a local folder",
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = type(error).__name__
        raise MachineError(
            f"base model {source} could not be downloaded ({reason}: no connection, or offline mode)",
            fix="connect once, or give a local diffusers folder, or --base embedded",
        ) from None
