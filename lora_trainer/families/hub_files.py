"""Download the files of a model from the Hub: which ones, how many bytes are here, errors in plain words.

Inputs: a repository's id and a choice among the names in its list. Output: its folder in the Hub's local
cache. A base model gives safetensors in one precision, configurations and tokenizers, never pickles, other
frameworks' weights or safety checkers.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from lora_trainer.common.errors import InputError, MachineError, first_line

# Configurations, vocabularies, SentencePiece's models, chat templates.
TEXT_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})
_TOP_TEXTS = frozenset({"model_index.json", "config.json"})
_FOLDERS = re.compile(r"scheduler|(?:tokenizer|text_encoder)(?:_\d)?|unet|transformer|vae")
# Marks of second copies of the same weights, as in `diffusion_pytorch_model.fp16.safetensors`.
_VARIANT = re.compile(r"\.(fp16|non_ema|bf16|ema)(?=[.-])")
_HALF = re.compile(r"\.fp16\.(?:.*\.)?safetensors$|\.safetensors\.index\.fp16\.(?:.*\.)?json$")


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


# Called while files come, from any thread: the repository, the bytes here of those it lacked, all of them.
OnBytes = Callable[[str, int, int], None]


def unheard(source: str, here_bytes: int, all_bytes: int) -> None:
    """Tell nobody how far a download is."""


def fetch(
    source: str,
    *,
    revision: str | None,
    choose: Callable[[Iterable[str]], list[str]],
    model_kind: str,
    instead: str,
    on_bytes: OnBytes = unheard,
) -> Path:
    """Return the local folder of a repository with the files that `choose` selects from its list.

    Raises MachineError when the Hub cannot be reached or requires a licence to be accepted, and InputError
    for a repository that does not exist. In messages `model_kind` names the model ("base model") and
    `instead` an alternative to the download.
    """
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is re-exported
        GatedRepoError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        # Patterns alone cannot say "fp16 only where there is nothing else", so the list is read first.
        listed = HfApi().model_info(source, revision=revision, files_metadata=True)
        sizes = {entry.rfilename: entry.size or 0 for entry in listed.siblings or []}
        files = choose(sizes)
        missing_bytes = sum(
            sizes[name]
            for name in files
            if not isinstance(try_to_load_from_cache(source, name, revision=listed.sha), str)
        )
        bar = _counting_bar(partial(on_bytes, source), missing_bytes)
        return Path(
            snapshot_download(source, revision=revision, allow_patterns=files, tqdm_class=bar)
        )
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
        fault, fix = f"could not be downloaded ({_reason(error)})", f"connect once, or {instead}"
        # With the name of a file it is the disk that refuses, not the network.
        if isinstance(error, OSError) and error.filename is not None:
            fault = f"cannot be stored: {error.filename}: {error.strerror}"
            fix = "free some space, or let HF_HOME name a folder that can be written"
        raise MachineError(f"{model_kind} {source} {fault}", fix=fix) from None
    except (LookupError, TypeError, ValueError) as error:  # a login page, a proxy's own answer
        raise MachineError(
            f"{model_kind} {source} could not be downloaded: the server that answers is not the Hub "
            f"({type(error).__name__}: {first_line(error)[:200]})",
            fix="check the connection and HF_ENDPOINT, or give a local folder",
        ) from None


def _counting_bar(report: Callable[[int, int], None], all_bytes: int) -> type[Any]:
    """Return a bar that draws nothing and reports (bytes here, all bytes) where the Hub's library would draw."""
    from huggingface_hub.utils.tqdm import tqdm

    here_bytes, lock = 0, threading.Lock()
    if all_bytes:  # else all is here, and the Hub's library only looks
        report(0, all_bytes)

    class Bar(tqdm):  # one for the files and two for their bytes
        def __init__(self, *arguments: Any, name: str | None = None, **options: Any) -> None:
            super().__init__(  # type: ignore[no-untyped-call]  # the Hub's bars have no types
                *arguments, name=name, **{**options, "disable": True}
            )
            # The other bar of bytes counts those of the network, fewer where files share parts.
            self._counts = name == "huggingface_hub.snapshot_download"

        def update(self, n: float | None = 1) -> None:
            nonlocal here_bytes
            if self._counts and all_bytes:
                with lock:
                    # A part that the Hub sends twice, after a broken connection, is not more than there is.
                    here_bytes = min(here_bytes + int(n or 0), all_bytes)
                    report(here_bytes, all_bytes)

    return Bar


def _reason(error: Exception) -> str:
    response = getattr(error, "response", None)
    if response is not None:
        return f"the Hub answers {response.status_code}"
    return f"{type(error).__name__}: no connection, or offline mode"


def wanted(names: Iterable[str], *, without: frozenset[str]) -> list[str]:
    """Choose the files of a repository to download: texts, and each folder's safetensors in one precision.

    Full precision is preferred, as it is when loading; `fp16` is chosen if there is no other. Of the folders
    `without` no weights are chosen.
    """
    readable = [path for path in map(PurePosixPath, names) if _is_read(path)]
    plain = [path for path in readable if not _VARIANT.search(path.name)]
    chosen = {path for path in plain if path.suffix in TEXT_SUFFIXES}
    weights = {path.parent for path in readable if path.suffix == ".safetensors"}
    if len(weights) > 1:  # weights at the top are a second copy of the model
        weights.discard(PurePosixPath("."))
    for folder in weights:
        if folder.name not in without:
            whole = {
                path for path in plain if (path.parent, path.suffix) == (folder, ".safetensors")
            }
            # With the index through which diffusers finds shards, which is not among the plain texts.
            half = {path for path in readable if path.parent == folder and _HALF.search(path.name)}
            chosen |= whole or half
    return sorted(map(str, chosen))


def _is_read(path: PurePosixPath) -> bool:
    """Say whether a file is at the top or in a component's folder; others are exports or duplicates."""
    if len(path.parts) == 1:
        return path.suffix == ".safetensors" or path.name in _TOP_TEXTS
    return len(path.parts) == 2 and _FOLDERS.fullmatch(path.parts[0]) is not None
