"""run.json as a record: what is written is read, of any release, and no damaged part takes others with it."""

from __future__ import annotations

import copy
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import json_bytes
from lora_trainer.common.records import REST, as_json, of_json, unreadable
from lora_trainer.reporting.run_record import RUN_FILE, RunRecord, read, write

RELEASES = sorted((Path(__file__).parents[1] / "fakes").glob("release_*"))
GONE = {"plan.time.more"}
"""Keys of earlier releases that nobody reads any more."""
NEEDED = {
    "name",
    "started_at_s",
    "settings",
    "base",
    "base.source",
    "base.identities",
    "plan",
    "plan.memory",
    "plan.memory.images_at_once",
    "environment",
    "environment.exactness",
    "dataset",
    "dataset.fingerprint",
}
"""What a resume cannot do without."""
NEEDED_IF_THERE = {"dataset.held_out"}
MISSING = object()
WRONG: tuple[Any, ...] = (None, "text", 7, 0.5, True, -1e400, [1], ["text"], [{}], {}, {"a": 1})


VALUES: Mapping[Any, Any] = {
    str: "a word",
    str | None: "a word",
    float: 1.5,
    int: 4,
    int | None: 3,
    bool | None: True,
    object: [1, None],
    Sequence[str]: ("one", "two"),
    Sequence[float]: (1, 2.5),
    Mapping[str, Any]: {"a": {"b": [1, "c", None]}},
    Mapping[str, str]: {"denoiser": "ab12"},
    Mapping[str, int]: {"64x64": 2},
    Mapping[str, float]: {"64x64": 2, "56x72": 0.5},
    Mapping[str, Sequence[float]]: {"steps": (1, 2.5)},
}
"""A value of each type of a field."""


def made(of: Any) -> Any:
    """Return a value of a type, with something in every field of the records in it."""
    if of in VALUES:
        return VALUES[of]
    if is_dataclass(of):
        types = get_type_hints(of)
        return of(**{each.name: made(types[each.name]) for each in fields(of)})
    if get_origin(of) is Sequence:
        return (made(get_args(of)[0]),) * 2
    return {"a": made(get_args(of)[1])} if get_origin(of) is Mapping else made(get_args(of)[0])


def whole_record() -> RunRecord:
    record: RunRecord = made(RunRecord)
    return replace(record, plan=replace(record.plan, settings={}))


def paths(kind: Any = RunRecord, prefix: str = "") -> Iterator[str]:
    """Yield the place of every field of a record and of the records in it, such as `base.source`."""
    for name, of in get_type_hints(kind).items():
        if name not in (REST, "settings") or kind is RunRecord:
            yield f"{prefix}{name}"
        if get_origin(of) not in (Sequence, Mapping):
            for inner in filter(is_dataclass, (of, *get_args(of))):
                yield from paths(inner, f"{prefix}{name}.")


def at(content: Any, path: str) -> Any:
    for name in path.split("."):
        content = content[name]
    return content


def damaged(content: Mapping[str, Any], path: str, wrong: Any) -> dict[str, Any]:
    """Return a copy with another value, or none, at a place."""
    changed: dict[str, Any] = copy.deepcopy(dict(content))
    *above, last = path.split(".")
    inside = at(changed, ".".join(above)) if above else changed
    inside[last] = wrong
    if wrong is MISSING:
        del inside[last]
    return changed


def keys(content: Any, prefix: str = "") -> Iterator[str]:
    """Yield the place of each key of the objects in a content, those in lists too."""
    if isinstance(content, dict):
        for name, entry in content.items():
            yield f"{prefix}{name}"
            yield from keys(entry, f"{prefix}{name}.")
    elif isinstance(content, list):
        for entry in content:
            yield from keys(entry, prefix)


def test_a_record_that_is_written_is_read_and_the_file_is_the_same_again(tmp_path: Path) -> None:
    whole = whole_record()
    write(tmp_path, whole)
    written = (tmp_path / RUN_FILE).read_bytes()
    assert read(tmp_path) == whole
    write(tmp_path, read(tmp_path))
    assert (tmp_path / RUN_FILE).read_bytes() == written
    content = json.loads(written)
    assert list(content)[:4] == ["name", "version", "command", "started_at_s"]
    # What nobody reads by name stands behind, as it was; the plan's settings are beside it.
    assert list(content["environment"]) == ["exactness", *whole.environment.rest]
    assert "settings" not in content["plan"] and content["settings"]


