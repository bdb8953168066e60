"""What may leave this machine: texts without folders, tokens and passwords.

Input is any text a person or a program wrote, output the same made fit for a file that is shared.
"""

from __future__ import annotations

import re

from lora_trainer.redaction import without_secrets

_START = r"(?:file:/+|/(?=[^/\s]+/)|~[\\/]|[A-Za-z]:[\\/](?!/)|\\\\|\.\.[\\/])"
_WHOLE_PATH = re.compile(_START)
_PATH_IN_TEXT = re.compile(rf"(?<![\w:/.~\\-]){_START}[^\s\"'<>|]*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = (".safetensors", ".ckpt", ".pt", ".gguf")


def public_text(value: str) -> str:
    """Reduce a path to its last name, strike paths and tokens out of text, make it valid UTF-8."""
    text = without_secrets(value.encode("utf-8", "replace").decode("utf-8"))
    if _WHOLE_PATH.match(text):
        return re.split(r"[\\/]+", text.rstrip("\\/"))[-1]
    return _PATH_IN_TEXT.sub("[path]", text)


def public_source(value: str) -> str:
    """Reduce what a setting names a model by: a Hub id stays, of a file or folder the name is left.

    "owner/name" could be a folder too; it is taken for a Hub id.
    """
    text = public_text(value)
    if _HUB_ID.fullmatch(text) and not text.endswith(_WEIGHTS):
        return text
    return re.split(r"[\\/]+", text.rstrip("\\/"))[-1]
