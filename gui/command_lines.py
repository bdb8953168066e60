"""The command lines that the interface runs, as lists of arguments; never a shell, never a string.

Inputs: drafts and run folders, checked here as far as it takes no torch. Outputs: the words of a
training, for the queue, and the JSON answers of commands that end by themselves; `Plans`, the answers of the last
drafts.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from lora_trainer.common.files import user_path, windows_name_problem
from lora_trainer.common.records import of_json
from lora_trainer.common.wording import one_line
from lora_trainer.config.config import build_config
from lora_trainer.config.inputs import EMBEDDED, MINIATURES
from lora_trainer.dataset.slider_file import is_slider_file
from lora_trainer.hardware.machine import detect
from lora_trainer.queue import commands
from lora_trainer.reporting.plan_record import PlanRecord
from lora_trainer.reporting.run_record import read

from . import slider_words
from .bases import RECOMMENDED, RECOMMENDED_FOR_PAIRS
from .drafts import PAIRS, SLIDER, Draft
from .fence import fenced
from .own_load import own_load
from .plan_process import BASES, Done, PlanProcess
from .server.asset_files import EXAMPLE, EXAMPLE_NAME
from .upload_names import is_image
from .uploads import is_unnamed, is_uploaded
from .workplace import Workplace

Words = tuple[str, ...]

TRAINER: Words = (sys.executable, "-m", "lora_trainer")
_ANSWER_WITHIN_S = 900
_NAME_MAX_LENGTH = 100
_BASE = "base.model"
_KEPT_PLANS = 64
_PLAN_FRESH_S = 60.0
# Two, so that a look at ten thousand images keeps no plan waiting.
_PLANS, _CHECKS = (PlanProcess(within_s=_ANSWER_WITHIN_S) for _ in range(2))
_PROCESSES = {"plan": _PLANS, BASES[0]: _PLANS, "check": _CHECKS, "models": _CHECKS}


def check_words(draft: Draft, work: Workplace) -> Words:
    """Return the command that reports on the dataset; raises RequestError or InputError.

    Images are judged for the chosen base. Where nobody has chosen and the plan would take the miniature,
    they are judged for the base that is recommended: at its size every photograph would be large enough.
    """
    dataset = dataset_of(draft, work)
    return (
        "check",
        str(dataset),
        *base_words(judged_for(draft, dataset), work),
        *_sets(draft, work),
        "--json",
    )


def dataset_of(draft: Draft, work: Workplace) -> Path:
    """Return what a draft is trained on: the folder of its images, or the file of its slider's words.

    Raises RequestError, InputError, MachineError.
    """
    if draft.kind == SLIDER:
        return slider_words.file_of(work, draft.slider)
    return work.dataset(draft.dataset)


def label_of(draft: Draft, work: Workplace) -> str:
    """Return what the training of a draft is called; raises as `dataset_of`."""
    dataset = dataset_of(draft, work)
    return _own_name(draft, dataset, work) or dataset.name


def _own_name(draft: Draft, dataset: Path, work: Workplace) -> str:
    """Return what a training is called that is not called after its folder, empty for one that is.

    A slider is called after its words, as its file is; images that were sent without a name after their trigger word,
    else after the first of them, as the page Datasets calls them.
    """
    if draft.name or not dataset.is_dir():
        return draft.name or dataset.stem
    if not (is_uploaded(work, dataset) and is_unnamed(dataset.name)):
        return ""
    images = (path for path in dataset.iterdir() if is_image(path.name))
    first = min((path.stem for path in images), default="")
    for name in (str(draft.settings.get("data.trigger") or ""), first):
        with suppress(RequestError):  # a trigger word may hold what no name of a folder may
            if run_name(name):
                return name.strip()
    return ""


def judged_for(draft: Draft, dataset: Path) -> str:
    """Return the base that the images of a draft are judged for; the example is made for the miniature."""
    if draft.base.strip() not in ("", "auto") or dataset.name == EXAMPLE_NAME or has_gpu():
        return draft.base
    return RECOMMENDED_FOR_PAIRS if draft.kind == PAIRS else RECOMMENDED


@cache
def has_gpu() -> bool:
    """Whether this machine has a GPU that can train."""
    return detect().accelerator()[0] is not None


def plan_words(draft: Draft, work: Workplace) -> Words:
    """Return the command that predicts memory and time; raises RequestError or InputError."""
    return ("plan", str(dataset_of(draft, work)), *_choices(draft, work), "--json")


def train_words(draft: Draft, work: Workplace) -> Words:
    """Return the training into a new folder of the runs; raises RequestError or InputError."""
    dataset = dataset_of(draft, work)
    name = run_name(_own_name(draft, dataset, work))
    named = (f"--name={name}",) if name else ()
    return (str(dataset), *_choices(draft, work), *named, f"--output={work.runs}")


def resume_words(run: Path, *, dataset: str, work: Workplace) -> Words:
    """Return the training that goes on with a run; `dataset` counts where the run does not say.

    Raises RequestError or InputError.
    """
    recorded = recorded_dataset(run)
    if recorded is None and not dataset.strip():
        raise InputError(
            f"the run {run.name} does not say where its images are",
            fix="type the folder of its images on its page and press Resume there",
        )
    found = recorded if recorded is not None else work.dataset(dataset)
    return (str(found), f"--resume-from={run.resolve()}")


def command_line(words: Sequence[str]) -> str:
    """Return a command as it is typed in a terminal, quoted for a POSIX shell."""
    return shlex.join(("lora-train", *words))


def recorded_dataset(run: Path) -> Path | None:
    """Return what a run was trained on: the word of its command that is a folder, or a slider's file, of that name.

    A run.json records names, not paths; a command typed in another folder may lead nowhere.
    """
    try:
        record = read(run)
    except RequestError:
        return None
    for word in record.command if record.dataset.name else ():
        try:
            found = Path(user_path(word)).resolve()
            if found.name != record.dataset.name:
                continue
            if found.is_dir() or (found.is_file() and is_slider_file(found)):
                return found
        except (OSError, RuntimeError, ValueError):  # too long for a name, as prompts are; no user
            continue
    return None


def run_name(text: str) -> str:
    """Return a name that is one visible folder of the runs folder; raises RequestError."""
    name = text.strip()
    # Windows forbids / and \\ too, and what it forbids no new run may have.
    unusable = name.startswith((".", "-")) or (name and windows_name_problem(name))
    if unusable or not name.isprintable() or len(name) > _NAME_MAX_LENGTH:
        raise RequestError(
            f"{name[:_NAME_MAX_LENGTH]!r} cannot be the name of a run",
            fix=f"use at most {_NAME_MAX_LENGTH} letters, digits, spaces, ._-, no . or - in front",
        )
    return name


def _choices(draft: Draft, work: Workplace) -> Words:
    return (f"--priority={draft.priority}", *base_words(draft.base, work), *_sets(draft, work))


def base_words(text: str, work: Workplace) -> Words:
    """Return the base model that was typed; raises InputError for a path that may not be named."""
    base = str(fenced({_BASE: text.strip()}, work)[_BASE])
    if base in ("", "auto"):
        return ()
    if base not in MINIATURES and _is_path(base):
        return (f"--base={work.path(base, what='a base model')}",)
    return (f"--base={base}",)


def _is_path(base: str) -> bool:
    """Whether a base model is meant as a file; a Hub id may be one, too, and then it is that."""
    try:
        return "\0" in base or Path(user_path(base)).exists()
    except (OSError, RuntimeError):  # too long, no such user: to be refused as a path
        return True


def _sets(draft: Draft, work: Workplace) -> Words:
    build_config(draft.settings)
    settings = fenced(draft.settings, work)
    return tuple(f"--set={key}={_word(value)}" for key, value in settings.items())


def _word(value: Any) -> str:
    """Return a value as `--set` reads it back: JSON, so that "5" stays text and 5 a number."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a short command said: its JSON, or the line in which it refused."""

    values: Mapping[str, Any] | None
    error: str = ""

    @property
    def plan(self) -> PlanRecord | None:
        """The JSON of `plan`; None where the command refused."""
        return None if self.values is None else of_json(PlanRecord, self.values)

    def beside(self, load: Callable[[str, float], float]) -> Answer:
        """Return the plan beside other programs by `load`, of its source and what it saw; another answer as it is."""
        values = self.values or {}
        time_of = values.get("time")
        if not isinstance(time_of, dict) or not time_of.get("beside_others"):
            return self
        beside = load(time_of.get("source", ""), time_of["beside_others"])
        return Answer(values={**values, "time": {**time_of, "beside_others": beside}})


