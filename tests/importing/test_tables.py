"""The tables of keys: every rule can be applied, and docs/importing.md says how many there are."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.config.config import setting_keys
from lora_trainer.importing.reading import TRAINERS, import_file

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "importing.md"
TABLES = sorted((ROOT / "lora_trainer" / "importing" / "trainers").glob("*.toml"))


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_rules_name_settings_and_say_why(trainer: Any) -> None:
    for name, rule in trainer.keys.items():
        if rule.kind == "carried":
            assert rule.setting in setting_keys(), name
        elif rule.kind != "read":
            assert len(rule.why) > 8 and "\n" not in rule.why, name


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.stem)
def test_a_key_stands_once_in_a_table(file: Path) -> None:
    """Of two rules of one key the later would win unseen; a table may only replace those of earlier tables."""
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    lists = [
        entry
        for kind in ("read", "nothing_to_set", "no_equivalent", "refused")
        for entry in table.get(kind, ())
    ]
    keys = [
        f"{prefix}{key}"
        for entry in lists
        for prefix in entry.get("under", [""])
        for key in entry["keys"].split()
    ]
    keys += [*table.get("carried", ()), *table.get("absent", "").split()]
    assert [key for key, times in Counter(keys).items() if times > 1] == []


def test_a_key_that_a_trainer_does_not_have_is_unknown(tmp_path: Path) -> None:
    dit = {"dit": "z.safetensors", "network_module": "networks.lora_zimage"}
    lines = [f'{key} = "{value}"' for key, value in dit.items()]
    file = tmp_path / "their.toml"
    file.write_text("\n".join([*lines, "flip_aug = true", "clip_skip = 2"]), encoding="utf-8")
    assert set(import_file(file).unknown) == {"flip_aug", "clip_skip"}


def test_the_docs_count_the_keys() -> None:
    rows: dict[str, dict[str, Any]] = {}
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
def test_optimizers_by_their_many_names(name: str, ours: str, tmp_path: Path) -> None:
    file = tmp_path / "their.toml"
    file.write_text(f'network_dim = 4\noptimizer_type = "{name}"\n', encoding="utf-8")
    assert import_file(file).values["optimizer.name"] == ours
