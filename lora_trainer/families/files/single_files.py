"""Single files of a base: kind and parts of a checkpoint, files of its text encoders, the companion of missing parts.

Files are recognised by their tensors, whatever their names (recognise.py). Who has a checkpoint of a gated
release, its VAE and its text encoders as files needs of the gated repository nothing but configurations, which
are public facts (open_companions.json, read off the repositories' config.json), and tokenizers, which lie in
open repositories too: that companion is made in the user's cache. Torch-free: everything follows from headers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp
from typing import Any

from lora_trainer import families
from lora_trainer.common.errors import InputError, MachineError
from lora_trainer.common.files import TEMPORARY_PREFIX, disk_error, user_cache_folder, user_path
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.layout import Header, Part
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.base.stated import stated_in
from lora_trainer.families.base.tables import family_table
from lora_trainer.families.files.base_parts import elements, inner_names, read_json
from lora_trainer.families.files.hub_files import SUFFIXES, TEXT_SUFFIXES, fetch
from lora_trainer.families.files.recognise import LORA, first_fit, other_model, text_encoder_in
from lora_trainer.families.files.weight_files import read_header, refuse_quantised

# CLIP's vocabulary and merges twice, T5's SentencePiece model: the files from open repositories.
TOKENIZER_BYTES = 3_700_000


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint in one file, its parts, and the settings that name the files of its other parts."""

    settings: BaseSettings
    file: Path
    header: Header
    family: Family
    parts: frozenset[Part]

    @cached_property
    def own_facts(self) -> BaseFacts:
        """Facts of the release that the checkpoint is made like, with its own denoiser's size."""
        made_like = self.family.file_release(self.file, self.header)
        release = self.family.as_stated(made_like, stated_in(self.file))
        count = elements(self.header, self.family.denoiser_names(self.header).values())
        sizes = {**release.parameters, "denoiser": count}
        return self.family.facts_of(replace(release, parameters=sizes), source=release.ids[0])

    @cached_property
    def companion(self) -> str:
        """Source of the missing parts; auto: the default release where its encoders fit."""
        if self.settings.companion != "auto":
            return self.settings.companion
        default = self.family.published[0]
        # Equal encoders need one companion for all releases: it is downloaded once.
        parameters = self.own_facts.parts["text_encoder"].parameters
        fits = default.parameters["text_encoder"] == parameters
        return default.ids[0] if fits else self.own_facts.source

    @cached_property
    def present(self) -> frozenset[str]:
        """The folders of a base whose weights the user's files hold.

        Of the text encoders often some only: a base's own file may have CLIP without T5.
        """
        is_whole = "text_encoder" in self.parts
        texts = self.family.text.roles if is_whole else self.encoders(folder=None)
        has_vae = "vae" in self.parts or self.settings.vae is not None
        return frozenset({self.family.traits.folder, *texts, *(("vae",) if has_vae else ())})

    @cached_property
    def open_companion(self) -> OpenCompanion | None:
        """How to make the companion, None where a repository with weights is needed or named."""
        is_auto = self.settings.companion == "auto"
        return open_companion(self.own_facts, self.present) if is_auto else None

    def encoders(self, *, folder: Path | None) -> dict[str, Path]:
        """Return component -> file of the text encoders, as `encoder_files` does."""
        return encoder_files(self.settings, self.family, self.header, self.file, folder=folder)

    def facts_alone(self) -> BaseFacts:
        """Return facts without the companion, which is not on this machine.

        Sizes are counted in the files that are there; missing parts have the sizes of the release that the
        checkpoint is made like, in the precision in which the companion is published.
        """
        facts, source = replace(self.own_facts, source=self.settings.model), self.companion
        companion = known_release(source, name=f"base.companion {source}")
        if self.open_companion is not None:
            missing = f"tokenizers of {' and '.join(self.open_companion.sources)}"
            return replace(facts, download_bytes=TOKENIZER_BYTES, missing=missing)
        roles = self.family.text.roles
        encoders = [role for name, role in roles.items() if name in self.present]
        lacking = [role for name, role in roles.items() if name not in self.present]
        absent = [] if "vae" in self.present else ["the VAE"]
        sizes = {part: each.parameters for part, each in companion.parts.items()}
        # The precision in which the companion is published: 2 bytes for bf16, 4 for float32.
        bytes_each = round(companion.release.download_bytes / sum(sizes.values()))
        if lacking:
            absent.append(", ".join(lacking) if encoders else "the text encoders")
            sizes["text_encoder"] = sum(text_network(role).parameters for role in encoders)
        if "vae" not in self.present:
            sizes["vae"] = 0
        absent_bytes = max(companion.release.download_bytes - bytes_each * sum(sizes.values()), 0)
        return replace(
            facts,
            download_bytes=absent_bytes if absent else 0,
            missing=f"{', '.join([*absent, 'configurations and tokenizers'])} of {source}",
        )


