"""Jobs are what their folders say, also for an interface that was started after them."""

from __future__ import annotations

import json
import signal
import sys
import time

import pytest
from lora_trainer.gui import jobs
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import RequestError
from tests.fakes.queues import until


def ended(work: Workplace, job: jobs.Job) -> jobs.Job:
    until(lambda: jobs.read(work, job.id).state != "running")
    return jobs.read(work, job.id)


def python(program: str, *words: str) -> list[str]:
    return [sys.executable, "-c", program, *words]


def test_a_job_ends_with_its_exit_code_and_output(work: Workplace) -> None:
    hostile = ("$(touch marker)", "; touch marker", "--flag", "a\nb")
    program = "import sys; print(sys.argv[1:]); print('error: no. Fix: do.'); sys.exit(3)"
    job = jobs.start(work, kind="try", argv=python(program, *hostile), about={"of": "x"})
    assert job.state == "running"
    found = ended(work, job)
    assert (found.state, found.exit_code, found.about) == ("failed", 3, {"of": "x"})
    assert found.log_tail()[0] == str(list(hostile))
    assert found.error() == "error: no. Fix: do."
    assert jobs.find(work, kind="try") == [found]
    assert jobs.find(work, kind="other") == []


def test_the_same_command_runs_once_at_a_time(work: Workplace) -> None:
    argv = python("import signal; print('here', flush=True); signal.pause()")
    job = jobs.start(work, kind="try", argv=argv)
    with pytest.raises(RequestError, match="runs already"):
        jobs.start(work, kind="try", argv=argv)
    until(lambda: jobs.read(work, job.id).log_tail() == ["here"])
    jobs.stop(jobs.read(work, job.id))
    assert ended(work, job).exit_code == -signal.SIGTERM
    jobs.stop(jobs.read(work, job.id))  # one that has ended is left alone
    again = jobs.start(work, kind="try", argv=python("print('two')"))
    assert ended(work, again).state == "finished"
    assert [found.id for found in jobs.find(work, kind="try")] == [again.id, job.id]


def test_old_records_are_forgotten_but_not_what_runs(
    work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MAX_KEPT", 2)
    runs_on = jobs.start(
        work, kind="try", argv=python("import signal; print('here', flush=True); signal.pause()")
    )
    until(lambda: jobs.read(work, runs_on.id).log_tail() == ["here"])
    later = [f"{2**63 + number:x}" for number in range(4)]
    for name in later:
        folder = work.own / jobs.FOLDER / name
        folder.mkdir()
        (folder / jobs.JOB_FILE).write_text('{"kind": "try"}')
        (folder / jobs.RESULT_FILE).write_text('{"exit_code": 0}')
    newest = ended(work, jobs.start(work, kind="try", argv=python("print(1)")))
    kept = {job.id for job in jobs.find(work, kind="try")}
    assert kept == {*later[2:], runs_on.id, newest.id}, "two, what runs, and the newest"
    jobs.stop(runs_on)
    assert ended(work, runs_on).state == "failed"


def test_a_record_that_is_damaged_or_of_a_runner_that_is_gone_stops_no_page(
    work: Workplace,
) -> None:
    folder = work.own / jobs.FOLDER / ("a" * 12)
    folder.mkdir(parents=True)
    for text, argv in (
        ('{"at_s": "x"}', ()),
        ('{"about": [], "argv": 5}', ()),
        ("[]", None),
        ("{", None),
    ):
        (folder / jobs.JOB_FILE).write_text(text)
        found = [(job.id, job.state, job.argv, job.about) for job in jobs.find(work, kind="None")]
        assert found == ([] if argv is None else [("a" * 12, "failed", argv, {})])
    (folder / jobs.JOB_FILE).write_text(json.dumps({"at_s": time.time()}))
    assert jobs.read(work, folder.name).state == "running", "it is being started"
    (folder / jobs.RUNNER_FILE).write_text('{"pid": 1, "started_s": 1.0}')
    assert jobs.read(work, folder.name).state == "failed"
    for name in ("../x", "", "0" * 12, "a/b"):
        with pytest.raises(RequestError, match="no job"):
            jobs.read(work, name)
