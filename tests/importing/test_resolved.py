"""Imported settings beside the numbers that the trainers' own code resolves, from `python -m scripts.trainers.NAME`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_trainer.importing.reading import import_file
from scripts.trainers.measured import FILE, Numbers, add_images, different, explained, ours
from tests.importing.corpus import Case
from tests.importing.test_corpus import CASES, case_id

TABLE = json.loads(FILE.read_text(encoding="utf-8"))
NUMBERS: dict[str, Numbers] = {
    name: numbers for trainer in TABLE.values() for name, numbers in trainer["cases"].items()
}


@pytest.mark.parametrize("case", [case for case in CASES if case.id in NUMBERS], ids=case_id)
def test_a_run_has_the_trainers_own_numbers_or_says_why_not(case: Case, tmp_path: Path) -> None:
    theirs = NUMBERS[case.id]
    add_images(tmp_path)
    imported = import_file(case.write(tmp_path))
    mine = ours(imported, theirs["family"])
    unexplained = {
        name: (mine[name], theirs[name])
        for name in different(mine, theirs)
        if not explained(name, imported, mine, theirs)
    }
    assert not unexplained


def test_every_number_belongs_to_a_case() -> None:
    assert NUMBERS.keys() <= {case.id for case in CASES}
    assert len(NUMBERS) >= 100
