"""Uploading a finished adapter to the Hugging Face Hub: the file, its sample images and a model card.

Input is a HubUpload, output the repository's address. Nothing else of a run leaves the machine: no
state, no record, no folder name, no token. A failed upload never fails a training.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from jinja2 import Template

from lora_trainer import families
from lora_trainer.common.errors import LoraTrainError, MachineError, RequestError
from lora_trainer.common.events import EventStream
from lora_trainer.common.files import read_json_object
from lora_trainer.common.wording import public_text
from lora_trainer.lora_file.embedding import embedding_path
from lora_trainer.lora_file.fitting_base import check_usable
from lora_trainer.lora_file.names import key_format
from lora_trainer.reporting.sample_files import last_samples, sample_prompt

if TYPE_CHECKING:
    from lora_trainer.lora_file.read import Contents

CARD = "README.md"
TAGS = ("text-to-image", "diffusers", "lora", "template:sd-lora")
"""`template:sd-lora` makes the Hub show the images as a gallery and offer to run the adapter."""
LOGIN = "run `hf auth login`, or set HF_TOKEN"
WRITE_REFUSED = "the token may only read, or not write there"
"""Said where the Hub knows the token and refuses to write; the interface recognises it by these words."""
_WRITING_LOGIN = (
    f"make a token that may write on https://huggingface.co/settings/tokens, then {LOGIN}"
)
_REPOSITORY = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class HubUpload:
    """The files of an upload and its repository. `base` is the Hub id of the base, None where it is a local file.

    `samples` are images in the order of their prompts. `in_diffusers` says whether
    `load_lora_weights` gives the trained adapter, `in_programs` whether ComfyUI and its like do.
    `embedding` holds the new tokens it was trained with.
    """

    repository: str
    private: bool
    file: Path
    title: str
    samples: Sequence[Path] = ()
    base: str | None = None
    base_name: str = ""
    trigger: str | None = None
    description: str = ""
    license: str = ""
    in_diffusers: bool = True
    in_programs: bool = True
    embedding: Path | None = None


def release_of_file(file: Path, *, repository: str, private: bool) -> HubUpload:
    """Gather what is uploaded of a file; raises InputError for one that is no LoRA of a known family."""
    contents, fit = check_usable(file, names=None)
    kinds = {part.kind for part in contents.parts.values() if part.kind is not None}
    dora = any("magnitude" in part.entries for part in contents.parts.values())
    format = key_format(contents.parts)
    source = _base_source(file, contents)
    words = embedding_path(file)
    texts = contents.metadata
    return HubUpload(
        repository=repository,
        private=private,
        file=file,
        title=texts.get("modelspec.title") or file.stem,
        samples=tuple(last_samples(file.parent / "samples")),
        base=source if is_repository(source) and not Path(source).exists() else None,
        base_name=Path(source).name or fit.family,
        trigger=texts.get("modelspec.trigger_phrase") or None,
        description=texts.get("modelspec.description", ""),
        license=texts.get("modelspec.license", ""),
        in_diffusers=kinds == {"lora"} and (format == "diffusers" or not dora),
        in_programs=format == families.family(fit.family).formats.written[0]
        or format != "diffusers",
        embedding=words if words.is_file() else None,
    )


def _base_source(file: Path, contents: Contents) -> str:
    """Return the base as the run's record names it, else as the header does; it may be a path."""
    try:
        record = read_json_object(file.parent / "run.json").get("base")
    except RequestError:  # a file that lies elsewhere
        record = None
    source = record.get("source") if isinstance(record, dict) else None
    return source if isinstance(source, str) else contents.metadata.get("ss_sd_model_name", "")


def is_repository(name: str) -> bool:
    """Return whether a repository of the Hub can have this name, owner/name."""
    return _REPOSITORY.fullmatch(name) is not None


