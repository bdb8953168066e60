"""Run tests in forks of the process that has collected them: `python -m pytest -p tests.forks --forks 5`.

Importing torch and all test modules takes 12 s of a core, which every process of pytest-xdist spends anew. A fork has
them at once. It takes one module after another, so that what a module prepares is prepared once, and has a home and a
temporary folder of its own. A test that ends its process fails, and a new fork goes on with those after it; programs
that its tests have started, such as a training that outlives its page, end with the fork.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import psutil
import pytest

HUB = "huggingface_hub.constants"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the number of processes."""
    group = parser.getgroup("forks")
    group.addoption(
        "--forks",
        type=int,
        default=0,
        metavar="COUNT",
        help="share the modules among so many processes (0: none)",
    )


def live_in(home: Path) -> None:
    """Let this process, and what it starts, have its home and its caches in a folder."""
    before = os.environ.get("HF_HOME")
    hub = sys.modules.get(HUB)
    os.environ |= {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "HF_HOME": str(home / "huggingface"),
    }
    home.mkdir(exist_ok=True)
    if before and hub is not None:  # it read the old folder when it was imported
        for name, value in list(vars(hub).items()):
            if isinstance(value, str) and value.startswith(before):
                setattr(hub, name, value.replace(before, os.environ["HF_HOME"]))


def end_programs_of(home: Path) -> None:
    """End every program that was started with this home.

    A fork itself is not one of them: what a process was started with stays when it forks.
    """
    for program in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # gone, or of another user
            if program.environ().get("HOME") == str(home):
                program.kill()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forks where they are asked for."""
    option = session.config.option
    if option.forks < 1 or option.collectonly or option.usepdb or session.testsfailed:
        return None
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.showfspath = False  # results of several files come in turn
    Forks(session).run(option.forks)
    return True


@dataclass(eq=False)
class Fork:
    """One process, what it is told and tells through, and the tests that it has yet to end, by their places."""

    pid: int
    connection: Connection[Any, Any]
    home: Path
    left: deque[int] = field(default_factory=deque)
    status: int | None = None
    """What it ended with, once that has been asked for."""

    def ended_with(self) -> int:
        """Wait for its end, end what its tests have left running, and return the status of its end."""
        if self.status is None:
            self.status = os.waitpid(self.pid, 0)[1]
        end_programs_of(self.home)
        return self.status


class Forks:
    """The forks of a session, among which its modules are shared."""

    def __init__(self, session: pytest.Session) -> None:
        """Take the tests of a session, by modules in their order."""
        self.session = session
        self.forks: list[Fork] = []
        self.started = 0
        modules: dict[str, list[int]] = {}
        for place, item in enumerate(session.items):
            modules.setdefault(item.nodeid.partition("::")[0], []).append(place)
        self.modules = deque(modules.values())

    def run(self, count: int) -> None:
        """Run all tests with so many forks, fewer where there are fewer modules; stop where pytest says so."""
        session = self.session
        folders: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]  # private: pytest has no other way to it
        folders.getbasetemp()  # one for all forks, which this process clears away
        try:
            for _ in range(min(count, len(self.modules))):
                self.start()
            while self.forks:
                # A process that a test has left behind may keep the pipe of its fork open: so look for ends as well.
                ready = wait([fork.connection for fork in self.forks], timeout=1)
                for fork in list(self.forks):
                    if fork.connection in ready:
                        self.hear(fork)
                    elif not ready:
                        self.see_end(fork)
                if session.shouldfail or session.shouldstop:
                    break
        finally:
            for fork in self.forks:
                fork.connection.close()  # it ends with the test under way
            for fork in self.forks:
                fork.ended_with()
        if self.modules and not (session.shouldfail or session.shouldstop):
            session.shouldfail = "no test process is left for the rest of the tests"
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def start(self) -> None:
        """Start a fork."""
        from tests.fakes.runs import forked  # not before the environment of tests: it imports numpy

        self.started += 1
        ours, its = Pipe()
        others = [ours, *(fork.connection for fork in self.forks)]
        home = Path(os.environ["HOME"]) / f"fork-{self.started}"
        pid = forked(partial(work, self.session, its, others, home))
        its.close()
        self.forks.append(Fork(pid, ours, home))

    def hear(self, fork: Fork) -> None:
        """Take one message of a fork, or see that it has ended."""
        hook, config = self.session.config.hook, self.session.config
        try:
            kind, told = fork.connection.recv()
        except (EOFError, ConnectionResetError):
            self.has_ended(fork)
            return
        match kind:
            case "report":
                hook.pytest_runtest_logreport(
                    report=hook.pytest_report_from_serializable(config=config, data=told)
                )
            case "finish":
                fork.left.popleft()
                hook.pytest_runtest_logfinish(**told)
            case "warning":
                hook.pytest_warning_recorded.call_historic(kwargs=told)
            case "idle":
                fork.left = deque(self.modules.popleft() if self.modules else ())
                with suppress(BrokenPipeError):  # it has just been killed: heard next
                    fork.connection.send(list(fork.left))
            case "stopped":  # by a plugin's own rule, such as a limit of time for all tests
                self.session.shouldfail, self.session.shouldstop = told

    def see_end(self, fork: Fork) -> None:
        """See whether a fork that says nothing has ended."""
        if fork.status is None:
            pid, status = os.waitpid(fork.pid, os.WNOHANG)
            fork.status = status if pid else None
        if fork.status is not None and not fork.connection.poll():
            self.has_ended(fork)

    def has_ended(self, fork: Fork) -> None:
        """Let the test fail in which a fork has ended, and give those after it to another; else the whole session."""
        self.forks.remove(fork)
        fork.connection.close()
        code = os.waitstatus_to_exitcode(fork.ended_with())
        if not fork.left:
            if code:
                self.session.shouldfail = f"a test process ended with {code} where it ran no test"
            return
        item = self.session.items[fork.left.popleft()]
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"its process ended with {code} (negative: a signal)",
            when="call",
        )
        item.config.hook.pytest_runtest_logreport(report=report)
        if fork.left:
            self.modules.appendleft(list(fork.left))
        if self.modules:
            self.start()


class Told:
    """A plugin of a fork that tells its results to the process that it came from."""

    def __init__(self, config: pytest.Config, connection: Connection[Any, Any]) -> None:
        """Tell through a connection."""
        self.config, self.connection, self.is_new = config, connection, True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell what came of a test."""
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("report", data))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        """Tell that a test has ended."""
        self.connection.send(("finish", {"nodeid": nodeid, "location": location}))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        """Tell a warning, by its text: a class may be known here alone."""
        if self.is_new:
            return  # pytest repeats to a new plugin what was told before
        it = warning_message
        text = f"{it.category.__name__}: {it.message}"
        message = warnings.WarningMessage(text, Warning, it.filename, it.lineno)
        self.connection.send(
            (
                "warning",
                {"warning_message": message, "when": when, "nodeid": nodeid, "location": location},
            )
        )


