"""The base models as the page Train shows them: cards of the releases, what each is worth here, models that are here.

Inputs: the releases that the families know, plans of the draft on other bases, the answer of `lora-train models`, the
runs of this machine. Outputs: plain values for bases.js. A picture on a card is a sample that a run of this machine
or the miniature has drawn; any other card has the emblem of its family (emblem.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from lora_trainer.common.files import json_bytes, read_json_object, write_atomic
from lora_trainer.common.wording import bytes_text
from lora_trainer.config.inputs import MINIATURES
from lora_trainer.queue.rules import is_offline
from lora_trainer.reporting import base_names
from lora_trainer.reporting.run_record import read

from .. import bases, command_lines, run_best, runs, sharing
from ..drafts import PAIRS, Draft
from ..markup import capital, plain
from ..media import run_url
from ..server.translation import Words
from ..workplace import Workplace
from . import fields, plan

# Those that are `offered` first are in sight; the others are folded away.
_IN_SIGHT = 3
_REMEMBERED = "model_folders.json"
_MAX_FOLDERS = 20
# As the planner refuses a training that fits nowhere.
_NEEDS = re.compile(r"needs at least (?P<size>\d+\.\d+ GiB)")
# What the refusal of a base says that is nowhere.
_ABSENT = "does not exist"
_COMPANIES = {
    "free": "Free for companies",
    "conditions": "Conditions for companies",
    "no": "Not for companies",
}


def cards(
    work: Workplace, released: Sequence[Mapping[str, Any]], said: Words
) -> list[dict[str, Any]]:
    """Return the cards of the releases: picture, name, what it is good for, licence, what there is to download.

    Those on this machine come first; all but those and the usual ones are folded away.
    """
    here, drawn = bases.downloaded(), own_samples(work)
    to_download = "offline: {#} missing" if is_offline(os.environ) else "{#} to download"
    found = [
        {
            "source": row["source"],
            "name": base_names.title(str(row["source"])),
            "picture": drawn.get(row["source"]) or emblem_url(row["family"], row["subjects"]),
            "own": row["source"] in drawn,
            "good_for": said.message(row["good_for"] or "Seldom used"),
            "subjects": row["subjects"],
            "recommended": row["source"] == bases.RECOMMENDED,
            "folded": row["source"] not in here and row["offered"] > _IN_SIGHT,
            "download": said("on this machine")
            if row["source"] in here
            else said(to_download, bytes_text(row["download_bytes"])),
            "here": row["source"] in here,
            "size": said("Images of {} px", row["resolution_px"]),
            "edits": row["edits"],
            "companies": row["companies"],
            "licence_word": said(_COMPANIES[row["companies"]]) if row["companies"] else "",
            "licence": row["licence"],
            "allows": said.message(row["allows"]),
            "gated": row["gated"] and row["source"] not in here,
            "checkpoints": row["checkpoints"],
        }
        for row in released
    ]
    offered = {row["source"]: row["offered"] for row in released}
    return sorted(found, key=lambda card: (not card["here"], offered[str(card["source"])]))


def emblem_url(family: str, subjects: Iterable[str]) -> str:
    """Return the address of the emblem of a family for what a release is chosen for."""
    return "/train/emblem.svg?" + urlencode({"family": family, "of": next(iter(subjects), "")})


def own_samples(work: Workplace) -> dict[str, str]:
    """Return for each base the address of a sample of the newest run that trained on it here: of its best step."""
    found: dict[str, str] = {}
    for run in runs.find_runs(work.runs):
        folder = work.runs / run.name
        with suppress(LoraTrainError):  # a damaged record names no base
            source = read(folder).base.source
            if source and source not in found and (file := _best_sample(folder)):
                found[source] = run_url(run.name, *file.relative_to(folder).parts)
    return found


def _best_sample(folder: Path) -> Path | None:
    """Return the first sample of the step that somebody found best, else of the last one that has samples."""
    best = run_best.read_best(folder)
    of_best = sorted((folder / f"samples/step-{best.step:08d}").glob("*.png")) if best else []
    return next(iter([*of_best, *runs.newest_samples(folder)]), None)


# ---- what a base is worth on this machine


def verdict(
    plans: command_lines.Plans, draft: Draft, said: Words, *, vram_gib: float | None = None
) -> Mapping[str, Any]:
    """Return the verdict on a draft: a light, a word, how long it takes, why, and which base its plan picks.

    With `vram_gib` it is the verdict for a GPU of that memory somewhere else.
    """
    try:
        answer = plans.of(draft, vram_gib=vram_gib)
    except (LoraTrainError, OSError) as problem:
        return {"fits": "", "said": said("Not known"), "why": said.message(plain(str(problem)))}
    return verdict_of(answer, said)


def that_fits(plans: command_lines.Plans, draft: Draft, said: Words) -> str:
    """Return the base for other programs that this draft fits on, the one that is offered first; empty without one.

    Pairs need one that edits. None is offered whose training takes more than a night here.
    """
    of_pairs = draft.kind == PAIRS
    releases = [row for row in plans.releases() if row["edits"] or not of_pairs]
    for row in sorted(releases, key=lambda release: release["offered"])[:_IN_SIGHT]:
        source = str(row["source"])
        with suppress(LoraTrainError):
            found = plans.of(fields.on_base(draft, source)).plan
            if found is not None and plan.pace(found, said).light == "good":
                return source
    return ""


def verdict_of(answer: command_lines.Answer, said: Words) -> Mapping[str, Any]:
    """Return the verdict that an answer of `lora-train plan` has."""
    found = answer.plan
    if found is None:
        refused = answer.error.removeprefix("error: ").partition(" Fix: ")[0].removesuffix(".")
        needs = _NEEDS.search(refused)
        return {
            "fits": "bad",
            "said": said(_refusal(refused, is_too_large=needs is not None)),
            "is_absent": _ABSENT in refused,
            "why": f"{capital(said.message(plain(refused)))}.",
            "too_large": needs is not None,
            "needs": said("needs {#}", needs["size"]) if needs else "",
            "needs_bytes": round(float(needs["size"].split()[0]) * 2**30) if needs else None,
        }
    pace = plan.pace(found, said)
    is_try_out = found.base in MINIATURES
    return {
        "fits": "slow" if is_try_out else pace.light,
        "needs": said("needs {#}", bytes_text(found.memory.peak_bytes)),
        "needs_bytes": found.memory.peak_bytes,
        "limit": said("usable: {#}", bytes_text(found.memory.limit_bytes)),
        "limit_bytes": found.memory.limit_bytes,
        "said": said("A try-out") if is_try_out else pace.word,
        "is_try_out": is_try_out,
        # What fits well needs no word beside its time.
        "line": _line(pace, said),
        "time": pace.time,
        "why": plan.fit(found, said),
        "images": [remark["short"] for remark in plan.of_images(found, said)],
        "picks": said.message(base_names.title(found.base)),
        "picked": found.base,
    }


def _line(pace: plan.Pace, said: Words) -> str:
    if not pace.time:
        return pace.word
    return pace.time if pace.light == "good" else said("{}: {}", pace.word, pace.time)


def _refusal(refused: str, *, is_too_large: bool) -> str:
    if is_too_large or " fit" in refused:
        return "Does not fit"
    return "Not on this machine" if _ABSENT in refused else "Not with these settings"


# ---- models that are on this machine already


def found_models(work: Workplace, said: Words, *, named: str = "") -> Mapping[str, Any]:
    """Return the models of other programs as cards, and what is broken; `named` is one more folder, kept.

    Raises InputError or MachineError for a folder that cannot be named; a refusal of the command is a line.
    """
    folders = _remembered(work)
    if named.strip():
        folder = work.path(named, what="a folder with models")
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder", fix="choose one that holds models")
        folders = list(dict.fromkeys([str(folder), *folders]))[:_MAX_FOLDERS]
        work.own.mkdir(parents=True, exist_ok=True)
        write_atomic(work.own / _REMEMBERED, json_bytes({"folders": folders}))
    program = sharing.remembered(work).folder
    words = [each for each in (*folders, program) if each and Path(each).is_dir()]
    answer = command_lines.ask(("models", *words, "--json"))
    if answer.values is None:
        return {"error": said.message(plain(answer.error)), "models": [], "broken": []}
    rows = [row for row in answer.values["models"] if _may_be_named(work, row["source"])]
    others = sum(row["verdict"] == "other" for row in rows)
    return {
        "models": [_found_card(row, said) for row in rows if row["verdict"] == "base"],
        "broken": [
            {"name": row["name"], "why": said.message(row["why"])}
            for row in rows
            if row["verdict"] == "broken"
        ],
        "others": said("{#} other files, such as LoRAs and VAEs, are left out", others)
        if others
        else "",
    }


def _found_card(row: Mapping[str, Any], said: Words) -> dict[str, Any]:
    like = f" ({base_names.title(row['like'])})" if row["like"] else ""
    return {
        "source": row["source"],
        "name": row["name"],
        "kind": f"{row['kind']}{like}",
        "of": row["program"] or str(Path(row["source"]).parent.name),
        "picture": emblem_url(row["family"], ()),
        "download": said("on this machine"),
        "size": said.figure(bytes_text(row["size_bytes"])),
        "found": True,
    }


def _may_be_named(work: Workplace, source: str) -> bool:
    """Whether a page may show a model: a file inside of the fence, or one of the Hub's cache, by its id."""
    return not Path(source).is_absolute() or work.allows(Path(source).resolve())


def _remembered(work: Workplace) -> list[str]:
    try:
        folders = read_json_object(work.own / _REMEMBERED).get("folders")
    except RequestError:  # none yet, or damaged
        return []
    return [each for each in folders if isinstance(each, str)] if isinstance(folders, list) else []
