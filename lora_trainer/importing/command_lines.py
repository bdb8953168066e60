"""Files that start another trainer: `.sh`, `.bat`, `.cmd`, `.ps1` with its command line, read as a table of options.

Nothing is run. Lines that go on are joined, comments left out, variables that the file sets put in; of several
commands the one that trains is read. What only a shell could know (conditions, other programs' output, variables of
the machine) stays open, and the options that hang on it are named.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath, PureWindowsPath
from typing import Any

from lora_trainer.common.errors import InputError, RequestError


@dataclass(frozen=True, kw_only=True)
class _Shell:
    """How a shell writes what is read here; names of variables are in group 1, values in group 2."""

    goes_on: str
    comment: re.Pattern[str]
    quotes: str
    escape: str
    assigns: re.Pattern[str]
    variable: re.Pattern[str]
    opens: re.Pattern[str]
    closes: re.Pattern[str]
    folds_case: bool = False


_SH = _Shell(
    goes_on="\\",
    comment=re.compile(r"\s*#"),
    quotes="\"'",
    escape="\\",
    assigns=re.compile(r"\s*(?:export\s+|declare\s+(?:-\w+\s+)*|local\s+)?(\w+)(\+?=)(.*)", re.S),
    # "${a[@]}" with its quotes, ${a:-b}, $a, $(a), `a`, $@
    variable=re.compile(
        r'"?\$\{(\w+)\[[@*]\]\}"?|\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)|\$\([^)]*\)|`[^`]*`|\$[@*#?]|\$\{[^}]*\}'
    ),
    opens=re.compile(r"\s*(?:if|for|while|until|case)\b"),
    closes=re.compile(r"(?:^|[;\s])(?:fi|done|esac)\s*;?\s*$"),
)
_BAT = _Shell(
    goes_on="^",
    comment=re.compile(r"\s*@?(?:rem\b|::)", re.I),
    quotes='"',
    escape="",
    assigns=re.compile(r"\s*@?set\s+\"?([^=\s/\"]+)(=)(.*?)\"?\s*$", re.I | re.S),
    variable=re.compile(r"%(\w+)%|!(\w+)!|%~?\w*\d|%\*|%[^%\s]+%"),
    opens=re.compile(r"\s*@?(?:if|for)\b.*\(\s*$", re.I),
    closes=re.compile(r"\s*\)\s*$"),
    folds_case=True,
)
_PS1 = _Shell(
    goes_on="`",
    comment=re.compile(r"\s*#"),
    quotes="\"'",
    escape="",
    assigns=re.compile(r"\s*(?:\[\w+\]\s*)?\$((?:env:)?\w+)\s*(\+?=)\s*(.*)", re.I | re.S),
    variable=re.compile(r"\$\{((?:env:)?\w+)\}|[$@]((?:env:)?\w+)|\$\([^)]*\)", re.I),
    opens=re.compile(
        r"\s*(?:if|foreach|for|while|switch|function|else|elseif|\}\s*else)\b.*\{\s*$", re.I
    ),
    closes=re.compile(r"\s*\}"),
    folds_case=True,
)
SHELLS: Mapping[str, _Shell] = {
    ".sh": _SH, ".bash": _SH, ".bat": _BAT, ".cmd": _BAT, ".ps1": _PS1,
}  # fmt: skip
_CONDITION = re.compile(r"\s*@?(?:if|for)\b", re.I)
_MOST_CHARACTERS, _MOST_OF_A_LINE, _MOST_OF_A_VARIABLE = 1 << 18, 20_000, 8_000
"""A short file can double a variable often."""
_OPEN = re.compile("\0([^\0]*)\0")
"""A variable that is not known, in an expanded line: its spelling between two zero characters."""
_REDIRECTS = re.compile(r"\d?[<>]{1,2}")
_TRAINS = re.compile(r"train_network\.py$")
_SCRIPT = re.compile(r"\w*(?:train|fine_tune)\w*\.py$")


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The options of a training, as a settings file would hold them, and what stays open, with the reason."""

    options: dict[str, Any]
    open: dict[str, str] = field(default_factory=dict)


