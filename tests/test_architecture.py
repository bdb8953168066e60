"""The rules of the house that a tool can check: layers, cycles, start-up, docstrings, the seam."""

from __future__ import annotations

import ast
import graphlib
import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

from lora_trainer import families

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lora_trainer", "gui", "presets")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PROGRAMS = sorted([*(ROOT / "scripts").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
TORCH_FREE_ROOMS = ("common", "hardware", "config", "costs", "families", "planning", "dataset")
# The modules of these rooms that work on tensors: calls of torch that differ by device, networks on `meta`.
ON_TENSORS = {
    "lora_trainer.hardware.device_calls",
    "lora_trainer.costs.meta_kernels",
    "lora_trainer.costs.trace",
    "lora_trainer.families.files.deferred",
    "lora_trainer.families.files.dequantise",
}
# Seconds of import each; none may be paid for by --help, plan, check, presets or inspect.
HEAVY = ("torch", "diffusers", "transformers", "accelerate", "peft", "bitsandbytes", "gradio")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def test_import_contracts_of_pyproject_are_kept() -> None:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


def _imported_names(source: str) -> Iterator[tuple[str, str | None]]:
    """Yield each module that a file imports, with each name that it takes from it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


def _home(module: str, name: str | None) -> str:
    """Return the module of what is imported; transformers and peft hand on what modules of theirs define."""
    if name is None or "." in module:
        return module
    return getattr(getattr(importlib.import_module(module), name), "__module__", None) or module


def test_mypy_reads_the_modules_of_libraries_whose_names_are_used() -> None:
    """A name from a module that mypy skips is unchecked, without a word."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    rules = {
        pattern: table["follow_imports"]
        for table in settings["overrides"]
        if "follow_imports" in table
        for pattern in table["module"]
    }
    del rules["bitsandbytes.*"], rules["diffusers.*"]  # their types are wrong: skipped on purpose
    libraries = {pattern.partition(".")[0] for pattern in rules}
    importing = re.compile(rf"^ *(from|import) ({'|'.join(libraries)})\b", re.MULTILINE)

    def is_skipped(module: str) -> bool:
        # As mypy has it: a name before a pattern, a longer pattern before a shorter one.
        patterns = [p for p in rules if p.endswith(".*") and f"{module}.".startswith(p[:-1])]
        rule = module if module in rules else max(patterns, key=len, default=None)
        return rules.get(rule) == "skip"

    checked = [path for folder in settings["files"] for path in (ROOT / folder).rglob("*.py")]
    checked.append(ROOT / "tests" / "fakes" / "tiny_base.py")  # benchmarks import it
    sources = [path.read_text(encoding="utf-8") for path in checked]
    used = {
        pair
        for source in filter(importing.search, sources)
        for pair in _imported_names(source)
        if pair[0].partition(".")[0] in libraries
    }
    assert len(used) > 50
    assert not {pair for pair in used if is_skipped(pair[0]) or is_skipped(_home(*pair))}