def check_upload(repository: str, *, asked_by: str = "--set output.hub_repo") -> None:
    """Refuse before training an upload that could not be done after it; `asked_by` is the option.

    Raises RequestError for a name that no repository can have, MachineError where nobody is logged in.
    """
    from huggingface_hub import get_token

    if not is_repository(repository):
        raise RequestError(
            f"{repository!r} is no repository; allowed is owner/name, of letters, digits, ._-",
            fix=f"write it as {asked_by}=owner/name",
        )
    if get_token() is None:
        raise MachineError(f"{repository} needs a login to the Hugging Face Hub", fix=LOGIN)


def push(release: HubUpload) -> str:
    """Upload and return the repository's address; raises as `check_upload`, and MachineError for the rest.

    A model card that somebody has put there is left alone.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # re-exported

    check_upload(release.repository)
    api = HfApi()
    try:
        api.create_repo(release.repository, private=release.private, exist_ok=True)
        with TemporaryDirectory() as folder:
            _stage(release, Path(folder), card=not api.file_exists(release.repository, CARD))
            api.upload_folder(
                repo_id=release.repository,
                folder_path=folder,
                commit_message=f"Upload {release.file.name}",
            )
    except HfHubHTTPError as error:
        status = error.response.status_code
        fixes = {401: LOGIN, 403: _WRITING_LOGIN}
        answer = f"the Hub answers {status}"
        reason = f": {WRITE_REFUSED} ({answer})" if status == 403 else f" ({answer})"
        raise _not_uploaded(release, reason, fixes.get(status)) from None
    except (HTTPError, OSError) as error:
        raise _not_uploaded(release, f" ({type(error).__name__})", None) from None
    return f"{constants.ENDPOINT}/{release.repository}"


def _not_uploaded(release: HubUpload, reason: str, fix: str | None) -> MachineError:
    return MachineError(
        f"{release.file.name} was not uploaded to {release.repository}{reason}",
        fix=fix or f"try again with `hf upload {release.repository} {release.file}`",
    )


def push_finished(file: Path, *, repository: str, private: bool, events: EventStream) -> None:
    """Upload the LoRA of a finished run; a failure is a problem that says how to try again."""
    try:
        address = push(release_of_file(file, repository=repository, private=private))
    except LoraTrainError as error:
        events.problem(error.found, fix=error.fix, code="HUB-01")
    else:
        events.emit("uploaded", address=address, private=private)


def _stage(release: HubUpload, folder: Path, *, card: bool) -> None:
    shutil.copyfile(release.file, folder / release.file.name)
    if release.embedding is not None:
        target = embedding_path(folder / release.file.name)
        target.parent.mkdir()
        shutil.copyfile(release.embedding, target)
    (folder / "samples").mkdir()
    for index, image in enumerate(release.samples):
        shutil.copyfile(image, folder / _sample_name(index))
    if card:
        (folder / CARD).write_text(model_card(release), encoding="utf-8", newline="\n")


def _sample_name(index: int) -> str:
    return f"samples/{index:02d}.png"


def model_card(release: HubUpload) -> str:
    """Return the model card: YAML that the Hub reads, the gallery, the trigger, how to use the file."""
    from huggingface_hub import ModelCardData

    gallery = [
        {"text": public_text(sample_prompt(image)) or "-", "output": {"url": _sample_name(index)}}
        for index, image in enumerate(release.samples)
    ]
    data = ModelCardData(
        tags=list(TAGS),
        library_name="diffusers",
        base_model=release.base,
        base_model_relation="adapter" if release.base else None,
        instance_prompt=release.trigger,
        license=release.license or None,
        widget=gallery or None,
    )
    prompt = sample_prompt(release.samples[0]) if release.samples else (release.trigger or "")
    template = Template(
        Path(__file__).with_name("model_card.md").read_text(encoding="utf-8"),
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return str(
        template.render(
            yaml=data.to_yaml(),
            release=release,
            description=public_text(release.description),
            prompt=public_text(prompt),
            python=partial(json.dumps, ensure_ascii=False),
        )
    )
