"""Settings files of other trainers, read as settings of this one: the file, the trainer, every key.

Input: a TOML, JSON or YAML file, a script that starts the trainer, or a LoRA file that tells how it was trained.
Output: `Foreign`. The trainer is told by its keys; what is nobody's, or is of this program, is refused and says why.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

import yaml

from lora_trainer import families
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.config import build_config, setting_keys
from lora_trainer.config.inputs import NO_ASSISTANT
from lora_trainer.importing import trained_files
from lora_trainer.importing.command_lines import SHELLS, read_commands, read_variables
from lora_trainer.importing.foreign import LIST, Foreign, Trainer, apply, flattened
from lora_trainer.importing.trainers import (
    ai_toolkit,
    diffusion_pipe,
    onetrainer,
    sd_scripts,
    sd_scripts_relatives,
    simpletuner,
)
from lora_trainer.lora_file.metadata import SETTINGS_ENTRY

# Those that are known, in the order in which they are asked.
_MODULES = (
    sd_scripts_relatives, simpletuner, ai_toolkit, onetrainer, diffusion_pipe, sd_scripts
)  # fmt: skip
TRAINERS: tuple[Trainer, ...] = tuple(one for module in _MODULES for one in module.TRAINERS)
MAX_BYTES = 4 << 20


def import_file(file: Path) -> Foreign:
    """Read a settings file of another trainer, and the further files beside it that it names.

    Raises InputError for one that cannot be read or is not a known trainer's, RequestError for what it says
    and cannot be done here.
    """
    try:
        if file.suffix.lower() == trained_files.SUFFIX:
            raw = trained_files.header_of(file)
        else:
            with file.open("rb") as stream:
                raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error}", fix="give a readable UTF-8 file") from None
    return _imported(raw, str(file), beside=file.parent)


def import_bytes(raw: bytes, name: str, *, images: Path | None = None) -> Foreign:
    """Read the bytes of a settings file called `name`, as a page uploads it; opens no file. Raises as `import_file`.

    Of a LoRA file they are those of its header.
    Further files that it names are not there, nor are images that would have to be counted, unless they are in the
    folder `images`; that is said.
    """
    return _imported(raw, name, beside=None, images=images)


def _imported(raw: bytes, file: str, *, beside: Path | None, images: Path | None = None) -> Foreign:
    data: Mapping[str, Any]
    still_open: Mapping[str, str] = {}
    suffix = PurePath(file).suffix.lower()
    variables = read_variables(decoded(raw, file), file) if suffix in (".env", ".sh") else {}
    if simpletuner.is_environment(variables):
        data, still_open = simpletuner.options_of_environment(variables)
    elif suffix == trained_files.SUFFIX:
        entries = trained_files.entries_of(raw, file)
        if SETTINGS_ENTRY in entries:
            raise InputError(
                f"{file} is a LoRA of this program, with its settings in its header",
                fix="drop it on a page of `lora-train gui`, which makes a training of them",
            )
        data, still_open = trained_files.options(entries, file)
    elif suffix in SHELLS:
        command = read_commands(decoded(raw, file), file)
        data, still_open = _with_config_file(command.options, beside), command.open
    else:
        data = read_tables(raw, file)
    trainer, values = recognised(data, file)
    foreign = Foreign(
        trainer=trainer.name,
        table=trainer.table,
        values=values,
        data=data,
        beside=beside,
        images=images,
    )
    try:
        apply(trainer, foreign)
        # What trainers allow and settings here do not, and what presets here do unasked.
        every = foreign.settings.get("output.save_every_steps")
        if every and every > (foreign.settings.get("train.steps") or math.inf):
            note = f" ({every}: nothing is saved before the end)"
            foreign.settings["output.save_every_steps"] = 0
            foreign.sources["output.save_every_steps"] += note
        if "data.validation_fraction" not in foreign.settings:
            foreign.set("data.validation_fraction", 0.0, note="nothing is held out there")
        if "optimizer.name" in foreign.settings and "data.caption_dropout" not in foreign.settings:
            foreign.set("data.caption_dropout", 0.0, note="it is not there")
        if "base.assistant" not in foreign.settings and _may_get_assistant(foreign):
            foreign.set("base.assistant", NO_ASSISTANT, note="none is used there")
        build_config(foreign.settings)
        foreign.without_equivalent |= still_open
    except RequestError as error:
        raise RequestError(
            f"{file} is of {trainer.name} and says what cannot be done here: {error.found}",
            fix=error.fix,
        ) from None
    if foreign.is_dataset:
        foreign.dataset = file
    # All keys get the names that the file has for them.
    name_in_file = foreign.called
    foreign.nearest, foreign.nothing_to_set, foreign.without_equivalent = (
        {name_in_file.get(key, key): why for key, why in rows.items()}
        for rows in (foreign.nearest, foreign.nothing_to_set, foreign.without_equivalent)
    )
    foreign.nothing_to_set |= foreign.out_of_use
    for key, source in foreign.sources.items():
        foreign.sources[key] = " ".join(name_in_file.get(word, word) for word in source.split(" "))
    foreign.unknown = [name_in_file.get(key, key) for key in foreign.unknown]
    return foreign


def _may_get_assistant(foreign: Foreign) -> bool:
    """Return whether the base may be one that is trained with an assistant here, and without one there."""
    if not foreign.is_flow or foreign.table.get("has_default_assistants"):
        return False
    known = families.known_base(str(foreign.settings.get("base.model", "")))
    published = families.family(known.family).published if known else ()
    return known is None or any(release.assistant for release in published)


def decoded(raw: bytes, file: str) -> str:
    """Return the text in the bytes of a file; raises InputError for what is not text, or too much of it."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {file}: {error}", fix="give a readable UTF-8 file") from None
    if len(raw) > MAX_BYTES:
        raise InputError(
            f"{file} is larger than a settings file can be", fix="give a settings file"
        )
    return text


