"""Find the LoRA that a base is trained with (`base.assistant`): a file, or a repository on the Hub.

`OWNER/NAME` is a repository with one weight file, `OWNER/NAME/FILE` one of several files. Torch-free; `fetch_assistant`
may download, nothing else uses a network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from lora_trainer.common.errors import InputError
from lora_trainer.common.files import user_path
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.files.hub_files import SAFETENSORS, OnBytes, fetch

_ON_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/([\w./-]+\.safetensors))?")
WITHOUT = "train without an assistant: --set base.assistant=none"


def local_assistant(source: str) -> Path | None:
    """Return the file on this machine, None for one that has to be downloaded from the Hub.

    Raises InputError for what is neither a file nor the name of a repository.
    """
    path = Path(user_path(source))
    if path.is_file():
        return path
    repository, name = _on_hub(source)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    if name:
        cached = try_to_load_from_cache(repository, name)
        return Path(cached) if isinstance(cached, str) else None
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    found = [file for file in folder.rglob(f"*{SAFETENSORS}") if file.is_file()]
    return found[0] if len(found) == 1 else None


def fetch_assistant(source: str, *, on_bytes: OnBytes) -> Path:
    """Return the file on this machine, downloading it where it is not.

    Raises InputError for an unusable source and MachineError when the Hub cannot be reached.
    """
    if (found := local_assistant(source)) is not None:
        return found
    repository, name = _on_hub(source)

    def choose(names: Iterable[str]) -> list[str]:
        weights = [each for each in names if PurePosixPath(each).suffix == SAFETENSORS]
        chosen = [each for each in weights if each == name] if name else weights
        if len(chosen) == 1:
            return chosen
        held = ", ".join(sorted(weights)[:6]) or "no safetensors"
        raise InputError(
            f"base.assistant {source}: the repository {repository} holds {held}",
            fix=f"name one of its files as {repository}/FILE, or {WITHOUT}",
        )

    folder = fetch(
        repository,
        revision=None,
        choose=choose,
        model_kind="assistant",
        instead=WITHOUT,
        on_bytes=on_bytes,
    )
    (file,) = [
        each for each in folder.rglob(f"*{SAFETENSORS}") if not name or each == folder / name
    ]
    return file


def assistant_bytes(source: str, facts: BaseFacts) -> int:
    """Return the size of an assistant's weights: of its file, else as published; 0 where neither is known."""
    if (file := local_assistant(source)) is not None:
        return file.stat().st_size
    published = facts.release.assistant
    return published.download_bytes if published and published.source == source else 0


def _on_hub(source: str) -> tuple[str, str]:
    """Return repository and file; the file is "" where only the repository is named."""
    found = _ON_HUB.fullmatch(source.strip())
    if found is None or (found[2] is None and source.strip().endswith(SAFETENSORS)):
        raise InputError(
            f"base.assistant {source!r} does not exist",
            fix=f"give a LoRA file or a Hub id (OWNER/NAME, OWNER/NAME/FILE), or {WITHOUT}",
        )
    return found[1], found[2] or ""
