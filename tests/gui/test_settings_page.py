"""The page of all settings: what it shows, what it changes, and that every value arrives as it was chosen."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import assume, settings
from hypothesis import given as examples
from hypothesis import strategies as st
from lora_trainer.gui import drafts, expert_edit, expert_view, launch, setting_presets
from lora_trainer.gui.drafts import Draft
from lora_trainer.gui.expert_text import text_of, value_of
from lora_trainer.gui.launch import Answer
from lora_trainer.gui.markup import inline, named
from lora_trainer.gui.pages import expert
from lora_trainer.gui.plans import Plans
from lora_trainer.gui.workplace import Workplace

from lora_trainer.cli import main
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.config import SettingInfo, all_settings, build_config, flatten
from lora_trainer.config.forms import Kind
from lora_trainer.config.layers import read_settings_text, resolve
from lora_trainer.run.plan_text import plan_json
from lora_trainer.run.prepare import Request, prepare
from tests.fakes.runs import toy

pytest.importorskip("gradio", reason="gradio is not installed (extra `gui`)")
Call = Callable[..., dict[str, Any]]


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(runs=tmp_path)


@pytest.fixture
def draft(work: Workplace, tmp_path: Path) -> Draft:
    return drafts.new(work, dataset=str(tmp_path))


@pytest.fixture
def call(work: Workplace, draft: Draft) -> Call:
    """Ask as the script does; `draft` is named unless another one is."""
    plans = Plans(work, ask=lambda words: Answer(values=None, error=" ".join(words)))
    functions = {f.__name__: f for f in expert.served(expert.ExpertDesk(work=work, plans=plans))}

    def ask(function: str, /, **asked: Any) -> Any:
        answer = functions[function]({"draft": draft.id, **asked})
        json.dumps(answer)  # it has to reach the browser
        return answer

    return ask


@pytest.mark.parametrize(
    "asked",
    [
        {"key": "adapter.rank", "text": "many"},
        {"key": "no.setting", "text": "1"},
        {"key": ["adapter.rank"], "text": "1"},
        {"key": "adapter.rank", "text": 1},
        {"key": "adapter.rank", "text": "1", "draft": "../../x"},
        {"key": "adapter.rank", "text": "1", "draft": None},
        {"key": "output.folder", "text": "/x"},
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    asked: dict[str, Any], call: Call, work: Workplace, draft: Draft
) -> None:
    assert "Fix: " in call("change", **asked)["error"]
    assert drafts.read(work, draft.id) == draft


def test_a_request_that_is_no_object_is_refused(work: Workplace) -> None:
    functions = expert.served(expert.ExpertDesk(work=work, plans=Plans(work)))
    for function in functions:
        for asked in (None, [], "x", 5):
            answer = function(asked)
            assert answer is not None and "error" in answer


def test_without_an_id_the_newest_draft_opens(call: Call, draft: Draft) -> None:
    assert call("open", draft="")["id"] == draft.id


def test_a_file_does_not_replace_what_was_changed_meanwhile(
    call: Call, work: Workplace, draft: Draft
) -> None:
    before = call("open")["stamp"]
    now = call("change", key="train.seed", text="7")["stamp"]
    refused = call("replace", text='{"adapter.rank": 4}', stamp=before)
    assert "changed elsewhere" in refused["error"]
    assert drafts.read(work, draft.id).settings == {"train.seed": 7}
    call("replace", text='{"adapter.rank": 4}', stamp=now)
    assert drafts.read(work, draft.id).settings == {"adapter.rank": 4}


RETIRED = {"adapter.rank": 4, "hardware.cuda_graphs": True}


def test_a_draft_of_an_earlier_version_is_read_without_what_is_gone(
    call: Call, work: Workplace, draft: Draft
) -> None:
    drafts.save(work, replace(draft, settings=RETIRED))
    assert drafts.current(work) == replace(draft, settings={"adapter.rank": 4})
    assert call("open")["given"] == {"adapter.rank": "4"}


def test_a_file_and_a_preset_of_an_earlier_version_are_read_without_what_is_gone(
    call: Call, work: Workplace, draft: Draft
) -> None:
    assert call("replace", text=json.dumps(RETIRED))["given"] == {"adapter.rank": "4"}
    setting_presets.save(work, RETIRED, name="old")
    call("reset", key="adapter.rank")
    assert call("load", name="old")["given"] == {"adapter.rank": "4"}
    assert drafts.read(work, draft.id).settings == {"adapter.rank": 4}


def test_changes_at_once_are_all_kept(call: Call, work: Workplace, draft: Draft) -> None:
    keys = ("adapter.rank", "train.seed", "train.steps", "data.repeats", "sampling.steps")
    threads = [
        threading.Thread(target=call, args=("change",), kwargs={"key": key, "text": "9"})
        for key in keys
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drafts.read(work, draft.id).settings == dict.fromkeys(keys, 9)


def test_the_command_line_is_the_training(call: Call, work: Workplace) -> None:
    call("change", key="sampling.prompts", text="an owl's nest")
    command = call("command")["command"]
    assert command == (
        f"lora-train {work.runs} --priority=balanced "
        """'--set=sampling.prompts=["an owl'"'"'s nest"]' """
        f"--output={work.runs}"
    )


def test_a_preset_is_kept_and_loaded_without_the_name_of_the_run(
    call: Call, work: Workplace, draft: Draft
) -> None:
    call("change", key="adapter.rank", text="8")
    call("change", key="output.name", text="owl")
    assert "mine.json" in call("keep", name="mine")["note"]
    assert "there is a preset" in call("keep", name="mine")["error"]
    call("replace", text='{"train.seed": 3, "output.name": "cat"}')
    assert call("load", name="mine")["presets"] == ["mine"]
    loaded = drafts.read(work, draft.id)
    assert (loaded.settings, loaded.name) == ({"adapter.rank": 8}, "cat")


def test_the_plan_says_why_there_is_none(call: Call, work: Workplace) -> None:
    assert call("plan")["error"].startswith("plan ")
    empty = drafts.new(work)
    unplanned = call("plan", draft=empty.id)
    assert "Choose the folder" in unplanned["said"][0] and not unplanned["error"]
    gone = drafts.new(work, dataset="/nowhere/at/all")
    assert "no folder" in call("plan", draft=gone.id)["error"]


def test_a_full_disk_is_said(
    call: Call, monkeypatch: pytest.MonkeyPatch, work: Workplace, draft: Draft
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drafts, "save", full)
    assert "error" in call("change", key="train.seed", text="7")
    assert drafts.read(work, draft.id) == draft


EMPTY = Draft(id="0" * 12)
NO_PLAN = Answer(values=None, error="adapter.rank=4096: input should be less than or equal to 1024")


def fields() -> dict[str, dict[str, Any]]:
    """Return the fields of the form as the script gets them, by key."""
    form = json.loads(json.dumps(expert_view.form()))
    return {field["key"]: field for part in form["sections"] for field in part["settings"]}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """The real plan of a draft with a rank of its own, without a card."""
    place = toy(tmp_path_factory.mktemp("expert"))
    overrides = {"data.cache_dir": str(place.cache), "adapter.rank": 8, "hardware.device": "cpu"}
    found = plan_json(prepare(Request(dataset=place.dataset, overrides=overrides)))
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def test_every_setting_is_in_the_form_with_all_it_says_about_itself() -> None:
    shown = fields()
    infos = all_settings()
    assert list(shown) == [info.key for info in infos]
    for info in infos:
        field = shown[info.key]
        assert (field["doc"], field["unit"], field["label"]) == (
            named(info.doc),
            info.unit,
            info.label,
        )
        default = json.loads(json.dumps(info.default))
        assert value_of(info, field["default"]) == default, info.key
        words = [value_of(info, word["text"]) for word in field["words"]]
        assert words == list(info.form.words)


def test_the_form_is_small_enough_to_come_with_the_page() -> None:
    assert len(json.dumps(expert_view.form())) < 60_000


def test_what_is_in_force_comes_with_its_origin(plan: Mapping[str, Any]) -> None:
    draft = replace(EMPTY, settings={"adapter.rank": 8, "hardware.device": "cpu"})
    found = expert_view.planned(draft, Answer(values=plan))
    rank, resolution = found["fields"]["adapter.rank"], found["fields"]["data.resolution"]
    assert (rank["text"], rank["from"]) == ("8", "you")
    assert (rank["preset"], rank["preset_from"]) == ("16", "priority balanced")
    assert (resolution["text"], resolution["from"]) == ("64", "planner")
    assert resolution["reason"] == "the size embedded was trained on"
    assert found["fields"]["data.flip"]["from"] == "default"
    assert found["unused"]["objective.flow_shift"] == (
        "needs \u201cPrediction\u201d = flow, but it is epsilon"
    )
    assert "adapter.rank" not in found["unused"]
    assert found["error"] == "" and found["blamed"] == []


def test_the_bar_is_of_the_plan(plan: Mapping[str, Any]) -> None:
    memory = expert_view.planned(EMPTY, Answer(values=plan))["memory"]
    assert memory["fits"] and memory["said"].startswith("Fits: needs ")
    total = sum(part["share"] for part in memory["parts"])
    peak, limit = plan["memory"]["peak_bytes"], plan["memory"]["limit_bytes"]
    assert total / memory["limit"] == pytest.approx(peak / limit, rel=0.01)
    assert 0 < memory["limit"] < 1


def test_without_a_plan_the_defaults_stand_and_the_reason_is_said() -> None:
    draft = replace(EMPTY, settings={"adapter.kind": "oft"})
    found = expert_view.planned(draft, NO_PLAN)
    assert found["fields"]["adapter.rank"]["text"] == "16"
    assert found["unused"]["adapter.alpha"] == "without effect while \u201cKind\u201d is oft"
    assert "objective.flow_shift" not in found["unused"], "the base is not known"
    assert (found["error"], found["blamed"]) == (named(NO_PLAN.error), ["adapter.rank"])
    assert found["memory"] is None


def test_a_damaged_plan_does_no_harm() -> None:
    found = expert_view.planned(EMPTY, Answer(values={"priority": "balanced", "settings": []}))
    assert found["fields"]["adapter.rank"]["preset_from"] == "default"


def test_the_stamp_changes_with_what_is_shown(tmp_path: Path) -> None:
    stamps = {
        expert_view.stamp(draft)
        for draft in (
            EMPTY,
            replace(EMPTY, settings={"train.seed": 1}),
            replace(EMPTY, settings={"train.seed": 2}),
            replace(EMPTY, base="embedded"),
            replace(EMPTY, name="owl"),
            replace(EMPTY, dataset="/x"),
            replace(EMPTY, priority="speed"),
            replace(EMPTY, started_as="000001"),
        )
    }
    assert len(stamps) == 8
    state = expert_view.state(Workplace(runs=tmp_path), replace(EMPTY, settings={"train.seed": 1}))
    assert state["given"] == {"train.seed": "1"}
    assert json.loads(state["json"]) == {"train.seed": 1}


EDITABLE = [info for info in all_settings() if info.key != expert_edit.FOLDER]
OWN_FIELDS = (expert_edit.BASE, expert_edit.NAME)


def values_of(info: SettingInfo) -> st.SearchStrategy[Any]:
    """Return values that the setting's form says are right."""
    form = info.form
    kinds: Mapping[str, st.SearchStrategy[Any]] = {
        "switch": st.booleans(),
        "choice": st.sampled_from(form.words or ("",)),
        "text": st.text(max_size=30),
        "list": st.lists(st.text(max_size=20), max_size=4),
        "mapping": st.dictionaries(
            st.text(max_size=10).map(re.escape), st.integers(1, 1000), max_size=3
        ),
    }
    if info.key in OWN_FIELDS:
        return st.from_regex("[a-z]{1,8}", fullmatch=True)
    if form.kind == "number" and form.whole:
        found: st.SearchStrategy[Any] = st.integers(int(form.low or 0), int(form.high or 1))
    elif form.kind == "number":
        found = st.floats(
            form.low, form.high, exclude_min=form.above_low, exclude_max=form.below_high
        )
    else:
        found = kinds[form.kind]
    if form.kind == "number" and form.words:
        found |= st.sampled_from(form.words)
    if not form.nullable:
        return found
    return found.filter(lambda value: str(value).strip() != "") | st.none()  # empty is none