def test_every_folder_is_a_layer_and_nothing_else_lies_at_the_root() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    (layers,) = (c["layers"] for c in settings["importlinter"]["contracts"] if c["id"] == "layers")
    package = ROOT / "lora_trainer"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert folders | {"__main__"} == set(layers)
    assert {path.name for path in package.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_the_page_of_the_architecture_names_every_module_of_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/` \| (.*) \|$", page, re.MULTILINE)
    named = {f"{room}/{name}" for room, names in rows for name in re.findall(r"`([\w/]+)`", names)}
    package = ROOT / "lora_trainer"
    modules = (path.relative_to(package).with_suffix("") for path in package.rglob("*.py"))
    # A family may keep more than its family.py in its folder.
    folders = {("families", name) for name in families.NAMES}
    assert named - {"families/NAME/family"} == {
        str(path)
        for path in modules
        if len(path.parts) > 1 and path.name != "__init__" and path.parts[:2] not in folders
    }


def test_no_module_imports_itself_by_way_of_others(imports: grimp.ImportGraph) -> None:
    """Layers allow neighbours to import each other; this keeps them from doing so in a circle."""
    graph = {name: imports.find_modules_directly_imported_by(name) for name in imports.modules}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError naming the circle


def test_packages_are_empty_rooms(imports: grimp.ImportGraph) -> None:
    """An `__init__` that imports makes `import lora_trainer.dataset.scan` pay for its neighbours."""
    rooms = {module_name(path) for path in MODULES if path.name == "__init__.py"}
    for name in rooms - {"lora_trainer.families", "lora_trainer.api"}:
        assert not imports.find_modules_directly_imported_by(name), name


def test_training_knows_nothing_of_the_gui() -> None:
    """By text: in a checkout `lora_trainer.gui` is a name that import graphs can not follow."""
    statement = re.compile(r"^\s*(from|import) (lora_trainer\.)?gui\b", re.MULTILINE)
    importing = [path for path in MODULES if statement.search(path.read_text(encoding="utf-8"))]
    assert not [path for path in importing if path.is_relative_to(ROOT / "lora_trainer")]


def test_every_module_says_what_it_is_for() -> None:
    for path in MODULES + PROGRAMS:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert docstring and len(docstring) > 20, path


IMPORT_EACH = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    if heavy := set(json.loads(sys.argv[2])) & set(sys.modules):
        sys.exit(f"{name} imports {heavy}")
"""


def test_no_text_that_a_user_reads_says_is_no() -> None:
    """ "x is not a y" is read once; "x is no y" twice, and "there is no y" has a plainer form."""
    texts = {f"{path}": _message_texts(path) for path in MODULES}
    for pattern in ("*.html", "*.js", "*.toml", "*.json"):
        for package in PACKAGES:
            for path in (ROOT / package).rglob(pattern):
                texts[f"{path}"] = [path.read_text(encoding="utf-8")]
    pattern = re.compile(r"\b(?:is|are|was|were)\s+no\b", re.IGNORECASE)
    found = [(path, said) for path, each in texts.items() for said in each if pattern.search(said)]
    assert not found


def _message_texts(path: Path) -> list[str]:
    """Return the texts of a module without docstrings and those that explain a field."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    explained = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in explained
    ]


def test_the_quick_commands_start_without_torch() -> None:
    """The modules behind the commands that must answer at once, each imported in turn in a new interpreter."""
    names = """cli.main lora.adapter_size lora_file.inspect cli.look_around queue.commands run.machine_report
        run.plan_text run.prepare run.run_folder tools.describe cache.background cache.store"""
    modules = [f"lora_trainer.{name}" for name in names.split()]
    for room in TORCH_FREE_ROOMS:
        folder = ROOT / "lora_trainer" / room
        modules += [module_name(path) for path in MODULES if path.is_relative_to(folder)]
    light = [name for name in modules if name not in ON_TENSORS]
    lists = [json.dumps(names) for names in (light, HEAVY)]
    command = [sys.executable, "-c", IMPORT_EACH, *lists]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ABOUT_RELEASES = """lora_trainer/families lora_trainer/importing/trainers lora_trainer/captioning/captioners.py
scripts/readers scripts/trainers scripts/allocator_table.py scripts/timestep_table.py benchmarks/random_bases.py
benchmarks/released_bases.py benchmarks/true_size.py benchmarks/gpu_day benchmarks/mid_size_base.py
benchmarks/other_trainers.py benchmarks/quantised_load.py"""
"""The families, and what is about releases by the names the world has for them: other trainers' keys; captioning
models, which share names with families; programs run by hand about other programs, what trainers draw, and true
sizes."""


def test_only_the_families_package_names_a_family() -> None:
    """A family is its folder and its presets; nothing else may know its name, not even the registry."""
    naming = [
        (path.relative_to(ROOT).as_posix(), family)
        for path in MODULES + PROGRAMS
        if not any(path.is_relative_to(ROOT / place) for place in ABOUT_RELEASES.split())
        for family in families.NAMES
        # As a word: an image has chromaticities.
        if re.search(rf"(?<![a-z]){family}(?![a-z])", path.read_text(encoding="utf-8"))
    ]
    assert not naming
    shared = ROOT / "lora_trainer" / "families"
    places = [
        shared / "__init__.py",
        *(shared / "base").rglob("*.py"),
        *(shared / "files").rglob("*.py"),
    ]
    registered = re.compile(f"[\"'](?:{'|'.join(families.NAMES)})[\"']")
    assert not [path for path in places if registered.search(path.read_text(encoding="utf-8"))]


def test_the_tests_left_out_of_ten_minutes_and_the_modules_of_a_quick_run_are_there() -> None:
    lists = (ROOT / "tests" / f"{name}.txt" for name in ("long", "slow"))
    for line in (line for file in lists for line in file.read_text(encoding="utf-8").split()):
        module, _, name = line.partition("::")
        text = (ROOT / module).read_text(encoding="utf-8")
        assert (f"def {name}(" if name else "def test_") in text, line
