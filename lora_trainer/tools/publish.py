"""Publishing a finished LoRA file on the Hugging Face Hub: what its own header and its run say of it.

Input is the file, the repository's name, who may see it. Output is the repository's address. What is sent
is that of `run/hub_upload.py`: the file, the run's last samples, a model card. Torch-free.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lora_trainer.common.errors import MachineError
from lora_trainer.run.hub_upload import LOGIN, check_upload, push, release_of_file

OPTION = "--repository"


def publish(file: Path, *, repository: str, private: bool) -> str:
    """Upload a LoRA file and return its address; a `repository` without an owner is the user's own.

    Raises InputError for a file that is no LoRA, RequestError for a name that no repository can have,
    MachineError where nobody is logged in or the Hub refuses.
    """
    release = release_of_file(file, repository=repository, private=private)
    if "/" not in repository:
        check_upload(f"owner/{repository}", asked_by=OPTION)
        release = replace(release, repository=f"{_user()}/{repository}")
    check_upload(release.repository, asked_by=OPTION)
    return push(release)


def _user() -> str:
    """Return the name of whoever is logged in; raises MachineError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # re-exported

    try:
        return str(HfApi().whoami()["name"])
    except (HfHubHTTPError, HTTPError, OSError) as error:
        raise MachineError(
            f"the Hub does not say who is logged in ({type(error).__name__})",
            fix=f"{LOGIN}; or name the owner too, as owner/name",
        ) from None