def known_release(source: str, *, name: str) -> BaseFacts:
    """Return the facts of a well-known Hub id; raises MachineError for another one, called `name`."""
    facts = families.known_base(source)
    if facts is None:
        raise MachineError(
            f"{name} is not on this machine, and its name is not that of a well-known base",
            fix="start the training once to download it, or give a local diffusers folder",
        )
    return facts


def encoder_files(
    settings: BaseSettings,
    family: Family,
    header: Header,
    file: Path | None,
    *,
    folder: Path | None,
) -> dict[str, Path]:
    """Return component -> file of the text encoders in `base.text_encoders` and in an all-in-one file.

    A file is recognised by its tensors, whatever its name; encoders of one kind are told apart by their
    width, which is the companion's where its `folder` is known. Raises InputError for a file that holds no
    text encoder of the family.
    """
    text: dict[str, Path] = {}
    if not family.text.encoder_files:
        if settings.text_encoders:
            raise InputError(
                f"base.text_encoders is set, but family {family.name} reads its text encoders from a "
                "checkpoint or a folder",
                fix="leave base.text_encoders out, or name a folder with the encoders in base.companion",
            )
        return text
    for component, prefix in family.text.prefixes.items():
        inside = family.text.inside.get(component)
        is_in = any(name.startswith(prefix) for name in header)
        if file is not None and (is_in if inside is None else inner_names(header, inside)):
            text[component] = file
    for name in settings.text_encoders:
        path = Path(user_path(name))
        if not path.is_file() or path.suffix not in SUFFIXES:
            raise InputError(
                f"base.text_encoders names {name}, which is not a weight file",
                fix=f"give files that end in {', '.join(sorted(SUFFIXES))}",
            )
        text[_component_of(path, family, folder)] = path
    return text


def _component_of(file: Path, family: Family, folder: Path | None) -> str:
    """Return the component that a text encoder's file is; raises InputError when it is none of the family."""
    header = read_header(file)
    refuse_quantised(file)
    encoder = text_encoder_in(header)
    # CLIP-L and bigG are both "clip" here; their widths tell them apart below.
    kinds = {component: text_network(role).kind for component, role in family.text.roles.items()}
    name, kind, width = encoder or ("", "", 0)
    fitting = [component for component in kinds if kinds[component] == kind]
    if len(fitting) > 1 or (fitting and folder is not None):
        fitting = [
            component
            for component in fitting
            if _encoder_width(family.text.roles[component], component, folder) == width
        ]
    if fitting:
        # Miniature bases have CLIPs of equal width. Then the projection decides, which files of CLIP-L lack.
        return fitting[-1] if "text_projection.weight" in header else fitting[0]
    described = f"the text encoder {name} of width {width}" if encoder else "not a text encoder"
    raise InputError(
        f"base.text_encoders: {file.name} is {described}; family {family.name} has "
        f"{', '.join(family.text.roles.values())}",
        fix="give the text encoders of this base, or leave base.text_encoders out",
    )


def _encoder_width(role: str, component: str, folder: Path | None) -> Any:
    if folder is None:
        return text_network(role).width
    config = read_json(folder / component / "config.json")
    # Qwen2.5-VL nests its language model's numbers; d_model is T5's word for the width, target_dim a conditioner's.
    inner = config.get("text_config", config)
    words = ("hidden_size", "d_model", "target_dim")
    return next((inner[word] for word in words if word in inner), None)


