"""Undo and redo are exact whatever the order of edits, kills and edits of others in between."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lora_trainer.gui.datasets import changes
from lora_trainer.gui.datasets.journal import Journal

from lora_trainer.common.errors import InputError, MachineError
from tests.gui.conftest import tree

Snapshot = dict[str, bytes]
NAMES = ("a.txt", "b.txt", "c.txt", "_excluded/a.txt")
NEVER = 99
KILLS = st.just(NEVER) | st.integers(0, 2)
"""The file of a step before which a kill comes."""


@pytest.fixture
def journal(root: Path, tmp_path: Path) -> Journal:
    return Journal(root=root, folder=tmp_path / "undo")


def write(journal: Journal, file: str, after: str | None, *, group: str = "") -> Any:
    with journal.locked():
        before = changes.read_content(journal.root / file)
        change = changes.FileChange(file=file, before=before, after=after)
        return journal.perform(f"edit {file}", [change], group=group)


def test_one_stay_in_a_field_is_one_step(journal: Journal, root: Path) -> None:
    for text in ("a", "a c", "a cat"):
        write(journal, "a.txt", text, group="stay 1")
    write(journal, "a.txt", "a dog", group="stay 2")
    journal.undo()
    assert (root / "a.txt").read_text() == "a cat"
    journal.undo()
    assert tree(root) == {}
    write(journal, "a.txt", "mine", group="stay")
    (root / "a.txt").write_text("theirs")
    write(journal, "a.txt", "theirs and mine", group="stay")
    journal.undo()
    assert (root / "a.txt").read_text() == "theirs", "not joined over an edit of somebody else"


def test_what_somebody_else_has_changed_is_left_and_named(journal: Journal, root: Path) -> None:
    with journal.locked():
        new = [changes.FileChange(file=f"{n}.txt", before=None, after=n) for n in "abc"]
        journal.perform("all", new)
    (root / "b.txt").write_text("theirs")
    outcome = journal.undo()
    assert outcome is not None
    (left,) = outcome.left
    assert "b.txt was changed by something else" in left
    assert tree(root) == {"b.txt": b"theirs"}
    journal.redo()
    assert tree(root) == {"a.txt": b"a", "b.txt": b"theirs", "c.txt": b"c"}
    write(journal, "d.txt", "one")
    journal.undo()
    with journal.locked():
        late = changes.FileChange(file="d.txt", before="not so", after="x")
        outcome = journal.perform("late", [late])
    assert len(outcome.left) == 1
    history = journal.history()
    assert (len(history.done), len(history.undone)) == (1, 1), "no step"


def test_a_full_disk_leaves_the_history_as_it_was_and_no_name_leads_out_of_the_folder(
    journal: Journal, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(journal, "a.txt", "one")

    def full(path: Path, data: bytes, **options: Any) -> None:
        raise MachineError(f"cannot write {path}", fix="free some space")

    with monkeypatch.context() as patch:
        patch.setattr(changes, "write_atomic", full)
        with pytest.raises(MachineError):
            write(journal, "a.txt", "two")
    assert len(journal.history().done) == 1
    journal.undo()
    assert tree(root) == {}
    (root / "link").symlink_to(tmp_path)
    (root / "file-link").symlink_to(tmp_path / "theirs")
    for name in ("../x", "/etc/x", "a/../../x", "a\0b", "link/x", "file-link"):
        with pytest.raises(InputError):
            changes.inside(root, name)


class Killed(BaseException):
    """Ends everything at once, as a kill does: nothing handles it."""


def kill_at(number: int, write_atomic: Callable[..., None]) -> Callable[..., None]:
    """Return a writer that is killed before its `number`-th file."""
    counter = iter(range(number, -1, -1))

    def writing(path: Path, data: bytes, **options: Any) -> None:
        if next(counter) == 0:
            raise Killed
        write_atomic(path, data, **options)

    return writing


def test_a_log_cut_anywhere_is_a_history(journal: Journal, root: Path) -> None:
    """As a kill in the middle of an append leaves it; the next edits count all the same."""
    write(journal, "a.txt", "one")
    write(journal, "a.txt", "two")
    journal.undo()
    whole = journal.log.read_bytes()
    for length in range(0, len(whole), 5):
        journal.log.write_bytes(whole[:length])
        (root / "a.txt").write_text("one")
        journal.history()
        write(journal, "b.txt", f"{length}")
        assert journal.history().done[-1].title == "edit b.txt"
        journal.undo()
        assert not (root / "b.txt").exists()
    journal.log.write_bytes(
        whole + b'\xff\n[]\n{"op": "do", "id": 3}\n{"op": "end", "without": ["x"]}\n7\n'
    )
    history = journal.history()
    assert [step.title for step in (*history.done, *history.undone)] == ["edit a.txt"] * 2


def test_a_large_log_forgets_the_oldest_steps(
    journal: Journal, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_trainer.gui.datasets.journal.MAX_LOG_BYTES", 4_000)
    monkeypatch.setattr("lora_trainer.gui.datasets.journal.KEPT_BYTES", 2_000)
    for number in range(40):
        write(journal, "a.txt", f"{number} {'x' * 100}")
    assert journal.log.stat().st_size < 6_000
    done = len(journal.history().done)
    assert 2 < done < 40
    journal.undo()
    assert (root / "a.txt").read_text().startswith("38 ")


class Model(RuleBasedStateMachine):
    """Any sequence of edits, undo, redo, restarts and kills against two stacks of snapshots.

    A step that a kill cuts short before one of its files is finished by the next look.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        base = Path(self.place.name)
        self.root = base / "set"
        self.root.mkdir()
        self.journal = Journal(root=self.root, folder=base / "undo")
        self.now: Snapshot = {}
        self.done: list[Snapshot] = []
        self.undone: list[Snapshot] = []

    def teardown(self) -> None:
        self.place.cleanup()

    def act(self, act: Callable[[], Any], kill: int) -> None:
        with pytest.MonkeyPatch.context() as patch, suppress(Killed):
            patch.setattr(changes, "write_atomic", kill_at(kill, changes.write_atomic))
            outcome = act()
            assert outcome is not None and not outcome.left

    def perform(self, step: list[Any], after: Snapshot, kill: int) -> None:
        def act() -> Any:
            with self.journal.locked():
                return self.journal.perform("step", step)

        self.act(act, kill)
        self.done.append(self.now)
        self.undone.clear()
        self.now = after

    @rule(name=st.sampled_from(NAMES), after=st.binary(max_size=4) | st.none(), kill=KILLS)
    def edit(self, name: str, after: bytes | None, kill: int) -> None:
        before = changes.read_content(self.root / name)
        text = None if after is None else after.decode("utf-8", "surrogateescape")
        if before is None and text is None:
            return
        (self.root / name).parent.mkdir(exist_ok=True)
        new = {each: data for each, data in self.now.items() if each != name}
        step = [changes.FileChange(file=name, before=before, after=text)]
        self.perform(step, new if after is None else {**new, name: after}, kill)

    @precondition(lambda self: self.now)
    @rule(suffix=st.sampled_from(["x", "y"]), kill=KILLS)
    def edit_all(self, suffix: str, kill: int) -> None:
        step: list[Any] = []
        for name in self.now:
            before = changes.read_content(self.root / name)
            step.append(changes.FileChange(file=name, before=before, after=f"{suffix}{before}"))
        new = {name: suffix.encode() + data for name, data in self.now.items()}
        self.perform(step, new, kill)

    @rule(pair=st.permutations(NAMES))
    def move(self, pair: list[str]) -> None:
        source, target = pair[:2]
        if source in self.now and target not in self.now:
            new = {target if name == source else name: data for name, data in self.now.items()}
            self.perform([changes.MoveChange(file=source, to=target)], new, NEVER)

    @precondition(lambda self: self.done)
    @rule(kill=KILLS)
    def undo(self, kill: int) -> None:
        self.act(self.journal.undo, kill)
        self.undone.append(self.now)
        self.now = self.done.pop()

    @precondition(lambda self: self.undone)
    @rule(kill=KILLS)
    def redo(self, kill: int) -> None:
        self.act(self.journal.redo, kill)
        self.done.append(self.now)
        self.now = self.undone.pop()

    @rule()
    def restart(self) -> None:
        self.journal = Journal(root=self.root, folder=self.journal.folder)

    @invariant()
    def the_folder_is_as_the_model_says(self) -> None:
        history = self.journal.history()
        assert tree(self.root) == self.now
        assert (len(history.done), len(history.undone)) == (len(self.done), len(self.undone))


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=25, stateful_step_count=12)