def read_commands(text: str, file: str) -> CommandLine:
    """Return the options of the training that a file starts; raises InputError without one.

    Raises RequestError for a script that trains whole models or embeddings.
    """
    shell = SHELLS[PurePath(file).suffix.lower()]
    if len(text) > _MOST_CHARACTERS:
        raise InputError(
            f"{file} is larger than a script that starts a training",
            fix="give the script with the command line alone",
        )
    if shell is _PS1:
        text = "".join(part.rpartition("#>")[2] for part in text.split("<#"))
    found = [
        (at, words)
        for words in _commands(text.replace("\0", ""), shell, file)
        for at, word in enumerate(words)
        if _SCRIPT.fullmatch(PureWindowsPath(word).name)
    ]
    trainings = [(at, words) for at, words in found if _TRAINS.search(words[at])]
    if found and not trainings:
        at, words = found[0]
        raise RequestError(
            f"{file} starts {PureWindowsPath(words[at]).name}, which does not train a LoRA",
            fix="give a file that starts a script whose name ends in train_network.py",
        )
    if not trainings:
        raise InputError(
            f"{file} starts no training that is known here",
            fix="give a file with the command line of sd-scripts or musubi-tuner "
            "(accelerate launch ... train_network.py --option value)",
        )
    at, words = trainings[0]
    read = _options(words[at + 1 :])
    if len(trainings) > 1:
        read.open["command line"] = f"of {len(trainings)} trainings the first is read"
    return read


def read_variables(text: str, file: str) -> dict[str, str]:
    """Return the variables that a file for a Unix shell sets, with one another put in."""
    variables: dict[str, str] = {}
    text = text[:_MOST_CHARACTERS].replace("\0", "")
    for _ in _commands(text, _SH, file, variables):
        pass
    return variables


def options_of(line: str) -> CommandLine:
    """Return the options in a text of words as a shell reads them, those of which the last of a name wins."""
    return _options([word for words in _split(line, _SH) for word in words])


def _commands(
    text: str, shell: _Shell, file: str, variables: dict[str, str] | None = None
) -> Iterator[list[str]]:
    """Yield the words of each command, variables put in; `variables` gets those that are set."""
    variables = {} if variables is None else variables
    depth = 0
    for line in _lines(text, shell):
        depth = max(0, depth - bool(shell.closes.search(line)))
        opens = bool(shell.opens.match(line)) and not shell.closes.search(line)
        assigned = shell.assigns.fullmatch(line)
        one_line_condition = bool(_CONDITION.match(line))
        if assigned and not one_line_condition and _is_alone(assigned[3], shell):
            name, adds, value = assigned.groups()
            name = name.lower() if shell.folds_case else name
            value = _expanded(_value(value, shell), variables, shell)
            # Only when the file runs is it known whether this is done.
            if depth or len(value) > _MOST_OF_A_VARIABLE:
                value = f"\0{name}\0"
            variables[name] = (
                f"{variables.get(name, '')} {value}"[:_MOST_OF_A_LINE] if adds == "+=" else value
            )
        elif not opens:
            try:
                yield from _split(_expanded(line, variables, shell), shell)
            except ValueError as error:
                if _SCRIPT.search(line) or "train_network.py" in line:
                    what = f"{file}: a command line cannot be read: {str(error).lower()}"
                    raise InputError(what, fix="close the quotes in it") from None
        depth += opens


def _lines(text: str, shell: _Shell) -> Iterator[str]:
    """Yield lines, those that go on as one, a list in parentheses too; without comments."""
    whole = ""
    for line in text.splitlines():
        bare = line if shell is _BAT else _uncommented(line, shell)
        if shell.comment.match(line) or (not bare.strip() and not whole):
            continue
        if bare.rstrip().endswith(shell.goes_on):
            whole += bare.rstrip()[: -len(shell.goes_on)] + " "
            continue
        whole += bare
        is_list = re.match(r"\s*(?:export\s+)?\$?[\w:]+\s*\+?=\s*@?\(", whole)
        if (
            is_list
            and len(whole) <= _MOST_OF_A_LINE
            and whole.count("(") > whole.count(")")
            and shell is not _BAT
        ):
            whole += "\n"
            continue
        yield whole
        whole = ""
    if whole.strip():
        yield whole


