"""List the texts of the interface that a language lacks, and entries of a language that no source has.

    python scripts/gui_texts.py de              # one text a line, with the file that has it
    python scripts/gui_texts.py de --file queue # only of files whose path has this word

A text is a string literal of gui/ (Python, JavaScript or template) with a space or a capital in it, or what a
family.toml says that a release is good for and catalogue.toml a captioner, or a sentence about a dataset in
finding_texts.toml. Literals that
never reach a page are listed too: the list helps to translate and is not a measure.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_trainer.gui.markup import named, plain
from lora_trainer.gui.server.language import families_words

from lora_trainer.config.config import Config, all_settings
from lora_trainer.hardware.machine import PURPOSES

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = ROOT / "gui" / "languages"
CHART = ROOT / "lora_trainer" / "reporting" / "chart.html"
FINDINGS = ROOT / "lora_trainer" / "dataset" / "finding_texts.toml"
TRAINERS = ROOT / "lora_trainer" / "importing" / "trainers"
CAPTIONERS = ROOT / "lora_trainer" / "captioning" / "catalogue.toml"
PLACEHOLDER = re.compile(r"\{(?:text|#)?\}")
_SCRIPT_STRING = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`")
_SCRIPT_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\(.)")
_EXPRESSION = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_TEMPLATE_STRING = re.compile(r'"([^"]*)"')
_FIELD = re.compile(r"\{[a-z_]+\}")
_FORMATTED = re.compile(r"\{[a-z_]+(?::[^{}]*)?\}")
_NUMBER = re.compile(r"\d[\d,.]*")
_MARKUP = re.compile(r">([^<>{}]+)<")


def known(code: str) -> dict[str, str]:
    """Return the texts of a language by their English texts, those of the families too."""
    texts: dict[str, str] = json.loads((LANGUAGES / f"{code}.json").read_text(encoding="utf-8"))
    return {**texts, **families_words(code)}


def sources() -> Iterator[Path]:
    """Yield the files whose texts may stand on a page."""
    for folder in ("gui", "lora_trainer"):
        yield from sorted((ROOT / folder).rglob("*.py"))
    for kind in ("*.js", "*.html"):
        yield from sorted((ROOT / "gui").rglob(kind))
    yield CHART
    yield from sorted((ROOT / "lora_trainer" / "families").glob("*/family.toml"))
    yield FINDINGS
    yield CAPTIONERS


def literals(path: Path) -> Iterator[str]:
    """Yield the string literals of a file as a page shows them, with `{}` for what is put in."""
    source = path.read_text(encoding="utf-8")
    for literal in _READERS[path.suffix](source):
        yield normal(literal)
        for between in _MARKUP.findall(literal):
            yield normal(between)


def of_settings() -> Iterator[str]:
    """Yield what the pages say of the settings: labels, units, helps, allowed values, sections."""
    for name, section in Config.model_fields.items():
        yield from (name.capitalize(), section.description or "")
    for info in all_settings():
        allowed = "" if info.form.kind == "text" and info.form.words else info.form.allowed
        yield from (info.label, info.unit, named(info.doc), _NUMBER.sub("{#}", allowed))


def of_packages() -> Iterator[str]:
    """Yield what the page Machine says that packages are for."""
    yield from PURPOSES.values()


def of_trainers() -> Iterator[str]:
    """Yield why settings of other trainers come to nothing here."""
    for table in sorted(TRAINERS.glob("*.toml")):
        for rows in tomllib.loads(table.read_text(encoding="utf-8")).values():
            if isinstance(rows, list):
                yield from (row["why"] for row in rows if "why" in row)


def normal(text: str) -> str:
    """Return a text without space around it, and each placeholder as `{}`."""
    return " ".join(PLACEHOLDER.sub("{}", text).split())


def _python(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    inside: set[int] = set()
    constants: list[ast.Constant] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside.update(map(id, node.values))
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(id(node.value))  # a docstring
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            constants.append(node)
    yield from (_FIELD.sub("{}", str(node.value)) for node in constants if id(node) not in inside)


def _table(source: str) -> Iterator[str]:
    """Yield what a release or a captioner is good for, and each sentence and advice of the findings."""
    values = tomllib.loads(source)
    for release in values.get("releases", ()):
        yield release.get("good_for", "")
    yield from _findings(values)


def _findings(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _findings(value)
        elif key in ("what", "advice", "good_for"):
            said = _FORMATTED.sub("{}", value).replace("{{", "{").replace("}}", "}")
            yield plain(said)


def _script(source: str) -> Iterator[str]:
    for match in _SCRIPT_STRING.findall(source):
        text = _SCRIPT_ESCAPE.sub(
            lambda found: chr(int(found[1], 16)) if found[1] else found[2], match[1:-1]
        )
        yield _without_fields(text) if match[0] == "`" else text


def _template(source: str) -> Iterator[str]:
    """Yield the strings of a template's expressions, which stand in quoted attributes too."""
    for expression in _EXPRESSION.findall(source):
        yield from _TEMPLATE_STRING.findall(expression)


def _without_fields(template: str) -> str:
    """Return the text of a template literal with `{}` in place of each `${...}`."""
    text, depth = "", 0
    for at, letter in enumerate(template):
        if depth == 0 and template.startswith("${", at):
            text += "{}"
        if letter == "{" and (depth or template[at - 1 : at] == "$"):
            depth += 1
        elif letter == "}" and depth:
            depth -= 1
        elif depth == 0 and not template.startswith("${", at):
            text += letter
    return text


_READERS = {".py": _python, ".js": _script, ".html": _template, ".toml": _table}


def lacking(code: str) -> Iterator[tuple[Path, str]]:
    """Yield the texts of the interface that a language has no entry for."""
    seen = {normal(english) for english in known(code)}
    for path in sources():
        if path.is_relative_to(ROOT / "gui") or path.suffix == ".toml":
            for text in literals(path):
                readable = re.search(r"[A-Za-z]{2}", text) and re.search(r"\s|^[A-Z]", text)
                if readable and text not in seen:
                    seen.add(text)
                    yield path, text


def dead(code: str) -> list[str]:
    """Return the entries of a language whose English text no source has any more."""
    there = {text for path in sources() for text in literals(path)}
    # What refuses a run names settings by their keys.
    there |= {normal(named(text)) for text in there}
    there |= {text.replace("{}={}", "\u201c{}\u201d = {}") for text in there}
    there |= {normal(text) for text in (*of_settings(), *of_packages(), *of_trainers())}
    return [english for english in known(code) if normal(english) not in there]


def main() -> None:
    """Print both lists."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("language", choices=sorted(path.stem for path in LANGUAGES.glob("*.json")))
    parser.add_argument("--file", default="", help="a word of the path of the files to look at")
    asked = parser.parse_args()
    for path, text in lacking(asked.language):
        if asked.file in str(path.relative_to(ROOT)):
            print(f"{path.relative_to(ROOT)}: {text}")
    for english in dead(asked.language):
        print(f"no source has it: {english}")


if __name__ == "__main__":
    main()