def ask(words: Words, *, program: Words = TRAINER) -> Answer:
    """Run a command that ends by itself and prints JSON."""
    try:
        process = _PROCESSES.get(words[0]) if program is TRAINER else None
        done = process.run(words) if process is not None else _run((*program, *words))
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer(values=None, error=one_line(str(error)))
    if done.returncode:
        return Answer(values=None, error=_last_line(done.stderr or done.stdout))
    try:
        values = json.loads(done.stdout)
    except ValueError:
        return Answer(values=None, error=f"no JSON: {_last_line(done.stdout)}")
    return Answer(values=values)


def start_plan_processes() -> None:
    """Start the processes that answer `plan` and `check`; this takes a second or two."""
    for name in ("plan", "check"):
        _PROCESSES[name].start((name, str(EXAMPLE), f"--base={EMBEDDED}", "--json"))


def _run(command: Words) -> Done:
    done = subprocess.run(
        command,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=_ANSWER_WITHIN_S,
        check=False,
    )
    return Done(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)


def _last_line(output: bytes) -> str:
    lines = output.decode("utf-8", errors="replace").strip().splitlines()
    return one_line(lines[-1]) if lines else ""


@dataclass(frozen=True, kw_only=True)
class _Aged:
    answer: Answer
    at_s: float


