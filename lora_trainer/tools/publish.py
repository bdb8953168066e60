"""Publishing a finished LoRA file on the Hugging Face Hub: what its own header and its run say of it.

Input is the file, the repository's name, who may see it. Output is the repository's address. What is sent
is that of `run/hub_upload.py`: the file, the run's last samples, a model card. Torch-free.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer import families
from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.files import read_json_object
from lora_trainer.lora_file.embedding import embedding_path
from lora_trainer.lora_file.fitting_base import check_usable
from lora_trainer.lora_file.problems import key_format
from lora_trainer.reporting.history import mapping
from lora_trainer.reporting.sample_files import last_samples
from lora_trainer.run.hub_upload import LOGIN, HubUpload, check_upload, is_repository, push
from lora_trainer.tools.describe import description_of

if TYPE_CHECKING:
    from lora_trainer.lora_file.read import Contents

OPTION = "--repository"


def publish(file: Path, *, repository: str, private: bool) -> str:
    """Upload a LoRA file and return its address; a `repository` without an owner is the user's own.

    Raises InputError for a file that is no LoRA, RequestError for a name that no repository can have,
    MachineError where nobody is logged in or the Hub refuses.
    """
    release = release_of_file(file, repository=repository, private=private)
    if "/" not in repository:
        check_upload(f"owner/{repository}", asked_by=OPTION)
        release = release_of_file(file, repository=f"{_user()}/{repository}", private=private)
    check_upload(release.repository, asked_by=OPTION)
    return push(release)


def release_of_file(file: Path, *, repository: str, private: bool) -> HubUpload:
    """Gather what is uploaded of a file; raises InputError for one that is no LoRA of a known family."""
    contents, fit = check_usable(file, names=None)
    texts = description_of(contents.metadata)
    kinds = {part.kind for part in contents.parts.values() if part.kind is not None}
    dora = any("magnitude" in part.entries for part in contents.parts.values())
    format = key_format(contents.parts)
    source = _base_source(file, contents)
    words = embedding_path(file)
    return HubUpload(
        repository=repository,
        private=private,
        file=file,
        title=texts.title or file.stem,
        samples=tuple(last_samples(file.parent / "samples")),
        base=source if is_repository(source) and not Path(source).exists() else None,
        base_name=Path(source).name or fit.family,
        trigger=texts.trigger or None,
        description=texts.description or "",
        license=texts.license or "",
        in_diffusers=kinds == {"lora"} and (format == "diffusers" or not dora),
        in_programs=format == families.family(fit.family).formats.written[0]
        or format != "diffusers",
        embedding=words if words.is_file() else None,
    )


def _base_source(file: Path, contents: Contents) -> str:
    """Return the base as the run's record names it, else as the header does; it may be a path."""
    try:
        source = mapping(read_json_object(file.parent / "run.json"), "base").get("source")
    except RequestError:  # a file that lies elsewhere
        source = None
    return source if isinstance(source, str) else contents.metadata.get("ss_sd_model_name", "")


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
