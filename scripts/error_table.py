"""Print a page with every error that the code can raise, read from its syntax tree: `python scripts/error_table.py`.

The documentation site gets it as `errors.md`. `…` stands for what the program puts in when it runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXIT_CODES = {
    "RequestError": "2",
    "InputError": "3",
    "UnusableModel": "3",
    "ImageDecodeError": "3",
    "MachineError": "4",
    "TrainingStopped": "5",
}


@dataclass(frozen=True, kw_only=True)
class ErrorText:
    """One error: its text and its fix, with `…` for the variable parts, and a place that raises it."""

    exit_code: str
    text: str
    fix: str
    place: str
    """`FILE:LINE`."""


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Yield the file and the syntax tree of each module of the package and the interface."""
    for folder in ("lora_trainer", "gui"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def template(node: ast.expr | None) -> str:
    """Return the text of a string expression, with `…` for each part that only a run can fill."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return "…"


def error_texts() -> list[ErrorText]:
    """Return all errors that are raised with a text of their own, by exit code and text."""
    places: dict[tuple[str, str, str], str] = {}
    for file, tree in trees():
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            exit_code = EXIT_CODES.get(call.func.id)
            if exit_code is None or not call.args:
                continue
            fix = next((word.value for word in call.keywords if word.arg == "fix"), None)
            error = (exit_code, template(call.args[-1]), template(fix))
            places.setdefault(error, f"{file}:{call.lineno}")
    texts = [
        ErrorText(exit_code=code, text=text, fix=fix, place=place)
        for (code, text, fix), place in sorted(places.items())
    ]
    return [error for error in texts if len(error.text.replace("…", "").strip(" .:;,()")) > 3]


def page() -> str:
    """Return the page in Markdown."""
    lines = [
        "# All errors",
        "",
        "Every error of the program, by exit code. `…` stands for a name or a number. What they mean, and what "
        "helps: [troubleshooting](troubleshooting.md).",
        "",
        "| exit code | text | fix | raised in |",
        "|---|---|---|---|",
    ]
    for error in error_texts():
        text, fix = (
            part.replace("|", "\\|").replace("\n", " ") for part in (error.text, error.fix)
        )
        lines.append(f"| {error.exit_code} | {_code(text)} | {_code(fix)} | `{error.place}` |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """Return a text as code, whose own backticks do not end it."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    print(page(), end="")
