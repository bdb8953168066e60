"""The texts for people in an adapter's header, such as title, author and trigger, written anew.

Input is a file and the new texts, output the same tensors, bit for bit, behind another header. Only
ModelSpec's entries for people change: the `ss_` ones are the record of the training, and readers hash
them. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.wording import public_text
from lora_trainer.lora_file.base_layers import check_usable
from lora_trainer.lora_file.metadata import usage_hint
from lora_trainer.lora_file.tensor_file import open_checked, write_tensors
from lora_trainer.run.hub_upload import LOGIN, check_upload, push

# Of one entry; ComfyUI ignores headers above 8 MiB.
MAX_TEXT_CHARACTERS = 20_000
_TRIGGER, _HINT = "modelspec.trigger_phrase", "modelspec.usage_hint"
_NAMES = ("title", "description", "author", "license", "trigger", "tags")
_KEYS = {name: f"modelspec.{name}" for name in _NAMES} | {"trigger": _TRIGGER}


def description_of(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of a header by the names of `describe`, empty ones where it has none."""
    return {name: metadata.get(key, "") for name, key in _KEYS.items()}


def describe(
    file: Path, texts: Mapping[str, str | None], *, output: Path, force: bool = False
) -> list[str]:
    """Write `output` as `file` with these texts; return the header's entries that are new or gone or other.

    The two may be the same file, with `force`. `texts` are by the names of the command's options: None leaves
    an entry as it is, an empty text removes it; `trigger` are the words that call the concept.

    Raises InputError for a file that is not a whole safetensors file, RequestError for a text that is too long
    or an output that exists, MachineError when the disk refuses or gives other tensors back.
    """
    with open_checked(file) as opened:
        before, new = opened.metadata, dict[str, str]()
        for name, text in texts.items():
            if text is None:
                continue
            if len(text) > MAX_TEXT_CHARACTERS:
                raise RequestError(
                    f"the {name} has {len(text):,} characters",
                    fix=f"use at most {MAX_TEXT_CHARACTERS:,}",
                )
            new[_KEYS[name]] = public_text(text.strip())
        # Our exports repeat the trigger in a hint; one in somebody else's own words stays.
        if _TRIGGER in new and before.get(_HINT, "") == usage_hint(before.get(_TRIGGER, "")):
            new[_HINT] = usage_hint(new[_TRIGGER])
        metadata = {k: text for k, text in {**before, **new}.items() if text or k not in new}
        bodies = map(opened.read, opened.entries.values())
        write_tensors(output, opened.entries, bodies, metadata=metadata, hashes=None, force=force)
    return sorted(
        key for key in before.keys() | metadata.keys() if before.get(key) != metadata.get(key)
    )


OPTION = "--repository"


def publish(file: Path, *, repository: str, private: bool) -> str:
    """Upload a LoRA file and return its address; a `repository` without an owner is the user's own.

    Raises InputError for a file that is not a LoRA, RequestError for a name that no repository can have,
    MachineError where nobody is logged in or the Hub refuses.
    """
    check_usable(file, names=None)  # before anybody has to log in
    if "/" not in repository:
        check_upload(f"owner/{repository}", asked_by=OPTION)
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # re-exported

        try:
            repository = f"{HfApi().whoami()['name']}/{repository}"
        except (HfHubHTTPError, HTTPError, OSError) as error:
            raise MachineError(
                f"the Hub does not say who is logged in ({type(error).__name__})",
                fix=f"{LOGIN}; or name the owner too, as owner/name",
            ) from None
    return push(file, repository=repository, private=private, asked_by=OPTION)