@pytest.mark.parametrize("release", RELEASES, ids=lambda folder: folder.name)
def test_run_json_of_earlier_releases_is_read_whole(release: Path) -> None:
    with tarfile.open(release / "run.tar.xz") as archive:
        (file,) = (name for name in archive.getnames() if name.endswith(RUN_FILE))
        opened = archive.extractfile(file)
        assert opened is not None
        content = json.loads(opened.read())
    assert unreadable(RunRecord, content) == ""
    back = as_json(of_json(RunRecord, content))
    assert set(keys(content)) - set(keys(back)) <= GONE
    for path in set(keys(content)) - GONE:
        if path in PATHS:
            now, then = at(back, path), at(content, path)
            assert now == then or isinstance(then, dict), path
    assert back["settings"] == content["settings"] and back["plan"]["memory"]["items"]
    assert back["origins"] == content["origins"] and back["environment"] == content["environment"]


PATHS = list(paths())


@pytest.mark.parametrize("path", PATHS)
def test_a_damaged_part_is_not_known_and_all_else_is(path: str) -> None:
    """It is missing or has another type; whoever cannot do without it is told which it is."""
    whole = as_json(whole_record())
    above = {"plan": {"memory": {"host": {}}}} if path.startswith("plan.memory.host.") else {}
    not_known = as_json(of_json(RunRecord, above))
    known = {
        name
        for name in PATHS
        if not f"{name}.".startswith(f"{path}.") and not path.startswith(f"{name}.")
    }
    for wrong in (MISSING, *WRONG):
        content = damaged(whole, path, wrong)
        record = of_json(RunRecord, content)
        back = as_json(record)
        for name in known:
            assert at(back, name) == at(whole, name), f"{path}={wrong} took {name} with it"
        if wrong in (MISSING, None):
            assert at(back, path) == at(not_known, path)
        assert as_json(of_json(RunRecord, back)) == back, "what was read can be written and read"
        json_bytes(back)
        lost = unreadable(RunRecord, content)
        if path in NEEDED | NEEDED_IF_THERE:
            is_lost = wrong in (MISSING, None) or at(back, path) != wrong
            if wrong is MISSING and path in NEEDED_IF_THERE:
                assert lost == ""
            elif is_lost:
                assert lost == path or lost.startswith(f"{path}."), f"{path}={wrong}"
            else:
                assert lost == "", f"{path}={wrong}"
        else:
            assert lost == "", f"a resume does without {path}"


def test_a_key_that_no_field_has_is_passed_over() -> None:
    whole = whole_record()
    content = as_json(whole)
    for path in ("", "base", "plan", "plan.memory", "plan.time", "dataset"):
        inside = at(content, path) if path else content
        inside["of tomorrow"] = {"a": [1]}
    content["dataset"]["findings"][0]["of tomorrow"] = 1
    content["plan"]["memory"]["items"][0]["of tomorrow"] = 1
    assert of_json(RunRecord, content) == whole and unreadable(RunRecord, content) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "run.json"), ("[1, 2]", "run.json"), ('{"name": ', "run.json"), ("\x00", "run.json")],
)
def test_a_file_that_is_not_an_object_is_an_error_that_names_it(
    text: str | None, said: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / RUN_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match=said):
        read(tmp_path)


def test_nothing_is_known_of_an_empty_record() -> None:
    empty = of_json(RunRecord, {})
    assert not empty.dataset.is_known and empty.plan.memory.runtime_bytes == 0
    assert unreadable(RunRecord, {}) == "name"
    for key in ("name", "fingerprint"):
        assert of_json(RunRecord, {"dataset": {key: "x"}}).dataset.is_known
    (finding,) = of_json(RunRecord, {"dataset": {"findings": [1, {"what": "x"}]}}).dataset.findings
    assert (finding.what, finding.file) == ("x", None), "what is not an object is passed over"
