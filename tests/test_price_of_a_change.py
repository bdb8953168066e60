"""What a change costs: one edit of one file adds a loss, an optimizer or a setting everywhere.

Each edit is made to the source as a process of its own imports it, so that nothing is written. docs/architecture.md has
the commits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A text that is put before another one in a file of lora_trainer/config/."""

    file: str
    before: str
    added: str


LOSS = Edit(
    file="losses.py",
    before='    "log_cosh": ErrorFunction(',
    added='    "l1": ErrorFunction(formula=lambda d, _: d.abs(), written="|d|", also_in="nobody"),\n',
)
OPTIMIZER = Edit(
    file="optimizers.py",
    before='    "adamw8bit": OptimizerRow(',
    added='    "nadam": OptimizerRow(path="torch.optim:NAdam", arguments=_like_adam, states=2, made_anew=True),\n',
)
SETTING = Edit(
    file="optimizers.py",
    before="    weight_decay: Share = setting(",
    added='    came_beta3: BelowOne = setting(0.9, "decay of unsteadiness", only_for={OF: ("came",)})\n',
)

# Imports the edited source instead of the file's, and prints what follows from it.
PROGRAM = """
import contextlib, importlib.machinery, io, json, sys

edited, before, added, *settings = sys.argv[1:]
loader = importlib.machinery.SourceFileLoader
code_of = loader.get_code

def get_code(self, name):
    if self.path != edited:
        return code_of(self, name)
    text = open(edited, encoding="utf-8").read()
    assert text.count(before) == 1, before
    return compile(text.replace(before, added + before), edited, "exec")

loader.get_code = get_code
from lora_trainer.cli import main
from scripts.row_tables import loss_table, optimizer_table
from scripts.write_schema import preset_schema

with contextlib.redirect_stdout(io.StringIO()) as out:
    main.run(["plan", "datasets/example", "--json", *settings])
made = [json.dumps(preset_schema()), loss_table(), optimizer_table()]
print(json.dumps({"plan": json.loads(out.getvalue()), "made": made}))
"""


def after(edit: Edit, *chosen: str) -> tuple[dict[str, Any], list[str]]:
    """Return the plan of the example with the chosen settings, and the made texts: schema, losses, optimizers."""
    words = [str(ROOT / "lora_trainer" / "config" / edit.file), edit.before, edit.added]
    settings = [word for setting in chosen for word in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words, *settings],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    shown = json.loads(done.stdout)
    return shown["plan"], shown["made"]


def test_a_loss_is_an_edit_of_one_file() -> None:
    plan, (schema, losses, _) = after(LOSS, "objective.loss=l1")
    assert plan["settings"]["objective.loss"]["value"] == "l1"
    assert '"l1"' in schema and "| `l1` | |d| |" in losses


def test_an_optimizer_is_an_edit_of_one_file() -> None:
    plan, (schema, _, optimizers) = after(OPTIMIZER, "optimizer.name=nadam")
    assert plan["settings"]["optimizer.name"]["value"] == "nadam"
    assert '"nadam"' in schema and "| `nadam` | 2 | 1 | torch |" in optimizers


def test_a_setting_is_an_edit_of_one_file() -> None:
    plan, (schema, _, _) = after(SETTING, "optimizer.name=came", "optimizer.came_beta3=0.5")
    assert plan["settings"]["optimizer.came_beta3"]["value"] == 0.5
    assert '"optimizer.came_beta3"' in schema
