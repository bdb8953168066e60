"""The commands that look around, without torch: check, inspect, models, presets, doctor and import; and gui.

They write nothing but caches, and `import` its settings file.
"""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lora_trainer.cli.main import Base, Json, Reply, Sets, overrides
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.events import shown
from lora_trainer.common.wording import bytes_text
from lora_trainer.config import PRIORITIES
from lora_trainer.config.layers import TIERS, load_presets, preset_families
from lora_trainer.lora_file.inspect import inspect_file
from lora_trainer.run.plan_text import STYLES, add_row, finding_line, key_table

# Number of blocks of an adapter that are listed with their norm.
BLOCKS_SHOWN = 12


def check(dataset: Path, /, *, base: Base = None, set_: Sets = [], json: Json = False) -> Reply:  # noqa: B006 - cyclopts reads the default, nobody mutates it
    """Report on a dataset: score, buckets, unusable files, captions, duplicates; each with advice."""
    from lora_trainer.run.prepare import Request, examine

    report, limit = examine(Request(dataset=dataset, overrides=overrides(set_, base=base)))
    if json:
        pictures = list(report.pictures)
        return {**report.to_json(), "pictures": pictures, "caption_limit": limit}
    if not report.images:
        said = Text(f"{shown(str(dataset))} is a slider: it can be read, and needs no images")
        return Group(said, *(Text(shown(finding_line(each))) for each in report.findings))
    parts = ", ".join(f"{name} {value:.2f}" for name, value in report.parts.items())
    head = key_table()
    add_row(head, "images", str(report.images))
    add_row(head, "score", f"{report.score:.2f} of 1 ({parts})")
    add_row(head, "buckets", ", ".join(f"{name} x{n}" for name, n in report.buckets.items()))
    findings = [
        Text(shown(finding_line(each)), style=STYLES[each.severity]) for each in report.findings
    ]
    return Group(head, *(findings or [Text("no findings")]))


def inspect(file: Path, /, *, json: Json = False) -> Reply:
    """Describe a LoRA file: family, key format, rank, alpha, metadata, problems."""
    inspection = inspect_file(file)
    if json:
        return inspection.to_json()
    table = key_table()
    add_row(table, "family", inspection.family)
    add_row(table, "format", inspection.format)
    add_row(table, "kind", ", ".join(inspection.kinds))
    for key, spread in (("rank", inspection.rank), ("alpha", inspection.alpha)):
        text = "not stated"
        if spread is not None:
            ends = dict.fromkeys(f"{end:g}" for end in spread)
            text = " to ".join(ends)
        add_row(table, key, text)
    add_row(table, "modules", str(inspection.modules))
    for key, (tokens, width) in inspection.embeddings.items():
        add_row(table, shown(key), f"{tokens} new tokens of {width} numbers")
    for key, value in inspection.metadata.items():
        add_row(table, shown(key), shown(value if len(value) <= 100 else value[:97] + "..."))
    lines: list[RenderableType] = [table]
    if norms := inspection.norms:
        # The blocks with the largest norms, with their share of the sum of squared norms.
        blocks = Table("block", "norm", "share", box=None, pad_edge=False)
        largest = sorted(norms, key=lambda block: norms[block], reverse=True)
        whole = math.fsum(norm**2 for norm in norms.values()) or 1.0
        for block in largest[:BLOCKS_SHOWN]:
            numbers = f"{norms[block]:.4g}", f"{norms[block] ** 2 / whole:.1%}"
            add_row(blocks, block, *(Text(number, justify="right") for number in numbers))
        lines += ["", blocks]
        if rest := largest[BLOCKS_SHOWN:]:
            more = f"and {len(rest)} blocks with norms up to {norms[rest[0]]:.4g}"
            lines.append(Text(more, style="dim"))
        lines.append("")
    lines += [
        Text(shown(f"{one.severity}: {one.what}. {one.advice}"), style=STYLES[one.severity])
        for one in inspection.problems
    ]
    return Group(*lines)


