"""The tables of keys: every rule can be applied, and docs/importing.md says how many there are."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from lora_trainer.config.config import setting_keys
from lora_trainer.importing.foreign_optimizers import OPTIMIZERS, plain
from lora_trainer.importing.reading import TRAINERS
from lora_trainer.importing.rules import Rule, Trainer

DOCS = Path(__file__).resolve().parents[2] / "docs" / "importing.md"


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_rules_name_settings_and_say_why(trainer: Trainer) -> None:
    for name, rule in trainer.keys.items():
        if rule.kind == "carried":
            assert rule.setting in setting_keys(), name
        elif rule.kind != "read":
            assert len(rule.why) > 8 and "\n" not in rule.why, name


def test_the_docs_count_the_keys() -> None:
    rows: dict[str, dict[str, Rule]] = {}
    for trainer in TRAINERS:
        rows.setdefault(trainer.name.partition(" (")[0], {}).update(trainer.keys)
    lines = re.findall(
        r"^\| (\S+) \| [^|]+ \| (.+) \|$",
        DOCS.read_text(encoding="utf-8").partition("| trainer | commit |")[0],
        re.MULTILINE,
    )
    told = {
        name: [int(part) for part in numbers.split("|")] for name, numbers in lines if name in rows
    }
    for name, keys in rows.items():
        kinds = Counter(rule.kind for rule in keys.values())
        other = [kinds[kind] for kind in ("nothing_to_set", "no_equivalent", "refused")]
        assert told[name] == [len(keys), len(keys) - sum(other), *other], name


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("bitsandbytes.optim.AdEMAMix8bit", "adamw8bit"),
        ("torch.optim.SGD", "adamw"),
        ("prodigyopt.Prodigy", "prodigy"),
        ("pytorch_optimizer.CAME", "came"),
        ("ao-adamw8bit", "adamw8bit"),
        ("optimi-stableadamw", "adamw"),
        ("PagedAdamW8bit", "paged_adamw8bit"),
        ("SCHEDULE_FREE_ADAMW", "schedulefree_adamw"),
        ("RAdamScheduleFree", "schedulefree_adamw"),
        ("bnb-lion8bit-paged", "lion8bit"),
    ],
)
def test_optimizers_by_their_many_names(name: str, ours: str) -> None:
    assert OPTIMIZERS[plain(name)].ours == ours
