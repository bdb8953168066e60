"""The folder beside a checkpoint of a gated release, made without that release's repository.

Who has a checkpoint, its VAE and its text encoders as files needs of the gated repository nothing but
configurations, which are public facts (open_companions.json, read off the repositories' config.json), and
tokenizers, which lie in open repositories too. The folder is made in the user's cache. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from lora_trainer.common.files import TEMPORARY_PREFIX, disk_error, user_cache_folder
from lora_trainer.families.base_files.base_folder import read_json, tokenizer_of
from lora_trainer.families.facts import BaseFacts

FILE = Path(__file__).with_name("open_companions.json")
DOWNLOAD_BYTES = 3_700_000
"""CLIP's vocabulary and merges twice, T5's SentencePiece model: the files from open repositories."""
Fetch = Callable[[str, tuple[str, ...]], Path]
"""Downloads the texts in some folders of a repository and returns its local folder."""


@dataclass(frozen=True, kw_only=True)
class OpenCompanion:
    """How the companion of a checkpoint is made, in `folder`."""

    folder: Path
    configs: Mapping[str, Mapping[str, Any]]
    """The folder's JSON files."""
    tokenizers: Mapping[str, Mapping[str, str]]
    """Folder of a tokenizer -> repository, folder there and class."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The open repositories with the tokenizers."""
        return tuple(sorted({each["source"] for each in self.tokenizers.values()}))

    def is_made(self) -> bool:
        """Whether the folder is there with all its files."""
        return all((self.folder / name).is_file() for name in self.configs) and all(
            any((self.folder / name).glob("*")) for name in self.tokenizers
        )

    def make(self, fetch: Fetch) -> Path:
        """Return the folder, made if it is not there; raises the errors of `fetch` and MachineError."""
        if self.is_made():
            return self.folder
        folder, tokenizers = self.folder, self.tokenizers
        repositories = {
            source: fetch(
                source, tuple(t["folder"] for t in tokenizers.values() if t["source"] == source)
            )
            for source in self.sources
        }
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            making = Path(mkdtemp(prefix=TEMPORARY_PREFIX, dir=folder.parent))
            for component, config in self.configs.items():
                file = making / component
                file.parent.mkdir(exist_ok=True)
                # The same bytes on Windows: a part's identity, and with it
                # the cache, is a hash of these files too.
                file.write_text(json.dumps(config, indent=2), encoding="utf-8", newline="\n")
            for name, tokenizer in tokenizers.items():
                shutil.copytree(
                    repositories[tokenizer["source"]] / tokenizer["folder"], making / name
                )
            shutil.rmtree(folder, ignore_errors=True)  # one that lacks a file
            try:
                os.replace(making, folder)  # noqa: PTH105 - whole or absent
            except OSError:
                if not self.is_made():  # another process was first
                    raise
                shutil.rmtree(making, ignore_errors=True)
        except OSError as error:
            raise disk_error(folder, error) from error
        return folder


def open_companion(facts: BaseFacts, present: Iterable[str]) -> OpenCompanion | None:
    """Return how to make a checkpoint's companion, None where a repository with weights is needed anyway.

    `present` are the parts, and the components of the text encoders, that the user's files hold.
    """
    table = _table()
    parts: Mapping[str, str] = table["families"].get(facts.family, {})
    encoders = {name: part for name, part in parts.items() if name.startswith("text_encoder")}
    if not encoders or not {*present} >= {"vae", *encoders}:
        return None
    tokenizers = {tokenizer_of(name): table["tokenizers"][part] for name, part in encoders.items()}
    networks = {"transformer": facts.architecture, "vae": table["configs"][parts["vae"]]}
    texts = {name: table["configs"][part] for name, part in encoders.items()}
    index = {
        "_class_name": parts["pipeline"],
        "scheduler": ["diffusers", facts.scheduler["_class_name"]],
        **{name: ["diffusers", config["_class_name"]] for name, config in networks.items()},
        **{name: ["transformers", config["architectures"][0]] for name, config in texts.items()},
        **{name: ["transformers", each["class"]] for name, each in tokenizers.items()},
    }
    configs = {
        "model_index.json": index,
        "scheduler/scheduler_config.json": facts.scheduler,
        **{f"{name}/config.json": config for name, config in (networks | texts).items()},
    }
    # The hash in the name: a folder made from other configurations is never taken for this one.
    content = json.dumps([facts.source, configs, tokenizers])
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    name = f"{facts.source.replace('/', '--')}-{digest}"
    return OpenCompanion(
        folder=user_cache_folder() / "companions" / name, configs=configs, tokenizers=tokenizers
    )


def is_makeable(family: str) -> bool:
    """Whether companions of a family can be made for those who have all weights as files."""
    return family in _table()["families"]


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    return read_json(FILE)