def around(info: SettingInfo) -> dict[str, Any]:
    """Return the settings that this one needs beside it."""
    beside = {key: values[0] for key, values in info.only_for.items() if key in NEEDED}
    return {"train.batch_size": 4096} if info.key == "memory.micro_batch" else beside


NEEDED = ("adapter.kind", "adapter.targets", "adapter.text_encoder")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    (folder / "photos").mkdir()
    return folder / "photos"


def understood(words: launch.Words) -> dict[str, Any]:
    """Return the settings that the real command line reads in these words."""
    _, bound, _ = main.app.parse_args(list(words), exit_on_error=False, print_error=False)
    name = bound.arguments.get("name")
    settings: dict[str, Any] = bound.arguments["options"].keywords(name=name)["settings"]
    return settings


@pytest.mark.parametrize("kind", get_args(Kind))
@settings(max_examples=40)
@examples(data=st.data())
def test_a_value_arrives_as_it_was_chosen(kind: Kind, data: Any, images: Path) -> None:
    info = data.draw(st.sampled_from([info for info in EDITABLE if info.form.kind == kind]))
    value = data.draw(values_of(info))
    beside = around(info)
    try:
        wanted = flatten(build_config({**beside, info.key: value}))[info.key]
    except RequestError:
        assume(False)
    text = text_of(info, wanted)
    draft = replace(EMPTY, dataset=str(images), settings=beside)
    draft = expert_edit.changed(draft, key=info.key, text=text)
    work = Workplace(runs=images.parent)
    arrived = flatten(build_config(understood(launch.train_words(draft, work))))
    assert arrived[info.key] == wanted
    pasted = expert_edit.replaced(EMPTY, text=expert_edit.as_json(expert_edit.given(draft))).draft
    assert expert_edit.given(pasted) == expert_edit.given(draft)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("train.batch_size", "many"),
        ("train.batch_size", ""),
        ("adapter.rank", "1.5"),
        ("optimizer.learning_rate", "NaN"),
        ("adapter.rank_pattern", '{"attn": 0}'),
        ("adapter.lokr_factor", "4"),
        ("data.max_aspect", "1e999"),
        ("data.resolution", "[[1]]"),
    ],
)
def test_the_impossible_is_refused_in_the_words_of_the_command_line(
    key: str, text: str, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError) as refused:
        expert_edit.changed(EMPTY, key=key, text=text)
    assert main.run(["plan", str(images), f"--set={key}={text}"]) == 2
    assert capsys.readouterr().err.strip() == f"error: {refused.value}"


