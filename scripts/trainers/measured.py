"""Settings files as their own trainer resolves them, in numbers, beside ours: rates, dims, schedule, noise, loss.

A trainer's module gives `resolve(file) -> Numbers` by that trainer's own code; `ours` gives the same numbers
of the run that `lora-train import` makes of the file. `run` compares them for every file of the corpus in
tests/importing and writes the trainer's numbers to tests/importing/resolved.json, which the tests compare
with ours without the trainer.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from PIL import Image

# Before a stand-in for torchvision, which transformers would take for the real one.
from transformers import CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel  # noqa: F401

from lora_trainer import families
from lora_trainer.config.config import build_config
from lora_trainer.config.layers import AskedFor
from lora_trainer.config.layers import resolve as resolve_settings
from lora_trainer.config.losses import LOSSES
from lora_trainer.config.running import Config
from lora_trainer.dataset.buckets import buckets_for, place
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.noise_levels import levels_of
from lora_trainer.importing.foreign import Foreign
from lora_trainer.importing.reading import import_file
from lora_trainer.training.noise import loss_delta, loss_weight
from lora_trainer.training.schedules import learning_rate
from tests.importing.corpus import CASES

Numbers = dict[str, Any]
"""`family`, `rate`, `text_encoder_rate` (None: not trained), `rank`, `alpha`, `conv_rank`, `conv_alpha`,
`steps`, `curve` (rate over its peak at ten steps), `noise` (quantiles of the noise level), `errors` (loss of
one number at each of LEVELS, for each of DIFFERENCES), `batch` (images at once, accumulation), `buckets` (size
for each of SIZES). A number that a file does not settle is left out."""
FILE = Path(__file__).resolve().parents[2] / "tests" / "importing" / "resolved.json"
IMAGES = 8
"""Images in the folder `images`, by which epochs become steps."""
DOCS = "docs/importing.md"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Noise levels: sigma of flow matching, else the timestep over 1000."""
DIFFERENCES = (0.1, 1.0)
"""Predicted number minus its target."""
SIZES = ((1024, 1024), (1920, 1080), (800, 1200), (3000, 2000), (2000, 3000), (1400, 1000))
DRAWS = 20_000
"""Random draws of a trainer; the test allows for their scatter."""
EXPLAINING: Mapping[str, tuple[str, ...]] = {
    "rate": ("optim", "lr", "learning_rate", "d_coef"),
    "text_encoder_rate": ("text_encoder", "te_", "lr", "optim", "text encoders", "learning_rate"),
    "rank": ("dim", "rank", "linear", "type", "algo", "full_matrix", "block_size"),
    "alpha": ("alpha", "dim", "rank", "linear", "type", "algo", "full_matrix"),
    "conv_rank": ("conv", "algo", "preset", "type", "dim"),
    "conv_alpha": ("conv", "algo", "preset", "type", "dim"),
    "steps": ("step", "epoch", "dataset", "concept", "backend", "folder"),
    "curve": ("sched", "warmup", "cycles", "optim"),
    "noise": ("timestep", "weighting_scheme", "content_or_style", "noising", "beta_schedule", "_t"),
    "errors": ("loss", "huber", "weight", "snr", "prediction_type", "smooth_l1", "timestep_type"),
    "batch": ("batch", "accumulation"),
    "buckets": ("reso", "bucket", "size", "ar_"),
}
"""Parts of a foreign key under which the import explains why a number is another."""


# ---- ours


def facts_of(family: str) -> BaseFacts:
    """Return what is known of a family's default base without its files."""
    facts = next(iter(families.family(family).releases.values()))
    assert facts is not None, family
    return facts