class Plans:
    """The plans of the last drafts that were asked for; free memory changes, so an answer ages.

    One command at a time, so that two tabs do not compute the same twice.
    """

    def __init__(
        self,
        work: Workplace,
        *,
        ask: Callable[[Words], Answer] = ask,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work, self._ask, self._clock_s = work, ask, clock_s
        self._lock = threading.Lock()
        self._answers: OrderedDict[tuple[Words, int], _Aged] = OrderedDict()

    def releases(self) -> Sequence[Mapping[str, Any]]:
        """Return the public releases, see bases.py; none where they cannot be asked for."""
        values = self._ask(BASES).values
        return () if values is None else values["releases"]

    def known(self, draft: Draft) -> Answer | None:
        """Return the plan of a draft that was asked for last, however old; None where none is kept.

        Nothing is asked, and what is being asked for is not waited for.
        """
        kept = self._answers.get(self._key(draft))
        return None if kept is None else kept.answer

    def _key(self, draft: Draft, *, vram_gib: float | None = None) -> tuple[Words, int]:
        folder = dataset_of(draft, self._work)
        elsewhere = () if vram_gib is None else (f"--vram={vram_gib:g}",)
        return (*plan_words(draft, self._work), *elsewhere), folder.stat().st_mtime_ns

    def _own_load(self) -> float:
        """Return what trainings of the queue take, which will have ended before this one starts."""
        try:
            return own_load(commands.items(self._work.runs), now_s=time.time())
        except LoraTrainError:  # the page Queue says so
            return 0.0

    def of(self, draft: Draft, *, anew: bool = False, vram_gib: float | None = None) -> Answer:
        """Return the plan of a draft; raises RequestError or InputError for what cannot be asked.

        One that is asked for `anew` is kept for the others: captions may have changed, which the key does not know.
        With `vram_gib` it is of a GPU of that memory somewhere else, beside which nothing runs.
        """
        key = self._key(draft, vram_gib=vram_gib)
        words, _ = key
        with self._lock:
            kept = self._answers.get(key)
            now_s = self._clock_s()
            if anew or kept is None or now_s - kept.at_s > _PLAN_FRESH_S:
                # Meanwhile the one before is known, as it is shown.
                answer = self._ask(words)
                if vram_gib is None:
                    answer = answer.beside(partial(self._work.beside.load, own=self._own_load()))
                kept = _Aged(answer=answer, at_s=now_s)
            self._answers[key] = kept
            self._answers.move_to_end(key)
            while len(self._answers) > _KEPT_PLANS:
                self._answers.popitem(last=False)
            return kept.answer
