"""Download the files of a model from the Hub: which ones, how many bytes are here, errors in plain words.

Inputs: a repository's id and a choice among the names in its list. Output: its folder in the Hub's local
cache. A base model gives safetensors in one precision, configurations and tokenizers, never pickles, other
frameworks' weights or safety checkers.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from lora_trainer.common.errors import InputError, MachineError, first_line
from lora_trainer.common.wording import is_hub_id

# Configurations, vocabularies, SentencePiece's models, chat templates.
TEXT_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})
# The index of a plain and of a modular diffusers folder: the second kind's pipeline is made of blocks.
INDEX, MODULAR_INDEX = "model_index.json", "modular_model_index.json"
INDEXES = (INDEX, MODULAR_INDEX)
_TOP_TEXTS = frozenset({*INDEXES, "config.json"})
# The folders of a base's components.
_FOLDERS = re.compile(
    r"scheduler|(?:tokenizer|text_encoder)(?:_\d)?|t5_tokenizer|processor|text_conditioner|unet|(?:unconditional_)?transformer"
    r"|vae"
)
# Marks of second copies of the same weights, as in `diffusion_pytorch_model.fp16.safetensors`.
_VARIANT = re.compile(r"\.(fp16|non_ema|bf16|ema)(?=[.-])")
_HALF = re.compile(r"\.fp16\.(?:.*\.)?safetensors$|\.safetensors\.index\.fp16\.(?:.*\.)?json$")


# Ends of the names of weight files; `.sft` is safetensors under the name that FLUX.1's first release used.
SAFETENSORS, GGUF = ".safetensors", ".gguf"
SUFFIXES = frozenset({SAFETENSORS, ".sft", GGUF})
# One of the files that a network is cut into: none of them is a checkpoint.
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
# Folders of repositories that hold other things than checkpoints beside them.
_OTHER_FOLDERS = re.compile(
    r"vae|vae_approx|text_encoders?|clip\w*|loras?|controlnet\w*|embeddings?|upscale\w*"
)
_MOST_NAMES = 6


def cached_snapshot(source: str, *, revision: str | None) -> Path | None:
    """Return the folder of a repository in the Hub's local cache, None if it is not there."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    if not is_hub_id(source):
        raise InputError(
            f"{source!r} is neither a file or folder on this machine nor a model on the Hub (OWNER/NAME)",
            fix="check the path or the name",
        )
    # A repository of a VAE alone has no index.
    for name in (*INDEXES, "config.json"):
        cached_path = try_to_load_from_cache(source, name, revision=revision)
        # None: never asked for. The Hub's library also returns an object for files known to be absent there.
        if isinstance(cached_path, str):
            return Path(cached_path).parent
    # Of a repository of a checkpoint alone `fetch` has left word that there is no index: without that word a checkpoint
    # in the cache may lie beside a diffusers folder that was not fetched. `snapshot_download` without a network wants
    # every file of the repository, and here one is enough.
    if try_to_load_from_cache(source, INDEX, revision=revision) is None:
        return None
    cache = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=source, repo_type="model")
    commit = revision or constants.DEFAULT_REVISION
    with suppress(OSError, ValueError):  # ValueError: a name with a null character
        commit = (cache / "refs" / commit).read_text(encoding="utf-8").strip()
    folder = cache / "snapshots" / commit
    return folder if folder.is_dir() and checkpoints(_files_in(folder)) else None