def ours(imported: Foreign, family: str) -> Numbers:
    """Return the numbers of the run that imported settings make of a family's default base."""
    config = _config(imported, family)
    adapter, optimizer = config.adapter, config.optimizer
    everything = adapter.targets == "all"
    steps = config.train.steps if isinstance(config.train.steps, int) else 0
    at_once = int(imported.settings.get("memory.micro_batch", config.train.batch_size))
    rate = optimizer.learning_rate
    numbers: Numbers = {
        "family": family,
        "rate": rate,
        "text_encoder_rate": rate * optimizer.text_encoder_scale if adapter.text_encoder else None,
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "conv_rank": (adapter.conv_rank or adapter.rank) if everything else None,
        "conv_alpha": (adapter.conv_alpha or adapter.alpha) if everything else None,
        "batch": [at_once, config.train.batch_size // at_once],
        "buckets": _buckets(config, facts_of(family)),
        **_noise_and_errors(config, facts_of(family)),
    }
    if "train.steps" in imported.settings:
        numbers["steps"] = steps
        if optimizer.name != "schedulefree_adamw":
            rates = learning_rate(optimizer, steps=steps)
            numbers["curve"] = [rates(steps * tenth // 10) / rate for tenth in range(10)]
    return numbers


def _config(imported: Foreign, family: str) -> Config:
    build_config(imported.settings)
    overrides = {**imported.settings, "base.companion": "auto", "base.assistant": "none"}
    asked = AskedFor(overrides=overrides)
    return resolve_settings(asked, family=family, tier="16-24", priority="balanced").config


def _side_px(config: Config, facts: BaseFacts) -> int:
    """Return the smallest resolution: the numbers of the trainers are of that, which their files name first."""
    side_px = config.data.resolution
    if not isinstance(side_px, int):
        return facts.resolution_px
    return min([side_px, *config.data.more_resolutions])


def _noise_and_errors(config: Config, facts: BaseFacts) -> Numbers:
    objective = config.objective
    size_px = (_side_px(config, facts),) * 2
    levels = levels_of(facts, objective)
    drawn = sorted(levels.draw((k + 0.5) / 4000, size_px=size_px).timestep for k in range(4000))
    prediction = facts.release.prediction
    if config.base.prediction == "v_prediction":
        prediction = "v_prediction"
    errors = []
    for fraction in LEVELS:
        level = levels.at(fraction)
        weight = loss_weight(objective, level, prediction)
        delta = loss_delta(objective, level)
        error = LOSSES[objective.loss].formula
        for difference in DIFFERENCES:
            errors.append(weight * float(error(torch.tensor(difference), torch.tensor(delta))))
    return {"noise": quantiles(drawn), "errors": errors}


def _buckets(config: Config, facts: BaseFacts) -> list[list[int]]:
    buckets = buckets_for(
        resolution_px=_side_px(config, facts),
        step_px=facts.bucket_step_px,
        max_aspect=config.data.max_aspect if config.data.buckets else 1.0,
    )
    placed = [place(*size, buckets=buckets).bucket for size in SIZES]
    return [[bucket.width_px, bucket.height_px] for bucket in placed]


def quantiles(timesteps: Sequence[float]) -> list[float]:
    """Return the quantiles of noise levels, from timesteps in [0, 1000]."""
    ordered = sorted(timesteps)
    return [ordered[int(share * len(ordered))] / 1000 for share in QUANTILES]


# ---- comparison


def different(mine: Numbers, theirs: Numbers) -> Iterator[str]:
    """Yield the names of the numbers that differ; those that one side leaves out do not."""
    for name in theirs.keys() & mine.keys() - {"family"}:
        if not _equal(name, mine[name], theirs[name]):
            yield name


def _equal(name: str, mine: Any, theirs: Any) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    if name == "buckets":
        return list(map(list, mine)) == list(map(list, theirs))
    pairs = list(zip(mine, theirs, strict=True)) if isinstance(mine, list) else [(mine, theirs)]
    if name == "curve" and theirs[0] == 0:
        pairs = pairs[1:]  # here a first step is not left out: a schedule is asked one step ahead
    # Draws of a trainer are random.
    absolute = {"curve": 0.025, "noise": 0.02}.get(name, 0.0)
    return all(math.isclose(a, b, rel_tol=1e-3, abs_tol=absolute) for a, b in pairs)


def _a_step_apart(mine: Sequence[int], theirs: Sequence[int]) -> bool:
    return all(abs(a - b) <= 64 for a, b in zip(mine, theirs, strict=True))


def explained(name: str, imported: Foreign, mine: Numbers, theirs: Numbers) -> str:
    """Return the foreign key under which the import says why a number is another, "" where none does.

    Buckets go in the base's own steps, as docs/importing.md says: sizes may be a step apart.
    """
    if name == "buckets" and all(map(_a_step_apart, mine[name], theirs[name])):
        return DOCS
    keys = [*imported.nearest, *imported.without_equivalent]
    return next((key for key in keys if any(p in key.lower() for p in EXPLAINING[name])), "")


# ---- a trainer's own run, by hand


def walked(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
    """Return the rate of an optimizer at ten steps of a schedule, over its rate of 1."""
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return [rates[steps * tenth // 10] for tenth in range(10)]


def run(
    resolve: Callable[[Path], Numbers],
    *,
    name: str,
    commit: str,
    files: Sequence[Path],
    write: bool,
) -> None:
    """Compare every case of the corpus, and the trainer's own example files, and print each difference."""
    cases = [case for case in CASES if case.trainer == name and not case.refused]
    stored: dict[str, Numbers] = {}
    counts = {"equal": 0, "explained": 0, "DIFFERENT": 0}
    with TemporaryDirectory() as place:
        for number, case in enumerate(cases):
            folder = Path(place) / str(number)
            add_images(folder)
            numbers = _report(case.name, case.write(folder), resolve, counts)
            if numbers is not None:
                stored[case.id] = numbers
        for number, file in enumerate(files):
            folder = Path(place) / f"own{number}"
            add_images(folder)
            copy = folder / file.name
            copy.write_bytes(file.read_bytes())
            if _report(str(file.name), copy, resolve, counts) is not None:
                counts["files"] = counts.get("files", 0) + 1
    print(f"{name} {commit[:7]}: {len(stored)} cases, {counts}")
    if write:
        table = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        table[name] = {"commit": commit, "cases": stored}
        rows = [f"{json.dumps(key)}: {_rows(table[key])}" for key in sorted(table)]
        FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def add_images(folder: Path) -> None:
    """Make a folder with IMAGES images in `images`."""
    (folder / "images").mkdir(parents=True)
    for number in range(IMAGES):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(folder / "images" / f"{number}.png")


def _report(
    title: str, file: Path, resolve: Callable[[Path], Numbers], counts: dict[str, int]
) -> Numbers | None:
    try:
        theirs = resolve(file)
    except Exception as error:  # noqa: BLE001 # a trainer may fail in any way, which is printed
        place = traceback.extract_tb(error.__traceback__)[-1]
        print(f"  {title}: not resolved there: {error!r:.150} ({place.filename}:{place.lineno})")
        return None
    imported = import_file(file)
    mine = ours(imported, theirs["family"])
    for name in theirs.keys() & mine.keys() - {"family"}:
        if name not in set(different(mine, theirs)):
            counts["equal"] += 1
            continue
        key = explained(name, imported, mine, theirs)
        counts["explained" if key else "DIFFERENT"] += 1
        if key != DOCS:
            values = f"there {_short(theirs[name])}, here {_short(mine[name])}"
            print(f"  {title}: {name}: {values}; {f'said of {key}' if key else 'NOT EXPLAINED'}")
    return {key: _rounded(value) for key, value in theirs.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _short(value: Any) -> str:
    return json.dumps(_rounded(value))


def _rows(table: Mapping[str, Any]) -> str:
    rows = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table["cases"].items()]
    return f'{{"commit": "{table["commit"]}", "cases": {{\n' + ",\n".join(rows) + "\n}}"


def statements(
    checkout: Path, file: str, first: Callable[[str], bool], last: Callable[[str], bool]
) -> CodeType:
    """Return a run of a trainer's statements, from one to another of the same block, as code.

    Training steps there are long methods that nothing of them can be asked without a loaded model.
    """
    tree = ast.parse((checkout / file).read_text(encoding="utf-8"))
    blocks = [getattr(node, name, None) for node in ast.walk(tree) for name in ("body", "orelse")]
    for body in (block for block in blocks if isinstance(block, list)):
        starts = [number for number, part in enumerate(body) if first(ast.unparse(part))]
        ends = [number for number, part in enumerate(body) if last(ast.unparse(part))]
        if starts and ends:
            module = ast.Module(body=body[starts[0] : ends[-1] + 1], type_ignores=[])
            return compile(module, file, "exec")
    raise LookupError(f"{file} has no such statements")


def function(checkout: Path, file: str, name: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """Return a function of a trainer that is defined in a file which cannot be imported."""
    tree = ast.parse((checkout / file).read_text(encoding="utf-8"))
    nodes = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    exec(compile(ast.Module(body=nodes[:1], type_ignores=[]), file, "exec"), scope)
    made: Callable[..., Any] = scope[name]
    return made


class _Mocked(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Mocks(MetaPathFinder, Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        within = any(name == one or name.startswith(f"{one}.") for one in self.names)
        return ModuleSpec(name, self, is_package=True) if within else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Mocked(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def mocked(*names: str) -> None:
    """Let modules that a trainer imports, and that settle no number, be imported as mocks."""
    sys.meta_path.insert(0, _Mocks(names))


def _absolute(path: str) -> Path:
    return Path(path).resolve()


def arguments(description: str) -> argparse.Namespace:
    """Return the checkout of the trainer, its commit, further files, and whether its numbers are written."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--checkout", type=_absolute, required=True, help="folder with its source")
    parser.add_argument("--commit", required=True, help="what it was taken at, for the record")
    parser.add_argument("--write", action="store_true", help="write its numbers for the tests")
    parser.add_argument(
        "files", nargs="*", type=_absolute, help="further settings files to compare"
    )
    return parser.parse_args()
