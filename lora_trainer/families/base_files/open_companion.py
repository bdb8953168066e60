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
from lora_trainer.families.base_files.base_folder import read_json
from lora_trainer.families.facts import BaseFacts

FILE = Path(__file__).with_name("open_companions.json")
DOWNLOAD_BYTES = 3_700_000
"""CLIP's vocabulary and merges twice, T5's SentencePiece model: the files from open repositories."""
Fetch = Callable[[str, tuple[str, ...]], Path]
"""Downloads the texts in some folders of a repository and returns its local folder."""


@dataclass(frozen=True, kw_only=True)
class OpenCompanion:
    """How the companion of a checkpoint with these facts is made."""

    facts: BaseFacts
    parts: Mapping[str, str]
    """Component -> name of its configuration; `pipeline` -> diffusers' class."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The open repositories with the tokenizers."""
        return tuple(sorted({each["source"] for each in self._tokenizers().values()}))

    def folder(self) -> Path:
        """Return where the folder is or will be; another content is another folder."""
        # The hash in the name: a folder made from other configurations is never taken for this one.
        content = json.dumps([self.facts.source, self._configs(), self._tokenizers()])
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        name = f"{self.facts.source.replace('/', '--')}-{digest}"
        return user_cache_folder() / "companions" / name

    def is_made(self) -> bool:
        """Whether the folder is there with all its files."""
        folder = self.folder()
        tokenizers = (folder / name for name in self._tokenizers())
        return all((folder / name).is_file() for name in self._configs()) and all(
            any(tokenizer.glob("*")) for tokenizer in tokenizers
        )

    def make(self, fetch: Fetch) -> Path:
        """Return the folder, made if it is not there; raises the errors of `fetch` and MachineError."""
        folder = self.folder()
        if self.is_made():
            return folder
        tokenizers = self._tokenizers()
        repositories = {
            source: fetch(
                source, tuple(t["folder"] for t in tokenizers.values() if t["source"] == source)
            )
            for source in self.sources
        }
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            making = Path(mkdtemp(prefix=TEMPORARY_PREFIX, dir=folder.parent))
            for component, config in self._configs().items():
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

    def _encoders(self) -> Mapping[str, str]:
        return {
            name: config for name, config in self.parts.items() if name.startswith("text_encoder")
        }

    def _tokenizers(self) -> Mapping[str, Mapping[str, str]]:
        """Return folder of a tokenizer -> repository, folder there and class."""
        return {
            name.replace("text_encoder", "tokenizer"): _table()["tokenizers"][config]
            for name, config in self._encoders().items()
        }

    def _configs(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the folder's JSON files."""
        configs = _table()["configs"]
        networks = {name: configs[config] for name, config in self._encoders().items()}
        vae = configs[self.parts["vae"]]
        index = {
            "_class_name": self.parts["pipeline"],
            "scheduler": ["diffusers", self.facts.scheduler["_class_name"]],
            "transformer": ["diffusers", self.facts.architecture["_class_name"]],
            "vae": ["diffusers", vae["_class_name"]],
            **{
                name: ["transformers", config["architectures"][0]]
                for name, config in networks.items()
            },
            **{name: ["transformers", each["class"]] for name, each in self._tokenizers().items()},
        }
        return {
            "model_index.json": index,
            "scheduler/scheduler_config.json": self.facts.scheduler,
            "transformer/config.json": self.facts.architecture,
            "vae/config.json": vae,
            **{f"{name}/config.json": config for name, config in networks.items()},
        }


def open_companion(facts: BaseFacts, present: Iterable[str]) -> OpenCompanion | None:
    """Return how to make a checkpoint's companion, None where a repository with weights is needed anyway.

    `present` are the parts, and the components of the text encoders, that the user's files hold.
    """
    parts: Mapping[str, str] | None = _table()["families"].get(facts.family)
    parts_present = set(present)
    if parts is None or "vae" not in parts_present:
        return None
    companion = OpenCompanion(facts=facts, parts=parts)
    return companion if parts_present >= companion._encoders().keys() else None


def is_makeable(family: str) -> bool:
    """Whether companions of a family can be made for those who have all weights as files."""
    return family in _table()["families"]


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    return read_json(FILE)
