"""Single files of a base: kind and parts of a checkpoint, files of its text encoders, parts that are missing.

Files are recognised by their tensors, whatever their names (recognise.py). Torch-free: everything follows
from headers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lora_trainer import families
from lora_trainer.common.errors import InputError, MachineError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.base import BaseFacts, Family, Header, Part
from lora_trainer.families.base_files.base_folder import (
    SUFFIXES,
    read_header,
    read_json,
    refuse_quantised,
)
from lora_trainer.families.base_files.network_files import ENCODER_PREFIX
from lora_trainer.families.base_files.open_companion import DOWNLOAD_BYTES, open_companion
from lora_trainer.families.recognise import (
    first_fit,
    other_model,
    signature_tables,
    text_encoder_in,
)
from lora_trainer.families.text.text_layers import BY_ROLE

LORA = "a LoRA"


def facts_of_file(settings: BaseSettings, file: Path, family: Family) -> BaseFacts:
    """Return facts of a checkpoint whose companion is not on this machine, from its header.

    Sizes are counted in the files that are there; missing parts have the sizes of the release that the
    checkpoint is made like, in the precision in which the companion is published.
    """
    header = read_header(file)
    _, parts = recognised(file)
    facts = family.facts_from_file(file, header)
    source = companion_of(settings, family, facts)
    companion = known_release(source, name=f"base.companion {source}")
    roles = family.text.roles
    text = encoder_files(settings, family, header, file, folder=None)
    encoders = roles if "text_encoder" in parts else text
    present = {*parts, *encoders, *({"vae"} if settings.vae is not None else ())}
    makeable = open_companion(facts, present)
    if makeable is not None and settings.companion == "auto":
        return replace(
            facts,
            source=settings.model,
            download_bytes=DOWNLOAD_BYTES,
            missing=f"tokenizers of {' and '.join(makeable.sources)}",
        )
    absent = [] if "vae" in present else ["the VAE"]
    if lacking := [role for name, role in roles.items() if name not in encoders]:
        absent.append(", ".join(lacking) if encoders else "the text encoders")
    sizes = {part: each.parameters for part, each in companion.parts.items()}
    # The precision in which the companion is published: 2 bytes for bf16, 4 for float32.
    bytes_each = round(companion.download_bytes / sum(sizes.values()))
    if lacking:
        sizes["text_encoder"] = sum(BY_ROLE[roles[component]].parameters for component in encoders)
    if "vae" not in present:
        sizes["vae"] = 0
    absent_bytes = max(companion.download_bytes - bytes_each * sum(sizes.values()), 0)
    return replace(
        facts,
        source=settings.model,
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


def companion_of(settings: BaseSettings, family: Family, facts: BaseFacts) -> str:
    """Return the source of a checkpoint's missing parts; auto: the default release where its encoders fit."""
    if settings.companion != "auto":
        return settings.companion
    default = next(iter(family.releases.values()))
    # Equal encoders need one companion for all releases: it is downloaded once.
    if default.parts["text_encoder"] == facts.parts["text_encoder"]:
        return default.source
    return facts.source


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
    for component, role in family.text.roles.items():
        prefix = ENCODER_PREFIX.format(role=role)
        if file is not None and any(name.startswith(prefix) for name in header):
            text[component] = file
    for name in settings.text_encoders:
        path = Path(name).expanduser()
        if not path.is_file() or path.suffix not in SUFFIXES:
            raise InputError(
                f"base.text_encoders names {name}, which is no weight file",
                fix=f"give files that end in {', '.join(sorted(SUFFIXES))}",
            )
        text[_component_of(path, family, folder)] = path
    return text


def _component_of(file: Path, family: Family, folder: Path | None) -> str:
    """Return the component that a text encoder's file is; raises InputError when it is none of the family."""
    header = read_header(file)
    refuse_quantised(file, header)
    encoder = text_encoder_in(header)
    # CLIP-L and bigG are both "clip" here; their widths tell them apart below.
    kinds = {component: BY_ROLE[role].kind for component, role in family.text.roles.items()}
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
    content = first_fit(header, "lone_parts") or _other_or_lora(
        header, family=family.name, file=file
    )
    described = (
        f"the text encoder {name} of width {width}" if encoder else content or "no text encoder"
    )
    raise InputError(
        f"base.text_encoders: {file.name} is {described}; family {family.name} has "
        f"{', '.join(family.text.roles.values())}",
        fix="give the text encoders of this base, or leave base.text_encoders out",
    )


def _encoder_width(role: str, component: str, folder: Path | None) -> int:
    if folder is None:
        return BY_ROLE[role].width
    config = read_json(folder / component / "config.json")
    # Qwen2.5-VL nests its language model's numbers; d_model is T5's word for the width.
    inner = config.get("text_config", config)
    width = inner.get("hidden_size", inner.get("d_model"))
    return width if isinstance(width, int) else 0


def recognised(file: Path) -> tuple[Family, frozenset[Part]]:
    """Return family and parts of a checkpoint file; raises InputError that names the kind of any other file."""
    if not file.is_file():
        raise InputError(
            f"base model {file} does not exist",
            fix="give an existing file or folder, a Hub id (owner/name) or `embedded`",
        )
    if file.suffix not in SUFFIXES:
        raise InputError(
            f"base model {file.name} is no weight file",
            fix=f"give a checkpoint ({', '.join(sorted(SUFFIXES))}), a diffusers folder or a Hub id",
        )
    header = read_header(file)
    allowed = f"allowed are text-to-image checkpoints of {', '.join(families.MODULES)}"
    family_and_parts = families.detect_file(header)
    family_name = family_and_parts[0].name if family_and_parts else ""
    # Before the check for quantisation: a quantised LoRA or ControlNet is better called by its name.
    if other := _other_or_lora(header, family=family_name, file=file):
        if other == LORA:
            raise InputError(
                f"{file.name} is a LoRA, not a base model",
                fix="give the base model it was trained on; to continue its training use --set train.init_from=FILE",
            )
        raise InputError(
            f"{file.name} is {other}, not a base model that can be trained; {allowed}",
            fix="give the text-to-image base model that it belongs to or was made from",
        )
    refuse_quantised(file, header)
    if family_and_parts is not None:
        return family_and_parts
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
    first = next(iter(sorted(header)), "no tensor")
    raise InputError(
        f"{file.name} holds {len(header):,} tensors such as {first[:80]!r}: an unknown architecture; {allowed}",
        fix="give a checkpoint of one of these families",
    )


def _other_or_lora(header: Header, *, family: str, file: Path) -> str | None:
    """Return `LORA` or the name of another model that a file is, None for neither."""
    if any(mark in name for name in header for mark in signature_tables()["lora"]):
        return LORA
    return other_model(header, family=family, file_name=file.name)
