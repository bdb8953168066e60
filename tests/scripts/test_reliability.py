"""docs/reliability.md: every fault has a test or a decision, and the page is what was measured."""

from __future__ import annotations

import json

import pytest

from scripts.reliability import kill
from scripts.reliability.fault_cases import FAULTS, IDS, files_by_id, ids_of
from scripts.reliability.report import PAGE, RECORD, ROOT, page


def test_each_of_sixty_faults_has_a_test_or_a_written_decision_and_each_test_a_fault() -> None:
    assert tuple(FAULTS) == IDS and len(IDS) == 60
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


def test_a_campaign_of_kills_names_the_packages_that_are_missing_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kill.py"])
    monkeypatch.setattr(kill, "find_spec", lambda name: None)
    # Loading is the first thing that would need one of them.
    monkeypatch.setattr(kill, "load_everything", lambda: pytest.fail("it began"))
    with pytest.raises(SystemExit) as ended:
        kill.main()
    assert ended.value.code == 4
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install bitsandbytes tensorboard" in said