def models(*folders: Path, json: Json = False) -> Reply:
    """List the base models that lie on this machine already: in ComfyUI, Forge, A1111 and others, in FOLDERS.

    :param folders: further folders, such as one of another program
    """
    from huggingface_hub import constants

    from lora_trainer.families.files.found_models import found_models
    from lora_trainer.families.files.model_folders import model_folders

    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise InputError(f"the folder {missing[0]} does not exist", fix="name an existing one")
    places = model_folders(folders)
    found = found_models(places, hub_cache=Path(constants.HF_HUB_CACHE))
    if json:
        return {
            "folders": [{"folder": str(each.path), "program": each.program} for each in places],
            "models": [{"name": each.name, **asdict(each)} for each in found.models],
            "is_cut": found.is_cut,
        }
    bases = [each for each in found.models if each.verdict == "base"]
    if not bases:
        looked = ", ".join(str(each.path) for each in places)
        return f"no base model was found on this machine; looked in {looked or 'no folder'} and the Hub's cache"
    table = Table("base model", "kind", "size", "of", "--base", box=None, pad_edge=False)
    for each in bases:
        row = (each.name, each.kind, bytes_text(each.size_bytes), each.program, each.source)
        add_row(table, *map(shown, row))
    others = [each for each in found.models if each.verdict == "other"]
    lines: list[RenderableType] = [table]
    if others:
        lines.append(
            Text(f"left out: {len(others):,} files that are not base models (--json)", "dim")
        )
    lines += [
        Text(shown(f"warning: {each.source} {each.why}"), style=STYLES["warning"])
        for each in found.models
        if each.verdict == "broken"
    ]
    return Group(*lines)


def presets() -> Reply:
    """List the presets: the settings of each hardware tier and priority."""
    table = Table("family", "tier", "priority", "sets", box=None, pad_edge=False)
    for family in preset_families():
        presets = load_presets(family)
        for tier in TIERS:
            for priority in PRIORITIES:
                reason = presets.unsupported(tier, priority)
                cell = presets.cells.get(f"{tier}/{priority}", {})
                values = {**presets.tiers[tier], **presets.priorities[priority], **cell}
                sets = ", ".join(f"{key}={value}" for key, value in values.items())
                text = f"unsupported: {reason}" if reason else sets
                add_row(table, family, tier, priority, text)
    return table


def doctor(
    *,
    clear_cache: bool = False,
    fix: bool = False,
    set_: Sets = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
    json: Json = False,
) -> Reply:
    """Check this machine: its hardware, the device trainings use and why, and how to fix problems.

    :param clear_cache: delete the encoded images and captions of all trainings
    :param fix: remove what killed trainings left, and damaged cache files
    """
    from lora_trainer.config.config import build_config
    from lora_trainer.dataset.scan import cache_in

    if clear_cache and fix:
        raise RequestError("--clear-cache and --fix contradict each other", fix="give one of them")
    if set_ and not clear_cache and not fix:
        raise RequestError(
            "--set has no effect without --clear-cache or --fix", fix="leave --set out, or add one"
        )
    config = build_config(overrides(set_))
    cache = cache_in(config.data)
    if clear_cache:
        from lora_trainer.cache.store import clear

        count, size_bytes = clear(cache)
        if json:
            return {"folder": str(cache.root), "files": count, "bytes": size_bytes}
        return (
            f"removed {count:,} entries, {bytes_text(size_bytes)}, from {cache.root}; "
            "the next trainings encode their images and captions again"
        )
    from lora_trainer.hardware.machine import detect
    from lora_trainer.run.machine_report import checks, doctor_json, doctor_text, mend

    repairs = mend(cache, Path(config.output.folder)) if fix else []
    hardware = detect()
    machine_checks = list(checks(hardware, cache=cache.root, environment=os.environ))
    if json:
        report = {**doctor_json(hardware), "checks": [check._asdict() for check in machine_checks]}
        return {**report, "repairs": [each._asdict() for each in repairs]} if fix else report
    return doctor_text([*machine_checks, *repairs])


def gui(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
) -> None:
    """Open the graphical interface; its options are those of `lora-train-gui --help`."""
    importlib.import_module("lora_trainer.gui.app").main(words)


def import_settings(
    file: Path,
    /,
    *,
    output: Path | None = None,
    force: bool = False,
    json: Json = False,
) -> Reply:
    """Turn another trainer's settings file into a lora-train settings file; reports every key.

    :param output: settings file to write, .toml or .json [default: print TOML]
    :param force: replace an existing output
    """
    from lora_trainer.common.files import write_atomic
    from lora_trainer.importing.reading import import_file, report, settings_json, settings_toml
    from lora_trainer.lora_file.tensor_file import refuse_existing

    writers = {".toml": settings_toml, ".json": settings_json}
    if output is not None and output.suffix.lower() not in writers:
        raise RequestError(f"{output} is not a settings file", fix="name it .toml or .json")
    if output is not None:
        refuse_existing(output, force=force)
    imported = import_file(file)
    if output is not None:
        write_atomic(output, writers[output.suffix.lower()](imported).encode())
    if json:
        return imported.to_json()
    return settings_toml(imported) if output is None else f"{report(imported)}\nwrote {output}"