def _files_in(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return [path.relative_to(folder).as_posix() for path in files]


def checkpoints(names: Iterable[str]) -> list[str]:
    """Return the files of a folder or repository that may be a base in one file each."""
    paths = map(PurePosixPath, sorted(names))
    return [
        str(path)
        for path in paths
        if path.suffix in SUFFIXES
        and not _SHARD.search(path.stem)
        and not any(_OTHER_FOLDERS.fullmatch(part.lower()) for part in path.parts[:-1])
    ]


def checkpoint_in(folder: Path) -> Path | None:
    """Return the only checkpoint in a folder that is not a diffusers folder, None for a diffusers folder.

    Raises InputError that names them for several; a folder without any is left to who knows what it should be.
    """
    if index_in(folder) is not None or not folder.is_dir():
        return None
    found = checkpoints(_files_in(folder))
    return folder / _only(found, where=str(folder)) if found else None


def index_in(folder: Path) -> Path | None:
    """Return the index of a diffusers folder, None for any other folder."""
    files = (folder / name for name in INDEXES)
    return next((file for file in files if file.is_file()), None)


def _only(found: Sequence[str], *, where: str) -> str:
    """Return the one checkpoint; raises InputError for several, of which nobody said which is meant."""
    if len(found) == 1:
        return found[0]
    listed = ", ".join(found[:_MOST_NAMES]) + (", ..." if len(found) > _MOST_NAMES else "")
    raise InputError(
        f"{where} holds {len(found)} checkpoints and no diffusers folder: {listed}",
        fix="download the one to train on (`hf download REPOSITORY FILE`) and give its path"
        if "/" in where and not Path(where).is_dir()
        else "give the path of the one to train on",
    )


def wanted_companion(names: Iterable[str], *, source: str, without: frozenset[str]) -> list[str]:
    """Choose the files of the companion that a user named; raises InputError where it is not a diffusers folder."""
    all_names = list(names)
    if not _has_index(all_names):
        raise InputError(
            f"base.companion {source} has no {INDEX}: it is not a diffusers folder",
            fix="name a diffusers folder or its Hub id, or leave base.companion at auto",
        )
    return wanted(all_names, without=without)


def wanted_base(names: Iterable[str], *, source: str, without: frozenset[str]) -> list[str]:
    """Choose the files of a base's repository to download: those of a diffusers folder, or its only checkpoint.

    Raises InputError, before anything is downloaded, for several checkpoints and for none.
    """
    all_names = list(names)
    if _has_index(all_names):
        return wanted(all_names, without=without)
    if found := checkpoints(all_names):
        return [_only(found, where=source)]
    pickles = any(name.endswith((".ckpt", ".pt", ".pth", ".bin")) for name in all_names)
    held = "pickles only, which can run code when opened" if pickles else "no weights of a base"
    raise InputError(
        f"{source} holds neither {INDEX} nor a checkpoint ({', '.join(sorted(SUFFIXES))}), but {held}",
        fix="give the repository of a diffusers folder or of a checkpoint",
    )


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
    check: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Return the local folder of a repository with the files that `choose` selects from its list.

    `check` gets the folder with the configurations of a diffusers folder before its weights are downloaded.
    Raises MachineError when the Hub cannot be reached or requires a licence to be accepted, and InputError
    for a repository that does not exist. In messages `model_kind` names the model ("base model") and
    `instead` an alternative to the download.
    """
    from huggingface_hub import (
        HfApi,
        constants,
        hf_hub_download,
        snapshot_download,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is re-exported
        EntryNotFoundError,
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
        download = partial(snapshot_download, source, revision=revision, tqdm_class=bar)
        if _has_index(files):
            texts = [name for name in files if PurePosixPath(name).suffix in TEXT_SUFFIXES]
            check(Path(download(allow_patterns=texts)))
        folder = Path(download(allow_patterns=files))
        if not _has_index(files) and checkpoints(files):
            with suppress(EntryNotFoundError):  # which the library remembers
                hf_hub_download(source, INDEX, revision=revision)
        return folder
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
            f"the Hub has no model {source!r} that you can read",
            fix="check the name, or give a local folder",
        ) from None
    except (
        ImportError
    ) as error:  # httpx: "Using SOCKS proxy, but the 'socksio' package is not installed"
        raise MachineError(
            f"{model_kind} {source} could not be downloaded: {first_line(error)[:200]}",
            fix="`pip install 'httpx[socks]'` for a SOCKS proxy, or unset ALL_PROXY",
        ) from None
    except (LocalEntryNotFoundError, HTTPError, OSError) as error:
        fault, fix = f"could not be downloaded ({_reason(error)})", f"connect once, or {instead}"
        if constants.HF_HUB_OFFLINE:
            fault = "is not on this machine, and offline mode forbids downloads"
            fix = f"allow them (Offline on the page Machine, or unset HF_HUB_OFFLINE), or {instead}"
        # With the name of a file it is the disk that refuses, not the network.
        if isinstance(error, OSError) and error.filename is not None:
            fault = f"cannot be stored: {error.filename}: {error.strerror}"
            fix = "free some space, or let HF_HOME name a folder that can be written"
        raise MachineError(f"{model_kind} {source} {fault}", fix=fix) from None
    except UnicodeEncodeError as error:  # of a header: all others are written here
        raise MachineError(
            f"{model_kind} {source} could not be downloaded: the Hub token has a character that no "
            f"token has, at place {error.start - len('Bearer ') + 1}",
            fix="copy the token again into HF_TOKEN, or run `hf auth login`",
        ) from None
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
    return f"{type(error).__name__}: no connection"


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


def _has_index(names: Iterable[str]) -> bool:
    return not set(INDEXES).isdisjoint(names)


def _is_read(path: PurePosixPath) -> bool:
    """Say whether a file is at the top or in a component's folder; others are exports or duplicates."""
    if len(path.parts) == 1:
        return path.suffix == ".safetensors" or path.name in _TOP_TEXTS
    return len(path.parts) == 2 and _FOLDERS.fullmatch(path.parts[0]) is not None
