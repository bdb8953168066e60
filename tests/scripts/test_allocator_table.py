"""R5: no default plan needs more than there is, replayed through a model of PyTorch's allocator.

docs/allocator.json has what `scripts/allocator_table.py` found; a plan that has changed since is stale.
"""

from __future__ import annotations

import pytest

from scripts.allocator_table import (
    END,
    PAGE,
    START,
    Cell,
    cells,
    fingerprint,
    planned,
    read,
    replayed,
    table,
)
from tests.fakes.nvml import GIB

AGAIN = "run scripts/allocator_table.py, a minute or two a plan"
MOST_UNUSED = {True: 0.26, False: 0.13}
"""By whether segments grow. The aim is 0.06. Above it are FLUX.2 klein on 24 GiB (0.25: `light` fits, `none` does not,
and there is nothing between them), Qwen-Image and FLUX.1 on 8 GiB (0.11, Windows 0.13: more is planned than taken)."""
ROWS = read()
U_NET = Cell(source="stable-diffusion-v1-5/stable-diffusion-v1-5", card_gib=8)
TRANSFORMER = Cell(source="black-forest-labs/FLUX.2-klein-base-4B", card_gib=8)


def test_every_default_plan_was_replayed_as_it_is_now() -> None:
    stale = [
        cell
        for cell in cells()
        if cell not in ROWS or ROWS[cell].load != fingerprint(planned(cell))
    ]
    assert not stale, AGAIN


def test_no_default_plan_needs_more_than_there_is() -> None:
    for row in ROWS.values():
        assert row.allocated_bytes <= row.reserved_bytes, row
        assert row.needed_bytes <= row.planned_bytes <= row.limit_bytes, row


@pytest.mark.parametrize("expandable", [True, False])
def test_little_of_a_card_is_left_unused_where_memory_decided(expandable: bool) -> None:
    rows = [row for row in ROWS.values() if row.is_limited and row.cell.expandable == expandable]
    worst = max(rows, key=lambda row: row.unused_share)
    assert worst.unused_share < MOST_UNUSED[expandable], worst


def test_the_page_has_the_rows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    written = text.partition(START)[2].partition(END)[0].strip()
    assert written == table([ROWS[cell] for cell in cells() if cell in ROWS]).strip(), AGAIN


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", [U_NET, TRANSFORMER], ids=["U-Net", "transformer"])
def test_a_plan_replayed_now_needs_what_is_written(cell: Cell) -> None:
    row = replayed(cell, planned(cell), {})
    assert row == ROWS[cell], AGAIN
    assert row.reserved_bytes < cell.card_gib * GIB
