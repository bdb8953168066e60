"""The sixty faults that are tried, by id, and what was decided where a fault is met in another way.

A test is of a fault when its name begins with the id: `test_ckp_02_03_...` is of CKP-02 and CKP-03.
Tests of the parts that meet a fault, without the id in their name, are named here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_GROUPS = {
    "IMG": 9, "CAP": 5, "CFG": 5, "MOD": 6, "CAC": 7, "TRN": 6, "CKP": 9, "MPR": 4, "SEC": 6, "ENV": 3,
}  # fmt: skip
IDS = tuple(
    f"{group}-{number:02d}" for group, count in _GROUPS.items() for number in range(1, count + 1)
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is done to a run, the tests of parts that meet it, and what was decided about it."""

    what: str
    parts: tuple[str, ...] = ()
    decided: str = ""


_SCAN = "tests/data/test_scan.py"
_CACHE, _ENCODE = "tests/data/test_cache.py", "tests/data/test_encode.py"
_RUN, _STATES = "tests/test_run.py", "tests/checkpoint/test_states.py"
_ATTACKS = "tests/gui/test_attacks.py"
_PROCESSES = "tests/test_processes.py"

FAULTS: Mapping[str, Fault] = {
    "IMG-01": Fault(what="images that end early"),
    "IMG-02": Fault(what="flipped bytes, empty files, texts named .jpg"),
    "IMG-03": Fault(what="EXIF orientations, garbage in EXIF"),
    "IMG-04": Fault(
        what="transparency",
        decided="Always put on `data.alpha_background` and reported; alpha as a mask is not a feature.",
    ),
    "IMG-05": Fault(what="16 bit, CMYK, float, broken colour profiles"),
    "IMG-06": Fault(what="animations", parts=(_SCAN,)),
    "IMG-07": Fault(what="images that claim to be huge, tiny or thin ones"),
    "IMG-08": Fault(what="names that nearly clash, identical files", parts=(_SCAN,)),
    "IMG-09": Fault(what="loops of links, pipes, folders named .png", parts=(_SCAN,)),
    "CAP-01": Fault(what="missing and empty captions", parts=(_SCAN,)),
    "CAP-02": Fault(
        what="captions that are not UTF-8",
        parts=("tests/data/test_caption_rules.py",),
        decided="Read as Windows-1252 with the first odd byte named; no setting for it.",
    ),
    "CAP-03": Fault(what="a caption of a megabyte, of 500 tokens", parts=(_ENCODE,)),
    "CAP-04": Fault(
        what="markup, escapes, wildcards in captions",
        parts=("tests/data/test_caption_rules.py", "tests/output/test_report.py"),
    ),
    "CAP-05": Fault(what="captions and images that change during a run", parts=(_ENCODE,)),
    "CFG-01": Fault(what="unknown, misspelt and mistyped settings", parts=("tests/config/test_settings.py",)),
    "CFG-02": Fault(what="settings files that are not JSON", parts=("tests/config/test_layers.py",)),
    "CFG-03": Fault(
        what="settings that contradict each other",
        parts=("tests/config/test_settings.py", "tests/planning/test_plan.py"),
        decided="Told in three groups, each at once: values, how they go together, what base and GPU "
        "can do. A later group cannot be judged while an earlier one is wrong.",
    ),
    "CFG-04": Fault(
        what="too little memory, no GPU, no driver",
        parts=("tests/hardware/test_machine.py", "tests/planning/test_plan.py", "tests/test_prepare.py"),
        decided="Instead of falling to a lower tier the plan lowers single values and says why; with "
        "no GPU the embedded base is trained.",
    ),
    "CFG-05": Fault(
        what="a resume with other settings",
        parts=(_RUN, "tests/test_run_folder.py"),
        decided="No `--resume=weights`: `train.init_from` begins a new run with the weights of a file.",
    ),
    "MOD-01": Fault(
        what="pickles that run code",
        parts=("tests/model/test_load.py",),
        decided="Never opened, not even to convert them: nothing in the package loads a pickle.",
    ),
    "MOD-02": Fault(
        what="hostile safetensors headers",
        parts=("tests/output/test_inspect.py", "tests/families/test_single_file.py"),
        decided="Headers above 16 MB and names above 1,000 characters are refused; the format allows more.",
    ),
    "MOD-03": Fault(
        what="base files that are cut or have a flipped bit",
        parts=("tests/test_bad_bases.py",),
        decided="The hash of each part is in run.json: a resume tells of other weights. A flipped bit "
        "before the first run cannot be known, as files of a Hub come without a hash to hold it against.",
    ),
    "MOD-04": Fault(
        what="the wrong family, a LoRA, missing parts and shards",
        parts=("tests/test_bad_bases.py",),
    ),
    "MOD-05": Fault(
        what="a VAE that overflows",
        parts=(_ENCODE,),
        decided="The VAE always runs in fp32, so there is nothing to try again; latents that are not "
        "finite name the image.",
    ),
    "MOD-06": Fault(what="downloads that are refused or break off", parts=("tests/model/test_hub_files.py",)),
    "CAC-01": Fault(what="damaged cache entries", parts=(_CACHE,)),
    "CAC-02": Fault(what="kills while caching", parts=(_CACHE, "tests/test_resume_kill.py")),
    "CAC-03": Fault(what="changes that make entries stale", parts=(_CACHE, _ENCODE)),
    "CAC-04": Fault(what="a cache that cannot be written, or vanishes", parts=(_CACHE,)),
    "CAC-05": Fault(what="a size cap that is too small", parts=(_CACHE,)),
    "CAC-06": Fault(
        what="two runs with one cache",
        parts=(_CACHE,),
        decided="No lock: an entry is whole or absent and its name is its content, so two runs at most "
        "encode the same image twice.",
    ),
    "CAC-07": Fault(what="entries of another format", parts=(_CACHE,)),
    "TRN-01": Fault(
        what="not-a-number in losses and gradients",
        parts=("tests/train/test_guards.py", "tests/train/test_rollback.py"),
        decided="States saved amid skipped steps are never gone back to, also after a kill; the last good one stays.",
    ),
    "TRN-02": Fault(what="out of memory anywhere", parts=("tests/train/test_loop.py",)),
    "TRN-03": Fault(
        what="sample images that fail",
        decided="Prompts are settings, not a file that is read during a run, so they cannot be edited then.",
    ),
    "TRN-04": Fault(what="overflows of fp16", parts=("tests/train/test_loop.py",)),
    "TRN-05": Fault(
        what="logs and dashboards that cannot be written",
        parts=("tests/output/test_trackers.py", "tests/common/test_files.py"),
    ),
    "TRN-06": Fault(
        what="data workers that die",
        parts=("tests/data/test_loader.py",),
        decided="There are no worker processes: one thread prepares steps, and what it raises reaches "
        "the loop.",
    ),
    "CKP-01": Fault(
        what="random kills",
        parts=("scripts/reliability/kill.py", "tests/test_resume_kill.py"),
        decided="A campaign, not a test: the figures above.",
    ),
    "CKP-02": Fault(what="a kill at every operation of the disk"),
    "CKP-03": Fault(what="an error at every operation of the disk", parts=("tests/checkpoint/test_writer.py",)),
    "CKP-04": Fault(
        what="power cuts",
        parts=(_STATES,),
        decided="A real one needs root and a loop device; the order of fsync and rename is tested instead.",
    ),
    "CKP-05": Fault(what="damaged states", parts=(_STATES,)),
    "CKP-06": Fault(
        what="a disk too small for the states",
        parts=(_RUN,),
        decided="Fewer than two states cannot be asked for.",
    ),
    "CKP-07": Fault(what="signals, at any time", parts=(_RUN,)),
    "CKP-08": Fault(what="resumes of resumes, at ends of epochs, of finished runs", parts=(_RUN,)),
    "CKP-09": Fault(what="clocks, times of files, copied and renamed runs", parts=(_STATES,)),
    "MPR-01": Fault(what="a process of several that dies", parts=(_PROCESSES,)),
    "MPR-02": Fault(what="a process of several that freezes", parts=(_PROCESSES,)),
    "MPR-03": Fault(what="processes that would decide differently", parts=(_PROCESSES,)),
    "MPR-04": Fault(
        what="a resume with another number of processes, another batch size",
        parts=(_PROCESSES, "tests/test_run_folder.py"),
        decided="Goes on: with other processes the draws are the same (SAME-STREAM), with another batch "
        "size it is CHANGED.",
    ),
    "SEC-01": Fault(
        what="paths that a browser sends",
        parts=(_ATTACKS, "tests/gui/test_media.py", "tests/gui/test_app.py"),
        decided="Each of more than 25 spellings wherever a path is taken, 0 escapes.",
    ),
    "SEC-02": Fault(
        what="other hosts, other origins, no key, no password",
        parts=(_ATTACKS, "tests/gui/test_app.py"),
        decided="127.0.0.1 and a key by default; another address only with a password. There is no way "
        "to share it over somebody else's server.",
    ),
    "SEC-03": Fault(
        what="names and texts that are markup or commands",
        parts=(
            _ATTACKS,
            "tests/gui/test_e2e_pages.py",
            "tests/output/test_report.py",
            "tests/gui/test_train_page.py",
        ),
    ),
    "SEC-04": Fault(
        what="secrets in environment, settings, command line",
        parts=("tests/output/test_metadata.py",),
        decided="A setting that holds a token is refused. Folders stand in run.json, which a resume "
        "needs and which is not shared; in exported files, reports and model cards they do not.",
    ),
    "SEC-05": Fault(
        what="the interface is closed, opened twice, reloaded",
        parts=("tests/gui/test_e2e_training.py", "tests/test_queue_worker.py", "tests/output/test_status.py"),
        decided="Trainers are sessions of their own and are found again by their run folders; the same "
        "training is not started twice.",
    ),
    "SEC-06": Fault(what="hostile archives", parts=("tests/gui/test_uploads.py",)),
    "ENV-01": Fault(
        what="odd names and locales",
        parts=(_SCAN,),
        decided="Names that only Windows cannot bear are not refused: nothing has been run there.",
    ),
    "ENV-02": Fault(what="folders that cannot be written", parts=(_RUN, _CACHE)),
    "ENV-03": Fault(
        what="missing and broken packages",
        parts=("tests/hardware/test_machine.py", "tests/planning/test_plan.py"),
    ),
}  # fmt: skip


def ids_of(name: str) -> list[str]:
    """Return the ids that the name of a test begins with."""
    found, group = [], ""
    for word in name.removeprefix("test_").upper().split("_"):
        if word in _GROUPS:
            group = word
        elif group and word.isdigit() and len(word) == 2:
            found.append(f"{group}-{word}")
        else:
            break
    return found


@cache
def files_by_id(root: Path = ROOT) -> dict[str, list[str]]:
    """Return for each id the files under tests/ that have a test of that name, in order."""
    found: dict[str, set[str]] = {}
    for file in sorted((root / "tests").rglob("test_*.py")):
        for name in _functions(file):
            for fault_id in ids_of(name):
                found.setdefault(fault_id, set()).add(file.relative_to(root).as_posix())
    return {fault_id: sorted(files) for fault_id, files in found.items()}


def _functions(file: Path) -> Iterator[str]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name