def _with_config_file(options: dict[str, Any], beside: Path | None) -> Mapping[str, Any]:
    """Return options with those of the settings file that they name beneath them, as sd-scripts reads both.

    Without the file they stay as they are, and `config_file` is named with the other keys.
    """
    named = options.get("config_file")
    if not isinstance(named, str) or beside is None:
        return options
    file = beside / PureWindowsPath(named).as_posix()
    file = file if file.suffix == ".toml" else file.with_name(f"{file.name}.toml")
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError:
        return options
    below = sd_scripts.without_sections(read_tables(raw, str(file)))
    return {**below, **{key: value for key, value in options.items() if key != "config_file"}}


def read_tables(raw: bytes, file: str) -> Mapping[str, Any]:
    """Return the values in the bytes of a TOML, JSON or YAML file called `file`; raises InputError."""
    text = decoded(raw, file)
    kind, parse = _PARSERS.get(PurePath(file).suffix.lower(), ("TOML", tomllib.loads))
    try:
        data = parse(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        line = " ".join(str(error).split())[:200]
        raise InputError(f"{file} is not {kind}: {line}", fix="correct that line") from None
    if isinstance(data, list):
        data = {LIST: data}
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise InputError(
            f"{file} holds no table of settings", fix=f"give a settings file of {_names()}"
        )
    return data


def recognised(data: Mapping[str, Any], file: str) -> tuple[Trainer, dict[str, Any]]:
    """Return whose file it is, and its values by flat key; raises InputError."""
    for trainer in TRAINERS:
        values = trainer.flat(data)
        if values is not None:
            return trainer, values
    our_keys = set(setting_keys())
    keys_of_ours = our_keys & {*data, *flattened(data)}
    if keys_of_ours or ("settings" in data and isinstance(data["settings"], Mapping)):
        raise InputError(
            f"{file} is a settings file of this program already", fix=f"use it with --config {file}"
        )
    keys = ", ".join(sorted(data)[:6]) or "nothing"
    raise InputError(
        f"{file} is of no trainer that is known here (it holds {keys})",
        fix=f"give a settings file of {_names()}",
    )


def _names() -> str:
    return ", ".join(dict.fromkeys(trainer.name.partition(" (")[0] for trainer in TRAINERS))


class _Loader(yaml.SafeLoader):  # type: ignore[misc] # PyYAML has no annotations
    """Refuses aliases, of which a short file can make gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not read")
        return super().compose_node(parent, index)


_PARSERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    ".toml": ("TOML", tomllib.loads),
    ".json": ("JSON", json.loads),
    ".yaml": ("YAML", partial(yaml.load, Loader=_Loader)),
    ".yml": ("YAML", partial(yaml.load, Loader=_Loader)),
}


def settings_toml(imported: Foreign) -> str:
    """Return the settings as TOML, and as comments where they come from and what is not in them."""
    as_toml = {
        key: {_toml(name): fields for name, fields in value.items()}  # of data.folders
        if isinstance(value, Mapping)
        else value
        for key, value in imported.settings.items()
    }
    our_keys = dict(zip(flattened(as_toml), flattened(imported.settings), strict=True))
    lines = [*(f"# {line}" for line in remarks(imported)), ""]
    for name, value in sorted(flattened(as_toml).items()):
        source = imported.sources.get(our_keys[name])
        lines.append(f"{name} = {_toml(value)}" + (f"  # {_one_line(source)}" if source else ""))
    return "\n".join(lines).strip() + "\n"


def settings_json(imported: Foreign) -> str:
    """Return the settings as JSON."""
    return json.dumps(imported.settings, indent=2, ensure_ascii=False) + "\n"


def report(imported: Foreign) -> str:
    """Return where the settings come from, and what is not in them, as text."""
    rows = [_one_line(f"{key} from {source}") for key, source in imported.sources.items()]
    return "\n".join([*remarks(imported), "Settings:", *(f"  {row}" for row in rows)])


def remarks(imported: Foreign) -> Iterator[str]:
    """Yield lines that say what to train on, and name each key that is not among the settings."""
    yield f"A settings file of {imported.trainer}"
    if imported.dataset is not None:
        yield _one_line(f"Train on: {imported.dataset}")
    parts = (
        ("The nearest that there is here:", imported.nearest),
        ("Without an equivalent here:", imported.without_equivalent),
        ("Nothing to set for:", imported.nothing_to_set),
    )
    for title, rows in parts:
        if rows:
            yield title
            yield from (_one_line(f"  {key} {why}") for key, why in sorted(rows.items()))
    if imported.unknown:
        yield _one_line(f"Not known: {', '.join(sorted(imported.unknown))}")


def _one_line(text: str) -> str:
    """Return a foreign text as a comment can hold it: TOML refuses control characters there."""
    return "".join(mark if mark.isprintable() else "\ufffd" for mark in text)


def _toml(value: Any) -> str:
    # JSON is TOML here, but for one control character that JSON leaves as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
