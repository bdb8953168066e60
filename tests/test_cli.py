"""The command line as scripts rely on it and people see it: names, exit codes, JSON, one line per error."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import shlex
import shutil
import signal
import struct
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.text import Text
from safetensors.numpy import save_file

from lora_trainer.cli import main
from lora_trainer.common.files import CappedFolder
from lora_trainer.config import PRIORITIES
from lora_trainer.config.config import all_settings
from lora_trainer.config.layers import TIERS, preset_families
from lora_trainer.reporting.control import Quitting
from tests.fakes.lora_library import lora
from tests.fakes.runs import ROOT, SQUARES_PX, Toy, python, run_cli, start, toy

FACTS = tomllib.loads(Path(__file__).with_name("command_line.toml").read_text(encoding="utf-8"))
FLAGS, REFUSED = FACTS["flags"], FACTS["refused"]
TOOLS = {"convert", "describe", "extract", "merge", "resize"}
TORCH = ["torch", "diffusers", "transformers", "accelerate"]
LIGHT = [
    "numpy",
    "PIL",
    "pydantic",
    "psutil",
    "lora_trainer.config.config",
    "lora_trainer.queue.commands",
]
PROGRAM = """
import json, sys
from lora_trainer.cli.main import run

for arguments, heavy in json.loads(sys.argv[1]):
    code = run(arguments)
    if code or (imported := sorted(set(heavy) & sys.modules.keys())):
        sys.exit(f"{arguments}: exit code {code}, imported {'' if code else imported}")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A dataset; the base is the embedded one, so that nothing here needs torch."""
    return toy(tmp_path_factory.mktemp("cli"))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Command:
    """The command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def run(self, *words: str | Path) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr of a command."""
        code = run_cli([str(word) for word in words])
        return code, *self.capsys.readouterr()

    def refused(self, *words: str | Path) -> tuple[int, str]:
        """Return exit code and the error, having checked that it is one line and nothing else."""
        code, out, error = self.run(*words)
        assert out == "" and error.startswith("error: ") and error.count("\n") == 1, error
        return code, error

    def json(self, *words: str | Path) -> dict[str, Any]:
        code, out, error = self.run(*words)
        assert (code, error) == (0, "")
        value = json.loads(out)
        assert isinstance(value, dict)
        return value


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def flags(text: str) -> set[str]:
    rows = re.findall(r"^│ (?:\* )?\s*((?:-\S+ ?)+)", text, flags=re.MULTILINE)
    return {flag.strip("()") for row in rows for flag in row.split() if flag.startswith("--")}


# ---- names


def test_the_help_of_gui_is_that_of_the_interface(command: Command) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.run("gui", "--help")
    out = command.capsys.readouterr().out
    assert "usage: lora-train-gui" in out
    assert set(re.findall(r"^  (?:-h, )?(--\S+)", out, re.MULTILINE)) == {
        "--help",
        *FLAGS["gui"].split(),
    }


@pytest.mark.parametrize("name", sorted(FLAGS.keys() - {"gui"}))
def test_the_flags_of_a_command_are_these(name: str, command: Command) -> None:
    code, out, _ = command.run(*name.split(), "--help")
    assert code == 0
    assert flags(out) - {"--help", "--version"} == set(FLAGS[name].split())
    if name:
        return
    commands = out[out.index("Commands") : out.index("Arguments")]
    lines = re.findall(r"^│ ([a-z]\S*)  +(\S+ \S+)", commands, flags=re.MULTILINE)
    assert {name for name, _ in lines} == FLAGS.keys() - {""}
    assert ("queue", "Queue trainings,") in lines and ("plan", "Predict memory,") in lines


def test_what_only_looks_around_imports_no_torch_and_the_help_only_what_it_shows(
    place: Toy, tmp_path: Path
) -> None:
    cache = ["--set", f"data.cache_dir={tmp_path / 'cache'}"]
    dataset = str(place.dataset)
    commands = [
        ["--version"],
        ["presets"],
        ["doctor"],
        ["queue", "list"],
        ["plan", dataset, "--vram", "12", *cache],
        ["check", dataset, *cache],
        ["inspect", str(lora(tmp_path / "lora.safetensors"))],
        ["import", str(ROOT / "tests/importing/corpus/sd-scripts/few/usual.toml")],
        *([tool, "--help"] for tool in sorted(TOOLS)),
        [dataset, "--dry-run", *cache],
    ]
    lines = [(["--help"], LIGHT), *((words, TORCH) for words in commands)]
    done = python(PROGRAM, json.dumps(lines))
    assert (done.returncode, done.stderr) == (0, "")


# ---- refusals


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_is_one_line_with_the_exit_code(
    line: str, place: Toy, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("empty").mkdir()
    launcher, words = re.fullmatch(r"((?:[A-Z_]+=\S+ )*)(.*)", line).groups()  # type: ignore[union-attr]  # of any line
    for assignment in launcher.split():
        monkeypatch.setenv(*assignment.split("="))
    code, named = REFUSED[line]
    ended, error = command.refused(*words.replace("DATASET", str(place.dataset)).split())
    assert ended == code and named in error
    assert "--set" not in words or "Fix: " in error
    assert [path.name for path in Path().iterdir()] == ["empty"]


def test_the_process_ends_with_the_exit_code_and_one_line() -> None:
    process = start("plan", "absent")
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error.count("\n")) == (3, "", 1)


@pytest.mark.parametrize(
    "text", ["can't start new thread", "thread: Resource temporarily unavailable"]
)
def test_a_system_that_allows_no_more_threads_is_one_line(
    text: str, place: Toy, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(threading.Thread, "start", refused)
    ended, error = command.refused(str(place.dataset))
    assert ended == 4 and "no more threads" in error


def test_a_flag_is_a_short_name_of_its_setting(place: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    train = "lora_trainer.api.train"
    monkeypatch.setattr(train, lambda _, *, settings, **__: asked.append(settings))
    flags = {"base": "base.model", "output": "output.folder", "name": "output.name"}
    words = [word for flag in flags for word in (f"--{flag}", f"my-{flag}")]
    assert run_cli([str(place.dataset), *words]) == 0
    assert asked == [{key: f"my-{flag}" for flag, key in flags.items()}]


def test_a_dry_run_makes_no_folder_and_a_setting_given_twice_alike_is_given_once(
    place: Toy, command: Command
) -> None:
    same = ["--steps", "5", "--set", "train.steps=5"]
    code, out, _ = command.run(place.dataset, "--dry-run", *same)
    assert code == 0
    assert "predicted peak" in out
    assert list(Path().iterdir()) == []


def test_doctor_empties_the_cache_that_is_named(tmp_path: Path, command: Command) -> None:
    root = tmp_path / "cache"
    CappedFolder(root=root, limit_bytes=1).create()
    entry = root / "latents" / "aa" / f"{'a' * 64}.safetensors"
    entry.parent.mkdir(parents=True)
    entry.write_bytes(b"12345")
    there = ["--clear-cache", "--set", f"data.cache_dir={root}"]
    found = command.json("doctor", *there, "--json")
    assert found == {"folder": str(root), "files": 1, "bytes": 5}
    assert "removed 0 entries" in command.run("doctor", *there)[1]
    assert command.refused("doctor", "--set", f"data.cache_dir={root}")[0] == 2
    assert command.refused("doctor", "--clear-cache", "--set", f"data.cache_dir={tmp_path}")[0] == 4
    report = command.json("doctor", "--json")
    assert report["accelerator"] and report["cpu_threads"]["reason"]
    assert "torch" in report["packages"]


# ---- what people are shown: complete, and never broken by odd texts

ODD = "[bold]odd[] [red] :cat:"
Said = Callable[..., str]


@pytest.fixture
def said(place: Toy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """Return what a command prints on a terminal of 400 columns, or of `width`."""
    cache = f"data.cache_dir={place.cache}"

    def said(command: str, *more: str | Path, width: int = 400) -> str:
        monkeypatch.setattr(main.out, "width", width)
        settings = ["--set", cache] if command in ("plan", "check") else []
        capsys.readouterr()
        assert main.run([command, *map(str, more), *settings]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        return out

    return said


def twelve_steps(place: Toy, *more: str) -> tuple[str | Path, ...]:
    return (place.dataset, *more, "--set", "train.steps=12", "--set", f'sampling.prompts=["{ODD}"]')


def settled(text: str) -> str:
    """Return a text without sizes, as the free memory of this machine changes between two plans."""
    return re.sub(r"[\d.]+ GiB", "", text)


def row(shown: str, start: str) -> str:
    return next(line for line in shown.splitlines() if line.startswith(start))


def test_a_plan_shows_a_dozen_settings_and_the_user_s_or_all_with_value_origin_and_reason(
    place: Toy, said: Said
) -> None:
    """REALITY R19: more than 130 rows hid the dozen that were decided."""
    plan = json.loads(said("plan", *twelve_steps(place, "--json")))["settings"]
    whole = said("plan", *twelve_steps(place, "--all"))
    for key, setting in plan.items():
        line = row(whole, f"{key} ")
        assert setting["origin"] in line and settled(setting["reason"]) in settled(line)
    assert "12" in row(whole, "train.steps ") and "px" in row(whole, "data.resolution ")
    assert ODD in row(whole, "sampling.prompts ")
    narrow = said("plan", *twelve_steps(place, "--all"), width=80)
    assert "…" not in narrow and all(row(narrow, f"{key} ") for key in plan)
    lines = said("plan", *twelve_steps(place)).splitlines()
    shown = {key for key in plan if any(line.startswith(f"{key} ") for line in lines)}
    headlines = {info.key for info in all_settings() if info.headline}
    assert len(headlines) == 12 and {"data.cache_dir", "sampling.prompts", "train.steps"} <= shown
    assert {plan[key]["origin"] for key in shown - headlines} == {"command line", "preset cpu"}
    hidden = f"{len(plan) - len(shown)} more settings: --all"
    assert hidden in [line.rstrip() for line in lines]


def test_a_plan_shows_time_length_and_every_item_of_the_peak(place: Toy, said: Said) -> None:
    shown = said("plan", *twelve_steps(place))
    plan = json.loads(said("plan", *twelve_steps(place, "--json")))
    items = plan["memory"]["items"]
    assert all(row(shown, item["name"]) for item in items)
    assert row(shown, "predicted peak: ").rstrip().endswith(f"while {plan['memory']['phase']}")
    assert sum(item["bytes"] for item in items) == plan["memory"]["peak_bytes"]
    assert "6 images trained, 0 held out" in row(shown, "data")
    assert "12 steps of 8 = 16.0 epochs" in row(shown, "length")
    time = plan["time"]
    low, high = time["seconds_per_step"]
    assert 12 * low < time["run_s"][0] < time["run_s"][1] and time["run_s"][1] > 12 * high
    assert sum(pair[0] for pair in time["parts_s"].values()) == pytest.approx(time["run_s"][0])
    assert "about" in row(shown, "time") and "s a step" in row(shown, "time")
    assert "processes" not in shown
    several = said("plan", *twelve_steps(place, "--processes", "3"))
    assert "3: 2 + 3 + 3 of 8 images a step" in row(several, "processes")
    assert "train.batch_size=9 would use all of them" in several


def test_a_plan_ends_with_its_remarks_and_announces_a_download(place: Toy, said: Said) -> None:
    """Scripts rely on the keys of its JSON."""
    asked = (place.dataset, "--vram", "24", "--base", "black-forest-labs/FLUX.1-schnell")
    shown, plan = said("plan", *asked), json.loads(said("plan", *asked, "--json"))
    designed = {"family", "tier", "priority", "settings", "memory", "time", "disk", "sampling"}
    designed |= {"images"}
    assert plan.keys() == designed | {"base", "preset", "processes", "remarks", "timesteps"}
    memory, settings, remarks = (plan[key] for key in ("memory", "settings", "remarks"))
    beside = {"phase", "phases", "by_phase", "images_at_once", "host"}
    assert memory.keys() == {"items", "peak_bytes", "limit_bytes", "fits"} | beside
    assert all(item.keys() == {"name", "bytes", "note"} for item in memory["items"])
    assert 0 < memory["limit_bytes"] <= 24 * 2**30 and memory["fits"]
    assert settings.keys() == {info.key for info in all_settings()}
    assert all(each.keys() == {"value", "origin", "reason"} for each in settings.values())
    assert "assisted" in [remark["kind"] for remark in remarks]
    assert all(f": {one['what']}. {one['advice']}" in shown for one in remarks)
    last = shown.splitlines()[-len(remarks) :]
    assert all(line.startswith(("warning: ", "note: ")) for line in last)
    assert "to download" in row(shown, "base")
    assert "to download" not in said("plan", *twelve_steps(place))


def test_check_shows_score_buckets_and_every_finding(
    place: Toy, said: Said, tmp_path: Path
) -> None:
    small = (toy(tmp_path, sizes=SQUARES_PX).dataset, "--set", "data.resolution=40")
    report, shown = json.loads(said("check", *small, "--json")), said("check", *small)
    assert report["findings"] == [] and "no findings" in shown
    assert f"{report['score']:.2f} of 1" in row(shown, "score")
    assert all(f"{name} x{count}" in shown for name, count in report["buckets"].items())
    odd = shutil.copytree(place.dataset, tmp_path / "odd")
    Image.new("RGB", (9, 9), "red").save(odd / f"{ODD}\n.png")
    report, shown = json.loads(said("check", odd, "--json")), said("check", odd)
    assert ODD in shown and "no findings" not in shown
    rest = {"parts", "pictures", "caption_limit"}
    assert report.keys() == {"images", "score", "findings", "buckets"} | rest
    assert report["images"] == len(report["pictures"]) == sum(report["buckets"].values()) == 6
    sizes = {"width_px", "height_px", "bucket", "kept", "cropped_fraction", "upscaled"}
    assert all(picture.keys() == {"file", "score"} | sizes for picture in report["pictures"])
    assert report["caption_limit"].keys() == {"tokenizer", "tokens"}
    # A plan has read the same images, and says so.
    assert "\ncheck " not in said("plan", *small)
    severities = [one["severity"] for one in report["findings"]]
    assert severities.count("error") == 1
    asked = ("--base", "embedded", "--set", "data.max_bad_fraction=0.5")
    line = row(said("plan", odd, *asked), "check ")
    assert f"1 error and {severities.count('warning')} warnings about the images: " in line
    assert line.rstrip().endswith(f"{shlex.quote(str(odd))} --base embedded")
    for one in report["findings"]:
        assert one.keys() == {"kind", "severity", "file", "advice", "what", "code"}
        where = f"{one['file']}: " if one["file"] else ""
        line = f"{one['severity']}: {where}{one['what']}. {one['advice']}"
        assert line.replace("\n", r"\n") in shown


def test_presets_shows_every_cell(said: Said) -> None:
    shown = said("presets").splitlines()[1:]
    cells = [
        [family, tier, priority]
        for family in preset_families()
        for tier in TIERS
        for priority in PRIORITIES
    ]
    rows = [line.split() for line in shown]
    assert [words[:3] for words in rows if words[:1] and words[0] in preset_families()] == cells
    assert all("=" in line or "unsupported: " in line for line in shown)


def write_lora(file: Path, ranks: list[int], **header: str) -> Path:
    """Write a LoRA of FLUX.1 whose block n changes its layer by a matrix of norm n + 1."""
    tensors = {}
    for number, rank in enumerate(ranks):
        name = f"transformer.transformer_blocks.{number}.attn.to_q.lora"
        down, up = np.zeros((rank, 3072), np.float32), np.zeros((3072, rank), np.float32)
        down[0, 0], up[0, 0] = 1, number + 1
        tensors |= {f"{name}_A.weight": down, f"{name}_B.weight": up}
    save_file(tensors, file, metadata=header)
    return file


def test_inspect_shows_the_file_its_header_and_the_blocks_that_change_most(
    said: Said, tmp_path: Path
) -> None:
    file = write_lora(tmp_path / "a.safetensors", [4] * 14 + [8], title=ODD, long="x" * 101)
    report, shown = json.loads(said("inspect", file, "--json")), said("inspect", file)
    assert report.keys() == {
        "family", "format", "kinds", "rank", "alpha", "modules", "norms", "metadata", "problems",
    }  # fmt: skip
    assert (report["format"], report["kinds"], report["modules"]) == ("diffusers", ["lora"], 15)
    assert row(shown, "kind").split() == ["kind", "lora"]
    assert row(shown, "rank").split() == ["rank", "4", "to", "8"]
    assert row(shown, "modules").split() == ["modules", "15"]
    assert row(shown, "title").split(None, 1)[1].rstrip() == ODD
    assert row(shown, "long").split()[1] == "x" * 97 + "..."
    whole = sum(number**2 for number in range(1, 16))
    blocks = [line.split() for line in shown.splitlines() if "_blocks." in line[:20]]
    assert [words[1:] for words in blocks] == [
        [f"{number}", f"{number**2 / whole:.1%}"] for number in range(15, 3, -1)
    ]
    assert "and 3 blocks with norms up to 3" in shown
    assert report["problems"], "a file of so few layers"
    for problem in report["problems"]:
        assert f"{problem['severity']}: {problem['what']}. {problem['advice']}" in shown


HOSTILE = "\x1b]0;pwned\x07\x1b[31mevil\u202ec\u009b31m\ud800"


def test_what_a_strangers_file_holds_is_escaped_in_every_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Escape sequences set the title of a terminal, its clipboard and its colours; marks turn words around."""
    stem = "lora_unet_down_blocks_0_attentions_0_proj_in.lora_"
    text = HOSTILE.removesuffix("\ud800")
    header = {
        "__metadata__": {"modelspec.title": f"{text}\nerror: forged", f"{text}key": "v"},
        f"{stem}down.weight": {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]},
        f"{stem}up.weight": {"dtype": "F32", "shape": [4, 1], "data_offsets": [16, 32]},
    }
    data = json.dumps(header).encode()
    file = tmp_path / "evil.safetensors"
    file.write_bytes(struct.pack("<Q", len(data)) + data + bytes(32))
    for options in ([], ["--json"]):
        assert main.run(["inspect", str(file), *options]) == 0
        out = capsys.readouterr().out
        assert "evil" in out and "pwned" in out
        odd = {character for character in out if not (character.isprintable() or character == "\n")}
        assert not odd
        assert not [line for line in out.splitlines() if line.startswith("error: forged")]
    assert json.loads(out)["metadata"]["modelspec.title"].startswith(text), (
        "the values are the same"
    )
    listing = main.console()
    listing.file = io.StringIO()
    listing.print(Text(f"a {HOSTILE}\tb\n", style="red"), HOSTILE)
    assert (
        "\x1b" not in listing.file.getvalue() and "\\x1b[31mevil\\u202ec" in listing.file.getvalue()
    )


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no such signal")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_before_a_run_listens_ends_it_in_one_line_with_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """While it imports, plans, or waits for other processes; once a run has finished it ends nothing."""
    number = getattr(signal, name)
    quitting = Quitting()

    def command() -> None:
        os.kill(os.getpid(), number)

    bound = inspect.signature(command).bind()
    app = SimpleNamespace(parse_args=lambda *_, **__: (command, bound, {}))
    monkeypatch.setattr(main, "app", app)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        quitting.begin()
        assert signal.getsignal(number) == quitting.handle, "else the system ends the program"
        assert main.run(["datasets/example"]) == 128 + number
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("stopped at once; the last saved state is valid")
        quitting.is_finished = True
        assert main.run(["datasets/example"]) == 0
        signal.signal(number, signal.SIG_IGN)  # as nohup does with SIGHUP
        quitting.begin()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
