"""SEC-03 and 04: no secret in anything a run leaves, no code out of a file, no shell, texts as texts.

What concerns the graphical interface (SEC-01, 02, 05, 06) is in tests/gui.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from lora_trainer.common.errors import RequestError
from lora_trainer.common.events import EventStream
from lora_trainer.config.config import build_config
from tests.fakes.runs import ROOT, Toy, contents, run_cli, toy

Figure = Callable[..., None]
SECRETS = tomllib.loads(Path(__file__).with_name("secrets.toml").read_text(encoding="utf-8"))
ENVIRONMENT, ADDRESSES, CAPTIONS = (
    SECRETS[name] for name in ("environment", "addresses", "captions")
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("secrets")).with_base()


def test_sec_03_04_no_name_is_a_command_and_no_secret_reaches_any_output_of_a_whole_training(
    place: Toy, figure: Figure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logs, run.json, states, exports, TensorBoard, report, sample images, console."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for name, (address, _) in ADDRESSES.items():
        monkeypatch.setenv(name, address)
    for index, caption in enumerate(CAPTIONS):
        (place.dataset / f"p{index}.txt").write_text(caption, encoding="utf-8")
    # Prompts are taken from the captions, so these reach the sample images and the report.
    name = "--strict; touch marker && `touch marker`$(touch marker)"  # `|` is refused: Windows forbids it in names
    assert place.train(f"--name={name}", sampling__prompts=[]) == 0
    assert not list(place.folder.rglob("marker")) and not Path("marker").exists()
    console = capsys.readouterr()
    secrets = [*ENVIRONMENT.values(), *CAPTIONS.values()]
    secrets += [secret for _, secret in ADDRESSES.values()]
    files = {path: path.read_bytes() for path in place.runs.rglob("*") if path.is_file()}
    assert {path.name for path in files} >= {
        "run.json", "events.jsonl", "status.json", "report.html", f"{name}.safetensors", "state.json",
    }  # fmt: skip
    assert any("tfevents" in path.name for path in files)
    texts = {"console": (console.out + console.err).encode()}
    texts |= {str(path.relative_to(place.runs)): data for path, data in files.items()}
    found = [
        (name, secret)
        for secret in secrets
        for name, data in texts.items()
        if secret.encode() in data
    ]
    figure("secrets", planted=len(secrets), found=len(found))
    assert not found
    with safe_open(place.runs / name / f"{name}.safetensors", framework="np") as opened:
        assert str(place.folder) not in json.dumps(opened.metadata())


def test_sec_04_a_secret_that_is_typed_or_in_a_settings_file_is_refused_and_not_repeated(
    place: Toy,
    tmp_path: Path,
    figure: Figure,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", ENVIRONMENT["WANDB_API_KEY"])
    cases = [(line.split(), secret) for line, secret in SECRETS["refused"].items()]
    for name, text in SECRETS["files"].items():
        (tmp_path / name).write_text(text)
        cases.append((["--config", str(tmp_path / name)], "SECRET"))
    before = contents(place.folder)
    for words, secret in cases:
        arguments = place.arguments(steps=None)
        if words[0] == "--base":
            del arguments[1:3]
        capsys.readouterr()
        assert run_cli([*arguments, *words]) in (2, 3), words
        said = capsys.readouterr()
        assert secret not in said.out + said.err
        assert "error: " in said.err
    assert contents(place.folder) == before
    figure("secrets", planted=len(cases), found=0)


def told(text: str) -> str:
    """Return what a run tells of a text, in its log, on the console and in its files."""
    seen: list[str] = []
    events = EventStream(listeners=[lambda event: seen.append(event.fields["what"])])
    events.problem(text, fix="none")
    return seen[0]


def test_sec_04_secrets_are_told_from_ordinary_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their form, as a tracker tells of a proxy that refused, or by the variable that holds them."""
    assert "pa55" not in told("tracker failed: http://jane:pa55@proxy refused")
    assert "abcdefghijklmnop1234" not in told("Bearer abcdefghijklmnop1234")
    for name, value in {
        "MY_TOKEN": "long-enough",
        "TOKENIZERS_PARALLELISM": "false-but-long",
        "KEYBOARD": "us-international",
        "API_KEY": "short",
    }.items():
        monkeypatch.setenv(name, value)
    assert "long-enough" not in told("with long-enough in it")
    for text in (
        "a hat, and/or a scarf, sk-8 board, false-but-long us-international short",
        "mail jane@example.com",
        "see https://example.com/a@b",
        "https://civitai.com/models/1?modelVersionId=2",
        "hf_short",
    ):
        assert told(text) == text
        assert build_config({"output.description": text}).output.description == text
    with pytest.raises(RequestError, match=r"output\.author, sampling\.prompts contains") as caught:
        build_config({"output.author": "hf_" + "a" * 20, "sampling.prompts": ["x?token=abc", "y"]})
    assert "aaa" not in str(caught.value)


# ---- no code out of a file, no shell

DANGERS = (
    r"^\s*(?:import|from) (?:c?pickle|_pickle|dill|cloudpickle|joblib|shelve|marshal)\b",
    r"\btorch\.(?:jit\.)?load\((?![^)]*weights_only=True)",
    r"allow_pickle=(?!False)|trust_remote_code=(?!False)|shell=(?!False)",
    r"\bread_pickle\(|\byaml\.(?:load|unsafe_load|full_load)\(",
    r"(?<![.\w])(?:eval|exec|__import__)\(|\bos\.(?:system|popen|spawn\w*)\(",
    r"\bsubprocess\.get(?:status)?output\(",
    # Weights; tokenizers, configurations and schedulers are not weights, and a None is a model from memory.
    r"(?<!Tokenizer)(?<!TokenizerFast)(?<!config_class)(?<!Scheduler)(?<!Config)(?<!Processor)"
    r"\.from_pretrained\((?!\s*None\b)(?!(?:[^()]|\([^()]*\))*use_safetensors=True)",
)


def dangers(source: str) -> list[str]:
    """Return the lines of a module that could run code out of a file, or a shell."""
    return [
        f"line {source.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for pattern in DANGERS
        for match in re.finditer(pattern, source, re.MULTILINE)
    ]


def test_sec_04_mod_01_no_pickle_can_be_loaded_and_no_shell_started(figure: Figure) -> None:
    files = [*(ROOT / "lora_trainer").rglob("*.py"), *(ROOT / "gui").rglob("*.py")]
    assert len(files) > 100
    found = {
        str(file.relative_to(ROOT)): rows
        for file in files
        if (rows := dangers(file.read_text(encoding="utf-8")))
    }
    figure("pickle_loads", reachable=sum(map(len, found.values())), files=len(files))
    assert not found
    for line in (
        "import pickle",
        "from joblib import load",
        "torch.load(file, weights_only=False)",
        "numpy.load(file, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "eval(text)",
        "AutoModel.from_pretrained(folder)",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=True)",
    ):
        assert len(dangers(line)) == 1, line
    assert not dangers("network.eval(); torch.load(file, weights_only=True); numpy.load(file)")
