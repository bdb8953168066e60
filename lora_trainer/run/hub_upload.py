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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.events import EventStream
from lora_trainer.common.redaction import public_text
from lora_trainer.config.config import OutputSettings
from lora_trainer.families.base import BaseFacts, Family, FileFormat
from lora_trainer.lora_file.embedding import embedding_path
from lora_trainer.lora_file.formats import AdapterContents
from lora_trainer.reporting.sample_files import last_samples, sample_prompt

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


class HubApi(Protocol):
    """The part of `huggingface_hub.HfApi` that is used."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any: ...

    def file_exists(self, repo_id: str, filename: str) -> bool: ...

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> Any: ...


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


def release_of(
    run_folder: Path,
    *,
    file: Path,
    title: str,
    settings: OutputSettings,
    trigger: str | None,
    family: Family,
    facts: BaseFacts,
    format: FileFormat,
    contents: AdapterContents,
) -> HubUpload:
    """Gather the files of a run to upload, the images of its last step among them."""
    assert settings.hub_repo is not None
    return HubUpload(
        repository=settings.hub_repo,
        private=settings.hub_private,
        file=file,
        title=title,
        samples=tuple(last_samples(run_folder / "samples")),
        base=hub_id(facts),
        base_name=Path(facts.source).name,
        trigger=trigger,
        description=settings.description,
        license=settings.license,
        in_diffusers=contents.kinds == {"lora"} and (format == "diffusers" or not contents.dora),
        embedding=words if (words := embedding_path(file)).is_file() else None,
        in_programs=format == family.formats.written[0] or format != "diffusers",
    )


def hub_id(facts: BaseFacts) -> str | None:
    """Return the base's Hub id, None for a base that lies on this machine only."""
    local = Path(facts.source).exists() or (facts.layout is not None and facts.layout.files)
    return facts.source if not local and is_repository(facts.source) else None


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


def push(release: HubUpload, *, api: HubApi | None = None) -> str:
    """Upload and return the repository's address; raises as `check_upload`, and MachineError for the rest.

    A model card that somebody has put there is left alone.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # re-exported

    if api is None:
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
        if status == 403:
            raise MachineError(
                f"{release.file.name} was not uploaded to {release.repository}: {WRITE_REFUSED} "
                "(the Hub answers 403)",
                fix=_WRITING_LOGIN,
            ) from None
        raise MachineError(
            f"{release.file.name} was not uploaded to {release.repository} (the Hub answers {status})",
            fix=LOGIN if status == 401 else retry(release),
        ) from None
    except (HTTPError, OSError) as error:
        raise MachineError(
            f"{release.file.name} was not uploaded to {release.repository} ({type(error).__name__})",
            fix=retry(release),
        ) from None
    return f"{constants.ENDPOINT}/{release.repository}"


def push_finished(release: HubUpload, events: EventStream, *, api: HubApi | None = None) -> None:
    """Upload the result of a finished run; a failure is a problem that says how to try again."""
    try:
        address = push(release, api=api)
    except (MachineError, RequestError) as error:
        events.problem(error.found, fix=error.fix, code="HUB-01")
    else:
        events.emit("uploaded", address=address, private=release.private)


def retry(release: HubUpload) -> str:
    """Return the command that uploads the file by hand."""
    return f"try again with `hf upload {release.repository} {release.file}`"


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
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(_sections(release)) + "\n"


def _sections(release: HubUpload) -> list[str]:
    base = release.base or release.base_name
    sections = [f"# {release.title}"]
    if release.description:
        sections.append(public_text(release.description))
    if release.samples:
        sections.append("<Gallery />")
    if release.trigger:
        sections.append(f"## Trigger\n\nPut `{release.trigger}` into the prompt.")
    sections.append(
        f"## Use\n\nThe base model is {f'[{base}](https://huggingface.co/{base})' if release.base else base}."
    )
    if release.in_diffusers and release.base:
        sections.append(_snippet(release))
    if release.in_programs:
        programs = (
            "ComfyUI, Forge, A1111 or InvokeAI" if release.in_diffusers else "ComfyUI or Forge"
        )
        sections.append(f"In {programs}: put `{release.file.name}` into the folder of LoRAs.")
    if release.embedding is not None:
        name = release.embedding.stem
        sections.append(
            f"It was trained with new tokens, which are in `embeddings/{name}.safetensors`: put that into "
            f"the folder of embeddings, and write `{name}` (in ComfyUI `embedding:{name}`) into the "
            f"prompt for the trigger."
        )
    return sections


def _snippet(release: HubUpload) -> str:
    prompt = sample_prompt(release.samples[0]) if release.samples else (release.trigger or "")
    return f"""```python
import torch
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained({json.dumps(release.base)}, dtype=torch.bfloat16)
pipeline.load_lora_weights({json.dumps(release.repository)}, weight_name={json.dumps(release.file.name)})
image = pipeline.to("cuda")({json.dumps(public_text(prompt), ensure_ascii=False)}).images[0]
```"""
