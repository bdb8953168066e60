"""The page of all settings: what it shows, what it changes, and that every value arrives as it was chosen."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from lora_trainer.gui import command_lines, drafts, markup, setting_edit
from lora_trainer.gui.server.translation import words as language
from lora_trainer.gui.setting_text import text_of, value_of
from lora_trainer.gui.settings import routes, view
from lora_trainer.gui.settings.api import Api
from lora_trainer.gui.train import routes as train
from lora_trainer.gui.train import view as train_view
from lora_trainer.gui.workplace import Workplace
from starlette.applications import Starlette
from starlette.testclient import TestClient

from lora_trainer.cli import main
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.records import as_json
from lora_trainer.config.config import SettingInfo, all_settings, build_config, flatten
from lora_trainer.config.layers import AskedFor, resolve
from lora_trainer.run import prepare
from lora_trainer.run.plan_text import plan_record
from tests.fakes.runs import toy, write_dataset

Call = Callable[..., Any]
INFOS = {info.key: info for info in all_settings()}


@pytest.fixture
def draft(work: Workplace, tmp_path: Path) -> drafts.Draft:
    return drafts.new(work, dataset=str(tmp_path))


def caller(work: Workplace, draft: drafts.Draft, plan: Any = None, *, language: str = "en") -> Call:
    """Return what asks as the script does; `draft` is named unless another one is."""

    def answer(words: Any) -> Any:
        return command_lines.Answer(values=plan, error="" if plan else " ".join(words))

    api = Api(work=work, plans=command_lines.Plans(work, ask=answer))
    client = TestClient(
        Starlette(routes=routes.answers(api)), headers={"accept-language": language}
    )

    def ask(question: str, /, **asked: Any) -> Any:
        body = json.dumps(
            {"draft": draft.id, **asked}
        )  # half a character is written as JSON.stringify does
        return client.post(f"/settings/{question}", content=body).json()

    return ask


def opened(work: Workplace, address: str = "/settings", *, language: str = "en") -> str:
    """Return the page at an address."""
    client = TestClient(Starlette(routes=routes.routes(work)))
    return client.get(address, headers={"accept-language": language}).text


def state_of(page: str) -> Any:
    """Return the draft that a page begins with."""
    found = re.search(r'data-state="([^"]*)"', page)
    assert found, page
    return json.loads(html.unescape(found[1]))


@pytest.fixture
def call(work: Workplace, draft: drafts.Draft) -> Call:
    return caller(work, draft)


def test_settings_are_found_by_everyday_words_in_each_language_and_choices_have_words() -> None:
    for code in ("en", "de"):
        fields = {field.key: field for section in view.form(code) for field in section.fields}
        for key, searched in {
            "memory.base_precision": "VRAM Grafikspeicher",
            "data.resolution": "image size Bildgröße",
            "hardware.compile": "speed Geschwindigkeit",
            "train.seed": "random Zufall",
        }.items():
            found = fields[key].also.casefold()
            assert all(word in found for word in searched.casefold().split()), (code, key)
        labels = {word.text: word.label for word in fields["base.distilled"].words}
        yes, automatic = {"en": ("yes", "automatic"), "de": ("ja", "automatisch")}[code]
        assert (labels["true"], labels['"auto"']) == (yes, automatic)


def test_a_number_may_be_typed_as_half_of_the_world_writes_it() -> None:
    rate, steps = INFOS["optimizer.learning_rate"], INFOS["train.steps"]
    for text, value in {"0,002": 0.002, "0.002": 0.002, "1,5e-4": 0.00015, "1,000": 1.0}.items():
        assert value_of(rate, text) == value
    for text, value in {"2400": 2400, "2,400": 2400, "2.400": 2400, "1.200.000": 1200000}.items():
        assert value_of(steps, text) == value
    for text in ("2,4", "24,00", "2.400,000", "0,400"):
        assert value_of(steps, text) == text or not float(value_of(steps, text)).is_integer()


def test_what_cannot_be_is_refused_in_the_words_of_the_command_line_and_changes_nothing(
    call: Call,
    work: Workplace,
    draft: drafts.Draft,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for key, text in (
        ("train.batch_size", "many"),
        ("adapter.rank", "1.5"),
        ("optimizer.learning_rate", "NaN"),
        ("adapter.rank_pattern", '{"attn": 0}'),
        ("adapter.lokr_factor", "4"),
        ("data.resolution", "[[1]]"),
    ):
        refused = call("change", key=key, text=text)["error"]
        assert main.run(["plan", str(work.runs), f"--set={key}={text}"]) == 2
        assert markup.named(capsys.readouterr().err.strip()) == f"error: {refused}"
    for wrong in (
        {"key": "adapter.rang", "text": "1"},
        {"key": "adapter.rank", "text": "1", "draft": "../../x"},
        {"key": "output.folder", "text": "/x"},
        {"key": "output.name", "text": "../owl"},
    ):
        assert "Fix: " in call("change", **wrong)["error"]
    for unsent in (
        {"key": ["adapter.rank"], "text": "1"},
        {"key": "adapter.rank", "text": 1},
        {"key": "adapter.rank"},
        {"key": "adapter.rank", "text": "1", "more": ""},
        {"key": "sampling.prompts", "text": "a \ud800"},
    ):
        assert call("change", **unsent) == {"error": "load the page again"}
    with pytest.raises(
        RequestError, match="half a character"
    ):  # as a file of another program may have it
        setting_edit.changed(draft, key="sampling.prompts", text="a \ud800")
    assert drafts.read(work, draft.id) == draft
    drafts.save(work, replace(draft, started_as="000001"))
    assert "started already" in call("change", key="adapter.rank", text="4")["error"]
    drafts.save(work, draft)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drafts, "save", full)
    assert "error" in call("change", key="train.seed", text="7")
    assert drafts.read(work, draft.id) == draft


def test_a_file_replaces_all_but_not_what_was_changed_meanwhile(
    call: Call, work: Workplace, draft: drafts.Draft
) -> None:
    assert state_of(opened(work))["id"] == draft.id, "without an id the newest one opens"
    first = state_of(opened(work, f"/settings?draft={draft.id}"))
    before = first["stamp"]
    assert call("look", stamp="") == first
    images = work.runs / "toys"
    images.mkdir(parents=True)
    about = replace(draft, dataset=str(images))
    assert view.state(work, about)["called"] == "toys"
    assert view.state(work, replace(about, name="bears"))["called"] == "bears", "as the queue does"
    assert "the draft" in opened(work, "/settings?draft=x")
    now = call("change", key="train.seed", text="7")
    assert json.loads(now["json"]) == {"train.seed": 7} and now["given"] == {"train.seed": "7"}
    assert call("look", stamp=now["stamp"]) == {} and call("look", stamp=before) == now
    refused = call("replace", text='{"adapter.rank": 4}', stamp=before)
    assert "changed elsewhere" in refused["error"]
    for text, name in (
        ('{"adapter.rank": 4, "train": {"seed": 7}}', "settings.json"),
        ("adapter.rank = 4\n[train]\nseed = 7\n", "mine.toml"),
        ('{"settings": {"adapter.rank": {"value": 4, "origin": "x"}, "train.seed": 7}}', "p.json"),
    ):
        call("change", key="data.flip", text="true")
        call("replace", text=text, name=name)
        assert drafts.read(work, draft.id).settings == {"adapter.rank": 4, "train.seed": 7}
    for text, error in (
        ('{"adapter.rank": 4\n "train.seed": 7}', "Line 2, column 2: not JSON"),
        ('{\n  "adapter.rang": 4}', "Unknown setting 'adapter.rang'. Did you mean"),
        ('{"adapter.rank": 4,\n  "train.seed": -1}', "“Train: Seed” = -1 is not possible, only "),
        ("[1]", "settings.json holds a list"),
    ):
        assert call("replace", text=text)["error"].startswith(error)
    assert call("reset", key="adapter.rank")["given"] == {"train.seed": "7"}
    note = call("replace", text='{"output.folder": "/x", "base.model": "me/model"}')["note"]
    assert "output.folder was left out" in note
    kept = drafts.read(work, draft.id)
    assert (kept.base, kept.settings) == ("me/model", {})
    assert call("change", key="base.model", text="auto")["given"] == {}
    assert call("replace", text=" ")["given"] == {}


def test_what_is_gone_since_an_earlier_version_is_left_out(
    call: Call, work: Workplace, draft: drafts.Draft
) -> None:
    retired = {"adapter.rank": 4, "hardware.cuda_graphs": True}
    drafts.save(work, replace(draft, settings=retired))
    assert drafts.current(work) == replace(draft, settings={"adapter.rank": 4})
    assert call("look", stamp="")["given"] == {"adapter.rank": "4"}
    assert call("replace", text=json.dumps(retired))["given"] == {"adapter.rank": "4"}
    call("keep", name="old")
    (work.own / "presets" / "old.json").write_text(json.dumps(retired))
    call("reset", key="adapter.rank")
    assert call("load", name="old")["given"] == {"adapter.rank": "4"}
    pissa = {"adapter.init": "pissa"}
    assert "earlier version" in call("replace", text=json.dumps(pissa))["error"]
    drafts.save(work, replace(draft, settings=pissa))
    with pytest.raises(RequestError, match="earlier version"):
        drafts.read(work, draft.id)


def test_changes_at_once_are_all_kept(call: Call, work: Workplace, draft: drafts.Draft) -> None:
    keys = ("adapter.rank", "train.seed", "train.steps", "data.repeats", "sampling.steps")
    with ThreadPoolExecutor(len(keys)) as tabs:
        list(tabs.map(lambda key: call("change", key=key, text="9"), keys))
    assert drafts.read(work, draft.id).settings == dict.fromkeys(keys, 9)


def test_a_preset_is_kept_loaded_without_the_name_of_the_run_and_read_by_the_command_line(
    call: Call, work: Workplace, draft: drafts.Draft
) -> None:
    assert "Nothing is changed" in call("keep", name="mine")["error"]
    chosen = {"adapter.rank": "8", "output.name": "owl", "sampling.prompts": "\u00fc"}
    for key, text in chosen.items():
        call("change", key=key, text=text)
    assert "mine.json" in call("keep", name=" mine ")["note"]
    again = call("keep", name="mine")
    assert "There is a preset" in again["error"] and again["taken"]
    for name in ("", " ", "../a", ".a", "a/b", "a\0", "x" * 200):
        assert "error" in call("keep", name=name) and "error" in call("load", name=name)
    assert "cannot be read" in call("load", name="none")["error"]
    call("replace", text='{"train.seed": 3, "output.name": "cat"}')
    assert call("load", name="mine")["presets"] == ["mine"]
    loaded = drafts.read(work, draft.id)
    assert loaded.settings == {"adapter.rank": 8, "sampling.prompts": ["\u00fc"]}
    assert loaded.name == "cat"
    file = work.own / "presets" / "mine.json"
    names = {"family": "sd15", "tier": "10-12", "priority": "balanced"}
    resolved = resolve(AskedFor(preset=str(file)), **names)
    assert (resolved.config.adapter.rank, resolved.config.sampling.prompts) == (8, ("\u00fc",))
    call("change", key="adapter.rank", text="9")
    call("keep", name="mine", over=True)
    assert '"adapter.rank": 9' in file.read_text()


def test_what_is_in_force_comes_with_its_origin_and_a_bar_of_the_plan_or_the_reason_for_none(
    work: Workplace, draft: drafts.Draft, tmp_path: Path
) -> None:
    place = toy(tmp_path)
    overrides = {"data.cache_dir": str(place.cache), "adapter.rank": 8, "hardware.device": "cpu"}
    request = prepare.Request(dataset=place.dataset, overrides=overrides)
    plan = as_json(plan_record(prepare.prepare(request)))
    call = caller(work, draft, plan)
    call("replace", text='{"adapter.rank": 8, "hardware.device": "cpu"}')
    found = call("plan")
    rank, resolution = found["fields"]["adapter.rank"], found["fields"]["data.resolution"]
    assert (rank["text"], rank["from"]) == ("8", "changed by you")
    assert (rank["preset"], rank["preset_from"]) == ("16", "usual for what matters most to you")
    assert (resolution["text"], resolution["from"]) == ("64", "chosen automatically")
    assert resolution["reason"] == "the size embedded was trained on"
    assert found["fields"]["data.flip"]["from"] == "usual"
    call("change", key="output.name", text="own name")
    name = call("plan")["fields"]["output.name"]
    assert (name["text"], name["layer"]) == ("own name", "command line"), "no plan knows it"
    needs = "needs \u201cPrediction\u201d = flow, but it is epsilon"
    assert found["unused"]["objective.flow_shift"] == needs
    assert "adapter.rank" not in found["unused"]
    assert found["error"] == "" and found["blamed"] == []
    memory = found["memory"]
    assert memory["fits"] and memory["said"].startswith("Fits: needs ")
    peak, limit = plan["memory"]["peak_bytes"], plan["memory"]["limit_bytes"]
    assert limit > 4 * peak and memory["limit"] == pytest.approx(1 / 1.04)
    assert sum(part["share"] for part in memory["parts"]) < 0.26, "of all that may be used"
    near = {**plan["memory"], "limit_bytes": 2 * peak}
    memory = caller(work, draft, {**plan, "memory": near})("plan")["memory"]
    assert 2 * sum(part["share"] for part in memory["parts"]) == pytest.approx(
        memory["limit"], rel=0.01
    )
    damaged = caller(work, draft, {"priority": "balanced", "settings": []})("plan")
    assert damaged["fields"]["adapter.rank"]["preset_from"] == "usual"
    german = caller(work, draft, plan, language="de")("plan")
    assert german["fields"]["adapter.rank"]["from"] == "von dir ge\u00e4ndert"
    assert german["memory"]["said"].startswith("Passt: ")
    assert " Schritte, etwa " in german["said"][0]
    # Without a plan the defaults stand, and the reason is said.
    call = caller(work, draft)
    call("replace", text=" ")
    call("change", key="adapter.kind", text="oft")
    call("change", key="adapter.rank", text="8")
    found = call("plan")
    assert found["error"].startswith("Plan ") and found["memory"] is None
    assert found["blamed"] == ["adapter.kind", "adapter.rank"], "those that the refusal names"
    assert found["fields"]["data.repeats"]["text"] == text_of(INFOS["data.repeats"], 1)
    assert found["unused"]["adapter.alpha"] == "without effect while \u201cKind\u201d is oft"
    assert "objective.flow_shift" not in found["unused"], "the base is not known"
    unplanned = call("plan", draft=drafts.new(work).id)
    assert unplanned["lacks"] and unplanned["said"] == [] and not unplanned["error"]
    gone = drafts.new(work, dataset="/nowhere/at/all")
    assert "does not exist" in call("plan", draft=gone.id)["error"]


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
    if info.key in ("base.model", "output.name"):
        return st.from_regex("[a-z]{1,8}", fullmatch=True)
    if info.path:  # quotes around a path go; ~NAME is somebody's home; no name has a NUL
        return st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30).filter(
            lambda path: path.strip().strip('"')[:1] not in ("", "~")
        )
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
    needed = ("adapter.kind", "adapter.targets", "adapter.text_encoder")
    beside = {key: values[0] for key, values in info.only_for.items() if key in needed}
    return {"train.batch_size": 4096} if info.key == "memory.micro_batch" else beside


@pytest.mark.parametrize("kind", sorted({info.form.kind for info in INFOS.values()}))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_value_arrives_as_it_was_chosen(
    kind: str, data: Any, call: Call, work: Workplace, draft: drafts.Draft
) -> None:
    """From the field through the draft and the command line, which is pasted into a shell, to the trainer."""
    infos = [info for info in INFOS.values() if info.form.kind == kind]
    info = data.draw(st.sampled_from([info for info in infos if info.key != "output.folder"]))
    value = data.draw(values_of(info))
    beside = around(info)
    try:
        wanted = flatten(build_config({**beside, info.key: value}))[info.key]
    except RequestError:
        assume(False)
    drafts.save(work, replace(draft, settings=beside))
    changed = call("change", key=info.key, text=text_of(info, wanted))
    words = shlex.split(call("command")["command"])[1:]
    _, bound, _ = main.app.parse_args(words, exit_on_error=False, print_error=False)
    options = bound.arguments["options"].keywords(name=bound.arguments.get("name"))
    arrived = flatten(build_config(options["settings"]))
    assert arrived[info.key] == wanted
    assert call("replace", text=changed["json"])["given"] == changed["given"]


def test_the_form_has_every_setting_and_is_small_enough_to_come_with_the_page(
    work: Workplace, tmp_path: Path
) -> None:
    page = opened(work)
    assert len(page) < 210_000
    fields = [field for section in view.form() for field in section.fields]
    usual = view.form()[0]
    assert [field.key for field in usual.fields] == list(view.USUAL)
    others = [key for key in INFOS if key not in view.USUAL]
    assert [field.key for field in fields] == [*view.USUAL, *others]
    assert re.findall(r'<div class="field" id="([^"]+)"', page) == [*view.USUAL, *others]
    for field in fields:
        info = INFOS[field.key]
        # A unit that the label ends with is not said twice.
        unit = "" if info.label.endswith(f" {info.unit}") else info.unit
        said = (field.doc, field.unit, field.label, field.default)
        assert said == (markup.named(info.doc), unit, info.label, text_of(info, info.default))
        assert [word.text for word in field.words] == [
            text_of(info, word) for word in info.form.words
        ]
        assert f'<label for="set-{field.key}">{html.escape(info.label)}</label>' in page
        assert f'data-default="{html.escape(field.default)}"' in page
    # Files outside of the allowed folders are not named.
    inside = tmp_path / "data"
    inside.mkdir()
    bounded = Workplace(runs=tmp_path / "runs", roots=(inside,))
    draft = drafts.new(bounded, dataset=str(inside))
    call = caller(bounded, draft)
    for key in [info.key for info in INFOS.values() if info.path and info.key != "output.folder"]:
        repository = ("someone/model",) if INFOS[key].hub else ()
        for fine in (f"{inside}/x.safetensors", "auto", *repository):
            assert "error" not in call("change", key=key, text=fine), (key, fine)
        for outside in (
            *("/etc/passwd", "../secret", "~/x", f"{inside}/../y", "passwd", "pwned/../../cache"),
            *(() if repository else ("someone/model", "pwned/cache")),
        ):
            assert "outside" in call("change", key=key, text=outside)["error"], (key, outside)
        call("reset", key=key)
    # Drafts from elsewhere, such as those of a run that is trained again, meet the same fence.
    typed = {"data.cache_dir": "pwned/cache", "base.text_encoders": ["a.safetensors"]}
    for key, value in typed.items():
        copied = replace(draft, base="embedded", settings={key: value})
        for words in (
            command_lines.plan_words,
            command_lines.train_words,
            command_lines.check_words,
        ):
            with pytest.raises(InputError, match="outside of the folders"):
                words(copied, bounded)
            assert words(copied, Workplace(runs=tmp_path / "runs"))
    cached = replace(draft, base="embedded", settings={"data.cache_dir": f"{inside}/x/../cache"})
    assert f'--set=data.cache_dir="{inside}/cache"' in command_lines.train_words(cached, bounded)


CORPUS = Path(__file__).parents[1] / "importing" / "corpus"


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        (
            "kohya.toml",
            'network_module = "networks.lora"\nnetwork_dim = 24\nunet_lr = 3e-4\nmax_train_steps = 900\n'
            'pretrained_model_name_or_path = "someone/model"\nfp8_base = true\n',
            {"adapter.rank": "24", "train.steps": "900", "base.model": "someone/model"},
        ),
        *(
            (file.name, file.read_text(encoding="utf-8"), {})
            for folder in ("OneTrainer", "ai-toolkit", "diffusion-pipe", "musubi-tuner")
            for file in sorted((CORPUS / folder).rglob("*.*"))[:1]
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)
def test_a_settings_file_of_another_trainer_is_imported_with_its_remarks(
    call: Call, name: str, text: str, wanted: dict[str, str]
) -> None:
    answer = call("replace", text=text, name=name)
    assert "error" not in answer, answer
    assert answer["note"].startswith("A settings file of ")
    given = answer["given"]
    assert len(given) > 3 and wanted.items() <= given.items()
    assert "output.folder" not in given
    if name == "kohya.toml":
        assert "fp8_base" in answer["note"] or "memory.base_precision" in given
        broken = call("replace", text="network_dim = ", name=name)["error"]
        assert "TOML" in broken
        unknown = call("replace", text='{"adapter.ranks": 8}', name="x.json")["error"]
        assert "adapter.rank" in unknown, "a mistake in a file of this program stays one"
        assert call("look", stamp="")["given"] == given, "what is refused changes nothing"


def usual_files() -> list[Path]:
    return sorted(CORPUS.rglob("usual.*"))


@pytest.mark.parametrize("file", usual_files(), ids=lambda file: file.relative_to(CORPUS).parts[0])
def test_a_file_that_is_dropped_becomes_a_draft_of_what_the_command_imports(
    call: Call,
    work: Workplace,
    draft: drafts.Draft,
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone = tmp_path / "alone" / file.name
    alone.parent.mkdir()
    alone.write_bytes(file.read_bytes())
    assert main.run(["import", str(alone), "--json"]) == 0
    imported = json.loads(capsys.readouterr().out)
    wanted = {key: value for key, value in imported["settings"].items() if key != "output.folder"}
    brought_draft(call, work, draft, name=file.name, text=file.read_text("utf-8"), wanted=wanted)
    shown = TestClient(Starlette(routes=train.routes(work))).get("/train").text
    listed = train_view.brought(drafts.current(work), language("en"))
    assert listed is not None and listed["own"] + listed["defaults"] == len(wanted)
    assert listed["own"] <= len(file.read_text("utf-8").splitlines()), "not the trainer's defaults"
    labels = [row["label"] for row in listed["rows"]]
    assert len(set(labels)) == len(labels), "no two rows have one name"
    trainer = str(imported["trainer"]).replace("sd-scripts", "kohya", 1)
    assert f"Settings of {file.name} made for {trainer}" in " ".join(texts_of(shown).split())
    counts = {
        "taken over": listed["own"],
        "adapted": len(imported["nearest"]),
        "without an equivalent": len(imported["without_equivalent"]) + len(imported["unknown"]),
        "not needed here": len(imported["nothing_to_set"]),
    }
    for what, count in counts.items():
        assert (f"{count} {what}" in texts_of(shown)) == bool(count), (
            "what there is none of is not said"
        )
    named = ("nearest", "without_equivalent", "unknown", "nothing_to_set")
    for key in (key for kind in named for key in imported[kind]):
        assert f"<code>{html.escape(key)}</code>" in shown


def texts_of(page: str) -> str:
    """Return the texts of a page without its tags."""
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


def brought_draft(
    call: Call, work: Workplace, shown: drafts.Draft, *, name: str, text: str, wanted: object
) -> None:
    """Bring a file; it becomes a draft of the same images, and the one that was shown stays."""
    answer = call("bring", name=name, text=text, draft=shown.id)
    assert "error" not in answer, answer
    draft = drafts.current(work)
    assert answer["url"] == f"/train?draft={draft.id}" != f"/train?draft={shown.id}"
    assert setting_edit.given(draft) == wanted and draft.dataset == shown.dataset
    assert drafts.read(work, shown.id) == shown
    # What changes something by the file is listed before what would be the same without it.
    listed = train_view.brought(draft, language("en"))
    assert listed is not None
    assert all(row["value"] != row["without"] for row in listed["changing"])
    assert all(row["value"] == row["without"] for row in listed["same"])
    assert len(listed["changing"]) + len(listed["same"]) == len(listed["rows"]) > 0


def test_epochs_and_a_warmup_in_steps_of_a_file_become_settings_when_the_images_are_there(
    call: Call, work: Workplace, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "seven", images=7)
    write_dataset(tmp_path / "three", images=3)
    kohya = """
        network_module = "networks.lora"
        max_train_epochs = 10
        train_batch_size = 2
        lr_warmup_steps = 8
        lr_scheduler = "cosine"
    """
    empty = drafts.new(work)
    assert "error" not in call("bring", name="a.toml", text=kohya, draft=empty.id)
    waiting = drafts.current(work)
    assert "train.steps" not in waiting.settings
    left_out = json.loads(waiting.brought)["left_out"]
    assert left_out["max_train_epochs"].endswith("as soon as the images are there")
    assert left_out["lr_warmup_steps"].endswith("as soon as these are known")
    sent = train_view.wanted(work, {"draft": waiting.id, "folder": str(tmp_path / "seven")})
    assert (sent.settings["train.steps"], sent.settings["optimizer.warmup_fraction"]) == (40, 0.2)
    assert not {"max_train_epochs", "lr_warmup_steps"} & set(json.loads(sent.brought)["left_out"])
    # Of other images it is another number, unless somebody has chosen one.
    typed = train_view.keep(work, sent.id, {"dataset": str(tmp_path / "three")}).draft
    assert typed.settings["train.steps"] == 20
    train_view.keep(work, sent.id, {"train.steps": "33"})
    typed = train_view.keep(work, sent.id, {"dataset": str(tmp_path / "seven")}).draft
    assert typed.settings["train.steps"] == 33
    # Brought for images that are there it is counted at once.
    given = drafts.new(work, dataset=str(tmp_path / "seven"))
    assert "error" not in call("bring", name="a.toml", text=kohya, draft=given.id)
    assert drafts.current(work).settings["train.steps"] == 40


def test_a_lora_and_settings_of_this_program_become_drafts_and_what_says_nothing_is_refused(
    call: Call, work: Workplace, draft: drafts.Draft, tmp_path: Path, capsys: Any
) -> None:
    entries = {"ss_network_module": "networks.lora", "ss_network_dim": "24", "ss_seed": "None"}
    header = json.dumps({"__metadata__": entries})
    file = tmp_path / "a.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    assert main.run(["import", str(file), "--json"]) == 0
    wanted = json.loads(capsys.readouterr().out)["settings"]
    assert wanted["adapter.rank"] == 24
    brought_draft(call, work, draft, name=file.name, text=header, wanted=wanted)
    ours = {"adapter.rank": 12, "train.steps": 70}
    header = json.dumps({"__metadata__": {"lora_train.settings": json.dumps(ours)}})
    brought_draft(call, work, draft, name="b.safetensors", text=header, wanted=ours)
    brought_draft(call, work, draft, name="c.json", text=json.dumps(ours), wanted=ours)
    before = drafts.current(work)
    for name, text, why in (
        ("d.safetensors", '{"__metadata__": {}}', "does not say how it was trained"),
        ("d.safetensors", "no header", "is not a whole .safetensors file"),
        ("d.json", '{"adapter.ranks": 8}', "adapter.rank"),
        ("d.toml", "broken = ", ""),
    ):
        assert why in call("bring", name=name, text=text)["error"]
    assert drafts.current(work) == before


def test_the_search_knows_the_words_of_other_trainers_and_english_ones() -> None:
    also = {field.key: field.others for section in view.form() for field in section.fields}
    for word, key in (
        ("network_dim", "adapter.rank"),
        ("blocks_to_swap", "memory.streamed_blocks"),
        ("fp8_base", "memory.base_precision"),
        ("unet_lr", "optimizer.learning_rate"),
    ):
        assert word in also[key]
    german = {field.key: field for section in view.form("de") for field in section.fields}
    rate = german["optimizer.learning_rate"]
    assert rate.label == "Lernrate" and "Learning rate" in rate.also


def test_messages_name_settings_by_their_labels_and_show_code_as_code() -> None:
    for said, shown in (
        ("leave optimizer.learning_rate out", "leave \u201cLearning rate\u201d out"),
        ("use --set train.precision=fp32, and", "use \u201cTrain: Precision\u201d = fp32, and"),
        ("run `lora-train <b>`", "run <code>lora-train &lt;b&gt;</code>"),
        (
            "`--set train.steps=4` optimizer.beta1",
            "<code>--set train.steps=4</code> \u201cBeta1\u201d",
        ),
        ("a ` alone, data.none, mydata.flip", "a ` alone, data.none, mydata.flip"),
    ):
        assert markup.inline(said) == shown


def test_a_slider_that_is_dropped_becomes_its_words_with_the_settings_of_its_trainer(
    call: Call, work: Workplace, draft: drafts.Draft
) -> None:
    table = '[[sliders]]\ntarget = "a man"\nmore = "an old man"\n'
    assert "error" not in call("bring", name="age.toml", text=table, draft=draft.id)
    words = {"target": "a man", "more": "an old man", "less": "", "keep": ""}
    found = drafts.current(work)
    assert (found.kind, found.slider, found.settings) == (drafts.SLIDER, words, {})
    both = table + table.replace("man", "woman")
    assert "error" not in call("bring", name="../age.toml", text=both, draft=draft.id)
    found = drafts.current(work)
    assert (found.kind, Path(found.dataset).read_text()) == (drafts.IMAGES, both)
    assert Path(found.dataset).is_relative_to(work.own)
    job = {
        "type": "concept_slider",
        "network": {"type": "lora", "linear": 8},
        "model": {"name_or_path": "stabilityai/stable-diffusion-xl-base-1.0", "arch": "sdxl"},
    }

    def bring_job(**words: str) -> dict[str, Any]:
        process = {**job, "slider": {"target_class": "a man", **words}}
        text = json.dumps({"job": "extension", "config": {"process": [process]}})
        return call("bring", name="job.json", text=text, draft=draft.id)

    assert "says neither more nor less" in bring_job()["error"], "a slider without words is refused"
    assert (
        "Slider 1 of age.toml has 'kep'"
        in call("bring", name="age.toml", text=f'{table}kep = "x"')["error"]
    )
    assert "error" not in bring_job(positive_prompt="an old man", negative_prompt="a boy")
    found = drafts.current(work)
    assert found.slider == {**words, "less": "a boy"}
    assert found.settings["adapter.rank"] == 8


def test_a_draft_that_lay_aside_when_another_was_started_is_not_edited_unasked(
    work: Workplace,
) -> None:
    aside = drafts.new(work, dataset="old")
    assert drafts.current(work, is_last=True).id == aside.id
    started = replace(drafts.new(work, dataset="old"), started_as="item")
    drafts.save(work, started)
    assert state_of(opened(work))["id"] != aside.id
    assert drafts.current(work, is_last=True).id not in (aside.id, started.id)


def test_the_page_says_whose_settings_it_shows_and_offers_those_of_others_and_of_none(
    work: Workplace, tmp_path: Path
) -> None:
    words = {"target": "a man", "more": "an old man", "less": "", "keep": ""}
    slider = replace(drafts.new(work), kind=drafts.SLIDER, slider=words)
    drafts.save(work, slider)
    drafts.save(work, replace(drafts.new(work, dataset=str(tmp_path)), started_as="item"))
    shown = drafts.new(work, dataset=str(tmp_path / "gone"))

    def offered(address: str) -> list[tuple[str, str]]:
        page = opened(work, address)
        options = re.search(r'<select id="whose".*?</select>', page, re.DOTALL)
        assert options, page
        return re.findall(r'<option value="(.*?)".*?>(.*?)</option>', options[0])

    empty = "a new one, empty yet"
    waiting = [(shown.id, "gone"), (slider.id, "an old man")]
    assert offered(f"/settings?draft={shown.id}") == [*waiting, ("new", empty)]
    assert offered("/settings?draft=new")[1:] != waiting
    new = offered("/settings?draft=new")
    assert new[-1][1] == empty and drafts.read(work, new[-1][0]) and new[:-1] == waiting
    assert offered("/settings?draft=new") == new, "not one more for each look"


def test_what_a_draft_lacks_is_named_by_what_it_is_trained_from(work: Workplace) -> None:
    for kind, what in (
        ("slider", "Write its words"),
        ("pairs", "Choose pairs"),
        ("images", "Choose images"),
    ):
        draft = replace(drafts.new(work), kind=kind)
        drafts.save(work, draft)
        page = opened(work, f"/settings?draft={draft.id}")
        lacks = re.search(r'<p class="lacks notice">.*?</p>', page, re.DOTALL)
        assert lacks and what in lacks[0]


def test_help_is_for_everybody_and_formulas_and_papers_are_beside_it() -> None:
    fields = {field.key: field for section in view.form() for field in section.fields}
    for key, field in fields.items():
        for word in ("null ", "arXiv", "Hub id", "module:Class", "docs/", "sigma)", "dtype"):
            assert word not in field.doc, key
    gamma = fields["objective.min_snr_gamma"]
    assert gamma.source.endswith("arXiv 2303.09556") and gamma.may_be_empty
    for field in fields.values():
        assert all(
            re.search(r"arXiv \d{4}\.\d{5}$", one) for one in field.source.split("; ") if one
        )
    labels = [field.label for field in view.form()[0].fields]
    assert len({*labels}) == len(labels), "two of the same name beside each other"


def test_what_has_no_effect_is_said_in_german_with_german_labels() -> None:
    told = markup.worded(
        "without effect while train.lower_after_validations is not set", language("de")
    )
    assert told == "ohne Wirkung, solange \u201eSenken nach Validierungen\u201c = nicht gesetzt"