def _uncommented(line: str, shell: _Shell) -> str:
    """Return a line up to a # that begins a word outside of quotes."""
    quote = ""
    for at, mark in enumerate(line):
        if quote:
            quote = "" if mark == quote else quote
        elif mark in shell.quotes:
            quote = mark
        elif mark == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at]
    return line


def _is_alone(value: str, shell: _Shell) -> bool:
    """Say whether a value ends the line; `A=1 command` sets a variable for that command alone."""
    if shell is not _SH or value.startswith("("):
        return True
    try:
        return len(shlex.split(value)) <= 1
    except ValueError:
        return True


def _value(value: str, shell: _Shell) -> str:
    """Return a value as it is put into a line: words of a list stay quoted, one text loses its quotes."""
    value = value.strip().rstrip(";").rstrip() if shell is not _BAT else value
    listed = re.fullmatch(r"@?\((.*)\)", value, re.S)
    if listed and shell is not _BAT:
        inner = listed[1].replace("\n", " ")
        # A list of PowerShell has commas between its texts.
        return re.sub(r"(?<=[\"'\w])\s*,\s*(?=[\"'$-]|$)", " ", inner) if shell is _PS1 else inner
    if len(value) > 1 and value[0] == value[-1] and value[0] in shell.quotes and shell is not _BAT:
        return value[1:-1]
    if shell is _PS1 and not re.fullmatch(r"[\d.eE+-]+|[$@][\w:]+", value):
        return "\0command\0"
    return value


def _expanded(line: str, variables: Mapping[str, str], shell: _Shell) -> str:
    def put_in(match: re.Match[str]) -> str:
        names = [group for group in match.groups() if group is not None]
        name = (names[0].lower() if shell.folds_case else names[0]) if names else ""
        if name in variables:
            return variables[name]
        if shell is _SH and match[3] is not None:  # ${a:-b}
            return match[3]
        return f"\0{match[0].strip(chr(34))}\0".replace(" ", "\1")

    return shell.variable.sub(put_in, line) if len(line) <= _MOST_OF_A_LINE else line


def _split(line: str, shell: _Shell) -> Iterator[list[str]]:
    """Yield the words of each command of a line; raises ValueError for a quote that is not closed."""
    for part in _parts(line, shell):
        lexer = shlex.shlex(part, posix=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        lexer.quotes, lexer.escape = shell.quotes, shell.escape
        yield list(lexer)


def _parts(line: str, shell: _Shell) -> Iterator[str]:
    """Yield what is between ; & | outside of quotes."""
    quote, begin = "", 0
    for at, mark in enumerate(line):
        if quote:
            quote = "" if mark == quote else quote
        elif mark in shell.quotes:
            quote = mark
        elif mark in ";&|":
            yield line[begin:at]
            begin = at + 1
    yield line[begin:]


def _options(words: list[str]) -> CommandLine:
    """Return options by name as argparse would: the last of a name wins, several values are a list."""
    read = CommandLine(options={})
    name, is_redirected = "", False
    values: dict[str, list[str]] = {}
    for word in words:
        unknown = _OPEN.search(word)
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = [value] if "=" in word else []
        elif unknown and _OPEN.fullmatch(word) and (not name or values[name]):
            read.open[_spelt(word)] = "is not set in this file: options that it holds are not read"
        elif name and not is_redirected and not _REDIRECTS.match(word):
            values[name].append(word)
        is_redirected = bool(_REDIRECTS.fullmatch(word))
    for name, given in values.items():
        if any(_OPEN.search(value) for value in given):
            read.open[name] = (
                f"{' '.join(map(_spelt, given))}: this variable is not set in the file"
            )
        elif len(given) > 1 or name.endswith("_args"):
            read.options[name] = given
        else:
            read.options[name] = _typed(given[0]) if given else True
    return read


def _spelt(word: str) -> str:
    return word.replace("\0", "").replace("\1", " ")


def _typed(value: str) -> Any:
    """Return a number as one, as a settings file has it."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