def test_a_name_that_is_no_setting_is_refused() -> None:
    with pytest.raises(RequestError, match=r"Did you mean 'adapter\.rank'"):
        expert_edit.changed(EMPTY, key="adapter.rang", text="4")


def test_base_and_name_are_those_of_the_draft() -> None:
    draft = expert_edit.changed(EMPTY, key="base.model", text="me/model")
    draft = expert_edit.changed(draft, key="output.name", text="owl")
    assert (draft.base, draft.name, dict(draft.settings)) == ("me/model", "owl", {})
    assert expert_edit.given(draft) == {"base.model": "me/model", "output.name": "owl"}
    assert expert_edit.without(draft, key="base.model").base == ""
    assert expert_edit.changed(draft, key="base.model", text="auto").base == ""
    with pytest.raises(RequestError, match="cannot be the name of a run"):
        expert_edit.changed(draft, key="output.name", text="../owl")


def test_the_runs_folder_is_not_changed_but_said(images: Path) -> None:
    with pytest.raises(RequestError, match="runs folder of this interface"):
        expert_edit.changed(EMPTY, key="output.folder", text="/elsewhere")
    edited = expert_edit.replaced(EMPTY, text='{"output.folder": "/x", "adapter.rank": 4}')
    assert edited.draft.settings == {"adapter.rank": 4}
    assert "output.folder was left out" in edited.note


