"""SEC-03 and 04: no secret in anything a run leaves, no code out of a file, no shell, texts as texts.

What concerns the graphical interface (SEC-01, 02, 05, 06) is in tests/gui.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from safetensors import safe_open

from lora_trainer.common.errors import RequestError
from lora_trainer.common.events import EventStream
from lora_trainer.common.wording import secret_values, without_secrets
from lora_trainer.config.config import build_config
from tests.fakes.runs import ROOT, Toy, contents, run_cli, toy

Figure = Callable[..., None]
ENVIRONMENT: Mapping[str, str] = {
    "HF_TOKEN": "hf_aaaaSECRETaaaaSECRETaaaa",
    "HUGGING_FACE_HUB_TOKEN": "hf_bbbbSECRETbbbbSECRETbbbb",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "CIVITAI_API_TOKEN": "89abcdef0123456789abcdef01234567",
    "COMET_API_KEY": "comet-SECRET-1",
    "NEPTUNE_API_TOKEN": "bmVwdHVuZS1TRUNSRVQ=",
    "SWANLAB_API_KEY": "swanlab-SECRET-2",
    "MLFLOW_TRACKING_PASSWORD": "mlflow SECRET 3",
    "AWS_SECRET_ACCESS_KEY": "aws/SECRET/4+aaaaaaaa",
    "GITHUB_TOKEN": "ghp_SECRETSECRETSECRETSECRET",
    "OPENAI_API_KEY": "sk-SECRETSECRETSECRETSECRET",
    "CLEARML_API_SECRET_KEY": "clearml-SECRET-5",
}
ADDRESSES: Mapping[str, tuple[str, str]] = {
    "HTTPS_PROXY": ("http://jane:proxy-pa55@localhost:9", "proxy-pa55"),
    "PIP_INDEX_URL": ("https://jane:index-pa55@localhost:9/simple", "index-pa55"),
    "HF_ENDPOINT": ("https://jane:hub-pa55@localhost:9", "hub-pa55"),
    "MLFLOW_TRACKING_URI": ("https://jane:mlflow-pa55@localhost:9", "mlflow-pa55"),
}
CAPTIONS = (
    "a toy hf_ccccCAPTIONccccCAPTION",
    "a toy from https://jane:caption-pa55@host/x",
    "a toy from https://civitai.com/api/1?token=caption5ecret",
)
IN_CAPTIONS = ("CAPTIONccccCAPTION", "caption-pa55", "caption5ecret")
REFUSED: Mapping[str, tuple[list[str], str]] = {
    "setting": (["--set", "output.description=hf_ddddSECRETddddSECRET"], "ddddSECRET"),
    "setting of the environment": (
        ["--set", f"output.author={ENVIRONMENT['WANDB_API_KEY']}"],
        ENVIRONMENT["WANDB_API_KEY"],
    ),
    "prompt": (["--set", 'sampling.prompts=["hf_eeeeSECRETeeeeSECRET"]'], "eeeeSECRET"),
    "base with a password": (["--base", "https://jane:base-pa55@host/x"], "base-pa55"),
    "base with a token": (["--base", "https://host/x?token=base5ecret"], "base5ecret"),
    "unknown setting": (["--set", "hub.token=hf_ffffSECRETffffSECRET"], "ffffSECRET"),
    "unknown flag": (["--hf-token", "hf_ggggSECRETggggSECRET"], "ggggSECRET"),
    "number": (["--steps", "hf_hhhhSECRETffffSECRET"], "hhhhSECRET"),
    "wrong value": (["--set", "train.precision=hf_iiiiSECRETffffSECRET"], "iiiiSECRET"),
    "preset": (["--preset", "hf_jjjjSECRETjjjjSECRET"], "jjjjSECRET"),
}


def started(place: Toy, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Start a training as a person would whose environment is full of secrets."""
    secret = {**ENVIRONMENT, **{name: value for name, (value, _) in ADDRESSES.items()}}
    return subprocess.run(
        [sys.executable, "-m", "lora_trainer", *arguments],
        env={**os.environ, **secret, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        cwd=place.folder,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("secrets")).with_base()


def outputs(folder: Path) -> Iterator[tuple[Path, bytes]]:
    yield from ((path, path.read_bytes()) for path in folder.rglob("*") if path.is_file())


def test_sec_04_no_secret_reaches_any_output_of_a_whole_training(
    place: Toy, figure: Figure
) -> None:
    """Logs, run.json, states, exports, TensorBoard, report, sample images, console."""
    for index, caption in enumerate(CAPTIONS):
        (place.dataset / f"p{index}.txt").write_text(caption, encoding="utf-8")
    # Prompts are taken from the captions, so these reach the sample images and the report.
    done = started(place, place.arguments(sampling__prompts=[]))
    assert done.returncode == 0, done.stderr[-2000:]
    secrets = [*ENVIRONMENT.values(), *(secret for _, secret in ADDRESSES.values()), *IN_CAPTIONS]
    files = dict(outputs(place.runs))
    assert {path.name for path in files} >= {
        "run.json", "events.jsonl", "status.json", "report.html", "toy.safetensors", "state.json",
    }  # fmt: skip
    assert any("tfevents" in path.name for path in files)
    texts = {"console": (done.stdout + done.stderr).encode()}
    texts |= {str(path.relative_to(place.runs)): data for path, data in files.items()}
    found = [
        (name, secret)
        for secret in secrets
        for name, data in texts.items()
        if secret.encode() in data
    ]
    figure("secrets", planted=len(secrets), found=len(found))
    assert not found
    assert str(place.folder) not in json.dumps(header_of(place.run / "toy.safetensors"))


def header_of(file: Path) -> dict[str, str]:
    with safe_open(file, framework="np") as opened:
        return dict(opened.metadata())


def test_sec_04_a_secret_that_is_typed_or_in_a_settings_file_is_refused_and_not_repeated(
    place: Toy,
    tmp_path: Path,
    figure: Figure,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", ENVIRONMENT["WANDB_API_KEY"])
    files = {
        "token.toml": '[output]\ndescription = "hf_kkkkSECRETkkkkSECRET"\n',
        "key.json": '{"wandb_api_key": "hf_llllSECRETllllSECRET"}',
    }
    cases = list(REFUSED.values())
    for name, text in files.items():
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


def test_sec_04_a_failure_that_quotes_a_password_is_told_without_it() -> None:
    """As a tracker tells of a proxy that refused."""
    told: list[str] = []
    events = EventStream(listeners=[lambda event: told.append(str(event.fields))])
    events.problem("tracker failed: http://jane:pa55@proxy refused", fix="ask http://a:b@host")
    events.emit("stopped", reason="Bearer abcdefghijklmnop1234", exit_code=4, step=1)
    assert "pa55" not in told[0] and "http://proxy refused" in told[0] and "a:b" not in told[0]
    assert "abcdefghijklmnop1234" not in told[1]


def test_sec_04_ordinary_texts_are_left_alone() -> None:
    for text in (
        "a hat, and/or a scarf, sk-8 board",
        "mail jane@example.com",
        "see https://example.com/a@b",
        "https://civitai.com/models/1?modelVersionId=2",
        "hf_short",
    ):
        assert without_secrets(text) == text
        assert build_config({"output.description": text}).output.description == text


def test_sec_04_variables_that_are_named_as_secrets_are() -> None:
    environment = {"MY_TOKEN": "long-enough", "TOKENIZERS_PARALLELISM": "false-but-long"}
    environment |= {"KEYBOARD": "us-international", "API_KEY": "short"}
    assert secret_values(environment) == ["long-enough"]
    with pytest.raises(RequestError, match=r"output\.author, sampling\.prompts contains") as caught:
        build_config({"output.author": "hf_" + "a" * 20, "sampling.prompts": ["x?token=abc", "y"]})
    assert "aaa" not in str(caught.value)


# ---- no code out of a file, no shell


PICKLES = frozenset(
    {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
)
WEIGHTS = frozenset({"from_pretrained"})
WITHOUT_WEIGHTS = ("Tokenizer", "config_class", "Scheduler", "Config", "Processor")


def dangers(source: str) -> list[str]:
    """Return what in a module could run code out of a file, or a shell."""
    return [
        f"line {node.lineno}: {what}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call | ast.Import | ast.ImportFrom)
        for what in _danger(node)
    ]


def _danger(node: ast.Call | ast.Import | ast.ImportFrom) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        names = [alias.name for alias in node.names]
        modules = {node.module or ""} if isinstance(node, ast.ImportFrom) else set(names)
        if found := {module.split(".")[0] for module in modules} & PICKLES:
            yield f"imports {found}"
        return
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    given = {word.arg: ast.unparse(word.value) for word in node.keywords}
    if name in ("torch.load", "torch.jit.load") and given.get("weights_only") != "True":
        yield f"{name} without weights_only=True"
    if (
        given.get("allow_pickle", "False") != "False"
        or given.get("trust_remote_code", "False") != "False"
    ):
        yield f"{name} with {given}"
    if last == "read_pickle" or (
        name.startswith("yaml.") and last in ("load", "unsafe_load", "full_load")
    ):
        yield name
    if name in ("eval", "exec", "os.system", "os.popen", "__import__") or name.startswith(
        "os.spawn"
    ):
        yield name
    if given.get("shell", "False") != "False" or name in (
        "subprocess.getoutput",
        "subprocess.getstatusoutput",
    ):
        yield f"{name} with a shell"
    if last in WEIGHTS and not name.rpartition(".")[0].endswith(WITHOUT_WEIGHTS):
        from_memory = bool(node.args) and ast.unparse(node.args[0]) == "None"
        if given.get("use_safetensors") != "True" and not from_memory:
            yield f"{name} without use_safetensors=True"


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


def test_sec_04_mod_01_the_search_finds_each_danger() -> None:
    for line in (
        "import pickle",
        "from joblib import load",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "numpy.load(file, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "pandas.read_pickle(file)",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "eval(text)",
        "AutoModel.from_pretrained(folder)",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=True)",
    ):
        assert len(dangers(line)) == 1, line
    assert not dangers("network.eval(); torch.load(file, weights_only=True); numpy.load(file)")


# ---- texts as texts


@pytest.mark.parametrize("name", ["; touch marker|`touch marker`$(touch marker)", "--strict"])
def test_sec_03_names_are_names_and_never_commands(name: str, place: Toy) -> None:
    quiet = {"sampling__every_steps": 0, "train__validate_every_steps": 0, "logging__trackers": []}
    assert place.train(f"--name={name}", steps=1, output__save_every_steps=0, **quiet) == 0
    assert (place.runs / name / f"{name}.safetensors").is_file()
    assert not list(place.folder.rglob("marker")) and not Path("marker").exists()
