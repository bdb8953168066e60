"""docs/reliability.md: every fault has a test or a decision, and the page is what was measured."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from scripts.reliability.fault_cases import FAULTS, IDS, files_by_id, ids_of
from scripts.reliability.report import NOT_MEASURED, PAGE, RECORD, ROOT, added, collect, page


def test_all_sixty_faults_are_listed() -> None:
    assert len(IDS) == 60
    assert tuple(FAULTS) == IDS


def test_each_fault_has_a_test_or_a_written_decision_and_each_test_a_fault() -> None:
    for fault_id, fault in FAULTS.items():
        assert files_by_id().get(fault_id) or fault.decided or fault.parts, fault_id
        assert all((ROOT / part).is_file() for part in fault.parts), fault_id
    assert set(files_by_id()) <= set(IDS)
    for name, found in (
        ("test_env_01_sec_03_fuzz_run_names", ["ENV-01", "SEC-03"]),
        ("test_ckp_02_03_a_fault", ["CKP-02", "CKP-03"]),
        ("test_16_bit_rgb", []),
    ):
        assert ids_of(name) == found


def test_the_page_is_what_was_measured() -> None:
    """After measuring, and after adding tests of faults, run scripts/reliability/report.py."""
    measured = json.loads(RECORD.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page(measured)


def test_measurements_are_added_up_and_older_ones_stay(tmp_path: Path) -> None:
    rows = [
        {"figure": "fuzz", "test": "a", "cases": 2, "crashes": 0, "over_limit": 0},
        {"figure": "fuzz", "test": "b", "cases": 3_000, "crashes": 1, "over_limit": 0},
    ]
    (tmp_path / "figures.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "soak.json").write_text('{"minutes": 60.0, "looks": [1, 2]}')
    found = collect(tmp_path, {"kills": {"kills": 1}, "soak": {"minutes": 1.0}})
    assert (
        found["figures"] == added(rows) == {"fuzz": {"cases": 3002, "crashes": 1, "over_limit": 0}}
    )
    assert (found["kills"], found["soak"]) == ({"kills": 1}, {"minutes": 60.0})
    assert "3,002; 1; 0" in page({"figures": found["figures"]})
    assert NOT_MEASURED in page({})


def test_the_nightly_script_is_a_program_that_the_shell_understands() -> None:
    script = ROOT / "scripts" / "reliability" / "nightly"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0
    text = script.read_text(encoding="utf-8")
    assert "scripts/reliability/report.py" in text and "RELIABILITY_FIGURES" in text