def test_a_started_training_keeps_its_settings() -> None:
    with pytest.raises(RequestError, match="started already"):
        expert_edit.changed(replace(EMPTY, started_as="000001"), key="adapter.rank", text="4")


def test_reset_leaves_the_others() -> None:
    draft = replace(EMPTY, settings={"adapter.rank": 4, "train.seed": 1})
    assert expert_edit.without(draft, key="adapter.rank").settings == {"train.seed": 1}


def test_half_a_character_is_refused() -> None:
    for text in ("a \ud800", '["\\ud800"]'):
        with pytest.raises(RequestError, match="half a character"):
            expert_edit.changed(EMPTY, key="sampling.prompts", text=text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"adapter.rank": 4, "train": {"seed": 7}}', "settings.json"),
        ("adapter.rank = 4\n[train]\nseed = 7\n", "mine.toml"),
        (
            '{"settings": {"adapter.rank": {"value": 4, "origin": "x"}, "train.seed": 7}}',
            "plan.json",
        ),
    ],
)
def test_a_settings_file_replaces_all(text: str, name: str) -> None:
    before = replace(EMPTY, settings={"data.flip": True})
    edited = expert_edit.replaced(before, text=text, name=name)
    assert edited.draft.settings == {"adapter.rank": 4, "train.seed": 7}
    written = expert_edit.as_json(expert_edit.given(edited.draft))
    assert read_settings_text(written, name="x").values == {"adapter.rank": 4, "train.seed": 7}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"adapter.rank": 4\n "train.seed": 7}', "line 2, column 2: not JSON"),
        ('{\n  "adapter.rang": 4}', "line 2, column 3: unknown setting 'adapter.rang'"),
        ('{"adapter.rank": 4,\n  "train.seed": -1}', "train.seed is in line 2, column 3"),
        ("[1]", "holds a list"),
    ],
)
def test_a_mistake_in_the_file_has_a_place(text: str, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        expert_edit.replaced(EMPTY, text=text)
    assert said in str(refused.value)


def test_no_text_is_no_change() -> None:
    assert expert_edit.replaced(replace(EMPTY, settings={"train.seed": 1}), text=" ").draft == EMPTY


def test_lists_are_lines_unless_that_would_lose_something() -> None:
    info = expert_edit.setting("sampling.prompts")
    assert text_of(info, ["a cat", "[portrait] of a dog"]) == "a cat\n[portrait] of a dog"
    assert value_of(info, "a cat\n\n [portrait] of a dog\n") == ["a cat", " [portrait] of a dog"]
    for kept in (["two\nlines"], ["", "a"], ['["a"]'], ["a\r"]):
        assert json.loads(text_of(info, kept)) == kept
        assert value_of(info, text_of(info, kept)) == kept


@pytest.mark.parametrize("key", [info.key for info in EDITABLE if info.path])
def test_files_outside_of_the_allowed_folders_are_not_named(key: str, tmp_path: Path) -> None:
    inside = tmp_path / "data"
    inside.mkdir()
    work = Workplace(runs=tmp_path / "runs", roots=(inside,))

    def named(value: str) -> Draft:
        return expert_edit.changed(EMPTY, key=key, text=value)

    for fine in (f"{inside}/x.safetensors", "someone/model", "auto"):
        expert_edit.check_paths(named(fine), work)
    for outside in ("/etc/passwd", "../secret", "~/x", f"{inside}/../y", "passwd"):
        with pytest.raises(InputError, match="outside"):
            expert_edit.check_paths(named(outside), work)
    expert_edit.check_paths(named("/etc/passwd"), Workplace(runs=tmp_path))


VALUES = {"adapter.rank": 4, "sampling.prompts": ["\u00fc", "a\nb"]}


def test_a_preset_is_listed_and_read_by_the_command_line(work: Workplace) -> None:
    file = setting_presets.save(work, VALUES, name=" my owl ")
    setting_presets.save(work, VALUES, name="a")
    assert setting_presets.names(work) == ["a", "my owl"]
    resolved = resolve(
        family="sd15",
        tier="10-12",
        priority="balanced",
        preset=str(file),
        config_file=None,
        overrides={},
    )
    assert resolved.config.adapter.rank == 4
    assert resolved.config.sampling.prompts == ("\u00fc", "a\nb")
    assert file.read_text(encoding="utf-8") == setting_presets.text(work, name="my owl")


def test_a_name_in_use_is_replaced_when_asked_only(work: Workplace) -> None:
    setting_presets.save(work, VALUES, name="a")
    with pytest.raises(RequestError, match="there is a preset 'a'"):
        setting_presets.save(work, {"adapter.rank": 8}, name="a")
    assert '"adapter.rank": 4' in setting_presets.text(work, name="a")
    setting_presets.save(work, {"adapter.rank": 8}, name="a", over=True)
    assert '"adapter.rank": 8' in setting_presets.text(work, name="a")


@pytest.mark.parametrize("name", ["", " ", "../a", ".a", "a/b", "a\0", "x" * 200])
def test_a_name_is_no_path(work: Workplace, name: str) -> None:
    with pytest.raises(RequestError):
        setting_presets.save(work, VALUES, name=name)
    with pytest.raises(RequestError):
        setting_presets.text(work, name=name)
    assert setting_presets.names(work) == []


def test_nothing_is_not_saved(work: Workplace) -> None:
    with pytest.raises(RequestError, match="nothing is changed"):
        setting_presets.save(work, {}, name="a")


def test_what_is_not_there_cannot_be_loaded(work: Workplace) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        setting_presets.text(work, name="b")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("leave optimizer.learning_rate out", "leave \u201cLearning rate\u201d out"),
        ("use --set train.precision=fp32, and", "use \u201cTrain: Precision\u201d = fp32, and"),
        ("train.steps=4 is above sampling.steps", "\u201cTrain: Steps\u201d = 4 is above \u201cSampling: Steps\u201d"),
        ("run `lora-train <b>`", "run <code>lora-train &lt;b&gt;</code>"),
        ("`--set train.steps=4` optimizer.beta1", "<code>--set train.steps=4</code> \u201cBeta1\u201d"),
        ("a ` alone, data.none, mydata.flip, data.flip.png", "a ` alone, data.none, mydata.flip, data.flip.png"),
    ],
)  # fmt: skip
def test_messages_name_settings_by_their_labels_and_show_code_as_code(
    said: str, shown: str
) -> None:
    assert inline(said) == shown