def open_checkpoint(settings: BaseSettings, file: Path) -> Checkpoint:
    """Return the checkpoint in a file; raises InputError that names the kind of any other file."""
    if file.suffix not in SUFFIXES:
        raise InputError(
            f"base model {file.name} is not a weight file",
            fix=f"give a checkpoint ({', '.join(sorted(SUFFIXES))}), a diffusers folder or a Hub id",
        )
    header = read_header(file)
    allowed = f"allowed are text-to-image checkpoints of {', '.join(families.NAMES)}"
    family_and_parts = families.detect_file(header)
    family_name = family_and_parts[0].name if family_and_parts else ""
    # Before the check for quantisation: a quantised LoRA or ControlNet is better called by its name.
    if other := other_model(header, family=family_name, file_name=file.name):
        if other == LORA:
            raise InputError(
                f"{file.name} is a LoRA, not a base model",
                fix="give the base model it was trained on; to continue its training use --set train.init_from=FILE",
            )
        raise InputError(
            f"{file.name} is {other}, not a base model that can be trained; {allowed}",
            fix="give the text-to-image base model that it belongs to or was made from",
        )
    refuse_quantised(file)
    if family_and_parts is not None:
        family, parts = family_and_parts
        return Checkpoint(settings=settings, file=file, header=header, family=family, parts=parts)
    if part := first_fit(header, "lone_parts"):
        raise InputError(
            f"{file.name} is {part} alone, not a base model; {allowed}",
            fix=f"give a base model, and this file with --set base.vae={file.name} if it is the base's VAE",
        )
    if encoder := text_encoder_in(header):
        raise InputError(
            f"{file.name} is a text encoder alone ({encoder[0]}), not a base model; {allowed}",
            fix=f"give a base model, and this file with --set base.text_encoders={file.name}",
        )
    held = f"{len(header):,} tensors such as {min(header)[:80]!r}" if header else "no tensors"
    raise InputError(
        f"{file.name} holds {held}: an unknown architecture; {allowed}",
        fix="give a checkpoint of one of these families",
    )


# ---- companions that are made


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

    def make(self) -> Path:
        """Make the folder and return it; raises the errors of `fetch` and MachineError."""
        folder, tokenizers = self.folder, self.tokenizers
        repositories = {source: self._fetched(source) for source in self.sources}
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

    def _fetched(self, source: str) -> Path:
        """Download the tokenizers of a repository; return its local folder."""
        folders = {each["folder"] for each in self.tokenizers.values() if each["source"] == source}

        def choose(names: Iterable[str]) -> list[str]:
            paths = [PurePosixPath(name) for name in names]
            return [str(p) for p in paths if str(p.parent) in folders and p.suffix in TEXT_SUFFIXES]

        return fetch(
            source,
            revision=None,
            choose=choose,
            model_kind="tokenizer",
            instead="name a diffusers folder of this base with --set base.companion=FOLDER",
        )


def open_companion(facts: BaseFacts, present: Iterable[str]) -> OpenCompanion | None:
    """Return how to make a checkpoint's companion, None where a repository with weights is needed anyway.

    `present` are the folders whose weights the user's files hold.
    """
    table = companion_table()
    parts: Mapping[str, str] = family_table(facts.family).get("companion", {})
    encoders = {name: part for name, part in parts.items() if name.startswith("text_encoder")}
    if not encoders or not {*present} >= {"vae", *encoders}:
        return None
    text = families.family(facts.family).text
    tokenizers = {
        text.tokenizer_of(name): table["tokenizers"][part] for name, part in encoders.items()
    }
    networks = {"transformer": facts.release.architecture, "vae": table["configs"][parts["vae"]]}
    texts = {name: table["configs"][part] for name, part in encoders.items()}
    index = {
        "_class_name": parts["pipeline"],
        "scheduler": ["diffusers", facts.release.scheduler["_class_name"]],
        **{name: ["diffusers", config["_class_name"]] for name, config in networks.items()},
        **{name: ["transformers", config["architectures"][0]] for name, config in texts.items()},
        **{name: ["transformers", each["class"]] for name, each in tokenizers.items()},
    }
    configs = {
        "model_index.json": index,
        "scheduler/scheduler_config.json": facts.release.scheduler,
        **{f"{name}/config.json": config for name, config in (networks | texts).items()},
    }
    # The hash in the name: a folder made from other configurations is never taken for this one.
    content = json.dumps([facts.source, configs, tokenizers])
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    name = f"{facts.source.replace('/', '--')}-{digest}"
    return OpenCompanion(
        folder=user_cache_folder() / "companions" / name, configs=configs, tokenizers=tokenizers
    )


@cache
def companion_table() -> Mapping[str, Any]:
    """Return the contents of open_companions.json: the parts of which companions are made."""
    return read_json(Path(__file__).with_name("open_companions.json"))