def work(
    session: pytest.Session,
    connection: Connection[Any, Any],
    others: Iterable[Connection[Any, Any]],
    home: Path,
) -> int:
    """Run modules in a fork until there are none, or until the process that it came from has ended."""
    for other in others:
        other.close()  # else they would stay open when that process ends
    config = session.config
    plugins = config.pluginmanager
    reporter: Any = plugins.get_plugin("terminalreporter")
    if reporter is not None:  # it stays: pytest-timeout writes through it
        reporter._tw._file = io.StringIO()
    plugins.register(told := Told(config, connection))
    told.is_new = False
    capture: Any = plugins.get_plugin("capturemanager")
    if capture is not None:  # into files of its own
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    live_in(home)
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]  # private: pytest sets it for a process, not a fork
    folders._basetemp = folders.getbasetemp() / home.name
    folders._basetemp.mkdir()
    try:
        connection.send(("idle", None))
        while places := connection.recv():
            for place, following in zip_longest(places, places[1:]):
                after = None if following is None else session.items[following]
                config.hook.pytest_runtest_protocol(item=session.items[place], nextitem=after)
                if session.shouldfail or session.shouldstop:
                    connection.send(("stopped", (session.shouldfail, session.shouldstop)))
                    return 0
                if connection.poll():
                    return 0  # to be told anything amid a module is to be told to stop
            connection.send(("idle", None))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except KeyboardInterrupt:
        return 130
    finally:
        session._setupstate.teardown_exact(None)
    return 0
